"""Loop arguments that a user gives after `--`: what they may say, and what they may not.

Everything is passed on verbatim. But an argument that a level's proof rests on cannot be changed without breaking the
proof, and that must not be held against the change under test: it blocks the trial, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from seatrial.model.guarded import parse_step
from seatrial.model.record import Finding
from seatrial.model.verdict import Boundary

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


def given(arguments: Sequence[str]) -> dict[str, str]:
    """Names and values of `--name value` and `--name=value`; TRL's parser takes dashes for underscores, and `--no_name`."""
    found = {}
    for word, following in zip(arguments, (*arguments[1:], ""), strict=False):
        name, separator, value = word.partition("=")
        if name.startswith("--"):
            found[name[2:].replace("-", "_").removeprefix("no_")] = value if separator else following
    return found


def max_steps(arguments: Sequence[str]) -> int | None:
    """The user's own number of steps, if it is one."""
    return parse_step(given(arguments).get("max_steps", ""))


def float_of(text: str) -> float:
    """A number; what is none is TRL's to refuse, and counts as one that is not zero."""
    try:
        return float(text)
    except ValueError:
        return 1.0


def findings(levels: Sequence[str], arguments: Sequence[str]) -> tuple[Finding, ...]:
    """Arguments that a level owns, and too few steps for a proof."""
    made = []
    for name in given(arguments):
        owner, why = OWNED.get(name, ("", ""))
        if owner == EVERY or set(owner.split()) & set(levels):
            made.append(_bad(f"--{name} is set by the level: {why}", f"leave --{name} out"))
    if given(arguments).get("loss_type") == "bnpo" and "ranks" in levels:
        made.append(_bad("--loss_type bnpo averages over each rank's own tokens: two ranks do not follow one", "leave level 4 out"))
    if "ranks" in levels and float_of(given(arguments).get("entropy_coef", "0")) != 0:
        made.append(_bad("--entropy_coef averages over each rank's own tokens: two ranks do not follow one", "leave level 4 out"))
    steps = max_steps(arguments)
    least = max((LEAST_STEPS.get(level, 1) for level in levels), default=1)
    if "max_steps" in given(arguments) and (steps is None or steps < least):
        made.append(_bad(f"--max_steps must be a number of at least {least} for these levels", f"--max_steps {least}"))
    return tuple(made)


def _bad(message: str, fix: str) -> Finding:
    return Finding(name="arguments", ok=False, boundary=Boundary.CONFIG, message=message, fix=fix)
