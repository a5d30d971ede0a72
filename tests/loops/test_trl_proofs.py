"""Proofs from synthetic facts: all of them met, then each fact taken away, doubled or falsified in turn."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks import probe_facts, refit_judge, refit_weights
from seatrial.core.records import CheckResult
from seatrial.core.series import Metrics, Series
from seatrial.loops import get_loop
from seatrial.loops.trl import trl_proofs

LEVELS = {level.name: level for level in get_loop("trl").levels()}
Row = dict[str, Any]
World = dict[str, list[Row]]
"""Facts by phase."""


LAST = 3


def state(when: str, step: int, weights: dict[str, str], process: str = "driver") -> Row:
    row: Row = {"fact": "state", "when": when, "step": step, "process": process, "weights": weights, "updates": [step, step], "norm": 2.0}
    return row | {part: {"a": f"{part}{step}"} for part in ("optimizer", "scheduler", "generators")}


def parameters(names: list[str], process: str = "driver", **changes: Any) -> Row:
    row: Row = {"fact": "parameters", "process": process, "world_size": 1, "made": True, "total": 9, "trainable": 9}
    return row | {"trainable_names": names, "start_step": 0, "max_steps": LAST, "device": "cpu"} | changes


def gradients(never: tuple[str, ...] = ()) -> Row:
    return {"fact": "gradients", "process": "driver", "never": list(never), "idle_at": dict.fromkeys(never, 1), "seen": True}


def built() -> Row:
    return {"fact": "built", "weights": {"w.lora_A": "0"}, "generators": {"torch": "g"}}


def on_disk(kind: str) -> Row:
    return {
        "fact": kind,
        "stored": 2,
        "compared": 1,
        "renamed": 1,
        "wrong": [],
        "lost": [],
        "files": ["config.json"],
        "odd": [],
        "tied": True,
        "tie_wanted": True,
    }


def run(*names: str, last: int = LAST) -> list[Row]:
    """A run in which every parameter learned."""
    begin, end = dict.fromkeys(names, "0"), dict.fromkeys(names, "1")
    rows = [parameters(list(names), max_steps=last), on_disk("loaded"), state("start", 0, begin), gradients(), state("end", last, end)]
    return [*rows, on_disk("saved")]


FIRST = "root0"
LIFE = "7-1"
COUNT = 4
"""Refits: one brings the base, and each transport brings changed weights."""
FIGURES = {"value": 1.0001, "tokens": 96, "sequences": 8, "nonfinite": 0, "outlier_share": 0.0, "max_abs": 0.001}
FIGURES |= {"p50": 1.0, "p90": 1.0, "p99": 1.001, "max_sequence": 1.001}


def refit(index: int, methods: Row) -> list[Row]:
    """One refit, and the samples after it."""
    hashes = dict.fromkeys(("w", "v"), f"{index}")
    root, moved = f"root{index}", 2 if index else 0
    held = {"replica": "0", "incarnation": LIFE, "version": index + 1}
    sparse = index % 3 == 2
    row: Row = {"fact": "refit", "names": 2, "produced": root, "consumed": root, "wrong_names": [], "refused": None, "committed": True}
    row |= {"index": index, "step": index, "changed": moved, "methods": methods, **held}
    row |= {"transport": ("full", "packed", "sparse")[index % 3], "kind": "difference" if sparse else "overwrite"}
    row |= {"modes": {"dense": 1, "same": 1} if sparse else {"raw": 2}, "bytes": 9, "elements": 4}
    row |= {"stale_names": moved, "touched_names": moved}
    row |= {"stale_max_dlogp": 0.5, "fresh_max_dlogp": 0.001} if index else {"stale_max_dlogp": None, "fresh_max_dlogp": None}
    made: list[Row] = [
        {"fact": "hashes", "side": "sent", "version": index + 1, "step": index, "hashes": hashes},
        {"fact": "hashes", "side": "live", "step": index, **held, "hashes": hashes},
        {"fact": "version", **held, "root": root},
        row,
        *([{"fact": "mismatch", "step": index, "of": "recomputed", **FIGURES}] if index else []),
    ]
    made += [{"fact": "sample", "id": f"{index}-{n}", **held} for n in range(2)]
    return [*made, {"fact": "mismatch", "step": index, "of": "sampled", **FIGURES, "sequences": 2}]


def trl_sync(index: int) -> list[Row]:
    """One sync of TRL's own, and the samples after it."""
    own: Row = {"transport": "trl", "kind": "sync", "modes": {}, "changed": None}
    own |= {"unsent": [], "unknown": [], "policy_moved": [], "policy_moved_by": 0.0}
    return [row | own if row["fact"] == "refit" else row for row in refit(index, {"forward": 1, "read": 1})]


COVERAGE: Row = {"fact": "coverage", "replica": "0", "tensors": 3, "written": ["w", "v"], "shared": {}, "derived": {}, "constant": ["c"]}
COVERAGE |= {
    "idle": [],
    "unconsumed": {},
    "unwritten": {"c": 1},
    "opaque": {},
    "never_changed": [],
    "padding": {},
    "moved": {},
    "unexported": [],
}
MAP: Row = {"fact": "map", "replica": "0", "elements": 4, "runs": 2, "duplicates": {}, "restored": True, "misplaced": {}}


def logged(*prefixes: str, first: int = 1, last: int = LAST) -> dict[str, Series]:
    """What a run logs at every step."""
    names = ("loss", "reward", "reward_std", "grad_norm", "entropy", "completions/mean_length")
    steps = tuple(range(first, last + 1))
    values = tuple(1 / step for step in steps)
    return {f"{prefix}train/{name}": Series(f"{prefix}train/{name}", steps, values) for prefix in prefixes for name in names}


def arm(name: str, seed: int, changed: int) -> Row:
    generators = {kind: f"{kind} {seed}" for kind in ("python", "numpy", "torch")}
    row = {"fact": "arm", "arm": name, "seed": seed, "changed": changed, "max_steps": LAST, "updates": [LAST, LAST], "misreported": 0}
    return row | {"generators": generators}


ARMS = [arm(name, seed, changed) for seed in (1, 2) for name, changed in (("learn", 5), ("control", 0))]
ARM_LOSSES = {f"{row['arm']}/{row['seed']}/loss": Series("", (1, 2, 3), (0.1, 0.2, 0.3)) for row in ARMS}
BASE, HALF = {"base": "b"}, {"base": "b", "w.lora_A": "h"}
ADAPTER: Row = {"trainable": 1, "max_steps": 6}
SERVER: Row = {"fact": "process", "process": "generator", "engine": "vLLM 0.32.0", "python": "/v/python", "pid": 7, "parent": 6}
HISTORY: Row = {"fact": "history", "process": "driver", "rows": {"0": '{"loss": 0.5}', "1": '{"train_loss": 0.5}'}}
WORLDS: dict[str, tuple[World, dict[str, Series]]] = {
    "smoke": ({"run": run("w", "v")}, logged("")),
    "lora-resume": (
        {
            "full": [
                parameters(["w.lora_A"], **ADAPTER),
                built(),
                state("start", 0, BASE | {"w.lora_A": "0"}),
                state("checkpoint", 3, HALF),
                gradients(),
                state("end", 6, BASE | {"w.lora_A": "1"}),
                {"fact": "adapter", "compared": 5, "wrong": [], "weights": {"w.lora_A": HALF["w.lora_A"]}},
                {"fact": "saved_adapter", "compared": 5, "wrong": [], "weights": {"w.lora_A": "1"}},
                {**HISTORY},
            ],
            "resumed": [
                parameters(["w.lora_A"], **ADAPTER | {"start_step": 3}),
                built(),
                state("start", 3, HALF),
                state("end", 6, BASE | {"w.lora_A": "1"}),
                {**HISTORY},
            ],
        },
        logged("full/", last=6) | logged("resumed/", first=4, last=6),
    ),
    "refit": (
        {
            "run": [
                {"fact": "process", "process": "generator", "pid": 7, "parent": 6, "device": "cpu", "tied": True},
                *run("w", last=COUNT),
                MAP,
                *(row for index in range(COUNT) for row in refit(index, {"read": 2})),
                COVERAGE,
            ]
        },
        logged("", last=COUNT),
    ),
    "vllm": (
        {
            "run": [
                SERVER,
                *run("w", last=COUNT),
                MAP,
                *(row for index in range(COUNT) for row in refit(index, {"forward": 1, "read": 1})),
                COVERAGE,
            ],
            "sync": [SERVER, *run("w", last=COUNT), MAP, *(row for index in range(COUNT) for row in trl_sync(index)), COVERAGE],
            "lora": [
                SERVER,
                parameters(["w.lora_A"], **ADAPTER | {"max_steps": COUNT}),
                state("start", 0, BASE | {"w.lora_A": "0"}),
                gradients(),
                state("end", COUNT, BASE | {"w.lora_A": "1"}),
                *(MAP, *(row for index in range(COUNT) for row in trl_sync(index)), COVERAGE),
            ],
        },
        logged("", "sync/", "lora/", last=COUNT),
    ),
    "ranks": (
        {
            "one": run("w"),
            "two": [
                parameters(["w"], world_size=2),
                parameters(["w"], "rank1", world_size=2),
                state("start", 0, {"w": "0"}) | {"generators": {"torch": "a"}},
                state("start", 0, {"w": "0"}, "rank1") | {"generators": {"torch": "b"}},
                state("end", LAST, {"w": "1"}),
                state("end", LAST, {"w": "1"}, "rank1"),
            ],
        },
        logged("one/", "two/"),
    ),
    "architectures": (
        {
            "moe": run("mlp.gate.w", "mlp.experts.w"),
            "vlm": [
                {"fact": "images", "other_picture_max_diff": 0.5, "same_picture_max_diff": 0.0},
                *run("vision_tower.w", "multi_modal_projector.w"),
            ],
        },
        logged("moe/", "vlm/"),
    ),
    "learning": ({"run": ARMS}, ARM_LOSSES | {"signal/gain": Series("signal/gain", (1, 2), (0.1, 0.2))}),
}
SHADOWS = {
    "smoke": {"run": LAST},
    "lora-resume": {"full": 6},
    "refit": {"run": COUNT},
    "vllm": {"run": COUNT, "sync": COUNT, "lora": COUNT},
    "ranks": {"one": LAST, "two": LAST},
    "architectures": {"moe": LAST, "vlm": LAST},
    "learning": {"run/learn/1": 4},
}
"""Recorded runs of the levels, and the steps that their shadow recomputed."""


def shadow(steps: int, **changes: Any) -> Row:
    """What a shadow writes that found nothing."""
    stages: list[Row] = [
        {"stage": name, "compared": 9, "worst": 0.5, "unproven": "", "notes": []} for name in ("data", "gradient", "update")
    ]
    return {"schema_version": 1, "steps": steps, "stages": stages, "divergence": None, "knobs": []} | changes


CHECKPOINT = trl_proofs.CHECKPOINT_FILES


def prove(directory: Path, name: str, world: World, series: dict[str, Series]) -> tuple[CheckResult, ...]:
    for phase, rows in world.items():
        (directory / phase).mkdir(exist_ok=True)
        (directory / phase / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for file in CHECKPOINT if name == "lora-resume" else ():
        (directory / "full" / "checkpoint-3").mkdir(exist_ok=True)
        (directory / "full" / "checkpoint-3" / file).touch()
    for run_of, steps in SHADOWS.get(name, {}).items():
        (directory / run_of).mkdir(parents=True, exist_ok=True)
        (directory / run_of / "shadow.json").write_text(json.dumps(shadow(steps)))
    return trl_proofs.prove(LEVELS[name], directory, Metrics(series=series))


def missed(made: tuple[CheckResult, ...]) -> list[str]:
    return [check.name for check in made if not check.passed]


@pytest.mark.parametrize("name", WORLDS)
def test_whole_facts_prove_the_level(tmp_path: Path, name: str) -> None:
    made = prove(tmp_path, name, *WORLDS[name])
    assert missed(made) == []
    assert made
    assert all(check.kind == "proof" and check.value is not None for check in made)


@pytest.mark.parametrize(("name", "place"), [(name, place) for name, places in SHADOWS.items() for place in places])
def test_a_run_that_was_not_recomputed_proves_nothing(tmp_path: Path, name: str, place: str) -> None:
    prove(tmp_path, name, *WORLDS[name])
    file = tmp_path / place / "shadow.json"
    whole = json.loads(file.read_text())
    divergence = {"stage": "gradient", "what": "norm", "expected": "1", "found": "2", "step": 2, "tensor": "w"}
    made: tuple[CheckResult, ...] = ()
    for text in (None, "", "[]", "{}", '{"error": "x"}', json.dumps(whole | {"steps": 2}), json.dumps(whole | {"divergence": divergence})):
        file.unlink(missing_ok=True) if text is None else file.write_text(text)
        made = trl_proofs.prove(LEVELS[name], tmp_path, Metrics(series=WORLDS[name][1]))
        assert len(missed(made)) == 1, text
    (wrong,) = (check for check in made if not check.passed)
    assert (wrong.stage, wrong.step, wrong.tensor, wrong.message) == ("gradient", 2, "w", "step 2, tensor w: norm: expected 1, found 2")


@pytest.mark.parametrize("name", WORLDS)
def test_without_facts_every_proof_is_missed(tmp_path: Path, name: str) -> None:
    for series in ({}, WORLDS[name][1]):
        made = trl_proofs.prove(LEVELS[name], tmp_path, Metrics(series=series))
        met = [check.name for check in made if check.passed]
        assert made
        assert [text for text in met if not text.startswith("trajectory")] == []  # which is made of metrics alone


@pytest.mark.parametrize("name", WORLDS)
def test_without_metrics_no_level_is_proven(tmp_path: Path, name: str) -> None:
    assert missed(prove(tmp_path, name, WORLDS[name][0], {}))


ROWS = [(name, phase, index) for name, (world, _) in WORLDS.items() for phase, rows in world.items() for index in range(len(rows))]


@pytest.mark.parametrize(("name", "phase", "index"), ROWS)
def test_each_fact_is_needed(tmp_path: Path, name: str, phase: str, index: int) -> None:
    world, series = copy.deepcopy(WORLDS[name])
    del world[phase][index]
    assert missed(prove(tmp_path, name, world, series))


def kind(row: Row) -> str:
    return str(row.get("when", row["fact"]))


SINGLE = [place for place in ROWS if kind(WORLDS[place[0]][0][place[1]][place[2]]) not in ("arm", "checkpoint")]
"""Facts of which a run has one."""


@pytest.mark.parametrize(("name", "phase", "index"), SINGLE)
def test_a_fact_that_was_written_twice_proves_nothing(tmp_path: Path, name: str, phase: str, index: int) -> None:
    world, series = copy.deepcopy(WORLDS[name])
    world[phase].append(world[phase][index])
    assert missed(prove(tmp_path, name, world, series))


@pytest.mark.parametrize(("name", "phase"), [(name, phase) for name, (world, _) in WORLDS.items() for phase in world])
def test_a_torn_row_is_a_missed_proof(tmp_path: Path, name: str, phase: str) -> None:
    prove(tmp_path, name, *WORLDS[name])
    with (tmp_path / phase / "facts.jsonl").open("a") as stream:
        stream.write('{"fact": "state", "wei')
    made = trl_proofs.prove(LEVELS[name], tmp_path, Metrics(series=WORLDS[name][1]))
    assert "facts are whole" in missed(made)


def change(phase: str, fact: str, index: int = 0, **changes: Any) -> Callable[[World], None]:
    """Changes the fields of one of the facts of a kind."""

    def apply(world: World) -> None:
        [row for row in world[phase] if kind(row) == fact][index].update(changes)

    return apply


def drop(phase: str, fact: str, **match: Any) -> Callable[[World], None]:
    """Takes the facts of a kind away whose fields have these values."""

    def apply(world: World) -> None:
        world[phase] = [row for row in world[phase] if kind(row) != fact or any(row[key] != value for key, value in match.items())]

    return apply


REFITS: list[tuple[str, str, Callable[[World], None]]] = [
    ("refit", refit_weights.REFITS, change("run", "parameters", max_steps=5)),
    ("refit", refit_weights.REFITS, change("run", "parameters", max_steps=3)),
    ("refit", refit_weights.REFITS, change("run", "refit", 2, step=1)),
    ("refit", refit_weights.EQUAL, change("run", "refit", 1, wrong_names=["w"])),
    ("refit", refit_weights.EQUAL, change("run", "refit", 1, consumed="y")),
    ("refit", refit_weights.EQUAL, change("run", "refit", 1, names=0)),
    ("refit", refit_weights.EQUAL, change("run", "refit", 1, produced=None, consumed=None)),
    ("refit", refit_judge.WHOLE, change("run", "refit", 1, produced=FIRST, consumed=FIRST)),
    ("refit", refit_weights.EQUAL, change("run", "hashes", 2, hashes={"w": "1"})),
    ("refit", refit_weights.EQUAL, change("run", "hashes", 3, hashes={"w": "1", "v": "0"})),
    ("refit", refit_weights.COMMITTED, change("run", "refit", 1, produced=None, consumed=None)),
    ("refit", refit_weights.COMMITTED, change("run", "refit", 1, committed=False)),
    ("refit", refit_weights.COMMITTED, change("run", "refit", 1, committed=None)),
    ("refit", refit_weights.COMMITTED, change("run", "refit", 1, consumed="y")),
    ("refit", refit_weights.COMMITTED, change("run", "refit", 1, refused="mismatch")),
    ("refit", refit_weights.REFUSED, change("run", "refit", 1, refused="mismatch")),
    ("refit", refit_weights.BASE, change("run", "refit", 0, touched_names=1)),
    ("refit", refit_weights.BASE, change("run", "refit", 0, stale_names=1)),
    ("refit", refit_weights.CONTROL, change("run", "refit", 2, touched_names=0)),
    ("refit", refit_weights.CONTROL, change("run", "refit", 2, touched_names=1)),
    ("refit", refit_weights.CONTROL, change("run", "refit", 2, stale_names=0)),
    ("refit", refit_weights.CONTROL, change("run", "refit", 2, stale_names=1)),
    ("refit", refit_weights.CONTROL, change("run", "refit", 2, stale_max_dlogp=None)),
    ("refit", refit_judge.USED, change("run", "refit", 1, transport="full")),
    ("refit", refit_judge.USED, change("run", "refit", 3, transport="packed")),
    ("refit", refit_judge.USED, change("run", "refit", 2, kind="overwrite")),
    ("refit", refit_judge.USED, change("run", "refit", 2, refused="truncated")),
    ("refit", refit_judge.WHOLE, change("run", "refit", 2, modes={"same": 2})),
    ("refit", refit_judge.WHOLE, change("run", "refit", 1, bytes=0)),
    ("refit", refit_judge.WHOLE, change("run", "refit", 1, elements=None)),
    ("refit", refit_judge.STAMPED, change("run", "sample", 3, version=1)),
    ("refit", refit_judge.STAMPED, change("run", "sample", 3, version=None)),
    ("refit", refit_judge.STAMPED, drop("run", "sample", version=2)),
    ("refit", refit_judge.STAMPED, drop("run", "sample", version=COUNT)),
    ("refit", refit_judge.STAMPED, change("run", "sample", 3, id="0-1")),
    ("refit", refit_judge.VERSIONS, change("run", "refit", 1, version=1)),
    ("refit", refit_judge.MISMATCH, change("run", "mismatch", 0, value=1.05)),
    ("refit", refit_judge.MISMATCH, change("run", "mismatch", 1, value="NaN")),
    ("refit", refit_judge.MISMATCH, change("run", "refit", 1, fresh_max_dlogp=0.1)),
]
RESTORED = "the coordinate map was made, and the weights restored bit for bit"
READ: list[tuple[str, str, Callable[[World], None]]] = [
    ("refit", refit_judge.VERSIONS, change("run", "sample", 1, incarnation="7-2")),
    ("refit", refit_judge.STAMPED, change("run", "sample", 2, incarnation=None)),
    ("refit", refit_judge.VERSIONS, change("run", "refit", 2, incarnation="8-1")),
    ("refit", refit_judge.VERSIONS, change("run", "version", 2, incarnation="8-1")),
    ("refit", refit_judge.VERSIONS, change("run", "version", 2, version=2)),
    ("refit", refit_weights.METHODS, change("run", "refit", 1, methods={"read": 1})),
    ("refit", refit_weights.METHODS, change("run", "refit", 1, methods={"guess": 2})),
    ("refit", refit_weights.METHODS, change("run", "refit", 2, methods={})),
    ("refit", RESTORED, change("run", "map", restored=False)),
    ("refit", RESTORED, change("run", "map", elements=0)),
    ("refit", RESTORED, change("run", "map", replica="1")),
    ("refit", "every element is where its name says", change("run", "map", misplaced={"w": "holds v"})),
    ("refit", "every runtime tensor is classified", change("run", "coverage", written=["w", "v", "c"])),
    ("refit", "every runtime tensor is classified", change("run", "coverage", replica="1")),
    ("refit", "every exported name is consumed", change("run", "coverage", unconsumed={"w": 2})),
    ("refit", "nothing is left unwritten but padding and derived tensors", change("run", "coverage", unwritten={"w": 2})),
    ("refit", "nothing is left unwritten but padding and derived tensors", change("run", "coverage", idle=["c"])),
    ("refit", "no name is outside the map", change("run", "coverage", opaque={"w": "quantized", "v": "quantized", "x": "quantized"})),
    (
        "refit",
        "no name is outside the map",
        change("run", "coverage", derived={"a.W_UV": "changed"}, opaque={"a.W_UV": "changed"}, tensors=4),
    ),
    (
        "refit",
        "no tensor changes that nothing explains",
        change("run", "coverage", constant=[], moved={"c": "its bits changed with load 1"}),
    ),
    ("refit", "nothing of the policy changes that is not exported", change("run", "coverage", unexported=["c"])),
    ("refit", "nothing of the policy changes that is not exported", change("run", "coverage", unexported=None)),
    ("refit", "every tensor is proven, and how", change("run", "refit", 1, unproven=["c"])),
]
FALSE: list[tuple[str, str, Callable[[World], None]]] = [
    ("smoke", "trained weights changed", change("run", "end", weights={"w": "1", "v": "0"})),
    ("smoke", "trained weights changed", change("run", "end", weights={"w": "0", "v": "0"})),
    ("smoke", "trained weights changed", change("run", "parameters", trainable_names=[])),
    ("smoke", "gradients reach every tensor", change("run", "gradients", idle_at={"v": 2})),
    ("smoke", "gradients reach every tensor", change("run", "gradients", seen=False)),
    ("smoke", "loaded weights equal the files: bit-equal", change("run", "loaded", wrong=["v"])),
    ("smoke", "loaded weights equal the files: bit-equal", change("run", "loaded", compared=0)),
    ("smoke", "saved weights equal the model: bit-equal", change("run", "saved", wrong=["v"])),
    ("smoke", "saved weights equal the model: bit-equal", change("run", "saved", lost=["v"])),
    ("smoke", "saved settings and tokenizer are the model's", change("run", "saved", odd=["tokenizer.json"])),
    ("smoke", "embeddings are tied as configured", change("run", "loaded", tied=False)),
    ("lora-resume", "the checkpoint stores the adapter's settings", change("full", "adapter", wrong=["lora_alpha"])),
    ("lora-resume", "new adapters from the seed: bit-equal", change("resumed", "built", weights={"w.lora_A": "1"})),
    ("lora-resume", "random state from the seed: bit-equal", change("resumed", "built", generators={"torch": "h"})),
    ("lora-resume", "adapters in the checkpoint: bit-equal", change("full", "adapter", weights={"w.lora_A": "x"})),
    ("lora-resume", "the checkpoint stores the adapter's settings", change("full", "saved_adapter", wrong=["r"])),
    ("lora-resume", "adapters as they are saved at the end: bit-equal", change("full", "saved_adapter", weights={"w.lora_A": "0"})),
    ("lora-resume", "history of both runs: bit-equal", change("resumed", "history", rows={"0": '{"loss": 1}'})),
    ("refit", "the generator ties what the trainer ties", change("run", "process", tied=False)),
    ("smoke", "optimizer updates", change("run", "end", updates=[2, 3])),
    ("smoke", "optimizer updates", change("run", "end", updates=[0, 0])),
    ("smoke", "every step was logged", change("run", "parameters", max_steps=4)),
    ("smoke", "no parameter is frozen", change("run", "parameters", trainable=8)),
    ("lora-resume", "trainable parameters", change("full", "parameters", trainable=0)),
    ("lora-resume", "only adapters train", change("full", "parameters", trainable_names=["w.lora_A", "base"])),
    ("lora-resume", "only adapters train", change("full", "parameters", trainable_names=[])),
    ("lora-resume", "adapter weights changed", change("full", "end", weights=BASE | {"w.lora_A": "0"})),
    ("lora-resume", "base frozen", change("full", "end", weights={"base": "other", "w.lora_A": "1"})),
    ("lora-resume", "base frozen", change("full", "end", weights={"w.lora_A": "1"})),
    ("lora-resume", "resumed from the checkpoint", change("resumed", "parameters", start_step=0)),
    ("lora-resume", "restored weights: bit-equal", change("resumed", "start", weights=BASE | {"w.lora_A": "0"})),
    ("lora-resume", "restored optimizer: bit-equal", change("resumed", "start", optimizer={})),
    ("lora-resume", "restored scheduler: bit-equal", change("resumed", "start", scheduler={"a": "x"})),
    ("lora-resume", "final weights of both runs: bit-equal", change("resumed", "end", weights=BASE | {"w.lora_A": "0"})),
    ("lora-resume", "final optimizer of both runs: bit-equal", change("resumed", "end", optimizer={"a": "optimizer6", "b": "1"})),
    ("lora-resume", "final generators of both runs: bit-equal", change("resumed", "end", generators={"a": "x"})),
    *REFITS,
    *(("vllm", name, falsify) for _, name, falsify in REFITS),
    ("vllm", "vLLM generates in its own process", change("run", "process", engine="transformers")),
    ("vllm", "vLLM generates in its own process", change("run", "process", parent=7)),
    ("refit", "generation runs in its own process", change("run", "process", parent=7)),
    ("refit", refit_judge.WHOLE, change("run", "refit", 1, bytes="9")),
    ("refit", refit_judge.WHOLE, change("run", "coverage", written="w")),
    *READ,
    *(("vllm", name, falsify) for _, name, falsify in READ),
    ("vllm", refit_judge.WHOLE, change("run", "coverage", written="w")),
    ("vllm", refit_judge.WHOLE, change("run", "refit", 1, bytes="9")),
    ("vllm", refit_judge.WHOLE, change("run", "map", elements=-4)),
    ("vllm", "TRL's own sync sent every tensor under its name (sync)", change("sync", "refit", 1, unsent=["w"])),
    ("vllm", "TRL's own sync sent every tensor under its name (lora)", change("lora", "refit", 1, unknown=["x"])),
    ("vllm", "TRL's own sync leaves the policy as it was (sync)", change("sync", "refit", 1, policy_moved_by=1e-9)),
    ("vllm", "TRL's own sync leaves the policy as it was (lora)", change("lora", "refit", 1, policy_moved_by=1e-4)),
    ("vllm", f"{refit_weights.EQUAL} (sync)", change("sync", "refit", 1, wrong_names=["w"])),
    ("vllm", f"{refit_weights.EQUAL} (lora)", change("lora", "refit", 2, consumed="other")),
    ("vllm", f"{refit_weights.CONTROL} (sync)", change("sync", "refit", 1, stale_names=0)),
    ("vllm", f"{refit_judge.STAMPED} (sync)", change("sync", "sample", 1, version=None)),
    ("vllm", f"{refit_judge.WHOLE} (lora)", change("lora", "refit", 1, transport="full")),
    ("vllm", "vLLM generates in its own process (sync)", change("sync", "process", process="other")),
    ("vllm", "adapter weights (lora) changed", change("lora", "end", weights=BASE | {"w.lora_A": "0"})),
    ("ranks", "two processes form one group", change("two", "parameters", world_size=1)),
    ("ranks", "ranks end with the same weights: bit-equal", change("two", "end", 1, weights={"w": "2"})),
    ("ranks", "ranks end with the same weights: bit-equal", change("two", "end", 1, weights={"w": "1", "x": "1"})),
    ("architectures", "MoE router weights changed", change("moe", "end", weights={"mlp.gate.w": "0", "mlp.experts.w": "1"})),
    ("architectures", "MoE expert weights changed", change("moe", "end", weights={"mlp.gate.w": "1", "mlp.experts.w": "0"})),
    ("architectures", "another picture changes the logits", change("vlm", "images", other_picture_max_diff=0.0)),
    ("architectures", "another picture changes the logits", change("vlm", "images", other_picture_max_diff="NaN")),
    ("architectures", "another picture changes the logits", change("vlm", "images", same_picture_max_diff=0.4)),
    (
        "architectures",
        "vision tower weights changed",
        change("vlm", "start", weights={"vision_tower.w": "1", "multi_modal_projector.w": "0"}),
    ),
    ("learning", "learning arms changed the weights", change("run", "arm", 2, changed=0)),
    ("ranks", "ranks draw random numbers of their own", change("two", "start", 1, generators={"torch": "a"})),
    ("learning", "control arms changed nothing", change("run", "arm", 1, changed=1)),
    ("learning", "rewards were logged as they were given", change("run", "arm", 1, misreported=1)),
    ("learning", "each seed has random numbers of its own", change("run", "arm", 2, generators={"torch": "torch 1"})),
    ("learning", "every seed has a learning arm and a control", change("run", "arm", 2, seed=3)),
    ("learning", "every arm made and logged every step", change("run", "arm", 2, updates=[0, 3])),
    ("learning", "every arm made and logged every step", change("run", "arm", 2, max_steps=4)),
]


@pytest.mark.parametrize(("name", "proof", "falsify"), FALSE)
def test_a_false_fact_is_seen(tmp_path: Path, name: str, proof: str, falsify: Callable[[World], None]) -> None:
    world, series = copy.deepcopy(WORLDS[name])
    falsify(world)
    assert proof in missed(prove(tmp_path, name, world, series))


def test_a_step_that_was_not_logged_is_seen(tmp_path: Path) -> None:
    world, series = copy.deepcopy(WORLDS["smoke"])
    series["train/loss"] = Series("train/loss", (1, 3), (0.1, 0.2))
    made = prove(tmp_path, "smoke", world, series)
    assert missed(made) == ["every step was logged"]
    assert next(check.missing for check in made if not check.passed) == (2,)


def test_a_trajectory_that_differs_is_seen(tmp_path: Path) -> None:
    world, series = copy.deepcopy(WORLDS["lora-resume"])
    series["resumed/train/loss"] = Series("", (4, 5, 6), (1 / 4, 1 / 5, math.nextafter(1 / 6, 1)))
    assert missed(prove(tmp_path, "lora-resume", world, series)) == ["trajectory after the resume: bit-equal"]


@pytest.mark.parametrize("file", CHECKPOINT)
def test_a_checkpoint_without_one_of_its_files_is_incomplete(tmp_path: Path, file: str) -> None:
    prove(tmp_path, "lora-resume", *WORLDS["lora-resume"])
    (tmp_path / "full" / "checkpoint-3" / file).unlink()
    made = trl_proofs.prove(LEVELS["lora-resume"], tmp_path, Metrics(series=WORLDS["lora-resume"][1]))
    assert missed(made) == ["checkpoint is complete"]
    assert next(check.message for check in made if not check.passed) == file


def test_seeds_without_a_gain_are_missed(tmp_path: Path) -> None:
    world, series = WORLDS["learning"]
    fewer = series | {"signal/gain": Series("signal/gain", (1,), (0.1,))}
    assert missed(prove(tmp_path, "learning", world, fewer)) == ["every seed has a learning arm and a control"]


def test_differing_names_both_sides() -> None:
    assert probe_facts.differing({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == ["a", "b", "c"]
    assert probe_facts.differing({"a": "1"}, {"a": "1"}) == []


def test_a_first_refit_that_was_refused_is_a_missed_proof(tmp_path: Path) -> None:
    """The run ends there: the facts are those of one refit, and of no sample."""
    world, series = copy.deepcopy(WORLDS["refit"])
    first = next(place for place, row in enumerate(world["run"]) if kind(row) == "refit")
    del world["run"][first + 1 :]
    change("run", "refit", 0, refused="truncated", committed=False, consumed=None, touched_names=0)(world)
    wanted = {refit_weights.REFUSED, refit_weights.REFITS, refit_weights.EQUAL, refit_judge.USED}
    assert wanted <= set(missed(prove(tmp_path, "refit", world, series)))
