"""`acceptance_probe`: the acceptance of many configurations on a given text, without generating."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pillarattn.config import PillarConfig
from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.errors import UnsupportedModelError
from pillarattn.evaluation.environment import environment
from pillarattn.evaluation.lossless import patched
from pillarattn.evaluation.probe_memory import ProbeMemory
from pillarattn.evaluation.probe_pass import TextPass, active
from pillarattn.evaluation.probe_rounds import RoundProbe
from pillarattn.evaluation.probe_table import Table
from pillarattn.evaluation.probe_text import token_ids

# Rounds of a text have no draws to adapt to, and no other drafter beside them.
FIXED = {"drafter": "sparse", "draft_length": "constant", "draft_share": "constant"}

ProbeConfig = PillarConfig | SelfSpeculativeGenerator | str


def acceptance_probe(
    model: Any,
    text_or_ids: str | Tensor | Sequence[int],
    configs: ProbeConfig | Sequence[ProbeConfig],
    *,
    tokenizer: Any = None,
    temperature: float = 0.6,
    start: int = 1024,
    max_tokens: int | None = None,
    piece: int | None = None,
    per_round: bool = False,
    on_progress: Callable[[float], None] | None = None,
) -> Table:
    """Measure how many drafts of each round would be accepted if all before them were.

    The text is run once under full attention. From `start` on, every k + 1 tokens a round begins:
    keys are chosen as a generation would choose them there, from the rows before, and the text's
    own next k tokens are drafted under those keys, hidden states and all. Draft j is accepted with
    probability `sum_v min(p_j(v), q_j(v))`, where p is the target's and q the draft's distribution
    at the temperature. Nothing is sampled, so that the variance is that of the text alone. Rounds
    come in order, so that strategies with history see what they would see in a generation whose
    drafts are all accepted.

    Args:
        model: a causal LM, patched or not; it is left as it was.
        text_or_ids: a text, or its token ids, `[T]` or `[1, T]`.
        configs: `PillarConfig`s, generators or names of strategies.
        tokenizer: for a text.
        temperature: of p and q, >= 0; 0 compares their most likely tokens.
        start: tokens of the prompt, >= 1: where the first round begins.
        max_tokens: cut the text to its first tokens.
        piece: tokens of the full pass at once; None fits a few hundred MB, or a share of the free
            memory of a GPU.
        per_round: also return each round's start and expected number of accepted drafts.
        on_progress: called with the share of the work that is done, 0..1.

    Returns:
        A `Table` with a record for each configuration: `strategy, strategy_options, k, s,
        min_budget, recent, sink, parity, temperature, rounds, mean_accepted` (of k), its
        `standard_error` over rounds, `acceptance_rate, acceptance_length, mean_overlap,
        overlap_by_position, accepted_by_position, greedy_agreement, greedy_mean_accepted,
        keys_read_per_draft_step` (a mean over layers and heads, the round's own included),
        `extra_reads_per_draft_step` (what choosing reads, in keys with their values), and
        `by_length`: the means by context length, in octaves.

    Raises:
        ValueError: a configuration, the temperature or the text does not allow a round.
        UnsupportedModelError: rounds cannot be drafted side by side on this model.
    """
    ids = token_ids(text_or_ids, tokenizer, max_tokens=max_tokens)
    wanted = _configs(configs)
    check_probe(wanted, ids, temperature, start, piece)
    begun = time.perf_counter()
    with patched(model):
        _check_model(model)
        memory = ProbeMemory.of(model.device)
        probes = [
            RoundProbe(config, start=start, row_limit=_row_limit(model, config), memory=memory)
            for config in wanted
        ]
        with active(model):
            run = ProbeRun(model, ids.to(model.device), probes, temperature, start, memory)
            run.go(piece, on_progress or (lambda share: None))
    records = [
        _record(probe, config, temperature, per_round)
        for probe, config in zip(probes, wanted, strict=True)
    ]
    about = {
        "model": str(getattr(model, "name_or_path", "") or type(model).__name__),
        "dtype": str(model.dtype).removeprefix("torch."),
        "tokens": len(ids),
        "start": start,
        "seconds": round(time.perf_counter() - begun, 2),
        "environment": environment(model.device),
    }
    return Table(records, about)


def _check_model(model: Any) -> None:
    """Raise `UnsupportedModelError` for a patched model whose rounds cannot be drafted at once."""
    reason = getattr(model.pillarattn_record, "dense_reason", None)
    if reason is not None:
        raise UnsupportedModelError(f"this model cannot be probed: {reason}")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError(
            f"{type(model).__name__} takes no position_ids, which rounds side by side need"
        )


class ProbeRun:
    """The pass over the text with all probes beside it."""

    def __init__(
        self,
        model: Any,
        ids: Tensor,
        probes: Sequence[RoundProbe],
        temperature: float,
        start: int,
        memory: ProbeMemory,
    ) -> None:
        # One token tells which layers there are, which have windows, and whether all is supported.
        sample = TextPass(model, ids[:1])
        sample.advance(1, logits=False, scored=None)
        self.sparse = probes[0].selector.sparse_layers(sample.cache)
        self.kv_heads = sum(sample.layer(i).views()[0].shape[1] for i in self.sparse)
        self.text = TextPass(model, ids, kernels=model.pillarattn_record.kernels)
        self.probes = probes
        self.temperature = temperature
        self.start = start
        self.memory = memory
        self.vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self.scored = self.sparse if any(p.needs_row_scores for p in probes) else None

    def go(self, piece: int | None, on_progress: Callable[[float], None]) -> None:
        """Walk through the text; what rounds no longer look at is forgotten."""
        text, total = self.text, len(self.text.ids)
        piece = piece or self._piece(total)
        back = self.start - min(probe.oldest_row for probe in self.probes)
        for end, scored in ((self.start - back, None), (self.start, self.scored)):
            while text.end < end:
                text.advance(min(piece, end - text.end), logits=False, scored=scored)
        while text.end < total:
            text.advance(piece, logits=True, scored=self.scored)
            first = min(probe.next for probe in self.probes)
            target = self._target(text.logits(first, text.end))
            for number, probe in enumerate(self.probes, start=1):
                probe.run(text, target, first, temperature=self.temperature)
                done = text.end - piece * (1 - number / len(self.probes))
                on_progress(min(max(done / total, 0.0), 1.0))
            text.forget(min(probe.oldest_row for probe in self.probes))

    def _target(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return logits
        return (logits / self.temperature).softmax(dim=-1)

    def _piece(self, total: int) -> int:
        rows = min(self.memory.rows, self.memory.logits // (4 * self.vocabulary))
        if self.scored is not None:
            rows = min(rows, self.memory.scores // (4 * self.kv_heads * total))
        longest_round = max(probe.config.k for probe in self.probes) + 1
        return max(rows, longest_round)


def _configs(configs: ProbeConfig | Sequence[ProbeConfig]) -> list[PillarConfig]:
    """Return the configurations, whatever they were given as."""
    if isinstance(configs, (PillarConfig, SelfSpeculativeGenerator, str)):
        configs = [configs]
    found = []
    for config in configs:
        if isinstance(config, str):
            config = PillarConfig(strategy=config)
        elif isinstance(config, SelfSpeculativeGenerator):
            config = config.config
        if not isinstance(config, PillarConfig):
            raise ValueError(f"configs are PillarConfig objects or strategy names, got {config!r}")
        # Wrong names fail here, before any compute.
        SelfSpeculativeGenerator.from_config(config)
        found.append(config)
    if not found:
        raise ValueError("no configuration was given; pass at least one PillarConfig")
    return found


def check_probe(
    configs: list[PillarConfig], ids: Tensor, temperature: float, start: int, piece: int | None
) -> None:
    """Raise `ValueError` for what no probe can measure."""
    if not (isinstance(temperature, (int, float)) and 0 <= temperature < math.inf):
        raise ValueError(f"temperature must be 0 (greedy) or above, got {temperature!r}")
    if start < 1:
        raise ValueError(f"start must be at least 1 token of prompt, got {start}")
    if piece is not None and piece < 1:
        raise ValueError(f"piece must be at least 1 token, got {piece}")
    for config in configs:
        if not isinstance(config.k, int) or config.k < 1:
            raise ValueError(f"a probe drafts k >= 1 tokens a round, got k={config.k!r}")
        for name, only in FIXED.items():
            if getattr(config, name) != only:
                raise ValueError(f"a probe measures {name}={only!r}, got {getattr(config, name)!r}")
        if start + config.k > len(ids):
            raise ValueError(
                f"the text has {len(ids)} tokens, too few for a round of k={config.k} after "
                f"start={start}; lower start or pass a longer text"
            )


def _row_limit(model: Any, config: PillarConfig) -> int | None:
    """Return how many verify rows the paper's score kernel counts (reference.md 1.3)."""
    if config.parity != "reference":
        return None
    text = model.config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    group = heads // (getattr(text, "num_key_value_heads", None) or heads)
    packed = group * (config.k + 1)
    tile = 32 if packed <= 48 else 64
    if packed > tile and tile % group:
        raise ValueError(
            f"parity='reference' cuts a verify row in two with {group} query heads per KV head and "
            f"k={config.k}, which a probe does not follow; use parity='default'"
        )
    return None if packed <= tile else tile // group


def _record(
    probe: RoundProbe, config: PillarConfig, temperature: float, per_round: bool
) -> dict[str, Any]:
    fields = config.to_dict()
    measured = probe.tally.summary(per_round=per_round)
    lengths = probe.tally.starts
    extra = [probe.strategy.extra_reads(n, config.k) for n in lengths]
    head = {"strategy": probe.strategy.name, "strategy_options": repr(probe.strategy)}
    head |= {name: fields[name] for name in ("k", "s", "min_budget", "recent", "sink", "parity")}
    return {
        **head,
        "temperature": temperature,
        **measured,
        "extra_reads_per_draft_step": sum(extra) / len(extra),
    }
