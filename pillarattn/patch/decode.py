"""From `generate`'s prepared inputs to a decoding run, and back to what `generate` returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pillarattn.datatypes import Generation, RowLengths
from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.decoding.history import History
from pillarattn.decoding.loop import DecodingRun
from pillarattn.decoding.outcome import Outcome, Recorder
from pillarattn.decoding.stats import GenerationStats
from pillarattn.errors import UnsupportedOptionError
from pillarattn.kernels.dispatch import choose
from pillarattn.modules.attention import PillarAttention
from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.compat import (
    Cache,
    DynamicCache,
    PreTrainedModel,
    cache_keyword,
    decode_context,
    decoder_output,
)
from pillarattn.patch.logits import ProcessorRule
from pillarattn.patch.options import check_generation_config, check_processors, check_prompt
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
    **model_kwargs: Any,
) -> Any:
    """Run one generation; the model's twin attention must be active.

    Returns:
        A LongTensor, or generate's output class where `return_dict_in_generate` asks for it.

    Raises:
        UnsupportedOptionError: before any compute, naming an option that cannot be honoured.
    """
    generator.reset()
    given: Cache | None = model_kwargs.pop(cache_keyword(), None)
    if generator.config.kernels != "auto":
        kernels = generator.config.kernels
    max_length, k = int(generation_config.max_length), generator.config.k
    check_generation_config(generation_config)
    check_processors(logits_processor)
    if model.training:
        raise UnsupportedOptionError("the model is in training mode; call model.eval() first")
    rule = generator.new_rule(do_sample=bool(generation_config.do_sample))
    for op in ATTENTION_OPS:
        choose(op, kernels, input_ids)
    check_prompt(model, input_ids, max_length=max_length, given=given, kwargs=model_kwargs)
    embeddings = model_kwargs.get("inputs_embeds")
    before = 0 if embeddings is None else embeddings.shape[1]
    before += 0 if given is None else int(given.get_seq_length())
    cache = _working_cache(given, limit=before + max_length + k + 1, kernels=kernels)
    wants_dict = bool(generation_config.return_dict_in_generate)
    # The empty DynamicCache that generate made is not the user's to look at.
    is_users = given is not None and getattr(given, "_is_user_defined", False)
    outcome, recorder = _outcome(
        input_ids,
        stopping_criteria,
        generation_config,
        streamer,
        scratch=k + 1,
        keep_padding=wants_dict or is_users,
    )
    target = HFTarget(
        model,
        input_ids,
        generation_config=generation_config,
        model_kwargs=model_kwargs,
        cache=cache,
    )
    run = DecodingRun(
        target=target,
        drafter=generator.new_drafter(),
        rule=rule,
        process=ProcessorRule(logits_processor),
        selector=generator.new_selector(),
        history=outcome.history,
        outcome=outcome,
        recorder=recorder,
        stats=GenerationStats(),
        k=k,
        **_parity_options(generator, model),
    )
    try:
        with decode_context(model):
            result = run.run()
    except BaseException:
        # Half-way rows are ragged and without their padding: no later call may take them for whole.
        cache.reset()
        raise
    finally:
        generator.stats = run.stats
    if streamer is not None:
        streamer.end()
    if not (wants_dict or is_users):
        return result.sequences
    _restore_layout(cache, target, result, outcome.history.prompt_length)
    returned = _returned_cache(cache, given)
    if not wants_dict:
        return result.sequences
    return decoder_output(
        returned, sequences=result.sequences, scores=result.scores, logits=result.logits
    )


def _outcome(
    input_ids: Tensor,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any,
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
    )
    outcome = Outcome(
        history,
        stop,
        max_length=max_length,
        emit=None if streamer is None else lambda tokens: streamer.put(tokens.cpu()),
        keep_padding=keep_padding,
    )
    return outcome, recorder


def _working_cache(given: Cache | None, *, limit: int, kernels: str) -> PillarCache:
    """Return the cache to decode with, holding what the caller's cache holds."""
    if isinstance(given, PillarCache):
        cache = given
    else:
        cache = PillarCache(limit=limit)
        if getattr(given, "offloading", False):
            raise UnsupportedOptionError(
                "an offloading cache cannot be used with assistant=; pass a plain DynamicCache"
            )
        if given is not None:
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
    return cache.export_to(given) if isinstance(given, DynamicCache) else cache
