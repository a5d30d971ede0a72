"""One call of a functional script of NeMo-RL, from the evidence that it would delete to the evidence that it leaves.

    python -m seatrial.instruments.nemo_rl.run_functional --checkout DIR --script tests/functional/X.sh --out PHASE_DIR
        [--sync FROM=TO] [--helpers MEGATRON_LM] -- WORDS...

The script deletes tests/functional/X as it starts: what an earlier run left there goes to PHASE_DIR/earlier, what this run leaves there to
PHASE_DIR/results, also after a failure or a signal. Its `git config --global` writes into PHASE_DIR/gitconfig. The exit code is the
script's, 128 + n for a signal; 2, 91, 92 and 93 are ours (see Failed). One driver works in a checkout at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from seatrial.instruments.nemo_rl import vendored_bridge
from seatrial.instruments.nemo_rl.nemo_process import USAGE, DriverChild, Failed, policy_python, say

NOT_KEPT = 93
"""Exit code: evidence could not be moved."""
STOPPED = "driver stopped: "
"""Before the reason why it could not do its work: triage knows the line by it."""
START = Path(__file__).absolute().parent / "start"
"""Holds the module that Python runs at its start, and nothing else."""


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run one functional script and keep what it leaves.", allow_abbrev=False)
    parser.add_argument("--checkout", required=True, type=Path, help="the NeMo-RL checkout")
    parser.add_argument("--script", required=True, type=Path, help="relative to the checkout")
    parser.add_argument("--out", required=True, type=Path, help="the directory of this phase")
    parser.add_argument("--sync", type=_trees, metavar="FROM=TO", help="put a copy of the one tree into the other meanwhile")
    parser.add_argument("--helpers", type=Path, help="a Megatron-LM whose dataset helpers are built in a copy")
    parser.add_argument("words", nargs="*", help="overrides, after --")
    return parser.parse_args(argv)


def _trees(text: str) -> tuple[Path, Path]:
    source, sign, target = text.partition("=")
    if not (source and sign and target):
        raise argparse.ArgumentTypeError(f"{text!r} is not FROM=TO")
    return Path(source), Path(target)


def main(argv: Sequence[str] | None = None) -> int:
    arguments, child = _arguments(argv), DriverChild()
    child.listen()
    try:
        with contextlib.ExitStack() as ending:
            code = _drive(arguments, child, ending)
    except Failed as error:
        say(f"{STOPPED}{error}")
        code = error.code
    except OSError as error:  # shutil.Error is one
        say(f"{STOPPED}evidence not kept: {error}")
        code = NOT_KEPT
    return 128 + child.asked() if child.asked() else code


def _drive(arguments: argparse.Namespace, child: DriverChild, ending: contextlib.ExitStack) -> int:
    """Prepare, run, and leave the rest to `ending`, whose steps all happen, the last one first."""
    checkout, out = arguments.checkout.absolute(), arguments.out.absolute()
    script = checkout / arguments.script
    if not script.is_file():
        raise Failed(USAGE, f"{script}: no such script")
    if (out / "results").exists():
        raise Failed(USAGE, f"{out / 'results'} exists already: it is the evidence of another run")
    out.mkdir(parents=True, exist_ok=True)
    marker = vendored_bridge.alone(checkout, ending)
    folder = script.with_suffix("")
    if os.path.lexists(folder):
        say(f"the script would delete what an earlier run left: {folder} is now {move(folder, out / 'earlier')}")
    if arguments.sync:
        source, target = arguments.sync
        ending.callback(vendored_bridge.restore_tree, marker)
        vendored_bridge.start_sync(source, target, out / "vendored-before", marker)
    environment = _environment(out)
    if arguments.helpers:
        python = policy_python(checkout, os.environ) or Path(sys.executable)
        copy = vendored_bridge.build_helpers(arguments.helpers, python, out / "helpers.log", child)
        ending.callback(vendored_bridge.remove_helpers, copy)
        environment.update(vendored_bridge.helper_variables(environment, arguments.helpers, copy))
    if environment.get("SEATRIAL_IMPORTS"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(START), environment.get("PYTHONPATH"))))
    ending.callback(_collect, folder, out / "results")
    try:
        return child.run(["uv", "run", "bash", str(arguments.script), *arguments.words], environment, checkout)
    except OSError as error:
        raise Failed(USAGE, f"cannot start the script: {error}") from error


def _environment(out: Path) -> dict[str, str]:
    """That of the script: its git configuration is ours, and where it writes is not the user's to change."""
    home = Path(os.environ.get("HOME", "/"))
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    named = os.environ.get("GIT_CONFIG_GLOBAL")
    users = [Path(named)] if named is not None else [settings / "git" / "config", home / ".gitconfig"]
    quoted = [str(path).replace("\\", "\\\\").replace('"', '\\"') for path in users if path.is_file()]
    (out / "gitconfig").write_text("".join(f'[include]\n\tpath = "{path}"\n' for path in quoted), encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if name != "EXP_NAME"}  # some scripts take it for their folder
    return {**kept, "GIT_CONFIG_GLOBAL": str(out / "gitconfig")}


def _collect(folder: Path, results: Path) -> None:
    if os.path.lexists(folder):
        move(folder, results)
        say(f"results are in {results}")
    else:
        say(f"the script left no {folder}")


def move(source: Path, target: Path) -> Path:
    """Rename, or copy and remove across file systems; a target that exists gets a neighbour with a number."""
    place, number = target, 1
    while os.path.lexists(place):
        number += 1
        place = target.with_name(f"{target.name}-{number}")
    shutil.move(str(source), str(place))
    return place


if __name__ == "__main__":
    sys.exit(main())
