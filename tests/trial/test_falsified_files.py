"""A second set of falsified runs and of healthy ones, by somebody who had not seen the first: logs that lie, and files that do.

What is wrong is said with its boundary before the judge is asked. `test_falsified.py` says how a run is falsified.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.verdict import Verdict
from tests.triage.runs import traceback
from tests.trial.made_runs import Row, Run, with_nemo_log
from tests.trial.test_falsified import Change, at, drop, healthy, put, training
from tests.trial.test_healthy_runs import both, vary

Lines = list[str]
MARK = {"trl": "STEP 12 ", "grpo": "step:12 - ", "nemo": "Step 4/", "sft": "step:3 - ", "ppo": "step:2 - "}
CLOSING = {"trl": "train_runtime", "grpo": "100%", "ppo": "100%", "sft": "step:4 -", "nemo": "Max number of steps"}
LAST = {"trl": 20, "grpo": 20, "sft": 4, "nemo": 6}
LOSS = {"trl": "loss", "grpo": "actor/pg_loss", "ppo": "actor/pg_loss", "sft": "train/loss", "nemo": "train/loss"}
NORM = {"trl": "grad_norm", "grpo": "actor/grad_norm", "ppo": "actor/grad_norm", "sft": "train/grad_norm", "nemo": "train/grad_norm"}
RATE = {"trl": "learning_rate", "grpo": "actor/lr", "ppo": "actor/lr", "sft": "train/lr", "nemo": "train/lr"}
ENTROPY = {"trl": "entropy", "grpo": "actor/entropy", "ppo": "actor/entropy", "nemo": "train/approx_entropy"}
COUNTERS = ("step", "epoch", "num_tokens", "training/global_step", "training/epoch", "train/total_tokens(B)")
CRASH = traceback("RuntimeError: CUDA error", "train.py:<module>", "train.py:main")
STOPPED = traceback("KeyboardInterrupt", "train.py:<module>", "train.py:main")


def text(name: str, change: Callable[[Lines, int, int], Lines]) -> Change:
    """Change the lines of the log: given the place of a step in the middle, and that of the end."""

    def changed(run: Run) -> Run:
        lines = run.log().rstrip("\n").split("\n")
        middle = next(number for number, line in enumerate(lines) if MARK[name] in line)
        end = max(number for number, line in enumerate(lines) if CLOSING[name] in line)
        return replace(run, head=tuple(change(lines, middle, end)), printed=[], tail=())

    return changed


def rows(change: Callable[[list[Row]], list[Row]], *, log: bool = False) -> Change:
    """Change the rows of the files, or those that the log prints."""
    return lambda run: replace(run, printed=change(run.printed)) if log else replace(run, rows=change(run.rows))


def swapped(of: list[Row]) -> list[Row]:
    first, second = [number for number, row in enumerate(of) if training(row)][:2]
    made = list(of)
    made[first], made[second] = of[second], of[first]
    return made


def shifted(of: list[Row]) -> list[Row]:
    """Each row with the values of the next: another run."""
    trained = [row for row in of if training(row)]
    values = [{key: value for key, value in row.items() if key not in COUNTERS} for row in trained]
    moved = {row["step"]: {**row, **new} for row, new in zip(trained, [*values[1:], values[0]], strict=True)}
    return [moved[row["step"]] if training(row) else row for row in of]


def stale(name: str) -> Change:
    """One step shows the values of the one before, with its own counters."""

    def copied(of: list[Row]) -> list[Row]:
        trained = [row for row in of if training(row)]
        if len(trained) < 2:
            return of
        old, new = trained[len(trained) // 2 - 1], trained[len(trained) // 2]
        fresh = {key: new[key] if key in COUNTERS else old.get(key, new[key]) for key in new}
        return [fresh if row is new else row for row in of]

    def change(run: Run) -> Run:
        made = replace(run, rows=copied(run.rows), printed=copied(run.printed))
        return with_nemo_log(made) if name == "nemo" else made

    return change


def spelled(name: str, value: str) -> Change:
    """The log prints a norm (NeMo-RL: a loss) in this spelling."""

    def change(lines: Lines, middle: int, _: int) -> Lines:
        if name == "nemo":
            place = next(number for number in range(middle, len(lines)) if "• Loss:" in lines[number])
            return [*lines[:place], f"  • Loss: {value}", *lines[place + 1 :]]
        place = middle + (name == "trl")
        pattern = r"('grad_norm': )'[^']*'" if name == "trl" else rf"({NORM[name]}:)[-\d.e]+"
        return [*lines[:place], re.sub(pattern, rf"\g<1>{value}", lines[place]), *lines[place + 1 :]]

    return text(name, change)


def falsified() -> Iterable[tuple[str, str, str, Change, str]]:
    """A healthy run, what is wrong, the boundaries that may be named, how, and the form of the files (`log`: none)."""
    for name, last in LAST.items():
        middle, loss, norm = last // 2 + 1, LOSS[name], NORM[name]
        alone = "log" if name != "nemo" else ""
        yield name, "values of the next step in the files", "metrics", rows(shifted), "events"
        yield name, "loss in other units in the files", "metrics", put(lambda v: v * 1000 + 1, loss, log=False), "table"
        yield name, "a row copied forward", "metrics", stale(name), ""
        yield name, "negative norm", "metrics", put(lambda v: -v, norm, when=at(middle)), "events"
        yield name, "two rows swapped in the file", "metrics", rows(swapped), ""
        yield name, "steps off by one in the file", "metrics", rows(lambda of: [{**row, "step": row["step"] - 1} for row in of]), "table"
        yield name, "steps times ten in the file", "metrics", rows(lambda of: [{**row, "step": row["step"] * 10} for row in of]), "events"
        yield name, "no gradient", "optimizer", put(0.0, norm, "critic/grad_norm"), "table"
        yield name, "loss gone at the end", "metrics", drop(loss, when=at(last)), "events"
        yield name, "loss 1e7 at the end", "metrics", put(1e7, loss, when=at(last)), alone
        for value in ("abc", "0.5", [0.5], {"mean": math.nan}, {"a": {"b": math.inf}}):
            yield name, f"loss {value!r} in the file", "metrics", put(value, loss, when=at(middle), log=False), ""
        for value in ("-nan(ind)", "1.#QNAN", "-inf", "{'mean': nan}", "np.float64(nan)", "tensor(nan)"):
            yield name, f"{value} printed", "metrics", spelled(name, value), ""
        yield name, "cut", "", text(name, lambda lines, middle, _: lines[:middle]), alone
        forged = text(name, lambda lines, middle, end: [*lines[:middle], *CRASH, *lines[end:]])
        yield name, "a closing row forged after a crash", "", forged, alone
        stopped = text(name, lambda lines, middle, end: [*lines[:middle], *STOPPED, *lines[end:]])
        yield name, "a closing row forged after an interrupt", "", stopped, alone
        dead = text(name, lambda lines, middle, _: [*lines[:middle], *(f"[rank1]: {line}" for line in CRASH), *lines[middle:]])
        yield name, "one of two ranks dead", "ddp", dead, ""
        yield name, "a crash, then a good run", "", text(name, lambda lines, middle, _: [*lines[:middle], *CRASH, "rc=1", *lines]), alone
        killed = text(name, lambda lines, middle, _: [*lines[:middle], "Killed", "+ python train.py --resume", *lines[middle:]])
        yield name, "killed and taken up again", "environment metrics", killed, ""
        yield name, "without its beginning", "", text(name, lambda lines, middle, _: lines[middle:]), alone
        if name in ENTROPY:
            yield name, "an infinite value inside the entropy", "metrics", put({"mean": math.inf}, ENTROPY[name], log=False), ""
        if name in ("trl", "grpo"):
            yield name, "learning rate 0 in the log alone", "metrics optimizer", put(0.0, RATE[name], files=False), "events"
            yield name, "a norm of 1e9", "metrics", put(1e9, norm, when=at(middle)), ""
            yield name, "two rows swapped in the log", "metrics", rows(swapped, log=True), alone


def quick(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Of verl's many metrics, tables are written in a tenth of the time of event files."""
    return [(*case[:-1], "table" if case[0] == "grpo" and case[-1] == "events" else case[-1]) for case in cases]


WRONG = quick(falsified())


@pytest.mark.parametrize(("name", "boundaries", "change", "form"), [pytest.param(n, b, c, f, id=f"{n}: {w}") for n, w, b, c, f in WRONG])
def test_a_falsified_run_does_not_pass(name: str, boundaries: str, change: Change, form: str, tmp_path: Path) -> None:
    run = change(healthy(name))
    found = replace(run, files=form != "log", form=form.removeprefix("log")).judge(tmp_path)
    assert found.verdict in (Verdict.FAIL, Verdict.BLOCKED), found.reason
    assert found.boundary is not None
    assert not boundaries or found.boundary.value in boundaries.split(), found.reason


MODEL_CODE = ["Traceback (most recent call last):", '  File "<string>", line 1, in <module>', "ZeroDivisionError: division by zero"]
IGNORED = [
    "Exception ignored in: <function Pool.__del__ at 0x7f>",
    *traceback("ValueError: pool is closed", "multiprocessing/pool.py:__del__"),
]
AT_EXIT = ["Error in atexit._run_exitfuncs:", *traceback("BrokenPipeError: [Errno 32] Broken pipe", "x/y.py:close")]
DROPPED = ["Task exception was never retrieved", "future: <Task finished name='T'>", *traceback("TimeoutError", "aiohttp/client.py:get")]
SAID = [
    "Completion: loss: nan, exit code 1",
    "Response: Segmentation fault (core dumped)",
    "assistant: weights mismatch! reward failed, using 0",
]
GOOD_END = ["Exit code: 0", "JobState=COMPLETED ExitCode=0:0", "1234.batch  batch  COMPLETED  0:0", "vllm server stopped (signal 15 sent)"]


def calm() -> Iterable[tuple[str, str, Change, str]]:
    """A healthy run, what is special about it, how, and the form of the files."""
    for name, last in LAST.items():
        alone = "log" if name != "nemo" else ""
        stamped = text(name, lambda lines, *_: [f"2026-11-15 01:02:03,123 {line}" if line else line for line in lines])
        yield name, "time stamps", stamped, alone
        composed = text(name, lambda lines, *_: [f"trainer-0  | {line}" if line else line for line in lines])
        yield name, "docker compose", composed, alone
        yield name, "line ends of Windows", text(name, lambda lines, *_: [f"{line}\r" for line in lines]), alone
        for what, more in (("code of a model", MODEL_CODE), ("ignored", IGNORED), ("never retrieved", DROPPED), ("a sample", SAID)):
            place = 8 if name == "nemo" else 0
            between = text(name, lambda lines, m, _, more=more, place=place: [*lines[: m + place], *more, *lines[m + place :]])  # type: ignore[misc]
            yield name, what, between, ""
        yield name, "at exit", text(name, lambda lines, *_: [*lines, *AT_EXIT, *GOOD_END]), alone
        odd = {"user/failed_share": 0.0, "nan_count": 0.0, "exit code": 0.0, "is_best": True, "phase": "warm", "cfg": {"a": 1}}
        yield name, "odd metrics of a user", rows(lambda of, odd=odd: [{**row, **odd} if training(row) else row for row in of]), ""  # type: ignore[misc]
        half = max(1, last // 2)
        yield name, "warm-up from 0", vary(lambda step, _, n=name, h=half: {RATE[n]: 1e-3 * min(1.0, (step - 1) / h)}), "events"  # type: ignore[misc]
        yield name, "a rate of 1e-9", vary(lambda _, __, n=name: {RATE[n]: 1e-9}), "table"  # type: ignore[misc]
        yield name, "a spike of the gradient", put(lambda v: v * 50, NORM[name], when=at(half + 1)), "events"
        yield name, "large gradients", put(lambda v: v * 40, NORM[name]), "table"


CALM = quick(calm())


@pytest.mark.parametrize(("name", "change", "form"), [pytest.param(n, c, f, id=f"{n}: {w}") for n, w, c, f in CALM])
def test_a_healthy_run_still_passes(name: str, change: Change, form: str, tmp_path: Path) -> None:
    run = both(change)(healthy(name))
    found = replace(run, files=form != "log", form=form.removeprefix("log")).judge(tmp_path)
    assert found.verdict is Verdict.PASS, found.reason


@pytest.mark.parametrize("name", ["grpo", "sft", "ppo"])
@pytest.mark.parametrize("files", [True, False])
def test_a_run_of_another_kind_than_the_level_is_inconclusive(name: str, files: bool, tmp_path: Path) -> None:
    found = replace(healthy(name), files=files, level=0).judge(tmp_path)
    assert found.verdict is Verdict.BLOCKED, found.reason
