"""Decode speed of `generate(assistant=)` beside plain `generate`, interleaved in one process.

    OMP_NUM_THREADS=2 python -m benchmarks.cpu_generate --batch 8 --length 4096 --k 4,6 --s 0.05 \
        --out benchmarks/results/cpu_generate_smollm2.jsonl

B rows sample different continuations of one prompt of worked mathematics. The prompt is run once,
by the model itself, and both sides start from copies of its cache, so that a run costs its decode
alone; the last few prompt tokens are left to each side, which seeds the first selection. Decode
time is that after the first forward pass of a call. Before any timing, greedy tokens must be equal
and sampled ones those of the same noise without drafts. Processor time stands beside wall time: on
a loaded machine it is the steadier of the two. `--prompt-phase` times whole prompts instead.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

import pillarattn
from pillarattn.evaluation.demo_model import load_model
from pillarattn.evaluation.environment import environment, source_commit
from pillarattn.evaluation.tasks.worked_maths import worked_maths
from pillarattn.patch.compat import cache_keyword

# Prompt tokens that each run reads itself.
LEFT = 16
# Of k and s: the cost gate chooses.
AUTO = "auto"


class Decoding:
    """One prompt, its cache, and timed calls of `generate` that go on from there."""

    def __init__(self, model: Any, ids: torch.Tensor, batch: int, options: dict[str, Any]) -> None:
        self.model, self.ids, self.batch = model, ids, batch
        self.options = options
        self.cache = DynamicCache(config=model.config)
        with torch.no_grad():
            for part in ids[:, :-LEFT].split(1024, dim=1):
                model(input_ids=part, logits_to_keep=1, **{cache_keyword(): self.cache})

    def run(
        self, new_tokens: int, assistant: Any = None, **options: Any
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the sequences and the seconds of decode, wall and processor."""
        cache = copy.deepcopy(self.cache)
        cache.batch_repeat_interleave(self.batch)
        marks: list[tuple[float, float]] = []
        hook = self.model.register_forward_hook(
            lambda *_: marks.append((time.perf_counter(), time.process_time()))
        )
        extra = {} if assistant is None else {"assistant": assistant}
        try:
            out = self.model.generate(
                self.ids.repeat(self.batch, 1),
                attention_mask=torch.ones(self.batch, self.ids.shape[1], dtype=torch.long),
                max_new_tokens=new_tokens,
                **{cache_keyword(): cache, **self.options, **options},
                **extra,
            )
            end = time.perf_counter(), time.process_time()
        finally:
            hook.remove()
        wall, processor = (b - a for a, b in zip(marks[0], end, strict=True))
        tokens = self.batch * (new_tokens - 1)
        return out, {
            "decode_seconds": wall,
            "processor_seconds": processor,
            "tokens_per_second": tokens / wall,
            "forwards": len(marks),
        }


def prompt_seconds(model: Any, ids: torch.Tensor, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the seconds to the first token of a whole prompt, without and with an assistant."""
    lines = []
    for chunk in (None, 512):
        for kind, extra in (
            ("plain", {}),
            ("speculative", {"assistant": pillarattn.SelfSpeculativeGenerator(6, 0.05)}),
        ):
            wall, processor = time.perf_counter(), time.process_time()
            model.generate(
                ids, max_new_tokens=1, do_sample=False, prefill_chunk_size=chunk, **options, **extra
            )
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            lines.append(
                {"kind": f"{kind} prompt", "chunk": chunk, "prompt_tokens": ids.shape[1],
                 "seconds": wall, "processor_seconds": processor}
            )  # fmt: skip
            print(f"{kind:12} prompt, chunk {chunk}: {wall:.2f} s, processor {processor:.2f} s")
    return lines


def is_lossless(decoding: Decoding, pillar: Any, tokens: int, sampling: dict[str, Any]) -> bool:
    """Whether greedy tokens are plain decoding's, and sampled ones those of seeded k = 0."""
    expected, _ = decoding.run(tokens, do_sample=False)
    got, _ = decoding.run(tokens, pillar, do_sample=False)
    if not torch.equal(expected, got):
        return False
    settings = {**pillar.config.to_dict(), "seed": 0}
    seeded, undrafted = (
        pillarattn.SelfSpeculativeGenerator(**{**settings, "k": k}) for k in (pillar.config.k, 0)
    )
    expected, _ = decoding.run(tokens, undrafted, **sampling)
    got, _ = decoding.run(tokens, seeded, **sampling)
    return torch.equal(expected, got)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=4000, help="prompt tokens at most")
    parser.add_argument("--k", default="6", help="one or more, with commas, or auto")
    parser.add_argument("--s", default="0.05", help="one or more, with commas")
    parser.add_argument("--weights", default="own,bfloat16,int8", help="of drafts, with commas")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check-tokens", type=int, default=16, help="0 leaves the check out")
    parser.add_argument("--strategy", default="pillar")
    parser.add_argument("--prompt-phase", action="store_true")
    parser.add_argument("--note", default="", help="kept in the record, such as the load")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    model, tokenizer = load_model("smollm2", device="cpu")
    ids = tokenizer(worked_maths(arguments.length, tokenizer), return_tensors="pt").input_ids
    pillarattn.patch(model)
    sampling = {"do_sample": True, "temperature": arguments.temperature, "top_k": 0, "top_p": 1.0}
    pad = {"eos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    settings = {name: value for name, value in vars(arguments).items() if name != "out"}
    lines: list[dict[str, Any]] = [
        {"environment": environment("cpu"), "commit": source_commit(), **settings}
    ]
    if arguments.prompt_phase:
        for _ in range(arguments.repeats):
            lines += prompt_seconds(model, ids, pad)
        write(arguments.out, lines)
        return 0
    decoding = Decoding(model, ids, arguments.batch, pad)
    kinds = [
        pillarattn.SelfSpeculativeGenerator(
            k if k == AUTO else int(k), s if s == AUTO else float(s), arguments.strategy,
            drafter={"name": "sparse", "weights": weights},
        )
        for k in arguments.k.split(",")
        for s in arguments.s.split(",")
        for weights in arguments.weights.split(",")
    ]  # fmt: skip
    for pillar in kinds if arguments.check_tokens else ():
        if not is_lossless(decoding, pillar, arguments.check_tokens, sampling):
            print(f"{pillar} does not give the model's own tokens", file=sys.stderr)
            return 1
    for repeat in range(arguments.repeats):
        torch.manual_seed(repeat)
        _, plain = decoding.run(arguments.new_tokens, **sampling)
        lines.append({"kind": "plain", "repeat": repeat, **plain})
        print(f"plain                   {plain['tokens_per_second']:7.2f} tok/s", flush=True)
        for pillar in kinds:
            torch.manual_seed(repeat)
            _, times = decoding.run(arguments.new_tokens, pillar, **sampling)
            lines.append(speculative_line(pillar, repeat, times, plain))
    write(arguments.out, lines)
    return 0


def speculative_line(
    pillar: Any, repeat: int, times: dict[str, float], plain: dict[str, float]
) -> dict[str, Any]:
    """Return the record of one run beside the plain run before it, and print it."""
    stats = pillar.stats
    line = {
        "kind": "speculative",
        "repeat": repeat,
        "k": pillar.config.k,
        "s": pillar.config.s,
        "weights": pillar.config.drafter["weights"],
        **times,
        "ratio": times["tokens_per_second"] / plain["tokens_per_second"],
        "processor_ratio": plain["processor_seconds"] / times["processor_seconds"],
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_length": stats.acceptance_length,
        "rounds": stats.rounds,
        "seconds_by_phase": {
            name: getattr(stats, f"{name}_seconds") for name in ("draft", "verify", "select")
        },
    }
    kind = f"k={line['k']} s={line['s']:<5} {line['weights']:9}"
    rates = f"{line['ratio']:.2f}x (processor {line['processor_ratio']:.2f}x)"
    rounds = f"accepted {stats.acceptance_rate:.2f}, {stats.acceptance_length:.2f} tokens a round"
    print(f"{kind} {times['tokens_per_second']:7.2f} tok/s  {rates}  {rounds}", flush=True)
    return line


def write(path: Path | None, lines: list[dict[str, Any]]) -> None:
    """Write the record, if one is wanted."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as record:
            record.writelines(json.dumps(line, default=str) + "\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
