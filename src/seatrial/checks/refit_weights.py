"""Checks of a refit: weights were sent, arrived bit for bit, and a missed refit would have been seen; every runtime tensor has a known
origin, every exported name arrives, nothing is left unwritten, and nothing of the policy changes that is not exported.

A wrong tensor gets a kind by hashes alone, and only where it is certain: one explanation fits and no other does. Two tensors of the
same bits (norms of ones) explain each other equally well; such a tensor only "differs".

- `stale`: the bits of an older version of the same name; `shifted layer`: of the same tensor in a neighbouring layer.
- `swapped`: the bits of another name, which in turn holds those of this one; `other name`: of another name, which holds something else.
- `zero`, `NaN`: seen by the process that read the tensor; a hash cannot say it.
- `torn`, `output`, `moved`: what a driver writes in the place of a hash when copies of a tied weight disagree, a module computes
  something else than its weights say, or a buffer changed that nothing was sent for.
- `not there`: the name was sent and nothing was read for it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from seatrial.checks.probe_facts import proof
from seatrial.checks.refit_facts import Coverage, Refit, Rows, by_replica, sent_versions
from seatrial.core.records import CheckResult, Record
from seatrial.core.verdict import Boundary
from seatrial.instruments.bits.fingerprint import layer

Hashes = Mapping[str, str]

REFITS = "every refit happened, once and in order"
REFUSED = "no refit was refused"
BASE = "base before any update: bit-equal"
EQUAL = "weights after each refit: bit-equal"
CONTROL = "stale weights are seen before each refit"
COMMITTED = "committed only after the generator's fingerprint matched"
MARKS = {
    "torn-": "torn (copies of a tied weight differ)",
    "output-off-": "its module's output is not that of these weights",
    "moved-": "changed, although nothing was sent for it",
}
_LAYER = re.compile(r"^(.*?\.)?(\d+)(?=\.|$)")


class Wrong(Record):
    """One tensor that is not what the policy sent."""

    name: str
    layer: str
    replica: str
    step: int
    version: int
    looks: str = ""
    """What it looks like, where that is certain."""
    runtime: str = ""
    """The engine's own tensor that holds it, where the run said so."""


@dataclass(frozen=True, slots=True)
class SeenWeights:
    """What one replica holds at one version, by exported name."""

    hashes: Hashes
    zeros: frozenset[str] = frozenset()
    nans: Mapping[str, int] = field(default_factory=dict)


def differing_tensors(sent: Hashes, seen: Hashes) -> list[str]:
    return [name for name in sent if seen.get(name) != sent[name]] + [name for name in seen if name not in sent]


def looks_like(name: str, version: int, sent: Mapping[int, Hashes], seen: SeenWeights) -> str:
    """What the tensor `name` looks like at `version`; "" when nothing is certain."""
    found, now = seen.hashes.get(name), sent.get(version, {})
    if found is None:
        return "not there"
    for mark, words in MARKS.items():
        if found.startswith(mark):
            return words
    if name in seen.nans:
        return f"NaN ({seen.nans[name]} elements)"
    if name in seen.zeros:
        return "zero"
    older = [number for number in sorted(sent) if number < version and sent[number].get(name) == found]
    others = [other for other, value in now.items() if other != name and value == found]
    if older and not others:
        return f"stale (equals version {older[-1]})"
    if len(others) == 1 and not older:
        return _of_another(name, others[0], now, seen)
    return ""


def _of_another(name: str, other: str, now: Hashes, seen: SeenWeights) -> str:
    if seen.hashes.get(other) == now.get(name):
        return f"swapped with {other}"
    if _neighbours(name, other):
        return f"shifted layer (holds {other})"
    return f"other name (holds {other})"


def _neighbours(name: str, other: str) -> bool:
    """Whether two names are the same tensor of layers that follow each other."""
    one, two = _LAYER.match(name), _LAYER.match(other)
    if one is None or two is None or one[1] != two[1] or name[one.end() :] != other[two.end() :]:
        return False
    return abs(int(one[2]) - int(two[2])) == 1


def changing(rows: Rows) -> list[Refit]:
    """Refits that brought other weights than the one before them to the same replica."""
    found = []
    for mine in by_replica(rows).values():
        found += [now for before, now in pairwise(mine) if now.produced != before.produced]
    return found


def wrong_tensors(rows: Rows) -> tuple[Wrong, ...]:
    """Every tensor that is not what was sent: what the run itself found, and what the hashes show beyond it."""
    sent = sent_versions(rows)
    seen = {
        (row.replica, row.version): SeenWeights(row.hashes, frozenset(row.zeros), row.nans) for row in rows.hashes if row.side == "live"
    }
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


def _shown(row: Refit, sent: Hashes | None, held: SeenWeights | None) -> Iterator[str]:
    """Names that the hashes show to be wrong. Those proven by comparing outputs have no hash of their own."""
    if sent is None or held is None or row.refused:
        return
    wrong = differing_tensors(sent, held.hashes)
    absent = [name for name in wrong if name not in held.hashes]
    yield from (name for name in wrong if name in held.hashes)
    if len(absent) > row.methods.get("compare", 0):
        yield from absent


def refits(rows: Rows, wanted: int | None) -> CheckResult:
    """Each replica got the base and one refit per step, each once and in order; all of them equally many. `wanted`: None if unknown."""
    least = 2 if wanted is None else max(2, wanted)
    mine = by_replica(rows)
    broken = [name for name, each in mine.items() if not _ordered(each, wanted)]
    counts = {len(each) for each in mine.values()}
    short = len(counts) > 1 or any(count < least or (wanted is not None and count != least) for count in counts)
    value = ", ".join(f"replica {name}: {len(each)}" for name, each in mine.items()) or "no refit"
    threshold = f">= {least}" if wanted is None else f"{least} each"
    message = "; ".join([*(f"replica {name}: refits missing, doubled or out of order" for name in broken)])
    return proof(REFITS, bool(mine) and not broken and not short, value, Boundary.REFIT, threshold, message)


def _ordered(mine: list[Refit], wanted: int | None) -> bool:
    """No index is missing or doubled, and steps grow; in a run of ours they are the numbers of the refits."""
    grown = all(row.index == place for place, row in enumerate(mine)) and all(before.step < now.step for before, now in pairwise(mine))
    return grown and (wanted is None or all(row.step == row.index for row in mine))


def refused(rows: Rows) -> CheckResult:
    bad = [row for row in rows.refits if row.refused]
    said = "; ".join(f"refit {row.index} (step {row.step}, replica {row.replica}): {row.refused}" for row in bad[:3])
    return proof(REFUSED, bool(rows.refits) and not bad, f"{len(bad)} of {len(rows.refits)}", Boundary.REFIT, "0", said)


def base(rows: Rows) -> CheckResult:
    firsts = [each[0] for each in by_replica(rows).values()]
    off = [row for row in firsts if row.index or row.stale_names or row.touched_names or row.wrong_names or row.produced != row.consumed]
    value = "; ".join(f"replica {row.replica}: {row.stale_names} differed, {row.touched_names} touched" for row in firsts) or "no refit"
    return proof(BASE, bool(firsts) and not off, value, Boundary.REFIT, "0")


def equal(rows: Rows, wrong: tuple[Wrong, ...]) -> CheckResult:
    """After each refit the runtime holds what was sent; without the hashes of both sides only the run itself says so."""
    sent, live = sent_versions(rows), {(row.replica, row.version) for row in rows.hashes if row.side == "live"}
    unseen = [row for row in rows.refits if not row.refused and (row.version not in sent or (row.replica, row.version) not in live)]
    off = [row for row in rows.refits if not _same_root(row) or not row.names]
    bad = {(item.replica, item.version) for item in wrong} | {(row.replica, row.version) for row in (*off, *unseen)}
    said = ", ".join(list(dict.fromkeys(map(_named, wrong)))[:3])
    said = said or "; ".join(f"refit {row.index}: sent {row.produced}, found {row.consumed}" for row in off[:2])
    said = said or "; ".join(f"refit {row.index} of replica {row.replica}: no hashes of both sides" for row in unseen[:2])
    names, cast = max((row.names for row in rows.refits), default=0), len(casts(rows))
    value = f"{names} tensors{f', {cast} after the same cast' if cast else ''}, {len(bad)} of {len(rows.refits)} refits wrong"
    return proof(EQUAL, bool(rows.refits) and not bad, value, Boundary.REFIT, "all", said)


def _named(wrong: Wrong) -> str:
    held = f"held as {wrong.runtime}" if wrong.runtime not in ("", wrong.name) else ""
    more = ", ".join(filter(None, (held, wrong.looks)))
    return f"{wrong.name} ({more})" if more else wrong.name


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
    sent, got = sent_versions(rows), [row for row in rows.hashes if row.side == "received"]
    if not got:
        return []
    wrong = [(row, name) for row in got for name in differing_tensors(sent.get(row.version, {}), row.hashes)]
    counts = Counter((row.replica, row.version) for row in got)
    unseen = [row for row in rows.refits if counts[row.replica, row.version] != 1]
    said = [f"{name} (version {row.version}, replica {row.replica})" for row, name in wrong[:3]]
    said += [f"version {row.version} at replica {row.replica}: seen {counts[row.replica, row.version]} times" for row in unseen[:3]]
    value = f"{len(wrong)} names differ in {len(got)} payloads"
    return [proof("what arrived is what was sent", not wrong and not unseen, value, Boundary.REFIT, "0", ", ".join(said))]


def control(rows: Rows, own: bool) -> CheckResult:
    """The negative control: whenever the policy moved, the generator was seen to lag before its refit and to be touched by it. In a run of
    ours the policy moves before every refit but the first, and log-probabilities are compared with the stale weights, too."""
    moved, sent = changing(rows), sent_versions(rows)
    judged = [row for mine in by_replica(rows).values() for row in mine[1:]] if own else moved
    judged = [row for row in judged if not row.refused]
    said = {f"refit {row.index}": text for row in judged if (text := _blind(row, sent, row in moved, own))}
    value, text = f"{len(judged) - len(said)} of {len(judged)}", "; ".join(f"{which}: {how}" for which, how in list(said.items())[:3])
    return proof(CONTROL, bool(moved) and bool(judged) and not said, value, Boundary.REFIT, "all", text)


def _blind(row: Refit, sent: Mapping[int, Hashes], changed: bool, own: bool) -> str:
    """Why a missed refit would not have been seen: fewer names seemed stale, or were touched, than moved. "" when it would. Outputs are not
    seen to be touched."""
    if not changed:
        return "the policy did not move"
    before, now = sent.get(row.version - 1, {}), sent.get(row.version, {})
    moved = max(1, sum(before.get(name) != value for name, value in now.items()) if before else 1)
    if row.stale_names < moved or row.touched_names < max(1, moved - row.methods.get("compare", 0)):
        return f"{row.stale_names} seen stale, {row.touched_names} touched"
    return "log-probabilities were not compared with the stale weights" if own and row.stale_max_dlogp is None else ""


def committed(rows: Rows) -> CheckResult:
    """The policy builds its next delta only on what was read back from the generator and is right."""
    off = [row for row in rows.refits if row.committed != (_same_root(row) and not row.refused)]
    said = "; ".join(f"refit {row.index} of replica {row.replica}: {row.committed}" for row in off[:3])
    value = f"{sum(bool(row.committed) for row in rows.refits)} of {len(rows.refits)} committed"
    return proof(COMMITTED, bool(rows.refits) and not off, value, Boundary.REFIT, "exactly those that are bit-equal", said)


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


def weight_limitations(rows: Rows) -> tuple[str, ...]:
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
    good = bool(rows.maps) and not wrong
    return proof("every element is where its name says", good, f"{len(wrong)} tensors are not", Boundary.REFIT, "0", said)


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
    """A name that the map had to refuse cannot be read through it: it must be proven by forward or output, or it is unproven. So is a
    tensor of the runtime that no exported name stands for: no method speaks of it. Which names are exported only the hashes of what was
    sent say."""
    found = {name: reason for row in rows.coverages for name, reason in row.opaque.items()}
    exported = {name for each in sent_versions(rows).values() for name in each}
    other = [
        sum(row.methods.values()) == row.names and row.methods.get("forward", 0) + row.methods.get("compare", 0) for row in rows.refits
    ]
    proven = exported.issuperset(found) and bool(other) and min(other) >= len(found)
    said = "; ".join(f"{name}: {reason}" for name, reason in list(found.items())[:3])
    good = bool(rows.coverages) and (not found or proven)
    return proof(OPAQUE, good, f"{len(found)} are", Boundary.REFIT, "0, or proven otherwise", said)


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
