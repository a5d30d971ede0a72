"""`seatrial new`: write the start of an extension, as an installable package that works as it stands."""

from __future__ import annotations

import keyword
import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
LONGEST = 40


@app.callback()
def new() -> None:
    """Write the start of an extension: a small package that is installed beside Seatrial and works as it stands."""


@app.command()
def loop(
    name: Annotated[str, typer.Argument(help="What it is called on the command line: lower-case letters, digits, dashes.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="A new directory. Default: ./seatrial-NAME.")] = None,
) -> None:
    """Write a loop of your own: one level, a training script that needs plain Python alone, a fault that the level catches, and a test."""
    from seatrial.core.errors import UserError
    from seatrial.core.files import write_text

    _require_free(name)
    target = (out or Path(f"seatrial-{name}")).absolute()
    if target.exists() or target.is_symlink():
        raise UserError(f"{target}: exists already; nothing was written", "name a directory that does not exist yet with --out")
    for path, text in files(name).items():
        try:
            write_text(target / path, text)
        except OSError as error:
            raise UserError(f"{target / path}: cannot be written: {error.strerror}", "name another directory with --out") from error
    place = shlex.quote(str(out or target.name))
    typer.echo(f"wrote {target}\n")
    typer.echo(f"  pip install -e {place}")
    typer.echo(f"  seatrial run {name} --level 0                  # Pass")
    typer.echo(f"  seatrial run {name} --level 0 --fault {FAULT}  # Fail, at the optimizer")


def _require_free(name: str) -> None:
    """Refuse a name that cannot be a package's, or that a loop has already."""
    from seatrial import loops
    from seatrial.core.errors import UserError

    if not NAME.fullmatch(name) or len(name) > LONGEST or keyword.iskeyword(name):
        better = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")[:LONGEST].strip("-")
        fix = f"use {better!r}" if NAME.fullmatch(better) and not keyword.iskeyword(better) else "use a name such as my-loop"
        rule = f"use lower-case letters, digits and single dashes, with a letter first, at most {LONGEST}"
        raise UserError(f"{name!r}: no name for a loop: {rule}", fix)
    if name in loops.names():
        origin = "comes with Seatrial" if name in loops.built_in() else "is installed"
        raise UserError(f"a loop called {name!r} {origin}", f"choose another name, such as my-{name}")


FAULT = "skipped-update"


def files(name: str) -> dict[str, str]:
    """The files of the package, by their paths."""
    package = f"seatrial_{name.replace('-', '_')}"
    title = name.replace("-", " ").title()
    words = {"@NAME@": name, "@PACKAGE@": package, "@TITLE@": title, "@CLASS@": title.replace(" ", ""), "@FAULT@": FAULT}
    made = {}
    for path, text in _TEMPLATES.items():
        for word, meaning in words.items():
            path, text = path.replace(word, meaning), text.replace(word, meaning)
        made[path] = text
    return made


_TEMPLATES = {
    "pyproject.toml": """[build-system]
requires = ["setuptools>=64"]
build-backend = "setuptools.build_meta"

[project]
name = "seatrial-@NAME@"
version = "0.1.0"
description = "The loop @NAME@ for Seatrial."
requires-python = ">=3.11"
dependencies = ["seatrial"]

[project.entry-points."seatrial.loops"]
@NAME@ = "@PACKAGE@.loop:LOOP"

[tool.setuptools.packages.find]
where = ["src"]

[tool.setuptools.package-data]
@PACKAGE@ = ["*.toml"]
""",
    "README.md": """# seatrial-@NAME@

The loop `@NAME@` for [Seatrial](https://pypi.org/project/seatrial/).

    pip install -e .
    seatrial run @NAME@ --level 0
    seatrial run @NAME@ --level 0 --fault @FAULT@
    pytest

The first run ends with a Pass. The second one skips the update of the weights, and must end with a Fail at the optimizer: a check counts
only if a fault shows that it can fail.

Make it yours, in this order:

1. `train.py`: start your training instead. Keep the import witness (a trial proves what it imported) and `metrics.jsonl`.
2. `levels.toml`: what each level proves, its checks and its limits. `milestones.toml`: lines of your log, in order.
3. `loop.py`: the processes of each level, its options (`--opt NAME=VALUE`), what your metrics mean (`measures`).
4. For every check that you add, a fault that it catches. `signatures.toml`: failures that you have understood.
""",
    "src/@PACKAGE@/__init__.py": '''"""The loop @NAME@ for Seatrial."""
''',
    "src/@PACKAGE@/loop.py": '''"""The host side of the loop @NAME@: its processes, and what its metrics mean.

The contract, part by part, is seatrial.core.loop.Loop. levels.toml, milestones.toml and signatures.toml beside this file are read.
"""

import os
import sys
from pathlib import Path

from seatrial.core.loop import Context, Loop, Measures, Option, Phase, Vacuity
from seatrial.core.series import Metrics
from seatrial.core.specs import Level, Signals
from seatrial.instruments.facts import LoopFault

HERE = Path(__file__).parent


def vacuous(metrics: Metrics) -> Vacuity | None:
    """A run in which nothing could be learned shows nothing."""
    spread = metrics.series.get("train/reward_std")
    return Vacuity("vacuous: the reward never varied") if spread and max(spread.values) == 0 else None


def unseen(metrics: Metrics) -> str | None:
    """What a Pass claims and these metrics do not show."""
    return None if "train/reward_std" in metrics.series else "no spread of rewards was logged"


class @CLASS@(Loop):
    """Only what it has: every other part of the contract has a default."""

    name = "@NAME@"
    title = "@TITLE@"
    folder = HERE
    default_model = "four weights"
    options = (Option("rate", "learning rate of a step, in thousandths", "number", "100", most=1000),)  # seatrial run … --opt rate=50
    measures = Measures(
        signals=Signals(
            loss=("train/loss",),
            grad_norm=("train/grad_norm",),
            rate=("train/learning_rate",),
            reward=("train/reward",),
            deviations=("train/reward_std",),
        ),
        vacuous=vacuous,
        unseen=unseen,
    )

    def interpreter(self) -> Path:
        """Where it runs without --python: it has no environment that Seatrial builds."""
        return Path(sys.executable)

    def faults(self) -> dict[str, LoopFault]:
        return {"@FAULT@": LoopFault("computes every update and never applies it", (0,))}

    def phases(self, level: Level, context: Context, directory: Path) -> tuple[Phase, ...]:
        """One process: train.py, which reports its imports and writes run/metrics.jsonl."""
        argv = [str(context.python), str(HERE / "train.py"), "--out", str(directory / "run"), "--steps", str(level.steps)]
        argv += ["--rate", self.option("rate")]
        if context.options.get("fault"):
            argv += ["--fault", str(context.options["fault"])]
        under_test = os.pathsep.join(f"{package}={repo.import_root}" for repo in context.changes for package in repo.packages)
        env = {"SEATRIAL_IMPORTS": str(directory), "SEATRIAL_UNDER_TEST": under_test, "SEATRIAL_WATCH": "random"}
        return (Phase(name="run", argv=(*argv, *context.arguments), env=env, steps=level.steps),)

    def limitations(self, level: Level, context: Context) -> tuple[str, ...]:
        return ("a policy of four weights: no model was trained",)


LOOP = @CLASS@()
''',
    "src/@PACKAGE@/levels.toml": """# The coverage ladder. Keys: seatrial.core.specs.Level.

[[level]]
number = 0
name = "smoke"
title = "Smoke"
default = true
required_when = ["**/*.py"]
proves = "the policy samples, scores, computes gradients, and its weights move towards the reward"
claims_not = ["a smoke run is no evidence of learning"]
steps = 8
deadline_minutes = 2
stall_minutes = 1
cost = { minutes = 0.1, cpu_seconds = 1, disk_mb = 1, memory_mb = 50 }
checks = [
    { expr = 'len(data["train/loss"]) >= 2', why = "losses were logged for several steps" },
    { expr = 'max(data["train/grad_norm"]) > 0', why = "some gradient is not zero", boundary = "optimizer" },
    { expr = 'min(data["train/weight_change"]) > 0', why = "every step moves the weights", boundary = "optimizer" },
]
""",
    "src/@PACKAGE@/milestones.toml": """# Log lines that show how far a run got, in order. Keys: seatrial.core.specs.Milestone.

[[milestone]]
id = "started"
pattern = '^@NAME@: start'
boundary = "config"
verdict = "Blocked"

[[milestone]]
id = "first step"
pattern = '^@NAME@: step \\d+'
boundary = "optimizer"

[[milestone]]
id = "done"
pattern = '^@NAME@: done'
boundary = "checkpoint"
""",
    "src/@PACKAGE@/signatures.toml": """# Failures that are understood. Keys: seatrial.core.specs.Signature.

[[signature]]
id = "@NAME@-unknown-argument"
pattern = 'train\\.py: error: unrecognized arguments'
boundary = "config"
verdict = "Blocked"
advice = "train.py does not know an argument given after `--`."
""",
    "src/@PACKAGE@/train.py": '''"""Policy gradient on one choice of four, in plain Python. The import path holds Seatrial's instruments."""

import argparse
import json
import math
import os
import random
from pathlib import Path

from seatrial.instruments.witness import watch_this_process

GOOD, GROUP = 2, 64

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--rate", type=int, required=True, help="in thousandths")
parser.add_argument("--fault", choices=["@FAULT@"])
asked = parser.parse_args()
rate = asked.rate / 1000
print("@NAME@: start", flush=True)
watch_this_process(os.environ, "driver", __file__)
asked.out.mkdir(parents=True, exist_ok=True)
draw, weights = random.Random(42), [0.0] * 4
for step in range(1, asked.steps + 1):
    total = sum(map(math.exp, weights))
    policy = [math.exp(weight) / total for weight in weights]
    actions = draw.choices(range(4), policy, k=GROUP)
    rewards = [float(action == GOOD) for action in actions]
    mean = sum(rewards) / GROUP
    spread = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / GROUP)
    advantages = [reward - mean for reward in rewards]
    loss = -sum(gain * math.log(policy[action]) for gain, action in zip(advantages, actions)) / GROUP
    slope = [-sum(gain * ((action == one) - policy[one]) for gain, action in zip(advantages, actions)) / GROUP for one in range(4)]
    before = list(weights)
    if asked.fault != "@FAULT@":
        weights = [weight - rate * part for weight, part in zip(weights, slope)]
    row = {"step": step, "train/loss": loss, "train/grad_norm": math.hypot(*slope), "train/learning_rate": rate}
    row |= {"train/reward": mean, "train/reward_std": spread, "train/weight_change": math.dist(before, weights)}
    with (asked.out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\\n")
    print(f"@NAME@: step {step} of {asked.steps}, reward {mean:.2f}", flush=True)
print("@NAME@: done", flush=True)
''',
    "tests/test_trial.py": '''"""The level passes as it stands, and fails with its fault, at the boundary where the fault is."""

import json
import subprocess
import sys
from pathlib import Path


def trial(out: Path, *words: str) -> dict:
    """Run level 0 with the `seatrial` of this Python."""
    command = [str(Path(sys.executable).with_name("seatrial")), "run", "@NAME@", "--level", "0", "--python", sys.executable]
    subprocess.run([*command, "--out", str(out), *words], check=False)
    return json.loads((out / "trial.json").read_text())


def test_it_passes(tmp_path: Path) -> None:
    assert trial(tmp_path / "run")["verdict"] == "Pass"


def test_its_fault_is_caught(tmp_path: Path) -> None:
    found = trial(tmp_path / "run", "--fault", "@FAULT@")
    assert (found["verdict"], found["levels"][0]["boundary"]) == ("Fail", "optimizer")
''',
}
