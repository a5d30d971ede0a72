"""A check on the metrics that one run left.

- Only files that the run wrote count: what is older belongs to the commit, or to its build.
- Metrics that are missing, damaged or not finite never pass; `was_measured` tells them from a value on the wrong side.
"""

from __future__ import annotations

import ast
import os
import tempfile
from pathlib import Path

from seatrial.metrics.checks import evaluate, undamaged
from seatrial.metrics.grammar import literal, parse, reads_data
from seatrial.metrics.read import read_run
from seatrial.model.errors import UserError
from seatrial.model.guarded import real_path
from seatrial.model.record import CheckResult
from seatrial.regress.bisect.search.noise import Threshold
from seatrial.report.text import one_line


def threshold(check: str) -> Threshold | None:
    """The limit of a check that compares one measured number with a constant; None for every other one."""
    tree = parse(check).tree
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1 or not isinstance(tree.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        return None
    below, inclusive = isinstance(tree.ops[0], ast.Lt | ast.LtE), isinstance(tree.ops[0], ast.LtE | ast.GtE)
    left, right = tree.left, tree.comparators[0]
    if (limit := literal(right)) is not None and reads_data(left):
        return Threshold(limit, below, inclusive)
    if (limit := literal(left)) is not None and reads_data(right):
        return Threshold(limit, not below, inclusive)
    return None


def measure(check: str, place: Path, started: float) -> CheckResult:
    """The check on what the run left at `place`; metrics that cannot be read, or not wholly, do not pass."""
    with tempfile.TemporaryDirectory(prefix="seatrial-fresh-") as directory:
        links = Path(directory, place.name) if place.is_file() else Path(directory)
        try:
            _link_fresh(place, started, links)
            metrics = read_run([links])
        except UserError as error:
            return CheckResult(name=check, passed=False, message=error.message.replace(str(links), str(place)))
        whole = undamaged(metrics)
        if not whole.passed:
            return CheckResult(name=check, passed=False, message=f"damaged: {whole.message.replace(str(links), str(place))}")
        return evaluate(check, metrics)


def _link_fresh(place: Path, started: float, links: Path) -> None:
    """Links to the files at `place` that the run wrote: an older file is part of the commit, or was left by a build."""
    if not place.exists():
        raise UserError(f"{place}: no such file or directory", "the command must leave its metrics there")
    single = place.is_file()
    files = [place] if single else [Path(parent) / name for parent, _, names in os.walk(place) for name in names]
    fresh = [file for file in files if file.is_file() and file.stat().st_mtime >= started]
    if files and not fresh:
        raise UserError(f"{place}: everything there is older than this run", "the command must write its metrics anew")
    for file in fresh:
        link = links if single else links / file.relative_to(place)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(real_path(file))


def was_measured(result: CheckResult) -> bool:
    """Whether the check missed by what it measured, and not for want of a value."""
    return result.message.startswith("measured ") and result.message.endswith(f", wanted {result.threshold}")


def shown(result: CheckResult) -> str:
    told = f"measured {result.value:.6g}, {result.threshold}" if isinstance(result.value, float) else result.threshold
    return one_line(f"{result.name}: {result.message or told}")
