"""`seatrial jobs` as a user calls it: files, scripts, lists, logs, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from seatrial.runtime.jobdir import job_dir
from tests.cli.command import SEATRIAL, Answer, inside
from tests.runtime.slurm.cluster import PrivateSlurm
from tests.runtime.slurm.stand_ins import StandIns, stand_ins

pytestmark = pytest.mark.slow

JOBS = """
[[jobs]]
name = "collect"
array = 2
[[jobs.components]]
name = "client"
role = "client"
command = ["bash", "-c", "echo hello from {index}; sleep $((4 * {index})); exit {index}"]

[[jobs]]
name = "merge"
after = [{ job = "collect", when = "any" }]
[[jobs.components]]
name = "client"
role = "client"
command = ["echo", "merged"]
"""
SECRETIVE = """
[[jobs]]
name = "one"
[[jobs.components]]
name = "server"
port = true
command = ["bash", "-c", "trap 'echo server ends with $PLANTED_API_KEY; exit' TERM; echo $PLANTED_API_KEY; sleep 99 & wait"]
[[jobs.components]]
name = "client"
role = "client"
command = ["bash", "-c", "sleep 1; echo it is $PLANTED_API_KEY; echo bye"]
"""


def jobs(*words: str | Path, cwd: Path) -> Answer:
    """Run `seatrial jobs …`."""
    return inside("jobs", *words, cwd=cwd)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory with jobs and a profile."""
    (tmp_path / "seatrial.toml").write_text('[slurm.main]\npartition = "main"\ntime = "0:10:00"\n')
    (tmp_path / "jobs.toml").write_text(JOBS)
    return tmp_path


@pytest.fixture
def fake(place: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    found = stand_ins(place, monkeypatch)
    found.answer("sbatch", "12\n")
    found.answer("sacct", "", "Slurm accounting storage is disabled\n", 1)
    return found


@pytest.mark.parametrize(
    ("old", "new", "said", "fix"),
    [
        ("array = 2", "aray = 2", "jobs.toml: jobs.collect.aray: unknown key", "did you mean array?"),
        ("array = 2", "array = 0", "jobs.collect.array: Input should be greater than or equal to 1 (got 0)", "correct array"),
        ("array = 2", "array = 4000002", "jobs.collect.array: Input should be less than or equal to 4000001", "correct array"),
        ('role = "client"', 'roll = "client"', "jobs.collect.components.client.roll: unknown key", "did you mean role?"),
        ('role = "client"', "", "jobs.collect: a job has exactly one client", "correct"),
        ('when = "any"', 'wenn = "any"', "jobs.merge.after.0.wenn: unknown key", "did you mean when?"),
        ('job = "collect"', 'job = "nope"', "job merge comes after nope", "correct the file"),
        ("[[jobs]]", "[[job", "jobs.toml: ", "correct the file"),
        ("[[jobs", "[[job", "no [[jobs]] in it", "write [[jobs]]"),
    ],
)
def test_a_wrong_file_names_the_key_and_the_fix(place: Path, old: str, new: str, said: str, fix: str) -> None:
    (place / "jobs.toml").write_text(JOBS.replace(old, new))
    answer = jobs("submit", "jobs.toml", "--on", "slurm:main", cwd=place)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err
    assert f"fix: {fix}" in answer.err
    assert not (place / "jobs").exists()


def test_an_unknown_profile_lists_the_known_ones(place: Path) -> None:
    answer = jobs("submit", "jobs.toml", "--on", "slurm:nope", cwd=place)
    assert answer.code == 2
    assert "known: main" in answer.err


def test_a_dry_run_prints_scripts_as_they_are_and_submits_nothing(fake: StandIns, place: Path) -> None:
    answer = jobs("submit", "jobs.toml", "--on", "slurm:main", "--dry-run", cwd=place)
    assert answer.code == 0
    assert answer.out.startswith("#!/bin/bash\n# collect: ")
    assert answer.out.count("#!/bin/bash\n") == 2
    waits = "submitted with --dependency=afterany:<id of collect> --kill-on-invalid-dep=yes"
    assert answer.err == f"seatrial: collect: ok\nseatrial: merge: ok, {waits}\n"
    assert [call[0] for call in fake.calls()] == ["--test-only"] * 2
    assert not (place / "jobs").exists()
    fake.answer("sbatch", "", "allocation failure: Invalid partition name specified\n", 1)
    answer = jobs("submit", "jobs.toml", "--on", "slurm:main", "--dry-run", cwd=place)
    assert answer.code == 99
    assert "seatrial: merge: sbatch: allocation failure: Invalid partition name specified" in answer.err


def test_without_slurm_it_is_blocked_and_nothing_is_left(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(place, monkeypatch, ())
    answer = jobs("submit", "jobs.toml", "--on", "slurm:main", cwd=place)
    assert answer.code == 99
    assert "Blocked (cluster): sbatch is not on PATH" in answer.err
    assert not (place / "jobs").exists()


def test_submitted_jobs_are_listed(fake: StandIns, place: Path) -> None:
    answer = jobs("submit", "jobs.toml", "--on", "slurm:main", cwd=place)
    assert answer.code == 0
    (directory,) = (place / "jobs").iterdir()
    assert answer.out.splitlines() == [str(directory), "submitted collect as 12, 2 units", "submitted merge as 12"]
    assert "-collect-" in directory.name
    assert (directory / ".gitignore").read_text() == "*\n"
    stored = job_dir(directory, "collect").submission()
    assert stored is not None
    fake.answer("squeue", f"12_0|RUNNING|NONE|None|(null)|{stored.name}\n12_1|PENDING|N/A|Priority|(null)|{stored.name}\n")
    listed = jobs("list", cwd=place).out.splitlines()
    assert listed[0] == f"jobs/{directory.name}\tcollect\t12\t1 waiting, 1 running\tPriority"
    units = jobs("list", directory, "--units", cwd=place).out.splitlines()
    assert units[0] == f"{directory}\tcollect\t0\t12_0\trunning\tRUNNING"
    found = json.loads(jobs("list", directory, "--json", cwd=place).out)
    assert [item["state"] for item in found["units"]] == ["running", "waiting", "waiting"]
    fake.answer("squeue", "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n", 1)
    silent = jobs("list", cwd=place)
    assert silent.code == 0
    assert "jobs are not lost" in silent.err
    assert "2 unknown" in silent.out


def test_what_is_not_there_is_said(fake: StandIns, place: Path) -> None:
    assert "no jobs in jobs, trials" in jobs("list", cwd=place).err
    for words in (("list", "nope"), ("wait", "nope"), ("logs", "nope"), ("cancel", "nope"), ("resubmit", "nope", "--on", "slurm:main")):
        answer = jobs(*words, cwd=place)
        assert answer.code == 2, words
        assert "nope" in answer.err


def test_waiting_says_when_the_controller_is_silent_and_jobs_go_on_after_ctrl_c(fake: StandIns, place: Path) -> None:
    directory = jobs("submit", "jobs.toml", "--on", "slurm:main", cwd=place).out.splitlines()[0]
    fake.answer("squeue", "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n", 1)
    command = [str(SEATRIAL), "jobs", "wait", directory]
    with subprocess.Popen(command, cwd=place, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("seatrial: Slurm does not answer since ")
        assert line.endswith("jobs are not lost\n")
        process.send_signal(signal.SIGINT)
        assert "the jobs go on" in process.stderr.read()
        assert process.wait(60) == 130
    answer = jobs("wait", directory, "--deadline", "0.02", cwd=place)
    assert answer.code == 99
    assert "not ended after 0.02 minutes" in answer.err


def test_jobs_run_on_this_machine(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    (place / "jobs.toml").write_text(JOBS.replace("sleep $((4 * {index})); ", ""))
    answer = jobs("submit", "jobs.toml", "--on", "local", "--out", "here", cwd=place)
    assert answer.code == 1
    assert "client-failed (client.0, exit code 1)" in answer.err
    assert "hello from 1" in jobs("logs", "here", "collect", "--index", "1", cwd=place).out
    listed = jobs("list", "here", cwd=place).out
    assert "1 done, 1 failed" in listed
    assert jobs("wait", "here", cwd=place).code == 1
    refused = jobs("submit", "jobs.toml", "--on", "local", "--dry-run", cwd=place)
    assert refused.code == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "there are several jobs: collect, merge"),
        (("nope",), "no job 'nope'"),
        (("collect",), "units 0 to 1"),
        (("collect", "--index", "2"), "no unit 2"),
        (("merge", "--component", "server"), "known: client, slurm"),
        (("merge", "--copy", "1"), "no copy 1"),
        (("merge", "--component", "slurm"), "no log there"),
    ],
)
def test_a_log_that_is_not_there(fake: StandIns, place: Path, words: tuple[str, ...], said: str) -> None:
    directory = jobs("submit", "jobs.toml", "--on", "slurm:main", cwd=place).out.splitlines()[0]
    answer = jobs("logs", directory, *words, cwd=place)
    assert answer.code == 2
    assert said in answer.err


@pytest.mark.real
def test_the_whole_way_on_slurm(cluster: PrivateSlurm, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    assert jobs("submit", "jobs.toml", "--on", "slurm:main", "--dry-run", cwd=place).code == 0
    answer = jobs("submit", "jobs.toml", "--on", "slurm:main", "--out", "b", "--wait", cwd=place)
    assert answer.code == 1
    assert "2 done, 1 failed" in answer.err
    assert "hello from 0" in jobs("logs", "b", "collect", "--index", "0", "--follow", cwd=place).out
    assert "[seatrial]" in jobs("logs", "b", "merge", "--component", "slurm", cwd=place).out
    again = jobs("resubmit", "b", "--on", "slurm:main", cwd=place)
    assert again.code == 0
    assert again.out.startswith("submitted collect as ")
    assert "merge" not in again.out
    busy = jobs("resubmit", "b", "--on", "slurm:main", cwd=place)
    assert (busy.code, "not ended yet: collect" in busy.err) == (2, True)
    assert jobs("wait", "b", cwd=place).code == 1


@pytest.mark.real
def test_logs_that_slurm_wrote_hold_no_secret_once_the_jobs_were_followed(
    cluster: PrivateSlurm, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    monkeypatch.setenv("PLANTED_API_KEY", "horse-battery-staple-42")
    (place / "jobs.toml").write_text(SECRETIVE)
    answer = jobs("submit", "jobs.toml", "--on", "slurm:main", "--out", "b", "--wait", cwd=place)
    assert answer.code == 0, answer.err
    logs = place / "b" / "one" / "logs"
    for name, last in (("client.0.log", "bye"), ("server.0.log", "server ends"), ("slurm.log", "done: client.0")):
        text = (logs / name).read_text()
        assert "horse-battery" not in text
        assert last in text
    assert (logs / "client.0.log").read_text().count("[redacted") == 1
    written = (logs / "client.0.log").stat().st_mtime_ns
    assert jobs("wait", "b", cwd=place).code == 0
    assert (logs / "client.0.log").stat().st_mtime_ns == written, "a log that is clear already is not written again"


@pytest.mark.real
def test_a_log_is_followed_and_a_job_cancelled(cluster: PrivateSlurm, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    text = JOBS.replace("echo hello from {index}; sleep $((4 * {index})); exit {index}", "echo first; sleep 600").replace("array = 2\n", "")
    (place / "jobs.toml").write_text(text)
    jobs("submit", "jobs.toml", "--on", "slurm:main", "--out", "b", cwd=place)
    command = [str(SEATRIAL), "jobs", "logs", "b", "collect", "--follow"]
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        assert "first\n" in iter(process.stdout.readline, "")
        assert jobs("cancel", "b", cwd=place).out == "cancelled collect\ncancelled merge\n"
        process.stdout.read()
        assert process.wait(60) == 0
    began = time.monotonic()
    answer = jobs("wait", "b", cwd=place)
    assert (answer.code, time.monotonic() - began < 60) == (99, True)
    assert "2 blocked" in answer.err
    assert "nothing to cancel" in jobs("cancel", "b", cwd=place).err
