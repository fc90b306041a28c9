"""`Engine`: many requests at once over one patched model, each decoded as if it were alone."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.engine.batched_selection import BatchedSelection
from pillarattn.engine.block_table import Move
from pillarattn.engine.config import EngineConfig
from pillarattn.engine.cruise import Cruise
from pillarattn.engine.flight import Flight
from pillarattn.engine.inbox import Inbox
from pillarattn.engine.intake import Intake
from pillarattn.engine.offline import generate
from pillarattn.engine.outcomes import Outcomes
from pillarattn.engine.packed_pass import Segment
from pillarattn.engine.prompts import Prompt, eos_tokens, longest, token_ids
from pillarattn.engine.request import FinishReason, RequestOutput, SamplingParams, joined
from pillarattn.engine.runner import ModelRunner
from pillarattn.engine.scheduler import Scheduler
from pillarattn.engine.shared_prompts import SharedPrompts
from pillarattn.engine.speculation_gate import SpeculationGate
from pillarattn.engine.stats import EngineStats
from pillarattn.engine.step_plan import StepPlan
from pillarattn.engine.stopping import StopCheck
from pillarattn.engine.streaming import StreamDriver


class Engine:
    """Continuous batching with sparse self-speculation, lossless for each request.

    Greedy tokens are those of `model.generate` for the prompt alone; sampled ones depend on the
    request and its seed, whatever else is in the batch (up to the rounding of matrix products,
    which may differ with the number of rows). A request that fails does so alone.

    Args:
        model: patched by `pillarattn.patch`, in eval mode.
        config: see `EngineConfig`; None is its defaults.
        tokenizer: for prompts, stop strings and outputs as text.

    Attributes:
        requests: those that have not ended, by id.
        scheduler: its pools and queue.
        last_plan: what the last step did.
        cruise: runs steps without plans; None: each step has one.
        stats: counters; requests count when they end.

    Raises:
        NotPatchedError: the model is not patched.
        UnsupportedModelError: its requests cannot share a pass; says why.
    """

    def __init__(
        self, model: Any, config: EngineConfig | None = None, *, tokenizer: Any = None
    ) -> None:
        self.config = config or EngineConfig()
        generator = SelfSpeculativeGenerator.from_config(self.config.pillar)
        is_auto = self.config.speculative == "auto" and self.config.pillar.k
        self._gate = SpeculationGate(int(self.config.pillar.k)) if is_auto else None
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(self.config.scheduler(getattr(model, "device", None)))
        size = self.config.block_size
        self.runner = ModelRunner(
            model,
            slots=self.scheduler.pool.num_blocks * size,
            host_slots=self.scheduler.host.num_blocks * size,
            block_size=size,
            kernels=self.config.pillar.kernels,
            preflight=self.config.preflight,
            graphs=self.config.cuda_graphs,
            is_delayed=self.config.delayed_verification, strict_rows=self.config.strict_rows,
        )  # fmt: skip
        self.model = self.runner.model
        self._stop = StopCheck(eos_tokens(self.model), tokenizer)
        self._shared = SharedPrompts()
        self._intake = Intake(
            self.config, self.runner, self.scheduler, self._shared, self._stop, self._gate
        )
        self.requests, self._decoders = self._intake.requests, self._intake.decoders
        self._outcomes = Outcomes(
            self.scheduler, self.requests, self._decoders, self._shared,
            BatchedSelection(generator.new_selector(), self.runner.cache, self.runner.device),
        )  # fmt: skip
        goes_ahead = self.config.delayed_verification and self.config.phases == "unified"
        self.cruise: Cruise | None = None
        if self.config.cruise and goes_ahead:
            most = longest(self.model, self.config.max_length)
            self.cruise = Cruise(self.runner, self.scheduler, self._outcomes, most, self._gate)
        self._streams = StreamDriver(self.step, device=self.runner.device.type)
        self.last_plan = StepPlan()
        self.stats = EngineStats()
        # Passes that run and that nobody has looked at, the earliest first.
        self._flights: list[Flight] = []
        self._late: list[RequestOutput] = []
        # What plans said and a step that raised has not done yet.
        self._moves: list[Move] = []
        self._forks: list[str] = []
        # Streams step in threads of their own, and nobody waits for a step to add a request.
        self._inbox = Inbox()

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Put a request into the queue and return its id.

        With `n > 1` the first sample has this id and sample i the id `f"{id}.{i}"`. It does not
        wait for a step that another thread runs.

        Args:
            prompt: text, token ids, or a tensor `[L]` or `[1, L]` of them.
            params: see `SamplingParams`; None is its defaults.
            request_id: not in use; None makes one.
            priority: smaller comes first.

        Raises:
            ValueError: the prompt is empty, too long or not of the vocabulary, stop strings lack a
                tokenizer, or the id is taken. Nothing was added then.
        """
        ids = token_ids(prompt, self.tokenizer)
        samples = self._intake.make(ids, params or SamplingParams(), request_id, priority)
        self._inbox.post(lambda: self._intake.enqueue(samples))
        return samples[0]

    def abort(self, request_id: str) -> RequestOutput:
        """End a request and return what it has come to, after the step that another thread runs.

        Raises:
            KeyError: there is no such request, or it has finished.
        """
        with self._inbox.held():
            if request_id not in self.requests:
                raise KeyError(f"no unfinished request {request_id!r}")
            self.requests[request_id].finish(FinishReason.ABORT)
            # What a step that raised has left for the next one is in this output too.
            self._late = [o for o in self._late if o.request_id != request_id or o.finished]
            return self._finished(request_id)

    def abort_all(self, names: Collection[str] | None = None) -> None:
        """End every request, or each of `names`; what no step has returned of it is forgotten."""
        with self._inbox.held():
            for name in list(self.requests):
                if names is None or name in names:
                    self.abort(name)
            self._late = [o for o in self._late if names is not None and o.request_id not in names]

    def collect(self, request_id: str, ended: deque[RequestOutput] | None) -> None:
        """Put the last output of a request that will be added into `ended`; None: no longer.

        It comes there too if it ends in the step of a stream, which another thread runs.
        """
        if ended is None:
            self._streams.close(request_id)
        else:
            self._streams.collect(request_id, ended)

    def room_after(self, prompt_tokens: int) -> int:
        """Return the new tokens that a request of so many prompt tokens may ask for at most."""
        pool = self.scheduler.pool
        limit = longest(self.model, self.config.max_length)
        # The last token is never written.
        room = pool.num_blocks * pool.block_size + 1
        return (room if limit is None else min(room, limit)) - prompt_tokens

    def reset_prefix_cache(self) -> None:
        """Forget the pages of requests that have ended, and share none of those that run.

        An engine without requests sees for itself that weights or adapters have changed; call this
        where they change in the middle of requests.
        """
        with self._inbox.held():
            self.scheduler.forget_pages()
            self.runner.look_again()

    def reset_stats(self) -> None:
        """Start counting anew."""
        self.stats = EngineStats()

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something to do."""
        return bool(self.requests or self._late)

    @torch.no_grad()
    def step(self) -> list[RequestOutput]:
        """Run one step; return the requests that got tokens or ended, in no particular order."""
        with self._inbox.stepping():
            begun, outputs, plan = perf_counter(), self._step(), self.last_plan
            if self._gate is not None and plan.only_decodes:
                tokens = sum(len(output.new_token_ids) for output in outputs)
                requests = len(plan.drafts) + len(plan.verifies) + len(plan.idle)
                self._gate.stepped(
                    perf_counter() - begun, tokens, requests, is_usual=self.runner.graphs.is_usual,
                    cruises=self.cruise is not None and self.cruise.is_on,
                )  # fmt: skip
            return outputs

    @property
    def speculates(self) -> bool:
        """Whether rounds that begin draft, as far as their requests and room allow."""
        return self._gate.drafts if self._gate is not None else bool(self.config.speculative)

    def _step(self) -> list[RequestOutput]:
        if self._cruises():
            late, self._late = self._late, []
            return joined([*late, *self._reports()])
        # A step that was interrupted may have left more than one, or one that cannot wait.
        is_late = len(self._flights) > 1 or not all(map(self._can_wait, self._flights))
        if is_late or self._moves or self._forks or not self.scheduler.is_calm:
            self._settle()
        plan = self.last_plan = self.scheduler.plan()
        self.stats.planned(plan)
        self._outcomes.news = {}
        for name in plan.interrupted:
            self._decoders[name].forget_drafts()
        for name in plan.failed:
            self._outcomes.fail(
                name,
                MemoryError("the KV pool is too small for this request alone; raise kv_tokens"),
            )
        try:
            self._copy_and_fork(plan)
            flight = self._run(plan)
            # The device has its next pass: time to see what the one before has brought.
            self._land(but=0 if flight is None or not self._can_wait(flight) else 1)
        except BaseException:
            # The pass will be run again; what came before it is not lost.
            self._late += self._reports()
            raise
        late, self._late = self._late, []
        return joined([*late, *self._reports()])

    def _cruises(self) -> bool:
        """Run a step without a plan, where requests can do without one; return whether it ran."""
        cruise, plan = self.cruise, None
        if cruise is None or self._moves or self._forks or not self.runner.runs_ahead:
            return False
        try:
            plan = cruise.take_step(self._settle)
        finally:
            if plan is None:
                self._late += self._reports()
        if plan is not None:
            self.last_plan = plan
            self.stats.ran(plan)
        return plan is not None

    def _settle(self) -> None:
        """Let all who have ended leave before anybody is planned."""
        self._land()
        self._late += self._reports()

    def _run(self, plan: StepPlan) -> Flight | None:
        """Begin the pass of a plan; None: it has none."""
        segments = list(self._segments(plan))
        if not segments:
            return None
        if self._flights and not self.runner.takes(segments):
            # Its tokens must be known here.
            self._land()
            segments = list(self._segments(plan))
        ahead = self._flights[-1].draws if self._flights else None
        logits = self.runner.run(segments, ahead)
        self.stats.ran(plan)
        self._flights.append(self._outcomes.launch(plan, logits))
        return self._flights[-1]

    def _can_wait(self, flight: Flight) -> bool:
        """Whether a pass is looked at in the next step alone; who drafts nothing would but idle."""
        drafts = self._gate is None or self._gate.drafts
        is_delayed = self.config.delayed_verification and drafts
        return is_delayed and self.runner.runs_ahead and flight.can_wait

    def _land(self, *, but: int = 0) -> None:
        """Look at the passes that run, in order, but for the last ones."""
        while len(self._flights) > but:
            flight = self._flights[0]
            # Whoever interrupts this finds everything as it was.
            flight.wait()
            del self._flights[0]
            self._outcomes.land(flight)

    def _reports(self) -> list[RequestOutput]:
        """Return what has come of the step's requests so far, once."""
        news, self._outcomes.news = self._outcomes.news, {}
        return [self._report(name, tokens) for name, tokens in news.items()]

    def _copy_and_fork(self, plan: StepPlan) -> None:
        """Copy blocks and give samples of a shared prompt their first token, late ones first.

        The scheduler says so once: what raises (out of memory) must be done by the next step.
        """
        self._moves += plan.moves
        self._forks = [name for name in self._forks if name not in plan.interrupted]
        self._forks += [child for child, _ in plan.forks]
        for name in plan.interrupted:
            self._decoders[name].keys.detach()
        self.runner.cache.move(self._moves)
        while self._forks:
            child = self._forks.pop(0)
            if child in self.requests:
                self._outcomes.fork(child)

    def generate(
        self,
        prompts: Sequence[Prompt] | str,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        checkpoint: str | Path | None = None,
    ) -> list[RequestOutput]:
        """Decode all `prompts` and return their outputs in order; n samples stand side by side.

        Args:
            prompts: texts or token ids; a single text is one prompt.
            params: for all of them, or one each.
            checkpoint: a file that finished outputs are added to, and that outputs of an earlier
                call with the same prompts, parameters and model are taken from.

        A prompt that cannot be served has an output with `finish_reason="error"`.

        Raises:
            ValueError: there are not as many params as prompts, or other requests are unfinished.
        """
        return generate(self, prompts, params, checkpoint=checkpoint)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Yield a request's output as it grows; any number of streams share the steps.

        Closing the iterator early aborts the request.

        Raises:
            ValueError: as `add_request`.
        """
        if params is not None and params.n > 1:
            raise ValueError(f"a stream has one sample, got n={params.n}; open n streams")
        # Other streams step in their threads: no output may come before its reader.
        name = self._streams.new_name(self.requests)
        self._streams.open(name)
        try:
            self.add_request(prompt, params, request_id=name, priority=priority)
            async for output in self._streams.outputs(name):
                yield output
        finally:
            self._streams.close(name)
            if name in self.requests:
                self._inbox.post(lambda: self._discard(name))

    def _discard(self, name: str) -> None:
        if name in self.requests:
            self.abort(name)

    def _segments(self, plan: StepPlan) -> Iterator[Segment]:
        def table(name: str) -> Any:
            return self.scheduler.entries[name].table

        for chunk in plan.prefills:
            name = chunk.request_id
            yield self._decoders[name].prefill(
                table(name), chunk.start, chunk.tokens, emits=chunk.emits
            )
        for name in plan.drafts:
            yield self._decoders[name].draft_row(table(name))
        for name, _ in plan.verifies:
            yield self._decoders[name].verify_rows(table(name))

    def _report(self, name: str, new: list[int]) -> RequestOutput:
        request = self.requests[name]
        if request.finish_reason is not None:
            return self._finished(name, new)
        if self._streams.has_reader(name):
            request.text = self._stop.text(request)
        return self._streams.deliver(request.result(new))

    def _finished(self, name: str, new: Sequence[int] = ()) -> RequestOutput:
        """Take a request out of everything, and return its last output."""
        request = self._intake.remove(name)
        if self.cruise is not None:
            self.cruise.drop(everybody=not self.requests)
        self.runner.buffers.leave(name)
        # A step that raised may have left it there, and the next one of this name is another.
        self._forks = [child for child in self._forks if child != name]
        self.stats.ended(request)
        if not self.requests:
            # Nobody will look at what runs, and its logits may take a lot of memory.
            self._flights.clear()
        request.text = self._stop.text(request)
        return self._streams.deliver(request.result(new))
