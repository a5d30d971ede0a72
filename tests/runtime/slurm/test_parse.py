"""What Slurm's commands are asked and how their answers are read, with answers as they were recorded on Slurm 22.05."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.jobs import Ending, Result, UnitState, UnitStatus
from seatrial.runtime import slurm as commands
from seatrial.runtime.slurm import ControllerDown, SlurmRefused, SlurmRow
from seatrial.runtime.slurm_status import RESULT_GRACE_S, SUBMITTED_GRACE_S, UnitFacts, judge_unit
from tests.runtime.slurm.stand_ins import StandIns, stand_ins

NAME = "seatrial-collect-01234567"
DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    return stand_ins(tmp_path, monkeypatch)


def short(rows: list[SlurmRow] | None) -> list[tuple[str, int | None, str, str]]:
    return [(row.job, row.index, row.part, row.state) for row in rows or ()]


def test_one_squeue_asks_for_everything(slurm: StandIns) -> None:
    commands.squeue("", ids=["12", "13"])
    assert slurm.calls() == [["-h", "-r", "-a", "-t", "all", "-j", "12,13", "-o", "%i|%T|%e|%r|%k|%j"]]


def test_units_parts_and_plain_jobs_are_told_apart(slurm: StandIns) -> None:
    slurm.answer(
        "squeue",
        f"1_0|PENDING|N/A|JobArrayTaskLimit|seatrial:b1|{NAME}\n1_11|RUNNING|NONE|None|(null)|{NAME}\n"
        f"3+1|COMPLETING|NONE|None|(null)|x\n8|FAILED|2026-11-15T06:51:54|NonZeroExitCode|(null)|{NAME}\n",
    )
    rows = commands.squeue("", ids=["1"])
    assert short(rows) == [("1", 0, "", "PENDING"), ("1", 11, "", "RUNNING"), ("3", None, "1", "COMPLETING"), ("8", None, "", "FAILED")]
    assert [row.reason for row in rows] == ["JobArrayTaskLimit", "None", "None", "NonZeroExitCode"]
    assert [row.comment for row in rows] == ["seatrial:b1", "", "", ""]
    assert [row.ended for row in rows] == [None, None, None, datetime(2026, 11, 15, 6, 51, 54).timestamp()]


def test_a_foreign_name_with_a_bar_in_it_stays_whole(slurm: StandIns) -> None:
    slurm.answer("squeue", "12|RUNNING|NONE|None|(null)|a|b|c\n")
    assert [row.name for row in commands.squeue("", ids=["12"])] == ["a|b|c"]


def test_an_unknown_id_alone_is_an_answer(slurm: StandIns) -> None:
    slurm.answer("squeue", "", "slurm_load_jobs error: Invalid job id specified\n", 1)
    assert commands.squeue("", ids=["99999"]) == []


@pytest.mark.parametrize(
    "said", [DOWN, "slurm_load_jobs error: Socket timed out on send/recv operation\n", "", "slurm_load_jobs error: Protocol error\n"]
)
def test_every_other_failure_of_squeue_is_no_answer(slurm: StandIns, said: str) -> None:
    slurm.answer("squeue", "", said, 1)
    with pytest.raises(ControllerDown) as caught:
        commands.squeue("", ids=["12"])
    assert caught.value.boundary == "cluster"
    assert "not lost" in caught.value.fix


def test_a_command_that_hangs_is_no_answer(slurm: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "TIMEOUT_S", 0.3)
    slurm.answer("squeue", seconds=60)
    began = time.monotonic()
    with pytest.raises(ControllerDown, match="did not answer within"):
        commands.squeue("", ids=["12"])
    assert time.monotonic() - began < 45


def test_without_slurm_the_fix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(tmp_path, monkeypatch, ())
    with pytest.raises(BlockedError) as caught:
        commands.sbatch(tmp_path / "job.sh", (), "")
    assert "sbatch is not on PATH" in caught.value.message
    assert "--on local" in caught.value.fix
    assert not isinstance(caught.value, ControllerDown | SlurmRefused)


def test_a_cluster_whose_configuration_is_gone_is_not_asked_for_a_minute(slurm: StandIns, tmp_path: Path) -> None:
    with pytest.raises(ControllerDown, match="no such file"):
        commands.squeue(str(tmp_path / "slurm.conf"), ids=["1"])
    assert slurm.calls() == []


def test_variables_that_steer_slurm_are_kept_away(slurm: StandIns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "slurm.conf"
    conf.touch()
    for key in ("SQUEUE_USERS", "SBATCH_PARTITION", "SLURM_JOB_ID", "SLURM_CLUSTERS", "SACCT_FORMAT"):
        monkeypatch.setenv(key, "x")
    monkeypatch.setenv("SLURM_CONF", "/of/another/cluster")
    monkeypatch.setenv("HF_TOKEN", "kept for the job")
    slurm.answer("sbatch", "12\n")
    commands.sbatch(tmp_path / "job.sh", (), str(conf))
    steering = {key: value for key, value in slurm.environment().items() if key.startswith(("SL", "SB", "SQ", "SA"))}
    assert steering == {"SLURM_CONF": str(conf)}
    assert slurm.environment()["HF_TOKEN"] == "kept for the job"
    commands.squeue("", ids=["1"])
    assert "SLURM_CONF" not in slurm.environment()
    assert slurm.environment()["SLURM_TIME_FORMAT"] == "standard"


def test_accounting_is_read_without_its_exit_codes(slurm: StandIns) -> None:
    slurm.answer(
        "sacct",
        f"7|FAILED|2026-11-15T07:05:44|2026-11-15T07:05:53|{NAME}\n7|REQUEUED|2026-11-15T07:05:43|2026-11-15T07:05:44|{NAME}\n"
        f"1_1|CANCELLED by 0|2026-11-15T07:05:37|2026-11-15T07:05:42|{NAME}\n"
        f"4_[0,2,4-5]|CANCELLED by 0|2026-11-15T07:05:42|Unknown|{NAME}\n5+0|NODE_FAIL|2026-11-15T07:05:43|2026-11-15T07:05:44|{NAME}\n",
    )
    rows = commands.sacct("", ids=["1", "7"])
    cancelled = [("4", index, "", "CANCELLED") for index in (0, 2, 4, 5)]
    assert short(rows) == [
        ("1", 1, "", "CANCELLED"), *cancelled, ("7", None, "", "REQUEUED"), ("5", None, "0", "NODE_FAIL"), ("7", None, "", "FAILED")
    ]  # fmt: skip
    assert "ExitCode" not in str(slurm.calls())
    assert slurm.calls()[0][:8] == ["-a", "-X", "-n", "-P", "-D", "-j", "1,7", "-o"]


def test_by_name_accounting_needs_a_time(slurm: StandIns) -> None:
    commands.sacct("", names=["a", "b"], since=datetime(2026, 11, 15, 7, 0, 0).timestamp())
    assert slurm.calls()[0][5:9] == ["--name", "a,b", "-S", "2026-11-15T07:00:00"]


def test_no_accounting_is_not_an_accounting_that_is_down(slurm: StandIns) -> None:
    slurm.answer("sacct", "", "Slurm accounting storage is disabled\n", 1)
    assert commands.sacct("", ids=["1"]) is None
    slurm.answer("sacct", "", "sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection\n", 1)
    with pytest.raises(ControllerDown, match="sacct"):
        commands.sacct("", ids=["1"])


@pytest.mark.parametrize(
    ("text", "indices"),
    [("1_[2-3%1]", [2, 3]), ("1_[0-8:4,9]", [0, 4, 8, 9]), ("1_[7]", [7]), ("1_[0-1,...]", [0, 1]), ("1.batch", []), ("", [])],
)
def test_lists_of_indices(slurm: StandIns, text: str, indices: list[int]) -> None:
    slurm.answer("squeue", f"{text}|PENDING|N/A|None|(null)|{NAME}\n")
    assert [row.index for row in commands.squeue("", ids=["1"])] == indices


@pytest.mark.parametrize("said", ["12\n", "12;alpha\n"])
def test_the_id_of_a_submission(slurm: StandIns, tmp_path: Path, said: str) -> None:
    slurm.answer("sbatch", said)
    assert commands.sbatch(tmp_path / "job.sh", ("--array=1,2",), "") == "12"
    assert slurm.calls() == [["--parsable", "--array=1,2", str(tmp_path / "job.sh")]]


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("sbatch: error: Batch job submission failed: Invalid partition name specified\n", SlurmRefused),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available\n", SlurmRefused),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n", ControllerDown),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n", ControllerDown),
    ],
)
def test_a_refusal_is_not_silence(slurm: StandIns, tmp_path: Path, said: str, kind: type[BlockedError]) -> None:
    slurm.answer("sbatch", "", said, 1)
    with pytest.raises(kind) as caught:
        commands.sbatch(tmp_path / "job.sh", (), "")
    assert caught.value.message == "sbatch: " + said.strip().removeprefix("sbatch: error: ")
    with pytest.raises(kind):
        commands.check_script("#!/bin/bash\n", (), "")


@pytest.mark.parametrize(("said", "code"), [("Submitted batch job 12\n", 0), ("", 0), ("", -9)])
def test_an_sbatch_that_gives_no_id_may_have_submitted(slurm: StandIns, tmp_path: Path, said: str, code: int) -> None:
    slurm.answer("sbatch", said, code=code)
    if code < 0:
        (slurm.place / "sbatch").write_text("#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(ControllerDown, match=said.strip() or "gave no id, but said: nothing"):
        commands.sbatch(tmp_path / "job.sh", (), "")


def test_a_site_that_greets_first_has_the_id_on_a_line_of_its_own(slurm: StandIns, tmp_path: Path) -> None:
    slurm.answer("sbatch", "Welcome to 2 clusters\n12;main\n")
    assert commands.sbatch(tmp_path / "job.sh", (), "") == "12"


def test_a_script_is_checked_from_standard_input(slurm: StandIns) -> None:
    slurm.answer("sbatch", "", "sbatch: Job 14 to start at 2537-04-03T19:06:57 using 1 processors on nodes n1 in partition main\n")
    assert commands.check_script("#!/bin/bash\n", (), "").startswith("Job 14 to start")
    assert slurm.stdin() == "#!/bin/bash\n"
    assert slurm.calls() == [["--test-only"]]


def test_cancelling_what_has_ended_is_no_error(slurm: StandIns) -> None:
    slurm.answer("scancel", "", "scancel: error: Kill job error on job id 5: Invalid job id specified\n", 1)
    commands.scancel("", ["5"])
    slurm.answer("scancel", "", "scancel: error: Kill job error on job id 5: Access/permission denied\n", 1)
    with pytest.raises(SlurmRefused, match="permission denied"):
        commands.scancel("", ["5"])


def test_the_largest_array(slurm: StandIns) -> None:
    slurm.answer("scontrol", "Configuration data\nMaxArraySize            = 1001\n")
    assert commands.setting("", "MaxArraySize") == "1001"


# ---- the state of a unit ---------------------------------------------------------------------------------------------

NOW = 1_000_000.0


def row(state: str, reason: str = "None", ended: float | None = None, part: str = "") -> SlurmRow:
    return SlurmRow("12", 3, part, state, reason, NAME, "", ended)


def result(ending: Ending = Ending.DONE, exit_code: int | None = 0, **more: Any) -> Result:
    values: dict[str, Any] = {"job": "collect", "index": 3, "slurm": "12_3", "restart": 0, "component": "client.0", "node": "n1"}
    return Result(**{**values, "started": 1, "ended": 2, "ending": ending, "exit_code": exit_code, **more})


def state_of(*rows: SlurmRow, **more: Any) -> UnitStatus:
    values: dict[str, Any] = {"slurm": "12", "handed": True, "since": NOW - 3600, "array": True, "rows": rows}
    return judge_unit(UnitFacts("collect", 3, **{**values, **more}), NOW)


@pytest.mark.parametrize("word", ["PENDING", "RUNNING", "FAILED", "NODE_FAIL", "CANCELLED", "TIMEOUT", "COMPLETED"])
def test_done_is_done_whatever_slurm_says(word: str) -> None:
    assert state_of(row(word), result=result()).state is UnitState.DONE
    assert state_of(silent="down", result=result()).state is UnitState.DONE
    assert state_of(result=result(slurm="7_3")).state is UnitState.DONE


@pytest.mark.parametrize("wrong", [{"index": 4}, {"job": "merge"}, {"exit_code": 1}, {"exit_code": None}])
def test_a_done_that_contradicts_itself_is_not_believed(wrong: dict[str, Any]) -> None:
    found = state_of(row("COMPLETED"), result=result(**wrong))
    assert found.state is UnitState.BLOCKED
    assert "not believed" in found.reason


@pytest.mark.parametrize(
    ("word", "state"),
    [
        *((word, UnitState.WAITING) for word in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")),
        *((word, UnitState.RUNNING) for word in ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "A_WORD_OF_TOMORROW")),
    ],
)
def test_what_lives_is_not_judged_by_an_old_result(word: str, state: UnitState) -> None:
    assert state_of(row(word)).state is state
    assert state_of(row(word), result=result(Ending.CLIENT_FAILED, 1)).state is state
    assert state_of(row(word), result=UserError("torn")).state is state


def test_a_failed_client_keeps_its_exact_code() -> None:
    found = state_of(row("FAILED"), result=result(Ending.CLIENT_FAILED, 255, message="the client exited with 255"))
    assert (found.state, found.slurm, found.scheduler) == (UnitState.FAILED, "12_3", "FAILED")
    assert found.reason == "client-failed (client.0, exit code 255): the client exited with 255"
    assert found.result is not None
    assert found.result.exit_code == 255


@pytest.mark.parametrize("ending", [item for item in Ending if item not in (Ending.DONE, Ending.CLIENT_FAILED)])
def test_every_other_ending_is_blocked_and_says_who(ending: Ending) -> None:
    found = state_of(row("FAILED"), result=result(ending, None, component="server.1", message="why"))
    assert (found.state, found.reason) == (UnitState.BLOCKED, f"{ending} (server.1): why")


@pytest.mark.parametrize(
    "word", ["TIMEOUT", "NODE_FAIL", "CANCELLED", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "FAILED", "COMPLETED"]
)
def test_ended_without_a_result_is_blocked_with_slurms_word(word: str) -> None:
    found = state_of(row(word, ended=NOW - RESULT_GRACE_S - 1))
    assert (found.state, found.scheduler) == (UnitState.BLOCKED, word)
    assert found.reason
    assert ("without leaving a result" in found.reason) == (word in ("COMPLETED", "FAILED"))


def test_a_result_may_be_late_but_only_where_one_is_expected() -> None:
    assert state_of(row("COMPLETED", ended=NOW - 1)).state is UnitState.RUNNING
    assert state_of(row("NODE_FAIL", ended=NOW - 1)).state is UnitState.BLOCKED


def test_a_result_of_an_earlier_submission_does_not_count() -> None:
    old = result(Ending.CLIENT_FAILED, 1, slurm="7_3")
    assert state_of(row("NODE_FAIL"), result=old).reason == "a node failed"
    assert state_of(result=old).state is UnitState.LOST
    assert state_of(result=old, slurm="").state is UnitState.LOST
    assert state_of(result=old, slurm="", since=0.5).state is UnitState.FAILED


def test_a_torn_result_is_blocked_and_named() -> None:
    torn = UserError("/b/collect/results/3.json:1:1: not valid JSON")
    for rows in ((row("COMPLETED", ended=NOW - 1),), ()):
        found = state_of(*rows, result=torn)
        assert (found.state, found.reason) == (UnitState.BLOCKED, torn.message)


def test_silence_is_never_lost() -> None:
    assert state_of(silent="down").state is UnitState.UNKNOWN
    assert state_of(silent="down", result=result(Ending.CLIENT_FAILED, 1)).state is UnitState.UNKNOWN
    assert state_of(silent="down").reason == "down"


def test_lost_needs_some_time() -> None:
    assert state_of(since=NOW - SUBMITTED_GRACE_S + 1).state is UnitState.WAITING
    assert state_of(since=NOW - SUBMITTED_GRACE_S - 1).state is UnitState.LOST
    assert state_of(note="the id 12 belongs to another job now: x").reason.endswith("another job now: x")


def test_a_dependency_that_can_never_hold_is_named() -> None:
    waiting = state_of(row("PENDING", "DependencyNeverSatisfied"))
    assert waiting.state is UnitState.WAITING
    assert "DependencyNeverSatisfied" in waiting.reason
    cancelled = state_of(row("CANCELLED", "DependencyNeverSatisfied"))
    assert cancelled.state is UnitState.BLOCKED
    assert "did not end well" in cancelled.reason


def test_a_part_that_lives_or_failed_decides() -> None:
    assert state_of(row("COMPLETED", part="0"), row("RUNNING", part="1")).state is UnitState.RUNNING
    assert state_of(row("COMPLETED", part="0"), row("NODE_FAIL", part="1")).scheduler == "NODE_FAIL"
