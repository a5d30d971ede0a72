"""Proofs over coverage: every runtime tensor has a known origin, every exported name arrives, nothing is left unwritten, and nothing of
the policy changes that is not exported."""

from __future__ import annotations

from collections import Counter

from seatrial.checks.probe_facts import proof
from seatrial.checks.refit_facts import Coverage, Rows, by_replica, sent_versions
from seatrial.core.records import CheckResult
from seatrial.core.verdict import Boundary

CONSUMED = "every exported name is consumed"
UNWRITTEN = "nothing is left unwritten but padding and derived tensors"
OPAQUE = "no name is outside the map"
MOVED = "no tensor changes that nothing explains"
UNEXPORTED = "nothing of the policy changes that is not exported"
DRAFT = "drafter."
MAPPED = "the coordinate map was made, and the weights restored bit for bit"
METHODS = "every tensor is proven, and how"
BITS = ("read", "forward")
KNOWN_METHODS = (*BITS, "compare")


def coverage_checks(rows: Rows) -> list[CheckResult]:
    """One result per question, over all replicas."""
    return [_map(rows), _placed(rows), _classified(rows), _consumed(rows), _unwritten(rows), _moved(rows), _opaque(rows)]


def unexported(rows: Rows) -> CheckResult:
    """A buffer that changes in the policy and is not exported is stale in every generator, whatever the refits do."""
    lost = sorted({name for row in rows.coverages for name in row.unexported or ()})
    blind = [row.replica for row in rows.coverages if row.unexported is None]
    said = ", ".join(lost[:3]) or (f"replica {blind[0]}: nobody watched the policy's own state" if blind else "")
    good = bool(rows.coverages) and not lost and not blind
    return proof(UNEXPORTED, good, f"{len(lost)} tensors do" if rows.coverages else "no facts", Boundary.REFIT, "0", said)


def _replicas(rows: Rows) -> set[str]:
    return set(by_replica(rows))


def _map(rows: Rows) -> CheckResult:
    lacking = sorted(_replicas(rows) - {row.replica for row in rows.maps})
    bad = [row.replica for row in rows.maps if not row.restored or not row.elements or not row.runs]
    value = ", ".join(f"replica {row.replica}: {row.elements} elements in {row.runs} runs" for row in rows.maps) or "no facts"
    said = "; ".join([*(f"replica {name}: no map" for name in lacking), *(f"replica {name}: not restored, or empty" for name in bad)])
    return proof(MAPPED, bool(rows.maps) and not lacking and not bad, value, Boundary.REFIT, "", said)


def _placed(rows: Rows) -> CheckResult:
    wrong = {name: text for row in rows.maps for name, text in row.misplaced.items()}
    said = "; ".join(f"{name}: {text}" for name, text in list(wrong.items())[:3])
    return proof(
        "every element is where its name says", bool(rows.maps) and not wrong, f"{len(wrong)} tensors are not", Boundary.REFIT, "0", said
    )


def _classified(rows: Rows) -> CheckResult:
    """Each runtime tensor is in exactly one class, and all that the runtime has are there."""
    lacking = sorted(_replicas(rows) - {row.replica for row in rows.coverages})
    off = [text for row in rows.coverages for text in [*_unsound(row), *_unclassified(row, rows)]]
    last = {row.replica: row for row in rows.coverages}
    value = "; ".join(
        f"replica {name}: {len(row.written)} written, {len(row.shared)} shared, {len(row.derived)} derived, "
        f"{len(row.constant)} constant{f', {len(row.moved)} moved' if row.moved else ''}"
        for name, row in last.items()
    )
    said = "; ".join([*(f"replica {name}: no coverage" for name in lacking), *off[:3]])
    good = bool(rows.coverages) and not lacking and not off and all(row.written or row.opaque for row in rows.coverages)
    return proof("every runtime tensor is classified", good, value or "no facts", Boundary.REFIT, "all", said)


def _unsound(row: Coverage) -> list[str]:
    names = Counter([*row.written, *row.shared, *row.derived, *row.moved, *row.constant])
    made = [f"{name}: in two classes" for name, count in names.items() if count > 1]
    made += [f"replica {row.replica}: {names.total()} of {row.tensors} tensors are classified"] if names.total() != row.tensors else []
    own = names.keys() - row.shared.keys()
    made += [f"{name}: shares the memory of {owner}, which is in no class" for name, owner in row.shared.items() if owner not in own]
    made += [f"{name}: idle, and not constant" for name in row.idle if name not in row.constant]
    made += [f"{name}: has padding, and is not written" for name in row.padding if name not in row.written]
    off = [name for name, pad in row.padding.items() if pad.elements != row.unwritten.get(name)]
    return made + [f"{name}: its padding is not what is unwritten of it" for name in off]


def _unclassified(row: Coverage, rows: Rows) -> list[str]:
    """Tensors that a hook saw in the worker and that are in no class. Draft models are a limitation: what they propose is verified."""
    classes = {*row.written, *row.shared, *row.derived, *row.moved, *row.constant}
    seen = {name for each in rows.hashes if each.replica == row.replica for name in each.runtime if not name.startswith(DRAFT)}
    return [f"{name}: the worker has it, and it is in no class" for name in sorted(seen - classes)]


def _consumed(rows: Rows) -> CheckResult:
    """What one rank of a replica does not take another must: a row speaks for a whole replica."""
    lost = {f"{name} ({count} elements)" for row in rows.coverages for name, count in row.unconsumed.items()}
    return proof(CONSUMED, bool(rows.coverages) and not lost, f"{len(lost)} are not", Boundary.REFIT, "0", ", ".join(sorted(lost)[:3]))


def _unwritten(rows: Rows) -> CheckResult:
    open_ = {
        f"{name} ({count} elements)" for row in rows.coverages for name, count in row.unwritten.items() if not _excused(row, name, count)
    }
    moved = {name for row in rows.coverages for name, pad in row.padding.items() if not pad.constant}
    said = ", ".join([*sorted(open_)[:3], *(f"padding of {name} changed" for name in sorted(moved)[:3])])
    return proof(UNWRITTEN, bool(rows.coverages) and not open_ and not moved, f"{len(open_)} are", Boundary.REFIT, "0", said)


def _excused(row: Coverage, name: str, count: int) -> bool:
    """A buffer that no load changes is a constant; a parameter that nothing reaches is not."""
    pad = row.padding.get(name)
    known = name in row.derived or name in row.shared or (name in row.constant and name not in row.idle)
    return known or (pad is not None and pad.constant and pad.elements == count)


def _moved(rows: Rows) -> CheckResult:
    """Rotary tables and other buffers that a refit damages: nobody can say what they should be now."""
    found = {name: how for row in rows.coverages for name, how in row.moved.items()}
    for row in rows.coverages:  # called derived without a reason that the map saw: as good as moved
        found |= {name: how for name, how in row.derived.items() if name not in row.opaque and name not in row.recomputed}
    said = "; ".join(f"{name}: {how}" for name, how in list(found.items())[:3])
    return proof(MOVED, bool(rows.coverages) and not found, f"{len(found)} do", Boundary.REFIT, "0", said)


def _opaque(rows: Rows) -> CheckResult:
    """A name that the map had to refuse cannot be read through it: it must be proven by forward or output, or it is unproven.

    So is a tensor of the runtime that no exported name stands for: no method speaks of it. Which names are exported only the hashes of
    what was sent say.
    """
    found = {name: reason for row in rows.coverages for name, reason in row.opaque.items()}
    exported = {name for each in sent_versions(rows).values() for name in each}
    other = [
        sum(row.methods.values()) == row.names and row.methods.get("forward", 0) + row.methods.get("compare", 0) for row in rows.refits
    ]
    proven = exported.issuperset(found) and bool(other) and min(other) >= len(found)
    said = "; ".join(f"{name}: {reason}" for name, reason in list(found.items())[:3])
    return proof(
        OPAQUE, bool(rows.coverages) and (not found or proven), f"{len(found)} are", Boundary.REFIT, "0, or proven otherwise", said
    )


def refused_all(rows: Rows) -> str:
    """The reason when some replica's map refused every name; "" otherwise."""
    for row in rows.coverages:
        if row.opaque and not row.written:
            name, reason = next(iter(row.opaque.items()))
            return f"{name}: {reason}"
    return ""


def coverage_limitations(rows: Rows) -> tuple[str, ...]:
    """Names that the map could not follow, what was compared with nothing, and elements with several places."""
    opaque = {name: reason for row in rows.coverages for name, reason in row.opaque.items()}
    doubled = {name for row in rows.maps for name in row.duplicates}
    derived = {name: how for row in rows.coverages for name, how in row.derived.items()}
    drafts = {name for row in rows.hashes for name in row.runtime if name.startswith(DRAFT)}
    made = [f"{len(opaque)} names are outside the map: {'; '.join(f'{n}: {r}' for n, r in list(opaque.items())[:3])}"] if opaque else []
    if derived:
        shown = "; ".join(f"{name}: {how}" for name, how in list(derived.items())[:3])
        made.append(f"{len(derived)} tensors are derived from others, and their bits are not compared: {shown}")
    constant = dict.fromkeys(name for row in rows.coverages for name in row.constant if name not in row.idle)
    if constant:
        made.append(f"{len(constant)} buffers were compared with nothing: {', '.join(list(constant)[:5])}")
    made += [f"{len(drafts)} tensors of a draft model are not proven"] if drafts else []
    return (*made, *([f"{len(doubled)} names have elements in several places (tied or replicated)"] if doubled else []))


def methods(rows: Rows) -> CheckResult:
    """Each refit says for every name how its live bits were proven."""
    short = [row for row in rows.refits if not row.refused and sum(row.methods.values()) != row.names]
    blind = [row for row in rows.refits if not row.refused and not any(row.methods.get(method) for method in BITS)]
    unknown = sorted({method for row in rows.refits for method in row.methods if method not in KNOWN_METHODS})
    last = rows.refits[-1].methods if rows.refits else {}
    value = ", ".join(f"{method} {last[method]}" for method in last) or "none"
    said = "; ".join(f"refit {row.index}: {sum(row.methods.values())} of {row.names} names" for row in short[:3])
    names = dict.fromkeys(name for row in rows.refits if not row.refused for name in row.unproven)
    more = [f"unknown: {', '.join(unknown)}" if unknown else "", f"refit {blind[0].index}: no bits were read at all" if blind else ""]
    more += [f"no method proves {', '.join(list(names)[:3])}" if names else ""]
    said = "; ".join(filter(None, [said, *more]))
    return proof(METHODS, bool(rows.refits) and not (short or unknown or blind or names), value, Boundary.REFIT, "all names", said)
