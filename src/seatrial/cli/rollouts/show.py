"""How a campaign is shown: one line while it runs, a small table when it is asked for, and the exit code at the end."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from seatrial.rollouts.status import Status

_SPEAK_S = 10.0


def say(text: str) -> None:
    """A line for people, beside what a command prints."""
    typer.echo(f"seatrial: {text}", err=True)


def line(status: Status) -> str:
    """Everything that matters, in one line."""
    share = 100 * status.settled / status.units
    parts = [f"{status.settled}/{status.units} rollouts ({share:.1f} %)", f"{status.shards_done}/{status.shards} shards"]
    if status.owed and status.per_s:
        parts.append(f"{status.per_s:.3g}/s, {duration(status.eta_s or 0)} to go")
    if status.mean_reward is not None:
        parts.append(f"mean reward {status.mean_reward:.3f}")
    if status.failed:
        parts.append(f"{status.failed} failed for good")
    if status.failures:
        parts.append("failures: " + ", ".join(f"{kind} {count}" for kind, count in status.failures.items()))
    if status.stopped:
        parts.append(f"stopped: {status.stopped}")
    return " · ".join(parts)


def table(status: Status) -> str:
    """The same and more, one fact per line."""
    rate = "-" if status.per_s is None else f"{status.per_s:.3g} rollouts/s"
    eta = "-" if status.eta_s is None else duration(status.eta_s)
    reward = "-" if status.mean_reward is None else f"{status.mean_reward:.4f}"
    failures = ", ".join(f"{kind} {count}" for kind, count in status.failures.items()) or "none"
    where = f"round {status.round} on {status.on}" if status.round else "nothing launched yet"
    facts = {
        "campaign": f"{status.name} ({where})",
        "rollouts": f"{status.settled} of {status.units} settled: {status.ok} ok, {status.failed} failed for good; {status.owed} owed",
        "rows": f"{status.rows_done} of {status.rows} complete",
        "shards": f"{status.shards_done} of {status.shards} done; {status.collectors} collectors at work, {status.open} requests open",
        "speed": f"{rate}, time to go {eta}",
        "reward": f"mean {reward}",
        "failures": failures,
    }
    if status.owed and status.slowest:
        facts["owing most"] = ", ".join(f"shard {number}" for number in status.slowest)
    odd = {"torn": status.torn, "twice": status.duplicates, "contradicting": status.conflicts, "foreign": status.foreign}
    if any(odd.values()):
        facts["records"] = ", ".join(f"{count} {name}" for name, count in odd.items() if count)
    if status.stopped:
        facts["stopped"] = status.stopped
    return "\n".join(f"{name + ':':<12}{text}" for name, text in facts.items())


def duration(seconds: float) -> str:
    """`1 h 05 min`, `3 min 20 s`, `12 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


class Progress:
    """A line that is rewritten on a terminal; elsewhere a new one when something changed, now and then."""

    def __init__(self) -> None:
        self._last, self._spoke = "", float("-inf")
        self._rewrite = sys.stderr.isatty()

    def show(self, status: Status) -> None:
        """Show where the campaign stands."""
        text = line(status)
        if text == self._last or (not self._rewrite and time.monotonic() - self._spoke < _SPEAK_S and status.owed):
            return
        self._last, self._spoke = text, time.monotonic()
        if self._rewrite:
            typer.echo(f"\r\x1b[Kseatrial: {text}", nl=not status.owed, err=True)
        else:
            say(text)


def close(status: Status, directory: Path) -> None:
    """The last lines, and the exit code when something is owed."""
    from seatrial.model.verdict import ExitCode

    typer.echo(table(status))
    if status.owed:
        place = shlex.quote(str(directory))
        say(f"{status.owed} rollouts are still owed; collect them with: seatrial rollouts resume {place}")
        raise typer.Exit(ExitCode.BLOCKED)
