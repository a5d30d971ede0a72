"""Proofs of level 2: trained weights went to the generator, by the transport that was asked for and by no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from seatrial.loops.nemo_rl.after.training import updates
from seatrial.loops.nemo_rl.after.transfer import OLDER, WHOLE, read_transfer
from seatrial.loops.nemo_rl.after.vacuity import DELTA_TRACES
from seatrial.loops.proof import proof
from seatrial.model.record import CheckResult
from seatrial.model.series import Metrics, Series
from seatrial.model.verdict import Boundary

RESHARD = "nccl_reshard bulk comm group"
PAYLOADS = "refit/transfer/payloads"
SAMPLES, MISMATCHES = "refit/delta_verify/samples", "refit/delta_verify/mismatches"


def transported(phase: str, directory: Path, text: str, metrics: Metrics) -> Iterator[CheckResult]:
    """Weights went to the generator by this transport, and by no other."""
    prefix = f"{phase}/"
    loss, series = (metrics.series.get(prefix + name) for name in ("train/loss", WHOLE))
    # The first transfer carries what both sides began with, and may be left out.
    late = [step for step in loss.steps if step > 1] if loss else []
    absent = [step for step in late if not ((series.get(step) if series else None) or 0) > 0]
    missed = f"none at step {', '.join(map(str, absent[:5]))}" if absent else ""
    name = f"trained weights were transferred at every step ({phase})"
    yield proof(name, bool(late) and not absent, f"{len(late) - len(absent)} of {len(late)} steps", Boundary.REFIT, "all", missed)
    found = read_transfer(directory / phase, metrics, prefix)
    yield proof(f"weight transfer ({phase})", found is not None, str(found or "not timed"), Boundary.REFIT)
    if phase == "delta":
        yield sparse(metrics)
        yield from (check for check in (verified(metrics),) if check)
    else:
        traces = [tag for tag in DELTA_TRACES if prefix + tag in metrics.series]
        yield proof(
            f"no sparse transport was used ({phase})", not traces, f"{len(traces)} traces of one", Boundary.REFIT, "0", ", ".join(traces)
        )
    if phase == "reshard":
        there = RESHARD in text
        yield proof("the reshard transport was set up", there, "yes" if there else "no line says so", Boundary.REFIT)


def sparse(metrics: Metrics) -> CheckResult:
    """The delta transport carried changed elements at every step after the first update."""
    changed, sent = (metrics.series.get(f"delta/{tag}") for tag in (DELTA_TRACES[0], PAYLOADS))
    older = metrics.series.get(f"delta/{OLDER}producer/sparse_encode")
    used = [series for series in ((changed, sent) if changed or sent else (older,)) if series]
    late = _after_updates(metrics)
    idle = [f"{series.tag} is {_shown(series, step)} at step {step}" for series in used for step in late if not (series.get(step) or 0) > 0]
    whole = len(used) == (2 if changed or sent else 1)
    value = "; ".join(
        f"{series.tag.removeprefix('delta/')} {min(series.values):g} to {max(series.values):g}" for series in used if series.values
    )
    name = "the delta transport carried changed elements"
    return proof(name, bool(late) and whole and not idle, value or "no trace", Boundary.REFIT, "> 0", "; ".join(idle[:2]))


def verified(metrics: Metrics) -> CheckResult | None:
    """Elements were compared on both sides after a transfer, and none differed; the older generation compares none."""
    if f"delta/{DELTA_TRACES[0]}" not in metrics.series:
        return None
    samples, wrong = (metrics.series.get(f"delta/{tag}") for tag in (SAMPLES, MISMATCHES))
    taken = sum((samples.get(step) or 0) for step in _after_updates(metrics)) if samples else 0
    differ = sum(wrong.values) if wrong else 0
    value = f"{taken:g} samples, {differ:g} differ"
    return proof("the delta transport was verified by samples", taken > 0 and not differ, value, Boundary.REFIT, "> 0, and none differs")


def _after_updates(metrics: Metrics) -> list[int]:
    """Steps whose transfer carries trained weights."""
    loss, first = metrics.series.get("delta/train/loss"), min(updates(metrics, "delta/"), default=None)
    return [step for step in loss.steps if step > first] if loss and first is not None else []


def _shown(series: Series, step: int) -> str:
    value = series.get(step)
    return "not logged" if value is None else f"{value:g}"
