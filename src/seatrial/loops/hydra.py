"""What loops with Hydra and Megatron share: overrides, parallel sizes, and the configuration that a log shows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from seatrial.core.loop import Option

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
