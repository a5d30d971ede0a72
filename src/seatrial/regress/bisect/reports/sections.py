"""The sections of a bisect's report: lists of sentences, for summary.md and report.html alike.

What was not tested, what was changed, and what the answer rests on is said by this code, never left to memory.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from seatrial.regress.bisect.record import Mark, Run, SkipKind
from seatrial.regress.bisect.reports.view import KINDS, SHOWN, View, listed, percent
from seatrial.regress.bisect.trees.edits import unchanged
from seatrial.report.markdown import code
from seatrial.report.text import one_line, unique

Section = tuple[str, tuple[str, ...]]


def sections(view: View) -> tuple[Section, ...]:
    """Title and sentences of each; a section that says nothing is left out, but for the limitations: that there are none is a fact."""
    made: tuple[Section, ...] = (
        ("Skipped", tuple(_skipped(view))),
        ("Flaky", tuple(_flaky(view))),
        ("Repositories", tuple(_repositories(view))),
        ("Environments", tuple(_environments(view))),
        ("What was changed", tuple(_changed(view))),
        ("Notes on runs", tuple(_notes(view))),
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
        sure = f"{percent(answer.confidence)}{f', {answer.model}' if answer.model else ''}"
        lines.append(f"Confidence: {'each commit ran once, without noise handling' if view.plan.repeat == 1 else sure}")
    return (*lines, f"Effort: {_effort(view)}, {_count(view.count, 'commit')} after the good end")


def _effort(view: View) -> str:
    """Every run counts once, also those beside the searched commits; rows that were not run are counted apart."""
    beside = sum(bool(row.directory) for row in view.others)
    further = f" ({beside} of them further runs)" if beside else ""
    rounds = len({(row.history, row.round) for row in view.rows if row.stage == "search"})
    seconds = sum(row.seconds for row in view.run)
    spent = f"{_count(len(view.run), 'run')} of {_time(seconds)} in all{further}, {_count(rounds, 'round')} of search"
    taken = len(view.rows) - len(view.run)
    return f"{spent}, {_count(taken, 'row')} taken over without a run" if taken else spent


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
    if plan.packages:
        yield f"with packages beside the lock: {', '.join(code(package) for package in plan.packages)}"
    if plan.build:
        yield f"built before each run with {code(shlex.join(plan.build))}"


def _changed(view: View) -> Iterator[str]:
    plan = view.plan
    for edit in plan.edits:
        yield f"{code(edit.file)} was edited in the tree of every run: {code(edit.clauses)}"
    judged = {row.point for row in view.run if row.mark is not Mark.SKIP}
    for file in unique(edit.file for edit in plan.edits):
        if idle := len(judged & _unchanged(view, file)):
            yield f"an edit of {code(file)} changed nothing at {idle} of the {_count(len(judged), 'commit')} that were run and judged"
    for patch in plan.patches:
        since = f", to commits from {code(patch.since[:12])} on" if patch.since else ""
        yield f"{code(patch.source)} was applied where it was missing{since}"
    if plan.extra:
        yield f"arguments were added to the command: {code(shlex.join(plan.extra))}"
    if plan.edits or plan.patches or plan.extra:
        yield "Warning: this changes what is measured; the answer holds for the changed command, and may not for the plain one"


def _unchanged(view: View, file: str) -> set[str]:
    """The points at which an edit of this file matched nothing."""
    return {row.point for row in view.rows if unchanged(file) in row.notes}


def _notes(view: View) -> Iterator[str]:
    """Each note once, with the number of its commits; the rows themselves are in report.html."""
    found: dict[str, set[str]] = {}
    for row in view.rows:
        for note in row.notes:
            found.setdefault(one_line(note).replace(row.commit[:12], "this commit"), set()).add(row.point)
    for note, points in list(found.items())[:SHOWN]:
        yield f"{_count(len(points), 'commit')}: {code(note)}"
    if len(found) > SHOWN:
        yield f"and {len(found) - SHOWN} more notes, see report.html"


def _limitations(view: View) -> Iterator[str]:
    plan, answer = view.plan, view.answer
    yield from plan.notes
    yield from answer.notes
    guilty = None if view.guilty is None else view.history.points[view.guilty].id
    for file in unique(edit.file for edit in plan.edits):
        idle = _unchanged(view, file)
        for point, what in ((answer.last_good, "last good"), (guilty, "first bad")):
            if point is not None and point in idle:
                yield f"an edit of {code(file)} changed nothing at the {what} commit, {view.named(point)}: it ran without this edit"
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
