"""Dispatch: what "auto" picks, and what an explicit choice refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pillarattn.kernels import dispatch

CPU, CUDA = torch.zeros(1), SimpleNamespace(is_cuda=True, device="cuda:0")


def plain() -> None: ...


def fast() -> None: ...


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(dispatch, "_TABLE", {})
    dispatch.register("both", "reference", plain)
    dispatch.register("both", "triton", fast)
    dispatch.register("one", "reference", plain)


@pytest.mark.parametrize(
    ("op", "name", "tensors", "want"),
    [
        ("both", "auto", [CPU], plain),
        ("both", "auto", [CUDA, CUDA], fast),
        ("both", "auto", [CUDA, CPU], plain),
        ("one", "auto", [CUDA], plain),
        ("both", "reference", [CUDA], plain),
        ("both", "triton", [CUDA], fast),
    ],
)
def test_choice(table, op, name, tensors, want) -> None:
    assert dispatch.choose(op, name, *tensors) is want


@pytest.mark.parametrize(
    ("op", "name", "tensors", "message"),
    [
        ("one", "triton", [CUDA], "one has no triton implementation, only reference"),
        ("both", "triton", [CPU], "needs tensors on CUDA, got cpu"),
        ("both", "triton", [CUDA, CPU], "needs tensors on CUDA"),
        ("both", "flash", [CPU], "choose one of auto, reference, triton"),
        ("none", "auto", [CPU], "unknown op 'none'; choose one of both, one"),
    ],
)
def test_refusal(table, op, name, tensors, message) -> None:
    with pytest.raises(ValueError, match=message):
        dispatch.choose(op, name, *tensors)


def test_register(table) -> None:
    dispatch.register("one", "reference", plain)
    assert dispatch.implementations("one") == ["reference"]
    with pytest.raises(ValueError, match="already has a reference"):
        dispatch.register("one", "reference", fast)
    with pytest.raises(ValueError, match="reference or triton"):
        dispatch.register("one", "auto", fast)


def test_every_op_has_a_reference() -> None:
    ops = {op for op, _ in dispatch._TABLE}
    assert ops == {
        "attention_scores",
        "draft_attention",
        "kv_append",
        "rejection_sample",
        "topk_select",
        "verify_attention",
    }
    assert all("reference" in dispatch.implementations(op) for op in ops)
