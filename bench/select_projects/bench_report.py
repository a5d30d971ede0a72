"""A pytest plugin of the mutation benchmark; runs in the project's environment and imports nothing but pytest.

- Writes to the file $BENCH_REPORT, a JSON line each: {"items": [...]} (what is left after selection), {"broken": file} (a file that cannot
  be collected), {"began": test}, {"test": …, "outcome": …, "seconds": …}, {"end": exit status}.
- A test that runs longer than $BENCH_TEST_S ends with the outcome "timeout". $BENCH_SKIP names a file with tests that are left out.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

OUT = Path(os.environ["BENCH_REPORT"])
LIMIT_S = float(os.environ.get("BENCH_TEST_S", "0"))
MAIN = os.getpid()
found: dict[str, dict] = {}


class Overran(BaseException):
    """Not an Exception, so that the code under test does not catch it."""


def _say(**row) -> None:
    if os.getpid() == MAIN:
        with OUT.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _ring(*_) -> None:
    raise Overran


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items) -> None:
    skip = os.environ.get("BENCH_SKIP")
    if skip:
        names = set(json.loads(Path(skip).read_text()))
        items[:] = [item for item in items if item.nodeid not in names]


def pytest_collection_finish(session) -> None:
    _say(items=[item.nodeid for item in session.items])


def pytest_collectreport(report) -> None:
    if report.failed:
        _say(broken=report.nodeid)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    _say(began=item.nodeid)
    found[item.nodeid] = {"outcome": "passed", "seconds": 0.0}
    result = yield
    _say(test=item.nodeid, **found.pop(item.nodeid))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    return (yield from _limited(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    return (yield from _limited(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    return (yield from _limited(item))


def _limited(item):
    """Its own wrapper of each phase, because an exception outside them would end the session."""
    if not LIMIT_S or os.getpid() != MAIN:
        return (yield)
    before = signal.signal(signal.SIGALRM, _ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        return (yield)
    except Overran:
        found[item.nodeid]["overran"] = True
        raise AssertionError("the time of the test is over") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pytest_runtest_logreport(report) -> None:
    row = found.get(report.nodeid)
    if row is None:
        return
    row["seconds"] = round(row["seconds"] + report.duration, 4)
    if row.pop("overran", False):
        row["outcome"] = "timeout"
    elif row["outcome"] == "passed" and (report.outcome != "passed" or hasattr(report, "wasxfail")):
        word = "error" if report.failed and report.when != "call" else report.outcome
        row["outcome"] = f"x{word}" if hasattr(report, "wasxfail") else word


def pytest_sessionfinish(exitstatus) -> None:
    _say(end=int(exitstatus))
