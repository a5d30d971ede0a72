"""The judge of refits: pure functions from facts to checks, for the refit probe, the embedded loop, and hooks in other frameworks; and
the verdict of the probe with its record, probe.json, whose shipped schema is made from these types.

- A fact that is missing is a missed check, and facts that contradict each other are not whole. Where hooks left the facts in another
  framework's run, some checks may be absent that hooks cannot make (base, commits, stamped samples, log-probabilities); each absence is
  then a limitation. Facts without a trace of hooks are judged as those of a run of ours.
- A map shows where elements land, not where they belong. So no tensor may be misplaced by its name, and a run of ours must have
  compared the base before its first refit. A fused tensor whose slots have no names counts as misplaced: a swap in it is not seen.
- `token_mult_prob_error` can fail a run; it never stands for a proof of bits.
- Any missed check is a Fail, unless the run was vacuous and the miss is only what the vacuity leaves open: then Blocked. A Pass needs
  every check.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from pydantic import Field

from seatrial.checks import refit_weights
from seatrial.checks.probe_facts import Facts, proof
from seatrial.checks.refit_facts import Mismatch, Refit, Rows, Sample, Version, by_replica, contradictions, typed
from seatrial.checks.refit_weights import Wrong, changing
from seatrial.core.files import number_to_json
from seatrial.core.records import SCHEMA_VERSION, CheckResult, Record
from seatrial.core.verdict import Boundary, Verdict
from seatrial.instruments.refit import agreement
from seatrial.instruments.refit.agreement import OUTLIER, Ledger
from seatrial.instruments.refit.payload_header import TRANSPORTS as TRANSPORTS
from seatrial.instruments.refit.payload_header import UNMAPPED

WHOLE = "facts of the refits are whole"
VERSIONS = "versions grow by one on every replica"
STAMPED = "every sample is stamped with its version"
USED = "the transports asked for were used"
MISMATCH = "token_mult_prob_error, the weak last check"
LIMIT = 1.05
NOISE = 1e-6
MOST = 1e300


@dataclass(frozen=True, slots=True)
class Expected:
    """What a run was to do, as far as it is known."""

    refits: int | None = None
    """Of each replica, the one that brings the base included; None where only the facts say."""
    transports: tuple[str, ...] = ()
    """Those that must have carried changed weights."""
    ends_with_samples: bool = False
    """Whether the generator samples after its last refit, too."""
    driven: bool = False
    """Whether a driver of ours wrote the facts; otherwise a trace of hooks excuses what hooks cannot see."""


@dataclass(frozen=True, slots=True)
class JudgedRefits:
    """The facts as rows, and what they prove."""

    rows: Rows
    own: bool
    """Whether a run of ours wrote the facts."""
    wrong: tuple[Wrong, ...]
    checks: tuple[CheckResult, ...]


def judge_refits(facts: Facts, expected: Expected) -> JudgedRefits:
    """Every check of the refits of one run. What was refused comes first: other facts are off because of it."""
    rows = typed(facts)
    own = expected.driven or not hooked(facts)
    wrong = refit_weights.wrong_tensors(rows)
    compared = bool(rows.mismatches) or any((row.stale_max_dlogp, row.fresh_max_dlogp) != (None, None) for row in rows.refits)
    checks = [
        refit_weights.refused(rows),
        whole(rows, [*unpaired(facts), *contradictions(rows, own, expected.transports)]),
        refit_weights.refits(rows, expected.refits),
        *([refit_weights.base(rows)] if own else []),
        refit_weights.equal(rows, wrong),
        *refit_weights.arrived(rows),
        refit_weights.methods(rows),
        refit_weights.control(rows, own),
        *([refit_weights.committed(rows)] if own else []),
        *refit_weights.coverage_checks(rows),
        *([refit_weights.unexported(rows)] if own or any(row.unexported for row in rows.coverages) else []),
        versions(rows),
        *([samples(rows, own, expected.ends_with_samples)] if own or rows.samples() else []),
        transports(rows, expected.transports, own),
        *([mismatch(rows, own)] if own or compared else []),
    ]
    return JudgedRefits(rows, own, wrong, tuple(checks))


def whole(rows: Rows, disagreements: Sequence[str] = ()) -> CheckResult:
    """Rows can be read and agree with each other, and policies agree with generators."""
    found = list(dict.fromkeys([*rows.problems, *disagreements]))
    boundary = Boundary.METRICS if rows.problems else Boundary.REFIT
    said = "; ".join(found[:3]) or ("" if rows.refits else "there is no fact of a refit")
    return proof(WHOLE, bool(rows.refits) and not found, f"{len(found)} problems", boundary, "0", said)


def versions(rows: Rows) -> CheckResult:
    """Versions grow by one per refit, on every replica, and no replica is late, restarted or falls back."""
    problems = _ledger(rows, samples=False)
    reported = {(row.replica, row.version) for row in rows.versions()}
    for name, mine in by_replica(rows).items():
        taken = [row.version for row in mine if not row.refused]
        problems += [f"replica {name}: begins with version {taken[0]}"] if taken and taken[0] != 1 else []
        problems += [f"replica {name}: version {b} follows {a}" for a, b in pairwise(taken) if b != a + 1]
        problems += [f"replica {name}: nothing reports version {version}" for version in taken if (name, version) not in reported]
        lives = [life for life, replica in rows.lives() if replica == name]
        problems += [f"replica {name}: restarted between refits"] if len(lives) > 1 else []
    value = ", ".join(f"replica {name}: up to {max(row.version for row in mine)}" for name, mine in by_replica(rows).items())
    good = bool(rows.versions()) and not problems
    return proof(VERSIONS, good, value or "no facts", Boundary.REFIT, "", "; ".join(problems[:3]))


def samples(rows: Rows, own: bool, ends_with_samples: bool) -> CheckResult:
    """Every sample carries the version that its replica held when it was asked for. In a run of ours it also says which life of the process
    made it, and each version has some; the last one where the run ends so."""
    before = _ledger(rows, samples=False)
    problems = [text for text in _ledger(rows, samples=True) if text not in before] + _elsewhere(rows)
    if own:
        drawn, sent = {row.version for row in rows.samples()}, {row.version for row in rows.refits}
        lacking = sorted(sent - drawn - (set() if ends_with_samples else {max(sent, default=0)}))
        problems += [f"no sample of version {', '.join(map(str, lacking[:3]))}"] if lacking else []
        bare = [row.id for row in rows.samples() if row.incarnation is None]
        problems += [f"sample {bare[0]}: of no known life of its replica"] if bare else []
    count = len(rows.samples())
    return proof(STAMPED, bool(count) and not problems, f"{count} samples", Boundary.REFIT, "", "; ".join(problems[:3]))


def _elsewhere(rows: Rows) -> list[str]:
    held: dict[str, int] = {}
    found = []
    for row in rows.replicas:
        if isinstance(row, Version):
            held[row.replica] = row.version
        elif row.version is not None and held.get(row.replica) != row.version:
            found.append(f"sample {row.id}: version {row.version}, although replica {row.replica} held {held.get(row.replica, 'none')}")
    return found


def _ledger(rows: Rows, samples: bool) -> list[str]:
    """What the ledger says when it is told the facts in the order in which they were written."""
    ledger = Ledger()
    for row in rows.replicas:
        if isinstance(row, Version):
            ledger.report(row.replica, row.version, row.root or "", row.incarnation)
        elif samples and isinstance(row, Sample):
            ledger.dispatch(row.id, row.version)
    return list(ledger.problems())


def hooked(facts: Facts) -> bool:
    """Whether hooks in another framework wrote these facts. Without a trace of them nothing excuses what they could not see."""
    return bool(facts.of("attached") or facts.of("waiting"))


def unpaired(facts: Facts) -> list[str]:
    """Hooks that ran in many processes: what policies and generators do not agree on. Nothing to say where no hook ran."""
    if not hooked(facts):
        return []
    try:
        return agreement.problems(facts.rows)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return [f"a row of the hooks cannot be read: {type(error).__name__}: {error}"]


def unused(rows: Rows, wanted: tuple[str, ...], own: bool) -> list[str]:
    """Transports that never brought changed weights; in a run of ours a sparse one must have brought a difference."""
    used = {row.transport for row in _carried(rows) if not own or row.transport != "sparse" or row.kind == "difference"}
    return [name for name in wanted if name not in used]


def _carried(rows: Rows) -> list[Refit]:
    return [row for row in changing(rows) if not row.refused]


def transports(rows: Rows, wanted: tuple[str, ...], own: bool) -> CheckResult:
    used = Counter(f"{row.transport} ({row.kind})" if row.kind else row.transport for row in _carried(rows))
    modes = Counter[str]()
    for row in _carried(rows):
        modes.update({mode: count for mode, count in row.modes.items() if (row.transport, row.kind) == ("sparse", "difference")})
    coded = f"; differences: {', '.join(f'{mode} {count}' for mode, count in sorted(modes.items()))}" if modes else ""
    value = ", ".join(f"{name} {count}" for name, count in sorted(used.items())) or "none"
    missing = unused(rows, wanted, own)
    said = f"never carried changed weights: {', '.join(missing)}" if missing else ""
    return proof(USED, bool(used) and not missing, value + coded, Boundary.REFIT, ", ".join(wanted), said)


def mismatch(rows: Rows, own: bool) -> CheckResult:
    """token_mult_prob_error after each refit, recomputed and as sampled: necessary, weak, and never a proof of bits."""
    every = (*rows.mismatches, *rows.sampled)
    lacking = _uncompared(rows) if own else []
    high = [row for row in every if not row.value < LIMIT or row.nonfinite or not _possible(row)]
    gaps = _gaps(rows)
    worst = max(every, key=lambda row: math.inf if math.isnan(row.value) else row.value, default=None)
    value = f"{worst.value:.6g} (p50 {worst.p50:.6g}, p99 {worst.p99:.6g}, outliers {worst.outlier_share:.1%})" if worst else "no facts"
    said = [f"step {row.step}, {row.of}: {row.value:.6g} over {row.tokens} tokens, {row.nonfinite} not finite" for row in high[:3]]
    said += [*gaps[:3], *lacking]
    return proof(MISMATCH, worst is not None and not said, value, Boundary.REFIT, f"< {LIMIT}", "; ".join(said))


def _uncompared(rows: Rows) -> list[str]:
    """Steps whose refit brought other weights, or was sampled from, without a comparison of log-probabilities."""
    drawn = {row.version for row in rows.samples()}
    fresh = {row.step for row in _carried(rows)} - {row.step for row in rows.mismatches}
    sampled = {row.step for row in rows.refits if row.version in drawn} - {row.step for row in rows.sampled}
    named = (("recomputed", sorted(fresh)), ("sampled", sorted(sampled)))
    return [f"no value for step {', '.join(map(str, steps[:5]))} ({what})" for what, steps in named if steps]


def _possible(row: Mismatch) -> bool:
    """Whether these figures can be those of one comparison: means of exp|difference|, their percentiles, and the largest difference."""
    ascending = [1.0, row.p50, row.p90, row.p99, row.max_sequence]
    ordered = all(low <= high for low, high in pairwise(ascending)) and 1.0 <= row.value <= row.max_sequence + NOISE
    if not ordered or not row.sequences or not row.tokens or not 0 <= row.outlier_share <= 1 or not 0 <= row.max_abs < math.log(MOST):
        return False
    if (row.outlier_share > 0) != (row.max_sequence > OUTLIER):
        return False
    most = math.exp(row.max_abs)
    return row.max_sequence <= most + NOISE and (most - 1) / row.tokens <= row.value - 1 + NOISE


def _gaps(rows: Rows) -> list[str]:
    """Largest differences that a refit itself tells: finite, and not above those of the comparison at its step."""
    largest = {row.step: row.max_abs for row in rows.mismatches}
    found = []
    for row in rows.refits:
        given = [gap for gap in (row.stale_max_dlogp, row.fresh_max_dlogp) if gap is not None]
        over = row.fresh_max_dlogp is not None and row.fresh_max_dlogp > largest.get(row.step, math.inf) + NOISE
        if over or not all(0 <= gap < math.inf for gap in given):
            found.append(f"refit {row.index}: log-probabilities differ by {row.stale_max_dlogp} before and {row.fresh_max_dlogp} after")
    return found


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
    ended = proof("the run came to its end", not trouble, trouble or "yes", Boundary.REFIT)
    made = [first, second, *([ended] if driven else []), *others]
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


def _vacuous(found: JudgedRefits, wanted: RefitRequest) -> _Vacuity | None:
    rows = found.rows
    if not refit_weights.changing(rows):
        names = {refit_weights.CONTROL, USED, *(() if wanted.steps else (refit_weights.REFITS,))}
        return _Vacuity("vacuous: the policy's weights never changed, so every refit could have been left out unseen", frozenset(names))
    if idle := unused(rows, wanted.transports, found.own):
        return _Vacuity(f"vacuous: the transport asked for was never used: {', '.join(idle)}", frozenset({USED}))
    if reason := refit_weights.refused_all(rows):
        names = {refit_weights.UNWRITTEN, refit_weights.CONSUMED, refit_weights.OPAQUE, refit_weights.METHODS, refit_weights.EQUAL}
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
    made = [*refit_weights.weight_limitations(rows), *refit_weights.coverage_limitations(rows)]
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
