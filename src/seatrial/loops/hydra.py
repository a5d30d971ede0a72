"""What loops with Hydra and Megatron share: overrides, parallel sizes, checkouts, and findings about a composed configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.checks.probe_facts import unmet_claims
from seatrial.core.guarded import parse_count
from seatrial.core.loop import Context, Option, finding
from seatrial.core.records import Finding, replace
from seatrial.core.specs import Level
from seatrial.core.verdict import Boundary

OVERRIDE = re.compile(r"(?:\+\+?|~)?[^\s=+~-][^\s=]*=.*|~[^\s=+~-][^\s=]*", re.DOTALL)
OVERRIDE_FORM = "write KEY=VALUE, +KEY=VALUE, ++KEY=VALUE or ~KEY"


def is_override(word: str) -> bool:
    """Whether Hydra takes it for an override: KEY=VALUE, +KEY=VALUE, ++KEY=VALUE or ~KEY. A flag is none."""
    return OVERRIDE.fullmatch(word) is not None


def override_key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


_KINDS = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert", "etp": "expert tensor"}


def size_options(levels: str, of_experts: str = "") -> tuple[Option, ...]:
    """The options of parallel sizes; those of experts may hold for other levels."""
    places = {name: (of_experts or levels) if name.startswith("e") else levels for name in KEYS}
    return tuple(Option(name, f"{_KINDS[name]} parallel size of {places[name]}", "number") for name in KEYS)


@dataclass(frozen=True)
class Sizes:
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    def problem(self, count: int) -> str | None:
        dense = (f"TP {self.tp} x PP {self.pp} x CP {self.cp}", self.tp * self.pp * self.cp)
        experts = (f"ETP {self.etp} x EP {self.ep} x PP {self.pp}", self.etp * self.ep * self.pp)
        wrong = [f"{text} = {size} does not divide {count} GPUs" for text, size in (dense, experts) if count % size]
        return wrong[0] if wrong else None


def last_count(arguments: Sequence[str], keys: tuple[str, ...], default: int) -> int:
    """The number that the user's own arguments give one of these keys; the last one counts, since it is what the loop will do."""
    given = [word.partition("=")[2] for word in arguments if word.lstrip("+").startswith(keys)]
    return parse_count(given[-1]) if given and given[-1].isascii() and given[-1].isdecimal() else default


def with_options(
    ladder: Sequence[Level], options: Mapping[str, str], gpus: int, changed: Callable[[Level, Mapping[str, str]], dict[str, object]]
) -> tuple[Level, ...]:
    """The ladder with these options; a cluster is asked for the GPUs that are used."""
    count = int(options.get("gpus", gpus))
    costs = [replace(level.cost, gpus=count) for level in ladder]
    return tuple(replace(level, cost=cost, **changed(level, options)) for level, cost in zip(ladder, costs, strict=True))


def checkout_of(context: Context, option: str, package: str) -> Path | None:
    """The checkout that is driven: the one that was named, or the one under test."""
    named = context.options.get(option)
    return Path(named).absolute() if named else next((Path(repo.path) for repo in context.changes if package in repo.packages), None)


def python_path(context: Context, behind: Sequence[str]) -> str:
    """PYTHONPATH of every process of the loop, as the trial sets it for the driver; workers must have the same."""
    return os.pathsep.join((*context.import_path(), *behind, str(context.run_dir / "instruments")))


def witness_variables(context: Context, directory: Path, cores: Sequence[Path], loop: str) -> dict[str, str]:
    """Variables of the import witness, for the processes of one level directory."""
    roots = ((package, repo.synced or repo.import_root) for repo in context.changes for package in repo.packages)
    tested = [*(f"{package}={root}" for package, root in roots if root), *(f"megatron.core={place}" for place in cores)]
    watched = (loop, "megatron.core", "megatron.bridge", "torch", "transformers", "ray", "vllm", "sglang")
    return {"SEATRIAL_IMPORTS": str(directory), "SEATRIAL_UNDER_TEST": os.pathsep.join(tested), "SEATRIAL_WATCH": ",".join(watched)}


def word_findings(arguments: Sequence[str], places: Sequence[str], script: str, form: str = OVERRIDE_FORM) -> list[Finding]:
    """Arguments must be overrides; and a script passes them on unquoted: one with white space would become two."""
    said = [(f"{word!r} is no Hydra override", form) for word in arguments if not is_override(word)]
    fix = "use paths and overrides without white space"
    said += [(f"the {script} would split {word!r}", fix) for word in places if len(word.split()) != 1]
    return [configured_wrong(False, message, fix, "arguments") for message, fix in said]


def configured_wrong(ok: bool, message: str, fix: str = "", name: str = "configuration") -> Finding:
    return finding(name, ok, message, fix, Boundary.CONFIG)


def rejected(title: str, answer: Mapping[str, Any], own: Sequence[str], loop: str, fix: Callable[[str], str]) -> Iterator[Finding]:
    """Overrides that the loop's own configuration does not take; `own` are the user's, for the others `fix` says what helps."""
    for entry in answer["rejected"]:
        override, near = entry["override"], entry["near"]
        known = f"; nearest known: {', '.join(near)}" if near else ""
        advice = "correct it, or leave it out" if override in own else fix(override)
        yield configured_wrong(False, f"{title}: this {loop} rejects {override}{known} ({entry['reason'][:200]})", advice)


def unlike_claims(title: str, claims: Mapping[str, Any], answer: Mapping[str, Any], own: Sequence[str], script: str) -> Iterator[Finding]:
    """Values that a level claims and the run would not have; one whose override was rejected is said already."""
    said = {override_key(entry["override"]) for entry in answer["rejected"]}
    for key, value, claimed in unmet_claims(claims, answer["values"]):
        if key not in said:
            theirs = next((word for word in own if override_key(word) == key), None)
            fix = f"leave {theirs} out: with it the level would not prove its claim" if theirs else f"use {script} unchanged"
            yield configured_wrong(False, f"{title} claims {key} = {claimed}, and the run would have {value}", fix)
