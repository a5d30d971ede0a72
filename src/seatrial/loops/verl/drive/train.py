"""One training run with real verl on this CPU: make model and data, start verl's own `main_ppo`, and clean up after Ray.

    python -m seatrial.loops.verl.drive.train --out DIR --model MODEL [options] -- [Hydra overrides]

Everything after `--` is handed to verl; the last override of a key wins, so that what a user appends counts.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path

from seatrial.loops.verl.drive import assets, gains
from seatrial.probes import facts, provenance
from seatrial.probes.prompts import prompts

MADE = "tiny-dense"
SEED = 42
SHORT = "/tmp"
"""Ray puts sockets below its directory, and the path of a socket holds 107 bytes: a run directory is too deep."""
SCRATCH = "str-"
DAY = 24 * 3600


def say(text: str) -> None:
    """A milestone line for the log."""
    print(f"seatrial: {text}", flush=True)


def parser() -> argparse.ArgumentParser:
    """The driver's own options."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--out", type=Path, required=True, help="directory of this run: metrics.jsonl, facts.jsonl, checkpoints")
    made.add_argument("--model", required=True, help=f"a local model directory, or {MADE}")
    made.add_argument("--models", type=Path, required=True, help="where locally made models are kept")
    made.add_argument("--untied", action="store_true", help=f"{MADE} with an output layer of its own")
    made.add_argument("--prompts", type=int, default=64)
    made.add_argument("--validation", type=int, default=32, help="validation prompts, none of them in the training data")
    made.add_argument("--resume-from", type=Path, help="a checkpoint of another run")
    made.add_argument("--signal", action="store_true", help="write the gain of each validation prompt when training is done")
    made.add_argument("--control", type=Path, help="directory of the run that the gains are compared with")
    return made


def model_path(arguments: argparse.Namespace) -> Path:
    """Where the model lies, or is made."""
    name = f"{MADE}-untied" if arguments.untied else MADE
    return Path(arguments.models) / name if arguments.model == MADE else Path(arguments.model)


def places(arguments: argparse.Namespace, scratch: str) -> list[str]:
    """Overrides that say where everything is."""
    out: Path = arguments.out
    model = model_path(arguments)
    if arguments.model == MADE:
        assets.model(model, not arguments.untied)
    texts = prompts(arguments.prompts + arguments.validation, SEED)
    here = Path(__file__).parent
    found = {
        "actor_rollout_ref.model.path": model,
        "critic.model.path": model,
        "data.train_files": assets.data(out / "train.parquet", texts[: arguments.prompts], "train"),
        "data.val_files": assets.data(out / "validation.parquet", texts[arguments.prompts :], "validation"),
        "reward.custom_reward_function.path": here / "reward.py",
        "trainer.v1.sampler.custom_sampler.path": here / "sampler.py",
        "trainer.default_local_dir": out / "checkpoints",
        "trainer.rollout_data_dir": out / "rollouts",
        "trainer.validation_data_dir": out / "validation",
        "hydra.run.dir": out / "hydra",
        "+ray_kwargs.ray_init._temp_dir": scratch,
    }
    if arguments.resume_from:
        found["trainer.resume_from_path"] = arguments.resume_from
    return [f"{key}={quoted(str(value))}" for key, value in found.items()]


def quoted(text: str) -> str:
    """A value for Hydra: a run directory may hold any character. Backslashes count only in front of a quote there."""
    return '"' + re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + ('\\"' if found[2] else ""), text) + '"'


def sweep() -> None:
    """Remove what runs that were killed have left: directories of processes that are gone.

    Another container may share the directory and not the processes, so only old ones are taken.
    """
    for path in Path(SHORT).glob(f"{SCRATCH}*-*"):
        pid = path.name.split("-")[1]
        try:
            old = time.time() - path.stat().st_mtime > DAY
        except OSError:
            continue  # another run was first
        if old and pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)


def main() -> None:
    """Run one phase of a level."""
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    arguments = parser().parse_args(words[:split])
    arguments.out.mkdir(parents=True, exist_ok=True)
    sweep()
    scratch = tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-", dir=SHORT)
    # Without a token of its own Ray leaves one in the user's home, and every later cluster there takes it up.
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        say("building the model and the data")
        with provenance.uncollected():
            overrides = places(arguments, scratch)
            from verl.trainer import main_ppo

        facts.append(arguments.out / "facts.jsonl", {"fact": "model", "made": arguments.model == MADE})
        say(f"starting verl; Ray works in {scratch}")
        sys.argv = ["main_ppo", *overrides, *words[split + 1 :]]
        main_ppo.main()
    finally:
        _end_ray()
        shutil.rmtree(scratch, ignore_errors=True)
    if arguments.signal:
        gains.write(arguments.out, arguments.control)
    say("run complete")


def _end_ray() -> None:
    import ray

    ray.shutdown()


if __name__ == "__main__":
    main()
