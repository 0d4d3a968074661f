"""One style of output for all benchmarks: a table for people, a list of objects for programs."""

from __future__ import annotations

import argparse
import json
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


def positive(text: str) -> int:
    """An argument that is a whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def print_metrics(metrics: Sequence[Metric], as_json: bool = False) -> None:
    """Print figures to standard output."""
    if as_json:
        print(json.dumps([asdict(m) for m in metrics], indent=1))
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


def format_rows(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, the first row its head; all columns but the first to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first, *others = widths
    rule = ["-" * first, *("-" * (width - 1) + ":" for width in others)]
    return "\n".join(
        f"| {' | '.join([row[0].ljust(first), *map(str.rjust, row[1:], others)])} |"
        for row in (rows[0], rule, *rows[1:])
    )


def show(value: float) -> str:
    """Four significant digits at least, thousands apart."""
    if abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.4g}"
