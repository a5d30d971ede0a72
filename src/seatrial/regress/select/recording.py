"""Recording in one pytest process: the tracer, the contexts, and at the end the records.

- A worker leaves its evidence in its own directory; the controller reads all of them. A single process does both.
- What cannot be written is told; the session's own result is never changed by it.
"""

from __future__ import annotations

import gc
import sqlite3
from pathlib import Path

from seatrial.regress.select import state
from seatrial.regress.select.contexts import Contexts
from seatrial.regress.select.files import cache
from seatrial.regress.select.gather import evidence
from seatrial.regress.select.gather.records import Recorder
from seatrial.regress.select.gather.sessions import Session
from seatrial.regress.select.sitting import Sitting
from seatrial.regress.select.trace.logs import read as read_children
from seatrial.regress.select.trace.recorder import Recorder as Tracer
from seatrial.regress.select.trace.session import start as start_tracing

JOURNAL = "evidence.jsonl"


class Recording:
    """From the first conftest to the end of the session."""

    def __init__(self, sitting: Sitting) -> None:
        self.told: list[str] = []
        self._sitting = sitting
        self._journal = evidence.Journal(sitting.directory / JOURNAL if sitting.role == "worker" else None)
        self._tracer: Tracer | None = None
        self._contexts: Contexts | None = None

    def start(self) -> Contexts:
        sitting = self._sitting
        trace = sitting.directory / "trace"
        trace.mkdir()
        skip = self._globs("seatrial_select_skip")
        self._tracer = start_tracing(trace, sitting.root, cache.place(), skip, sitting.config)
        self._contexts = Contexts(self._tracer, self._journal, sitting.project)
        return self._contexts

    def stop(self) -> None:
        if self._tracer is not None:
            self._tracer.stop()
            self._tracer = None
        self._journal.close()

    def finish(self) -> None:
        """The end of the session: evidence of a worker is complete, or records are written."""
        # Records are many objects and none of them is garbage: collections would look through all of pytest's again and again.
        collects = gc.isenabled()
        gc.disable()
        try:
            if self._contexts is not None:
                self._contexts.flush()
            self.stop()
            if self._sitting.role != "worker":
                self._write()
        except (OSError, ValueError, sqlite3.Error) as error:
            self.told.append(f"seatrial: nothing was recorded: {self._sitting.state}: {error}")
        finally:
            self._sitting.forget()
            if collects:
                gc.enable()

    def _write(self) -> None:
        sitting = self._sitting
        found = self._evidence()
        if not any(one.tests for one in found):
            return
        inputs = self._globs("seatrial_select_inputs")
        common = sitting.common()
        recorder = Recorder(sitting.digests, found, inputs, common)
        outcomes = [outcome for one in found for outcome in Session(recorder, one).outcomes()]
        state.save(sitting.state, sitting.asked.given, sitting.asked.commit, outcomes, sitting.now, sitting.loaded)

    def _globs(self, name: str) -> list[str]:
        """Globs of the ini file: relative to the project, or to pytest's root below it."""
        given = [str(glob) for glob in self._sitting.config.getini(name)]
        below = self._sitting.below
        return [*given, *(f"{below}/{glob}" for glob in given)] if below else given

    def _evidence(self) -> list[evidence.Evidence]:
        if self._sitting.role == "single":
            return [self._with_children(self._journal.take(), self._sitting.directory)]
        found = []
        for path in sorted(self._sitting.directory.glob(f"*/{JOURNAL}")):
            found.append(self._with_children(evidence.read(path), path.parent))
        return found

    def _with_children(self, one: evidence.Evidence, directory: Path) -> evidence.Evidence:
        if (directory / "trace").exists():
            one.children = list(read_children(directory / "trace"))
        return one
