"""Trials of every outcome, built in code, with the run directories that belong to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from seatrial.core.files import write_json
from seatrial.core.records import (
    Baseline,
    CheckResult,
    Comparison,
    Cost,
    Diagnosis,
    EnvironmentRecord,
    Finding,
    ImportProof,
    LevelResult,
    PhaseOutcome,
    Plan,
    PlannedLevel,
    RepoState,
    SideResult,
    SubmoduleState,
    Trial,
)
from seatrial.core.series import Metrics, Series
from seatrial.core.specs import CheckSpec, Level
from seatrial.core.verdict import Boundary, Verdict
from seatrial.trial import run_dir as digests
from seatrial.trial import run_dir as rundir

TITLE = "Toy RL"
LOSS = 'mean(data["train/loss"]) < 1.05'
REWARD = 'data["train/reward"]["20"] > 0.5'

LADDER = tuple(
    Level(
        number=number,
        name=name,
        title=title,
        proves=f"{title} works",
        cost=Cost(minutes=1),
        checks=(CheckSpec(expr=LOSS, why="a loss that grows is broken"), CheckSpec(expr=REWARD, why="it must learn")),
    )
    for number, name, title in (
        (0, "smoke", "GRPO smoke"),
        (1, "resume", "LoRA, checkpoint and resume"),
        (2, "refit", "separate generation with refit"),
        (3, "parallel", "parallelism stress"),
    )
)

REPO = RepoState(
    name="bridge",
    path="/home/user/bridge",
    commit="0123456789abcdef0123456789abcdef01234567",
    branch="fix-provider",
    dirty=("src/bridge/provider.py", "notes.txt"),
    submodules=(SubmoduleState(path="3rdparty/core", commit="aa" * 20, state="clean"),),
    packages=("bridge",),
    import_root="/home/user/bridge/src",
    patch="bridge.patch",
)

ENVIRONMENT = EnvironmentRecord(
    python="/home/user/.cache/seatrial/env/bin/python",
    python_version="3.11.9",
    packages={"torch": "2.13.0", "transformers": "5.19.0", "toy": "1.0.0", "numpy": "2.3.4"},
    lock="sha256:0f0f",
    fingerprint="f00dcafe",
    platform="Linux x86_64",
    cpu_count=2,
)

IMPORTS = tuple(
    ImportProof(
        process=process,
        package="bridge",
        file="/home/user/bridge/src/bridge/__init__.py",
        version="0.5.0",
        expected="/home/user/bridge",
        ok=True,
    )
    for process in ("driver", "generator")
)


def check(
    name: str = LOSS, passed: bool = True, value: float | str | None = 0.31, message: str = "", missing: tuple[int, ...] = ()
) -> CheckResult:
    """A check over steps 1 to 20."""
    left, _, right = name.rpartition(" < ") if " < " in name else name.rpartition(" > ")
    threshold = name.removeprefix(left).strip() if right else ""
    steps = tuple(step for step in range(1, 21) if step not in missing)
    return CheckResult(name=name, passed=passed, value=value, threshold=threshold, steps=steps, missing=missing, message=message)


def level(number: int = 0, **changes: object) -> LevelResult:
    """A passed level of the ladder; `changes` are fields to set."""
    rung = LADDER[number]
    base = LevelResult(
        number=number,
        name=rung.name,
        title=rung.title,
        verdict=Verdict.PASS,
        reason="all 20 steps completed and every check was met",
        checks=(check(), check(REWARD, value=0.777)),
        phases=(PhaseOutcome(name="train", exit_code=0, ended="exited", seconds=61.5, cpu_seconds=118),),
        steps_reached=20,
        steps_expected=20,
        proves=rung.proves,
        limitations=("a tiny random model: no claim about a real one", "no claim of convergence"),
        key_lines=("STEP 20 reward 0.777",),
        directory=f"levels/{number}-{rung.name}",
        seconds=62.4,
        cpu_seconds=119,
    )
    return LevelResult.model_validate(base.model_dump() | changes)


def planned(*numbers: int, skip: dict[int, str] | None = None) -> tuple[PlannedLevel, ...]:
    """The plan of these levels."""
    return tuple(
        PlannedLevel(
            number=rung.number, name=rung.name, title=rung.title, reasons=("asked for",), cost=rung.cost, skip=(skip or {}).get(rung.number)
        )
        for rung in LADDER
        if rung.number in numbers
    )


def trial(*levels: LevelResult, **changes: object) -> Trial:
    """A finished trial of a dirty change with these levels; `changes` are fields to set."""
    plan = Plan(loop="toy", levels=planned(*(one.number for one in levels)), model="tiny-llama", changes=(REPO,), arguments=("seed=7",))
    base = Trial(
        id="20261115T101500-toy-3f9a",
        seatrial="0.1.0",
        created="2026-11-15T10:15:00Z",
        plan=plan,
        command=("seatrial", "run", "toy", "--change", "/home/user/bridge"),
        status="done",
        ended="2026-11-15T10:18:00Z",
        verdict=Verdict.PASS,
        findings=(Finding(name="disk space", ok=True, message="120 GB free"),),
        imports=IMPORTS,
        environment=ENVIRONMENT,
        levels=levels,
    )
    return Trial.model_validate(base.model_dump() | changes)


def passed() -> Trial:
    """Two levels, both passed."""
    return trial(level(0), level(1))


def failed() -> Trial:
    """Level 1 missed a check because of NaN."""
    miss = check(LOSS, passed=False, value="NaN", message="not finite at step 13", missing=(13,))
    diagnosis = Diagnosis(
        boundary=Boundary.OPTIMIZER,
        verdict=Verdict.FAIL,
        cause="RuntimeWarning: loss is nan",
        file="levels/1-resume/run.log",
        line=412,
        excerpt=("\x1b[36m(worker pid=7)\x1b[0m step 13 loss nan", "grad_norm is not finite, step skipped"),
        advice="compare the optimizer state before and after the resume",
        noise=("resource_tracker: leaked semaphore",),
    )
    bad = level(
        1,
        verdict=Verdict.FAIL,
        reason="a check was missed: the loss is NaN at step 13",
        boundary=Boundary.OPTIMIZER,
        checks=(check(REWARD, value=0.61), miss),
        diagnosis=diagnosis,
    )
    return trial(level(0), bad, verdict=Verdict.FAIL, reason="level 1 failed at optimizer: the loss is NaN at step 13")


def blocked_preflight() -> Trial:
    """The preflight stopped everything: no level, no environment."""
    finding = Finding(
        name="disk space", ok=False, boundary=Boundary.ENVIRONMENT, message="1 GB free, 8 GB needed", fix="rm -r ~/.cache/old"
    )
    return trial(
        plan=Plan(loop="toy", levels=planned(0, 1), model="tiny-llama", changes=(REPO,)),
        verdict=Verdict.BLOCKED,
        reason="the preflight failed: disk space: 1 GB free, 8 GB needed",
        findings=(finding,),
        imports=(),
        environment=None,
    )


def blocked_vacuous() -> Trial:
    """Level 0 finished and proved nothing."""
    zero = level(0, verdict=Verdict.BLOCKED, reason="vacuous: the weights never changed", boundary=Boundary.REWARD, vacuous=True)
    return trial(zero, verdict=Verdict.BLOCKED, reason="level 0 was vacuous: the weights never changed")


def skipped_mix() -> Trial:
    """Level 0 passed, level 2 could not run; no change was given."""
    plan = Plan(loop="toy", levels=planned(0, 2, skip={2: "needs 1 GPU, this machine has none"}), model="tiny-llama")
    return trial(level(0), plan=plan, verdict=Verdict.SKIPPED, reason="level 2 was not run: needs 1 GPU, this machine has none", imports=())


def interrupted() -> Trial:
    """Killed while level 1 ran: level 0 passed, level 1 left no result, no verdict."""
    plan = Plan(loop="toy", levels=planned(0, 1), model="tiny-llama", changes=(REPO,))
    return trial(level(0), plan=plan, status="running", verdict=None, ended=None)


def against_baseline() -> Trial:
    """Level 0 misses a check that its baseline misses, too; the tests of the change are newly broken; one issue is known."""
    zero = level(0, verdict=Verdict.FAIL, reason="missed: the loss", boundary=Boundary.METRICS, checks=CHECKS)
    plan = Plan(loop="toy", levels=planned(0), model="tiny-llama", changes=(REPO,), known_issues={LOSS: "https://example.org/issues/7"})
    fail = Verdict.FAIL
    baseline = Baseline(
        source="origin/main",
        changes=(REPO.model_copy(update={"commit": "ba" * 20, "dirty": (), "patch": None}),),
        directory="baseline/trial",
        comparisons=(
            Comparison(deliverable=SIDE.name, before=Verdict.PASS, after=fail, word="newly broken"),
            Comparison(
                deliverable="level 0 (GRPO smoke)",
                before=fail,
                after=fail,
                word="fail (pre-existing)",
                excuses=True,
                note=f"{LOSS}: bit-identical value on the baseline (1.25)",
            ),
        ),
        notes=("another environment: 0123, here f00d",),
    )
    return trial(zero, plan=plan, sides=(SIDE,), baseline=baseline, verdict=fail, reason="level 0: missed: the loss")


CHECKS = (check(passed=False, value=1.25), check(REWARD, value=0.777))
SIDE = SideResult(
    key="bridge",
    name="Bridge-side checks",
    verdict=Verdict.FAIL,
    reason="1 of 12 tests failed: tests.test_map::test_qkv: AssertionError: shapes differ",
    command=("python", "-m", "pytest", "-q", "--junitxml", "/run/sides/bridge/junit.xml", "tests/test_map.py"),
    files=("tests/test_map.py",),
    notes=("tests/test_gone.py is missing",),
    passed=11,
    failed=1,
    directory="sides/bridge",
    seconds=3.5,
)


TRIALS: dict[str, Callable[[], Trial]] = {
    make.__name__: make for make in (passed, failed, blocked_preflight, blocked_vacuous, skipped_mix, interrupted, against_baseline)
}


def write_run(run_dir: Path, made: Trial) -> None:
    """Put the log and metrics of every level with a result, and what tests left, into the run directory."""
    for side in made.sides:
        (run_dir / side.directory).mkdir(parents=True, exist_ok=True)
        for name in ("run.log", "junit.xml"):
            (run_dir / side.directory / name).write_text("12 tests\n")
    for result in made.levels:
        directory = run_dir / result.directory
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "run.log").write_text("STEP 20 reward 0.777\n")
        (directory / "metrics.jsonl").write_text('{"step": 20, "train/reward": 0.777}\n')


def store_run(run_dir: Path, made: Trial) -> Trial:
    """The same as a trial leaves it: with the records of its levels, its evidence, and digests of all files."""
    write_run(run_dir, made)
    for result in made.levels:
        write_json(run_dir / result.directory / "result.json", result)
    write_json(run_dir / "evidence" / "config.json", {})
    write_json(run_dir / "evidence" / "imports.json", [item.model_dump(mode="json") for item in made.imports])
    files = digests.evidence_digests(run_dir)
    for directory in (*(one.directory for one in made.levels), *(one.directory for one in made.sides)):
        files |= digests.level_digests(run_dir, directory)
    made = made.model_copy(update={"files": files})
    rundir.save(run_dir, made)
    return made


def metrics(broken: bool = False) -> Metrics:
    """Twenty steps of eight metrics; `broken` makes the loss NaN at 13 and one series wholly non-finite."""
    steps = tuple(range(1, 21))
    shapes: dict[str, Callable[[int], float]] = {
        "train/reward": lambda s: 0.8 - 0.78 * math.exp(-s / 6),
        "train/loss": lambda s: math.nan if broken and s in (13, 14) else 0.9 * math.exp(-s / 9) + 0.02 * math.sin(s * 2),
        "train/kl": lambda s: 0.0004 * s,
        "train/grad_norm": lambda s: 1.4 + 0.5 * math.sin(s),
        "train/reward_std": lambda s: 0.2 + 0.01 * (s % 3),
        "train/learning_rate": lambda s: 1e-6 * s,
        "train/entropy": lambda s: math.inf if broken else 2.0,
        "perf/tokens_per_second": lambda s: 15_000 + 40 * (s % 5),
        **{f"perf/phase_{n}": (lambda s, n=n: n + s / 10) for n in range(6)},  # type: ignore[misc]
    }
    return Metrics({tag: Series(tag, steps, tuple(shape(step) for step in steps)) for tag, shape in shapes.items()})
