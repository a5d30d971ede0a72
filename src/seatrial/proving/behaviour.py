"""Proofs over what happens around the weights: versions, stamped samples, transports, and the weak last check of log-probabilities."""

from __future__ import annotations

import math
from itertools import pairwise

from seatrial.loops.facts import Facts
from seatrial.loops.proof import proof
from seatrial.loops.refits.rows import Mismatch, Rows, Sample, Version, by_replica
from seatrial.model.record import CheckResult
from seatrial.model.verdict import Boundary
from seatrial.probes.engines import pairs
from seatrial.probes.refit.mismatch import OUTLIER
from seatrial.probes.refit.versions import Ledger
from seatrial.proving.weights import changing

TRANSPORTS = "the transports asked for were used"
LIMIT = 1.05
NOISE = 1e-6
MOST = 1e300


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
    return proof("versions grow by one on every replica", good, value or "no facts", Boundary.REFIT, "", "; ".join(problems[:3]))


def samples(rows: Rows, every_version: bool) -> CheckResult:
    """Every sample carries the version that its replica held when it was asked for; in a run of ours each version but the last has some."""
    before = _ledger(rows, samples=False)
    problems = [text for text in _ledger(rows, samples=True) if text not in before] + _elsewhere(rows)
    if every_version:
        drawn = {row.version for row in rows.samples()}
        last = max((row.version for row in rows.refits), default=0)
        lacking = sorted({row.version for row in rows.refits} - drawn - {last})
        problems += [f"no sample of version {', '.join(map(str, lacking[:3]))}"] if lacking else []
    count = len(rows.samples())
    return proof(
        "every sample is stamped with its version",
        bool(count) and not problems,
        f"{count} samples",
        Boundary.REFIT,
        "",
        "; ".join(problems[:3]),
    )


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
        return pairs.problems(facts.rows)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return [f"a row of the hooks cannot be read: {type(error).__name__}: {error}"]


def unused(rows: Rows, wanted: tuple[str, ...]) -> list[str]:
    """Transports that never brought changed weights."""
    used = {row.transport for row in changing(rows) if not row.refused}
    return [name for name in wanted if name not in used]


def transports(rows: Rows, wanted: tuple[str, ...]) -> CheckResult:
    """Those asked for carried changed weights at least once."""
    used = sorted({f"{row.transport} ({row.kind})" if row.kind else row.transport for row in changing(rows) if not row.refused})
    missing = unused(rows, wanted)
    return proof(
        TRANSPORTS,
        bool(used) and not missing,
        ", ".join(used) or "none",
        Boundary.REFIT,
        ", ".join(wanted),
        f"never: {', '.join(missing)}" if missing else "",
    )


def mismatch(rows: Rows, every_step: bool) -> CheckResult:
    """token_mult_prob_error after each refit: necessary, weak, and never a proof of bits."""
    there = {row.step for row in rows.mismatches}
    lacking = sorted({row.step for row in changing(rows) if not row.refused} - there) if every_step else []
    high = [row for row in rows.mismatches if not row.value < LIMIT or row.nonfinite or not _possible(row)]
    gaps = _gaps(rows)
    worst = max(rows.mismatches, key=lambda row: math.inf if math.isnan(row.value) else row.value, default=None)
    value = f"{worst.value:.6g} (p50 {worst.p50:.6g}, p99 {worst.p99:.6g}, outliers {worst.outlier_share:.1%})" if worst else "no facts"
    said = "; ".join(
        [f"step {row.step}: {row.value:.6g} over {row.tokens} tokens, {row.nonfinite} not finite" for row in high[:3]]
        + gaps[:3]
        + ([f"no value for step {', '.join(map(str, lacking[:5]))}"] if lacking else [])
    )
    return proof(
        "token_mult_prob_error, the weak last check",
        worst is not None and not high and not gaps and not lacking,
        value,
        Boundary.REFIT,
        f"< {LIMIT}",
        said,
    )


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
