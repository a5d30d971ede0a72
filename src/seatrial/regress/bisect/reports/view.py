"""What a bisect has to say, as plain sentences: summary.md and report.html show the same ones.

- In a sentence, what stands between backticks is code. Recorded text (subjects, reasons) comes in by `code`, so that none of it can be
  markup, mention somebody on GitHub, or recolour a terminal.
- Nothing is rounded in favour of the answer: 99.96 % is shown as 99.9 %.
- A commit counts as run only by rows of the searched history; runs inside a submodule or of other combinations are listed apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from seatrial.regress.bisect.record import Answer, History, Mark, Plan, Point, Run, SkipKind, Standing
from seatrial.regress.bisect.reports.reproduce import commands
from seatrial.report.markdown import code
from seatrial.report.text import number, one_line, unique

SHOWN = 12
"""Suspects, commits of one reason and the like that are named; the rest is counted."""
KINDS = {
    SkipKind.COMMAND: "the command asked for it (exit code 125)",
    SkipKind.TREE: "the tree could not be made",
    SkipKind.MISSING: "a file that the command names does not exist there",
    SkipKind.ABSENT: "a file that the command names does not exist there",
    SkipKind.UNEDITED: "a file of --edit does not exist there",
    SkipKind.BUILD: "the environment could not be built",
    SkipKind.BUILD_COMMAND: "the build command failed",
    SkipKind.ENVIRONMENT: "the machine, the network or the cluster failed, not the commit",
    SkipKind.OTHER_FAILURE: "it failed in another way than the bad end",
    SkipKind.METRIC: "the metric is missing or not finite",
    SkipKind.TRIAL: "the trial was Blocked or Skipped",
    SkipKind.HAND: "a person said so",
}


def percent(share: float) -> str:
    """A probability; only what is certain is 100 %."""
    return f"{math.floor(share * 1000 + 1e-9) / 10:g} %"


@dataclass(frozen=True)
class Line:
    """A point that was run, or that is suspected."""

    index: int
    point: Point
    rows: tuple[Run, ...]
    probability: float | None
    """Of being the first bad one; None for a point that is not suspected."""
    gap: int
    """Points between the line above and this one that were not run."""

    @property
    def mark(self) -> str:
        """What its runs say."""
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
class View:
    """A bisect, ready to be told."""

    directory: Path
    plan: Plan
    history: History
    rows: tuple[Run, ...]
    answer: Answer
    limit: float | None = None
    """What the check compares its value with, if that is one number."""

    @cached_property
    def by_point(self) -> dict[int, tuple[Run, ...]]:
        """The rows of each point of the history."""
        found: dict[int, list[Run]] = {}
        for row in self.rows:
            if on_history(row, self.history):
                found.setdefault(self.history.by_id[row.point], []).append(row)
        return {index: tuple(found[index]) for index in sorted(found)}

    @property
    def others(self) -> tuple[Run, ...]:
        """Rows that test something beside the history."""
        return tuple(row for row in self.rows if not on_history(row, self.history))

    @cached_property
    def suspects(self) -> dict[int, float]:
        """Probability of each suspected point of the history."""
        by_id = self.history.by_id
        return {by_id[one.point]: one.probability for one in self.answer.suspects if one.point in by_id}

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """In the order of the commits. Suspects that were not run are there when the answer names them."""
        named = set(self.suspects) if self.answer.state != "open" and len(self.suspects) <= SHOWN else set()
        made: list[Line] = []
        for index in sorted({*self.by_point, *named}):
            gap = index - made[-1].index - 1 if made else index
            probability = self.suspects.get(index) if self.answer.state != "open" else None
            made.append(Line(index, self.history.points[index], self.by_point.get(index, ()), probability, gap))
        return tuple(made)

    @property
    def count(self) -> int:
        """Commits that may be the first bad one, before anything was run."""
        return self.history.last

    def short(self, index: int) -> str:
        """A point in a sentence."""
        point = self.history.points[index]
        where = f" of {code(point.repo)}" if len(self.plan.repos) > 1 else ""
        return f"{code(point.commit[:12])}{where} {code(point.subject)}"

    def named(self, point: str | None) -> str:
        """A point by its id."""
        index = self.history.by_id.get(point or "")
        return "not known" if index is None else self.short(index)

    @property
    def title(self) -> str:
        """Two or three words."""
        return {"found": "First bad commit found", "range": "Narrowed to a range", "open": "Not finished"}[self.answer.state]

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
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
    def run(self) -> tuple[Run, ...]:
        """Rows of what was run here. The others were taken over: from a log, from equal contents, from a run of the same state."""
        return tuple(row for row in self.rows if row.directory)

    def subject(self, row: Run) -> str:
        """Of the commit of a row, or what state it is of."""
        index = self.history.by_id.get(row.point)
        return row.subject if index is None or row.subject else self.history.points[index].subject

    def submodule(self, row: Run) -> str:
        """The submodule that a row is about, or empty. Its place is part of the name that its repository has in the point."""
        start = f"{self.plan.repos[0].name}/"
        pins = (part.rpartition("@") for part in row.point.split("+"))
        return next((name.removeprefix(start) for name, _, commit in pins if commit == row.commit and name.startswith(start)), "")


def on_history(row: Run, history: History) -> bool:
    """Whether a row speaks of a point of the searched history."""
    return row.history == 0 and row.stage != "conviction" and row.point in history.by_id


def listed(texts: Sequence[str]) -> str:
    """Texts in a row; beyond a dozen they are counted."""
    more = len(texts) - SHOWN
    return ", ".join(texts[:SHOWN]) + (f" and {more} more" if more > 0 else "")
