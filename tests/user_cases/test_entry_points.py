"""U10, U15 and part C: every door to generate, flags that are not ours, versions, quiet logs."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path

import pytest
import transformers
from transformers import pipeline

import pillarattn
from pillarattn.errors import UnsupportedOptionError
from pillarattn.patch import compat

NEW = {"max_new_tokens": 8, "do_sample": False}


def test_the_keyword_and_the_sanctioned_hook(plain, patched, prompt, rejecting):
    """Stock generate rejects `assistant=`; `custom_generate=` is its own hook, and takes ours."""
    with pytest.raises(ValueError, match="assistant"):
        plain.generate(prompt(1, 8), **NEW, assistant=rejecting())
    want = plain.generate(prompt(1, 8), **NEW)
    assert patched.generate(prompt(1, 8), **NEW, assistant=rejecting()).equal(want)
    stock = type(patched).generate(patched, prompt(1, 8), **NEW, custom_generate=rejecting())
    assert stock.equal(want)
    with pytest.raises(ValueError, match=r"pillarattn\.patch"):
        plain.generate(prompt(1, 8), **NEW, custom_generate=rejecting())


@pytest.mark.parametrize("how", ["one", "batch", "stop", "in the constructor"])
def test_a_pipeline(plain, patched, tokenizer, rejecting, how):
    def text(model, assistant):
        made = assistant if how == "in the constructor" else {}
        called = {} if how == "in the constructor" else assistant
        generate = pipeline("text-generation", model=model, tokenizer=tokenizer, **made)
        if how == "batch":
            texts = ["w5 w6 w9", "w7 w8 w1 w2 w40"]
            return generate(texts, **NEW, **called, batch_size=2, return_full_text=False)
        if how == "stop":
            called = {**called, "stop_strings": ["w34"], "tokenizer": tokenizer}
        return generate("w5 w6 w9", **NEW, **called)

    pillar = rejecting()
    assert text(patched, {"assistant": pillar}) == text(plain, {})
    assert pillar.stats.drafted > 0


def test_u15_flags_that_we_cannot_honour(plain, patched, draft_model, prompt, rejecting, caplog):
    """Stock assisted decoding drops beams with only a warning; the table has all the others."""
    beams = {**NEW, "num_beams": 2}
    transformers.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        plain.generate(prompt(1, 8), **beams, assistant_model=draft_model)
    transformers.logging.disable_propagation()
    assert any("only supported with Greedy Search" in r.getMessage() for r in caplog.records)
    with pytest.raises(UnsupportedOptionError, match="num_beams=2"):
        patched.generate(prompt(1, 8), **beams, assistant=rejecting())
    for wrong in ({"k": -1}, {"s": 1.5}, {"s": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            rejecting(**wrong)
    pillar = rejecting(k=0)
    want = plain.generate(prompt(1, 8), **NEW)
    assert patched.generate(prompt(1, 8), **NEW, assistant=pillar).equal(want)
    assert pillar.stats.drafted == 0


def test_u10_no_deprecated_name_is_ours(patched, prompt, rejecting, caplog):
    """Neither in the source, nor in what a whole run makes transformers say."""
    root = Path(pillarattn.__file__).parent
    old = re.compile(r"key_cache|value_cache|to_legacy_cache|from_legacy_cache")
    for path in root.rglob("*.py"):
        found = [m for m in old.findall(path.read_text()) if path.name != "compat.py"]
        assert not found, f"{path.name}: {found}"
    transformers.logging.enable_propagation()
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        patched.generate(
            prompt(1, 8), **NEW, return_dict_in_generate=True, assistant=rejecting(),
            **{compat.cache_keyword(): pillarattn.PillarCache()},
        )  # fmt: skip
    transformers.logging.disable_propagation()
    assert not caplog.records


def test_u10_a_version_that_is_too_old_is_named_with_the_range(tiny_model, monkeypatch):
    monkeypatch.setattr(compat.transformers, "__version__", "5.16.2")
    with pytest.raises(ImportError, match=r"transformers >= 5\.17, found 5\.16\.2"):
        pillarattn.patch(tiny_model("llama"))


def test_nothing_foreign_is_written_into_a_models_files(patched, prompt, rejecting, tmp_path):
    patched.generate(prompt(1, 8), **NEW, assistant=rejecting())
    patched.save_pretrained(tmp_path)
    for name in ("config.json", "generation_config.json"):
        assert "pillar" not in (tmp_path / name).read_text()
