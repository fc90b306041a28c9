"""`SelfSpeculativeGenerator`: what users pass as `assistant=`."""

from __future__ import annotations

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pillarattn.config import AUTO, PillarConfig
from pillarattn.decoding.acceptance import ACCEPTANCE, AcceptanceRule
from pillarattn.decoding.cost_gate import (
    FIRST_S,
    MAX_K,
    SS,
    CostGate,
    Gate,
    GateMemory,
    Outlook,
)
from pillarattn.decoding.draft_length import DRAFT_LENGTHS, DraftLength
from pillarattn.decoding.draft_share import DRAFT_SHARES, DraftShare
from pillarattn.decoding.drafters import DRAFTERS, ChainDrafter, Drafter
from pillarattn.decoding.kept_run import KeptRun
from pillarattn.decoding.parts import build_part
from pillarattn.decoding.presets import preset
from pillarattn.decoding.stats import GenerationStats
from pillarattn.errors import NotPatchedError
from pillarattn.modules.budgets import RatioBudget
from pillarattn.modules.selector import ForcedTokens, Selector
from pillarattn.modules.strategies import STRATEGIES, Strategy


class SelfSpeculativeGenerator:
    """Sparse self-speculation, ready to be passed to `model.generate(..., assistant=pillar)`.

    Stock `model.generate(..., custom_generate=pillar)` takes it too, on a patched model. It holds
    settings and the statistics of its last run, so that one object serves many calls and models.

    Attributes:
        config: the settings.
        stats: what the last run did.
        learnt: what the cost gate knows of models, kept from one run to the next.
        kept: on a GPU, the cache and the recorded passes of the last run, which the next one of the
            same batch on the same model goes on with; `free` gives their memory back.
        synchronise: wait for a GPU at the ends of a round's phases, so that the seconds in `stats`
            are the device's too and not only the host's; slower, for profiles.

    Args:
        k: tokens drafted per round; 0 is plain decoding with the same sampler; "auto" is what
            pays best, plain decoding included.
        s: share of the context that a draft may read, 0 < s <= 1; or "auto", with k="auto".
        strategy: a registered name or a `Strategy` object.
        options: the other fields of `PillarConfig`.

    Raises:
        ValueError: a value is out of range, or a name is unknown.
    """

    def __init__(
        self,
        k: int | str = 8,
        s: float | str = 0.05,
        strategy: str | dict[str, Any] | Strategy = "pillar",
        **options: Any,
    ) -> None:
        self.config = PillarConfig.from_dict({"k": k, "s": s, "strategy": strategy, **options})
        self.stats = GenerationStats()
        self.synchronise = False
        self.learnt = GateMemory()
        self.kept = KeptRun()
        # Wrong names fail here, not in the middle of a sweep.
        self.new_strategy()
        self.new_drafter()
        self.new_draft_length()
        self.new_draft_share()

    @classmethod
    def from_config(cls, config: PillarConfig) -> SelfSpeculativeGenerator:
        """Build a generator from a config."""
        return cls(**{f.name: getattr(config, f.name) for f in fields(config)})

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> SelfSpeculativeGenerator:
        """Build a generator from the `pillar_config.json` of a folder, as `calibrate` writes one.

        Raises:
            FileNotFoundError: there is none.
        """
        return cls.from_config(PillarConfig.from_pretrained(folder))

    @classmethod
    def preset(cls, name: str, **changes: Any) -> SelfSpeculativeGenerator:
        """Build a generator that works as a named system does: see `decoding.presets`.

        Args:
            name: "magicdec", "triforce", ...
            changes: options that differ from the preset's.

        Raises:
            ValueError: there is no such preset; the message lists them.
        """
        return cls(**{**preset(name), **changes})

    def reset(self) -> None:
        """Forget the statistics of the last run."""
        self.stats = GenerationStats()

    def free(self) -> None:
        """Give back the GPU memory that the last run left for the next one."""
        self.kept.free()

    def new_strategy(self) -> Strategy:
        """Return a strategy with no history, for one generation."""
        strategy = self.config.strategy
        if isinstance(strategy, Strategy):
            fresh = copy.deepcopy(strategy)
            fresh.reset()
            return fresh
        if isinstance(strategy, dict):
            arguments = {key: value for key, value in strategy.items() if key != "name"}
            cls = STRATEGIES.get(strategy["name"])
            try:
                return cls(**arguments)
            except TypeError as error:
                raise ValueError(f"strategy {strategy['name']!r}: {error}") from None
        return STRATEGIES.get(strategy)()

    def new_drafter(self) -> Drafter:
        """Return the drafter of one generation."""
        levels = self.config.drafter
        if not isinstance(levels, tuple):
            return build_part(DRAFTERS, levels)
        drafters = [build_part(DRAFTERS, level) for level in levels]
        return drafters[0] if len(drafters) == 1 else ChainDrafter(drafters, self.config.inner_k)

    def new_draft_length(self) -> DraftLength:
        """Return what says how many tokens the rounds of one generation draft."""
        return build_part(DRAFT_LENGTHS, self.config.draft_length)

    def new_draft_share(self) -> DraftShare:
        """Return what says what share of the context the drafts of one generation read."""
        return build_part(DRAFT_SHARES, self.config.draft_share)

    @property
    def most_drafts(self) -> int:
        """Tokens that a round may draft at most."""
        return MAX_K if self.config.k == AUTO else int(self.config.k)

    def new_gate(self, drafter: Drafter, known: Outlook | None = None) -> Gate | None:
        """Return what chooses k and s for the rounds of one generation; None: they are given.

        Args:
            drafter: who drafts.
            known: what `learnt` holds of such generations.
        """
        if self.config.k != AUTO:
            return None
        chooses_s = self.config.s == AUTO and drafter.needs_selections
        ss = SS if chooses_s else (self._first_s,)
        return CostGate(ss=ss, min_budget=self.config.min_budget, known=known)

    @property
    def _first_s(self) -> float:
        return FIRST_S if self.config.s == AUTO else float(self.config.s)

    def new_rule(self, *, do_sample: bool) -> AcceptanceRule:
        """Return the acceptance rule for a generation that samples or does not.

        Raises:
            ValueError: the configured rule cannot give what plain decoding would.
        """
        name = self.config.acceptance
        if name == "auto":
            name = (
                "greedy"
                if not do_sample
                else "gumbel"
                if self.config.seed is not None
                else "rejection"
            )
        if (name == "greedy") == do_sample:
            raise ValueError(
                f"acceptance={name!r} does not fit do_sample={do_sample}; "
                "use 'greedy' without sampling, 'rejection', 'block' or 'gumbel' with it, or 'auto'"
            )
        return ACCEPTANCE.get(name)(self.config.seed)

    def new_selector(self) -> Selector:
        """Return the selector of one generation, as the paper's code does it if parity asks so."""
        config = self.config
        budget = RatioBudget(self._first_s, config.min_budget)
        if config.parity == "reference":
            return Selector(
                self.new_strategy(),
                budget,
                ForcedTokens(recent=0, sink=0, extra=1),
                normalise="visible",
                score_dtype=torch.float16,
                all_rows=True,
                kernels=config.kernels,
            )
        return Selector(
            self.new_strategy(),
            budget,
            ForcedTokens(recent=config.recent, sink=config.sink),
            kernels=config.kernels,
        )

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decode, called by stock `generate(custom_generate=pillar)` with what it has prepared.

        Raises:
            NotPatchedError: the model was not prepared by `pillarattn.patch`.
        """
        record = getattr(model, "pillarattn_record", None)
        if record is None:
            raise NotPatchedError(
                f"{type(model).__name__} is not patched; call pillarattn.patch(model) first"
            )
        return record.decode(
            self,
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            **model_kwargs,
        )

    def __repr__(self) -> str:
        changed = {
            name: value
            for name, value in self.config.to_dict().items()
            if value != getattr(PillarConfig(), name) or name in ("k", "s", "strategy")
        }
        inside = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        return f"SelfSpeculativeGenerator({inside})"
