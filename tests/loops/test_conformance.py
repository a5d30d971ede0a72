"""Which rungs and families of the conformance ladder a diff asks for, and when there is nothing to ask."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from seatrial.core.loop import Context, SideTests
from seatrial.core.records import RepoState
from seatrial.instruments.bridge.rungs import FAMILIES, TABLE
from seatrial.loops import MEGATRON_CPU, get_loop
from seatrial.loops.bridge_tests import conformance, conformance_rows

BRIDGE = "src/megatron/bridge/"
GENERAL = ["build", "import", "roundtrip", "parity"]


MAPPING = ["reload", "mapping", "order"]
BASE = "b" * 40


def repo(*changed: str, package: str = "megatron.bridge", companion: bool = False, base: str | None = None) -> RepoState:
    path, head = f"/c/{package}", "0" * 40
    return RepoState(
        name=package, path=path, commit=head, branch=None, packages=(package,), changed=changed, companion=companion, base=base
    )


def context(*changes: RepoState, built: bool = True, **options: str) -> Context:
    environments = {MEGATRON_CPU: Path("/e/python")} if built else {}
    return Context(Path("/run"), Path("python"), "m", changes=changes, options=options, environments=environments)


def words(made: SideTests, flag: str) -> list[str]:
    return [made.argv[index + 1] for index, word in enumerate(made.argv) if word == flag]


def asked(*changed: str) -> tuple[list[str], list[str]]:
    """Rungs and families."""
    (made,) = conformance(context(repo(*(f"{BRIDGE}{path}" for path in changed))))
    return words(made, "--rungs")[0].split(","), words(made, "--model")


@pytest.mark.parametrize(
    ("path", "rungs", "families"),
    [
        ("models/transformer_config.py", GENERAL, ["qwen2"]),
        ("models/qwen/qwen3_bridge.py", [*GENERAL[:3], *MAPPING, "parity"], ["qwen2", "qwen3", "qwen3-moe"]),
        ("models/qwen/qwen3_moe_bridge.py", [*GENERAL[:3], *MAPPING, "parity", "ep"], ["qwen2", "qwen3", "qwen3-moe"]),
        ("models/llama/llama_bridge.py", [*GENERAL[:3], *MAPPING, "parity"], ["llama"]),
        ("models/glm/glm45_bridge.py", [*GENERAL[:3], *MAPPING, "parity"], ["glm4-moe"]),
        ("models/conversion/auto_bridge.py", [*GENERAL, *MAPPING], ["qwen2", "qwen3-moe", "llama"]),
        ("models/conversion/param_mapping.py", [*GENERAL, *MAPPING, "tp", "pp", "sp", "ep"], ["qwen2", "qwen3-moe", "llama"]),
        ("peft/lora.py", [*GENERAL, "lora"], ["qwen2"]),
        ("models/model_provider.py", [*GENERAL, "tp", "pp", "sp"], ["qwen2"]),
        ("models/__init__.py", GENERAL, ["qwen2"]),
    ],
)
def test_a_path_asks_for_its_rungs(path: str, rungs: list[str], families: list[str]) -> None:
    assert asked(path) == (rungs, families)


def test_rows_add_up() -> None:
    assert asked("peft/lora.py", "models/model_provider.py") == ([*GENERAL, "lora", "tp", "pp", "sp"], ["qwen2"])


@pytest.mark.parametrize(
    ("path", "rungs"),
    [
        ("dist_checkpointing/mapping.py", ["checkpoint"]),
        ("optimizer/distrib_optimizer.py", ["optimizer", "policy"]),
        ("transformer/moe/router.py", ["ep"]),
        ("transformer/attention.py", []),
    ],
)
@pytest.mark.parametrize("place", ["megatron/core/", "3rdparty/Megatron-LM/megatron/core/"])
def test_a_path_of_megatron_core_asks_for_its_rungs(place: str, path: str, rungs: list[str]) -> None:
    package = "megatron.bridge" if place.startswith("3rdparty") else "megatron.core"
    (made,) = conformance(context(repo(f"{place}{path}", package=package)))
    assert words(made, "--rungs") == [",".join([*GENERAL, *rungs])]


def test_a_family_does_not_climb_what_it_fails_as_released() -> None:
    changed = [f"{BRIDGE}models/{name}.py" for name in ("olmoe/olmoe_bridge", "hy_v3/hy_v3_bridge", "model_provider")]
    first, other = conformance(context(repo(*changed)))
    assert (first.key, words(first, "--model")) == ("conformance", ["qwen2", "hy-v3"])
    assert {"tp", "sp", "pp"} <= set(words(first, "--rungs")[0].split(","))
    assert (other.key, other.name) == ("conformance-olmoe", "Bridge conformance of olmoe")
    assert words(other, "--model") == ["olmoe"]
    assert words(first, "--rungs")[0].replace("tp,pp,sp", "pp") == words(other, "--rungs")[0]
    assert other.gate


def test_every_rung_and_family_exists_and_can_be_made_here() -> None:
    assert {rung for row in conformance_rows() for rung in (*row.rungs, *row.without)} <= set(TABLE)
    assert all(row.families for row in conformance_rows() if row.without)
    assert {family for row in conformance_rows() for family in row.families} <= {
        name for name, family in FAMILIES.items() if not family.needs
    }
    assert all(row.rungs or row.families for row in conformance_rows())
    assert conformance_rows()[0].rungs
    assert conformance_rows()[0].families


def test_it_is_a_gate_of_our_own_command() -> None:
    (made,) = conformance(context(repo(f"{BRIDGE}peft/lora.py")))
    assert made.argv[:7] == (sys.executable, "-m", "seatrial.cli.main", "probe", "bridge", "--change", "bridge=/c/megatron.bridge")
    assert made.argv[-1] == "--no-tests"
    assert (made.kind, made.gate, made.blocked, made.skip, made.notes) == ("probe", True, None, None, ())


def test_megatron_is_tested_beside_the_bridge_or_alone() -> None:
    core = repo("megatron/core/tensor_parallel/layers.py", package="megatron.core")
    (made,) = conformance(context(repo(f"{BRIDGE}peft/lora.py"), core))
    assert words(made, "--change") == ["bridge=/c/megatron.bridge", "megatron=/c/megatron.core"]
    assert words(made, "--rungs") == [",".join([*GENERAL, "lora", "tp", "pp", "sp"])]
    (alone,) = conformance(context(core))
    assert words(alone, "--change") == ["megatron=/c/megatron.core"]


def test_without_a_known_base_the_general_rungs_run_and_it_is_said() -> None:
    (made,) = conformance(context(repo()))
    assert (words(made, "--rungs"), words(made, "--model")) == ([",".join(GENERAL)], ["qwen2"])
    assert "name --base" in made.notes[0]


def test_the_base_is_passed_on_to_the_probe_and_to_the_gate() -> None:
    bridge = repo(f"{BRIDGE}peft/lora.py", base=BASE)
    core = repo("megatron/core/utils.py", package="megatron.core", base="c" * 40)
    (made,) = conformance(context(bridge))
    assert (words(made, "--base"), made.bases) == ([BASE], ((bridge, BASE),))
    (both,) = conformance(context(bridge, core))
    assert (words(both, "--base"), both.bases) == ([], ((bridge, BASE), (core, "c" * 40)))
    (half,) = conformance(context(bridge, repo("megatron/core/utils.py", package="megatron.core")))
    assert half.bases == ()


def test_without_its_environment_it_is_blocked_with_the_fix() -> None:
    (made,) = conformance(context(repo(f"{BRIDGE}peft/lora.py"), built=False))
    assert made.blocked == "the environment megatron-cpu is not built: seatrial env build megatron-cpu"


@pytest.mark.parametrize(
    "given",
    [
        context(),
        context(repo("verl/x.py", package="verl")),
        context(repo(f"{BRIDGE}peft/lora.py", companion=True)),
        context(repo("docs/lora.md", f"{BRIDGE}recipes/qwen/qwen3_moe.py", f"{BRIDGE}data/x.py")),
        context(
            repo(f"{BRIDGE}training/checkpointing.py", f"{BRIDGE}models/deepseek/deepseek_v3_bridge.py", f"{BRIDGE}training/__init__.py")
        ),
        context(repo("megatron/core/ssm/mamba_mixer.py", package="megatron.core")),
        context(repo(f"{BRIDGE}peft/lora.py"), tests="off"),
    ],
    ids=["no change", "another package", "driven only", "papers", "not called", "core, not called", "switched off"],
)
def test_nothing_is_asked_for(given: Context) -> None:
    assert conformance(given) == ()
    assert get_loop("verl").side_tests(given) == ()


def test_both_loops_begin_with_it_and_fsdp2_does_not() -> None:
    given = context(repo(f"{BRIDGE}peft/lora.py"))
    for loop in (get_loop("verl"), get_loop("verl").configured({"device": "cpu"}), get_loop("nemo-rl")):
        assert loop.side_tests(given)[0].key == "conformance"
    assert get_loop("verl").configured({"device": "cpu", "strategy": "fsdp2"}).side_tests(given) == ()
