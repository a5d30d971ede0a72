"""Checks TRL's arguments after `--` and finds the Python of the vLLM server before anything starts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from seatrial.core.guarded import parse_step
from seatrial.core.loop import Context
from seatrial.core.records import Finding
from seatrial.core.verdict import Boundary
from seatrial.loops import VLLM_CPU

EVERY = "every level"
REUSE = "refits and rewards are counted per step, and a resume begins with a generation"
OWNED: dict[str, tuple[str, str]] = {
    "output_dir": (EVERY, "the run directory is where the evidence is"),
    "logging_steps": (EVERY, "every step must be logged"),
    "logging_strategy": (EVERY, "every step must be logged"),
    "logging_nan_inf_filter": (EVERY, "NaN must be seen"),
    "resume_from_checkpoint": (EVERY, "level 1 resumes by itself"),
    "save_strategy": ("lora-resume", "the checkpoint in the middle is what is resumed from"),
    "save_only_model": ("lora-resume", "optimizer and random state are part of the claim"),
    "ignore_data_skip": ("lora-resume", "the resumed run must go on with the data where the first stopped"),
    "save_steps": ("lora-resume", "the checkpoint in the middle is what is resumed from"),
    "beta": ("smoke lora-resume", "the reference model is part of the claim"),
    "num_iterations": ("lora-resume refit vllm learning", REUSE),
    "steps_per_generation": ("lora-resume refit vllm learning", REUSE),
    "reward_weights": ("architectures learning", "pictures and learning have one reward"),
    "per_device_train_batch_size": ("ranks", "two ranks must take the rows of one"),
    "neftune_noise_alpha": (EVERY, "noise in the policy's embeddings hides whether its reference starts as the policy"),
}
LEAST_STEPS = {"smoke": 2, "lora-resume": 3, "refit": 3, "vllm": 3, "ranks": 2, "architectures": 2, "learning": 8}


def given_argument(arguments: Sequence[str]) -> dict[str, str]:
    """Names and values of `--name value` and `--name=value`; TRL's parser takes dashes for underscores, and `--no_name`."""
    found = {}
    for word, following in zip(arguments, (*arguments[1:], ""), strict=False):
        name, separator, value = word.partition("=")
        if name.startswith("--"):
            found[name[2:].replace("-", "_").removeprefix("no_")] = value if separator else following
    return found


def max_steps(arguments: Sequence[str]) -> int | None:
    """The user's own number of steps, if it is one."""
    return parse_step(given_argument(arguments).get("max_steps", ""))


def float_of(text: str) -> float:
    """A number; what is none is TRL's to refuse, and counts as one that is not zero."""
    try:
        return float(text)
    except ValueError:
        return 1.0


def argument_findings(levels: Sequence[str], arguments: Sequence[str]) -> tuple[Finding, ...]:
    """Arguments that a level owns, and too few steps for a proof."""
    made = []
    for name in given_argument(arguments):
        owner, why = OWNED.get(name, ("", ""))
        if owner == EVERY or set(owner.split()) & set(levels):
            made.append(_bad(f"--{name} is set by the level: {why}", f"leave --{name} out"))
    if given_argument(arguments).get("loss_type") == "bnpo" and "ranks" in levels:
        made.append(_bad("--loss_type bnpo averages over each rank's own tokens: two ranks do not follow one", "leave level 4 out"))
    if "ranks" in levels and float_of(given_argument(arguments).get("entropy_coef", "0")) != 0:
        made.append(_bad("--entropy_coef averages over each rank's own tokens: two ranks do not follow one", "leave level 4 out"))
    steps = max_steps(arguments)
    least = max((LEAST_STEPS.get(level, 1) for level in levels), default=1)
    if "max_steps" in given_argument(arguments) and (steps is None or steps < least):
        made.append(_bad(f"--max_steps must be a number of at least {least} for these levels", f"--max_steps {least}"))
    return tuple(made)


def _bad(message: str, fix: str) -> Finding:
    return Finding(name="arguments", ok=False, boundary=Boundary.CONFIG, message=message, fix=fix)


VLLM_OPTION = "vllm_python"
VLLM_MEANING = "interpreter with vLLM for level 3, where it is not the one of the trainer or of the environment vllm-cpu"
VLLM_LEVEL = "vllm"
SECONDS = 60
_ASK = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


def vllm_interpreter(context: Context) -> Path | None:
    given = context.options.get(VLLM_OPTION)
    if given:
        return Path(str(given))
    return context.python if has_vllm(context.python) else context.environments.get(VLLM_CPU)


@cache
def has_vllm(python: Path) -> bool:
    """Whether an interpreter can import vLLM, without importing it."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    try:
        done = subprocess.run([python, "-c", _ASK], env={**kept, "PYTHONSAFEPATH": "1"}, capture_output=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def vllm_findings(context: Context) -> tuple[Finding, ...]:
    if VLLM_LEVEL not in context.levels:
        return ()
    python = vllm_interpreter(context)
    if python is None:
        message = f"level 3 needs vLLM: {context.python} has none, and the environment {VLLM_CPU} is not built"
        return (_finding(False, message, f"seatrial env build {VLLM_CPU}"),)
    if not has_vllm(python):
        fix = f"name an interpreter that has vLLM with --set options.{VLLM_OPTION}=PATH, or leave the option out"
        return (_finding(False, f"level 3 needs vLLM, and {python} cannot import it", fix),)
    return (_finding(True, f"level 3 runs vLLM in {python}"),)


def _finding(ok: bool, message: str, fix: str = "") -> Finding:
    return Finding(name="vllm", ok=ok, boundary=Boundary.ENVIRONMENT, message=message, fix=fix)
