"""Logs as verl and Ray write them, for the tests of the judge."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from seatrial.loops import get_loop
from seatrial.trial.files_judge import FileVerdict, judge_files

VERL = get_loop("verl")
TESTS = Path(__file__).parents[1]
DATA = TESTS / "data" / "verl"
TRIAGE = TESTS / "data" / "triage"
SITE = "/workspace/venv/lib/python3.11/site-packages"
RUNNER, WORKER = "\x1b[36m(TaskRunnerV1 pid=1958)\x1b[0m ", "\x1b[36m(WorkerDict pid=4628, ip=192.0.2.10)\x1b[0m "
RECORD = (
    "actor/pg_loss:0.1 - actor/grad_norm:{norm} - actor/lr:0.001 - critic/score/max:{high} - critic/score/min:0.0"
    " - critic/advantages/max:np.float64(1.5) - critic/advantages/min:-1.5 - training/global_step:{step}"
)
MILESTONES = {
    "configuration checked": "[validate_config] All configuration checks passed successfully!",
    "cluster started": "2026-11-15 01:43:53,414\tINFO worker.py:2038 -- Started a local Ray instance.",
    "data read": f"{RUNNER}INFO:2026-11-15 01:47:22,086:train and validate dataloader initialized, train dataset size: 64",
    "engines built": f"{RUNNER}INFO:2026-11-15 01:48:17,878:actor and ref model engine initialized",
    "ready to train": f"{RUNNER}INFO:2026-11-15 01:49:46,798:all initialize finished, ready to fit",
    "training started": f"{RUNNER}Training Progress:   0%|          | 0/2 [00:00<?, ?it/s]",
    "first step": f"{RUNNER}step:1 - {RECORD.format(norm=1.13, high=0.5, step=1)}",
}
DONE = f"{RUNNER}Training Progress: 100%|██████████| 2/2 [00:52<00:00, 26.16s/it]"
SECOND = f"{RUNNER}step:2 - {RECORD.format(norm=1.04, high=1.0, step=2)}"


def judge(log: Path, *metrics: Path, steps: int | None = None) -> FileVerdict:
    return judge_files(VERL, log, metrics, None, steps)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def begun(after: str) -> list[str]:
    """The lines of a run up to and including a milestone."""
    names = list(MILESTONES)
    return [MILESTONES[name] for name in names[: names.index(after) + 1]] if after else []


def line(path: Path, number: int | None) -> str:
    assert number is not None
    return path.read_bytes().split(b"\n")[number - 1].decode()


def frames(calls: list[str]) -> list[str]:
    made = []
    for call in calls:
        file, _, function = call.rpartition(":")
        made += [f'  File "{SITE}/{file}", line 93, in {function}', "    return inner(*args, **kwargs)"]
    return made


def failed(entry: dict[str, Any]) -> list[str]:
    """What the driver prints: Ray's wrapped errors, the innermost last."""
    raised = entry["raised"].split("\n")
    outer = ["Error executing job with overrides: ['trainer.nnodes=1']", "Traceback (most recent call last):"]
    outer += frames(["verl/trainer/main_ppo.py:main"])
    ending = ["", "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.", "rc=1"]
    if not entry["call"]:
        return [*outer, *frames(entry["frames"]), *raised, *ending]
    cause = re.split(r"[:\s]", raised[0])[0].rpartition(".")[2]
    wrapped = f"ray.exceptions.RayTaskError({cause}): \x1b[36mray::{{}}()\x1b[39m (pid=17102, ip=192.0.2.10, actor_id=21adfb)"
    runner = [wrapped.format("TaskRunnerV1.run"), *frames(["verl/trainer/main_ppo.py:run", "verl/single_controller/ray/base.py:__call__"])]
    own = [wrapped.format(entry["call"]), *frames(["verl/single_controller/ray/base.py:func", *entry["frames"]])]
    return [*outer, *frames(["ray/_private/worker.py:get_objects"]), *runner, *own, *raised, *ending]


def healthy() -> list[str]:
    return [*begun("first step"), SECOND, f"{RUNNER}'Final validation metrics: None'", DONE, "rc=0"]
