"""Run a script in a process that records, and read what it and its children told.

The script is the body of a function with `recorder` at hand, in a project of the given files; the root is its working directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_seatrial.select.source_digests import facts
from pytest_seatrial.select.trace import instrument
from pytest_seatrial.select.trace.trace_events import Event, Process, read_logs

SOURCE = Path(__file__).parents[4] / "packages" / "pytest-seatrial" / "src"
SECONDS = 120
DRIVER = """
import json, os, sys
from pathlib import Path
from pytest_seatrial.select.trace.startup import start

def main(recorder):
{body}

if __name__ == "__main__":
    session, root, cache, out = sys.argv[1:]
    recorder = start(Path(session), Path(root), Path(cache), {skip}, None)
    sys.path.insert(0, root)
    try:
        main(recorder)
    finally:
        told = recorder.drain()
        recorder.stop()
        Path(out).write_text(json.dumps(told))
"""


@dataclass(frozen=True)
class Told:
    """What was told: by the recording process itself, and by its children."""

    own: list[Event]
    children: list[tuple[Process, list[Event]]]
    names: dict[int, str]
    output: str

    def hits(self, epoch: int, *, own: bool = True, children: bool = True) -> set[str]:
        """`path:block` of what was hit in an epoch, outside of imports."""
        return {
            self.names[int(event.a)] for event in self._events(own, children) if event.kind == "hit" and event[1] == epoch and not event.b
        }

    def of(self, kind: str, epoch: int | None = None) -> set[tuple[str, str]]:
        """(a, b) of all events of a kind."""
        return {event[2:] for event in self._events(True, True) if event.kind == kind and epoch in (None, event.epoch)}

    def paths(self, kind: str, epoch: int | None = None) -> set[str]:
        """The same, only a."""
        return {a for a, _ in self.of(kind, epoch)}

    def wholes(self) -> set[tuple[str, str]]:
        """Whole files of the project; the driver, which lies beside it, is told as well."""
        return {(a, b) for a, b in self.of("whole") if not a.startswith("/")}

    def at_import(self, module: str) -> set[str]:
        """What was hit while a module was imported."""
        return {self.names[int(event.a)] for event in self._events(True, True) if event.kind == "hit" and event.b == module}

    def hits_of(self, events: list[Event]) -> set[str]:
        """All that was hit in some events."""
        return {self.names[int(event.a)] for event in events if event.kind == "hit"}

    def _events(self, own: bool, children: bool) -> list[Event]:
        return [*(self.own if own else ()), *(event for _, events in self.children if children for event in events)]


def write(root: Path, files: Mapping[str, str]) -> None:
    """Files of a project."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def trace(
    tmp_path: Path,
    files: Mapping[str, str],
    script: str,
    *,
    python: str = sys.executable,
    skip: tuple[str, ...] = (),
    root: str = "project",
    within: tuple[str, ...] = (),
) -> Told:
    """Run it; a script that fails fails the test."""
    project = tmp_path / "project"
    write(project, files)
    driver, session, out = tmp_path / "driver.py", tmp_path / "session", tmp_path / "told.json"
    driver.write_text(DRIVER.format(body=textwrap.indent(textwrap.dedent(script), "    "), skip=repr(skip)))
    ran = subprocess.run(
        [*within, python, str(driver), str(session), str(tmp_path / root), str(tmp_path / "cache"), str(out)],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    names: dict[int, str] = {}
    for path in project.rglob("*.py"):
        relative = path.relative_to(project).as_posix()
        names |= {instrument.block_number(relative, name): f"{relative}:{name}" for name in facts(path.read_bytes()).blocks}
    return Told(list(unfolded(json.loads(out.read_text()))), list(read_logs(session)), names, ran.stdout)


def unfolded(kept: Sequence[list[Any]]) -> Iterator[Event]:
    """What `drain` gave, as events."""
    hits, calls, events = kept
    epoch = 0
    for number in hits:
        epoch = epoch if number >= 0 else -1 - number
        if number >= 0:
            yield Event("hit", epoch, str(number & (instrument.KEEPS - 1)))
    for number, *by in (calls[at : at + 4] for at in range(0, len(calls), 4)):
        yield Event("call", 0, str(number), "\0".join(map(str, by)))
    for at in range(0, len(events), 4):
        yield Event(*events[at : at + 4])
