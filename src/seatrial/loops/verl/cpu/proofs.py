"""What the facts of a level on a CPU prove: pure functions from the files of a level directory to checks.

The facts come from inside verl's processes: the engines of the worker, both ends of the weight sync, the replay buffer
and the reward. Each proof has the value it measured; a fact that is missing is a missed proof.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from seatrial.checks.step import step_checks
from seatrial.loops.facts import Facts, read_facts
from seatrial.loops.proof import differing, equal, proof, same_trajectory
from seatrial.loops.verl.claims import in_force
from seatrial.loops.verl.cpu.claims import claims
from seatrial.loops.verl.cpu.settings import UPDATES
from seatrial.loops.verl.cpu.sync import few, is_adapter, span, state, synced
from seatrial.model.knowledge import Level
from seatrial.model.record import CheckResult
from seatrial.model.series import Metrics
from seatrial.model.verdict import Boundary

Row = dict[str, Any]
HEAD = "output_layer.weight"
"""The critic's head in Megatron: it is new, so it is trained beside adapters, too."""
CONTROL = "control"
CONTROL_STEPS = 2
"""A learning rate of 0 changes nothing in any number of steps."""


def prove(level: Level, directory: Path, metrics: Metrics, strategy: str) -> tuple[CheckResult, ...]:
    """All proofs of a level."""
    facts = {path.parent.name: read_facts(path) for path in sorted(directory.glob("*/facts.jsonl"))}
    none = Facts(())
    made = [proof("facts are whole", False, str(item), Boundary.METRICS) for each in facts.values() for item in each.damage]
    last, megatron = level.steps or 0, strategy == "megatron"
    made += [in_force(phase, claims(strategy, phase, steps), directory / phase / "run.log") for phase, steps in _phases(level).items()]
    if level.name == "smoke":
        for phase in ("grpo", "ppo"):
            if (facts.get(phase, none).one("model") or {"made": True})["made"]:
                made += step_checks(directory / phase, phase, last * UPDATES, lora=phase == "ppo")
        made += trained(facts.get("grpo", none), metrics, "grpo", 0, last, ("actor",), per_step=UPDATES)
        made.append(reference(facts.get("grpo", none), "grpo"))
        adapted = ("actor", "critic") if megatron else ("actor",)
        made += trained(facts.get("ppo", none), metrics, "ppo", 0, last, ("actor", "critic"), adapted, UPDATES)
    elif level.name == "save-resume":
        full, resumed = facts.get("full", none), facts.get("resumed", none)
        lora = ("actor",) if megatron else ()
        made += trained(full, metrics, "full", 0, last, ("actor", "critic"), lora)
        made += [] if megatron else [reference(full, "full")]
        made.append(complete(directory / "full" / "checkpoints" / f"global_step_{last // 2}", strategy))
        made += resume(full, resumed, metrics, last // 2, last)
        made += trained(resumed, metrics, "resumed", last // 2, last, ("actor", "critic"), lora)
    elif level.name == "learning":
        made += trained(facts.get("learn", none), metrics, "learn", 0, last, ("actor",))
        made += idle(facts.get(CONTROL, none), metrics)
    return tuple(made)


def _phases(level: Level) -> dict[str, int]:
    """The phases of a level, and the step that each is to reach."""
    last = level.steps or 0
    found = {"smoke": {"grpo": last, "ppo": last}, "save-resume": {"full": last, "resumed": last}}
    return found.get(level.name, {CONTROL: CONTROL_STEPS, "learn": last})


def trained(
    facts: Facts,
    metrics: Metrics,
    phase: str,
    begin: int,
    last: int,
    roles: tuple[str, ...],
    lora: tuple[str, ...] = (),
    per_step: int = 1,
) -> list[CheckResult]:
    """One run did all it was to do: every parameter, every update, every sync, every rollout. `lora` names the roles with adapters."""
    made = []
    for role in roles:
        made += updated(facts, phase, role, begin, last, role in lora, per_step)
    return [
        *made,
        *synced(facts, phase, begin, last, "actor" in lora),
        *rolled_out(facts, phase, begin, last),
        logged(metrics, phase, begin, last),
    ]


def updated(facts: Facts, phase: str, role: str, begin: int, last: int, lora: bool, per_step: int = 1) -> list[CheckResult]:
    """What was to be trained has a gradient and moved at every step; what was not did not."""
    where = f" ({phase}, {role})"
    run, model = facts.one("parameters", role=role), facts.one("model")
    first = state(facts, role, "restored" if begin else "start", begin)
    rows = [first, *(state(facts, role, "step", step) for step in range(begin + 1, last + 1))]
    if run is None or model is None or last <= begin or not all(rows):
        return [proof(f"training facts{where}", False, "no facts", Boundary.OPTIMIZER)]
    boundary = Boundary.PEFT if lora else Boundary.OPTIMIZER
    names = run["trainable_names"]
    stray = [name for name in names if is_adapter(name) != lora and not (role == "critic" and name == HEAD)]
    frozen = run["frozen_names"]
    chosen = bool(names) and not stray and bool(frozen) == lora == any(is_adapter(name) for name in names)
    still = [step for step, (a, b) in enumerate(itertools.pairwise(rows), begin + 1) if not _moved(a, b, names)]
    # A model that is not ours may have tensors that no text reaches.
    silent = rows[-1]["without_gradient"]
    reached = set(silent) < set(names) and not (silent and model["made"])
    stuck = [name for name in names if name not in silent and first["weights"].get(name) == rows[-1]["weights"].get(name)]
    moved = sum(first["weights"].get(name) != rows[-1]["weights"].get(name) for name in names)
    drifted = [name for name in frozen if first["weights"][name] != rows[-1]["weights"].get(name)]
    counts = [row["updates"] for row in rows[1:]]
    what = "only adapters train" if lora else "no parameter is frozen"
    return [
        proof(f"{what}{where}", chosen, f"{run['trainable']} of {run['total']}", boundary),
        proof(f"weights move at every step{where}", not still, f"{last - begin - len(still)} of {last - begin}", boundary, "all"),
        proof(f"every trained tensor changed{where}", not stuck, f"{moved} of {len(names)}", boundary, "all", few(stuck)),
        proof(f"frozen tensors did not{where}", not drifted, f"{len(drifted)} of {len(frozen)} moved", boundary, "0", few(drifted)),
        proof(f"gradients reach every tensor{where}", reached, f"{len(silent)} without", boundary, "0", few(silent)),
        proof(
            f"{'one optimizer update' if per_step == 1 else f'{per_step} optimizer updates'} per step{where}",
            counts == [[step * per_step] * 2 for step in range(begin + 1, last + 1)],
            f"{counts[-1]}",
            boundary,
            f"{last * per_step}",
        ),
    ]


def _moved(before: Row, after: Row, names: list[str]) -> bool:
    return any(before["weights"].get(name) != after["weights"].get(name) for name in names)


def reference(facts: Facts, phase: str) -> CheckResult:
    """The reference is a model of its own, and starts as the actor."""
    run = facts.one("parameters", role="reference")
    name = f"the reference starts as the actor ({phase})"
    return equal(
        name, state(facts, "reference", "start", 0).get("weights") if run else None, state(facts, "actor", "start", 0).get("weights")
    )


def rolled_out(facts: Facts, phase: str, begin: int, last: int) -> list[CheckResult]:
    """Every prompt of every step came back with all its trajectories, each was scored, and scores differ."""
    rows = facts.of("rollouts")
    train = [row for row in rows if row["split"] == "train"]
    steps = [row["step"] for row in train]
    failed, lost = sum(row["failed"] for row in rows), sum(row["expected"] - row["trajectories"] for row in rows)
    scored, expected = len(facts.of("reward")), sum(row["expected"] for row in rows)
    spread = {row["score"] for row in facts.of("reward")}
    wanted, where = list(range(begin + 1, last + 1)), f" ({phase})"
    return [
        proof(f"rollouts for every step{where}", steps == wanted, span(steps), Boundary.ROLLOUT, span(wanted)),
        proof(
            f"no rollout was lost{where}",
            bool(rows) and not failed and not lost,
            f"{failed} prompts, {lost} trajectories",
            Boundary.ROLLOUT,
            "0",
        ),
        proof(f"every trajectory was scored{where}", bool(scored) and scored == expected, f"{scored}", Boundary.REWARD, f"{expected}"),
        proof(f"rewards differ{where}", len(spread) > 1, f"{len(spread)} values", Boundary.REWARD, "> 1"),
    ]


def logged(metrics: Metrics, phase: str, begin: int, last: int) -> CheckResult:
    """Metrics of every step are there, and of no other."""
    series = metrics.series.get(f"{phase}/training/global_step")
    found, wanted = set(series.steps) if series else set(), set(range(begin + 1, last + 1))
    return CheckResult(
        name=f"every step was logged ({phase})",
        kind="proof",
        passed=bool(wanted) and found == wanted,
        value=f"{len(found & wanted)} of {len(wanted)}",
        threshold="all",
        steps=tuple(sorted(found)),
        missing=tuple(sorted(wanted - found)),
    )


def is_clock(name: str) -> bool:
    """Whether a metric measures the machine: time, throughput, memory."""
    return "perf/" in name or name.startswith("timing_")


def resume(full: Facts, resumed: Facts, metrics: Metrics, middle: int, last: int) -> list[CheckResult]:
    """The resumed run starts from the checkpoint and equals the uninterrupted run from there on, in everything."""
    made = []
    for role in ("actor", "critic"):
        saved, restored = state(full, role, "saved", middle), state(resumed, role, "restored", middle)
        one, two = state(full, role, "step", last), state(resumed, role, "step", last)
        for part in ("weights", "optimizer", "scheduler", "generators"):
            made.append(equal(f"restored {part} of the {role}", saved.get(part), restored.get(part)))
            made.append(equal(f"final {part} of the {role}", one.get(part), two.get(part)))
        # Equal for nothing, had there been nothing to load.
        fresh, loaded = state(resumed, role, "start", 0).get("weights", {}), restored.get("weights", {})
        apart = differing(fresh, loaded) if fresh and loaded else []
        made.append(
            proof(f"without the checkpoint the {role} is another one", bool(apart), f"{len(apart)} tensors", Boundary.CHECKPOINT, "> 0")
        )
    for key, what in (("asked", "prompts"), ("answered", "completions")):
        made.append(equal(f"{what} after the resume", _rollouts(full, key, middle), _rollouts(resumed, key, middle), Boundary.DATA))
    return [*made, same_trajectory(metrics, "full/", "resumed/", middle, is_clock)]


def checkpoint_files(strategy: str) -> list[str]:
    """What a checkpoint of actor and critic consists of."""
    if strategy != "megatron":
        made = [f"{role}/{part}_world_size_1_rank_0.pt" for role in ("actor", "critic") for part in ("model", "optim", "extra_state")]
        return [*made, "data.pt"]
    parts = [f"{role}/{part}/dist_ckpt/.metadata" for role in ("actor", "critic") for part in ("optimizer", "extra")]
    whole = ["actor/model/dist_ckpt/.metadata", "critic/model/huggingface/model.safetensors"]
    return [*parts, *whole, "actor/ckpt_contents.json", "critic/ckpt_contents.json", "data.pt"]


def complete(folder: Path, strategy: str) -> CheckResult:
    """A checkpoint has model, optimizer and extra state of actor and critic, and the position in the data."""
    wanted = checkpoint_files(strategy)
    absent = [name for name in wanted if not (folder / name).is_file()]
    value = f"{len(wanted) - len(absent)} of {len(wanted)} files in {folder.name}"
    return proof("checkpoint is complete", not absent, value, Boundary.CHECKPOINT, "all", few(absent))


def _rollouts(facts: Facts, key: str, after: int) -> dict[str, str]:
    return {f"step {row['step']}": row[key] for row in facts.of("rollouts", split="train") if row["step"] > after and key in row}


def idle(facts: Facts, metrics: Metrics) -> list[CheckResult]:
    """The control made its steps and changed nothing; both arms were validated with the same prompts."""
    begin = state(facts, "actor", "start", 0).get("weights", {})
    rows = [state(facts, "actor", "step", step).get("weights", {}) for step in range(1, CONTROL_STEPS + 1)]
    kept = {f"{step} {name}": value for step in range(1, CONTROL_STEPS + 1) for name, value in begin.items()}
    held = {f"{step} {name}": value for step, row in enumerate(rows, 1) for name, value in row.items()}
    learned, control = (metrics.series.get(f"{phase}/signal/gain") for phase in ("learn", CONTROL))
    counts = [len(series.steps) if series else 0 for series in (learned, control)]
    return [
        equal("the control's weights stay as they were", kept, held, Boundary.OPTIMIZER),
        *rolled_out(facts, CONTROL, 0, CONTROL_STEPS),
        proof("both arms were validated", counts[0] > 0 and counts[0] == counts[1], f"{counts} prompts", Boundary.METRICS),
    ]
