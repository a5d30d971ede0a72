"""What each level runs: the scripts, what is set on top of them, and what is claimed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.loops import get_loop
from seatrial.loops.nemo_rl import nemo_runs
from seatrial.loops.nemo_rl.nemo_checkout import generation
from seatrial.loops.nemo_rl.nemo_runs import ScriptCall
from tests.loops.nemo_rl_checkout import Bench, make_bench


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("variants"))


def one(bench: Bench, level: str, **options: Any) -> ScriptCall:
    (call,) = nemo_runs.variants(level, bench.context(**options))
    return call


def test_the_smoke_is_the_functional_as_it_is(bench: Bench) -> None:
    call = one(bench, "smoke")
    assert (call.script, call.steps, call.overrides) == ("tests/functional/grpo_megatron.sh", 2, ())
    assert call.claims["policy.megatron_cfg.enabled"] is True
    assert call.claims["policy.dtensor_cfg.enabled"] is False
    assert call.claims["grpo.seq_logprob_error_threshold"] is None, "masking would hide what the level measures"


def test_another_model_takes_its_tokenizer_along(bench: Bench) -> None:
    context = bench.context(model="/models/m")
    (call,) = nemo_runs.variants("smoke", context)
    assert call.overrides == ("policy.model_name=/models/m", "policy.tokenizer.name=/models/m")
    assert call.claims["policy.model_name"] == "/models/m"


def test_lora_is_left_out_where_the_checkout_is_known_to_be_broken(bench: Bench) -> None:
    assert [call.name for call in nemo_runs.variants("lora-checkpoint", bench.context())] == ["lora", "resume"]
    assert [call.name for call in nemo_runs.variants("lora-checkpoint", bench.context(peft="broken"))] == ["resume"]
    loop = get_loop("nemo-rl").configured({"nemo_rl": str(bench.nemo_rl), "peft": "broken"})
    level = loop.levels()[1]
    assert "LoRA was not run" in level.proves
    assert "PEFT is broken in this NeMo-RL checkout" in level.left_out[0]
    assert get_loop("nemo-rl").configured({"nemo_rl": str(bench.nemo_rl)}).levels()[2].title.endswith("(full, packed, reshard, delta)")
    assert any("PEFT is broken in this NeMo-RL checkout" in text for text in loop.limitations(level, bench.context(peft="broken")))


def test_every_transport_of_the_checkout_is_a_run_of_its_own(bench: Bench) -> None:
    made = {call.name: call for call in nemo_runs.variants("refit", bench.context())}
    assert list(made) == ["full", "packed", "reshard", "delta"]
    assert made["packed"].variables["NRL_REFIT_BUFFER_MEMORY_RATIO"] == "0.0005"
    assert made["reshard"].script.endswith("grpo_nccl_reshard_refit.sh")
    assert made["delta"].claims["policy.generation.refit_transport"] == "vllm_zmq_sparse"
    assert all(call.claims["policy.generation.colocated.enabled"] is False for call in made.values())
    assert all(call.steps == 3 for call in made.values()), "two transfers of trained weights"
    assert [call.name for call in nemo_runs.variants("refit", bench.context(transports="delta"))] == ["delta"]


def test_the_older_generation_is_told_by_its_own_keys(tmp_path: Path) -> None:
    config = tmp_path / "nemo_rl/models/generation"
    config.mkdir(parents=True)
    (config / "config.py").write_text('x = cfg["delta_compression"]\n')
    found = generation(tmp_path)
    assert found.refit == "delta_compression"
    words = nemo_runs.delta_settings(found)
    assert words[0] == "policy.generation.delta_compression.enabled=true"
    assert len(words) == 6
    assert not any(word.startswith("+") for word in words), "with ++ any key would be accepted, and have no effect"
    assert nemo_runs.available(found) == ("full", "delta")


def test_sizes_are_explicit_and_claimed(bench: Bench) -> None:
    call = one(bench, "parallelism", tp="2", pp="2", gpus="4", sequence_parallel="true")
    assert "policy.megatron_cfg.pipeline_model_parallel_size=2" in call.overrides
    assert "policy.megatron_cfg.sequence_parallel=true" in call.overrides
    assert "cluster.gpus_per_node=4" in call.overrides
    assert call.claims["policy.megatron_cfg.tensor_model_parallel_size"] == 2
    assert call.sizes.problem(4) is None
    assert "does not divide" in (call.sizes.problem(6) or "")


def test_a_recipe_runs_its_own_script_for_two_steps_without_its_thresholds(bench: Bench) -> None:
    call = one(bench, "parallelism", recipe="examples/configs/recipes/llm/grpo-llama3.2-1b-instruct-1n8g-megatron.yaml")
    assert call.script == "tests/test_suites/llm/grpo-llama3.2-1b-instruct-1n8g-megatron.sh"
    assert "grpo.max_num_steps=2" in call.overrides
    assert not call.assertions


@pytest.mark.parametrize(
    ("kind", "script", "words"),
    [
        ("vlm", "vlm_grpo.sh", "vlm_grpo_3B_megatron.yaml"),
        ("audio", "audio_grpo_megatron.sh", ""),
        ("eagle", "grpo_megatron_eagle3_online.sh", ""),
        ("qat", "modelopt_quant_rollout.sh", ""),
        ("fp8", "grpo_megatron.sh", "grpo_math_8B_megatron_fp8.yaml"),
        ("moe", "grpo_megatron.sh", "expert_model_parallel_size=2"),
    ],
)
def test_an_architecture_runs_what_turns_it_on(bench: Bench, kind: str, script: str, words: str) -> None:
    call = one(bench, "architecture", architecture=kind)
    assert call.script.endswith(script)
    assert words in " ".join(call.overrides)
    loop = get_loop("nemo-rl").configured({"nemo_rl": str(bench.nemo_rl), "architecture": kind})
    assert loop.levels()[5].skip is None


def test_learning_runs_twenty_steps_in_a_fixed_order(bench: Bench) -> None:
    call = one(bench, "learning", steps="30")
    assert (call.script.rpartition("/")[2], call.steps) == ("grpo_megatron_lora.sh", 30)
    assert {"grpo.max_num_steps=30", "data.shuffle=false", "checkpointing.enabled=false"} <= set(call.overrides)
    assert one(bench, "learning", peft="broken").script.endswith("grpo_megatron.sh")


def test_the_users_words_come_last_and_their_steps_count(bench: Bench) -> None:
    context = bench.context("grpo.max_num_steps=5", "++a.b=1")
    (call,) = nemo_runs.variants("smoke", context)
    phase = nemo_runs.training(call, context, bench.root / "level")
    assert phase.steps == 5
    assert phase.argv[-2:] == ("grpo.max_num_steps=5", "++a.b=1")
    assert phase.cwd == bench.nemo_rl


def test_a_level_begins_with_the_import_check_which_carries_claims_and_assertions(bench: Bench) -> None:
    context, level = bench.context(), get_loop("nemo-rl").levels()[0]
    imports, run = nemo_runs.phases(level, context, bench.root / "level")
    assert (imports.name, run.name) == ("imports", "run")
    assert imports.processes == ("imports-driver", "imports-worker")
    said = " ".join(imports.argv)
    assert '"policy.megatron_cfg.enabled": true' in said
    assert "token_mult_prob_error" in said


def test_a_synced_bridge_and_local_helpers_are_the_drivers_business(bench: Bench) -> None:
    context = bench.context(helpers="local")
    synced = context.changes[0].model_copy(update={"synced": "/vendored"})
    changed = type(context)(context.run_dir, context.python, context.model, context.levels, (synced,), (), context.options)
    (call,) = nemo_runs.variants("smoke", changed)
    words = nemo_runs.training(call, changed, bench.root / "level").argv
    assert f"{bench.bridge}=/vendored" in words
    assert words[words.index("--helpers") + 1].endswith("3rdparty/Megatron-LM")
    assert str(bench.bridge / "src") not in changed.import_path()


@pytest.mark.parametrize(
    ("word", "key", "claimed"),
    [
        ("policy.model_name=Qwen/Qwen3-0.6B", "policy.model_name", "Qwen/Qwen2.5-0.5B"),
        ("++grpo.overlong_filtering=true", "grpo.overlong_filtering", False),
        ("loss_fn.force_on_policy_ratio=true", "loss_fn.force_on_policy_ratio", False),
        ("logger.log_dir=/elsewhere", "logger.log_dir", None),
        ("+checkpointing.pretrained_checkpoint.format=megatron_bridge", "checkpointing.pretrained_checkpoint", None),
    ],
)
def test_an_argument_that_takes_from_what_the_level_proves_is_claimed_otherwise(bench: Bench, word: str, key: str, claimed: Any) -> None:
    assert key not in one(bench, "smoke").claims
    context = replace(bench.context(), arguments=(word,))
    (call,) = nemo_runs.variants("smoke", context)
    assert key in call.claims
    assert call.claims[key] == claimed
    _, resume = nemo_runs.variants("lora-checkpoint", context)
    assert resume.claims[key] == claimed


def test_checkpoints_and_converted_models_of_a_level_are_its_own(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's own place may hold what a killed run left; the user's cache what another Bridge converted."""
    context, level = bench.context(), tmp_path / "1-lora-checkpoint"
    lora, resume = nemo_runs.variants("lora-checkpoint", context)
    assert nemo_runs.training(lora, context, level).argv[-1] == f"checkpointing.checkpoint_dir={level}/lora/checkpoints"
    assert not any("checkpoint_dir" in word for word in nemo_runs.training(resume, context, level).argv), "its script has places of its own"
    assert nemo_runs.training(resume, context, level).env["NRL_MEGATRON_CHECKPOINT_DIR"] == f"{level}/converted"
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", "/scratch")
    place = nemo_runs.training(resume, context, level).env["NRL_MEGATRON_CHECKPOINT_DIR"]
    assert place == f"/scratch/seatrial-{context.run_dir.name}/1-lora-checkpoint/converted"


def test_a_recipe_goes_before_the_functional_and_must_be_of_the_architecture(bench: Bench) -> None:
    name = "llm/grpo-llama3.2-1b-instruct-1n8g-megatron"
    call = one(bench, "architecture", architecture="mtp", recipe=name)
    assert call.script == f"tests/test_suites/{name}.sh"
    assert call.claims["policy.megatron_cfg.mtp_num_layers"] == "> 0"
    assert one(bench, "architecture", architecture="moe", recipe=name).claims["policy.megatron_cfg.expert_model_parallel_size"] == "> 1"
    claims = one(bench, "parallelism", recipe=name, tp="4").claims
    assert claims["policy.megatron_cfg.tensor_model_parallel_size"] == 4
    assert "policy.megatron_cfg.pipeline_model_parallel_size" not in claims


def test_without_expert_parallelism_a_dense_model_would_pass_for_one_with_experts(bench: Bench) -> None:
    loop = get_loop("nemo-rl").configured({"nemo_rl": str(bench.nemo_rl), "architecture": "moe", "ep": "1"})
    assert "nothing shows that the model has experts" in (loop.levels()[5].skip or "")
