"""The judge of refits: one pure function from facts to checks, for the refit probe, the embedded loop, and hooks in other frameworks.

- A fact that is missing is a missed check, and facts that contradict each other are not whole. Where hooks left the facts in another
  framework's run, some checks may be absent that hooks cannot make (base, commits, stamped samples, log-probabilities); each absence is
  then a limitation. Facts without a trace of hooks are judged as those of a run of ours.
- A map shows where elements land, not where they belong. So no tensor may be misplaced by its name, and a run of ours must have
  compared the base before its first refit. A fused tensor whose slots nobody named counts as misplaced: a swap in it is not seen.
- `token_mult_prob_error` can fail a run; it never stands for a proof of bits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from seatrial.checks import refit_coverage, refit_weights
from seatrial.checks.probe_facts import Facts, proof
from seatrial.checks.refit_facts import Mismatch, Refit, Rows, Sample, Version, by_replica, contradictions, typed
from seatrial.checks.refit_weights import Wrong, changing
from seatrial.core.records import CheckResult
from seatrial.core.verdict import Boundary
from seatrial.instruments.refit import agreement, payload_header
from seatrial.instruments.refit.agreement import OUTLIER, Ledger

WHOLE = "facts of the refits are whole"
VERSIONS = "versions grow by one on every replica"
STAMPED = "every sample is stamped with its version"
TRANSPORTS = "the transports asked for were used"
MISMATCH = "token_mult_prob_error, the weak last check"
EVERY_TRANSPORT = payload_header.TRANSPORTS
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
        refit_coverage.methods(rows),
        refit_weights.control(rows, own),
        *([refit_weights.committed(rows)] if own else []),
        *refit_coverage.coverage_checks(rows),
        *([refit_coverage.unexported(rows)] if own or any(row.unexported for row in rows.coverages) else []),
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
    return proof(WHOLE, bool(rows.refits) and not found, f"{len(found)} problems", boundary, "0", "; ".join(found[:3]) or _none(rows))


def _none(rows: Rows) -> str:
    return "" if rows.refits else "there is no fact of a refit"


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
    """Every sample carries the version that its replica held when it was asked for.

    In a run of ours it also says which life of the process made it, and each version has some; the last one where the run ends so.
    """
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
    """Samples that name a replica which held another version then."""
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
    """Those asked for carried changed weights at least once."""
    used = Counter(f"{row.transport} ({row.kind})" if row.kind else row.transport for row in _carried(rows))
    modes = Counter[str]()
    for row in _carried(rows):
        modes.update({mode: count for mode, count in row.modes.items() if (row.transport, row.kind) == ("sparse", "difference")})
    coded = f"; differences: {', '.join(f'{mode} {count}' for mode, count in sorted(modes.items()))}" if modes else ""
    value = ", ".join(f"{name} {count}" for name, count in sorted(used.items())) or "none"
    missing = unused(rows, wanted, own)
    said = f"never carried changed weights: {', '.join(missing)}" if missing else ""
    return proof(TRANSPORTS, bool(used) and not missing, value + coded, Boundary.REFIT, ", ".join(wanted), said)


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
