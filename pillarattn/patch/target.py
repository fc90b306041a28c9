"""A patched Hugging Face model as the target of decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pillarattn.datatypes import Phase, RowLengths
from pillarattn.decoding.target import HiddenStates
from pillarattn.errors import UnsupportedModelError, UnsupportedOptionError
from pillarattn.kernels.workspace import Workspace
from pillarattn.modules.attention import PillarAttention
from pillarattn.modules.step import StepState
from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.captured_passes import CapturedPasses, Forward
from pillarattn.patch.compat import PreTrainedModel, cache_keyword
from pillarattn.patch.current_pass import current_cache
from pillarattn.patch.draft_weights import DraftWeights
from pillarattn.patch.hidden_states import HiddenTap
from pillarattn.patch.pass_ahead import PassAhead
from pillarattn.patch.snapshot import STATES, Snapshot

# Prepared for the prompt alone: later passes take no padding mask (padding has left the cache by
# then) and positions of their own.
_PROMPT_ONLY = ("attention_mask", "position_ids", "logits_to_keep", "use_cache")
_PER_TOKEN = ("token_type_ids", "mm_token_type_ids")


class HFTarget:
    """Runs the prompt through `generate`'s own path, and blocks at each row's true positions.

    Args:
        model: patched, with its twin attention active.
        input_ids: `[B, L]`, the prompt as `generate` hands it over.
        generation_config: as `generate` prepared it.
        model_kwargs: likewise, with `cache` under the model's own keyword.
        cache: empty, or holding an earlier turn.
        lockstep: let all rows advance together (see `Target`).

    Attributes:
        block_width: see `Target`.
        begins_ahead: whether `forward_ahead` may begin a pass.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        cache: PillarCache,
        lockstep: bool = False,
    ) -> None:
        self.model = model
        self.lockstep = lockstep
        self.cache = cache
        self.layer_calls: list[int] | None = None
        self._ids = input_ids
        self._generation_config = generation_config
        self._keyword = cache_keyword()
        self._kwargs = {**model_kwargs, self._keyword: cache}
        self._takes_logits_to_keep = model._supports_logits_to_keep()
        self._next_position: Tensor | None = None
        self._last_position: Tensor | None = None
        self._block: Tensor | None = None
        self._states: Snapshot | None = None
        self._tap: HiddenTap | None = None
        self._hidden: HiddenStates | None = None
        self._draft_weights: DraftWeights | None = None
        self._captured: CapturedPasses | None = None
        self.begins_ahead = True
        self._ahead: PassAhead | None = None
        # Where passes were begun ahead; None: none was.
        self._ran_ahead: torch.device | None = None
        # What an earlier turn left, so that a failed run can leave it too.
        self._earlier = cache.lengths if cache.used_layers else None
        self._earlier_states = Snapshot(cache.state_layers, STATES) if self._earlier else None
        self._is_compact = False
        self.prompt_width = 0
        self.block_width = 0
        self.prompt_mask: Tensor | None = model_kwargs.get("attention_mask")

    @property
    def own_cache(self) -> PillarCache:
        """The cache, under the name that every target has for it."""
        return self.cache

    @property
    def cuts(self) -> bool:
        """Whether `roll_back` may stop at any length of each row."""
        return not self.lockstep and not self.cache.state_layers

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.model.config.get_text_config(decoder=True).num_hidden_layers)

    @property
    def hidden_states(self) -> HiddenStates:
        """The watched states of the last prefill or block."""
        if self._hidden is None:
            raise ValueError("no hidden states are kept; call watch() before the prompt runs")
        return self._hidden

    def watch(self, layers: tuple[int, ...]) -> None:
        """Keep hidden states from now on; `close` ends it.

        Raises:
            UnsupportedOptionError: the passes that would be watched must be replayed.
        """
        if self._captured is not None and self._captured.strict:
            raise UnsupportedOptionError(
                "strict=True replays every verify pass, and this drafter watches hidden states, "
                "which no replay hands out; use another drafter, or strict=False"
            )
        if self._tap is not None:
            self._tap.close()
        self._tap = HiddenTap(self.model, layers)

    def give_captured(self) -> CapturedPasses | None:
        """Return what passes were recorded, for another run; `close` leaves it alone then."""
        self._end_ahead()
        given, self._captured = self._captured, None
        return given

    def capture(self, make: Callable[[Forward], CapturedPasses]) -> None:
        """Replay blocks by what `make` makes of an eager pass, from now on; `close` ends it."""
        self._captured = make(self._forward)

    def _end_ahead(self) -> None:
        """Wait for a pass that nobody took: its buffers go to others, maybe of another stream."""
        self._ahead, device, self._ran_ahead = None, self._ran_ahead, None
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def take_settled(self) -> bool:
        """Return whether all passes since the last call ran as they will from now on."""
        if self._captured is None or self._captured.reason is not None:
            return True
        settled, self._captured.settled = self._captured.settled, True
        return settled

    def close(self) -> None:
        """Take away what `watch` and `draft_with` put into the model, and memory of the run."""
        self._use_workspace(None)
        self._end_ahead()
        # A user's cache grows as it did.
        self.cache.allocates_at_once = False
        if self._captured is not None:
            self._captured.close()
            self._captured = None
        if self._tap is not None:
            self._tap.close()
            self._tap = None
        if self._draft_weights is not None:
            self._draft_weights.close()
            self._draft_weights = None

    def draft_with(self, weights: str) -> None:
        """Let draft passes compute with rounded weights from now on; `close` ends it.

        Raises:
            UnsupportedOptionError: see `DraftWeights`.
        """
        self._draft_weights = DraftWeights(self.model, weights, self.cache)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings of `tokens`."""
        return self.model.get_input_embeddings()(tokens)

    def unembed(self, states: Tensor) -> Tensor:
        """Return the logits of final, normed states."""
        head = self.model.get_output_embeddings()
        return head(states.to(head.weight.dtype))

    def prefill(self, step: StepState) -> Tensor:
        """Run the prompt exactly as plain generate does; then drop padding from the cache."""
        kwargs = dict(self._kwargs)
        # Scores are pooled in the round that they come from.
        self._use_workspace(Workspace())
        with self._pass(step), self._catching():
            outputs = self.model._prefill(self._ids, self._generation_config, kwargs)
        if not self.cache.used_layers:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} left its cache empty; it cannot be rolled back"
            )
        logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=self._ids.device)
        self.layer_calls = list(step.visited) if step.visited else None
        self.prompt_width = self.cache.lengths.max
        mask = self.prompt_mask
        if mask is not None and not bool(mask.all()):
            self.cache.compact(mask.bool().to(self.cache.lengths.device))
            self._is_compact = True
        self._keep_hidden(self.cache.lengths, mask)
        lengths = self.cache.lengths.tensor
        positions = self._kwargs.get("position_ids")
        if positions is not None:
            last = positions[..., -1:].to(lengths.device)
            # What to add to a row's cache length to get the position of its next token.
            self._next_position = last + 1 - lengths.unsqueeze(-1)
            new = int(self._generation_config.max_length or 0) - self._ids.shape[1]
            if new > 0:
                # Rows ahead of the others draft past the end; position tables do not reach there.
                self._last_position = last + new - 1
        return logits

    def forward(self, tokens: Tensor, step: StepState) -> Tensor:
        """Append `tokens` `[B, Q]` to the cache and return their logits `[B, Q, V]` fp32."""
        if self._states is None and self.cache.state_layers:
            self._states = Snapshot(self.cache.state_layers, STATES)
        self._block = tokens
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self._tap is None and ahead.serves(tokens, step):
            grown = self.cache.lengths.plus(1)
            for layer in self.cache.used_layers:
                layer.lengths = grown
            step.visited[:], self.block_width = ahead.step.visited, 1
            self._check_layers(step)
            return ahead.logits
        with self._catching():
            logits = self._run(tokens, step)
        self._keep_hidden(self.cache.lengths, None)
        return logits

    def forward_ahead(self, tokens: Tensor, step: StepState) -> None:
        """Begin the plain pass that follows, over `tokens` `[B]`, if it is one that is replayed.

        The cache's lengths stay what they are until `forward` takes what it left.
        """
        captured = self._captured
        if captured is None or self._tap is not None or not (self.cuts and self.begins_ahead):
            return
        inputs = self._inputs(tokens.unsqueeze(1), 1)
        # Of inputs without positions nothing is recorded.
        if not captured.will_replay(inputs, step, 1):
            return
        base = self.cache.lengths
        logits = captured.run(inputs, step, width=1)
        if logits is not None:
            self.cache.roll_back(base)
            self._ahead, self._ran_ahead = PassAhead(logits, step), logits.device

    def forget_ahead(self) -> None:
        """Let the next `forward` run its own pass."""
        self._ahead = None

    def roll_back(self, lengths: RowLengths) -> None:
        """Forget what drafts appended, states included."""
        self.cache.roll_back(lengths)
        if self._states is not None:
            self._states.restore()

    def abandon(self) -> None:
        """Leave the cache as it was before the run, which has failed.

        Half-way rows are ragged and without their padding: no later call may take them for whole.
        """
        if self._earlier is None or self._earlier_states is None:
            self.cache.reset()
            return
        self._earlier_states.restore()
        if not self._is_compact:
            self.cache.roll_back(self._earlier)
            return
        assert self.prompt_mask is not None
        device = self._earlier.device
        valid = self.prompt_mask[:, : self._earlier.max].bool().to(device)
        self.cache.roll_back(RowLengths(valid.sum(dim=1).tolist(), device))
        self.cache.expand(valid)

    def keep(self, lengths: RowLengths) -> None:
        """Commit the verified block up to `lengths`.

        Keys past them are forgotten. States cannot be shortened: unless every token stands, the
        ones from before the block are put back and run over the tokens that do. Rows part company
        where they end: a block for all of them up to the shortest, the next one up to the second...
        """
        assert self._block is not None
        width = self._block.shape[1]
        base = [n - width for n in self.cache.lengths.host]
        counts = [new - old for new, old in zip(lengths.host, base, strict=True)]
        if self._states is not None and any(n != width for n in counts):
            self._states.restore()
            self.cache.roll_back(RowLengths(base, lengths.device))
            done = 0
            for count in sorted(set(counts)):
                if count > done:
                    self._run(self._block[:, done:count], StepState(Phase.VERIFY))
                    done = count
                self._states.take_rows([row for row, n in enumerate(counts) if n == count])
            self._states.restore()
        self.cache.roll_back(lengths)
        self._states = self._block = None

    def _run(self, tokens: Tensor, step: StepState) -> Tensor:
        wanted = tokens.shape[1]
        # A head that watches hidden states hears of no pass that is replayed.
        captured = self._captured if self._tap is None else None
        width = wanted if captured is None else captured.width_for(wanted, step)
        inputs = self._inputs(tokens, width)
        # Positions that the model counts by itself would be recorded with the first pass.
        if captured is not None and "position_ids" in inputs:
            logits = captured.run(inputs, step, width=width, kept=wanted)
            if logits is not None:
                self.block_width = width
                self._check_layers(step)
                return logits
        if width != wanted:
            inputs = self._inputs(tokens, wanted)
        self.block_width = wanted
        step.visited.clear()
        logits = self._forward(inputs, step, wanted)
        self._check_layers(step)
        return logits.to(copy=True, dtype=torch.float32, device=tokens.device)

    def _inputs(self, tokens: Tensor, width: int) -> dict[str, Any]:
        """Return the model's inputs for a block; the last token fills up to `width`."""
        if width > tokens.shape[1]:
            filler = tokens[:, -1:].expand(-1, width - tokens.shape[1])
            tokens = torch.cat([tokens, filler], dim=1)
        inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            tokens, is_first_iteration=False, **self._block_kwargs(width)
        )
        if self._takes_logits_to_keep:
            inputs["logits_to_keep"] = width
        return inputs

    def _forward(self, inputs: dict[str, Any], step: StepState, width: int) -> Tensor:
        """Run the model eagerly and return the logits of the last `width` tokens, `[B, Q, V]`."""
        with self._pass(step):
            outputs = self.model(**inputs, return_dict=True)
        logits: Tensor = outputs.logits[:, -width:]
        return logits

    def _use_workspace(self, workspace: Workspace | None) -> None:
        if isinstance(self.cache.attention, PillarAttention):
            self.cache.attention.workspace = workspace

    def _catching(self) -> Any:
        return nullcontext() if self._tap is None else self._tap.catching()

    def _keep_hidden(self, ends: RowLengths, mask: Tensor | None) -> None:
        """Put the states of each row's tokens first, as its cache has them."""
        if self._tap is None:
            return
        states = self._tap.states
        width = states.shape[1]
        counts = [width] * states.shape[0]
        if mask is not None:
            valid = mask[:, -width:].bool().to(states.device)
            counts = valid.sum(dim=1).tolist()
            order = torch.argsort((~valid).to(torch.int8), dim=1, stable=True)
            states = states.gather(1, order.unsqueeze(-1).expand_as(states))
        start = [end - count for end, count in zip(ends.host, counts, strict=True)]
        self._hidden = HiddenStates(states, RowLengths(start, ends.device))

    @contextmanager
    def _pass(self, step: StepState) -> Iterator[None]:
        """Let attention find the cache and the step of the forward pass inside the block."""
        self.cache.step, self.cache.written = step, None
        try:
            with current_cache(self.cache):
                yield
        finally:
            self.cache.step = None

    def _block_kwargs(self, width: int) -> dict[str, Any]:
        kwargs = {k: v for k, v in self._kwargs.items() if k not in _PROMPT_ONLY}
        for name in _PER_TOKEN:
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][..., -1:].expand(-1, width)
        if self._next_position is not None:
            lengths = self.cache.lengths.tensor
            positions = self._next_position + lengths.unsqueeze(-1)
            if width > 1:
                positions = positions + torch.arange(width, device=lengths.device)
            if self._last_position is not None:
                positions = positions.minimum(self._last_position)
            kwargs["position_ids"] = positions
        kwargs["use_cache"] = True
        return kwargs

    def _check_layers(self, step: StepState) -> None:
        """Make sure that every layer that attended in the prompt did so through the library."""
        calls = self.layer_calls
        if step.phase is not Phase.PREFILL and calls is not None:
            chunks = len(calls) // len(step.visited) if step.visited else 0
            if not chunks or sorted(step.visited * chunks) != sorted(calls):
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} attends outside the library in some layers "
                    f"(prompt {sorted(set(calls))}, block {sorted(set(step.visited))})"
                )
