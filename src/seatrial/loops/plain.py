"""What loops say that lack a part of the contract: it is then empty."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

from seatrial.loops.options import require_known
from seatrial.model.knowledge import CheckSpec, Concern, Level, Surface
from seatrial.model.loop import Context, Footprint, Isolation, SideTests
from seatrial.model.record import LevelResult, RepoState
from seatrial.model.tokens import TokenRow

CLOCKS = ("time", "timing", "second", "_per_s", "perf/", "throughput", "memory", "mfu")
"""Parts of names of metrics that measure the machine, where a loop does not say it better."""


class Basic:
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


class Plain(Basic):
    """A loop that drives installed packages in an environment of ours, and has no options unless it says so."""

    title: str
    chosen: Mapping[str, str] = MappingProxyType({})

    def options(self) -> Mapping[str, str]:
        """None."""
        return {}

    def configured(self, options: Mapping[str, str]) -> Self:
        """Itself, when it takes them all."""
        require_known(self.title, self.options(), options)
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
