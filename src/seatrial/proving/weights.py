"""Proofs over the weights: how often they were sent, that they arrived, bit for bit, and that a missed refit would have been seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise

from seatrial.loops.proof import proof
from seatrial.loops.refits.rows import Refit, Rows, by_replica, sent_versions
from seatrial.model.record import CheckResult
from seatrial.model.verdict import Boundary
from seatrial.probes.fingerprint import layer
from seatrial.proving.naming import Hashes, Seen, differing, looks_like
from seatrial.proving.record import Wrong

REFITS = "a refit after every step"
EQUAL = "weights after each refit: bit-equal"
CONTROL = "stale weights are seen before each refit"


def changing(rows: Rows) -> list[Refit]:
    """Refits that brought other weights than the one before them to the same replica."""
    found = []
    for mine in by_replica(rows).values():
        found += [now for before, now in pairwise(mine) if now.produced != before.produced]
    return found


def wrong_tensors(rows: Rows) -> tuple[Wrong, ...]:
    """Every tensor that is not what was sent: what the run itself found, and what the hashes show beyond it."""
    sent = sent_versions(rows)
    seen = {(row.replica, row.version): Seen(row.hashes, frozenset(row.zeros), row.nans) for row in rows.hashes if row.side == "live"}
    found: list[Wrong] = []
    for row in rows.refits:
        held = seen.get((row.replica, row.version))
        names = list(dict.fromkeys([*row.wrong_names, *row.wrong, *_shown(row, sent.get(row.version), held)]))
        place = {"replica": row.replica, "step": row.step, "version": row.version}
        for name in names:
            looks = looks_like(name, row.version, sent, held) if held else ""
            runtime = str((row.wrong.get(name) or {}).get("runtime", ""))
            found.append(Wrong.model_validate({"name": name, "layer": layer(name), "looks": looks, "runtime": runtime, **place}))
    return tuple(found)


def _shown(row: Refit, sent: Hashes | None, held: Seen | None) -> Iterator[str]:
    """Names that the hashes show to be wrong. Those proven by comparing outputs have no hash of their own."""
    if sent is None or held is None or row.refused:
        return
    wrong = differing(sent, held.hashes)
    absent = [name for name in wrong if name not in held.hashes]
    yield from (name for name in wrong if name in held.hashes)
    if len(absent) > row.methods.get("compare", 0):
        yield from absent


def refits(rows: Rows, steps: int | None) -> CheckResult:
    """Each replica got the base and one refit per step, each once and in order; all of them equally many."""
    least = 2 if steps is None else steps + 1
    mine = by_replica(rows)
    broken = [name for name, each in mine.items() if any(row.index != place for place, row in enumerate(each)) or not _ordered(each, steps)]
    counts = {len(each) for each in mine.values()}
    short = len(counts) > 1 or any(count < least or (steps is not None and count != least) for count in counts)
    value = ", ".join(f"replica {name}: {len(each)}" for name, each in mine.items()) or "no refit"
    threshold = f">= {least}" if steps is None else f"{least} each"
    message = "; ".join([*(f"replica {name}: refits missing, doubled or out of order" for name in broken)])
    return proof(REFITS, bool(mine) and not broken and not short, value, Boundary.REFIT, threshold, message)


def _ordered(mine: list[Refit], steps: int | None) -> bool:
    """Steps grow; in a run of ours they are the numbers of the refits."""
    grown = all(before.step < now.step for before, now in pairwise(mine))
    return grown and (steps is None or all(row.step == row.index for row in mine))


def refused(rows: Rows) -> CheckResult:
    """Nothing that was sent was refused."""
    bad = [row for row in rows.refits if row.refused]
    said = "; ".join(f"refit {row.index} (step {row.step}, replica {row.replica}): {row.refused}" for row in bad[:3])
    return proof("no refit was refused", bool(rows.refits) and not bad, f"{len(bad)} of {len(rows.refits)}", Boundary.REFIT, "0", said)


def base(rows: Rows) -> CheckResult:
    """Before any update, both sides hold the same bits: the first refit changes nothing."""
    firsts = [each[0] for each in by_replica(rows).values()]
    off = [row for row in firsts if row.index or row.stale_names or row.touched_names or row.wrong_names or row.produced != row.consumed]
    value = "; ".join(f"replica {row.replica}: {row.stale_names} differed, {row.touched_names} touched" for row in firsts) or "no refit"
    return proof("base before any update: bit-equal", bool(firsts) and not off, value, Boundary.REFIT, "0")


def equal(rows: Rows, wrong: tuple[Wrong, ...]) -> CheckResult:
    """After each refit the runtime holds what was sent; without the hashes of both sides only the run itself says so."""
    sent, live = sent_versions(rows), {(row.replica, row.version) for row in rows.hashes if row.side == "live"}
    unseen = [row for row in rows.refits if not row.refused and (row.version not in sent or (row.replica, row.version) not in live)]
    off = [row for row in rows.refits if not _same_root(row) or not row.names]
    bad = {(item.replica, item.version) for item in wrong} | {(row.replica, row.version) for row in (*off, *unseen)}
    said = ", ".join(f"{item.name}{f' ({item.looks})' if item.looks else ''}" for item in wrong[:3])
    said = said or "; ".join(f"refit {row.index}: sent {row.produced}, found {row.consumed}" for row in off[:2])
    said = said or "; ".join(f"refit {row.index} of replica {row.replica}: no hashes of both sides" for row in unseen[:2])
    names, cast = max((row.names for row in rows.refits), default=0), len(casts(rows))
    value = f"{names} tensors{f', {cast} after the same cast' if cast else ''}, {len(bad)} of {len(rows.refits)} refits wrong"
    return proof(EQUAL, bool(rows.refits) and not bad, value, Boundary.REFIT, "all", said)


def claim(rows: Rows) -> str:
    """How many tensors are equal, and in which sense; a cast or an output is never called bits."""
    last = max(rows.refits, key=lambda row: row.names, default=None)
    names, compared = (last.names, last.methods.get("compare", 0)) if last else (0, 0)
    cast = min(len(casts(rows)), names - compared)
    parts = [f"{names - compared - cast} tensors are bit-equal"] if names > compared + cast or not names else []
    parts += [f"{cast} tensors are equal after the same cast ({_kinds(rows)})"] if cast else []
    parts += [f"{compared} tensors are right by the output of their module"] if compared else []
    return ", ".join(parts)


def casts(rows: Rows) -> dict[str, str]:
    """Names that a runtime holds in another dtype than was sent, each with both."""
    told = [*(row.casts for row in rows.maps), *(row.casts for row in rows.hashes)]
    return {name: how for each in told for name, how in each.items()}


def _kinds(rows: Rows) -> str:
    return ", ".join(dict.fromkeys(casts(rows).values()))


def _same_root(row: Refit) -> bool:
    return row.produced is not None and row.produced == row.consumed


def arrived(rows: Rows) -> list[CheckResult]:
    """What arrived is what was sent, where the arrival was seen at all."""
    sent, got = sent_versions(rows), [row for row in rows.hashes if row.side == "received"]
    if not got:
        return []
    wrong = [(row, name) for row in got for name in differing(sent.get(row.version, {}), row.hashes)]
    counts = Counter((row.replica, row.version) for row in got)
    unseen = [row for row in rows.refits if counts[row.replica, row.version] != 1]
    said = [f"{name} (version {row.version}, replica {row.replica})" for row, name in wrong[:3]]
    said += [f"version {row.version} at replica {row.replica}: seen {counts[row.replica, row.version]} times" for row in unseen[:3]]
    value = f"{len(wrong)} names differ in {len(got)} payloads"
    return [proof("what arrived is what was sent", not wrong and not unseen, value, Boundary.REFIT, "0", ", ".join(said))]


def control(rows: Rows) -> CheckResult:
    """The negative control: whenever the policy moved, the generator was seen to lag before its refit and to be touched by it."""
    moved = changing(rows)
    blind = [row for row in moved if not row.refused and _blind(row, sent_versions(rows))]
    said = "; ".join(f"refit {row.index}: {row.stale_names} seen stale, {row.touched_names} touched" for row in blind[:3])
    return proof(CONTROL, bool(moved) and not blind, f"{len(moved) - len(blind)} of {len(moved)}", Boundary.REFIT, "all", said)


def _blind(row: Refit, sent: Mapping[int, Hashes]) -> bool:
    """Whether fewer names were seen stale, or touched, than moved. Outputs are not seen to be touched."""
    before, now = sent.get(row.version - 1, {}), sent.get(row.version, {})
    moved = max(1, sum(before.get(name) != value for name, value in now.items()) if before else 1)
    return row.stale_names < moved or row.touched_names < max(1, moved - row.methods.get("compare", 0))


def weaker(rows: Rows) -> list[str]:
    """Proofs that are weaker than reading the bits themselves."""
    made = []
    compared = max((row.methods.get("compare", 0) for row in rows.refits), default=0)
    if compared:
        made.append(f"{compared} tensors were proven by the output of their module, not by their bits")
    forwarded = max((row.methods.get("forward", 0) for row in rows.refits), default=0)
    if forwarded:
        made.append(f"{forwarded} tensors were read through their layer's own forward: the sign of a zero does not show there")
    if cast := casts(rows):
        names = ", ".join(list(cast)[:3])
        made.append(
            f"{len(cast)} names are held in another dtype ({_kinds(rows)}): equal after the same cast, what it drops is not seen: {names}"
        )
    return made


def limitations(rows: Rows) -> tuple[str, ...]:
    """What is weaker than a comparison of bits, and what was never put to the test."""
    made = weaker(rows)
    if bad := nonfinite(rows):
        shown = ", ".join(f"{name} ({count})" for name, count in list(bad.items())[:5])
        made.append(f"{len(bad)} names were sent with values that are not finite: {shown}")
    still = never_changed(rows)
    if still:
        made.append(f"{len(still)} names never changed, so a missed refit of them would not be seen: {', '.join(still[:5])}")
    if rows.refits and not sent_versions(rows):
        made.append("no hashes by name were written: a mismatch has its name, but not its kind")
    return tuple(made)


def nonfinite(rows: Rows) -> dict[str, int]:
    """Names that were sent with NaN or infinity in them, and the most such elements of one refit."""
    found: dict[str, int] = {}
    for row in rows.refits:
        for name, count in row.nonfinite.items():
            found[name] = max(count, found.get(name, 0))
    return found


def never_changed(rows: Rows) -> list[str]:
    """Names that had the same bits in every version; what a replica's coverage says counts, too."""
    sent = list(sent_versions(rows).values())
    still = [name for name in sent[0] if len({version.get(name) for version in sent}) == 1] if len(sent) > 1 else []
    return list(dict.fromkeys([*still, *(name for row in rows.coverages for name in row.never_changed)]))
