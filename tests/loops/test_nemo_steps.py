"""Runs whose numbers meet every threshold, although steps are missing, repeated, or compared with themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.core.series import Metrics, Series
from seatrial.core.verdict import Boundary
from seatrial.loops.nemo_rl.nemo_metrics import agreed
from tests.loops.test_nemo_proofs import GRPO, MEGATRON, Bench, config, ended, whole

GENERATION: dict[str, Any] = {"policy": {**MEGATRON["policy"], "generation": {"backend": "megatron"}}}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A whole run of level 0."""
    made = Bench(tmp_path)
    made.add("run", GRPO, config(MEGATRON) + ended(3))
    whole(made)
    return made


@pytest.mark.parametrize(
    ("tag", "steps", "words"),
    [
        ("train/loss", (2, 3), "train/loss: none at step 1"),
        ("train/loss", (1, 3), "train/loss: none at step 2"),
        ("train/token_mult_prob_error", (1, 2), "train/token_mult_prob_error: none at step 3"),
        ("train/grad_norm", (1,), "train/grad_norm: none at step 2, 3"),
    ],
)
def test_a_step_that_was_not_logged(bench: Bench, tag: str, steps: tuple[int, ...], words: str) -> None:
    """A run that was resumed from elsewhere, a hole, a metric that the logger skipped."""
    bench.series[tag] = Series(tag, steps, tuple(1.0 + step / 100 for step in steps))
    assert words in bench.missed()["every step was logged"].message


def test_fewer_steps_than_the_configuration_says(bench: Bench) -> None:
    bench.log("run", lambda text: text.replace("'policy':", "'grpo': {'max_num_steps': 4}, 'policy':", 1))
    assert "train/loss: none at step 4" in bench.missed()["every step was logged"].message


def test_a_step_that_repeats_the_one_before(bench: Bench) -> None:
    for tag in ("train/loss", "train/grad_norm", "train/token_mult_prob_error"):
        first, second, _ = GRPO[tag]
        bench.put(tag, first, second, second)
    missed = bench.missed()["no step repeats another"]
    assert missed.message == "all numbers of step 3 are those of the step before: nothing new was computed"
    bench.put("train/approx_entropy", 0.5, 0.6, 0.7)
    assert "no step repeats another" not in bench.missed()


def test_a_step_without_a_gradient_although_there_was_something_to_learn(bench: Bench) -> None:
    bench.put("train/grad_norm", 0.3, 0.0, 0.2)
    assert "no gradient at step 2" in bench.missed()["a gradient and a learning rate"].message
    bench.put("train/advantages/max", 1.0, 0.0, 1.0)
    bench.put("train/advantages/min", -1.0, 0.0, -1.0)
    assert "a gradient and a learning rate" not in bench.missed()


def test_a_training_that_failed_before_the_one_that_is_shown(bench: Bench) -> None:
    bench.log("run", lambda text: config(MEGATRON) + "ValueError: boom\n" + text)
    assert bench.missed()["each run was trained once (run)"].value == "2 trainings, 1 runs with metrics"


def test_a_generator_that_is_compared_with_itself(bench: Bench, tmp_path: Path) -> None:
    bench.put("train/token_mult_prob_error", 1.0, 1.0, 1.0)
    missed = bench.missed()["generator and trainer are two computations"]
    assert missed.boundary is Boundary.CONFIG
    assert "exactly 1" in missed.message
    (tmp_path / "run" / "run.log").write_text(config(GENERATION) + ended(3))  # one engine may agree with itself
    assert "generator and trainer are two computations" not in bench.proofs()


@pytest.mark.parametrize("largest", [1.2, float("nan")])
def test_an_error_that_neither_script_nor_level_bounds(largest: float) -> None:
    metrics = Metrics(series={"lora/train/token_mult_prob_error": Series("lora/train/token_mult_prob_error", (1,), (largest,))})
    found = agreed("lora/", metrics, ('max(data["train/token_mult_prob_error"]) < 1.05',))
    assert found is not None
    assert not found.passed
    assert found.boundary is Boundary.REFIT
    assert agreed("lora/", metrics, ("max(data['lora/train/token_mult_prob_error']) < 2",)) is None


@pytest.mark.parametrize(("place", "missed"), [("{level}/converted/Qwen/Qwen2.5-0.5B", False), ("/root/.cache/nemo_rl/Qwen/Q", True)])
def test_a_model_that_another_bridge_may_have_converted(bench: Bench, place: str, missed: bool) -> None:
    path = place.format(level=bench.directory)
    bench.log("run", lambda text: f"(W pid=1) Checkpoint already exists at {path}. Skipping import.\n" + text)
    found = bench.proofs()["the Bridge under test converted the model (run)"]
    assert found.passed is not missed
    assert found.boundary is Boundary.CONFIG
    if missed:
        assert found.message.startswith(f"{path} was made by an earlier run")


def test_a_model_that_nothing_shows_to_be_converted(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence proves nothing; and a trial is judged where the user's own place is set no more."""
    made, name = bench.directory / "converted", "the Bridge under test converted the model (run)"
    made.rename(tmp_path / "away")
    (made / "Qwen" / "iter_0000000").mkdir(parents=True)
    assert list(bench.missed()) == [name], "a folder alone is none"
    assert bench.missed()[name].message == f"{made} holds none: the import of the Bridge under test was not exercised"
    own = tmp_path / "scratch" / f"seatrial-{bench.directory.parents[1].name}" / bench.directory.name / "converted"
    own.parent.mkdir(parents=True)
    (tmp_path / "away").rename(own)
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "scratch"))
    assert bench.missed() == {}
    monkeypatch.delenv("NRL_MEGATRON_CHECKPOINT_DIR")
    assert list(bench.missed()) == [name]
    bench.log("run", lambda text: f"(W pid=1) Using default megatron checkpoint dir: {own}\n" + text)
    assert bench.missed() == {}


@pytest.mark.parametrize(
    ("level", "settings", "name", "value"),
    [
        ("parallelism", {"tensor_model_parallel_size": 1}, "the model was split", "all sizes 1"),
        ("parallelism", {"context_parallel_size": 2}, "", "cp 2"),
        ("architecture", {"expert_model_parallel_size": 1}, "the architecture's own path was turned on", "nothing"),
        ("architecture", {"mtp_num_layers": None, "fp8_cfg": {"enabled": False}}, "the architecture's own path was turned on", "nothing"),
        ("architecture", {"mtp_num_layers": 1}, "", "mtp"),
        ("architecture", {"expert_model_parallel_size": 8}, "", "moe"),
    ],
)
def test_a_recipe_that_does_not_do_what_its_level_is_about(
    bench: Bench, level: str, settings: dict[str, Any], name: str, value: str
) -> None:
    bench.level = level
    content = {"policy": {**MEGATRON["policy"], "megatron_cfg": {"enabled": True, "peft": {"enabled": True}, **settings}}}
    bench.log("run", lambda _: config(content) + ended(3))
    assert list(bench.missed()) == ([name] if name else [])
    titles = {"parallelism": "the model was split", "architecture": "the architecture's own path was turned on"}
    assert bench.proofs()[titles[level]].value == value


def test_a_vision_recipe_is_known_by_its_configuration(bench: Bench) -> None:
    bench.level = "architecture"
    line = "2026-11-15T14:25:14.432Z Loaded configuration from: /audio/{}/grpo-qwen.yaml\n"
    bench.log("run", lambda text: line.format("llm") + text)
    assert list(bench.missed()) == ["the architecture's own path was turned on"]
    bench.log("run", lambda text: text.replace("/llm/", "/vlm/"))
    assert bench.missed() == {}


@pytest.mark.parametrize(
    ("sampling", "count", "missed"),
    [
        ({"top_p": 1.0, "top_k": None}, 1, True),
        ({"top_p": 1.0, "top_k": -1}, 1, True),
        ({"top_p": 0.9, "top_k": None}, 1, False),
        ({"top_p": 1.0, "top_k": 50}, 20, True),
        ({}, 0, False),
    ],
)
def test_tokens_that_the_trainer_calls_impossible(bench: Bench, sampling: dict[str, Any], count: int, missed: bool) -> None:
    content = {"policy": {**MEGATRON["policy"], "generation": sampling}}
    line = f"(W pid=1) [WARNING]: {count}/1000 valid tokens have -inf in prev_logprobs (policy top-k/top-p mismatch). Masking out\n"
    bench.log("run", lambda _: config(content) + line + ended(3))
    assert list(bench.missed()) == (["the trainer can sample what was generated (run)"] if missed else [])
