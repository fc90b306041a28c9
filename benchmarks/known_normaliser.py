"""Row scores by normalisers that drafts have left against exact ones, with SmolLM2-135M.

    python -m benchmarks.known_normaliser --dataset olympiadbench.jsonl \\
        --out benchmarks/results/known_normaliser_cpu.jsonl

The engine goes on from real texts, in rounds of 8 drafts that read 5 % of the keys. Of each verify
pass, keys are chosen by exact row scores, by those with the drafts' log-sum-exps, by the same with
each row divided by its sum, and with the log-sum-exp of the first row of the verify pass before.
What counts is the exact attention of all rows of the pass that the chosen keys hold. The first line
of the record is all layers together, each further one a layer.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pillarattn
from pillarattn.config import PillarConfig
from pillarattn.engine.config import EngineConfig
from pillarattn.engine.engine import Engine
from pillarattn.engine.mixed_step import MixedStep
from pillarattn.engine.request import SamplingParams
from pillarattn.evaluation.demo_model import load_model
from pillarattn.evaluation.environment import environment
from pillarattn.evaluation.probe_text import problem_text, token_ids

# Drafts of a round, and the share of the keys that they read.
K, S = 8, 0.05
WAYS = ("exact", "drafts", "rescaled", "before")


class Watch:
    """Looks at the queries and keys of verify passes whose drafts have left log-sum-exps."""

    def __init__(self) -> None:
        # Of each layer and way: mass of the chosen keys, one number a pass and KV head.
        self.mass: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.gaps: dict[int, list[float]] = defaultdict(list)
        self._before: dict[tuple[int, int], tuple[int, Tensor]] = {}

    def look(self, step: MixedStep, query: Tensor, layer: Any, index: int, scale: float) -> None:
        """Compare the ways of choosing in one layer of a pass; call it after the attention."""
        buffers, named = step.buffers, step.buffers.named
        if index not in buffers.sizes.scored:
            return
        at = buffers.sizes.scored.index(index)
        for seat in named["row_starts"].diff()[:-1].nonzero().flatten().tolist():
            first, end = named["row_starts"][seat : seat + 2].tolist()
            if named["drafting"][seat] or end - first < 2:
                continue
            length, rows = int(named["lengths"][seat]), end - first
            places, size = torch.arange(length), buffers.block_size
            slots = buffers.block_table[seat].long()[places // size] * size + places % size
            keys = layer.key_buffer[slots].float().transpose(0, 1)  # [Hkv, S, D]
            own = query[0, :, first:end].float().unflatten(0, (len(keys), -1))
            logits = own @ keys.unsqueeze(1).transpose(-1, -2) * scale  # [Hkv, G, rows, S]
            hidden = places > (length - rows + torch.arange(rows)).unsqueeze(1)
            logits = logits.masked_fill(hidden, -math.inf)
            lse = logits.logsumexp(-1)
            base, known = self._before.get((index, seat), (-1, lse[:, :, 0]))
            if named["score_place"][seat] > 0 and 0 <= base < length - rows + 1:
                line = torch.arange(rows).clamp_max(rows - 2)
                kept = buffers.kept.values[at, seat][line].T.unflatten(0, lse.shape[:2])
                self._compare(index, logits, lse, kept, known.unsqueeze(-1).expand_as(lse))
            # Which rows stand is known later: the first one always does.
            self._before[index, seat] = length - rows, lse[:, :, 0]

    def _compare(
        self, index: int, logits: Tensor, lse: Tensor, kept: Tensor, known: Tensor
    ) -> None:
        exact = (logits - lse.unsqueeze(-1)).exp().mean(1)  # [Hkv, rows, S]
        near = (logits - kept.unsqueeze(-1)).exp().mean(1)
        before = (logits - known.unsqueeze(-1)).exp().mean(1)
        found = exact, near, near / near.sum(-1, keepdim=True), before
        count, whole = math.ceil(S * logits.shape[-1]), exact.mean(1)
        for way, scores in zip(WAYS, found, strict=True):
            chosen = scores.sum(1).topk(count).indices
            self.mass[index][way] += whole.gather(1, chosen).sum(1).tolist()
        self.gaps[index] += (lse - kept)[:, :, :-1].flatten().tolist()

    def record(self, layers: list[int]) -> dict[str, Any]:
        """Return the mean masses of some layers, and the share that each way loses."""
        means = {w: float(torch.tensor([m for i in layers for m in self.mass[i][w]]).mean())
                 for w in WAYS}  # fmt: skip
        gaps = torch.tensor([gap for i in layers for gap in self.gaps[i]])
        return {
            "mass": means, "loss": {w: 1 - means[w] / means["exact"] for w in WAYS[1:]},
            # How far the exact one is above the draft's.
            "lse_gap": dict(zip(("p5", "median", "p95"), gaps.sort().values[
                [len(gaps) // 20, len(gaps) // 2, len(gaps) * 19 // 20]].tolist(), strict=True)),
            "cases": sum(len(self.mass[i]["exact"]) for i in layers),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--contexts", default="1024,1400,1900")
    parser.add_argument("--new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    model, tokenizer = load_model("smollm2", device="cpu", dtype="float32")
    contexts = [int(n) for n in arguments.contexts.split(",")]
    ids = token_ids(problem_text(arguments.dataset), tokenizer, max_tokens=sum(contexts)).tolist()
    ends = [sum(contexts[: i + 1]) for i in range(len(contexts))]
    config = EngineConfig(
        pillar=PillarConfig(k=K, s=S), kv_tokens=8192, seed=0, preflight=False, cruise=False
    )
    engine = Engine(pillarattn.patch(model), config)
    engine.runner.uses_buffers = True
    watch, attend = Watch(), MixedStep.attend

    def watched(step: MixedStep, query: Tensor, layer: Any, index: int, *given: Any) -> Tensor:
        out = attend(step, query, layer, index, *given)
        watch.look(step, query, layer, index, given[0].scale or query.shape[-1] ** -0.5)
        return out

    MixedStep.attend = watched  # type: ignore[method-assign, assignment]
    begun = time.perf_counter()
    outputs = engine.generate(
        [ids[end - n : end] for end, n in zip(ends, contexts, strict=True)],
        SamplingParams(max_tokens=arguments.new_tokens),
    )
    layers = sorted(watch.mass)
    about = {
        "model": "smollm2", "text": arguments.dataset.name, "contexts": contexts,
        "k": K, "s": S, "accepted": sum(o.accepted for o in outputs),
        "rounds": sum(o.rounds for o in outputs), "environment": environment("cpu"),
        "seconds": round(time.perf_counter() - begun, 1),
    }  # fmt: skip
    records = [{"layer": layer, **watch.record([layer])} for layer in layers]
    worst = max(records, key=lambda record: record["loss"]["drafts"])
    about["worst"] = {"layer": worst["layer"], "loss": worst["loss"]["drafts"]}
    records.insert(0, {"layer": "all", **watch.record(layers), **about})
    arguments.out.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(json.dumps(records[0], indent=1))


if __name__ == "__main__":
    main()
