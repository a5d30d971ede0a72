"""Facts that cannot be true together. Each kind of fact is believed only as far as the others agree with it.

A fact that was lost, written twice or mixed with those of another run shows here, also where every single row looks well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from seatrial.loops.refits.rows import Refit, Rows, by_replica, sent_versions
from seatrial.probes.refit.header import KINDS, TRANSPORTS

SHOWN = 3


def contradictions(rows: Rows, own: bool, transports: Sequence[str] = ()) -> list[str]:
    """One sentence for each. `own`: a run of ours, whose rows say more than hooks can. `transports`: those asked for, if not ours."""
    found = [*_exports(rows), *_counts(rows), *_moves(rows), *_replicas(rows), *_roots(rows), *_rest(rows)]
    return [*found, *_own(rows, transports)] if own else found


def _exports(rows: Rows) -> Iterator[str]:
    """The policy exports the same names each time, and each export reaches every replica."""
    sent = sent_versions(rows)
    for (before, old), (version, new) in pairwise(sorted(sent.items())):
        if other := sorted(old.keys() ^ new.keys()):
            yield f"versions {before} and {version} were sent with different names: {', '.join(other[:SHOWN])}"
    for name, mine in by_replica(rows).items():
        lost = sorted(set(sent) - {row.version for row in mine})
        if lost:
            yield f"replica {name}: version {', '.join(map(str, lost[:SHOWN]))} was sent, and there is no refit of it"


def _counts(rows: Rows) -> Iterator[str]:
    """Counts of a refit against what was sent."""
    sent = sent_versions(rows)
    for row in rows.refits:
        if row.version in sent and row.names != len(sent[row.version]):
            yield f"{_what(row)}: {row.names} names, although {len(sent[row.version])} were sent"
        if max(row.stale_names, row.touched_names, len(row.wrong_names)) > row.names:
            yield f"{_what(row)}: more names are stale, touched or wrong than there are"


def _moves(rows: Rows) -> Iterator[str]:
    """Root, hashes and payload agree on whether a refit brought other weights."""
    sent = sent_versions(rows)
    for mine in by_replica(rows).values():
        for before, now in pairwise(mine):
            moved = now.produced != before.produced
            if before.version in sent and now.version in sent and moved != (sent[before.version] != sent[now.version]):
                yield f"{_what(now)}: by its root the weights {'moved' if moved else 'stayed'}, by their hashes they did not"
            nothing = now.changed == 0 or not now.bytes or (now.modes and set(now.modes) == {"same"})
            if moved and nothing and not now.refused:
                yield f"{_what(now)}: other weights than before, and a payload that carried nothing"


def _replicas(rows: Rows) -> Iterator[str]:
    """Whoever says anything was refitted, and no process is two replicas."""
    known = by_replica(rows)
    named = [row.replica for row in (*rows.maps, *rows.coverages, *rows.replicas, *rows.hashes) if row.replica is not None]
    for name in dict.fromkeys(named):
        if name not in known:
            yield f"replica {name}: there are facts of it, and no refit"
    lives: dict[str, set[str]] = {}
    for life, name in rows.lives():
        lives.setdefault(life, set()).add(name)
    for life, names in lives.items():
        if len(names) > 1:
            yield f"replicas {', '.join(sorted(names))} are one process: {life}"


def _roots(rows: Rows) -> Iterator[str]:
    """What a replica says it holds is what was read there."""
    found = {(row.replica, row.version): row.consumed for row in rows.refits if not row.refused}
    for row in rows.versions():
        if (row.replica, row.version) in found and row.root != found[row.replica, row.version]:
            yield f"replica {row.replica}: says that version {row.version} is {row.root}, read was {found[row.replica, row.version]}"


def _rest(rows: Rows) -> Iterator[str]:
    sent = list(sent_versions(rows).values())
    still = {name for row in rows.coverages for name in row.never_changed}
    moved = sorted(name for name in still if len({each.get(name) for each in sent}) > 1)
    if moved:
        yield f"{', '.join(moved[:SHOWN])}: never changed by the coverage, changed by the hashes"
    for compared in (rows.mismatches, rows.sampled):
        steps = [row.step for row in compared]
        if len(steps) > len(set(steps)):
            yield "log-probabilities of one step were compared twice"
        if idle := sorted(set(steps) - {row.step for row in rows.refits}):
            yield f"log-probabilities of step {', '.join(map(str, idle[:SHOWN]))}, which has no refit"
    largest = max((row.elements or 0 for row in rows.refits), default=0)
    for row in rows.maps:
        if row.elements < largest:
            yield f"replica {row.replica}: the map has {row.elements} of {largest} elements"


def _own(rows: Rows, transports: Sequence[str]) -> Iterator[str]:
    """Transports are known, sizes are said, a version has one step, and every sample was compared."""
    for row in rows.refits:
        if row.transport in transports and row.transport not in TRANSPORTS:
            continue  # a loop's own, which counts no elements
        if row.transport not in TRANSPORTS or row.kind not in KINDS:
            yield f"{_what(row)}: no such transport: {row.transport} ({row.kind})"
        if row.changed is None or row.elements is None:
            yield f"{_what(row)}: it is not said how many elements changed"
    steps = {row.version: row.step for row in rows.refits}
    for each in rows.hashes:
        if each.step != steps.get(each.version, each.step):
            yield f"what was {each.side} as version {each.version} is of step {each.step}, its refit of step {steps[each.version]}"
    drawn = Counter(row.version for row in rows.samples())
    for compared in rows.sampled:
        count = sum(drawn[version] for version, step in steps.items() if step == compared.step)
        if not count <= compared.sequences <= count + drawn[None]:  # a sample without a version is named elsewhere
            yield f"step {compared.step}: log-probabilities of {compared.sequences} samples were compared, and there are facts of {count}"


def _what(row: Refit) -> str:
    return f"refit {row.index} of replica {row.replica}"
