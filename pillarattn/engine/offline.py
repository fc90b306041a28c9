"""The offline call: all prompts in, all outputs out, and what is finished is kept on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pillarattn.engine.checkpoint import Checkpoint
from pillarattn.engine.prompts import Prompt, token_ids
from pillarattn.engine.request import FinishReason, Request, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from pillarattn.engine.engine import Engine


def generate(
    engine: Engine,
    prompts: Sequence[Prompt] | str,
    params: SamplingParams | Sequence[SamplingParams] | None,
    *,
    checkpoint: str | Path | None,
) -> list[RequestOutput]:
    """Do what `Engine.generate` says."""
    if engine.has_unfinished:
        raise ValueError(
            f"{len(engine.requests)} requests are unfinished; step() until they end, or abort "
            "them, before generate()"
        )
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if params is None or isinstance(params, SamplingParams):
        each = [params or SamplingParams()] * len(prompts)
    else:
        each = list(params)
    if len(each) != len(prompts):
        raise ValueError(f"got {len(prompts)} prompts and {len(each)} params; give one each")
    if checkpoint is not None and any(own.logits_processors for own in each):
        raise ValueError(
            "a checkpoint cannot tell logits processors apart; leave out checkpoint=, or "
            "logits_processors="
        )
    run = _Run(engine, Checkpoint(checkpoint, engine.model))
    try:
        for i, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            run.add(i, prompt, own)
        run.to_the_end()
    except BaseException:
        engine.abort_all(set(run.order))
        raise
    return [run.done[name] for name in run.order]


class _Run:
    """One call: what is done, what is on the way, and under which key it is kept."""

    def __init__(self, engine: Engine, store: Checkpoint) -> None:
        self.engine, self.store = engine, store
        self.done: dict[str, RequestOutput] = {}
        self.order: list[str] = []
        self._keys: dict[str, str] = {}
        # Streams of other threads may run the steps in which requests of this call end.
        self._ended: deque[RequestOutput] = deque()

    def add(self, index: int, prompt: Prompt, params: SamplingParams) -> None:
        """Queue the samples of a prompt that are not kept already; what is wrong with it is its
        output."""
        names = [f"{index}", *(f"{index}.{j}" for j in range(1, params.n))]
        self.order += names
        ids: list[int] = []
        try:
            ids = token_ids(prompt, self.engine.tokenizer)
            for sample, name in enumerate(names):
                self._keys[name] = self.store.key(index, sample, ids, params)
                kept = self.store.find(self._keys[name], name)
                if kept is not None:
                    self.done[name] = kept
            if any(name not in self.done for name in names):
                for name in names:
                    if name not in self.done:
                        self.engine.collect(name, self._ended)
                self.engine.add_request(ids, params, request_id=names[0])
                for name in names:
                    if name in self.done:
                        self.engine.abort(name)
        except (ValueError, TypeError) as error:
            for name in names:
                self.engine.collect(name, None)
                request = Request(name, ids, params)
                request.finish(FinishReason.ERROR, error)
                self.done[name] = request.result()

    def to_the_end(self) -> None:
        """Step until all requests have ended, keeping each output as it ends."""
        while len(self.done) < len(self.order):
            self.engine.step()
            while self._ended:
                output = self._ended.popleft()
                self.done[output.request_id] = output
                self.store.add(self._keys[output.request_id], output)
