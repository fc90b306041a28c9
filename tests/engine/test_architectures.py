"""Any architecture: packed losslessly, or refused with the reason; never packed wrongly.

`PILLARATTN_ALL_ARCHITECTURES=1` runs every causal model type of transformers, a few without it.
"""

from __future__ import annotations

import copy
import os
import warnings

import pytest
import torch

import pillarattn
from tests.architectures import recipes
from tests.architectures.recipes.types import model_types

PACKED = ("gemma3n_text", "gemma4_text", "gpt_oss", "olmo2", "cohere2", "mixtral", "opt")
REFUSED = {
    "bamba": "recurrent states",
    "deepseek_v3": "caches latents",
    "llama4_text": "attends in chunks",
    "bart": "counts positions by itself",
    # It attends to values that it makes of what it caches; only the numbers show it.
    "diffllama": "of the logits' spread",
}
ALL = sorted(model_types()) if os.environ.get("PILLARATTN_ALL_ARCHITECTURES") == "1" else []
CONFIG = pillarattn.EngineConfig(
    kv_tokens=512, prefill_chunk=16, max_length=500,
    pillar=pillarattn.PillarConfig(k=4, s=0.25, min_budget=8, recent=2, sink=1),
)  # fmt: skip
NEW = 10


def differing(model_type):
    """Return which of three requests differ from plain decoding; raise if they are refused."""
    plain = recipes.build(model_type)
    model = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pillarattn.patch(model)
    engine = pillarattn.Engine(model, CONFIG)
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(5, 60, (n,), generator=generator).tolist() for n in (30, 9, 21)]
    outputs = engine.generate(texts, pillarattn.SamplingParams(max_tokens=NEW, ignore_eos=True))
    wrong = []
    for text, output in zip(texts, outputs, strict=True):
        ids = torch.tensor([text])
        alone = plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
            eos_token_id=None,
        )  # fmt: skip
        if list(output.token_ids) != alone[0, len(text) :].tolist():
            wrong.append((len(text), output.error))
    return wrong


@pytest.mark.parametrize("model_type", [t for t in PACKED if t in model_types()])
def test_packed_requests_get_what_they_get_alone(model_type):
    assert differing(model_type) == []


@pytest.mark.parametrize("model_type", [t for t in REFUSED if t in model_types()])
def test_what_cannot_be_packed_is_refused_with_the_reason(model_type):
    with pytest.raises(pillarattn.UnsupportedModelError, match=REFUSED[model_type]):
        differing(model_type)


@pytest.mark.parametrize("model_type", ALL)
def test_any_architecture_is_lossless_or_refused(model_type):
    try:
        assert differing(model_type) == []
    except (pillarattn.UnsupportedModelError, recipes.CannotBuild) as error:
        pytest.skip(str(error))
