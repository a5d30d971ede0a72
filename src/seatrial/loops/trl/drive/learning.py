"""Level 6: the same short training over several seeds, each with a do-nothing control (learning rate 0).

    python -m seatrial.loops.trl.drive.learning --seeds 5 [options of train.py] -- [TRL arguments]

Per seed two series are written, `learn/<seed>/reward` and `control/<seed>/reward`, and from them the gains that the
check tests: the mean reward of the last window minus that of the first, and the same minus the control's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from seatrial.loops.trl.drive import train
from seatrial.loops.trl.drive.imports import TRAINER, Imports

WINDOW = 4
RECORDED_STEPS = 4
"""Steps of the first learning arm that are recorded, for the shadow to recompute."""


def gain(rewards: list[float]) -> float:
    """Mean of the last window minus mean of the first; the windows never overlap."""
    if len(rewards) < 2 * WINDOW:
        raise RuntimeError(f"a learning signal needs at least {2 * WINDOW} steps, got {len(rewards)}")
    return sum(rewards[-WINDOW:]) / WINDOW - sum(rewards[:WINDOW]) / WINDOW


def averages(trainer: Any) -> list[float]:
    """The mean of every answer that the first reward function gives from now on."""
    function, given = trainer.reward_funcs[0], list[float]()

    def averaged(*args: Any, **kwargs: Any) -> list[float]:
        rewards = [float(value) for value in function(*args, **kwargs)]
        given.append(sum(rewards) / max(1, len(rewards)))
        return rewards

    averaged.__name__ = function.__name__
    trainer.reward_funcs[0] = averaged
    return given


def arm(arguments: Any, words: list[str], name: str, seed: int) -> list[float]:
    """Train one arm and return its rewards by step, as our reward function gave them."""
    from seatrial.loops.trl.drive import record
    from seatrial.probes import facts, fingerprint

    out: Path = arguments.out
    rate = ["--learning_rate", "0.0"] if name == "control" else []
    settings = train.config(out / name / str(seed), [*words, "--seed", str(seed), *rate])
    first = name == "learn" and seed == 1
    recorded = train.recorder(arguments, out / name / str(seed), RECORDED_STEPS) if first else None
    trainer = train.build(arguments, settings, train.model_path(arguments), None, recorded=recorded)
    given = averages(trainer)
    trainer.pop_callback(record.MetricsWriter)
    trainer.pop_callback(record.FactsWriter)
    trainer.add_callback(record.MetricsWriter(out / "metrics.jsonl", f"{name}/{seed}"))
    before, chance = fingerprint.model(trainer.model), fingerprint.generators()
    record.say(f"arm {name} seed {seed}")
    trainer.train()
    after = fingerprint.model(trainer.model)
    row = {"fact": "arm", "arm": name, "seed": seed, "names": len(before), "changed": len(fingerprint.differing(before, after))}
    row |= {"generators": chance} | {"max_steps": trainer.state.max_steps, "updates": record.updates(trainer.optimizer)}
    said = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    row["misreported"] = sum(abs(one - two) > 1e-4 for one, two in zip(given, said, strict=False)) + abs(len(given) - len(said))
    facts.append(out / "facts.jsonl", row)
    return given


def main() -> None:
    """Run all arms and write the gains."""
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = train.parser()
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args(words[:split])
    arguments.out.mkdir(parents=True, exist_ok=True)
    imports = Imports(arguments.imports, train.process_name(), arguments.under_test)
    imports.prove(TRAINER)
    from seatrial.loops.trl.drive import record
    from seatrial.probes import facts

    record.say("building the model")
    for index in range(1, arguments.seeds + 1):
        learned, idle = (gain(arm(arguments, words[split + 1 :], name, index)) for name in ("learn", "control"))
        row = {"step": index, "signal/gain": learned, "signal/control_gain": idle, "signal/gain_over_control": learned - idle}
        facts.append(arguments.out / "metrics.jsonl", row)
        record.say(f"seed {index} of {arguments.seeds}: gain {learned:.3f}, control {idle:.3f}")
    imports.close(TRAINER)
    record.say("run complete")


if __name__ == "__main__":
    main()
