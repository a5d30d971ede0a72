"""One short real GRPO run for the samples below `made/`; see README.md for the calls. Runs in the loop's own environment."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from seatrial.instruments.trl import models_on_disk, tasks


class At(TrainerCallback):  # type: ignore[misc]
    """After a step, sends this process a signal, or asks the trainer to stop."""

    def __init__(self, step: int, what: str) -> None:
        self.step, self.what = step, what

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self.step:
            return
        if self.what == "STOP":
            control.should_training_stop = True
        else:
            os.kill(os.getpid(), getattr(signal, self.what))


def reward(kind: str | None) -> Any:
    """The usual reward, or one that is broken in the named way."""
    calls = 0

    def even_share(completion_ids: Any, **kwargs: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if kind == "raises" and calls == 3 and int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
            raise RuntimeError("answer checker is not reachable")
        if kind == "nan" and calls >= 3:
            return [float("nan")] * len(completion_ids)
        if kind == "constant":
            return [1.0] * len(completion_ids)
        return tasks.even_share(completion_ids, **kwargs)

    return even_share


def main() -> None:
    """Parse, build, train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--reward", choices=("raises", "nan", "constant"))
    parser.add_argument("--at", metavar="STEP:SIGNAL", help="or STEP:STOP")
    parser.add_argument("--crash-after", action="store_true", help="raise once training is done")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--column", default="prompt")
    ours, words = parser.parse_known_args()
    model = models_on_disk.ensure_model("dense", ours.out.parent / "model")
    common = ["--per_device_train_batch_size", "16", "--num_generations", "8", "--max_completion_length", "8", "--learning_rate", "1e-3"]
    common += ["--report_to", "none", "--bf16", "false", "--gradient_checkpointing", "false", "--save_strategy", "no"]
    (settings,) = HfArgumentParser((GRPOConfig,)).parse_args_into_dataclasses(["--output_dir", str(ours.out), *common, *words])
    extra: dict[str, Any] = {"eval_dataset": tasks.text_dataset(8, 7)} if ours.evaluate else {}
    if ours.lora:
        from peft import LoraConfig

        extra["peft_config"] = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    data = tasks.text_dataset(64, 1)
    if ours.column != "prompt":
        data = data.rename_column("prompt", ours.column)
    trainer = GRPOTrainer(model=str(model), reward_funcs=reward(ours.reward), args=settings, train_dataset=data, **extra)
    if ours.at:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
        step, _, name = ours.at.partition(":")
        trainer.add_callback(At(int(step), name))
    trainer.train(resume_from_checkpoint=True if ours.resume else None)
    if ours.crash_after:
        raise RuntimeError("export of the final model failed")
    trainer.save_state()


if __name__ == "__main__":
    main()
