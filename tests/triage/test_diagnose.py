"""Which failure ended a run: order of processes, kills, survived errors, silent ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.core.records import Diagnosis
from seatrial.core.specs import Milestone, Signature
from seatrial.core.verdict import Boundary, Verdict
from seatrial.triage.diagnose import diagnose

MILESTONES = (
    Milestone(id="start", pattern="^cluster up", boundary=Boundary.DATA, verdict=Verdict.BLOCKED),
    Milestone(id="model", pattern="^model built", boundary=Boundary.ROLLOUT),
    Milestone(id="step", pattern=r"\bSTEP \d+", boundary=Boundary.OPTIMIZER),
    Milestone(id="done", pattern="^training done", boundary=Boundary.CHECKPOINT),
)
FRAMES = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    call()\n'


def raises(exception: str, prefix: str = "") -> str:
    return "".join(f"{prefix}{part}\n" for part in f"{FRAMES}{exception}".split("\n"))


def triage(tmp_path: Path, text: str, *signatures: Signature) -> Diagnosis:
    path = tmp_path / "run.log"
    path.write_text(text)
    return diagnose(path, MILESTONES, signatures)


@pytest.mark.parametrize(
    ("before", "boundary", "verdict", "milestone"),
    [
        ("", Boundary.ENVIRONMENT, Verdict.BLOCKED, None),
        ("cluster up\n", Boundary.DATA, Verdict.BLOCKED, "start"),
        ("cluster up\nmodel built\n", Boundary.ROLLOUT, Verdict.FAIL, "model"),
        ("cluster up\nmodel built\nSTEP 1\nSTEP 2\n", Boundary.OPTIMIZER, Verdict.FAIL, "step"),
        ("cluster up\nmodel built\nSTEP 1\ntraining done\n", Boundary.CHECKPOINT, Verdict.FAIL, "done"),
    ],
)
def test_unknown_failure_sits_at_the_last_milestone(
    before: str, boundary: Boundary, verdict: Verdict, milestone: str | None, tmp_path: Path
) -> None:
    found = triage(tmp_path, before + raises("ValueError: shapes differ"))
    assert (found.boundary, found.verdict, found.milestone) == (boundary, verdict, milestone)
    assert found.cause == "ValueError: shapes differ"
    assert found.line == before.count("\n") + 4
    assert found.excerpt == ('  File "a.py", line 1, in f', "    call()", "ValueError: shapes differ")
    assert "add a signature" in found.advice


def test_known_failure_beats_the_milestone(tmp_path: Path) -> None:
    found = triage(tmp_path, "model built\nSTEP 1\n" + raises("OSError: [Errno 28] No space left on device"))
    assert (found.boundary, found.verdict, found.signature) == (Boundary.ENVIRONMENT, Verdict.BLOCKED, "no-space")


def test_own_signature_beats_the_general_one(tmp_path: Path) -> None:
    own = Signature(id="own", pattern="No space left", boundary=Boundary.CHECKPOINT)
    assert triage(tmp_path, raises("OSError: No space left on device"), own).signature == "own"


def test_signature_must_match_the_first_cause(tmp_path: Path) -> None:
    """A known text elsewhere in the log, or in a consequence, does not excuse the change."""
    link = "\nThe above exception was the direct cause of the following exception:\n\n"
    text = "model built\nretry: Connection refused\n" + raises("ValueError: mine") + link + raises("ImportError: misleading")
    found = triage(tmp_path, text)
    assert (found.signature, found.cause, found.verdict) == (None, "ValueError: mine", Verdict.FAIL)


def test_survived_tracebacks_are_noise(tmp_path: Path) -> None:
    text = raises("KeyError: 'cache'") + "model built\nSTEP 1\n" + raises("ERROR:x:lost", "") + "training done\n"
    found = triage(tmp_path, text)
    assert found.verdict is None
    assert found.noise[0] == "line 4: survived KeyError: 'cache'"


def test_logged_error_counts_only_if_its_process_ended(tmp_path: Path) -> None:
    logged = "STEP 1\nERROR:root:training failed\n" + raises("ValueError: x")
    assert triage(tmp_path, logged + "rc=1\n").cause == "ValueError: x"
    went_on = triage(tmp_path, logged + "ordinary output\n" * 30)
    assert went_on.cause == ""
    assert went_on.noise == ("line 6: survived ValueError: x",)


def test_driver_end_beats_a_worker_traceback_that_was_printed_earlier(tmp_path: Path) -> None:
    text = "model built\n" + raises("TimeoutError: retried", "(Reward pid=3) ") + raises("ValueError: fatal")
    assert triage(tmp_path, text).cause == "ValueError: fatal"


def test_first_print_of_the_same_exception_is_the_cause(tmp_path: Path) -> None:
    text = "model built\n" + raises("ValueError: fatal", "(Worker pid=3) ") + raises("ValueError: fatal")
    assert triage(tmp_path, text).line == 5


def test_launcher_points_back_to_the_rank_that_died_first(tmp_path: Path) -> None:
    text = (
        "STEP 1\n"
        + raises("ValueError: rank 1 broke", "[rank1]: ")
        + "STEP 2\n"
        + raises("torch.distributed.DistBackendError: Connection closed by peer", "[rank0]: ")
        + "E1115 01:09:52.154000 2465 torch/distributed/elastic/api.py:1002] failed (exitcode: 1) local_rank: 0\n"
        + raises("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ")
        + "====\ntrain FAILED\nRoot Cause (first observed failure):\n"
    )
    found = triage(tmp_path, text)
    assert (found.cause, found.line, found.boundary) == ("ValueError: rank 1 broke", 5, Boundary.OPTIMIZER)


def test_engine_error_is_found_behind_the_server_that_reports_it(tmp_path: Path) -> None:
    core = "(EngineCore_0 pid=5) "
    text = (
        "cluster up\nmodel built\n"
        + raises("RuntimeError: kernel missing", f"{core}ERROR 11-15 01:02:03 [core.py:1] ")
        + f"{core}Process EngineCore_0:\n"
        + raises("RuntimeError: kernel missing", core)
        + raises("RuntimeError: Engine core initialization failed. See root cause above.", "(APIServer pid=4) ")
    )
    found = triage(tmp_path, text)
    assert (found.cause, found.line, found.boundary) == ("RuntimeError: kernel missing", 6, Boundary.ROLLOUT)


def test_dead_actor_is_explained_by_a_known_line_above(tmp_path: Path) -> None:
    text = "STEP 1\n(raylet) Task was killed due to the node running low on memory.\n" + raises(
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."
    )
    found = triage(tmp_path, text)
    assert (found.signature, found.line, found.verdict) == ("host-memory", 2, Verdict.BLOCKED)
    alone = triage(tmp_path, text.replace("(raylet)", "").replace("node running low", "-"))
    assert (alone.signature, alone.verdict) == ("worker-died", Verdict.FAIL)
    assert "ActorDiedError" in alone.cause


def test_kill_explains_what_follows_it_and_not_what_came_before(tmp_path: Path) -> None:
    kill = "*** SIGTERM received at time=1 on cpu 0 ***\n"
    killed = triage(tmp_path, "model built\n" + kill + raises("RuntimeError: loader worker ended"))
    assert (killed.line, killed.boundary, killed.verdict) == (2, Boundary.ROLLOUT, Verdict.FAIL)
    assert "from outside" in killed.advice
    raised = triage(tmp_path, "model built\n" + raises("ValueError: x") + kill)
    assert raised.cause == "ValueError: x"
    assert triage(tmp_path, kill).boundary is Boundary.CLUSTER
    assert triage(tmp_path, "STEP 1\ntraining done\n" + kill).verdict is None


def test_scheduler_and_memory_kills_are_blocked(tmp_path: Path) -> None:
    slurm = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-15T01:02:03 DUE TO TIME LIMIT ***\n"
    assert triage(tmp_path, "STEP 1\n" + slurm).signature == "scheduler-ended-job"
    assert triage(tmp_path, "STEP 1\nKilled\n").signature == "host-memory"


def test_crash(tmp_path: Path) -> None:
    found = triage(tmp_path, "STEP 1\nFatal Python error: Segmentation fault\n\nCurrent thread 0x1:\n")
    assert (found.cause, found.verdict) == ("Fatal Python error: Segmentation fault", Verdict.FAIL)


def test_silent_signature_counts_in_a_completed_run(tmp_path: Path) -> None:
    silent = Signature(id="s", pattern="skipped weight", boundary=Boundary.REFIT, silent=True, advice="map it")
    loud = silent.model_copy(update={"silent": False})
    text = "model built\nskipped weight lm_head\nSTEP 1\ntraining done\n"
    found = triage(tmp_path, text, silent)
    assert (found.verdict, found.line, found.advice, found.milestone) == (Verdict.FAIL, 2, "map it", "done")
    assert triage(tmp_path, text, loud).verdict is None
    full = raises("OSError: No space left on device")
    assert triage(tmp_path, text + full, silent).signature == "s", "Fail beats Blocked"


def test_harmless_signature_acquits_a_traceback(tmp_path: Path) -> None:
    harmless = Signature(id="h", pattern="optional kernel", harmless=True)
    found = triage(tmp_path, "model built\n" + raises("ImportError: optional kernel"), harmless)
    assert (found.verdict, found.cause) == (None, "")
    assert any("optional kernel" in text for text in found.noise)


def test_last_lines_without_exception(tmp_path: Path) -> None:
    found = triage(tmp_path, "cluster up\nrun.sh: line 4: uv: command not found\n")
    assert (found.signature, found.line) == ("command-missing", 2)
    hydra = "Could not override 'a.b'.\nTo append use +a.b=1\nKey 'b' is not in struct\n    full_key: a.b\n\nSet …\n"
    assert triage(tmp_path, hydra + "rc=1\n").line == 1
    assert triage(tmp_path, "training done\nupload: Connection refused\n").verdict is None
    assert triage(tmp_path, "Connection refused, retrying\n" + "fine\n" * 9).verdict is None


@pytest.mark.parametrize(
    ("exception", "signature"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "device-memory"),
        ("AssertionError: Torch not compiled with CUDA enabled", "no-accelerator"),
        ("RuntimeError: Found no NVIDIA driver on your system.", "no-accelerator"),
        ("OSError: [Errno 98] Address already in use", "address-in-use"),
        ("huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests", "hub-rate-limit"),
        ("huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach https://huggingface.co", "hub-offline"),
        ("OSError: Can't load tokenizer for '/models/x'.", "hub-offline"),
        ("ConnectionRefusedError: [Errno 111] Connection refused", "connection-refused"),
        ("socket.gaierror: [Errno -2] Name or service not known", "dns"),
        ("PermissionError: [Errno 13] Permission denied: '/data'", "permission-denied"),
        ("ImportError: libcudart.so.12: cannot open shared object file: No such file or directory", "shared-library"),
        ("ImportError: cannot import name 'A' from 'b'", "package-missing"),
        ("json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", "torn-json"),
        ("omegaconf.errors.ConfigKeyError: Key 'x' is not in struct", "override-unknown"),
        ("ray.exceptions.GetTimeoutError: Get timed out", "cluster-start"),
        ("httpx.HTTPStatusError: Server error '503 Service Unavailable' for url", "server-error"),
        ("KeyError: 'model.embed_tokens.weight'", None),
    ],
)
def test_general_signatures(exception: str, signature: str | None, tmp_path: Path) -> None:
    assert triage(tmp_path, "model built\n" + raises(exception)).signature == signature


def test_long_lines_are_clipped(tmp_path: Path) -> None:
    found = triage(tmp_path, raises("ValueError: " + "x" * 5000))
    assert len(found.cause) == 400
    assert all(len(text) <= 400 for text in found.excerpt)


def test_empty_and_missing_log(tmp_path: Path) -> None:
    assert triage(tmp_path, "") == Diagnosis(file=str(tmp_path / "run.log"))
    with pytest.raises(UserError, match="absent"):
        diagnose(tmp_path / "absent.log", MILESTONES, ())


def test_a_forced_kill_after_the_work_is_a_failure(tmp_path: Path) -> None:
    """The machine ran out of memory while the model was saved: the work was not done."""
    done = Milestone(id="done", pattern="all steps made", boundary=Boundary.CHECKPOINT)
    log = tmp_path / "run.log"
    log.write_text("all steps made\nsaving\n/job: line 4: 4711 Killed                  python train.py\n")
    found = diagnose(log, [done], [])
    assert (found.verdict, found.boundary, found.line) == (Verdict.BLOCKED, Boundary.ENVIRONMENT, 3)
    log.write_text("all steps made\nsaving\n/job: line 4: 4711 Terminated              python train.py\n")
    assert diagnose(log, [done], []).verdict is None


LATE = (*MILESTONES[:2], MILESTONES[2].model_copy(update={"late": True}), MILESTONES[3])


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("cluster up\nmodel built\nSTEP 1\ntraining done\nSTEP 2\n", "done"),
        ("cluster up\nmodel built\ntraining done\nSTEP 1\nSTEP 2\n", "done"),
        ("cluster up\nSTEP 1\ntraining done\nmodel built\nSTEP 1\n", "step"),
        ("cluster up\nmodel built\nSTEP 1\n", "step"),
    ],
)
def test_a_late_milestone_is_no_step_back(text: str, last: str, tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(text)
    assert diagnose(path, LATE, ()).milestone == last
    if text.endswith("training done\nSTEP 2\n"):
        assert diagnose(path, MILESTONES, ()).milestone == "step", "only one that is marked so"


def test_noise_before_a_failure_acquits_nothing(tmp_path: Path) -> None:
    noise = Signature(id="noise", pattern="^harmless: ", harmless=True)
    found = triage(tmp_path, "cluster up\nharmless: x\n" + raises("ValueError: real"), noise)
    assert (found.cause, found.verdict) == ("ValueError: real", Verdict.BLOCKED)


def test_noise_above_a_report_of_a_death_explains_nothing(tmp_path: Path) -> None:
    noise = Signature(id="noise", pattern="^harmless: ", harmless=True)
    text = "model built\nharmless: libx.so: cannot open shared object file\n" + raises(
        "ray.exceptions.ActorDiedError: The actor died unexpectedly"
    )
    assert triage(tmp_path, text).signature == "shared-library"
    assert triage(tmp_path, text, noise).signature == "worker-died"


def test_a_test_runner_is_told_by_its_last_line(tmp_path: Path) -> None:
    text = "E   ValueError: a\nE   ValueError: b\n2 failed, 3 passed, 1 skipped in 1.25s\n"
    found = triage(tmp_path, text)
    assert (found.line, found.verdict, found.cause) == (3, Verdict.FAIL, "2 failed, 3 passed, 1 skipped in 1.25s")
