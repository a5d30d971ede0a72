"""Reading a diff: which line or path of it asks for which level, and what of it asks for none.

- A path that the loop's table knows to need no level (documentation, recipes) is set aside first: neither a glob nor a word in it counts.
- Words are searched in the changed lines of all other paths; in files of dependency pins only for the pins that matter.
- What cannot be read (a diff that is too large, a pin file without lines) is taken to ask for its levels.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from seatrial.evidence.changes import ChangedLine
from seatrial.model.globs import matches
from seatrial.model.knowledge import Concern, Level, Surface
from seatrial.model.loop import Loop

_DEFINES = re.compile(r"(?:async def|def|class)\s+(\w+)")


@dataclass(frozen=True, slots=True)
class Diff:
    """What changed in one repository."""

    repo: str
    base: str
    paths: tuple[str, ...]
    lines: tuple[ChangedLine, ...] = ()
    """Added and removed lines, for words."""
    complete: bool = True
    """False when the diff was too large to be read whole: a word that is missing then proves nothing."""
    packages: tuple[str, ...] = ()
    """What the checkout provides."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One path or line of a diff that asks for a level, and the rule by which it does."""

    level: int
    repo: str
    path: str
    rule: str
    """The glob, word or import, in words."""
    concern: str = ""
    """The row of the loop's table."""
    line: int | None = None
    text: str = ""
    """The changed line, as it stands: it may hold a secret."""

    @property
    def reason(self) -> str:
        """One line for people."""
        place = self.path if self.line is None else f"{self.path}:{self.line}"
        return f"{self.repo}: {place} {self.rule}" + (f" ({self.concern})" if self.concern else "")


@dataclass(slots=True)
class Reading:
    """What one diff asks for."""

    causes: list[Cause] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    """Paths that no rule names, and lines that were not read."""
    not_needed: list[str] = field(default_factory=list)
    """Paths that are known to need no level."""


def read(loop: Loop, diff: Diff) -> Reading:
    """Hold a diff against everything that the loop knows."""
    found = Reading()
    rows = [row for row in loop.concerns() if row.package is None or row.package in diff.packages]
    aside: set[str] = set()
    for path in diff.paths:
        if any(row.glob_of(path) for row in rows if not row.levels):
            aside.add(path)
            found.not_needed.append(f"{diff.repo}: {path}")
            continue
        pins = [row for row in rows if row.only_with and row.glob_of(path)]
        aside |= {path} if pins else set()
        causes = [*_by_path(loop.levels(), rows, diff, path), *(cause for row in pins for cause in _by_pin(row, diff, path))]
        found.causes += causes
        if not causes:
            (found.not_needed if pins else found.unmatched).append(f"{diff.repo}: {path}")
    searched = [line for line in diff.lines if line.path not in aside]
    found.causes += _by_word(loop.levels(), rows, diff, searched)
    found.causes += [cause for surface in loop.surfaces() for cause in _by_import(loop.title, surface, diff, searched)]
    if not diff.complete:
        found.unmatched.append(f"{diff.repo}: lines beyond what is read of a diff")
    return found


def _by_path(levels: Iterable[Level], rows: Iterable[Concern], diff: Diff, path: str) -> Iterator[Cause]:
    for level in levels:
        glob = next((glob for glob in level.required_when if matches(path, glob)), None)
        if glob is not None:
            yield Cause(level.number, diff.repo, path, f"matches {glob}")
    for row in rows:
        glob = None if row.only_with else row.glob_of(path)
        if glob is not None:
            yield from (Cause(number, diff.repo, path, f"matches {glob}", row.name) for number in row.levels)


def _by_pin(row: Concern, diff: Diff, path: str) -> Iterator[Cause]:
    """A row that asks for words: by the line that says one, or because no line could be read."""
    lines = [line for line in diff.lines if line.path == path]
    said = next(((line, word) for line in lines for word in row.only_with if _beginning(word).search(f"{line.within}\n{line.text}")), None)
    if said is not None:
        yield from (_at(number, diff, said[0], f"says {said[1]!r}", row.name) for number in row.levels)
    elif not lines or not diff.complete:
        rule = f"matches {row.glob_of(path)}, and its lines were not read"
        yield from (Cause(number, diff.repo, path, rule, row.name) for number in row.levels)


def _by_word(levels: Iterable[Level], rows: Iterable[Concern], diff: Diff, lines: Sequence[ChangedLine]) -> Iterator[Cause]:
    """Words that occur in changed lines, each by the first line that says it."""
    wanted: list[tuple[tuple[int, ...], str, str]] = [((level.number,), word, "") for level in levels for word in level.words]
    wanted += [(row.levels, word, row.name) for row in rows for word in row.words]
    # One text for all: a large diff is searched for some sixty words.
    whole = "\n".join(line.text for line in lines)
    starts = list(accumulate((len(line.text) + 1 for line in lines), initial=0))
    for numbers, word, name in wanted:
        found = _beginning(word).search(whole)
        if found is not None:
            line = lines[bisect_right(starts, found.start()) - 1]
            yield from (_at(number, diff, line, f"says {word!r}", name) for number in numbers)


def _by_import(title: str, surface: Surface, diff: Diff, lines: Sequence[ChangedLine]) -> Iterator[Cause]:
    """What the loop imports: each name by the first changed line inside its definition."""
    told: set[str] = set()
    inside = ""
    before: ChangedLine | None = None
    for line in lines:
        if not surface.is_file(line.path):
            continue
        if before is None or (line.within, line.removed) != (before.within, before.removed) or line.number != before.number + 1:
            inside = _defined(line.within)
        inside, before = _defined(line.text) or inside, line
        name = inside if inside in surface.names else "" if surface.names else surface.module
        if name and name not in told:
            told.add(name)
            yield from (_at(number, diff, line, f"is in {name}, which {title} imports", "") for number in surface.levels)


def _defined(text: str) -> str:
    """The function or class that a line of the outermost level opens."""
    found = _DEFINES.match(text)
    return found[1] if found else ""


def _beginning(word: str) -> re.Pattern[str]:
    """Finds where a word begins; what follows it does not matter."""
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(word)}", re.IGNORECASE)


def _at(level: int, diff: Diff, line: ChangedLine, rule: str, concern: str) -> Cause:
    return Cause(level, diff.repo, line.path, rule, concern, line.number, f"{'-' if line.removed else '+'} {line.text.strip()}")
