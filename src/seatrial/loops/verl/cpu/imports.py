"""Whether the changes can be imported in the CPU environment: asked before the run, in the loop's own interpreter.

Only a module that is missing outside the changes blocks. Whatever a change itself lacks or raises is for the trial to judge: that
is what it is under test for.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from seatrial.loops.child import run_child
from seatrial.loops.verl.cpu.settings import MEGATRON
from seatrial.loops.verl.drive.import_check import MARK
from seatrial.loops.verl.gpu.checkout import import_path
from seatrial.model.guarded import BadValue, parse_json
from seatrial.model.loop import Context
from seatrial.model.record import Finding

DRIVE = Path(__file__).parents[1] / "drive"
MODULE = "seatrial.loops.verl.drive.import_check"
SECONDS = 90
"""A cold import of Megatron-Bridge takes 10 s on two cores."""
PACKAGES = {MEGATRON: ("megatron.core", "megatron.bridge", "verl")}
"""What is imported with each engine; with FSDP2 Megatron is hidden."""
FITS = {"megatron.bridge": "add --change megatron=PATH of the Megatron-LM it was written for, or use a Bridge that fits (0.5 and 0.6 do)"}


def import_findings(context: Context, strategy: str, shim: str) -> tuple[Finding, ...]:
    """One finding over all packages under test, or none when there is nothing to import."""
    known = PACKAGES.get(strategy, ("verl",))
    packages = [name for name in known if any(name in repo.packages for repo in context.changes)]
    if not packages:
        return ()
    names = ", ".join(packages)
    kept = {key: value for key, value in os.environ.items() if key != "VERL_USE_EXTERNAL_MODULES"}
    own = {"PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1", "TORCHDYNAMO_DISABLE": "1"}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0"}
    argv = [str(context.python), "-m", MODULE, shim, *packages]
    try:
        with tempfile.TemporaryDirectory(prefix="seatrial-imports-") as folder:
            path = os.pathsep.join((*_roots(context), str(_staged(Path(folder)))))
            done = run_child(argv, Path(folder), {**kept, **own, **offline, "PYTHONPATH": path}, SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (_finding(f"{names}: not tried, the level will show it: {error}"),)
    answers = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not answers:
        last = (done.stderr.strip() or "(nothing said)").rsplit("\n", 1)[-1]
        return (_finding(f"{names}: the import ends with {last[:300]}; the level will judge it"),)
    try:
        answer: dict[str, str] = parse_json(answers[-1])
    except BadValue as error:
        return (_finding(f"{names}: what the import said cannot be read: {error}; the level will judge it"),)
    return (_judge(answer, context) if answer else _finding(f"{names}: can be imported"),)


def _roots(context: Context) -> tuple[str, ...]:
    return (*context.import_path(), *import_path(context))


def _staged(place: Path) -> Path:
    """Our modules alone, as they are staged for a run: `doctor` has no run directory, and a loop must not see Seatrial's packages."""
    within = place / "seatrial" / "loops" / "verl"
    within.mkdir(parents=True)
    for package in (within, within.parent, within.parent.parent):
        (package / "__init__.py").touch()
    (within / "drive").symlink_to(DRIVE)
    return place


def _judge(answer: dict[str, str], context: Context) -> Finding:
    package, missing, said = answer["package"], answer["missing"], answer["said"]
    if not missing or _provided(missing, context):
        return _finding(f"{package}: the import ends with {said[:300]}; the level will judge it")
    wanted = missing if said.startswith("No module named") else f"another {missing} ({said[:200]})"
    core = f" (megatron-core {answer['core']})" if missing.startswith("megatron.") and answer["core"] else ""
    message = f"this {package} needs {wanted}, which the environment does not have{core}"
    fix = FITS.get(package, f"use a {package} that fits the pinned environment")
    return _finding(message, f"{fix}, or run on GPUs")


def _provided(module: str, context: Context) -> bool:
    """Whether a change is where this module should be: `megatron` itself is shared by several repositories."""
    parts = module.split(".")
    near = Path(*parts[: 2 if parts[0] == "megatron" else 1])
    places = [Path(root) / near for root in _roots(context)]
    return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)


def _finding(message: str, fix: str = "") -> Finding:
    return Finding(name="imports", ok=not fix, message=message, fix=fix)
