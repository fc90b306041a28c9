"""One request's decoding: its text, its sampler, its drafts, and the keys that they read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pillarattn.datatypes import Draft, Phase, on_device
from pillarattn.decoding.draft_length import ConstantLength
from pillarattn.decoding.drafters.ngram import NgramDrafter, look_up
from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.engine.batched_draws import DrawKind, Drawn, DrawRows, draw_kind
from pillarattn.engine.block_table import BlockTable
from pillarattn.engine.draft_laws import DraftLaws, OwnLaws
from pillarattn.engine.own_noise import OwnRejection
from pillarattn.engine.packed_pass import PENDING, Segment
from pillarattn.engine.paged_cache import PagedCache
from pillarattn.engine.request import Request
from pillarattn.engine.request_keys import RequestKeys
from pillarattn.engine.request_text import RequestText
from pillarattn.engine.sampling import processors_of, rule_of
from pillarattn.engine.speculation_gate import SpeculationGate
from pillarattn.engine.stopping import StopCheck
from pillarattn.patch.dead_ends import DeadEnds
from pillarattn.patch.logits import ProcessorRule


class RequestDecoder:
    """Turns a request's rows of each pass into its tokens; knows nothing of other requests.

    Args:
        request: what is asked for; its output grows here.
        generator: makes its strategy and selector.
        cache: the pool.
        device: where the model is.
        stop: says where the output ends.
        gate: says whether rounds draft; None: they do.
        laws: where requests keep what their drafts were drawn from; None: one of its own.

    Attributes:
        text: its tokens.
        keys: those that its drafts read.
        wants_heat: says whether a verify pass that is looked at leaves `heat`.
        heat: what the last one paid to each block.
    """

    def __init__(
        self,
        request: Request,
        generator: SelfSpeculativeGenerator,
        cache: PagedCache,
        *,
        device: torch.device,
        stop: StopCheck,
        laws: DraftLaws | None = None,
        gate: SpeculationGate | None = None,
    ) -> None:
        params = request.params
        self.request, self.device, self.stop, self._gate = request, device, stop, gate
        self.k = params.k or 0
        self.text = RequestText(request.prompt, device)
        self._dead_ends = DeadEnds()
        self._process = ProcessorRule(
            processors_of(params, prompt_length=len(request.prompt)), self._dead_ends
        )
        self._rule, self._length = rule_of(params), generator.new_draft_length()
        drafter = generator.new_drafter()
        self._lookup = drafter if isinstance(drafter, NgramDrafter) else None
        self._rejection = self._rule if isinstance(self._rule, OwnRejection) else None
        looks_up = self._lookup is not None and self._rejection is not None
        # Drafts from the text were drawn from no law.
        self._kind = None if looks_up else draw_kind(params, self._length)
        self.keys = RequestKeys(
            cache, generator.new_selector(), generator.new_draft_share(),
            selects=bool(self.k) and self._lookup is None, k=self.k, device=device,
        )  # fmt: skip
        self._drafts: list[int] = []
        # Drafts after those, which the device has drawn and nobody has looked at.
        self.pending = 0
        # The last draft's row, while the round goes on.
        self._drafting: Segment | None = None
        # What each draft was drawn from, where the rule needs it.
        self._laws = OwnLaws(DraftLaws() if laws is None else laws, self.k)
        self.wants_heat: Callable[[], bool] = lambda: False
        self.heat: tuple[float, ...] = ()

    @property
    def length(self) -> int:
        """Committed tokens; the newest has no keys yet."""
        return self.text.length

    @property
    def fresh(self) -> int:
        """Rows at the prompt's end that it must compute itself: for logits, and to choose keys."""
        return max(1, self.keys.seeds.seed_rows)

    def forget_drafts(self) -> None:
        """Start the round again; the next draft is the first one."""
        self._drafts, self._drafting = [], None
        if self._rejection is not None:
            self._rejection.drafts = 0
        self._laws.forget()

    def leave(self) -> None:
        """Give back what it holds of others'; nothing is asked of it any more."""
        self._laws.leave()

    def prefill(self, table: BlockTable, start: int, tokens: int, *, emits: bool) -> Segment:
        """Return the rows of a chunk of the text."""
        ids = self.text.tokens(start, start + tokens)
        segment = self._segment(Phase.VERIFY, ids, start, table)
        segment.keep = 1 if emits else 0
        is_prompt = start < len(self.request.prompt) and not self.request.output
        self.keys.read_prompt(segment, fresh=is_prompt)
        return segment

    def draft_row(self, table: BlockTable) -> Segment:
        """Return the row of the round's next draft: its newest token, over the selected keys.

        Holds until the next one is asked for: a round's drafts differ in token and position alone.
        """
        done = len(self._drafts)
        known = self._drafts[-1] if done else self.text.newest
        token = PENDING if self.pending else known
        at = self.text.length + done + self.pending - 1
        segment = self._drafting
        if segment is not None and segment.table is table and not (segment.holes or table.away):
            segment.tokens, segment.start = [token], at
            return segment
        segment = self._drafting = self._segment(Phase.DRAFT, [token], at, table)
        segment.keep = 1
        self.keys.read_draft(segment)
        return segment

    def verify_rows(self, table: BlockTable) -> Segment:
        """Return the rows of a verify pass: the newest token and the drafts."""
        tokens = self._round_tokens()
        segment = self._segment(Phase.VERIFY, tokens, self.length - 1, table)
        segment.keep = len(tokens)
        self.keys.read_verify(segment, drafts=self._gate is None or self._gate.drafts)
        return segment

    def rows_to_draw(self, phase: Phase, first: int, count: int) -> DrawRows | None:
        """Return how a pass's logits become tokens; None: only the request itself can say.

        Args:
            phase: `DRAFT`, or `VERIFY` for the prompt's last row and verify passes.
            first: row of the logits.
            count: rows.
        """
        if self._kind is None:
            return None
        if self._rejection is not None:
            return self._rejection_rows(self._kind, phase, first, count)
        ahead = len(self._drafts) + self.pending if phase is Phase.DRAFT else 0
        step = len(self.request.output) + ahead
        return DrawRows(self.request.id, self._kind, first, count, self.request.params.seed, step)

    def _rejection_rows(self, kind: DrawKind, phase: Phase, first: int, count: int) -> DrawRows:
        """Return rows of a kind that rejects, with the number of the draw, drafts ahead counted."""
        own, laws, is_draft = self._rejection, self._laws, phase is Phase.DRAFT
        assert own is not None
        if is_draft:
            number = own.draft_number(self.pending)
            places = [laws.row(len(self._drafts) + self.pending)]
        else:
            number, places = own.verdicts, laws.rows[: count - 1]
        return DrawRows(
            self.request.id, kind, first, count, own.key, number, laws.store, places, is_draft
        )

    def first_token(self, found: Tensor | Drawn) -> list[int]:
        """Take the token after the prompt; choose the first round's keys.

        Args:
            found: `[1, V]`, logits after the prompt, or what was drawn from them.
        """
        tokens = self._emit(self._chosen(found))
        if self.request.finish_reason is None:
            self.keys.seed(self.text, emitted=len(tokens))
        else:
            self.keys.forget_seeds()
        return tokens

    @property
    def can_wait(self) -> bool:
        """Whether its next pass can begin before anybody knows what this one drew."""
        is_drawn = self._kind is not None and self._kind.threshold is None
        # Without drafts each pass is a verify pass, after which it would idle.
        return self.k > 0 and is_drawn and not self.proposes and not self.keys.refreshes

    @property
    def can_cruise(self) -> bool:
        """Whether the device can go on by itself, round after round of k drafts.

        What its tokens, its drafts' number or their keys depend on must be there.
        """
        is_drawn = self._kind is not None and self._kind.threshold is None
        is_level = isinstance(self._length, ConstantLength) and self.keys.is_constant
        is_asked = self.request.params.logprobs is not None
        is_drawn = is_drawn and self._rejection is None and not self.proposes
        return is_drawn and is_level and not is_asked

    @property
    def kind(self) -> DrawKind | None:
        """How its tokens are drawn; None: only the request itself can say."""
        return self._kind

    @property
    def drafts(self) -> tuple[int, ...]:
        """The drafts of the round that somebody has looked at."""
        return tuple(self._drafts)

    def end_round(self, targets: list[int], drafts: list[int]) -> list[int]:
        """Emit what stands of a round that the device has drafted and verified by itself.

        Args:
            targets: tokens that the verify rows gave.
            drafts: those that they are compared with.

        Raises:
            ValueError: no token is possible.
        """
        self._drafts = drafts
        return self.judge(Drawn(targets, True))

    def resume(self, drafts: list[int], *, k: int) -> None:
        """Go on from a round of `k` drafts that the device has begun by itself."""
        self.forget_drafts()
        if k < self.k:
            # Such passes leave nothing that keys are chosen by.
            self.keys.are_fresh = not self.keys.selects
        for token in drafts:
            self._add(token)

    @property
    def in_part(self) -> bool:
        """Whether its drafts can do without keys that are on the host."""
        return self.keys.selects and not self.keys.refreshes

    @property
    def proposes(self) -> bool:
        """Whether drafts come all at once, from the text."""
        return self._lookup is not None

    def wish(self, room: int) -> int:
        """Return how many of at most `room` drafts the coming round should have."""
        if not room or (self._gate is not None and not self._gate.drafts):
            return 0
        # Keys of long ago would be poor ones: the coming pass leaves new scores.
        return min(room, self._length.choose(room)) if self.keys.are_fresh else 0

    def propose(self, room: int) -> int:
        """Look up at most `room` drafts for the coming round; return how many there are."""
        assert self._lookup is not None
        self.forget_drafts()
        if room > 0:
            # On the host, where the text is: nobody waits for the device.
            ids = torch.tensor([self.text.tokens(0, self.length)], device="cpu")
            tokens, found = look_up(
                ids, [0], [self.length], k=room,
                longest=self._lookup.max_ngram, shortest=self._lookup.min_ngram,
            )  # fmt: skip
            for token in tokens[0].tolist() if bool(found) else []:
                self._add(token)
        return len(self._drafts)

    def add_draft(self, found: Tensor | Drawn) -> bool:
        """Add the round's next draft; return whether the round drafts on.

        Args:
            found: `[1, V]`, logits of its row, or what was drawn from them.
        """
        self.pending -= 1
        if isinstance(found, Drawn):
            # Where no token is possible, any will do: no rule accepts it.
            self._add(max(0, found.tokens[0]))
            if self._rejection is not None:
                self._rejection.drafts += 1
            return found.goes_on
        at = len(self._drafts)
        logits = self._processed(self.length + at, found)
        token, law = self._rule.draw(logits[:, 0], [self.length + at - self.text.prompt_length])
        self._add(int(token))
        if law is not None:
            self._laws.put(at, token, law)
        sure = self._length.goes_on(logits[:, 0])
        return sure is None or bool(sure)

    def judge(self, found: Tensor | Drawn) -> list[int]:
        """Emit what a verify pass leaves of the drafts, and one token more.

        The keys of the coming round are still to be chosen, from the scores that `keys` holds.

        Args:
            found: `[rows, V]`, its logits, or what was drawn from them.

        Raises:
            Exception: what a logits processor raised on a text that was reached.
            ValueError: no token is possible.
        """
        request, drafted = self.request, len(self._drafts)
        chosen = self._chosen(found)
        emitted = self._emit(chosen)
        request.rounds += 1
        request.drafted += drafted
        kept = min(len(chosen) - 1, len(emitted))
        request.accepted += kept
        self._length.observe([drafted], [kept])
        self.forget_drafts()
        self.keys.end_round(self.text, drafted=drafted, kept=kept, emitted=len(emitted))
        self.heat = self.keys.heat() if self.wants_heat() else ()
        return emitted

    def select_keys(self) -> None:
        """Choose the keys of the coming round by a call of the request's own."""
        self.keys.select(self.text)

    def _round_tokens(self) -> list[int]:
        """Return the newest token and the drafts, those included that only the device knows."""
        return [self.text.newest, *self._drafts, *[PENDING] * self.pending]

    def _add(self, token: int) -> None:
        self.text.sketch(len(self._drafts), token)
        self._drafts.append(token)

    def _chosen(self, found: Tensor | Drawn) -> list[int]:
        """Return the drafts that stand and the token after them, -1 where none is possible."""
        drafts = self._drafts
        if isinstance(found, Drawn):
            if found.accepted is not None and self._rejection is not None:
                self._rejection.verdicts += 1
                return [*drafts[: found.accepted], *found.tokens]
            targets, stands = found.tokens, 0
            while stands < len(drafts) and drafts[stands] == targets[stands]:
                stands += 1
            return targets[: stands + 1]
        logits = self._processed(self.length, found)
        draft = Draft(on_device([drafts], found.device), self._laws.read(len(drafts), found))
        step = self.length - self.text.prompt_length
        verdict = self._rule.judge(draft, logits, [step])
        return [*drafts[: verdict.accepted[0]], int(verdict.next_tokens)]

    def _emit(self, chosen: list[int]) -> list[int]:
        """Commit tokens one by one, up to an end, an error or the last one."""
        text: Any = self.text
        request, before = self.request, len(self.request.output)
        for token in chosen:
            if token < 0:
                raise ValueError(
                    f"no token is possible after {self.length} tokens: the processed logits are "
                    "all -inf, or NaN; check the logits processors and the model's dtype"
                )
            text.commit(token)
            self._dead_ends.raise_if_reached(text, text.length - 1)
            request.output.append(token)
            reason = self.stop(request)
            if reason is not None:
                request.finish(reason)
                break
        return request.output[before:]

    def _processed(self, length: int, raw: Tensor) -> Tensor:
        """Return the logits after `length` tokens and their drafts, `[1, rows, V]`."""
        text: Any = self.text
        return self._process(text, [length], raw.unsqueeze(0))

    def _segment(self, phase: Phase, tokens: list[int], start: int, table: BlockTable) -> Segment:
        holes = phase is Phase.DRAFT and table.away > 0
        if not holes and table.away:
            table.resident()
        self.keys.table = table
        view = self.keys.view
        return Segment(
            self.request.id, phase, tokens, start, view, partial(view.place, table, holes=holes),
            holes=holes, table=table,
        )  # fmt: skip
