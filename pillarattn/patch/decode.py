"""From `generate`'s prepared inputs to a decoding run, and back to what `generate` returns."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from pillarattn.datatypes import Generation, RowLengths
from pillarattn.decoding.drafters import DRAFTERS
from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.decoding.history import History
from pillarattn.decoding.loop import DecodingRun
from pillarattn.decoding.outcome import Outcome, Recorder
from pillarattn.decoding.stats import GenerationStats
from pillarattn.errors import UnsupportedOptionError
from pillarattn.kernels.dispatch import choose
from pillarattn.modules.attention import PillarAttention
from pillarattn.patch.assistant import target_builder
from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.compat import (
    Cache,
    DynamicCache,
    PreTrainedModel,
    cache_keyword,
    decode_context,
    decoder_output,
)
from pillarattn.patch.dead_ends import DeadEnds
from pillarattn.patch.foreign_target import ForeignTarget
from pillarattn.patch.logits import ProcessorRule
from pillarattn.patch.options import (
    check_generation_config,
    check_model,
    check_processors,
    check_prompt,
)
from pillarattn.patch.static_cache import export_static, import_static, tokens_cached
from pillarattn.patch.stopping import CriteriaRule
from pillarattn.patch.target import HFTarget

ATTENTION_OPS = ("draft_attention", "verify_attention", "attention_scores")


def decode(
    generator: SelfSpeculativeGenerator,
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    kernels: str = "auto",
    sparse: bool = True,
    lockstep: bool = False,
    **model_kwargs: Any,
) -> Any:
    """Run one generation; for sparse drafts the model's twin attention must be active.

    Args:
        generator: settings, and where the statistics go.
        model: patched.
        input_ids: `[B, L]`.
        logits_processor: as `generate` prepared it; so are the next two.
        stopping_criteria: see above.
        generation_config: see above.
        streamer: gets tokens once they are final.
        kernels: "auto", "reference" or "triton".
        sparse: whether the model's attention can read selected keys; if not, it keeps its own
            attention and cache.
        lockstep: whether rows must advance together.
        model_kwargs: what else `generate` hands to a decoding method.

    Returns:
        A LongTensor, or generate's output class where `return_dict_in_generate` asks for it.

    Raises:
        UnsupportedOptionError: before any compute, naming an option that cannot be honoured.
    """
    generator.reset()
    k = generator.config.k
    check_generation_config(generation_config)
    check_processors(logits_processor)
    check_model(model)
    rule = generator.new_rule(do_sample=bool(generation_config.do_sample))
    given: Cache | None = model_kwargs.get(cache_keyword())
    wants_dict = bool(generation_config.return_dict_in_generate)
    # The empty DynamicCache that generate made is not the user's to look at.
    is_users = given is not None and getattr(given, "_is_user_defined", False)
    prepare = _sparse_target if sparse else _foreign_target
    target = prepare(
        generator,
        model,
        input_ids,
        generation_config,
        model_kwargs,
        kernels=kernels,
        returns_cache=wants_dict or is_users,
    )
    target.lockstep |= lockstep
    drafter = generator.new_drafter()
    if not sparse and drafter.needs_selections:
        # Drafts by the model itself would cost what they save.
        drafter = DRAFTERS.get("ngram")()
    dead_ends = DeadEnds()
    outcome, recorder = _outcome(
        input_ids,
        stopping_criteria,
        generation_config,
        streamer,
        dead_ends,
        scratch=k + 1 + drafter.scratch,
        keep_padding=wants_dict or is_users,
    )
    run = DecodingRun(
        target=target,
        drafter=drafter,
        rule=rule,
        process=ProcessorRule(logits_processor, dead_ends),
        selector=generator.new_selector(),
        history=outcome.history,
        outcome=outcome,
        recorder=recorder,
        stats=GenerationStats(),
        k=k,
        draft_length=generator.new_draft_length(),
        draft_share=generator.new_draft_share(),
        **_parity_options(generator, model),
    )
    with ExitStack() as stack:
        drafter.prepare(
            target_builder(
                input_ids,
                generation_config=generation_config,
                model_kwargs=model_kwargs,
                kernels=kernels if generator.config.kernels == "auto" else generator.config.kernels,
                stack=stack,
            )
        )
        if isinstance(target, HFTarget):
            stack.callback(target.close)
        result = _run(run, model, generator)
    if streamer is not None:
        streamer.end()
    if not (wants_dict or is_users):
        return result.sequences
    returned = target.own_cache
    if isinstance(target, HFTarget):
        _restore_layout(target.cache, target, result, outcome.history.prompt_length)
        returned = _returned_cache(target.cache, given)
    if not wants_dict:
        return result.sequences
    return decoder_output(
        returned, sequences=result.sequences, scores=result.scores, logits=result.logits
    )


def _run(
    run: DecodingRun, model: PreTrainedModel, generator: SelfSpeculativeGenerator
) -> Generation:
    try:
        with decode_context(model):
            return run.run()
    except BaseException:
        if isinstance(run.target, HFTarget):
            run.target.abandon()
        raise
    finally:
        generator.stats = run.stats


def _sparse_target(
    generator: SelfSpeculativeGenerator,
    model: PreTrainedModel,
    input_ids: Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *,
    kernels: str,
    returns_cache: bool,
) -> HFTarget:
    """Return the target whose attention is the library's own, over a `PillarCache`."""
    model_kwargs = dict(model_kwargs)
    given: Cache | None = model_kwargs.pop(cache_keyword(), None)
    if generator.config.kernels != "auto":
        kernels = generator.config.kernels
    for op in ATTENTION_OPS:
        choose(op, kernels, input_ids)
    max_length = int(generation_config.max_length)
    check_prompt(model, input_ids, max_length=max_length, given=given, kwargs=model_kwargs)
    embeddings = model_kwargs.get("inputs_embeds")
    before = 0 if embeddings is None else embeddings.shape[1]
    before += 0 if given is None else int(given.get_seq_length())
    limit = before + max_length + generator.config.k + 1 + generator.new_drafter().scratch
    cache = _working_cache(model, given, limit=limit, kernels=kernels)
    if isinstance(given, StaticCache):
        past = int(given.get_seq_length())
        needed = tokens_cached(
            input_ids, past=past, generation_config=generation_config, kwargs=model_kwargs
        )
        import_static(cache, given, rows=input_ids.shape[0], needed=needed)
    return HFTarget(
        model,
        input_ids,
        generation_config=generation_config,
        model_kwargs=model_kwargs,
        cache=cache,
        # States cannot be cut to where a shorter row ended, and a returned cache must be.
        lockstep=returns_cache and bool(cache.state_layers),
    )


def _foreign_target(
    generator: SelfSpeculativeGenerator,
    model: PreTrainedModel,
    input_ids: Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *,
    kernels: str,
    returns_cache: bool,
) -> ForeignTarget:
    """Return the target that leaves the model's attention and cache alone."""
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
    max_length = int(generation_config.max_length)
    check_prompt(model, input_ids, max_length=max_length, given=given, kwargs=model_kwargs)
    return ForeignTarget(
        model, input_ids, generation_config=generation_config, model_kwargs=model_kwargs
    )


def _outcome(
    input_ids: Tensor,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any,
    dead_ends: DeadEnds,
    *,
    scratch: int,
    keep_padding: bool,
) -> tuple[Outcome, Recorder]:
    """Return what follows the rows to their ends, and what keeps the logits that were asked for."""
    max_length = int(generation_config.max_length)
    wants_dict = bool(generation_config.return_dict_in_generate)
    recorder = Recorder(
        input_ids.shape[0],
        scores=wants_dict and bool(generation_config.output_scores),
        logits=wants_dict and bool(generation_config.output_logits),
    )
    pad = generation_config._pad_token_tensor
    pad_token = 0 if pad is None else int(pad.reshape(-1)[0])
    history = History(input_ids, capacity=max_length + scratch, fill=pad_token)
    stop = CriteriaRule(
        stopping_criteria,
        pad_token=pad_token,
        recorder=recorder,
        prompt_length=history.prompt_length,
        dead_ends=dead_ends,
    )
    outcome = Outcome(
        history,
        stop,
        max_length=max_length,
        emit=None if streamer is None else lambda tokens: streamer.put(tokens.cpu()),
        keep_padding=keep_padding,
    )
    return outcome, recorder


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


def _parity_options(generator: SelfSpeculativeGenerator, model: PreTrainedModel) -> dict[str, Any]:
    """Return how the prompt seeds the first round and how many packed rows are scored."""
    k = generator.config.k
    if generator.config.parity == "default":
        return {"seed_rows": k + 1, "row_limit": None}
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    group = heads // (getattr(config, "num_key_value_heads", None) or heads)
    # The paper's score kernel handles the first query tile only (reference.md 1.3).
    return {"seed_rows": 0, "row_limit": 32 if group * (k + 1) <= 48 else 64}


def _restore_layout(
    cache: PillarCache, target: HFTarget, result: Generation, prompt_length: int
) -> None:
    """Give the cache equal rows again, padded as the prompt was, without the last token."""
    # The cache may be wider than the ids: embeddings, or an earlier turn, came before them.
    total = target.prompt_width + result.sequences.shape[1] - prompt_length - 1
    mask = target.prompt_mask
    valid = torch.ones(
        result.sequences.shape[0], total, dtype=torch.bool, device=cache.lengths.device
    )
    if mask is not None:
        width = min(mask.shape[1], total)
        valid[:, :width] = mask[:, :width].bool().to(valid.device)
    counts = valid.sum(dim=1).tolist()
    cache.roll_back(RowLengths(counts, cache.lengths.device))
    if not bool(valid.all()):
        cache.expand(valid)


def _returned_cache(cache: PillarCache, given: Cache | None) -> Cache:
    """Return what the caller sees: its own object, filled, or a `DynamicCache`."""
    if given is None or given is cache:
        return cache
    if isinstance(given, StaticCache):
        return export_static(cache, given)
    return cache.export_to(given) if isinstance(given, DynamicCache) else cache
