"""Signatures of known failures: read from TOML, matched in a log.

- A file holds `[[signature]]` tables with the keys of `core.specs.Signature`; a wrong key, a missing boundary, a
  repeated id or a bad pattern is a UserError that names file and entry: no rule silently never applies.
- Patterns are searched line by line, with and without the process prefix, so that `^` means the start of either.
- `Scan` takes the log once, in blocks: the search of a block is only a filter, the line decides.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from seatrial.core import registry
from seatrial.core.errors import UserError
from seatrial.core.files import read_text
from seatrial.core.guarded import BadValue, parse_toml
from seatrial.core.log_text import required
from seatrial.core.specs import Milestone, Signature
from seatrial.core.verdict import Verdict
from seatrial.triage.causes import Reached
from seatrial.triage.log import Line

GENERAL = Path(__file__).with_name("signatures.toml")
"""Failures that any loop may meet; always part of a diagnosis."""
_BLOCK = 2000
_REPEATED = re.compile(r"\[repeated ([0-9]{1,9})x across cluster\]")
"""Ray prints a line of several processes once, with their number."""


class Hit(NamedTuple):
    """A line that a pattern matched."""

    line: int
    text: str


def load_signatures(path: Path) -> tuple[Signature, ...]:
    """Read a signatures.toml. Those of installed distributions come with the general ones: they hold for any loop, too.

    An id of two of them is a UserError that names both.
    """
    found = [*_read(path)]
    origins = {signature.id: str(path) for signature in found}
    for extension in registry.extensions(registry.SIGNATURES) if path == GENERAL else ():
        for signature in _read(extension.file()):
            if signature.id in origins:
                raise extension.error(f"has a signature {signature.id}, which is also in {origins[signature.id]}: rename it")
            origins[signature.id] = str(extension)
            found.append(signature)
    return tuple(found)


def _read(path: Path) -> tuple[Signature, ...]:
    try:
        data = parse_toml(read_text(path))
    except BadValue as error:
        raise UserError(f"{path}: not valid TOML: {error}", "correct the file at that place") from error
    unknown = sorted(set(data) - {"signature"})
    if unknown or not isinstance(data.get("signature", []), list):
        raise UserError(f"{path}: unknown key {', '.join(unknown) or 'signature'}", "write every entry as a [[signature]] table")
    signatures: dict[str, Signature] = {}
    for index, entry in enumerate(data.get("signature", []), 1):
        where = f"{path}: signature {index} ({entry.get('id', 'no id') if isinstance(entry, dict) else 'not a table'})"
        signature = _signature(where, entry)
        if signature.id in signatures:
            raise UserError(f"{where}: id is used twice", "give every signature its own id")
        signatures[signature.id] = signature
    return tuple(signatures.values())


def _signature(where: str, entry: Any) -> Signature:
    try:
        signature = Signature.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "(entry)"
        allowed = ", ".join(Signature.model_fields)
        raise UserError(f"{where}: {key}: {first['msg']}", f"allowed keys: {allowed}") from error
    for pattern in (signature.pattern, *signature.also, *signature.unless):
        compile_pattern(where, pattern)
    silent, limited = signature.silent, bool(signature.tolerated or signature.share)
    skipped = signature.verdict is Verdict.PASS or (signature.verdict is Verdict.SKIPPED and not silent)
    unsupported = f"verdict: {signature.verdict} is not supported by a failure"
    for wrong, problem, fix in (
        (signature.harmless and silent, "harmless and silent exclude each other", "remove one of them"),
        (not signature.harmless and signature.boundary is None, "boundary: missing", "name the boundary, or set harmless = true"),
        (skipped, unsupported, "use Fail or Blocked; Skipped (nothing was run) only with silent = true"),
        (limited and not silent, "tolerated and share are limits of silent signatures", "add silent = true, or remove them"),
        (signature.bare and (limited or not silent), "bare needs silent, and no limit", "add silent = true, remove tolerated and share"),
        (signature.frame and (silent or signature.harmless), "frame excludes silent and harmless", "remove one of them"),
    ):
        if wrong:
            raise UserError(f"{where}: {problem}", fix)
    return signature


def compile_pattern(where: str, pattern: str) -> re.Pattern[str]:
    """Compile a pattern so that `^` and `$` mean a line; a bad one is a UserError that names `where`."""
    if not pattern or r"\A" in pattern or r"\Z" in pattern:
        raise UserError(f"{where}: pattern {pattern!r} can never match a line", "write a pattern, with ^ and $ for a line's start and end")
    try:
        return re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise UserError(f"{where}: pattern {pattern!r}: {error}", "correct the regular expression") from error


class Scan:
    """One pass over a log: every match of the milestones, and the first match of each signature's patterns."""

    def __init__(self, milestones: Sequence[Milestone], signatures: Sequence[Signature]) -> None:
        self.reached: list[Reached] = []
        self.hits: dict[str, Hit] = {}
        """First match by pattern."""
        self.times: dict[str, int] = {}
        """How often the pattern of a silent signature matched."""
        self._milestones = [(m.id, compile_pattern(f"milestone {m.id}", m.pattern)) for m in milestones]
        self._wanted = {
            pattern: compile_pattern(f"signature {s.id}", pattern)
            for s in signatures
            for pattern in ((s.pattern,) if s.silent or s.harmless else ()) + s.also + s.unless
        }
        self._counted = {s.pattern for s in signatures if s.silent}
        self._lines: list[Line] = []

    def feed(self, line: Line) -> None:
        """Take the next line of the log."""
        self._lines.append(line)
        if len(self._lines) >= _BLOCK:
            self.finish()

    def finish(self) -> None:
        """Search what was fed since the last search; call it once after the last line."""
        if not self._lines:
            return
        block = _Block(self._lines)
        self._lines = []
        found = [(line.number, order, line.process, name) for order, (name, p) in enumerate(self._milestones) for line in block.matches(p)]
        self.reached.extend(Reached(number, process, name) for number, _, process, name in sorted(set(found)))
        for pattern, compiled in list(self._wanted.items()):
            counted = pattern in self._counted
            for line in block.matches(compiled):
                self.hits.setdefault(pattern, Hit(line.number, line.text))
                if not counted:
                    break
                self.times[pattern] = self.times.get(pattern, 0) + times(line.text)
            if pattern in self.hits and not counted:
                del self._wanted[pattern]

    def counts(self, signature: Signature) -> bool:
        """Whether the rest of the log lets the signature count: every `also` occurs and no `unless` does."""
        return all(p in self.hits for p in signature.also) and not any(p in self.hits for p in signature.unless)


class _Block:
    """Consecutive lines joined for fast searching."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._lines: list[Line] = []
        self._ends: list[int] = []
        texts: list[str] = []
        end = 0
        for line in lines:
            for text in (line.text, line.body) if line.process else (line.text,):
                texts.append(text)
                self._lines.append(line)
                end += len(text) + 1
                self._ends.append(end)
        self._texts = texts
        self._joined = "\n".join(texts)
        lower = self._joined.lower()
        self._lower = lower if len(lower) == len(self._joined) else "\n".join(map(_lower, texts))

    def matches(self, pattern: re.Pattern[str]) -> Iterator[Line]:
        """Lines that the pattern matches, in order and once each. A match across lines is none."""
        last: Line | None = None
        for index in self._candidates(pattern):
            if self._lines[index] is not last and pattern.search(self._texts[index]):
                last = self._lines[index]
                yield last

    def _candidates(self, pattern: re.Pattern[str]) -> Iterable[int]:
        """The indices of the lines that may match: those that hold what every match holds, where that is known."""
        needed = required(pattern)
        if needed is None:
            return self._searched(pattern)
        joined = self._lower if needed.lower else self._joined
        found: set[int] = set()
        for text in needed.texts:
            position = joined.find(text)
            while position >= 0:
                index = bisect_right(self._ends, position)
                found.add(index)
                position = joined.find(text, self._ends[index])
        return sorted(found)

    def _searched(self, pattern: re.Pattern[str]) -> Iterator[int]:
        """The lines in which a search of the whole block ends up."""
        position = index = 0
        while (match := pattern.search(self._joined, position)) is not None:
            while self._ends[index] <= match.start():
                index += 1
            yield index
            position = self._ends[index]
            if position > len(self._joined):
                return


def _lower(text: str) -> str:
    """A text in small letters, of the same length: a few capital letters have small ones of two."""
    lower = text.lower()
    return lower if len(lower) == len(text) else "".join(one if len(one) == 1 else "?" for one in map(str.lower, text))


def times(text: str) -> int:
    """For how many lines this one stands."""
    found = _REPEATED.search(text)
    return int(found[1]) if found else 1


def first_match(signature: Signature, texts: Iterable[Hit]) -> Hit | None:
    """The first of the given lines that the signature's pattern matches."""
    pattern = compile_pattern(f"signature {signature.id}", signature.pattern)
    return next((hit for hit in texts if pattern.search(hit.text)), None)
