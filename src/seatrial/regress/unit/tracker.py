"""The `tracker` fixture: metrics of a test, kept in unit_results.json.

- `tracker.track(name, value)`, `tracker.log_max_mem(name)`, `tracker.get_max_mem()` in GB (2**30 bytes); `_elapsed` by itself.
- Key of a test: `module::Class::function[parameters]`. A conftest's own fixture `tracker` wins over this one.
- A test's metrics travel in its report (`report.seatrial`, JSON text), so pytest-xdist and forks keep them; the controller writes.
- A suite that never asks for the fixture pays for a look at its reports, and no file is written.
"""

from __future__ import annotations

import os
import resource
import sys
import time
import warnings
from collections.abc import Generator
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from seatrial.regress.unit.values import ELAPSED, TrackError, check_name, encode

if TYPE_CHECKING:
    from seatrial.regress.unit.collector import Collector

GB = 2**30
QUOTED = f'"{ELAPSED}"'


class Tracker:
    """What a test sees. After the test has ended it takes nothing more."""

    def __init__(self, node: pytest.Item) -> None:
        self.key = key_of(node)
        self.nodeid = node.nodeid
        self.gpus: list[str] = []
        self.notes: list[str] = []
        self._values: dict[str, str] = {}
        self._elapsed: float | None = None
        self._marks = _begin()
        self._peaks: dict[str, int] = {}
        self._pid = os.getpid()
        self.called = "skipped"  # setup alone (--setup-only) is no pass
        self._began = time.perf_counter()

    def track(self, name: str, value: object) -> None:
        """Keep `value`, which JSON must be able to hold, under `name`."""
        __tracebackhide__ = True
        try:
            text = encode(check_name(name), value)
        except TrackError as error:
            raise TrackError(str(error)) from error.__cause__  # the report shows the test's line, not ours
        if self._elapsed is not None:
            raise TrackError(f"metric {name!r}: the test {self.key} has ended: track in the test")
        if os.getpid() != self._pid:
            raise TrackError(
                f"metric {name!r}: this is a child process, whose metrics get lost: send the value to the test, and track it there"
            )
        if name in self._values:
            raise TrackError(f"metric {name!r} is tracked twice: {self._values[name][:80]}, then {text[:80]}: give each a name of its own")
        self._values[name] = text

    def get_max_mem(self) -> float:
        """The most that any GPU of the cluster had in use since the test began; without GPUs, the process tree or the fullest Ray node."""
        return self._fullest()[0]

    def log_max_mem(self, name: str) -> None:
        """Track `get_max_mem()` under `name`, and where it was under `name/where`."""
        value, where = self._fullest()
        self.track(name, value)
        self.track(f"{name}/where", where)

    def end(self) -> None:
        """The test is over."""
        self._elapsed = time.perf_counter() - self._began

    def payload(self) -> dict[str, Any]:
        """Everything; the metrics as JSON text, which every transport leaves as it is."""
        elapsed = time.perf_counter() - self._began if self._elapsed is None else self._elapsed
        parts = [f"{encode_basestring_ascii(name)}: {text}" for name, text in self._values.items()]
        metrics = f"{{{', '.join([*parts, f'{QUOTED}: {elapsed!r}'])}}}"
        return {"key": self.key, "called": self.called, "metrics": metrics, "gpus": self.gpus, "notes": self.notes}

    def _fullest(self) -> tuple[float, str]:
        from seatrial.regress.unit.reading import read_peaks

        if self._elapsed is not None:
            raise TrackError(f"memory: the test {self.key} has ended: read it in the test")
        peaks, self.gpus, notes = read_peaks(self.nodeid, self._marks)
        for note in notes:
            if note not in self.notes:
                self.notes.append(note)
                warnings.warn(f"GPUs cannot be read: {note}", RuntimeWarning, stacklevel=4)
        for place, value in peaks.items():
            self._peaks[place] = max(value, self._peaks.get(place, 0))
        on_gpus = {place: value for place, value in self._peaks.items() if "gpu" in place}
        value, where = max(((value, place) for place, value in (on_gpus or self._peaks).items()), key=lambda pair: pair[0])
        return value / GB, where


def _begin() -> tuple[int, int]:
    """A test begins: what the kernel remembers of this process (as `memory.marks`); a sampler that runs begins anew."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    marks = own.ru_maxrss * 1024, children.ru_maxrss * 1024
    if (reading := sys.modules.get("seatrial.regress.unit.reading")) is not None:
        reading.begin(marks)
    return marks


def key_of(node: pytest.Item) -> str:
    """`module::Class::function[parameters]`; the node id where there is no module."""
    module = getattr(node, "module", None)
    name = getattr(module, "__name__", None)
    if not isinstance(name, str):
        return node.nodeid
    names = [node.name]
    parent = node.parent
    while isinstance(parent, pytest.Class):
        names.append(parent.name)
        parent = parent.parent
    return "::".join([name, *reversed(names)])


TRACKER = pytest.StashKey[Tracker]()
WHERE = pytest.StashKey[tuple[Path, float]]()
COLLECTOR = "seatrial_tracker_collector"
DATED = "unit_results"
"""The directory of dated copies."""


class Running:
    """The test that this process runs. The fixture asks here, since the fixture `request` costs ten times what the tracker does."""

    item: pytest.Item


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before its fixtures are made."""
    Running.item = item


@pytest.fixture
def tracker() -> Generator[Tracker]:
    """Metrics of this test, kept in unit_results.json."""
    item = Running.item
    plugins = item.config.pluginmanager
    if not plugins.has_plugin(Sender.NAME):
        plugins.register(Sender(), Sender.NAME)
    made = item.stash[TRACKER] = Tracker(item)
    yield made
    made.end()


class Sender:
    """Puts metrics into the last report of a test; it is here once a test has asked for the fixture."""

    NAME = "seatrial_tracker_sender"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if (made := item.stash.get(TRACKER, None)) is None:
            return report
        if call.when == "teardown":
            report.seatrial = made.payload()
            del item.stash[TRACKER]  # a rerun begins anew
        elif call.when == "call" or not report.passed:
            made.called = phase(report)
        return report


def phase(report: pytest.TestReport) -> str:
    """The outcome of a test by its setup or call."""
    if report.failed:
        return "error" if report.when == "setup" else "failed"
    expected = hasattr(report, "wasxfail")
    if report.skipped:
        return "xfailed" if expected else "skipped"
    return "xpassed" if expected else "passed"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where results go."""
    told = "directory of unit_results.json and unit_results/ (default: rootdir)"
    parser.getgroup("seatrial").addoption("--seatrial-results", metavar="DIR", default=None, help=told)
    parser.addini("seatrial_history", "keep the results in the history: auto or off", default="auto")
    parser.addini("seatrial_results", f"{told}, relative to rootdir", default="")


def pytest_configure(config: pytest.Config) -> None:
    """What a killed session left is told by the next. Only the controller of pytest-xdist collects."""
    if (history := config.getini("seatrial_history")) not in ("auto", "off"):
        raise pytest.UsageError(f"seatrial_history = {history}: it may be auto or off")
    if hasattr(config, "workerinput"):
        return
    given = config.getoption("--seatrial-results")
    base = config.invocation_params.dir if given else config.rootpath
    directory = Path(base, given or config.getini("seatrial_results"))
    config.stash[WHERE] = (directory, time.time())
    config.pluginmanager.register(Receiver(config), "seatrial_tracker_receiver")
    if (directory / DATED).is_dir():
        collector(config)


def collector(config: pytest.Config) -> Collector:
    """What writes the results; it is made when the first test that used the tracker has ended."""
    found: Collector | None = config.pluginmanager.getplugin(COLLECTOR)
    if found is None:
        from seatrial.regress.unit.collector import Collector

        found = Collector(config, *config.stash[WHERE])
        config.pluginmanager.register(found, COLLECTOR)
    return found


class Receiver:
    """On the controller: hands reports with metrics to the collector."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Three per test; the last brings the metrics."""
        if report.when == "teardown" and (payload := getattr(report, "seatrial", None)) is not None:
            collector(self.config).keep(report, payload)


def pytest_unconfigure() -> None:
    """End the thread that watches memory."""
    if (reading := sys.modules.get("seatrial.regress.unit.reading")) is not None:
        reading.stop()
