"""Runs on this machine: how they end, how many at once, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from seatrial.bisect import runners
from seatrial.bisect.bisect_records import BisectPlan
from seatrial.bisect.runners import LocalRunner, end_local_leftovers
from seatrial.bisect.step_preparer import PreparedStep, RunFacts
from seatrial.core.errors import BlockedError
from seatrial.evidence.redact import Redactor
from seatrial.runtime.interrupt import Interrupted, Interruptible
from seatrial.runtime.process import pid_file
from tests.bisect.prepared import plan_of, prepared_of

slow = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FOREVER = ("bash", "-c", "sleep 600 & echo began; wait")


def nothing() -> set[int]:
    return set()


def runner(plan: BisectPlan, told: list[str] | None = None) -> LocalRunner:
    return LocalRunner(plan, Redactor(os.environ), (told if told is not None else []).append)


def run_one(plan: BisectPlan, root: Path) -> RunFacts:
    [(_, facts)] = list(runner(plan).run([prepared_of(plan, root)], nothing))
    return facts


def several(plans: Sequence[BisectPlan], root: Path) -> list[PreparedStep]:
    return [prepared_of(plan, root, number) for number, plan in enumerate(plans, 1)]


def alive(root: Path) -> list[str]:
    """Processes whose environment names a step below `root`."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(root) in process.environ().get("SEATRIAL_TREE", "") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def test_it_runs_in_its_tree_and_the_exit_code_is_exact(tmp_path: Path) -> None:
    facts = run_one(plan_of("bash", "-c", "pwd; echo $SEATRIAL_COMMIT; echo x > {output}/made; exit 0"), tmp_path)
    assert (facts.exit_code, facts.ended, facts.scheduler) == (0, "exited", "")
    assert str(facts.tree) in facts.log.read_text()
    assert f"{1:040x}" in facts.log.read_text()
    assert (facts.output / "made").stat().st_mtime >= facts.started
    assert not pid_file(facts.log).exists()


@pytest.mark.parametrize(("command", "code"), [("exit 125", 125), pytest.param("kill -SEGV $$", 139, marks=slow)])
def test_codes_are_passed_on(tmp_path: Path, command: str, code: int) -> None:
    facts = run_one(plan_of("bash", "-c", command), tmp_path)
    assert (facts.exit_code, facts.ended) == (code, "exited")


def test_a_command_that_is_not_there_has_the_code_of_a_shell(tmp_path: Path) -> None:
    facts = run_one(plan_of("no-such-program"), tmp_path)
    assert (facts.exit_code, facts.ended) == (127, "exited")
    assert "no-such-program" in facts.log.read_text()
    (tmp_path / "plain").write_text("")
    assert run_one(plan_of(str(tmp_path / "plain")), tmp_path / "other").exit_code == 126


def test_the_log_holds_no_secret(tmp_path: Path) -> None:
    facts = run_one(plan_of("echo", "hf_" + "s" * 34), tmp_path)
    assert "hf_s" not in facts.log.read_text()
    assert "redacted" in facts.log.read_text()


@slow
def test_the_deadline_ends_it_with_everything_that_it_started(tmp_path: Path) -> None:
    facts = run_one(plan_of(*FOREVER, minutes=0.01), tmp_path)
    assert (facts.exit_code, facts.ended) == (None, "deadline")
    assert "deadline" in facts.log.read_text()
    assert not alive(tmp_path)


@slow
def test_a_step_that_no_longer_matters_is_ended_and_one_that_waits_is_never_begun(tmp_path: Path) -> None:
    plans = [plan_of("true", jobs=2), plan_of(*FOREVER), plan_of("true")]
    told: list[str] = []
    ended: dict[int, RunFacts] = {}
    for prepared, facts in runner(plans[0], told).run(several(plans, tmp_path), lambda: {2, 3} if 1 in ended else set()):
        ended[prepared.step.number] = facts
    assert {number: facts.ended for number, facts in ended.items()} == {1: "exited", 2: "interrupted", 3: "interrupted"}
    assert not ended[3].log.exists()
    assert not alive(tmp_path)
    assert len(told) == 1


@slow
def test_a_run_that_is_begun_while_an_interrupt_comes_is_ended_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepared_of(plan_of(*FOREVER), tmp_path)

    class Cut(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            super().submit(fn, *args, **kwargs)
            while not prepared.step.log.exists() or "began" not in prepared.step.log.read_text():
                time.sleep(0.01)
            raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(runners, "ThreadPoolExecutor", Cut)
    with pytest.raises(Interrupted):
        list(runner(plan_of(*FOREVER, minutes=0.1)).run([prepared], nothing))
    assert "Seatrial was interrupted: ending the run" in prepared.step.log.read_text()
    assert not alive(tmp_path)


@slow
def test_only_so_many_run_at_once_and_each_is_given_back_once(tmp_path: Path) -> None:
    count = "mkdir {output}/../../on-$$; ls -d {output}/../../on-* | wc -l; sleep 0.1; rmdir {output}/../../on-$$"
    steps = several([plan_of("bash", "-c", count)] * 5, tmp_path)
    found = list(runner(plan_of("true", jobs=2)).run(steps, nothing))
    assert sorted(prepared.step.number for prepared, _ in found) == [1, 2, 3, 4, 5]
    assert {facts.exit_code for _, facts in found} == {0}
    assert max(int(facts.log.read_text().split()[1]) for _, facts in found) <= 2


@slow
def test_an_iterator_that_is_left_ends_what_runs(tmp_path: Path) -> None:
    plans = [plan_of("true"), plan_of(*FOREVER)]
    running = runner(plan_of("true", jobs=2)).run(several(plans, tmp_path), nothing)
    next(running)
    running.close()  # type: ignore[attr-defined]
    assert not alive(tmp_path)


@slow
def test_a_log_that_cannot_be_written_is_an_error_and_ends_the_others(tmp_path: Path) -> None:
    steps = several([plan_of(*FOREVER), plan_of("true")], tmp_path)
    steps[1].step.log.mkdir()
    with pytest.raises(BlockedError):
        list(runner(plan_of("true", jobs=2)).run(steps, nothing))
    assert not alive(tmp_path)


@slow
def test_an_interrupt_ends_all_and_passes_on(tmp_path: Path) -> None:
    steps = several([plan_of("true"), plan_of(*FOREVER), plan_of(*FOREVER)], tmp_path)
    with Interruptible():
        running = runner(plan_of("true", jobs=3)).run(steps, nothing)
        next(running)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            next(running)
    assert not alive(tmp_path)


@slow
def test_what_a_killed_seatrial_left_is_ended_by_clean_up(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from tests.bisect.prepared import plan_of\n"
        "from tests.bisect.test_local import nothing, runner, several\n"
        # The grandchild leaves the session: the kernel does not end it with its parent.
        "plan = plan_of('bash', '-c', 'setsid sleep 600 & echo began; wait')\n"
        "list(runner(plan).run(several([plan], Path(sys.argv[2])), nothing))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(ROOT), str(tmp_path)]) as seatrial:
        log = tmp_path / "steps" / f"0001-{1:040x}"[:17] / "run.log"
        stops = time.monotonic() + 60
        while not (log.is_file() and "began" in log.read_text()):
            assert time.monotonic() < stops, "the run did not begin"
            assert seatrial.poll() is None, "Seatrial ended"
            time.sleep(0.05)
        seatrial.kill()
    assert pid_file(log).is_file()
    assert end_local_leftovers(tmp_path) >= 1
    assert not alive(tmp_path)
    assert not pid_file(log).exists()
    assert end_local_leftovers(tmp_path) == 0
