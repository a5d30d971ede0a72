"""Showing a trial as it runs: a live line on a terminal, plain lines in a pipe, JSON lines for machines."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.text import Text as Plain

from seatrial.core.records import Record
from seatrial.core.text import visible
from seatrial.report.outcomes import bit_words
from seatrial.trial.progress import Compared, Ended, Event, Found, Judged, Planned, Running, SideJudged, SideRunning, Stage

PLAIN_SECONDS = 10.0
COLOURS = {"Pass": "green", "Fail": "red", "Blocked": "yellow", "Skipped": "cyan"}


def running_text(event: Running | SideRunning) -> str:
    """One line about a running level, or about tests that go before the levels."""
    if isinstance(event, SideRunning):
        return " · ".join(part for part in (event.name, event.line.strip()[:80], f"{event.seconds:.0f} s") if part)
    parts = [f"level {event.level} {event.title}"]
    if event.phase != "run":
        parts.append(event.phase)
    if event.step is not None:
        parts.append(f"step {event.step}" + (f" of {event.steps}" if event.steps else ""))
    if event.reward is not None:
        parts.append(f"reward {event.reward:.3f}")
    return " · ".join([*parts, f"{event.seconds:.0f} s"])


class Text:
    """For people. On a terminal the running level is one line that changes; elsewhere a line now and then."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.status: Status | None = self.console.status("") if self.console.is_terminal else None
        self.said = 0.0
        self.started = time.monotonic()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if isinstance(event, Running | SideRunning):
            self._live(running_text(event), at_once=False)
            return
        if self.status is not None and not isinstance(event, Stage):
            self.status.stop()
        if isinstance(event, Planned):
            levels = ", ".join(f"{level.number} {level.title}" for level in event.plan.levels)
            self._plain(f"seatrial: levels {levels}\nseatrial: {event.directory}")
        elif isinstance(event, Stage):
            self._live(f"{event.name}: {event.detail}" if event.detail else event.name, at_once=True)
        elif isinstance(event, Found) and (not event.finding.ok or event.finding.warns):
            word = "[yellow]blocked[/]" if not event.finding.ok else "[cyan]warning[/]"
            self.console.print(f"{word} {escape(visible(event.finding.name))}: ", end="")
            self._plain(f"{event.finding.message}\n  fix: {event.finding.fix}")
        elif isinstance(event, Judged | SideJudged):
            result = event.result
            what = f"level {event.result.number} {event.result.title}" if isinstance(event, Judged) else event.result.name
            self.console.print(f"[bold {COLOURS[result.verdict]}]{result.verdict}[/] {escape(visible(what))}: ", end="")
            self._plain(f"{result.reason} ({result.seconds:.0f} s)")
        elif isinstance(event, Compared):
            self._plain(f"base: level {event.level}: {bit_words(event.found)}")
        elif isinstance(event, Ended):
            self.said = 0.0

    def _plain(self, text: str) -> None:
        """Print recorded text: it neither styles nor steers the terminal."""
        self.console.print(visible(text), markup=False)

    def _live(self, text: str, *, at_once: bool) -> None:
        """What happens now: on a terminal the line that changes, elsewhere a line at once or now and then."""
        if self.status is not None:
            self.status.update(Plain(visible(text)))
            self.status.start()
        elif at_once or time.monotonic() - self.said > PLAIN_SECONDS:
            self.said = self.said if at_once else time.monotonic()
            self._plain(f"seatrial: {text}")


class JsonLines:
    """For machines: one object per event on standard output."""

    def __call__(self, event: Event) -> None:
        """Print one event."""
        if isinstance(event, Running | SideRunning) and event.seconds % 5 > 0.6:
            return
        row = {"event": type(event).__name__.lower()} | {
            field.name: _plain(getattr(event, field.name)) for field in dataclasses.fields(event)
        }
        sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
        sys.stdout.flush()


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, Record) else value
