"""Plain and speculative decoding of one prompt: the same tokens, and what the drafts read.

Run: python examples/quickstart.py [MODEL]    (default: the built-in smollm2, see `make demo`)
"""

from __future__ import annotations

import sys

import pillarattn
from pillarattn.evaluation import load_model, worked_maths


def main(name: str = "smollm2") -> None:
    """Patch a model, generate with and without drafts, and compare."""
    model, tokenizer = load_model(name)
    inputs = tokenizer(worked_maths(800, tokenizer), return_tensors="pt").to(model.device)

    pillarattn.patch(model)
    pillar = pillarattn.SelfSpeculativeGenerator(k=8, s=0.05, strategy="pillar", min_budget=64)
    options = {"max_new_tokens": 64, "do_sample": False}
    plain = model.generate(**inputs, **options)
    fast = model.generate(**inputs, **options, assistant=pillar)
    pillarattn.unpatch(model)

    print(tokenizer.decode(fast[0, inputs["input_ids"].shape[1] :]))
    print()
    print(pillar.stats)
    print("same tokens as plain decoding:", plain.tolist() == fast.tolist())


if __name__ == "__main__":
    main(*sys.argv[1:2])
