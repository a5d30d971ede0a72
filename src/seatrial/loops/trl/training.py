"""What one training run proves about itself: every parameter, every step, every update, and what is on disk.

Shared by the levels. Each proof has the value it measured; a fact that is missing is a missed proof.
"""

from __future__ import annotations

from typing import Any

from seatrial.loops.facts import Facts, Row
from seatrial.loops.proof import differing, proof
from seatrial.model.record import CheckResult
from seatrial.model.series import Metrics
from seatrial.model.verdict import Boundary

MOST_STEPS = 1_000_000
"""More than any level takes: a fact that says so costs no list of them."""


def states(facts: Facts | None, process: str = "driver") -> tuple[dict[str, Any], dict[str, Any]]:
    """State at the start and at the end; empty when it was not recorded exactly once."""
    start = facts.one("state", when="start", process=process) if facts else None
    end = facts.one("state", when="end", process=process) if facts else None
    return start or {}, end or {}


def _moved(facts: Facts | None) -> set[str] | None:
    """Names whose hash differs between start and end; None without facts of both."""
    start, end = states(facts)
    if not start or not end:
        return None
    return set(differing(start["weights"], end["weights"]))


def changed(facts: Facts | None, words: tuple[str, ...], what: str, boundary: Boundary) -> CheckResult:
    """Every trained parameter whose name holds one of the words changed, unless it never had a gradient."""
    run, gradients = (facts.one("parameters", process="driver"), facts.one("gradients", process="driver")) if facts else (None, None)
    moved = _moved(facts)
    if not run or not gradients or moved is None:
        return proof(f"{what} changed", False, "no facts", boundary)
    names = [name for name in run["trainable_names"] if any(word in name for word in words) or not words]
    idle = set(gradients["never"])
    stuck = [name for name in names if name not in moved and name not in idle]
    count = sum(name in moved for name in names)
    return proof(f"{what} changed", bool(count) and not stuck, f"{count} of {len(names)} tensors", boundary, "all", ", ".join(stuck[:3]))


def trained(facts: Facts | None, metrics: Metrics, prefix: str, lora: bool = False) -> list[CheckResult]:
    """One training run did all it was to do: every parameter, every step, every update.

    Its gradients are proven by its shadow, which knows when there is nothing to learn.
    """
    run, gradients = (facts.one("parameters", process="driver"), facts.one("gradients", process="driver")) if facts else (None, None)
    where = f" ({prefix.rstrip('/')})" if prefix else ""
    if not run or not gradients:
        return [proof(f"training facts{where}", False, "no facts", Boundary.METRICS)]
    # An adapter's first factor has no gradient while its second is still zero, so for adapters one gradient is enough.
    idle = [name for name in gradients["never" if lora else "idle_at"] if "post_layernorm" not in name]  # LLaVA reads the layer before it
    everywhere = bool(gradients["seen"]) and not (idle and run["made"])
    made = [
        changed(facts, (), f"trained weights{where}", Boundary.OPTIMIZER),
        proof(
            f"gradients reach every tensor{where}",
            everywhere,
            f"{len(idle)} without",
            Boundary.OPTIMIZER,
            "0",
            ", ".join(idle[:3]),
        ),
        *steps(facts, metrics, prefix, where, run["start_step"], run["max_steps"]),
    ]
    if lora:
        made.append(adapter_settings(facts))
    else:
        made += on_disk(facts, where, bool(run["made"]))
        frozen = run["total"] - run["trainable"]
        made.append(proof(f"no parameter is frozen{where}", frozen == 0, f"{frozen} of {run['total']}", Boundary.OPTIMIZER, "0"))
    return made


def adapter_settings(facts: Facts | None) -> CheckResult:
    """What a checkpoint says about the adapter is how it was trained."""
    rows = [facts.one(fact) if facts else None for fact in ("adapter", "saved_adapter")]
    name = "the checkpoint stores the adapter's settings"
    known = [row for row in rows if row is not None]
    if len(known) < len(rows):
        return proof(name, False, "no facts", Boundary.CHECKPOINT)
    wrong = sorted({setting for row in known for setting in row["wrong"]})
    return proof(name, not wrong, f"{known[0]['compared']} compared", Boundary.CHECKPOINT, "all", ", ".join(wrong))


def on_disk(facts: Facts | None, where: str, made: bool) -> list[CheckResult]:
    """The model is what the files said, and the files say what the model is; tied weights are one tensor."""
    found = facts.one("loaded") if facts else None
    written = facts.one("saved") if facts else None
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
    """Tensors may be renamed on their way and are then found by content; experts may be fused, and so may be a user's model.

    Otherwise every tensor of the model has one in the files.
    """
    if row is None:
        return proof(f"{name}: bit-equal", False, "no facts", Boundary.PROVIDER)
    found = row["compared"] + row["renamed"] - len(row["wrong"])
    fused = not made or "moe" in where
    lost = [] if fused else list(row["lost"])
    enough = found > 0 and (fused or found == row["stored"]) and not lost
    value = f"{found} of {row['stored']} tensors"
    odd = ", ".join([*row["wrong"], *lost][:3])
    return proof(f"{name}: bit-equal", enough and not row["wrong"], value, Boundary.PROVIDER, "all", odd)


def steps(facts: Facts | None, metrics: Metrics, prefix: str, where: str, start: int, last: int) -> list[CheckResult]:
    """Every step was logged, and updated the weights once."""
    wanted = set(range(start + 1, min(last, start + MOST_STEPS) + 1))
    loss = metrics.series.get(f"{prefix}train/loss")
    logged = set(loss.steps) if loss else set()
    updates = states(facts)[1].get("updates")
    missing = sorted(wanted - logged)
    return [
        CheckResult(
            name=f"every step was logged{where}",
            kind="proof",
            passed=bool(wanted) and logged == wanted and last <= start + MOST_STEPS,
            value=f"{len(wanted & logged)} of {len(wanted)}",
            threshold="all",
            steps=tuple(sorted(logged)),
            missing=tuple(missing),
        ),
        # An optimizer that keeps no count (plain SGD) cannot be asked.
        proof(f"optimizer updates{where}", updates in (None, [last, last]), f"{updates or 'not counted'}", Boundary.OPTIMIZER, f"{last}"),
    ]
