"""The proof before the first use: on random tokens, blocks, steps and roll backs agree."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pillarattn.datatypes import Phase, RowLengths
from pillarattn.errors import PillarError, UnsupportedModelError
from pillarattn.modules.attention import PillarAttention
from pillarattn.modules.step import StepState
from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.compat import DynamicCache, PreTrainedModel, cache_keyword
from pillarattn.patch.target import HFTarget

if TYPE_CHECKING:
    from pillarattn.patch.record import PatchRecord

PROMPT, BLOCK = 9, 4
# Allowed gaps, relative to the spread of the logits. In fp32 the largest gap is near 1e-6. In half
# precision single logits of a large vocabulary stray far, so the root mean square counts: 0.03 to
# 0.05 in bf16 on a model of 30 layers. A wrong mask, position or stale state gives about 1.
EXACT_TOLERANCE, COARSE_TOLERANCE = 1e-3, 0.12


def preflight(model: PreTrainedModel, record: PatchRecord) -> None:
    """Compare plain single steps with ragged blocks, drafts and roll backs on random tokens.

    Neither the global random state nor the model's mode is touched.

    Raises:
        UnsupportedModelError: they differ, with the measured gap, or the model cannot run a block.
    """
    device = model.get_input_embeddings().weight.device
    if device.type == "meta":
        return
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(False)
        with torch.no_grad():
            _check(model, record, device)
    except PillarError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} could not run a block of tokens on a preallocated cache "
            f"({type(error).__name__}: {error}); use it without assistant="
        ) from error
    finally:
        for module, training in modes:
            module.training = training


def _check(model: PreTrainedModel, record: PatchRecord, device: torch.device) -> None:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(20251201)
    ids = torch.randint(1, vocabulary, (2, PROMPT + BLOCK), generator=generator).to(device)
    plain = _plain_steps(model, ids)
    is_exact = model.dtype in (torch.float32, torch.float64)
    tolerance = EXACT_TOLERANCE if is_exact else COARSE_TOLERANCE
    for name, logits in _blocks(model, record, ids).items():
        difference = logits - (plain if name != "ragged" else plain[:, 1:])
        size = difference.abs().max() if is_exact else difference.square().mean().sqrt()
        gap = float(size / plain.std().clamp_min(1e-6))
        if not gap <= tolerance:
            raise UnsupportedModelError(
                f"{type(model).__name__}: a {name} block of {BLOCK} tokens differs from single "
                f"steps by {gap:.2g} of the logits' spread (allowed: {tolerance:g}); its output "
                "would not be lossless, so use it without assistant="
            )


def _plain_steps(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return plain decoding's logits of the block, `[2, BLOCK, V]`, with the model's own cache."""
    outputs = model(input_ids=ids[:, :PROMPT], use_cache=True, return_dict=True)
    logits = []
    for i in range(BLOCK):
        cache = outputs.get("cache") if "cache" in outputs else outputs.past_key_values
        here = ids[:, PROMPT + i : PROMPT + i + 1]
        outputs = model(
            input_ids=here, use_cache=True, return_dict=True, **{cache_keyword(): cache}
        )
        logits.append(outputs.logits[:, -1].float())
    return torch.stack(logits, dim=1)


def _check_windows(model: PreTrainedModel, cache: PillarCache) -> None:
    """Refuse a model whose own cache forgets what its attention could still see, or the reverse."""
    own = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    for index, layer in enumerate(cache.layers):
        kept = getattr(own[index], "sliding_window", None) if index < len(own) else None
        if layer.lengths is not None and kept != layer.window:
            raise UnsupportedModelError(
                f"{type(model).__name__}: layer {index} attends within {layer.window} tokens but "
                f"its cache keeps {kept}; correct sliding_window in the config, or use the model "
                "without assistant="
            )


def _blocks(model: PreTrainedModel, record: PatchRecord, ids: Tensor) -> dict[str, Tensor]:
    """Return the same logits from a verify block, a repeat after roll back, drafts, ragged rows."""
    cache = PillarCache()
    cache.attention = PillarAttention(kernels=record.kernels)
    positions = torch.arange(PROMPT, device=ids.device).expand(2, -1)
    kwargs: dict[str, Any] = {"use_cache": True}
    if "position_ids" in inspect.signature(model.forward).parameters:
        kwargs["position_ids"] = positions
    target = HFTarget(
        model,
        ids[:, :PROMPT],
        generation_config=model.generation_config,
        model_kwargs=kwargs,
        cache=cache,
    )
    block = ids[:, PROMPT:]
    results: dict[str, Tensor] = {}
    with record.active():
        target.prefill(StepState(Phase.PREFILL))
        _check_windows(model, cache)
        base = cache.lengths
        results["verified"] = target.forward(block, StepState(Phase.VERIFY))
        cache.roll_back(base)
        drafted = [
            target.forward(block[:, i : i + 1], StepState(Phase.DRAFT)) for i in range(BLOCK)
        ]
        results["drafted"] = torch.cat(drafted, dim=1)
        cache.roll_back(base)
        results["repeated"] = target.forward(block, StepState(Phase.VERIFY))
        # Row 1 keeps one token more than row 0: positions, masks and writes are per row from here.
        cache.roll_back(RowLengths([PROMPT, PROMPT + 1], base.device))
        shifted = torch.stack([block[0, : BLOCK - 1], block[1, 1:]])
        ragged = target.forward(shifted, StepState(Phase.VERIFY))
        cache.roll_back(RowLengths([PROMPT + 1, PROMPT + 1], base.device))
        again = target.forward(block[:, 1:], StepState(Phase.VERIFY))
        results["ragged"] = torch.cat([again[:1], ragged[1:]])
        results["ragged"][0, : BLOCK - 2] = ragged[0, 1:]
    return results
