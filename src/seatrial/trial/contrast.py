"""Two trials side by side: what each deliverable came to, with the change and without it. Only reads what is stored.

- "fail (pre-existing)" is said only of the same failure: same boundary, same first missed check or known failure, nothing
  missed now that was met before, nothing missed by more (see `misses`), and no earlier end. Anything else that fails now is
  newly broken: the change is not excused by another failure that happens to sit in the same level.
- Where two failures look the same but did not measure the same, the note shows both. Where they did not say the same,
  numbers and places aside, they excuse nothing.
- A failure behind the place where the unchanged side failed is not comparable: nobody knows what would happen there.
- What was Blocked or Skipped on either side, or is missing on the unchanged one, is not comparable.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from seatrial.model.guarded import BadValue
from seatrial.model.record import CheckResult, Comparison, LevelResult, SideResult, Trial
from seatrial.model.verdict import Verdict
from seatrial.report.outcome import DOUBT
from seatrial.report.text import generic
from seatrial.trial.misses import both_values, measured_alike, worse
from seatrial.trial.sides import JUNIT, read_cases

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
        return _both_fail(after.name, False, f"fails differently: these tests do not fail on the baseline: {_few(new)}")
    other = [f"{name}: {now[name]}, on the baseline {old[name]}" for name in now if _kind(now[name]) != _kind(old[name])]
    if other:
        return _both_fail(after.name, False, f"fails differently: {_few(other, 1)}")
    unlike = [f"{name}: {now[name]}, on the baseline {old[name]}" for name in now if now[name] != old[name]]
    if unlike:
        same = all(generic(now[name]) == generic(old[name]) for name in now)
        note = f"the same tests fail on the baseline, with other messages: {_few(unlike, 1)}"
        return _both_fail(after.name, True, note if same else f"{note}: {DOUBT}", same)
    return _both_fail(after.name, True, f"the same tests fail on the baseline: {_few(list(now))}")


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
    if before.boundary is not after.boundary or generic(was) != generic(now):
        return _both_fail(name, False, f"fails differently: on the baseline {_at(before)}{was}, now {_at(after)}{now}")
    old = {check.name: check for check in _missed(before)}
    new = [check.name for check in _missed(after) if check.name not in old]
    if new:
        return _both_fail(name, False, f"fails differently: missed now and not on the baseline: {_few(new)}")
    if (after.steps_reached or 0) < (before.steps_reached or 0):
        steps = f"came to step {after.steps_reached or 0}, on the baseline to step {before.steps_reached}"
        return _both_fail(name, False, f"fails differently: {steps}")
    more = [text for check in _missed(after) if (text := worse(old[check.name], check))]
    if more:
        return _both_fail(name, False, f"fails differently: missed by more than on the baseline: {_few(more)}")
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
    """What the same known failure said on both sides, where that differs: one pattern may stand for several causes.

    And whether that is the same, numbers and places aside.
    """
    old, now = before.diagnosis, after.diagnosis
    if old is None or now is None or now.verdict is None or now.signature is None:
        return "", True
    was, cause = _neutral(old.cause, old_roots), _neutral(now.cause, roots)
    if was == cause:
        return "", True
    same = generic(was) == generic(cause)
    return f"{now.signature}: {cause}, on the baseline {was}" + ("" if same else f": {DOUBT}"), same


def _few(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
