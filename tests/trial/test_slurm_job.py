"""A trial as a Slurm job: what is submitted, who may go on, and what is made of a job that ended too early."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import psutil
import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import read_json, read_model, read_text
from seatrial.core.jobs import Component, Ending, Profile, UnitState, UnitStatus
from seatrial.core.records import Cost, LevelResult, Plan, Report, Trial
from seatrial.core.verdict import Boundary, Verdict
from seatrial.evidence.repos import repo_states
from seatrial.runtime.jobdir import job_dir
from seatrial.trial import run_dir, runner, slurm_job
from seatrial.trial.plan import make_plan, requested
from seatrial.trial.progress import Event, Running
from seatrial.trial.slurm_job import Following, Note, Tail
from tests.trial.conftest import Bench, commit, result
from tests.trial.fake import FakeLoop
from tests.trial.fake_slurm import FakeSlurm, leave_result, slurm

pytestmark = pytest.mark.slow

__all__ = ["slurm"]
PROFILE = Profile(time="0:10:00", cpus=2)


def plan_of(bench: Bench, *levels: int) -> Plan:
    return make_plan(FakeLoop(), requested(FakeLoop(), levels), None, repo_states(bench.changes), arguments=bench.arguments)


def prepare(bench: Bench, *levels: int) -> Trial:
    """A stored trial of which nothing has run."""
    for module in (runner, slurm_job):
        bench.monkeypatch.setattr(module, "loop_of", bench._loop)
    return runner.prepare(runner.Request(plan_of(bench, *levels), bench.out, bench.python), bench._listen)


def submit(bench: Bench, *levels: int) -> Trial:
    """A trial that waits in the fake Slurm."""
    trial = prepare(bench, *levels)
    assert slurm_job.submit_trial(bench.out, trial, PROFILE, "test").slurm == "41"
    return trial


def ended(scheduler: str, reason: str = "", state: UnitState = UnitState.BLOCKED) -> UnitStatus:
    return UnitStatus(job="trial", index=0, slurm="41", state=state, scheduler=scheduler, reason=reason)


def client_of(plan: Plan, path: Path, profile: Profile) -> Component:
    return slurm_job.batch_of(plan, path, profile).jobs[0].client


class TestPrepare:
    """A trial that is stored, and run later."""

    def test_the_trial_and_its_evidence_are_stored_and_nothing_runs(self, bench: Bench, repo: Path) -> None:
        (repo / "pkg" / "smoke.py").write_text("a = 2\n")
        bench.changes = (repo,)
        trial = prepare(bench, 0)
        assert trial.status == "planned"
        assert trial.environment is not None
        assert trial == run_dir.load(bench.out)
        names = {path.name for path in (bench.out / "evidence").iterdir()}
        assert names >= {"config.json", "request.json", "repos.json", "environment.json", trial.plan.changes[0].patch}
        assert not (bench.out / "levels").exists()

    def test_resume_runs_it(self, bench: Bench) -> None:
        prepare(bench, 0, 1)
        trial = bench.resume()
        assert (trial.status, trial.verdict) == ("done", Verdict.PASS)

    def test_a_change_that_was_edited_meanwhile_is_refused(self, bench: Bench, repo: Path) -> None:
        bench.changes = (repo,)
        prepare(bench, 0)
        commit(repo, {"pkg/other.py": ""})
        with pytest.raises(UserError, match="another commit since this trial began"):
            bench.resume()

    def test_a_secret_argument_is_refused_before_anything_is_stored(self, bench: Bench) -> None:
        bench.arguments = ("--hub_token", "hf_abcdefghijklmnopqrstuvwxyz0123456789")
        with pytest.raises(UserError, match="is a secret, which is not stored") as caught:
            prepare(bench, 0)
        assert "hf_abc" not in str(caught.value)
        assert "without --on" in caught.value.fix
        assert not (bench.out / "trial.json").exists()

    def test_the_interpreter_is_stored_by_its_whole_path(self, bench: Bench) -> None:
        bench.monkeypatch.chdir(Path(sys.executable).parent)
        bench.python = Path(Path(sys.executable).name)
        prepare(bench, 0)
        assert read_json(bench.out / "evidence" / "request.json")["python"] == sys.executable


class TestJob:
    """What is submitted."""

    def test_the_client_resumes_the_trial(self, bench: Bench) -> None:
        client = client_of(plan_of(bench, 0), bench.out, Profile(cpus=3, memory_mb=500))
        assert client.command == (sys.executable, "-P", "-m", "seatrial.cli.main", "resume", str(bench.out))
        assert (client.gpus, client.cpus, client.memory_mb, client.nodes) == (0, 3, 500, 1)
        assert (client.image, client.container, client.mounts) == (None, None, ())

    def test_gpus_are_those_of_the_levels_unless_the_profile_says_otherwise(self, bench: Bench) -> None:
        plan = plan_of(bench, 0, 1)
        levels = tuple(level.model_copy(update={"cost": Cost(minutes=1, gpus=number)}) for number, level in enumerate(plan.levels, 1))
        plan = plan.model_copy(update={"levels": levels})
        assert client_of(plan, bench.out, Profile()).gpus == 2
        assert client_of(plan, bench.out, Profile(gpus=4)).gpus == 4

    def test_a_container_sees_what_the_trial_needs(self, bench: Bench, repo: Path, tmp_path: Path) -> None:
        plain = tmp_path / "checkout"
        repo.rename(plain)
        bench.changes = (plain,)
        profile = Profile(container="c", containers={"c": "image"}, mounts=("/data:/data",))
        client = client_of(plan_of(bench, 0), bench.out, profile)
        assert client.container == "c"
        assert {f"{bench.out}:{bench.out}", f"{plain}:{plain}", f"{sys.prefix}:{sys.prefix}"} <= set(client.mounts)
        script = slurm_job.script(plan_of(bench, 0), bench.out, profile)
        assert "--container-image=image" in script
        assert "/data:/data" in script

    @pytest.mark.parametrize(
        ("name", "profile", "message"),
        [
            ("run", Profile(nodes=2), "without Ray a trial runs on one node"),
            ("run", Profile(ray="ray.sub"), "does not say where it is"),
            ("{port}", Profile(), "words in braces"),
            ("a b", Profile(image="i"), "cannot be mounted"),
            ("a:b", Profile(image="i"), "cannot be mounted"),
        ],
    )
    def test_what_cannot_be_a_job_is_refused(self, bench: Bench, tmp_path: Path, name: str, profile: Profile, message: str) -> None:
        with pytest.raises(UserError, match=message):
            slurm_job.batch_of(plan_of(bench, 0).model_copy(update={"loop": "trl"}), tmp_path / name, profile)

    def test_with_ray_the_client_runs_inside_it_on_whole_nodes(self, bench: Bench) -> None:
        profile = Profile(nodes=2, ray="symmetric-run", gpus=4)
        job = slurm_job.batch_of(plan_of(bench, 0).model_copy(update={"loop": "trl"}), bench.out, profile, "/env/bin/python").jobs[0]
        assert (job.exclusive, job.client.nodes, job.client.tasks) == (True, 2, 2)
        assert job.client.command[0] == "/env/bin/python"
        assert "/env/bin/ray" in job.client.command
        assert job.client.command[-2:] == ("resume", str(bench.out))
        assert job.client.environment == {"SEATRIAL_RAY_NODES": "2"}

    def test_a_launcher_of_the_loops_own_gets_the_client_unchanged(self, bench: Bench) -> None:
        profile = Profile(nodes=2, ray="ray.sub", ray_sub="/x/ray.sub", image="i")
        job = slurm_job.batch_of(plan_of(bench, 0).model_copy(update={"loop": "trl"}), bench.out, profile).jobs[0]
        assert (job.launcher, job.client.nodes) == ("/x/ray.sub", 2)
        assert job.client.command[0] == sys.executable

    def test_every_submission_has_its_own_directory(self, bench: Bench, slurm: FakeSlurm) -> None:
        trial = submit(bench, 0)
        sent = slurm_job.submit_trial(bench.out, trial, PROFILE, "test")
        assert (sent.slurm, sent.profile) == ("42", "test")
        assert [path.name for path in slurm_job.submissions(bench.out)] == ["1", "2"]
        assert len(slurm.calls("sbatch")) == 2
        assert "resume" in job_dir(bench.out / "jobs" / "2", "trial").script.read_text()

    def test_the_program_that_starts_ray_is_staged(self, bench: Bench, slurm: FakeSlurm) -> None:
        slurm_job.submit_trial(bench.out, prepare(bench, 0), PROFILE.model_copy(update={"ray": "symmetric-run"}), "test")
        assert (bench.out / "jobs" / "1" / "trial" / "ray_step.py").is_file()

    def test_submissions_are_ordered_by_number(self, bench: Bench, slurm: FakeSlurm) -> None:
        trial = submit(bench, 0)
        (bench.out / "jobs" / "1").rename(bench.out / "jobs" / "9")
        (bench.out / "jobs" / "notes").touch()
        slurm_job.submit_trial(bench.out, trial, PROFILE, "test")
        assert [path.name for path in slurm_job.submissions(bench.out)] == ["9", "10"]

    def test_what_slurm_says_is_passed_on(self, bench: Bench, slurm: FakeSlurm) -> None:
        assert slurm_job.validate(plan_of(bench, 0), bench.out, PROFILE) == "ok"
        slurm.flag("refuses")
        assert "not available" in slurm_job.validate(plan_of(bench, 0), bench.out, PROFILE)
        assert list(bench.out.iterdir()) == []


class TestWhoMayGoOn:
    """At most one job, and nobody beside it."""

    def own(self, bench: Bench, slurm_id: str = "41") -> dict[str, str]:
        return {"SEATRIAL_JOB": str(job_dir(bench.out / "jobs" / "1", "trial").path), "SLURM_JOB_ID": slurm_id}

    @pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "REQUEUED"])
    def test_a_live_job_keeps_others_out(self, bench: Bench, slurm: FakeSlurm, state: str) -> None:
        submit(bench, 0)
        slurm.says(state)
        with pytest.raises(UserError, match="Slurm job 41 of this trial is") as caught:
            slurm_job.refuse_while_active(bench.out, {})
        assert f"seatrial attach {bench.out}" in caught.value.fix

    def test_an_earlier_job_that_lives_counts_too(self, bench: Bench, slurm: FakeSlurm) -> None:
        slurm_job.submit_trial(bench.out, submit(bench, 0), PROFILE, "test")
        slurm.says("CANCELLED", slurm="42")
        with pytest.raises(UserError, match="Slurm job 41"):
            slurm_job.refuse_while_active(bench.out, {})

    @pytest.mark.parametrize("state", ["CANCELLED", "TIMEOUT", "NODE_FAIL"])
    def test_an_ended_job_does_not(self, bench: Bench, slurm: FakeSlurm, state: str) -> None:
        submit(bench, 0)
        slurm.says(state)
        slurm_job.refuse_while_active(bench.out, {})

    def test_a_silent_controller_keeps_others_out(self, bench: Bench, slurm: FakeSlurm) -> None:
        submit(bench, 0)
        slurm.flag("down")
        with pytest.raises(BlockedError, match=r"not known: .*Unable to contact") as caught:
            slurm_job.refuse_while_active(bench.out, {})
        assert caught.value.boundary is Boundary.CLUSTER

    def test_the_job_itself_goes_on_without_asking(self, bench: Bench, slurm: FakeSlurm) -> None:
        submit(bench, 0)
        slurm.flag("down")
        slurm_job.refuse_while_active(bench.out, self.own(bench))
        assert slurm.calls("squeue") == []

    def test_another_job_is_not_the_job_itself(self, bench: Bench, slurm: FakeSlurm) -> None:
        trial = submit(bench, 0)
        assert slurm_job.is_own_job(bench.out, self.own(bench))
        assert not slurm_job.is_own_job(bench.out, self.own(bench, "40"))
        assert not slurm_job.is_own_job(bench.out, {"SLURM_JOB_ID": "41"})
        assert not slurm_job.is_own_job(bench.out, {})
        slurm_job.submit_trial(bench.out, trial, PROFILE, "test")
        assert not slurm_job.is_own_job(bench.out, self.own(bench)), "a later one was submitted"

    def test_a_job_may_start_before_its_id_is_stored(self, bench: Bench, slurm: FakeSlurm) -> None:
        submit(bench, 0)
        file = job_dir(bench.out / "jobs" / "1", "trial").submission_file
        file.write_text(file.read_text().replace('"41"', "null"))
        assert slurm_job.is_own_job(bench.out, self.own(bench))

    def test_a_trial_that_was_never_submitted_needs_no_slurm(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        prepare(bench, 0)
        slurm_job.refuse_while_active(bench.out, {})


class TestSettle:
    """What a job that ended leaves."""

    def stored(self, bench: Bench, *levels: LevelResult) -> None:
        """As if the job was killed after these levels."""
        run_dir.save(bench.out, run_dir.load(bench.out).model_copy(update={"status": "running", "levels": levels}))

    def ran(self, bench: Bench, *levels: int, words: dict[int, str] | None = None) -> Trial:
        """Submitted, and run in the job to its end."""
        submit(bench, *levels)
        bench.words = words or {}
        return bench.resume()

    def test_a_trial_with_its_verdict_is_left_alone(self, bench: Bench, slurm: FakeSlurm) -> None:
        before = self.ran(bench, 0)
        text = read_text(bench.out / "trial.json")
        assert slurm_job.settle(bench.out, ended("CANCELLED")) == (before, "")
        assert read_text(bench.out / "trial.json") == text

    def test_a_job_that_never_started_blocks_every_level(self, bench: Bench, slurm: FakeSlurm) -> None:
        submit(bench, 0, 1, 3)
        trial, cut = slurm_job.settle(bench.out, ended("CANCELLED", "cancelled"))
        assert cut == "Slurm job 41: CANCELLED, cancelled"
        assert [level.verdict for level in trial.levels] == [Verdict.BLOCKED, Verdict.BLOCKED, Verdict.SKIPPED]
        assert result(trial, 0).boundary is Boundary.CLUSTER
        assert result(trial, 0).reason == f"{cut}, before this level was judged"
        assert (trial.status, trial.verdict) == ("running", Verdict.BLOCKED)
        assert read_model(bench.out / "report.json", Report).result is Verdict.BLOCKED
        assert "Slurm job 41: CANCELLED" in read_text(bench.out / "summary.md")
        assert bench.resume().levels[0].verdict is Verdict.PASS

    def test_stored_levels_keep_their_verdicts(self, bench: Bench, slurm: FakeSlurm) -> None:
        done = self.ran(bench, 0, 1, 2, words={1: "crash"})
        self.stored(bench, *done.levels[:2])
        trial, cut = slurm_job.settle(bench.out, ended("TIMEOUT", "ended by Slurm at its time limit"))
        assert [level.verdict for level in trial.levels] == [Verdict.PASS, Verdict.FAIL, Verdict.BLOCKED]
        assert trial.levels[:2] == done.levels[:2]
        assert "TIMEOUT" in cut
        assert trial.verdict is Verdict.FAIL

    def test_all_levels_stored_as_pass_are_no_verdict(self, bench: Bench, slurm: FakeSlurm) -> None:
        done = self.ran(bench, 0, 1)
        self.stored(bench, *done.levels)
        trial, _ = slurm_job.settle(bench.out, ended("NODE_FAIL", "a node failed"))
        assert trial.levels == done.levels
        assert (trial.status, trial.verdict) == ("running", Verdict.BLOCKED)
        assert "before the trial had its verdict" in trial.reason
        assert read_model(bench.out / "report.json", Report).result is Verdict.BLOCKED
        again = bench.resume()
        assert (again.levels, again.verdict) == (done.levels, Verdict.PASS)

    @pytest.mark.parametrize("level", [0, 1])
    def test_an_interruption_is_the_clusters(self, bench: Bench, slurm: FakeSlurm, level: int) -> None:
        """SIGTERM, as near the time limit or after scancel, while one level runs."""
        submit(bench, 0, 1)
        bench.words = {level: "hang"}
        told: list[int] = []

        def interrupt(event: Event) -> None:
            if isinstance(event, Running) and event.level == level and not told:
                told.append(level)
                os.kill(os.getpid(), 15)

        bench.meddle = interrupt
        assert bench.resume().status == "running"
        trial, cut = slurm_job.settle(bench.out, ended("", "time-limit (client, exit code 130): the time limit was near"))
        assert [item.verdict for item in trial.levels] == [Verdict.PASS, Verdict.BLOCKED][1 - level :] + [Verdict.BLOCKED] * (1 - level)
        assert all(item.boundary is Boundary.CLUSTER and cut in item.reason for item in trial.levels if item.verdict is Verdict.BLOCKED)
        assert run_dir.load(bench.out) == trial, "trial.json and the levels agree"
        bench.meddle, bench.words = None, {}
        assert bench.resume().verdict is Verdict.PASS
        assert (bench.level(level) / "attempts" / "1" / "run.log").is_file()

    @pytest.mark.parametrize("delay", [0.0, 0.3])
    def test_a_loop_that_was_signalled_with_us_did_not_fail(self, bench: Bench, slurm: FakeSlurm, delay: float) -> None:
        """scancel signals every process of a job, the loop first or last."""
        submit(bench, 0)
        bench.words = {0: "hang"}
        told: list[int] = []

        def cancel(event: Event) -> None:
            if isinstance(event, Running) and not told and event.step == 2:
                told.append(1)
                threading.Timer(delay, os.kill, (os.getpid(), 15)).start()
                for child in psutil.Process().children():
                    child.terminate()

        bench.meddle = cancel
        assert bench.resume().status == "running"
        assert [(phase.ended, phase.exit_code) for phase in run_dir.load(bench.out).levels[0].phases] == [("interrupted", None)]
        trial, _ = slurm_job.settle(bench.out, ended("CANCELLED"))
        assert (trial.verdict, trial.levels[0].boundary) == (Verdict.BLOCKED, Boundary.CLUSTER)

    def test_a_block_of_the_trial_itself_keeps_its_reason(self, bench: Bench, slurm: FakeSlurm) -> None:
        done = self.ran(bench, 0, 1, words={0: "flat"})
        self.stored(bench, done.levels[0])
        trial, _ = slurm_job.settle(bench.out, ended("NODE_FAIL"))
        assert trial.levels[0] == done.levels[0]
        assert "vacuous" in trial.levels[0].reason

    def test_a_second_job_gives_its_own_reason(self, bench: Bench, slurm: FakeSlurm) -> None:
        trial = submit(bench, 0)
        slurm_job.settle(bench.out, ended("CANCELLED"))
        slurm_job.submit_trial(bench.out, trial, PROFILE, "test")
        trial, _ = slurm_job.settle(bench.out, ended("NODE_FAIL").model_copy(update={"slurm": "42"}))
        assert trial.levels[0].reason == "Slurm job 42: NODE_FAIL, before this level was judged"

    def test_the_client_says_why_it_gave_up(self, bench: Bench, slurm: FakeSlurm) -> None:
        submit(bench, 0)
        log = job_dir(bench.out / "jobs" / "1", "trial").log("client", 0, None)
        log.write_text("seatrial: no such thing\n  fix: another thing\n")
        trial, cut = slurm_job.settle(bench.out, ended("FAILED", "client-failed (client, exit code 2)", UnitState.FAILED))
        assert cut == "Slurm job 41: client-failed (client, exit code 2), fix: another thing"
        assert trial.verdict is Verdict.BLOCKED

    def test_a_directory_that_is_in_use_is_waited_for_and_then_named(self, bench: Bench, slurm: FakeSlurm) -> None:
        submit(bench, 0)
        bench.monkeypatch.setattr(slurm_job, "LOCK_S", 0.2)
        with run_dir.locked(bench.out), pytest.raises(UserError, match=f"process {os.getpid()}"):
            slurm_job.settle(bench.out, ended("CANCELLED"))
        assert run_dir.load(bench.out).status == "planned"


class TestFollowing:
    """From now to the end of the job; the world moves on whenever something was told."""

    @pytest.fixture(autouse=True)
    def quick(self, bench: Bench) -> None:
        for name in ("ASK_S", "SOON_S", "TICK_S"):
            bench.monkeypatch.setattr(slurm_job, name, 0.01)

    def log(self, bench: Bench) -> Path:
        return job_dir(bench.out / "jobs" / "1", "trial").log("client", 0, None)

    def test_states_and_lines_are_told_as_they_come(self, bench: Bench, slurm: FakeSlurm) -> None:
        submit(bench, 0)
        notes: list[Note] = []

        def world(note: Note) -> None:
            notes.append(note)
            match note.text:
                case "waiting: Resources":
                    (self.log(bench).parent / "slurm.log").write_text("… job 41, unit 0, restart 0, on n1\n")
                    slurm.says("RUNNING")
                case "running on n1":
                    with self.log(bench).open("a") as stream:
                        stream.write("first line\nsecond ")
                case "first line":
                    slurm.says("PENDING", "BeginTime")
                case "requeued: BeginTime":
                    slurm.flag("down")
                case text if text.startswith("Slurm does not answer"):
                    slurm.flag("down", on=False)
                    slurm.says("CANCELLED")

        unit = Following(bench.out, world).to_the_end()
        assert (unit.state, unit.slurm) == (UnitState.BLOCKED, "41")
        texts = [note.text for note in notes]
        assert texts[:4] == ["waiting: Resources", "running on n1", "first line", "requeued: BeginTime"]
        assert "Unable to contact" in texts[4]
        assert texts[5:] == ["second ", "ended: blocked (CANCELLED, cancelled)"]
        assert [note.kind for note in notes] == ["job", "job", "log", "job", "job", "log", "job"]

    def test_there_is_a_sign_of_life(self, bench: Bench, slurm: FakeSlurm) -> None:
        submit(bench, 0)
        bench.monkeypatch.setattr(slurm_job, "ALIVE_S", 0.05)
        bench.monkeypatch.setattr(slurm_job, "SOON_S", 0.3)
        notes: list[Note] = []

        def world(note: Note) -> None:
            notes.append(note)
            if note.kind == "alive":
                slurm.says("CANCELLED")

        Following(bench.out, world).to_the_end()
        alive = next(note for note in notes if note.kind == "alive")
        assert alive.text.startswith("waiting: Resources; followed for 0.0 min")

    def test_a_verdict_with_a_result_needs_no_controller(self, bench: Bench, slurm: FakeSlurm) -> None:
        submit(bench, 0)
        bench.words = {0: "crash"}
        bench.resume()
        leave_result(bench.out, Ending.CLIENT_FAILED, 1)
        slurm.flag("down")
        Following(bench.out, lambda _: None).to_the_end()
        trial, cut = slurm_job.settle(bench.out, ended(""))
        assert (trial.verdict, cut) == (Verdict.FAIL, "")

    def test_a_verdict_of_before_does_not_end_it(self, bench: Bench, slurm: FakeSlurm) -> None:
        """A trial that was done as Blocked, and was submitted again: only what the new job leaves counts."""
        submit(bench, 0)
        bench.words = {0: "flat"}
        bench.resume()
        notes: list[str] = []

        def world(note: Note) -> None:
            notes.append(note.text)
            slurm.says("TIMEOUT", "TimeLimit")

        Following(bench.out, world).to_the_end()
        assert notes == ["waiting: Resources", "ended: blocked (TIMEOUT, ended by Slurm at its time limit (TimeLimit))"]

    def test_a_job_is_lost_only_when_that_is_certain(self, bench: Bench, slurm: FakeSlurm) -> None:
        submit(bench, 0)
        file = job_dir(bench.out / "jobs" / "1", "trial").submission_file
        data = read_json(file)
        file.write_text(json.dumps({**data, "submitted": data["submitted"] - 1000}))
        slurm.says("")
        asked = len(slurm.calls("squeue"))
        assert Following(bench.out, lambda _: None).to_the_end().state is UnitState.LOST
        assert len(slurm.calls("squeue")) - asked == slurm_job.LOST_ASKED

    def test_a_trial_that_was_never_submitted_is_named(self, bench: Bench) -> None:
        prepare(bench, 0)
        with pytest.raises(UserError, match="never submitted") as caught:
            Following(bench.out, lambda _: None)
        assert "--on slurm:PROFILE" in caught.value.fix


def test_a_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    assert list(tail.lines()) == []
    with (tmp_path / "log").open("ab") as stream:
        for data, expected in ((b"a\nb", ["a"]), (b"", []), (b"c\n\xff\n", ["bc", "\\xff"]), (b"end", [])):
            stream.write(data)
            stream.flush()
            assert list(tail.lines()) == expected
    assert list(tail.lines(last=True)) == ["end"]
    assert list(tail.lines(last=True)) == []
