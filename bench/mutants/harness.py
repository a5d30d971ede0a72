"""Runs the recorded part of a level many times: in forks of processes that have imported everything, several at once."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from seatrial.core.loop import Context, Phase
from seatrial.core.records import CheckResult, PhaseOutcome
from seatrial.core.verdict import Verdict
from seatrial.loops.trl.loop import LOOP
from seatrial.loops.trl.trl_proofs import prove
from seatrial.metrics.checks import evaluate
from seatrial.runtime.environments import Environments
from seatrial.trial.judge import Evidence, Judgement, judge
from seatrial.trial.level import read_level_metrics

Item = TypeVar("Item")
Made = TypeVar("Made")
ROOT = Path(__file__).parents[2]
TIMEOUT = 180.0
Outcome = CheckResult | str | None
BLOCKED = "blocked"
"""No Pass, and no Fail either: counts as missed."""


class Server:
    """One process that forks drivers."""

    def __init__(self, python: Path) -> None:
        env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
        phase = phases_of(0, Path("/nowhere"), python)[0]
        self.process = subprocess.Popen(
            [str(python), "-m", "bench.mutants.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**env, **phase.env},
            text=True,
            cwd=tempfile.gettempdir(),
        )
        self.imports = float(self._read()["cpu"])
        """CPU seconds of all imports."""

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the server of mutants ended")
        return json.loads(line)

    def ask(self, **request: Any) -> Any:
        """One request, one answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


def phases_of(
    number: int,
    directory: Path,
    python: Path,
    words: Sequence[str] = (),
    options: Sequence[str] = (),
    model: str = "tiny-dense",
    run_dir: Path | None = None,
) -> tuple[Phase, ...]:
    """The phases of a level, with loop arguments and with options of the driver; `run_dir` holds the models that are made."""
    level = next(level for level in LOOP.levels() if level.number == number)
    phases = LOOP.phases(level, Context(run_dir=run_dir or directory.parent, python=python, model=model, arguments=tuple(words)), directory)
    made = []
    for phase in phases:
        split = phase.argv.index("--")
        made.append(dataclasses.replace(phase, argv=(*phase.argv[:split], *options, *phase.argv[split:])))
    return tuple(made)


def run(server: Server, number: int, directory: Path, python: Path, short: bool = False, resumed: bool = False, **more: Any) -> Outcome:
    """Run the recorded part of a level: the first missed check, how it crashed, or None for a Pass.

    `short` leaves the variants out; `resumed` takes in the run of level 1 that resumes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    how = {name: more.pop(name) for name in ("words", "options", "model", "run_dir") if name in more}
    phases = [phase for phase in phases_of(number, directory, python, **how) if resumed or phase.name != "resumed"]
    for phase in phases:
        log = directory / f"{phase.name}.log"
        if phase.argv[2] == "torch.distributed.run":  # several ranks are processes of their own
            code = start(phase, log)
            if code != 0:
                return "crash"
            continue
        module = phase.argv[2].rpartition(".")[2]
        given = more if not phase.beside else {}
        words = [word for word in phase.argv[3:] if not short or word != "--variants"]
        answer = server.ask(module=module, argv=words, log=str(log), timeout=TIMEOUT, **given)
        if answer["exit"] is None:
            return "hang"
        if answer["exit"] != 0:
            return "shadow crashed" if phase.beside else "crash"
    verdict, missed = judged(number, directory, phases[0].steps, resumed)
    if verdict.verdict is Verdict.BLOCKED:
        return f"{BLOCKED}: {verdict.reason}"
    if missed:
        return missed[0]
    return None if verdict.verdict is Verdict.PASS else verdict.reason


def judged(number: int, directory: Path, steps: int | None, resumed: bool = False) -> tuple[Judgement, list[CheckResult]]:
    """The verdict on what a level left, with or without its resume, and the checks that it missed."""
    level = next(level for level in LOOP.levels() if level.number == number)
    metrics = read_level_metrics(LOOP, directory)
    kept = [check for check in prove(level, directory, metrics) if number == 0 or resumed or not _of_resume(check)]
    kept += [evaluate(spec.expr, metrics, spec.boundary) for spec in level.checks if resumed or "resumed/" not in spec.expr]
    missed = [check for check in kept if not check.passed]
    ended = (PhaseOutcome(name="run", exit_code=0, ended="exited", seconds=0.0),)
    evidence = Evidence(
        metrics=metrics, checks=tuple(kept), phases=ended, steps_expected=steps, steps_reached=LOOP.measures.steps_reached(metrics)
    )
    return judge(evidence, LOOP.milestones()), missed


def start(phase: Phase, log: Path, seconds: float = TIMEOUT) -> int:
    """Run a phase in a process of its own; its exit code."""
    env = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", "HOME": str(Path.home()), **phase.env}
    with log.open("wb") as stream:
        return subprocess.run(list(phase.argv), env=env, stdout=stream, stderr=subprocess.STDOUT, timeout=seconds, check=False).returncode


def same_record(one: Path, two: Path) -> bool:
    """Whether two runs recorded the same bits in every step: nothing of what a step does differs."""
    names = sorted(path.relative_to(one) for path in one.rglob("record.jsonl"))
    if names != sorted(path.relative_to(two) for path in two.rglob("record.jsonl")):
        return False
    return bool(names) and all((one / name).read_bytes() == (two / name).read_bytes() for name in names)


def _of_resume(check: CheckResult) -> bool:
    return "resume" in check.name or check.name.startswith(
        ("restored", "final", "history", "checkpoint is", "new adapters", "random state")
    )


def trl_python() -> Path:
    """The interpreter of the pinned environment; ends the program where it is not built."""
    built = Environments().find("trl", LOOP.environments()["trl"])
    if built is None:
        sys.exit("the environment trl is not built; run: seatrial env build trl")
    return built.python


def spread(servers: Sequence[Server], items: Sequence[Item], work: Callable[[Server, Item], Made]) -> list[Made]:
    """What `work` makes of each item, in their order; each server takes the next one as soon as it is free."""
    waiting, made, lock = list(enumerate(items)), dict[int, Made](), threading.Lock()

    def worker(server: Server) -> None:
        while True:
            with lock:
                if not waiting:
                    return
                index, item = waiting.pop(0)
            made[index] = work(server, item)

    threads = [threading.Thread(target=worker, args=(server,)) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(made) != len(items):
        raise RuntimeError(f"{len(items) - len(made)} of {len(items)} runs have no outcome: a worker failed, see above")
    return [made[index] for index in sorted(made)]
