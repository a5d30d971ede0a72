"""One session of selection: its options, its directory, what it chose; and the cache of instrumented code.

- The controller makes a directory below `.seatrial-select/` for its workers; a worker finds it by a variable.
- The cache lies outside every checkout, in `$XDG_CACHE_HOME/seatrial/select`, and all share it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple, Self

import pytest

from pytest_seatrial.safe_git import GitRefused, command_line, environment
from pytest_seatrial.select import selection_state
from pytest_seatrial.select.project_files import Project
from pytest_seatrial.select.selection_state import Choice, Why, choose_affected
from pytest_seatrial.select.source_digests import ABSENT, Digests, Shelf, Version, sha

MARK = "swept"
DAY_S = 86_400.0
KEPT_S = 30 * DAY_S


def cache_place() -> Path | None:
    above = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111  # never raises, unlike Path.home
    return above / "seatrial" / "select" if above.is_absolute() else None


def sweep_cache() -> None:
    """Remove old code, at most once a day."""
    above, now = cache_place(), time.time()
    if above is None:
        return
    try:
        mark = above / MARK
        if not above.is_dir() or (mark.exists() and now - mark.stat().st_mtime < DAY_S):
            return
        mark.touch()
        for path in above.glob("??/*"):
            told = path.stat()
            if now - max(told.st_atime, told.st_mtime) > KEPT_S:
                path.unlink(missing_ok=True)
    except OSError:
        pass  # another session sweeps, or it is not ours to sweep


VARIABLE = "SEATRIAL_SELECT_SESSION"
DIRECTORY = ".seatrial-select"
MINUTE_S, STALE_S = 60.0, 86_400.0


# Options that say how tests are run, not what they find.
HOW = frozenset(
    (
        *("numprocesses", "maxprocesses", "maxworkerrestart", "dist", "tx", "distload", "rsyncdir", "rsyncignore", "testrunuid", "px"),
        *("looponfail", "loadscopereorder", "loadgroup", "maxschedchunk", "quiet"),
    )
)
# Options of pytest itself under which the same test may end otherwise.
OUTCOME = ("runxfail", "pythonwarnings", "override_ini")
VERSION = "version of selection"


def environment_key(config: pytest.Config, root: Path) -> dict[str, str]:
    """The circumstances of a session, each under the word that is shown when it differs."""
    own = sorted(Path(__file__).parent.rglob("*.py"))  # what a digest means, and what is noticed at all, changes with our text
    found: set[str] = set()
    for entry in sys.path:
        try:
            found.update(path.name for path in Path(entry or ".").iterdir() if path.name.endswith((".dist-info", ".egg-info")))
        except OSError:
            continue
    # Newer versions of pytest keep the options of the ini file under another name, and wrap their values.
    ini = dict(config.inicfg if (inner := getattr(config, "_inicfg", None)) is None else inner)
    return {
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "root": str(root),
        VERSION: sha(b"\0".join(path.read_bytes() for path in own)),
        "set of distributions": sha("\n".join(sorted(found)).encode()),
        "set of pytest options": sha("\n".join(sorted(f"{key}={getattr(value, 'value', value)!r}" for key, value in ini.items())).encode()),
    }


def _git(repo: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails, or says no."""
    try:
        call, env = command_line(repo, *arguments), environment(repo)
        done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired, GitRefused):
        return None
    return done.stdout if done.returncode == 0 else None


def _commit(root: Path) -> str:
    """HEAD, or "" where there is no git."""
    if "GIT_DIR" not in os.environ and not any((above / ".git").exists() for above in (root, *root.parents)):
        return ""  # git would say so too, after a process more
    return (_git(root, "rev-parse", "--verify", "HEAD") or "").strip()


def _top(root: Path) -> Path:
    """The top of the git repository that `root` belongs to; `root` itself where there is none, or where git ignores it."""
    above = next((one for one in (root, *root.parents) if (one / ".git").exists()), root)
    return root if above != root and _git(above, "check-ignore", "-q", str(root)) is not None else above


class SelectionRequest(NamedTuple):
    """What the controller settles for all its workers."""

    select: bool
    why: bool
    picked: bool  # -k or a node id: the user has chosen
    commit: str
    given: dict[str, str]
    path: list[str]


class Chosen(NamedTuple):
    """What one process decided; alike in all workers."""

    selected: int
    of: int
    counts: dict[str, int]
    files: int
    others: dict[str, int]  # affected by what is no file
    told: str
    lines: list[str]

    def summary(self) -> list[str]:
        if self.told:
            return [*self.lines, f"seatrial: {self.selected} of {self.of} tests selected: the map is not trusted: {self.told}"]
        if not self.selected and self.of:
            return [f"seatrial: no test is affected by the change ({self.of} known)"]
        parts = []
        for why, count in self.counts.items():
            plural = "s" if self.files != 1 else ""
            parts.append(f"{count} {why}" + (f" ({self.files} changed file{plural})" if why == Why.AFFECTED else ""))
        parts += [f"{count} by {what}" for what, count in self.others.items()]
        return [*self.lines, f"seatrial: {self.selected} of {self.of} tests selected" + (f": {', '.join(parts)}" if parts else "")]


class SelectionSession:
    """The session of this process: `role` is "single", "controller" or "worker"."""

    def __init__(self, config: pytest.Config, role: str, directory: Path, asked: SelectionRequest, before: frozenset[str]) -> None:
        self.config = config
        self.role = role
        self.directory = directory
        self.asked = asked
        self.root = project_root(config)
        self.state = state_path(config)
        self.lock = -1
        self.chosen: Chosen | None = None
        self._before = before
        self._common: tuple[Version, ...] = ()
        below = Path(os.path.realpath(config.rootpath)).relative_to(self.root).as_posix()
        self.below = "" if below == "." else below
        self.project = Project.walk(self.root, asked.path, self.below)
        self.loaded = selection_state.load_state(self.state, asked.given) if asked.select and not asked.picked else None
        self.digests = self._digests()

    @classmethod
    def begin(cls, config: pytest.Config, *, select: bool, why: bool, picked: bool) -> Self:
        """Join the session of a controller, or open one."""
        before = frozenset(vars(config.known_args_namespace))
        worker = os.environ.get("PYTEST_XDIST_WORKER")
        above = os.environ.get(VARIABLE)
        if worker and above:
            asked = SelectionRequest(**json.loads(Path(above, "asked.json").read_text()))
            own = Path(above, worker if not Path(above, worker).exists() else f"{worker}-{os.getpid()}")
            own.mkdir()
            return cls(config, "worker", own, asked, before)
        root = project_root(config)
        asked = SelectionRequest(select, why, picked, _commit(root), environment_key(config, root), list(sys.path))
        directory, lock = _directory(state_path(config).parent / DIRECTORY)
        (directory / "asked.json").write_text(json.dumps(asked._asdict()))
        namespace = config.known_args_namespace
        spread = bool(getattr(namespace, "numprocesses", None) or getattr(namespace, "tx", None))
        if spread:
            os.environ[VARIABLE] = str(directory)
        session = cls(config, "controller" if spread else "single", directory, asked, before)
        session.lock = lock
        return session

    def _digests(self) -> Digests:
        return Digests(self.project, Shelf(cache_place(), self.asked.given[VERSION]))

    def start(self) -> selection_state.Loaded:
        """What the state file says; who only records has not read it before the end."""
        if self.loaded is None:
            self.loaded = selection_state.load_state(self.state, self.asked.given)
        return self.loaded

    def forget(self) -> None:
        """What is not needed any more would be looked through by every garbage collection until the process ends."""
        self.loaded, self.digests = None, self._digests()

    def common(self) -> tuple[Version, ...]:
        """Dependencies of every test that are no files; read when the session begins, since tests may change options."""
        if not self._common:
            values = vars(self.config.option)
            project = {key: value for key, value in values.items() if key not in self._before and key not in HOW}
            command = {key: values.get(key) for key in OUTCOME}
            for which, found in (("project", project), ("command line", command)):
                text = "\n".join(f"{key}={value!r}" for key, value in sorted(found.items()))
                self._common += (("", f"@options of the {which}", sha(text.encode("utf-8", "surrogateescape"))),)
        return self._common

    def now(self, path: str, block: str) -> str:
        """The digest of a dependency today, files or not."""
        if not path and block.startswith("@"):
            return next((digest for _, name, digest in self.common() if name == block), ABSENT)
        return self.digests.now(path, block)

    def choose(self, items: list[pytest.Item]) -> list[Choice]:
        """Decide over collected tests; the map of other circumstances decides nothing."""
        tests = [item.nodeid for item in items]
        loaded = self.start()
        unknown = [Choice(test, Why.NEW, "not trusted") for test in tests]
        choices = unknown if loaded.told else choose_affected(loaded.known, self.now, tests)
        taken = [choice for choice in choices if choice.why is not None]
        counts = {why.value: sum(choice.why == why and not choice.by for choice in taken) for why in Why}
        self.chosen = Chosen(
            selected=len(taken),
            of=len(tests),
            counts={why: count for why, count in counts.items() if count},
            files=len({choice.path for choice in taken if choice.path}),
            others=dict(Counter(choice.by for choice in taken if choice.by)),
            told=loaded.told,
            lines=[f"seatrial: {choice.line()}" for choice in taken] if self.asked.why else [],
        )
        if self.role == "worker":
            (self.directory / "chosen.json").write_text(json.dumps(self.chosen._asdict()))
        return choices

    def decided(self) -> Chosen | None:
        """What was chosen, here or by any worker."""
        if self.chosen is None and self.role == "controller":
            for path in sorted(self.directory.glob("*/chosen.json")):
                try:
                    return Chosen(**json.loads(path.read_text()))
                except (OSError, ValueError, TypeError, RecursionError):
                    continue  # its worker was killed while it wrote
        return self.chosen

    def close(self) -> None:
        """Leave nothing behind but the state file."""
        if self.role != "worker":
            if os.environ.get(VARIABLE) == str(self.directory):
                del os.environ[VARIABLE]
            shutil.rmtree(self.directory, ignore_errors=True)
            if self.lock >= 0:
                os.close(self.lock)
                self.lock = -1
            try:
                self.directory.parent.rmdir()
            except OSError:
                pass  # another session is at work beside this one
            sweep_cache()


def state_path(config: pytest.Config) -> Path:
    return Path(os.path.realpath(config.rootpath)) / (str(config.getini("seatrial_select_state")) or f"{DIRECTORY}.sqlite")


def project_root(config: pytest.Config) -> Path:
    return _top(Path(os.path.realpath(config.rootpath)))


def _own_directory(above: Path) -> Path:
    for _ in range(100):
        above.mkdir(parents=True, exist_ok=True)
        try:
            return Path(tempfile.mkdtemp(prefix=f"{socket.gethostname()}-{os.getpid()}-", dir=above))
        except FileNotFoundError:
            continue  # another session ended at this moment and took the empty directory away
    raise FileNotFoundError(2, "it is removed again and again", str(above))


def _locked(directory: Path) -> int:
    """A descriptor that holds the lock of a session's directory; -1 where there are no locks. BlockingIOError: another process has it."""
    try:
        import fcntl

        file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (ImportError, OSError):
        return -1
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise
    except OSError:
        os.close(file)
        return -1
    return file


def _left(directory: Path) -> bool:
    """Whether the session of a directory is over: nobody holds its lock, and it is older than a day, or a minute on this machine (a
    new one is locked a moment after it is made). A lock alone is not seen from every other machine."""
    try:
        age = time.time() - directory.stat().st_mtime
        here = directory.name.startswith(f"{socket.gethostname()}-")
        if age < (MINUTE_S if here else STALE_S):
            return False
        lock = _locked(directory)
    except OSError:
        return False  # at work, or gone by now
    if lock >= 0:
        os.close(lock)
    return lock >= 0 or age > STALE_S


def _directory(above: Path) -> tuple[Path, int]:
    """A new directory for this process, and its lock; those of sessions that are over are removed."""
    try:
        own = _own_directory(above)
        lock = _locked(own)
        (own / ".gitignore").write_text("*\n")
        for old in above.iterdir():
            if old != own and _left(old):
                shutil.rmtree(old, ignore_errors=True)
        return own, lock
    except OSError as error:
        message = f"{above}: cannot write: {error.strerror}; make it writable, or set seatrial_select_state to another place"
        raise pytest.UsageError(message) from error
