"""Many requests at once: prompts of different lengths, samples of one prompt, and a stream.

Run: python examples/engine.py [MODEL]    (default: the built-in smollm2, see `make demo`)
"""

from __future__ import annotations

import asyncio
import sys

import pillarattn
from pillarattn.evaluation import load_model, worked_maths


async def show(engine: pillarattn.Engine, text: str) -> None:
    """Print a request's output as it grows."""
    async for output in engine.stream(text, pillarattn.SamplingParams(max_tokens=16)):
        print("stream:", len(output.new_token_ids), "new tokens:", repr(output.text))


def main(name: str = "smollm2") -> None:
    """Decode prompts of three lengths, eight samples of one of them, and stream another."""
    model, tokenizer = load_model(name)
    config = pillarattn.EngineConfig(
        kv_tokens=8192, pillar=pillarattn.PillarConfig(k=6, s=0.1, min_budget=64)
    )
    engine = pillarattn.Engine(pillarattn.patch(model), config, tokenizer=tokenizer)
    prompts = [worked_maths(size, tokenizer) for size in (100, 200, 300)]

    greedy = pillarattn.SamplingParams(max_tokens=24)
    for output in engine.generate(prompts, greedy):
        print(f"{len(output.prompt_token_ids)} + {len(output.token_ids)} tokens in "
              f"{output.rounds} rounds, {output.acceptance_rate:.0%} of drafts accepted: "
              f"{output.text!r}")  # fmt: skip

    # As in reinforcement learning: the samples share the prompt's pages.
    rollouts = pillarattn.SamplingParams(max_tokens=12, temperature=0.8, top_p=0.95, n=8, seed=1)
    for output in engine.generate(prompts[0], rollouts):
        print(f"sample {output.request_id}: {output.text!r}")

    asyncio.run(show(engine, prompts[1]))


if __name__ == "__main__":
    main(*sys.argv[1:2])
