"""What to do next about a verdict that is no Pass: one table from boundary and situation to sentences and commands.

- A step says where it applies, so no advised command is refused there: a run directory for `isolate` and `localize`, token logs, facts, a
  checkout under test for `--baseline`.
- `seatrial judge` of other people's files, the summary and the report of a trial use the same table.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from seatrial.core.specs import Level
from seatrial.core.verdict import Boundary, Verdict


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known where advice is asked for."""

    boundary: Boundary
    verdict: Verdict
    loop: str
    levels: Sequence[Level] = ()
    level: int | None = None
    run: str | None = None
    """The run directory; None for files of another run."""
    changes: Sequence[str] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    """Where it is not the loop's own."""
    arguments: Sequence[str] = ()
    compared: bool = False
    """A base ran beside the change, or runs next."""
    fault: str | None = None
    isolable: bool = False
    tokens: bool = False
    facts: str | None = None
    measured: bool = True
    """Metrics files were there."""

    @property
    def files(self) -> bool:
        """Whether it is about files of a run that Seatrial did not start."""
        return self.run is None

    @property
    def fails(self) -> bool:
        """Whether it is a Fail, and nobody meant it to be one."""
        return self.verdict is Verdict.FAIL and self.fault is None

    @property
    def changed(self) -> bool:
        """Whether a checkout is under test, or may be named."""
        return self.files or bool(self.changes)


class NextStep(NamedTuple):
    """One sentence. `{again}` is the call that repeats the run, `{proof}` one of the level that proves the boundary."""

    text: str
    applies: Callable[[Situation], bool] = lambda _: True


PROOFS: dict[Boundary, tuple[str, ...]] = {
    Boundary.PEFT: ("lora-resume", "lora-checkpoint"),
    Boundary.CHECKPOINT: ("lora-resume", "save-resume", "lora-checkpoint"),
    Boundary.REFIT: ("refit",),
    Boundary.DDP: ("ranks", "parallelism"),
    Boundary.REWARD: ("learning",),
    Boundary.ROLLOUT: ("vllm",),
}
"""Names of the levels that prove a boundary; the loop's first level proves the others."""

_LOCALIZE = NextStep(
    "See which sequences and positions diverge: `seatrial localize {run} --level {level}`.",
    lambda s: s.fails and s.tokens and not s.files,
)
_FAULT = NextStep("The fault {fault} was injected on purpose; see the same level without it: `{again}`.", lambda s: s.fault is not None)
_AGAIN = NextStep("Then run it again: `{again}`.", lambda s: s.fault is None)
_SUSPECTS = (
    NextStep("Separate the suspects: `seatrial isolate {run} --level {level}`.", lambda s: s.fails and s.isolable and not s.files),
    NextStep("Tell the change from what was there before: `{baseline}`.", lambda s: s.fails and s.changed and not s.compared),
    NextStep("If an earlier commit passes, find the one that broke it: `{bisect}`.", lambda s: s.fails and s.changed),
    _FAULT,
)


def _proven(what: str) -> NextStep:
    return NextStep(f"See the level that proves {what}: `{{proof}}`.", lambda s: s.files)


ADVICE: dict[Boundary, tuple[NextStep, ...]] = {
    Boundary.ENVIRONMENT: (
        NextStep("See what this machine lacks, with the command that mends each finding: `seatrial doctor {loop}`."),
        _AGAIN,
        _FAULT,
    ),
    Boundary.CONFIG: (
        NextStep("Correct the setting that the decisive line names. See what would run with which settings: `seatrial plan {loop}`."),
        _AGAIN,
        _FAULT,
    ),
    Boundary.DATA: (
        NextStep("Look at the rows and columns that the decisive line names. The level brings its own data: `{proof}`.", lambda s: s.files),
        NextStep("Look at the rows and columns that the decisive line names.", lambda s: not s.files),
        NextStep("Then run it again: `{again}`.", lambda s: s.fault is None and not s.files),
        _FAULT,
    ),
    Boundary.REWARD: (
        NextStep(
            "Run the reward function alone on the prompts of that step: equal or missing rewards teach nothing. "
            "More samples per prompt make uneven rewards likely."
        ),
        NextStep(
            "The learning level has a reward that can be earned; it shows whether the trainer learns from one: `{proof}`.",
            lambda s: s.fault is None and bool(s.levels),
        ),
        _FAULT,
    ),
    Boundary.CLUSTER: (
        NextStep("Free what other runs hold (`ray status`, `squeue`), and look for the machine or worker that is gone."),
        _AGAIN,
        _FAULT,
    ),
    Boundary.ROLLOUT: (
        NextStep("Start the generation engine alone with this model and the same settings; its own lines name the cause."),
        _SUSPECTS[0],
        _proven("generation"),
        *_SUSPECTS[1:],
    ),
    Boundary.PROVIDER: (
        NextStep(
            "If the model goes through Megatron-Bridge, convert, run and train it alone, by its family or its directory: "
            "`seatrial probe bridge --model qwen2`.",
            lambda s: s.fault is None,
        ),
        *_SUSPECTS,
    ),
    Boundary.PEFT: (
        NextStep(
            "Compare the adapter's target modules and rank with the modules of this model: "
            "which parameters are trainable, and does each get a gradient?"
        ),
        _proven("adapters"),
        *_SUSPECTS,
    ),
    Boundary.DDP: (
        NextStep("Read the log of every rank for the earliest exception, and compare the ranks' weights after one step."),
        _proven("several ranks"),
        *_SUSPECTS,
    ),
    Boundary.OPTIMIZER: (
        NextStep("Look at learning rate, gradient norm and loss of the step that the decisive line names: which of them moves first?"),
        _proven("an update"),
        *_SUSPECTS,
    ),
    Boundary.CHECKPOINT: (
        NextStep("List the files of the checkpoint and their sizes: is each shard of each rank there, and was the save finished?"),
        _proven("save and resume"),
        *_SUSPECTS,
    ),
    Boundary.REFIT: (
        NextStep("Compare the generator's live weights with the policy's export, tensor by tensor: names, shapes, dtypes, then bits."),
        NextStep(
            "Hold every sent tensor against what the generator holds: `seatrial probe refit --facts {facts}`.",
            lambda s: s.facts is not None,
        ),
        NextStep(
            "See a refit of a small model proven bit for bit: `seatrial probe refit`; with your model: `seatrial probe refit --model DIR`.",
            lambda s: s.facts is None and s.fault is None,
        ),
        _LOCALIZE,
        *_SUSPECTS,
    ),
    Boundary.METRICS: (
        NextStep(
            "Give the metrics that the run wrote, too: `seatrial judge {loop} --log LOG --metrics PATH`.",
            lambda s: s.files and not s.measured,
        ),
        NextStep("See a run of the level whose files hold what a verdict needs: `{proof}`.", lambda s: s.files),
        NextStep("See whether the same value comes again: `{again}`.", lambda s: s.fault is None and not s.files),
        _LOCALIZE,
        *_SUSPECTS,
    ),
}


def advise(situation: Situation) -> tuple[str, ...]:
    """The steps that apply; none for a Pass."""
    if situation.verdict is Verdict.PASS:
        return ()
    words = _words(situation)
    return tuple(step.text.format(**words) for step in ADVICE[situation.boundary] if step.applies(situation))


def proving_level(boundary: Boundary, levels: Sequence[Level]) -> int:
    """The level of a loop that proves a boundary; its first one where none is named for it."""
    names = PROOFS.get(boundary, ())
    return next((level.number for level in levels if level.name in names), min((level.number for level in levels), default=0))


def _words(situation: Situation) -> dict[str, str]:
    proof = proving_level(situation.boundary, situation.levels)
    level = situation.level if situation.level is not None else proof
    changes = tuple(situation.changes) or ("PATH",)
    tree = _call(situation, level, ("{tree}",)).removeprefix("seatrial run ")
    return {
        "loop": situation.loop,
        "level": str(level),
        "run": shlex.quote(situation.run or ""),
        "fault": situation.fault or "",
        "facts": shlex.quote(situation.facts or ""),
        "again": _call(situation, level, situation.changes),
        "proof": _call(situation, proof, situation.changes),
        "baseline": _call(situation, level, changes, "--baseline REV"),
        "bisect": f"seatrial bisect --trial --good REV --repo {_path(changes[0])} -- {tree}",
    }


def _path(change: str) -> str:
    """The checkout of a change, which may have a name before it."""
    name, separator, path = change.partition("=")
    return shlex.quote(path if separator and "/" not in name else change)


def _call(situation: Situation, level: int, changes: Sequence[str], more: str = "") -> str:
    """The call of `seatrial run` under the same conditions."""
    made = ["seatrial run", situation.loop, f"--level {level}"]
    made += [f"--change {shlex.quote(change) if change != '{tree}' else change}" for change in changes]
    made += [f"--model {shlex.quote(situation.model)}"] if situation.model else []
    made += [f"--set {shlex.quote(f'options.{name}={value}')}" for name, value in situation.options.items()]
    made += [more] if more else []
    return " ".join(made) + (f" -- {shlex.join(situation.arguments)}" if situation.arguments else "")
