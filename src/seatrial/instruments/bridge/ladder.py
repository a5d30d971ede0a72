"""Driver of the conformance ladder: `python -m seatrial.instruments.bridge.ladder PLAN OUT`, where Megatron and transformers are.

PLAN is JSON: `device`, `models` (name -> directory, or null for a family that is made here), `items` (each a model, a rung and a fault
or null), `options`, `patience` (a factor of deadlines) and `watch` (changed files -> the names they are reported by).
OUT/facts.jsonl gets what the rungs found, how each ended (`rung`), what was imported from where (`imported`), which shims took part
(`shims`), and which functions of watched files were called (`called`). The host judges them.

On a CPU the Bridge is imported once, and every item runs in forked processes of its own, one per rank. What Megatron imports touches CUDA,
so on a GPU `Workers` run one item each, and a few are started ahead. Neither a crash nor parallel state of one rung reaches the next.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from seatrial.instruments import facts, provenance
from seatrial.instruments.bridge import faults, rungs
from seatrial.instruments.bridge.rungs import Missing, NotApplicable, Rank
from seatrial.instruments.megatron import shims

AHEAD = 4
IMPORT_S = 600.0
"""How long a worker may import before its job's own deadline begins."""


class Workers:
    """As many workers as there are jobs, never more than `AHEAD` at once."""

    def __init__(self, jobs: int) -> None:
        self._left, self._waiting = jobs, deque[subprocess.Popen[str]]()
        self._running: subprocess.Popen[str] | None = None

    def __enter__(self) -> Workers:
        self._fill()
        return self

    def __exit__(self, *_exc: object) -> None:
        for worker in (*self._waiting, *([self._running] if self._running else [])):
            worker.kill()
            worker.wait()

    def _fill(self) -> None:
        while self._left and len(self._waiting) < AHEAD:
            self._left -= 1
            self._waiting.append(
                subprocess.Popen([sys.executable, "-m", "seatrial.instruments.bridge.ladder", "--worker"], stdin=subprocess.PIPE, text=True)
            )

    def run(self, job: dict[str, Any], place: Path, deadline_s: float) -> tuple[int | None, float, float]:
        """The exit code of a job (negative: its signal; None: it was late and is ended), seconds and CPU seconds of the job itself."""
        worker = self._running = self._waiting.popleft()
        self._fill()
        place.mkdir(parents=True, exist_ok=True)
        assert worker.stdin is not None
        with contextlib.suppress(OSError):  # it died as it imported: its exit code says so
            worker.stdin.write(json.dumps({**job, "place": str(place)}) + "\n")
            worker.stdin.close()
        code: int | None = None
        try:
            begun = self._begun(worker, place / "begun")
            code = worker.wait(timeout=deadline_s) if begun else worker.returncode
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
        spent = place / "spent"
        seconds, cpu = json.loads(spent.read_text(encoding="utf-8")) if spent.is_file() else (deadline_s, 0.0)
        return code, seconds, cpu

    def _begun(self, worker: subprocess.Popen[str], mark: Path) -> bool:
        limit = time.monotonic() + IMPORT_S
        while not mark.exists():
            if worker.poll() is not None:
                return mark.exists()
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired(worker.args, IMPORT_S)
            time.sleep(0.02)
        return True


ENDED = {"ran": 0, "raised": 10, "not applicable": 11, "missing": 12}
"""How a rank ended, as its exit code."""
MAKE_S = 300.0
GRACE_S = 20.0
"""How long the other ranks may go on when one has failed."""


class Ladder:
    def __init__(self, plan: dict[str, Any], out: Path) -> None:
        self.plan, self.out, self.facts = plan, out, out / "facts.jsonl"
        self.device: str = plan["device"]
        self.patience: float = 60 * plan.get("patience", 1.0)
        """Seconds for each minute of a rung: large checkpoints take longer."""
        self.workers: Workers | None = None

    def run(self) -> None:
        if self.device == "cpu":
            self.imported()
            self.items()
        else:
            made = [name for name, place in self.plan["models"].items() if not place]
            items = [item for item in self.plan["items"] if rungs.TABLE[item["rung"]].ranks == 1]
            with Workers(1 + len(made) + len(items)) as self.workers:
                self.started({"imported": str(self.facts)}, self.out / "rungs" / "imported", IMPORT_S)
                self.items()
        self.write("end", items=len(self.plan["items"]))

    def imported(self) -> None:
        """Import everything; what comes from where is a fact, and so is an import that fails."""
        try:
            prepare()
        except Exception:
            self.write("unimportable", error=traceback.format_exc())
            raise
        self.write("imported", **origins())

    def items(self) -> None:
        places = {name: Path(place) if place else self.made(name) for name, place in self.plan["models"].items()}
        for item in self.plan["items"]:
            place = places[item["model"]]
            if place is not None:
                self.item(item, place)

    def made(self, name: str) -> Path | None:
        place, errors = self.out / "models" / name, self.out / "rungs" / f"{name}-made"
        if self.workers is None:
            state, error, _, _ = fork_all([lambda: rungs.ensure_family(name, place)], MAKE_S, errors)
        else:
            state, error, _, _ = self.started({"made": name, "directory": str(place)}, errors, MAKE_S)
        self.write("made", model=name, state=state, error=error)
        return place if state == "ran" else None

    def item(self, item: dict[str, Any], directory: Path) -> None:
        model, name, fault = item["model"], item["rung"], item.get("fault")
        rung = rungs.TABLE[name]
        place = self.out / "rungs" / "-".join(filter(None, (model, name, fault)))
        place.mkdir(parents=True)
        print(f"seatrial: {model}: {name}" + (f" with the fault {fault}" if fault else ""), flush=True)
        first = Rank(model, name, directory, place, self.facts, self.device, 0, rung.ranks, fault, self.plan.get("options") or {})
        watch = self.plan.get("watch") or {}
        if self.device != "cpu" and rung.ranks > 1:
            state, error, seconds, cpu = "missing", f"{rung.ranks} GPUs: run this rung on a CPU", 0.0, 0.0
        elif self.workers is None:
            work = [_bound(replace(first, rank=rank), place / "store", watch) for rank in range(rung.ranks)]
            state, error, seconds, cpu = fork_all(work, self.patience * rung.minutes, place)
        else:
            state, error, seconds, cpu = self.started({"rank": first.plain(), "watch": watch}, place, self.patience * rung.minutes)
        self.write("rung", model=model, rung=name, fault=fault, state=state, error=error, seconds=seconds, cpu_seconds=cpu)

    def started(self, job: dict[str, Any], place: Path, deadline_s: float) -> tuple[str, str, float, float]:
        """A job in a worker: how it ended, its error, seconds and CPU seconds."""
        assert self.workers is not None
        code, seconds, cpu = self.workers.run(job, place, deadline_s)
        state = "deadline" if code is None else f"killed by signal {-code}" if code < 0 else _named(code)
        error = place / "error-0"
        text = f"no end within {deadline_s:.0f} s" if code is None else error.read_text(encoding="utf-8") if error.is_file() else ""
        return state, text, seconds, cpu

    def write(self, fact: str, **fields: Any) -> None:
        facts.append(self.facts, {"fact": fact, **fields})


def worker() -> None:
    """One job, read from standard input after everything was imported."""
    failed = ""
    try:
        prepare()
    except Exception:  # noqa: BLE001 - the job says that it could not begin
        failed = traceback.format_exc()
    line = sys.stdin.readline()
    if not line:  # nobody needs this worker
        return
    job = json.loads(line)
    place = Path(job["place"])
    (place / "begun").touch()
    began, before = time.monotonic(), time.process_time()
    state = _ended(functools.partial(_job, job, failed), place / "error-0")
    spent = (round(time.monotonic() - began, 3), round(time.process_time() - before, 3))
    (place / "spent").write_text(json.dumps(spent), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ENDED[state])


def _job(job: dict[str, Any], failed: str) -> None:
    if "imported" in job:
        facts.append(job["imported"], {"fact": "unimportable", "error": failed} if failed else {"fact": "imported", **origins()})
    elif "made" in job:
        rungs.ensure_family(job["made"], Path(job["directory"]))
    elif failed:
        raise ImportError(failed)
    else:
        rank = Rank.of(job["rank"])
        _bound(rank, rank.out / "store", job["watch"])()


def _bound(rank: Rank, store: Path, watch: dict[str, str]) -> Callable[[], None]:
    def work() -> None:
        _world(rank, store)
        if rank.fault:
            faults.FAULTS[rank.fault].apply()
        seen = _watched(watch)
        try:
            module, _, function = rungs.TABLE[rank.rung].run.partition(":")
            getattr(importlib.import_module(f"seatrial.instruments.bridge.{module}"), function)(rank)
        finally:
            sys.setprofile(None)
            rank.write("shims", shims=[row for row in shims.report() if row["state"] != "not reached"])
            rank.write("called", functions=sorted([watch[file], line] for file, line in seen))

    return work


def _watched(watch: dict[str, str]) -> set[tuple[str, int]]:
    """Functions of these files that are called from now on, by file and first line: a rung says nothing about what it never calls."""
    seen: set[tuple[str, int]] = set()
    if watch:

        def called(frame: Any, event: str, _argument: object) -> None:
            code = frame.f_code
            # The body of a module or class is run by its import alone; only functions have locals of their own.
            if event == "call" and code.co_flags & inspect.CO_NEWLOCALS and code.co_filename in watch:
                seen.add((code.co_filename, code.co_firstlineno))

        sys.setprofile(called)
    return seen


def _world(rank: Rank, store: Path) -> None:
    """This rank's process group: by a file, so that no port is needed."""
    import torch

    os.environ |= {"RANK": str(rank.rank), "WORLD_SIZE": str(rank.world), "LOCAL_RANK": str(rank.rank)}
    if rank.device != "cpu":
        torch.cuda.set_device(rank.rank)
    backend = "gloo" if rank.device == "cpu" else "nccl"
    torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank.rank, world_size=rank.world)


def fork_all(work: list[Callable[[], Any]], deadline_s: float, place: Path) -> tuple[str, str, float, float]:
    """Run each in a process of its own: how they ended, the error of the first that failed, seconds, and CPU seconds. A rank that fails
    leaves the others waiting for it: they are ended."""
    place.mkdir(parents=True, exist_ok=True)
    began, before = time.monotonic(), os.times()
    sys.stdout.flush()
    running = {_forked(task, place / f"error-{number}"): number for number, task in enumerate(work)}
    states: dict[int, str] = {}
    limit = began + deadline_s
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            number = running.pop(pid)
            states[number] = _state(status)
            if states[number] != "ran":
                limit = min(limit, time.monotonic() + GRACE_S)
        elif time.monotonic() > limit:
            for late in running:
                os.kill(late, signal.SIGKILL)
            for late, number in list(running.items()):
                os.waitpid(late, 0)
                states[number] = "deadline" if not any(state != "ran" for state in states.values()) else "abandoned"
            running = {}
        else:
            time.sleep(0.02)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    ordered = ("raised", "killed", "missing", "not applicable", "deadline", "abandoned", "ran")
    state = min(states.values(), key=lambda found: next(place for place, name in enumerate(ordered) if found.startswith(name)))
    first = next((number for number in sorted(states) if states[number] == state), 0)
    error = place / f"error-{first}"
    text = error.read_text(encoding="utf-8") if error.is_file() else ""
    if state == "deadline":
        text = f"no end within {deadline_s:.0f} s"
    return state, text, round(time.monotonic() - began, 3), round(cpu, 3)


def _state(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by signal {os.WTERMSIG(status)}"
    return _named(os.WEXITSTATUS(status))


def _named(code: int) -> str:
    return next((name for name, known in ENDED.items() if known == code), f"killed with exit code {code}")


def _forked(task: Callable[[], Any], error: Path) -> int:
    """A child that does one task and ends without the parent's exit handlers."""
    pid = os.fork()
    if pid:
        return pid
    state = "raised"
    try:
        state = _ended(task, error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ENDED[state])


def _ended(task: Callable[[], Any], error: Path) -> str:
    """Do a task and say how it ended; whatever ended it is in the file."""
    try:
        task()
    except NotApplicable as reason:
        error.write_text(str(reason), encoding="utf-8")
        return "not applicable"
    except Missing as reason:
        error.write_text(str(reason), encoding="utf-8")
        return "missing"
    except BaseException:  # noqa: BLE001 - whatever ends a rung is what the parent has to write down
        error.write_text(traceback.format_exc(), encoding="utf-8")
        traceback.print_exc()
        return "raised"
    return "ran"


def prepare() -> None:
    """Import everything that rungs share, once, with one thread: a process with more must not be forked."""
    import logging
    import warnings

    with provenance.uncollected():
        import torch

        torch.set_num_threads(1)
        warnings.filterwarnings("ignore")
        logging.disable(logging.INFO)
        shims.install()
        for name in ("transformers", "megatron.core", "megatron.bridge"):
            importlib.import_module(name)
        logging.disable(logging.WARNING)


def origins() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"python": sys.version.split()[0], "cuda": torch.cuda.is_available()}
    for name in ("torch", "transformers", "megatron.core", "megatron.bridge"):
        module = sys.modules[name]
        found[name] = {"version": str(getattr(module, "__version__", "")), "file": str(module.__file__)}
    return found


def main() -> None:
    if sys.argv[1:] == ["--worker"]:
        worker()
        return
    plan, out = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]).absolute()
    print("seatrial: importing Megatron and transformers", flush=True)
    Ladder(plan, out).run()


if __name__ == "__main__":
    main()
