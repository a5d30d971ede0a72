"""Deaths that no exception of their own explains, noise after the end, and files that hold more than one run."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from seatrial.core.verdict import Verdict
from tests.loops.verl_logs import DATA, DONE, MILESTONES, RUNNER, SECOND, TRIAGE, WORKER, begun, failed, frames, healthy, judge, line, write

PASS, FAIL, BLOCKED = Verdict.PASS, Verdict.FAIL, Verdict.BLOCKED
TRACEBACK = "Traceback (most recent call last):"
SERVER = "\x1b[36m(vLLMHttpServer pid=25058)\x1b[0m "
ENGINE = f"{SERVER}\x1b[0;36m(EngineCore_DP0 pid=494)\x1b[0;0m ERROR 05-20 00:55:13 [core.py:1100] "


def died(*details: str) -> list[str]:
    """What the driver prints when a worker is gone."""
    said = ["ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", "\tclass_name: WorkerDict", *details]
    return failed({"call": "WorkerDict.actor_rollout_ref_update_actor", "frames": [], "raised": "\n".join(said)})


def test_an_abort_is_explained_by_what_the_watchdog_said_before_it(tmp_path: Path) -> None:
    said = [
        "[rank3]:[E1023 02:44:30.941 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=26",
        "[rank3]:[E1023 02:44:30.952 ProcessGroupNCCL.cpp:698] [Rank 3] we are taking the entire process down.",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated: [Rank 3] Watchdog caught",
        "*** SIGABRT received at time=1761187471 on cpu 33 ***",
        "Fatal Python error: Aborted",
    ]
    log = write(tmp_path / "a.log", *begun("first step"), *(f"{WORKER}{text}" for text in said), *died())
    found = judge(log)
    assert (found.verdict, found.boundary, found.signature) == (FAIL, "ddp", "collective-timeout"), found.reason
    assert "Watchdog caught" in line(log, found.line)
    other = WORKER.replace("4628", "7")
    log = write(tmp_path / "b.log", *begun("first step"), f"{other}{said[0]}", *(f"{WORKER}{text}" for text in said[-2:]), *died())
    assert "Fatal Python error" in line(log, judge(log).line), "what another process said does not explain a crash"


@pytest.mark.parametrize(
    ("details", "verdict", "boundary", "signature"),
    [
        (["The actor died because its node has died. Node Id: 1f2"], BLOCKED, "cluster", "node-died"),
        (["The actor is dead because its worker process has died."], FAIL, "cluster", "worker-died"),
    ],
)
def test_a_dead_node_is_not_a_dead_worker(details: list[str], verdict: Verdict, boundary: str, signature: str, tmp_path: Path) -> None:
    found = judge(write(tmp_path / "a.log", *begun("first step"), *died(*details)))
    assert (found.verdict, found.boundary, found.signature) == (verdict, boundary, signature), found.reason


def test_a_limit_of_processes_is_named_although_ray_only_reports_a_death(tmp_path: Path) -> None:
    said = f"{WORKER}[2025-03-04 19:28:30,014 E 1 1] logging.cc:113: Unhandled exception: what(): thread: Resource temporarily unavailable"
    log = write(tmp_path / "a.log", *begun("data read"), said, *died("The actor is dead because its worker process has died."))
    found = judge(log)
    assert (found.verdict, found.boundary, found.signature) == (BLOCKED, "environment", "process-limit")


@pytest.mark.parametrize(
    ("details", "verdict", "boundary", "signature"),
    [
        (["ncclUnhandledCudaError: Call failed.", "Last error:", "Cuda failure 2 'out of memory'"], FAIL, "environment", "device-memory"),
        (["ncclSystemError: System call (e.g. socket, malloc) failed or device error. "], BLOCKED, "environment", "collective-setup"),
    ],
)  # fmt: skip
def test_the_details_of_a_collective_stand_below_it(
    details: list[str], verdict: Verdict, boundary: str, signature: str, tmp_path: Path
) -> None:
    raised = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356, NCCL version 2.27.3"
    entry = {"call": "W.init_model", "frames": ["megatron/core/parallel_state.py:initialize_model_parallel"], "raised": raised}
    lines = failed(entry)
    at = lines.index(raised) + 1
    found = judge(write(tmp_path / "a.log", *begun("data read"), *lines[:at], *details, *lines[at:]))
    assert (found.verdict, found.boundary, found.signature) == (verdict, boundary, signature), found.reason


def test_a_kernel_fault_sits_in_the_engine_that_had_it(tmp_path: Path) -> None:
    fault = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    engine = ["EngineCore encountered a fatal error.", TRACEBACK, *frames(["vllm/v1/worker/gpu_model_runner.py:execute_model"]), fault]
    dead = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause."
    driver = failed({"call": "AgentLoopWorkerTQ.generate_sequences", "frames": ["vllm/v1/engine/async_llm.py:generate"], "raised": dead})
    log = write(tmp_path / "a.log", *begun("first step"), *(f"{ENGINE}{text}" for text in engine), *driver)
    found = judge(log)
    assert (found.verdict, found.boundary, found.signature) == (FAIL, "rollout", "rollout-kernel-fault"), found.reason
    assert fault in line(log, found.line)


def test_a_library_that_does_not_fit_is_named_by_the_process_that_aborted(tmp_path: Path) -> None:
    said = [
        "Invalid handle. Cannot load symbol cublasLtGetVersion",
        "*** SIGABRT received at time=1 on cpu 4 ***",
        "Fatal Python error: Aborted",
    ]
    shown = [f"{WORKER}{text}" for text in said]
    repeated = [f"{WORKER.replace('4628', '9')}{text}\x1b[32m [repeated 7x across cluster]\x1b[0m" for text in said]
    log = write(tmp_path / "a.log", *begun("training started"), *shown, *died(), *repeated)
    found = judge(log)
    assert (found.verdict, found.boundary, found.signature, found.line) == (BLOCKED, "environment", "shared-library", 7), found.reason


def test_a_traceback_of_repeated_lines_is_read_like_any_other(tmp_path: Path) -> None:
    own = [TRACEBACK, *frames(["verl/workers/engine/megatron/transformer_impl.py:optimizer_step"]), "RuntimeError: something new"]
    log = write(tmp_path / "a.log", *begun("first step"), *(f"{WORKER}{text} [repeated 3x across cluster]" for text in own), *died())
    found = judge(log)
    assert (found.verdict, found.boundary, found.signature) == (FAIL, "optimizer", "optimizer-raised"), found.reason


def test_a_scheduler_says_why_and_its_server_only_that(tmp_path: Path) -> None:
    server = "\x1b[36m(SGLangHttpServer pid=77)\x1b[0m "
    cause = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
    own = [f"[2026-11-15 03:00:00] Scheduler hit an exception: {TRACEBACK}", *frames(["sglang/srt/managers/scheduler.py:run"]), cause]
    outer = "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9)."
    entry = {
        "call": "SGLangHttpServer.launch_server",
        "frames": ["verl/workers/rollout/sglang_rollout/s.py:launch_server"],
        "raised": outer,
    }
    log = write(tmp_path / "a.log", *begun("engines built"), *(f"{server}{text}" for text in own), *failed(entry))
    found = judge(log)
    assert (found.verdict, found.boundary, found.signature) == (BLOCKED, "rollout", "rollout-memory"), found.reason
    assert cause in line(log, found.line)


def test_a_compiler_that_failed_in_a_worker(tmp_path: Path) -> None:
    said = ["/usr/bin/ld: cannot find -lcuda: No such file or directory", "collect2: error: ld returned 1 exit status"]
    raised = "subprocess.CalledProcessError: Command '['/usr/bin/gcc', 'main.c', '-lcuda']' returned non-zero exit status 1."
    entry = {"call": "W.compute_log_prob", "frames": ["triton/runtime/build.py:_build"], "raised": raised}
    found = judge(write(tmp_path / "a.log", *begun("training started"), *(f"{WORKER}{text}" for text in said), *failed(entry)))
    assert (found.verdict, found.boundary, found.signature) == (BLOCKED, "environment", "compiler"), found.reason


@pytest.mark.parametrize(
    "said",
    [
        "mismatched input '=' expecting <EOF>",
        "In 'ppo_trainer': Could not find 'actor@actor_rollout_ref.actor/foo'",
        "Cannot find primary config 'ppo_trainr'. Check that it's in your config search path.",
    ],
)
def test_hydra_refuses_without_a_traceback(said: str, tmp_path: Path) -> None:
    hint = "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."
    found = judge(write(tmp_path / "a.log", said, "", "Config search path:", "\tprovider=hydra, path=pkg://hydra.conf", "", hint))
    assert (found.verdict, found.boundary, found.line) == (BLOCKED, "config", 1), found.reason


def test_waiting_for_resources_is_named_and_noise_above_it_is_not(tmp_path: Path) -> None:
    noise = f"{WORKER}Warning: Failed to set NUMA affinity: libnuma.so: cannot open shared object file: No such file or directory"
    waits = "(autoscaler +1m2s) Warning: The following resource request cannot be scheduled right now: {'GPU': 1.0}."
    for end in ([], ["*** SIGTERM received at time=1 on cpu 0 ***"]):
        found = judge(write(tmp_path / "a.log", *begun("data read"), noise, waits, waits, *end))
        assert (found.verdict, found.boundary, found.signature) == (BLOCKED, "cluster", "waits-for-cluster-resources"), found.reason
    assert judge(write(tmp_path / "b.log", waits, *healthy())).verdict is PASS, "it was waited for, and came"


# --- the end ---


@pytest.mark.parametrize(
    "noise",
    [
        ["Error in atexit._run_exitfuncs:", TRACEBACK, *frames(["wandb/sdk/wandb_run.py:finish"]), "wandb.errors.errors.CommError: x"],
        [f"{RUNNER}wandb: ERROR Failed to upload file: request failed: 403"],
        ["Exception ignored in: <function BaseEventLoop.__del__ at 0x7f8>", TRACEBACK, *frames(["a.py:f"]), "RuntimeError: closed"],
        [f"{SERVER}Engine core proc EngineCore_DP0 died unexpectedly, shutting down client."],
        [f"{ENGINE}{text}" for text in ("AsyncLLM output_handler failed.", TRACEBACK, "vllm.v1.engine.exceptions.EngineDeadError: x")],
        [f"{WORKER}[rank0]:[W1115 03:00:00.1 ProcessGroupNCCL.cpp:1538] Warning: WARNING: destroy_process_group() was not called"],
    ],
    ids=range(6),
)  # fmt: skip
def test_what_is_printed_after_the_end_decides_nothing(noise: list[str], tmp_path: Path) -> None:
    own = [text if text.startswith("\x1b") else f"{RUNNER}{text}" for text in noise]
    found = judge(write(tmp_path / "a.log", *healthy()[:-1], *own))
    assert found.verdict is PASS, found.reason


def test_tracking_that_fails_before_the_end_is_a_cause(tmp_path: Path) -> None:
    entry = {"call": "", "frames": ["wandb/sdk/wandb_run.py:log"], "raised": "wandb.errors.errors.CommError: x"}
    assert judge(write(tmp_path / "a.log", *begun("first step"), *failed(entry))).signature == "tracking-service"


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        (["rc=1", "real\t3m20.1s", "user\t1m2.0s", "sys\t0m3.1s"], FAIL),
        (["exit code: 0", "real\t3m20.1s"], PASS),
        (["srun: error: node001: task 0: Exited with exit code 1", "srun: Terminating StepId=7.0"], FAIL),
        (["make: *** [Makefile:10: train] Error 1"], FAIL),
        ([f"{WORKER}the tool ended with exit code 1"], PASS),
    ],
)
def test_an_exit_code_counts_when_the_shell_says_more_after_it(last: list[str], verdict: Verdict, tmp_path: Path) -> None:
    assert judge(write(tmp_path / "a.log", *healthy()[:-1], *last)).verdict is verdict


# --- files of several runs, and steps that nobody saw ---


def test_a_log_of_several_runs_is_inconclusive(tmp_path: Path) -> None:
    failure = failed({"call": "", "frames": [], "raised": "ValueError: x"})
    for before in (healthy(), [*begun("first step"), *failure]):
        found = judge(write(tmp_path / "a.log", *before, *healthy()))
        assert (found.verdict, found.boundary) == (BLOCKED, "metrics")
        assert "several runs" in found.reason
    other = MILESTONES["first step"].replace("actor/pg_loss:0.1", "actor/pg_loss:0.7")
    found = judge(write(tmp_path / "b.log", *begun("first step"), other, SECOND, DONE))
    assert "actor/pg_loss has several values at step 1" in found.reason


def test_a_step_that_is_missing_in_the_middle_is_inconclusive(tmp_path: Path) -> None:
    third, bar = SECOND.replace("step:2", "step:3").replace("global_step:2", "global_step:3"), DONE.replace("2/2", "3/3")
    found = judge(write(tmp_path / "a.log", *begun("first step"), third, bar, "rc=0"))
    assert found.verdict is BLOCKED
    assert "was not logged at step 2" in found.reason


def test_metrics_of_another_run_are_inconclusive(tmp_path: Path) -> None:
    log, metrics = tmp_path / "a.log", tmp_path / "m.jsonl"
    log.write_bytes(gzip.decompress((TRIAGE / "ppo_gae_3step.log.gz").read_bytes()))
    rows = [json.loads(row) for row in gzip.decompress((DATA / "ppo_gae_3step.jsonl.gz").read_bytes()).splitlines()]

    def judged(factor: float) -> Verdict:
        changed = [
            {**row, "data": {tag: v * factor if re.match("actor|critic", tag) else v for tag, v in row["data"].items()}} for row in rows
        ]
        metrics.write_text("".join(json.dumps(row) + "\n" for row in changed))
        found = judge(log, metrics)
        assert found.verdict is PASS or "of another run" in found.reason
        return found.verdict

    assert judged(1.0) is PASS
    assert judged(1.001) is PASS, "rounded"
    assert judged(1.4) is BLOCKED
