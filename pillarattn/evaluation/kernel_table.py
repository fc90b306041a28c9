"""What `bench kernels` measured, as tables: each op beside what else computes it, run by run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pillarattn.evaluation.report_tables import ReportTable

Record = Mapping[str, Any]
# Ours; what it is compared with was measured in the same run.
OWN = "triton"
HEADINGS = ("shape", "implementation", "us", "least..most", "TB/s", "of a read as large", "ours is")


@dataclass(frozen=True)
class KernelCell:
    """One shape of one op in one run.

    Attributes:
        op: its name.
        shape: its sizes.
        machine: the run's first record.
        own: our record, with default tiles.
        others: what computed the same in the same run, rivals first as they came.
    """

    op: str
    shape: Mapping[str, Any]
    machine: Record
    own: Record
    others: Sequence[Record]

    @property
    def label(self) -> str:
        """The shape in words."""
        return shape_label(self.shape)


def kernel_cells(records: Iterable[Record]) -> list[KernelCell]:
    """Return each shape of each op, op by op, as the last run that measured it found it.

    Args:
        records: lines of one or more files of `bench kernels`, older runs first; records of a
            sweep (other tiles than the default ones) and failures are left out.

    Raises:
        ValueError: a measurement stands before any machine.
    """
    found: dict[tuple[str, str], dict[str, Record]] = {}
    machines: dict[tuple[str, str], Record] = {}
    machine: Record | None = None
    for record in records:
        if record.get("kind") == "machine":
            machine = record
            continue
        if "median_us" not in record or record.get("tiles") is not None:
            continue
        if machine is None:
            raise ValueError("the first record must be of kind 'machine'; is the file cut?")
        key = record["op"], shape_label(record["shape"])
        if machines.get(key) is not machine:
            found[key], machines[key] = {}, machine
        found[key][record["implementation"]] = record
    ops = list(dict.fromkeys(op for op, _ in found))
    return [
        KernelCell(
            op, cell[OWN]["shape"], machines[op, label], cell[OWN],
            [record for name, record in cell.items() if name != OWN],
        )
        for (op, label), cell in sorted(found.items(), key=lambda item: ops.index(item[0][0]))
        if OWN in cell
    ]  # fmt: skip


def kernel_tables(records: Iterable[Record]) -> list[ReportTable]:
    """Return a table for each op; see `kernel_cells`."""
    cells = kernel_cells(records)
    tables = []
    for op in dict.fromkeys(cell.op for cell in cells):
        rows = [row for cell in cells if cell.op == op for row in _rows(cell)]
        tables.append(ReportTable(op, op, HEADINGS, rows))
    return tables


def shape_label(shape: Mapping[str, Any]) -> str:
    """Return a shape in words: `batch=32 length=16384`, flags by their name where they are set."""
    parts = []
    for name, value in shape.items():
        if isinstance(value, bool):
            parts += [name] if value else []
        else:
            parts.append(f"{name}={value}")
    return " ".join(parts)


def _rows(cell: KernelCell) -> list[tuple[Any, ...]]:
    rows = []
    for record in (cell.own, *cell.others):
        is_own = record is cell.own
        rows.append(
            (
                cell.label if is_own else "",
                record["implementation"],
                f"{record['median_us']:,.1f}",
                f"{record['least_us']:,.1f}..{record['most_us']:,.1f}",
                f"{record['tbps']:.2f}",
                f"{record['share_of_matched']:.2f}",
                "" if is_own else f"{record['median_us'] / cell.own['median_us']:.2f}x as fast",
            )
        )
    return rows
