"""Reading NeMo-RL's console: results, steps and the configuration in force, and what must not be read as one."""

from __future__ import annotations

import math
import pprint
from pathlib import Path

import pytest

from seatrial.checks.probe_facts import lookup
from seatrial.core.series import Metrics, Series
from seatrial.loops.nemo_rl.nemo_outputs import (
    completed_steps,
    in_force,
    other_run,
    read_configs,
    read_console,
    steps_planned,
    steps_reached,
)
from tests.loops.nemo_logs import CONFIG, CONTROLLER, LINE, POLICY, grpo_log, nested, printed_config

TITLE = "Final config:\n"
MEGATRON = {"policy.megatron_cfg.enabled": True, "policy.dtensor_cfg.enabled": False}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "run.log"


def written(log: Path, text: str) -> Path:
    log.write_text(text)
    return log


def made(**series: tuple[int, ...]) -> Metrics:
    tags = {tag.replace("__", "/"): steps for tag, steps in series.items()}
    return Metrics({tag: Series(tag, steps, tuple(0.5 for _ in steps)) for tag, steps in tags.items()})


# --- metrics ---


def test_the_results_of_each_step_are_read(log: Path) -> None:
    found = read_console(written(log, grpo_log(values={"loss": (0.5, math.nan)})))
    assert found.series["train/gen_kl_error"].values == (0.0003, 0.0004)
    assert found.series["train/reward"].steps == (1, 2)
    assert found.series["train/mean_gen_tokens_per_sample"].values == (201.5, 187.25)
    assert found.series["train/loss"].non_finite() == (2,)
    assert found.series["timing/train/total_step_time"].values == (12.34, 12.34)
    assert found.series["timing/train/prepare_for_generation/transfer_and_update_weights"].values == (1.25, 1.25)
    assert len(found.series) == 8
    assert (found.damage, found.overlaps, found.sources) == ((), (), (str(log),))


@pytest.mark.parametrize(("printed", "value"), [("-inf", -math.inf), ("inf", math.inf), ("-0.0000", 0.0), ("1e-05", 1e-05), ("3", 3.0)])
def test_every_form_of_a_number_is_read(printed: str, value: float, log: Path) -> None:
    found = read_console(written(log, grpo_log(1, 1).replace("• Loss: 0.0123", f"• Loss: {printed}")))
    assert found.series["train/loss"].values == (value,)


def test_a_step_that_did_not_end_has_no_metrics(log: Path) -> None:
    written(log, grpo_log(1, 2) + f"\n{LINE} Step 2/2 {LINE}\n▶ Preparing batch...\n")
    assert (completed_steps(log), steps_reached(read_console(log)), steps_planned((log,))) == (1, 1, 2)


def test_asynchronous_and_filtered_results(log: Path) -> None:
    rows = "  • Avg Filtered Reward: 0.7500\n  • Avg Total Reward: 0.5000\n  • Buffer Size: 4\n  • Avg Trajectory Age: 1.00 steps"
    rows += "\n  • Draft Loss: 2.5000"
    found = read_console(written(log, grpo_log(1, 1).replace("  • Avg Reward: 0.2500", rows)))
    tags = ("filtered_reward", "reward", "buffer_size", "avg_trajectory_age", "draft_loss")
    assert [found.series[f"train/{tag}"].values[0] for tag in tags] == [0.75, 0.5, 4.0, 1.0, 2.5]


def test_validation_stands_at_its_own_step(log: Path) -> None:
    results = (
        "▶ Starting validation at step {}...\n\n📊 Validation Results:\n    • Accuracy: 0.{}\n    • Average response length: 12.5 tokens\n"
    )
    results += "    • Samples processed: 8\n\n  ⏱️  Validation Timing:\n    • Total validation time: 3.00s"
    extra = {"setup complete": [results.format(0, 25)], "update": [results.format(1, 75)]}
    found = read_console(written(log, grpo_log(1, 1, extra=extra)))
    accuracy = found.series["validation/accuracy"]
    assert (accuracy.steps, accuracy.values) == ((0, 1), (0.25, 0.75))
    assert "validation/avg_length" in found.series
    assert not [tag for tag in found.series if "Total" in tag or "Samples" in tag]


def test_a_second_epoch_counts_on(log: Path) -> None:
    epoch = f"\n{LINE} Epoch 2/2 {LINE}\n"
    second = grpo_log(2, 2).partition("Epoch 1/1")[2].partition("\n")[2]
    plain = "\n".join(line for line in (grpo_log() + epoch + second).split("\n") if "train_data_step" not in line)
    assert read_console(written(log, plain)).series["train/loss"].steps == (1, 2, 3, 4)


def test_the_data_file_says_the_step_of_a_resumed_epoch(log: Path) -> None:
    found = read_console(
        written(log, grpo_log().replace("train_data_step1.", "train_data_step11.").replace("train_data_step2.", "train_data_step12."))
    )
    assert found.series["train/loss"].steps == (11, 12)


@pytest.mark.parametrize(
    "text",
    [
        "  • Loss: 9.0000",
        f"{POLICY}  • Loss: 9.0000",
        "User: say this\n  • Loss: 9.0000\n  • Total reward: 1",
        "📊 Using log directory: /x\n  • Loss: 9.0000",
    ],
)
def test_what_stands_elsewhere_is_no_metric(text: str, log: Path) -> None:
    for milestone in ("setup complete", "step begun", "update"):
        found = read_console(written(log, grpo_log(1, 1, extra={milestone: [text]})))
        assert found.series["train/loss"].values == (0.0123,)


def test_a_row_of_another_process_inside_the_block_is_left_out(log: Path) -> None:
    text = grpo_log(1, 1).replace("  • Avg Reward", f"{POLICY}  • Avg Reward: 9.0000\n  • Avg Reward")
    assert read_console(written(log, text)).series["train/reward"].values == (0.25,)


def test_a_log_that_ends_inside_the_results_is_damaged(log: Path) -> None:
    whole = grpo_log(2, 2)
    for cut in ("Loss: -0.00", "Generation KL Error: 0.", "Total step time: 12.34s"):
        found = read_console(written(log, whole[: whole.rindex(cut) + len(cut)]))
        assert [damage.what for damage in found.damage] == ["the log ends inside the results of a step"], cut


def test_two_runs_in_one_log_overlap(log: Path) -> None:
    found = read_console(written(log, grpo_log() + grpo_log(values={"loss": (7.0, 8.0)})))
    assert [(overlap.tag, overlap.steps) for overlap in found.overlaps] == [("train/loss", (1, 2))]


def test_stamps_and_labels_of_scripts_do_not_matter(log: Path) -> None:
    for head in ("2026-11-15T03:41:59.123Z ", "[mcore 2step] ", "2026-11-15T03:41:59.123Z [dtensor 1step] "):
        written(log, "\n".join(head + line for line in grpo_log().split("\n")))
        assert steps_reached(read_console(log)) == completed_steps(log) == 2
        assert read_configs(log)[0] is not None


def test_nothing_printed_is_nothing_read(log: Path) -> None:
    found = read_console(written(log, "uv: command not found\n"))
    assert (found.series, found.sources, steps_reached(found), steps_planned((log,))) == ({}, (), None, None)


# --- steps ---


def test_steps_reached_is_that_of_the_slowest_run() -> None:
    assert steps_reached(made(train__loss=(1, 2), validation__accuracy=(0, 10))) == 2
    assert steps_reached(made(full__train__loss=(1, 2), delta__train__loss=(1,))) == 1
    assert steps_reached(made(resume__mcore__train__loss=(1, 2), resume__baseline__train__loss=(1, 2))) == 2
    assert steps_reached(made(full__train__loss=(1, 2), delta__timing__setup__total=(0,))) == 0, "a run without a step"
    assert steps_reached(made(validation__accuracy=(0,), timing__setup__total=(0,))) is None
    assert steps_reached(made(timing__train__loss=(1, 2))) is None
    assert steps_reached(Metrics()) is None


def test_steps_planned_by_the_configuration_or_by_the_count(tmp_path: Path) -> None:
    log = written(tmp_path / "run.log", grpo_log(2, 500))
    assert steps_planned((log, tmp_path / "missing.log")) == 500
    supervised = {"sft.max_num_steps": 60, "policy.megatron_cfg.enabled": True}
    short = written(tmp_path / "run.log.mcore_1step", f"{TITLE}{printed_config(supervised)}\n{LINE} Step 1/2 {LINE}\n")
    assert steps_planned((short,)) == 60
    assert steps_planned((written(tmp_path / "torn.log", f"{LINE} Step 1/2 {LINE}\n"),)) == 2
    assert steps_planned((written(tmp_path / "metrics.json", f"{LINE} Step 1/2 {LINE}\n"),)) is None


def test_steps_of_a_single_controller_are_counted(log: Path) -> None:
    step = "⏱️  Timing:\n  • Total step time: 3.21s\nstep_metrics={'loss': 0.1}\ntrain step 1/2  trainer_v=1  lag=0  "
    written(log, "\n".join(CONTROLLER + line for line in step.split("\n")) + "\n")
    assert completed_steps(log) == 1
    assert read_console(log).series == {}


# --- the configuration in force ---


def test_both_forms_of_the_configuration_are_the_same(tmp_path: Path) -> None:
    one = read_configs(written(tmp_path / "a.log", f"{TITLE}{printed_config(CONFIG)}\n"))
    old = read_configs(written(tmp_path / "b.log", f"{TITLE}{pprint.pformat(nested(CONFIG))}\n📊 Using log directory: x\n"))
    assert one == old == [nested(CONFIG)]


def test_values_that_are_no_plain_literals(log: Path) -> None:
    text = "MasterConfig(a=inf, b=-inf, c=nan, d=PosixPath('/x'), e=-1, f=(1, 2), g=Empty(), h='a(b{c', i=\"it's [\", j=np.float64(0.5))"
    (found,) = read_configs(written(log, f"{TITLE}{text}\n"))
    assert found is not None
    assert math.isnan(found.pop("c"))
    plain = {"a": math.inf, "b": -math.inf, "d": "/x", "e": -1, "f": [1, 2], "g": {}, "h": "a(b{c", "i": "it's [", "j": 0.5}
    assert found == plain


def test_lines_of_others_inside_the_block_are_left_out(log: Path) -> None:
    rows = pprint.pformat(nested(CONFIG)).split("\n")
    foreign = [
        "(raylet) node is slow",
        "/opt/x/config.py:12: UserWarning: old key",
        "  warnings.warn(",
        f"{POLICY}{{'policy': 1}}",
        "INFO:nemo_rl:x.py:1: hello (",
    ]
    text = "\n".join(["Final config:", foreign[4], rows[0], *foreign, *rows[1:]])
    assert read_configs(written(log, text)) == [nested(CONFIG)]


@pytest.mark.parametrize(
    "text",
    [
        TITLE,
        f"{TITLE}nothing\n" * 2,
        TITLE + printed_config(CONFIG)[:-200],
        TITLE + pprint.pformat(nested(CONFIG))[:-40] + "\n" + "INFO: x\n" * 20,
        f"{TITLE}MasterConfig(a=__import__('os').getcwd())\n",
        f"{TITLE}MasterConfig(a=<Kind.X: 1>)\n",
        f"{TITLE}MasterConfig(a=1 + 1)\n",
        f"{TITLE}{{'a': b}}\n",
    ],
)
def test_a_torn_block_is_no_configuration(text: str, log: Path) -> None:
    found = read_configs(written(log, text))
    assert set(map(type, found)) == {type(None)}
    assert not in_force("run", {}, log).passed
    assert "no whole" in (other_run(log) or "")


def test_no_block_is_no_configuration(log: Path) -> None:
    assert not in_force("run", {}, log).passed, "no log at all"
    assert read_configs(written(log, "Final config: see below\nMasterConfig(a=1)\n")) == []


def test_several_runs_are_all_read(log: Path) -> None:
    one, other = printed_config(CONFIG), printed_config({**CONFIG, "grpo.max_num_steps": 9})
    found = read_configs(written(log, f"[mcore 1step] {TITLE}[mcore 1step] {one}\n{TITLE}{one[:50]}\n{TITLE}{other}\n"))
    assert [config and lookup(config, "grpo.max_num_steps") for config in found] == ["(no such key)", None, 9]
    assert not in_force("resume", {}, log).passed, "one of them is torn"


# --- claims ---


def test_what_is_claimed_must_be_in_force(log: Path) -> None:
    written(log, grpo_log())
    assert in_force("run", {**MEGATRON, "grpo.max_num_steps": 2, "policy.generation.colocated.enabled": True}, log).passed
    missed = in_force("run", {**MEGATRON, "grpo.max_num_steps": 3, "policy.megatron_cfg.peft.dim": 8}, log)
    assert not missed.passed
    assert "grpo.max_num_steps fell back to 2 (claimed: 3)" in missed.message
    assert "policy.megatron_cfg.peft.dim fell back to (no such key)" in missed.message
    assert missed.value == "2 of 4 values as claimed"


def test_dtensor_instead_of_megatron_is_another_run(log: Path) -> None:
    assert other_run(written(log, grpo_log())) is None
    fallback = {"policy.megatron_cfg.enabled": False, "policy.dtensor_cfg.enabled": True}
    for config in (fallback, {**MEGATRON, "policy.dtensor_cfg.enabled": True}, {**MEGATRON, "policy.megatron_cfg.enabled": False}):
        assert "dtensor was used instead of Megatron" in (other_run(written(log, grpo_log(config=config))) or "")
    assert "dtensor" in (other_run(written(log, grpo_log() + grpo_log(config=fallback))) or ""), "one of several runs"
