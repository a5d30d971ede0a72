"""Healthy runs of many kinds: none of them may be called anything but a Pass. The twin of `test_falsified.py`."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.verdict import Verdict
from tests.trial.made_runs import HEALTHY, Row, Run, with_nemo_log
from tests.trial.test_falsified import Change, at, drop, end, healthy, put, rows_from, say, script, training

Vary = Callable[[int, Row], dict[str, Any]]


def vary(what: Vary) -> Change:
    """Change rows of training by their step."""

    def change(run: Run) -> Run:
        for rows in (run.rows, run.printed):
            for row in rows:
                if training(row):
                    row.update({key: value for key, value in what(int(row["step"]), row).items() if value is not None})
        return with_nemo_log(run) if run.loop == "nemo-rl" else run

    return change


def rated(tag: str, units: Callable[[int, int], int]) -> Change:
    """A schedule of the learning rate, by a step and the last one."""

    def change(run: Run) -> Run:
        last = sum(training(row) for row in run.rows)
        return vary(lambda step, _: {tag: 1e-3 * units(step, last)})(run)

    return change


def both(*changes: Change) -> Change:
    def change(run: Run) -> Run:
        for one in changes:
            run = one(run)
        return run

    return change


def every(distance: int, first: bool = False) -> Change:
    """Logged every so many steps."""

    def kept(rows: list[Row]) -> list[Row]:
        return [row for row in rows if not training(row) or row["step"] % distance == 0 or (first and row["step"] == 1)]

    return lambda run: replace(
        run, rows=kept(run.rows), printed=kept(run.printed), state={**run.state, "logging_steps": distance} if run.state else {}
    )


def reused(run: Run) -> Run:
    """Every batch is trained on twice (`num_iterations=2`): what generation logs is in every second row."""
    made = ("reward", "completions/", "frac_reward_zero_std")

    def kept(rows: list[Row]) -> list[Row]:
        return [{key: value for key, value in row.items() if row["step"] % 2 or not key.startswith(made)} for row in rows]

    return replace(run, rows=kept(run.rows), printed=kept(run.printed))


def resumed(first: int, word: str) -> Change:
    """The log begins at a later step; files hold every step, or the later ones, too."""

    def change(run: Run) -> Run:
        late = [row for row in run.printed if not training(row) or row["step"] >= first]
        for row in late:
            if "train_runtime" in row:
                row["train_steps_per_second"] = row["train_steps_per_second"] * (21 - first) / 20
        rows = run.rows if run.loop == "trl" else [row for row in run.rows if not training(row) or row["step"] >= first]
        return replace(run, printed=late, rows=rows, head=(*run.head, *([word] if word else [])))

    return change


def evaluated(run: Run) -> Run:
    """Rows of evaluation between those of training."""
    made = []
    for row in run.printed:
        made.append(row)
        if training(row) and row["step"] % 5 == 0:
            made.append({"eval_loss": 0.01, "eval_runtime": 1.2, "eval_reward": 0.5, "epoch": row["epoch"], "step": row["step"]})
    return replace(run, printed=made, rows=copy.deepcopy(made))


def console(change: Change) -> Change:
    return lambda run: replace(change(run), files=False)


def with_kl(step: int, _: Row) -> dict[str, Any]:
    return {"kl": 0.0003 * step}


NOISE = random.Random(7)
NOISY = {step: NOISE.lognormvariate(0, 1.2) for step in range(1, 21)}
SPIKED = {**{step: 1 + step / 50 for step in range(1, 21)}, 11: 38.0}
SAMPLE = (
    "╭──────────────────── Step 3 ────────────────────╮",
    "│ What is the loss? │ loss: nan, and grad_norm: inf; the program exited with code 1 │",
    "╰────────────────────────────────────────────────╯",
)
ANSWER = (
    "\x1b[36m(TaskRunnerV1 pid=1958)\x1b[0m [prompt] Why does training fail?",
    "\x1b[36m(TaskRunnerV1 pid=1958)\x1b[0m [response] The learning rate is too large:",
    "\x1b[36m(TaskRunnerV1 pid=1958)\x1b[0m loss: nan",
    "\x1b[36m(TaskRunnerV1 pid=1958)\x1b[0m reward = -inf, exit code 1",
    "\x1b[36m(TaskRunnerV1 pid=1958)\x1b[0m [ground_truth] 42",
    "\x1b[36m(TaskRunnerV1 pid=1958)\x1b[0m [score] 0.0",
)
HARMLESS = (
    "UserWarning: logits are passed through torch.nan_to_num before the loss",
    "check_for_nan_in_loss_and_grad=True, clip_grad=1.0, max_grad_norm: inf",
    "{'clip_ratio_c': inf, 'best_metric': None, 'max_grad_norm': None, 'learning_rate': None, 'kl_coef': None}",
    "training args: loss_type=bnpo, lr_scheduler_type=constant, log_on_each_node=True, logging_nan_inf_filter=True",
    "info: no nan loss was found; 0 inf gradients",
    "EarlyStopping: best loss improved from inf to 0.031",
    "INFO: rewards information: 3 functions; scores in infinity-norm",
    "num nan gradients: 0; nan_grads=0 inf_grads=0; reward_range=(-inf, inf)",
    "Set logging_nan_inf_filter so that a nan loss is filtered",
    "sample: 'the loss is nan and exit code 1'",
    "loss_info enabled, entropy inference on",
)

NOISE_OF_SERVICES = (
    "INFO 11-15 01:02:03 [loggers.py:116] Engine 000: Avg prompt throughput: 12.0 tokens/s, Running: 0 reqs, GPU KV cache usage: 0.0%",
    "wandb: Syncing run true-sky-12",
    "wandb: WARNING Tried to log to step 3 that is less than the current step 4. "
    "Steps must be monotonically increasing, so this data will be ignored.",
    "[2026-11-15 01:02:03,123] [INFO] [logging.py:128:log_dist] [Rank 0] step=3, skipped=0, lr=[0.001], mom=[(0.9, 0.95)]",
    "/usr/lib/python3.11/site-packages/torch/utils/checkpoint.py:1399: FutureWarning: `torch.cpu.amp.autocast(args...)` is deprecated.",
    "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.",
    "Setting `pad_token_id` to `eos_token_id`:151643 for open-end generation.",
    "The attention mask and the pad token id were not set. As a consequence, you may observe unexpected behavior.",
    "[W1115 01:02:03.123456 ProcessGroupNCCL.cpp:4115] Warning: "
    "using GPU 0 to perform barrier as devices used by this process are currently unknown.",
    "NCCL INFO Channel 00/02 : 0 1",
    "[rank0]:[W1115 01:02:03.1 reducer.cpp:1400] Warning: "
    "find_unused_parameters=True was specified, but did not find any unused parameters in the forward pass.",
    "Saving model checkpoint to out/checkpoint-10",
    "Deleting older checkpoint [out/checkpoint-5] due to args.save_total_limit",
    "Loading checkpoint shards: 100%|██████████| 4/4 [00:00<00:00, 10.11it/s]",
    'INFO: 127.0.0.1:41234 - "POST /update_named_param/ HTTP/1.1" 200 OK',
    "weights updated: version 3, 291 tensors, 0 missing, 0 failed",
    "refit finished in 1.2 s (291/291 tensors)",
    "timing/refit 0.42s, timing/update 3.1s, error rate 0.0",
    "errors: 0, retries: 0, dropped: 0",
    "Token indices sequence length is longer than the specified maximum sequence length for this model (612 > 512).",
    "UserWarning: The given NumPy array is not writable, and PyTorch does not support non-writable tensors.",
    "2026-11-15 01:02:03,123 INFO reward_manager: mean reward 0.31, failed to parse 3 of 64 answers",
    'HTTP Request: GET https://huggingface.co/api/models "HTTP/1.1 200 OK"',
    "Retrying in 1s [Retry 1/5].",
    "huggingface_hub.utils: Connection error, and we cannot find the requested files in the disk cache (telemetry)",
    "DEBUG checkpoint: state_dict has 291 keys",
    "grad_norm clipped from 3.1 to 1.0",
    "KL target 6.0, coefficient unchanged",
    "EMA of loss: 0.031",
    "│ GPU 0: 43% util, 0 MiB free errors none │",
    "Epoch 1: 45%|████▌     | 9/20 [00:10<00:12,  1.02s/it, loss=0.03, reward=0.4]",
    "\rGenerating:  50%|█████     | 4/8 [00:01<00:01]",
    "[#####-----] 50% step 4/8 eta 0:12",
    "Processed prompts: 100%|██████████| 16/16 [00:00<00:00, 20.1it/s, est. speed input: 100 toks/s, output: 300 toks/s]",
    "(raylet) [2026-11-15 01:02:03,123 I 1 1] object_store: 0 bytes spilled",
    "UserWarning: `max_length` is ignored when `padding`=`True`",
    "ray.get of 4 objects took 0.1 s, no failures",
    "Evaluating: accuracy 0.41, 0 errors",
    "swanlab: 📊 step 3 logged",
    "mlflow: logged 12 metrics",
    "tensorboard: flush",
    "optimizer: AdamW, lr 0.001, weight decay 0.0, betas (0.9, 0.999)",
    "advantages: mean 0.0 std 1.0",
    "No errors found in checkpoint out/checkpoint-10",
    "INFO optimizer state saved",
    "WARNING: max_grad_norm is None, gradients will not be clipped",
    "Some weights were offloaded to the CPU",
)


def variants() -> Iterable[tuple[str, str, Change]]:
    """A healthy run, what is special about it, and how."""
    for name in HEALTHY:
        yield name, "words that look like NaN", say(*HARMLESS)
        yield name, "what engines, loggers and bars print", say(*NOISE_OF_SERVICES)
        yield name, "a sample that talks of NaN", say(*SAMPLE)
        yield name, "exit code 0 in words", end("Command exited with status 0", "Exit status: 0", "rc=0")
        yield name, "time and memory at the end", end("Elapsed (wall clock) time: 1:02.3", "Maximum resident set size: 505", "exit code: 0")
    for name, run in (("ppo", "actor"), ("grpo", "actor"), ("sft", "train")):
        yield name, "an answer that talks of NaN", say(*ANSWER)
        yield name, "warm-up from 0", rated(f"{run}/lr", lambda step, _: step - 1)
        yield name, "the last learning rate is 0", rated(f"{run}/lr", lambda step, last: last - step)
    yield "trl", "every second step", every(2)
    yield "trl", "every tenth step", every(10)
    yield "trl", "every fifth step and the first", every(5, first=True)
    yield "trl", "every tenth step and the first", every(10, first=True)
    yield "trl", "linear schedule to 0", vary(lambda step, _: {"learning_rate": 1e-3 * (20 - step) / 20})
    yield "trl", "warm-up from 0 and down to 0", vary(lambda step, _: {"learning_rate": 1e-4 * min(step - 1, 20 - step)})
    yield "trl", "one batch for two steps", reused
    yield "trl", "one batch for two steps, console alone", console(reused)
    yield "trl", "evaluation between", evaluated
    yield "trl", "console alone, evaluation between", console(evaluated)
    yield "trl", "console alone", console(lambda run: run)
    yield "trl", "console alone, every second step", console(every(2))
    yield "trl", "resumed, the files hold all", resumed(11, "")
    yield "trl", "resumed, console alone", console(resumed(11, ""))
    yield "trl", "KL that grows from 0", vary(with_kl)
    yield "trl", "KL 0", vary(lambda *_: {"kl": 0.0})
    yield "trl", "loss 0 at many steps", vary(lambda step, _: {"loss": 0.0 if step % 2 else 3.7e-9})
    yield "trl", "loss 0 at every step, by equal lengths", vary(lambda *_: {"loss": 0.0})
    yield "trl", "one step without a gradient", put(0.0, "grad_norm", when=at(9))
    yield "trl", "noisy gradients", vary(lambda step, _: {"grad_norm": NOISY[step]})
    yield "trl", "a spike of the gradient", vary(lambda step, _: {"grad_norm": SPIKED[step]})
    yield "trl", "small gradients", vary(lambda step, row: {"grad_norm": row["grad_norm"] * 1e-5})
    yield (
        "trl",
        "rewards saturate at the end",
        vary(
            lambda step, _: (
                {"reward": 1.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0, "loss": 0.0} if step > 13 else {}
            )
        ),
    )
    yield (
        "trl",
        "some steps without spread",
        vary(lambda step, _: {"reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0, "loss": 0.0} if step % 3 == 0 else {}),
    )
    yield "trl", "negative rewards", vary(lambda step, row: {"reward": row["reward"] - 5})
    yield "trl", "large rewards", vary(lambda step, row: {"reward": row["reward"] * 400, "reward_std": row["reward_std"] * 400})
    yield "trl", "no entropy logged", drop("entropy", when=lambda _: True)
    yield "trl", "exit code 124 after the end", end("rc=124")
    for name in ("ppo", "grpo"):
        yield name, "console alone", console(lambda run: run)
        yield name, "KL loss from 0", vary(lambda step, _: {"actor/kl_loss": 0.004 * (step - 1)})
        yield name, "no KL", drop("actor/kl_loss", "actor/kl_coef", "actor/ppo_kl", when=lambda _: True)
        yield name, "exit code 124 after the end", end("rc=124")
    yield (
        "ppo",
        "a constant reward, and a critic",
        put(0.0, *(f"critic/{n}/{e}" for n in ("score", "rewards") for e in ("mean", "max", "min"))),
    )
    yield "grpo", "resumed", resumed(11, "Setting global step to 10")
    yield (
        "grpo",
        "no spread at some steps",
        vary(
            lambda step, _: (
                {
                    **{f"critic/advantages/{end}": 0.0 for end in ("max", "min", "mean")},
                    **{"actor/grad_norm": 0.0, "actor/pg_loss": 0.0, "actor/loss": 0.0},
                }
                if step > 15
                else {}
            )
        ),
    )
    yield "grpo", "noisy gradients", vary(lambda step, _: {"actor/grad_norm": NOISY[step]})
    yield "sft", "console alone", console(lambda run: run)
    yield "sft", "loss falls to near 0", vary(lambda step, _: {"train/loss": 6.9 / 10**step})
    yield "sft", "loss of a large vocabulary", vary(lambda step, _: {"train/loss": 12.6 - step / 10})
    yield "nemo", "small losses", vary(lambda step, row: {"train/loss": row["train/loss"] / 1e3})
    yield "nemo", "error near its limits", put(1.0004, "train/token_mult_prob_error", when=at(3))
    yield "nemo", "warm-up", vary(lambda step, row: {"train/lr": row["train/lr"] * (step - 1) / 6})


CASES = list(variants())


@pytest.mark.parametrize(("name", "change"), [pytest.param(run, change, id=f"{run}: {what}") for run, what, change in CASES])
def test_a_healthy_run_passes(name: str, change: Change, tmp_path: Path) -> None:
    found = change(healthy(name)).judge(tmp_path)
    assert (found.verdict, [check.name for check in found.checks if not check.passed]) == (Verdict.PASS, []), found.reason


@pytest.mark.parametrize("change", [say(*HARMLESS), say(*SAMPLE), rows_from(lambda rows: rows[:]), both()], ids=range(4))
@pytest.mark.parametrize("known", [True, False])
def test_a_healthy_script_passes(change: Change, known: bool, tmp_path: Path) -> None:
    assert script(change, tmp_path, known=known) is Verdict.PASS
