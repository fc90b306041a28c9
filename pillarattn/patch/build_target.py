"""The target of a `generate` call: the library's attention and cache, or the model's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers import StaticCache

from pillarattn.decoding.kept_run import KeptRun
from pillarattn.errors import UnsupportedOptionError
from pillarattn.kernels.dispatch import choose
from pillarattn.modules.attention import PillarAttention
from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.captured_passes import LEAST_SPAN, CapturedPasses
from pillarattn.patch.compat import Cache, DynamicCache, PreTrainedModel, cache_keyword
from pillarattn.patch.foreign_target import ForeignTarget
from pillarattn.patch.fused_layers import FusedLayers
from pillarattn.patch.graph_recorder import rounded
from pillarattn.patch.kept_passes import KeptPasses, code_of, kind_of
from pillarattn.patch.obstacle import obstacle
from pillarattn.patch.options import check_prompt
from pillarattn.patch.static_cache import import_static, tokens_cached
from pillarattn.patch.strict import check_products, check_strict
from pillarattn.patch.target import HFTarget

ATTENTION_OPS = ("draft_attention", "verify_attention", "attention_scores")


@dataclass(frozen=True)
class Call:
    """What one call of `generate` brings to its target.

    Attributes:
        model: patched.
        input_ids: `[B, L]`.
        generation_config: as `generate` prepared it.
        model_kwargs: what else it hands to a decoding method.
        kernels: "auto", "reference" or "triton".
        scratch: tokens that a round may write past the length limit.
        returns_cache: whether the caller will look at the cache.
        cuda_graphs: whether passes may be recorded and replayed.
        strict: whether every pass must be recorded, and strict.
        width: tokens a row of the widest verify pass.
        widest: see `CapturedPasses`; for a gate, whose rounds differ.
        share: largest share of the context that drafts may read, where rounds differ in it, or 0.
        kept: what earlier runs left, and where this one leaves what it can.
    """

    model: PreTrainedModel
    input_ids: Tensor
    generation_config: Any
    model_kwargs: dict[str, Any]
    kernels: str
    scratch: int
    returns_cache: bool
    cuda_graphs: bool = True
    strict: bool = False
    width: int = 1
    widest: int | None = None
    share: float = 0.0
    kept: KeptRun = field(default_factory=KeptRun)

    @cached_property
    def key(self) -> Any:
        """What another call must share to go on with this one's recordings; None: none may."""
        given = self.model_kwargs.get(cache_keyword())
        # generate itself brings an empty one.
        is_fresh = given is None or (type(given) is DynamicCache and not given.get_seq_length())
        if not is_fresh or self.returns_cache or not self.cuda_graphs:
            return None
        return kind_of(
            self.model, self.input_ids, kernels=self.kernels, strict=self.strict, code=self.code
        )

    @cached_property
    def code(self) -> Any:
        """See `code_of`."""
        return code_of(self.model)

    def most_keys(self, cache: PillarCache) -> int:
        """Return how many keys a draft may read at most, where rounds differ in it, or 0."""
        return int(self.share * (cache.limit or 0))

    def keep(self, target: HFTarget) -> None:
        """Leave to the next call what this one's target has recorded."""
        if self.key is None:
            return
        captured = target.give_captured()
        if captured is not None and captured.reason is None:
            key, fused = (self.key, target.cache.limit), captured.fused
            kept = KeptPasses(captured.rebound(None, None), fused)
            self.kept.keep(key, kept, owner=self.model)


def build_target(call: Call, *, sparse: bool, lockstep: bool) -> HFTarget | ForeignTarget:
    """Return the target of a call; nothing has run yet.

    Args:
        call: what `generate` was given.
        sparse: whether the library's attention can act.
        lockstep: whether rows must advance together.

    Raises:
        UnsupportedOptionError: a prompt or a cache that cannot be decoded exactly.
    """
    if call.strict and not sparse:
        raise UnsupportedOptionError(
            f"strict=True needs the library's attention, which cannot act in "
            f"{type(call.model).__name__} with this prompt; use strict=False"
        )
    target = _sparse_target(call) if sparse else _foreign_target(call)
    target.lockstep |= lockstep
    return target


def _sparse_target(call: Call) -> HFTarget:
    """Return the target whose attention is the library's own, over a `PillarCache`."""
    model, input_ids, generation_config = call.model, call.input_ids, call.generation_config
    model_kwargs = dict(call.model_kwargs)
    given: Cache | None = model_kwargs.pop(cache_keyword(), None)
    for op in ATTENTION_OPS:
        choose(op, call.kernels, input_ids)
    max_length = int(generation_config.max_length)
    check_prompt(model, input_ids, max_length=max_length, given=given, kwargs=model_kwargs)
    embeddings = model_kwargs.get("inputs_embeds")
    before = 0 if embeddings is None else embeddings.shape[1]
    before += 0 if given is None else int(given.get_seq_length())
    limit, earlier = before + max_length + call.scratch, None
    if call.key is not None:
        # Prompts differ a little from call to call.
        limit = rounded(limit, LEAST_SPAN)
        earlier = call.kept.take((call.key, limit))
    if earlier is None:
        cache = _working_cache(model, given, limit=limit, kernels=call.kernels)
    else:
        cache = earlier.restart()
    if isinstance(given, StaticCache):
        past = int(given.get_seq_length())
        needed = tokens_cached(
            input_ids, past=past, generation_config=generation_config, kwargs=model_kwargs
        )
        import_static(cache, given, rows=input_ids.shape[0], needed=needed)
    target = HFTarget(
        model,
        input_ids,
        generation_config=generation_config,
        model_kwargs=model_kwargs,
        cache=cache,
        # States cannot be cut to where a shorter row ended, and a returned cache must be.
        lockstep=call.returns_cache and bool(cache.state_layers),
    )
    _capture(target, call, earlier)
    return target


def _capture(target: HFTarget, call: Call, earlier: KeptPasses | None) -> None:
    """Let a target record its passes where the model and the call allow it.

    Args:
        target: of the call.
        call: what `generate` was given.
        earlier: recordings to go on with, over the target's cache.

    Raises:
        UnsupportedOptionError: it must, and cannot.
    """
    model, cache = call.model, target.cache
    record = model.pillarattn_record
    if earlier is not None:
        # Its key says that nothing has come between.
        again = earlier.fused
        if again is None or not again.goes_on(record.fused):
            joined = None if again is None else again.joined
            again = FusedLayers(model, cache, record.fused, joined=joined, joins=not call.strict)
        target.capture(lambda forward: earlier.captured.rebound(forward, again))
        return
    reason, fused = obstacle(model, cache), None
    if reason is None and call.kernels == "reference" and call.strict:
        reason = "kernels='reference' rounds by the number of rows"
    if reason is None:
        # Joined products have shapes of their own, which strict mode does not check.
        fused = FusedLayers(model, cache, record.fused, joins=not call.strict)
    if call.strict:
        check_strict(model, fused, reason)
        check_products(model, batch=call.input_ids.shape[0], width=call.width)
        cache.allocates_at_once = cache.attention.strict = True
    if call.cuda_graphs and fused is not None:
        proven = record.proven_with(call.code)
        options: dict[str, Any] = {"strict": call.strict, "widest": call.widest}
        options["least_keys"] = call.most_keys(cache)
        target.capture(lambda forward: CapturedPasses(forward, cache, proven, fused, **options))


def _foreign_target(call: Call) -> ForeignTarget:
    """Return the target that leaves the model's attention and cache alone."""
    model, input_ids, model_kwargs = call.model, call.input_ids, call.model_kwargs
    given = model_kwargs.get(cache_keyword())
    if isinstance(given, PillarCache) or getattr(given, "offloading", False):
        raise UnsupportedOptionError(
            f"{type(model).__name__} keeps a cache of its own; pass a plain DynamicCache, or none"
        )
    for layer in getattr(given, "layers", ()):
        name = type(layer).__name__
        if "Static" in name or "Quantized" in name:
            raise UnsupportedOptionError(
                f"a cache with {name} layers cannot be used with assistant=; "
                "pass a DynamicCache, or none"
            )
    max_length = int(call.generation_config.max_length)
    check_prompt(model, input_ids, max_length=max_length, given=given, kwargs=model_kwargs)
    return ForeignTarget(
        model, input_ids, generation_config=call.generation_config, model_kwargs=model_kwargs
    )


def _working_cache(
    model: PreTrainedModel, given: Cache | None, *, limit: int, kernels: str
) -> PillarCache:
    """Return the cache to decode with, holding what the caller's cache holds."""
    if isinstance(given, PillarCache):
        cache = given
        cache.fit(model.config)
    else:
        cache = PillarCache(limit=limit, config=model.config)
        if getattr(given, "offloading", False):
            raise UnsupportedOptionError(
                "an offloading cache cannot be used with assistant=; pass a plain DynamicCache"
            )
        if given is not None and not isinstance(given, StaticCache):
            cache.import_from(given)
    cache.attention = PillarAttention(kernels=kernels)
    return cache
