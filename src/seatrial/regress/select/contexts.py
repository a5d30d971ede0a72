"""To whom belongs what happens now: the hooks that move the epoch while tests run.

- One epoch per test (setup, call and teardown), one per value of a fixture wider than a function (its setup and its finalisation), one per
  collected file, one per collector that has a setup of its own. Epoch 0 is everything else and belongs to every test.
- A test uses the contexts of all fixtures that pytest really gave to it, asked for by name or by `getfixturevalue`, and of what these use.
- A test that did not come to its end leaves nothing. One that a guard left out (its report says so) did not run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from seatrial.regress.select.files.project import Project
from seatrial.regress.select.gather.evidence import ASIDE, BASE, Journal, Ran
from seatrial.regress.select.trace.events import FIRST, Kept
from seatrial.regress.unit.wrapping import wrapping

Hook = Generator[None, Any, Any]


class Tracer(Protocol):
    """The part of the recorder that is used here."""

    def switch(self, epoch: int) -> None: ...
    def tell(self, kind: str, a: str, b: str | None = None) -> None: ...
    def drain(self) -> Kept: ...


class Contexts:
    """A plugin of its own, registered while a session records."""

    def __init__(self, tracer: Tracer, journal: Journal, project: Project) -> None:
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
        path = self._project.relative(_path(collector)) if isinstance(collector, pytest.File | pytest.Class) else None
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
        place = _path(item)
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
            self._journal.add(self._tracer.drain, Ran(item.nodeid, self._path, epoch, uses, self._outcome), self._needs)
            self._needs = {}
        return result

    def _collectors(self, item: pytest.Item) -> frozenset[int]:
        """Contexts of the file of a test and of its collectors that have a setup of their own, which runs with the first of their tests."""
        found = [self._files[self._path]] if self._path in self._files else []
        for node in item.listchain()[:-1]:
            if type(node).setup is not pytest.Collector.setup and node not in self._nodes:
                self._nodes[node] = self._new()
                node.setup = self._inside(self._nodes[node], node.setup)  # type: ignore[method-assign]
            if node in self._nodes:
                found.append(self._nodes[node])
        return frozenset(found)

    def _inside(self, epoch: int, setup: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            self._enter(epoch)
            try:
                setup()
            finally:
                self._leave()

        return run

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


def _path(node: Any) -> Path:
    """Of a collected node; pytest before 7 has another name for it."""
    return node.path if hasattr(node, "path") else Path(str(node.fspath))
