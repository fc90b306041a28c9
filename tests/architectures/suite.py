"""What each architecture is put through: plain decoding, then sparse self-speculation."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch

import pillarattn
from pillarattn.errors import UnsupportedOptionError
from tests.architectures import recipes

NEW = 12
# A quarter of the context and at least 8 keys: prompts cross it, and the windows.
SPARSE: dict[str, Any] = {"s": 0.25, "min_budget": 8, "recent": 2, "sink": 1}
# The longest prompt crosses the recipes' windows of 16 tokens.
LENGTHS = (30, 9, 21)


@dataclass(frozen=True)
class Finding:
    """What was seen of one architecture.

    Attributes:
        model_type: as in the config.
        verdict: "lossless", "lossless-dense-draft" or "refused".
        reason: why it is not "lossless", or None.
        faults: outputs that differ from plain decoding, and what else went wrong.
        notes: remarks for the table.
        drafted, accepted: tokens over all runs.
        keys_read: share of the keys that drafts read, 1 where they read all.
    """

    model_type: str
    verdict: str
    reason: str | None = None
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    drafted: int = 0
    accepted: int = 0
    keys_read: float = 1.0


def examine(model_type: str) -> Finding:
    """Patch a tiny random model and compare its outputs with plain decoding's."""
    try:
        plain = recipes.build(model_type)
    except recipes.CannotBuild as error:
        return Finding(model_type, "refused", str(error).removeprefix(f"{model_type}: "))
    patched = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            pillarattn.patch(patched)
        except pillarattn.UnsupportedModelError as error:
            return Finding(model_type, "refused", str(error))
        return _decode(model_type, plain, patched)


def _decode(model_type: str, plain: Any, patched: Any) -> Finding:
    record = patched.pillarattn_record
    faults: list[str] = []
    notes = ["rows advance together"] if record.lockstep and not record.dense_reason else []
    drafted = accepted = 0
    read = full = 0.0
    for (name, inputs), k in zip(prompts().items(), (6, 3), strict=True):
        pillar = pillarattn.SelfSpeculativeGenerator(k=k, **SPARSE)
        wanted = _generate(plain, inputs)
        try:
            got = _generate(patched, inputs, assistant=pillar)
        except UnsupportedOptionError:
            if record.padding_reason is None:
                raise
            notes.append(record.padding_reason)
            continue
        if got != wanted:
            faults.append(f"greedy, {name}, k={k}: {_first(wanted, got)}")
        drafted, accepted = drafted + pillar.stats.drafted, accepted + pillar.stats.accepted
        read, full = read + pillar.stats.keys_read, full + pillar.stats.keys_full
        seeded = [
            _generate(
                patched,
                inputs,
                do_sample=True,
                temperature=0.8,
                assistant=pillarattn.SelfSpeculativeGenerator(k=k, seed=11, **SPARSE),
            )
            for k in (0, 4)
        ]
        if seeded[0] != seeded[1]:
            faults.append(f"seeded sampling, {name}: {_first(*seeded)}")
    return Finding(
        model_type,
        record.info["verdict"],
        record.dense_reason,
        tuple(faults),
        tuple(notes),
        drafted,
        accepted,
        read / full if full else 1.0,
    )


def prompts() -> dict[str, dict[str, torch.Tensor]]:
    """Return one prompt alone, and three of different lengths padded on the left."""
    generator = torch.Generator().manual_seed(5)
    width = max(LENGTHS)
    ids = torch.randint(3, 90, (len(LENGTHS), width), generator=generator)
    mask = (torch.arange(width) >= width - torch.tensor(LENGTHS)[:, None]).long()
    return {
        "batch 1": {"input_ids": ids[:1], "attention_mask": mask[:1]},
        "ragged batch 3": {"input_ids": ids * mask, "attention_mask": mask},
    }


def _generate(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> list[list[int]]:
    options = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, **options}
    return model.generate(**inputs, pad_token_id=0, **options).tolist()


def _first(wanted: list[list[int]], got: list[list[int]]) -> str:
    for row, (a, b) in enumerate(zip(wanted, got, strict=True)):
        for at, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                return f"row {row}, token {at - max(LENGTHS)}: {x} became {y}"
    return "different lengths"
