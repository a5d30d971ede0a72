"""The decisive line shows the cause: the row of the metric, never an exit code of 0 or merely the last line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from seatrial.core.records import CheckResult
from seatrial.core.series import Metrics, Series
from seatrial.core.verdict import Boundary, Verdict
from seatrial.loops import get_loop
from seatrial.trial.decisive import FailureCase, decisive
from seatrial.trial.files_judge import FileVerdict, judge_files
from seatrial.trial.judge import Evidence, Judgement
from tests.cli.command import inside
from tests.triage.runs import judged, nemo_log, trl_log, verl_log

DATA = Path(__file__).parents[1] / "data"


def shown(found: FileVerdict) -> str:
    """The line of the file that the verdict names."""
    assert found.file is not None
    assert found.line is not None
    return Path(found.file).read_bytes().decode().split("\n")[found.line - 1]


def still(text: str, name: str, value: str, since: int = 1) -> str:
    """The same log with one metric at this value from a row on."""
    rows = 0

    def put(found: re.Match[str]) -> str:
        nonlocal rows
        rows += 1
        return f"{found[1]}{value}" if rows >= since else found[0]

    return re.sub(rf"({re.escape(name)}['\"]?: ?'?)[-\d.]+", put, text)


def test_a_pass_shows_completion(tmp_path: Path) -> None:
    assert "train_runtime" in shown(judged("trl", trl_log(after=["rc=0"]), tmp_path))
    assert "100%" in shown(judged("verl", verl_log(after=["rc=0"]), tmp_path))


@pytest.mark.parametrize("since", [1, 2])
def test_advantages_that_are_zero(since: int, tmp_path: Path) -> None:
    text = verl_log(after=["rc=0"])
    for name in ("critic/advantages/max", "critic/advantages/min"):
        text = still(text, name, "0.0", since)
    found = judged("verl", text, tmp_path)
    assert found.verdict is Verdict.BLOCKED
    assert "critic/advantages/max:0.0" in shown(found)


def test_a_reward_that_never_varies(tmp_path: Path) -> None:
    found = judged("trl", still(trl_log(after=["rc=0"]), "'reward_std", "0"), tmp_path)
    assert (found.verdict, found.boundary) == (Verdict.BLOCKED, Boundary.REWARD)
    assert "'reward_std': '0'" in shown(found)
    assert "'reward_std': '0'" in found.text


def test_a_reward_of_zero_on_the_console_of_a_run_that_prints_no_gradient(tmp_path: Path) -> None:
    found = judged(
        "nemo-rl",
        nemo_log(after=["rc=0"]).replace("Avg Reward: 0.2500", "Avg Reward: 0.0000").replace("Avg Reward: 0.5000", "Avg Reward: 0.0000"),
        tmp_path,
    )
    assert found.verdict is Verdict.BLOCKED
    assert shown(found).strip() == "• Avg Reward: 0.0000"


def test_a_gradient_of_zero(tmp_path: Path) -> None:
    found = judged("trl", still(trl_log(after=["rc=0"]), "'grad_norm", "0.0"), tmp_path)
    assert found.verdict is Verdict.FAIL
    assert "'grad_norm': '0.0'" in shown(found)


@pytest.mark.parametrize("loop", ["trl", "verl"])
def test_a_value_that_is_not_finite_is_shown_at_its_step(loop: str, tmp_path: Path) -> None:
    text = (
        trl_log(after=["rc=0"]).replace("'grad_norm': '1.07'", "'grad_norm': 'nan'")
        if loop == "trl"
        else verl_log(after=["rc=0"]).replace("actor/grad_norm:1.3", "actor/grad_norm:nan")
    )
    found = judged(loop, text, tmp_path)
    assert found.verdict is Verdict.FAIL
    assert "nan" in shown(found)


def test_a_metrics_file_is_named_with_its_line(tmp_path: Path) -> None:
    rows = [
        json.dumps(
            {
                "step": step,
                "data": {
                    "actor/grad_norm": 0.0,
                    "actor/lr": 1e-3,
                    "critic/score/max": 1.0,
                    "critic/score/min": 0.0,
                    "critic/advantages/max": 0.0,
                    "critic/advantages/min": 0.0,
                    "actor/pg_loss": 0.1,
                    "training/global_step": step,
                },
            }
        )
        for step in (1, 2, 3, 4)
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("\n".join(rows) + "\n")
    log = re.sub(r"step:\d - .*", "working", verl_log(after=["rc=0"]))
    found = judged("verl", log, tmp_path, metrics)
    assert (found.verdict, found.file, found.line) == (Verdict.BLOCKED, str(metrics), 1)
    assert '"critic/advantages/max": 0.0' in found.text


def test_a_state_file_of_many_lines_is_named_with_the_line_of_the_value(tmp_path: Path) -> None:
    state = json.loads((DATA / "trl" / "grpo_full" / "trainer_state.json").read_text())
    for row in state["log_history"]:
        if "reward_std" in row:
            row["reward_std"], row["frac_reward_zero_std"] = 0.0, 1.0
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps(state, indent=2))
    log = re.sub(r"\{'loss'.*", "working", trl_log())
    found = judged("trl", log, tmp_path, path)
    assert (found.verdict, found.boundary, found.file) == (Verdict.BLOCKED, Boundary.REWARD, str(path))
    assert re.search(r'"(reward_std|frac_reward_zero_std)": ', shown(found))


def test_a_run_that_stopped_shows_its_last_step(tmp_path: Path) -> None:
    text = trl_log(8).replace("{'train_runtime", "{'_") + "rc=0\n"
    found = judged("trl", text, tmp_path, steps=20)
    assert found.verdict is Verdict.FAIL
    assert shown(found).startswith("{'loss': '-0.09'")


def test_several_runs_show_the_second_beginning(tmp_path: Path) -> None:
    found = judged("verl", verl_log() + verl_log(), tmp_path)
    assert found.verdict is Verdict.BLOCKED
    assert found.line == verl_log().count("\n") + 1


def test_an_exit_code_is_shown_by_its_line(tmp_path: Path) -> None:
    found = judged("trl", trl_log(after=["exit code 1", "done at 12:00"]), tmp_path)
    assert found.verdict is not Verdict.PASS
    assert shown(found) == "exit code 1"


def test_a_refit_measurement_is_shown_by_its_line() -> None:
    log = DATA / "triage" / "server_20_refits.log"
    found = judge_files(get_loop("trl"), log, [], None, None)
    assert "ParallelLMHead: Failed to load weights" in shown(found)


def case(tmp_path: Path, text: str, check: CheckResult, metrics: Metrics, verdict: Verdict = Verdict.FAIL) -> FailureCase:
    log = tmp_path / "run.log"
    log.write_text(text)
    evidence = Evidence(metrics=metrics, checks=(check,), steps_reached=4)
    return FailureCase(Judgement(verdict, "why", check.boundary), evidence, (check,), log, get_loop("verl"))


def test_a_missed_check_shows_the_step_that_misses_most(tmp_path: Path) -> None:
    series = Series("actor/grad_norm", (1, 2, 3, 4), (1.1, 1.2, 9.5, 1.4))
    check = CheckResult(
        name='max(data["actor/grad_norm"]) < 5', passed=False, threshold="< 5", value=9.5, steps=(1, 2, 3, 4), tag="actor/grad_norm"
    )
    text = verl_log().replace("actor/grad_norm:1.3", "actor/grad_norm:9.5")
    place = decisive(case(tmp_path, text, check, Metrics({series.tag: series})))
    assert "step:3 - " in place.text
    named = check.model_copy(update={"name": "x", "step": 2})
    assert "step:2 - " in decisive(case(tmp_path, text, named, Metrics({series.tag: series}))).text


def test_where_no_line_shows_it_the_text_names_metric_step_and_value(tmp_path: Path) -> None:
    series = Series("train/token_mult_prob_error", (1, 2), (1.0, 7.4))
    name = 'max(data["train/token_mult_prob_error"]) < 1.05'
    check = CheckResult(name=name, passed=False, threshold="< 1.05", steps=(1, 2), tag="train/token_mult_prob_error")
    place = decisive(case(tmp_path, verl_log(after=["rc=0"]), check, Metrics({series.tag: series}, sources=("events.out.tfevents.1",))))
    assert place == ("events.out.tfevents.1", None, "train/token_mult_prob_error = 7.4 at step 2")


def test_a_check_that_read_a_line_shows_it(tmp_path: Path) -> None:
    check = CheckResult(name="the log says no NaN", kind="proof", passed=False, line=8)
    assert decisive(case(tmp_path, verl_log(), check, Metrics())).line == 8


def test_text_and_json_agree(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(still(trl_log(after=["rc=0"]), "'grad_norm", "0.0"))
    told, data = inside("judge", "trl", "--log", log).out, json.loads(inside("judge", "trl", "--log", log, "--json").out)
    missed = [check["name"] for check in data["checks"] if not check["passed"]]
    assert f"checks:    {len(data['checks'])} made, {len(missed)} missed" in told
    assert all(f"missed:    {name}" in told for name in missed)
    assert f"{data['file']}:{data['line']}" in told
    assert data["text"] in told
