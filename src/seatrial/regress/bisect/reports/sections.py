"""The sections of a bisect's report: lists of sentences, for summary.md and report.html alike.

What was not tested, what was changed, and what the answer rests on is said by this code, never left to memory.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from seatrial.regress.bisect.record import Mark, Run, SkipKind
from seatrial.regress.bisect.reports.view import KINDS, SHOWN, View, code, listed, percent
from seatrial.report.text import unique

Section = tuple[str, tuple[str, ...]]


def sections(view: View) -> tuple[Section, ...]:
    """Title and sentences of each; a section that says nothing is left out, but for those whose emptiness is a fact."""
    made: tuple[Section, ...] = (
        ("Skipped", tuple(_skipped(view)) or ("nothing: every commit that was run could be judged",)),
        ("Flaky", tuple(_flaky(view)) or ("nothing: no commit gave different results",)),
        ("Repositories", tuple(_repositories(view))),
        ("Environments", tuple(_environments(view))),
        ("What was changed", tuple(_changed(view)) or ("nothing: every commit ran as it is",)),
        ("Limitations", unique(_limitations(view)) or ("none",)),
        ("How to go on", tuple(_onward(view))),
    )
    return tuple((title, texts) for title, texts in made if texts)


def answer_lines(view: View) -> tuple[str, ...]:
    """The facts of the answer."""
    answer = view.answer
    lines: list[str] = []
    suspects = sorted(answer.suspects, key=lambda one: -one.probability)
    if answer.state == "found" and suspects:
        lines = [f"Commit: {code(suspects[0].commit)}", f"Subject: {code(suspects[0].subject)}", f"Repository: {code(suspects[0].repo)}"]
    elif answer.state == "range":
        shares = len({round(one.probability, 6) for one in suspects}) > 1
        for one in suspects[:SHOWN]:
            lines.append(f"Suspect: {view.named(one.point)}{f', probability {percent(one.probability)}' if shares else ''}")
        lines += [f"and {len(suspects) - SHOWN} more suspects, see report.json"] if len(suspects) > SHOWN else []
    lines += [f"Inside {code(one.repo)}: {code(one.commit)} {code(one.subject)}" for one in view.inside if one.commit]
    lines += [f"Last good: {view.named(answer.last_good)}", f"First seen bad: {view.named(answer.first_bad)}"]
    if answer.state != "open":
        lines.append(f"Confidence: {percent(answer.confidence)}{f', {answer.model}' if answer.model else ''}")
    run = [row for row in view.rows if row.directory]
    rounds = len({row.round for row in view.rows if row.stage == "search" and row.history == 0})
    spent = f"{_count(len(run), 'run')} of {_time(sum(row.seconds for row in run))} in all, {_count(rounds, 'round')} of search"
    return (*lines, f"Effort: {spent}, {_count(view.count, 'commit')} in the range")


def _skipped(view: View) -> Iterator[str]:
    """By reason: how many, which, and the reason of the first."""
    found: dict[SkipKind, list[tuple[str, str]]] = {}
    for index, rows in view.by_point.items():
        if all(row.mark is Mark.SKIP for row in rows):
            commit = view.history.points[index].commit[:12]
            found.setdefault(rows[-1].skip or SkipKind.HAND, []).append((commit, rows[-1].reason))
    for kind, points in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
        why = next((reason for _, reason in points if reason), "")
        first = f"; the first one: {code(why)}" if why else ""
        yield f"{_count(len(points), 'commit')}: {KINDS[kind]}: {listed([code(commit) for commit, _ in points])}{first}"


def _flaky(view: View) -> Iterator[str]:
    for point in view.answer.flaky:
        index = view.history.by_id.get(point)
        if index is None:
            yield f"{code(point)}: its runs disagree"
            continue
        rows = view.by_point.get(index, ())
        said = ", ".join(f"{count} {mark}" for mark in Mark if (count := sum(row.mark is mark for row in rows)))
        yield f"{view.short(index)}: {said}"


def _repositories(view: View) -> Iterator[str]:
    for one in view.answer.standings:
        commit = f" of {code(one.commit[:12])}" if one.commit else ""
        yield f"{code(one.repo)}: {one.verdict}{commit}: {one.why}"
    if len(view.plan.repos) > 1 and not view.answer.standings:
        yield "no repository is convicted or acquitted yet"


def _environments(view: View) -> Iterator[str]:
    plan = view.plan.environment
    if plan.kind == "none":
        yield "every commit ran in the environment of the caller"
    else:
        run: list[Run] = [row for row in view.rows if row.environment]
        kinds, built = len({row.environment for row in run}), sum(row.built for row in run)
        reused = f"{built} built, {len(run) - built} times reused"
        yield f"{_count(kinds, 'environment')} from {code(plan.lock or plan.kind)} by {plan.kind}: {reused}"
    if plan.build:
        yield f"built before each run with {code(shlex.join(plan.build))}"


def _changed(view: View) -> Iterator[str]:
    plan = view.plan
    for edit in plan.edits:
        yield f"{code(edit.file)} was edited at every commit: {code(edit.clauses)}"
    for patch in plan.patches:
        since = f", to commits from {code(patch.since[:12])} on" if patch.since else ""
        yield f"{code(patch.source)} was applied where it was missing{since}"
    if plan.extra:
        yield f"arguments were added to the command: {code(shlex.join(plan.extra))}"
    if plan.edits or plan.patches or plan.extra:
        yield "Warning: this changes what is measured; the answer holds for the changed command, and may not for the plain one"


def _limitations(view: View) -> Iterator[str]:
    plan, answer = view.plan, view.answer
    yield from plan.notes
    yield from answer.notes
    if plan.repeat == 1:
        yield "each commit ran once: if the result is a matter of chance, so is the answer (`--repeat 5` runs doubtful commits again)"
    if plan.any_failure:
        yield "every failure counted as bad, also one for another reason than at the bad end (`--any-failure`)"
    if plan.failure:
        yield f"a failure counted as bad by a pattern alone: {code(plan.failure)}"
    if plan.environment.kind == "none":
        yield "dependencies were those of the caller at every commit: a commit that needs others was tested with the wrong ones"
    if plan.first_parent:
        yield "merged branches count as one commit each (`--first-parent`)"
    if len(plan.repos) > 1:
        yield "the repositories were put in order by commit time; that they were used together like this is an assumption"
    replayed = sum(row.stage == "replay" for row in view.rows)
    if replayed:
        yield f"{_count(replayed, 'mark')} came from a log that was replayed, and {'was' if replayed == 1 else 'were'} not run here"
    hand = sum(any(note.startswith("marked ") and "by hand" in note for note in row.notes) for row in view.rows)
    if hand:
        yield f"{_count(hand, 'row')} of the journal {'was' if hand == 1 else 'were'} changed by hand"


def _onward(view: View) -> Iterator[str]:
    place = shlex.quote(str(view.directory))
    log = shlex.quote(str(view.directory / "bisect.log"))
    if view.answer.state != "found":
        yield f"go on where this ended: {code(f'seatrial bisect resume {place}')}"
    yield f"change marks in bisect.log or runs.jsonl, then start again from them: {code(f'seatrial bisect … --replay {log}')}"
    if len(view.plan.repos) == 1:
        yield f"go on with git alone: {code(f'git -C {shlex.quote(view.plan.repos[0].path)} bisect replay {log}')}"
    yield f"remove trees and stores, keep the reports: {code(f'seatrial bisect clean {place}')}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
