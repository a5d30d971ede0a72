"""What the facts of a CPU level prove: every update, every rollout, and a generator that holds exactly the actor's weights."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from seatrial.checks.probe_facts import Facts, about_run, differing, equal, proof, read_facts, same_trajectory
from seatrial.checks.step import step_checks
from seatrial.core.records import CheckResult, replace
from seatrial.core.series import Metrics
from seatrial.core.specs import Level
from seatrial.core.verdict import Boundary
from seatrial.loops.verl.cpu_settings import UPDATES, phase_claims
from seatrial.loops.verl.verl_log import in_force


def weight_state(facts: Facts, role: str, when: str, step: int) -> Row:
    """The only state of that moment; empty when there is none or more than one."""
    return facts.one("state", role=role, when=when, step=step) or {}


def span(steps: list[int]) -> str:
    """The steps as a reader wants them: `0 to 20` when none is missing, doubled or out of order."""
    whole = bool(steps) and steps[-1] - steps[0] == len(steps) - 1 and steps == list(range(steps[0], steps[-1] + 1))
    return f"{steps[0]} to {steps[-1]}" if whole else f"{steps}"


def is_adapter(name: str) -> bool:
    """Whether a tensor belongs to an adapter: PEFT and Megatron-Bridge name theirs differently."""
    return "lora_" in name or ".adapter." in name


def synced(facts: Facts, phase: str, begin: int, last: int, lora: bool) -> list[CheckResult]:
    """After every step the generation server holds, bit for bit, what the actor holds; with adapters the base came first."""
    rows = [row for row in facts.of("sync") if row["adapter"] == lora]
    base = [row for row in facts.of("sync") if row["adapter"] != lora]
    bad = [row["step"] for row in (*rows, *base) if row["unknown"] or row["absent"] or row["wrong"] or not row["sent"]]
    wrong = [name for row in (*rows, *base) for name in (*row["unknown"], *row["absent"], *row["wrong"])]
    steps = [row["step"] for row in rows]
    names, where, wanted = len(rows[0]["sent"]) if rows else 0, f" ({phase})", list(range(begin, last + 1))
    value = f"{names} tensors, {len(bad)} of {len(rows) + len(base)} syncs wrong"
    made = [
        proof(f"weights go to the generator at every step{where}", steps == wanted, span(steps), Boundary.REFIT, span(wanted)),
        proof(f"the generator holds what was sent: bit-equal{where}", bool(rows) and not bad, value, Boundary.REFIT, "all", few(wrong)),
        _follows(facts, rows, base, begin, where),
    ]
    if lora:
        early = [row["step"] for row in base] == [begin]
        made.append(proof(f"the base was sent before the adapters{where}", early, f"{len(base)} syncs", Boundary.REFIT, "1"))
    if not begin:
        made.append(_began(facts, (base if lora else rows)[:1], where))
    return made


def _follows(facts: Facts, rows: list[Row], base: list[Row], begin: int, where: str) -> CheckResult:
    """What was sent is what the actor holds, by an opinion of our own on what that is; or, of a model that we have none on, it moves."""
    given = (facts.one("model") or {"made": True})["made"] is False
    first = weight_state(facts, "actor", "restored" if begin else "start", begin)
    if given and first and first.get("exported") is None:
        still = [b["step"] for a, b in itertools.pairwise(rows) if a["sent"] == b["sent"]]
        return proof(f"what is sent moves with the actor{where}", len(rows) > 1 and not still, f"{len(still)} syncs", Boundary.REFIT, "0")
    names = [name for row in (*rows, *base) for name in _foreign(facts, row, begin)]
    value = f"{len(names)} tensors differ"
    return proof(
        f"what was sent is what the actor holds: bit-equal{where}", bool(rows) and not names, value, Boundary.REFIT, "0", few(names)
    )


def _foreign(facts: Facts, row: Row, begin: int) -> list[str]:
    """Names in a sync that are not as the actor holds them at that step, and what the actor holds and was not sent."""
    when = "step" if row["step"] > begin else "restored" if begin else "start"
    held = weight_state(facts, "actor", when, row["step"]).get("exported") or {}
    return _unlike(row["sent"], {name: value for name, value in held.items() if is_adapter(name) == row["adapter"]}) or (
        [] if held else ["all"]
    )


def _began(facts: Facts, first: list[Row], where: str) -> CheckResult:
    """The first weights sent are those of the model's files: what was loaded into the engine came out again."""
    files = facts.one("files")
    names = _unlike(first[0]["sent"], files["tensors"]) if first and files else ["all"]
    count = len(files["tensors"]) if files else 0
    name = f"the first weights sent are those of the model's files: bit-equal{where}"
    return proof(name, bool(count) and not names, f"{len(names)} of {count} tensors differ", Boundary.PROVIDER, "0", few(names))


def _unlike(sent: Row, held: Row) -> list[str]:
    """Where two sets of tensors differ; of tied tensors, which are equal, one name is enough."""
    wrong = [name for name, value in sent.items() if (held[name] != value if name in held else value not in held.values())]
    return wrong + [name for name, value in held.items() if name not in sent and value not in sent.values()]


def few(names: list[str]) -> str:
    """Enough of them to know where to look."""
    return ", ".join(names[:3])


Row = dict[str, Any]
HEAD = "output_layer.weight"
"""The critic's head in Megatron: it is new, so it is trained beside adapters, too."""
CONTROL = "control"
CONTROL_STEPS = 2
"""A learning rate of 0 changes nothing in any number of steps."""


def prove(level: Level, directory: Path, metrics: Metrics, strategy: str) -> tuple[CheckResult, ...]:
    facts = {path.parent.name: read_facts(path) for path in sorted(directory.glob("*/facts.jsonl"))}
    none = Facts(())
    made = [proof("facts are whole", False, str(item), Boundary.METRICS) for each in facts.values() for item in each.damage]
    last, megatron = level.steps or 0, strategy == "megatron"
    made += [
        in_force(phase, phase_claims(strategy, phase, steps), directory / phase / "run.log") for phase, steps in _phases(level).items()
    ]
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
    facts: Facts, metrics: Metrics, phase: str, begin: int, last: int, roles: tuple[str, ...], lora: tuple[str, ...] = (), per_step: int = 1
) -> list[CheckResult]:
    """One run did all it was to do: every parameter, every update, every sync, every rollout. `lora` names the roles with adapters."""
    made = []
    for role in roles:
        made += updated(facts, phase, role, begin, last, role in lora, per_step)
    made += synced(facts, phase, begin, last, "actor" in lora)
    made += rolled_out(facts, phase, begin, last)
    return about_run(phase, [*made, logged(metrics, phase, begin, last)])


def updated(facts: Facts, phase: str, role: str, begin: int, last: int, lora: bool, per_step: int = 1) -> list[CheckResult]:
    """What was to be trained has a gradient and moved at every step; what was not did not."""
    where = f" ({phase}, {role})"
    run, model = facts.one("parameters", role=role), facts.one("model")
    first = weight_state(facts, role, "restored" if begin else "start", begin)
    rows = [first, *(weight_state(facts, role, "step", step) for step in range(begin + 1, last + 1))]
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
    each = counts == [[step * per_step] * 2 for step in range(begin + 1, last + 1)]
    updates = "one optimizer update" if per_step == 1 else f"{per_step} optimizer updates"
    what = "only adapters train" if lora else "no parameter is frozen"
    return [
        proof(f"{what}{where}", chosen, f"{run['trainable']} of {run['total']}", boundary),
        proof(f"weights move at every step{where}", not still, f"{last - begin - len(still)} of {last - begin}", boundary, "all"),
        proof(f"every trained tensor changed{where}", not stuck, f"{moved} of {len(names)}", boundary, "all", few(stuck)),
        proof(f"frozen tensors did not{where}", not drifted, f"{len(drifted)} of {len(frozen)} moved", boundary, "0", few(drifted)),
        proof(f"gradients reach every tensor{where}", reached, f"{len(silent)} without", boundary, "0", few(silent)),
        proof(f"{updates} per step{where}", each, f"{counts[-1]}", boundary, f"{last * per_step}"),
    ]


def _moved(before: Row, after: Row, names: list[str]) -> bool:
    return any(before["weights"].get(name) != after["weights"].get(name) for name in names)


def reference(facts: Facts, phase: str) -> CheckResult:
    """The reference is a model of its own, and starts as the actor."""
    run = facts.one("parameters", role="reference")
    own, actor = (weight_state(facts, role, "start", 0).get("weights") for role in ("reference", "actor"))
    return replace(equal(f"the reference starts as the actor ({phase})", own if run else None, actor), run=phase)


def rolled_out(facts: Facts, phase: str, begin: int, last: int) -> list[CheckResult]:
    """Every prompt of every step came back with all its trajectories, each was scored, and scores differ."""
    rows = facts.of("rollouts")
    train = [row for row in rows if row["split"] == "train"]
    steps = [row["step"] for row in train]
    failed, lost = sum(row["failed"] for row in rows), sum(row["expected"] - row["trajectories"] for row in rows)
    scored, expected = len(facts.of("reward")), sum(row["expected"] for row in rows)
    spread = {row["score"] for row in facts.of("reward")}
    wanted, where = list(range(begin + 1, last + 1)), f" ({phase})"
    value = f"{failed} prompts, {lost} trajectories"
    return [
        proof(f"rollouts for every step{where}", steps == wanted, span(steps), Boundary.ROLLOUT, span(wanted)),
        proof(f"no rollout was lost{where}", bool(rows) and not failed and not lost, value, Boundary.ROLLOUT, "0"),
        proof(f"every trajectory was scored{where}", bool(scored) and scored == expected, f"{scored}", Boundary.REWARD, f"{expected}"),
        proof(f"rewards differ{where}", len(spread) > 1, f"{len(spread)} values", Boundary.REWARD, "> 1"),
    ]


def logged(metrics: Metrics, phase: str, begin: int, last: int) -> CheckResult:
    series = metrics.series.get(f"{phase}/training/global_step")
    found, wanted = set(series.steps) if series else set(), set(range(begin + 1, last + 1))
    whole, value = bool(wanted) and found == wanted, f"{len(found & wanted)} of {len(wanted)}"
    every = proof(f"every step was logged ({phase})", whole, value, Boundary.METRICS, "all")
    return replace(every, steps=tuple(sorted(found)), missing=tuple(sorted(wanted - found)))


def is_clock(name: str) -> bool:
    """Whether a metric measures the machine: time, throughput, memory."""
    return "perf/" in name or name.startswith("timing_")


def resume(full: Facts, resumed: Facts, metrics: Metrics, middle: int, last: int) -> list[CheckResult]:
    """The resumed run starts from the checkpoint and equals the uninterrupted run from there on, in everything."""
    made = []
    for role in ("actor", "critic"):
        saved, restored = weight_state(full, role, "saved", middle), weight_state(resumed, role, "restored", middle)
        one, two = weight_state(full, role, "step", last), weight_state(resumed, role, "step", last)
        for part in ("weights", "optimizer", "scheduler", "generators"):
            made.append(equal(f"restored {part} of the {role}", saved.get(part), restored.get(part)))
            made.append(equal(f"final {part} of the {role}", one.get(part), two.get(part)))
        # Equal for nothing, had there been nothing to load.
        fresh, loaded = weight_state(resumed, role, "start", 0).get("weights", {}), restored.get("weights", {})
        apart = differing(fresh, loaded) if fresh and loaded else []
        made.append(
            proof(f"without the checkpoint the {role} is another one", bool(apart), f"{len(apart)} tensors", Boundary.CHECKPOINT, "> 0")
        )
    for key, what in (("asked", "prompts"), ("answered", "completions")):
        made.append(equal(f"{what} after the resume", _rollouts(full, key, middle), _rollouts(resumed, key, middle), Boundary.DATA))
    return [*made, same_trajectory(metrics, "full/", "resumed/", middle, is_clock)]


def checkpoint_files(strategy: str) -> list[str]:
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
    begin = weight_state(facts, "actor", "start", 0).get("weights", {})
    rows = [weight_state(facts, "actor", "step", step).get("weights", {}) for step in range(1, CONTROL_STEPS + 1)]
    kept = {f"{step} {name}": value for step in range(1, CONTROL_STEPS + 1) for name, value in begin.items()}
    held = {f"{step} {name}": value for step, row in enumerate(rows, 1) for name, value in row.items()}
    learned, control = (metrics.series.get(f"{phase}/signal/gain") for phase in ("learn", CONTROL))
    counts = [len(series.steps) if series else 0 for series in (learned, control)]
    return [
        equal("the control's weights stay as they were", kept, held, Boundary.OPTIMIZER),
        *about_run(CONTROL, rolled_out(facts, CONTROL, 0, CONTROL_STEPS)),
        proof("both arms were validated", counts[0] > 0 and counts[0] == counts[1], f"{counts} prompts", Boundary.METRICS),
    ]
