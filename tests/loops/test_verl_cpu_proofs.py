"""Proofs of the CPU side over facts that are all right, then taken away, doubled or falsified in turn."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial.loops import get_loop
from seatrial.loops.verl import cpu_proofs
from seatrial.loops.verl.cpu_claims import claims
from seatrial.model.record import CheckResult
from seatrial.model.series import Metrics, Series

LEVELS = {level.name: level for level in get_loop("verl").configured({"device": "cpu"}).levels()}
Row = dict[str, Any]
World = dict[str, list[Row]]
"""Facts by phase."""
FULL, ADAPTERS = ("w", "v"), ("base_model.model.w.lora_A.default.weight",)
BASE = {"base_model.model.w.base_layer.weight": "b"}
FILES = [f"{role}/{part}_world_size_1_rank_0.pt" for role in ("actor", "critic") for part in cpu_proofs.CHECKPOINT_FILES] + ["data.pt"]


def state(role: str, when: str, step: int, weights: dict[str, str], **extra: Any) -> Row:
    row: Row = {
        "fact": "state",
        "role": role,
        "when": when,
        "step": step,
        "weights": weights,
        "updates": [step, step],
        "without_gradient": [],
    }
    return row | {part: {"a": f"{role}{part}{step}"} for part in ("optimizer", "scheduler", "generators")} | extra


def weights(names: tuple[str, ...], step: int) -> dict[str, str]:
    return {name: f"{name}{step}" for name in names} | (BASE if names == ADAPTERS else {})


def sync(names: tuple[str, ...], step: int) -> Row:
    sent = {cpu_proofs._exported(name): f"{name}{step}" for name in names}
    return {"fact": "sync", "step": step, "adapter": names == ADAPTERS, "unknown": [], "absent": [], "wrong": [], "sent": sent}


def rollouts(step: int, split: str = "train") -> list[Row]:
    row: Row = {"fact": "rollouts", "split": split, "step": step, "prompts": 1, "failed": 0, "expected": 2, "trajectories": 2}
    row |= {"asked": f"asked{step}", "answered": f"answered{step}"}
    return [row, *({"fact": "reward", "split": split, "score": score} for score in (0.1, 0.2))]


def run(names: tuple[str, ...], roles: tuple[str, ...], begin: int, last: int, saved: int = 0) -> list[Row]:
    """A run in which everything is as it should be."""
    rows: list[Row] = [{"fact": "model", "made": True}]
    for role in (*roles, *(("reference",) if names == FULL else ())):
        own = names if role == "actor" else FULL
        frozen = list(BASE) if own == ADAPTERS else []
        rows.append({"fact": "parameters", "role": role, "total": 9, "trainable": 9, "trainable_names": list(own), "frozen_names": frozen})
        fresh = weights(own, 0) | ({"v": f"head of run {begin}"} if role == "critic" else {})
        rows.append(state(role, "start", 0, fresh))
        if role == "reference":
            continue
        if begin:
            rows.append(state(role, "restored", begin, weights(own, begin)))
        rows += [state(role, "step", step, weights(own, step)) for step in range(begin + 1, last + 1)]
        if saved:
            rows.append(state(role, "saved", saved, weights(own, saved)))
    if names == ADAPTERS:
        base = {cpu_proofs._exported(name): value for name, value in BASE.items()}
        rows.append({"fact": "sync", "step": 0, "adapter": False, "unknown": [], "absent": [], "wrong": [], "sent": base})
    rows += [sync(names, step) for step in range(begin, last + 1)]
    return rows + [row for step in range(begin + 1, last + 1) for row in rollouts(step)]


def control() -> list[Row]:
    rows = run(FULL, ("actor",), 0, 2)
    return [row | {"weights": weights(FULL, 0)} if row["fact"] == "state" else row for row in rows]


def logged(*runs: tuple[str, int, int]) -> dict[str, Series]:
    made = {}
    for phase, begin, last in runs:
        steps = tuple(range(begin + 1, last + 1))
        for name in ("training/global_step", "actor/loss", "timing_s/step", "actor/perf/memory"):
            # Times differ between the runs, as they do.
            values = tuple(1 / step + (begin if cpu_proofs.is_clock(name) else 0) for step in steps)
            made[f"{phase}/{name}"] = Series(f"{phase}/{name}", steps, values)
    return made


SIGNAL = {f"{phase}/signal/gain": Series("", (1, 2), (0.1, 0.2)) for phase in ("learn", "control")}
WORLDS: dict[str, tuple[World, dict[str, Series]]] = {
    "smoke": (
        {"grpo": run(FULL, ("actor",), 0, 2), "ppo": run(ADAPTERS, ("actor", "critic"), 0, 2)},
        logged(("grpo", 0, 2), ("ppo", 0, 2)),
    ),
    "save-resume": (
        {"full": run(FULL, ("actor", "critic"), 0, 4, saved=2), "resumed": run(FULL, ("actor", "critic"), 2, 4)},
        logged(("full", 0, 4), ("resumed", 2, 4)),
    ),
    "learning": ({"learn": run(FULL, ("actor",), 0, 20), "control": control()}, logged(("learn", 0, 20)) | SIGNAL),
}


def prove(directory: Path, name: str, world: World | None = None, series: dict[str, Series] | None = None) -> list[CheckResult]:
    for phase, rows in (WORLDS[name][0] if world is None else world).items():
        (directory / phase).mkdir(exist_ok=True)
        (directory / phase / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (directory / phase / "run.log").write_text(f"(TaskRunnerV1 pid=7) {config(name, phase)}\n", encoding="utf-8")
    place = directory / "full" / "checkpoints" / "global_step_2"
    for file in FILES:
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).touch()
    return list(cpu_proofs.prove(LEVELS[name], directory, Metrics(series=WORLDS[name][1] if series is None else series)))


def config(level: str, phase: str) -> Row:
    """The configuration that a run of this phase prints."""
    made: Row = {"actor_rollout_ref": {}}
    for key, value in claims(phase, 2 if phase == "control" else LEVELS[level].steps or 0).items():
        *parts, last = key.split(".")
        place = made
        for part in parts:
            place = place.setdefault(part, {})
        place[last] = value
    return made


def missed(checks: list[CheckResult]) -> set[str]:
    return {check.name for check in checks if not check.passed}


@pytest.mark.parametrize("name", WORLDS)
def test_a_good_run_meets_every_proof(name: str, tmp_path: Path) -> None:
    checks = prove(tmp_path, name)
    assert missed(checks) == set()
    assert len(checks) > 10
    assert len({check.name for check in checks}) == len(checks)


@pytest.mark.parametrize("name", WORLDS)
def test_without_facts_every_proof_is_missed(name: str, tmp_path: Path) -> None:
    checks = prove(tmp_path, name, {}, {})
    assert checks
    assert {check.name for check in checks if check.passed} <= {"checkpoint is complete"}


@pytest.mark.parametrize("name", WORLDS)
def test_each_fact_counts(name: str, tmp_path: Path) -> None:
    """Taking any single fact away, or writing it twice, is noticed; so is a torn row."""
    world = WORLDS[name][0]
    for phase, rows in world.items():
        kinds: dict[str, int] = {}
        for place, row in enumerate(rows):
            # Facts of one kind are alike: of each kind the first and the last are tried.
            kind = f"{row['fact']} {row.get('role')} {row.get('when')}"
            kinds[kind] = kinds.get(kind, 0) + 1
            # The start of a resumed run counts for nothing but the critic's fresh head and the reference.
            if kinds[kind] > 1 or (phase == "resumed" and row.get("when") == "start" and row["role"] != "critic"):
                continue
            if (phase, row.get("role")) in (("resumed", "reference"), ("learn", "reference"), ("control", "reference")):
                continue
            if phase == "control" and row["fact"] in ("model", "parameters", "sync"):
                continue
            assert missed(prove(tmp_path, name, world | {phase: rows[:place] + rows[place + 1 :]})), (phase, kind)
            if row["fact"] != "state" or row["when"] != "start":
                assert missed(prove(tmp_path, name, world | {phase: [*rows, row]})), (phase, kind)


def test_a_torn_fact_is_a_missed_proof(tmp_path: Path) -> None:
    prove(tmp_path, "smoke")
    with (tmp_path / "grpo" / "facts.jsonl").open("a", encoding="utf-8") as sink:
        sink.write('{"fact": "rew')
    checks = cpu_proofs.prove(LEVELS["smoke"], tmp_path, Metrics(series=WORLDS["smoke"][1]))
    assert missed(list(checks)) == {"facts are whole"}


def change(kind: str, update: Callable[[Row], Row], **match: Any) -> Callable[[list[Row]], list[Row]]:
    """Falsify the facts of a kind that match."""

    def changed(rows: list[Row]) -> list[Row]:
        found = [row for row in rows if row["fact"] == kind and all(row.get(key) == value for key, value in match.items())]
        assert found
        return [update(copy.deepcopy(row)) if row in found else row for row in rows]

    return changed


def put(**values: Any) -> Callable[[Row], Row]:
    return lambda row: row | values


FALSE: list[tuple[str, str, Callable[[list[Row]], list[Row]], str]] = [
    (
        "smoke",
        "grpo",
        change("parameters", put(frozen_names=["v"], trainable_names=["w"]), role="actor"),
        "no parameter is frozen (grpo, actor)",
    ),
    ("smoke", "ppo", change("parameters", put(trainable_names=[*ADAPTERS, *BASE]), role="actor"), "only adapters train (ppo, actor)"),
    ("smoke", "ppo", change("parameters", put(frozen_names=[]), role="actor"), "only adapters train (ppo, actor)"),
    ("smoke", "grpo", change("state", put(weights=weights(FULL, 1)), role="actor", step=2), "weights move at every step (grpo, actor)"),
    (
        "smoke",
        "grpo",
        change("state", put(weights={"w": "w2", "v": "v0"}), role="actor", step=2),
        "every trained tensor changed (grpo, actor)",
    ),
    (
        "smoke",
        "ppo",
        change("state", put(weights=weights(ADAPTERS, 2) | dict.fromkeys(BASE, "x")), role="actor", step=2),
        "frozen tensors did not (ppo, actor)",
    ),
    ("smoke", "ppo", change("state", put(without_gradient=["v"]), role="critic", step=2), "gradients reach every tensor (ppo, critic)"),
    ("smoke", "ppo", change("state", put(updates=[1, 2]), role="critic", step=2), "one optimizer update per step (ppo, critic)"),
    (
        "smoke",
        "grpo",
        change("state", put(weights={"w": "x", "v": "v0"}), role="reference"),
        "the reference starts as the actor (grpo): bit-equal",
    ),
    ("smoke", "grpo", change("sync", put(wrong=["w"]), step=2), "the generator holds what was sent: bit-equal (grpo)"),
    ("smoke", "grpo", change("sync", put(absent=["w"]), step=0), "the generator holds what was sent: bit-equal (grpo)"),
    ("smoke", "ppo", change("sync", put(unknown=["w"]), adapter=False), "the generator holds what was sent: bit-equal (ppo)"),
    ("smoke", "grpo", change("sync", put(step=1), step=2), "weights go to the generator at every step (grpo)"),
    ("smoke", "grpo", change("sync", put(sent={"w": "w1", "v": "v1"}), step=2), "what was sent is what the actor holds (grpo)"),
    ("smoke", "grpo", change("sync", put(sent={"w": "w2"}), step=2), "what was sent is what the actor holds (grpo)"),
    ("smoke", "ppo", change("sync", put(sent={"w.weight": "x"}), adapter=False), "what was sent is what the actor holds (ppo)"),
    ("smoke", "grpo", change("rollouts", put(failed=1), step=2), "no rollout was lost (grpo)"),
    ("smoke", "grpo", change("rollouts", put(trajectories=1), step=2), "no rollout was lost (grpo)"),
    ("smoke", "grpo", change("rollouts", put(expected=3, trajectories=3), step=2), "every trajectory was scored (grpo)"),
    ("smoke", "grpo", change("rollouts", put(step=3), step=2), "rollouts for every step (grpo)"),
    ("smoke", "grpo", change("reward", put(score=0.5)), "rewards differ (grpo)"),
    (
        "save-resume",
        "resumed",
        change("state", put(optimizer={"a": "x"}), role="critic", when="restored"),
        "restored optimizer of the critic: bit-equal",
    ),
    (
        "save-resume",
        "resumed",
        change("state", put(generators={"a": "x"}), role="actor", step=4),
        "final generators of the actor: bit-equal",
    ),
    (
        "save-resume",
        "resumed",
        change("state", put(scheduler={}), role="actor", when="restored"),
        "restored scheduler of the actor: bit-equal",
    ),
    (
        "save-resume",
        "resumed",
        change("state", put(weights={"w": "w0", "v": "head of run 0"}), role="critic", when="start"),
        "without the checkpoint the critic is another one",
    ),
    ("save-resume", "resumed", change("rollouts", put(asked="x"), step=3), "prompts after the resume: bit-equal"),
    ("save-resume", "resumed", change("rollouts", put(answered="x"), step=4), "completions after the resume: bit-equal"),
    (
        "learning",
        "control",
        change("state", put(weights=weights(FULL, 1)), role="actor", step=2),
        "the control's weights stay as they were: bit-equal",
    ),
    (
        "learning",
        "learn",
        change("state", put(weights=weights(FULL, 9)), role="actor", step=10),
        "weights move at every step (learn, actor)",
    ),
]


@pytest.mark.parametrize(("level", "phase", "falsify", "caught"), FALSE, ids=[f"{row[1]}: {row[3]}" for row in FALSE])
def test_a_false_fact_is_caught(level: str, phase: str, falsify: Callable[[list[Row]], list[Row]], caught: str, tmp_path: Path) -> None:
    world = WORLDS[level][0]
    assert caught in missed(prove(tmp_path, level, world | {phase: falsify(world[phase])}))


def test_a_model_of_the_users_may_have_tensors_that_nothing_reaches(tmp_path: Path) -> None:
    world = copy.deepcopy(WORLDS["smoke"][0])
    for row in world["grpo"]:
        if row.get("role") == "actor" and row["fact"] == "state" and row["step"]:
            row["without_gradient"], row["weights"]["v"] = ["v"], "v0"
        if row["fact"] == "sync":
            row["sent"]["v"] = "v0"
    assert missed(prove(tmp_path, "smoke", world)) == {"gradients reach every tensor (grpo, actor)"}
    world["grpo"][0]["made"] = False
    assert missed(prove(tmp_path, "smoke", world)) == set()
    for row in world["grpo"]:
        if row.get("role") == "actor" and row["fact"] == "state" and row["step"]:
            row["without_gradient"] = ["v", "w"]
    assert "gradients reach every tensor (grpo, actor)" in missed(prove(tmp_path, "smoke", world))


@pytest.mark.parametrize(
    ("phase", "line"),
    [("ppo", "'lora_rank': 4"), ("grpo", "'strategy': 'fsdp2'"), ("grpo", "'load_format': 'dummy'"), ("ppo", "'adv_estimator': 'gae'")],
)
def test_a_run_that_fell_back_to_something_else_is_caught(phase: str, line: str, tmp_path: Path) -> None:
    prove(tmp_path, "smoke")
    log = tmp_path / phase / "run.log"
    text = log.read_text(encoding="utf-8")
    assert line in text
    log.write_text(text.replace(line, f"{line.partition(':')[0]}: 'other'"), encoding="utf-8")
    checks = cpu_proofs.prove(LEVELS["smoke"], tmp_path, Metrics(series=WORLDS["smoke"][1]))
    assert missed(list(checks)) == {f"configuration in force ({phase})"}


@pytest.mark.parametrize("file", FILES)
def test_a_checkpoint_without_one_of_its_files_is_not_complete(file: str, tmp_path: Path) -> None:
    prove(tmp_path, "save-resume")
    (tmp_path / "full" / "checkpoints" / "global_step_2" / file).unlink()
    checks = cpu_proofs.prove(LEVELS["save-resume"], tmp_path, Metrics(series=WORLDS["save-resume"][1]))
    assert missed(list(checks)) == {"checkpoint is complete"}


@pytest.mark.parametrize("value", [0.26, float("nan")])
def test_another_metric_after_the_resume_is_caught(value: float, tmp_path: Path) -> None:
    series = WORLDS["save-resume"][1] | {"resumed/actor/loss": Series("", (3, 4), (1 / 3, value))}
    assert missed(prove(tmp_path, "save-resume", series=series)) == {"trajectory after the resume: bit-equal"}


def test_a_step_without_metrics_is_caught(tmp_path: Path) -> None:
    series = WORLDS["smoke"][1] | {"ppo/training/global_step": Series("", (2,), (2.0,))}
    assert missed(prove(tmp_path, "smoke", series=series)) == {"every step was logged (ppo)"}
