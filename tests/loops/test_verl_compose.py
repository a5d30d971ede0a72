"""The script of the checkout with stand-ins for python3 and uv, and the configuration that Hydra makes of what they record.

With SEATRIAL_VERL_CHECKOUT=DIR (and SEATRIAL_VERL_PYTHON, a Python with verl's dependencies) the same is done with a real
checkout and the real Hydra.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from seatrial.checks.probe_facts import claim_holds
from seatrial.core.loop import Context
from seatrial.core.records import Finding
from seatrial.loops.verl import gpu_runs, verl_checkout
from seatrial.loops.verl import gpu_side as wrapper
from seatrial.loops.verl.gpu_side import MACHINE, HydraRequest, ScriptError, ScriptRecording, compose, record_script
from tests.loops.verl_checkout import PYTHON, Bench, level, make_bench

HYDRA = """
from contextlib import nullcontext

from hydra.errors import HydraException

KNOWN = {"lora": {"rank": 0, "alpha": 0}, "trainer": {"nnodes": 1}}


def initialize_config_dir(directory, version_base):
    return nullcontext()


def compose(config_name, overrides):
    made = {key: dict(value) for key, value in KNOWN.items()}
    if config_name == "broken":
        raise HydraException("the defaults list is broken")
    for word in overrides:
        key, _, value = word.partition("=")
        part, _, name = key.partition(".")
        if name not in made.get(part, {}):
            raise HydraException(f"Could not override '{key}'.")
        made[part][name] = int(value)
    return made
"""
OMEGACONF = """
class OmegaConf:
    @staticmethod
    def to_container(config, resolve):
        return config

    @staticmethod
    def is_config(value):
        return isinstance(value, dict)

    @staticmethod
    def select(config, key, default):
        part, _, name = key.partition(".")
        return config.get(part, {}).get(name, default)
"""


@pytest.fixture
def hydra(tmp_path: Path) -> dict[str, str]:
    """Variables that give an interpreter a small stand-in for Hydra."""
    place = tmp_path / "site"
    for name, text in {
        "hydra/__init__.py": HYDRA,
        "hydra/errors.py": "class HydraException(Exception): ...\n",
        "omegaconf/__init__.py": OMEGACONF,
        "omegaconf/errors.py": "class OmegaConfBaseException(Exception): ...\n",
    }.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return {"PYTHONPATH": str(place), "PATH": os.environ["PATH"]}


def composed(hydra: dict[str, str], *overrides: str, name: str = "good", own: tuple[str, ...] = (), **claims: object) -> list[Finding]:
    recording = ScriptRecording(("python3", "-m", "verl.trainer.main_ppo", f"--config-name={name}", *overrides), {})
    wanted = HydraRequest("smoke (run)", recording, {key.replace("_", "."): value for key, value in claims.items()})
    return compose([wanted], Path(hydra["PYTHONPATH"]), [str(PYTHON)], hydra, own)


def test_a_configuration_that_composes_is_one_good_finding(hydra: dict[str, str]) -> None:
    (found,) = composed(hydra, "lora.rank=4", "hydra.run.dir=x", lora_rank="> 0", trainer_nnodes=1)
    assert found.ok
    assert found.message == "1 runs composed, 2 values as claimed"


def test_every_rejected_override_is_named_with_the_nearest_key(hydra: dict[str, str]) -> None:
    words = ("lora.rnk=4", "lora.rank=1", "trainer.nodes=2", "trainer.nnodes=3", "other.thing=1")
    found = composed(hydra, *words, own=("trainer.nodes=2",))
    assert [("rejects " + word) in finding.message for finding, word in zip(found, words[::2], strict=True)] == [True] * 3
    assert "nearest known: lora.rank" in found[0].message
    assert "different versions" in found[0].fix
    assert "correct it" in found[1].fix, "the user's own"
    assert not any(finding.ok for finding in found)


def test_a_value_that_is_not_as_claimed_is_a_finding(hydra: dict[str, str]) -> None:
    (found,) = composed(hydra, "lora.rank=4", "lora.rank=0", own=("lora.rank=0",), lora_rank="> 0")
    assert "claims lora.rank = > 0, and the run would have 0" in found.message
    assert "leave lora.rank=0 out" in found.fix
    (absent,) = composed(hydra, lora_other=True)
    assert "(no such key)" in absent.message


def test_a_broken_checkout_and_a_python_without_hydra_are_told_apart(hydra: dict[str, str]) -> None:
    (broken,) = composed(hydra, name="broken")
    assert "does not compose: the defaults list is broken" in broken.message
    (bare,) = composed({**hydra, "PYTHONPATH": str(Path(hydra["PYTHONPATH"]).parent)})
    assert "No module named 'hydra'" in bare.message
    assert "hydra-core" in bare.fix
    gone = compose([], Path("/"), ["/nowhere/python"], {}, ())
    assert "could not be composed" in gone[0].message


@pytest.mark.parametrize(
    ("claimed", "value", "held"),
    [
        (True, True, True),
        (True, 1, False),
        (4, 4, True),
        (4, "4", False),
        ("> 0", 8, True),
        ("> 0", 0, False),
        ("> 0", None, False),
        ("> 0", True, False),
        (">= 2", 2, True),
        (">= 2", 1, False),
        ("/a", ["/a"], True),
        ("/a", ["/a", "/b"], False),
        (["console", "file"], ["console"], False),
    ],
)
def test_claims_are_strict_about_types(claimed: object, value: object, held: bool) -> None:
    assert claim_holds(claimed, value) is held


def run_script(bench: Bench, context: Context, name: str = "smoke") -> ScriptRecording:
    phase = gpu_runs.phases(level(name), context, bench.level_directory(name))[1]
    environment = {**os.environ, **phase.env, "PYTHONPATH": verl_checkout.python_path(context)}
    return record_script(context_checkout(context) / phase.argv[1], context_checkout(context), phase.argv[2:], environment)


def context_checkout(context: Context) -> Path:
    found = verl_checkout.checkout_of(context)
    assert found is not None
    return found


def assert_level_0(recording: ScriptRecording, context: Context) -> None:
    """The contract with the wrapper: what it makes of our variables and arguments."""
    words = recording.overrides()
    last = dict(word.lstrip("+").partition("=")[::2] for word in words)
    assert recording.config_name() == "ppo_megatron_trainer.yaml"
    assert last["actor_rollout_ref.model.path"] == last["critic.model.path"] == str(Path(context.model))
    assert last["actor_rollout_ref.model.lora.rank"] == last["critic.model.lora.rank"] == "4"
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        assert last[f"{role}.megatron.use_mbridge"] == "True"
        assert last[f"{role}.megatron.vanilla_mbridge"] == "False"
        assert last[f"{role}.megatron.use_megatron_fsdp"] == "False"
        assert last[f"{role}.megatron.virtual_pipeline_model_parallel_size"] == "null"
        for part in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor"):
            assert last[f"{role}.megatron.{part}_parallel_size"] == "1"
    assert last["trainer.logger"] == "[console,file]"
    assert last["trainer.n_gpus_per_node"] == "8"
    assert last["trainer.total_training_steps"] == "1"
    assert last["global_profiler.steps"] == "null"
    assert last["reward.reward_model.enable"] == "False"
    assert recording.environment["PYTHONPATH"] == f"/workspace/Megatron-LM:{verl_checkout.python_path(context)}"
    assert recording.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_the_script_passes_on_what_a_level_sets(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    context = bench.context("trainer.seed=7")
    recording = run_script(bench, context)
    assert_level_0(recording, context)
    assert recording.launch() == ("python3",)
    assert recording.argv[-1] == "trainer.seed=7"


def test_with_uv_the_script_starts_everything_through_it(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    context = bench.context(launcher="uv")
    recording = run_script(bench, context)
    extras = verl_checkout.extras("vllm")
    assert recording.launch() == ("uv", *verl_checkout.uv_words(extras), "python3")
    key = "ray_kwargs.ray_init.runtime_env.py_executable="
    assert key + str(verl_checkout.worker_command(context, extras)) in recording.argv


def test_a_dummy_model_is_made_before_training(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    recording = run_script(bench, bench.context(model_config=str(tmp_path / "model" / "config.json")))
    assert f"actor_rollout_ref.model.path={bench.level_directory('smoke') / 'dummy_model'}" in recording.argv


def test_a_script_that_fails_or_hangs_shows_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.sh"
    script.write_text("set -xeu\necho $GONE\n")
    with pytest.raises(ScriptError, match="GONE: unbound variable"):
        record_script(script, tmp_path, (), os.environ)
    script.write_text("sleep 20 | cat\necho on\n")
    monkeypatch.setattr("seatrial.loops.verl.gpu_side.SCRIPT_SECONDS", 0.1)
    with pytest.raises(ScriptError, match="timed out"):
        record_script(script, tmp_path, (), os.environ)


# A real checkout.


@pytest.fixture
def real(tmp_path: Path) -> Bench:
    """A bench whose verl is the real checkout."""
    named = os.environ.get("SEATRIAL_VERL_CHECKOUT")
    if not named:
        pytest.skip("no real checkout: SEATRIAL_VERL_CHECKOUT=DIR")
    return make_bench(tmp_path)


def real_context(bench: Bench, *arguments: str, levels: tuple[str, ...] = ("smoke",), **options: str) -> Context:
    python = Path(os.environ.get("SEATRIAL_VERL_PYTHON", PYTHON))
    made = bench.context(*arguments, levels=levels, python=python, **options, verl=os.environ["SEATRIAL_VERL_CHECKOUT"])
    return Context(**{**{name: getattr(made, name) for name in made.__slots__}, "changes": made.changes[:1]})


def test_the_real_wrapper_has_the_interface_of_the_fixture(real: Bench) -> None:
    context = real_context(real)
    assert_level_0(run_script(real, context), context)
    uv = run_script(real, real_context(real, launcher="uv"))
    assert uv.launch() == ("uv", *verl_checkout.uv_words(verl_checkout.extras("vllm")), "python3")


def test_the_real_configuration_composes_on_every_level(real: Bench) -> None:
    if "SEATRIAL_VERL_PYTHON" not in os.environ:
        pytest.skip("no Python with verl's dependencies: SEATRIAL_VERL_PYTHON=FILE")
    (real.root / "model" / "config.json").write_text('{"num_experts": 8, "vision_config": {"depth": 1}, "mtp_num_layers": 1}')
    for name in ("train.parquet", "test.parquet"):
        (real.root / name).write_bytes(b"PAR1 images" + (6).to_bytes(4, "little") + b"PAR1")
    plain = ("smoke", "save-resume", "parallelism", "megatron-fsdp", "learning")
    for levels, options in (
        (plain, {}),
        (("architecture",), {"architecture": "moe"}),
        (("architecture",), {"architecture": "vlm"}),
        (("architecture",), {"architecture": "mtp", "engine": "sglang"}),
    ):
        found = wrapper.findings(real_context(real, levels=levels, **options))
        assert [finding for finding in found if not finding.ok and finding.code not in MACHINE] == []
        assert found[-1].message.endswith("values as claimed")
    rejected = wrapper.findings(real_context(real, "actor_rollout_ref.model.lora.rnk=3", "actor_rollout_ref.model.lora.rank=0"))
    wrong = [finding.message for finding in rejected if finding.name == "configuration"]
    assert len(wrong) == 2
    assert "nearest known: actor_rollout_ref.model.lora.rank" in wrong[0]
    assert "the run would have 0" in wrong[1]
