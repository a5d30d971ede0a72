"""Start recording in the pytest process, or in a child of it.

- `start` sets two variables for children: PYTHONPATH begins with our `start` directory, whose sitecustomize starts the child's recorder,
  and SEATRIAL_SELECT says where things are. `Recorder.stop` takes all of it back.
- Modules of the project that were imported before count as whole files.
- A session inside a recorded test has its own recorder; the outer one takes what the inner instruments as whole files.
"""

from __future__ import annotations

import builtins
import json
import mmap
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_seatrial.select.trace.fs_hooks import AuditHook, QuestionHooks
from pytest_seatrial.select.trace.import_loader import Imports, Rewriting
from pytest_seatrial.select.trace.trace_events import HIT_NAME, EventLog, kind_of_process
from pytest_seatrial.select.trace.trace_recorder import LIBRARY, ProjectTree, TraceRecorder, active, register

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

# Paths are text here: pathlib may not be loaded yet, and what it does is watched.
# ruff: noqa: PTH118, PTH123


VARIABLE = "SEATRIAL_SELECT"
EPOCH = "epoch"
START = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "start")  # noqa: PTH100, PTH120


def start(session: Path, root: Path, cache: Path | None, skip: Sequence[str], config: pytest.Config | None) -> TraceRecorder:
    """Record in this process, and have its children record; without a cache code is made anew each time."""
    session, kept = session.resolve(), "" if cache is None else str(cache.resolve())
    session.mkdir(parents=True, exist_ok=True)
    place = session / EPOCH
    place.write_bytes(bytes(8))
    outer = active()
    recorder = TraceRecorder(
        str(session), ProjectTree(str(root), skip, [str(session), *filter(None, [kept])]), _cell(str(place), write=True), None
    )
    if outer is not None:
        recorder.outer, outer.inner = outer, recorder
    before = getattr(builtins, HIT_NAME, None)
    _begin(recorder, kept)
    if before is not None:
        recorder.undo.append(lambda: setattr(builtins, HIT_NAME, before))
    if config is not None:
        Rewriting(recorder, config).install()
    told = {"session": str(session), "root": recorder.tree.root, "cache": kept, "skip": list(skip)}
    _set(recorder, VARIABLE, json.dumps(told))
    others = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != START]
    _set(recorder, "PYTHONPATH", os.pathsep.join([START, *others]))
    return recorder


def begin() -> None:
    """Record in a child, if SEATRIAL_SELECT says where."""
    if not (text := os.environ.get(VARIABLE)):
        return
    given = json.loads(text)
    session = given["session"]
    tree = ProjectTree(given["root"], given["skip"], [session, *filter(None, [given["cache"]])])
    recorder = TraceRecorder(session, tree, _cell(os.path.join(session, EPOCH), write=False), EventLog(session, kind_of_process()))
    assert recorder.log is not None
    recorder.log.hello(int(recorder.cell[0]))
    _begin(recorder, given["cache"])


def _begin(recorder: TraceRecorder, cache: str) -> None:
    register(recorder)
    asked = QuestionHooks(recorder)
    Imports(recorder, cache, asked.after).install()
    asked.install()
    apart = not recorder.tree.root.startswith(LIBRARY)  # Python's own modules, of which there are hundreds, are no part of the project
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and not (apart and file.startswith(LIBRARY) and "-packages/" not in file):
            relative = recorder.tree.source(file)
            if relative is not None:
                recorder.whole(relative, "")
            else:
                recorder.outside(file)
    AuditHook(recorder).install()


def _cell(place: str, *, write: bool) -> memoryview:
    with open(place, "r+b" if write else "rb") as file:
        mapped = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ)
    return memoryview(mapped).cast("Q")


def _set(recorder: TraceRecorder, name: str, value: str) -> None:
    before = os.environ.get(name)
    os.environ[name] = value

    def undo() -> None:
        if os.environ.get(name) == value:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before

    recorder.undo.append(undo)
