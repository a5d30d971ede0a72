"""The `tracker` fixture: metrics of a test, kept in unit_results.json.

- `tracker.track(name, value)`, `tracker.log_max_mem(name)`, `tracker.get_max_mem()` in GB (2**30 bytes); `_elapsed` by itself.
- Key of a test: `module::Class::function[parameters]`. A conftest's own fixture `tracker` wins over this one.
- A test's metrics travel in its report (`report.seatrial`, JSON text), so pytest-xdist keeps them; the controller writes.
- A suite that never asks for the fixture pays for a look at its reports, and no file is written; one that was written earlier is looked for
  once.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Generator, Sequence
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

try:
    import resource
except ImportError:  # Windows: nobody's pytest shall fail because of us
    HAS_USAGE = False
else:
    HAS_USAGE = True

if TYPE_CHECKING:
    from pytest_seatrial.results_collector import Collector

ELAPSED = "_elapsed"
LARGEST = int(sys.float_info.max)
DEPTH = 50  # deeper than anybody means; a list that holds itself gets here


class TrackError(ValueError):
    """A metric that cannot be kept; it fails the test that tracked it."""


def check_name(name: object) -> str:
    if not isinstance(name, str):
        raise TrackError(f"the name of a metric is a string, not {shown(name)}: give str(name)")
    if not name:
        raise TrackError("the name of a metric is empty: give it a name")
    if name == ELAPSED:
        raise TrackError(f"{ELAPSED} is the time of the test, and is there by itself: take another name")
    return name if name.isascii() else _text(name, "", name)


def encode(name: str, value: object) -> str:
    if type(value) is int and -LARGEST <= value <= LARGEST:
        return repr(value)
    return json.dumps(_plain(name, "", value, 0), allow_nan=False)


def shown(value: object) -> str:
    """A value and its type, short, whatever its repr does."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001  # a broken repr may raise anything, and is not what the message is about
        text = f"<no repr: {type(error).__name__}>"
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({kind})"


def _plain(name: str, inside: str, value: object, depth: int) -> Any:  # JSON has no better type
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(name, inside, value)
    if isinstance(value, int):
        if not -LARGEST <= value <= LARGEST:
            raise _wrong(name, inside, value, "is beyond the range of a float", "track its logarithm, or a text")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _wrong(name, inside, value, "is not finite", "track None, or a text that says so, and assert on the number itself")
        return float(value)
    if depth > DEPTH:
        raise _wrong(name, inside[:40], value, f"is nested deeper than {DEPTH} levels", "track a flat value")
    if isinstance(value, list | tuple):
        return [_plain(name, f"{inside}[{index}]", part, depth + 1) for index, part in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise _wrong(name, inside, key, "is a key, and keys of JSON are strings", "make the keys strings: {str(key): value}")
        return {_text(name, inside, key): _plain(name, f"{inside}[{key!r}]", part, depth + 1) for key, part in value.items()}
    return _scalar(name, inside, value, depth)


def _text(name: str, inside: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _wrong(name, inside, value, "is no text that UTF-8 can hold", "track ascii(value)") from error
    return str.__str__(value)


def _scalar(name: str, inside: str, value: object, depth: int) -> Any:
    take = getattr(value, "item", None)
    fix = "track a number, a string, a list or a dict, such as float(value) or str(value)"
    if isinstance(value, type) or not callable(take):
        raise _wrong(name, inside, value, "is nothing that JSON can hold", fix)
    try:
        scalar = take()
    except Exception as error:
        raise _wrong(name, inside, value, f"is no scalar ({type(error).__name__}: {error})", "track value.tolist()") from error
    if not isinstance(scalar, bool | int | float | str):
        raise _wrong(name, inside, value, "is nothing that JSON can hold", fix)
    return _plain(name, inside, scalar, depth + 1)


def _wrong(name: str, inside: str, value: object, why: str, fix: str) -> TrackError:
    return TrackError(f"metric {name!r}{': at ' + inside if inside else ''}: {shown(value)} {why}: {fix}")


GB = 2**30
QUOTED = f'"{ELAPSED}"'
PARTS = ("key", "called", "metrics", "gpus", "notes")  # what is known of a test that used the tracker, as a worker of pytest-xdist sends it


class Tracker:
    """What a test sees. After the test has ended it takes nothing more."""

    gpus: Sequence[str] = ()
    notes: tuple[str, ...] = ()
    called = "skipped"  # how its call came out; setup alone (--setup-only) is no pass
    _elapsed_ns: int | None = None

    def __init__(self, node: pytest.Item) -> None:
        self._node = node
        self._values: dict[str, str] = {}
        self._marks = _begin()
        self._peaks: dict[str, int] | None = None
        self._pid = os.getpid()
        self._began = time.perf_counter_ns()

    def track(self, name: str, value: object) -> None:
        """Keep `value`, which JSON must be able to hold, under `name`."""
        __tracebackhide__ = True
        try:
            text = encode(check_name(name), value)
        except TrackError as error:
            raise TrackError(str(error)) from error.__cause__  # the report shows the test's line, not ours
        if self._elapsed_ns is not None:
            raise TrackError(f"metric {name!r}: the test {key_of(self._node)} has ended: track in the test")
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
        self._elapsed_ns = time.perf_counter_ns() - self._began

    def parts(self) -> tuple[Any, ...]:
        """Everything, as `PARTS` names it; the metrics as JSON text, which every transport leaves as it is."""
        elapsed = time.perf_counter_ns() - self._began if self._elapsed_ns is None else self._elapsed_ns
        metrics = "{"
        for name, text in self._values.items():
            metrics += f"{encode_basestring_ascii(name)}: {text}, "
        # Whole numbers are written faster than fractions.
        metrics += f"{QUOTED}: {elapsed // 1_000_000_000}.{elapsed % 1_000_000_000:09d}}}"
        return key_of(self._node), self.called, metrics, self.gpus, self.notes

    def _fullest(self) -> tuple[float, str]:
        from pytest_seatrial.memory_sampler import read_peaks

        if self._elapsed_ns is not None:
            raise TrackError(f"memory: the test {key_of(self._node)} has ended: read it in the test")
        peaks, self.gpus, notes = read_peaks(self._node.nodeid, self._marks)
        for note in notes:
            if note not in self.notes:
                self.notes += (note,)
                warnings.warn(f"GPUs cannot be read: {note}", RuntimeWarning, stacklevel=4)
        known = self._peaks = self._peaks or {}
        for place, value in peaks.items():
            known[place] = max(value, known.get(place, 0))
        on_gpus = {place: value for place, value in known.items() if "gpu" in place}
        value, where = max(((value, place) for place, value in (on_gpus or known).items()), key=lambda pair: pair[0])
        return value / GB, where


def _begin() -> tuple[int, int]:
    """A test begins: what the kernel remembers of this process (as `memory_sampler.marks`); a sampler that runs begins anew."""
    if not HAS_USAGE:
        return 0, 0
    # Of memory Linux says the same of a thread as of its process, and says it faster.
    own = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    marks = resource.getrusage(own).ru_maxrss * 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    if "pytest_seatrial.memory_sampler" in sys.modules:
        sys.modules["pytest_seatrial.memory_sampler"].begin(marks)
    return marks


class _Now:
    """The test that this process runs. The fixture asks here, since the fixture `request` costs ten times what the tracker does.

    An object: with each change of a class Python forgets what it knew of that.
    """

    item: pytest.Item
    made: Tracker | None = None
    parent: object = None
    prefix: str | None = None  # what the keys of the tests of `parent` begin with: pytest walks up the tree to find it


_now = _Now()


def key_of(node: pytest.Item) -> str:
    """`module::Class::function[parameters]`; the node id where there is no module."""
    if _now.parent is not node.parent or node.parent is None:
        name = getattr(getattr(node, "module", None), "__name__", None)
        classes, parent = "", node.parent
        while isinstance(parent, pytest.Class):
            classes, parent = f"::{parent.name}{classes}", parent.parent
        _now.parent, _now.prefix = node.parent, f"{name}{classes}" if isinstance(name, str) else None
    return node.nodeid if _now.prefix is None else f"{_now.prefix}::{node.name}"


LATEST, DATED = "unit_results.json", "unit_results"  # the latter: directory of dated copies


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _now.item = item


@pytest.fixture
def tracker() -> Generator[Tracker]:
    """Metrics of this test, kept in unit_results.json."""
    made = _now.made = Tracker(_now.item)
    yield made
    made.end()


def phase(report: pytest.TestReport) -> str:
    outcome = report.outcome
    if outcome == "failed":
        return "error" if report.when == "setup" else "failed"
    if hasattr(report, "wasxfail"):
        return "xfailed" if outcome == "skipped" else "xpassed"
    return outcome


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "directory of unit_results.json and unit_results/ (default: rootdir)"
    parser.getgroup("seatrial").addoption("--seatrial-results", metavar="DIR", default=None, help=told)
    parser.addini("seatrial_history", "keep the results in the history: auto or off", default="auto")
    parser.addini("seatrial_results", f"{told}, relative to rootdir", default="")


NO_RUN = ("help", "version", "collectonly", "setupplan", "showfixtures", "show_fixtures_per_test", "markers", "cacheshow")
"""Options with which pytest runs no test, by the names that it has for them."""


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Watch over the results of an earlier session: from here on this one may end before it has begun."""
    asked = early_config.known_args_namespace
    directory = place(early_config, asked.seatrial_results)
    worker = "PYTEST_XDIST_WORKER" in os.environ  # which does not know yet that it is one
    if worker or any(getattr(asked, name, False) for name in NO_RUN) or not (directory / LATEST).is_file():
        return
    from pytest_seatrial.unit_results import StaleResults

    beginning = StaleResults(directory)
    early_config.pluginmanager.register(beginning, "seatrial_tracker_beginning")
    early_config.add_cleanup(beginning.close)


def place(config: pytest.Config, given: str | None) -> Path:
    return Path(config.invocation_params.dir if given else config.rootpath, given or config.getini("seatrial_results"))


def pytest_configure(config: pytest.Config) -> None:
    """What a killed session left is told by the next, and an old file is replaced. Only the controller of pytest-xdist collects."""
    if (history := config.getini("seatrial_history")) not in ("auto", "off"):
        raise pytest.UsageError(f"seatrial_history = {history}: it may be auto or off")
    reports = Reports(config)
    config.pluginmanager.register(reports, "seatrial_tracker_reports")
    if not reports.sends and ((reports.directory / DATED).is_dir() or (reports.directory / LATEST).is_file()):
        reports.collector()


class Reports:
    """Metrics by way of the reports: a worker of pytest-xdist puts them into the last report of a test, the controller takes them out."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.sends = hasattr(config, "workerinput")
        self.start = time.time()
        self.directory = place(config, config.getoption("--seatrial-results"))
        self._collector: Collector | None = None

    def collector(self) -> Collector:
        """What writes the results; it is made when the first test that used the tracker has ended."""
        if self._collector is None:
            from pytest_seatrial.results_collector import Collector

            self._collector = Collector(self.config, self.directory, self.start)
            self.config.pluginmanager.register(self._collector, "seatrial_tracker_collector")
        return self._collector

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Three per test, in the process that ran it; before a worker sends them away."""
        made = _now.made
        if report.when != "teardown":
            if made is not None and (report.when == "call" or report.outcome != "passed"):
                made.called = phase(report)
        elif made is not None:
            _now.made = None  # a rerun begins anew
            if self.sends:
                setattr(report, "seatrial", dict(zip(PARTS, made.parts(), strict=True)))  # noqa: B010 - reports take further attributes along
            else:
                self.collector().keep(report, *made.parts())
        elif (sent := getattr(report, "seatrial", None)) is not None:
            self.collector().keep(report, **sent)


def pytest_unconfigure() -> None:
    """End the thread that watches memory."""
    if (reading := sys.modules.get("pytest_seatrial.memory_sampler")) is not None:
        reading.stop()
