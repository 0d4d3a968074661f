"""One style of output for all benchmarks: a table for people, a list of objects for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Metric:
    """One figure. `target` is the value to reach, None where there is none to miss."""

    name: str
    value: float
    unit: str
    target: float | None = None
    higher_is_better: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.target is None:
            return None
        return self.value >= self.target if self.higher_is_better else self.value <= self.target


def print_metrics(metrics: Sequence[Metric], as_json: bool = False) -> None:
    """Print figures to standard output."""
    if as_json:
        json.dump([asdict(m) for m in metrics], sys.stdout, indent=1)
        print()
    else:
        print(table(metrics))


def table(metrics: Sequence[Metric]) -> str:
    """Names, values with units, targets and whether they were met; columns aligned."""
    verdict = {None: "", True: "met", False: "MISSED"}
    rows = [("figure", "value", "unit", "target", "")]
    for m in metrics:
        sign = ">=" if m.higher_is_better else "<="
        bound = "" if m.target is None else f"{sign} {show(m.target)}"
        rows.append((m.name, show(m.value), m.unit, bound, verdict[m.met]))
    return format_rows(rows)


def format_rows(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows of cells with aligned columns: the first `left` to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def show(value: float) -> str:
    """Four significant digits at least, thousands apart."""
    if abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.4g}"
