"""From `generate`'s prepared inputs to a decoding run, and back to what `generate` returns."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from pillarattn.config import AUTO
from pillarattn.datatypes import Generation, RowLengths
from pillarattn.decoding.cost_gate import SS, CostGate, Gate
from pillarattn.decoding.drafters import DRAFTERS, Drafter
from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.decoding.history import History
from pillarattn.decoding.loop import DecodingRun
from pillarattn.decoding.outcome import Outcome, Recorder
from pillarattn.decoding.stats import GenerationStats
from pillarattn.patch.agreed_choices import (
    agreed_gate,
    agreed_length,
    agreed_rule,
    agreed_share,
    agreed_stop,
)
from pillarattn.patch.assistant import target_builder
from pillarattn.patch.build_target import Call, build_target
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
)
from pillarattn.patch.static_cache import export_static
from pillarattn.patch.stopping import CriteriaRule
from pillarattn.patch.target import HFTarget
from pillarattn.patch.tensor_parallel import Ranks, ranks_of

# Prompt rows that choose the first keys where k is not known beforehand: those of the default k.
SEED_ROWS = 9


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
    check_generation_config(generation_config)
    check_processors(logits_processor)
    check_model(model)
    ranks = ranks_of(model)
    if ranks is not None:
        ranks.check_same(
            "prompts or settings",
            input_ids,
            model_kwargs.get("attention_mask"),
            generation_config.max_length,
            generation_config.do_sample,
            generator,
        )
    drafter = generator.new_drafter()
    if not sparse and drafter.needs_selections:
        # Drafts by the model itself would cost what they save.
        drafter = DRAFTERS.get("ngram")()
    given: Cache | None = model_kwargs.get(cache_keyword())
    call = _new_call(
        generator, model, input_ids, generation_config, model_kwargs, kernels, drafter.scratch
    )
    target = build_target(call, sparse=sparse, lockstep=lockstep)
    dead_ends = DeadEnds()
    outcome, recorder = _outcome(call, stopping_criteria, streamer, dead_ends)
    process = ProcessorRule(logits_processor, dead_ends)
    kind = (*_kind(call), sparse, lockstep)
    gate = generator.new_gate(drafter, generator.learnt.recall(model, kind))
    run = _new_run(generator, call, target, drafter, process, outcome, recorder, ranks, gate)
    result = _run(run, call, generator)
    if isinstance(gate, CostGate):
        generator.learnt.keep(model, kind, gate.outlook)
    if streamer is not None:
        streamer.end()
    return _returned(result, target, given, call, prompt_length=outcome.history.prompt_length)


def _new_call(
    generator: SelfSpeculativeGenerator,
    model: PreTrainedModel,
    input_ids: Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    kernels: str,
    scratch: int,
) -> Call:
    """Return what the call brings to its target; `scratch` is what its drafter may write ahead."""
    given = model_kwargs.get(cache_keyword())
    # The empty DynamicCache that generate made is not the user's to look at.
    is_users = given is not None and getattr(given, "_is_user_defined", False)
    own = generator.config.kernels
    return Call(
        model,
        input_ids,
        generation_config,
        model_kwargs,
        kernels=kernels if own == "auto" else own,
        scratch=generator.most_drafts + 1 + scratch,
        returns_cache=bool(generation_config.return_dict_in_generate) or is_users,
        cuda_graphs=generator.config.cuda_graphs,
        strict=generator.config.strict,
        width=generator.most_drafts + 1,
        **_common_shape(generator),
        kept=generator.kept,
    )


def _common_shape(generator: SelfSpeculativeGenerator) -> dict[str, Any]:
    """Return the shape that serves all rounds of a gate, which would each be recorded anew."""
    if generator.config.k != AUTO:
        return {}
    share = max(SS) if generator.config.s == AUTO else 0.0
    return {"widest": generator.most_drafts + 1, "share": share}


def _kind(call: Call) -> tuple[int, int, bool]:
    """Return what a gate's lessons hold for: batch, length to a factor of two, whether sampled."""
    batch, length = call.input_ids.shape
    return batch, length.bit_length(), bool(call.generation_config.do_sample)


def _new_run(
    generator: SelfSpeculativeGenerator,
    call: Call,
    target: HFTarget | ForeignTarget,
    drafter: Drafter,
    process: ProcessorRule,
    outcome: Outcome,
    recorder: Recorder,
    ranks: Ranks | None,
    gate: Gate | None,
) -> DecodingRun:
    """Return the run of a call; what `ranks` of one model choose, they choose alike."""
    selector = generator.new_selector()
    selector.mean_over_ranks = None if ranks is None else ranks.mean
    if isinstance(target, HFTarget):
        selector.most_keys = call.most_keys(target.cache)
        # Ranks must run as many passes, and each decides by itself what it replays.
        target.begins_ahead = ranks is None
    rule = generator.new_rule(do_sample=bool(call.generation_config.do_sample))
    return DecodingRun(
        target=target,
        drafter=drafter,
        rule=agreed_rule(rule, ranks),
        process=process,
        selector=selector,
        history=outcome.history,
        outcome=outcome,
        recorder=recorder,
        stats=GenerationStats(),
        k=generator.most_drafts,
        draft_length=agreed_length(generator.new_draft_length(), ranks),
        draft_share=agreed_share(generator.new_draft_share(), ranks),
        gate=agreed_gate(gate, ranks),
        synchronise=generator.synchronise,
        **_parity_options(generator, call.model),
    )


def _run(run: DecodingRun, call: Call, generator: SelfSpeculativeGenerator) -> Generation:
    target = run.target
    try:
        with ExitStack() as stack:
            run.drafter.prepare(
                target_builder(
                    call.input_ids,
                    generation_config=call.generation_config,
                    model_kwargs=call.model_kwargs,
                    kernels=call.kernels,
                    stack=stack,
                )
            )
            if isinstance(target, HFTarget):
                stack.callback(target.close)
            stack.enter_context(decode_context(call.model))
            result = run.run()
            if isinstance(target, HFTarget):
                call.keep(target)
            return result
    except BaseException:
        if isinstance(target, (HFTarget, ForeignTarget)):
            target.abandon()
        raise
    finally:
        generator.stats = run.stats


def _returned(
    result: Generation,
    target: HFTarget | ForeignTarget,
    given: Cache | None,
    call: Call,
    *,
    prompt_length: int,
) -> Any:
    """Return what `generate` returns, the caller's cache filled."""
    if not call.returns_cache:
        return result.sequences
    returned = target.own_cache
    if isinstance(target, HFTarget):
        _restore_layout(target.cache, target, result, prompt_length)
        returned = _returned_cache(target.cache, given)
    if not call.generation_config.return_dict_in_generate:
        return result.sequences
    return decoder_output(
        returned, sequences=result.sequences, scores=result.scores, logits=result.logits
    )


def _outcome(
    call: Call, stopping_criteria: Any, streamer: Any, dead_ends: DeadEnds
) -> tuple[Outcome, Recorder]:
    """Return what follows the rows to their ends, and what keeps the logits that were asked for."""
    input_ids, generation_config = call.input_ids, call.generation_config
    max_length = int(generation_config.max_length)
    wants_dict = bool(generation_config.return_dict_in_generate)
    recorder = Recorder(
        input_ids.shape[0],
        scores=wants_dict and bool(generation_config.output_scores),
        logits=wants_dict and bool(generation_config.output_logits),
    )
    pad = generation_config._pad_token_tensor
    pad_token = 0 if pad is None else int(pad.reshape(-1)[0])
    history = History(input_ids, capacity=max_length + call.scratch, fill=pad_token)
    stop = CriteriaRule(
        stopping_criteria,
        pad_token=pad_token,
        recorder=recorder,
        prompt_length=history.prompt_length,
        dead_ends=dead_ends,
    )
    outcome = Outcome(
        history,
        agreed_stop(stop, stopping_criteria, ranks_of(call.model)),
        max_length=max_length,
        emit=None if streamer is None else streamer.put,
        keep_padding=call.returns_cache,
    )
    return outcome, recorder


def _parity_options(generator: SelfSpeculativeGenerator, model: PreTrainedModel) -> dict[str, Any]:
    """Return how the prompt seeds the first round and how many packed rows are scored."""
    k = generator.config.k
    if generator.config.parity == "default":
        # The cost gate begins with short drafts.
        rows = SEED_ROWS if k == AUTO else k + 1
        return {"seed_rows": rows, "row_limit": None}
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
