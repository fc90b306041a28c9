"""A tiny model behind a test client, and what it says by itself."""

from __future__ import annotations

import pytest

import pillarattn
from pillarattn.evaluation.notebook_model import notebook_model

pytest.importorskip("fastapi", reason="the extra pillarattn[serve] is not installed")
pytest.importorskip("httpx2", reason="httpx2, which the test client needs, is not installed")

from fastapi.testclient import TestClient

from pillarattn.engine.server import create_app


@pytest.fixture(scope="module")
def parts():
    """Return the untouched model, a patched one and the tokenizer, which reads bytes."""
    plain, tokenizer = notebook_model(tiny=True)
    return plain, pillarattn.patch(notebook_model(tiny=True)[0]), tokenizer


@pytest.fixture
def engine(parts):
    config = pillarattn.EngineConfig(
        kv_tokens=2048, seed=0, preflight=False,
        pillar=pillarattn.PillarConfig(k=4, s=0.5, min_budget=8),
    )  # fmt: skip
    return pillarattn.Engine(parts[1], config, tokenizer=parts[2])


@pytest.fixture
def client(engine):
    with TestClient(create_app(engine, "tiny")) as client:
        yield client


@pytest.fixture
def alone(parts):
    plain, _, tokenizer = parts

    def text(prompt, new):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = plain.generate(ids, max_new_tokens=new, do_sample=False)
        return tokenizer.decode(out[0, ids.shape[1] :])

    return text
