"""Judging real logs of verl, Megatron and vLLM: verdict, boundary, decisive line and steps."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from seatrial.core.verdict import Boundary, Verdict
from seatrial.trial.files_judge import judge_files
from tests.loops.verl_logs import DATA, TRIAGE, VERL, judge, line

PASS, FAIL, BLOCKED, SKIPPED = Verdict.PASS, Verdict.FAIL, Verdict.BLOCKED, Verdict.SKIPPED


def unpacked(source: Path, target: Path) -> Path:
    target.write_bytes(gzip.decompress(source.read_bytes()))
    return target


# --- real logs: what samples/INDEX.md calls the true outcome ---

REAL: list[tuple[str, Verdict, str | None, int, str]] = [
    ("fail_missing_uvicorn_sft", BLOCKED, "environment", 27, "No module named 'uvicorn'"),
    ("fail_duplicate_gloo_backend_sft", BLOCKED, "environment", 36, "Duplicate device type cpu"),
    ("fail_pin_memory_no_accelerator_grpo", BLOCKED, "environment", 1085, "Cannot access accelerator device"),
    ("fail_critic_flash_attn_missing", BLOCKED, "environment", 1070, "FlashAttention2 has been toggled on"),
    ("fail_vllm_sleep_mode_unsupported", BLOCKED, "rollout", 1083, "Sleep mode is not supported"),
    ("hang_too_few_ray_cpus", BLOCKED, "cluster", 947, "'num_data_storage_units': 8"),
    ("sig_vllm_missing", BLOCKED, "rollout", 23, "vllm version None not supported"),
    ("sig_rollout_mode_sync_removed", BLOCKED, "config", 7, "Rollout mode 'sync' has been removed"),
    ("sig_rocr_visible_devices", BLOCKED, "environment", 6, "ROCR_VISIBLE_DEVICES"),
    ("sig_engine_megatron_missing", BLOCKED, "environment", 17, "Unknown backend: megatron"),
    ("swallowed_reward_errors", FAIL, "reward", 1040, "Error in _run_prompt for uid="),
    ("sft_4step", PASS, None, 50, "Final validation metrics"),
    ("core0.16.1_no_cuda", BLOCKED, "environment", 3, "Torch not compiled with CUDA"),
    ("core0.16.1_tp1", FAIL, "checkpoint", 15, "FAIL dist_checkpointing save+load model+optimizer dopt=True"),
    ("core0.19.2_tp2", PASS, None, 20, "PASS dist_checkpointing save+load model+optimizer dopt=True"),
    ("core0.19.2_partial_cuda_redirect", BLOCKED, "environment", 9, "FAIL get_megatron_optimizer dopt=False"),
    ("bridge0.6.2_qwen2", PASS, None, 27, "PASS save_hf_pretrained"),
    ("bridge0.6.2_qwen2_tp2", PASS, None, 43, "PASS save_hf_pretrained"),
    ("bridge0.7.0_qwen2", PASS, None, 27, "PASS save_hf_pretrained"),
    ("bridge0.6.2_qwen2_bf16", FAIL, "provider", 22, "FAIL export roundtrip"),
    ("bridge0.6.2_llama_no_tokenizer", FAIL, "provider", 24, "FAIL save_hf_pretrained ValueError"),
    ("bridge0.6.2_lora_ddp_distopt", PASS, None, 55, "token_mult_prob_error-like"),
    ("import_probe_multistorageclient_missing", BLOCKED, "environment", 4, "multistorageclient"),
    ("import_probe_one_missing", BLOCKED, "environment", 10, "nvidia_resiliency_ext"),
    ("unit_tests_peft_models", FAIL, "provider", 1055, "137 failed, 3500 passed"),
    ("refit_qwen2", FAIL, "refit", 14, '"tag": "after_reload_weights"'),
    ("refit_llama_inprocess", PASS, None, 33, "after reload_weights"),
    ("server_20_refits", FAIL, "refit", 140, "ParallelLMHead: Failed to load weights"),
]


GPU: list[tuple[str, Verdict, str | None, str]] = [
    ("level0", PASS, None, "Training Progress: 100%"),
    ("megatron_fsdp", PASS, None, "Training Progress: 100%"),
    ("loader_killed", PASS, None, "Training Progress: 100%"),
    ("no_transformer_engine", BLOCKED, "environment", "No module named 'transformer_engine'"),
    ("packed_sequence", FAIL, "provider", "Packed sequence is not supported by DotProductAttention"),
    ("rule_vacuous", PASS, None, "Training Progress: 100%"),  # a constant reward, and a critic to learn from
]


@pytest.mark.parametrize(("name", "verdict", "boundary", "text"), GPU)
def test_logs_of_the_wrapper_on_a_real_gpu(name: str, verdict: Verdict, boundary: str | None, text: str, tmp_path: Path) -> None:
    log = unpacked(DATA / "h200" / f"{name}.log.gz", tmp_path / "run.log")
    rows = DATA / "h200" / f"{name}.jsonl.gz"
    for metrics in ((), (unpacked(rows, tmp_path / "metrics.jsonl"),)) if rows.exists() else ((),):
        found = judge(log, *metrics)
        assert (found.verdict, found.boundary) == (verdict, boundary), found.reason
        assert text in line(log, found.line)


@pytest.mark.parametrize(("name", "verdict", "boundary", "number", "text"), REAL)
def test_real_logs(name: str, verdict: Verdict, boundary: str | None, number: int, text: str) -> None:
    log = TRIAGE / f"{name}.log"
    found = judge(log)
    assert (found.verdict, found.boundary, found.line) == (verdict, boundary, number), found.reason
    assert text in line(log, number)
    assert found.advice or verdict is PASS or found.signature is None


@pytest.mark.parametrize("with_metrics", [False, True])
@pytest.mark.parametrize(
    ("log", "metrics", "verdict", "steps"),
    [
        ("ppo_gae_3step.log.gz", "ppo_gae_3step", PASS, (3, 3)),
        ("sft_4step.log", "sft_fsdp2_4step", PASS, (4, 4)),
        ("swallowed_reward_errors.log", "grpo_swallowed_reward_errors", FAIL, (2, 2)),
    ],
)
def test_runs_with_and_without_metrics(
    log: str, metrics: str, verdict: Verdict, steps: tuple[int, int], with_metrics: bool, tmp_path: Path
) -> None:
    source = TRIAGE / log
    path = unpacked(source, tmp_path / "run.log") if source.suffix == ".gz" else source
    files = [unpacked(DATA / f"{metrics}.jsonl.gz", tmp_path / "metrics.jsonl")] if with_metrics else []
    found = judge(path, *files)
    assert (found.verdict, found.steps_reached, found.steps_expected) == (verdict, *steps), found.reason
    if verdict is PASS:
        assert line(path, found.line).endswith("[00:42<00:00, 14.01s/it]") or "Final validation" in found.text


def test_more_steps_than_were_reached_are_missed() -> None:
    found = judge(TRIAGE / "sft_4step.log", steps=5)
    assert (found.verdict, found.reason) == (FAIL, "reached step 4 of 5")


def test_swallowed_errors_are_counted() -> None:
    assert judge(TRIAGE / "swallowed_reward_errors.log").advice.startswith("6 such lines.")


def test_a_wrapper_that_only_expanded_its_arguments_is_skipped(tmp_path: Path) -> None:
    log = unpacked(DATA / "xtrace.log.gz", tmp_path / "xtrace.log")
    found = judge(log)
    assert (found.verdict, found.boundary, found.line) == (SKIPPED, Boundary.CONFIG, 87)
    assert line(log, 87) == "+ VANILLA_MBRIDGE=False"
    with log.open("a") as stream:
        stream.write("tests/special_e2e/run_ppo_trainer_megatron.sh: line 313: uv: command not found\n")
    found = judge(log)
    assert (found.verdict, found.boundary, found.signature) == (BLOCKED, Boundary.ENVIRONMENT, "uv-missing")


MADE = {
    "batch": ("config", "batch-sizes"),
    "bridge": ("environment", "megatron-missing"),
    "ckpt": ("checkpoint", "checkpoint-world-size"),
    "mode": ("config", "parallel-sizes"),
    "model_path": ("data", "model-files"),
    "override": ("config", "override-unknown"),
    "parquet": ("data", "data-file"),
    "reward_file": ("reward", "reward-function-missing"),
    "reward_source": ("data", "reward-unknown-data-source"),
    "rollout_name": ("config", "unknown-choice"),
    "tracking": ("config", "logger-unknown"),
    "trainer": ("config", "unknown-choice"),
}


@pytest.mark.parametrize("name", sorted(path.stem for path in (DATA / "made").glob("*.log")))
def test_real_output_of_calls_that_were_to_fail(name: str) -> None:
    found = judge(DATA / "made" / f"{name}.log")
    assert (found.boundary, found.signature) == MADE[name], found.reason
    assert found.verdict is (FAIL if name == "ckpt" else BLOCKED)


def test_a_run_that_is_not_of_the_level_is_inconclusive(tmp_path: Path) -> None:
    """FSDP2 without LoRA completed; that is no Pass of a level that claims Megatron and LoRA. Nor is a log without a dump."""
    log = unpacked(TRIAGE / "ppo_gae_3step.log.gz", tmp_path / "console.log")
    assert judge(log).verdict is PASS
    found = judge_files(VERL, log, (), VERL.levels()[0], None)
    assert (found.verdict, "strategy fell back to" in found.reason) == (BLOCKED, True)
    megatron = unpacked(DATA / "h200" / "level0.log.gz", tmp_path / "run.log")
    rows = unpacked(DATA / "h200" / "level0.jsonl.gz", tmp_path / "metrics.jsonl")
    assert judge_files(VERL, megatron, (rows,), VERL.levels()[0], None).verdict is PASS
