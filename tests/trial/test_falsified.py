"""Healthy runs that were falsified on purpose: none of them may pass. Each is one healthy run with one thing wrong.

A falsification changes what the files hold, what the log prints, or both. `made_runs.py` says where the healthy runs come from.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.verdict import Verdict
from seatrial.functional.judge_script import ScriptRun, judge_script
from seatrial.functional.plan_scripts import PlannedScript
from seatrial.loops.nightly_scripts import Asserted, Functional
from tests.trial.made_runs import HEALTHY, NEMO_STEPS, Row, Run, with_nemo_log

Change = Callable[[Run], Run]
NAN, INF = math.nan, math.inf


@cache
def _healthy(name: str) -> Run:
    return HEALTHY[name]()


def healthy(name: str) -> Run:
    return copy.deepcopy(_healthy(name))


def training(row: Row) -> bool:
    """Whether a row is one of training: not of validation, not the closing one."""
    return any(key in row for key in ("loss", "actor/pg_loss", "train/loss"))


def later(row: Row) -> bool:
    return int(row["step"]) >= 2


def anywhere(_: Row) -> bool:
    return True


def at(*steps: int) -> Callable[[Row], bool]:
    return lambda row: row["step"] in steps


# --- what a falsification does: to the files alone, to the log alone, or to both ---


def put(
    value: Any,
    *tags: str,
    when: Callable[[Row], bool] = anywhere,
    files: bool = True,
    log: bool = True,
    rows_of: Callable[[Row], bool] = training,
) -> Change:
    """Give metrics a value."""

    def change(run: Run) -> Run:
        for rows in ([run.rows] if files else []) + ([run.printed] if log else []):
            for row in rows:
                for tag in tags:
                    if tag in row and rows_of(row) and when(row):
                        row[tag] = value(row[tag]) if callable(value) else value
        return with_nemo_log(run) if run.loop == "nemo-rl" and log else run

    return change


def drop(*tags: str, when: Callable[[Row], bool], files: bool = True, log: bool = True) -> Change:
    """Take metrics out of rows."""

    def change(run: Run) -> Run:
        for rows in ([run.rows] if files else []) + ([run.printed] if log else []):
            for row in rows:
                for tag in tags:
                    if training(row) and when(row):
                        row.pop(tag, None)
        return run

    return change


def keep(when: Callable[[Row], bool], files: bool = True, log: bool = False) -> Change:
    """Leave only these rows of training."""

    def kept(rows: list[Row]) -> list[Row]:
        return [row for row in rows if not training(row) or when(row)]

    return lambda run: replace(run, rows=kept(run.rows) if files else run.rows, printed=kept(run.printed) if log else run.printed)


def rows_from(make: Callable[[list[Row]], list[Row]], files: bool = True, log: bool = True) -> Change:
    def change(run: Run) -> Run:
        made = replace(run, rows=make(run.rows) if files else run.rows, printed=make(run.printed) if log and run.printed else run.printed)
        return with_nemo_log(made) if run.loop == "nemo-rl" and log else made

    return change


def twice(rows: list[Row]) -> list[Row]:
    """The first half of the steps, twice."""
    half = [row for row in rows if training(row)]
    half = half[: len(half) // 2]
    return [*half, *copy.deepcopy(half), *(row for row in rows if not training(row))]


def frozen(rows: list[Row]) -> list[Row]:
    """Every row of training is the first one."""
    first = next(row for row in rows if training(row))
    return [{**copy.deepcopy(first), "step": row["step"]} if training(row) else row for row in rows]


def mirrored(rows: list[Row]) -> list[Row]:
    """The second half of the steps are the numbers of the first."""
    train = [row for row in rows if training(row)]
    half = len(train) // 2
    copies = {row["step"]: {**copy.deepcopy(train[number % half]), "step": row["step"]} for number, row in enumerate(train)}
    return [copies[row["step"]] if training(row) else row for row in rows]


def shuffled(rows: list[Row]) -> list[Row]:
    train = [row for row in rows if training(row)]
    return [*reversed(train), *(row for row in rows if not training(row))]


def swapped(rows: list[Row]) -> list[Row]:
    """Two neighbours in the wrong order."""
    made = list(rows)
    places = [number for number, row in enumerate(made) if training(row)]
    made[places[0]], made[places[1]] = made[places[1]], made[places[0]]
    return made


def end(*lines: str) -> Change:
    """More lines at the end of the log."""
    return lambda run: replace(run, tail=(*(line for line in run.tail if not line.startswith("rc=")), *lines), head=_ended(run, lines))


def _ended(run: Run, lines: tuple[str, ...]) -> tuple[str, ...]:
    return run.head if run.loop != "nemo-rl" else (*run.head, *lines)


def say(*lines: str) -> Change:
    """Lines in the middle of the log: before its last printed row."""

    def change(run: Run) -> Run:
        if run.loop == "nemo-rl":
            place = next(number for number, line in enumerate(run.head) if "Step 2/" in line)
            return replace(run, head=(*run.head[:place], *lines, *run.head[place:]))
        return replace(run, head=(*run.head, *lines))

    return change


def printed_nan(run: Run) -> Run:
    """The results of a step print NaN."""
    return replace(run, head=tuple(re.sub(r"• Loss: \S+", "• Loss: nan", line) for line in run.head))


CRASH = (
    "Traceback (most recent call last):",
    '  File "/workspace/train.py", line 88, in <module>',
    "    main()",
    '  File "/workspace/train.py", line 61, in main',
    "    trainer.train()",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
)


def after_another(*between: str, share: float = 1.0) -> Change:
    """The log of another run stands before this one; so much of it."""

    def change(run: Run) -> Run:
        lines = run.log().rstrip("\n").split("\n")
        return replace(run, head=(*lines[: int(len(lines) * share)], *between, *run.head))

    return change


def log_alone(change: Change) -> Change:
    """The same, judged by the log without metrics."""
    return lambda run: replace(change(run), files=False)


# --- the table: name of the run, what is wrong, how ---

NAMES = {
    "trl": {"loss": "loss", "norm": "grad_norm", "rate": "learning_rate", "reward": "reward", "entropy": "entropy"},
    "ppo": {
        "loss": "actor/pg_loss",
        "norm": "actor/grad_norm",
        "rate": "actor/lr",
        "reward": "critic/score/mean",
        "entropy": "actor/entropy",
    },
    "grpo": {
        "loss": "actor/pg_loss",
        "norm": "actor/grad_norm",
        "rate": "actor/lr",
        "reward": "critic/score/mean",
        "entropy": "actor/entropy",
    },
    "sft": {"loss": "train/loss", "norm": "train/grad_norm", "rate": "train/lr"},
    "nemo": {
        **{"loss": "train/loss", "norm": "train/grad_norm", "rate": "train/lr", "reward": "train/reward"},
        "entropy": "train/approx_entropy",
    },
}


def before_last(name: str) -> Callable[[Row], bool]:
    last = sum(training(row) for row in healthy(name).rows)
    return lambda row: bool(row["step"] != last)


def everywhere() -> Iterable[tuple[str, str, Change]]:
    """What can be wrong with a run of any loop."""
    for run, names in NAMES.items():
        loss, norm, rate = names["loss"], names["norm"], names["rate"]
        yield run, "gradient 0 from step 2 on", put(0.0, norm, when=later)
        yield run, "gradient 1e-30 from step 2 on", put(1e-30, norm, when=later)
        yield run, "gradient 0 from step 2 on, files alone", put(0.0, norm, when=later, log=False)
        yield run, "negative gradient norm", put(-1.0, norm, when=at(2))
        yield run, "gradient 1e12", put(1e12, norm, when=at(2))
        yield run, "gradient 1e12 from step 2 on", put(1e12, norm, when=later)
        yield run, "learning rate 0 from step 2 on", put(0.0, rate, when=later)
        yield run, "learning rate 0", put(0.0, rate)
        yield run, "negative learning rate", put(-1e-3, rate)
        yield run, "loss 1e8", put(1e8, loss, when=at(2))
        yield run, "loss 1e8 from step 2 on", put(1e8, loss, when=later)
        yield run, "loss NaN in the files", put(NAN, loss, when=at(2), log=False)
        yield run, "loss lost at step 2", drop(loss, when=at(2))
        yield run, "gradient lost at step 2", drop(norm, when=at(2), log=False)
        yield run, "step 2 lost", keep(lambda row: row["step"] != 2)
        yield run, "frozen rows", rows_from(frozen)
        yield run, "rows in the wrong order", rows_from(swapped)
        yield run, "rows backwards", rows_from(shuffled, log=False)
        yield run, "half of the steps twice", rows_from(twice, log=False)
        yield run, "last row lost", keep(before_last(run))
        yield run, "no row of training", keep(lambda _: False)
        yield run, "exit code 1", end("rc=1")
        yield run, "loss nan in a line", say("step 2: loss nan")
        yield run, "crash after the end", end(*CRASH)
        if run != "nemo":
            yield run, "loss NaN in the log", put(NAN, loss, when=at(2), files=False)
            yield run, "gradient inf in the log", put(INF, norm, when=at(2), files=False)
            yield run, "another value in the log", put(lambda old: old * 3 + 0.5, norm, when=at(2), files=False)
        if run != "sft":
            yield run, "entropy 0", put(0.0, names["entropy"])
            yield run, "entropy 1e9", put(1e9, names["entropy"], when=later)
            yield run, "reward lost at step 2", drop(names["reward"], norm, when=at(2), log=False)


def particular() -> Iterable[tuple[str, str, Change]]:
    """What can be wrong with the runs of one loop."""
    yield "trl", "steps 1 to 10 twice in log and files", rows_from(twice)
    yield "trl", "rows 1 and 20 only", keep(at(1, 20))
    yield "trl", "every second row gone", keep(lambda row: row["step"] % 2 == 0)
    yield (
        "trl",
        "every second row gone, no word of the distance",
        lambda run: replace(keep(lambda row: row["step"] % 2 == 0)(run), state={**run.state, "logging_steps": 500}),
    )
    yield "trl", "first rows lost", keep(lambda row: row["step"] > 5)
    yield "trl", "first rows lost in log and files", keep(lambda row: row["step"] > 5, log=True)
    yield "trl", "last rows lost", keep(lambda row: row["step"] < 16)
    yield "trl", "second half repeats the first", rows_from(mirrored)
    yield "trl", "completion length 0", put(0.0, "completions/mean_length", "completions/max_length", "completions/min_length")
    yield "trl", "negative length", put(-3.0, "completions/mean_length", when=at(4))
    yield "trl", "reward_std 0 from step 2 on", put(0.0, "reward_std", when=later)
    yield "trl", "all groups tied from step 2 on", put(1.0, "frac_reward_zero_std", when=later)
    yield "trl", "reward_std negative", put(-0.2, "reward_std", when=at(3))
    yield "trl", "share of 1.7", put(1.7, "frac_reward_zero_std", when=at(3))
    yield "trl", "clip ratio -0.5", put(-0.5, "clip_ratio/region_mean", when=at(3))
    yield "trl", "reward 1e12", put(1e12, "reward", when=at(9))
    yield "trl", "tokens fall", put(12.0, "num_tokens", when=at(15))
    yield "trl", "KL 1e9", lambda run: _with_kl(run, 1e9)
    yield "trl", "negative KL", lambda run: _with_kl(run, -4.0)
    yield "trl", "two runs in the log", after_another()
    yield "trl", "a crashed run, then a good one", after_another(*CRASH, share=0.5)
    yield "trl", "a run that crashed before its first row", lambda run: replace(run, head=(*run.head, *CRASH, "rc=1", *run.head))
    yield "trl", "None printed", put(None, "reward", when=at(7), files=False)
    yield "trl", "Infinity printed", put("Infinity", "entropy", when=at(7), files=False)
    yield "trl", "numpy NaN printed", say("{'loss': np.float64(nan), 'grad_norm': 1.5}")
    yield "trl", "JSON row with NaN", say('{"loss": NaN, "grad_norm": 1.5}')
    yield "trl", "NaN in a table", say("| step 3 | loss nan | lr 0.001 |")
    yield "trl", "a list of NaN", say("loss tensor([nan])")
    yield "trl", "tensor(nan)", say("grad_norm = tensor(nan, device='cuda:0')")
    yield "trl", "loss constant", put(-0.0187, "loss")
    for spelling in EXITS:
        yield "trl", f"ends with {spelling!r}", end(spelling)
    for spelling in EXITS[:6]:
        yield "ppo", f"ends with {spelling!r}", end(spelling)
        yield "nemo", f"ends with {spelling!r}", end(spelling)
    yield "trl", "console alone: loss NaN", log_alone(put(NAN, "loss", when=at(7)))
    yield "trl", "console alone: steps twice", log_alone(rows_from(twice))
    yield "trl", "console alone: gradient 0", log_alone(put(0.0, "grad_norm", when=later))
    yield "trl", "console alone: rate 0", log_alone(put(0.0, "learning_rate", when=later))
    yield "trl", "console alone: rows lost", log_alone(keep(lambda row: row["step"] not in (4, 5), log=True))
    yield "trl", "console alone: two runs", log_alone(after_another())
    for run in ("ppo", "grpo"):
        yield (
            run,
            "advantages 0 from step 2 on",
            put(0.0, "critic/advantages/max", "critic/advantages/min", "critic/advantages/mean", when=later),
        )
        yield run, "response length 0", put(0.0, *(f"response_length/{end}" for end in ("mean", "max", "min")))
        yield run, "ppo_kl 1e6", put(1e6, "actor/ppo_kl", when=at(3))
        yield run, "kl_loss 1e9", put(1e9, "actor/kl_loss", when=at(3))
        yield run, "clip fraction 3", put(3.0, "actor/pg_clipfrac", when=at(2))
        yield run, "aborted ratio -1", put(-1.0, "response/aborted_ratio", when=at(2))
        yield run, "least score above the largest", put(9.0, "critic/score/min", when=at(2))
        yield run, "probabilities differ", put(0.6, "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max", when=later)
        yield run, "probabilities do not correlate", put(0.1, "training/rollout_actor_probs_pearson_corr", when=later)
        yield run, "two runs in the log", after_another()
        yield run, "a crashed run, then a good one", after_another(*CRASH, share=0.6)
        yield run, "console alone: ppo_kl 1e6", log_alone(put(1e6, "actor/ppo_kl", when=at(3)))
        yield (
            run,
            "console alone: advantages 0",
            log_alone(put(0.0, "critic/advantages/max", "critic/advantages/min", "critic/advantages/mean", when=later)),
        )
    yield "ppo", "vf_loss 1e8", put(1e8, "critic/vf_loss", when=at(3))
    yield "trl", "the closing row's loss 1e30", put(1e30, "train_loss", rows_of=anywhere)
    yield "sft", "loss of validation 1e8", put(1e8, "val/loss", rows_of=anywhere)
    for tag in ("ppl_ratio", "log_ppl_diff_max", "rollout_log_ppl", "training_ppl"):
        yield "grpo", f"{tag} 1e8: trainer and generator disagree", put(1e8, f"rollout_corr/{tag}", when=later)
    yield "ppo", "the critic's gradient is 0", put(0.0, "critic/grad_norm", when=later)
    yield "grpo", "rows 1 and 20 only", keep(at(1, 20))
    yield "grpo", "every second row gone", keep(lambda row: row["step"] % 2 == 0)
    yield "grpo", "first rows lost in log and files", keep(lambda row: row["step"] > 5, log=True)
    yield (
        "grpo",
        "constant reward and no critic",
        put(0.2, *(f"critic/{name}/{end}" for name in ("score", "rewards") for end in ("mean", "max", "min"))),
    )
    yield "sft", "loss 0", put(0.0, "train/loss")
    yield "sft", "loss 60 at the end", put(60.0, "train/loss", when=at(3, 4))
    yield "sft", "no token", put(0.0, "train/global_tokens")
    yield "sft", "two runs in the log", after_another()
    yield "nemo", "error 7.4 without a level", put(7.4, "train/token_mult_prob_error", when=at(3))
    yield "nemo", "error 0.0 without a level", put(0.0, "train/token_mult_prob_error")
    yield "nemo", "error 0.7 at one step", put(0.7, "train/token_mult_prob_error", when=at(4))
    yield "nemo", "error exactly 1", put(1.0, "train/token_mult_prob_error")
    yield "nemo", "advantages 0 from step 2 on", put(0.0, "train/advantages/max", "train/advantages/min", when=later)
    yield "nemo", "generation length 0", put(0.0, "train/mean_gen_tokens_per_sample")
    yield "nemo", "KL 1e9", put(1e9, "train/gen_kl_error", when=at(3))
    yield "nemo", "sequences masked", put(8.0, "train/num_masked_seqs_by_logprob_error", when=at(2))
    yield "nemo", "two runs in the log", after_another()
    yield "nemo", "a crashed run, then a good one", after_another(*CRASH, share=0.6)
    yield "nemo", "loss nan printed", printed_nan
    yield (
        "nemo",
        "another run's log",
        lambda run: replace(with_nemo_log(put(5.0, "train/reward", log=False)(healthy("nemo"))), rows=run.rows),
    )


EXITS = (
    "exited with code 1",
    "Command exited with non-zero status 1",
    "returncode: -9",
    "exit code 139",
    "exit status 1",
    "rc=137",
    "subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 2.",
    "Exit code: 1",
    "ExitCode 1:0",
    "ExitCode 0:9",
    "srun: error: node7: task 0: Exited with exit code 1",
    "Job finished (exit code 1)",
    "script failed with 1",
    "make: *** [Makefile:12: train] Error 2",
    "run.sh: line 12:  4711 Segmentation fault      (core dumped) python train.py",
    "Aborted (core dumped)",
    "  exitcode  : 1 (pid: 4711)",
    "process ended with signal 9",
    "slurmstepd: error: *** JOB 4711 ON node7 CANCELLED AT 2026-11-15T01:02:03 DUE TO TIME LIMIT ***",
    '{"status": "done", "exit_code": 1}',
    "##[error]Process completed with exit code 1.",
    "EXIT_STATUS=1",
)


def _with_kl(run: Run, value: float) -> Run:
    for rows in (run.rows, run.printed):
        for row in rows:
            if training(row):
                row["kl"] = value if row["step"] == 12 else 0.001 * int(row["step"])
    return run


CASES = [*everywhere(), *particular()]


@pytest.mark.parametrize(("name", "change"), [pytest.param(run, change, id=f"{run}: {what}") for run, what, change in CASES])
def test_a_falsified_run_is_no_pass(name: str, change: Change, tmp_path: Path) -> None:
    found = change(healthy(name)).judge(tmp_path)
    assert found.verdict in (Verdict.FAIL, Verdict.BLOCKED), found.reason
    assert found.reason
    assert found.boundary is not None


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_falsified_was_healthy(name: str, tmp_path: Path) -> None:
    found = healthy(name).judge(tmp_path)
    assert (found.verdict, [check.name for check in found.checks if not check.passed]) == (Verdict.PASS, []), found.reason


def test_the_set_is_as_large_as_it_is_to_be() -> None:
    assert len({(run, what) for run, what, _ in CASES}) == len(CASES)
    assert len(CASES) + len(SCRIPTS) >= 120


# --- functional scripts: an exit code of 0, a log, and metrics.json ---

CHECKS = ('max(data["train/token_mult_prob_error"]) < 1.05', 'max(data["train/reward"]) > 0.03')


def script(change: Change, place: Path, *, known: bool = True) -> Verdict:
    """The verdict on a functional script whose run was falsified."""
    run = change(healthy("nemo"))
    table: dict[str, dict[str, Any]] = {}
    for row in run.rows:
        for tag, value in row.items():
            if tag != "step":
                table.setdefault(tag, {})[str(row["step"])] = value
    (place / "metrics.json").write_text(json.dumps(table))
    (place / "run.log").write_text(run.log(), encoding="utf-8")
    asserted = (Asserted(metrics=place / "metrics.json", written="metrics.json", checks=CHECKS, steps=NEMO_STEPS),)
    found = Functional(loop="nemo-rl", root=place, output=place, logs=place / "logs", asserted=asserted, step_tags=("train/loss",))
    planned = PlannedScript(
        name="grpo",
        script=place / "grpo.sh",
        argv=(),
        cwd=place,
        asserted=asserted,
        known=found if known else None,
        minutes=1,
        stall=1,
        gpus=None,
        step_tags=("train/loss",),
    )
    out = place / "out"
    out.mkdir()
    result = judge_script(planned, ScriptRun(directory=out, log=place / "run.log", started=0, ended="exited", exit_code=0, seconds=1))
    return result.verdict


def before_end(run: Run, *lines: str) -> Run:
    """Lines that a script prints before the results of its last step."""
    place = max(number for number, line in enumerate(run.head) if "Training Results" in line)
    return replace(run, head=(*run.head[:place], *lines, *run.head[place:]))


SCRIPTS: list[tuple[str, Change]] = [
    ("gradient 0 from step 2 on", put(0.0, "train/grad_norm", when=later)),
    ("gradient 1e-30 from step 2 on", put(1e-30, "train/grad_norm", when=later)),
    ("gradient 1e12", put(1e12, "train/grad_norm", when=at(3))),
    ("gradient lost at step 3", drop("train/grad_norm", when=at(3))),
    ("negative gradient norm", put(-1.0, "train/grad_norm", when=at(3))),
    ("gradient NaN", put(NAN, "train/grad_norm", when=at(3), log=False)),
    ("learning rate 0 from step 2 on", put(0.0, "train/lr", when=later)),
    ("loss 1e8", put(1e8, "train/loss", when=at(3))),
    ("loss lost at step 3", drop("train/loss", when=at(3), log=False)),
    ("frozen rows", rows_from(frozen)),
    ("entropy 0", put(0.0, "train/approx_entropy")),
    ("loss nan in a line", say("loss: nan")),
    ("reward NaN in a line of JSON", say('{"step": 3, "reward": NaN}')),
]
KNOWN: list[tuple[str, Change]] = [
    ("stale weights", lambda run: before_end(run, "WARNING: weight sync failed; generating with stale weights")),
    ("a skipped update", lambda run: before_end(run, "skipping optimizer step: gradients are not finite")),
    ("advantages 0 from step 2 on", put(0.0, "train/advantages/max", "train/advantages/min", when=later)),
    ("generation length 0", put(0.0, "train/mean_gen_tokens_per_sample")),
    ("KL 1e9", put(1e9, "train/gen_kl_error", when=at(3))),
    ("another run's log", lambda run: replace(with_nemo_log(put(5.0, "train/reward", log=False)(healthy("nemo"))), rows=run.rows)),
    ("loss nan printed", printed_nan),
    ("step 3 lost", keep(lambda row: row["step"] != 3)),
]


@pytest.mark.parametrize(
    ("known", "change"),
    [pytest.param(True, change, id=what) for what, change in (*SCRIPTS, *KNOWN)]
    + [pytest.param(False, change, id=f"unknown script: {what}") for what, change in (*SCRIPTS, *KNOWN[:5])],
)
def test_a_falsified_functional_script_is_no_pass(known: bool, change: Change, tmp_path: Path) -> None:
    assert script(change, tmp_path, known=known) in (Verdict.FAIL, Verdict.BLOCKED)


@pytest.mark.parametrize("known", [True, False])
def test_a_healthy_functional_script_passes(known: bool, tmp_path: Path) -> None:
    assert script(lambda run: run, tmp_path, known=known) is Verdict.PASS
