"""What the facts of levels 2 and 3 prove of their refits: the one judge of refits, and which process generates.

TRL's own sync has two proofs more: it sends every tensor under its name, and leaves the policy as it was.
"""

from __future__ import annotations

from seatrial.loops.facts import Facts, Row
from seatrial.loops.proof import proof
from seatrial.loops.refits.checks import EVERY_TRANSPORT, Expected, judge_refits
from seatrial.loops.refits.rows import KNOWN
from seatrial.model.record import CheckResult
from seatrial.model.verdict import Boundary

ROUNDING = 1e-5
"""How far merging adapters and taking them out again may move a frozen weight, which rounds each time: in fp32 by some 1e-8."""
SYNC = "trl"
"""The transport of TRL's own sync, as its facts name it."""


def refits(facts: Facts | None) -> list[CheckResult]:
    """Level 2: a process of our own generates."""
    other = facts.one("process", process="generator") if facts else None
    value = f"pid {other['pid']} on {other['device']}" if other else "no facts"
    found = facts.one("loaded") if facts else None
    tied = found is not None and other is not None and found["tied"] == other["tied"]
    return [
        proof("generation runs in its own process", _own(other), value, Boundary.ROLLOUT),
        proof("the generator ties what the trainer ties", tied, f"{(other or {}).get('tied')}", Boundary.REFIT),
        *_judged(facts, EVERY_TRANSPORT),
    ]


def served(facts: Facts | None, transports: tuple[str, ...] = EVERY_TRANSPORT) -> list[CheckResult]:
    """Level 3: vLLM generates."""
    other = facts.one("process", process="generator") if facts else None
    own = _own(other) and other is not None and str(other.get("engine", "")).startswith("vLLM ")
    value = f"{other.get('engine')}, pid {other['pid']}" if other else "no facts"
    python = f"{other['python']}" if other else ""
    return [proof("vLLM generates in its own process", own, value, Boundary.ROLLOUT, "", python), *_judged(facts, transports)]


def synced(facts: Facts | None, run: str, lora: bool = False) -> list[CheckResult]:
    """Level 3, where TRL's own sync brings the weights over; the names of the checks say in which run."""
    rows = facts.of("refit", transport=SYNC) if facts else []
    unsent = {name for row in rows for name in row["unsent"]}
    unknown = {name for row in rows for name in row["unknown"]}
    listed = [*(f"{name} was not sent" for name in sorted(unsent)), *(f"{name} is no name of the policy" for name in sorted(unknown))]
    moved = max((row["policy_moved_by"] for row in rows), default=None)
    bound = ROUNDING if lora else 0.0
    own = [
        proof(
            "TRL's own sync sent every tensor under its name",
            bool(rows) and not unsent and not unknown,
            f"{len(rows)} syncs, {len(unsent)} left out, {len(unknown)} under other names" if rows else "no facts",
            Boundary.REFIT,
            "all",
            ", ".join(listed[:3]),
        ),
        proof(
            "TRL's own sync leaves the policy as it was",
            moved is not None and moved <= bound,
            f"moved by up to {moved:.1e}" if moved is not None else "no facts",
            Boundary.REFIT,
            f"<= {bound:.0e}" if lora else "0",
        ),
    ]
    return [check.model_copy(update={"name": f"{check.name} ({run})"}) for check in (*own, *served(facts, (SYNC,)))]


def _own(process: Row | None) -> bool:
    return process is not None and process["pid"] != process["parent"]


def _judged(facts: Facts | None, transports: tuple[str, ...]) -> tuple[CheckResult, ...]:
    """One refit before the generation of every step, so the last version has samples, too."""
    run = facts.one("parameters", process="driver") if facts else None
    rows = tuple(row for row in facts.rows if row["fact"] in KNOWN) if facts else ()
    wanted = max(2, int(run["max_steps"])) if run else 2
    return judge_refits(Facts(rows), Expected(wanted, transports, ends_with_samples=True, driven=True)).checks
