"""Which tests a change can reach: a pure function of what is known and of the digests of today.

- A test is left out only if some passing record of it has nothing but dependencies that are the same now, and it did not fail last.
- A skip is no proof: the record of a test that skipped itself never holds, whatever stayed the same.
- Every selected test has one reason: new, failed or skipped before, or a dependency that changed (the newest record's first).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from seatrial.regress.select.files.digests import ABSENT, EXISTS, IMPORTS, LEVEL, LISTING, UNSETTLED, WHOLE, Version

Now = Callable[[str, str], str]

SKIPPED: Version = ("", "@skipped", UNSETTLED)
"""All that is recorded of a test that skipped itself: it never holds."""


class Why(StrEnum):
    """The reasons, in the order of the summary."""

    AFFECTED = "affected"
    NEW = "new"
    FAILED = "failed before"
    SKIPPED = "skipped before"


@dataclass(slots=True)
class Known:
    """What the state file says: versions and sets by number, records of a test newest first."""

    versions: dict[int, Version] = field(default_factory=dict)
    sets: dict[int, tuple[int, ...]] = field(default_factory=dict)
    records: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Choice:
    """One test: selected with a reason, or left out (`why` is None)."""

    test: str
    why: Why | None
    detail: str = ""
    path: str = ""
    by: str = ""  # what else than a file

    def line(self) -> str:
        return f"{self.test}: {self.why}" + (f": {self.detail}" if self.detail else "")


def choose(known: Known, now: Now, tests: Sequence[str]) -> list[Choice]:
    """One choice per test, in the order given."""
    changed = Changed(known, now)
    return [_choice(known, changed, test) for test in tests]


class Changed:
    """The first changed version of each set, looked up once per set."""

    def __init__(self, known: Known, now: Now) -> None:
        self._known = known
        self._now = now
        self._found: dict[int, Version | None] = {}

    def of(self, sets: Iterable[int]) -> Version | None:
        for one in sets:
            if one not in self._found:
                self._found[one] = self._look(one)
            found = self._found[one]
            if found is not None:
                return found
        return None

    def _look(self, number: int) -> Version | None:
        members = self._known.sets.get(number)
        if members is None:
            return ("", f"set {number}", "missing from the state file")
        for member in members:
            version = self._known.versions.get(member)
            if version is None:
                return ("", f"version {member}", "missing from the state file")
            path, block, digest = version
            if digest == UNSETTLED or self._now(path, block) != digest:
                return version
        return None


def _choice(known: Known, changed: Changed, test: str) -> Choice:
    if test in known.failed:
        return Choice(test, Why.FAILED)
    first: Version | None = None
    for sets in known.records.get(test, ()):
        found = changed.of(sets)
        if found is None:
            return Choice(test, None)
        first = first or found
    if first is None:
        return Choice(test, Why.NEW)
    if first == SKIPPED:
        return Choice(test, Why.SKIPPED)
    path, block, _ = first
    if not path and block.startswith("@"):
        return Choice(test, Why.AFFECTED, describe(first), by=describe(first))
    return Choice(test, Why.AFFECTED, describe(first), path or ("." if block in (WHOLE, LISTING, EXISTS) else ""))


def describe(version: Version) -> str:
    """A changed dependency, in words."""
    path, block, digest = version
    if digest == UNSETTLED:
        return f"{path or 'the root'} was written while the test ran"
    if digest == ABSENT:
        return f"{path or 'the root'} was absent" if block in (WHOLE, LISTING, EXISTS) else f"{path}: {block or 'module level'} was absent"
    if block == LEVEL:
        return f"{path}: module level"
    if block in (WHOLE, EXISTS):
        return path
    if block == LISTING:
        return f"{path or '.'}: names in the directory"
    if block == IMPORTS:
        return f"{path}: what its imports reach"
    if block.startswith("@"):
        return f"other {block[1:]}"
    return f"{path}: {block}" if path else block
