"""Finishing a trial: what is kept, what runs again, and when it is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.core.files import read_json, read_model, write_json
from seatrial.core.records import Trial
from seatrial.core.verdict import Verdict
from seatrial.trial import run_dir
from seatrial.trial.progress import Event, Judged, Stage
from tests.trial.conftest import Bench, commit, result

pytestmark = pytest.mark.slow


def stored(bench: Bench) -> Trial:
    return read_model(bench.out / "trial.json", Trial)


def test_final_levels_are_kept_and_the_rest_runs_again(bench: Bench) -> None:
    bench.words = {1: "crash", 2: "flat"}
    first = bench.start(0, 1, 2)
    assert [level.verdict for level in first.levels] == [Verdict.PASS, Verdict.FAIL, Verdict.BLOCKED]
    times = {number: (bench.level(number) / "run.log").stat().st_mtime_ns for number in (0, 1)}
    bench.words = {}
    second = bench.resume()
    assert [level.verdict for level in second.levels] == [Verdict.PASS, Verdict.FAIL, Verdict.PASS]
    assert {number: (bench.level(number) / "run.log").stat().st_mtime_ns for number in (0, 1)} == times
    assert result(second, 0) == result(first, 0)
    assert second.verdict is Verdict.FAIL


def test_an_earlier_level_that_runs_again_does_not_cost_a_later_one(bench: Bench) -> None:
    bench.words = {0: "flat"}
    first = bench.start(0, 1)
    assert [level.verdict for level in first.levels] == [Verdict.BLOCKED, Verdict.PASS]
    time = (bench.level(1) / "run.log").stat().st_mtime_ns
    bench.words = {}
    seen: list[tuple[Verdict, ...]] = []
    bench.meddle = lambda event: seen.append(tuple(level.verdict for level in stored(bench).levels)) if isinstance(event, Judged) else None
    second = bench.resume()
    assert second.verdict is Verdict.PASS
    assert (bench.level(1) / "run.log").stat().st_mtime_ns == time
    assert seen == [(Verdict.PASS, Verdict.PASS)] * 2  # at no time is the later Pass missing on disk


def test_an_interruption_does_not_cost_what_had_passed(bench: Bench) -> None:
    bench.words = {0: "flat"}
    bench.start(0, 1)

    def interrupt(event: Event) -> None:
        if isinstance(event, Stage) and event.name == "preflight":
            os.kill(os.getpid(), 2)

    bench.meddle = interrupt
    trial = bench.resume()
    assert [level.verdict for level in trial.levels] == [Verdict.BLOCKED, Verdict.PASS]
    assert (trial.status, trial.verdict) == ("running", Verdict.BLOCKED)


def test_an_earlier_attempt_is_set_aside_and_never_mixed_in(bench: Bench) -> None:
    bench.words = {0: "flat"}
    bench.start(0)
    bench.resume()
    bench.words = {}
    trial = bench.resume()
    assert trial.verdict is Verdict.PASS
    attempts = bench.level(0) / "attempts"
    assert sorted(path.name for path in attempts.iterdir()) == ["1", "2"]
    assert (attempts / "1" / "run" / "metrics.jsonl").read_text().count("\n") == 3
    assert (bench.level(0) / "run" / "metrics.jsonl").read_text().count("\n") == 3
    assert json.loads((attempts / "1" / "result.json").read_text())["verdict"] == "Blocked"


def test_a_trial_that_was_killed_before_its_first_level_is_finished(bench: Bench) -> None:
    class Killed(BaseException):
        pass

    def kill(event: Event) -> None:
        if isinstance(event, Stage) and event.name == "evidence":
            raise Killed

    bench.meddle = kill
    with pytest.raises(Killed):
        bench.start(0)
    assert stored(bench).status == "planned"
    bench.meddle = None
    assert bench.resume().verdict is Verdict.PASS


def test_a_trial_that_passed_stays_as_it_is(bench: Bench) -> None:
    first = bench.start(0)
    second = bench.resume()
    assert second.levels == first.levels
    assert second.verdict is Verdict.PASS


def test_another_environment_is_refused(bench: Bench) -> None:
    bench.words = {0: "flat"}
    bench.start(0)
    trial = read_json(bench.out / "trial.json")
    trial["environment"]["fingerprint"] = "0" * 64
    trial["environment"]["packages"]["pytest"] = "0.1"
    write_json(bench.out / "trial.json", trial)
    with pytest.raises(UserError, match=r"not the one this trial began in: pytest: 0\.1 -> ") as caught:
        bench.resume()
    assert "new trial" in caught.value.fix


@pytest.mark.parametrize("how", ["edit", "another edit", "commit", "new file"])
def test_another_state_of_the_change_is_refused(bench: Bench, repo: Path, how: str) -> None:
    (repo / "pkg" / "smoke.py").write_text("a = 2\n")
    bench.words, bench.changes = {0: "flat"}, (repo,)
    bench.start(0)
    match how:
        case "edit":
            (repo / "pkg" / "__init__.py").write_text("b = 1\n")
        case "another edit":
            (repo / "pkg" / "smoke.py").write_text("a = 3\n")
        case "commit":
            commit(repo, {})
        case "new file":
            (repo / "pkg" / "new.py").touch()
    with pytest.raises(UserError, match="since this trial began"):
        bench.resume()
    assert stored(bench).levels[0].verdict is Verdict.BLOCKED


def test_the_state_of_the_change_may_be_restored(bench: Bench, repo: Path) -> None:
    bench.words, bench.changes = {0: "edit"}, (repo,)
    assert bench.start(0).verdict is Verdict.BLOCKED
    with pytest.raises(UserError):
        bench.resume()
    (repo / "edited.py").unlink()
    bench.words = {}
    assert bench.resume().verdict is Verdict.PASS


def test_a_directory_that_is_in_use_is_refused(bench: Bench) -> None:
    bench.start(0)
    with run_dir.locked(bench.out), pytest.raises(UserError, match=f"process {os.getpid()}"):
        bench.resume()


def test_a_directory_without_a_trial_is_refused(bench: Bench) -> None:
    with pytest.raises(UserError, match="not a run directory"):
        bench.resume()


def test_a_torn_trial_is_named(bench: Bench) -> None:
    bench.start(0)
    text = (bench.out / "trial.json").read_text()
    (bench.out / "trial.json").write_text(text[: len(text) // 2])
    with pytest.raises(UserError, match=r"trial\.json:\d+:\d+: not valid JSON"):
        bench.resume()


def test_a_finished_trial_stays_as_it_is(bench: Bench) -> None:
    bench.start(0)
    before = {path: path.read_bytes() for path in bench.out.rglob("*") if path.is_file()}
    again = bench.resume()
    assert again.verdict == Verdict.PASS
    assert {path: path.read_bytes() for path in bench.out.rglob("*") if path.is_file()} == before


def test_an_altered_level_of_an_unfinished_trial_is_blocked_first_and_run_from_scratch_by_a_second_resume(bench: Bench) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, Judged) and event.result.number == 0:
            os.kill(os.getpid(), 2)

    bench.meddle = interrupt
    assert bench.start(0, 1).status == "running"
    with (bench.level(0) / "run.log").open("a") as log:
        log.write("altered\n")
    bench.meddle = None
    first = bench.resume()
    assert [level.verdict for level in first.levels] == [Verdict.BLOCKED, Verdict.PASS]
    second = bench.resume()
    assert [level.verdict for level in second.levels] == [Verdict.PASS, Verdict.PASS]
    assert "altered" in (bench.level(0) / "attempts" / "1" / "run.log").read_text()
    assert "altered" not in (bench.level(0) / "run.log").read_text()
