"""Run one `EvalConfig`: generate, check, measure, and return one record."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch

from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.evaluation.demo_model import load_model, resolve_device, resolve_dtype
from pillarattn.evaluation.environment import environment, machine, source_commit
from pillarattn.evaluation.eval_config import EvalConfig
from pillarattn.evaluation.results import KIND, RECORD_SCHEMA
from pillarattn.evaluation.runner_batches import digest, load_prompts, make_batches
from pillarattn.evaluation.runner_cell import Cell, PlainRun, generate_options
from pillarattn.evaluation.tasks import TASKS
from pillarattn.patch.patching import patch

PLAIN_RUNS = 8
# Fields that plain decoding does not depend on.
_SPECULATIVE = ("k", "s", "strategy", "drafter", "acceptance", "options", "lossless",
                "recall_tokens", "run_code", "plain")  # fmt: skip


class Runner:
    """Runs cells one after another, and keeps what the next one may share with the last.

    That is the model, its prompts, and plain decoding of them, which depends on no speculative
    setting: a sweep over strategies decodes plainly once.

    Args:
        device: where "auto" goes; None for the GPU if there is one.
        keep_texts: whether records hold the generated texts.
    """

    def __init__(self, *, device: str | None = None, keep_texts: bool = False) -> None:
        self.device = device
        self.keep_texts = keep_texts
        self._model: tuple[Any, ...] = ()
        self._plain: dict[str, list[PlainRun]] = {}

    def run(
        self, config: EvalConfig, *, on_batch: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """Evaluate one config and return its record.

        Args:
            on_batch: called with (batches done, batches in all).

        Raises:
            ValueError: the config does not fit the model or the data.
            ModuleNotFoundError, OSError: something that the config names is not there.
        """
        started, begun = datetime.now(UTC), time.perf_counter()
        assistant = SelfSpeculativeGenerator.from_config(config.pillar_config())
        task = TASKS.get(config.task)()
        model, tokenizer = self._load(config)
        prompts = load_prompts(config, task, tokenizer)
        batches = make_batches(config, model, tokenizer, prompts)
        cell = Cell(config, model, tokenizer, task, assistant, batches)
        key = replace(config, **_plain_fields()).hash if config.plain else ""
        plain = self._plain.get(key, [])
        reused = bool(plain)
        for number, batch in enumerate(batches):
            if config.plain and not reused:
                plain.append(cell.decode_plainly(batch))
            cell.run_batch(batch, plain[number] if config.plain else None)
            if on_batch is not None:
                on_batch(number + 1, len(batches))
        if config.plain:
            # Only a whole run is kept, and the newest few: a grid may alternate between them.
            self._plain[key] = self._plain.pop(key, plain)
            while len(self._plain) > PLAIN_RUNS:
                del self._plain[next(iter(self._plain))]
        return {
            "schema": RECORD_SCHEMA,
            "kind": KIND,
            "hash": config.hash,
            "label": config.label,
            "status": "ok",
            "config": config.to_dict(),
            "metrics": {
                **cell.tally.metrics(),
                "plain_reused": reused,
                **cell.predicted(),
                **cell.recall(),
            },
            "lossless": cell.verdict(),
            "examples": [self._example(line) for line in cell.lines],
            "data_digest": digest(prompts),
            **provenance(model.device, config.seed, started, begun),
        }

    def check(self, config: EvalConfig) -> None:
        """Load what a config names and raise what `run` would raise before it generates.

        The model is kept, so that a `run` that follows need not load it again.
        """
        model, tokenizer = self._load(config)
        task = TASKS.get(config.task)()
        make_batches(config, model, tokenizer, load_prompts(config, task, tokenizer))
        generate_options(config, model)

    def forget(self) -> None:
        """Let go of the model and of all that was kept with it."""
        self._model, self._plain = (), {}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _load(self, config: EvalConfig) -> tuple[Any, Any]:
        device = self.device if config.device == "auto" and self.device else config.device
        key = (config.model, str(resolve_device(device)), resolve_dtype(config.dtype))
        if self._model[:1] != (key,):
            # Two models at once may not fit.
            self.forget()
            model, tokenizer = load_model(config.model, device=key[1], dtype=key[2])
            patch(model)
            self._model = (key, model, tokenizer)
        return self._model[1], self._model[2]

    def _example(self, line: dict[str, Any]) -> dict[str, Any]:
        return line if self.keep_texts else {k: v for k, v in line.items() if k != "text"}


def _plain_fields() -> dict[str, Any]:
    default = EvalConfig()
    return {name: getattr(default, name) for name in _SPECULATIVE}


def provenance(device: Any, seed: int, started: datetime, begun: float) -> dict[str, Any]:
    """Return what a record says about where and when it was made."""
    return {
        "environment": environment(device),
        "machine": machine(),
        "commit": source_commit(),
        "seed": seed,
        "started_at": started.isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - begun, 3),
    }
