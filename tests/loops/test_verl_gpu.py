"""verl's wrapper on GPUs, without one: variables and arguments per level, and the preflight."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.loop import Context, Phase
from seatrial.core.records import Finding
from seatrial.loops import get_loop
from seatrial.loops.verl import gpu_side as wrapper
from seatrial.loops.verl import verl_checkout
from seatrial.loops.verl.gpu_runs import phases
from tests.loops.tiny_model import make_model
from tests.loops.verl_checkout import LADDER, PYTHON, Bench, level, on_gpus, repo


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return on_gpus(tmp_path, monkeypatch)


def training(bench: Bench, name: str, context: Context) -> list[Phase]:
    """The phases of a level without the import check."""
    made = phases(level(name), context, bench.level_directory(name))
    assert made[0].name == "imports"
    return list(made[1:])


def bad(context: Context) -> list[Finding]:
    return [finding for finding in wrapper.findings(context) if not finding.ok]


LEVEL_0 = {
    **{"LORA_RANK": "4", "USE_MBRIDGE": "True", "VANILLA_MBRIDGE": "False", "VALUE_VANILLA_MBRIDGE": "False", "USE_MEGATRON_FSDP": "False"},
    **{"COMMON_PP": "1", "COMMON_VPP": "null", "COMMON_CP": "1", "COMMON_TP": "1", "INFER_TP": "1", "COMMON_EP": "1", "COMMON_ETP": "1"},
    **{"ALL_OFFLOAD": "False", "TOTAL_TRAIN_STEPS": "1", "SAVE_FREQ": "-1", "RESUME_MODE": "disable", "ENGINE": "vllm", "NUM_GPUS": "8"},
    **{"VAL_BEFORE_TRAIN": "False", "TEST_FREQ": "-1", "VERL_USE_UV": "0", "USE_DUMMY_MODEL": "False"},
}
DIFFERS: dict[str, list[dict[str, str]]] = {
    "smoke": [{}],
    "save-resume": [{"SAVE_FREQ": "1"}, {"SAVE_FREQ": "1", "RESUME_MODE": "auto", "TOTAL_TRAIN_STEPS": "2"}],
    "parallelism": [{"COMMON_TP": "2", "COMMON_PP": "2", "COMMON_CP": "2", "INFER_TP": "2"}],
    "megatron-fsdp": [{"USE_MEGATRON_FSDP": "True", "LORA_RANK": "0"}],
    "learning": [{"TOTAL_TRAIN_STEPS": "20", "VAL_BEFORE_TRAIN": "True", "TEST_FREQ": "10"}],
}


@pytest.mark.parametrize("name", DIFFERS)
def test_each_level_sets_the_variables_of_level_0_and_what_differs(bench: Bench, name: str) -> None:
    made = training(bench, name, bench.context())
    assert len(made) == len(DIFFERS[name])
    for phase, differs in zip(made, DIFFERS[name], strict=True):
        assert {key: phase.env[key] for key in LEVEL_0} == {**LEVEL_0, **differs}
        assert phase.argv[:2] == ("bash", verl_checkout.WRAPPER)
        assert phase.cwd == bench.verl
        assert phase.env["MODEL_PATH"] == str(bench.root / "model")
        assert phase.env["TRAIN_FILES"] == str(bench.root / "train.parquet")
        assert phase.env["PATH"].split(":")[0] == str(PYTHON.parent)
        assert phase.processes == ("driver", "worker")
        assert phase.steps == int(phase.env["TOTAL_TRAIN_STEPS"])
        assert not any(re.search(r"\s", word) for word in phase.argv), "the wrapper would split it"


def test_overrides_are_appended_and_the_users_come_last(bench: Bench) -> None:
    (phase,) = training(bench, "smoke", bench.context("trainer.seed=3", "trainer.total_training_steps=3"))
    words = phase.argv[2:]
    place = bench.level_directory("smoke") / "run"
    assert words[-2:] == ("trainer.seed=3", "trainer.total_training_steps=3")
    assert phase.steps == 3
    for word in (
        *("trainer.logger=[console,file]", "global_profiler.steps=null", "reward.reward_model.enable=False"),
        *(f"trainer.default_local_dir={place}/checkpoints", f"hydra.run.dir={place}/hydra", f"trainer.rollout_data_dir={place}/rollouts"),
    ):
        assert word in words
    inside = dict(re.findall(r"\+\+ray_kwargs\.ray_init\.runtime_env\.env_vars\.(\w+)='(.*?)'", " ".join(words)))
    assert inside["PYTHONPATH"] == verl_checkout.python_path(bench.context())
    assert inside["VERL_FILE_LOGGER_PATH"] == phase.env["VERL_FILE_LOGGER_PATH"] == f"{place}/metrics.jsonl"
    assert inside["SEATRIAL_UNDER_TEST"] == phase.env["SEATRIAL_UNDER_TEST"]
    assert "megatron.core=" in inside["SEATRIAL_UNDER_TEST"], "Bridge's own Megatron-LM is Bridge's"
    assert inside["VERL_USE_EXTERNAL_MODULES"] == "seatrial.instruments.verl.import_witness"


def test_the_import_path_has_the_change_then_its_megatron_then_verl(bench: Bench) -> None:
    path = verl_checkout.python_path(bench.context()).split(":")
    parts = (bench.bridge / "src", bench.bridge / "3rdparty" / "Megatron-LM", bench.verl, bench.root / "run" / "instruments")
    assert path == [str(part) for part in parts]


def test_save_and_resume_share_one_directory_below_the_level(bench: Bench) -> None:
    save, resume = training(bench, "save-resume", bench.context())
    wanted = f"trainer.default_local_dir={bench.level_directory('save-resume')}/save/checkpoints"
    assert wanted in save.argv
    assert wanted in resume.argv
    assert save.env["VERL_FILE_LOGGER_PATH"] != resume.env["VERL_FILE_LOGGER_PATH"], "the logger truncates its file"


def test_learning_has_as_many_epochs_as_steps(bench: Bench) -> None:
    """With the wrapper's two a run on little data ends before its steps, and with exit code 0."""
    (phase,) = training(bench, "learning", bench.context(steps="30"))
    assert "trainer.total_epochs=30" in phase.argv


def test_fsdp_switches_off_the_three_fusions_and_a_reward_model_is_used_when_named(bench: Bench) -> None:
    (phase,) = training(bench, "megatron-fsdp", bench.context(reward_model=str(bench.root / "model")))
    assert sum("gradient_accumulation_fusion=False" in word for word in phase.argv) == 3
    assert "reward.reward_model.enable=False" not in phase.argv
    assert phase.env["RM_MODEL_PATH"] == str(bench.root / "model")


def test_a_dummy_model_is_made_below_the_level(bench: Bench) -> None:
    (phase,) = training(bench, "smoke", bench.context(model_config=str(bench.root / "model" / "config.json")))
    assert phase.env["USE_DUMMY_MODEL"] == "True"
    assert phase.env["DUMMY_MODEL_PATH"] == str(bench.level_directory("smoke") / "dummy_model")
    assert "dummy" in " ".join(wrapper.limitations(level("smoke"), bench.context(model_config="x")))


def test_sizes_follow_the_gpus_and_experts_are_spread_for_a_moe_model(bench: Bench) -> None:
    (four,) = training(bench, "parallelism", bench.context(gpus="4"))
    assert [four.env[f"COMMON_{name}"] for name in ("TP", "PP", "CP", "EP")] == ["2", "2", "1", "1"]
    (bench.root / "model" / "config.json").write_text('{"text_config": {"num_experts": 8}, "vision_config": {"depth": 1}}')
    (moe,) = training(bench, "parallelism", bench.context())
    assert moe.env["COMMON_EP"] == "2"
    said = " ".join(wrapper.limitations(level("smoke"), bench.context("actor_rollout_ref.rollout.enforce_eager=True")))
    for word in ("expert parallel size 1", "text-only", "enforce_eager", "rule"):
        assert word in said


def test_the_import_check_uses_the_launcher_of_training(bench: Bench) -> None:
    plain = phases(level("smoke"), bench.context(), bench.level_directory("smoke"))[0]
    assert plain.argv[:3] == (str(PYTHON), "-m", "seatrial.instruments.ray_imports")
    assert "--py-executable" not in plain.argv
    assert "VERL_USE_EXTERNAL_MODULES" not in plain.env, "the witness speaks for training only"
    uv = phases(level("smoke"), bench.context(launcher="uv"), bench.level_directory("smoke"))
    extras = "--frozen --all-packages --extra vllm --extra megatron --extra math"
    assert " ".join(uv[0].argv).startswith(f"uv run {extras} python3 -m ")
    assert uv[0].argv[-1] == f"uv -v run {extras}"
    assert uv[1].env["VERL_USE_UV"] == "1"


def test_levels_that_cannot_run_say_why(bench: Bench) -> None:
    def skips(**options: str) -> dict[int, str | None]:
        return {item.number: item.skip for item in wrapper.levels(LADDER, {"verl": str(bench.verl), **options})}

    assert [number for number, skip in skips().items() if skip] == [4]
    assert skips(architecture="moe")[4] is None
    assert skips(architecture="vlm")[4] is None
    assert "QAT" in str(skips(architecture="qat")[4])
    assert "options.engine=sglang" in str(skips(architecture="mtp")[4])
    assert skips(architecture="mtp", engine="sglang")[4] is None
    assert "GPU" in str(skips(gpus="1")[2])
    (bench.verl / "examples" / "grpo_trainer" / "run_qwen3_vl_8b_megatron.sh").unlink()
    assert "closest script" in str(skips(architecture="vlm")[4])
    assert "dummy" in str(skips(architecture="mtp", engine="sglang", model_config="x")[4])
    assert wrapper.levels(LADDER, {"steps": "50"})[5].steps == 50
    with pytest.raises(UserError, match="from 20 to 100"):
        get_loop("verl").configured({"steps": "5"})


def test_a_healthy_setup_has_no_bad_finding(bench: Bench) -> None:
    found = wrapper.findings(bench.context(levels=("smoke", "save-resume", "parallelism", "megatron-fsdp", "learning")))
    assert [finding for finding in found if not finding.ok] == []
    assert any("through uv unless" in finding.message for finding in found)


BAD: dict[str, tuple[Callable[[Bench], object], dict[str, Any], str]] = {
    "not a checkout": (lambda b: (b.verl / verl_checkout.VERSION).unlink(), {}, "not a verl checkout"),
    "no configuration": (lambda b: shutil.rmtree(b.verl / verl_checkout.CONFIG), {}, "is missing"),
    "no model": (lambda b: (b.root / "model" / "config.json").unlink(), {}, "no config.json"),
    "no weights": (lambda b: (b.root / "model" / "model.safetensors").unlink(), {}, "no weights"),
    "no tokenizer": (lambda b: (b.root / "model" / "tokenizer.json").unlink(), {}, "no tokenizer"),
    "no parquet": (lambda b: (b.root / "train.parquet").unlink(), {}, "no such file"),
    "torn parquet": (lambda b: (b.root / "test.parquet").write_bytes(b"PAR1 rows"), {}, "not a whole parquet"),
    "no dummy config": (lambda b: None, {"model_config": "/nowhere/config.json"}, "no such config.json"),
    "no reward model": (lambda b: None, {"reward_model": "/nowhere"}, "no reward model"),
    "too few GPUs": (lambda b: None, {"gpus": "16"}, "8 GPUs here, 16 wanted"),
    "sizes": (lambda b: None, {"tp": "3"}, "TP 3 x PP 1 x CP 1 = 3 does not divide 8 GPUs"),
    "expert sizes": (lambda b: None, {"ep": "3"}, "ETP 1 x EP 3 x PP 2 = 6 does not divide 8 GPUs"),
    "no uv": (lambda b: None, {"launcher": "uv"}, "no uv on PATH"),
    "no such model": (lambda b: shutil.rmtree(b.root / "model"), {}, "no such directory"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_finding_with_a_fix(bench: Bench, case: str) -> None:
    spoil, options, said = BAD[case]
    spoil(bench)
    found = bad(bench.context(levels=("smoke", "parallelism"), **options))
    assert found, "nothing was found"
    assert said in found[0].message
    assert found[0].fix


def test_no_checkout_and_a_moved_wrapper_say_what_was_looked_for(bench: Bench) -> None:
    nothing = Context(run_dir=bench.root, python=PYTHON, model="m")
    assert "no verl checkout was named" in bad(nothing)[0].message
    old = bench.verl / verl_checkout.WRAPPER
    old.rename(old.with_name("run_ppo_megatron.sh"))
    (found,) = bad(bench.context())
    assert verl_checkout.WRAPPER in found.message
    assert "tests/special_e2e/run_ppo_megatron.sh" in found.message


def test_missing_data_say_how_to_make_them(bench: Bench) -> None:
    (bench.root / "train.parquet").unlink()
    (found,) = bad(bench.context())
    assert found.fix == f"cd {bench.verl} && python3 examples/data_preprocess/gsm8k.py --local_save_dir {bench.root}"


def test_level_4_needs_the_model_and_the_data_that_it_is_about(bench: Bench) -> None:
    context = bench.context(levels=("architecture",), architecture="vlm")
    assert [finding.name for finding in bad(context)] == ["data", "data", "model"]
    for name in ("train.parquet", "test.parquet"):
        (bench.root / name).write_bytes(b"PAR1 rows images" + (6).to_bytes(4, "little") + b"PAR1")
    (bench.root / "model" / "config.json").write_text('{"vision_config": {"depth": 2}}')
    assert bad(context) == []
    (dense,) = bad(bench.context(levels=("architecture",), architecture="moe"))
    assert "none of num_experts" in dense.message


def test_no_gpu_says_where_to_run_instead(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (found,) = bad(bench.context())
    assert "no GPU was found here" in found.message
    assert "--device cpu" in found.fix


def test_too_few_cpus_for_rays_actors_would_wait_for_ever(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert bad(bench.context(gpus="1")) == []
    (found,) = bad(bench.context(gpus="2"))
    assert found.message == "12 CPUs here, 15 needed by Ray's actors"
    assert bad(bench.context(found.fix.rpartition("-- ")[2])) == []


def test_an_argument_that_the_wrapper_would_split_is_refused(bench: Bench) -> None:
    (found,) = bad(bench.context("trainer.experiment_name=a b"))
    assert "would split 'trainer.experiment_name=a b'" in found.message


def test_a_script_that_never_starts_training_is_refused(bench: Bench) -> None:
    (bench.verl / verl_checkout.WRAPPER).write_text("set -eu\n: VERL_USE_UV\necho $NOT_SET\n")
    (found,) = bad(bench.context())
    assert "NOT_SET" in found.message
    assert "before training" in found.message


def test_the_megatron_of_an_image_must_not_shadow_the_one_under_test(bench: Bench) -> None:
    verl_checkout.SHADOW.mkdir(parents=True)
    (found,) = bad(bench.context())
    assert "puts it before" in found.message
    core = repo("megatron", verl_checkout.SHADOW, verl_checkout.SHADOW, ("megatron.core",))
    mounted = Context(run_dir=bench.root / "run", python=PYTHON, model="m", changes=(core,))
    assert all(finding.ok for finding in verl_checkout.shadowing(mounted))
    nothing = Context(run_dir=bench.root / "run", python=PYTHON, model="m")
    assert verl_checkout.import_path(nothing) == (str(verl_checkout.SHADOW),), "driver and workers see the same"


def test_the_model_is_found_in_the_offline_cache(bench: Bench) -> None:
    stored = bench.root / "hf" / "hub" / "models--org--small"
    (stored / "snapshots" / "abc").mkdir(parents=True)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("abc")
    make_model(stored / "snapshots" / "abc")
    context = bench.context()
    named = Context(**{**{name: getattr(context, name) for name in context.__slots__}, "model": "org/small"})
    (phase,) = training(bench, "smoke", named)
    assert phase.env["MODEL_PATH"] == str(stored / "snapshots" / "abc")
    assert phase.env["MODEL_ID"] == "org/small"
    assert bad(named) == []
    (stored / "refs" / "main").write_text("other")
    assert "hf download org/small" in bad(named)[0].fix


def test_the_interpreter_is_the_one_that_the_wrapper_starts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"verl": str(bench.verl)}
    assert verl_checkout.interpreter(options).name == "python3"
    uv = bench.root / "bin" / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    with pytest.raises(BlockedError, match="has not made the environment") as caught:
        verl_checkout.interpreter(options)
    assert "uv sync --frozen --all-packages --extra vllm" in caught.value.fix
    python = bench.verl / ".venv" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.symlink_to(PYTHON)
    assert verl_checkout.interpreter(options) == python
    assert verl_checkout.launcher(bench.context(python=python)) == "uv"
    assert verl_checkout.launcher(bench.context()) == "python", "--python was given"
    monkeypatch.setenv("PATH", str(bench.root / "nowhere"))
    with pytest.raises(BlockedError, match="no python3"):
        verl_checkout.interpreter(options)
