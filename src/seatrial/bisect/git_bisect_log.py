"""Results in the format of `git bisect log`, written and read back; marks from an earlier bisect."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from seatrial.bisect import bisect_dir
from seatrial.bisect.bisect_dir import PLAN
from seatrial.bisect.bisect_records import BisectAnswer, BisectPlan, BisectRun, History, Mark, Point, SkipKind
from seatrial.bisect.bisect_view import on_history
from seatrial.core.errors import UserError
from seatrial.core.files import read_model
from seatrial.core.guarded import read_file
from seatrial.core.records import replace
from seatrial.core.text import one_line
from seatrial.evidence.git import commit_of, git
from seatrial.evidence.git import text as decoded

_PINNED = re.compile(r"# [^\s:]+: \[([0-9a-f]{40}|[0-9a-f]{64})\]")
_HASH = re.compile(r"[0-9a-f]{4,64}")
_FLAGS = ("--no-checkout", "--first-parent")
_TERMS = {"--term-old": Mark.GOOD, "--term-good": Mark.GOOD, "--term-new": Mark.BAD, "--term-bad": Mark.BAD}
_PAIRS = ({"good": Mark.GOOD, "bad": Mark.BAD}, {"old": Mark.GOOD, "new": Mark.BAD})


def write_git_log(history: History, rows: Sequence[BisectRun], answer: BisectAnswer, redact: Callable[[str], str]) -> str:
    """The log. With several repositories it is all comments: no single `git bisect` could replay it."""

    marks = _marks(history, rows)
    one = len(history.points[0].pins) == 1
    lines = ["# Written by seatrial bisect; `git bisect replay` takes it." if one else "# Several repositories: git cannot replay this."]
    lines += ["git bisect start"] if one else []

    def comment(word: str, point: Point) -> str:
        return f"# {word}: [{point.commit}] {'' if one else f'{point.repo}: '}{redact(one_line(point.subject))}"

    # git keeps the bad commit that it reads last: the oldest must stand there.
    order = sorted((index for index in marks if marks[index] == {Mark.BAD}), reverse=True)
    order += sorted(set(marks) - set(order), key=lambda index: (marks[index] != {Mark.GOOD}, index))
    for index in order:
        mark, told = _for_git(history, answer, index, marks)
        lines.append(comment(mark, history.points[index]))
        if not told:
            lines.append("# the line above is not for git: the answer does not rest on it")
        elif one:
            lines.append(f"git bisect {mark} {history.points[index].commit}")
    if answer.state != "open":
        title = "first bad commit" if answer.state == "found" else "possible first bad commit"
        lines += ["# only skipped commits left to test"] if answer.state == "range" and not answer.model else []
        suspects = sorted(history.by_id[suspect.point] for suspect in answer.suspects if suspect.point in history.by_id)
        lines += [comment(title, history.points[index]) for index in suspects]
    return "\n".join(lines) + "\n"


def _marks(history: History, rows: Sequence[BisectRun]) -> dict[int, set[Mark]]:
    """What the runs of each point say; skips only where there is nothing else. Runs beside this history are left out."""
    found: dict[int, set[Mark]] = {}
    for row in rows:
        if on_history(row, history):
            found.setdefault(history.by_id[row.point], set()).add(row.mark)
    return {index: marks - {Mark.SKIP} or marks for index, marks in found.items()}


def _for_git(history: History, answer: BisectAnswer, index: int, marks: dict[int, set[Mark]]) -> tuple[Mark, bool]:
    """The one mark of a point, and whether git is told. Where runs disagree git is told to skip, but for the ends, which are known."""
    suspects = sum(1 << history.by_id[suspect.point] for suspect in answer.suspects if suspect.point in history.by_id)
    if len(marks[index]) == 1:
        (mark,) = marks[index]
    elif index in (0, history.last):
        mark = Mark.BAD if index else Mark.GOOD
    else:
        mark = Mark.SKIP
    if mark is Mark.GOOD:
        return mark, not history.ancestors[index] & suspects
    if mark is Mark.BAD:
        healed = any(said == {Mark.GOOD} and history.ancestors[other] >> index & 1 for other, said in marks.items())
        return mark, not suspects & ~history.ancestors[index] if suspects else not healed
    return mark, True


@dataclass(frozen=True)
class Marked:
    mark: Mark
    commit: str
    line: int


QUESTION = ("command", "extra", "trial", "check", "metrics", "failure", "any_failure", "nightly", "variables", "edits", "patches")
"""What of a plan says what is measured, and how it is judged."""


@dataclass(frozen=True, slots=True)
class EarlierMarks:
    """What was read, before it is known which history it belongs to."""

    path: Path
    marks: tuple[Marked, ...] | None = None
    """Of a log."""
    journal: tuple[BisectRun, ...] = ()
    notes: tuple[str, ...] = ()

    def end(self, mark: Mark) -> str | None:
        if self.marks is not None:
            return next((marked.commit for marked in self.marks if marked.mark is mark), None)
        return next((row.commit for row in self.journal if row.stage == "ends" and row.history == 0 and row.mark is mark), None)

    def rows(self, history: History, plan: BisectPlan) -> tuple[BisectRun, ...]:
        rows: Sequence[BisectRun] = self.journal if self.marks is None else as_rows(self, history)
        beside = self.path.with_name(PLAN)
        old = read_model(beside, BisectPlan) if self.marks is None and beside.is_file() else None
        if old is None or any(getattr(old, name) != getattr(plan, name) for name in QUESTION):
            on_line = [row for row in rows if row.history == 0 and row.stage != "conviction"]
            rows = [replace(row, stage="replay") for row in on_line]
        strange = next((row for row in rows if row.history == 0 and row.stage != "conviction" and row.point not in history.by_id), None)
        if strange is not None:
            message = f"{self.path}: {strange.commit[:12]} is not between the ends"
            raise UserError(message, "delete its line, or name the ends that the log was made with: --good REV --bad REV")
        return tuple(replace(row, number=number, directory="") for number, row in enumerate(rows, start=1))


def parse_git_log(text: str, repo: Path, path: Path) -> EarlierMarks:
    """Read a log of a bisect of `repo`; `path` is where it came from, for messages."""
    reader = _GitLogReader(repo, path)
    # Not `splitlines`: a subject may hold other characters that end a line for it, and what follows them must stay a comment.
    for count, line in enumerate(text.split("\n"), start=1):
        reader.line(count, line.strip())
    reader.contradictions()
    if not reader.marks:
        raise UserError(f"{path}: marks no commit", "give the output of `git bisect log`, or bisect.log of a bisect directory")
    return EarlierMarks(path, tuple(reader.marks), notes=tuple(reader.notes))


@dataclass
class _GitLogReader:
    """Takes a log line by line."""

    repo: Path
    path: Path
    marks: list[Marked] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    words: dict[str, Mark] = field(default_factory=lambda: dict(_PAIRS[0]))
    settled: bool = False
    started: bool = False
    above: list[str] = field(default_factory=list)
    """Commits that the comments right above name."""
    count: int = 0

    def line(self, count: int, line: str) -> None:
        self.count = count
        if not line or line.startswith("#"):
            if pinned := _PINNED.match(line):
                self.above.append(pinned.group(1))
            return
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise self.error(f"{line!r}: {error}", "close the quotes, or delete the line") from error
        words = ["git", "bisect", *words[1:]] if words[0] == "git-bisect" else words
        if words[:2] != ["git", "bisect"] or len(words) < 3:
            raise self.error(f"not a line of a bisect log: {line!r}", "delete the line, or put `# ` in front of it")
        if words[2] == "start":
            self.start(words[3:])
        else:
            self.mark(words[2], words[3:])
        self.above.clear()

    def start(self, arguments: list[str]) -> None:
        if self.started or self.marks:
            raise self.error("a second bisect starts here", "keep the lines of one bisect only")
        self.started = True
        terms: dict[Mark, str] = {}
        while arguments and arguments[0].startswith("--") and arguments[0] != "--":
            name, equals, value = arguments.pop(0).partition("=")
            if name in _TERMS:
                if not equals and not arguments:
                    raise self.error(f"{name} without a word", "write the word behind it, or delete it")
                terms[_TERMS[name]] = value if equals else arguments.pop(0)
            elif name not in _FLAGS:
                raise self.error(f"unknown option {name}", f"known are {', '.join((*_FLAGS, *_TERMS))}")
        if terms:
            self.words = {terms.get(Mark.GOOD, "good"): Mark.GOOD, terms.get(Mark.BAD, "bad"): Mark.BAD}
            self.settled = True
            if len(self.words) < 2 or "skip" in self.words:
                raise self.error("good and bad must have two names, and none of them `skip`", "correct the --term options")
        self.ends(arguments)

    def ends(self, arguments: list[str]) -> None:
        """The commits that `start` was given: the bad one, then good ones, then paths."""
        cut = arguments.index("--") if "--" in arguments else len(arguments)
        named, paths = arguments[:cut], arguments[cut + 1 :]
        pinned = self.above if self.above and (len(self.above) == len(named) or cut == len(arguments) > len(self.above)) else []
        for place, word in enumerate(named):
            if place < len(pinned):
                commit = self.hash(word) or self.known(pinned[place])
            elif pinned or (cut == len(arguments) and not _HASH.fullmatch(word) and commit_of(self.repo, word) is None):
                paths = [*named[place:], *paths]
                break
            else:
                commit = self.commit(word)
            self.marks.append(Marked(Mark.GOOD if place else Mark.BAD, commit, self.count))
        if paths:
            self.notes.append(f"{self.path}: was made with the paths {shlex.join(paths)}; here every commit counts")

    def mark(self, word: str, revisions: list[str]) -> None:
        if word != "skip" and word not in self.words:
            if self.settled or word not in _PAIRS[1]:
                raise self.error(f"unknown mark {word!r}", f"write {', '.join(self.words)} or skip")
            self.words = dict(_PAIRS[1])
        self.settled = self.settled or word != "skip"
        if not revisions:
            raise self.error(f"`git bisect {word}` without a commit", "write the hash of the commit behind it")
        for revision in revisions:
            commits = self.range(revision) if word == "skip" and ".." in revision else [self.commit(revision)]
            self.marks += [Marked(Mark.SKIP if word == "skip" else self.words[word], commit, self.count) for commit in commits]

    def range(self, text: str) -> list[str]:
        first, _, last = text.partition("..")
        if last.startswith("."):
            raise self.error(f"{text}: a range is written with two dots", f"write {first}..{last[1:]}")
        ends = [self.commit(end) for end in (first, last)]
        found = decoded(git(self.repo, "rev-list", f"{ends[0]}..{ends[1]}")).split()
        if not found:
            raise self.error(f"{text}: no commit lies in this range", "the older commit comes first")
        return found

    def commit(self, word: str) -> str:
        """The commit that a hash names; other names move, and are refused."""
        if found := self.hash(word):
            return found
        if _HASH.fullmatch(word):
            return self.known(word)
        now = commit_of(self.repo, word)
        fix = f"write the hash of the commit that was meant; today {word} is {now}" if now else "write the hash of the commit"
        raise self.error(f"{word}: a name that may move, not the hash of a commit", fix)

    def hash(self, word: str) -> str | None:
        """The commit whose hash, maybe shortened, this is. A branch may be called `beef`: that is no hash."""
        found = commit_of(self.repo, word) if _HASH.fullmatch(word) else None
        return found if found and found.startswith(word) else None

    def known(self, commit: str) -> str:
        if found := self.hash(commit):
            return found
        fetch = f"git -C {shlex.quote(str(self.repo))} fetch"
        raise self.error(
            f"{commit} names no single commit of {self.repo}", f"write the whole hash; fetch the commit if it is not there: {fetch}"
        )

    def contradictions(self) -> None:
        """Good and bad of one commit cannot both be replayed; a skip gives way to both."""
        seen: dict[str, Marked] = {}
        for marked in self.marks:
            if marked.mark is Mark.SKIP:
                continue
            before = seen.setdefault(marked.commit, marked)
            if before.mark is not marked.mark:
                self.count = marked.line
                message = f"{marked.commit} is {marked.mark} here and {before.mark} in line {before.line}"
                raise self.error(message, f"delete one of the lines {before.line} and {marked.line}, or write skip in both")

    def error(self, message: str, fix: str) -> UserError:
        return UserError(f"{self.path}:{self.count}: {message}", fix)


def as_rows(replayed: EarlierMarks, history: History) -> tuple[BisectRun, ...]:
    if len(history.points[0].pins) > 1:
        message = f"{replayed.path}: a log of git bisect speaks of one repository, and this bisect has several"
        raise UserError(message, "replay a runs.jsonl instead, or name one --repo")
    first = {(marked.mark, marked.commit): marked for marked in reversed(replayed.marks or ())}
    return tuple(
        BisectRun(
            number=number,
            stage="replay",
            round=0,
            point=marked.commit,
            commit=marked.commit,
            mark=marked.mark,
            skip=SkipKind.HAND if marked.mark is Mark.SKIP else None,
            reason=f"{replayed.path.name}:{marked.line} says so",
        )
        for number, marked in enumerate(sorted(first.values(), key=lambda one: one.line), start=1)
    )


def read_marks(path: Path, repo: Path) -> EarlierMarks:
    """Read either format; the first character tells them apart."""
    try:
        # Not as text: a carriage return in a subject must not begin a line.
        text = read_file(path).decode("utf-8", "backslashreplace")
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror or error}", "name a `git bisect log`, or a runs.jsonl") from error
    if text.lstrip().startswith("{"):
        found = bisect_dir.read_runs(path)
        return EarlierMarks(path, journal=found.rows, notes=found.notes)
    return parse_git_log(text, repo, path)
