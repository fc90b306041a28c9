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
def test_refusal(table, monkeypatch, op, name, tensors, message) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=message):
        dispatch.choose(op, name, *tensors)


def test_what_triton_cannot_take_goes_to_the_reference(table) -> None:
    reason = "float64 (it takes fp16)"
    assert dispatch.choose("both", "auto", CUDA, unsupported=reason) is plain
    assert dispatch.choose("both", "reference", CUDA, unsupported=reason) is plain
    with pytest.raises(ValueError, match=r"of both does not take float64 .* or pass 'reference'"):
        dispatch.choose("both", "triton", CUDA, unsupported=reason)


def test_gradients_go_to_the_reference(table) -> None:
    needs = SimpleNamespace(is_cuda=True, device="cuda:0", requires_grad=True)
    assert dispatch.choose("both", "auto", needs) is plain
    with pytest.raises(ValueError, match="no backward pass"):
        dispatch.choose("both", "triton", needs)
    with torch.no_grad():
        assert dispatch.choose("both", "auto", needs) is fast


def test_the_interpreter_takes_cpu_tensors_only_when_asked(table, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.choose("both", "triton", CPU) is fast
    assert dispatch.choose("both", "auto", CPU) is plain


def test_a_named_function_is_imported_when_chosen(table, monkeypatch) -> None:
    dispatch.register("one", "triton", "os.path:join")
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    assert dispatch.choose("one", "auto", CUDA) is plain
    with pytest.raises(ValueError, match=r"install pillarattn\[triton\]"):
        dispatch.choose("one", "triton", CUDA)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: name)
    import os

    assert dispatch.choose("one", "auto", CUDA) is os.path.join


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
        "add_rms_norm",
        "attention_scores",
        "draft_attention",
        "forecast_mass",
        "forecast_moments",
        "gumbel_argmax",
        "judge_rounds",
        "keyed_rejection",
        "kv_append",
        "mixed_attention",
        "paged_row_scores",
        "place_rows",
        "pool_layers",
        "pooled_attention",
        "pooled_select",
        "rejection_sample",
        "rotary_write",
        "seat_keys",
        "silu_mul",
        "topk_select",
        "verify_attention",
        "work_items",
    }
    assert all("reference" in dispatch.implementations(op) for op in ops)
