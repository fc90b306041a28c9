"""Strict mode: refused, with the reason, wherever it could not keep its word."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pillarattn
from pillarattn.errors import UnsupportedOptionError
from pillarattn.kernels import verify_attention
from pillarattn.patch import strict
from pillarattn.patch.captured_passes import CapturedPasses
from pillarattn.patch.strict import check_products, check_strict, strict_products
from pillarattn.patch.target import HFTarget

NEW = {"max_new_tokens": 8, "do_sample": False}


def test_on_a_cpu_it_is_refused_before_any_compute(pair, drafting, prompt, monkeypatch):
    _, patched = pair()
    monkeypatch.setattr(patched, "forward", lambda *_, **__: pytest.fail("computed"))
    with pytest.raises(UnsupportedOptionError, match=r"strict=True cannot run here.*on cpu"):
        patched.generate(prompt(2, 12), **NEW, assistant=drafting(strict=True))


def test_layers_that_are_not_known_are_refused(rehearsed, pair, drafting, prompt):
    _, patched = pair("gemma2")
    with pytest.raises(UnsupportedOptionError, match=r"norms may round.*Llama, Mistral, Qwen2"):
        patched.generate(prompt(2, 12), **NEW, assistant=drafting(strict=True))
    with pytest.raises(UnsupportedOptionError, match="not on one GPU"):
        check_strict(patched, None, "the weights are on cpu, not on one GPU")


def test_reference_kernels_are_refused(rehearsed, pair, drafting, prompt):
    _, patched = pair()
    with pytest.raises(UnsupportedOptionError, match="kernels='reference' rounds by"):
        patched.generate(prompt(2, 12), **NEW, assistant=drafting(strict=True, kernels="reference"))
    query = torch.zeros(1, 2, 1, 16)
    with pytest.raises(ValueError, match="strict=True needs the Triton kernel"):
        verify_attention(query, query, query, lengths=torch.tensor([1]), strict=True)


def test_drafters_that_watch_hidden_states_are_refused(pair, prompt, monkeypatch):
    """Their passes run eagerly, whose rounding differs."""
    _, patched = pair()
    target = HFTarget(
        patched, prompt(1, 9), generation_config=patched.generation_config, model_kwargs={},
        cache=pillarattn.PillarCache(),
    )  # fmt: skip
    strict_passes = CapturedPasses(None, target.cache, set(), strict=True)
    target.capture(lambda _: strict_passes)
    with pytest.raises(UnsupportedOptionError, match="watches hidden states"):
        target.watch((0,))
    target.close()
    assert not any(module._forward_hooks for module in patched.modules())
    target.watch((0,))
    target.close()


def test_products_are_tried_once_a_shape(monkeypatch):
    """A layer whose sums depend on the number of rows is found, and the message names it.

    Numbers are drawn where the model is, which need not be the current device.
    """

    class Uneven(nn.Linear):
        calls = 0

        def forward(self, rows):
            type(self).calls += 1
            return super().forward(rows) + (1e-3 if len(rows) > 4 else 0.0)

    monkeypatch.setattr(strict.nn, "Linear", Uneven)
    model = nn.Sequential(Uneven(8, 6), Uneven(8, 6))
    with pytest.raises(UnsupportedOptionError, match="8 to 6 gives other bits for 20 rows than"):
        check_products(model, batch=4, width=5)
    Uneven.calls = 0
    check_products(model, batch=2, width=1)
    assert Uneven.calls == 2, "two layers of one shape, one try of two products"


def test_without_a_gpu_the_switch_does_nothing(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    monkeypatch.setattr(
        torch.backends.cuda, "preferred_blas_library", lambda *_: pytest.fail("asked")
    )
    with strict_products():
        pass


def test_the_preferred_library_comes_back_when_the_last_run_ends(monkeypatch):
    chosen = ["cublas"]

    def prefer(name=None):
        if name is not None:
            chosen.append(name)
        return chosen[-1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    first = strict_products()
    first.__enter__()
    with strict_products():
        first.__exit__(None, None, None)
        assert chosen[-1] == "cublaslt"
    assert chosen == ["cublas", "cublaslt", "cublas"]


def test_it_needs_recorded_passes():
    with pytest.raises(ValueError, match="it needs cuda_graphs=True"):
        pillarattn.PillarConfig(strict=True, cuda_graphs=False)
    with pytest.raises(ValueError, match="strict must be True or False"):
        pillarattn.PillarConfig(strict=None)


def test_a_cache_takes_its_whole_limit_at_once():
    cache = pillarattn.PillarCache(limit=4000)
    cache.allocates_at_once = True
    keys = torch.zeros(1, 1, 5, 4)
    cache.update(keys, keys, 0)
    assert cache.layers[0].capacity == 4000
    other = pillarattn.PillarCache(limit=4000)
    other.update(keys, keys, 0)
    assert other.layers[0].capacity == 64
