"""Other systems and other versions: pytest must run there as if we were not installed, or with less."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest

from pytest_seatrial import guards, memory_sampler, suite_groups, unit_results
from pytest_seatrial.hook_wrappers import wrapping
from pytest_seatrial.unit_results import Partial, Tracked
from tests.pytest_seatrial.tracker.guarded import Ran, project, pytest_in
from tests.pytest_seatrial.tracker.tracked import latest

pytestmark = pytest.mark.slow

WITHOUT = """
import os, sys
sys.modules["resource"] = sys.modules["fcntl"] = None
del os.uname, os.sched_getaffinity, os.register_at_fork
"""
"""As on Windows; loaded with -p before all other plugins."""
PLAIN = "def test_plain(): pass\n"
TRACKED = """
import pytest
def test_tracked(tracker): tracker.track("x", 1)
"""
MEMORY = """
import pytest
from pytest_seatrial import memory_sampler
memory_sampler.PROC = "/nowhere"
def test_memory(tracker): tracker.log_max_mem("mem")
def test_next(tracker): tracker.track("x", 1)
"""


def elsewhere(folder: Path, tests: str, *options: str) -> Ran:
    return pytest_in(
        project(folder, "", tests, elsewhere=WITHOUT),
        "-p",
        "elsewhere",
        *options,
        env={"PYTHONPATH": str(folder), "SEATRIAL_HISTORY": str(folder / "history.sqlite")},
    )


def test_a_session_without_the_tracker_needs_nothing_of_linux(tmp_path: Path) -> None:
    ran = elsewhere(tmp_path, PLAIN)
    assert ran.code == 0, ran.text
    assert ran.tests("PASSED") == {"test_plain"}


def test_metrics_are_kept_without_locks_and_marks_of_the_kernel(tmp_path: Path) -> None:
    ran = elsewhere(tmp_path, TRACKED)
    assert ran.code == 0, ran.text
    read = latest(tmp_path)
    assert read["outcomes"] == {"test_it::test_tracked": "passed"}
    assert f"{os.cpu_count()} CPUs" in read["machine"]
    assert not list((tmp_path / "unit_results").glob(".*"))


def test_memory_is_an_error_of_that_test_where_there_is_no_proc(tmp_path: Path) -> None:
    ran = elsewhere(tmp_path, MEMORY)
    assert ran.code == 1, ran.text
    assert (ran.tests("FAILED"), ran.tests("PASSED")) == ({"test_memory"}, {"test_next"})
    assert "which only Linux has" in ran.text
    assert "mem" not in latest(tmp_path)["metrics"]["test_it::test_memory"]


def test_marks_of_another_kernel_are_not_taken_for_kilobytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert min(memory_sampler.marks()) >= 0
    assert memory_sampler.marks()[0] > 2**20
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory_sampler.marks() == (0, 0)


@pytest.mark.parametrize(("silent_s", "lines"), [(10, 0), (unit_results.SILENT_S + 10, 1)])
def test_without_locks_only_a_long_silence_says_that_a_session_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_s: float, lines: int
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    partial = Partial(tmp_path, time.time(), {"git_commit": None})
    partial.add(Tracked("t.py::test", "t::test", "passed", '{"x": 1}'))
    then = time.time() - silent_s
    os.utime(partial.path, (then, then))
    assert len(unit_results.restore(tmp_path)) == lines
    assert partial.path.exists() == (not lines)
    partial.close(remove=True)
    assert not partial.path.exists()


def test_the_plugin_loads_where_pytest_has_no_stash(tmp_path: Path) -> None:
    code = "import pytest; del pytest.StashKey; from pytest_seatrial import guards"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("new", [True, False])
def test_a_wrapping_hook_does_the_same_in_both_styles(new: bool) -> None:
    manager = _manager(new)
    assert manager.hook.pytest_it(value=1) == [2, "seen"]
    assert manager.hook.pytest_it(value=-1) == "mended"
    with pytest.raises(KeyError, match="theirs"):
        manager.hook.pytest_it(value=-2)


@pytest.mark.filterwarnings("ignore::pluggy.PluggyTeardownRaisedWarning")
@pytest.mark.parametrize("new", [True, False])
def test_a_wrapping_hook_may_refuse_in_both_styles(new: bool) -> None:
    with pytest.raises(pytest.UsageError, match="ours"):
        _manager(new).hook.pytest_it(value=99)


def _manager(new: bool) -> pluggy.PluginManager:
    """One hook that doubles or raises, and one around it."""

    class Wrapper:
        @wrapping(new=new)
        def pytest_it(self, value: int) -> Generator[None, Any, Any]:
            try:
                found = yield
            except ValueError:
                return "mended"
            if value == 99:
                raise pytest.UsageError("ours")
            return [*found, "seen"]

    def doubled(value: int) -> int:
        if value < 0:
            raise ValueError("known") if value == -1 else KeyError("theirs")
        return 2 * value

    class Spec:
        @pytest.hookspec()
        def pytest_it(self, value: int) -> Any: ...

    manager = pluggy.PluginManager("pytest")
    manager.add_hookspecs(Spec)
    manager.register(SimpleNamespace(pytest_it=pytest.hookimpl()(doubled)))
    manager.register(Wrapper())
    return manager


def test_an_option_that_is_taken_is_explained_where_pytest_finds_out_late(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    class Late:
        def getgroup(self, name: str) -> Any:
            return SimpleNamespace(addoption=lambda *args, **kwargs: None)

        def parse_known_args(self, args: list[str]) -> None:
            raise argparse.ArgumentError(None, "conflicting option string: --hf-gated")

    (tmp_path / "seatrial.toml").write_text("[groups.other]\n[groups.hf_gated]\n")
    parser: Any = Late()
    with pytest.raises(pytest.UsageError, match=r"groups\.hf_gated\.option: --hf-gated is declared already"):
        guards._declare(pytestconfig, parser, suite_groups.read_groups(tmp_path).groups)


def test_a_suite_that_says_nothing_to_us_pays_for_no_slow_module(tmp_path: Path) -> None:
    tests = (
        "import sys\n"
        "def test_it():\n"
        "    ours = [name for name in sys.modules if name.startswith('pytest_seatrial')]\n"
        "    assert 'pytest_seatrial.suite_groups' in ours\n"
        "    assert 'pytest_seatrial.gpus' not in ours\n"
    )
    folder = project(tmp_path, "", tests)
    (folder / "seatrial.toml").unlink()
    code = (
        "import sys, pytest; before = set(sys.modules);"
        "from pytest_seatrial import guards, suite_groups as groups; from pathlib import Path;"
        "groups.read_groups(Path.cwd()); print(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    assert not {"ctypes", "difflib", "tomllib", "pytest_seatrial.gpus"} & set(done.stdout.split())
    assert pytest_in(folder).code == 0


def test_a_project_file_that_does_not_name_us_is_not_ours_to_parse(tmp_path: Path) -> None:
    inner = project(tmp_path / "inner", "", PLAIN)
    (inner / "seatrial.toml").unlink()
    (tmp_path / "pyproject.toml").write_text("[tool\n")
    assert pytest_in(inner).code == 0
    (tmp_path / "pyproject.toml").write_text("[tool.seatrial\n")
    ran = pytest_in(inner)
    assert ran.code == 4
    assert f"{tmp_path / 'pyproject.toml'}: " in ran.text
