"""Base classes of a Loop with default (empty) methods, and what its options are: values, Hydra overrides, parallel sizes, TOML tables."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self, TypeVar

from pydantic import ValidationError

from seatrial.core.errors import UserError
from seatrial.core.guarded import parse_step, parse_toml, read_file
from seatrial.core.loop import Context, Footprint, Isolation, SideTests
from seatrial.core.records import LevelResult, Record, RepoState
from seatrial.core.series import TokenRow
from seatrial.core.specs import CheckSpec, Concern, Level, Surface


def require_known_options(loop: str, known: Mapping[str, str], options: Mapping[str, str]) -> None:
    """Refuse an option that the loop does not take."""
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            listed = f"known: {', '.join(known)}" if known else "it takes none"
            raise UserError(f"options.{name}: {loop} has no such option; {listed}", f"use {close[0]}" if close else "leave it out")


def choice_option(options: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    """One of the known values; the first is the default."""
    value = options.get(name, known[0])
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1) or known
        raise UserError(f"options.{name} = {value!r}: not one of {', '.join(known)}", f"use {' or '.join(near)}")
    return value


def int_option(options: Mapping[str, str], name: str, default: int, least: int = 1, most: int | None = None) -> int:
    """A whole number within its limits."""
    text = options.get(name)
    if text is None:
        return default
    limits = f"from {least} to {most}" if most is not None else f"of at least {least}"
    value = parse_step(text)
    if value is None or value < least or (most is not None and value > most):
        raise UserError(f"options.{name} = {text!r}: not a whole number {limits}", f"use {default}")
    return value


CLOCKS = ("time", "timing", "second", "_per_s", "perf/", "throughput", "memory", "mfu")
"""Parts of names of metrics that measure the machine, where a loop does not say it better."""


class BaseLoop:
    """A loop without a table of concerns, assertions, tests, isolations and token logs of its own."""

    footprint: Footprint = Footprint()

    def concerns(self) -> tuple[Concern, ...]:
        """None."""
        return ()

    def surfaces(self) -> tuple[Surface, ...]:
        """None."""
        return ()

    def launcher(self) -> Path | None:
        """None."""
        return None

    def placed(self, changes: tuple[RepoState, ...]) -> tuple[RepoState, ...]:
        """Each from its own checkout."""
        return changes

    def own_checks(self, level: Level, directory: Path) -> tuple[CheckSpec, ...]:  # noqa: ARG002 - the contract
        """None."""
        return ()

    def shortfalls(self, level: Level, directory: Path) -> tuple[str, ...]:  # noqa: ARG002 - the contract
        """None that can be computed."""
        return ()

    def shown(self, level: Level, context: Context, directory: Path) -> tuple[str, ...]:  # noqa: ARG002 - the contract
        """Nothing beyond the processes themselves."""
        return ()

    def side_tests(self, context: Context) -> tuple[SideTests, ...]:  # noqa: ARG002 - the contract
        """None."""
        return ()

    def isolations(self, result: LevelResult) -> tuple[Isolation, ...]:  # noqa: ARG002 - the contract
        """None."""
        return ()

    def next_steps(self, result: LevelResult, context: Context) -> tuple[str, ...]:  # noqa: ARG002 - the contract
        """None."""
        return ()

    def is_clock(self, metric: str) -> bool:
        """By its name."""
        return any(word in metric for word in CLOCKS)

    def log_interval(self, paths: tuple[Path, ...]) -> int | None:  # noqa: ARG002 - the contract
        """Every step is logged."""
        return None

    def not_exercised(self, log: Path) -> tuple[str, ...]:  # noqa: ARG002 - the contract
        """Nothing that a log could show."""
        return ()

    def tokens(self, directory: Path) -> Iterator[TokenRow]:  # noqa: ARG002 - the contract
        """None."""
        return iter(())


class PackagedLoop(BaseLoop):
    """A loop that drives installed packages in an environment of ours, and has no options unless it says so."""

    title: str
    chosen: Mapping[str, str] = MappingProxyType({})

    def options(self) -> Mapping[str, str]:
        """None."""
        return {}

    def configured(self, options: Mapping[str, str]) -> Self:
        """Itself, when it takes them all."""
        require_known_options(self.title, self.options(), options)
        return self

    def checkouts(self) -> Mapping[str, Path]:
        """None: it drives an installed package, or the checkout under test."""
        return {}

    def interpreter(self) -> Path:
        """Never asked for: it has an environment."""
        raise AssertionError(f"{self.title} runs in an environment of ours")

    def other_run(self, level: Level, log: Path) -> str | None:  # noqa: ARG002 - the contract
        """Its logs do not say."""
        return None

    def import_path(self, context: Context) -> tuple[str, ...]:  # noqa: ARG002 - the contract
        """Nothing more than the checkouts under test."""
        return ()


OVERRIDE = re.compile(r"(?:\+\+?|~)?[^\s=+~-][^\s=]*=.*|~[^\s=+~-][^\s=]*", re.DOTALL)
OVERRIDE_FORM = "write KEY=VALUE, +KEY=VALUE, ++KEY=VALUE or ~KEY"


def is_override(word: str) -> bool:
    """Whether Hydra takes it for an override: KEY=VALUE, +KEY=VALUE, ++KEY=VALUE or ~KEY. A flag is none."""
    return OVERRIDE.fullmatch(word) is not None


def override_key(word: str) -> str:
    """The key of an override."""
    return word.lstrip("+~").partition("=")[0]


KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


@dataclass(frozen=True)
class Sizes:
    """Parallel sizes of one model."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    def problem(self, count: int) -> str | None:
        """Why these sizes cannot be had on so many GPUs."""
        dense = (f"TP {self.tp} x PP {self.pp} x CP {self.cp}", self.tp * self.pp * self.cp)
        experts = (f"ETP {self.etp} x EP {self.ep} x PP {self.pp}", self.etp * self.ep * self.pp)
        wrong = [f"{text} = {size} does not divide {count} GPUs" for text, size in (dense, experts) if count % size]
        return wrong[0] if wrong else None


R = TypeVar("R", bound=Record)


def read_tables(path: Path, table: str, kind: type[R], beside: tuple[str, ...] = ()) -> tuple[R, ...]:
    """All `[[table]]` entries of a file; an error names the file, the entry and the key. Tables `beside` it are for other readers."""
    try:
        data = parse_toml(read_file(path).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}", "correct the file") from error
    unknown = sorted(set(data) - {table, *beside})
    found = data.get(table, [])
    if unknown or not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise UserError(f"{path}: unknown key {(unknown or [table])[0]!r}; only [[{table}]] entries are read", f"use [[{table}]]")
    entries = []
    for index, entry in enumerate(found, 1):
        try:
            entries.append(kind.model_validate(entry))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise UserError(
                f"{path}: {table} {index} ({entry.get('id', entry.get('name', '?'))}): {key}: {first['msg']}", "correct the entry"
            ) from error
    return tuple(entries)
