"""Tests that go before the levels: chosen by the diff, found where they went, and never left out silently."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.core.loop import Context, SideTests
from seatrial.core.records import RepoState
from seatrial.loops.nemo_rl.loop import LOOP


def put(root: Path, *names: str, text: str = "def test_x(): ...\n") -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def context(tmp_path: Path, *changed: str, levels: tuple[str, ...] = ("smoke",), **options: str) -> Context:
    bridge = RepoState(
        name="bridge", path=str(tmp_path / "bridge"), commit="0" * 40, branch=None, packages=("megatron.bridge",), changed=changed
    )
    given = {"nemo_rl": str(tmp_path / "rl"), **options}
    return Context(run_dir=tmp_path / "run", python=Path("python"), model="m", levels=levels, changes=(bridge,), options=given)


def by_key(made: tuple[SideTests, ...]) -> dict[str, SideTests]:
    return {side.key: side for side in made}


def test_the_bridge_tests_of_the_diff_and_those_that_a_guide_names(tmp_path: Path) -> None:
    put(
        tmp_path / "bridge",
        *("tests/unit_tests/models/test_param_mapping.py", "tests/unit_tests/models/qwen/test_qwen_provider.py"),
        *("tests/unit_tests/models/qwen/test_qwen_bridge.py", "tests/unit_tests/peft/test_utils.py", "tests/unit_tests/models/test_new.py"),
    )
    changed = ("src/megatron/bridge/models/qwen/qwen_provider.py", "tests/unit_tests/models/test_new.py", "docs/x.md")
    bridge = by_key(LOOP.side_tests(context(tmp_path, *changed)))["bridge"]
    assert bridge.argv == ("uv", "run", "python", "-m", "pytest", "-q")
    assert set(bridge.files) == {
        "tests/unit_tests/models/test_param_mapping.py",
        "tests/unit_tests/models/qwen/test_qwen_provider.py",
        "tests/unit_tests/models/test_new.py",
        "tests/unit_tests/peft/test_utils.py",
    }
    assert bridge.notes == (
        "tests/unit_tests/models/test_model_provider_mixin.py is missing",
        "tests/unit_tests/training/test_integration.py is missing, tests/unit_tests/peft/test_utils.py run instead",
    )


def test_a_file_of_a_family_without_a_test_of_its_own_takes_the_family(tmp_path: Path) -> None:
    put(tmp_path / "bridge", "tests/unit_tests/models/qwen/test_qwen_bridge.py")
    bridge = by_key(LOOP.side_tests(context(tmp_path, "src/megatron/bridge/models/qwen/rotary.py")))["bridge"]
    assert bridge.files == ("tests/unit_tests/models/qwen/test_qwen_bridge.py",)


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("models/conversion/auto_bridge.py", "models/test_auto_bridge.py"),
        ("models/exaone/exaone45/modelling_exaone45/model.py", "models/exaone45/test_exaone45_bridge.py"),
        ("training/post_training/dspark/loss.py", "training/post_training/test_dspark_loss.py"),
        ("training/megatron_mimo_parallel_utils.py", "training/megatron_mimo/test_megatron_mimo_parallel_utils.py"),
        ("inference/_tokenizer.py", "inference/test_tokenizer.py"),
        ("training/checkpointing.py", "training/test_checkpointing_async.py"),
    ],
)
def test_tests_that_lie_elsewhere_are_found(tmp_path: Path, changed: str, test: str) -> None:
    """Each pair is one of the Bridge's own, of its last hundred commits."""
    put(tmp_path / "bridge", f"tests/unit_tests/{test}", "tests/unit_tests/models/other/test_model.py")
    bridge = by_key(LOOP.side_tests(context(tmp_path, f"src/megatron/bridge/{changed}")))["bridge"]
    assert bridge.files == (f"tests/unit_tests/{test}",)
    assert not any("no unit test" in note for note in bridge.notes)


def test_a_changed_file_without_any_test_is_named(tmp_path: Path) -> None:
    put(tmp_path / "bridge", "tests/unit_tests/models/test_param_mapping.py", "tests/unit_tests/utils/test_config.py")
    lacking = [f"src/megatron/bridge/training/file_{number}.py" for number in range(7)]
    unused = ("src/megatron/bridge/recipes/qwen/qwen3.py", "src/megatron/bridge/peft/__init__.py", "src/megatron/bridge/x.md")
    notes = by_key(LOOP.side_tests(context(tmp_path, *unused)))["bridge"].notes
    assert not any("no unit test" in note for note in notes)
    notes = by_key(LOOP.side_tests(context(tmp_path, "src/megatron/bridge/training/tokenizers/config.py", *unused)))["bridge"].notes
    assert notes[-1] == "no unit test was found for src/megatron/bridge/training/tokenizers/config.py"
    assert (
        by_key(LOOP.side_tests(context(tmp_path, *lacking)))["bridge"]
        .notes[-1]
        .endswith("file_3.py, src/megatron/bridge/training/file_4.py and 2 more")
    )


def test_without_any_test_nothing_is_run_and_it_is_said(tmp_path: Path) -> None:
    put(tmp_path / "rl", "README.md")
    sides = by_key(LOOP.side_tests(context(tmp_path)))
    assert "none of the focused tests exists" in (sides["bridge"].skip or "")
    assert "none of the unit tests" in (sides["nemo-rl"].skip or "")
    assert len(sides["nemo-rl"].notes) == 3


def test_unit_tests_run_once_for_each_extra_that_they_are_marked_with(tmp_path: Path) -> None:
    rl = tmp_path / "rl"
    put(rl, "tests/unit/models/megatron/test_megatron_setup.py", text="@pytest.mark.mcore\ndef test_x(): ...\n\ndef test_y(): ...\n")
    put(rl, "tests/unit/models/policy/test_megatron_worker.py", text="pytestmark = pytest.mark.mcore\n")
    put(rl, "tests/unit/utils/test_weight_transfer_stream.py", "tests/unit/utils/test_checkpoint.py")
    put(rl, "tests/unit/models/generation/test_vllm_utils.py", text="@pytest.mark.vllm\ndef test_x(): ...\n")
    sides = by_key(LOOP.side_tests(context(tmp_path, levels=("smoke", "lora-checkpoint", "refit"))))
    assert "tests/unit/models/policy/test_megatron_worker.py" not in sides["nemo-rl"].files, "all of it is marked"
    assert "tests/unit/utils/test_weight_transfer_stream.py" in sides["nemo-rl"].files
    assert "tests/unit/utils/test_checkpoint.py" in sides["nemo-rl"].files
    assert sides["nemo-rl-mcore"].argv[-4:] == ("mcore", "pytest", "-q", "--mcore-only")
    assert len(sides["nemo-rl-mcore"].files) == 2
    assert sides["nemo-rl-vllm"].files == ("tests/unit/models/generation/test_vllm_utils.py",)
    missing = [note for note in sides["nemo-rl"].notes if note.endswith(" is missing")]
    assert len(missing) == 2
    assert sides["nemo-rl-mcore"].notes == ()
    assert str(rl) in sides["nemo-rl"].env["PYTHONPATH"]


def test_the_bridge_under_test_goes_first_also_when_it_will_be_synced(tmp_path: Path) -> None:
    put(tmp_path / "rl", "tests/unit/utils/test_checkpoint.py", "tests/unit/utils/test_packed_tensor.py")
    plain = context(tmp_path)
    for synced in (None, str(tmp_path / "rl" / "vendored")):
        repo = plain.changes[0].model_copy(update={"import_root": "/b/src", "synced": synced})
        side = by_key(LOOP.side_tests(replace(plain, changes=(repo,))))["nemo-rl"]
        assert side.env["PYTHONPATH"].startswith("/b/src:")


def test_they_can_be_switched_off(tmp_path: Path) -> None:
    assert LOOP.side_tests(context(tmp_path, tests="off")) == ()
