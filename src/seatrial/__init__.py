"""Seatrial proves that a change survives real RL post-training, and says where it breaks when it does not.

- The public names are those of `__all__`; `docs/api.md` shows them. The rest of the package may change.
- Importing this package pulls in nothing heavy: no torch, no Ray, no transformers, and a public name is loaded when it is first used.
  Loops run in their own interpreters; what must be known from inside them is reported by `seatrial.instruments`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seatrial.api import Trial, bisect, check, collect, judge, plan, probe_bridge, probe_refit, run
    from seatrial.core.errors import BlockedError, UserError
    from seatrial.core.verdict import Verdict

__all__ = [
    "BlockedError",
    "Trial",
    "UserError",
    "Verdict",
    "bisect",
    "check",
    "collect",
    "judge",
    "plan",
    "probe_bridge",
    "probe_refit",
    "run",
]
__version__ = "0.1.0"

_MODULES = {"BlockedError": "core.errors", "UserError": "core.errors", "Verdict": "core.verdict", "collect": "rollouts.collect_campaign"}
"""Where a public name is, unless it is in `api`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "bisect":  # a room of this name, which can be called
        return import_module("seatrial.bisect")
    found = getattr(import_module(f"seatrial.{_MODULES.get(name, 'api')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
