"""Whether a recorded map may be trusted (same Python, distributions, options and version), and which tests a change can reach."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest

from pytest_seatrial.safe_git import GitRefused, command_line, environment
from pytest_seatrial.select.source_digests import ABSENT, EXISTS, IMPORTS, LEVEL, LISTING, UNSETTLED, WHOLE, Version, sha

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


def choose_affected(known: Known, now: Now, tests: Sequence[str]) -> list[Choice]:
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


# Options that say how tests are run, not what they find.
HOW = frozenset(
    (
        "numprocesses",
        "maxprocesses",
        "maxworkerrestart",
        "dist",
        "tx",
        "distload",
        "rsyncdir",
        "rsyncignore",
        "testrunuid",
        "px",
        "looponfail",
    )
) | {"loadscopereorder", "loadgroup", "maxschedchunk", "quiet"}
OUTCOME = ("runxfail", "pythonwarnings", "override_ini")
VERSION = "version of selection"


def environment_key(config: pytest.Config, root: Path) -> dict[str, str]:
    """The circumstances of a session, each under the word that is told when it differs."""
    return {
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "root": str(root),
        VERSION: _version(),
        "set of distributions": sha("\n".join(_distributions()).encode()),
        "set of pytest options": sha("\n".join(sorted(f"{key}={_plain(value)}" for key, value in _ini(config).items())).encode()),
    }


def _version() -> str:
    """Of our own text: what a digest means, and what is noticed at all, changes with it."""
    own = sorted(Path(__file__).parent.rglob("*.py"))
    return sha(b"\0".join(path.read_bytes() for path in own))


def _ini(config: pytest.Config) -> dict[str, object]:
    """The options of the ini file; newer versions of pytest keep them under another name."""
    found = getattr(config, "_inicfg", None)
    return dict(config.inicfg if found is None else found)


def _plain(value: object) -> str:
    """An ini value without pytest's wrapping, which also tells where it came from."""
    return repr(getattr(value, "value", value))


def _distributions() -> Iterable[str]:
    found: set[str] = set()
    for entry in sys.path:
        try:
            found.update(path.name for path in Path(entry or ".").iterdir() if path.name.endswith((".dist-info", ".egg-info")))
        except OSError:
            continue
    return sorted(found)


def commit(root: Path) -> str:
    """HEAD, or "" where there is no git."""
    if "GIT_DIR" not in os.environ and not any((above / ".git").exists() for above in (root, *root.parents)):
        return ""  # git would say so too, after a process more
    try:
        call = command_line(root, "rev-parse", "--verify", "HEAD")
        done = subprocess.run(call, env=environment(root), capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired, GitRefused):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def top(root: Path) -> Path:
    """The top of the git repository that `root` belongs to; `root` itself where there is none, or where git ignores it."""
    for above in (root, *root.parents):
        if (above / ".git").exists():
            break
    else:
        return root
    try:
        call = command_line(above, "check-ignore", "-q", str(root))
        ignored = subprocess.run(call, env=environment(above), capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired, GitRefused):
        return root if above == root else above
    return root if above != root and ignored.returncode == 0 else above


def options(config: pytest.Config, before: frozenset[str]) -> Version:
    """Values of the options that came with the project's conftests; `before` are the names that were there without them."""
    found = {key: value for key, value in vars(config.option).items() if key not in before and key not in HOW}
    return "", "@options of the project", _digest(found)


def command(config: pytest.Config) -> Version:
    """Options of pytest itself under which the same test may end otherwise: `--runxfail`, `-W`, `-o`."""
    return "", "@options of the command line", _digest({key: getattr(config.option, key, None) for key in OUTCOME})


def _digest(values: dict[str, object]) -> str:
    return sha("\n".join(f"{key}={value!r}" for key, value in sorted(values.items())).encode("utf-8", "surrogateescape"))
