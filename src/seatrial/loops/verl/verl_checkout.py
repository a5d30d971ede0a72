"""The verl checkout that is driven: its place, its wrapper, how the wrapper starts Python, and the variables of the import witness."""

from __future__ import annotations

import difflib
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seatrial.core.errors import BlockedError, FindingCode
from seatrial.core.guarded import real_path
from seatrial.core.loop import Context
from seatrial.core.records import Finding
from seatrial.core.verdict import Boundary
from seatrial.loops import hydra

WRAPPER = "tests/special_e2e/run_ppo_trainer_megatron.sh"
VERSION = "verl/version/version"
CONFIG = "verl/trainer/config"
SHADOW = Path("/workspace/Megatron-LM")
"""The wrapper puts this directory first on the driver's import path, whatever is under test."""
OWN = Path(sys.prefix)
"""Where Seatrial itself is installed."""
NEEDED = ("torch", "ray", "hydra")
"""What no environment of verl is without."""
CLONE = "git clone https://github.com/verl-project/verl.git, then --verl PATH"


def checkout_of(context: Context) -> Path | None:
    """The checkout: the one that was named, or the verl under test."""
    return hydra.checkout_of(context, "verl", "verl")


def knows_uv(checkout: Path | None) -> bool:
    """Whether the wrapper is of the generation that starts Python through uv unless VERL_USE_UV=0."""
    wrapper = checkout / WRAPPER if checkout else None
    return wrapper is not None and wrapper.is_file() and "VERL_USE_UV" in wrapper.read_text(encoding="utf-8", errors="replace")


def uv_environment(checkout: Path) -> Path:
    return checkout / os.environ.get("UV_PROJECT_ENVIRONMENT", ".venv")


def launcher(context: Context) -> str:
    """`uv` or `python`: as asked for; else uv, where the loop's interpreter is the one that uv made for the checkout."""
    asked = context.options.get("launcher")
    if asked:
        return str(asked)
    checkout = checkout_of(context)
    theirs = checkout is not None and uv_environment(checkout).absolute() in context.python.absolute().parents
    return "uv" if theirs and knows_uv(checkout) and shutil.which("uv") else "python"


def extras(engine_name: str) -> tuple[str, ...]:
    """The extras of verl's lock that the wrapper asks uv for."""
    return (engine_name, "megatron", "math")


def uv_words(chosen: Sequence[str]) -> tuple[str, ...]:
    """What a script writes between `uv` and the program."""
    return ("run", "--frozen", "--all-packages", *(word for extra in chosen for word in ("--extra", extra)))


def start_words(context: Context, chosen: Sequence[str]) -> tuple[str, ...]:
    """How a Python program of this loop starts, with the launcher that training uses."""
    return (str(context.python),) if launcher(context) == "python" else ("uv", *uv_words(chosen), "python3")


def worker_command(context: Context, chosen: Sequence[str]) -> str | None:
    """How Ray starts its workers: the script's py_executable; None is the driver's own interpreter."""
    return " ".join(("uv", "-v", *uv_words(chosen))) if launcher(context) == "uv" else None


def engine(context: Context) -> str:
    return str(context.options.get("engine", "vllm"))


def interpreter(options: Mapping[str, Any]) -> Path:
    """The Python that the wrapper will use when no --python was given."""
    named = options.get("verl")
    checkout = Path(named).absolute() if named else None
    asked = options.get("launcher")
    if asked == "uv" or (asked is None and knows_uv(checkout) and shutil.which("uv")):
        found = uv_environment(checkout or Path.cwd()) / "bin" / "python3"
        if not found.is_file():
            sync = f"cd {checkout} && uv sync {' '.join(uv_words(extras(str(options.get('engine', 'vllm'))))[1:])}"
            raise BlockedError(Boundary.ENVIRONMENT, f"{found}: uv has not made the environment of this checkout yet", sync)
        return found
    ambient = shutil.which("python3")
    if ambient is None:
        raise BlockedError(Boundary.ENVIRONMENT, "no python3 on PATH: the wrapper starts it by this name", "--python PATH")
    return Path(ambient)


def import_path(context: Context) -> tuple[str, ...]:
    """What stands behind the checkouts under test: Bridge's own Megatron-LM, the verl checkout, the Megatron-LM of an image."""
    tested = {package for repo in context.changes if not repo.companion for package in repo.packages}
    made = [str(place) for place in bundled_core(context)]
    checkout = checkout_of(context)
    if checkout is not None and "verl" not in tested:
        made.append(str(checkout))
    if not bundled_core(context) and "megatron.core" not in tested and SHADOW.is_dir():
        made.append(str(SHADOW))  # the driver has it first, so its workers must have it, too
    return tuple(made)


def bundled_core(context: Context) -> list[Path]:
    """The Megatron-LM inside a Bridge under test: it is Bridge's own, unless another Megatron-LM is under test."""
    if any("megatron.core" in repo.packages for repo in context.changes):
        return []
    bundled = [Path(repo.path, "3rdparty", "Megatron-LM") for repo in context.changes if "megatron.bridge" in repo.packages]
    return [place for place in bundled if (place / "megatron" / "core").is_dir()]  # an empty submodule provides nothing


def python_path(context: Context) -> str:
    return hydra.python_path(context, import_path(context))


def layout(checkout: Path | None) -> Finding:
    """Whether this is a verl checkout with the wrapper at its place."""
    if checkout is None:
        return _finding(False, "no verl checkout was named: its own wrapper is what runs on GPUs", CLONE)
    version = checkout / VERSION
    if not version.is_file():
        return _finding(False, f"{checkout}: not a verl checkout: {VERSION} is missing", CLONE)
    said = version.read_text(encoding="utf-8", errors="replace").strip()
    if not (checkout / WRAPPER).is_file():
        similar = _similar(checkout)
        near = f"; similar scripts there: {', '.join(similar)}" if similar else ""
        message = f"{checkout} (verl {said}): the wrapper {WRAPPER} is missing{near}"
        return _finding(False, message, "check out a branch that has the wrapper (verl's main has)")
    if not (checkout / CONFIG).is_dir():
        return _finding(False, f"{checkout} (verl {said}): {CONFIG} is missing", "check out the whole repository")
    generation = "starts Python through uv unless VERL_USE_UV=0" if knows_uv(checkout) else "starts the python3 on PATH"
    return _finding(True, f"{checkout}: verl {said}, its wrapper {generation}")


def _similar(checkout: Path) -> list[str]:
    """Scripts that may be the wrapper under another name, the closest first; those of other devices are not."""
    found = [str(path.relative_to(checkout)) for path in checkout.glob("tests/**/run*megatron*.sh")]
    mine = sorted(name for name in found if "special_npu" not in name)
    return sorted(mine, key=lambda name: -difflib.SequenceMatcher(None, WRAPPER, name).ratio())[:5]


def shadowing(context: Context) -> tuple[Finding, ...]:
    """The Megatron-LM that the wrapper puts first in the driver must be the one under test, if one is."""
    if not SHADOW.is_dir():
        return ()
    tested = [Path(repo.import_root) for repo in context.changes if "megatron.core" in repo.packages and repo.import_root]
    wanted = (tested or bundled_core(context))[:1]
    if not wanted:
        return (_finding(True, f"{SHADOW} exists: driver and workers use its Megatron-LM"),)
    if real_path(wanted[0]) == real_path(SHADOW):
        return (_finding(True, f"{SHADOW} is the Megatron-LM under test"),)
    message = f"{SHADOW} exists and the wrapper puts it before {wanted[0]} in the driver, not in its workers"
    fix = f"move {SHADOW} away, or mount {wanted[0]} there"
    return (Finding(name="Megatron-LM", ok=False, message=message, fix=fix),)


def launching(context: Context) -> Finding | tuple[()]:
    """The launcher is there, and starts the interpreter whose packages were recorded."""
    if launcher(context) == "uv":
        found = shutil.which("uv")
        if found is None:
            message = "launcher = uv, and there is no uv on PATH"
            return Finding(name="launcher", ok=False, message=message, fix="pip install uv, or --set options.launcher=python")
        if not knows_uv(checkout_of(context)):
            message = "launcher = uv, and the wrapper of this checkout starts python3 whatever is asked for"
            return Finding(name="launcher", ok=False, message=message, fix="--set options.launcher=python")
        return Finding(name="launcher", ok=True, message=f"{found}: driver and Ray workers run through it")
    if not context.has_python:
        return ()
    if OWN in context.python.absolute().parents and (lacks := [name for name in NEEDED if importlib.util.find_spec(name) is None]):
        message = f"{context.python} is Seatrial's own Python, which has no {', '.join(lacks)}"
        return Finding(name="launcher", ok=False, message=message, fix="--python /path/to/verl/env/bin/python")
    beside = context.python.absolute().parent / "python3"
    if not beside.exists() or real_path(beside) != real_path(context.python):
        message = f"the wrapper starts `python3`, and {beside} is not {context.python}"
        return Finding(name="launcher", ok=False, message=message, fix="--python with the python3 of a virtual environment")
    return Finding(name="launcher", ok=True, message=f"{beside}: driver and Ray workers run it")


def _finding(ok: bool, message: str, fix: str = "") -> Finding:
    return Finding(name="verl", ok=ok, boundary=Boundary.CONFIG, message=message, fix=fix, code=FindingCode.CHECKOUT)


WITNESS_MODULE = "seatrial.instruments.verl.import_witness"
REFIT = "SEATRIAL_REFIT_FACTS"
"""Where the refit probe writes; the user turns it on, and workers on other nodes must be told."""


def witness_variables(context: Context, directory: Path, plugins: tuple[str, ...] = ()) -> dict[str, str]:
    """For the processes of one level directory; `plugins` are loaded after the witness."""
    return {
        "VERL_USE_EXTERNAL_MODULES": ",".join((WITNESS_MODULE, *plugins)),
        **hydra.witness_variables(context, directory, bundled_core(context), "verl"),
        **({REFIT: facts} if (facts := os.environ.get(REFIT)) else {}),
    }
