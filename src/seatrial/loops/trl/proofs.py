"""What the facts of a level prove: pure functions from the files of a level directory to checks.

Each proof has the value it measured, so that a reader can see that it could have failed. A fact that is missing is
a missed proof, never an absent one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from seatrial.checks.step import RECORD, step_checks
from seatrial.loops.facts import Facts, read_facts
from seatrial.loops.proof import differing, equal, proof
from seatrial.loops.trl.drive.variants import RESEEDED, STEPS, VARIANTS
from seatrial.loops.trl.refits import refits, served, synced
from seatrial.loops.trl.training import changed, states, steps, trained
from seatrial.loops.trl.trajectory import RELATIVE, same_trajectory, within_tolerance
from seatrial.model.guarded import parse_json
from seatrial.model.knowledge import Level
from seatrial.model.record import CheckResult
from seatrial.model.series import Metrics
from seatrial.model.verdict import Boundary

CHECKPOINT_FILES = (
    *("adapter_model.safetensors", "adapter_config.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"),
    "training_args.bin",
)
IMAGE_EFFECT = 1e-6
RECORDED_STEPS = 4
"""Steps of the first learning arm that are recorded."""


def prove(level: Level, directory: Path, metrics: Metrics) -> tuple[CheckResult, ...]:
    """All proofs of a level."""
    facts = {path.parent.name: read_facts(path) for path in sorted(directory.glob("*/facts.jsonl"))}
    run = facts.get("run")
    made: dict[str, Callable[[], Iterable[CheckResult]]] = {
        "smoke": lambda: [
            *step_checks(directory / "run", "run", planned(run)),
            *(
                check
                for name in varied(directory)
                for check in step_checks(directory / "run" / "variants" / name, f"variant {name}", STEPS, brief=True)
            ),
            *trained(run, metrics, ""),
            *(seeded(directory / "run") if varied(directory) else ()),
        ],
        "lora-resume": lambda: [
            *step_checks(directory / "full", "full", planned(facts.get("full")), lora=True),
            *lora(facts.get("full")),
            *trained(facts.get("full"), metrics, "full/", lora=True),
            *resume(directory, facts.get("full"), facts.get("resumed"), metrics),
        ],
        "refit": lambda: [*refits(run), *step_checks(directory / "run", "run", planned(run)), *trained(run, metrics, "")],
        "vllm": lambda: [
            *served(run),
            *step_checks(directory / "run", "run", planned(run)),
            *trained(run, metrics, ""),
            *synced(facts.get("sync"), "sync"),  # a stale server explains what it samples
            *step_checks(directory / "sync", "sync", planned(facts.get("sync"))),
            *trained(facts.get("sync"), metrics, "sync/"),
            *synced_adapters(facts.get("lora"), metrics),
            *step_checks(directory / "lora", "lora", planned(facts.get("lora")), lora=True),
        ],
        "ranks": lambda: [
            *step_checks(directory / "one", "one", planned(facts.get("one"))),
            *step_checks(directory / "two", "two", planned(facts.get("two")), ranks=True),
            *trained(facts.get("one"), metrics, "one/"),
            *ranks(facts.get("one"), facts.get("two"), metrics),
        ],
        "architectures": lambda: [
            *step_checks(directory / "moe", "moe", planned(facts.get("moe"))),
            *moe(facts.get("moe")),
            *trained(facts.get("moe"), metrics, "moe/"),
            *step_checks(directory / "vlm", "vlm", planned(facts.get("vlm"))),
            *vlm(facts.get("vlm")),
            *trained(facts.get("vlm"), metrics, "vlm/"),
        ],
        "learning": lambda: [*step_checks(directory / "run" / "learn" / "1", "learn/1", RECORDED_STEPS), *arms(run, metrics)],
    }
    whole = [proof("facts are whole", False, str(item), Boundary.METRICS) for each in facts.values() for item in each.damage]
    return (*whole, *made[level.name]())


def seeded(directory: Path) -> list[CheckResult]:
    """Random numbers come from the seed: variants with the same seed draw their first tokens from the same state, others do not."""
    places = {"": directory} | {name: directory / "variants" / name for name in VARIANTS}
    states = {name: first_random_state(place) for name, place in places.items()}
    own = states.pop("")
    wrong = [name for name, state in states.items() if state is None or (state == own) == (name in RESEEDED)]
    value = f"{len(states) - len(wrong)} of {len(states)} variants"
    return [proof("random numbers come from the seed", own is not None and not wrong, value, Boundary.ROLLOUT, "all", ", ".join(wrong))]


def first_random_state(directory: Path) -> str | None:
    """The digest of the random state that a recorded run drew its first tokens from."""
    try:
        for line in (directory / RECORD).read_text(encoding="utf-8").splitlines():
            row = parse_json(line)
            if row["event"] == "generated":
                return str(row["values"]["random_state"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def varied(directory: Path) -> tuple[str, ...]:
    """The variants that a run was to train, if it was to train any: one that left nothing is missed, not absent."""
    return tuple(VARIANTS) if (directory / "run" / "variants").is_dir() else ()


def planned(facts: Facts | None) -> int | None:
    """Steps that a run was to take."""
    row = facts.one("parameters", process="driver") if facts else None
    return int(row["max_steps"]) - int(row["start_step"]) if row else None


def synced_adapters(facts: Facts | None, metrics: Metrics) -> list[CheckResult]:
    """Adapters train and are merged for vLLM by TRL's own sync; nothing else of the run is of interest here (see level 1)."""
    row = facts.one("parameters", process="driver") if facts else None
    logged = []
    if row:
        logged = steps(facts, metrics, "lora/", " (lora)", row["start_step"], row["max_steps"])
    return [
        proof("training facts (lora)", row is not None, "no facts" if row is None else "there", Boundary.METRICS),
        *logged,
        changed(facts, ("lora_",), "adapter weights (lora)", Boundary.PEFT),
        *synced(facts, "lora", lora=True),
    ]


def lora(facts: Facts | None) -> list[CheckResult]:
    """Adapters train, everything else is frozen."""
    row = facts.one("parameters", process="driver") if facts else None
    names = row["trainable_names"] if row else []
    stray = [name for name in names if "lora_" not in name]
    start, end = states(facts)
    base = {name: value for name, value in start.get("weights", {}).items() if "lora_" not in name}
    moved = [name for name, value in base.items() if end.get("weights", {}).get(name) != value]
    count = f"{row['trainable']} of {row['total']}" if row else "no facts"
    return [
        proof("trainable parameters", bool(row and row["trainable"]), count, Boundary.PEFT, "> 0"),
        proof("only adapters train", bool(names) and not stray, f"{len(stray)} others", Boundary.PEFT, "0", ", ".join(stray[:3])),
        changed(facts, ("lora_",), "adapter weights", Boundary.PEFT),
        proof(
            "base frozen",
            bool(base) and bool(end) and not moved,
            f"{len(moved)} of {len(base)} tensors moved",
            Boundary.PEFT,
            "0",
            ", ".join(moved[:3]),
        ),
    ]


def resume(directory: Path, full: Facts | None, resumed: Facts | None, metrics: Metrics) -> list[CheckResult]:
    """The resumed run starts from the checkpoint and equals the uninterrupted run from there on, in everything."""
    saved = full.of("state", when="checkpoint") if full else []
    step = int(saved[0]["step"]) if saved else None
    folder = directory / "full" / f"checkpoint-{step}"
    absent = [name for name in CHECKPOINT_FILES if not (folder / name).is_file()]
    row = resumed.one("parameters", process="driver") if resumed else None
    begin = row["start_step"] if row else None
    full_end, resumed_end = states(full)[1], states(resumed)[1]
    resumed_start = states(resumed)[0]
    made = [
        proof("checkpoint is complete", bool(saved) and not absent, f"checkpoint-{step}", Boundary.CHECKPOINT, "", ", ".join(absent)),
        proof("resumed from the checkpoint", step is not None and begin == step, f"step {begin}", Boundary.CHECKPOINT, f"step {step}"),
    ]
    one, two = ((each.one("built") if each else None) or {} for each in (full, resumed))
    made.append(equal("new adapters from the seed", one.get("weights"), two.get("weights"), Boundary.PEFT))
    made.append(equal("random state from the seed", one.get("generators"), two.get("generators"), Boundary.ENVIRONMENT))
    stored = full.one("adapter") if full else None
    kept = saved[0].get("weights", {}) if saved else {}
    adapters = {name: value for name, value in kept.items() if ".lora_" in name and "magnitude" not in name}
    made.append(equal("adapters in the checkpoint", adapters, stored.get("weights") if stored else None))
    last = full.one("saved_adapter") if full else None
    live = {name: value for name, value in full_end.get("weights", {}).items() if ".lora_" in name and "magnitude" not in name}
    made.append(equal("adapters as they are saved at the end", live, last.get("weights") if last else None))
    for part in ("weights", "optimizer", "scheduler"):
        made.append(equal(f"restored {part}", saved[0].get(part) if saved else None, resumed_start.get(part)))
    made.append(same_trajectory(metrics, "full/", "resumed/", step))
    for part in ("weights", "optimizer", "scheduler", "generators"):
        made.append(equal(f"final {part} of both runs", full_end.get(part), resumed_end.get(part)))
    first, second = ((each.one("history") if each else None) or {} for each in (full, resumed))
    made.append(equal("history of both runs", _every_step(first), _every_step(second)))
    return made


def _every_step(history: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a trainer's history says of its steps; the row that closes a run knows only what that run computed."""
    rows = history.get("rows")
    return None if rows is None else {key: row for key, row in rows.items() if '"train_loss"' not in row}


def ranks(one: Facts | None, two: Facts | None, metrics: Metrics) -> list[CheckResult]:
    """Two ranks took part, hold identical weights, and followed the trajectory of one."""
    first, second = states(two)[1].get("weights", {}), states(two, "rank1")[1].get("weights", {})
    wrong = differing(first, second)
    both = bool(first) and bool(second)
    sizes = [row["world_size"] for row in two.of("parameters")] if two else []
    run = two.one("parameters", process="driver") if two else None
    last = run["max_steps"] if run else None
    counts = [states(two, process)[1].get("updates") for process in ("driver", "rank1")]
    whole = last is not None and all(count in (None, [last, last]) for count in counts)
    drawn = [states(two, process)[0].get("generators", {}).get("torch") for process in ("driver", "rank1")]
    own = None not in drawn and drawn[0] != drawn[1]
    alone, together = (float(states(each)[1].get("norm", math.nan)) for each in (one, two))
    near = abs(alone - together) <= RELATIVE * abs(alone)
    value = f"{len(first) - len(wrong)} of {len(first)} equal" if both else "no facts of both ranks"
    return [
        proof("two processes form one group", sizes == [2, 2], f"world sizes {sizes}", Boundary.DDP, "[2, 2]"),
        proof("ranks draw random numbers of their own", own, "others" if own else "the same", Boundary.DDP, "others"),
        proof("optimizer updates (two)", whole, f"{counts}", Boundary.DDP, f"{last}"),
        proof("final weights of two ranks against one", near, f"norms {alone:.8g}, {together:.8g}", Boundary.DDP, f"within {RELATIVE}"),
        proof("ranks end with the same weights: bit-equal", both and not wrong, value, Boundary.DDP, "all", ", ".join(wrong[:3])),
        within_tolerance(metrics, "one/", "two/"),
    ]


def moe(facts: Facts | None) -> list[CheckResult]:
    """Routers and experts learn."""
    return [
        changed(facts, ("mlp.gate.", "router"), "MoE router weights", Boundary.PROVIDER),
        changed(facts, ("experts",), "MoE expert weights", Boundary.PROVIDER),
    ]


def vlm(facts: Facts | None) -> list[CheckResult]:
    """Pictures reach the model, and the parts that read them learn."""
    row = facts.one("images") if facts else None
    effect, repeat = (row["other_picture_max_diff"], row["same_picture_max_diff"]) if row else (None, None)
    seen = isinstance(effect, float) and isinstance(repeat, float) and effect > IMAGE_EFFECT and repeat < effect / 10
    value = f"{effect:.3g} (same picture {repeat:.3g})" if isinstance(effect, float) and isinstance(repeat, float) else "no facts"
    return [
        proof("another picture changes the logits", seen, value, Boundary.DATA, f"> {IMAGE_EFFECT}"),
        changed(facts, ("vision_tower",), "vision tower weights", Boundary.PROVIDER),
        changed(facts, ("multi_modal_projector",), "projector weights", Boundary.PROVIDER),
    ]


def arms(facts: Facts | None, metrics: Metrics) -> list[CheckResult]:
    """Each learning arm moved the weights at every step, no control arm did, and every seed has both."""
    learned, control = (facts.of("arm", arm="learn"), facts.of("arm", arm="control")) if facts else ([], [])
    gains = metrics.series.get("signal/gain")
    seeds = set(gains.steps) if gains else set()
    paired = bool(seeds) and {row["seed"] for row in learned} == {row["seed"] for row in control} == seeds
    moved, idle = sum(bool(row["changed"]) for row in learned), sum(bool(row["changed"]) for row in control)
    short = [row for row in (*learned, *control) if not _whole_arm(row, metrics)]
    wrong = sum(int(row["misreported"]) for row in (*learned, *control))
    count = len(learned) + len(control)
    drawn = {kind: {row["generators"].get(kind) for row in learned} for kind in ("python", "numpy", "torch")}
    least = min(map(len, drawn.values()))
    return [
        proof(
            "every seed has a learning arm and a control",
            paired,
            f"{len(learned)} and {len(control)}",
            Boundary.METRICS,
            f"{len(seeds)} each",
        ),
        proof(
            "learning arms changed the weights",
            bool(learned) and moved == len(learned),
            f"{moved} of {len(learned)}",
            Boundary.OPTIMIZER,
            "all",
        ),
        proof("control arms changed nothing", bool(control) and not idle, f"{idle} of {len(control)}", Boundary.OPTIMIZER, "0"),
        proof(
            "each seed has random numbers of its own",
            bool(learned) and least == len(learned),
            f"{least} kinds",
            Boundary.ENVIRONMENT,
            f"{len(seeds)}",
        ),
        proof("rewards were logged as they were given", bool(count) and not wrong, f"{wrong} others", Boundary.METRICS, "0"),
        proof(
            "every arm made and logged every step", bool(count) and not short, f"{count - len(short)} of {count}", Boundary.OPTIMIZER, "all"
        ),
    ]


def _whole_arm(row: Mapping[str, Any], metrics: Metrics) -> bool:
    """An arm logged each of its steps and updated the weights at each of them."""
    loss = metrics.series.get(f"{row['arm']}/{row['seed']}/loss")
    last = row["max_steps"]
    whole = loss is not None and len(loss.steps) == last and loss.steps == tuple(range(1, last + 1))
    return whole and row["updates"] in (None, [last, last])
