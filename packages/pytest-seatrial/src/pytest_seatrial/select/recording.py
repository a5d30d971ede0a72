"""Recording in one pytest process: starts the tracer, attributes events to the current test, fixture or module, writes the records."""

from __future__ import annotations

import functools
import gc
import sqlite3
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pytest_seatrial.hook_wrappers import wrapping
from pytest_seatrial.select import evidence, selection_session, selection_state
from pytest_seatrial.select.dependencies import DependencyRecorder, ProcessSession
from pytest_seatrial.select.evidence import ASIDE, BASE, EvidenceJournal, RanTest
from pytest_seatrial.select.project_files import Project
from pytest_seatrial.select.selection_session import SelectionSession
from pytest_seatrial.select.trace.startup import start as start_tracing
from pytest_seatrial.select.trace.trace_events import FIRST
from pytest_seatrial.select.trace.trace_events import read_logs as read_children
from pytest_seatrial.select.trace.trace_recorder import TraceRecorder as Tracer

Hook = Generator[None, Any, Any]


class Contexts:
    """A plugin of its own, registered while a session records."""

    def __init__(self, tracer: Tracer, journal: EvidenceJournal, project: Project) -> None:
        self._tracer = tracer
        self._journal = journal
        self._project = project
        self._last = ASIDE
        self._stack = [BASE]
        self._values: dict[Any, int] = {}  # a fixture definition: the epoch of the value that it holds
        self._finishing: list[Any] = []
        self._nodes: dict[Any, int] = {}  # a collector: the epoch of its setup
        self._files: dict[str, int] = {}  # a collected file: the epoch of its collection
        self._needs: dict[int, tuple[int, ...]] = {}
        self._uses: set[int] = set()
        self._outcome = ""
        self._path = ""  # of the test that runs
        self._place: Path | None = None  # the same, as pytest knows it
        self._parent: Any = None  # of that test
        self._always: tuple[int, ...] = ()  # what every test of it uses
        self._behind: frozenset[int] = frozenset()  # contexts of its collectors, and of its file

    def _enter(self, epoch: int) -> None:
        self._stack.append(epoch)
        self._tracer.switch(epoch)

    def _leave(self) -> None:
        self._stack.pop()
        self._tracer.switch(self._stack[-1])

    def _new(self) -> int:
        self._last += 1
        return self._last

    @wrapping(tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Hook:
        path = self._project.relative(collector.path) if isinstance(collector, pytest.File | pytest.Class) else None
        if path is None or isinstance(collector, pytest.Package):
            return (yield)
        self._journal.evidence.collected.add(path)
        if path not in self._files:
            self._files[path] = self._new()
        self._enter(self._files[path])
        try:
            return (yield)
        finally:
            self._leave()

    @wrapping(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Hook:
        epoch = self._new()
        place = item.path
        # Tests come by file: what is the same object as for the one before has not to be found again.
        if place is not self._place:
            self._place, self._path, self._parent = place, self._project.relative(place) or "", None
        if item.parent is not self._parent:
            self._parent, self._behind = item.parent, self._collectors(item)
            self._always = tuple(sorted(self._behind))
        self._uses = set(self._behind)
        self._outcome = ""
        self._enter(epoch)
        try:
            result = yield
        finally:
            del self._stack[1:]
            self._tracer.switch(BASE)
        if self._outcome:
            uses = self._always if self._uses == self._behind else tuple(sorted(self._uses))
            self._journal.add(self._tracer.drain, RanTest(item.nodeid, self._path, epoch, uses, self._outcome), self._needs)
            self._needs = {}
        return result

    def _collectors(self, item: pytest.Item) -> frozenset[int]:
        """Contexts of the file of a test and of its collectors that have a setup of their own, which runs with the first of their tests."""
        found = [self._files[self._path]] if self._path in self._files else []
        for node in item.listchain()[:-1]:
            if type(node).setup is not pytest.Collector.setup and node not in self._nodes:
                self._nodes[node] = self._new()
                node.setup = functools.partial(self._run_inside, self._nodes[node], node.setup)  # type: ignore[method-assign]
            if node in self._nodes:
                found.append(self._nodes[node])
        return frozenset(found)

    def _run_inside(self, epoch: int, setup: Callable[[], None]) -> None:
        self._enter(epoch)
        try:
            setup()
        finally:
            self._leave()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if not self._values:
            return
        self._uses.update(self._used(getattr(item, "_request", None)))
        # One that skipped or failed is not given to anybody; what it raised is raised again for whoever asks.
        known = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", None) or {}
        self._uses.update(self._values[one] for found in known.values() for one in found if one in self._values)

    def _used(self, request: Any) -> list[int]:
        """Epochs of the fixture values that this request was given so far."""
        given = getattr(request, "_fixture_defs", None) or {}
        return [self._values[one] for one in given.values() if one in self._values]

    @wrapping(tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Hook:
        if fixturedef.scope == "function":
            return (yield)
        epoch = self._values[fixturedef] = self._new()
        self._enter(epoch)
        # Which test asks first decides when it is set up, and what it then finds: marks and arguments of that test.
        self._tracer.tell(FIRST, self._path, "")
        try:
            return (yield)
        finally:
            self._leave()
            self._uses.add(epoch)
            self._needs[epoch] = tuple(self._needed(fixturedef, request, epoch))
            # Finalizers run last in, first out: this one before the fixture's own.
            fixturedef.addfinalizer(lambda: self._finish(fixturedef, epoch))

    def _needed(self, fixturedef: Any, request: Any, epoch: int) -> list[int]:
        """Contexts behind a fixture: by its arguments, or any that is there if it can ask for more by `request`."""
        if "request" in fixturedef.argnames:
            return [one for one in self._used(request) if one != epoch]
        given = getattr(request, "_fixture_defs", None) or {}
        return [self._values[given[name]] for name in fixturedef.argnames if name in given and given[name] in self._values]

    def _finish(self, fixturedef: Any, epoch: int) -> None:
        self._finishing.append(fixturedef)
        self._enter(epoch)

    @pytest.hookimpl(trylast=True)
    def pytest_fixture_post_finalizer(self, fixturedef: Any) -> None:
        if self._finishing and self._finishing[-1] is fixturedef:
            self._finishing.pop()
            if len(self._stack) > 1:
                self._leave()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome not in ("passed", "skipped"):
            self._outcome = "failed"
        elif self._outcome != "failed":
            if hasattr(report, "seatrial_left"):
                self._outcome = "left"
            elif not self._outcome or self._outcome == "passed":
                skipped = report.outcome == "skipped" and not hasattr(report, "wasxfail")
                self._outcome = "skipped" if skipped else "passed"

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Our own reading of the project is no test's."""
        self._enter(ASIDE)
        try:
            yield
        finally:
            self._leave()

    def flush(self) -> None:
        """What happened since the last test (the end of the session)."""
        self._journal.add(self._tracer.drain, None, self._needs)
        self._needs = {}


JOURNAL = "evidence.jsonl"


class Selection:
    """The hooks of a session that selects or records, from the first conftest to the end."""

    def __init__(self, session: SelectionSession) -> None:
        self._session = session
        self._journal = evidence.EvidenceJournal(session.directory / JOURNAL if session.role == "worker" else None)
        self._tracer: Tracer | None = None
        self._contexts: Contexts | None = None
        self._error = ""

    def start(self) -> Contexts:
        session = self._session
        trace = session.directory / "trace"
        trace.mkdir()
        skip = self._globs("seatrial_select_skip")
        self._tracer = start_tracing(trace, session.root, selection_session.cache_place(), skip, session.config)
        self._contexts = Contexts(self._tracer, self._journal, session.project)
        return self._contexts

    def stop(self) -> None:
        if self._tracer is not None:
            self._tracer.stop()
            self._tracer = None
        self._journal.close()

    def left_some_out(self) -> bool:
        """Whether there are tests that do not run, since they passed and nothing of theirs changed."""
        chosen = self._session.decided()
        return chosen is not None and chosen.selected < chosen.of

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        self._session.common()

    def pytest_report_header(self) -> list[str]:
        """Why everything will run, before it does."""
        asked = self._session.asked
        why = self._session.start().told if asked.select and not asked.picked else ""
        return [f"seatrial: every test runs: the map is not trusted: {why}"] if why else []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        asked = self._session.asked
        if not asked.select or asked.picked or self._contexts is None:
            return
        with self._contexts.aside():
            choices = self._session.choose(items)
        left = [item for item, choice in zip(items, choices, strict=True) if choice.why is None]
        if left:
            config.hook.pytest_deselected(items=left)
            items[:] = [item for item, choice in zip(items, choices, strict=True) if choice.why is not None]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """The evidence of a worker is complete, or records are written."""
        chosen = self._session.decided()
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and chosen and chosen.of and not chosen.selected:
            session.exitstatus = pytest.ExitCode.OK
        # Records are many objects and none of them is garbage: collections would look through all of pytest's again and again.
        collects = gc.isenabled()
        gc.disable()
        try:
            if self._contexts is not None:
                self._contexts.flush()
            self.stop()
            if self._session.role != "worker":
                self._write()
        except (OSError, ValueError, sqlite3.Error) as error:
            self._error = f"seatrial: nothing was recorded: {self._session.state}: {error}"
        finally:
            self._session.forget()
            if collects:
                gc.enable()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        chosen, asked = self._session.decided(), self._session.asked
        lines = chosen.summary() if chosen else []
        if asked.select and asked.picked:
            lines = ["seatrial: tests were chosen on the command line: nothing was left out"]
        for line in [*lines, *filter(None, [self._error])]:
            terminalreporter.write_line(line)

    def _write(self) -> None:
        session = self._session
        found = self._evidence()
        if not any(one.tests for one in found):
            return
        inputs = self._globs("seatrial_select_inputs")
        common = session.common()
        recorder = DependencyRecorder(session.digests, found, inputs, common)
        outcomes = [outcome for one in found for outcome in ProcessSession(recorder, one).outcomes()]
        selection_state.save_state(session.state, session.asked.given, session.asked.commit, outcomes, session.now, session.loaded)

    def _globs(self, name: str) -> list[str]:
        """Globs of the ini file: relative to the project, or to pytest's root below it."""
        given = [str(glob) for glob in self._session.config.getini(name)]
        below = self._session.below
        return [*given, *(f"{below}/{glob}" for glob in given)] if below else given

    def _evidence(self) -> list[evidence.Evidence]:
        if self._session.role == "single":
            found = [(self._journal.take(), self._session.directory)]
        else:
            paths = sorted(self._session.directory.glob(f"*/{JOURNAL}"))
            found = [(evidence.read_evidence(path), path.parent) for path in paths]
        for one, directory in found:
            one.children = list(read_children(directory / "trace"))  # none where that is absent
        return [one for one, _ in found]
