"""The NeMo-RL loop as a whole: options, levels that a checkout does not have, and the plan with its commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.core.records import Plan, RepoState
from seatrial.loops import environments, get_loop, loop_of
from tests.cli.command import seatrial

NAMES = ["smoke", "lora-checkpoint", "refit", "megatron-generation", "parallelism", "architecture", "learning"]


def test_the_ladder_has_seven_levels_and_the_loop_no_environment_of_ours() -> None:
    loop = get_loop("nemo-rl")
    assert [level.name for level in loop.levels()] == NAMES
    assert [level.number for level in loop.levels()] == list(range(7))
    assert loop.environment is None
    assert not any("nemo" in name for name in environments())
    assert {level.number for level in loop.levels() if level.skip} == {5}, "which architecture is not known"
    assert all(level.checks for level in loop.levels() if level.name not in ("refit", "architecture")), "their runs differ by checkout"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bridge": "copy"}, r"options\.bridge = 'copy': not one of path, sync"),
        ({"transport": "full"}, r"options\.transport: NeMo-RL has no such option.*"),
        ({"transports": "full,zmq"}, r"'zmq' is none of full, packed, reshard, delta"),
        ({"architecture": "cnn"}, r"options\.architecture = 'cnn'"),
        ({"steps": "19"}, r"options\.steps = '19'"),
        ({"tp": "0"}, r"options\.tp = '0'"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        get_loop("nemo-rl").configured(options).levels()


def test_what_a_checkout_or_a_host_does_not_have_is_skipped_with_the_reason(tmp_path: Path) -> None:
    loop = get_loop("nemo-rl").configured({"nemo_rl": str(tmp_path), "gpus": "1", "architecture": "mtp"})
    assert loop.levels()[1].title == "LoRA and checkpoint", "nothing is known of what is no checkout"
    (tmp_path / "nemo_rl").mkdir()
    (tmp_path / "nemo_rl" / "package_info.py").touch()
    skipped = {level.number: level.skip or "" for level in loop.levels() if level.skip}
    assert skipped.keys() == {2, 3, 4, 5}
    assert "does not support policy.generation.backend=megatron" in skipped[3]
    assert "no functional of NeMo-RL turns MTP on" in skipped[5]
    assert loop.levels()[1].title == "Checkpoint (LoRA blocked by NeMo-RL)"
    assert loop.levels()[0].cost.gpus == 1


def test_a_synced_bridge_is_imported_from_the_vendored_tree(tmp_path: Path) -> None:
    bridge = RepoState(name="bridge", path="/b", commit="0" * 40, branch=None, packages=("megatron.bridge",), import_root="/b/src")
    other = RepoState(name="x", path="/x", commit="0" * 40, branch=None, packages=("x",), import_root="/x")
    synced = get_loop("nemo-rl").configured({"nemo_rl": str(tmp_path), "bridge": "sync"}).placed((bridge, other))
    assert [repo.synced for repo in synced] == [str(tmp_path / "3rdparty/Megatron-Bridge-workspace/Megatron-Bridge"), None]
    assert get_loop("nemo-rl").configured({"nemo_rl": str(tmp_path)}).placed((bridge,)) == (bridge,)


def test_paths_are_stored_absolute_and_the_plan_finds_its_loop_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    loop = get_loop("nemo-rl").configured({"nemo_rl": "here", "steps": "30"})
    assert loop.chosen == {"nemo_rl": str(tmp_path / "here"), "steps": "30"}
    again = loop_of(Plan(loop="nemo-rl", levels=(), model="m", options=dict(loop.chosen)))
    assert (again.levels()[6].steps, again.checkouts()) == (30, {"nemo-rl": tmp_path / "here"})
    assert again.launcher() is None
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "ray.sub").touch()
    assert again.launcher() == tmp_path / "here" / "ray.sub"


def test_a_checkout_that_is_none_is_told_with_the_fix(tmp_path: Path) -> None:
    answer = seatrial("plan", "nemo-rl", "--nemo-rl", str(tmp_path / "nowhere"))
    assert answer.code == 2
    assert "nowhere" in answer.err
