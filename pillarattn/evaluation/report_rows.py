"""One tidy row a measurement, whether it was generated (`evaluate`, `sweep`) or probed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pillarattn.evaluation.eval_config import part_label, who_drafts
from pillarattn.evaluation.predicted_speed import speedup_bounds
from pillarattn.evaluation.results import parse_records, read_records
from pillarattn.evaluation.selection_trace import SelectionTrace

# Settings of a cell that change what it measures and that no field of a row holds.
_DETAILS = ("acceptance", "chat", "context_tokens", "max_new_tokens", "top_p", "top_k")
GENERATION, PROBE, TRACE = "generation", "probe", "trace"


@dataclass(frozen=True)
class ReportRow:
    """What tables and plots read; None or empty where it was not measured.

    Attributes:
        source: "generation", "probe" or "trace".
        model, task, device, dtype: what it was measured on.
        strategy, drafter, k, s, temperature: how it was decoded.
        detail: other settings, as far as they differ among the rows of a report.
        mean_accepted, acceptance_rate, acceptance_length: see `GenerationStats`.
        by_position: share of rounds that accepted draft j.
        by_length: mean accepted drafts by context length: dicts with `from`, `to`, `mean_accepted`.
        keys_share: keys that a draft step reads, of those that full attention would.
        values: the record's other figures, by name.
        recall_by_head: `[layers, Hkv]`.
        recall_layers: numbers of those layers.
    """

    source: str
    model: str
    task: str
    device: str
    dtype: str
    strategy: str
    drafter: str
    k: Any
    s: Any
    temperature: float
    mean_accepted: float
    acceptance_rate: float
    acceptance_length: float
    by_position: Sequence[float] = ()
    by_length: Sequence[Mapping[str, Any]] = ()
    keys_share: float | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    recall_by_head: Sequence[Sequence[float]] = ()
    recall_layers: Sequence[int] = ()
    detail: str = ""

    @classmethod
    def from_trace(cls, trace: SelectionTrace, *, s: float) -> ReportRow:
        """Return a row that holds only the recall of a trace, for the recall plots."""
        return cls(
            source=TRACE,
            model="",
            task=f"{len(trace.tokens)} tokens",
            device="",
            dtype="",
            strategy=trace.strategy,
            drafter="sparse",
            k=None,
            s=s,
            temperature=0.0,
            mean_accepted=0.0,
            acceptance_rate=0.0,
            acceptance_length=0.0,
            recall_by_head=trace.recall,
            recall_layers=trace.layers,
        )

    @property
    def name(self) -> str:
        """Who drafts and by which strategy, and the detail: one line of a plot."""
        who = who_drafts(self.drafter, self.strategy)
        return f"{who}, {self.detail}" if self.detail else who

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Speed-ups between which theory puts this cell; see `speedup_bounds`."""
        if self.keys_share is None:
            return None
        # With a draft length that adapts, rounds draft fewer than k.
        rounds, drafted = self.values.get("rounds"), self.values.get("drafted")
        drafts = drafted / rounds if rounds and drafted is not None else float(self.k)
        return speedup_bounds(drafts, self.acceptance_rate, self.keys_share)


@dataclass(frozen=True)
class Measurements:
    """Everything that a report is made of.

    Attributes:
        rows: what was measured.
        failed: records of cells that ended with an error.
        environments: machine lines, without repetitions.
    """

    rows: list[ReportRow]
    failed: list[dict[str, Any]] = field(default_factory=list)
    environments: list[str] = field(default_factory=list)


def load_measurements(paths: Iterable[str | Path]) -> Measurements:
    """Read result files, sweep folders and saved probes.

    Raises:
        FileNotFoundError: a path does not exist.
        ValueError: a file is none of these, or nothing was measured at all.
    """
    records: list[dict[str, Any]] = []
    probes: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for path in paths:
        where = Path(path)
        if where.is_file() and (probe := _read_probe(where)) is not None:
            probes += [(probe[0], record) for record in probe[1]]
        else:
            records += read_records(where)
    found = measurements(records, probes)
    if not found.rows and not found.failed:
        raise ValueError("there is nothing to report: no file holds a record")
    return found


def measurements(
    records: Iterable[Mapping[str, Any]],
    probes: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]] = (),
) -> Measurements:
    """Return rows of evaluation records and of probe records (each with what its probe shares)."""
    rows, failed = [], []
    machines: dict[str, None] = {}
    kept = list(records)
    varying = _varying([record["config"] for record in kept])
    for record in kept:
        if record.get("status") != "ok":
            failed.append(dict(record))
            continue
        rows.append(_generation_row(record, varying))
        machines[_machine_line(record["environment"], record.get("commit"))] = None
    for about, record in probes:
        rows.append(_probe_row(about, record))
        machines[_machine_line(about.get("environment", {}), None)] = None
    return Measurements(rows, failed, list(machines))


def short_model(name: str) -> str:
    """Return a model's name for people: of a local folder only its last part."""
    return Path(name).name if Path(name).is_absolute() or name.startswith(".") else name


def _varying(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings, other than those that rows have a place for, that are not all alike."""
    flat = [_detail_settings(config) for config in configs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    return [name for name in names if len({repr(s.get(name)) for s in flat}) > 1]


def _detail_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: config[name] for name in _DETAILS}
    return values | dict(config["options"])


def _generation_row(record: Mapping[str, Any], varying: Sequence[str]) -> ReportRow:
    config, metrics = record["config"], record["metrics"]
    drafter = config["drafter"]
    lossless = record.get("lossless")
    full = metrics["keys_full_per_draft_step"]
    settings = _detail_settings(config)
    shown = {
        **metrics,
        "lossless": None if lossless is None else lossless["lossless"],
        "verdict": None if lossless is None else lossless["verdict"],
        "batch_size": config["batch_size"],
        "hash": record["hash"],
    }
    return ReportRow(
        source=GENERATION,
        model=short_model(config["model"]),
        task=config["task"],
        device=record["environment"]["device_name"],
        dtype=config["dtype"],
        strategy=part_label(config["strategy"]),
        drafter="+".join(map(part_label, drafter if isinstance(drafter, list) else [drafter])),
        k=config["k"],
        s=config["s"],
        temperature=config["temperature"],
        mean_accepted=metrics["mean_accepted"],
        acceptance_rate=metrics["acceptance_rate"],
        acceptance_length=metrics["acceptance_length"],
        by_position=metrics["acceptance_by_position"],
        by_length=metrics["by_length"],
        keys_share=metrics["keys_read_per_draft_step"] / full if full else None,
        values=shown,
        recall_by_head=metrics.get("recall_by_head") or (),
        recall_layers=metrics.get("recall_layers") or (),
        detail=", ".join(f"{n}={settings[n]}" for n in varying if n in settings),
    )


def _probe_row(about: Mapping[str, Any], record: Mapping[str, Any]) -> ReportRow:
    return ReportRow(
        source=PROBE,
        model=short_model(str(about.get("model", ""))),
        task=Path(str(about.get("text", "text"))).stem,
        device=str(about.get("environment", {}).get("device_name", "")),
        dtype=str(about.get("dtype", "")),
        strategy=record["strategy"],
        drafter="sparse",
        k=record["k"],
        s=record["s"],
        temperature=record["temperature"],
        mean_accepted=record["mean_accepted"],
        acceptance_rate=record.get("acceptance_rate", record["mean_accepted"] / record["k"]),
        acceptance_length=record.get("acceptance_length", record["mean_accepted"] + 1),
        by_position=record.get("accepted_by_position") or (),
        by_length=record["by_length"],
        values=dict(record),
    )


def _read_probe(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """Return `about` and the records of a saved probe, or None if the file is something else.

    A probe is JSON Lines whose first line has `about`, or one JSON object with both keys.
    """
    text = path.read_text(encoding="utf-8")
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        whole = None
    if isinstance(whole, dict) and {"about", "records"} <= set(whole):
        return whole["about"], list(whole["records"])
    first, _, rest = text.partition("\n")
    try:
        head = json.loads(first)
    except json.JSONDecodeError:
        return None
    if not isinstance(head, dict) or "about" not in head:
        return None
    return head["about"], parse_records(rest.encode(), path, first_line=2)


def _machine_line(environment: Mapping[str, Any], commit: str | None) -> str:
    versions = environment.get("versions", {})
    parts = [
        str(environment.get("device_name", "unknown device")),
        f"{environment.get('threads', '?')} CPU threads",
        *(f"{name} {versions[name]}" for name in ("torch", "transformers") if versions.get(name)),
    ]
    if commit:
        parts.append(f"commit {commit[:12]}{'-dirty' if commit.endswith('-dirty') else ''}")
    return ", ".join(parts)
