"""What a loop without options of its own says about them: most of the contract of a loop is then empty."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

from seatrial.loops.options import require_known
from seatrial.model.knowledge import Level
from seatrial.model.loop import Context


class Plain:
    """A loop that drives installed packages in an environment of ours, and has no options."""

    title: str
    chosen: Mapping[str, str] = MappingProxyType({})

    def options(self) -> Mapping[str, str]:
        """None."""
        return {}

    def configured(self, options: Mapping[str, str]) -> Self:
        """Itself."""
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
