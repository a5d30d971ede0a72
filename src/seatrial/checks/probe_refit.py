"""probe.json of a refit probe, and its verdict: a pure function from facts to checks, a verdict and its limitations.

The shipped schema is made from these types. Any missed check is a Fail, unless the run was vacuous and the miss is only what the vacuity
leaves open: then Blocked. Pass needs every check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from seatrial.checks import refit_coverage, refit_judge, refit_weights
from seatrial.checks.probe_facts import Facts, proof
from seatrial.checks.refit_facts import Mismatch, Rows, by_replica
from seatrial.checks.refit_judge import Expected, JudgedRefits, judge_refits
from seatrial.checks.refit_weights import Wrong
from seatrial.core.files import number_to_json
from seatrial.core.records import SCHEMA_VERSION, CheckResult, Record
from seatrial.core.verdict import Boundary, Verdict
from seatrial.instruments.refit.payload_header import TRANSPORTS, UNMAPPED

__all__ = ["TRANSPORTS", "JudgedRefitProbe", "MismatchLine", "RefitLine", "RefitProbe", "RefitRequest", "Wrong"]


class RefitRequest(Record):
    """What the probe was to show."""

    source: Literal["driver", "attach", "facts"]
    """Our own driver, a server that runs already, or facts that another framework's run left."""
    engine: str = ""
    model: str = ""
    steps: int | None = None
    """Updates of the policy, each with a refit after it; None where only the facts say."""
    transports: tuple[str, ...] = ()
    """Those that must have been used; none are asked for when empty."""
    fault: str | None = None


class RefitLine(Record):
    """One refit, for the table."""

    index: int
    step: int
    version: int
    replica: str
    transport: str
    kind: str | None
    names: int
    bytes: int
    changed: int | None
    elements: int | None
    stale: int
    wrong: int
    methods: dict[str, int]
    refused: str | None


class MismatchLine(Record):
    """token_mult_prob_error of one step; non-finite numbers are marked strings."""

    step: int
    value: float | str
    p50: float | str
    p90: float | str
    p99: float | str
    max_sequence: float | str
    outlier_share: float | str
    tokens: int
    sequences: int


class JudgedRefitProbe(Record):
    """What the facts prove."""

    verdict: Verdict
    reason: str
    boundary: Boundary | None = None
    vacuous: bool = False
    checks: tuple[CheckResult, ...] = ()
    wrong: tuple[Wrong, ...] = ()
    refits: tuple[RefitLine, ...] = ()
    mismatch: tuple[MismatchLine, ...] = ()
    limitations: tuple[str, ...] = ()


class RefitProbe(Record):
    """probe.json."""

    schema_version: int = Field(default=SCHEMA_VERSION)
    probe: Literal["refit"] = "refit"
    seatrial: str
    created: str
    """UTC, ISO 8601."""
    command: tuple[str, ...]
    """How Seatrial was called, redacted."""
    wanted: RefitRequest
    python: str | None = None
    seconds: float = 0
    judged: JudgedRefitProbe


@dataclass(frozen=True, slots=True)
class _Vacuity:
    """Why the run could not have shown what was asked, and the checks that it leaves open."""

    reason: str
    leaves_open: frozenset[str]


def judge_refit_probe(facts: Facts, wanted: RefitRequest, trouble: str = "") -> JudgedRefitProbe:
    """Judge the facts of one run; `trouble` says how its process ended, when not well."""
    driven = wanted.source == "driver"
    refits = None if wanted.steps is None else wanted.steps + 1
    found = judge_refits(facts, Expected(refits, wanted.transports, driven=driven))
    first, second, *others = found.checks  # refused payloads and facts that are not whole explain how a process ended
    made = [first, second, *([_finished(trouble)] if driven else []), *others]
    vacuity = _vacuous(found, wanted)
    verdict, reason, boundary = _verdict(made, vacuity, found.wrong, found.rows, trouble)
    return JudgedRefitProbe(
        verdict=verdict,
        reason=reason,
        boundary=boundary,
        vacuous=vacuity is not None,
        checks=tuple(made),
        wrong=found.wrong,
        refits=lines(found.rows),
        mismatch=tuple(_spread(row) for row in found.rows.mismatches),
        limitations=_limitations(found.rows, wanted, found.own),
    )


def _finished(trouble: str) -> CheckResult:
    return proof("the run came to its end", not trouble, trouble or "yes", Boundary.REFIT)


def _vacuous(found: JudgedRefits, wanted: RefitRequest) -> _Vacuity | None:
    """The first reason why nothing could be shown."""
    rows = found.rows
    if not refit_weights.changing(rows):
        names = {refit_weights.CONTROL, refit_judge.TRANSPORTS, *(() if wanted.steps else (refit_weights.REFITS,))}
        return _Vacuity("vacuous: the policy's weights never changed, so every refit could have been left out unseen", frozenset(names))
    if unused := refit_judge.unused(rows, wanted.transports, found.own):
        return _Vacuity(f"vacuous: the transport asked for was never used: {', '.join(unused)}", frozenset({refit_judge.TRANSPORTS}))
    if reason := refit_coverage.refused_all(rows):
        names = {refit_coverage.UNWRITTEN, refit_coverage.CONSUMED, refit_coverage.OPAQUE, refit_coverage.METHODS, refit_weights.EQUAL}
        return _Vacuity(f"the coordinate map could not be made for any name: {reason}", frozenset(names))
    return None


def _verdict(
    made: Sequence[CheckResult], vacuity: _Vacuity | None, wrong: tuple[Wrong, ...], rows: Rows, trouble: str
) -> tuple[Verdict, str, Boundary | None]:
    missed = [check for check in made if not check.passed]
    unmapped = next((row.error for row in rows.errors if row.where == UNMAPPED), None)
    if not rows.refits and unmapped is not None:
        return Verdict.FAIL, f"the coordinate map could not be learned: {unmapped}", Boundary.REFIT
    if not rows.refits and not wrong:
        reason = f"no refit happened: {trouble or (rows.problems[0] if rows.problems else 'there is no fact of one')}"
        return Verdict.BLOCKED, reason, Boundary.ENVIRONMENT if trouble else Boundary.REFIT
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return Verdict.FAIL, f"the generator does not hold the policy's weights: {describe(wrong[0])}{more}", Boundary.REFIT
    serious = [check for check in missed if vacuity is None or check.name not in vacuity.leaves_open]
    if serious:
        first = serious[0]
        said = f": {first.message}" if first.message else ""
        return Verdict.FAIL, f"not proven: {first.name} ({first.value}){said}", first.boundary
    if vacuity is not None:
        return Verdict.BLOCKED, vacuity.reason, Boundary.REFIT
    count = len(rows.refits)
    return Verdict.PASS, f"{refit_weights.claim(rows)} after each of {count} refits, and every check was met", None


def describe(wrong: Wrong) -> str:
    looks = f": {wrong.looks}" if wrong.looks else ""
    held = f", held as {wrong.runtime}," if wrong.runtime not in ("", wrong.name) else ""
    return f"{wrong.name} (layer {wrong.layer}){held} on replica {wrong.replica} at step {wrong.step}, version {wrong.version}{looks}"


def lines(rows: Rows) -> tuple[RefitLine, ...]:
    keep = ("index", "step", "version", "replica", "transport", "kind", "names", "bytes", "changed", "elements", "methods", "refused")
    return tuple(
        RefitLine(stale=row.stale_names, wrong=len(row.wrong_names), **{key: getattr(row, key) for key in keep}) for row in rows.refits
    )


def _spread(row: Mismatch) -> MismatchLine:
    figures = {key: number_to_json(getattr(row, key)) for key in ("value", "p50", "p90", "p99", "max_sequence", "outlier_share")}
    return MismatchLine.model_validate({"step": row.step, "tokens": row.tokens, "sequences": row.sequences, **figures})


def _limitations(rows: Rows, wanted: RefitRequest, own: bool) -> tuple[str, ...]:
    made = [*refit_weights.weight_limitations(rows), *refit_coverage.coverage_limitations(rows)]
    if wanted.engine == "transformers":
        made.append("the generator was a plain transformers model: no engine's loader, packed weights or kernels took part")
    if not own:
        made += [] if rows.samples() else ["samples carried no version: nothing shows which weights each came from"]
        made += [] if rows.mismatches else ["log-probabilities were not compared"]
        made.append(
            "the export stream was taken for the policy: a fault before it, or a buffer that changes and is not exported, is not seen"
        )
        made.append(
            "the base was not compared before the first refit, which is where hooks begin: that a loader puts every element in its place "
            "is judged by names alone"
        )
        seen = ", ".join(by_replica(rows)) or "none"
        made.append(f"a generator that was never refitted leaves no fact: hold those seen ({seen}) against those that ran")
    if wanted.fault is not None:
        made.append(f"the fault {wanted.fault} was injected: a Pass would be a defect of the probe")
    return tuple(made)
