"""The preflight of NeMo-RL: what a newcomer gets wrong is said before a GPU is touched, and with its fix."""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.core.errors import FindingCode
from seatrial.core.loop import Context
from seatrial.core.records import Finding
from seatrial.core.verdict import Boundary
from seatrial.loops import host_findings
from seatrial.loops.nemo_rl import nemo_checkout, nemo_preflight
from seatrial.loops.nemo_rl.nemo_runs import MASKING, ScriptCall, variants
from seatrial.loops.nemo_rl.script_dry_run import Training
from tests.loops.nemo_rl_checkout import Bench, on_gpus

pytestmark = pytest.mark.slow

HUB = "Qwen/Qwen2.5-0.5B"
RECIPE = "llm/grpo-llama3.2-1b-instruct-1n8g-megatron"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return on_gpus(tmp_path, monkeypatch)


def bad(context: Context) -> list[Finding]:
    return [finding for finding in nemo_preflight.nemo_findings(context) if not finding.ok]


def named(name: str, context: Context) -> list[Finding]:
    return [finding for finding in nemo_preflight.nemo_findings(context) if finding.name == name]


def test_every_level_composes(bench: Bench) -> None:
    levels = ("smoke", "lora-checkpoint", "refit", "megatron-generation", "parallelism", "learning")
    made = nemo_preflight.nemo_findings(bench.context(levels=levels))
    assert [finding.message for finding in made if not finding.ok] == []
    assert made[-1].message.startswith("14 runs composed, ")
    assert made[-1].message.endswith(" values as claimed, every override is read")


def test_every_architecture_and_a_recipe_compose(bench: Bench) -> None:
    made: list[ScriptCall] = []
    for kind in ("moe", "vlm", "audio", "eagle", "fp8", "qat"):
        made += variants("architecture", bench.context(architecture=kind))
    made += variants("parallelism", bench.context(recipe=RECIPE))
    found = nemo_preflight.configuration({"architecture": made}, bench.context(gpus="8"), bench.nemo_rl)
    assert [finding.message for finding in found if not finding.ok] == []
    assert found[-1].message.startswith("8 runs composed, ")


def test_what_is_no_checkout_hides_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_findings, "gpus_here", lambda *_: Finding(name="GPUs", ok=False, message="none"))
    (found, gpus) = bad(replace(bench.context(), options={"nemo_rl": str(bench.root)}))
    assert (found.name, found.code, found.fix) == ("NeMo-RL", FindingCode.CHECKOUT, nemo_checkout.CLONE)
    assert gpus.name == "GPUs"


def test_the_machine_is_said_to_be_incomplete_and_the_configuration_is_composed_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.which  # the caller's own PATH may have them, too
    monkeypatch.setattr(shutil, "which", lambda name: None if name in ("uv", "nvidia-smi") else real(name))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    (bench.nemo_rl / "pyproject.toml").write_text('[project]\nrequires-python = ">=3.99.1,<4"\n')
    made = nemo_preflight.nemo_findings(bench.context())
    assert [finding.name for finding in made if not finding.ok] == ["launcher", "Python", "variables", "GPUs"]
    wanted = {finding.name: finding for finding in made if not finding.ok}
    assert "requires >=3.99.1,<4" in wanted["Python"].message
    assert "uv sync" in wanted["Python"].fix
    assert "TORCH_CUDA_ARCH_LIST is not set" in wanted["variables"].message
    assert made[-1].message.startswith("1 runs composed")


def test_too_few_gpus(bench: Bench) -> None:
    (found,) = bad(bench.context(gpus="4"))
    assert (found.message, found.fix) == ("2 GPUs here, 4 wanted", "--set options.gpus=2")


def test_a_recipe_may_ask_for_more_gpus_than_are_to_be_used(bench: Bench) -> None:
    (found,) = bad(bench.context(levels=("parallelism",), recipe=RECIPE))
    assert (found.message, found.fix) == ("parallelism (run) asks for 8 GPUs, and 2 are to be used", "--set options.gpus=8")


def test_an_empty_submodule(bench: Bench) -> None:
    context = bench.context()
    (bench.nemo_rl / nemo_checkout.VENDORED / nemo_checkout.BRIDGE).rename(bench.root / "away")
    found = nemo_preflight.vendored_finding(context, bench.nemo_rl)
    assert (found.ok, found.fix) == (False, f"cd {bench.nemo_rl} && git submodule update --init --recursive")
    assert list(nemo_preflight.submodule_core(context, bench.nemo_rl)) == []
    for place in (bench.bridge, bench.nemo_rl / nemo_checkout.VENDORED):
        (place / nemo_checkout.CORE / "megatron").rename(bench.root / f"core-{place.name}")
    (found,) = nemo_preflight.submodule_core(context, bench.nemo_rl)
    assert (found.name, found.ok) == ("Megatron-LM", False)


def test_commands_that_fix_something_quote_their_paths() -> None:
    place = Path("/my checkouts/RL")
    assert shlex.split(nemo_checkout.submodules_command(place))[:3] == ["cd", str(place), "&&"]
    assert nemo_checkout.sync_command(place).endswith(" && uv sync")


def test_the_vendored_bridge_is_compared_with_the_one_under_test(bench: Bench) -> None:
    context = bench.context()
    assert "is the same as" in nemo_preflight.vendored_finding(context, bench.nemo_rl).message
    (bench.bridge / nemo_checkout.BRIDGE / "provider.py").write_text("NAME = 'changed'\n")
    (bench.bridge / nemo_checkout.BRIDGE / "new.py").touch()
    assert "in 2 files (new.py, provider.py): it stands behind it" in nemo_preflight.vendored_finding(context, bench.nemo_rl).message
    synced = replace(context, changes=(context.changes[0].model_copy(update={"synced": "x"}),))
    assert "is replaced by a copy of it" in nemo_preflight.vendored_finding(synced, bench.nemo_rl).message
    assert "no Bridge is under test" in nemo_preflight.vendored_finding(replace(context, changes=()), bench.nemo_rl).message


def test_sizes_must_divide_the_gpus_that_train(bench: Bench) -> None:
    made = nemo_preflight.nemo_findings(bench.context(levels=("parallelism",), tp="3"))
    assert [finding.message for finding in made if not finding.ok] == ["parallelism (run): TP 3 x PP 1 x CP 1 = 3 does not divide 2 GPUs"]
    assert made[-1].message == "not composed, because this must be right before: sizes"


def test_evidence_never_rests_on_a_guard_that_is_switched_off(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    word = "++policy.megatron_cfg.env_vars.NRL_IGNORE_TP_ACCURACY_CHECK=1"
    (found,) = bad(bench.context(word))
    assert "evidence must not rest on that" in found.message
    monkeypatch.setenv("NRL_IGNORE_TP_ACCURACY_CHECK", "1")
    (found,) = nemo_preflight.variable_findings(bench.context(), bench.nemo_rl)
    assert (found.ok, found.fix) == (False, "unset NRL_IGNORE_TP_ACCURACY_CHECK")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--flag",), "'--flag' is no Hydra override"),
        (("--config",), "'--config' is no Hydra override"),
        (("a.b='x y'",), "the script would split \"a.b='x y'\""),
        (("word", "--config", "x y"), "'word' is no Hydra override"),
    ],
)
def test_words_that_a_script_cannot_pass_on(bench: Bench, words: tuple[str, ...], said: str) -> None:
    assert said in [finding.message for finding in named("arguments", bench.context(*words))]


def test_a_configuration_may_be_named(bench: Bench) -> None:
    assert bad(bench.context("--config", "examples/configs/grpo_math_8B_megatron_fp8.yaml")) == []
    (found,) = bad(bench.context("--config", "examples/configs/grpo_math_1B.yaml", "++policy.dtensor_cfg.enabled=false"))
    assert "claims policy.megatron_cfg.enabled = True, and the run would have False" in found.message


def test_a_transport_that_the_checkout_does_not_have(bench: Bench) -> None:
    for path in (bench.nemo_rl / "nemo_rl").rglob("*.py"):
        path.write_text(path.read_text().replace("vllm_zmq_sparse", "other"))
    (found,) = bad(bench.context(levels=("refit",), transports="full,delta"))
    assert found.message == "refit: this NeMo-RL has no transport delta; it has full, packed, reshard"
    assert found.fix == "--set options.transports=full,packed,reshard"


def test_a_release_that_cannot_mask_sequences_needs_no_key_for_it(bench: Bench) -> None:
    """NeMo-RL 0.4 and 0.5."""
    for path in (*(bench.nemo_rl / "nemo_rl").rglob("*.py"), *(bench.nemo_rl / "examples").rglob("*.yaml")):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if MASKING not in line))
    assert bad(bench.context()) == []


def test_a_script_that_is_missing_or_fails(bench: Bench) -> None:
    place = bench.nemo_rl / "tests" / "functional" / "grpo_megatron.sh"
    place.write_text("echo no >&2; exit 3\n")
    (found,) = bad(bench.context())
    assert "smoke (run): " in found.message
    assert found.message.endswith("ended with code 3 before training: no")
    place.rename(place.with_name("grpo_megatron_renamed.sh"))
    (found,) = bad(bench.context())
    assert "tests/functional/grpo_megatron.sh is missing; similar scripts there: tests/functional/grpo_megatron" in found.message


def test_assertions_that_only_the_shell_can_tell(bench: Bench) -> None:
    """What the checker would get is compared with what was read from the script: the level judges by the latter."""
    place = bench.nemo_rl / "tests" / "functional" / "grpo_megatron.sh"
    line = "uv run tests/check_metrics.py $JSON_METRICS \"max(data['train/x']) < $BOUND\""
    place.write_text(f"{place.read_text()}BOUND=$(echo 2)\n{line}\n")
    (found,) = bad(bench.context())
    assert (found.name, found.boundary) == ("assertions", Boundary.CONFIG)
    said = "tests/functional/grpo_megatron.sh asserts max(data['train/x']) < 2, which Seatrial does not read from it"
    assert found.message == f"smoke (run): {said} (1 of 6 assertions)"


def test_the_thresholds_of_a_recipe_are_not_used_and_need_not_be_read(bench: Bench) -> None:
    place = bench.nemo_rl / "tests" / "test_suites" / f"{RECIPE}.sh"
    place.write_text(f"{place.read_text()}BOUND=$(echo 2)\nuv run tests/check_metrics.py x.json \"max(data['x']) < $BOUND\"\n")
    assert named("assertions", bench.context(levels=("parallelism",), recipe=RECIPE)) == []


def asked(*overrides: str) -> list[Training]:
    return [Training((), {}, "examples/run_grpo.py", None, overrides)]


def test_a_local_model_must_be_whole(bench: Bench) -> None:
    place = bench.root / "model"
    assert bad(bench.context(model=str(place))) == []
    (place / "tokenizer.json").unlink()
    (found, _) = nemo_preflight.named_model_findings(asked(f"policy.model_name={place}"), bench.context())
    assert (found.ok, found.message) == (False, f"{place}: no tokenizer files")
    elsewhere = asked(f"policy.model_name={place}", "policy.tokenizer.name=other")
    assert nemo_preflight.named_model_findings(elsewhere, bench.context())[0].ok
    (place / "config.json").unlink()
    found = nemo_preflight.named_model_findings(asked("policy.model_name=first", f"policy.model_name='{place}'"), bench.context())[0]
    assert (found.ok, found.message) == (False, f"{place}: config.json is missing")
    (found,) = nemo_preflight.named_model_findings(asked("policy.model_name=/none/such"), bench.context())
    assert found.message == "/none/such: no such model directory"


def test_a_model_of_the_hub(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = asked(f"policy.model_name={HUB}", "policy.draft.model_name=null")
    (found,) = nemo_preflight.named_model_findings(wanted, bench.context())
    assert found.ok
    assert found.message.endswith("NeMo-RL will download it")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (found,) = nemo_preflight.named_model_findings(wanted, bench.context())
    assert not found.ok
    assert found.message == f"{HUB}: offline, and no snapshot of it below {bench.root / 'hf' / 'hub'}"
    stored = bench.root / "hf" / "hub" / "models--Qwen--Qwen2.5-0.5B"
    for name, text in {"refs/main": "abc", "snapshots/abc/config.json": "{}"}.items():
        (stored / name).parent.mkdir(parents=True, exist_ok=True)
        (stored / name).write_text(text)
    (found,) = nemo_preflight.named_model_findings(wanted, bench.context())
    assert found.ok
    assert f"policy.model_name={stored}/snapshots/abc policy.tokenizer.name={stored}/snapshots/abc" in found.message


def test_old_environments_of_workers_are_mentioned(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(nemo_preflight.worker_environments(bench.nemo_rl)) == []
    python = bench.nemo_rl / "venvs" / "nemo_rl.Worker" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    os.utime(python, (1, 1))
    (found,) = nemo_preflight.worker_environments(bench.nemo_rl)
    assert found.ok
    assert "1 environments of Ray workers" in found.message
    assert "are older than uv.lock (nemo_rl.Worker)" in found.message
    monkeypatch.setenv("NRL_FORCE_REBUILD_VENVS", "true")
    (found,) = nemo_preflight.worker_environments(bench.nemo_rl)
    assert "are made anew" in found.message
