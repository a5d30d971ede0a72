"""The CPU side: its phases, what may be overridden, and the parts of its driver that need no verl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import FindingCode, UserError
from seatrial.core.loop import Context, Phase
from seatrial.core.records import Finding, RepoState
from seatrial.core.series import Metrics, Series
from seatrial.core.specs import Level
from seatrial.instruments.verl import train, verl_process
from seatrial.instruments.verl import train as gains
from seatrial.instruments.verl.verl_process import FAULTS
from seatrial.loops import get_loop
from seatrial.loops.verl import cpu_runs
from seatrial.loops.verl.cpu_runs import DRIVE
from seatrial.loops.verl.cpu_settings import STRATEGIES, phase_claims
from tests.loops.tiny_model import make_model

SIDES = {strategy: get_loop("verl").configured({"device": "cpu", "strategy": strategy}) for strategy in STRATEGIES}
VERL = get_loop("verl").configured({"device": "cpu"})
NAMES = ("smoke", "save-resume", "learning")
RUN = Path("/runs/a b")
DRIVE_DIRECTORY = Path(train.__file__).parent
both = pytest.mark.parametrize("strategy", STRATEGIES)
each = pytest.mark.parametrize("name", NAMES)


def level_of(strategy: str, name: str) -> Level:
    return next(level for level in SIDES[strategy].levels() if level.name == name)


def phases(strategy: str, name: str, **changes: Any) -> tuple[Phase, ...]:
    context = Context(**{"run_dir": RUN, "python": Path("/env/bin/python"), "model": "tiny-dense", **changes})
    level = level_of(strategy, name)
    return SIDES[strategy].phases(level, context, RUN / "levels" / f"{level.number}-{level.name}")


def trained(strategy: str, name: str, **changes: Any) -> tuple[Phase, ...]:
    """The phases that train: a shadow only recomputes one of them."""
    return tuple(phase for phase in phases(strategy, name, **changes) if not phase.beside)


def setting(phase: Phase, key: str) -> str:
    """The last value of an override: the one that counts."""
    return [word.partition("=")[2] for word in phase.argv if word.lstrip("+").partition("=")[0] == key][-1]


@both
@each
def test_every_level_has_complete_commands(strategy: str, name: str) -> None:
    level = level_of(strategy, name)
    made = trained(strategy, name, arguments=("actor_rollout_ref.actor.clip_ratio=0.3",))
    assert len({phase.name for phase in made}) == len(made) == 2
    for phase in made:
        out = RUN / "levels" / f"{level.number}-{level.name}" / phase.name
        assert phase.argv[:3] == ("/env/bin/python", "-m", "seatrial.instruments.verl.train")
        assert phase.argv[-1] == "actor_rollout_ref.actor.clip_ratio=0.3"
        assert setting(phase, "trainer.total_training_steps") == str(phase.steps)
        assert phase.env["SEATRIAL_FACTS"] == str(out / "facts.jsonl")
        assert phase.env["VERL_FILE_LOGGER_PATH"] == str(out / "metrics.jsonl")
        assert "SEATRIAL_FAULT" not in phase.env
        assert phase.processes == ("driver", "worker")
    assert made[-1].steps == level.steps


def test_megatron_is_the_engine_unless_another_is_asked_for() -> None:
    assert VERL.levels() == SIDES["megatron"].levels() != SIDES["fsdp2"].levels()
    with pytest.raises(UserError, match="not one of megatron, fsdp2"):
        get_loop("verl").configured({"device": "cpu", "strategy": "fsdp"})


@pytest.mark.parametrize(
    ("strategy", "engine", "modules"),
    [
        ("megatron", "megatron_engine", ["megatron_on_cpu", "cpu_platform"]),
        ("fsdp2", "fsdp_engine", ["without_megatron", "cpu_platform"]),
    ],
)
def test_megatron_is_made_to_run_or_hidden_before_all_else(strategy: str, engine: str, modules: list[str]) -> None:
    assert (DRIVE_DIRECTORY / f"{engine}.py").is_file()
    for phase in trained(strategy, "smoke"):
        assert phase.env["VERL_USE_EXTERNAL_MODULES"].split(",")[1:] == [f"{DRIVE}.{name}" for name in modules]
        assert phase.env["SEATRIAL_ENGINE"] == engine
        assert ("TORCHDYNAMO_DISABLE" in phase.env) == (strategy == "megatron")
    said = SIDES[strategy].limitations(level_of(strategy, "smoke"), Context(run_dir=RUN, python=Path("/p"), model="tiny-dense"))
    assert ("no Transformer Engine" in said[0]) == (strategy == "megatron")
    assert ("not Megatron" in said[0]) == (strategy == "fsdp2")


def test_level_0_on_megatron_is_that_of_a_gpu() -> None:
    grpo, ppo = trained("megatron", "smoke")
    for phase in (grpo, ppo):
        assert setting(phase, "model_engine") == "megatron"
        assert setting(phase, "actor_rollout_ref.actor.megatron.use_mbridge") == "True"
        assert setting(phase, "actor_rollout_ref.actor.megatron.vanilla_mbridge") == "False"
    assert setting(ppo, "algorithm.adv_estimator") == "gae"
    assert setting(ppo, "actor_rollout_ref.model.lora.rank") == setting(ppo, "critic.model.lora.rank") == "4"
    assert setting(ppo, "actor_rollout_ref.model.lora.merge") == "False"
    assert not any("lora" in word for word in grpo.argv)


@both
def test_recorded_runs_are_recomputed_beside_the_change_with_the_same_words(strategy: str) -> None:
    grpo, ppo, *shadows = phases(strategy, "smoke")
    for run, shadow in zip((grpo, ppo), shadows, strict=True):
        place = RUN / "levels" / "0-smoke" / run.name
        assert run.env["SEATRIAL_RECORD"] == str(place / "parts")
        assert (shadow.name, shadow.beside, shadow.processes) == (f"shadow-{run.name}", True, ())
        assert option(shadow, "--shadow-out") == str(place / "shadow.json")
        assert run.argv[run.argv.index("--out") :] == shadow.argv[shadow.argv.index("--out") :]
        assert "VERL_USE_EXTERNAL_MODULES" not in shadow.env
    for name in ("save-resume", "learning"):
        assert not any("SEATRIAL_RECORD" in phase.env for phase in phases(strategy, name))


@both
def test_the_second_run_resumes_where_the_first_saved(strategy: str) -> None:
    full, resumed = phases(strategy, "save-resume")
    assert ("--untied" in full.argv) == ("--untied" in resumed.argv) == (strategy == "megatron")
    assert setting(full, "trainer.save_freq") == "2"
    assert option(resumed, "--resume-from") == f"{option(full, '--out')}/checkpoints/global_step_2"
    assert {word for word in full.argv if "resume" not in word and "/full" not in word} <= set(resumed.argv)


def option(phase: Phase, name: str) -> str:
    return phase.argv[phase.argv.index(name) + 1]


@both
def test_the_control_differs_from_the_learning_run_in_its_rate_and_length_only(strategy: str) -> None:
    control, learn = phases(strategy, "learning")
    assert setting(control, "actor_rollout_ref.actor.optim.lr") == "0"
    own = {word.partition("=")[0] for word in set(control.argv) ^ set(learn.argv) if "=" in word}
    assert own == {"actor_rollout_ref.actor.optim.lr", "trainer.total_training_steps", "trainer.test_freq"}


@pytest.mark.parametrize(("run", "empty"), [("control", False), ("learn", True), ("grpo", True)])
def test_only_the_control_may_learn_nothing(run: str, empty: bool) -> None:
    metrics = Metrics(series={f"{run}/actor/lr": Series("", (1, 2), (0.0, 0.0))})
    assert (VERL.measures.vacuous(metrics) is not None) == empty


@pytest.mark.parametrize(("steps", "ok"), [("20", True), ("100", True), ("19", False), ("101", False), ("many", False)])
def test_level_5_takes_20_to_100_steps(steps: str, ok: bool) -> None:
    given = {"device": "cpu", "steps": steps}
    if not ok:
        with pytest.raises(UserError, match="from 20 to 100"):
            get_loop("verl").configured(given)
        return
    chosen = get_loop("verl").configured(given)
    assert next(level for level in chosen.levels() if level.name == "learning").steps == int(steps)


@both
def test_levels_without_a_gpu_say_why_they_are_skipped(strategy: str) -> None:
    skipped = [level for level in SIDES[strategy].levels() if level.skip]
    assert [level.number for level in skipped] == [2, 3, 4]
    assert all("GPU" in str(level.skip) for level in skipped)
    with pytest.raises(AssertionError):
        phases(strategy, skipped[0].name)


def test_the_ladders_have_the_same_rungs() -> None:
    gpu = get_loop("verl").levels()
    for side in SIDES.values():
        assert [(level.number, level.name) for level in side.levels()] == [(level.number, level.name) for level in gpu]
    megatron = SIDES["megatron"].levels()
    assert [(level.required_when, level.words) for level in megatron] == [(level.required_when, level.words) for level in gpu]


@both
def test_a_fault_reaches_every_process(strategy: str) -> None:
    made = trained(strategy, "smoke", options={"fault": "frozen"})
    assert {phase.env["SEATRIAL_FAULT"] for phase in made} == {"frozen"}
    assert all(set(fault.levels) <= {0, 1, 5} for fault in FAULTS.values())


@pytest.mark.parametrize(
    ("word", "ok"),
    [
        ("actor_rollout_ref.actor.clip_ratio=0.3", True),
        ("+algorithm.gamma=0.9", True),
        ("trainer.total_training_steps=9", False),
        ("++trainer.v1.sampler.custom_sampler.name=Other", False),
        ("~reward.custom_reward_function", False),
        ("actor_rollout_ref.rollout.n=2", False),
        ("model_engine=dp", False),
        ("actor_rollout_ref.actor.megatron.use_mbridge=False", False),
        ("~algorithm.kl_ctrl", True),
        ("--help", False),
        ("clip_ratio", False),
    ],
)
def test_overrides_that_a_proof_rests_on_are_refused(word: str, ok: bool) -> None:
    made = VERL.findings(Context(run_dir=RUN, python=Path("/p"), model="tiny-dense", arguments=(word,)))
    assert [finding.ok for finding in made] == ([True] if ok else [False, True])
    assert all(finding.ok or finding.fix for finding in made)


def test_a_locked_key_names_its_beginning() -> None:
    made = VERL.findings(Context(run_dir=RUN, python=Path("/p"), model="tiny-dense", arguments=("trainer.no_such_key=1",)))
    assert made[0].message == "trainer.no_such_key cannot be overridden on a CPU: the proofs rest on what begins with trainer."


def test_options_of_the_gpu_side_are_refused() -> None:
    given = {"device": "cpu", "strategy": "fsdp2", "steps": "20", "fault": "frozen", "verl": "/v", "tp": "2", "train_files": "/t"}
    made = VERL.findings(Context(run_dir=RUN, python=Path("/p"), model="tiny-dense", options=given))
    assert [(one.message, one.fix) for one in made if not one.ok] == [
        ("options.tp has no effect on a CPU", "leave it out"),
        ("options.train_files has no effect on a CPU", "leave it out"),
    ]


def test_what_the_import_check_needs_is_staged_with_it(tmp_path: Path) -> None:
    place = cpu_runs._staged(tmp_path)
    code = "import seatrial.instruments.megatron.import_patches, seatrial.instruments.verl.verl_process as check; print(check.__file__)"
    done = subprocess.run([sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(place)}, capture_output=True, text=True, check=False)
    assert done.stdout.strip().startswith(str(place)), done.stderr


@pytest.fixture
def no_shims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shims that do nothing in place of the real ones, which need torch."""
    drive = tmp_path / "instruments" / "verl"
    drive.mkdir(parents=True)
    (tmp_path / "instruments" / "megatron").mkdir()
    for file in ("__init__", "megatron_on_cpu", "without_megatron"):
        (drive / f"{file}.py").touch()
    for file in ("verl/verl_process.py", "facts.py"):
        (drive.parent / file).write_bytes((DRIVE_DIRECTORY.parent / file).read_bytes())
    monkeypatch.setattr(cpu_runs, "INSTRUMENTS", drive.parent)


def importing(root: Path, strategy: str, source: str, package: str = "megatron.bridge") -> list[Finding]:
    """The findings over a change whose package has this text."""
    place = root / "change" / "src" / Path(*package.split("."))
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(source, encoding="utf-8")
    change = RepoState(
        name="c", path=str(root / "change"), commit="0" * 40, branch=None, packages=(package,), import_root=str(root / "change" / "src")
    )
    context = Context(run_dir=root / "run", python=Path(sys.executable), model="tiny-dense", changes=(change,))
    return [finding for finding in SIDES[strategy].findings(context) if finding.name == "imports"]


@pytest.mark.parametrize(
    ("source", "ok", "said"),
    [
        ("print('loaded')", True, "can be imported"),
        ("import megatron.training.models.gpt", False, "this megatron.bridge needs megatron.training, which the environment does not have"),
        ("from json import no_such_name", False, "needs another json (cannot import name 'no_such_name'"),
        ("import megatron.bridge.absent", True, "the level will judge it"),
        ("from megatron.bridge import absent", True, "the level will judge it"),
        ("import atexit; atexit.register(print, 'bye')", True, "can be imported"),
        ("raise SystemExit", True, "the level will judge it"),
        ("raise TypeError('mine')", True, "TypeError: mine; the level will judge it"),
    ],
)
@pytest.mark.usefixtures("no_shims")
def test_what_a_change_needs_must_be_there_and_what_it_breaks_is_judged(tmp_path: Path, source: str, ok: bool, said: str) -> None:
    (found,) = importing(tmp_path, "megatron", source)
    assert found.ok is ok
    assert said in found.message
    assert ("--change megatron=PATH" in found.fix) is not ok


@pytest.mark.usefixtures("no_shims")
def test_what_the_engine_hides_is_not_imported(tmp_path: Path) -> None:
    assert importing(tmp_path / "one", "fsdp2", "import no_such_module") == []
    (found,) = importing(tmp_path / "two", "fsdp2", "import no_such_module", "verl")
    assert "this verl needs no_such_module" in found.message
    assert "run on GPUs" in found.fix


def test_a_given_model_must_be_there(tmp_path: Path) -> None:
    context = Context(run_dir=RUN, python=Path("/p"), model=str(tmp_path))
    assert not VERL.findings(context)[-1].ok
    make_model(tmp_path)
    assert VERL.findings(context)[-1].code is FindingCode.MODEL_NOT_LOADED
    assert VERL.findings(context)[-1].ok
    counts = {strategy: len(side.limitations(level_of(strategy, "smoke"), context)) for strategy, side in SIDES.items()}
    assert counts == {"megatron": 5, "fsdp2": 4}
    assert not any(phase.beside or "SEATRIAL_RECORD" in phase.env for phase in phases("fsdp2", "smoke", model=str(tmp_path)))


DEFAULTS = (
    *("trainer.use_v1", "trainer.v1.trainer_mode", "reward.reward_model.enable", "actor_rollout_ref.rollout.load_format"),
    *("strategy", "lora.merge", "use_megatron_fsdp", "use_distributed_optimizer", "dtype", "parallel_size", "model_engine"),
)
"""Ends of keys that a command may leave to verl."""


@both
@each
def test_the_commands_set_what_is_claimed(strategy: str, name: str) -> None:
    for phase in trained(strategy, name):
        given = {word.lstrip("+").partition("=")[0] for word in phase.argv}
        for key, value in phase_claims(strategy, phase.name, phase.steps or 0).items():
            if key in given or not (key.endswith(DEFAULTS) or value == 0):
                assert setting(phase, key) == str(value), key


def dump(directory: Path, step: int, scores: dict[str, list[float]]) -> None:
    (directory / "validation").mkdir(parents=True, exist_ok=True)
    rows = [{"input": prompt, "score": score} for prompt, each in scores.items() for score in each]
    (directory / "validation" / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_gains_are_paired_by_prompt(tmp_path: Path) -> None:
    for name, end in (("control", [0.5]), ("learn", [0.75, 1.0])):
        dump(tmp_path / name, 0, {"b": [0.5], "a": [0.25]})
        dump(tmp_path / name, 9, {"a": [0.25], "b": end})
        gains.write_gains(tmp_path / name, tmp_path / "control" if name == "learn" else None)
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
        gains.write_gains(tmp_path / "one", None)
    dump(tmp_path / "two", 0, {"b": [0.5]})
    dump(tmp_path / "two", 2, {"b": [0.5]})
    dump(tmp_path / "three", 0, {"c": [0.5]})
    dump(tmp_path / "three", 2, {"c": [0.5]})
    with pytest.raises(RuntimeError, match="different prompts"):
        gains.write_gains(tmp_path / "two", tmp_path / "three")


@pytest.mark.parametrize(("text", "score"), [("", 0.0), ("bd", 1.0), ("abcd", 0.5), ("\U0001f600", 1.0)])
def test_the_reward_is_the_share_of_even_characters(text: str, score: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEATRIAL_FACTS", str(tmp_path / "facts.jsonl"))
    assert verl_process.compute_score(data_source="train", solution_str=text, ground_truth="x", extra_info={}) == score
    assert json.loads((tmp_path / "facts.jsonl").read_text(encoding="utf-8")) == {"fact": "reward", "split": "train", "score": score}


def test_faults_of_the_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEATRIAL_FACTS", str(tmp_path / "facts.jsonl"))
    monkeypatch.setenv("SEATRIAL_FAULT", "constant-reward")
    assert {verl_process.compute_score("train", text, "x") for text in ("", "a", "b")} == {0.5}
    monkeypatch.setenv("SEATRIAL_FAULT", "reward-raises")
    failed = 0
    for number in range(30):
        try:
            verl_process.compute_score("train", "b", f"prompt {number}")
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
