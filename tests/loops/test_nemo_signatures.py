"""Each known failure of NeMo-RL in a log as it really looks, what must not count, and where an unknown failure sits."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

import seatrial.loops.nemo_rl as package
from seatrial.core.loop import Loop, read_tables
from seatrial.core.records import Diagnosis
from seatrial.core.specs import Milestone, Signature
from seatrial.core.verdict import Verdict
from seatrial.triage.signatures import GENERAL, load_signatures
from seatrial.trial.level import read_diagnosis
from tests.loops.nemo_logs import HEADER, POLICY, VLLM, frames, grpo_log, raised

HERE = Path(package.__path__[0])
DATA = Path(__file__).parents[1] / "data" / "nemo_rl"
FAILURES: list[dict[str, Any]] = tomllib.loads((DATA / "failures.toml").read_text())["failure"]
SIGNATURES = load_signatures(HERE / "signatures.toml")
MILESTONES = read_tables(HERE / "milestones.toml", "milestone", Milestone)
PREFIX = {"": "", "policy": POLICY, "vllm": VLLM}


class Known:
    """As much of the loop as triage asks for."""

    def signatures(self) -> tuple[Signature, ...]:
        return SIGNATURES

    def milestones(self) -> tuple[Milestone, ...]:
        return MILESTONES


def diagnosis(path: Path, text: str) -> Diagnosis:
    path.write_text(text)
    return read_diagnosis(cast(Loop, Known()), path)


def begun(after: str | None) -> str:
    return grpo_log(until=after) if after else "+ uv run bash tests/functional/grpo_megatron.sh\n"


def worker_print(texts: Sequence[str]) -> list[str]:
    """What a generation worker logs: a line, a traceback through calls, and the exception."""
    lead, *calls, exception = texts
    return [f"{VLLM}{line}" for line in (lead, HEADER, *frames(calls), exception)]


def failed(entry: dict[str, Any]) -> str:
    """The log of a run with this failure."""
    if "lines" in entry:
        lines = [PREFIX[entry.get("by", "")] + line for line in entry["lines"]]
        if entry.get("swallowed"):
            return grpo_log(extra={entry["after"]: lines})
        return begun(entry.get("after")) + "\n".join(lines) + "\n"
    lines = [*entry.get("before", ()), *(line for texts in entry.get("worker", ()) for line in worker_print(texts))]
    lines += raised(entry.get("call", ""), entry.get("frames", ()), entry["raised"])
    return begun(entry["after"]) + "\n".join(lines) + "\nrc=1\n"


def name(entry: dict[str, Any]) -> str:
    return f"{entry['signature']}-{entry.get('call', '') or entry.get('after', 'start')}"


@pytest.mark.parametrize("entry", FAILURES, ids=name)
def test_each_failure_is_known(entry: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    found = diagnosis(log, failed(entry))
    verdict, boundary = entry["expect"]
    assert (found.signature, found.verdict, found.boundary) == (entry["signature"], verdict, boundary), found
    assert found.line is not None
    assert found.advice
    signature = next(s for s in SIGNATURES if s.id == entry["signature"])
    if not signature.frame:
        below = "\n".join(log.read_text().split("\n")[found.line - 1 : found.line + 3])
        assert re.search(signature.pattern, below, re.MULTILINE)


@pytest.mark.parametrize("entry", [e for e in FAILURES if "call" in e and e.get("before") is None], ids=name)
def test_the_worker_prints_it_first(entry: dict[str, Any], tmp_path: Path) -> None:
    """The same failure with the worker's own print above the driver's, after our time stamps and the label of a script."""
    own = [HEADER, *frames(entry["frames"]), *entry["raised"].split("\n")]
    worker = VLLM if "Vllm" in entry["call"] else POLICY
    text = begun(entry["after"]) + "\n".join(
        [*(f"{worker}{line}" for line in own), *raised(entry["call"], entry["frames"], entry["raised"])]
    )
    stamped = "\n".join(f"2026-11-15T03:41:59.123Z [mcore 1step] {line}" for line in text.split("\n"))
    found = diagnosis(tmp_path / "run.log", stamped)
    assert (found.signature, found.verdict, found.boundary) == (entry["signature"], *entry["expect"]), found


def test_every_signature_is_tested_and_says_what_to_do() -> None:
    tested = {entry["signature"] for entry in FAILURES}
    assert {s.id for s in SIGNATURES if not s.harmless} == tested
    assert all(s.advice and s.seen_in for s in SIGNATURES)
    general = {s.id for s in load_signatures(GENERAL)}
    assert not general & {s.id for s in SIGNATURES}, "a general signature is not repeated"


def test_the_four_boundaries_of_a_refit_have_different_advice() -> None:
    ids = ("refit-export-raised", "refit-transport-raised", "refit-load-raised", "refit-vllm-loader-raised")
    advice = {s.id: s.advice for s in SIGNATURES}
    assert len({advice[i].partition(":")[0] for i in ids}) == 4


@pytest.mark.parametrize(
    ("name", "after", "signature", "line"),
    [
        (
            "init",
            "workers being made",
            "architecture-unsupported",
            "ValueError: ✗ Model architecture 'FooForCausalLM' is not yet supported",
        ),
        ("method", "update", "loss-not-finite", "RuntimeError: Unexpected result nan"),
    ],
)
def test_what_ray_really_prints(name: str, after: str, signature: str, line: str, tmp_path: Path) -> None:
    """Of stand-ins for the worker under Ray 2.60; its own lines come after the driver's, the milestone, too."""
    found = diagnosis(tmp_path / "run.log", begun(after) + (DATA / f"ray_{name}.log").read_text())
    assert (found.signature, found.verdict) == (signature, Verdict.FAIL), found
    assert found.cause.startswith(line)


# --- what must not count ---


@pytest.mark.parametrize(
    ("milestone", "lines"),
    [
        ("configuration loaded", ["WARNING:root:__init__.py:214: ", "WARNING: Container/Code Version Mismatch Detected!"]),
        (
            "step begun",
            ["[WARNING]: 3/512 valid tokens have -inf in prev_logprobs (policy top-k/top-p mismatch). Masking out these positions."],
        ),
        ("update", ["Warning: Skipping metric 'train/x' for TensorBoard logging (unsupported type: str)"]),
        ("step begun", ["❌ NeMo-Gym batch did not complete prompt groups [1]; retrying in 1.0s (attempt 2/3)"]),
        ("training done", ["Error shutting down generation workers: The actor is dead because it was killed by `ray.kill`."]),
        (
            "training done",
            [
                "Async GRPO training complete!",
                f"{POLICY}[rank0]:[W1115 ProcessGroupNCCL.cpp:1538] Warning: WARNING: destroy_process_group() was not called",
            ],
        ),
        ("training done", ['│ PASS   │ max(data["train/token_mult_prob_error"]) < 1.05 │ 1.01 │ │']),
        (
            "training done",
            [
                "*** SIGTERM received at time=1 on cpu 0 ***",
                "/usr/lib/python3.13/multiprocessing/resource_tracker.py:301: UserWarning: resource_tracker: There appear to be 1 leaked",
            ],
        ),
        ("step begun", [f"{VLLM}{line}" for line in (HEADER, *frames(["vllm/entrypoints/llm.py:f"]), "RuntimeError: survived")]),
        ("step begun", ["A model wrote: CUDA error: an illegal memory access, FAIL, Traceback"]),
    ],
)
def test_noise_decides_nothing(milestone: str, lines: list[str], tmp_path: Path) -> None:
    found = diagnosis(tmp_path / "run.log", grpo_log(extra={milestone: lines}))
    assert (found.verdict, found.signature, found.milestone) == (None, None, "training done"), found


def test_a_healthy_run_has_no_verdict_and_all_milestones(tmp_path: Path) -> None:
    text = grpo_log()
    assert diagnosis(tmp_path / "run.log", text).verdict is None
    lines = [re.sub(r"\x1b\[\d+m|\([^)]*pid=[^)]*\) ", "", line) for line in text.split("\n")]
    missing = [m.id for m in MILESTONES if not any(re.search(m.pattern, line) for line in lines)]
    assert missing == ["weight sync", "checkpoint being saved"], "those of other runs"


@pytest.mark.parametrize(
    ("line", "done"),
    [
        ("Timeout has been reached, stopping training early", False),
        ("Async GRPO training complete!", False),
        ("SC run complete: {'train_steps': 2, 'trainer_version': 2}", True),
    ],
)
def test_what_shows_the_end_of_a_run(line: str, done: bool, tmp_path: Path) -> None:
    found = diagnosis(tmp_path / "run.log", grpo_log(ended=False) + line + "\n")
    assert (found.milestone == MILESTONES[-1].id) is done


# --- unknown failures, and symptoms ---


@pytest.mark.parametrize(
    ("after", "verdict", "boundary"),
    [
        (None, "Blocked", "environment"),
        ("configuration loaded", "Blocked", "config"),
        ("configuration in force", "Blocked", "cluster"),
        ("cluster connected", "Blocked", "data"),
        ("data read", "Blocked", "cluster"),
        ("GPUs placed", "Blocked", "environment"),
        ("workers being made", "Blocked", "environment"),
        ("policy being built", "Fail", "provider"),
        ("policy built", "Fail", "provider"),
        ("policy and generator ready", "Fail", "refit"),
        ("setup complete", "Fail", "rollout"),
        ("step begun", "Fail", "rollout"),
        ("log-probabilities", "Fail", "provider"),
        ("update", "Fail", "optimizer"),
        ("step done", "Fail", "metrics"),
        ("training done", "Fail", "metrics"),
    ],
)
def test_an_unknown_failure_sits_where_the_run_was(after: str | None, verdict: str, boundary: str, tmp_path: Path) -> None:
    lines = [HEADER, *frames(["examples/run_grpo.py:main"]), "ZeroDivisionError: division by zero"]
    found = diagnosis(tmp_path / "run.log", begun(after) + "\n".join(lines) + "\n")
    assert (found.verdict, found.boundary, found.signature) == (verdict, boundary, None)


DIED = "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."


@pytest.mark.parametrize(
    ("cause", "verdict", "boundary", "signature"),
    [
        ("(raylet) Task was killed due to the node running low on memory.", "Blocked", "environment", "host-memory"),
        (
            f"{POLICY}[rank1]:[E809 14:59:33.6 ProcessGroupNCCL.cpp:629] Watchdog caught collective operation timeout: W(",
            "Fail",
            "ddp",
            "collective-timeout",
        ),
        (f"{POLICY}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "Fail", "environment", "device-memory"),
        ("", "Fail", "cluster", "worker-died"),
    ],
)
def test_a_dead_worker_is_explained_by_what_stands_above_it(
    cause: str, verdict: str, boundary: str, signature: str, tmp_path: Path
) -> None:
    text = begun("update") + "\n".join([cause, *raised("", ["ray/_private/worker.py:get"], DIED)]) + "\n"
    found = diagnosis(tmp_path / "run.log", text)
    assert (found.verdict, found.boundary, found.signature) == (verdict, boundary, signature), found


def test_a_kernel_fault_in_training_is_no_fault_of_cuda_graphs(tmp_path: Path) -> None:
    fault = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    calls = ["nemo_rl/models/policy/workers/megatron_policy_worker.py:train", "megatron/core/models/gpt/gpt_model.py:forward"]
    found = diagnosis(tmp_path / "run.log", begun("update") + "\n".join(raised("MegatronPolicyWorker.train", calls, fault)) + "\n")
    assert found.signature == "accelerator-memory-fault", "although the printed configuration names graphs"


@pytest.mark.parametrize(
    ("after", "text", "signature"),
    [
        (
            "configuration loaded",
            "OverridesError: Failed to parse Hydra overrides: Could not override 'grpo.max_steps'.",
            "override-unknown",
        ),
        ("cluster connected", "OSError: [Errno 28] No space left on device", "no-space"),
        (
            "cluster connected",
            "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://hf",
            "hub-rate-limit",
        ),
        ("cluster connected", "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot", "hub-offline"),
        ("cluster connected", "huggingface_hub.errors.GatedRepoError: 401 Client Error.", "hub-access"),
        ("data read", "TimeoutError: Timed out waiting for placement groups to be ready. The cluster may not have enough", "cluster-start"),
        ("data read", "RuntimeError: Could not find a free port in range 1400-1999", "address-in-use"),
        ("workers being made", "ModuleNotFoundError: No module named 'ray'", "package-missing"),
        ("update", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "device-memory"),
        ("update", "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", "host-memory"),
        ("update", "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-15T03:00:00 DUE TO TIME LIMIT ***", "scheduler-ended-job"),
    ],
)
def test_general_failures_are_still_known(after: str, text: str, signature: str, tmp_path: Path) -> None:
    lines = [text] if text.startswith("slurm") else raised("", ["nemo_rl/algorithms/grpo.py:setup"], text)
    assert diagnosis(tmp_path / "run.log", begun(after) + "\n".join(lines) + "\n").signature == signature


def test_a_worker_that_ends_with_the_run_is_no_failure_and_one_that_dies_before_is(tmp_path: Path) -> None:
    died = "\n".join(f"{VLLM}{line}" for line in raised("", ["ray/_private/worker.py:get"], DIED)) + "\n"
    assert diagnosis(tmp_path / "a.log", grpo_log() + died).verdict is None
    assert diagnosis(tmp_path / "b.log", grpo_log(ended=False) + died).signature == "worker-died"
    other = died.replace(DIED, "ValueError: something new")
    assert diagnosis(tmp_path / "c.log", grpo_log() + other).verdict is Verdict.FAIL
