"""Logs of healthy runs of each loop, into which a test puts its lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from seatrial.loops import get_loop
from seatrial.trial.files_judge import FileVerdict, judge_files
from tests.loops.nemo_logs import grpo_log

SITE = "/workspace/venv/lib/python3.11/site-packages"
RUNNER = "\x1b[36m(TaskRunnerV1 pid=1958)\x1b[0m "
DONE = (
    "{'train_runtime': '29.91', 'train_samples_per_second': '42.8', 'train_steps_per_second': '0.669', 'train_loss': '-0.01', 'epoch': '1'}"
)
HEADER = "Traceback (most recent call last):"


def traceback(text: str, *calls: str, prefix: str = "") -> list[str]:
    """A traceback through `file.py:function` calls."""
    frames = [
        part for call in calls for part in (f'  File "/work/{call.partition(":")[0]}", line 7, in {call.partition(":")[2]}', "    call()")
    ]
    return [f"{prefix}{line}" for line in (HEADER, *frames, text)]


def trl_row(step: int) -> str:
    return (
        f"{{'loss': '-0.0{step % 9 + 1}', 'grad_norm': '1.{step:02}', 'learning_rate': '0.001', 'num_tokens': '{step * 700}', "
        f"'reward': '0.{step:02}', 'reward_std': '0.2', 'frac_reward_zero_std': '0', 'kl': '0.001', 'epoch': '{step / 20:.2f}'}}"
    )


def trl_log(steps: int = 20, *, at: Mapping[int, Sequence[str]] | None = None, end: Sequence[str] = (), after: Sequence[str] = ()) -> str:
    """A run of TRL; `at` puts lines before the row of a step, `end` before the closing row, `after` behind it."""
    lines = ["Loading weights: 100%|██████████| 26/26 [00:00<00:00, 1000.04it/s]"]
    for step in range(1, steps + 1):
        lines += [*(at or {}).get(step, ()), f"STEP {step} 1.5", trl_row(step)]
    return "\n".join([*lines, *end, DONE, *after]) + "\n"


def verl_log(steps: int = 4, *, at: Mapping[int, Sequence[str]] | None = None, end: Sequence[str] = (), after: Sequence[str] = ()) -> str:
    """A run of verl."""
    lines = [
        "[validate_config] All configuration checks passed successfully!",
        "2026-11-15 01:43:53,414\tINFO worker.py:2038 -- Started a local Ray instance.",
        f"{RUNNER}INFO:2026-11-15 01:47:22,086:train and validate dataloader initialized, train dataset size: 64",
        f"{RUNNER}INFO:2026-11-15 01:48:17,878:actor and ref model engine initialized",
        f"{RUNNER}INFO:2026-11-15 01:49:46,798:all initialize finished, ready to fit",
        f"{RUNNER}Training Progress:   0%|          | 0/{steps} [00:00<?, ?it/s]",
    ]
    for step in range(1, steps + 1):
        record = (
            f"actor/pg_loss:0.{step} - actor/grad_norm:1.{step} - actor/lr:0.001 - critic/score/max:1.0 - critic/score/min:0.0"
            f" - critic/advantages/max:1.5 - critic/advantages/min:-1.5 - response_length/mean:12.5 - training/global_step:{step}"
        )
        lines += [*(at or {}).get(step, ()), f"{RUNNER}step:{step} - {record}"]
    return "\n".join([*lines, *end, f"{RUNNER}Training Progress: 100%|██████████| {steps}/{steps} [00:52<00:00, 26.16s/it]", *after]) + "\n"


def nemo_log(steps: int = 4, *, at: Mapping[int, Sequence[str]] | None = None, end: Sequence[str] = (), after: Sequence[str] = ()) -> str:
    """A run of NeMo-RL."""
    text = grpo_log(steps, steps)
    for step, lines in (at or {}).items():
        mark = f"train_data_step{step}.jsonl\n"
        text = text.replace(mark, mark + "\n".join([*lines, ""]))
    closing = "Max number of steps has been reached"
    text = text.replace(closing, "\n".join([*end, closing])) if end else text
    return text + "\n".join([*after, ""] if after else [])


LOGS = {"trl": trl_log, "verl": verl_log, "nemo-rl": nemo_log}


def judged(loop: str, text: str, tmp_path: Path, *metrics: Path, steps: int | None = None) -> FileVerdict:
    """The verdict on a log."""
    path = tmp_path / "run.log"
    path.write_text(text)
    return judge_files(get_loop(loop), path, metrics, None, steps)
