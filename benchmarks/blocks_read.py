"""How many blocks of a request its drafts read between two verify passes, on the real model.

Run: python -m benchmarks.blocks_read    (some minutes on a CPU)

What no draft reads could leave the device while a request runs on. A block can be moved for one
layer (its keys of all heads lie together) or for all layers at once.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

import pillarattn
from pillarattn.evaluation import load_model, worked_maths
from pillarattn.evaluation.environment import environment

RESULTS = Path(__file__).parent / "results" / "blocks_read_smollm2_cpu.jsonl"
PROMPT, NEW, K, S, MIN_BUDGET = 3072, 48, 8, 0.05, 64


def main() -> None:
    """Decode one request and record the share of blocks that each round's selection touches."""
    model, tokenizer = load_model("smollm2")
    ids = tokenizer(worked_maths(PROMPT, tokenizer))["input_ids"][:PROMPT]
    pillar = pillarattn.PillarConfig(k=K, s=S, min_budget=MIN_BUDGET)
    engine = pillarattn.Engine(
        pillarattn.patch(model), pillarattn.EngineConfig(kv_tokens=4096, pillar=pillar)
    )
    engine.add_request(ids, pillarattn.SamplingParams(max_tokens=NEW, ignore_eos=True))
    rounds: list[dict[str, object]] = []
    while engine.has_unfinished:
        had = sum(r.rounds for r in engine.requests.values())
        engine.step()
        decoder = next(iter(engine._decoders.values()), None)
        if decoder is None or decoder.request.rounds == had:
            continue
        chosen = [s.indices[0].long() for s in decoder.keys.selections.values()]
        for size in (1, 16, 64):
            blocks = -(-decoder.length // size)
            by_layer = [len(set((i // size).flatten().tolist())) / blocks for i in chosen]
            union = torch.cat([(i // size).flatten() for i in chosen]).unique()
            rounds.append(
                {"kind": "round", "round": decoder.request.rounds, "tokens": decoder.length,
                 "block_size": size, "share_one_layer": sum(by_layer) / len(by_layer),
                 "share_all_layers": len(union) / blocks}
            )  # fmt: skip
    about = {
        "schema": 1,
        "kind": "blocks_read",
        "model": "smollm2",
        "dtype": "float32",
        "prompt": PROMPT,
        "new": NEW,
        "pillar": pillar.to_dict(),
        "environment": environment(),
        "command": "python -m benchmarks.blocks_read",
    }
    lines = [about, *rounds]
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for size in (1, 16, 64):
        mine = [r for r in rounds if r["block_size"] == size]
        one = sum(float(str(r["share_one_layer"])) for r in mine) / len(mine)
        every = sum(float(str(r["share_all_layers"])) for r in mine) / len(mine)
        print(f"blocks of {size:2}: {one:.3f} of a layer's, {every:.3f} over all layers")


if __name__ == "__main__":
    main()
