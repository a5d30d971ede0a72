"""How a run failed, by its log: real logs, and logs that try to mislead."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial import loops
from seatrial.bisect import run_failures
from seatrial.bisect.run_failures import FailureReading, machine_failures, read_failure
from seatrial.core.verdict import Boundary, Verdict
from seatrial.triage.signatures import GENERAL, load_signatures

DATA = Path(__file__).parents[1] / "data"
OWN = {
    # Fixed by the files, the environment of the commit and the machine together: a machine that always fails so fails at the good end.
    *("shared-library", "compiler", "too-many-open-files", "permission-denied", "duplicate-device-type", "command-missing", "uv-missing"),
    *("attention-package-missing", "package-missing", "megatron-missing", "modelopt-missing", "value-head-package", "profiler-package"),
    *("vllm-not-in-worker", "megatron-extension", "helpers-not-built", "extras-conflict", "transformers-too-old", "arch-list"),
    *("engine-not-importable", "engine-not-for-device", "fsdp1-without-accelerator", "device-variables", "nvshmem-setting"),
    # What a commit does to its data and how it reads them.
    *("torn-json", "trl-prompt-column", "data-file", "data-empty", "data-empty-supervised", "data-columns", "data-too-long"),
    *("chat-template", "data-exhausted", "reward-unknown-data-source"),
    # Said by Seatrial's own driver in a trial, which is judged by its verdict.
    *("wrong-import", "driver-stopped", "no-cpu-shim"),
}


def read(name: str, exit_code: int = 1) -> FailureReading:
    return read_failure(DATA / name, exit_code)


def written(place: Path, *parts: str) -> FailureReading:
    log = place / "run.log"
    log.write_text("".join(parts), encoding="utf-8")
    return read_failure(log, 1)


def text(name: str) -> str:
    return (DATA / "bisect" / name).read_text(encoding="utf-8")


def test_it_is_decided_of_every_known_failure_whether_it_is_the_machines() -> None:
    known = [*load_signatures(GENERAL), *(s for name in loops.names() for s in loops.get_loop(name).signatures())]
    beside = {Boundary.ENVIRONMENT, Boundary.CLUSTER, Boundary.DATA}
    blocked = {s.id for s in known if s.verdict is Verdict.BLOCKED and s.boundary in beside and not (s.frame or s.harmless)}
    assert blocked - set(machine_failures()) - OWN == set(), "new: say `machine` in its entry if it may come and go, else add it to OWN"
    assert set(machine_failures()) & OWN == set()
    assert (set(machine_failures()) | OWN) - {s.id for s in known} == set(), "no such signature any more"


@pytest.mark.parametrize(
    ("log", "machine"),
    [
        ("bisect/hub_429.log", "hub-rate-limit"),
        ("bisect/disk_full.log", "no-space"),
        ("triage/start_no_python_no_network.log", "dns"),
        ("triage/fail_pin_memory_no_accelerator_grpo.log", "no-accelerator"),
        ("bisect/cuda_oom.log", ""),
        ("bisect/assertion.log", ""),
        ("bisect/pytest_assertion.log", ""),
        ("bisect/pytest_collection.log", ""),
        ("triage/fail_missing_uvicorn_sft.log", ""),
        ("triage/resume_torn_cache.log", ""),
        ("triage/sig_rocr_visible_devices.log", ""),
    ],
)
def test_whose_failure_it_is(log: str, machine: str) -> None:
    reading = read(log)
    assert reading.machine == machine
    assert reading.failure.cause


def test_numbers_and_places_do_not_make_a_difference(tmp_path: Path) -> None:
    moved = text("assertion.log").replace("0002-bb", "0009-cc").replace("line 27", "line 31").replace("step 2", "step 5")
    assert written(tmp_path, moved).failure.same(read("bisect/assertion.log").failure)


def test_two_bare_assertions_of_different_functions_differ(tmp_path: Path) -> None:
    frame = 'Traceback (most recent call last):\n  File "/t/a.py", line 3, in {}\n    assert x\nAssertionError\n'
    one = written(tmp_path, frame.format("forward")).failure
    assert not one.same(written(tmp_path, frame.format("backward")).failure)
    assert one.same(written(tmp_path, frame.format("forward").replace("line 3", "line 8")).failure)


def test_the_same_test_that_cannot_be_collected_fails_in_another_way() -> None:
    assert not read("bisect/pytest_assertion.log").failure.same(read("bisect/pytest_collection.log").failure)


def test_several_failed_tests_are_compared_by_name_and_not_by_their_number(tmp_path: Path) -> None:
    def log(*names: str) -> str:
        heads = "".join(f"____ {name} ____\nE   assert 1 == 2\nt.py:1: AssertionError\n" for name in names)
        lines = "".join(f"FAILED t.py::{name} - assert 1 == 2\n" for name in names)
        return f"{heads}{lines}==== {len(names)} failed, 3 passed in 0.1s ====\n"

    one = written(tmp_path, log("test_a[1]", "test_b")).failure
    assert one.same(written(tmp_path, log("test_b", "test_a[1]")).failure)  # another order, as with several workers
    assert not one.same(written(tmp_path, log("test_a[2]", "test_b")).failure)
    assert not one.same(written(tmp_path, log("test_a[1]", "test_c")).failure)
    many = [f"test_{index:03}" for index in range(200)]
    long = written(tmp_path, log(*many)).failure
    assert len(long.cause) <= 400
    assert not long.same(written(tmp_path, log(*many[:-1])).failure)


def test_tests_of_unittest_are_named_too(tmp_path: Path) -> None:
    log = (
        'FAIL: {0} (t.T.{0})\n----\nTraceback (most recent call last):\n  File "/t/t.py", line 3, in go\n    self.fail()\nAssertionError\n'
    )
    assert not written(tmp_path, log.format("test_a")).failure.same(written(tmp_path, log.format("test_b")).failure)


def test_a_test_that_the_machine_failed_among_others_is_the_machines(tmp_path: Path) -> None:
    limit = "____ test_hub ____\nE   huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: x\n"
    assert written(tmp_path, limit, text("pytest_assertion.log")).machine == "hub-rate-limit"


def test_a_survived_limit_is_kept_beside_the_real_failure(tmp_path: Path) -> None:
    both = written(tmp_path, text("hub_429.log"), text("assertion.log"))
    assert both.machine == ""
    assert both.failure.same(read("bisect/assertion.log").failure)
    assert both.failure.beside == ("hub-rate-limit",)
    retried = written(tmp_path, "WARNING 429 Client Error: Too Many Requests, retry 1 of 5\n", text("assertion.log"))
    assert retried.failure.beside == ("hub-rate-limit",)


def test_what_follows_from_the_failure_is_not_beside_it(tmp_path: Path) -> None:
    after = written(tmp_path, text("assertion.log"), "INFO: Connection refused by the server that is gone\n")
    assert after.failure.same(read("bisect/assertion.log").failure)
    assert after.failure.beside == ()


def test_a_traceback_that_a_test_printed_does_not_hide_what_failed(tmp_path: Path) -> None:
    head, _, tail = text("pytest_assertion.log").partition("=========================== short test summary")
    both = written(tmp_path, head, text("hub_429.log"), "=========================== short test summary", tail)
    assert both.machine == ""
    assert both.failure.cause == read("bisect/pytest_assertion.log").failure.cause
    assert both.failure.beside == ("hub-rate-limit",)


def test_a_limit_that_ends_the_run_after_the_tests_is_the_machines(tmp_path: Path) -> None:
    assert written(tmp_path, text("pytest_assertion.log"), text("hub_429.log")).machine == "hub-rate-limit"


def test_a_silent_exit_has_no_cause_but_last_words_count(tmp_path: Path) -> None:
    assert written(tmp_path, "step 1\nstep 2\n").failure.cause == ""
    words = written(tmp_path, "comparing\ntable 3: mismatch of 0.25\n[seatrial] the child exited\n").failure
    assert words.cause == "table #: mismatch of #"
    assert not words.same(written(tmp_path, "comparing\ncannot open the table\n").failure)
    assert read_failure(tmp_path / "none.log", 1).failure.cause == ""


def test_ending_a_hung_run_leaves_no_cause(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("step 1\nTerminated\n", encoding="utf-8")
    assert read_failure(log, None, hung=True).failure.cause == ""
    assert read_failure(DATA / "triage" / "hang_too_few_ray_cpus.log", None, hung=True).machine == "waits-for-cluster-cpus"


@pytest.mark.parametrize(
    ("line", "nothing"),
    [
        ("==== 3 skipped in 0.01s ====", True),
        ("1 skipped, 2 warnings in 0.20s", True),
        ("2 xfailed, 1 deselected in 0.20s", True),
        ("1 passed, 3 skipped in 0.20s", False),
        ("all is well", False),
    ],
)
def test_tests_that_did_not_run_are_noticed(tmp_path: Path, line: str, nothing: bool) -> None:
    assert bool(written(tmp_path, line, "\n").nothing_ran) is nothing


def test_of_a_very_long_log_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_failures, "LONGEST", 300)
    log = tmp_path / "run.log"
    raised = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: broken\n'
    log.write_text("Too Many Requests\n" * 100 + raised)
    found = read_failure(log, 1)
    assert found.failure.cause.startswith("ValueError: broken")
    assert (tmp_path / "run.end.log").stat().st_size < 300
