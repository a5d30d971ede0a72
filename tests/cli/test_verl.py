"""The verl loop as a whole: two sides behind one name, options, and the checkout that is driven beside the change."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.core.records import Plan
from seatrial.loops import environments, get_loop, loop_of
from tests.cli.command import inside, seatrial

NAMES = ["smoke", "save-resume", "parallelism", "megatron-fsdp", "architecture", "learning"]


def git(path: Path, *words: str) -> None:
    subprocess.run(["git", "-C", path, "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git repository that looks like verl from far away."""
    path = tmp_path / "verl"
    (path / "verl").mkdir(parents=True)
    (path / "verl" / "__init__.py").touch()
    git(path, "init", "-q", "-b", "main")
    git(path, "add", "-A")
    git(path, "commit", "-q", "-m", "one")
    return path


def test_options_of_the_loop_are_given_by_name(tmp_path: Path) -> None:
    plan = inside("plan", "verl", "--level", "5", "--opt", "device=cpu", "--opt", "steps=30", "--json", cwd=tmp_path)
    assert json.loads(plan.out)["options"] == {"device": "cpu", "steps": "30"}
    listed = inside("run", "verl", "--opt", "list", cwd=tmp_path)
    assert (listed.code, len(listed.out.splitlines())) == (0, len(get_loop("verl").options))
    assert "steps=20..100 (default: 20)  steps of level 5" in listed.out
    for words, said in (
        (("--opt", "step=30"), "options.step: verl has no such option; known: device, "),
        (("--opt", "steps=3"), "options.steps = '3': not a whole number from 20 to 100"),
        (("--opt", "steps"), "--opt 'steps' is not of the form NAME=VALUE"),
        (("--device", "cpu", "--opt", "device=gpu"), "the option device is given twice"),
    ):
        wrong = inside("plan", "verl", *words, cwd=tmp_path)
        assert (wrong.code, said in wrong.err, "  fix: " in wrong.err) == (2, True, True), wrong.err


def test_both_sides_have_the_same_ladder_under_one_name() -> None:
    gpu = get_loop("verl")
    cpu = gpu.configured({"device": "cpu"})
    assert [level.name for level in gpu.levels()] == [level.name for level in cpu.levels()] == NAMES
    assert [level.number for level in cpu.levels()] == list(range(6))
    assert (gpu.environment, cpu.environment) == (None, "verl-cpu")
    assert "verl-cpu" in environments()
    assert gpu.faults() == {}
    assert cpu.faults()


def test_levels_that_a_cpu_cannot_run_say_why() -> None:
    cpu = get_loop("verl").configured({"device": "cpu"})
    assert {level.number for level in cpu.levels() if not level.skip} == {0, 1, 5}
    assert all(len(level.skip) > 40 for level in cpu.levels() if level.skip)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, r"options\.device = 'tpu': not one of gpu, cpu"),
        ({"gpu": "4"}, r"options\.gpu: verl has no such option"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        get_loop("verl").configured(options)


@pytest.mark.parametrize(("name", "value"), [("gpus", "0"), ("gpus", "many"), ("steps", "19"), ("steps", "101")])
def test_a_wrong_number_is_2(name: str, value: str) -> None:
    answer = inside("plan", "verl", "--set", f"options.{name}={value}")
    assert (answer.code, answer.out) == (2, "")
    assert f"options.{name} = '{value}': not a whole number" in answer.err


def test_paths_are_stored_absolute_and_the_plan_finds_its_loop_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    loop = get_loop("verl").configured({"verl": "here", "gpus": "2", "train_files": "t.parquet"})
    assert loop.chosen == {"verl": str(tmp_path / "here"), "gpus": "2", "train_files": str(tmp_path / "t.parquet")}
    again = loop_of(Plan(loop="verl", levels=(), model="m", options=dict(loop.chosen)))
    assert (again.chosen, again.checkouts()) == (loop.chosen, {"verl": tmp_path / "here"})
    assert again.levels()[0].cost.gpus == 2, "a cluster is asked for the GPUs that are used"


def test_the_driven_checkout_is_a_companion_and_its_diff_counts_for_nothing(checkout: Path, tmp_path: Path) -> None:
    (checkout / "verl" / "new.py").write_text("x = 1\n")
    bridge = tmp_path / "bridge"
    (bridge / "src" / "megatron" / "bridge").mkdir(parents=True)
    (bridge / "src" / "megatron" / "bridge" / "__init__.py").touch()
    git(bridge, "init", "-q", "-b", "main")
    git(bridge, "add", "-A")
    git(bridge, "commit", "-q", "-m", "one")
    answer = seatrial("plan", "verl", "--verl", str(checkout), "--change", f"bridge={bridge}", "--auto", "--json")
    assert answer.code == 0, answer.err
    plan = json.loads(answer.out)
    assert [(repo["name"], repo["companion"], repo["packages"]) for repo in plan["changes"]] == [
        ("bridge", False, ["megatron.bridge"]),
        ("verl", True, ["verl"]),
    ]
    assert not any("verl/new.py" in reason for level in plan["levels"] for reason in level["reasons"])
    assert plan["options"]["verl"] == str(checkout)


def test_a_checkout_that_is_under_test_is_no_companion(checkout: Path) -> None:
    answer = inside("plan", "verl", "--verl", str(checkout), "--change", f"verl={checkout}", "--json")
    assert [(repo["name"], repo["companion"]) for repo in json.loads(answer.out)["changes"]] == [("verl", False)]


@pytest.mark.parametrize("place", ["nowhere", "."])
def test_what_is_no_checkout_is_2(tmp_path: Path, place: str) -> None:
    answer = inside("run", "verl", "--verl", str(tmp_path / place), "--level", "0")
    assert answer.code == 2
    assert "fix:" in answer.err
    assert not (tmp_path / "trials").exists()


def test_two_checkouts_of_one_name_are_2_and_leave_nothing(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    subprocess.run(["git", "clone", "-q", checkout, other], check=True)
    answer = inside("run", "verl", "--verl", str(checkout), "--change", f"verl={other}", "--level", "0")
    assert (answer.code, "leave out --verl" in answer.err) == (2, True)
    answer = inside("run", "verl", "--change", f"verl={checkout}", "--change", f"verl={other}", "--level", "0")
    assert (answer.code, "two changes are called verl" in answer.err) == (2, True)
    assert not (tmp_path / "trials").exists()


@pytest.mark.real  # the preflight asks the environment that `seatrial env build` makes
def test_a_change_that_is_not_what_its_name_says_is_blocked(checkout: Path) -> None:
    answer = seatrial("doctor", "verl", "--device", "cpu", "--change", f"bridge={checkout}")
    assert answer.code == 99
    assert f"fix: --change verl={checkout}" in answer.out


def test_faults_are_those_of_the_cpu() -> None:
    answer = inside("run", "verl", "--fault", "list")
    assert (answer.code, "seatrial run verl --device cpu --fault list" in answer.err) == (2, True)
    assert "stale-generator" in inside("run", "verl", "--device", "cpu", "--fault", "list").out


def test_a_level_that_is_skipped_is_not_blocked_by_its_preflight(tmp_path: Path) -> None:
    answer = inside("run", "verl", "--level", "4", "--out", str(tmp_path / "run"))
    assert answer.code == 77, answer.err
    assert "say which" in answer.out
