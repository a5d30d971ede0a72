"""Proofs of the CPU side over facts that are all right, then taken away, doubled or falsified in turn."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.records import CheckResult
from seatrial.core.series import Metrics, Series
from seatrial.loops import get_loop
from seatrial.loops.verl import cpu_proofs
from seatrial.loops.verl.cpu_settings import UPDATES, phase_claims

LEVELS = {
    f"{strategy} {level.name}": level
    for strategy in ("megatron", "fsdp2")
    for level in get_loop("verl").configured({"device": "cpu", "strategy": strategy}).levels()
}
Row = dict[str, Any]
World = dict[str, list[Row]]
"""Facts by phase."""
FULL, PEFT, BRIDGE = ("w", "v"), ("base_model.model.w.lora_A.default.weight",), ("w.adapter.linear_in.weight",)
ADAPTERS = (PEFT, BRIDGE)
BASE = {"w.frozen": "b"}
SENT = {"w.frozen": "w", PEFT[0]: "w.lora_A.weight", BRIDGE[0]: "w.lora_A.weight"}
"""Names of the engine's tensors in the generator, where they are others."""


def state(role: str, when: str, step: int, weights: dict[str, str], per_step: int = 1, **extra: Any) -> Row:
    row: Row = {
        "fact": "state",
        "role": role,
        "when": when,
        "step": step,
        "weights": weights,
        "updates": [step * per_step, step * per_step],
        "without_gradient": [],
    }
    row |= {"exported": exported(weights)} if role == "actor" else {}
    return row | {part: {"a": f"{role}{part}{step}"} for part in ("optimizer", "scheduler", "generators")} | extra


def weights(names: tuple[str, ...], step: int) -> dict[str, str]:
    return {name: f"{name}{step}" for name in names} | (BASE if names[:1] in ADAPTERS else {})


def exported(held: dict[str, str]) -> dict[str, str]:
    return {SENT.get(name, name): value for name, value in held.items()}


def sync(names: tuple[str, ...], step: int) -> Row:
    sent = {name: value for name, value in exported(weights(names, step)).items() if value not in BASE.values()}
    return {"fact": "sync", "step": step, "adapter": names in ADAPTERS, "unknown": [], "absent": [], "wrong": [], "sent": sent}


def rollouts(step: int, split: str = "train") -> list[Row]:
    row: Row = {"fact": "rollouts", "split": split, "step": step, "prompts": 1, "failed": 0, "expected": 2, "trajectories": 2}
    row |= {"asked": f"asked{step}", "answered": f"answered{step}"}
    return [row, *({"fact": "reward", "split": split, "score": score} for score in (0.1, 0.2))]


def run(
    names: tuple[str, ...],
    roles: tuple[str, ...],
    begin: int,
    last: int,
    saved: int = 0,
    critic: tuple[str, ...] = FULL,
    per_step: int = 1,
) -> list[Row]:
    """A run in which everything is as it should be."""
    files = BASE if names in ADAPTERS else weights(names, 0)
    rows: list[Row] = [{"fact": "model", "made": True}, {"fact": "files", "tensors": exported(files)}]
    for role in (*roles, *(("reference",) if names == FULL else ())):
        own = critic if role == "critic" else names
        frozen = list(BASE) if own[:1] in ADAPTERS else []
        rows.append({"fact": "parameters", "role": role, "total": 9, "trainable": 9, "trainable_names": list(own), "frozen_names": frozen})
        rows.append(state(role, "start", 0, weights(own, 0)))
        if role == "reference":
            continue
        if begin:
            rows.append(state(role, "restored", begin, weights(own, begin)))
        rows += [state(role, "step", step, weights(own, step), per_step) for step in range(begin + 1, last + 1)]
        if saved:
            rows.append(state(role, "saved", saved, weights(own, saved)))
    if names in ADAPTERS:
        rows.append({"fact": "sync", "step": begin, "adapter": False, "unknown": [], "absent": [], "wrong": [], "sent": exported(BASE)})
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
BOTH = ("actor", "critic")
LEARNED: tuple[World, dict[str, Series]] = (
    {"learn": run(FULL, ("actor",), 0, 20), "control": control()},
    logged(("learn", 0, 20)) | SIGNAL,
)
SMOKE, RESUME = logged(("grpo", 0, 3), ("ppo", 0, 3)), logged(("full", 0, 4), ("resumed", 2, 4))
WORLDS: dict[str, tuple[World, dict[str, Series]]] = {
    "fsdp2 smoke": (
        {"grpo": run(FULL, ("actor",), 0, 3, per_step=UPDATES), "ppo": run(PEFT, BOTH, 0, 3, per_step=UPDATES)},
        SMOKE,
    ),
    "fsdp2 save-resume": ({"full": run(FULL, BOTH, 0, 4, saved=2), "resumed": run(FULL, BOTH, 2, 4)}, RESUME),
    "fsdp2 learning": LEARNED,
    "megatron smoke": (
        {
            "grpo": run(FULL, ("actor",), 0, 3, per_step=UPDATES),
            "ppo": run(BRIDGE, BOTH, 0, 3, critic=(*BRIDGE, cpu_proofs.HEAD), per_step=UPDATES),
        },
        SMOKE,
    ),
    "megatron save-resume": ({"full": run(BRIDGE, BOTH, 0, 4, saved=2), "resumed": run(BRIDGE, BOTH, 2, 4)}, RESUME),
}


def prove(directory: Path, name: str, world: World | None = None, series: dict[str, Series] | None = None) -> list[CheckResult]:
    for phase, rows in (WORLDS[name][0] if world is None else world).items():
        (directory / phase).mkdir(exist_ok=True)
        (directory / phase / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        if name.endswith("smoke"):
            (directory / phase / "shadow.json").write_text(json.dumps(recomputed(3 * UPDATES)), encoding="utf-8")
        (directory / phase / "run.log").write_text(f"(TaskRunnerV1 pid=7) {config(name, phase)}\n", encoding="utf-8")
    place = directory / "full" / "checkpoints" / "global_step_2"
    for file in cpu_proofs.checkpoint_files(name.partition(" ")[0]):
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).touch()
    return judged(directory, name, series)


def recomputed(steps: int, divergence: Row | None = None) -> Row:
    """What a shadow writes."""
    stages = [{"stage": stage, "compared": 7, "worst": 0.1, "unproven": ""} for stage in ("data", "value", "gradient", "update")]
    return {"schema_version": 1, "steps": steps, "stages": stages, "divergence": divergence, "knobs": []}


def judged(directory: Path, name: str, series: dict[str, Series] | None = None) -> list[CheckResult]:
    metrics = Metrics(series=WORLDS[name][1] if series is None else series)
    return list(cpu_proofs.prove(LEVELS[name], directory, metrics, name.partition(" ")[0]))


def config(level: str, phase: str) -> Row:
    """The configuration that a run of this phase prints."""
    made: Row = {"actor_rollout_ref": {}}
    for key, value in phase_claims(level.partition(" ")[0], phase, 2 if phase == "control" else LEVELS[level].steps or 0).items():
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
            if kinds[kind] > 1:
                continue
            if (phase, row.get("role")) in (("resumed", "reference"), ("learn", "reference"), ("control", "reference")):
                continue
            # Only a run that starts from the files shows them, and the control is not trained.
            if (phase == "control" and row["fact"] in ("model", "parameters", "sync")) or (
                phase in ("control", "resumed") and row["fact"] == "files"
            ):
                continue
            assert missed(prove(tmp_path, name, world | {phase: rows[:place] + rows[place + 1 :]})), (phase, kind)
            if row["fact"] != "state" or row["when"] != "start":
                assert missed(prove(tmp_path, name, world | {phase: [*rows, row]})), (phase, kind)


def test_a_torn_fact_is_a_missed_proof(tmp_path: Path) -> None:
    prove(tmp_path, "fsdp2 smoke")
    with (tmp_path / "grpo" / "facts.jsonl").open("a", encoding="utf-8") as sink:
        sink.write('{"fact": "rew')
    assert missed(judged(tmp_path, "fsdp2 smoke")) == {"facts are whole"}


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
        "fsdp2 smoke",
        "grpo",
        change("parameters", put(frozen_names=["v"], trainable_names=["w"]), role="actor"),
        "no parameter is frozen (grpo, actor)",
    ),
    ("fsdp2 smoke", "ppo", change("parameters", put(trainable_names=[*PEFT, *BASE]), role="actor"), "only adapters train (ppo, actor)"),
    ("fsdp2 smoke", "ppo", change("parameters", put(frozen_names=[]), role="actor"), "only adapters train (ppo, actor)"),
    (
        "fsdp2 smoke",
        "grpo",
        change("state", put(weights=weights(FULL, 1)), role="actor", step=2),
        "weights move at every step (grpo, actor)",
    ),
    (
        "fsdp2 smoke",
        "grpo",
        change("state", put(weights={"w": "w3", "v": "v0"}), role="actor", step=3),
        "every trained tensor changed (grpo, actor)",
    ),
    (
        "fsdp2 smoke",
        "ppo",
        change("state", put(weights=weights(PEFT, 3) | dict.fromkeys(BASE, "x")), role="actor", step=3),
        "frozen tensors did not (ppo, actor)",
    ),
    (
        "fsdp2 smoke",
        "ppo",
        change("state", put(without_gradient=["v"]), role="critic", step=3),
        "gradients reach every tensor (ppo, critic)",
    ),
    ("fsdp2 smoke", "ppo", change("state", put(updates=[1, 2]), role="critic", step=2), "4 optimizer updates per step (ppo, critic)"),
    (
        "fsdp2 smoke",
        "grpo",
        change("state", put(weights={"w": "x", "v": "v0"}), role="reference"),
        "the reference starts as the actor (grpo): bit-equal",
    ),
    ("fsdp2 smoke", "grpo", change("sync", put(wrong=["w"]), step=2), "the generator holds what was sent: bit-equal (grpo)"),
    ("fsdp2 smoke", "grpo", change("sync", put(absent=["w"]), step=0), "the generator holds what was sent: bit-equal (grpo)"),
    ("fsdp2 smoke", "ppo", change("sync", put(unknown=["w"]), adapter=False), "the generator holds what was sent: bit-equal (ppo)"),
    ("fsdp2 smoke", "grpo", change("sync", put(step=1), step=2), "weights go to the generator at every step (grpo)"),
    (
        "fsdp2 smoke",
        "grpo",
        change("sync", put(sent={"w": "w1", "v": "v1"}), step=2),
        "what was sent is what the actor holds: bit-equal (grpo)",
    ),
    ("fsdp2 smoke", "grpo", change("sync", put(sent={"w": "w2"}), step=2), "what was sent is what the actor holds: bit-equal (grpo)"),
    ("fsdp2 smoke", "ppo", change("sync", put(sent={"w": "x"}), adapter=False), "what was sent is what the actor holds: bit-equal (ppo)"),
    (
        "fsdp2 smoke",
        "grpo",
        change("files", put(tensors={"w": "w0", "v": "x"})),
        "the first weights sent are those of the model's files: bit-equal (grpo)",
    ),
    (
        "megatron smoke",
        "grpo",
        change("files", put(tensors={"w": "w0", "v": "v0", "u": "x"})),
        "the first weights sent are those of the model's files: bit-equal (grpo)",
    ),
    (
        "megatron smoke",
        "ppo",
        change("state", put(exported={"w": "b", "w.lora_A.weight": "x"}), role="actor", step=2),
        "what was sent is what the actor holds: bit-equal (ppo)",
    ),
    (
        "megatron smoke",
        "grpo",
        change("state", put(exported=None), role="actor", step=0),
        "what was sent is what the actor holds: bit-equal (grpo)",
    ),
    (
        "megatron smoke",
        "ppo",
        change("parameters", put(trainable_names=[*BRIDGE, *BASE]), role="critic"),
        "only adapters train (ppo, critic)",
    ),
    (
        "megatron smoke",
        "ppo",
        change("parameters", put(trainable_names=[cpu_proofs.HEAD]), role="actor"),
        "only adapters train (ppo, actor)",
    ),
    (
        "megatron smoke",
        "ppo",
        change("parameters", put(trainable_names=[cpu_proofs.HEAD]), role="critic"),
        "only adapters train (ppo, critic)",
    ),
    ("fsdp2 smoke", "grpo", change("rollouts", put(failed=1), step=2), "no rollout was lost (grpo)"),
    ("fsdp2 smoke", "grpo", change("rollouts", put(trajectories=1), step=2), "no rollout was lost (grpo)"),
    ("fsdp2 smoke", "grpo", change("rollouts", put(expected=3, trajectories=3), step=2), "every trajectory was scored (grpo)"),
    ("fsdp2 smoke", "grpo", change("rollouts", put(step=3), step=2), "rollouts for every step (grpo)"),
    ("fsdp2 smoke", "grpo", change("reward", put(score=0.5)), "rewards differ (grpo)"),
    (
        "fsdp2 save-resume",
        "resumed",
        change("state", put(optimizer={"a": "x"}), role="critic", when="restored"),
        "restored optimizer of the critic: bit-equal",
    ),
    (
        "fsdp2 save-resume",
        "resumed",
        change("state", put(generators={"a": "x"}), role="actor", step=4),
        "final generators of the actor: bit-equal",
    ),
    (
        "fsdp2 save-resume",
        "resumed",
        change("state", put(scheduler={}), role="actor", when="restored"),
        "restored scheduler of the actor: bit-equal",
    ),
    (
        "fsdp2 save-resume",
        "resumed",
        change("state", put(weights=weights(FULL, 2)), role="critic", when="start"),
        "without the checkpoint the critic is another one",
    ),
    ("fsdp2 save-resume", "resumed", change("rollouts", put(asked="x"), step=3), "prompts after the resume: bit-equal"),
    ("fsdp2 save-resume", "resumed", change("rollouts", put(answered="x"), step=4), "completions after the resume: bit-equal"),
    (
        "fsdp2 learning",
        "control",
        change("state", put(weights=weights(FULL, 1)), role="actor", step=2),
        "the control's weights stay as they were: bit-equal",
    ),
    (
        "fsdp2 learning",
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
    world = copy.deepcopy(WORLDS["fsdp2 smoke"][0])
    for row in world["grpo"]:
        if row.get("role") == "actor" and row["fact"] == "state" and row["step"]:
            row["without_gradient"], row["weights"]["v"], row["exported"]["v"] = ["v"], "v0", "v0"
        if row["fact"] == "sync":
            row["sent"]["v"] = "v0"
    assert missed(prove(tmp_path, "fsdp2 smoke", world)) == {"gradients reach every tensor (grpo, actor)"}
    world["grpo"][0]["made"] = False
    assert missed(prove(tmp_path, "fsdp2 smoke", world)) == set()
    for row in world["grpo"]:
        if row.get("role") == "actor" and row["fact"] == "state" and row["step"]:
            row["without_gradient"] = ["v", "w"]
    assert "gradients reach every tensor (grpo, actor)" in missed(prove(tmp_path, "fsdp2 smoke", world))


def test_tied_tensors_need_one_name(tmp_path: Path) -> None:
    world = copy.deepcopy(WORLDS["megatron smoke"][0])
    for row in world["grpo"]:
        for key in ("tensors", "exported"):
            if key in row:
                row[key]["lm_head"] = row[key]["w"]
    assert missed(prove(tmp_path, "megatron smoke", world)) == set()


def test_of_a_model_whose_layout_is_not_known_what_is_sent_must_move(tmp_path: Path) -> None:
    world = copy.deepcopy(WORLDS["megatron smoke"][0])
    for row in world["grpo"]:
        row.pop("exported", None)
    assert missed(prove(tmp_path, "megatron smoke", world)) == {"what was sent is what the actor holds: bit-equal (grpo)"}
    world["grpo"][0]["made"] = False
    checks = prove(tmp_path, "megatron smoke", world)
    assert missed(checks) == set()
    assert "what is sent moves with the actor (grpo)" in {check.name for check in checks}
    for row in world["grpo"]:
        if row["fact"] == "sync":
            row["sent"] = weights(FULL, 0)
    assert missed(prove(tmp_path, "megatron smoke", world)) == {"what is sent moves with the actor (grpo)"}


@pytest.mark.parametrize(
    ("name", "phase", "line"),
    [
        ("fsdp2 smoke", "ppo", "'lora_rank': 4"),
        ("fsdp2 smoke", "grpo", "'strategy': 'fsdp2'"),
        ("fsdp2 smoke", "grpo", "'load_format': 'dummy'"),
        ("fsdp2 smoke", "ppo", "'adv_estimator': 'gae'"),
        ("megatron smoke", "ppo", "'rank': 4"),
        ("megatron smoke", "ppo", "'vanilla_mbridge': False"),
        ("megatron smoke", "grpo", "'use_mbridge': True"),
        ("megatron smoke", "grpo", "'model_engine': 'megatron'"),
    ],
)
def test_a_run_that_fell_back_to_something_else_is_caught(name: str, phase: str, line: str, tmp_path: Path) -> None:
    prove(tmp_path, name)
    log = tmp_path / phase / "run.log"
    text = log.read_text(encoding="utf-8")
    assert line in text
    log.write_text(text.replace(line, f"{line.partition(':')[0]}: 'other'"), encoding="utf-8")
    assert missed(judged(tmp_path, name)) == {f"configuration in force ({phase})"}


@pytest.mark.parametrize(
    ("strategy", "file"), [(each, file) for each in ("megatron", "fsdp2") for file in cpu_proofs.checkpoint_files(each)]
)
def test_a_checkpoint_without_one_of_its_files_is_not_complete(strategy: str, file: str, tmp_path: Path) -> None:
    name = f"{strategy} save-resume"
    prove(tmp_path, name)
    (tmp_path / "full" / "checkpoints" / "global_step_2" / file).unlink()
    assert missed(judged(tmp_path, name)) == {"checkpoint is complete"}


@pytest.mark.parametrize("value", [0.26, float("nan")])
def test_another_metric_after_the_resume_is_caught(value: float, tmp_path: Path) -> None:
    series = WORLDS["fsdp2 save-resume"][1] | {"resumed/actor/loss": Series("", (3, 4), (1 / 3, value))}
    assert missed(prove(tmp_path, "fsdp2 save-resume", series=series)) == {"trajectory after the resume: bit-equal"}


def test_a_step_without_metrics_is_caught(tmp_path: Path) -> None:
    series = WORLDS["fsdp2 smoke"][1] | {"ppo/training/global_step": Series("", (2,), (2.0,))}
    assert missed(prove(tmp_path, "fsdp2 smoke", series=series)) == {"every step was logged (ppo)"}


def test_a_run_that_was_not_recomputed_or_diverged_is_a_missed_proof(tmp_path: Path) -> None:
    prove(tmp_path, "fsdp2 smoke")
    path = tmp_path / "ppo" / "shadow.json"
    path.write_text(json.dumps(recomputed(11)), encoding="utf-8")
    assert missed(judged(tmp_path, "fsdp2 smoke")) == {"every step was recomputed (ppo)"}
    found = {"stage": "value", "what": "an old value", "expected": "1", "found": "2", "step": 1, "model": "critic"}
    path.write_text(json.dumps(recomputed(12, found)), encoding="utf-8")
    assert missed(judged(tmp_path, "fsdp2 smoke")) == {"step proof: value (ppo)"}
    (check,) = (check for check in judged(tmp_path, "fsdp2 smoke") if not check.passed)
    assert (check.stage, check.step, check.run) == ("value", 1, "ppo")
    assert "model critic" in check.message
    path.unlink()
    assert missed(judged(tmp_path, "fsdp2 smoke")) == {"the step is recomputed (ppo)"}
