"""Proofs over what happens around the weights: versions, stamped samples, transports, and the weak last check of log-probabilities."""

from __future__ import annotations

import math
from itertools import pairwise

from seatrial.loops.facts import Facts
from seatrial.loops.proof import proof
from seatrial.model.record import CheckResult
from seatrial.model.verdict import Boundary
from seatrial.probes.engines import pairs
from seatrial.probes.refit.versions import Ledger
from seatrial.proving.rows import Rows, Sample, Version
from seatrial.proving.weights import by_replica, changing

PAIRED = "policies and generators agree on every refit"
TRANSPORTS = "the transports asked for were used"
LIMIT = 1.05


def versions(rows: Rows) -> CheckResult:
    """Versions grow by one per refit, on every replica, and no replica is late, restarted or falls back."""
    problems = _ledger(rows, samples=False)
    reported = {(row.replica, row.version) for row in rows.versions()}
    for name, mine in by_replica(rows).items():
        taken = [row.version for row in mine if not row.refused]
        problems += [f"replica {name}: version {b} follows {a}" for a, b in pairwise(taken) if b != a + 1]
        problems += [f"replica {name}: nothing reports version {version}" for version in taken if (name, version) not in reported]
        lives = {row.incarnation for row in mine} | {row.incarnation for row in rows.versions() if row.replica == name}
        problems += [f"replica {name}: restarted between refits"] if len(lives - {None}) > 1 else []
    value = ", ".join(f"replica {name}: up to {max(row.version for row in mine)}" for name, mine in by_replica(rows).items())
    good = bool(rows.versions()) and not problems
    return proof("versions grow by one on every replica", good, value or "no facts", Boundary.REFIT, "", "; ".join(problems[:3]))


def samples(rows: Rows) -> CheckResult:
    """Every sample carries the version that was held when it was asked for."""
    before = _ledger(rows, samples=False)
    problems = [text for text in _ledger(rows, samples=True) if text not in before]
    count = len(rows.samples())
    return proof(
        "every sample is stamped with its version",
        bool(count) and not problems,
        f"{count} samples",
        Boundary.REFIT,
        "",
        "; ".join(problems[:3]),
    )


def _ledger(rows: Rows, samples: bool) -> list[str]:
    """What the ledger says when it is told the facts in the order in which they were written."""
    ledger = Ledger()
    for row in rows.replicas:
        if isinstance(row, Version):
            ledger.report(row.replica, row.version, row.root or "", row.incarnation)
        elif samples and isinstance(row, Sample):
            ledger.dispatch(row.id, row.version)
    return list(ledger.problems())


def paired(facts: Facts) -> list[CheckResult]:
    """Hooks that ran in many processes: policies and generators agree on every refit. Nothing to say where no hook ran."""
    if not facts.of("attached"):
        return []
    try:
        found = pairs.problems(facts.rows)
    except (KeyError, TypeError) as error:
        found = [f"a row of the hooks cannot be read: {type(error).__name__}: {error}"]
    return [proof(PAIRED, not found, f"{len(found)} problems", Boundary.REFIT, "0", "; ".join(found[:3]))]


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
    high = [row for row in rows.mismatches if not math.isfinite(row.value) or row.value >= LIMIT or row.nonfinite or not row.tokens]
    worst = max(rows.mismatches, key=lambda row: math.inf if math.isnan(row.value) else row.value, default=None)
    value = f"{worst.value:.6g} (p50 {worst.p50:.6g}, p99 {worst.p99:.6g}, outliers {worst.outlier_share:.1%})" if worst else "no facts"
    said = "; ".join(
        [f"step {row.step}: {row.value:.6g}, {row.nonfinite} not finite" for row in high[:3]]
        + ([f"no value for step {', '.join(map(str, lacking[:5]))}"] if lacking else [])
    )
    return proof(
        "token_mult_prob_error, the weak last check",
        worst is not None and not high and not lacking,
        value,
        Boundary.REFIT,
        f"< {LIMIT}",
        said,
    )
