"""The decisive line, boundary and verdict of every real sample, as recorded when it was made."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from seatrial.core.specs import Milestone
from seatrial.core.verdict import Boundary, Verdict
from seatrial.triage.diagnose import diagnose
from seatrial.triage.signatures import load_signatures

DATA = Path(__file__).parent.parent / "data" / "triage"
SIGNATURES = load_signatures(DATA / "signatures.toml")
BLOCKED, FAIL = Verdict.BLOCKED, Verdict.FAIL

RAY = (
    Milestone(id="cluster", pattern=r"Started a local Ray instance", boundary=Boundary.CLUSTER, verdict=BLOCKED),
    Milestone(id="data", pattern=r"train and validate dataloader initialized", boundary=Boundary.PROVIDER, verdict=FAIL),
    Milestone(id="model", pattern=r"actor and ref model engine initialized", boundary=Boundary.ROLLOUT, verdict=BLOCKED),
    Milestone(id="step", pattern=r"\bstep:\d+ - ", boundary=Boundary.OPTIMIZER),
    Milestone(id="done", pattern=r"Training Progress: 100%|Final validation metrics", boundary=Boundary.METRICS),
)
TRAINER = (
    Milestone(id="built", pattern=r"^trainer_build_s", boundary=Boundary.ROLLOUT),
    Milestone(id="step", pattern=r"^STEP \d+", boundary=Boundary.OPTIMIZER),
    Milestone(id="done", pattern=r"'train_runtime'", boundary=Boundary.CHECKPOINT),
)
STAGES = (
    Milestone(id="parallel", pattern=r"^PASS initialize_model_parallel", boundary=Boundary.PROVIDER),
    Milestone(id="import", pattern=r"^PASS import HF", boundary=Boundary.PROVIDER),
    Milestone(id="export", pattern=r"^PASS export roundtrip", boundary=Boundary.PROVIDER),
    Milestone(id="train", pattern=r"^PASS (train|PG) step", boundary=Boundary.CHECKPOINT),
)


@pytest.mark.parametrize(
    ("name", "milestones", "line", "text", "boundary", "verdict", "signature"),
    [
        ("fail_missing_uvicorn_sft", RAY, 27, "No module named 'uvicorn'", "environment", BLOCKED, "package-missing"),
        ("fail_duplicate_gloo_backend_sft", RAY, 36, "Duplicate device type cpu", "environment", BLOCKED, "duplicate-device-type"),
        ("fail_pin_memory_no_accelerator_grpo", RAY, 1085, "Cannot access accelerator", "environment", BLOCKED, "no-accelerator"),
        ("fail_critic_flash_attn_missing", RAY, 1070, "FlashAttention2 has been", "environment", BLOCKED, "attention-package-missing"),
        ("fail_vllm_sleep_mode_unsupported", RAY, 1083, "Sleep mode is not supported", "rollout", BLOCKED, "sleep-mode"),
        ("hang_too_few_ray_cpus", RAY, 952, "*** SIGTERM received", "cluster", BLOCKED, "storage-hang"),
        ("sig_vllm_missing", RAY, 23, "vllm version None", "rollout", BLOCKED, "rollout-package"),
        ("sig_rollout_mode_sync_removed", RAY, 7, "Rollout mode 'sync'", "config", BLOCKED, "rollout-mode"),
        ("sig_rocr_visible_devices", RAY, 6, "ROCR_VISIBLE_DEVICES", "environment", BLOCKED, "device-variables"),
        ("sig_engine_megatron_missing", RAY, 17, "Unknown backend: megatron", "environment", BLOCKED, "engine-missing"),
        ("swallowed_reward_errors", RAY, 1040, "Error in _run_prompt", "reward", FAIL, "reward-swallowed"),
        ("server_20_refits", (), 140, "ParallelLMHead: Failed to load weights", "refit", FAIL, "stale-head"),
        ("collect_http500_at_78_of_80", (), 57, "ClientResponseError: 500", "rollout", FAIL, "server-error"),
        ("server_log_http500", (), 18, '"POST /run HTTP/1.1" 500', "rollout", FAIL, "request-failed"),
        ("resume_torn_cache", (), 31, "orjson.JSONDecodeError: unexpected end", "data", BLOCKED, "torn-json"),
        ("start_no_python_no_network", (), 19, "dns error", "environment", BLOCKED, "dns"),
        ("core0.16.1_no_cuda", STAGES, 3, "Torch not compiled with CUDA", "environment", BLOCKED, "no-accelerator"),
        ("core0.19.2_partial_cuda_redirect", STAGES, 9, "not linked with support for cuda", "environment", BLOCKED, "no-accelerator"),
        ("core0.16.1_tp1", STAGES, 15, "CheckpointingException", "checkpoint", FAIL, None),
        ("bridge0.6.2_qwen2_bf16", STAGES, 22, "FAIL export roundtrip", "provider", FAIL, None),
        ("bridge0.6.2_llama_no_tokenizer", STAGES, 24, "FAIL save_hf_pretrained ValueError", "provider", FAIL, None),
        ("import_probe_multistorageclient_missing", (), 4, "multistorageclient", "environment", BLOCKED, "package-missing"),
        ("import_probe_one_missing", (), 10, "nvidia_resiliency_ext", "environment", BLOCKED, "package-missing"),
    ],
)
def test_failure(
    name: str, milestones: tuple[Milestone, ...], line: int, text: str, boundary: str, verdict: Verdict, signature: str | None
) -> None:
    path = DATA / f"{name}.log"
    found = diagnose(path, milestones, SIGNATURES)
    assert (found.line, found.boundary, found.verdict, found.signature) == (line, boundary, verdict, signature)
    assert text in found.cause
    assert text in path.read_bytes().decode().split("\n")[line - 1], "the line number is the one that sed -n prints"
    assert found.file == str(path)
    assert found.excerpt
    assert len(found.excerpt) <= 12


@pytest.mark.parametrize(
    ("name", "milestones", "last", "noise"),
    [
        ("grpo_full", TRAINER, "done", 0),
        ("grpo_resumed", TRAINER, "done", 1),
        ("ppo_gae_3step", RAY, "done", 1),
        ("sft_4step", RAY, "done", 1),
        ("bridge0.6.2_qwen2", STAGES, "export", 2),
        ("bridge0.6.2_qwen2_tp2", STAGES, "export", 2),
        ("bridge0.7.0_qwen2", STAGES, "export", 2),
        ("bridge0.6.2_lora_ddp_distopt", STAGES, "train", 2),
        ("core0.19.2_tp2", STAGES, "train", 0),
        ("refit_llama_inprocess", (), None, 1),
        ("start_warm", (), None, 0),
    ],
)
@pytest.mark.parametrize("knowing", [True, False])
def test_completed(name: str, milestones: tuple[Milestone, ...], last: str | None, noise: int, knowing: bool, tmp_path: Path) -> None:
    """A completed run has no cause, whether or not its harmless lines are known."""
    path = DATA / f"{name}.log"
    if not path.exists():
        path = tmp_path / "run.log"
        path.write_bytes(gzip.decompress((DATA / f"{name}.log.gz").read_bytes()))
    found = diagnose(path, milestones, SIGNATURES if knowing else ())
    assert (found.verdict, found.boundary, found.cause, found.line, found.signature) == (None, None, "", None, None)
    assert found.milestone == last
    if knowing:
        assert len(found.noise) == noise, found.noise


def test_unknown_failure_falls_to_the_last_milestone() -> None:
    """Without its signature the refused rollout configuration still sits at the rollout."""
    found = diagnose(DATA / "fail_vllm_sleep_mode_unsupported.log", RAY, ())
    assert (found.boundary, found.verdict, found.line) == (Boundary.ROLLOUT, BLOCKED, 1083)
    assert "Sleep mode is not supported" in found.cause
    assert found.milestone == "model"


def test_hang_without_signature_sits_at_the_last_milestone() -> None:
    found = diagnose(DATA / "hang_too_few_ray_cpus.log", RAY, ())
    assert (found.boundary, found.verdict, found.line) == (Boundary.CLUSTER, BLOCKED, 952)
    assert "from outside" in found.advice


def test_swallowed_errors_are_inconclusive_without_their_signature() -> None:
    found = diagnose(DATA / "swallowed_reward_errors.log", RAY, ())
    assert (found.verdict, found.boundary, found.survived, found.times) == (BLOCKED, Boundary.REWARD, True, 6)
    assert found.noise == ("line 1083: survived RuntimeError: reward backend unavailable",)


def test_test_runner_fails_when_one_failure_is_not_the_environment() -> None:
    found = diagnose(DATA / "unit_tests_peft_models.log", (), ())
    assert (found.verdict, found.boundary) == (FAIL, Boundary.PROVIDER)


def test_log_that_just_stops_has_no_verdict() -> None:
    assert diagnose(DATA / "collect_killed_at_55_of_160.log", (), SIGNATURES).verdict is None


@pytest.mark.parametrize("name", ["fail_critic_flash_attn_missing", "fail_vllm_sleep_mode_unsupported", "swallowed_reward_errors"])
def test_our_time_stamps_change_nothing(name: str, tmp_path: Path) -> None:
    stamped = tmp_path / "run.log"
    lines = (DATA / f"{name}.log").read_bytes().split(b"\n")
    stamped.write_bytes(b"\n".join(b"2026-11-15T03:41:59.123Z " + line for line in lines))
    expected = diagnose(DATA / f"{name}.log", RAY, SIGNATURES)
    assert diagnose(stamped, RAY, SIGNATURES).model_copy(update={"file": expected.file}) == expected
