"""The controller's side of the tracker: outcomes, the partial file, and the results at the end.

- Every test is counted once, by its worst: error (setup or teardown), failed, skipped, passed; an expected failure is `skipped` among
  outcomes, since it did not pass, and `xfailed` among counts.
- Results that cannot be written fail the session; what was tracked stays in the partial file where there is one.
- unit_results.json is of the last session: when that begins to collect, the file of an earlier one is replaced by one without metrics that
  says so, which is what a kill leaves; one that tracked nothing (a collection error, nothing selected) ends with such a file, and no
  dated copy or history. Where there is none it leaves none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from seatrial.model.words import counted
from seatrial.regress.unit import results
from seatrial.regress.unit.results import Partial, Tracked, is_ours

NO_COVERAGE = "[n/a] run with --cov=PACKAGE"
NOT_ENDED = "not ended"
"""The exit status of a session that runs, or was killed."""


class Collector:
    """One per session, on the controller only."""

    def __init__(self, config: pytest.Config, directory: Path, start: float) -> None:
        self.config = config
        self.directory = directory
        self.start = start
        self.written: Path | None = None
        """The dated file, once it is there."""
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
        """What a killed session left."""
        if (self.directory / results.DATED).is_dir():
            self._lines += results.restore(self.directory)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Only sessions that are to run tests come here: --fixtures and --cache-show do not."""
        self._ran = not self.config.getoption("collectonly", False) and not self.config.getoption("setupplan", False)
        if self._ran and is_ours(self.directory / results.LATEST):
            begun = results.document(self._read_head(), (), NOT_ENDED, {"coverage": "[n/a] the session has not ended"})
            try:
                results.write_latest(self.directory, begun)
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
        if not self._tracked:
            self._begin()
        if self._partial is not None:
            try:
                self._partial.add(test)
            except OSError as error:
                self._say_partial(error)

    def _begin(self) -> None:
        self._tracked = True
        try:
            self._partial = Partial(self.directory, self.start, self._read_head())
        except OSError as error:
            self._say_partial(error)

    def _read_head(self) -> dict[str, Any]:
        """Read once: a file of ours that git knows must not make the tree a changed one."""
        from seatrial.regress.unit.origin import read_origin

        if self._head is None:
            origin = read_origin(self.config.rootpath)
            self._head = {
                "git_commit": origin.commit,
                "start_time": results.told(self.start),
                "git_branch": origin.branch,
                "git_dirty": origin.dirty,
                "project": origin.project,
                "notes": [*origin.notes],
            }
        return self._head

    def _say_partial(self, error: OSError) -> None:
        self._partial = None
        self._lines.append(f"{self.directory / results.DATED}: a kill from here on would lose what was tracked: {error}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write, if any test used the tracker; last, so that other plugins have had their say about the exit status."""
        if self._tracked:
            self._write(session, self._document(session))
        elif self._ran and is_ours(self.directory / results.LATEST):
            self._replace(session, self._document(session))

    def _document(self, session: pytest.Session) -> dict[str, Any]:
        from seatrial.regress.unit.machine import machine_here

        found = outcomes(self.config)
        # A test whose subtest failed fails only after its own report was made.
        tests = [test._replace(outcome=found[test.nodeid]) if found.get(test.nodeid) in WORST[:2] else test for test in self._tests]
        gpus = self._gpu_types()
        end = {
            "gpu_types": gpus,
            "machine": machine_here(gpus),
            "coverage": coverage(self.config),
            "tests": counts(found),
            "notes": self._notes,
        }
        return results.document(self._read_head(), tests, int(session.exitstatus), end)

    def _write(self, session: pytest.Session, made: dict[str, Any]) -> None:
        try:
            self.written = results.write(self.directory, results.stamp(self.start), made, latest=True)
        except OSError as error:
            are = "is" if len(self._tests) == 1 else "are"
            self._fail(session, f"what {counted(len(self._tests), 'test')} tracked {are} not written: {error}")
        else:
            self._lines.append(f"metrics of {counted(len(made['metrics']), 'test')}: {self.directory / results.LATEST}, {self.written}")
            self._lines += history_line(self.config, self.written)
        if self._partial is not None:
            self._partial.close(remove=self.written is not None)

    def _replace(self, session: pytest.Session, made: dict[str, Any]) -> None:
        """Nothing was tracked, and what lies there would be taken for this session's."""
        file = self.directory / results.LATEST
        try:
            results.write_latest(self.directory, made)
        except OSError as error:
            self._fail(session, f"{file} is that of an earlier session, and cannot be replaced: {error}")
        else:
            self._lines.append(f"no test used the tracker: {file} has no metrics now, and exit status {made['exit_status']}")

    def _fail(self, session: pytest.Session, why: str) -> None:
        self._problem = f"{why}: make {self.directory} writable, or give --seatrial-results DIR"
        session.exitstatus = session.exitstatus or pytest.ExitCode.USAGE_ERROR

    def _gpu_types(self) -> list[str]:
        from seatrial.regress.unit import gpus

        try:
            here = gpus.names_here()
        except gpus.GpuError as error:
            here = []
            self._notes.append(f"the names of GPUs cannot be read: {error}")
            self._lines.append(self._notes[-1])
        return list(dict.fromkeys([*here, *self._gpus]))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:  # pytest does not export its type
        """One line each."""
        for line in self._lines:
            terminalreporter.write_line(f"seatrial: {line}")
        if self._problem:
            terminalreporter.write_line(f"seatrial: {self._problem}", red=True)


def history_line(config: pytest.Config, written: Path) -> list[str]:
    """Keep the session in the history, unless the ini option says off; what is said of it. Never raises."""
    from seatrial.regress.history.switch import is_off

    if config.getini("seatrial_history") == "off" or is_off():
        return []
    from seatrial.regress.history.keep import keep_results

    return [line] if (line := keep_results(written, repo=config.rootpath)) else []


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
    return _around()


def _around() -> float | str:
    import io
    import sys

    module = sys.modules.get("coverage")
    running = module.Coverage.current() if module is not None and hasattr(module, "Coverage") else None
    if running is None:
        return NO_COVERAGE
    try:
        return float(running.report(file=io.StringIO()))
    except Exception as error:  # noqa: BLE001  # no data, or a source that cannot be parsed: the number is unknown, the results are not
        return f"[n/a] coverage made no report: {type(error).__name__}: {error}"
