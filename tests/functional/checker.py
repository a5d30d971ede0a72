"""A stand-in for upstream's check_metrics.py, with its semantics: what it lets pass (NaN that does not come first), this lets pass too.

As there, expressions are evaluated by Python; these are the tests' own.
"""

from __future__ import annotations

import builtins
import json
import statistics
import sys
from pathlib import Path
from typing import Any

Table = dict[str, Any]


def least(value: Table) -> float:
    return builtins.min(float(v) for v in value.values())


def most(value: Table) -> float:
    return builtins.max(float(v) for v in value.values())


def chosen(value: Table, start: int, end: int) -> list[float]:
    last = builtins.max(int(step) for step in value)
    start, end = start + (last + 1 if start < 0 else 0), end + (last + 1 if end <= 0 else 0)
    return [float(v) for step, v in value.items() if start <= int(step) < end]


def mean(value: Table, range_start: int = 1, range_end: int = 0) -> float:
    return statistics.mean(chosen(value, range_start, range_end))


def median(value: Table, range_start: int = 1, range_end: int = 0) -> float:
    return statistics.median(chosen(value, range_start, range_end))


def met(data: Table, check: str) -> bool:
    try:
        return bool(eval(check, {}, {"data": data, "min": least, "max": most, "mean": mean, "median": median}))  # noqa: S307
    except (KeyError, IndexError, ValueError, TypeError):
        return False


if __name__ == "__main__":
    data, checks = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:]
    results = [met(data, check) for check in checks]
    sys.stdout.write("Metric Checks".center(220).rstrip() + "\n")
    for check, passed in zip(checks, results, strict=True):
        sys.stdout.write(f"│ {'PASS' if passed else 'FAIL'}   │ {check} │\n")
    sys.exit(0 if all(results) else 1)
