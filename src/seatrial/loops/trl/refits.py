"""What the facts of refits prove: pure functions from facts to checks, for level 2 and for level 3, where vLLM is the generator.

Every refit delivered every bit, the first changed nothing, each later one found the generator stale, and samples carry the version
of the refit before them. How each tensor was read is known, through a map that leaves nothing out, and nothing of the trainer's model
changed that is not exported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from seatrial.loops.facts import Facts, Row
from seatrial.loops.proof import proof
from seatrial.loops.refits import coverage
from seatrial.loops.refits.rows import Rows, sent_versions, typed
from seatrial.model.record import CheckResult
from seatrial.model.verdict import Boundary

TRANSPORTS = ("full", "packed", "sparse")
"""As in `probes.refit.header`, which belongs to the other side."""
JUDGED = ("refit", "hashes", "map", "coverage", "version", "mismatch", "probe_error")
"""Facts that are read as rows of the refit probe; the others of this loop are its own."""


def refits(facts: Facts | None) -> list[CheckResult]:
    """Level 2: a process of our own generates."""
    other = facts.one("process", process="generator") if facts else None
    value = f"pid {other['pid']} on {other['device']}" if other else "no facts"
    return _proven(
        facts,
        "the generator",
        proof("generation runs in its own process", other is not None, value, Boundary.ROLLOUT),
        proof("the generator ties what the trainer ties", _same_tie(facts, other), f"{(other or {}).get('tied')}", Boundary.REFIT),
    )


def served(facts: Facts | None) -> list[CheckResult]:
    """Level 3: vLLM generates."""
    other = facts.one("process", process="generator") if facts else None
    own = other is not None and str(other.get("engine", "")).startswith("vLLM ") and other["pid"] != other["parent"]
    value = f"{other.get('engine')}, pid {other['pid']}" if other else "no facts"
    python = f"{other['python']}" if other else ""
    return _proven(facts, "vLLM", proof("vLLM generates in its own process", own, value, Boundary.ROLLOUT, "", python))


def _proven(facts: Facts | None, who: str, *own: CheckResult) -> list[CheckResult]:
    """What holds of any generator, after the level's own proofs. Rows that cannot be read leave nothing else to be said."""
    rows = typed(Facts(tuple(row for row in facts.rows if row["fact"] in JUDGED)) if facts else Facts(()))
    readable = proof(
        f"facts of {who} are whole",
        bool(rows.refits) and not rows.problems,
        f"{len(rows.problems)} problems" if rows.refits else "no facts",
        Boundary.METRICS,
        "0",
        "; ".join(rows.problems[:3]),
    )
    if facts is not None and len(rows.refits) != len(facts.of("refit")):
        return [readable]
    read = [_one_life(rows, facts), coverage.methods(rows), *coverage.checks(rows), coverage.unexported(rows)]
    return [*own, *_delivered(facts, sent_versions(rows)), *read, readable]


def _delivered(facts: Facts | None, sent: Mapping[int, Mapping[str, str]]) -> list[CheckResult]:
    """The weights arrived, each time. `sent`: the hashes of what was sent, by version; roots must differ where these do."""
    rows = facts.of("refit") if facts else []
    later = rows[1:]
    wrong = {name: str(((row.get("wrong") or {}).get(name) or {}).get("runtime", "")) for row in rows for name in row["wrong_names"]}
    bad = sum(bool(row["wrong_names"]) for row in rows)
    same = all(_same_root(row) and row["names"] > 0 for row in rows)
    told = _told(rows, sent)
    noop = bool(rows) and rows[0]["stale_names"] == 0 and rows[0]["touched_names"] == 0
    seen = [row for row in later if min(row["stale_names"], row["touched_names"]) > 0 and row["stale_max_dlogp"] is not None]
    names = rows[0]["names"] if rows else 0
    run = facts.one("parameters", process="driver") if facts else None
    steps = max(2, run["max_steps"]) if run else 2
    said = ", ".join(f"{name} (held as {place})" if place not in ("", name) else name for name, place in list(wrong.items())[:3])
    return [
        proof("a refit before every generation", bool(run) and len(rows) >= steps, f"{len(rows)} refits", Boundary.REFIT, f">= {steps}"),
        proof(
            "weights after each refit: bit-equal",
            bool(rows) and same and told and not wrong,
            f"{names} tensors, {bad} of {len(rows)} refits wrong",
            Boundary.REFIT,
            "all",
            said or ("" if told else "roots and hashes of what was sent disagree, or are missing"),
        ),
        proof("first refit changes nothing", noop, f"{rows[0]['touched_names']} touched" if rows else "no facts", Boundary.REFIT, "0"),
        proof(
            "stale weights are detected each time",
            bool(later) and len(seen) == len(later),
            f"{len(seen)} of {len(later)}",
            Boundary.REFIT,
            "all",
        ),
        *_transports(rows),
        _stamped(rows, facts.of("samples") if facts else []),
    ]


def _transports(rows: list[Row]) -> list[CheckResult]:
    """Every transport brought weights over, and a baseline was taken for the generator's only when its fingerprint said so."""
    good = [row for row in rows if row.get("committed")]
    used = Counter(row["transport"] for row in good)
    modes = Counter[str]()
    for row in good:
        if (row["transport"], row["kind"]) == ("sparse", "difference"):
            modes.update({mode: count for mode, count in row["modes"].items() if mode != "same"})
    value = ", ".join(f"{name} {used[name]}" for name in TRANSPORTS)
    coded = ", ".join(f"{mode} {count}" for mode, count in sorted(modes.items())) or "none"
    honest = all(row.get("committed") == (_same_root(row) and row["refused"] is None) for row in rows)
    sizes = all(row["bytes"] > 0 and row["elements"] > 0 for row in rows)
    return [
        proof(
            "every transport was used",
            all(used[name] for name in TRANSPORTS) and bool(modes) and sizes,
            f"{value}; differences: {coded}",
            Boundary.REFIT,
            "full, packed, sparse with a difference",
        ),
        proof(
            "committed only after the generator's fingerprint matched",
            bool(good) and honest,
            f"{len(good)} of {len(rows)} committed",
            Boundary.REFIT,
            "exactly those that are bit-equal",
        ),
    ]


def _told(rows: list[Row], sent: Mapping[int, Mapping[str, str]]) -> bool:
    """Every refit has the hashes of what was sent, of all names; roots are equal exactly where these are."""
    given = [(row["produced"], sent.get(row["version"], {})) for row in rows]
    whole = all(len(hashes) == row["names"] for row, (_, hashes) in zip(rows, given, strict=True))
    return whole and all((one[0] == two[0]) == (one[1] == two[1]) for one, two in pairwise(given))


def _same_root(row: Row) -> bool:
    return bool(row["produced"]) and row["produced"] == row["consumed"]


def _stamped(rows: list[Row], samples: list[Row]) -> CheckResult:
    """Versions grow, and each batch of samples carries the version of the refit before it."""
    versions = [row["version"] for row in rows]
    grows = all(one < two for one, two in pairwise(versions))
    held = [(row["step"], row["version"]) for row in rows]
    right = sum(one == two for one, two in zip(held, ((row["step"], row["version"]) for row in samples), strict=False))
    whole = bool(rows) and len(samples) == len(rows) == right and all(row["count"] > 0 for row in samples)
    return proof("samples carry the version of the last refit", whole and grows, f"{right} of {len(rows)} batches", Boundary.REFIT, "all")


def _same_tie(facts: Facts | None, other: Mapping[str, Any] | None) -> bool:
    found = facts.one("loaded") if facts else None
    return found is not None and other is not None and found["tied"] == other["tied"]


def _one_life(rows: Rows, facts: Facts | None) -> CheckResult:
    """The worker that samples is the one that was refitted, was never restarted, and says itself that it holds each version."""
    said = [row.get("incarnation") for row in facts.of("samples")] if facts else []
    sampled = {None if life is None else str(life) for life in said}  # as the typed rows have it; level 2 gives a pid
    lives = {row.incarnation for row in rows.refits} | {row.incarnation for row in rows.versions()} | sampled
    held = [row.version for row in rows.versions()]
    good = len(lives) == 1 and bool(held) and held == [row.version for row in rows.refits]
    value = f"{len(lives)} lives, versions {', '.join(map(str, held)) or 'none'}"
    return proof("one life of the worker holds every version and samples", good, value, Boundary.REFIT, "1, each version once")
