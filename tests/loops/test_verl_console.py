"""Reading verl's console: records, steps and the configuration in force, and what must not be read as one."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest

from seatrial.core.series import Metrics, Series
from seatrial.loops.verl import verl_log
from seatrial.loops.verl.verl_log import read_config, read_console, steps_planned, steps_reached
from seatrial.metrics.read import read_metrics

TESTS = Path(__file__).parents[1]
TRIAGE = TESTS / "data" / "triage"
VERL = TESTS / "data" / "verl"
RUNNER = "\x1b[36m(TaskRunnerV1 pid=1958)\x1b[0m "


def console(tmp_path: Path, *lines: str, end: str = "\n") -> Path:
    path = tmp_path / "run.log"
    path.write_text("\n".join(lines) + end)
    return path


@pytest.fixture
def ppo(tmp_path: Path) -> Path:
    path = tmp_path / "ppo.log"
    path.write_bytes(gzip.decompress((TRIAGE / "ppo_gae_3step.log.gz").read_bytes()))
    return path


@pytest.mark.parametrize(
    ("log", "metrics", "steps", "points"),
    [
        ("ppo_gae_3step", "ppo_gae_3step", 3, 364),
        ("sft_4step", "sft_fsdp2_4step", 4, 38),
        ("swallowed_reward_errors", "grpo_swallowed_reward_errors", 2, 188),
    ],
)
def test_the_console_says_what_the_file_says(log: str, metrics: str, steps: int, points: int, tmp_path: Path) -> None:
    source = TRIAGE / f"{log}.log"
    path = tmp_path / "run.log"
    path.write_bytes(source.read_bytes() if source.exists() else gzip.decompress((TRIAGE / f"{log}.log.gz").read_bytes()))
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(gzip.decompress((VERL / f"{metrics}.jsonl.gz").read_bytes()))
    shown, filed = read_console(path), read_metrics([file])
    assert (shown.damage, shown.overlaps) == ((), ())
    assert shown.series.keys() == filed.series.keys()
    assert sum(len(series) for series in shown.series.values()) == points
    for tag, series in shown.series.items():
        assert series.steps == filed.series[tag].steps
        assert series.values == pytest.approx(filed.series[tag].values, rel=1e-9)
    assert steps_reached(shown) == steps_reached(filed) == steps_planned((path,)) == steps


def test_values_are_unwrapped(tmp_path: Path) -> None:
    items = (
        "a/b:np.int32(2) - c:np.float64(-1.5e-07) - val-core/openai/gsm8k/acc/mean@1:0.5 - train/total_tokens(B):4.92e-07 - d:e:7 - f:True"
    )
    log = console(tmp_path, f"{RUNNER}step:3 - {items}")
    found = read_console(log)
    assert {tag: series.values[0] for tag, series in found.series.items()} == {
        **{"a/b": 2.0, "c": -1.5e-07, "val-core/openai/gsm8k/acc/mean@1": 0.5, "train/total_tokens(B)": 4.92e-07},
        **{"d:e": 7.0, "f": 1.0},
    }
    assert not found.damage


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "np.float64(nan)", "np.float32(inf)", "np.float64(-inf)"])
def test_values_that_are_not_finite_are_kept(tmp_path: Path, text: str) -> None:
    found = read_console(console(tmp_path, f"step:1 - critic/vf_loss:{text} - actor/lr:0.1"))
    assert found.series["critic/vf_loss"].non_finite() == (1,)
    assert math.isnan(found.series["critic/vf_loss"].values[0]) == ("nan" in text)


def test_a_record_is_found_anywhere_in_a_line(tmp_path: Path) -> None:
    bar = "Epoch 1/1:  12%|█▎        | 1/8 [00:02<00:15,  2.16s/it]"
    log = console(
        tmp_path, f"{bar}step:2 - train/loss:6.5\rEpoch 1/1:  25%|", "step:2 - val/loss:6.4", f"{bar}\r{bar}step:3 - train/loss:6.0"
    )
    found = read_console(log)
    assert found.series["train/loss"].steps == (2, 3)
    assert found.series["val/loss"].values == (6.4,)
    repeated = read_console(console(tmp_path, f"{RUNNER}step:1 - a:1.0 [repeated 3x across cluster] (Ray deduplicates logs)"))
    assert (repeated.series["a"].values, repeated.damage) == ((1.0,), ())


@pytest.mark.parametrize(
    "record",
    ["step:3 - actor/lr:0.1 - actor/en", "step:3 - actor", "step:3 - a:1 - b:1e-", "step:3 - a:1 - b:np.float64(1.0", "step:3 - a: - b:1"],
)
def test_a_torn_record_is_damage(tmp_path: Path, record: str) -> None:
    for lines in ((record, "more"), (record,)):
        found = read_console(console(tmp_path, *lines))
        assert [damage.where for damage in found.damage] == ["line 1"]


def test_a_log_that_ends_in_a_record_may_have_lost_digits(tmp_path: Path) -> None:
    assert "ends inside" in read_console(console(tmp_path, "step:3 - a:1.23", end="")).damage[0].what


def test_prose_is_no_record(tmp_path: Path) -> None:
    found = read_console(console(tmp_path, "The answer, step:1 - add the numbers - then stop", "+ python3 x.py --step:1", "", "nothing"))
    assert (found.series, found.damage, found.sources) == ({}, (), ())


def test_a_step_written_twice_is_said(tmp_path: Path) -> None:
    found = read_console(console(tmp_path, "step:1 - a:1.0 - b:1", "step:1 - a:2.0 - b:1"))
    assert [(overlap.tag, overlap.steps) for overlap in found.overlaps] == [("a", (1,))]


def test_rounded_learning_rates_of_older_versions_say_nothing(tmp_path: Path) -> None:
    found = read_console(console(tmp_path, "step:1 - actor/lr:0.000 - critic/kl:0.000", "step:2 - actor/lr:0.0"))
    assert found.series["actor/lr"].steps == (2,)
    assert found.series["critic/kl"].values == (0.0,)


def metrics(**values: tuple[float, ...]) -> Metrics:
    return Metrics(series={tag: Series(tag, tuple(range(1, len(row) + 1)), row) for tag, row in values.items()})


def test_only_training_shows_a_step() -> None:
    assert steps_reached(metrics(**{"val-core/x/acc/mean@1": (0.1, 0.2)})) is None
    assert steps_reached(metrics(**{"training/global_step": (1, 2), "val/loss": (1, 1, 1)})) == 2
    assert steps_reached(metrics(**{"save/training/global_step": (1, 2), "resume/training/global_step": (1, 2, 3)})) == 2
    assert steps_reached(Metrics()) is None


def test_the_plan_is_what_the_trainer_says_first(tmp_path: Path) -> None:
    schedule, bar = "Total steps: 30, num_warmup_steps: 0", "Training Progress:  33%|███       | 1/3 [00:48<00:48, 48.92s/it]"
    said = f"{RUNNER}INFO:2026-11-15 01:47:22,086:Total training steps: 2"
    assert [steps_planned((console(tmp_path, *lines),)) for lines in ((schedule, bar, said), (schedule, bar), (schedule,), ("x",))] == [
        2,
        3,
        30,
        None,
    ]
    assert steps_planned((tmp_path, tmp_path / "absent", tmp_path / "metrics.jsonl")) is None


def test_the_configuration_in_force(ppo: Path) -> None:
    config = read_config(ppo)
    assert config is not None
    assert config["algorithm"]["adv_estimator"] == "gae"
    assert (config["trainer"]["total_training_steps"], config["trainer"]["use_v1"]) == (3, True)
    assert config["transfer_queue"]["backend"]["SimpleStorage"]["num_data_storage_units"] == 1
    assert config["actor_rollout_ref"]["rollout"]["name"] == "hfcpu"


@pytest.mark.parametrize(
    "name", ["fail_pin_memory_no_accelerator_grpo", "fail_vllm_sleep_mode_unsupported", "hang_too_few_ray_cpus", "swallowed_reward_errors"]
)
def test_every_dump_is_read(name: str) -> None:
    config = read_config(TRIAGE / f"{name}.log")
    assert config is not None
    assert config["algorithm"]["adv_estimator"] == "grpo"


def test_the_configuration_of_a_supervised_run() -> None:
    config = read_config(TRIAGE / "sft_4step.log")
    assert config is not None
    assert config["trainer"]["total_training_steps"] == 4


def test_our_time_stamps_change_nothing(ppo: Path, tmp_path: Path) -> None:
    stamped = tmp_path / "stamped.log"
    stamped.write_text("\n".join(f"2026-11-15T03:41:59.123Z {text}" for text in ppo.read_text().split("\n")))
    assert read_config(stamped) == read_config(ppo)
    assert read_console(stamped).series == read_console(ppo).series


@pytest.mark.parametrize("lost", [19, 88, 300, 600, 955])
def test_a_torn_dump_is_none(ppo: Path, tmp_path: Path, lost: int) -> None:
    lines = ppo.read_text().split("\n")
    assert read_config(console(tmp_path, *lines[:lost])) is None, "cut off"
    broken = read_config(console(tmp_path, *lines[: lost - 1], lines[lost - 1][:-1], *lines[lost:]))
    assert broken is None, "a line lost its last character"


def test_lines_of_other_processes_do_not_disturb_the_dump(ppo: Path, tmp_path: Path) -> None:
    lines = ppo.read_text().split("\n")
    mixed = console(tmp_path, *lines[:400], "\x1b[36m(pid=7)\x1b[0m {'actor_rollout_ref", "rc=0", *lines[400:])
    assert read_config(mixed) == read_config(ppo)
    foreign = console(tmp_path, *lines[:400], f"{RUNNER}WARNING: something", *lines[400:])
    assert read_config(foreign) is None, "a line of the same process cannot be told from the dump"
    assert read_config(console(tmp_path, "nothing here")) is None
    warning = [f"{RUNNER}/a b/specs.py:74: UserWarning: Apex is not installed", f'{RUNNER}  warnings.warn("Apex (is not")']
    assert read_config(console(tmp_path, *lines[:400], *warning, *lines[400:])) == read_config(ppo), "a warning can be told"
    assert read_config(console(tmp_path, *lines[:400], warning[1], *lines[400:])) is None


def test_the_last_run_counts(ppo: Path, tmp_path: Path) -> None:
    text = ppo.read_text()
    second = console(tmp_path, text, text.replace("'total_training_steps': 3", "'total_training_steps': 9"))
    config = read_config(second)
    assert config is not None
    assert config["trainer"]["total_training_steps"] == 9
    assert read_config(console(tmp_path, text, *text.split("\n")[:300])) is None, "a torn dump hides behind no earlier one"


def test_vacuous_and_unseen_by_run() -> None:
    spread = {"critic/score/max": (0.0, 1.0), "critic/score/min": (0.0, 0.0), "actor/grad_norm": (0.1, 0.1), "actor/lr": (0.0, 1e-6)}
    assert (verl_log.vacuous(metrics(**spread)), verl_log.unseen(metrics(**spread))) == (None, None)
    flat = {f"resume/{tag}": (0.0,) for tag in spread}
    found = verl_log.vacuous(metrics(**spread, **flat))
    assert found is not None
    assert "in resume" in found.reason
    assert found.boundary.value == "optimizer"
    still = {f"control/{tag}": (0.0, 0.0) if tag == "actor/lr" else row for tag, row in spread.items()}
    assert verl_log.vacuous(metrics(**spread, **still)) is None, "a control is to learn nothing"
    assert verl_log.unseen(metrics(**{"train/loss": (1.0,), "train/grad_norm": (1.0,)})) is None, "no rewards where none are"
    assert "no train/grad_norm" in (verl_log.unseen(metrics(**{"train/loss": (1.0,)})) or "")
    assert verl_log.unseen(Metrics()) is not None
    assert verl_log.unseen(metrics(**spread, **{"val-core/train/acc/mean@1": (1.0,)})) is None, "a data source called train is no run"
