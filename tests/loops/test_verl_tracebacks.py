"""Classes of failures of verl, what Ray does to a log, and everything that must not become a Pass."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.verdict import Verdict
from seatrial.trial.files_judge import FileVerdict
from tests.loops.verl_logs import (
    DATA,
    DONE,
    MILESTONES,
    RUNNER,
    SECOND,
    TRIAGE,
    VERL,
    WORKER,
    begun,
    failed,
    frames,
    healthy,
    judge,
    line,
    write,
)

PASS, FAIL, BLOCKED = Verdict.PASS, Verdict.FAIL, Verdict.BLOCKED
TRACEBACKS: list[dict[str, Any]] = tomllib.loads((DATA / "tracebacks.toml").read_text())["traceback"]


@pytest.mark.parametrize("entry", TRACEBACKS, ids=lambda entry: str(entry["name"]))
def test_classes_of_failures(entry: dict[str, Any], tmp_path: Path) -> None:
    log = write(tmp_path / "run.log", *begun(entry["after"]), *failed(entry))
    found = judge(log)
    verdict, boundary, signature = entry["expect"]
    assert (found.verdict, found.boundary, found.signature or "") == (verdict, boundary, signature), found.reason
    assert entry["raised"].split("\n")[0] in line(log, found.line)


@pytest.mark.parametrize("entry", TRACEBACKS, ids=lambda entry: str(entry["name"]))
def test_the_worker_prints_it_first(entry: dict[str, Any], tmp_path: Path) -> None:
    """The same failure with the worker's own print above the driver's, in colour and after our time stamps."""
    own = ["Traceback (most recent call last):", *frames(entry["frames"]), *entry["raised"].split("\n")]
    lines = [*begun(entry["after"]), *(f"{WORKER}{text}" for text in own), *failed(entry)]
    found = judge(write(tmp_path / "run.log", *(f"2026-11-15T03:41:59.123Z {text}" for text in lines)))
    verdict, boundary, signature = entry["expect"]
    assert (found.verdict, found.boundary, found.signature or "") == (verdict, boundary, signature), found.reason


# --- what Ray does to logs ---


def test_a_healthy_run_passes_in_any_order_of_its_last_lines(tmp_path: Path) -> None:
    assert judge(write(tmp_path / "a.log", *healthy())).verdict is PASS
    swapped = [*begun("first step"), DONE, SECOND, "rc=0"]
    found = judge(write(tmp_path / "b.log", *swapped))
    assert (found.verdict, found.steps_reached, found.milestone) == (PASS, 2, "training done"), found.reason


def test_a_second_run_that_did_not_end_is_no_pass(tmp_path: Path) -> None:
    found = judge(write(tmp_path / "a.log", *healthy(), *begun("first step")))
    assert found.verdict is FAIL


@pytest.mark.parametrize("count", range(len(MILESTONES) + 2))
def test_no_beginning_of_a_run_is_a_pass(count: int, tmp_path: Path) -> None:
    found = judge(write(tmp_path / "a.log", *[text for text in healthy() if "Final" not in text][:count]))
    assert found.verdict in (FAIL, BLOCKED)


def test_a_bar_that_is_not_full_is_no_end(tmp_path: Path) -> None:
    for bar in (DONE.replace("2/2", "1/2"), DONE.replace("100%", " 50%")):
        assert judge(write(tmp_path / "a.log", *begun("first step"), SECOND, bar)).verdict is FAIL


@pytest.mark.parametrize(
    ("lines", "verdict", "boundary"),
    [
        (["ERROR:x:Error in _run_prompt for uid=1", "Traceback (most recent call last):", "ValueError: x"], FAIL, "rollout"),
        (["ERROR:x:Error in _run_prompt for uid=1 [repeated 7x across cluster]"], FAIL, "rollout"),
        (["WARN: grad_norm is not finite: nan"], FAIL, "optimizer"),
        (["ERROR:x:Reward computation failed for data_source=a: boom. Response preview: b..."], FAIL, "reward"),
        (["Warning: No dataloader state found at /c/data.pt, will start from scratch"], FAIL, "checkpoint"),
        (["NotImplementedError: Reward function is not implemented for data_source='x'"], BLOCKED, "data"),
        (["seatrial: wrong import in worker: megatron.bridge from /elsewhere"], BLOCKED, "environment"),
    ],
)
def test_what_was_swallowed_is_never_a_pass(lines: list[str], verdict: Verdict, boundary: str, tmp_path: Path) -> None:
    log = write(tmp_path / "a.log", *begun("training started"), *(f"{WORKER}{text}" for text in lines), *healthy()[-5:])
    found = judge(log)
    assert (found.verdict, found.boundary) == (verdict, boundary), found.reason


@pytest.mark.parametrize(
    "noise",
    [
        "engine/__init__.py:69: UserWarning: megatron engine is not available: ModuleNotFoundError(\"No module named 'megatron'\")",
        "Warning: Failed to set NUMA affinity: libnuma.so: cannot open shared object file: No such file or directory",
        "FutureWarning: The legacy mbridge backend selected by `vanilla_mbridge=True` is deprecated",
        "UserWarning: resource_tracker: There appear to be 1 leaked semaphore objects to clean up at shutdown",
        "Checkpoint tracker file does not exist: /workspace/run/latest_checkpointed_iteration.txt",
        "\n".join(
            [
                "Traceback (most recent call last):",
                *frames(["a.py:f"]),
                "RuntimeError: DataLoader worker (pid 7) is killed by signal: Terminated. ",
            ]
        ),
        "\n".join(
            [
                "Traceback (most recent call last):",
                *frames(["ray/_private/worker.py:main_loop", "torch/utils/data/_utils/signal_handling.py:handler"]),
                "RuntimeError: DataLoader worker (pid 11350) is killed by signal: Killed. ",
            ]
        ),
    ],
)
def test_noise_decides_nothing(noise: str, tmp_path: Path) -> None:
    shown = [f"{RUNNER}{text}" for text in noise.split("\n")]
    assert judge(write(tmp_path / "a.log", *healthy()[:-1], *shown)).verdict is PASS
    found = judge(write(tmp_path / "b.log", *begun("data read"), *shown))
    assert (found.verdict, found.boundary) == (BLOCKED, "environment")


def test_a_failure_right_after_noise_is_still_one(tmp_path: Path) -> None:
    noise = "Warning: Failed to set NUMA affinity: libnuma.so: cannot open shared object file"
    raised = [
        "Traceback (most recent call last):",
        *frames(["verl/workers/engine/megatron/transformer_impl.py:initialize"]),
        "ValueError: x",
    ]
    found = judge(write(tmp_path / "a.log", *begun("data read"), *(f"{WORKER}{text}" for text in (noise, *raised))))
    assert (found.verdict, found.boundary, found.signature) == (FAIL, "provider", "provider-raised")


def test_a_dead_actor_is_explained_by_what_stands_above_it(tmp_path: Path) -> None:
    died = ["ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", "\tclass_name: WorkerDict"]
    died += ["The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"]
    noise = f"{WORKER}Warning: Failed to set NUMA affinity: libnuma.so: cannot open shared object file"
    driver = ["Traceback (most recent call last):", *frames(["ray/_private/worker.py:get_objects"]), *died]
    before = judge(write(tmp_path / "a.log", *begun("data read"), noise, *driver))
    assert (before.verdict, before.boundary, before.signature) == (BLOCKED, "environment", "worker-died-early")
    after = judge(write(tmp_path / "b.log", *begun("first step"), noise, *driver))
    assert (after.verdict, after.boundary) == (FAIL, "cluster")
    memory = "(raylet) Task was killed due to the node running low on memory."
    found = judge(write(tmp_path / "c.log", *begun("first step"), memory, *driver))
    assert (found.verdict, found.boundary, found.signature, found.line) == (BLOCKED, "environment", "host-memory", 8)
    timeout = f"{WORKER}[rank1]:[E809 14:59:33.6 ProcessGroupNCCL.cpp:629] Watchdog caught collective operation timeout: WorkNCCL("
    found = judge(write(tmp_path / "d.log", *begun("training started"), timeout, *driver))
    assert (found.verdict, found.boundary, found.signature) == (FAIL, "ddp", "collective-timeout")


ENGINE = "\x1b[36m(vLLMHttpServer pid=25058)\x1b[0m \x1b[0;36m(EngineCore_DP0 pid=7)\x1b[0;0m ERROR 11-15 02:30:11 [core.py:390] "


@pytest.mark.parametrize(
    ("calls", "raised", "outer", "expected"),
    [
        (
            ["vllm/v1/worker/utils.py:update_weights_from_ipc", "vllm/model_executor/layers/linear.py:weight_loader"],
            "KeyError: 'layers.0.qkv_proj.base_layer.weight'",
            "RuntimeError: Worker failed with error 'cannot close exported pointers exist', please check the stack trace above",
            (FAIL, "refit", "weight-sync-raised"),
        ),
        (
            ["vllm/v1/engine/core.py:run_engine_core", "vllm/v1/engine/core.py:_initialize_kv_caches"],
            "RuntimeError: something new",
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
            (BLOCKED, "rollout", "rollout-start-raised"),
        ),
    ],
)
def test_the_engine_says_why_and_the_driver_only_that(
    calls: list[str], raised: str, outer: str, expected: tuple[Verdict, str, str], tmp_path: Path
) -> None:
    engine = ["Traceback (most recent call last):", *frames(calls), raised]
    entry = {"call": "vLLMHttpServer.launch", "frames": ["vllm/v1/engine/core_client.py:__init__"], "raised": outer}
    log = write(tmp_path / "a.log", *begun("engines built"), *(f"{ENGINE}{text}" for text in engine), *failed(entry))
    found = judge(log)
    assert (found.verdict, found.boundary, found.signature) == expected, found.reason
    assert raised in line(log, found.line)


def test_a_hang_elsewhere_is_not_the_one_of_the_storage_units(tmp_path: Path) -> None:
    hang = (TRIAGE / "hang_too_few_ray_cpus.log").read_text().split("\n")[:951]
    found = judge(write(tmp_path / "a.log", *hang))
    assert (found.signature, found.verdict) == ("waits-for-cluster-cpus", BLOCKED), "a log that just stops there is named, too"
    found = judge(write(tmp_path / "b.log", *hang, MILESTONES["data read"], "*** SIGTERM received at time=1 on cpu 0 ***"))
    assert (found.signature, found.verdict, found.boundary) == (None, BLOCKED, "environment")


def test_metrics_that_are_not_finite_fail_and_show_their_line(tmp_path: Path) -> None:
    for value in ("nan", "np.float64(nan)", "-inf", "np.float32(inf)"):
        noted = "ray init kwargs: {'num_cpus': None, 'runtime_env': {'env_vars': {'A': '1'}, 'b': None}}"
        shown = [noted, *healthy()[1:]]
        log = write(tmp_path / "a.log", *(text.replace("actor/pg_loss:0.1", f"actor/pg_loss:{value}") for text in shown))
        found = judge(log)
        assert (found.verdict, found.boundary, found.line) == (FAIL, "metrics", 7), found.reason
        assert "actor/pg_loss is not finite at step 1, 2" in found.reason


def test_runs_without_a_signal_are_blocked_or_failed(tmp_path: Path) -> None:
    def changed(pattern: str, by: str) -> FileVerdict:
        return judge(write(tmp_path / "a.log", *(re.sub(pattern, by, text) for text in healthy())))

    assert (changed(r"score/max:[\d.]+", "score/max:0.0").verdict, changed(r"score/max:[\d.]+", "score/max:0.0").boundary) == (
        BLOCKED,
        "reward",
    )
    assert changed(r"advantages/(max|min):\S+", r"advantages/\1:0.0").verdict is BLOCKED
    assert "learning rate" in changed(r"actor/lr:\S+", "actor/lr:0.0").reason
    assert changed(r"actor/grad_norm:\S+", "actor/grad_norm:0.0 - critic/grad_norm:1.5").boundary == "optimizer"
    assert "no actor/grad_norm" in changed(r"actor/grad_norm:\S+", "critic/grad_norm:1.5").reason
    assert "no critic/score" in changed(r"critic/score/", "critic/other/").reason


def test_every_signature_says_what_to_do() -> None:
    for signature in VERL.signatures():
        assert signature.harmless or signature.advice, signature.id
        assert signature.harmless or signature.boundary, signature.id
        assert not signature.frame or signature.verdict in (FAIL, BLOCKED), signature.id


@pytest.mark.parametrize(("code", "verdict"), [(0, PASS), (124, PASS), (1, FAIL), (134, FAIL), (137, FAIL)])
def test_an_exit_code_that_the_shell_wrote_counts(code: int, verdict: Verdict, tmp_path: Path) -> None:
    """124 is that of `timeout`, and says nothing about a run whose work is done."""
    assert judge(write(tmp_path / "a.log", *healthy()[:-1], f"rc={code}")).verdict is verdict


def test_a_resumed_run_passes_with_its_last_step_alone(tmp_path: Path) -> None:
    bars = [f"{RUNNER}Training Progress:  75%|███████▌  | 3/4 [00:00<?, ?it/s]", DONE.replace("2/2", "4/4")]
    found = judge(write(tmp_path / "a.log", *begun("ready to train"), *bars, MILESTONES["first step"].replace("step:1", "step:4"), "rc=0"))
    assert (found.verdict, found.steps_reached, found.steps_expected) == (PASS, 4, 4), found.reason
