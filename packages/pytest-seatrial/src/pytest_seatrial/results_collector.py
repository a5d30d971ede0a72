"""Collects outcomes and tracked metrics in the controller and writes the results at the end, with the commit they come from.

- Nothing that the checkout configures runs when git is asked. No git, repository or commit is no error; a git that fails is a note.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pytest_seatrial import unit_results
from pytest_seatrial.guarded_text import parse_toml
from pytest_seatrial.safe_git import GitRefused, command_line, environment
from pytest_seatrial.unit_results import Partial, Tracked, is_ours

NO_COVERAGE = "[n/a] run with --cov=PACKAGE"
NOT_ENDED = "not ended"  # the exit status of a session that runs, or was killed


class Collector:
    """One per session, on the controller only."""

    def __init__(self, config: pytest.Config, directory: Path, start: float) -> None:
        self.config = config
        self.directory = directory
        self.start = start
        self.written: Path | None = None  # the dated file, once it is there
        self._tests: list[Tracked] = []
        self._gpus: list[str] = []
        self._notes: list[str] = []
        self._head: dict[str, Any] | None = None
        self._tracked = False
        self._ran = False
        self._partial: Partial | None = None
        self._lines: list[str] = []
        self._problem: str | None = None

    def pytest_sessionstart(self) -> None:
        if (self.directory / unit_results.DATED).is_dir():
            self._lines += unit_results.restore(self.directory)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Only sessions that are to run tests come here: --fixtures and --cache-show do not."""
        self._ran = not self.config.getoption("collectonly", False) and not self.config.getoption("setupplan", False)
        if self._ran and is_ours(self.directory / unit_results.LATEST):
            begun = unit_results.document(self._read_head(), (), NOT_ENDED, {"coverage": "[n/a] the session has not ended"})
            try:
                unit_results.write_latest(self.directory, begun)
            except OSError:
                pass  # the end of the session cannot write either, and fails

    def keep(self, report: pytest.TestReport, key: str, called: str, metrics: str, gpus: Sequence[str], notes: Sequence[str]) -> None:
        """The last report of a test that used the tracker."""
        outcome = "error" if report.outcome == "failed" and called not in ("failed", "error") else called
        test = Tracked(report.nodeid, key, _OUTCOMES.get(outcome, outcome), metrics)
        self._tests.append(test)
        if gpus or notes:
            self._gpus += gpus
            self._notes += [note for note in notes if note not in self._notes]
        try:
            if not self._tracked:
                self._tracked = True
                self._partial = Partial(self.directory, self.start, self._read_head())
            if self._partial is not None:
                self._partial.add(test)
        except OSError as error:
            self._partial = None
            self._lines.append(f"{self.directory / unit_results.DATED}: a kill from here on would lose what was tracked: {error}")

    def _read_head(self) -> dict[str, Any]:
        """Read once: a file of ours that git knows must not make the tree a changed one."""
        if self._head is None:
            origin = read_origin(self.config.rootpath)
            self._head = {
                "git_commit": origin.commit,
                "start_time": unit_results.told(self.start),
                "git_branch": origin.branch,
                "git_dirty": origin.dirty,
                "project": origin.project,
                "notes": [*origin.notes],
            }
        return self._head

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write, if any test used the tracker; last, so that other plugins have had their say about the exit status."""
        file = self.directory / unit_results.LATEST
        if not self._tracked and not (self._ran and is_ours(file)):
            return
        made = self._document(session)
        try:
            if self._tracked:
                self.written = unit_results.write(self.directory, unit_results.stamp(self.start), made, latest=True)
                self._lines.append(f"metrics of {_tests(len(made['metrics']))}: {file}, {self.written}")
                self._lines += history_line(self.config, self.written)
            else:  # what lies there would be taken for this session's
                unit_results.write_latest(self.directory, made)
                self._lines.append(f"no test used the tracker: {file} has no metrics now, and exit status {made['exit_status']}")
        except OSError as error:
            are = "is" if len(self._tests) == 1 else "are"
            lost = f"what {_tests(len(self._tests))} tracked {are} not written: {error}"
            stale = f"{file} is that of an earlier session, and cannot be replaced: {error}"
            self._problem = f"{lost if self._tracked else stale}: make {self.directory} writable, or give --seatrial-results DIR"
            session.exitstatus = session.exitstatus or pytest.ExitCode.USAGE_ERROR
        if self._partial is not None:
            self._partial.close(remove=self.written is not None)

    def _document(self, session: pytest.Session) -> dict[str, Any]:
        from pytest_seatrial import gpus

        found = outcomes(self.config)
        # A test whose subtest failed fails only after its own report was made.
        tests = [test._replace(outcome=found[test.nodeid]) if found.get(test.nodeid) in WORST[:2] else test for test in self._tests]
        try:
            here = gpus.names_here()
        except gpus.GpuError as error:
            here = []
            self._notes.append(f"the names of GPUs cannot be read: {error}")
            self._lines.append(self._notes[-1])
        types = list(dict.fromkeys([*here, *self._gpus]))
        end = {
            "gpu_types": types,
            "machine": gpus.machine_here(types),
            "coverage": coverage(self.config),
            "tests": counts(found),
            "notes": self._notes,
        }
        return unit_results.document(self._read_head(), tests, int(session.exitstatus), end)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:  # pytest does not export its type
        for line in self._lines:
            terminalreporter.write_line(f"seatrial: {line}")
        if self._problem:
            terminalreporter.write_line(f"seatrial: {self._problem}", red=True)


def _tests(count: int) -> str:
    return f"{count} test{'' if count == 1 else 's'}"


def history_line(config: pytest.Config, written: Path) -> list[str]:
    """Keep the session in the history of Seatrial, where that is installed too and nobody said off; what is said of it. Never raises."""
    if config.getini("seatrial_history") == "off" or os.environ.get("SEATRIAL_HISTORY", "").lower() == "off":
        return []
    try:
        from seatrial.history.auto_import import import_unit_results
    except ImportError as error:
        absent = (error.name or "").partition(".")[0] == "seatrial"
        return [] if absent else [f"history: not kept, because Seatrial cannot be imported: {error}"]
    return [line] if (line := import_unit_results(written, repo=config.rootpath)) else []


_OUTCOMES = {"xfailed": "skipped", "xpassed": "passed"}
WORST = ("error", "failed", "xpassed", "xfailed", "skipped", "passed")


def outcomes(config: pytest.Config) -> dict[str, str]:
    """The worst that happened to each test, from what the terminal counts anyway."""
    stats = getattr(config.pluginmanager.getplugin("terminalreporter"), "stats", {})
    found: dict[str, str] = {}
    for outcome in WORST:
        for report in stats.get(outcome, ()):
            found.setdefault(report.nodeid, outcome)
    return found


def counts(found: Mapping[str, str]) -> dict[str, int]:
    """How many tests came out how; each counts once."""
    return {outcome: count for outcome in reversed(WORST) if (count := sum(each == outcome for each in found.values()))}


def coverage(config: pytest.Config) -> float | str:
    """Percent in total, of pytest-cov or of a `coverage run` around pytest."""
    plugin = config.pluginmanager.getplugin("_cov")
    total = getattr(plugin, "cov_total", None)
    if isinstance(total, float):
        return total
    if total is not None or getattr(plugin, "cov_controller", None) is not None:
        return "[n/a] pytest-cov made no report"  # it puts a plain 0 where its report failed
    module = sys.modules.get("coverage")
    running = module.Coverage.current() if module is not None and hasattr(module, "Coverage") else None
    if running is None:
        return NO_COVERAGE
    try:
        return float(running.report(file=io.StringIO()))
    except Exception as error:  # noqa: BLE001  # no data, or a source that cannot be parsed: the number is unknown, the results are not
        return f"[n/a] coverage made no report: {type(error).__name__}: {error}"


GIT_S = 20.0
OURS = re.compile(r"\? (?:.*/)?(?:unit_results(?:\.json|/)|\.seatrial-select)")  # what the plugins leave, as git lists it
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:gh[pousr]_|github_pat_|glpat-|hf_|npm_|pypi-|nvapi-|sk-|xox[a-z]-|AKIA|ASIA|AIza|eyJ)"
    r"(?:[a-z0-9]+-){0,2}(?=[A-Za-z]*\d)[A-Za-z0-9]{16,}[\w.-]*"
)
"""Tokens that a branch may be called after."""


class Origin(NamedTuple):
    project: str
    commit: str | None = None
    branch: str | None = None
    dirty: bool | None = None
    notes: tuple[str, ...] = ()


def read_origin(root: Path) -> Origin:
    """Of the checkout that holds `root`."""
    options = ("--porcelain=v2", "--branch", "--untracked-files=normal", "--ignore-submodules=dirty")
    call, name = command_line(root, "status", *options), project(root)
    try:
        env = environment(root)
        done = subprocess.run(
            call, env=env, capture_output=True, text=True, errors="replace", check=False, timeout=GIT_S, stdin=subprocess.DEVNULL
        )
        top = next((above for above in (root, *root.parents) if (above / ".git").exists()), None)
        # Whether something is changed inside a submodule; git is not left to look there by itself.
        inside = top is not None and (top / ".gitmodules").is_file() and any(map(_is_changed, _submodules(top)))
    except FileNotFoundError:
        return Origin(name)
    except (OSError, subprocess.TimeoutExpired, GitRefused) as error:
        return Origin(name, notes=(f"the commit is not known: {error}",))
    if done.returncode:
        absent = "not a git repository" in done.stderr
        return Origin(name, notes=() if absent else (f"the commit is not known: {done.stderr.strip()[:300]}",))
    lines = done.stdout.splitlines()
    head = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# "))
    commit, branch = head.get("branch.oid"), _TOKEN.sub("[redacted]", head.get("branch.head", "")) or None
    dirty = inside or any(not line.startswith("#") and not OURS.match(line) for line in lines)
    return Origin(name, None if commit == "(initial)" else commit, None if branch == "(detached)" else branch, dirty)


def _submodules(root: Path) -> Iterator[Path]:
    """Where a submodule is checked out; git does not follow a symbolic link either, which may lead back to where we are."""
    for entry in _git(root, "ls-files", "-z", "--stage").split("\0"):
        stamp, _, path = entry.partition("\t")
        place = root / path
        real = Path(os.path.realpath(root)) / path
        if stamp.startswith("160000 ") and (place / ".git").exists() and Path(os.path.realpath(place)) == real:
            yield place


def _is_changed(root: Path) -> bool:
    """Whether a checkout differs from its commit, also where its index is told to overlook that."""
    entries = (entry.partition(" ") for entry in _git(root, "ls-files", "-z", "-v").split("\0"))
    # Lower case: assume-unchanged. S: skip-worktree; absent files are a sparse checkout, not deletions.
    marked = [path for tag, _, path in entries if tag.islower() or (tag == "S" and (root / path).exists())]
    with tempfile.TemporaryDirectory(prefix="seatrial-git-") as scratch:
        index = Path(scratch, "index") if marked else None
        if index is not None:
            shutil.copy2(root / _git(root, "rev-parse", "--git-path", "index").removesuffix("\n"), index)
            for flag in ("--no-assume-unchanged", "--no-skip-worktree"):
                _git(root, "update-index", flag, "-z", "--stdin", index=index, stdin="\0".join(marked))
        if _git(root, "status", "--porcelain", "-z", "--untracked-files=all", "--ignore-submodules=dirty", index=index):
            return True
    return any(map(_is_changed, _submodules(root)))


def _git(root: Path, *arguments: str, index: Path | None = None, stdin: str = "") -> str:
    env = environment(root) | ({} if index is None else {"GIT_INDEX_FILE": str(index)})
    done = subprocess.run(
        command_line(root, *arguments), env=env, input=os.fsencode(stdin), capture_output=True, check=False, timeout=GIT_S
    )
    if done.returncode:
        raise GitRefused(done.returncode, f"git {arguments[0]}: {os.fsdecode(done.stderr).strip()[:300]}")
    return os.fsdecode(done.stdout)


def project(root: Path) -> str:
    """The name in the nearest pyproject.toml of the checkout, else that of its directory."""
    for directory in (root, *root.parents):
        try:
            name = parse_toml((directory / "pyproject.toml").read_text(encoding="utf-8")).get("project", {}).get("name")
        except (OSError, ValueError, AttributeError):
            name = None  # no file, or a damaged one, which is for its own tools to tell
        if name and isinstance(name, str):
            return name
        if (directory / ".git").exists():
            return directory.name
    return root.name
