"""What the facts of a TRL level prove: pure functions from the files of a level directory to checks, each with its measured value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from seatrial.checks.probe_facts import Facts, Row, about_run, differing, equal, proof, read_facts
from seatrial.checks.refit_facts import KNOWN
from seatrial.checks.refit_judge import TRANSPORTS, Expected, judge_refits
from seatrial.checks.step import RECORD, step_checks
from seatrial.core.guarded import parse_json
from seatrial.core.records import CheckResult, replace
from seatrial.core.series import Metrics
from seatrial.core.specs import Level
from seatrial.core.verdict import Boundary
from seatrial.instruments.trl.extra_runs import RESEEDED, STEPS, VARIANTS
from seatrial.loops.trl.trl_metrics import RELATIVE, same_trajectory, within_tolerance

ROUNDING = 1e-5
"""How far merging adapters and taking them out again may move a frozen weight, which rounds each time: in fp32 by some 1e-8."""
SYNC = "trl"
"""The transport of TRL's own sync, as its facts name it."""


def refits(facts: Facts) -> list[CheckResult]:
    """Level 2: a process of our own generates."""
    other = facts.one("process", process="generator")
    value = f"pid {other['pid']} on {other['device']}" if other else "no facts"
    found = facts.one("loaded")
    tied = found is not None and other is not None and found["tied"] == other["tied"]
    return [
        proof("generation runs in its own process", _own(other), value, Boundary.ROLLOUT),
        proof("the generator ties what the trainer ties", tied, f"{(other or {}).get('tied')}", Boundary.REFIT),
        *_judged(facts, TRANSPORTS),
    ]


def served(facts: Facts, transports: tuple[str, ...] = TRANSPORTS) -> list[CheckResult]:
    """Level 3: vLLM generates."""
    other = facts.one("process", process="generator")
    own = _own(other) and other is not None and str(other.get("engine", "")).startswith("vLLM ")
    value = f"{other.get('engine')}, pid {other['pid']}" if other else "no facts"
    python = f"{other['python']}" if other else ""
    return [proof("vLLM generates in its own process", own, value, Boundary.ROLLOUT, "", python), *_judged(facts, transports)]


def synced(facts: Facts, run: str, lora: bool = False) -> list[CheckResult]:
    """Level 3, where TRL's own sync brings the weights over; the names of the checks say in which run."""
    rows = facts.of("refit", transport=SYNC)
    unsent = {name for row in rows for name in row["unsent"]}
    unknown = {name for row in rows for name in row["unknown"]}
    listed = [*(f"{name} was not sent" for name in sorted(unsent)), *(f"{name} is no name of the policy" for name in sorted(unknown))]
    moved = max((row["policy_moved_by"] for row in rows), default=None)
    bound = ROUNDING if lora else 0.0
    sent, most = bool(rows) and not unsent and not unknown, f"<= {bound:.0e}" if lora else "0"
    value = f"{len(rows)} syncs, {len(unsent)} left out, {len(unknown)} under other names" if rows else "no facts"
    shift = f"moved by up to {moved:.1e}" if moved is not None else "no facts"
    own = [
        proof("TRL's own sync sent every tensor under its name", sent, value, Boundary.REFIT, "all", ", ".join(listed[:3])),
        proof("TRL's own sync leaves the policy as it was", moved is not None and moved <= bound, shift, Boundary.REFIT, most),
    ]
    return [replace(check, name=f"{check.name} ({run})", run=run) for check in (*own, *served(facts, (SYNC,)))]


def _own(process: Row | None) -> bool:
    return process is not None and process["pid"] != process["parent"]


def _judged(facts: Facts, transports: tuple[str, ...]) -> tuple[CheckResult, ...]:
    """One refit before the generation of every step, so the last version has samples, too."""
    run = _driver(facts)
    rows = tuple(row for row in facts.rows if row["fact"] in KNOWN)
    wanted = max(2, int(run["max_steps"])) if run else 2
    return judge_refits(Facts(rows), Expected(wanted, transports, ends_with_samples=True, driven=True)).checks


MOST_STEPS = 1_000_000
"""More than any level takes: a fact that says so costs no list of them."""


def states(facts: Facts, process: str = "driver") -> tuple[dict[str, Any], dict[str, Any]]:
    """State at the start and at the end; empty when it was not recorded exactly once."""
    start = facts.one("state", when="start", process=process)
    end = facts.one("state", when="end", process=process)
    return start or {}, end or {}


def _moved(facts: Facts) -> set[str] | None:
    """Names whose hash differs between start and end; None without facts of both."""
    start, end = states(facts)
    if not start or not end:
        return None
    return set(differing(start["weights"], end["weights"]))


def changed(facts: Facts, words: tuple[str, ...], what: str, boundary: Boundary) -> CheckResult:
    """Every trained parameter whose name holds one of the words changed, unless it never had a gradient."""
    run, gradients = _driver(facts), facts.one("gradients", process="driver")
    moved = _moved(facts)
    if not run or not gradients or moved is None:
        return proof(f"{what} changed", False, "no facts", boundary)
    names = [name for name in run["trainable_names"] if any(word in name for word in words) or not words]
    idle = set(gradients["never"])
    stuck = [name for name in names if name not in moved and name not in idle]
    count = sum(name in moved for name in names)
    return proof(f"{what} changed", bool(count) and not stuck, f"{count} of {len(names)} tensors", boundary, "all", ", ".join(stuck[:3]))


def trained(facts: Facts, metrics: Metrics, prefix: str, lora: bool = False) -> list[CheckResult]:
    """One training run did all it was to do: every parameter, every step, every update. Its shadow proves the gradients."""
    run, gradients = _driver(facts), facts.one("gradients", process="driver")
    name = prefix.rstrip("/")
    where = f" ({name})" if name else ""
    if not run or not gradients:
        return [proof(f"training facts{where}", False, "no facts", Boundary.METRICS, run=name)]
    # An adapter's first factor has no gradient while its second is still zero, so for adapters one gradient is enough.
    idle = [name for name in gradients["never" if lora else "idle_at"] if "post_layernorm" not in name]  # LLaVA reads the layer before it
    everywhere = bool(gradients["seen"]) and not (idle and run["made"])
    made = [
        changed(facts, (), f"trained weights{where}", Boundary.OPTIMIZER),
        proof(f"gradients reach every tensor{where}", everywhere, f"{len(idle)} without", Boundary.OPTIMIZER, "0", ", ".join(idle[:3])),
        *steps(facts, metrics, prefix, where, run["start_step"], run["max_steps"]),
    ]
    if lora:
        made.append(adapter_settings(facts))
    else:
        made += on_disk(facts, where, bool(run["made"]))
        frozen = run["total"] - run["trainable"]
        made.append(proof(f"no parameter is frozen{where}", frozen == 0, f"{frozen} of {run['total']}", Boundary.OPTIMIZER, "0"))
    return about_run(name, made)


def adapter_settings(facts: Facts) -> CheckResult:
    """What a checkpoint says about the adapter is how it was trained."""
    rows = [facts.one(fact) for fact in ("adapter", "saved_adapter")]
    name = "the checkpoint stores the adapter's settings"
    known = [row for row in rows if row is not None]
    if len(known) < len(rows):
        return proof(name, False, "no facts", Boundary.CHECKPOINT)
    wrong = sorted({setting for row in known for setting in row["wrong"]})
    return proof(name, not wrong, f"{known[0]['compared']} compared", Boundary.CHECKPOINT, "all", ", ".join(wrong))


def on_disk(facts: Facts, where: str, made: bool) -> list[CheckResult]:
    """The model is what the files said, and the files say what the model is; tied weights are one tensor."""
    found = facts.one("loaded")
    written = facts.one("saved")
    name = f"embeddings are tied as configured{where}"
    tied = proof(name, False, "no facts", Boundary.PROVIDER)
    if found is not None:
        tied = proof(name, found["tied"] == found["tie_wanted"], f"{found['tied']}", Boundary.PROVIDER, f"{found['tie_wanted']}")
    return [
        _equal_files(f"loaded weights equal the files{where}", found, made, where),
        _equal_files(f"saved weights equal the model{where}", written, made, where),
        _whole_model(written, where),
        tied,
    ]


def _whole_model(row: Row | None, where: str) -> CheckResult:
    """Configuration and tokenizer are saved with the weights, and say what they said before."""
    name = f"saved settings and tokenizer are the model's{where}"
    if row is None:
        return proof(name, False, "no facts", Boundary.CHECKPOINT)
    return proof(name, not row["odd"], f"{len(row['files'])} files", Boundary.CHECKPOINT, "all", ", ".join(row["odd"][:3]))


def _equal_files(name: str, row: Row | None, made: bool, where: str) -> CheckResult:
    """Every tensor of the model has one in the files, by name or content; experts may be fused, and so may be a user's model."""
    if row is None:
        return proof(f"{name}: bit-equal", False, "no facts", Boundary.PROVIDER)
    found = row["compared"] + row["renamed"] - len(row["wrong"])
    fused = not made or "moe" in where
    lost = [] if fused else list(row["lost"])
    enough = found > 0 and (fused or found == row["stored"]) and not lost
    value = f"{found} of {row['stored']} tensors"
    odd = ", ".join([*row["wrong"], *lost][:3])
    return proof(f"{name}: bit-equal", enough and not row["wrong"], value, Boundary.PROVIDER, "all", odd)


def steps(facts: Facts, metrics: Metrics, prefix: str, where: str, start: int, last: int) -> list[CheckResult]:
    """Every step was logged, and updated the weights once."""
    wanted = set(range(start + 1, min(last, start + MOST_STEPS) + 1))
    loss = metrics.series.get(f"{prefix}train/loss")
    logged = set(loss.steps) if loss else set()
    updates = states(facts)[1].get("updates")
    whole = bool(wanted) and logged == wanted and last <= start + MOST_STEPS
    every = proof(f"every step was logged{where}", whole, f"{len(wanted & logged)} of {len(wanted)}", Boundary.METRICS, "all")
    return [
        replace(every, steps=tuple(sorted(logged)), missing=tuple(sorted(wanted - logged))),
        # An optimizer that keeps no count (plain SGD) cannot be asked.
        proof(f"optimizer updates{where}", updates in (None, [last, last]), f"{updates or 'not counted'}", Boundary.OPTIMIZER, f"{last}"),
    ]


CHECKPOINT_FILES = (
    *("adapter_model.safetensors", "adapter_config.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"),
    "training_args.bin",
)
IMAGE_EFFECT = 1e-6
RECORDED_STEPS = 4
"""Steps of the first learning arm that are recorded."""


def prove(level: Level, directory: Path, metrics: Metrics) -> tuple[CheckResult, ...]:
    found = {path.parent.name: read_facts(path) for path in sorted(directory.glob("*/facts.jsonl"))}
    whole = [proof("facts are whole", False, str(item), Boundary.METRICS) for each in found.values() for item in each.damage]
    return (*whole, *_of_level(level.name, directory, metrics, lambda run: found.get(run, Facts(()))))


def _of_level(level: str, directory: Path, metrics: Metrics, of: Callable[[str], Facts]) -> Iterator[CheckResult]:
    def recomputed(run: str, **how: bool) -> list[CheckResult]:
        return step_checks(directory / run, run, planned(of(run)), **how)

    def finished(run: str, **how: bool) -> list[CheckResult]:
        return trained(of(run), metrics, "" if run == "run" else f"{run}/", **how)

    match level:
        case "smoke":
            yield from recomputed("run")
            names = varied(directory)
            for name in names:
                yield from step_checks(directory / "run" / "variants" / name, f"variant {name}", STEPS, brief=True)
            yield from finished("run")
            yield from seeded(directory / "run") if names else ()
        case "lora-resume":
            yield from recomputed("full", lora=True)
            yield from lora(of("full"))
            yield from finished("full", lora=True)
            yield from resume(directory, of("full"), of("resumed"), metrics)
        case "refit":
            yield from (*refits(of("run")), *recomputed("run"), *finished("run"))
        case "vllm":
            yield from (*served(of("run")), *recomputed("run"), *finished("run"))
            # A stale server explains what it samples.
            yield from (*synced(of("sync"), "sync"), *recomputed("sync"), *finished("sync"))
            yield from (*synced_adapters(of("lora"), metrics), *recomputed("lora", lora=True))
        case "ranks":
            yield from (*recomputed("one"), *recomputed("two", ranks=True), *finished("one"))
            yield from ranks(of("one"), of("two"), metrics)
        case "architectures":
            yield from (*recomputed("moe"), *moe(of("moe")), *finished("moe"))
            yield from (*recomputed("vlm"), *vlm(of("vlm")), *finished("vlm"))
        case "learning":
            yield from step_checks(directory / "run" / "learn" / "1", "learn/1", RECORDED_STEPS)
            yield from arms(of("run"), metrics)
        case _:
            raise KeyError(level)


def _driver(facts: Facts) -> Row | None:
    return facts.one("parameters", process="driver")


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


def planned(facts: Facts) -> int | None:
    row = _driver(facts)
    return int(row["max_steps"]) - int(row["start_step"]) if row else None


def synced_adapters(facts: Facts, metrics: Metrics) -> list[CheckResult]:
    """Adapters train and are merged for vLLM by TRL's own sync; nothing else of the run is of interest here (see level 1)."""
    row = _driver(facts)
    logged = []
    if row:
        logged = steps(facts, metrics, "lora/", " (lora)", row["start_step"], row["max_steps"])
    made = [
        proof("training facts (lora)", row is not None, "no facts" if row is None else "there", Boundary.METRICS),
        *logged,
        changed(facts, ("lora_",), "adapter weights (lora)", Boundary.PEFT),
        *synced(facts, "lora", lora=True),
    ]
    return about_run("lora", made)


def lora(facts: Facts) -> list[CheckResult]:
    """Adapters train, everything else is frozen."""
    row = _driver(facts)
    names = row["trainable_names"] if row else []
    stray = [name for name in names if "lora_" not in name]
    start, end = states(facts)
    base = {name: value for name, value in start.get("weights", {}).items() if "lora_" not in name}
    moved = [name for name, value in base.items() if end.get("weights", {}).get(name) != value]
    count = f"{row['trainable']} of {row['total']}" if row else "no facts"
    whole, value = bool(base) and bool(end) and not moved, f"{len(moved)} of {len(base)} tensors moved"
    return [
        proof("trainable parameters", bool(row and row["trainable"]), count, Boundary.PEFT, "> 0"),
        proof("only adapters train", bool(names) and not stray, f"{len(stray)} others", Boundary.PEFT, "0", ", ".join(stray[:3])),
        changed(facts, ("lora_",), "adapter weights", Boundary.PEFT),
        proof("base frozen", whole, value, Boundary.PEFT, "0", ", ".join(moved[:3])),
    ]


def resume(directory: Path, full: Facts, resumed: Facts, metrics: Metrics) -> list[CheckResult]:
    """The resumed run starts from the checkpoint and equals the uninterrupted run from there on, in everything."""
    saved = full.of("state", when="checkpoint")
    step = int(saved[0]["step"]) if saved else None
    folder = directory / "full" / f"checkpoint-{step}"
    absent = [name for name in CHECKPOINT_FILES if not (folder / name).is_file()]
    row = _driver(resumed)
    begin = row["start_step"] if row else None
    full_end, resumed_end = states(full)[1], states(resumed)[1]
    resumed_start = states(resumed)[0]
    made = [
        proof("checkpoint is complete", bool(saved) and not absent, f"checkpoint-{step}", Boundary.CHECKPOINT, "", ", ".join(absent)),
        proof("resumed from the checkpoint", step is not None and begin == step, f"step {begin}", Boundary.CHECKPOINT, f"step {step}"),
    ]
    one, two = (each.one("built") or {} for each in (full, resumed))
    made.append(equal("new adapters from the seed", one.get("weights"), two.get("weights"), Boundary.PEFT))
    made.append(equal("random state from the seed", one.get("generators"), two.get("generators"), Boundary.ENVIRONMENT))
    stored = full.one("adapter")
    kept = saved[0].get("weights", {}) if saved else {}
    adapters = {name: value for name, value in kept.items() if ".lora_" in name and "magnitude" not in name}
    made.append(equal("adapters in the checkpoint", adapters, stored.get("weights") if stored else None))
    last = full.one("saved_adapter")
    live = {name: value for name, value in full_end.get("weights", {}).items() if ".lora_" in name and "magnitude" not in name}
    made.append(equal("adapters as they are saved at the end", live, last.get("weights") if last else None))
    for part in ("weights", "optimizer", "scheduler"):
        made.append(equal(f"restored {part}", saved[0].get(part) if saved else None, resumed_start.get(part)))
    made.append(same_trajectory(metrics, "full/", "resumed/", step))
    for part in ("weights", "optimizer", "scheduler", "generators"):
        made.append(equal(f"final {part} of both runs", full_end.get(part), resumed_end.get(part)))
    first, second = (each.one("history") or {} for each in (full, resumed))
    made.append(equal("history of both runs", _every_step(first), _every_step(second)))
    return made


def _every_step(history: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a trainer's history says of its steps; the row that closes a run knows only what that run computed."""
    rows = history.get("rows")
    return None if rows is None else {key: row for key, row in rows.items() if '"train_loss"' not in row}


def ranks(one: Facts, two: Facts, metrics: Metrics) -> list[CheckResult]:
    """Two ranks took part, hold identical weights, and followed the trajectory of one."""
    first, second = states(two)[1].get("weights", {}), states(two, "rank1")[1].get("weights", {})
    wrong = differing(first, second)
    both = bool(first) and bool(second)
    sizes = [row["world_size"] for row in two.of("parameters")]
    run = _driver(two)
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
        proof("optimizer updates (two)", whole, f"{counts}", Boundary.DDP, f"{last}", run="two"),
        proof("final weights of two ranks against one", near, f"norms {alone:.8g}, {together:.8g}", Boundary.DDP, f"within {RELATIVE}"),
        proof("ranks end with the same weights: bit-equal", both and not wrong, value, Boundary.DDP, "all", ", ".join(wrong[:3])),
        within_tolerance(metrics, "one/", "two/"),
    ]


def moe(facts: Facts) -> list[CheckResult]:
    return [
        changed(facts, ("mlp.gate.", "router"), "MoE router weights", Boundary.PROVIDER),
        changed(facts, ("experts",), "MoE expert weights", Boundary.PROVIDER),
    ]


def vlm(facts: Facts) -> list[CheckResult]:
    """Pictures reach the model, and the parts that read them learn."""
    row = facts.one("images")
    effect, repeat = (row["other_picture_max_diff"], row["same_picture_max_diff"]) if row else (None, None)
    seen = isinstance(effect, float) and isinstance(repeat, float) and effect > IMAGE_EFFECT and repeat < effect / 10
    value = f"{effect:.3g} (same picture {repeat:.3g})" if isinstance(effect, float) and isinstance(repeat, float) else "no facts"
    return [
        proof("another picture changes the logits", seen, value, Boundary.DATA, f"> {IMAGE_EFFECT}"),
        changed(facts, ("vision_tower",), "vision tower weights", Boundary.PROVIDER),
        changed(facts, ("multi_modal_projector",), "projector weights", Boundary.PROVIDER),
    ]


def arms(facts: Facts, metrics: Metrics) -> list[CheckResult]:
    """Each learning arm moved the weights at every step, no control arm did, and every seed has both."""
    learned, control = facts.of("arm", arm="learn"), facts.of("arm", arm="control")
    gains = metrics.series.get("signal/gain")
    seeds = set(gains.steps) if gains else set()
    paired = bool(seeds) and {row["seed"] for row in learned} == {row["seed"] for row in control} == seeds
    moved, idle = sum(bool(row["changed"]) for row in learned), sum(bool(row["changed"]) for row in control)
    short = [row for row in (*learned, *control) if not _whole_arm(row, metrics)]
    wrong = sum(int(row["misreported"]) for row in (*learned, *control))
    count = len(learned) + len(control)
    drawn = {kind: {row["generators"].get(kind) for row in learned} for kind in ("python", "numpy", "torch")}
    least, ran = min(map(len, drawn.values())), len(learned)
    pairs, changed_all, whole = f"{ran} and {len(control)}", bool(learned) and moved == ran, bool(count) and not short
    return [
        proof("every seed has a learning arm and a control", paired, pairs, Boundary.METRICS, f"{len(seeds)} each"),
        proof("learning arms changed the weights", changed_all, f"{moved} of {ran}", Boundary.OPTIMIZER, "all"),
        proof("control arms changed nothing", bool(control) and not idle, f"{idle} of {len(control)}", Boundary.OPTIMIZER, "0"),
        proof(
            "each seed has random numbers of its own", bool(ran) and least == ran, f"{least} kinds", Boundary.ENVIRONMENT, f"{len(seeds)}"
        ),
        proof("rewards were logged as they were given", bool(count) and not wrong, f"{wrong} others", Boundary.METRICS, "0"),
        proof("every arm made and logged every step", whole, f"{count - len(short)} of {count}", Boundary.OPTIMIZER, "all"),
    ]


def _whole_arm(row: Mapping[str, Any], metrics: Metrics) -> bool:
    """An arm logged each of its steps and updated the weights at each of them."""
    loss = metrics.series.get(f"{row['arm']}/{row['seed']}/loss")
    last = row["max_steps"]
    whole = loss is not None and len(loss.steps) == last and loss.steps == tuple(range(1, last + 1))
    return whole and row["updates"] in (None, [last, last])
