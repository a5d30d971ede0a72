"""One GRPO run with real TRL: build, train, and leave metrics and facts behind.

    python -m seatrial.instruments.trl.train --out DIR --model MODEL [options] -- [TRL arguments]

Everything after `--` is parsed by TRL itself into GRPOConfig. The last occurrence of an argument wins, so that
what a user appends overrides what the level sets.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from seatrial.instruments.witness import ImportProofs

TRAINER = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")

SEPARATE = ("generator", "vllm", "synced")  # rollouts that come from another process
MADE = {"tiny-dense": "dense", "tiny-untied": "untied", "tiny-moe": "moe", "tiny-vlm": "vlm"}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--out", type=Path, required=True, help="directory of this run: metrics.jsonl, facts.jsonl, checkpoints")
    made.add_argument("--imports", type=Path, required=True, help="directory that import proofs are written to")
    made.add_argument("--model", required=True, help=f"a local model directory, or one of {', '.join(MADE)}")
    made.add_argument("--models", type=Path, required=True, help="where locally made models are kept")
    made.add_argument("--prompts", type=int, default=64)
    made.add_argument("--images", action="store_true", help="the image task")
    made.add_argument("--chat", action="store_true", help="prompts are conversations")
    made.add_argument("--rewards", default="even_share", help="reward functions, by name, with commas between")
    made.add_argument("--lora", action="store_true")
    made.add_argument("--lora-rank", type=int, default=8)
    made.add_argument("--lora-alpha", type=float, default=16)
    made.add_argument("--lora-targets", default="all-linear", help="all-linear, or names of layers with commas between")
    made.add_argument("--lora-dropout", type=float, default=0.0)
    made.add_argument("--rslora", action="store_true")
    made.add_argument("--dora", action="store_true")
    made.add_argument("--variants", action="store_true", help="train the variants, too (see extra_runs.py)")
    made.add_argument("--record", action="store_true", help="write the batch record of every step")
    made.add_argument("--rollouts", choices=("trainer", "seeded", "generator", "vllm", "synced"), default="trainer")
    made.add_argument("--vllm-python", help="interpreter of the vLLM server")
    made.add_argument("--resume-from", type=Path)
    made.add_argument("--under-test", action="append", default=[], metavar="PACKAGE=ROOT")
    made.add_argument("--fault")
    return made


class _Absent:
    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError("the trainer's process has no vLLM of its own: generation runs in the server")


def _no_transport(*_: object, **__: object) -> None:
    raise RuntimeError("no transport was put in place by vllm_rollouts")


STAND_IN: dict[str, dict[str, Any]] = {
    # The newest version that TRL 1.16 says it supports.
    "vllm": {"__version__": "0.31.0", **dict.fromkeys(("LLM", "RequestOutput", "SamplingParams"), _Absent)},
    "vllm.sampling_params": {"StructuredOutputsParams": _Absent},
    "vllm.utils": {},
    "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1"},
    "vllm.distributed": {},
    "vllm.distributed.weight_transfer": {},
    "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": _no_transport},
    "vllm.distributed.weight_transfer.packed_tensor": {"packed_nccl_broadcast_producer": _no_transport},
}
"""The names that TRL imports of vLLM in a trainer that only talks to a server: the real vLLM, in its own process and environment."""


def allow_vllm_import() -> None:
    """Before TRL is imported: it takes up its client of vLLM only where `vllm` can be imported. An installed one goes first."""
    if importlib.util.find_spec("vllm") is not None:
        return
    for name, held in STAND_IN.items():
        module = importlib.util.module_from_spec(ModuleSpec(name, None, is_package=True))
        vars(module).update(held)
        sys.modules[name] = module


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """The driver's own words, and TRL's, which stand behind `--`."""
    split = words.index("--") if "--" in words else len(words)
    return words[:split], words[split + 1 :]


def process_name() -> str:
    """`driver`, or the rank for the others."""
    rank = int(os.environ.get("RANK", "0"))
    return "driver" if rank == 0 else f"rank{rank}"


def model_path(arguments: argparse.Namespace) -> str:
    """The model directory, made first if it is one of ours."""
    if arguments.model not in MADE:
        return str(arguments.model)
    made: Path = arguments.models / arguments.model
    if not (made / "config.json").is_file():
        _make(MADE[arguments.model], made, [item.partition("=")[2] for item in arguments.under_test])
    return str(made)


def _make(kind: str, directory: Path, roots: list[str]) -> None:
    """Make a model in a process without the change: code that is wrong when it saves and when it loads would agree with itself.

    What was made is kept for later runs of the same interpreter, but where others maintain a read-only cache.
    """
    from seatrial.instruments.trl import models_on_disk

    kept = models_on_disk.model_cache(sys.executable) / kind
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        kept = directory
    if not (kept / "config.json").is_file():
        path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        path = [entry for entry in path if not any(Path(entry).resolve() == Path(root).resolve() for root in roots)]
        words = [sys.executable, "-m", "seatrial.instruments.trl.models_on_disk", kind, str(kept)]
        done = subprocess.run(words, env={**os.environ, "PYTHONPATH": os.pathsep.join(path)}, capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            sys.exit(f"the model {kept.name} could not be made: {done.stderr[-2000:]}")
    if kept != directory:
        models_on_disk.copy_model(kept, directory)


def config(out: Path, extra: list[str]) -> Any:
    """TRL's own configuration from the command line; TRL reports unknown arguments itself."""
    from transformers import HfArgumentParser
    from trl import GRPOConfig

    # Without abbreviations a name is what the preflight read, and a typo is an error.
    parsed = HfArgumentParser((GRPOConfig,), allow_abbrev=False)
    (made,) = parsed.parse_args_into_dataclasses(["--output_dir", str(out), *extra])
    # Trainer stores its arguments in every checkpoint; a token must not be among them.
    made.hub_token, made.push_to_hub = None, False
    return made


def rollout_function(arguments: argparse.Namespace, settings: Any, model: str) -> Any:
    """How completions are made: by the trainer itself, by the seeded sampler, or by a separate process, which is started here."""
    if arguments.rollouts == "trainer":
        return None
    if arguments.rollouts in ("vllm", "synced"):
        from seatrial.instruments.trl.vllm_rollouts import Engine, ServedRollouts, SyncedGeneration

        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that the server is ended, too
        if arguments.rollouts == "synced":
            given = (arguments.out, settings, arguments.imports, arguments.under_test, arguments.fault)
            return SyncedGeneration(arguments.vllm_python, model, *given)
        engine = Engine(arguments.vllm_python, model, arguments.out, settings.max_completion_length, arguments.fault)
        return ServedRollouts(engine, arguments.imports, arguments.under_test, settings.seed, arguments.fault)
    from seatrial.instruments.engines.transformers_generator import Remote
    from seatrial.instruments.trl.seeded_rollouts import RefittedRollouts, seeded_rollouts

    if arguments.rollouts == "seeded":
        return seeded_rollouts(settings.seed)
    passed = ["--model", model, "--device", str(settings.device), "--imports", str(arguments.imports)]
    passed += ["--facts", str(arguments.out / "facts.jsonl")]
    passed += [word for item in arguments.under_test for word in ("--under-test", item)]
    passed += ["--fault", arguments.fault] if arguments.fault else []
    return RefittedRollouts(Remote(passed, "seatrial.instruments.trl.seeded_rollouts"), arguments.out, settings.seed, arguments.fault)


def recorder(arguments: argparse.Namespace, place: Path, steps: int | None = None) -> Any:
    """The recorder of this process, if the run is recorded; other ranks have a directory of their own."""
    from seatrial.instruments.trl.recorders import StepRecorder

    name = process_name()
    return StepRecorder(place if name == "driver" else place / name, steps) if arguments.record else None


def adapter_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the driver's options ask of adapters, in PEFT's words, but for the layers that get one."""
    made = {"r": arguments.lora_rank, "lora_alpha": arguments.lora_alpha, "lora_dropout": arguments.lora_dropout}
    return {**made, "use_rslora": arguments.rslora, "use_dora": arguments.dora, "task_type": "CAUSAL_LM"}


def build(arguments: argparse.Namespace, settings: Any, model: str, rollouts: Any, recorded: Any = None) -> Any:
    from trl import GRPOTrainer

    from seatrial.instruments.trl import faults, recorders, tasks

    kwargs: dict[str, Any] = {"rollout_func": rollouts} if rollouts and arguments.rollouts != "synced" else {}
    if arguments.lora:
        from peft import LoraConfig

        targets = arguments.lora_targets
        layers = targets if targets == "all-linear" else targets.split(",")
        kwargs["peft_config"] = LoraConfig(target_modules=layers, **adapter_settings(arguments))
    count, seed = arguments.prompts, settings.seed
    data = tasks.image_dataset(count, seed) if arguments.images else tasks.text_dataset(count, seed, arguments.chat)
    functions = [tasks.REWARDS[name] for name in tasks.reward_names(arguments)]
    functions = [faults.break_reward(functions[0], arguments.fault), *functions[1:]]
    rewards = [recorded.reward(function) if recorded else function for function in functions]
    trainer = GRPOTrainer(model=model, reward_funcs=rewards, args=settings, train_dataset=data, **kwargs)
    faults.break_step(trainer, arguments.fault)
    if recorded:
        recorded.attach(trainer)
    faults.break_run(trainer, arguments.fault)
    if arguments.rollouts == "synced":
        rollouts.attach(trainer, recorded)
    saves = int(settings.save_steps) if settings.save_strategy == "steps" else None
    trainer.add_callback(recorders.MetricsWriter(arguments.out / "metrics.jsonl"))
    trainer.add_callback(recorders.FactsWriter(arguments.out / "facts.jsonl", process_name(), saves, arguments.model in MADE))
    return trainer


def main() -> None:
    own, words = split_words(sys.argv[1:])
    arguments = parser().parse_args(own)
    arguments.out.mkdir(parents=True, exist_ok=True)
    imports = ImportProofs(arguments.imports, process_name(), arguments.under_test)
    if arguments.rollouts == "synced":
        allow_vllm_import()
    imports.prove(TRAINER)
    from seatrial.instruments.trl import extra_runs, models_on_disk, recorders, tasks

    settings = config(arguments.out, words)
    recorders.say("building the model")
    model = model_path(arguments)
    rollouts = rollout_function(arguments, settings, model)
    try:
        recorded = recorder(arguments, arguments.out)
        trainer = build(arguments, settings, model, rollouts, recorded=recorded)
        recorders.say("trainer built")
        facts_path = arguments.out / "facts.jsonl"
        models_on_disk.built(trainer.model, facts_path)
        if not arguments.lora:
            models_on_disk.loaded(trainer.accelerator.unwrap_model(trainer.model), Path(model), facts_path)
        if arguments.images:
            tasks.image_control(trainer, facts_path)
        trainer.train(resume_from_checkpoint=str(arguments.resume_from) if arguments.resume_from else None)
        if recorded:
            recorded.end()
        if arguments.rollouts in SEPARATE:
            rollouts.finish()
        if arguments.lora and settings.save_strategy == "steps" and not arguments.resume_from:
            asked = {**adapter_settings(arguments), "base_model_name_or_path": model}
            models_on_disk.saved_adapter(trainer.model, asked, arguments.out / f"checkpoint-{settings.save_steps}", facts_path)
            last = arguments.out / f"checkpoint-{trainer.state.global_step}"
            if not last.is_dir():
                last = arguments.out / "final"
                trainer.save_model(str(last))
            models_on_disk.saved_adapter(trainer.model, asked, last, facts_path, "saved_adapter")
        elif not arguments.lora and trainer.accelerator.num_processes == 1:
            models_on_disk.saved(trainer, Path(model), arguments.model in MADE, arguments.out / "final", facts_path)
        if arguments.variants:
            extra_runs.run_variants(arguments, words, model)
    finally:
        if arguments.rollouts in SEPARATE:
            rollouts.generator.close()
    imports.close(TRAINER)
    recorders.say("run complete")


if __name__ == "__main__":
    main()
