"""Guards of a suite, as a pytest plugin: options that select groups, needs of tests, and a budget of GPU hours."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pytest_seatrial.hook_wrappers import wrapping
from pytest_seatrial.suite_groups import (
    GroupSettings,
    Left,
    Mode,
    Needs,
    Out,
    SuiteGroup,
    gpu_number,
    is_amount,
    nearest,
    parse,
    place,
    read_groups,
)

KEYS = ("gpus", "minutes")
LARGEST = 5
SLACK = 1e-9  # sums of minutes are not exact: ten times six minutes are one hour
OUTPUT = "seatrial_guards"  # key of what a worker hands to the controller
MARKERS = (
    "needs(gpus=, modules=[], programs=[], env=[], files=[]): what the test needs; it is Skipped where that is absent",
    "gpu_hours(hours, gpus=, minutes=): the GPU hours that the test takes, for the budget of the suite",
)


class Share(NamedTuple):
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


def _number(name: str, value: Any) -> float:
    if not is_amount(value):
        raise ValueError(f"{name}: must be a number, not below 0 (got {value!r})")
    return float(value)


def _budget_option(text: str) -> float:
    try:
        return _number("hours", float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number of hours, not below 0 (got {text!r})") from error


def _shown(hours: float) -> str:
    return "under 0.001" if 0 < hours < 0.001 else f"{hours:.6g}"


def excess(shares: Sequence[Share], budget: float, origin: str) -> str | None:
    """Why the plan is refused; None when the budget holds."""
    total = math.fsum(one.hours for one in shares)
    if total <= budget * (1 + SLACK):
        return None
    largest = sorted(shares, key=lambda one: (-one.hours, one.test))[:LARGEST]
    lines = [f"seatrial: the tests plan {_shown(total)} GPU hours, the budget is {_shown(budget)} ({origin}); the largest:"]
    lines += [f"  {_shown(one.hours)} {one.test}" for one in largest]
    lines += [f"  … and {len(shares) - LARGEST} more"] if len(shares) > LARGEST else []
    return "\n".join([*lines, "select fewer tests, or give --seatrial-gpu-hours"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("seatrial").addoption(
        "--seatrial-gpu-hours",
        type=_budget_option,
        metavar="H",
        help="refuse to start when the tests plan more GPU hours than this (default: gpu_hours of [tests])",
    )


@wrapping()
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser) -> Generator[None, Any, Any]:
    """Declare the options of the groups: here the rootdir is known and the command line not yet parsed for good.

    After the conftests, so that an option which one of them has is our error to explain, not a traceback of theirs.
    """
    guards = Guards(early_config)
    early_config.pluginmanager.register(guards, "seatrial_guards_hooks")
    try:
        result = yield
    except Exception:
        # `--help` goes on after a conftest that breaks; for all else the error of the conftest is the one to see.
        if early_config.known_args_namespace.help:
            _declare(early_config, parser, guards.settings.groups)
        raise
    _declare(early_config, parser, guards.settings.groups)
    return result


def _declare(config: pytest.Config, parser: pytest.Parser, declared: Sequence[SuiteGroup]) -> None:
    family = parser.getgroup("seatrial")
    for group in declared:
        what = "run also" if group.mode is Mode.INCLUDE else "run only"
        text = f"{what} the tests of group {group.name}" + (f": {group.reason}" if group.reason else "")
        try:
            family.addoption(group.option, action="store_true", default=False, dest=group.dest, help=text.replace("%", "%%"))
        except (ValueError, argparse.ArgumentError) as error:
            raise pytest.UsageError(_taken(config, group)) from error
    if not declared:
        return
    try:
        parser.parse_known_args([])  # pytest before 9 finds out that an option is there twice only when it parses
    except pytest.UsageError:
        return  # an option that must be given; the real words are parsed later
    except argparse.ArgumentError as error:
        for group in declared:
            if error.message.endswith(f" {group.option}"):
                raise pytest.UsageError(_taken(config, group)) from error
        raise


def _taken(config: pytest.Config, group: SuiteGroup) -> str:
    """The error for an option that another plugin has; files that mention it are a good guess at which."""
    files = {Path(path) for plugin in config.pluginmanager.get_plugins() if (path := getattr(plugin, "__file__", None))}
    own = Path(__file__).parent
    # errors are replaced, because a plugin need not be text in UTF-8, and this only looks for one word
    found = [file for file in sorted(files) if file.suffix == ".py" and file.parent != own and file.is_file()]
    who = [str(file) for file in found if f'"{group.option}"' in file.read_text(encoding="utf-8", errors="replace").replace("'", '"')]
    by = f"by {', '.join(who)}" if who else "by pytest or another plugin"
    return f"{group.origin}.option: {group.option} is declared already {by}; give the group another option, or remove that one"


def pytest_configure(config: pytest.Config) -> None:
    """A configuration that was made without a command line has loaded no conftests."""
    if not config.pluginmanager.hasplugin("seatrial_guards_hooks"):
        config.pluginmanager.register(Guards(config), "seatrial_guards_hooks")


class Guards:
    """The hooks and the state of one session."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.worker = False
        self.settings: GroupSettings = read_groups(config.rootpath)
        self.asked: list[SuiteGroup] = []
        self.bypassed = False
        self.planned = self.measured = 0.0
        self.out = 0
        self.unaffected: Sequence[pytest.Item] | None = None
        """What the selection left out, since it passed and nothing of it changed."""
        self.unaffected_known = 0  # how many of these the groups would let run
        self.none_affected = self.nothing_ran = False
        self.skipped: Counter[str] = Counter()
        self.ran = 0
        self.error = ""
        self._left: dict[pytest.Item, Left] = {}
        self._shares: dict[pytest.Item, Share] = {}

    @wrapping()
    def pytest_make_collect_report(self) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Explain an option that a conftest declares too, where it is found only while tests are collected."""
        report = yield
        if report.failed:
            text = str(report.longrepr)
            for group in self.settings.groups:
                if f"conflicting option string: {group.option}\n" in f"{text}\n":
                    report.longrepr = _taken(self.config, group)
        return report

    def pytest_configure(self, config: pytest.Config) -> None:
        """Register the markers and see whether what was asked for can be had."""
        self.worker = hasattr(config, "workerinput")
        for line in (*MARKERS, *(f"{group.marker}: group {group.name}: {group.reason}" for group in self.settings.groups)):
            config.addinivalue_line("markers", line)
        self.bypassed = bool(config.getoption("markexpr", ""))
        self.asked = [group for group in self.settings.groups if config.getoption(group.dest, False)]
        if config.getoption("help", False) or self.worker:
            return
        only = [group.option for group in self.asked if group.mode is Mode.ONLY]
        if len(only) > 1:
            raise pytest.UsageError(f"{' and '.join(only)} exclude each other; give one of them")
        for group in self.asked:
            if absent := group.needs.absent(group.folder):
                raise pytest.UsageError(
                    f"{group.option} was given, but group {group.name} needs {', '.join(absent)} ({group.origin}.needs)"
                )

    @wrapping(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, Any, Any]:
        """Guard what is left after all other plugins, which may add markers or deselect."""
        result = yield
        try:
            self._guard(items)
        except pytest.UsageError as error:
            if not self.worker:
                raise
            self.error = str(error)
            items.clear()
        if self.worker:
            handed = {"error": self.error, "planned": self.planned, "out": self.out, "known": self.unaffected_known}
            self.config.workeroutput[OUTPUT] = handed  # type: ignore[attr-defined]
        return result

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Note the tests that the selection leaves out: it reports them right after it has decided, before any other plugin can."""
        selection: Any = self.config.pluginmanager.getplugin("seatrial_selection")  # None where that plugin is off
        if items and self.unaffected is None and selection is not None and selection.left_some_out():
            self.unaffected = list(items)

    def _guard(self, items: list[pytest.Item]) -> None:
        here: dict[Needs, list[str]] = {}
        out: set[pytest.Item] = set()
        for item in items:
            wanted, share = _declared(item)
            found = self._place(item)
            if isinstance(found, Out):
                out.add(item)
                continue
            left = found or self._absent(wanted, here)
            if left is not None:
                self._left[item] = left
                item.add_marker(pytest.mark.skip(reason=left.reason))
            elif share is not None and item.get_closest_marker("skip") is None:
                self._shares[item] = share
        if out:
            self.config.hook.pytest_deselected(items=[item for item in items if item in out])
            items[:] = [item for item in items if item not in out]
        self.out = len(out)
        self.unaffected_known = sum(self._place(item) is None for item in self.unaffected or ())
        shares = list(self._shares.values())
        self.planned = math.fsum(share.hours for share in shares)
        limit, origin = self._budget()
        listed = self.config.getoption("collectonly", False)  # nothing runs, and the list is what one needs to select fewer
        if limit is not None and not listed and (why := excess(shares, limit, origin)):
            raise pytest.UsageError(why)

    def _place(self, item: pytest.Item) -> Left | Out | None:
        if self.bypassed:
            return None
        return place([group for group in self.settings.groups if item.get_closest_marker(group.marker) is not None], self.asked)

    def _absent(self, wanted: Sequence[Needs], here: dict[Needs, list[str]]) -> Left | None:
        """`here` keeps what was looked up: many tests need the same."""
        absent: list[str] = []
        for one in wanted:
            if one not in here:
                here[one] = one.absent(self.config.rootpath)
            absent += [what for what in here[one] if what not in absent]
        text = f"needs {', '.join(absent)}"
        return Left(f"seatrial: {text}", text) if absent else None

    def _budget(self) -> tuple[float | None, str]:
        given: float | None = self.config.getoption("seatrial_gpu_hours")
        return (self.settings.gpu_hours, self.settings.gpu_hours_origin) if given is None else (given, "--seatrial-gpu-hours")

    @wrapping()
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put what the summary counts on the report: as attributes, which xdist carries to the controller."""
        report = yield
        left, share = self._left.get(item), self._shares.get(item)
        # a test may have a skip of its own, which then was the reason
        if left is not None and report.skipped and isinstance(report.longrepr, tuple) and left.reason in report.longrepr[2]:
            report.seatrial_left = left.label  # type: ignore[attr-defined]
        if share is not None:
            report.seatrial_gpus = share.gpus  # type: ignore[attr-defined]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count every phase of every test, on the controller too."""
        if label := getattr(report, "seatrial_left", ""):
            self.skipped[label] += 1
        # a test that skips itself says that it did not run; an expected failure did
        self.ran += report.when == "call" and (not report.skipped or hasattr(report, "wasxfail"))
        self.measured += report.duration * getattr(report, "seatrial_gpus", 0) / 3600

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Workers collect alike, so that one of them speaks for all; a worker that crashed hands over nothing."""
        handed = getattr(node, "workeroutput", {}).get(OUTPUT, {})
        self.error = self.error or handed.get("error", "")
        self.planned = max(self.planned, handed.get("planned", 0.0))
        self.out = max(self.out, handed.get("out", 0))
        self.unaffected_known = max(self.unaffected_known, handed.get("known", 0))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """An error that a worker handed over is the end of the session, and one that ran nothing because of us is no success."""
        if self.worker:
            return
        if self.error:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
            return
        empty = self.skipped and not self.ran and not session.config.getoption("setuponly", False)
        if empty and session.exitstatus == pytest.ExitCode.OK and not self.unaffected_known:
            self.nothing_ran = True
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        elif self.out and self.unaffected_known and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            # all that the selection would have run is outside of the `only` group, and within it passes stand
            self.none_affected = True
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was left out and what it cost; nothing where there is nothing to say."""
        lines: list[str] = []
        if self.skipped:
            counts = ", ".join(f"{count} {label}" for label, count in self.skipped.most_common())
            lines.append(f"{self.skipped.total()} skipped by seatrial: {counts}")
        if self.out:
            only = next(group for group in self.asked if group.mode is Mode.ONLY)
            lines.append(f"{self.out} deselected by seatrial: not in group {only.name} ({only.option})")
            if self.none_affected:
                lines.append(f"no test of group {only.name} is affected by the change ({self.unaffected_known} known)")
        if self.bypassed and self.settings.groups:
            lines.append("-m was given: groups filter nothing")
        limit, _ = self._budget()
        if self.planned or limit is not None:
            of = "" if limit is None else f" of {_shown(limit)}"
            lines.append(f"GPU hours: {_shown(self.planned)} planned{of}, {_shown(self.measured)} measured")
        if lines or self.error:
            terminalreporter.write_sep("=", "seatrial")
        for line in lines:
            terminalreporter.write_line(line)
        if self.nothing_ran:
            terminalreporter.write_line("nothing ran, which is no success: exit status 5", red=True)
        if self.error:
            terminalreporter.write_line(f"ERROR: {self.error}", red=True)


def _declared(item: pytest.Item) -> tuple[list[Needs], Share | None]:
    """All `needs` of a test, of its class and of its module (each must be met), and its share of the budget."""
    needs: list[Needs] = []
    name = "needs"
    try:
        for marker in item.iter_markers(name):
            if marker.args:
                raise ValueError(f"give names, such as needs(gpus=2) (got {marker.args[0]!r})")
            needs.append(parse(marker.kwargs))
        name = "gpu_hours"
        if (hours := item.get_closest_marker(name)) is None:
            return needs, None
        return needs, share(item.nodeid, hours.args, hours.kwargs, max((one.gpus for one in needs), default=0))
    except ValueError as error:
        raise pytest.UsageError(f"{item.nodeid}: {name}: {error}") from error
