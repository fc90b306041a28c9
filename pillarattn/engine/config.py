"""`EngineConfig`: every setting of an engine, checked on construction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pillarattn.config import PillarConfig
from pillarattn.decoding.drafters.ngram import NgramDrafter
from pillarattn.decoding.drafters.sparse import SparseDrafter
from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.engine.block_pool import BLOCK_SIZES
from pillarattn.engine.eviction import EVICTION_POLICIES
from pillarattn.engine.phases import PHASE_POLICIES
from pillarattn.engine.request import ACCEPTANCE_RULES
from pillarattn.engine.row_buckets import bucket
from pillarattn.engine.scheduler_config import ADMISSIONS, SchedulerConfig

if TYPE_CHECKING:
    import torch

# Prompt tokens of a step where nobody says, on a CPU and on a GPU.
PREFILL_CHUNKS = (512, 2048)
# The same in strict mode, whose products are known not to depend on their rows up to 512.
STRICT_CHUNK = 256


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an `Engine`.

    Attributes:
        kv_tokens: tokens whose keys and values fit the device's pool.
        host_tokens: the same of the host's; 0 drops victims and computes them again.
        block_size: tokens of a block of the pool: 1, 16 or 64.
        max_batch: requests that run at a time.
        prefill_chunk: prompt tokens of a step, over all requests; None: 512 on a CPU and 2,048 on
            a GPU, where a pass of few tokens takes as long as the host needs for its launches; 256
            with strict=True.
        max_length: tokens of prompt and output at most; None is what the model's config says.
        speculative: False decodes plainly with the same attention and the same sampler; "auto"
            measures both ways and lets rounds draft where that is faster.
        pillar: how drafts are made and which keys they read; requests may have their own `k` and
            `s`. Drafts come from the model itself ("sparse") or from the text ("ngram").
            `acceptance` "auto" is "gumbel": each request has a seed.
        phases: "unified" levels the rows of steps, "lockstep" lets all verify together.
        admission: "optimistic" admits what fits now; "reserve" what fits at its full length.
        eviction: who makes room: "fifo", "lifo", "shortest", "lru" or "heat".
        offload_chunk: tokens that move to or from the host at a time.
        prefix_cache: let requests share the full pages with which their texts begin alike, also
            after the one that computed them has ended, until the room is needed.
        seed: of the seeds of requests that bring none; None draws them at random.
        preflight: compare a pass of packed requests with plain passes before the first one.
        cuda_graphs: on a GPU, record passes without prompts and replay them.
        delayed_verification: on a GPU, begin a pass before the host has looked at the one before.
            Drafts go over on the device; a request that has verified idles for a step.
        cruise: with delayed verification, let rounds follow each other on the device without plans,
            and nobody idle, while all requests decode and are drawn on the device.

    Raises:
        ValueError: a value is out of range, or the engine has no such drafts.
    """

    kv_tokens: int = 65536
    host_tokens: int = 0
    block_size: int = 16
    max_batch: int = 64
    prefill_chunk: int | None = None
    max_length: int | None = None
    speculative: bool | str = True
    pillar: PillarConfig = field(default_factory=PillarConfig)
    phases: str = "unified"
    admission: str = "optimistic"
    eviction: str = "lifo"
    offload_chunk: int = 1024
    prefix_cache: bool = True
    seed: int | None = None
    preflight: bool = True
    cuda_graphs: bool = True
    delayed_verification: bool = True
    cruise: bool = True

    def __post_init__(self) -> None:
        for name, minimum in (
            ("kv_tokens", 1), ("host_tokens", 0), ("max_batch", 1), ("prefill_chunk", 1),
            ("offload_chunk", 1), ("max_length", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if name in ("max_length", "prefill_chunk") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")
        allowed: Any
        for name, allowed in (
            ("block_size", BLOCK_SIZES), ("phases", PHASE_POLICIES.names()),
            ("admission", ADMISSIONS), ("eviction", EVICTION_POLICIES.names()),
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(repr, allowed))}, "
                    f"got {getattr(self, name)!r}"
                )
        if self.speculative not in (True, False, "auto"):
            raise ValueError(f"speculative must be True, False or 'auto', got {self.speculative!r}")
        if self.kv_tokens < self.block_size:
            raise ValueError(
                f"kv_tokens={self.kv_tokens} is less than a block of {self.block_size} tokens"
            )
        generator = SelfSpeculativeGenerator.from_config(self.pillar)
        drafter, strategy = generator.new_drafter(), generator.new_selector().strategy
        if self.speculative == "auto" and strategy.keeps_history:
            # It would miss the rounds that drafted nothing.
            raise ValueError(
                f"speculative='auto' takes strategies without history, got {self.pillar.strategy!r}"
                "; set speculative=True, or another strategy such as 'pillar'"
            )
        if type(drafter) not in (SparseDrafter, NgramDrafter):
            raise ValueError(
                "the engine takes pillar.drafter 'sparse' or 'ngram', got "
                f"{self.pillar.drafter!r}; model.generate(assistant=) takes the others"
            )
        for name in ("k", "s"):
            if isinstance(getattr(self.pillar, name), str):
                raise ValueError(
                    f"the engine takes a number for pillar.{name}, got "
                    f"{getattr(self.pillar, name)!r}; model.generate(assistant=) takes the others"
                )
        for name, allowed in (
            ("acceptance", ("auto", *ACCEPTANCE_RULES)), ("parity", ("default",)),
            ("compile", (False,)),
        ):  # fmt: skip
            value = getattr(self.pillar, name)
            if value not in allowed:
                raise ValueError(
                    f"the engine takes pillar.{name}={' or '.join(map(repr, allowed))}, "
                    f"got {value!r}; model.generate(assistant=) takes the others"
                )
        if self.pillar.strict and (self.eviction == "heat" or strategy.refresh == "step"):
            raise ValueError(
                "strict=True takes strategies that choose once a round, and any eviction but "
                f"'heat', got {self.pillar.strategy!r} and {self.eviction!r}; use strict=False"
            )

    @property
    def strict_rows(self) -> int | None:
        """Rows of a step at most, where they must not depend on each other; None: they may."""
        if not self.pillar.strict:
            return None
        verifying = self.max_batch * (int(self.pillar.k) + 1)
        return bucket(verifying + (self.prefill_chunk or STRICT_CHUNK))

    def scheduler(self, device: torch.device | None = None) -> SchedulerConfig:
        """Return the scheduler's part, for a model on a device; None: a CPU."""
        is_gpu = device is not None and device.type == "cuda"
        usual = STRICT_CHUNK if self.pillar.strict else PREFILL_CHUNKS[is_gpu]
        return SchedulerConfig(
            num_blocks=self.kv_tokens // self.block_size,
            block_size=self.block_size,
            host_blocks=self.host_tokens // self.block_size,
            max_batch=self.max_batch,
            prefill_chunk=self.prefill_chunk or usual,
            phases=self.phases,
            admission=self.admission,
            eviction=self.eviction,
            offload_chunk=self.offload_chunk,
        )
