"""Every fault that can be injected is caught at the level that claims to catch it, at the right boundary.

A trial that passes with a fault in it is broken; so is one that blames something else. Faults that end neither the loop nor its log
run in forks of a process that has imported everything, and their files are judged as a trial judges them: a tenth of a trial's cost.
What another row, or a cheaper test, shows of the same check runs with SEATRIAL_ALL_LEVELS=1 only: `AGAIN` says which shows it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from bench.mutants.harness import Server, judged, phases_of
from bench.mutants.harness import run as run_forked
from bench.mutants.harness import start as start_phase

from seatrial.core.records import CheckResult, PhaseOutcome
from seatrial.core.verdict import Boundary, Verdict, exit_code
from seatrial.instruments.trl.fault_names import FAULTS, OTHER
from seatrial.loops import VLLM_CPU, environments
from seatrial.loops.trl.loop import LOOP
from seatrial.loops.trl.trl_proofs import prove
from seatrial.runtime.environments import Environment, Environments
from seatrial.trial.judge import Evidence, Judgement, judge
from seatrial.trial.level import read_level_metrics
from tests.real.drive import PLAIN, Ran, call, processes_of, run

pytestmark = [pytest.mark.real, pytest.mark.timeout(2700)]  # level 3 starts three servers, one after another


@dataclass(frozen=True, slots=True)
class Caught:
    """How a fault must come out."""

    fault: str
    level: int
    boundary: Boundary
    reason: str
    """Part of the reason."""
    verdict: Verdict = Verdict.FAIL
    missed: tuple[str, ...] = ()
    """Checks that must be among those missed."""
    words: tuple[str, ...] = ()
    waits: bool = False
    """Whether most of its trial is waiting: it then runs beside the others from the beginning, and costs no time."""
    forked: bool = False
    """Whether it runs in a fork, without the trial around it: what the command makes of a Fail is shown by the other rows."""


TABLE = (
    Caught("constant-reward", 0, Boundary.REWARD, "the reward of patchy_share", missed=("step proof: reward",), forked=True),
    Caught("reward-raises", 0, Boundary.REWARD, "RuntimeError: reward backend unavailable"),
    Caught(
        "no-optimizer-step",
        0,
        Boundary.OPTIMIZER,
        "optimizer steps in the record: expected 8, found 0",
        missed=("trained weights changed",),
        forked=True,
    ),
    Caught("nan-weight", 0, Boundary.OPTIMIZER, "probability tensor contains either `inf`, `nan`"),
    Caught("nan-loss", 0, Boundary.METRICS, "train/loss is not finite at step 3", missed=("every metric is finite",), words=PLAIN),
    Caught(
        "skip-update", 0, Boundary.OPTIMIZER, "one optimizer step took in: expected 3, found 6", missed=("optimizer updates",), forked=True
    ),
    Caught(
        "frozen-layer", 0, Boundary.PROVIDER, "frozen parameters, though all should train", missed=("no parameter is frozen",), forked=True
    ),
    Caught(
        "wrong-reference",
        0,
        Boundary.PROVIDER,
        "missed: step proof: reference",
        missed=('abs(data["train/kl"]["1"]) < 0.000001',),
        forked=True,
    ),
    Caught("wrong-mask", 0, Boundary.ROLLOUT, "the attention mask of generation", missed=("step proof: sampling",), forked=True),
    Caught("half-advantages", 0, Boundary.REWARD, "an advantage: expected", missed=("step proof: advantage",), forked=True),
    Caught("early-exit", 0, Boundary.METRICS, "reached step 1 of 8"),
    # Far longer than the silence while the largest package is imported, which a crowded machine makes ten times as long.
    Caught("hang", 0, Boundary.OPTIMIZER, "stalled: no log line and no metric", words=("--set", "limits.stall_minutes=1.5"), waits=True),
    Caught("train-base", 1, Boundary.PEFT, "weights changed between two optimizer steps", missed=("base frozen",), forked=True),
    Caught("frozen-adapter", 1, Boundary.PEFT, "missed: step proof: sampling (full)", missed=("adapter weights changed",), forked=True),
    Caught(
        "forget-optimizer", 1, Boundary.CHECKPOINT, "missed: restored optimizer", missed=("restored optimizer: bit-equal",), forked=True
    ),
    Caught(
        "forget-rng",
        1,
        Boundary.CHECKPOINT,
        "missed: trajectory after the resume",
        missed=("trajectory after the resume: bit-equal", "final generators of both runs: bit-equal"),
    ),
    Caught(
        "skip-refit",
        2,
        Boundary.REFIT,
        "missed: weights after each refit",
        missed=("weights after each refit: bit-equal", 'max(data["refit/fresh_max_dlogp"]) < 0.0001'),
    ),
    Caught("flip-bit", 2, Boundary.REFIT, "model.layers.0.self_attn.q_proj.weight", missed=("weights after each refit: bit-equal",)),
    Caught(
        "swap-layers",
        2,
        Boundary.REFIT,
        "(swapped with model.layers.1.self_attn.q_proj.weight)",
        missed=("weights after each refit: bit-equal",),
    ),
    Caught("truncated-payload", 2, Boundary.REFIT, "refit: refused (truncated)"),
    Caught("replayed-payload", 2, Boundary.REFIT, "refit: refused (replay): version 2 was sent, version 2 is held"),
    Caught("wrong-base", 2, Boundary.REFIT, "refit: refused (wrong-base)"),
    Caught("dead-generator", 2, Boundary.REFIT, "refit: refused (dead): the generation process ended with code -9 at 'apply'"),
    Caught("flip-bit", 3, Boundary.REFIT, "layers.0.input_layernorm.weight", missed=("weights after each refit: bit-equal",)),
    Caught(
        "sync-skips-tensor",
        3,
        Boundary.REFIT,
        "model.layers.0.input_layernorm.weight",
        missed=("TRL's own sync sent every tensor under its name (sync)", "weights after each refit: bit-equal (sync)"),
        forked=True,
    ),
    Caught("sync-swaps-names", 3, Boundary.REFIT, "layernorm.weight", missed=("weights after each refit: bit-equal (sync)",)),
    Caught("sync-mangles-name", 3, Boundary.REFIT, "the generation process failed at TRL's own sync"),
    Caught("no-grad-sync", 4, Boundary.DDP, "missed: ", missed=("ranks end with the same weights: bit-equal",)),
    Caught("blind", 5, Boundary.DATA, "a row's picture in the generation", missed=("another picture changes the logits",), forked=True),
    Caught("blind-generation", 5, Boundary.DATA, "a row's picture in the generation", missed=("step proof: data (vlm)",), forked=True),
    Caught("swapped-pictures", 5, Boundary.DATA, "a row's picture in the generation", missed=("step proof: data (vlm)",)),
)
AGAIN = {
    ("flip-bit", 3): "the same check at level 2, and a flipped bit in a live vLLM is named in test_vllm.py",
    ("sync-mangles-name", 3): "TRL's sync raises where vLLM refuses a name, as level 2's refusals do",
    ("sync-swaps-names", 3): "the same check with sync-skips-tensor",
    ("swap-layers", 2): "the same check with flip-bit, and test_refit_faults.py names exchanged tensors",
    ("truncated-payload", 2): "refused as replayed-payload is, and test_refit_failures.py truncates everywhere",
    ("wrong-base", 2): "refused as replayed-payload is, and test_refit_failures.py has the same base",
    ("swapped-pictures", 5): "the same check with blind-generation",
}
"""Rows that repeat what is shown by default, and by what."""
ALL = bool(os.environ.get("SEATRIAL_ALL_LEVELS"))
ROWS = [
    pytest.param(
        row,
        marks=pytest.mark.skipif(not ALL and (row.fault, row.level) in AGAIN, reason="shown by others: SEATRIAL_ALL_LEVELS=1 runs it"),
        id=f"{row.fault}-{row.level}",
    )
    for row in TABLE
    if not row.forked
]
SERVED = next(level for level in LOOP.levels() if level.name == "vllm")
AT_ONCE = 2
"""Trials that run side by side: most of a trial is one thread on one core."""


@pytest.fixture(scope="module")
def trials(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, int], Future[Ran]]]:
    """The trial of every fault that was selected; each test waits for its own."""
    chosen = [item.callspec.params["expected"] for item in request.session.items if "trials" in getattr(item, "fixturenames", ())]  # type: ignore[attr-defined]
    chosen = [row for row in chosen if not row.forked and (ALL or (row.fault, row.level) not in AGAIN)]
    where = tmp_path_factory.mktemp("faults")
    with ThreadPoolExecutor(AT_ONCE) as pool, ThreadPoolExecutor() as beside:
        yield {(row.fault, row.level): (beside if row.waits else pool).submit(_trial, where, row) for row in chosen}
        pool.shutdown(cancel_futures=True)


def _trial(where: Path, row: Caught) -> Ran:
    return run(where, "trl", "--level", str(row.level), "--fault", row.fault, *row.words, name=f"with {row.fault} at {row.level}")


def test_the_table_covers_every_fault() -> None:
    assert {row.fault for row in TABLE} == set(OTHER), "those of a single step are in test_step_faults.py"
    assert all(row.level in FAULTS[row.fault].levels for row in TABLE)
    assert all(row.verdict is not Verdict.PASS for row in TABLE)


def test_what_runs_by_default_misses_every_check_and_blames_every_boundary_of_the_table() -> None:
    default = [row for row in TABLE if (row.fault, row.level) not in AGAIN]
    assert len(default) == len(TABLE) - len(AGAIN)
    assert {(row.verdict, row.boundary) for row in default} == {(row.verdict, row.boundary) for row in TABLE}
    assert {name for row in default for name in row.missed} == {name for row in TABLE for name in row.missed}


def _judged_sync(fault: str, python: Path, place: Path) -> tuple[Judgement, list[CheckResult]]:
    """The run of level 3 with TRL's own sync, without the other two, which start a vLLM each: its verdict and what it missed."""
    place.mkdir()
    found = Environments().find(VLLM_CPU, environments()[VLLM_CPU])
    assert found is not None, f"run `seatrial env build {VLLM_CPU}` first"
    for phase in phases_of(SERVED.number, place, python, options=("--fault", fault)):
        if phase.name in ("sync", "shadow-sync"):
            argv = tuple(str(found.python) if word == "PYTHON-WITH-VLLM" else word for word in phase.argv)
            log = place / f"{phase.name}.log"
            assert start_phase(replace(phase, argv=argv), log, 600) == 0, log.read_text(encoding="utf-8")[-3000:]
    metrics = read_level_metrics(LOOP, place)
    checks = tuple(check for check in prove(SERVED, place, metrics) if check.name.endswith("(sync)"))
    ended = (PhaseOutcome(name="sync", exit_code=0, ended="exited", seconds=0.0),)
    steps = SERVED.steps  # that each was logged is one of the checks
    evidence = Evidence(metrics=metrics, checks=checks, phases=ended, steps_expected=steps, steps_reached=steps)
    result = judge(evidence, LOOP.milestones())
    return result, [check for check in checks if not check.passed]


@pytest.mark.parametrize("expected", [pytest.param(row, id=f"{row.fault}-{row.level}") for row in TABLE if row.forked])
def test_fault_in_a_fork_is_caught(expected: Caught, server: Server, environment: Environment, tmp_path: Path) -> None:
    place = tmp_path / str(expected.level)
    if expected.level == SERVED.number:
        result, missed = _judged_sync(expected.fault, environment.python, place)
    else:
        run_forked(server, expected.level, place, environment.python, short=True, resumed=True, options=("--fault", expected.fault))
        level = next(level for level in LOOP.levels() if level.number == expected.level)
        result, missed = judged(expected.level, place, level.steps, resumed=True)
    assert (result.verdict, result.boundary) == (expected.verdict, expected.boundary), result.reason
    assert expected.reason in result.reason
    assert set(expected.missed) <= {check.name for check in missed}
    stage = FAULTS[expected.fault].stage
    assert not stage or stage in {check.stage for check in missed}


@pytest.mark.parametrize("expected", ROWS)
def test_fault_is_caught(expected: Caught, trials: dict[tuple[str, int], Future[Ran]]) -> None:
    done = trials[expected.fault, expected.level].result()
    result = done.level(expected.level)
    assert (result.verdict, result.boundary) == (expected.verdict, expected.boundary), result.reason
    assert expected.reason in result.reason
    assert done.code == exit_code(expected.verdict)
    assert result.vacuous == (expected.verdict is Verdict.BLOCKED)
    assert set(expected.missed) <= {check.name for check in result.checks if not check.passed}
    assert f"a fault was injected on purpose: {expected.fault}" in result.limitations
    assert (done.directory / "summary.md").read_text(encoding="utf-8").startswith(f"Result: {expected.verdict} - ")
    if expected.fault in SPECIAL:
        SPECIAL[expected.fault](done)


def _exits_with_zero(done: Ran) -> None:
    """An exit code of 0 proves nothing by itself."""
    assert [(phase.ended, phase.exit_code) for phase in done.level(0).phases] == [("exited", 0)] * 2


def _ended_with_its_stacks(done: Ran) -> None:
    """A process that hangs is ended, and its log says where it stood."""
    assert [phase.ended for phase in done.level(0).phases] == ["stalled"]
    assert "[seatrial] no output and no change" in done.log(0)
    assert "on_step_end" in done.log(0) or "[seatrial] no stacks: py-spy" in done.log(0), "where it hangs, or why that is not known"
    assert processes_of(done.directory) == []


def _one_bit(done: Ran) -> None:
    """Log-probabilities do not show a single bit; the fingerprints do."""
    missed = {check.name for level in done.trial.levels for check in level.checks if not check.passed}
    assert not any("dlogp" in name for name in missed)


SPECIAL = {"early-exit": _exits_with_zero, "hang": _ended_with_its_stacks, "flip-bit": _one_bit}


def test_unknown_fault_is_refused(tmp_path: Path) -> None:
    done = call(tmp_path, "run", "--level", "0", "--fault", "no-such-fault")
    assert done.returncode == 2
    assert "constant-reward" in done.stdout
    assert not list(tmp_path.iterdir()), "nothing was made"
