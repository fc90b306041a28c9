"""Tables and figures of what `examples/sweep.py`, `pillarattn evaluate` or `sweep` measured.

Run: python examples/report.py RESULTS [FOLDER]    (default folder: report)
"""

from __future__ import annotations

import sys

from pillarattn.evaluation import load_measurements, make_report
from pillarattn.evaluation.plots import plot_acceptance_vs_s, save


def main(results: str = "sweep-example", folder: str = "report") -> None:
    """Write the whole report, and one figure by hand."""
    found = load_measurements([results])
    for path in make_report(found).write(folder):
        print(path)

    # Every figure is also a function of rows, for choices of one's own.
    pillar = [row for row in found.rows if row.strategy in ("pillar", "oracle", "uniform")]
    print(save(plot_acceptance_vs_s(pillar), f"{folder}/pillar-and-bounds.pdf"))


if __name__ == "__main__":
    main(*sys.argv[1:3])
