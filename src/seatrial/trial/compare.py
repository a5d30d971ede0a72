"""Two runs side by side: deliverable by deliverable, miss by miss, and bit by bit. Only reads what is stored.

- "fail (pre-existing)" needs the same failure: same boundary, same first missed check or known failure, nothing missed that the base
  met, and nothing missed by more than `ROOM` allows.
- Two levels are bit-identical, or the first difference is named: phase, event, step. Where a record is absent the metrics alone count.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from seatrial.core.errors import UserError
from seatrial.core.files import read_text
from seatrial.core.guarded import BadValue, parse_json
from seatrial.core.records import BitComparison, BitDifference, CheckResult, Comparison, LevelResult, SideResult, Trial
from seatrial.core.text import failure_identity, first_few, ranges
from seatrial.core.verdict import Boundary, Verdict
from seatrial.report.outcomes import DOUBT
from seatrial.trial.pre_tests import JUNIT, read_cases

ROOM = 1.5
"""How much larger than the baseline's a miss may be and still be called the same: two runs are seldom equal to the bit."""
_BOUND = re.compile(r"(<=|<|>=|>|==) *(-?\d[\d.]*(?:e[+-]?\d+)?)")


def worse(old: CheckResult, now: CheckResult) -> str:
    """In what the miss is worse than that of the baseline; empty when it is not, or when that cannot be told."""
    lost = sorted(set(now.missing) - set(old.missing))
    if lost:
        return f"{now.name}: no finite point at step {ranges(lost)}, where the baseline has one"
    before, after = _finite(old.value), _finite(now.value)
    if before is None:
        return ""
    both = both_values(old, now)
    if after is None:
        return both
    misses = _distance(before, old.threshold), _distance(after, now.threshold)
    return both if misses[0] is not None and misses[1] is not None and misses[1] > ROOM * misses[0] else ""


def measured_alike(old: CheckResult, now: CheckResult) -> bool:
    """Whether two misses of which none is worse measured the same, or numbers whose distance to the threshold is known."""
    before, after = _finite(old.value), _finite(now.value)
    if before is None or after is None:
        return old.value == now.value
    return before == after or (_distance(before, old.threshold) is not None and _distance(after, now.threshold) is not None)


def both_values(old: CheckResult, now: CheckResult) -> str:
    return f"{now.name}: measured {now.value!r}, on the baseline {old.value!r}"


def _finite(value: float | str | None) -> float | None:
    """The number that a check measured; None for what is not finite, or no number."""
    return value if isinstance(value, float) and math.isfinite(value) else None


def _distance(value: float, threshold: str) -> float | None:
    """How far the value is on the wrong side of its threshold; None when that cannot be read."""
    bound = _BOUND.fullmatch(threshold.strip())
    if bound is None:
        return None
    over = value - float(bound[2])
    return abs(over) if bound[1] == "==" else over if bound[1].startswith("<") else -over


ADDRESS = re.compile(r"0x[0-9a-f]+")
KIND = re.compile(r"[\w.]+(?=:|$)")


def contrast(before: Trial | None, before_dir: Path, after: Trial, after_dir: Path) -> tuple[Comparison, ...]:
    """One comparison for each of the tests before the levels, and for each level; without a trial nothing is comparable."""
    sides = {side.key: side for side in before.sides} if before else {}
    levels = {(level.number, level.name): level for level in before.levels} if before else {}
    made = []
    for side in after.sides:
        old = sides.get(side.key)
        made.append(_side(side, old, before_dir / old.directory if old else before_dir, after_dir / side.directory))
    for level in after.levels:
        made.append(_level(level, levels.get((level.number, level.name)), _roots(before), _roots(after)))
    return tuple(made)


def _plain(name: str, before: Verdict | None, after: Verdict, why: str) -> Comparison | None:
    """Every case but two failures, which must be told apart."""
    known = (Verdict.PASS, Verdict.FAIL)
    if before not in known or after not in known:
        here = "" if after in known else f"{after} here"
        there = "the baseline has no such deliverable" if before is None else f"{before} on the baseline: {why}"
        note = "; ".join(part for part in (here, "" if before in known else there) if part)
        return Comparison(deliverable=name, before=before, after=after, word="not comparable", note=note)
    if before is after is Verdict.PASS:
        return Comparison(deliverable=name, before=before, after=after, word="pass")
    if after is Verdict.PASS:
        return Comparison(deliverable=name, before=before, after=after, word="fixed", note=f"failed on the baseline: {why}")
    if before is Verdict.PASS:
        return Comparison(deliverable=name, before=before, after=after, word="newly broken")
    return None


def _both_fail(name: str, same: bool, note: str, excuses: bool | None = None) -> Comparison:
    """Two failures; those that look the same excuse the change unless it is said that they may not be."""
    word: Literal["fail (pre-existing)", "newly broken"] = "fail (pre-existing)" if same else "newly broken"
    fail = Verdict.FAIL
    return Comparison(deliverable=name, before=fail, after=fail, word=word, excuses=same if excuses is None else excuses, note=note)


def _side(after: SideResult, before: SideResult | None, before_dir: Path, after_dir: Path) -> Comparison:
    plain = _plain(after.name, before.verdict if before else None, after.verdict, before.reason if before else "")
    if plain is not None:
        return plain
    old, now = _failing(before_dir), _failing(after_dir)
    if not old or not now:
        return _both_fail(after.name, False, "fails on the baseline, too, but which tests failed is not known")
    new = [name for name in now if name not in old]
    if new:
        return _both_fail(after.name, False, f"fails differently: these tests do not fail on the baseline: {first_few(new)}")
    other = [f"{name}: {now[name]}, on the baseline {old[name]}" for name in now if _kind(now[name]) != _kind(old[name])]
    if other:
        return _both_fail(after.name, False, f"fails differently: {first_few(other, 1)}")
    unlike = [f"{name}: {now[name]}, on the baseline {old[name]}" for name in now if now[name] != old[name]]
    if unlike:
        same = all(failure_identity(now[name]) == failure_identity(old[name]) for name in now)
        note = f"the same tests fail on the baseline, with other messages: {first_few(unlike, 1)}"
        return _both_fail(after.name, True, note if same else f"{note}: {DOUBT}", same)
    return _both_fail(after.name, True, f"the same tests fail on the baseline: {first_few(list(now))}")


def _failing(directory: Path) -> dict[str, str]:
    """The tests that did not pass, with what ended each; those that were run several times by all of it."""
    try:
        cases = [case for case in read_cases(directory / JUNIT) if case.outcome in ("failed", "error")]
    except (OSError, BadValue):
        return {}
    return {case.name: "; ".join(sorted(ADDRESS.sub("0x", one.message) for one in cases if one.name == case.name)) for case in cases}


def _kind(message: str) -> str:
    """The exception that a message begins with; a bare assertion has none."""
    found = KIND.match(message)
    return found[0] if found else "AssertionError"


def _level(after: LevelResult, before: LevelResult | None, old_roots: Sequence[str], roots: Sequence[str]) -> Comparison:
    name = f"level {after.number} ({after.title})"
    plain = _plain(name, before.verdict if before else None, after.verdict, before.reason if before else "")
    if plain is not None:
        return plain
    assert before is not None  # or it would have been plain
    was, now = _failure(before, old_roots), _failure(after, roots)
    if (before.steps_reached or 0) < (after.steps_reached or 0):
        ends = f"the baseline failed before that, at step {before.steps_reached or 0}: {_at(before)}{was}"
        return _beyond(name, f"what fails at step {after.steps_reached} was never reached there: {ends}")
    if before.boundary is not after.boundary or failure_identity(was) != failure_identity(now):
        return _both_fail(name, False, f"fails differently: on the baseline {_at(before)}{was}, now {_at(after)}{now}")
    old = {check.name: check for check in _missed(before)}
    new = [check.name for check in _missed(after) if check.name not in old]
    if new:
        return _both_fail(name, False, f"fails differently: missed now and not on the baseline: {first_few(new)}")
    if (after.steps_reached or 0) < (before.steps_reached or 0):
        steps = f"came to step {after.steps_reached or 0}, on the baseline to step {before.steps_reached}"
        return _both_fail(name, False, f"fails differently: {steps}")
    more = [text for check in _missed(after) if (text := worse(old[check.name], check))]
    if more:
        return _both_fail(name, False, f"fails differently: missed by more than on the baseline: {first_few(more)}")
    doubtful = next((check for check in _missed(after) if not measured_alike(old[check.name], check)), None)
    if doubtful is not None:
        return _both_fail(name, True, f"{both_values(old[doubtful.name], doubtful)}: {DOUBT}", excuses=False)
    values = _values(before, after)
    if values:
        return _both_fail(name, True, values)
    causes, same = _causes(before, old_roots, after, roots)
    unlike = "" if was == now else f"{now}, on the baseline {was}"
    return _both_fail(name, True, causes or unlike or f"{now}, as on the baseline", same)


def _beyond(name: str, note: str) -> Comparison:
    return Comparison(deliverable=name, before=Verdict.FAIL, after=Verdict.FAIL, word="not comparable", note=note)


def _missed(result: LevelResult) -> list[CheckResult]:
    return [check for check in result.checks if not check.passed]


def _failure(result: LevelResult, roots: Sequence[str]) -> str:
    """What a level failed by: how it was cut, the known failure or its cause, the first missed check, or the reason."""
    found = result.diagnosis
    cut = next((phase for phase in result.phases if phase.ended in ("deadline", "stalled")), None)
    if cut is not None:
        return f"{cut.name} {cut.ended} after the milestone {found.milestone if found else None}"
    if found is not None and found.verdict is not None:
        return found.signature or _neutral(found.cause, roots)
    missed = next(iter(_missed(result)), None)
    if missed is None:
        return _neutral(result.reason, roots)
    short = result.steps_expected is not None and (result.steps_reached or 0) < result.steps_expected
    return missed.name + (f" at step {result.steps_reached} of {result.steps_expected}" if short else "")


def _neutral(text: str, roots: Sequence[str]) -> str:
    """A message without what differs from run to run: where the checkouts are, and addresses."""
    for root in roots:
        text = text.replace(root, "CHECKOUT")
    return ADDRESS.sub("0x", text)


def _roots(trial: Trial | None) -> list[str]:
    return [repo.path for repo in trial.plan.changes if not repo.companion] if trial else []


def _at(result: LevelResult) -> str:
    return f"at {result.boundary}: " if result.boundary else ""


def _values(before: LevelResult, after: LevelResult) -> str:
    """What the first missed check measured on both sides; nothing when that is the same, and no number."""
    old, now = next(iter(_missed(before)), None), next(iter(_missed(after)), None)
    if old is None or now is None or old.value is None or (old.value == now.value and not isinstance(now.value, float)):
        return ""
    if old.value == now.value:
        return f"{now.name}: bit-identical value on the baseline ({now.value!r})"
    return both_values(old, now)


def _causes(before: LevelResult, old_roots: Sequence[str], after: LevelResult, roots: Sequence[str]) -> tuple[str, bool]:
    """What the same known failure said on both sides, where that differs; and whether it is the same, numbers and places aside."""
    old, now = before.diagnosis, after.diagnosis
    if old is None or now is None or now.verdict is None or now.signature is None:
        return "", True
    was, cause = _neutral(old.cause, old_roots), _neutral(now.cause, roots)
    if was == cause:
        return "", True
    same = failure_identity(was) == failure_identity(cause)
    return f"{now.signature}: {cause}, on the baseline {was}" + ("" if same else f": {DOUBT}"), same


Source = Literal["record", "metrics"]
RECORD, METRICS, PHASES, ATTEMPTS = "record.jsonl", "metrics.jsonl", "phases.json", "attempts"
ABSENT, END = "absent", "the end"
UNCOMPARED = ("seconds", "pid", "tensors")
"""Keys of a row that differ between equal runs, or name files whose digests are compared; so do those that start with `path`."""
SAID = "trainer/"
"""Begins the names of what the trainer says of itself, where its methods have the names that we know: one that a side lacks, because it
renamed them, is no difference."""
GROUPS = ("digests", "values")
WRITERS = ("process", "rank")
"""Keys of a row that tell which process wrote it."""
PLACES = tuple(("", key) for key in ("event", "step", "stage"))
"""Where a row belongs: no evidence by itself."""
STAGES = {
    "data": Boundary.DATA,
    "sampling": Boundary.ROLLOUT,
    "length": Boundary.ROLLOUT,
    "reward": Boundary.REWARD,
    "advantage": Boundary.REWARD,
    "reference": Boundary.PROVIDER,
    "logprob": Boundary.PROVIDER,
    "ratio": Boundary.OPTIMIZER,
    "kl": Boundary.OPTIMIZER,
    "mask": Boundary.DATA,
    "loss": Boundary.OPTIMIZER,
    "gradient": Boundary.OPTIMIZER,
    "clip": Boundary.OPTIMIZER,
    "schedule": Boundary.OPTIMIZER,
    "update": Boundary.OPTIMIZER,
    "logging": Boundary.METRICS,
}
"""Where a difference in a stage of the training step sits."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of a file: where in the run it belongs, and what it holds."""

    step: int | None
    stage: str
    fields: Mapping[tuple[str, str], str]
    """By group (`digests`, `values`, or none) and name."""


class _NotComparableError(Exception):
    """Why two level directories cannot be compared."""


def compare_levels(level: int, base: Path, now: Path, is_clock: Callable[[str], bool]) -> BitComparison:
    """The level directory `now` beside the same level of the base. `is_clock` tells metrics that measure the machine."""
    try:
        phases = _phases(base, now)
        sources: set[Source] = set()
        compared = 0
        for phase in phases:
            found, equal = _phase(phase, base, now, is_clock, sources)
            compared += equal
            if found is not None:
                return BitComparison(level=level, outcome="differs", sources=_sorted(sources), compared=compared, difference=found)
    except (_NotComparableError, UserError) as error:
        return BitComparison(level=level, outcome="not comparable", reason=str(error))
    if not compared:
        return BitComparison(level=level, outcome="not comparable", reason="neither run recorded anything that could differ")
    return BitComparison(level=level, outcome="identical", sources=_sorted(sources), compared=compared)


def boundary_of(difference: BitDifference) -> Boundary:
    """Where a difference sits: by its stage; one that only metrics show is at metrics."""
    stage = difference.stage.lower()
    named = next((boundary for boundary in Boundary if boundary == stage), None)
    return named or STAGES.get(stage, Boundary.METRICS)


def _sorted(sources: set[Source]) -> tuple[Source, ...]:
    every: tuple[Source, ...] = ("record", "metrics")
    return tuple(source for source in every if source in sources)


def _phases(base: Path, now: Path) -> list[str]:
    """The directories that hold a record or metrics on either side, in the order in which the phases ran."""
    order = list(dict.fromkeys((*_ended(base), *_ended(now))))
    found = {file.parent.relative_to(side).as_posix() for side in (base, now) for file in _files(side)}
    if not found:
        raise _NotComparableError("neither run left a record or metrics")
    inner = found - {"."}  # the metrics that Seatrial itself gathered count only where no phase has any
    return sorted(inner or found, key=lambda name: (_place(order, name), name))


def _place(order: list[str], name: str) -> int:
    phase = name.partition("/")[0]
    return order.index(phase) if phase in order else len(order)


def _files(side: Path) -> Iterator[Path]:
    for name in (RECORD, METRICS):
        yield from (file for file in side.rglob(name) if file.relative_to(side).parts[0] != ATTEMPTS)


def _ended(side: Path) -> list[str]:
    """The phases that ran; one that Seatrial cut ended at a moment that no two runs share."""
    try:
        rows = parse_json(read_text(side / PHASES))
        cut = next((row for row in rows if row["ended"] != "exited"), None)
        names = [str(row["name"]) for row in rows]
    except (UserError, ValueError, KeyError, TypeError) as error:
        raise _NotComparableError(f"{side / PHASES} cannot be read: {error}") from error
    if cut is not None:
        raise _NotComparableError(f"{side / str(cut['name'])} did not run to its own end ({cut['ended']})")
    return names


def _phase(phase: str, base: Path, now: Path, is_clock: Callable[[str], bool], sources: set[Source]) -> tuple[BitDifference | None, int]:
    """The first difference of one phase: the earlier step of record and metrics, the record where both show one. And what is equal."""
    found: list[BitDifference] = []
    equal = 0
    for source, name in (("record", RECORD), ("metrics", METRICS)):
        kind: Source = "record" if source == "record" else "metrics"
        before, after = base / phase / name, now / phase / name
        if not before.is_file() and not after.is_file():
            continue
        sources.add(kind)
        if not before.is_file() or not after.is_file():
            sides = [_count(file) for file in (before, after)]
            found.append(BitDifference(phase=phase, source=kind, step=None, name=name, expected=sides[0], found=sides[1]))
            continue
        for old, new in _pairs(before, after) if kind == "record" else [_steps(before, after, is_clock)]:
            difference, same = _first(phase, kind, old, new)
            equal += same
            found += [difference] if difference else []
    return min(found, key=lambda one: -1 if one.step is None else one.step, default=None), equal


def _count(file: Path) -> str:
    return f"{len(read_text(file).splitlines())} rows" if file.is_file() else ABSENT


def _first(phase: str, source: Source, before: Iterable[_Row], after: Iterable[_Row]) -> tuple[BitDifference | None, int]:
    """The first row that differs, and how many fields before it are equal."""
    equal = 0
    for old, new in zip_longest(before, after):
        if old is None or new is None:
            there, ends = (old or new), (END if old is None else "a row", END if new is None else "a row")
            assert there is not None  # the longer one has a row
            return BitDifference(
                phase=phase, source=source, step=there.step, stage=there.stage, name="row", expected=ends[0], found=ends[1]
            ), equal
        for key in (*old.fields, *(key for key in new.fields if key not in old.fields)):
            one, two = old.fields.get(key, ABSENT), new.fields.get(key, ABSENT)
            if one != two and not (key[1].startswith(SAID) and {one, two} & {ABSENT, "null"}):
                return BitDifference(
                    phase=phase, source=source, step=old.step, stage=old.stage, name=key[1], expected=one, found=two
                ), equal
        equal += sum(1 for key in old.fields if key not in PLACES)
    return None, equal


def _pairs(before: Path, after: Path) -> list[tuple[Iterable[_Row], Iterable[_Row]]]:
    """The rows of two records, by the process that wrote them: several may write to one file, in no fixed order."""
    sides = []
    for file in (before, after):
        rows: dict[str, list[_Row]] = {}
        for row in _objects(file):
            step = row.get("step")
            made = _Row(step if isinstance(step, int) else None, str(row.get("stage", "")), _recorded(row))
            rows.setdefault(json.dumps([row.get(key) for key in WRITERS]), []).append(made)
        sides.append(rows)
    pairs = [(sides[0].get(writer, []), sides[1].get(writer, [])) for writer in sorted({**sides[0], **sides[1]})]
    return [(_heard(old, new), _heard(new, old)) for old, new in pairs]


def _heard(rows: list[_Row], others: list[_Row]) -> list[_Row]:
    """The rows without those of which only the trainer tells, if the other side has none of their kind."""
    kinds = {row.fields.get(("", "event")) for row in others}
    return [row for row in rows if row.fields.get(("", "event")) in kinds or not all(key[1].startswith(SAID) for key in _held(row))]


def _held(row: _Row) -> list[tuple[str, str]]:
    return [key for key in row.fields if key not in PLACES]


def _steps(before: Path, after: Path, is_clock: Callable[[str], bool]) -> tuple[Iterable[_Row], Iterable[_Row]]:
    """The metrics of two files, one row for each step: within a step the order of rows means nothing."""
    sides = [_by_step(file, is_clock) for file in (before, after)]
    steps = sorted({**sides[0], **sides[1]}, key=lambda step: -1 if step is None else step)
    first, second = (
        [_Row(step, "", {key: ", ".join(sorted(one)) for key, one in side.get(step, {}).items()}) for step in steps] for side in sides
    )
    return first, second


def _by_step(file: Path, is_clock: Callable[[str], bool]) -> dict[int | None, dict[tuple[str, str], list[str]]]:
    found: dict[int | None, dict[tuple[str, str], list[str]]] = {}
    for row in _objects(file):
        step = row.get("step")
        place = found.setdefault(step if isinstance(step, int) else None, {})
        for key, value in _logged(row, is_clock):
            place.setdefault(key, []).append(value)
    return found


def _objects(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file; a torn or foreign line makes it not comparable."""
    *lines, rest = read_text(file).split("\n")
    for number, line in enumerate([*lines, rest] if rest else lines, 1):
        try:
            row = parse_json(line)
        except ValueError as error:
            raise _NotComparableError(f"{file}:{number} is damaged: {error}") from error
        if not isinstance(row, dict):
            raise _NotComparableError(f"{file}:{number} is no object")
        yield row


def _logged(row: dict[str, Any], is_clock: Callable[[str], bool], group: str = "") -> Iterator[tuple[tuple[str, str], str]]:
    """What of a row of metrics is compared; some loops put the metrics of a step into a group of their own."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _logged(value, is_clock, f"{group}{key}/")
        elif not is_clock(key) and (group, key) not in PLACES:
            yield (group, key), _exact(value)


def _recorded(row: dict[str, Any]) -> dict[tuple[str, str], str]:
    """What of a row of a record is compared: where it belongs first, then digests, values, and what else it holds."""
    fields = {(group, key): _exact(row[key]) for group, key in PLACES if key in row}
    for group in GROUPS:
        inside = row.get(group)
        held = inside if isinstance(inside, dict) else {} if inside is None else {"": inside}
        fields |= {(group, key): _exact(value) for key, value in held.items() if group == "digests" or not _own(key)}
    known = {key for _, key in PLACES} | set(GROUPS)
    return fields | {("", key): _exact(value) for key, value in row.items() if key not in known and not _own(key)}


def _own(key: str) -> bool:
    return key in UNCOMPARED or key.startswith("path")


def _exact(value: Any) -> str:
    """A value as text that is equal only for equal bits; 1 and 1.0 are the same number."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 and str(value) != "-0.0" else repr(value)
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True)
    return value if isinstance(value, str) else json.dumps(value)
