"""The conductor: rounds until nothing is owed, or until there is no sense in another; it says why. Collectors run in this process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.jobs import Batch, Profile, UnitState, UnitStatus
from seatrial.rollouts import campaign_dir, campaign_rounds, campaign_runner
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.campaign_runner import CampaignRunner, RunTarget, Status, campaign_lock, cancel
from seatrial.runtime import jobdir
from seatrial.runtime.interrupt import Interrupted, Interruptible
from seatrial.runtime.jobdir import job_dir
from seatrial.runtime.slurm_status import Poller, Snapshot
from tests.rollouts.collecting import make
from tests.rollouts.served import halves, run_in_process, serving


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_process(monkeypatch)


def campaign(tmp_path: Path, url: str, prompts: list[str], **tables: Any) -> CampaignDir:
    tables = {"work": {"repeats": 2, "shards": 2}, "verifier": "choice", **tables}
    place, _ = make(tmp_path, prompts, policy={"url": url, "model": "stub"}, **tables)
    return place


def carried(place: CampaignDir, where: RunTarget | None = None) -> tuple[Status, list[str]]:
    said: list[str] = []
    with campaign_lock(place, said.append):
        status = CampaignRunner(place, where or RunTarget(), said.append, lambda status: None).run()
    return status, said


def test_one_round_settles_everything_and_a_second_call_launches_none(tmp_path: Path) -> None:
    with serving() as stub:
        place = campaign(tmp_path, stub.url, halves(3))
        status, said = carried(place)
        assert (status.ok, status.owed, status.round, stub.calls) == (6, 0, 1, 6)
        assert said == ["round 1 on local: 6 rollouts in 1 task"]
        status, said = carried(place)
        assert (status.owed, status.round, stub.calls, said) == (0, 1, 6, [])


def test_a_poisoned_prompt_is_given_up_within_the_rounds_of_one_call(tmp_path: Path) -> None:
    with serving() as stub:
        place = campaign(tmp_path, stub.url, [*halves(2), "[[status=500]]"], requests={"tries": 1})
        status, said = carried(place)
    assert (status.ok, status.failed, status.owed, status.round) == (4, 2, 0, 3)
    assert said[1:] == ["round 2 on local: 2 rollouts in 1 task", "round 3 on local: 2 rollouts in 1 task"]


def test_rounds_are_limited(tmp_path: Path) -> None:
    with serving() as stub:
        work = {"repeats": 2, "shards": 2, "rounds": 1}
        place = campaign(tmp_path, stub.url, [*halves(2), "[[status=500 times=2]]"], work=work, requests={"tries": 1})
        status, said = carried(place)
        assert (status.ok, status.owed) == (4, 2)
        assert said[-1].startswith("something is owed after 1 round (work.rounds): task 0")
        assert carried(place)[0].owed == 0


def test_a_campaign_that_stopped_by_itself_is_not_launched_again(tmp_path: Path) -> None:
    with serving() as stub:
        place = campaign(tmp_path, stub.url, ["[[status=400]]", *halves(3)], failures={"max_count": 0}, requests={"concurrency": 1})
        status, said = carried(place)
        assert status.stopped.endswith("failures.max_count is 0")
        assert status.owed > 0
        assert len(said) == 1
        calls = stub.calls
        assert carried(place)[0].stopped
        assert stub.calls == calls


def test_nobody_answers(tmp_path: Path) -> None:
    place = campaign(tmp_path, "http://127.0.0.1:9/v1", halves(2))
    status, said = carried(place)
    assert (status.ok, status.owed, status.round) == (0, 4, 1)
    assert "no server of the policy answered" in said[1]
    assert said[2].startswith("the round settled nothing: task 0")


def test_one_conductor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign_runner, "_LOCK_S", 0.0)
    place = campaign(tmp_path, "http://h/v1", halves(1))
    with campaign_lock(place, print), pytest.raises(BlockedError, match=r"another seatrial that carries .*process") as caught:
        carried(place)
    assert caught.value.fix.endswith(f"stop it: seatrial rollouts cancel {place.root}")


def test_a_key_is_looked_for_only_when_something_is_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S4_KEY", "k")
    with serving(key="k") as stub:
        place, _ = make(tmp_path, halves(1), verifier="choice", policy={"url": stub.url, "key_env": "S4_KEY"})
        monkeypatch.delenv("S4_KEY")
        with pytest.raises(UserError, match="S4_KEY"):
            carried(place)
        assert campaign_rounds.list_rounds(place) == ()
        monkeypatch.setenv("S4_KEY", "k")
        assert carried(place)[0].owed == 0
    monkeypatch.delenv("S4_KEY")
    assert carried(place)[0].owed == 0


def test_asked_to_stop_it_ends_after_the_round_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = campaign(tmp_path, "http://h/v1", halves(2))
    with Interruptible() as stop:

        def interrupted(batch: Batch, directory: Path, say: object, line_filter: object) -> None:
            stop.signal = 2

        monkeypatch.setattr(campaign_runner, "run_batch", interrupted)
        with pytest.raises(Interrupted):
            carried(place)


def test_the_last_words_of_a_collector_and_their_fix(tmp_path: Path) -> None:
    log = job_dir(tmp_path, campaign_rounds.COLLECT).log("client", 0, 3)
    assert campaign_runner._last_words(tmp_path, 3) == []
    log.parent.mkdir(parents=True)
    stamp = "2026-11-15T17:08:11.568Z "
    log.write_text("".join(stamp + text + "\n" for text in ("seatrial: waiting", "seatrial: Blocked: nobody answers", "  fix: start it")))
    assert campaign_runner._last_words(tmp_path, 3) == ["Blocked: nobody answers", "fix: start it"]


def test_nothing_to_cancel(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no manifest\.json"):
        cancel(CampaignDir(tmp_path))
    place = campaign(tmp_path, "http://h/v1", halves(1))
    assert cancel(place) == ()
    campaign_rounds.save_round(place, campaign_rounds.plan_round(place, {0: 2}, 2, "slurm:x"))  # planned, and never submitted
    assert cancel(place) == ()
    assert campaign_dir.read_stop_file(place) is None


def test_a_campaign_that_somebody_carries_is_stopped(tmp_path: Path) -> None:
    place = campaign(tmp_path, "http://h/v1", halves(1))
    with campaign_lock(place, print):
        assert cancel(place) == ("what another seatrial carries",)
    found = campaign_dir.read_stop_file(place)
    assert found is not None
    assert found.reason == "it was cancelled"
    assert carried(place)[0].round == 0


def test_left_on_slurm_nothing_is_submitted_twice_or_needlessly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = campaign(tmp_path, "http://h/v1", halves(1))
    handed: list[int] = []
    said: list[str] = []
    monkeypatch.setattr(RunTarget, "most_tasks", 1000)

    def submit(batch: Batch, *_: object) -> tuple[()]:
        handed.append(len(batch.jobs))
        return ()

    monkeypatch.setattr("seatrial.rollouts.campaign_runner.slurm_submit.submit", submit)
    conductor = CampaignRunner(place, RunTarget("slurm:x", Profile(partition="p")), said.append, lambda status: None)
    conductor.submit()
    assert handed == [2]
    monkeypatch.setattr(conductor, "_live", lambda: campaign_rounds.list_rounds(place)[-1])
    conductor.submit()
    assert handed == [2]
    assert said[-1] == "round 1 on slurm:x has not ended: nothing was submitted"


def ended(place: CampaignDir, reason: str, monkeypatch: pytest.MonkeyPatch, code: int | None = None) -> tuple[str, bool]:
    """What is said of a task that ended for this reason, its client with this exit code, after it had said something."""
    campaign_rounds.save_round(place, campaign_rounds.plan_round(place, {0: 2}, 2, "local"))
    log = job_dir(campaign_rounds.round_dir(place, 1), campaign_rounds.COLLECT).log("client", 0, 0)
    log.parent.mkdir(parents=True)
    log.write_text("2026-11-15T17:08:11.568Z seatrial: done: 3 ok, 1 owed.\n")
    about = {"job": campaign_rounds.COLLECT, "index": 0, "slurm": ""}
    told = {"restart": 0, "ending": "client-failed", "component": "client.0", "exit_code": code, "node": "n", "started": 0, "ended": 1}
    unit = UnitStatus.model_validate({**about, "state": UnitState.FAILED, "reason": reason, "result": {**about, **told} if code else None})
    monkeypatch.setattr(Poller, "__init__", lambda self, directories: None)
    monkeypatch.setattr(Poller, "poll", lambda self: Snapshot(((place.root, (unit,)),), 0))
    found = CampaignRunner(place, RunTarget(), print, lambda status: None)
    return found._why(), found.refused


def test_a_collector_that_said_why_it_ended_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = campaign(tmp_path, "http://h/v1", halves(1))
    said = ended(place, "client-failed: the client exited with 99; its log: x", monkeypatch, 99)
    assert said == ("task 0: done: 3 ok, 1 owed.", False)


def test_one_that_was_killed_is_not_believed_and_one_that_refused_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = campaign(tmp_path / "a", "http://h/v1", halves(1))
    assert ended(place, "killed by signal 9", monkeypatch) == ("task 0: killed by signal 9\n  done: 3 ok, 1 owed.", False)
    place = campaign(tmp_path / "b", "http://h/v1", halves(1))
    assert ended(place, "the client exited with 2", monkeypatch, 2)[1]


def test_while_nothing_happens_the_collector_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = campaign(tmp_path, "http://h/v1", halves(1))
    monkeypatch.setattr(campaign_runner, "_LOOK_S", 0.01)
    said: list[str] = []

    def waiting(batch: Batch, directory: Path, say: object, line_filter: object) -> None:
        jobdir.save(directory, batch)
        log = job_dir(directory, campaign_rounds.COLLECT).log("client", 0, 0)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("2026-11-15T17:08:11.568Z seatrial: no answer yet\n")
        until = time.monotonic() + 60
        while len(said) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.05)

    monkeypatch.setattr(campaign_runner, "run_batch", waiting)
    with campaign_lock(place, said.append):
        CampaignRunner(place, RunTarget(), said.append, lambda status: None).run()
    assert said[1] == "task 0: no answer yet"
    assert said.count("task 0: no answer yet") == 1


def test_a_wrong_address_ends_in_one_round_whatever_was_written(tmp_path: Path) -> None:
    with serving() as stub:
        place = campaign(tmp_path, stub.url, ["[[status=404]]"] * 2, requests={"tries": 2, "concurrency": 1})
        status, said = carried(place)
    assert (status.round, status.settled, status.owed) == (1, 0, 4)
    assert said[1].startswith("the round settled nothing")


def test_how_the_process_of_a_collector_ended_is_told_only_when_it_did_not_say_so(tmp_path: Path) -> None:
    said: list[str] = []
    found = CampaignRunner(campaign(tmp_path, "http://h/v1", halves(1)), RunTarget(), said.append, lambda status: None)
    for text in ("the client exited with 99; its log: x", "the client exited with 990", "the client exited with 1; its log: x"):
        found._tell(f"collect[0]: client-failed: {text}")
    assert [text.rpartition("with ")[2] for text in said] == ["990", "1; its log: x"]
