"""Hooks for test groups: options that select groups, needs of tests, and a budget of GPU hours."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pytest_seatrial import suite_groups
from pytest_seatrial.hook_wrappers import wrapping
from pytest_seatrial.suite_groups import gpu_number, nearest

KEYS = ("gpus", "minutes")
LARGEST = 5
SLACK = 1e-9
"""Sums of minutes are not exact: ten times six minutes are one hour."""


class Share(NamedTuple):
    """What one test says that it takes."""

    test: str
    hours: float
    gpus: int


def share(test: str, args: Sequence[object], kwargs: Mapping[str, object], needed: int) -> Share:
    """The share of a test from the arguments of its marker; `needed`: the GPUs of its `needs`."""
    for key in kwargs:
        if key not in KEYS:
            raise ValueError(f"unknown argument {key!r}; {nearest(key, KEYS)}")
    gpus = gpu_number(kwargs["gpus"]) if "gpus" in kwargs else max(needed, 1)
    if len(args) + ("minutes" in kwargs) != 1:
        raise ValueError("give hours, or minutes=, and one of them: gpu_hours(0.5) or gpu_hours(gpus=2, minutes=15)")
    if args:
        return Share(test, _number("hours", args[0]), gpus)
    return Share(test, gpus * _number("minutes", kwargs["minutes"]) / 60, gpus)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}: must be a number, not below 0 (got {value!r})")
    return float(value)


def hours_given(text: str) -> float:
    """The value of `--seatrial-gpu-hours`."""
    try:
        return _number("hours", float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number of hours, not below 0 (got {text!r})") from error


def told(hours: float) -> str:
    """Hours as people say them: a test of milliseconds is no 2e-08."""
    return "under 0.001" if 0 < hours < 0.001 else f"{hours:.6g}"


def excess(shares: Sequence[Share], budget: float, origin: str) -> str | None:
    """Why the plan is refused; None when the budget holds."""
    total = math.fsum(one.hours for one in shares)
    if total <= budget * (1 + SLACK):
        return None
    largest = sorted(shares, key=lambda one: (-one.hours, one.test))[:LARGEST]
    lines = [f"seatrial: the tests plan {told(total)} GPU hours, the budget is {told(budget)} ({origin}); the largest:"]
    lines += [f"  {told(one.hours)} {one.test}" for one in largest]
    lines += [f"  … and {len(shares) - LARGEST} more"] if len(shares) > LARGEST else []
    return "\n".join([*lines, "select fewer tests, or give --seatrial-gpu-hours"])


OUTPUT = "seatrial_guards"
"""Key of what a worker hands to the controller."""
MARKERS = (
    "needs(gpus=, modules=[], programs=[], env=[], files=[]): what the test needs; it is Skipped where that is absent",
    "gpu_hours(hours, gpus=, minutes=): the GPU hours that the test takes, for the budget of the suite",
)


@dataclass
class State:
    """What one session knows."""

    settings: suite_groups.GroupSettings
    asked: list[suite_groups.SuiteGroup] = field(default_factory=list)
    bypassed: bool = False
    planned: float = 0.0
    measured: float = 0.0
    out: int = 0
    unaffected: list[pytest.Item] | None = None
    stand: int = 0
    stood: bool = False
    skipped: Counter[str] = field(default_factory=Counter)
    ran: int = 0
    nothing: bool = False
    error: str = ""


STATE = pytest.StashKey[State]()
LEFT = pytest.StashKey[suite_groups.Left]()
SHARE = pytest.StashKey[Share]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that is always there."""
    parser.getgroup("seatrial").addoption(
        "--seatrial-gpu-hours",
        type=hours_given,
        metavar="H",
        help="refuse to start when the tests plan more GPU hours than this (default: gpu_hours of [tests])",
    )


@wrapping()
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser) -> Generator[None, Any, Any]:
    """Declare the options of the groups: here the rootdir is known and the command line not yet parsed for good.

    After the conftests, so that an option which one of them has is our error to explain, not a traceback of theirs.
    """
    state = early_config.stash[STATE] = State(suite_groups.read_groups(early_config.rootpath))
    try:
        result = yield
    except Exception:
        # `--help` goes on after a conftest that breaks; for all else the error of the conftest is the one to see.
        if early_config.known_args_namespace.help:
            _declare(early_config, parser, state.settings.groups)
        raise
    _declare(early_config, parser, state.settings.groups)
    return result


def _declare(config: pytest.Config, parser: pytest.Parser, declared: Sequence[suite_groups.SuiteGroup]) -> None:
    family = parser.getgroup("seatrial")
    for group in declared:
        what = "run also" if group.mode is suite_groups.Mode.INCLUDE else "run only"
        text = f"{what} the tests of group {group.name}" + (f": {group.reason}" if group.reason else "")
        try:
            family.addoption(group.option, action="store_true", default=False, dest=group.dest, help=text.replace("%", "%%"))
        except (ValueError, argparse.ArgumentError) as error:
            raise pytest.UsageError(_taken(config, group)) from error
    if declared:
        _check_taken(config, parser, declared)


def _check_taken(config: pytest.Config, parser: pytest.Parser, declared: Sequence[suite_groups.SuiteGroup]) -> None:
    """pytest before 9 finds out that an option is there twice only when it parses."""
    try:
        parser.parse_known_args([])
    except pytest.UsageError:
        return  # an option that must be given; the real words are parsed later
    except argparse.ArgumentError as error:
        for group in declared:
            if error.message.endswith(f" {group.option}"):
                raise pytest.UsageError(_taken(config, group)) from error
        raise


def _taken(config: pytest.Config, group: suite_groups.SuiteGroup) -> str:
    """The error for an option that somebody else has; files that mention it are a good guess at who."""
    files = {Path(path) for plugin in config.pluginmanager.get_plugins() if (path := getattr(plugin, "__file__", None))}
    own = Path(__file__).parent
    # errors are replaced, because a plugin need not be text in UTF-8, and this only looks for one word
    found = [file for file in sorted(files) if file.suffix == ".py" and file.parent != own and file.is_file()]
    who = [str(file) for file in found if f'"{group.option}"' in file.read_text(encoding="utf-8", errors="replace").replace("'", '"')]
    by = f"by {', '.join(who)}" if who else "by pytest or another plugin"
    return f"{group.origin}.option: {group.option} is declared already {by}; give the group another option, or remove that one"


@wrapping()
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Explain the same mistake in a conftest that is found only while tests are collected: a traceback of argparse does not."""
    report = yield
    if report.failed:
        text = str(report.longrepr)
        for group in collector.config.stash[STATE].settings.groups:
            if f"conflicting option string: {group.option}\n" in f"{text}\n":
                report.longrepr = _taken(collector.config, group)
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and see whether what was asked for can be had."""
    if STATE not in config.stash:  # a configuration that was made without a command line
        config.stash[STATE] = State(suite_groups.read_groups(config.rootpath))
    state = config.stash[STATE]
    for line in (*MARKERS, *(f"{group.marker}: group {group.name}: {group.reason}" for group in state.settings.groups)):
        config.addinivalue_line("markers", line)
    state.bypassed = bool(config.getoption("markexpr", ""))
    state.asked = [group for group in state.settings.groups if config.getoption(group.dest, False)]
    if config.getoption("help", False) or _is_worker(config):
        return
    only = [group.option for group in state.asked if group.mode is suite_groups.Mode.ONLY]
    if len(only) > 1:
        raise pytest.UsageError(f"{' and '.join(only)} exclude each other; give one of them")
    for group in state.asked:
        if absent := group.needs.absent(group.folder):
            raise pytest.UsageError(f"{group.option} was given, but group {group.name} needs {', '.join(absent)} ({group.origin}.needs)")


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


@wrapping(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, Any, Any]:
    """Guard what is left after everybody else, who may add markers or deselect."""
    result = yield
    state = config.stash[STATE]
    try:
        _guard(config, state, items)
    except pytest.UsageError as error:
        if not _is_worker(config):
            raise
        state.error = str(error)
        items.clear()
    if _is_worker(config):
        handed = {"error": state.error, "planned": state.planned, "out": state.out, "stand": state.stand}
        config.workeroutput[OUTPUT] = handed  # type: ignore[attr-defined]
    return result


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Note the tests that the selection leaves out: it tells them right after it has decided, and nobody else's come first then."""
    if not items:
        return
    config = items[0].config
    state, selection = config.stash[STATE], _selection(config)
    if state.unaffected is None and selection is not None and selection.left_some_out():
        state.unaffected = list(items)


def _selection(config: pytest.Config) -> Any:
    """The selection, of a plugin that may be off: None."""
    return config.pluginmanager.getplugin("seatrial_selection")


def _guard(config: pytest.Config, state: State, items: list[pytest.Item]) -> None:
    here: dict[suite_groups.Needs, list[str]] = {}
    out: list[pytest.Item] = []
    shares: list[Share] = []
    for item in items:
        wanted = _needs(item)
        share = _share(item, wanted)
        found = _place(item, state)
        if isinstance(found, suite_groups.Out):
            out.append(item)
            continue
        left = found or _absent(wanted, config.rootpath, here)
        if left is not None:
            item.stash[LEFT] = left
            item.add_marker(pytest.mark.skip(reason=left.reason))
        elif share is not None and item.get_closest_marker("skip") is None:
            item.stash[SHARE] = share
            shares.append(share)
    if out:
        config.hook.pytest_deselected(items=out)
        gone = set(out)
        items[:] = [item for item in items if item not in gone]
    state.out = len(out)
    state.stand = sum(_place(item, state) is None for item in state.unaffected or ())
    state.planned = math.fsum(share.hours for share in shares)
    limit, origin = _budget(config, state)
    listed = config.getoption("collectonly", False)  # nothing runs, and the list is what one needs to select fewer
    if limit is not None and not listed and (why := excess(shares, limit, origin)):
        raise pytest.UsageError(why)


def _place(item: pytest.Item, state: State) -> suite_groups.Left | suite_groups.Out | None:
    """Where the groups put a test; None: it runs."""
    if state.bypassed:
        return None
    belongs = [group for group in state.settings.groups if item.get_closest_marker(group.marker) is not None]
    return suite_groups.place(belongs, state.asked)


def _needs(item: pytest.Item) -> list[suite_groups.Needs]:
    """All `needs` of a test, of its class and of its module: each must be met."""
    found: list[suite_groups.Needs] = []
    for marker in item.iter_markers("needs"):
        if marker.args:
            raise pytest.UsageError(f"{item.nodeid}: needs: give names, such as needs(gpus=2) (got {marker.args[0]!r})")
        try:
            found.append(suite_groups.parse(marker.kwargs))
        except ValueError as error:
            raise pytest.UsageError(f"{item.nodeid}: needs: {error}") from error
    return found


def _share(item: pytest.Item, wanted: Sequence[suite_groups.Needs]) -> Share | None:
    marker = item.get_closest_marker("gpu_hours")
    if marker is None:
        return None
    try:
        return share(item.nodeid, marker.args, marker.kwargs, max((one.gpus for one in wanted), default=0))
    except ValueError as error:
        raise pytest.UsageError(f"{item.nodeid}: gpu_hours: {error}") from error


def _absent(wanted: Sequence[suite_groups.Needs], folder: Path, here: dict[suite_groups.Needs, list[str]]) -> suite_groups.Left | None:
    """`here` keeps what was looked up: many tests need the same."""
    absent: list[str] = []
    for one in wanted:
        if one not in here:
            here[one] = one.absent(folder)
        absent += [what for what in here[one] if what not in absent]
    text = f"needs {', '.join(absent)}"
    return suite_groups.Left(f"seatrial: {text}", text) if absent else None


def _budget(config: pytest.Config, state: State) -> tuple[float | None, str]:
    given: float | None = config.getoption("seatrial_gpu_hours")
    return (state.settings.gpu_hours, state.settings.gpu_hours_origin) if given is None else (given, "--seatrial-gpu-hours")


@wrapping()
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put what the summary counts on the report: as attributes, which xdist carries to the controller."""
    report = yield
    left, share = item.stash.get(LEFT, None), item.stash.get(SHARE, None)
    # a test may have a skip of its own, which then was the reason
    if left is not None and report.skipped and isinstance(report.longrepr, tuple) and left.reason in report.longrepr[2]:
        report.seatrial_left = left.label  # type: ignore[attr-defined]
    if share is not None:
        report.seatrial_gpus = share.gpus  # type: ignore[attr-defined]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Count reports with the session at hand; the hook for reports does not know it."""
    session.config.pluginmanager.register(_Counter(session.config.stash[STATE]), "seatrial_guards_counter")


class _Counter:
    """Counts the reports of one session, and takes what workers hand over."""

    def __init__(self, state: State) -> None:
        self.state = state

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Every phase of every test, on the controller too."""
        if label := getattr(report, "seatrial_left", ""):
            self.state.skipped[label] += 1
        # a test that skips itself says that it did not run; an expected failure did
        self.state.ran += report.when == "call" and (not report.skipped or hasattr(report, "wasxfail"))
        self.state.measured += report.duration * getattr(report, "seatrial_gpus", 0) / 3600

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Workers collect alike, so that one of them speaks for all; a worker that crashed hands over nothing."""
        handed = getattr(node, "workeroutput", {}).get(OUTPUT, {})
        self.state.error = self.state.error or handed.get("error", "")
        self.state.planned = max(self.state.planned, handed.get("planned", 0.0))
        self.state.out = max(self.state.out, handed.get("out", 0))
        self.state.stand = max(self.state.stand, handed.get("stand", 0))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """An error that a worker handed over is the end of the session, and one that ran nothing because of us is no success."""
    state = session.config.stash[STATE]
    if _is_worker(session.config):
        return
    if state.error:
        session.exitstatus = pytest.ExitCode.USAGE_ERROR
        return
    empty = state.skipped and not state.ran and not session.config.getoption("setuponly", False)
    if empty and session.exitstatus == pytest.ExitCode.OK and not state.stand:
        state.nothing = True
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
    elif state.out and state.stand and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        # all that the selection would have run is outside of the `only` group, and within it passes stand
        state.stood = True
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out and what it cost; nothing where there is nothing to say."""
    state = config.stash[STATE]
    lines = _lines(state, _budget(config, state)[0])
    if lines or state.error:
        terminalreporter.write_sep("=", "seatrial")
    for line in lines:
        terminalreporter.write_line(line)
    if state.nothing:
        terminalreporter.write_line("nothing ran, which is no success: exit status 5", red=True)
    if state.error:
        terminalreporter.write_line(f"ERROR: {state.error}", red=True)


def _lines(state: State, limit: float | None) -> list[str]:
    lines: list[str] = []
    if state.skipped:
        counts = ", ".join(f"{count} {label}" for label, count in state.skipped.most_common())
        lines.append(f"{state.skipped.total()} skipped by seatrial: {counts}")
    if state.out:
        only = next(group for group in state.asked if group.mode is suite_groups.Mode.ONLY)
        lines.append(f"{state.out} deselected by seatrial: not in group {only.name} ({only.option})")
        if state.stood:
            lines.append(f"no test of group {only.name} is affected by the change ({state.stand} known)")
    if state.bypassed and state.settings.groups:
        lines.append("-m was given: groups filter nothing")
    if state.planned or limit is not None:
        of = "" if limit is None else f" of {told(limit)}"
        lines.append(f"GPU hours: {told(state.planned)} planned{of}, {told(state.measured)} measured")
    return lines
