"""Tiny services and clients for the tests of jobs on this machine."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from seatrial.core.jobs import Batch, Component, Ending, Job, Ready, Result
from seatrial.runtime import servers
from seatrial.runtime.jobdir import job_dir
from seatrial.runtime.local_jobs import run_batch

PYTHON = (sys.executable, "-S", "-E", "-c")

SERVER = """
import http.server, os, signal, sys
status = int(sys.argv[1]) if len(sys.argv) > 1 else 200
where = os.environ["SEATRIAL_JOB"]
result = os.path.join(where, "results", os.environ["SEATRIAL_INDEX"] + ".json")
def stop(*_):
    with open(os.path.join(where, "seen-%s-%s" % (os.environ["SEATRIAL_INDEX"], os.environ["SEATRIAL_COPY"])), "w") as seen:
        seen.write(open(result).read() if os.path.exists(result) else "nothing")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(status if self.path == "/health" else 200)
        self.end_headers()
        self.wfile.write(os.environ["SEATRIAL_COPY"].encode())
    def log_message(self, *_):
        pass
server = http.server.HTTPServer((os.environ["SEATRIAL_BIND"], int(os.environ["SEATRIAL_PORT"])), Handler)
print("listening", flush=True)
server.serve_forever()
"""
"""Answers on its port; when it is told to end, it writes down whether the result was there already."""

FETCH = "import sys, urllib.request; print(*(urllib.request.urlopen(url).read().decode() for url in sys.argv[1].split(',')))"
"""Asks every URL and prints what they said."""


def python(name: str, program: str, *words: str, **more: Any) -> Component:
    """A component that runs a Python program."""
    return Component(name=name, command=(*PYTHON, program, *words), **more)


def shell(name: str, program: str, **more: Any) -> Component:
    """A component that runs a shell program."""
    return Component(name=name, command=("sh", "-c", program), **more)


def server(name: str = "server", *words: str, deadline_s: int = 30, **more: Any) -> Component:
    """An HTTP server that is waited for."""
    return python(name, SERVER, *words, port=True, ready=Ready(deadline_s=deadline_s), **more)


def client(program: str, **more: Any) -> Component:
    """The client, a shell program."""
    return shell("client", program, role="client", **more)


def run_jobs(tmp_path: Path, *jobs: Job, said: list[str] | None = None) -> tuple[Result, ...]:
    """Run a batch in `tmp_path` and make sure that nothing of it is left and every result on disk is what was returned."""
    said = [] if said is None else said
    results = run_batch(Batch(jobs=jobs), tmp_path, said.append)
    assert left_behind(tmp_path) == []
    for result in results:
        stored = job_dir(tmp_path, result.job).result(result.index)
        assert stored == result or (stored is None and result.ending is Ending.STOPPED)
    return results


def run_one(tmp_path: Path, *components: Component, said: list[str] | None = None, **more: Any) -> Result:
    """Run one job of one unit, called `job`."""
    (result,) = run_jobs(tmp_path, Job(name="job", components=components, **more), said=said)
    return result


def left_behind(tmp_path: Path) -> list[str]:
    """Processes that were started for jobs in this directory, and pid files."""
    found = [str(path) for path in tmp_path.glob("*/logs/*.pids")]
    for process in psutil.process_iter():
        try:
            if process.environ().get("SEATRIAL_JOB", "").startswith(str(tmp_path)) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {process.cmdline()}")
        except psutil.Error:
            continue
    return found


def log(tmp_path: Path, name: str, job: str = "job") -> list[str]:
    """Lines of a log without their stamps."""
    return [line.partition(" ")[2] for line in (tmp_path / job / "logs" / f"{name}.log").read_text().splitlines()]


def patient_clock(monkeypatch: pytest.MonkeyPatch, *answers: str, step: float) -> None:
    """The time of `ready` stands still until each answer was given twice, and then goes on by a step at every look at it."""
    owed, passed, ask = Counter(dict.fromkeys(answers, 2)), itertools.count(step, step), servers.ask

    def counted(target: servers.Target) -> tuple[bool, str]:
        found = ask(target)
        owed[found[1]] -= 1
        return found

    monkeypatch.setattr(servers, "ask", counted)
    monkeypatch.setattr(servers, "time", SimpleNamespace(monotonic=lambda: next(passed) if max(owed.values()) <= 0 else 0.0))


ALMOST_A_MINUTE = 45
"""What ends by itself after a minute was ended before; a bound near the usual second would fail on a busy machine."""


class Clock:
    """How long a block took."""

    def __enter__(self) -> Clock:
        self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._began
