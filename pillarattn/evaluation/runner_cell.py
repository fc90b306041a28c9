"""One evaluation under way: decode, check and count, batch by batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.decoding.stats import GenerationStats
from pillarattn.evaluation.batch_timing import BatchTimes, timed_batch
from pillarattn.evaluation.eval_config import EvalConfig
from pillarattn.evaluation.kept_text import KeptText
from pillarattn.evaluation.lossless_cell import check_cell, first_difference
from pillarattn.evaluation.metrics import Tally
from pillarattn.evaluation.metrics_traffic import kv_layers, traffic
from pillarattn.evaluation.predicted_speed import predicted_speedup
from pillarattn.evaluation.runner_batches import Batch
from pillarattn.evaluation.selection_trace import NothingSelectedError, trace_selection
from pillarattn.evaluation.tasks import Task

WARM_UP_TOKENS = 4


RECALL_FIELDS = ("recall", "recall_by_head", "recall_layers", "kept_text")


@dataclass(frozen=True)
class PlainRun:
    """What plain decoding of one batch gave, kept for the cells that share it."""

    sequences: Tensor
    times: BatchTimes


class Cell:
    """One evaluation under way."""

    def __init__(
        self,
        config: EvalConfig,
        model: Any,
        tokenizer: Any,
        task: Task,
        assistant: SelfSpeculativeGenerator,
        batches: list[Batch],
    ) -> None:
        self.config, self.model, self.tokenizer, self.task = config, model, tokenizer, task
        self.assistant, self.batches = assistant, batches
        self.layers = kv_layers(model)
        self.tally = Tally()
        self.lines: list[dict[str, Any]] = []
        self.options, self.end_tokens = generate_options(config, model)
        self.reports: list[dict[str, Any]] = []
        self._warm_up()

    def _warm_up(self) -> None:
        """Let first-call costs fall outside the measurement."""
        options = {**self.options, "max_new_tokens": WARM_UP_TOKENS}
        inputs = {name: tensor[:1] for name, tensor in self.batches[0].inputs.items()}
        self.model.generate(**inputs, **options, assistant=self.assistant)
        if self.config.plain:
            self.model.generate(**inputs, **options)

    def decode_plainly(self, batch: Batch) -> PlainRun:
        """Decode a batch without speculation."""
        self._set_noise()
        sequences, times = timed_batch(
            self.model, batch.inputs, end_tokens=self.end_tokens, **self.options
        )
        return PlainRun(sequences, times)

    def run_batch(self, batch: Batch, plain: PlainRun | None) -> None:
        """Decode a batch speculatively and add it to the figures."""
        self._set_noise()
        sequences, times = timed_batch(
            self.model,
            batch.inputs,
            end_tokens=self.end_tokens,
            assistant=self.assistant,
            **self.options,
        )
        stats: GenerationStats = self.assistant.stats
        width = batch.inputs["input_ids"].shape[1]
        scores = []
        for row, prompt in enumerate(batch.prompts):
            new = sequences[row, width : width + times.new_tokens[row]]
            text = self.tokenizer.decode(new, skip_special_tokens=True)
            score = self.task.score(prompt.example, text, run_code=self.config.run_code)
            scores.append(score)
            self.lines.append(
                {
                    "id": prompt.example.id,
                    "prompt_tokens": len(prompt.ids),
                    "new_tokens": times.new_tokens[row],
                    "accepted_per_round": stats.accepted_per_round[row],
                    "correct": score.correct,
                    "extracted": None if score.extracted is None else score.extracted[:200],
                    "reason": score.reason,
                    "text": text,
                }
            )
        longest = max(batch.lengths) + self.config.max_new_tokens // 2
        k = stats.draft_steps // max(1, stats.rounds)
        self.tally.add(
            stats,
            prompt_lengths=batch.lengths,
            times=times,
            plain_times=None if plain is None else plain.times,
            traffic=traffic(
                self.layers,
                stats,
                prompt_lengths=batch.lengths,
                new_tokens=times.new_tokens,
                extra_reads_per_step=self.assistant.new_strategy().extra_reads(longest, max(1, k)),
            ),
            scores=scores,
        )
        self._check(batch, sequences, plain)

    def predicted(self) -> dict[str, Any]:
        """Return what a roofline of this device would allow, as theory sees it."""
        tally, config = self.tally, self.assistant.config
        figures = tally.metrics()
        fixed = isinstance(config.k, int) and isinstance(config.s, float)
        found = None
        if fixed and tally.rounds:
            found = predicted_speedup(
                self.model,
                batch=max(len(batch.prompts) for batch in self.batches),
                length=round(figures["keys_full_per_draft_step"]),
                k=config.k,
                s=config.s,
                mean_accepted=figures["mean_accepted"],
                min_budget=config.min_budget,
            )
        return {"predicted_speedup": found}

    def _check(self, batch: Batch, sequences: Tensor, plain: PlainRun | None) -> None:
        is_first = batch is self.batches[0]
        expected = None if plain is None else plain.sequences
        report = check_cell(
            self.config,
            self.model,
            batch.inputs,
            self.assistant,
            self.options,
            got=sequences,
            expected=expected,
            is_first=is_first,
        )
        if report is not None:
            ids = [prompt.example.id for prompt in batch.prompts]
            self.reports.append(report | first_difference(report, ids))

    def verdict(self) -> dict[str, Any] | None:
        """Return the checks of all batches as one, or None if nothing was checked."""
        if not self.reports:
            return None
        failed = [report for report in self.reports if not report["lossless"]]
        shown = (failed or self.reports)[0]
        rows = sum(report["rows"] for report in self.reports)
        tokens = sum(report["new_tokens"] for report in self.reports)
        summary = f"lossless ({shown['mode']}): {tokens} new tokens in {rows} rows"
        return {
            "lossless": not failed,
            "mode": shown["mode"],
            "rows": rows,
            "new_tokens": tokens,
            "failed_batches": len(failed),
            "first_difference": shown["first_difference"],
            "law": shown["law"],
            "verdict": shown["verdict"] if failed or len(self.reports) == 1 else summary,
        }

    def recall(self) -> dict[str, Any]:
        """Return recall and kept keys on the first problem, if they were asked for."""
        wanted = min(self.config.recall_tokens, self.config.max_new_tokens)
        if not wanted or not self.assistant.config.k:
            return dict.fromkeys(RECALL_FIELDS)
        self._set_noise()
        inputs = {name: tensor[:1] for name, tensor in self.batches[0].inputs.items()}
        pad = int((inputs["attention_mask"] == 0).sum())
        inputs = {name: tensor[:, pad:] for name, tensor in inputs.items()}
        options = {**self.options, "max_new_tokens": wanted}
        try:
            trace = trace_selection(self.model, inputs, self.assistant, **options)
        except NothingSelectedError:
            return dict.fromkeys(RECALL_FIELDS)
        return {
            "recall": trace.mean_recall,
            "recall_by_head": trace.recall,
            "recall_layers": trace.layers,
            "kept_text": KeptText.newest(trace, self.tokenizer).to_dict(),
        }

    def _set_noise(self) -> None:
        if self.config.do_sample:
            torch.manual_seed(self.config.seed)


def generate_options(config: EvalConfig, model: Any) -> tuple[dict[str, Any], frozenset[int]]:
    """Return the options of `generate` for a config, and the ids that end a row."""
    options: dict[str, Any] = {
        "max_new_tokens": config.max_new_tokens,
        "do_sample": config.do_sample,
    }
    if config.do_sample:
        options |= {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
        }
    ends = model.generation_config.eos_token_id
    if config.ignore_eos:
        options["eos_token_id"] = None
        ends = None
    listed = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    return options, frozenset(listed)
