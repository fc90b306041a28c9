"""The proof before the first use: on random tokens, blocks, steps and roll backs agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pillarattn.errors import PillarError, UnsupportedModelError
from pillarattn.patch.autocast import outside
from pillarattn.patch.compat import PreTrainedModel
from pillarattn.patch.preflight_passes import (
    BLOCK,
    foreign_blocks,
    padded_foreign_block,
    padded_sparse_block,
    plain_steps,
    prompt_kwargs,
    sparse_blocks,
)
from pillarattn.patch.support import field
from pillarattn.patch.tensor_parallel import ranks_of
from pillarattn.patch.wrappers import weights_device

if TYPE_CHECKING:
    from pillarattn.patch.record import PatchRecord

PROMPT, PADDING = 9, 3
# A window up to this long is crossed; longer ones would make the proof slow.
LONGEST_WINDOW = 64
# Allowed gaps, relative to the spread of the logits. In fp32 the largest gap is near 1e-6. In half
# precision single logits of a large vocabulary stray far, so the root mean square counts: 0.03 to
# 0.05 in bf16 on a model of 30 layers. A wrong mask, position or stale state gives about 1.
EXACT_TOLERANCE, COARSE_TOLERANCE = 1e-3, 0.12
_FAULTS = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    AttributeError,
    KeyError,
    AssertionError,
)


def preflight(model: PreTrainedModel, record: PatchRecord) -> None:
    """Compare plain single steps with blocks, drafts and roll backs on random tokens.

    If blocks over the library's own cache fail, `record.dense_reason` says why, and blocks over the
    model's own attention and cache are tried. Neither the global random state nor the model's mode
    is touched.

    Raises:
        UnsupportedModelError: both differ, with the measured gap, or the model runs no block.
    """
    device = weights_device(model)
    if device.type == "meta":
        return
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(False)
        with torch.no_grad(), outside(device.type), record.own_code.active(model):
            ids = _random_ids(model, device)
            plain = _guarded(model, lambda: plain_steps(model, ids))
            if record.dense_reason is None:
                try:
                    _guarded(model, lambda: _compare_sparse(model, record, plain, ids))
                except UnsupportedModelError as error:
                    record.dense_reason = str(error)
            if record.dense_reason is not None:
                _guarded(model, lambda: _compare(model, plain, foreign_blocks(model, ids)))
            _check_padding(model, record, ids)
            _check_agreement(model, record)
    finally:
        for module, training in modes:
            module.training = training


def _check_agreement(model: PreTrainedModel, record: PatchRecord) -> None:
    ranks = ranks_of(model)
    if ranks is not None:
        ranks.check_same(
            "models: their preflights differ",
            record.dense_reason,
            record.lockstep,
            record.pads_foreign,
            record.padding_reason,
            record.stores_latents,
        )


def _check_padding(model: PreTrainedModel, record: PatchRecord, ids: Tensor) -> None:
    """Find out what prompts with padding on the left may be decoded with: see `PatchRecord`."""
    kwargs = prompt_kwargs(model, ids, padding=PADDING)
    routes = [lambda: padded_foreign_block(model, ids, kwargs)]
    if record.dense_reason is None and not record.lockstep:
        routes.insert(0, lambda: padded_sparse_block(model, record, ids, kwargs))
    try:
        plain = _guarded(model, lambda: plain_steps(model, ids, padding=PADDING))
        for number, route in enumerate(routes):
            try:
                _guarded(model, lambda route=route: _compare(model, plain, route()))
            except UnsupportedModelError:
                if number + 1 == len(routes):
                    raise
            else:
                record.pads_foreign = len(routes) > 1 and number == 1
                return
    except UnsupportedModelError as error:
        record.padding_reason = (
            f"prompts padded on the left are refused: {str(error).partition('; its output')[0]}"
        )


def _guarded(model: PreTrainedModel, attempt: Any) -> Any:
    try:
        return attempt()
    except PillarError:
        raise
    except _FAULTS as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} could not run a block of tokens after a cached prompt "
            f"({type(error).__name__}: {error}); use it without assistant="
        ) from error


def _random_ids(model: PreTrainedModel, device: torch.device) -> Tensor:
    config = model.config.get_text_config(decoder=True)
    windows = [field(config, name) or 0 for name in ("sliding_window", "attention_chunk_size")]
    short = [n for n in windows if isinstance(n, int) and n <= LONGEST_WINDOW]
    prompt = PROMPT + max(short, default=0)
    generator = torch.Generator().manual_seed(20251201)
    ids = torch.randint(1, config.vocab_size, (2, prompt + BLOCK), generator=generator)
    return ids.to(device)


def _compare_sparse(
    model: PreTrainedModel, record: PatchRecord, plain: Tensor, ids: Tensor
) -> None:
    """Compare blocks over the library's cache; rows that must not part company set `lockstep`."""
    blocks = sparse_blocks(model, record, ids)
    ragged = blocks.pop("ragged")
    _compare(model, plain, blocks)
    try:
        _compare(model, plain, {"ragged": ragged})
    except UnsupportedModelError:
        # Positions that the model counts itself, the same for all rows.
        record.lockstep = True


def _compare(model: PreTrainedModel, plain: Tensor, blocks: dict[str, Tensor]) -> None:
    is_exact = model.dtype in (torch.float32, torch.float64)
    tolerance = EXACT_TOLERANCE if is_exact else COARSE_TOLERANCE
    ranks = ranks_of(model)
    for name, logits in blocks.items():
        difference = logits - plain[:, plain.shape[1] - logits.shape[1] :]
        size = difference.abs().max() if is_exact else difference.square().mean().sqrt()
        gap = float(size / plain.std().clamp_min(1e-6))
        if ranks is not None:
            # All must take the same way from here: each pass needs all of them.
            gap = ranks.worst(gap)
        if not gap <= tolerance:
            raise UnsupportedModelError(
                f"{type(model).__name__}: a {name} block of {BLOCK} tokens differs from single "
                f"steps by {gap:.2g} of the logits' spread (allowed: {tolerance:g}); its output "
                "would not be lossless, so use it without assistant="
            )
