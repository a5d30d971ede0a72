"""The configuration that NeMo-RL's own loader makes of what was recorded: what is rejected, what is not as claimed, and what is
accepted without effect.

With SEATRIAL_NEMO_RL_CHECKOUT=DIR the scripts of a real checkout are composed with its real loader, in SEATRIAL_NEMO_RL_PYTHON
(or the CPU environment of another loop, which has omegaconf and hydra-core).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from seatrial.core.records import Finding
from seatrial.loops.nemo_rl.nemo_preflight import ComposeRequest, config_findings, default_config
from seatrial.loops.nemo_rl.script_dry_run import ScriptError, Training, record_script
from tests.loops.nemo_rl_checkout import PYTHON, REAL, Bench, make_bench

MEGATRON = "examples/configs/grpo_math_1B_megatron.yaml"
TP = "policy.megatron_cfg.tensor_model_parallel_size"
SEED = (
    *("enabled=true", "dtype=bfloat16", "transport=sparse_indices", "full_sync_interval=20"),
    *("sparse_bucket_size_bytes=5368709120", "delta_load_batch_size_bytes=536870912"),
)
"""Settings below policy.generation.delta_compression, as an older NeMo-RL had them."""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return make_bench(tmp_path)


def training(*overrides: str, config: str | None = MEGATRON, program: str = "examples/run_grpo.py", text: str | None = None) -> Training:
    return Training((), {}, program, config, overrides, text)


def composed(bench: Bench, item: Training, own: tuple[str, ...] = (), **claims: object) -> list[Finding]:
    wanted = ComposeRequest("smoke (run)", item, {key.replace("__", "."): value for key, value in claims.items()})
    return config_findings([wanted], bench.nemo_rl, [str(PYTHON)], {"PYTHONPATH": str(bench.site), "PATH": os.environ["PATH"]}, own)


def test_a_configuration_that_composes_is_one_good_finding(bench: Bench) -> None:
    (found,) = composed(
        bench,
        training("grpo.max_num_steps=2"),
        grpo__max_num_steps=">= 2",
        policy__megatron_cfg__enabled=True,
        policy__dtensor_cfg__enabled=False,
    )
    assert found.ok
    assert found.message == "1 runs composed, 3 values as claimed, every override is read"


def test_without_a_configuration_the_programs_own_is_taken(bench: Bench) -> None:
    (found,) = composed(bench, training(config=None), policy__megatron_cfg__enabled=True)
    assert "claims policy.megatron_cfg.enabled = True, and the run would have False" in found.message
    (found,) = composed(bench, training("sft.max_num_steps=2", config=None, program="examples/run_sft.py"), sft__max_num_steps=2)
    assert found.ok
    bare = bench.nemo_rl / "examples" / "run_bare.py"
    bare.write_text("import os\nos.path.join('a', name, 'b.yaml')\nprint('x.yaml')\n")
    assert default_config(bare) is None
    (found,) = composed(bench, training(config=None, program="examples/run_bare.py"))
    assert "examples/run_bare.py names no configuration of its own" in found.message


def test_every_rejected_override_is_named_with_the_nearest_key(bench: Bench) -> None:
    words = ("grpo.max_num_step=4", "grpo.max_num_steps=1", "policy.other.thing=2", "grpo.max_num_steps=3", "cluster.gpus=1")
    found = composed(bench, training(*words), own=("cluster.gpus=1",))
    assert [("rejects " + word) in finding.message for finding, word in zip(found, words[::2], strict=True)] == [True] * 3
    assert "nearest known: grpo.max_num_steps" in found[0].message
    assert "different versions" in found[0].fix
    assert "correct it" in found[2].fix, "the user's own"
    assert not any(finding.ok for finding in found)


def test_what_a_level_sets_and_a_checkout_does_not_have_is_one_finding(bench: Bench) -> None:
    word = "policy.generation.no_such_key=true"
    item = ComposeRequest("refit (x)", training(word), {"policy.generation.no_such_key": True}, ours=(word,))
    found = config_findings([item], bench.nemo_rl, [str(PYTHON)], {"PYTHONPATH": str(bench.site), "PATH": os.environ["PATH"]}, ())
    assert [(finding.ok, "rejects" in finding.message) for finding in found] == [(False, True)], "not a second time as a claim"
    assert "leave the level out" in found[0].fix


def test_a_value_that_is_not_as_claimed_is_a_finding(bench: Bench) -> None:
    words = ("policy.megatron_cfg.enabled=false",)
    (found,) = composed(bench, training(*words), own=words, policy__megatron_cfg__enabled=True)
    assert found.fix.startswith("leave policy.megatron_cfg.enabled=false out")
    (absent,) = composed(bench, training(), policy__none__such=1)
    assert "the run would have (no such key)" in absent.message


def test_seed_settings_that_are_accepted_without_effect_are_found(bench: Bench) -> None:
    words = tuple(f"++policy.generation.delta_compression.{setting}" for setting in SEED)
    found = composed(bench, training(*words, "policy.megatron_cfg.converter_type=Qwen2ForCausalLM"), own=words)
    assert len(found) == 7
    for finding, word in zip(found, (*words, "policy.megatron_cfg.converter_type=Qwen2ForCausalLM"), strict=True):
        assert not finding.ok
        assert f"{word} is accepted, but nothing in this checkout reads" in finding.message
        assert finding.message.endswith("a run with it would be vacuous")
    assert "use the key that this checkout reads" in found[0].fix


def test_what_other_values_refer_to_is_read(bench: Bench) -> None:
    text = f"defaults: {bench.nemo_rl / MEGATRON}\nshort_name: 4\ngrpo:\n  max_num_steps: ${{short_name}}\nother_name: 1\n"
    (found,) = composed(bench, training("short_name=2", "other_name=2", config="gone.yaml", text=text))
    assert "other_name=2 is accepted" in found.message


def test_sizes_and_the_guard_of_tensor_parallelism(bench: Bench) -> None:
    four = (f"{TP}=4", "cluster.gpus_per_node=4", "policy.train_micro_batch_size=1")
    (found,) = composed(bench, training(*four))
    assert "TP 4 with train_micro_batch_size 1 and logprob_batch_size 4" in found.message
    assert found.fix.startswith("use TP 1 or 2; or set policy.train_micro_batch_size and policy.logprob_batch_size")
    assert composed(bench, training(*four, "policy.logprob_batch_size=1"))[0].ok
    (found,) = composed(bench, training(f"{TP}=2", "cluster.gpus_per_node=3"))
    assert "TP 2 x PP 1 x CP 1 = 2 does not divide 3 GPUs" in found.message
    apart = ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=1")
    (found,) = composed(bench, training(f"{TP}=2", "cluster.gpus_per_node=2", *apart))
    assert "does not divide 1 GPUs" in found.message, "the other one generates"
    off = ("policy.megatron_cfg.enabled=false", f"{TP}=8")
    assert composed(bench, training(*off))[0].ok, "sizes of an engine that does not run"


def test_the_same_of_several_trainings_is_said_once(bench: Bench) -> None:
    item = ComposeRequest("resume (run)", training("grpo.x=1"), {})
    assert len(config_findings([item, item], bench.nemo_rl, [str(PYTHON)], {"PYTHONPATH": str(bench.site)}, ())) == 1


def test_a_broken_checkout_and_a_python_without_omegaconf_are_told_apart(bench: Bench) -> None:
    (broken,) = composed(bench, training(config="examples/none.yaml"))
    assert "NeMo-RL's own configuration does not compose" in broken.message
    (bare,) = config_findings([ComposeRequest("x", training(), {})], bench.nemo_rl, [str(PYTHON)], {"PYTHONPATH": ""}, ())
    assert "No module named 'omegaconf'" in bare.message
    assert "uv sync" in bare.fix
    (gone,) = config_findings([ComposeRequest("x", training(), {})], bench.nemo_rl, ["/nowhere/python"], {}, ())
    assert "could not be composed" in gone.message


def interpreter() -> str:
    named = os.environ.get("SEATRIAL_NEMO_RL_PYTHON")
    made = sorted(Path.home().glob(".cache/seatrial/envs/verl-cpu-*/bin/python"))
    if not REAL or not (named or made):
        pytest.skip("no real checkout, or no Python with omegaconf: SEATRIAL_NEMO_RL_CHECKOUT=DIR SEATRIAL_NEMO_RL_PYTHON=FILE")
    return named or str(made[0])


@pytest.mark.real
def test_no_override_of_the_real_scripts_is_rejected_or_without_effect() -> None:
    python, place = interpreter(), Path(str(REAL))
    wanted = []
    for script in sorted((place / "tests" / "functional").glob("[!L]*.sh")):
        if "chaos" in script.name or "failover" in script.name:
            continue  # they wait for a job that is to be killed
        try:
            trainings = record_script(script, place, (), {**os.environ, "HF_TOKEN": "none"}).trainings
        except ScriptError:
            continue
        wanted += [ComposeRequest(script.name, item, {}) for item in trainings]
    assert len(wanted) > 60
    assert [finding.message for finding in config_findings(wanted, place, [python], os.environ, ()) if not finding.ok] == []


@pytest.mark.real
def test_the_seed_settings_are_found_at_the_real_checkout() -> None:
    python, place = interpreter(), Path(str(REAL))
    seeds = tuple(f"policy.generation.delta_compression.{setting}" for setting in SEED)
    words = (*seeds, *(f"++{word}" for word in (*seeds, "policy.megatron_cfg.converter_type=Qwen2ForCausalLM")))
    recording = record_script(place / "tests/functional/grpo_megatron.sh", place, words, os.environ)
    found = config_findings([ComposeRequest("smoke", recording.trainings[0], {})], place, [python], os.environ, words)
    assert sum("rejects" in finding.message for finding in found) == 6
    assert sum("would be vacuous" in finding.message for finding in found) == 7
