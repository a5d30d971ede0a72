"""The tracker in real pytest sessions: what the guide shows, keys, wrong values, outcomes, xdist."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pytest_seatrial.tracker.tracked import dated, latest, session, strict, without_time

pytestmark = pytest.mark.slow

GUIDE = """
def test_exponentiate(tracker):
    starting_mem = tracker.get_max_mem()
    base = 2
    exponent = 4
    result = base ** exponent
    tracker.track("result", result)
    tracker.log_max_mem("memory_after_exponentiating")
    change_in_mem = tracker.get_max_mem() - starting_mem
    tracker.track("change_in_mem", change_in_mem)
    assert result == 16
"""
CASES = """
import pytest

@pytest.mark.parametrize("size", [1, 2, 3])
def test_sizes(tracker, size):
    tracker.track("size", size)

class TestA:
    def test_same(self, tracker):
        tracker.track("who", "a")

    class TestInner:
        def test_same(self, tracker):
            tracker.track("who", "inner")

class TestB:
    def test_same(self, tracker):
        tracker.track("who", "b")

def test_not_tracked():
    pass
"""
WRONG = """
import pytest

VALUES = {
    "nan": float("nan"),
    "inf": [1.0, -float("inf")],
    "object": object(),
    "set": {1},
    "tuple_key": {(1, 2): 3},
    "int_key": {1: 2},
    "bytes": b"x",
    "surrogate": "\\ud800",
    "digits": 10 ** 5000,
    "big": 10 ** 400,
    "big_inside": {"a": [1, -(10 ** 400)]},
    "class": int,
}

@pytest.mark.parametrize("kind", VALUES)
def test_value(tracker, kind):
    tracker.track("before", 1)
    tracker.track(kind, VALUES[kind])

def test_loop(tracker):
    value = []
    value.append(value)
    tracker.track("loop", value)

def test_twice(tracker):
    tracker.track("loss", 1.5)
    tracker.track("loss", 2.5)

def test_name(tracker):
    tracker.track(3, 1)

def test_elapsed_is_ours(tracker):
    tracker.track("_elapsed", 1)

def test_good(tracker):
    tracker.track("good", {"a": [1, None, True, "ä", 2.5], "t": (1, 2)})
    tracker.track("large", 10 ** 300)
"""
OUTCOMES = """
import pytest

@pytest.fixture
def broken_after(tracker):
    yield
    raise OSError("teardown")

@pytest.fixture
def broken_before(tracker):
    tracker.track("x", 1)
    raise OSError("setup")

def test_passed(tracker): tracker.track("x", 1)
def test_failed(tracker):
    tracker.track("x", 1)
    assert False
def test_skipped(tracker):
    tracker.track("x", 1)
    pytest.skip("no")
@pytest.mark.xfail
def test_expected(tracker):
    tracker.track("x", 1)
    assert False
@pytest.mark.xfail(strict=True)
def test_unexpected(tracker): tracker.track("x", 1)
def test_before(broken_before): pass
def test_after(tracker, broken_after): tracker.track("x", 1)
def test_plain_failure(): assert False
"""


SEVERAL = {
    "test_scalars.py": """
    class Scalar:
        def __init__(self, value): self.value = value
        def item(self):
            if isinstance(self.value, list): raise ValueError("only one element tensors can be converted")
            return self.value
    def test_good(tracker): tracker.track("x", [Scalar(1.5), Scalar(True)])
    def test_many(tracker): tracker.track("x", Scalar([1, 2]))
    def test_nan(tracker): tracker.track("x", Scalar(float("nan")))
    """,
    "test_late.py": """
    import pytest
    kept = []
    def test_a(tracker): kept.append(tracker)
    def test_b():
        with pytest.raises(ValueError, match="has ended"): kept[0].track("x", 1)
        with pytest.raises(ValueError, match="has ended"): kept[0].get_max_mem()
    """,
    "test_subtests.py": """
    def test_a(subtests, tracker):
        tracker.track("x", 1)
        with subtests.test("one"):
            assert False
    """,
    "test_fork.py": """
    import os
    def test_a(tracker):
        pid = os.fork()
        if not pid:
            try:
                tracker.track('x', 1)
            except ValueError as error:
                os._exit(7 if 'child process' in str(error) else 8)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    """,
}
Ended = tuple[subprocess.CompletedProcess[str], dict[str, Any]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ended]:
    """A session of some tests in one process, and its results; each runs once."""

    @functools.cache
    def run(code: str) -> Ended:
        directory = tmp_path_factory.mktemp("alone")
        return session(directory, code, "-rA"), latest(directory)

    return run


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """One session of small files that have nothing to do with each other."""
    directory = tmp_path_factory.mktemp("several")
    for name, code in SEVERAL.items():
        (directory / name).write_text(textwrap.dedent(code))
    return session(directory, None, "-rA"), latest(directory)


def outcomes(read: dict[str, Any], module: str) -> dict[str, str]:
    return {key: outcome for key, outcome in read["outcomes"].items() if key.startswith(f"{module}::")}


def git(directory: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    return subprocess.run(["git", *who, *words], cwd=directory, check=True, capture_output=True, text=True, timeout=30).stdout.strip()


def test_the_guides_example_and_its_jq_line_work_word_for_word(tmp_path: Path) -> None:
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    (tmp_path / "tests" / "unit" / "test_it.py").write_text(GUIDE)
    (tmp_path / ".gitignore").write_text("unit_results*\n")
    (tmp_path / "pytest.ini").touch()
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    done = session(tmp_path, None, "--seatrial-results", "tests/unit")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seatrial: metrics of 1 test: " in done.stdout
    read = latest(tmp_path / "tests" / "unit")
    assert list(read)[:6] == ["exit_status", "git_commit", "start_time", "metrics", "gpu_types", "coverage"]
    assert read["exit_status"] == 0
    assert (read["git_commit"], read["git_branch"], read["project"]) == (git(tmp_path, "rev-parse", "HEAD"), "main", tmp_path.name)
    assert read["coverage"] == "[n/a] run with --cov=PACKAGE"
    found = read["metrics"]["test_it::test_exponentiate"]
    assert found["result"] == 16
    assert found["memory_after_exponentiating"] > 0
    assert found["memory_after_exponentiating/where"]
    assert found["_elapsed"] > 0
    assert read == latest_dated(tmp_path / "tests" / "unit")
    if (jq := shutil.which("jq")) is None:
        pytest.skip("no jq here: all but its line was checked")
    line = '[.start_time, .git_commit, .metrics["test_it::test_exponentiate"].result] | @tsv'
    files = [str(path) for path in dated(tmp_path / "tests" / "unit")]
    said = subprocess.run([jq, "-r", line, *files], check=True, capture_output=True, text=True, timeout=30).stdout
    assert said == f"{read['start_time']}\t{read['git_commit']}\t16\n"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", read["start_time"])


def latest_dated(directory: Path) -> object:
    (only,) = dated(directory)
    return strict(only)


def test_parameters_and_classes_keep_their_own_metrics(alone: Callable[[str], Ended]) -> None:
    done, read = alone(CASES)
    assert done.returncode == 0
    assert without_time(read)["metrics"] == {
        "test_it::TestA::TestInner::test_same": {"who": "inner"},
        "test_it::TestA::test_same": {"who": "a"},
        "test_it::TestB::test_same": {"who": "b"},
        "test_it::test_sizes[1]": {"size": 1},
        "test_it::test_sizes[2]": {"size": 2},
        "test_it::test_sizes[3]": {"size": 3},
    }
    assert read["tests"] == {"passed": 7}


def test_a_wrong_value_fails_its_test_and_the_file_holds_the_others(alone: Callable[[str], Ended]) -> None:
    done, read = alone(WRONG)
    assert done.returncode == 1
    failed = {key for key, outcome in read["outcomes"].items() if outcome == "failed"}
    assert failed == set(read["metrics"]) - {"test_it::test_good"}
    assert len(failed) == 16
    assert without_time(read)["metrics"]["test_it::test_value[nan]"] == {"before": 1}
    assert without_time(read)["metrics"]["test_it::test_twice"] == {"loss": 1.5}
    assert without_time(read)["metrics"]["test_it::test_good"] == {
        "good": {"a": [1, None, True, "ä", 2.5], "t": [1, 2]},
        "large": 10**300,
    }
    for said in (
        "metric 'nan': nan (float) is not finite: track None",
        "metric 'inf': at [1]: -inf (float) is not finite",
        "metric 'tuple_key': (1, 2) (tuple) is a key, and keys of JSON are strings: make the keys strings",
        "(object) is nothing that JSON can hold",
        "metric 'big': 1000",
        "(int) is beyond the range of a float: track its logarithm, or a text",
        "metric 'big_inside': at ['a'][1]: -1000",
        "metric 'loss' is tracked twice: 1.5, then 2.5: give each a name of its own",
        "the name of a metric is a string, not 3 (int)",
        "_elapsed is the time of the test",
    ):
        assert said in done.stdout, said


def test_outcomes_stand_beside_the_metrics_also_of_tests_that_failed(alone: Callable[[str], Ended]) -> None:
    done, read = alone(OUTCOMES)
    assert done.returncode == 1
    assert {key.removeprefix("test_it::test_"): outcome for key, outcome in read["outcomes"].items()} == {
        "passed": "passed",
        "failed": "failed",
        "skipped": "skipped",
        "expected": "skipped",
        "unexpected": "failed",
        "before": "error",
        "after": "error",
    }
    assert all(values["x"] == 1 and values["_elapsed"] >= 0 for values in read["metrics"].values())
    assert read["tests"] == {"passed": 1, "failed": 3, "skipped": 1, "xfailed": 1, "error": 2}
    assert read["exit_status"] == 1


@pytest.mark.parametrize("code", [CASES, WRONG, OUTCOMES], ids=["cases", "wrong", "outcomes"])
def test_with_xdist_the_file_is_the_same(tmp_path: Path, code: str, alone: Callable[[str], Ended]) -> None:
    first, read = alone(code)
    second = session(tmp_path, code, "-n", "2")
    assert first.returncode == second.returncode
    one, two = without_time(read), without_time(latest(tmp_path))
    assert {**one, "project": ""} == {**two, "project": ""}
    assert len(dated(tmp_path)) == 1


def test_a_worker_that_dies_loses_only_its_own_test(tmp_path: Path) -> None:
    code = """
    import os
    def test_a(tracker): tracker.track("x", 1)
    def test_dies(tracker):
        tracker.track("x", 2)
        os._exit(9)
    def test_c(tracker): tracker.track("x", 3)
    """
    assert session(tmp_path, code, "-n", "1").returncode == 1
    read = latest(tmp_path)
    assert without_time(read)["metrics"] == {"test_it::test_a": {"x": 1}, "test_it::test_c": {"x": 3}}
    assert read["tests"] == {"passed": 2, "failed": 1}


def test_scalars_of_numpy_and_torch_are_taken_by_their_item(several: Ended) -> None:
    done, read = several
    assert list(outcomes(read, "test_scalars").values()) == ["passed", "failed", "failed"]
    assert read["metrics"]["test_scalars::test_good"]["x"] == [1.5, True]
    assert "track value.tolist()" in done.stdout


def test_a_conftests_own_tracker_wins_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import pytest\n@pytest.fixture\ndef tracker(): return 5\n")
    assert session(tmp_path, "def test_own(tracker): assert tracker == 5").returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conftest.py", "pytest.ini", "test_it.py"]


def test_tracking_after_the_test_is_an_error(several: Ended) -> None:
    done, read = several
    assert outcomes(read, "test_late") == {"test_late::test_a": "passed"}
    assert "PASSED test_late.py::test_b" in done.stdout


def test_setup_only_is_no_pass(tmp_path: Path) -> None:
    assert session(tmp_path, "def test_a(tracker): pass", "--setup-only").returncode == 0
    assert list(latest(tmp_path)["outcomes"].values()) == ["skipped"]


def test_a_failed_subtest_fails_its_test(several: Ended) -> None:
    assert outcomes(several[1], "test_subtests") == {"test_subtests::test_a": "failed"}


def test_a_forked_child_is_told_that_its_metrics_would_get_lost(several: Ended) -> None:
    assert outcomes(several[1], "test_fork") == {"test_fork::test_a": "passed"}


def test_a_file_that_git_does_not_know_makes_the_tree_dirty_and_our_own_results_do_not(tmp_path: Path) -> None:
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one", "--allow-empty"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    code = 'def test_a(tracker):\n    tracker.track("x", 1)\n'
    session(tmp_path, code)
    assert latest(tmp_path)["git_dirty"] is True, "the test itself is not known yet"
    subprocess.run(["git", "add", "test_it.py", "pytest.ini"], cwd=tmp_path, check=True)
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "two"], cwd=tmp_path, check=True)
    session(tmp_path, code)
    assert latest(tmp_path)["git_dirty"] is False
