"""Tiny models, patched once, and what each prompt gives by itself."""

from __future__ import annotations

import copy

import pytest
import torch

import pillarattn
from pillarattn.config import PillarConfig
from pillarattn.engine.config import EngineConfig
from pillarattn.engine.engine import Engine

# A quarter of the context, and at least 8 keys: drafts are wrong often enough to test something.
SPARSE = {"k": 4, "s": 0.25, "min_budget": 8, "recent": 2, "sink": 1}


@pytest.fixture(scope="session")
def prompts():
    """Return prompts of 3 to 40 tokens."""
    generator = torch.Generator().manual_seed(1)
    sizes = (3, 14, 29, 40, 7, 17)
    return [torch.randint(1, 97, (n,), generator=generator).tolist() for n in sizes]


@pytest.fixture(scope="session")
def models(tiny_model):
    """Return `models(family)`: an untouched model and a patched copy, built once."""
    built = {}

    def build(family="llama"):
        if family not in built:
            plain = tiny_model(family)
            built[family] = plain, pillarattn.patch(copy.deepcopy(plain))
        return built[family]

    return build


@pytest.fixture(scope="session")
def alone(models):
    """Return `alone(prompt, new, family)`: the new tokens of plain greedy `generate`."""
    known = {}

    def tokens(prompt, new, family="llama"):
        key = (tuple(prompt), new, family)
        if key not in known:
            ids = torch.tensor([prompt])
            out = models(family)[0].generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False
            )
            known[key] = tuple(out[0, len(prompt) :].tolist())
        return known[key]

    return tokens


@pytest.fixture
def engine(models):
    """Return `engine(family, **changes)`: an engine over a small pool; `k`, `s` go to drafts."""

    def build(family="llama", *, tokenizer=None, **changes):
        pillar = {name: changes.pop(name, value) for name, value in SPARSE.items()}
        pillar |= {n: changes.pop(n) for n in ("strategy", "drafter") if n in changes}
        config = {"kv_tokens": 1024, "prefill_chunk": 16, "seed": 0, "preflight": False, **changes}
        config["pillar"] = PillarConfig(**pillar)
        return Engine(models(family)[1], EngineConfig(**config), tokenizer=tokenizer)

    return build


@pytest.fixture
def delayed(engine):
    """Return `delayed(**changes)`: an engine that looks at a pass while the next one runs.

    Each of its steps has a plan; see `cruising` for those that do without.
    """

    def build(*arguments, cruise=False, **changes):
        run = engine(*arguments, delayed_verification=True, cruise=cruise, **changes)
        # As on a GPU: requests share one call a layer, over buffers.
        run.runner.uses_buffers = True
        return run

    return build


@pytest.fixture
def cruising(delayed):
    """Return `cruising(**changes)`: an engine that cruises whenever it can, and counts it."""

    def build(*arguments, **changes):
        run = delayed(*arguments, cruise=True, **changes)
        run.cruised, take_step = 0, run.cruise.take_step

        def counted(settle):
            plan = take_step(settle)
            run.cruised += plan is not None
            return plan

        run.cruise.take_step = counted
        return run

    return build


class Letters:
    """A tokenizer of one character a token."""

    def __call__(self, text):
        return {"input_ids": [ord(c) - 30 for c in text]}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(int(i) + 30) for i in ids)


@pytest.fixture
def letters():
    """Return a tokenizer of one character a token."""
    return Letters()
