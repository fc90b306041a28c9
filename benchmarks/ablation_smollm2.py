"""Acceptance on several long texts with SmolLM2-135M, teacher-forced, many settings at once.

    python -m benchmarks.ablation_smollm2 generate --problems aime24.jsonl --out aime_generated.txt
    python -m benchmarks.ablation_smollm2 table --text olympiadbench=olympiadbench.jsonl \\
        --text aime_generated=aime_generated.txt --out benchmarks/results/ablation_table_h200.jsonl
    python -m benchmarks.ablation_smollm2 ladder --calibration calibration.json --text ... --out ...

`table` is every strategy at s = 0.02, 0.05, 0.1 and k = 4, 8, 16; `ladder` adds the ingredients of
the forecast one by one, and takes some away. Texts are problem sets (.jsonl) or plain files; `code`
and `prose` stand for a module's source and the language reference that come with Python. fp32,
T = 0.6, 8192 tokens, rounds from 1024 on, no floor, the k + 2 newest tokens forced, no sinks but
for `streaming` (4). Cells are divided over processes, one a device: processes that share a GPU wait
for each other. Each line names its text and setting.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = ("pillar", "forecast", "streaming", "snapkv", "h2o", "vegas", "value_aware", "union",
         "triforce", "quest", "uniform", "oracle")  # fmt: skip
HISTORY = ("now", "average", "peak")
MOVING = (*HISTORY, "spread_now", "spread_last", "left_1", "left_2", "left_3")
MATCHED = (*MOVING, "match")
EVERY = (*MATCHED, "constant")


@dataclass(frozen=True)
class Cell:
    """One setting: a label, a strategy as a config names it, k, s and forced newest tokens."""

    label: str
    strategy: Any
    k: int = 8
    s: float = 0.05
    recent: int | None = None


def table_cells() -> list[list[Cell]]:
    """Return the settings of the table, a group for each s: groups share the pass over a text."""
    return [
        [Cell(name, name, k, s) for name in TABLE for k in (4, 8, 16)] for s in (0.05, 0.02, 0.1)
    ]


def ladder_cells(layer_weights: list[float] | None) -> list[list[Cell]]:
    """Return the settings of the ladder, in groups of similar length."""

    def forecast(**arguments: Any) -> dict[str, Any]:
        return {"name": "forecast", **arguments}

    def without(*names: str) -> tuple[str, ...]:
        return tuple(name for name in EVERY if name not in names)

    best = forecast(layer_weights=layer_weights) if layer_weights else forecast()
    steps = [
        Cell("pillar", "pillar"),
        Cell("pillar, 16 newest", "pillar", recent=16),
        Cell("history", forecast(budget="even", features=HISTORY)),
        Cell("history, moving", forecast(budget="even", features=MOVING)),
        Cell("history, moving, match", forecast(budget="even", features=MATCHED)),
        Cell("all features, even budget", forecast(budget="even")),
        Cell("forecast", forecast()),
        Cell("forecast, layer weights", best),
        Cell("forecast, layer weights, equal bytes at D=128", best, s=0.0489),
        Cell("forecast, layer weights, equal bytes at D=64", best, s=0.0478),
        Cell("oracle", "oracle"),
    ]
    ablations = [
        Cell("forecast without match", forecast(features=without("match"))),
        Cell("forecast without constant", forecast(features=without("constant"))),
        Cell("forecast without peak", forecast(features=without("peak"))),
        Cell("forecast without average", forecast(features=without("average"))),
        Cell("forecast without spreads", forecast(features=without("spread_now", "spread_last"))),
        Cell("forecast without spread_last", forecast(features=without("spread_last"))),
        Cell("forecast with every feature", forecast(features=(*EVERY, "last", "spread_average"))),
        Cell("forecast, 32-bit state", forecast(state_bits=32)),
        Cell("forecast that learns every round", forecast(learn_every=1)),
    ]
    elsewhere = [
        Cell(label, strategy, k, s)
        for k, s in ((8, 0.02), (8, 0.1), (4, 0.05), (16, 0.05))
        for label, strategy in (("pillar", "pillar"), ("forecast, layer weights", best))
    ]
    every = [*steps, *ablations, *elsewhere]
    return [every[first : first + 3] for first in range(0, len(every), 3)]


def ids_of(source: str, tokenizer: Any, tokens: int) -> Any:
    """Return the first tokens of a text: `code`, `prose`, a problem set or a plain file."""
    from pillarattn.evaluation.probe_text import problem_text, token_ids

    if source == "code":
        text = Path(argparse.__file__).read_text(encoding="utf-8")
    elif source == "prose":
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[name] for name in sorted(topics))
    elif source.endswith(".jsonl"):
        text = problem_text(source)
    else:
        text = Path(source).read_text(encoding="utf-8")
    return token_ids(text, tokenizer, max_tokens=tokens)


def measure(model: Any, ids: Any, cells: list[Cell], start: int) -> Iterator[dict[str, Any]]:
    """Yield one record a cell."""
    from pillarattn import PillarConfig
    from pillarattn.evaluation.probe import acceptance_probe

    configs = [
        PillarConfig(
            k=cell.k,
            s=cell.s,
            strategy=cell.strategy,
            min_budget=1,
            recent=cell.k + 2 if cell.recent is None else cell.recent,
            sink=4 if cell.strategy == "streaming" else 0,
        )
        for cell in cells
    ]
    found = acceptance_probe(model, ids, configs, temperature=0.6, start=start)
    for cell, record in zip(cells, found, strict=True):
        yield {"label": cell.label, **record, "seconds_of_group": found.about["seconds"]}


def work(options: argparse.Namespace, jobs: Any, lock: Any, deadline: float) -> None:
    """Take jobs until none is left or the time is up; runs in a process of its own."""
    import torch

    from pillarattn.evaluation.demo_model import load_model

    torch.set_num_threads(options.threads)
    model, tokenizer = load_model("smollm2", device=options.device, dtype="float32")
    while time.time() < deadline:
        job = jobs.get()
        if job is None:
            return
        (name, source), cells = job
        ids = ids_of(source, tokenizer, options.tokens)
        digest = hashlib.sha256(" ".join(map(str, ids.tolist())).encode()).hexdigest()
        try:
            lines = list(measure(model, ids, cells, options.start))
        except Exception as error:  # One cell's failure must not take the others along.
            failed = f"{type(error).__name__}: {error}"
            lines = [{"labels": [cell.label for cell in cells], "error": failed}]
        about = {"text": name, "ids_sha256": digest, "tokens": len(ids), "start": options.start}
        with lock, options.out.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps({**about, **line}) + "\n" for line in lines)


def generate(options: argparse.Namespace) -> None:
    """Write what the model says to each problem at T = 0.6, one text after the other."""
    import torch

    from pillarattn.evaluation.demo_model import load_model

    model, tokenizer = load_model("smollm2", device=options.device, dtype="float32")
    lines = options.problems.read_text(encoding="utf-8").splitlines()[: options.count]
    prompts = [f"Problem: {json.loads(line)['problem']}\nSolution:" for line in lines]
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
    torch.manual_seed(0)
    tokens = model.generate(
        **batch, max_new_tokens=options.new_tokens, min_new_tokens=options.new_tokens,
        do_sample=True, temperature=0.6, top_k=0, top_p=1.0,
    )  # fmt: skip
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n\n".join(texts), encoding="utf-8")


def main() -> None:
    """Divide the cells over processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", choices=("generate", "table", "ladder"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", action="append", default=[], help="NAME=code|prose|FILE")
    parser.add_argument("--problems", type=Path)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=640)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--labels", help="only these settings of the plan; several with ';'")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--start", type=int, default=1024)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no group after so long")
    options = parser.parse_args()
    if options.plan == "generate":
        generate(options)
        return
    weights = None
    if options.calibration is not None:
        weights = json.loads(options.calibration.read_text())["layer_weights"]
    groups = table_cells() if options.plan == "table" else ladder_cells(weights)
    if options.labels is not None:
        wanted = {label.strip() for label in options.labels.split(";")}
        # Together, so that the pass over a text is shared.
        groups = [[cell for group in groups for cell in group if cell.label in wanted]]
    texts = [tuple(text.split("=", 1)) for text in options.text]
    from pillarattn.evaluation.demo_model import resolve_device
    from pillarattn.evaluation.environment import environment, source_commit

    head = {"environment": environment(resolve_device(options.device)), "commit": source_commit(),
            "plan": options.plan, "model": "smollm2", "dtype": "float32",
            "temperature": 0.6}  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(head) + "\n", encoding="utf-8")
    context = multiprocessing.get_context("spawn")
    jobs, lock, begun = context.Queue(), context.Lock(), time.time()
    for group in groups:
        for text in texts:
            jobs.put((text, group))
    for _ in range(options.processes):
        jobs.put(None)
    workers = [
        context.Process(
            target=work, args=(options, jobs, lock, begun + options.seconds), daemon=True
        )
        for _ in range(options.processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    # What was not begun in time must not keep the queue's thread alive.
    jobs.cancel_join_thread()
    jobs.close()
    print(f"{options.plan}: {time.time() - begun:.0f} s, {options.out}")


if __name__ == "__main__":
    main()
