"""What a rung is given: its model, its place, the world it is a rank of, and the way to say what it found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from seatrial.probes import facts
from seatrial.probes.bridge.session import Session


class NotApplicable(Exception):
    """This model has nothing that the rung could ask about; the text says why."""


class Missing(Exception):
    """This machine or environment lacks a part that the rung needs; the text names it exactly."""


@dataclass(frozen=True)
class Rank:
    """One process of a rung."""

    model: str
    """The family, or the name of the directory."""
    rung: str
    directory: Path
    """The HF checkpoint. Nothing is written there."""
    out: Path
    """A directory of this rung alone, shared by its ranks; empty at the start."""
    facts: Path
    device: str
    """`cpu` or `cuda`."""
    rank: int = 0
    world: int = 1
    fault: str | None = None
    options: dict[str, Any] | None = None
    """Of the plan: `steps`, `engine_python` and the like."""

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Rank:
        """From what `plain` gave."""
        return cls(**{**fields, **{key: Path(fields[key]) for key in ("directory", "out", "facts")}})

    def write(self, fact: str, **fields: Any) -> None:
        """One fact, by the first rank alone: facts that differ between ranks must be gathered first."""
        if self.rank == 0:
            facts.append(self.facts, {"fact": fact, "model": self.model, "rung": self.rung, "fault": self.fault, **fields})

    def say(self, text: str) -> None:
        """Progress, for people."""
        if self.rank == 0:
            print(f"seatrial: {self.model}: {self.rung}: {text}", flush=True)

    def session(self, dtype: str = "float32") -> Session:
        """The model through the Bridge under test."""
        return Session(self.directory, self.device, dtype)

    def config(self) -> Any:
        """The HF configuration of the text model."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.directory, local_files_only=True).get_text_config()
