"""What a bisect reports, as plain sentences and sections that summary.md and report.html share, with shell lines to reproduce a point."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from seatrial.bisect.bisect_records import (
    PLACEHOLDERS,
    SKIP_REASONS,
    BisectAnswer,
    BisectPlan,
    BisectRun,
    EnvironmentPlan,
    History,
    Mark,
    Pin,
    Point,
    Repo,
    SkipKind,
    Standing,
    tree_variable,
)
from seatrial.core.text import counted, number, one_line, unique
from seatrial.report.markdown import code

_HOLES = re.compile("{(" + "|".join(PLACEHOLDERS) + ")}")
_MADE = ("output", "checkpoints")
"""Directories that a step has before its command runs."""


def commands(plan: BisectPlan, point: Point, patches: Path, inside: Sequence[Standing] = ()) -> tuple[str, ...]:
    """The lines. `patches`: where the patches lie that are files; `inside`: what was found out about submodules that the point moves."""
    pins = {pin.repo: pin for pin in point.pins}
    main = plan.repos[0]
    place = f"../{main.name}-{pins[main.name].commit[:12]}"
    lines = [f"cd {shlex.quote(main.path)}", shlex.join(["git", "worktree", "add", "--detach", place, pins[main.name].commit])]
    lines += [f"cd {shlex.quote(place)}", "git submodule update --init --recursive", *_inside(inside)]
    for repo in plan.repos[1:]:
        lines += _further(repo, pins[repo.name])
    for patch in plan.patches:
        file = patches / patch.source
        apply = ["git", "apply", "--3way", str(file)] if file.is_file() else ["git", "cherry-pick", "--no-commit", patch.source]
        lines.append(shlex.join(apply))
    lines += [shlex.join(["sed", "-i", "-e", edit.clauses, "--", edit.file]) for edit in plan.edits]
    return (*lines, *_environment(plan.environment), *_command(plan, point.commit))


def _inside(standings: Sequence[Standing]) -> Iterator[str]:
    """The commit that was found in a submodule, and those found further inside. Of two submodules that are guilty each by itself only
    the first is moved: the other was never tried together with it."""
    found = [one for one in standings if one.commit]
    for one in found:
        if one is found[0] or one.repo.startswith(f"{found[0].repo}/"):
            place = shlex.quote(one.repo)
            yield f"git -C {place} checkout --detach {one.commit} && git -C {place} submodule update --init --recursive"


def _further(repo: Repo, pin: Pin) -> Iterator[str]:
    """A further repository at its place in, or beside, the worktree of the first."""
    place = shlex.quote(pin.place)
    if not pin.place.startswith("../"):
        yield f"rm -rf {place}"  # the submodule as it is recorded
    yield f"git init --quiet {place} && git -C {place} fetch {shlex.quote(repo.path)} {pin.commit}"
    yield f"git -C {place} checkout --detach {pin.commit} && git -C {place} submodule update --init --recursive"
    yield f'export {tree_variable(repo.name)}="$PWD"/{place} PYTHONPATH="$PWD"/{place}/src:"$PWD"/{place}:"$PYTHONPATH"'


def _environment(plan: EnvironmentPlan) -> Iterator[str]:
    if plan.kind == "pip":
        yield f"python{plan.python} -m venv .venv && . .venv/bin/activate && pip install -r {shlex.quote(plan.lock)}"
    elif plan.kind == "uv":
        yield f"uv sync --frozen{f' --python {plan.python}' if plan.python else ''} && . .venv/bin/activate"
    if plan.packages and plan.kind != "none":
        pip = "pip" if plan.kind == "pip" else "uv pip"
        yield f"{pip} freeze > .venv/present.txt && {pip} install -c .venv/present.txt {shlex.join(plan.packages)}"
    if plan.build:
        yield shlex.join(plan.build)


def _command(plan: BisectPlan, commit: str) -> Iterator[str]:
    """Places, variables, the command, and the check on what it leaves."""
    filled = {"tree": ".", "output": "output", "checkpoints": "checkpoints", "commit": commit, "python": "python"}

    def fill(text: str) -> str:
        return _HOLES.sub(lambda hole: filled[hole[1]], text)

    words = (*plan.command, *plan.extra)
    told = "\n".join((*words, *plan.variables.values()))
    metrics = plan.metrics if plan.check else ""
    # A command that is not told where its metrics are to lie knows it by the variable.
    by_name = [name for name in _MADE if f"SEATRIAL_{name.upper()}" in told or (f"{{{name}}}" in metrics and f"{{{name}}}" not in told)]
    if made := [name for name in _MADE if name in by_name or f"{{{name}}}" in told or f"{{{name}}}" in metrics]:
        yield f"mkdir -p {' '.join(made)}"
    yield from (f'export SEATRIAL_{name.upper()}="$PWD"/{name}' for name in by_name)
    yield from (f"export {name}={shlex.quote(fill(value))}" for name, value in plan.variables.items())
    yield shlex.join([*(["seatrial", "run"] if plan.trial else []), *(fill(word) for word in words)])
    if plan.check:
        yield shlex.join(["seatrial", "check", fill(metrics), plan.check])


SHOWN = 12
"""Suspects, commits of one reason and the like that are named; the rest is counted."""


def percent(share: float) -> str:
    """A probability; only what is certain is 100 %."""
    return f"{math.floor(share * 1000 + 1e-9) / 10:g} %"


@dataclass(frozen=True)
class ReportLine:
    """A point that was run, or that is suspected."""

    index: int
    point: Point
    rows: tuple[BisectRun, ...]
    probability: float | None
    """Of being the first bad one; None for a point that is not suspected."""
    gap: int
    """Points between the line above and this one that were not run."""

    @property
    def mark(self) -> str:
        said = Counter(row.mark for row in self.rows if row.mark is not Mark.SKIP)
        if len(said) > 1:
            return f"{said[Mark.GOOD]} good, {said[Mark.BAD]} bad"
        return str(next(iter(said), Mark.SKIP)) if self.rows else "not run"

    @property
    def tone(self) -> str:
        """`good`, `bad`, `skip`, `mixed` or `none`."""
        return "mixed" if "," in self.mark else "none" if not self.rows else self.mark

    @property
    def value(self) -> str:
        """What was measured; of several runs the mean and the extent, and what was not finite."""
        found = [row.value for row in self.rows if row.value is not None]
        finite = [float(value) for value in found if not isinstance(value, str)]
        parts = [number(finite[0])] if finite else []
        if len(finite) > 1:
            parts = [f"{math.fsum(finite) / len(finite):.4g} ({min(finite):.4g} to {max(finite):.4g})"]
        return ", ".join([*parts, *unique(value for value in found if isinstance(value, str))])

    @property
    def reason(self) -> str:
        """Of its last run that decided something."""
        judged = [row for row in self.rows if row.mark is not Mark.SKIP] or self.rows
        return judged[-1].reason if judged else ""


@dataclass(frozen=True)
class BisectView:
    """A bisect, ready to be told."""

    directory: Path
    plan: BisectPlan
    history: History
    rows: tuple[BisectRun, ...]
    answer: BisectAnswer
    limit: float | None = None
    """What the check compares its value with, if that is one number."""

    @cached_property
    def by_point(self) -> dict[int, tuple[BisectRun, ...]]:
        found: dict[int, list[BisectRun]] = {}
        for row in self.rows:
            if on_history(row, self.history):
                found.setdefault(self.history.by_id[row.point], []).append(row)
        return {index: tuple(found[index]) for index in sorted(found)}

    @property
    def others(self) -> tuple[BisectRun, ...]:
        return tuple(row for row in self.rows if not on_history(row, self.history))

    @cached_property
    def suspects(self) -> dict[int, float]:
        by_id = self.history.by_id
        return {by_id[one.point]: one.probability for one in self.answer.suspects if one.point in by_id}

    @cached_property
    def lines(self) -> tuple[ReportLine, ...]:
        """In the order of the commits. Suspects that were not run are there when the answer names them."""
        named = set(self.suspects) if self.answer.state != "open" and len(self.suspects) <= SHOWN else set()
        made: list[ReportLine] = []
        for index in sorted({*self.by_point, *named}):
            gap = index - made[-1].index - 1 if made else index
            probability = self.suspects.get(index) if self.answer.state != "open" else None
            made.append(ReportLine(index, self.history.points[index], self.by_point.get(index, ()), probability, gap))
        return tuple(made)

    @property
    def count(self) -> int:
        return self.history.last

    def short(self, index: int) -> str:
        point = self.history.points[index]
        where = f" of {code(point.repo)}" if len(self.plan.repos) > 1 else ""
        return f"{code(point.commit[:12])}{where} {code(point.subject)}"

    def named(self, point: str | None) -> str:
        index = self.history.by_id.get(point or "")
        return "not known" if index is None else self.short(index)

    @property
    def title(self) -> str:
        return {"found": "First bad commit found", "range": "Narrowed to a range", "open": "Not finished"}[self.answer.state]

    @property
    def headline(self) -> str:
        suspects = sorted(self.suspects)
        if self.answer.state == "found" and suspects:
            sure = "" if self.answer.confidence >= 1 else f", with a confidence of {percent(self.answer.confidence)}"
            return f"The first bad commit is {self.short(suspects[0])}{sure}{''.join(self._closer())}."
        if self.answer.state == "range":
            sure = "" if self.answer.confidence >= 1 else f" with a confidence of {percent(self.answer.confidence)}"
            why = f": {one_line(self.answer.why).rstrip('.')}" if self.answer.why else ""
            return f"The first bad commit is one of {len(suspects)}{sure}, and no more can be told{why}."
        why = f" ({one_line(self.answer.why).rstrip('.')})" if self.answer.why else ""
        left = f" {len(suspects)} of {self.count} commits are still suspected." if suspects else ""
        return f"Not finished: the first bad commit is not known yet{why}.{left}"

    @property
    def inside(self) -> tuple[Standing, ...]:
        """What was found out about submodules. Only with one repository are they looked into; their names are none of the plan's."""
        return self.answer.standings if len(self.plan.repos) == 1 else ()

    def _closer(self) -> Iterator[str]:
        """What was found out about the commit: the commit of a submodule that it moves, or another repository that it needs."""
        for one in self.inside:
            if one.commit:
                sure = "" if one.confidence >= 1 else f", with a confidence of {percent(one.confidence)}"
                yield f"; inside of the submodule {code(one.repo)}, which it moves, it is {code(one.commit[:12])} {code(one.subject)}{sure}"
            elif one.verdict == "convicted":
                yield f"; the cause is that it moves the submodule {code(one.repo)}"
        repos = [] if self.inside else [one for one in self.answer.standings if one.repo != self.answer.suspects[0].repo]
        if needed := [code(one.repo) for one in repos if one.verdict == "accomplice"]:
            yield f"; it fails only together with {listed(needed)}"
        if guilty := [code(one.repo) for one in repos if one.verdict == "convicted"]:
            yield f"; {listed(guilty)} {'fails' if len(guilty) == 1 else 'fail'} without it, too"

    @property
    def reproduce(self) -> tuple[str, ...]:
        """Shell lines that run the answer's commit alone; of a range, the oldest that was seen to be bad."""
        index = self.guilty
        if index is None:
            return ()
        inside = self.inside if self.answer.state == "found" else ()
        return commands(self.plan, self.history.points[index], self.directory / "patches", inside)

    @property
    def guilty(self) -> int | None:
        """The first bad commit; of a range, the oldest that was seen to be bad."""
        if self.answer.state == "found" and self.suspects:
            return min(self.suspects)
        return self.history.by_id.get(self.answer.first_bad or "") if self.answer.state == "range" else None

    @property
    def why(self) -> str:
        """What is bad about it, in one sentence: what was measured before and there, or how it fails; empty when no run says it."""
        index = self.guilty
        line = next((line for line in self.lines if line.index == index), None)
        bad = next((row for row in reversed(line.rows) if row.mark is Mark.BAD), None) if line else None
        if line is None or bad is None:
            return ""
        told = self.told(bad.failure.shown if bad.failure and bad.failure.shown else bad.reason)
        first = "the first commit that was seen to be bad"
        if bad.value is None or not self.plan.check:
            return f"{'It' if self.answer.state == 'found' else first.capitalize()} fails: {code(told)}." if told else ""
        here = "here" if self.answer.state == "found" else f"at {first}"
        before = next((line for line in self.lines if line.point.id == self.answer.last_good and line.value), None)
        parts = [f"{code(before.value)} at the last good commit"] if before else []
        wanted = told.rpartition(", wanted ")[2] if ", wanted " in told else ""
        return ", ".join([*parts, f"{code(line.value)} {here}", *([f"wanted {code(wanted)}"] if wanted else [])]) + "."

    def told(self, reason: str) -> str:
        """A reason without the check, which is the same for every run."""
        return one_line(reason).replace(f"{one_line(self.plan.check)}: ", "") if self.plan.check else reason

    @property
    def run(self) -> tuple[BisectRun, ...]:
        """Rows of what was run here. The others were taken over: from a log, from equal contents, from a run of the same state."""
        return tuple(row for row in self.rows if row.directory)

    def subject(self, row: BisectRun) -> str:
        """Of the commit of a row, or what state it is of."""
        index = self.history.by_id.get(row.point)
        return row.subject if index is None or row.subject else self.history.points[index].subject

    def submodule(self, row: BisectRun) -> str:
        """The submodule that a row is about, or empty. Its place is part of the name that its repository has in the point."""
        start = f"{self.plan.repos[0].name}/"
        pins = (part.rpartition("@") for part in row.point.split("+"))
        return next((name.removeprefix(start) for name, _, commit in pins if commit == row.commit and name.startswith(start)), "")


def on_history(row: BisectRun, history: History) -> bool:
    return row.history == 0 and row.stage != "conviction" and row.point in history.by_id


def listed(texts: Sequence[str]) -> str:
    """Texts in a row; beyond a dozen they are counted."""
    more = len(texts) - SHOWN
    return ", ".join(texts[:SHOWN]) + (f" and {more} more" if more > 0 else "")


Section = tuple[str, tuple[str, ...]]


def sections(view: BisectView) -> tuple[Section, ...]:
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


def answer_lines(view: BisectView) -> tuple[str, ...]:
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
    return (*lines, f"Effort: {_effort(view)}, {counted(view.count, 'commit')} after the good end")


def _effort(view: BisectView) -> str:
    """Every run counts once, also those beside the searched commits; rows that were not run are counted apart."""
    beside = sum(bool(row.directory) for row in view.others)
    further = f" ({beside} of them further runs)" if beside else ""
    rounds = len({(row.history, row.round) for row in view.rows if row.stage == "search"})
    seconds = sum(row.seconds for row in view.run)
    took = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
    spent = f"{counted(len(view.run), 'run')} of {took} in all{further}, {counted(rounds, 'round')} of search"
    taken = len(view.rows) - len(view.run)
    return f"{spent}, {counted(taken, 'row')} taken over without a run" if taken else spent


def _skipped(view: BisectView) -> Iterator[str]:
    """By reason: how many, which, and the reason of the first."""
    found: dict[SkipKind, list[tuple[str, str]]] = {}
    for index, rows in view.by_point.items():
        if all(row.mark is Mark.SKIP for row in rows):
            commit = view.history.points[index].commit[:12]
            found.setdefault(rows[-1].skip or SkipKind.HAND, []).append((commit, rows[-1].reason))
    for kind, points in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
        why = next((reason for _, reason in points if reason), "")
        first = f"; the first one: {code(why)}" if why else ""
        yield f"{counted(len(points), 'commit')}: {SKIP_REASONS[kind]}: {listed([code(commit) for commit, _ in points])}{first}"


def _flaky(view: BisectView) -> Iterator[str]:
    for point in view.answer.flaky:
        index = view.history.by_id.get(point)
        if index is None:
            yield f"{code(point)}: its runs disagree"
            continue
        rows = view.by_point.get(index, ())
        said = ", ".join(f"{count} {mark}" for mark in Mark if (count := sum(row.mark is mark for row in rows)))
        yield f"{view.short(index)}: {said}"


def _repositories(view: BisectView) -> Iterator[str]:
    for one in view.answer.standings:
        commit = f" of {code(one.commit[:12])}" if one.commit else ""
        yield f"{code(one.repo)}: {one.verdict}{commit}: {one.why}"
    if len(view.plan.repos) > 1 and not view.answer.standings:
        yield "no repository is convicted or acquitted yet"


def _environments(view: BisectView) -> Iterator[str]:
    plan = view.plan.environment
    if plan.kind == "none":
        yield "every commit ran in the environment of the caller"
    else:
        run: list[BisectRun] = [row for row in view.rows if row.environment]
        kinds, built = len({row.environment for row in run}), sum(row.built for row in run)
        reused = f"{built} built, {len(run) - built} times reused"
        yield f"{counted(kinds, 'environment')} from {code(plan.lock or plan.kind)} by {plan.kind}: {reused}"
    if plan.packages:
        yield f"with packages beside the lock: {', '.join(code(package) for package in plan.packages)}"
    if plan.build:
        yield f"built before each run with {code(shlex.join(plan.build))}"


def _changed(view: BisectView) -> Iterator[str]:
    plan = view.plan
    for edit in plan.edits:
        yield f"{code(edit.file)} was edited in the tree of every run: {code(edit.clauses)}"
    judged = {row.point for row in view.run if row.mark is not Mark.SKIP}
    for file in unique(edit.file for edit in plan.edits):
        if idle := len(judged & _unchanged(view, file)):
            yield f"an edit of {code(file)} changed nothing at {idle} of the {counted(len(judged), 'commit')} that were run and judged"
    for patch in plan.patches:
        since = f", to commits from {code(patch.since[:12])} on" if patch.since else ""
        yield f"{code(patch.source)} was applied where it was missing{since}"
    if plan.extra:
        yield f"arguments were added to the command: {code(shlex.join(plan.extra))}"
    if plan.edits or plan.patches or plan.extra:
        yield "Warning: this changes what is measured; the answer holds for the changed command, and may not for the plain one"


def _unchanged(view: BisectView, file: str) -> set[str]:
    return {row.point for row in view.rows if file in row.unedited}


def _notes(view: BisectView) -> Iterator[str]:
    """Each note once, with the number of its commits; the rows themselves are in report.html."""
    found: dict[str, set[str]] = {}
    for row in view.rows:
        for note in row.notes:
            found.setdefault(one_line(note).replace(row.commit[:12], "this commit"), set()).add(row.point)
    for note, points in list(found.items())[:SHOWN]:
        yield f"{counted(len(points), 'commit')}: {code(note)}"
    if len(found) > SHOWN:
        yield f"and {len(found) - SHOWN} more notes, see report.html"


def _limitations(view: BisectView) -> Iterator[str]:
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
        yield f"{counted(replayed, 'mark')} came from a log that was replayed, and {'was' if replayed == 1 else 'were'} not run here"
    hand = sum(row.by_hand for row in view.rows)
    if hand:
        yield f"{counted(hand, 'row')} of the journal {'was' if hand == 1 else 'were'} changed by hand"


def _onward(view: BisectView) -> Iterator[str]:
    place = shlex.quote(str(view.directory))
    log = shlex.quote(str(view.directory / "bisect.log"))
    if view.answer.state != "found":
        yield f"go on where this ended: {code(f'seatrial bisect resume {place}')}"
    yield f"change marks in bisect.log or runs.jsonl, then start again from them: {code(f'seatrial bisect … --replay {log}')}"
    if len(view.plan.repos) == 1:
        yield f"go on with git alone: {code(f'git -C {shlex.quote(view.plan.repos[0].path)} bisect replay {log}')}"
    yield f"remove trees and stores, keep the reports: {code(f'seatrial bisect clean {place}')}"
