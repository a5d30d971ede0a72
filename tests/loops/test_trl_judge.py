"""Judging real logs: verdict, boundary, decisive line and steps, and everything that must not become a Pass."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.core.verdict import Boundary, Verdict
from seatrial.loops import get_loop
from seatrial.trial.files_judge import FileVerdict, judge_files

TRL = get_loop("trl")
LEVELS = TRL.levels()
DATA = Path(__file__).parents[1] / "data" / "trl"
MADE = DATA / "made"
FULL = DATA / "grpo_full" / "console.log"
LAST = "'train_runtime': '29.91'"


def judge(log: Path, *metrics: Path, level: int | None = None, steps: int | None = None) -> FileVerdict:
    return judge_files(TRL, log, metrics, LEVELS[level] if level is not None else None, steps)


def line(path: Path, number: int | None) -> str:
    """A line as `sed -n Np` prints it."""
    assert number is not None
    return path.read_bytes().split(b"\n")[number - 1].decode()


@pytest.mark.parametrize(("name", "decisive"), [("grpo_full", 46), ("grpo_seven", 44), ("grpo_resumed", 26)])
@pytest.mark.parametrize("metrics", [(), ("trainer_state.json",), (".",)], ids=["log only", "state", "directory"])
def test_runs_that_completed_pass(name: str, decisive: int, metrics: tuple[str, ...]) -> None:
    log = DATA / name / "console.log"
    found = judge(log, *(DATA / name / place for place in metrics))
    assert (found.verdict, found.boundary, found.line, found.milestone) == (Verdict.PASS, None, decisive, "training done")
    assert (found.steps_reached, found.steps_expected) == (20, 20 if metrics else None)
    assert "train_runtime" in line(log, found.line)
    assert found.text in line(log, found.line)
    assert all(check.passed for check in found.checks)
    assert any("exit codes were not seen" in text for text in found.limitations)
    assert any("--expect-steps" in text for text in found.limitations) == (not metrics)


def test_events_of_a_resumed_run_alone_are_enough_for_its_end() -> None:
    found = judge(DATA / "grpo_resumed" / "console.log", DATA / "grpo_resumed" / "runs", steps=20)
    assert (found.verdict, found.steps_reached) == (Verdict.PASS, 20)


# What `tests/data/trl/README.md` calls the true outcome.
OUTCOMES: list[tuple[str, Verdict, Boundary | None, int | None, str]] = [
    ("bars", Verdict.PASS, None, 6, "{'train_runtime'"),
    ("buffered", Verdict.PASS, None, 24, "{'train_runtime'"),
    ("sparse", Verdict.PASS, None, 11, "{'train_runtime'"),
    ("plain", Verdict.PASS, None, 11, "{'train_runtime'"),
    ("lora_resumed", Verdict.PASS, None, 6, "{'train_runtime'"),
    ("plain_resumed", Verdict.PASS, None, 6, "{'train_runtime'"),
    ("ranks_ok", Verdict.PASS, None, 4, "{'train_runtime'"),
    ("no_rows", Verdict.BLOCKED, Boundary.METRICS, 4, ""),
    ("stopped_bar", Verdict.FAIL, Boundary.METRICS, 4, ""),
    ("reward_constant", Verdict.BLOCKED, Boundary.REWARD, 4, ""),
    ("reward_nan", Verdict.FAIL, Boundary.REWARD, 5, "All reward functions returned None"),
    ("reward_raises", Verdict.FAIL, Boundary.REWARD, 2, "RuntimeError: answer checker is not reachable"),
    ("ranks_raise", Verdict.FAIL, Boundary.REWARD, 2, "[rank1]: RuntimeError: answer checker is not reachable"),
    ("weights_nan", Verdict.FAIL, Boundary.OPTIMIZER, 1, "RuntimeError: probability tensor contains either `inf`, `nan`"),
    ("crash_after", Verdict.FAIL, Boundary.CHECKPOINT, 4, "RuntimeError: export of the final model failed"),
    ("no_column", Verdict.BLOCKED, Boundary.DATA, None, "KeyError: 'prompt'"),
    ("batch_not_divisible", Verdict.BLOCKED, Boundary.CONFIG, None, "ValueError: generation_batch_size (16) must be divisible"),
    ("unknown_argument", Verdict.BLOCKED, Boundary.CONFIG, None, "ValueError: Some specified arguments are not used"),
    ("no_checkpoint", Verdict.FAIL, Boundary.CHECKPOINT, None, "ValueError: No valid checkpoint found"),
    ("sigint", Verdict.FAIL, Boundary.OPTIMIZER, 2, "KeyboardInterrupt"),
    ("sigterm", Verdict.FAIL, Boundary.OPTIMIZER, 2, "Terminated"),
    ("sigkill", Verdict.BLOCKED, Boundary.ENVIRONMENT, 2, "Killed"),
]


@pytest.mark.parametrize(("name", "verdict", "boundary", "steps", "decisive"), OUTCOMES)
def test_real_logs_are_judged_right(name: str, verdict: Verdict, boundary: Boundary | None, steps: int | None, decisive: str) -> None:
    log = MADE / name / "console.log"
    found = judge(log)
    assert (found.verdict, found.boundary, found.steps_reached) == (verdict, boundary, steps), found.reason
    if name == "no_rows":  # nothing was logged, so no line shows what is missing
        assert (found.file, found.line, found.text) == (str(log), None, found.reason)
    else:
        assert decisive in line(log, found.line)


@pytest.mark.parametrize(
    ("name", "verdict", "steps"),
    [
        ("sparse", Verdict.PASS, (11, 11)),
        ("lora_resumed", Verdict.PASS, (6, 6)),
        ("no_rows", Verdict.BLOCKED, (4, 4)),
        ("stopped", Verdict.FAIL, (4, 12)),
        ("reward_nan", Verdict.FAIL, (5, 5)),
        ("reward_constant", Verdict.BLOCKED, (4, 4)),
    ],
)
def test_real_logs_with_their_state_are_judged_right(name: str, verdict: Verdict, steps: tuple[int, int]) -> None:
    found = judge(MADE / name / "console.log", MADE / name)
    assert (found.verdict, (found.steps_reached, found.steps_expected)) == (verdict, steps), found.reason


def test_every_real_log_is_in_a_table() -> None:
    assert {name for name, *_ in OUTCOMES} | {"stopped"} == {path.name for path in MADE.iterdir()}


def cut(tmp_path: Path, count: int, *more: str) -> Path:
    log = tmp_path / "cut.log"
    log.write_bytes(b"\n".join(FULL.read_bytes().split(b"\n")[:count]) + b"\n" + "".join(f"{text}\n" for text in more).encode())
    return log


@pytest.mark.parametrize("count", range(46))
def test_no_cut_of_a_log_is_a_pass(tmp_path: Path, count: int) -> None:
    """Every prefix that ends before the line that closes the training."""
    found = judge(cut(tmp_path, count))
    assert found.verdict in (Verdict.FAIL, Verdict.BLOCKED)
    assert found.boundary is not None
    assert found.line is None or found.line <= max(count, 1)
    with_state = judge(cut(tmp_path, count), FULL.with_name("trainer_state.json"))
    assert with_state.verdict is Verdict.FAIL
    assert "the log does not show the end of the run" in with_state.reason


@pytest.mark.parametrize("bytes_off", [1, 40, 200, 700])
def test_a_log_that_was_cut_inside_a_row_is_no_pass(tmp_path: Path, bytes_off: int) -> None:
    log = tmp_path / "cut.log"
    whole = b"\n".join(FULL.read_bytes().split(b"\n")[:43])
    log.write_bytes(whole[: len(whole) - bytes_off])
    found = judge(log, steps=20)
    assert found.verdict is Verdict.FAIL
    assert found.boundary is Boundary.METRICS


def test_a_killed_run_says_how_far_it_came(tmp_path: Path) -> None:
    log = cut(tmp_path, 30)
    found = judge(log, steps=20)
    assert (found.verdict, found.boundary, found.reason) == (Verdict.FAIL, Boundary.METRICS, "reached step 13 of 20")
    assert (found.steps_reached, found.milestone, found.line) == (13, "first step", 30)


def test_an_empty_log_shows_nothing(tmp_path: Path) -> None:
    log = tmp_path / "empty.log"
    log.touch()
    found = judge(log)
    assert (found.verdict, found.boundary, found.line) == (Verdict.BLOCKED, Boundary.ENVIRONMENT, None)
    assert judge(log, FULL.with_name("trainer_state.json")).verdict is Verdict.FAIL


def test_a_log_of_something_else_is_no_pass(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text("hello\n" * 30)
    assert judge(tmp_path / "x.log").verdict is Verdict.BLOCKED
    (tmp_path / "b.log").write_bytes(bytes(range(256)) * 9)
    assert judge(tmp_path / "b.log").verdict is Verdict.BLOCKED


def test_more_steps_than_were_reached_are_missed() -> None:
    for metrics in ([], [FULL.parent]):
        found = judge(FULL, *metrics, steps=21)
        assert (found.verdict, found.reason, found.steps_expected) == (Verdict.FAIL, "reached step 20 of 21", 21)
    found = judge(FULL, steps=10)
    assert found.verdict is Verdict.BLOCKED
    assert "the files hold several runs" in found.reason


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", None])
@pytest.mark.parametrize("key", ["loss", "grad_norm", "reward", "entropy"])
def test_a_row_that_is_not_finite_fails_and_is_the_decisive_line(tmp_path: Path, key: str, value: str | None) -> None:
    log = tmp_path / "console.log"
    rows = FULL.read_text().split("\n")
    place = next(index for index, text in enumerate(rows) if text.startswith("STEP 7")) + 1
    rows[place] = re.sub(rf"'{key}': '[^']*'", f"'{key}': {value!r}", rows[place])
    log.write_text("\n".join(rows))
    found = judge(log)
    assert (found.verdict, found.boundary) == (Verdict.FAIL, Boundary.METRICS)
    assert found.reason == f"train/{key} is not finite at step 7"
    assert found.line == place + 1


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_a_torn_state_fails(tmp_path: Path, keep: float) -> None:
    text = FULL.with_name("trainer_state.json").read_text()
    (tmp_path / "trainer_state.json").write_text(text[: int(len(text) * keep)])
    found = judge(FULL, tmp_path / "trainer_state.json")
    assert (found.verdict, found.boundary) == (Verdict.FAIL, Boundary.METRICS)
    assert "damaged" in found.reason


def test_a_torn_event_file_fails(tmp_path: Path) -> None:
    (source,) = FULL.parent.rglob("events*")
    (tmp_path / source.name).write_bytes(source.read_bytes()[:-7])
    assert judge(FULL, tmp_path, steps=20).verdict is Verdict.FAIL


def test_a_state_whose_rows_disagree_with_its_log_is_still_bound_by_the_log(tmp_path: Path) -> None:
    """A good state of another run does not save a log that crashed."""
    found = judge(MADE / "reward_raises" / "console.log", FULL.with_name("trainer_state.json"))
    assert (found.verdict, found.boundary) == (Verdict.FAIL, Boundary.REWARD)


def test_metrics_that_are_none_are_refused(tmp_path: Path) -> None:
    for bad in (tmp_path / "none", FULL, tmp_path):
        with pytest.raises(UserError, match=re.escape(str(bad))):
            judge(FULL, bad)


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5, 6])
def test_only_the_smoke_can_pass_from_files(level: int) -> None:
    found = judge(FULL, FULL.parent, level=level)
    assert (found.verdict, found.boundary) == (Verdict.BLOCKED, Boundary.METRICS)
    assert f"seatrial run trl --level {level}" in found.reason
    assert judge(MADE / "reward_raises" / "console.log", level=level).verdict is Verdict.FAIL


def test_the_smoke_says_which_of_its_checks_could_not_be_made() -> None:
    found = judge(FULL, FULL.parent, level=0)
    assert found.verdict is Verdict.PASS
    assert {check.name for check in found.checks} >= {'max(data["train/reward_std"]) > 0', 'max(data["train/entropy"]) > 0'}
    assert [text for text in found.limitations if "train/kl was not logged" in text]
    assert set(LEVELS[0].claims_not) <= set(found.limitations)


@pytest.mark.parametrize("key", ["reward_std", "entropy", "loss"])
def test_a_check_of_the_smoke_without_its_metric_is_missed(tmp_path: Path, key: str) -> None:
    log = tmp_path / "console.log"
    log.write_text(re.sub(rf"'{key}': '[^']*'", f"'other_{key}': '1'", FULL.read_text()).replace("{'other_loss'", "{'reward': '1', 'x'"))
    found = judge(log, level=0)
    assert found.verdict is Verdict.FAIL
    assert any(key in check.name and not check.passed for check in found.checks)


def test_steps_that_nobody_saw_are_missed(tmp_path: Path) -> None:
    log = tmp_path / "console.log"
    rows = FULL.read_text().split("\n")
    first, last = (next(index for index, text in enumerate(rows) if text.startswith(f"STEP {step} ")) for step in (5, 9))
    log.write_text("\n".join(rows[:first] + rows[last:]))
    found = judge(log)
    assert (found.verdict, found.boundary) == (Verdict.FAIL, Boundary.METRICS)
    assert "train/loss is logged without holes" in found.reason


def test_a_run_whose_rewards_nobody_saw_is_inconclusive(tmp_path: Path) -> None:
    log = tmp_path / "console.log"
    log.write_text(re.sub(r"'(reward_std|frac_reward_zero_std)': '[^']*', ", "", FULL.read_text()))
    found = judge(log)
    assert (found.verdict, found.boundary) == (Verdict.BLOCKED, Boundary.METRICS)
    assert "no spread of rewards was logged" in found.reason


def test_a_gradient_that_is_always_zero_fails(tmp_path: Path) -> None:
    log = tmp_path / "console.log"
    log.write_text(re.sub(r"'grad_norm': '[^']*'", "'grad_norm': '0'", FULL.read_text()))
    found = judge(log)
    assert (found.verdict, found.boundary) == (Verdict.FAIL, Boundary.OPTIMIZER)


def test_a_failure_after_the_training_counts(tmp_path: Path) -> None:
    log = tmp_path / "console.log"
    shutil.copy(FULL, log)
    with log.open("a") as stream:
        stream.write(
            'Traceback (most recent call last):\n  File "/a.py", line 1, in <module>\nOSError: [Errno 28] No space left on device\n'
        )
    found = judge(log, FULL.parent)
    assert (found.verdict, found.boundary, found.signature) == (Verdict.BLOCKED, Boundary.ENVIRONMENT, "no-space")


def test_a_second_run_in_the_same_log_that_did_not_end_is_no_pass(tmp_path: Path) -> None:
    log = tmp_path / "console.log"
    log.write_bytes(FULL.read_bytes() + b"\n".join(FULL.read_bytes().split(b"\n")[:20]) + b"\n")
    assert judge(log).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("name", "verdict", "boundary", "decisive"),
    [
        ("refit_qwen2.log", Verdict.FAIL, Boundary.REFIT, 14),
        ("server_20_refits.log", Verdict.FAIL, Boundary.REFIT, 140),
        ("refit_llama_inprocess.log", Verdict.PASS, None, 33),
    ],
)
def test_logs_of_a_generator(name: str, verdict: Verdict, boundary: Boundary | None, decisive: int) -> None:
    found = judge(DATA / "vllm" / name)
    assert (found.verdict, found.boundary, found.line) == (verdict, boundary, decisive)


def test_a_refit_within_the_tolerance_is_no_mismatch(tmp_path: Path) -> None:
    text = (DATA / "vllm" / "refit_qwen2.log").read_text().replace('"token_mult_prob_error": 1.088', '"token_mult_prob_error": 1.004')
    (tmp_path / "x.log").write_text(text)
    assert judge(tmp_path / "x.log").signature is None
