"""The NeMo-RL checkout that is driven: its place, its generation, its Python, and the configuration keys that its code reads."""

from __future__ import annotations

import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from seatrial.core.errors import BlockedError, FindingCode
from seatrial.core.files import read_text
from seatrial.core.loop import Context
from seatrial.core.records import Finding
from seatrial.core.verdict import Boundary
from seatrial.loops import hydra

FOLDERS = ("nemo_rl", "examples")
PASSED_ON = (
    *("data", "env", "env_vars", "hf_config_overrides", "nemo_gym", "optimizer", "scheduler", "freeze_config"),
    *("wandb", "swanlab", "mlflow", "tensorboard"),
)
"""Sections that are handed on whole to other code: their keys need not occur in NeMo-RL. So are those named `…kwargs`."""
_SILENT = re.compile(r"^[ \t]*#.*$|(\"\"\"|''')[\s\S]*?\1", re.MULTILINE)
"""Comments on lines of their own, and texts of several lines: a name in them is not read."""
_WORD = re.compile(r"[A-Za-z_]\w*")
_QUOTED = re.compile(r"[\"'](\w+)[\"']")
_CLASS = re.compile(r"^class (\w+)\(([^)]*)\):((?:\n(?:[ \t][^\n]*)?)*)", re.MULTILINE)
_FIELD = re.compile(r"^    (\w+): ((?:[^\n=\[]|\[[^\]]*\])*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ConfigSource:
    words: frozenset[str]
    quoted: frozenset[str]
    """Names that stand alone between quotation marks: keys of a dictionary, perhaps."""
    sections: Mapping[str, frozenset[str]]
    """The sections that declare a key, by the name of the key."""

    def unread(self, key: str, added: str | None) -> str | None:
        """Why no code reads a dotted key, or None; `added` is the first part of it that no YAML file has."""
        parts = list(_own_parts(key))
        unknown = [part for part in parts if part not in self.words]
        if unknown:
            return f"nothing in this checkout reads {unknown[0]}"
        first = sum(not part.isdecimal() for part in added.split(".")) - 1 if added else len(parts)
        for place, (section, name) in enumerate(pairwise(parts), 1):
            if place < first or name in self.quoted:
                continue
            declared = self.sections.get(name, frozenset())
            if declared and section not in declared:
                return f"nothing in this checkout reads {name} below {section} (it belongs below {', '.join(sorted(declared))})"
        return None


def _own_parts(key: str) -> Iterator[str]:
    """The parts of a key that NeMo-RL itself must know: up to a section that is handed on; numbers are places in a list."""
    for part in key.split("."):
        if not part.isdecimal():
            yield part
        if part in PASSED_ON or part.endswith("kwargs"):
            return


@lru_cache(maxsize=8)
def read_source(checkout: Path) -> ConfigSource:
    """Read the code of a checkout once; it does not change while a trial is planned."""
    texts = [_SILENT.sub("", read_text(path)) for folder in FOLDERS for path in (checkout / folder).rglob("*.py")]
    words = frozenset(word for text in texts for word in _WORD.findall(text))
    quoted = frozenset(word for text in texts for word in _QUOTED.findall(text))
    return ConfigSource(words, quoted, _sections(texts))


def _sections(texts: list[str]) -> Mapping[str, frozenset[str]]:
    """Which sections declare a key: fields whose type names a class that has it, itself or by inheritance."""
    bases: dict[str, set[str]] = defaultdict(set)
    fields: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, parents, body in (match for text in texts for match in _CLASS.findall(text)):
        bases[name] |= set(_WORD.findall(parents))
        for field, kind in _FIELD.findall(body):
            fields[name][field] |= set(_WORD.findall(kind))
    kin = {name: _ancestors(name, bases) for name in bases}
    made: dict[str, set[str]] = defaultdict(set)
    for field, kind in ((field, kind) for each in fields.values() for field, kind in each.items()):
        for relative in (other for named in kind & kin.keys() for other in kin if other in kin[named] or named in kin[other]):
            for key in fields.get(relative, {}):
                made[key].add(field)
    return {key: frozenset(value) for key, value in made.items()}


def _ancestors(name: str, bases: Mapping[str, set[str]]) -> set[str]:
    found, left = set[str](), [name]
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += [base for base in bases.get(one, ()) if base in bases]
    return found


FUNCTIONAL = "tests/functional"
VENDORED = "3rdparty/Megatron-Bridge-workspace/Megatron-Bridge"
BRIDGE = "src/megatron/bridge"
CORE = "3rdparty/Megatron-LM"
VERSION = "nemo_rl/package_info.py"
LOADER = "nemo_rl/utils/config.py"
CHECKER = "tests/check_metrics.py"
CONFIGS = ("examples/configs/grpo_math_1B_megatron.yaml", "examples/configs/grpo_math_1B.yaml")
IMAGE = Path("/opt/nemo_rl_venv")
"""Where NeMo-RL's container has uv's environment."""
TRANSPORTS = {
    "NRL_REFIT_BUFFER_MEMORY_RATIO": "packed",
    **{name: name for name in ("vllm_zmq_sparse", "vllm_s3_sparse", "nccl_reshard", "nixl")},
}
"""Transports by the name that tells, in the code, that there is one."""
CLONE = "git clone --recursive https://github.com/NVIDIA-NeMo/RL.git, then --nemo-rl PATH"
UNNAMED = "no NeMo-RL checkout was named: its own functionals are what runs, in the environment that uv made for it"
NAME_IT = f"{CLONE}, also when NeMo-RL itself is under test"
SUBMODULES = "git submodule update --init --recursive"
_POSITIONAL = re.compile(r"add_argument\(\s*[\"']checks[\"']")
_PEFT = re.compile(r"^[ \t]+peft:", re.MULTILINE)
_NUMBER = re.compile(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Generation:
    refit: Literal["refit_transport", "delta_compression", "none"]
    """The key below policy.generation that chooses how weights are sent."""
    transports: tuple[str, ...]
    peft: bool
    """LoRA with Megatron."""
    megatron_generation: bool
    scripts: frozenset[str]
    """Names of the functionals."""
    check_interface: Literal["positional", "unknown"]


def generation(checkout: Path) -> Generation:
    source = read_source(checkout)
    checker, configs = checkout / CHECKER, [checkout / name for name in CONFIGS if (checkout / name).is_file()]
    positional = checker.is_file() and _POSITIONAL.search(read_text(checker)) is not None
    refit = next((name for name in ("refit_transport", "delta_compression") if name in source.words), None)
    return Generation(
        refit="refit_transport" if refit == "refit_transport" else "delta_compression" if refit else "none",
        transports=tuple(name for word, name in TRANSPORTS.items() if word in source.words),
        peft="peft" in source.words and any(_PEFT.search(read_text(path)) for path in configs),
        megatron_generation="mcore_generation_config" in source.words,
        scripts=frozenset(path.name for path in (checkout / FUNCTIONAL).glob("*.sh")),
        check_interface="positional" if positional else "unknown",
    )


def checkout_of(context: Context) -> Path | None:
    """The checkout: the one that was named, or the NeMo-RL under test."""
    return hydra.checkout_of(context, "nemo_rl", "nemo_rl")


def interpreter(options: Mapping[str, Any]) -> Path:
    """The Python of the environment that `uv run` uses in the checkout."""
    if not options.get("nemo_rl"):
        raise BlockedError(Boundary.CONFIG, UNNAMED, NAME_IT)
    checkout = Path(options["nemo_rl"]).absolute()
    named = os.environ.get("UV_PROJECT_ENVIRONMENT")
    places = [checkout / named] if named else [checkout / ".venv", IMAGE]
    found = next((place / "bin" / "python" for place in places if (place / "bin" / "python").is_file()), None)
    if found is None:
        looked = " or ".join(str(place) for place in places)
        raise BlockedError(Boundary.ENVIRONMENT, f"{looked}: uv has not made the environment of this checkout yet", sync_command(checkout))
    return found


def sync_command(checkout: Path) -> str:
    return f"{submodules_command(checkout)} && uv sync"


def submodules_command(checkout: Path) -> str:
    return f"cd {shlex.quote(str(checkout))} && {SUBMODULES}"


def import_path(context: Context) -> tuple[str, ...]:
    """What stands behind the checkouts under test: the Bridge's own Megatron-LM, and the NeMo-RL checkout."""
    tested = {package for repo in context.changes if not repo.companion for package in repo.packages}
    checkout = checkout_of(context)
    own = [str(checkout)] if checkout is not None and "nemo_rl" not in tested else []
    return (*(str(place) for place in bundled_core(context)), *own)


def bundled_core(context: Context) -> list[Path]:
    """The Megatron-LM inside the Bridge under test, or else the vendored one; none when a Megatron-LM is under test itself."""
    if any("megatron.core" in repo.packages for repo in context.changes):
        return []
    checkout = checkout_of(context)
    bridges = [Path(repo.path) for repo in context.changes if "megatron.bridge" in repo.packages]
    bridges += [checkout / VENDORED] if checkout is not None else []
    # An empty submodule provides nothing; of two, the first would be imported, so the second is left out.
    return [place / CORE for place in bridges if (place / CORE / "megatron" / "core").is_dir()][:1]


def python_path(context: Context) -> str:
    return hydra.python_path(context, import_path(context))


def layout(checkout: Path | None) -> Finding:
    if checkout is None:
        return _finding(False, UNNAMED, NAME_IT)
    version = checkout / VERSION
    if not version.is_file():
        return _finding(False, f"{checkout}: not a NeMo-RL checkout: {VERSION} is missing", CLONE)
    title = f"{checkout}: NeMo-RL {'.'.join(_NUMBER.findall(read_text(version))) or '(version unknown)'}"
    offers = generation(checkout)
    missing = [name for name, there in ((LOADER, (checkout / LOADER).is_file()), (f"{FUNCTIONAL}/*.sh", offers.scripts)) if not there]
    if missing:
        return _finding(False, f"{title}: {', '.join(missing)} is missing", "check out the whole repository, at v0.3 or later")
    said = [
        f"refit by {offers.refit}" if offers.refit != "none" else "one refit transport",
        *([f"transports {', '.join(offers.transports)}"] if offers.transports else []),
        "LoRA with Megatron" if offers.peft else "no LoRA with Megatron",
        "Megatron generation" if offers.megatron_generation else "no Megatron generation",
        f"{len(offers.scripts)} functionals",
        *([] if offers.check_interface == "positional" else [f"{CHECKER} has an interface that Seatrial does not know"]),
    ]
    return _finding(True, f"{title}, {'; '.join(said)}")


def _finding(ok: bool, message: str, fix: str = "") -> Finding:
    return Finding(name="NeMo-RL", ok=ok, boundary=Boundary.CONFIG, message=message, fix=fix, code=FindingCode.CHECKOUT)


def witness_variables(context: Context, directory: Path) -> dict[str, str]:
    return hydra.witness_variables(context, directory, bundled_core(context), "nemo_rl")
