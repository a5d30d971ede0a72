"""How a campaign is shown: one line while it runs, a small table when it is asked for, and the exit code at the end."""

from __future__ import annotations

import shlex
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from seatrial.model.words import counted

if TYPE_CHECKING:
    from seatrial.rollouts.conduct.status import Status

_SPEAK_S = 10.0
_SILENT_S = 5.0
"""A collector says every two seconds where it stands."""
VERIFIERS = "exact, choice, math, code, judge, or a name of [verifiers]; a function needs a table there."
"""What may stand behind --verifier."""
_CLEAR = "\r\x1b[K"


def say(text: str) -> None:
    """A line for people, beside what a command prints."""
    typer.echo(f"seatrial: {text}", err=True)


def line(status: Status) -> str:
    """Everything that matters, in one line."""
    share = 100 * status.settled / status.units if status.units else 100.0
    parts = [f"{status.settled}/{status.units} rollouts ({share:.1f} %)", f"{status.shards_done}/{status.shards} shards"]
    if status.owed and status.per_s:
        parts.append(f"{status.per_s:.3g}/s, {duration(status.eta_s or 0)} to go")
    if status.mean_reward is not None:
        parts.append(f"mean reward {status.mean_reward:.3f}")
    if status.failed:
        parts.append(f"{status.failed} failed for good")
    if status.failures:
        parts.append("failures: " + _failures(status))
    if status.stopped:
        parts.append(f"stopped: {status.stopped}")
    return " · ".join(parts)


def table(status: Status) -> str:
    """The same and more, one fact per line."""
    rate = "-" if status.per_s is None else f"{status.per_s:.3g} rollouts/s"
    eta = "-" if status.eta_s is None else duration(status.eta_s)
    reward = "-" if status.mean_reward is None else f"{status.mean_reward:.4f}"
    where = f"round {status.round} on {status.on}" if status.round else "no round was launched"
    facts = {
        "campaign": f"{status.name} ({where})",
        "rollouts": f"{status.settled} of {status.units} settled: {status.ok} ok, {status.failed} failed for good; {status.owed} owed",
        "rows": f"{status.rows_done} of {status.rows} settled",
        "shards": f"{status.shards_done} of {status.shards} done; {_collectors(status)}, {counted(status.open, 'request')} open",
        "speed": f"{rate}, time to go {eta}",
        "reward": f"mean {reward}",
        "failures": _failures(status) or "none",
    }
    if status.owing_most:
        facts["owing most"] = ", ".join(f"shard {number}" for number in status.owing_most)
    odd = {"torn": status.torn, "twice": status.duplicates, "contradicting": status.conflicts, "foreign": status.foreign}
    if any(odd.values()):
        facts["records"] = ", ".join(f"{count} {name}" for name, count in odd.items() if count)
    if status.stopped:
        facts["stopped"] = status.stopped
    return "\n".join(f"{name + ':':<12}{text}" for name, text in facts.items())


def _failures(status: Status) -> str:
    """Failures by class. They are records, of which most heal: that all did is said, since it looks like the opposite."""
    said = ", ".join(f"{kind} {count}" for kind, count in status.failures.items())
    return f"{said} (all healed)" if said and not status.failed and not status.owed else said


def _collectors(status: Status) -> str:
    """Who works on it. One that was killed cannot say so: its silence is told."""
    silent = status.seen_s is not None and status.seen_s > _SILENT_S
    return f"{counted(status.collectors, 'collector')} {f'seen {status.seen_s:.0f} s ago' if silent else 'at work'}"


def duration(seconds: float) -> str:
    """`1 h 05 min`, `3 min 20 s`, `12 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def _clear() -> None:
    """Take the line away that is rewritten: the one thing here that steers the terminal."""
    getattr(sys.stderr, "rich_proxied_file", sys.stderr).write(_CLEAR)


class Progress:
    """A line that is rewritten on a terminal, below what else is said; elsewhere a new one when something changed, now and then.

    Several threads may call it.
    """

    def __init__(self) -> None:
        self._last, self._spoke = "", float("-inf")
        self._rewrite = sys.stderr.isatty()
        self._lock = threading.Lock()

    def show(self, status: Status) -> None:
        """Show where the campaign stands."""
        text, now = line(status), time.monotonic()
        with self._lock:
            if self._rewrite:
                self._last = f"seatrial: {text}"[: shutil.get_terminal_size().columns - 1]  # a longer one would not be rewritten
                _clear()
                typer.echo(self._last, nl=False, err=True)
            elif text != self._last and (now - self._spoke >= _SPEAK_S or not status.owed):
                self._last, self._spoke = text, now
                say(text)

    def say(self, text: str) -> None:
        """A line that stays."""
        with self._lock:
            if self._rewrite and self._last:
                _clear()
                typer.echo(f"seatrial: {text}\n{self._last}", nl=False, err=True)
            else:
                say(text)

    def close(self) -> None:
        """What follows is on a new line."""
        with self._lock:
            if self._rewrite and self._last:
                typer.echo(err=True)
                self._last = ""


def close(status: Status, directory: Path, mend: str = "") -> None:
    """The last lines; the exit code is 99 when something is owed, or when no rollout worked: then there is no result.

    `mend` is what to do about the latter, where that is not to retry them.
    """
    from seatrial.model.verdict import ExitCode

    typer.echo(table(status))
    place = shlex.quote(str(directory))
    if status.owed:
        are, them = ("is", "it") if status.owed == 1 else ("are", "them")
        say(f"{counted(status.owed, 'rollout')} {are} still owed; collect {them} with: seatrial rollouts resume {place}")
    elif not status.ok:
        then = mend or f"seatrial rollouts resume {place} --retry-failed"
        say(f"no rollout worked: {directory}/merged/failures.jsonl says why; then: {then}")
    if status.owed or not status.ok:
        raise typer.Exit(ExitCode.BLOCKED)
