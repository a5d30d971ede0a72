"""Driver of the conformance ladder: `python -m seatrial.probes.bridge.ladder PLAN OUT`, where Megatron and transformers are.

PLAN is JSON: `device`, `models` (name -> directory, or null for a family that is made here), `items` (each a model, a rung and a fault
or null) and `options`. The Bridge is imported once; every item then runs in forked processes of its own, one per rank, with a deadline:
neither a crash nor parallel state of one rung reaches the next. OUT/facts.jsonl gets what the rungs found, how each ended (`rung`), what
was imported from where (`imported`) and which shims took part (`shim`). The judgement is made outside.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seatrial.probes import facts
from seatrial.probes.bridge import families, faults, rungs
from seatrial.probes.bridge.rank import Missing, NotApplicable, Rank
from seatrial.probes.megatron import shims

ENDED = {"ran": 0, "raised": 10, "not applicable": 11, "missing": 12}
"""How a rank ended, as its exit code."""
MAKE_S = 300.0
GRACE_S = 20.0
"""How long the other ranks may go on when one has failed."""


class Ladder:
    """One run of a plan."""

    def __init__(self, plan: dict[str, Any], out: Path) -> None:
        self.plan, self.out, self.facts = plan, out, out / "facts.jsonl"
        self.device: str = plan["device"]
        self.stopped: set[tuple[str, str | None]] = set()

    def run(self) -> None:
        """Every item, in order."""
        places = {name: Path(place) if place else self.made(name) for name, place in self.plan["models"].items()}
        for item in self.plan["items"]:
            place = places[item["model"]]
            if place is not None:
                self.item(item, place)

    def made(self, name: str) -> Path | None:
        """The tiny checkpoint of a family, or None when it cannot be made, which is then a fact."""
        place = self.out / "models" / name
        state, error, _, _ = fork_all([lambda: families.ensure(name, place)], MAKE_S, self.out / "errors")
        self.write("made", model=name, state=state, error=error)
        return place if state == "ran" else None

    def item(self, item: dict[str, Any], directory: Path) -> None:
        """One rung of one model."""
        model, name, fault = item["model"], item["rung"], item.get("fault")
        rung = rungs.TABLE[name]
        place = self.out / "rungs" / "-".join(filter(None, (model, name, fault)))
        place.mkdir(parents=True)
        print(f"seatrial: {model}: {name}" + (f" with the fault {fault}" if fault else ""), flush=True)
        ranks = [
            Rank(model, name, directory, place, self.facts, self.device, rank, rung.ranks, fault, self.plan.get("options") or {})
            for rank in range(rung.ranks)
        ]
        if self.device != "cpu" and rung.ranks > 1:
            state, error, seconds, cpu = "missing", f"{rung.ranks} GPUs: run this rung on a CPU", 0.0, 0.0
        else:
            work = [_bound(rank, place / "store") for rank in ranks]
            state, error, seconds, cpu = fork_all(work, 60 * rung.minutes, place)
        self.write("rung", model=model, rung=name, fault=fault, state=state, error=error, seconds=seconds, cpu_seconds=cpu)

    def write(self, fact: str, **fields: Any) -> None:
        """One fact of the driver's own."""
        facts.append(self.facts, {"fact": fact, **fields})


def _bound(rank: Rank, store: Path) -> Callable[[], None]:
    def work() -> None:
        _world(rank, store)
        if rank.fault:
            faults.apply(rank.fault)
        try:
            importlib.import_module(f"seatrial.probes.bridge.rungs.{rungs.TABLE[rank.rung].module}").run(rank)
        finally:
            rank.write("shims", shims=[row for row in shims.report() if row["state"] != "not reached"])

    return work


def _world(rank: Rank, store: Path) -> None:
    """This rank's process group: by a file, so that no port is needed."""
    import torch

    os.environ |= {"RANK": str(rank.rank), "WORLD_SIZE": str(rank.world), "LOCAL_RANK": str(rank.rank)}
    if rank.device != "cpu":
        torch.cuda.set_device(rank.rank)
    backend = "gloo" if rank.device == "cpu" else "nccl"
    torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank.rank, world_size=rank.world)


def fork_all(work: list[Callable[[], Any]], deadline_s: float, place: Path) -> tuple[str, str, float, float]:
    """Run each in a process of its own: how they ended, the error of the first that failed, seconds, and CPU seconds.

    A rank that fails leaves the others waiting for it: they are ended.
    """
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
    code = os.WEXITSTATUS(status)
    return next((name for name, known in ENDED.items() if known == code), f"killed with exit code {code}")


def _forked(task: Callable[[], Any], error: Path) -> int:
    """A child that does one task and ends without the parent's exit handlers."""
    pid = os.fork()
    if pid:
        return pid
    state = "raised"
    try:
        task()
        state = "ran"
    except NotApplicable as reason:
        state = "not applicable"
        error.write_text(str(reason), encoding="utf-8")
    except Missing as reason:
        state = "missing"
        error.write_text(str(reason), encoding="utf-8")
    except BaseException:  # noqa: BLE001 - whatever ends a rung is what the parent has to write down
        error.write_text(traceback.format_exc(), encoding="utf-8")
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ENDED[state])


def prepare() -> None:
    """Import everything that rungs share, once, with one thread: a process with more must not be forked."""
    import logging
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    shims.install()
    for name in ("transformers", "megatron.core", "megatron.bridge"):
        importlib.import_module(name)
    logging.disable(logging.WARNING)
    gc.freeze()


def origins() -> dict[str, Any]:
    """Versions, and the files that packages were imported from."""
    found: dict[str, Any] = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "megatron.core", "megatron.bridge"):
        module = sys.modules[name]
        found[name] = {"version": str(getattr(module, "__version__", "")), "file": str(module.__file__)}
    return found


def main() -> None:
    """Run the plan of the command line."""
    plan, out = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]).absolute()
    ladder = Ladder(plan, out)
    print("seatrial: importing Megatron and transformers", flush=True)
    try:
        prepare()
    except Exception:
        ladder.write("unimportable", error=traceback.format_exc())
        raise
    ladder.write("imported", **origins())
    ladder.run()
    ladder.write("end", items=len(plan["items"]))


if __name__ == "__main__":
    main()
