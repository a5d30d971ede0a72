"""The generations of NeMo Gym, and what differs between them.

- Since 0.4 there is one program, `gym`. Before, there were ng_run, ng_collect_rollouts and others; 0.4 has them as deprecated shims,
  so `gym` is taken where it is.
- Both take what they are told as Hydra's overrides, have the same head, and agents with the same /run.
- What one of the older ones lacks is looked up in its code: a checkout may lie between two versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from seatrial import files

_SEAM = ("resume_from_cache", "disable_aggregation", "_failures.jsonl")
"""What we need of Gym's collector: that it rolls out the rows it is given, hands them on as they are made, and says when it begins."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Of one installation."""

    version: str
    modern: bool = True
    """Whether it has `gym`."""
    liveness: bool = True
    """Whether its servers answer 200 on /. Others answer 404 there, once they are up."""
    lacks: tuple[str, ...] = ()
    """What its collector would need."""

    @property
    def start(self) -> tuple[str, ...]:
        """The command that starts servers: a program of its environment, and words."""
        return ("gym", "env", "start") if self.modern else ("ng_run",)

    @property
    def collect(self) -> tuple[str, ...]:
        """The command that collects from servers that run, and goes on with what was begun."""
        return ("gym", "eval", "run", "--no-serve", "--resume") if self.modern else ("ng_collect_rollouts", "+resume_from_cache=true")

    def __str__(self) -> str:
        return f"NeMo Gym {self.version}, {' '.join(self.start)}"


def find_generation(programs: Path, package: Path, version: str | None) -> Generation | None:
    """By the programs and the code of the package nemo_gym; None where neither generation's programs are there."""
    known = version or "of unknown version"
    if (programs / "gym").is_file():
        return Generation(known)
    if not (programs / "ng_run").is_file():
        return None
    collector, servers = _code(package / "rollout_collection.py"), _code(package / "server_utils.py")
    return Generation(known, modern=False, liveness="setup_liveness" in servers, lacks=tuple(key for key in _SEAM if key not in collector))


def _code(path: Path) -> str:
    return files.read_text(path) if path.is_file() else ""
