"""Who is in the engine: requests are made here, handed to the scheduler, and taken out again."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch

from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.engine.config import EngineConfig
from pillarattn.engine.decoder import RequestDecoder
from pillarattn.engine.draft_laws import DraftLaws
from pillarattn.engine.page_names import PageNames
from pillarattn.engine.prompts import check_request, filled, sample_seed
from pillarattn.engine.request import Request, SamplingParams
from pillarattn.engine.runner import ModelRunner
from pillarattn.engine.scheduler import Scheduler
from pillarattn.engine.shared_prompts import SharedPrompts
from pillarattn.engine.speculation_gate import SpeculationGate
from pillarattn.engine.stopping import StopCheck
from pillarattn.engine.weights_state import weights_state
from pillarattn.patch.autocast import autocast_dtype


class Intake:
    """Makes requests and their decoders; any thread may do so while a step runs.

    Args:
        config: the engine's.
        runner: its model and pool.
        scheduler: told of each request by `enqueue`, which must not run beside a step.
        shared: told of the samples of one prompt.
        stop: says where outputs end.
        gate: says whether rounds draft; None: they do.

    Attributes:
        requests: those that have not ended, by id.
        decoders: theirs.
    """

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, scheduler: Scheduler,
        shared: SharedPrompts, stop: StopCheck, gate: SpeculationGate | None = None,
    ) -> None:  # fmt: skip
        self.config, self.runner, self.scheduler = config, runner, scheduler
        self.shared, self.stop, self._gate = shared, stop, gate
        self.requests: dict[str, Request] = {}
        self.decoders: dict[str, RequestDecoder] = {}
        self._laws = DraftLaws()
        self._noise = torch.Generator()
        if config.seed is None:
            self._noise.seed()
        else:
            self._noise.manual_seed(config.seed)
        self._weights: object = None
        self._added = 0
        self._lock = threading.Lock()

    def make(
        self, ids: list[int], params: SamplingParams, request_id: str | None, priority: int
    ) -> list[str]:
        """Make the requests of all samples and return their ids, or change nothing.

        Raises:
            ValueError: see `Engine.add_request`.
        """
        pillar = self.config.pillar
        if pillar.strict and params.k is not None and params.k > int(pillar.k):
            raise ValueError(
                f"with strict=True a request has at most the engine's k={pillar.k} drafts a round, "
                f"got k={params.k}: steps of more rows were not checked"
            )
        with self._lock:
            params = filled(params, self.config, self._noise)
            name = f"request-{self._added}" if request_id is None else request_id
            check_request(
                name, ids, params, model=self.runner.model, tokenizer=self.stop.tokenizer,
                max_length=self.config.max_length,
            )  # fmt: skip
            self.scheduler.check_fits(name, prompt=len(ids), max_tokens=params.max_tokens)
            names = [name, *(f"{name}.{i}" for i in range(1, params.n))]
            for taken in names:
                if taken in self.requests:
                    raise ValueError(f"request {taken!r} exists already; choose another id")
            requests = [
                Request(sample, list(ids), replace(params, n=1, seed=sample_seed(params.seed, i)),
                        priority, None if i == 0 else name)
                for i, sample in enumerate(names)
            ]  # fmt: skip
            self.decoders.update({request.id: self._decoder(request) for request in requests})
            self.requests.update({request.id: request for request in requests})
            self._added += 1
            return names

    def enqueue(self, names: list[str]) -> None:
        """Hand the samples of one prompt to the scheduler, but those that have left already."""
        if self.scheduler.is_idle:
            self.runner.look_again()
        if self.config.prefix_cache and self.scheduler.is_idle:
            # Keys that were rounded are others too.
            precision = autocast_dtype(self.runner.device.type)
            weights = precision, weights_state(self.runner.model)
            if weights != self._weights:
                self.scheduler.forget_pages()
            self._weights = weights
        root = names[0] if len(names) > 1 else None
        for name in names:
            if name not in self.requests:
                continue
            request, decoder = self.requests[name], self.decoders[name]
            pages = None
            if self.config.prefix_cache:
                pages = PageNames(request.prompt, request.output, self.config.block_size)
            self.scheduler.add(
                name, prompt=len(request.prompt), max_tokens=request.params.max_tokens,
                k=request.params.k or 0, priority=request.priority, root=root,
                proposes=decoder.proposes, names=pages, fresh=decoder.fresh,
                in_part=decoder.in_part,
            )  # fmt: skip
            if root is not None:
                self.shared.join(name, root)

    def remove(self, name: str) -> Request:
        """Take a request out of everything and return it, handed in or not."""
        self.decoders.pop(name).leave()
        if name in self.scheduler.entries:
            self.scheduler.remove(name)
        self.shared.leave(name)
        return self.requests.pop(name)

    def _decoder(self, request: Request) -> RequestDecoder:
        pillar, own = self.config.pillar, request.params
        generator = SelfSpeculativeGenerator.from_config(
            replace(pillar, k=own.k or 0, s=own.s or pillar.s, draft_length=own.draft_length,
                    draft_share=own.draft_share)
        )  # fmt: skip
        decoder = RequestDecoder(
            request, generator, self.runner.cache, device=self.runner.device, stop=self.stop,
            laws=self._laws, gate=self._gate,
        )  # fmt: skip
        decoder.wants_heat = self.scheduler.kv.wants_heat
        return decoder
