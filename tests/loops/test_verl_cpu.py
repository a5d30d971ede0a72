"""The CPU side: its phases, what may be overridden, and the parts of its driver that need no verl."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from seatrial.loops import get_loop
from seatrial.loops.verl import cpu
from seatrial.loops.verl.cpu_claims import claims
from seatrial.loops.verl.drive import gains, reward, train
from seatrial.loops.verl.drive.fault_names import FAULTS
from seatrial.model.errors import UserError
from seatrial.model.knowledge import Level
from seatrial.model.loop import Context, Phase
from seatrial.model.series import Metrics, Series

VERL = get_loop("verl").configured({"device": "cpu"})
LEVELS = {level.name: level for level in VERL.levels()}
RUNNABLE = [level for level in VERL.levels() if not level.skip]
RUN = Path("/runs/a b")


def phases(level: Level, **changes: Any) -> tuple[Phase, ...]:
    context = Context(run_dir=RUN, python=Path("/env/bin/python"), model="tiny-dense", **changes)
    return VERL.phases(level, context, RUN / "levels" / f"{level.number}-{level.name}")


def setting(phase: Phase, key: str) -> str:
    """The last value of an override: the one that counts."""
    return [word.partition("=")[2] for word in phase.argv if word.lstrip("+").partition("=")[0] == key][-1]


@pytest.mark.parametrize("level", RUNNABLE, ids=lambda level: level.name)
def test_every_level_has_complete_commands(level: Level) -> None:
    made = phases(level, arguments=("actor_rollout_ref.actor.clip_ratio=0.3",))
    assert len({phase.name for phase in made}) == len(made) == 2
    for phase in made:
        out = RUN / "levels" / f"{level.number}-{level.name}" / phase.name
        assert phase.argv[:3] == ("/env/bin/python", "-m", "seatrial.loops.verl.drive.train")
        assert phase.argv[-1] == "actor_rollout_ref.actor.clip_ratio=0.3"
        assert setting(phase, "trainer.total_training_steps") == str(phase.steps)
        assert phase.env["SEATRIAL_FACTS"] == str(out / "facts.jsonl")
        assert phase.env["VERL_FILE_LOGGER_PATH"] == str(out / "metrics.jsonl")
        assert phase.env["VERL_USE_EXTERNAL_MODULES"].split(",")[1:] == list(cpu.PLUGINS)
        assert "SEATRIAL_FAULT" not in phase.env
        assert phase.processes == ("driver", "worker")
    assert made[-1].steps == level.steps


def test_the_second_run_resumes_where_the_first_saved() -> None:
    full, resumed = phases(LEVELS["save-resume"])
    assert setting(full, "trainer.save_freq") == "2"
    assert option(resumed, "--resume-from") == f"{option(full, '--out')}/checkpoints/global_step_2"
    assert {word for word in full.argv if "resume" not in word and "/full" not in word} <= set(resumed.argv)


def option(phase: Phase, name: str) -> str:
    return phase.argv[phase.argv.index(name) + 1]


def test_the_control_differs_from_the_learning_run_in_its_rate_and_length_only() -> None:
    control, learn = phases(LEVELS["learning"])
    assert setting(control, "actor_rollout_ref.actor.optim.lr") == "0"
    own = {word.partition("=")[0] for word in set(control.argv) ^ set(learn.argv) if "=" in word}
    assert own == {"actor_rollout_ref.actor.optim.lr", "trainer.total_training_steps", "trainer.test_freq"}


@pytest.mark.parametrize(("run", "empty"), [("control", False), ("learn", True), ("grpo", True)])
def test_only_the_control_may_learn_nothing(run: str, empty: bool) -> None:
    metrics = Metrics(series={f"{run}/actor/lr": Series("", (1, 2), (0.0, 0.0))})
    assert (VERL.vacuous(metrics) is not None) == empty


@pytest.mark.parametrize(("steps", "ok"), [("20", True), ("100", True), ("19", False), ("101", False), ("many", False)])
def test_level_5_takes_20_to_100_steps(steps: str, ok: bool) -> None:
    chosen = get_loop("verl").configured({"device": "cpu", "steps": steps})
    if not ok:
        with pytest.raises(UserError, match="from 20 to 100"):
            chosen.levels()
        return
    assert next(level for level in chosen.levels() if level.name == "learning").steps == int(steps)


def test_levels_without_a_gpu_say_why_they_are_skipped() -> None:
    skipped = [level for level in VERL.levels() if level.skip]
    assert [level.number for level in skipped] == [2, 3, 4]
    assert all("GPU" in str(level.skip) for level in skipped)
    with pytest.raises(AssertionError):
        phases(skipped[0])


def test_a_fault_reaches_every_process() -> None:
    made = phases(LEVELS["smoke"], options={"fault": "frozen"})
    assert {phase.env["SEATRIAL_FAULT"] for phase in made} == {"frozen"}
    assert all(set(levels) <= {level.number for level in RUNNABLE} for _, levels in FAULTS.values())


@pytest.mark.parametrize(
    ("word", "ok"),
    [
        ("actor_rollout_ref.actor.clip_ratio=0.3", True),
        ("+algorithm.gamma=0.9", True),
        ("trainer.total_training_steps=9", False),
        ("++trainer.v1.sampler.custom_sampler.name=Other", False),
        ("~reward.custom_reward_function", False),
        ("actor_rollout_ref.rollout.n=2", False),
        ("--help", False),
        ("clip_ratio", False),
    ],
)
def test_overrides_that_a_proof_rests_on_are_refused(word: str, ok: bool) -> None:
    made = VERL.findings(Context(run_dir=RUN, python=Path("/p"), model="tiny-dense", arguments=(word,)))
    assert [finding.ok for finding in made] == ([True] if ok else [False, True])
    assert all(finding.ok or finding.fix for finding in made)


def test_a_given_model_must_be_there(tmp_path: Path) -> None:
    context = Context(run_dir=RUN, python=Path("/p"), model=str(tmp_path))
    assert not VERL.findings(context)[-1].ok
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert VERL.findings(context)[-1].ok
    assert len(VERL.limitations(LEVELS["smoke"], context)) == 3


@pytest.mark.parametrize("level", RUNNABLE, ids=lambda level: level.name)
def test_the_commands_set_what_is_claimed(level: Level) -> None:
    for phase in phases(level):
        for key, value in claims(phase.name, phase.steps or 0).items():
            if key.startswith(("trainer.use_v1", "trainer.v1.", "reward.", "actor_rollout_ref.rollout.load_format")) or value == 0:
                continue  # verl's own defaults
            assert setting(phase, key) == str(value), key


def dump(directory: Path, step: int, scores: dict[str, list[float]]) -> None:
    (directory / "validation").mkdir(parents=True, exist_ok=True)
    rows = [{"input": prompt, "score": score} for prompt, each in scores.items() for score in each]
    (directory / "validation" / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_gains_are_paired_by_prompt(tmp_path: Path) -> None:
    for name, end in (("control", [0.5]), ("learn", [0.75, 1.0])):
        dump(tmp_path / name, 0, {"b": [0.5], "a": [0.25]})
        dump(tmp_path / name, 9, {"a": [0.25], "b": end})
        gains.write(tmp_path / name, tmp_path / "control" if name == "learn" else None)
    rows = [json.loads(line) for line in (tmp_path / "learn" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["data"] for row in rows] == [
        {"signal/gain": 0.0, "signal/gain_over_control": 0.0},
        {"signal/gain": 0.375, "signal/gain_over_control": 0.375},
    ]


def test_gains_of_other_prompts_are_refused(tmp_path: Path) -> None:
    dump(tmp_path / "one", 0, {"a": [0.5]})
    dump(tmp_path / "one", 2, {"b": [0.5]})
    with pytest.raises(RuntimeError, match="not the same ones"):
        gains.write(tmp_path / "one", None)
    dump(tmp_path / "two", 0, {"b": [0.5]})
    dump(tmp_path / "two", 2, {"b": [0.5]})
    dump(tmp_path / "three", 0, {"c": [0.5]})
    dump(tmp_path / "three", 2, {"c": [0.5]})
    with pytest.raises(RuntimeError, match="different prompts"):
        gains.write(tmp_path / "two", tmp_path / "three")


@pytest.mark.parametrize(("text", "score"), [("", 0.0), ("bd", 1.0), ("abcd", 0.5), ("\U0001f600", 1.0)])
def test_the_reward_is_the_share_of_even_characters(text: str, score: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEATRIAL_FACTS", str(tmp_path / "facts.jsonl"))
    assert reward.compute_score(data_source="train", solution_str=text, ground_truth="x", extra_info={}) == score
    assert json.loads((tmp_path / "facts.jsonl").read_text(encoding="utf-8")) == {"fact": "reward", "split": "train", "score": score}


def test_faults_of_the_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEATRIAL_FACTS", str(tmp_path / "facts.jsonl"))
    monkeypatch.setenv("SEATRIAL_FAULT", "constant-reward")
    assert {reward.compute_score("train", text, "x") for text in ("", "a", "b")} == {0.5}
    monkeypatch.setenv("SEATRIAL_FAULT", "reward-raises")
    failed = 0
    for number in range(30):
        try:
            reward.compute_score("train", "b", f"prompt {number}")
        except RuntimeError:
            failed += 1
    assert 0 < failed < 30


def test_the_driver_removes_what_dead_runs_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "SHORT", str(tmp_path))
    for name in ("str-999999999-a", "str-999999999-new", f"str-{os.getpid()}-b", "str-x-c", "other"):
        (tmp_path / name).mkdir()
        if not name.endswith("new"):
            os.utime(tmp_path / name, (0, 0))
    train.sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["other", "str-999999999-new", f"str-{os.getpid()}-b", "str-x-c"])


@pytest.mark.parametrize(
    ("text", "made"),
    [("/a b", "/a b"), ("/a='b,]", "/a='b,]"), ('/a"b', '/a\\"b'), ("/a\\b", "/a\\b"), ("/a\\", "/a\\\\"), ('/a\\"', '/a\\\\\\"')],
)
def test_paths_are_quoted_for_hydra(text: str, made: str) -> None:
    assert train.quoted(text) == f'"{made}"'
