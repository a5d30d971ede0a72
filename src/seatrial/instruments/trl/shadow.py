"""The shadow of a TRL run: recomputes its record in a process that imports nothing of the change.

    python -m seatrial.instruments.trl.shadow --record-dir RUN [options of train.py] -- [TRL arguments]

It gets the same words as the trainer, so that what was configured is known without the trainer.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from seatrial.instruments.shadow.interface import Lora, write_findings
from seatrial.instruments.trl import extra_runs, tasks, train, trl_settings

OWN = ("seeded", "generator", "vllm")  # rollouts that a sampler of ours draws: from the model's own probabilities, whatever is configured


def rewards_of(names: Sequence[str], tokenizer: Any) -> dict[str, Callable[[Sequence[Sequence[int]], Sequence[int]], Any]]:
    def reward(name: str, completions: Sequence[Sequence[int]], rows: Sequence[int]) -> Any:
        texts = tokenizer.batch_decode([list(ids) for ids in completions], skip_special_tokens=True)
        bright = [tasks.is_bright(row) for row in rows]
        return tasks.REWARDS[name](completion_ids=completions, completions=texts, row=rows, bright=bright)

    return {name: functools.partial(reward, name) for name in names}


def prompts_of(arguments: Any, seed: int, tokenizer: Any, model: Path) -> tuple[list[list[int]], Any]:
    """Token ids of each dataset row, and its pixel values where prompts have pictures."""
    if not arguments.images:
        texts = tasks.text_prompts(arguments.prompts, seed)
        if arguments.chat:
            texts = [tokenizer.apply_chat_template(tasks.message(text), tokenize=False, add_generation_prompt=True) for text in texts]
        return tokenizer(texts)["input_ids"], None
    import torch
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(model)
    made = []
    for text, picture in tasks.image_prompts(arguments.prompts, seed):
        message = {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]}
        how = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
        made.append(processor.apply_chat_template([message], **how))
    return [each["input_ids"][0].tolist() for each in made], torch.cat([each["pixel_values"] for each in made])


def lora_of(arguments: Any) -> Lora | None:
    """The adapters that the driver's options ask for."""
    if not arguments.lora:
        return None
    targets: Any = arguments.lora_targets
    targets = targets if targets == "all-linear" else tuple(targets.split(","))
    return Lora(arguments.lora_rank, arguments.lora_alpha, arguments.rslora, arguments.dora, arguments.lora_dropout, targets=targets)


def recompute(arguments: Any, record: Path, words: list[str]) -> dict[str, Any]:
    import torch
    import transformers
    from transformers import AutoConfig, AutoTokenizer

    from seatrial.instruments.shadow.interface import World
    from seatrial.instruments.shadow.recompute import Shadow

    torch.set_num_threads(1)
    names = tasks.reward_names(arguments)
    path = Path(train.model_path(arguments))
    tokenizer = AutoTokenizer.from_pretrained(path)
    lora = lora_of(arguments)
    own = "none" if arguments.rollouts in OWN else ""
    settings = trl_settings.settings(words, arguments.world, lora, len(names), own)
    if arguments.images:
        settings = dataclasses.replace(settings, suppressed=(AutoConfig.from_pretrained(path).image_token_id,))
    texts = tasks.text_prompts(arguments.prompts, settings.seed)
    prompts, pictures = prompts_of(arguments, settings.seed, tokenizer, path)
    world = World(
        prompts=prompts,
        pictures=pictures,
        rewards=rewards_of(names, tokenizer),
        model=path,
        eos=(tokenizer.eos_token_id,),
        pad=tokenizer.pad_token_id,
        loop="trl",
        versions={name: importlib.metadata.version(name) for name in ("trl", "transformers", "peft")},
        texts=texts,
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
    )
    shadow = Shadow(record, settings, world, lambda text: print(f"seatrial: shadow: {text}", flush=True))
    found = shadow.run()
    made = found.to_json()
    made["knobs"] = knobs(words, made, shadow)
    unknown = trl_settings.unknown(words)
    if made["divergence"] is not None and unknown:
        found_at = "step {step}, {stage}: {what}: expected {expected}, found {found}".format(**made["divergence"])
        raise RuntimeError(f"--{', --'.join(unknown)}: no formula here, and the run is not the one without: {found_at}")
    made["imports"] = {module.__name__: str(module.__file__) for module in (torch, transformers)}
    return made


def knobs(words: list[str], made: dict[str, Any], shadow: Any) -> list[dict[str, Any]]:
    """Each knob: configured, in force, and whether this run proved it."""
    values, rows = trl_settings.knob_values(words), list[dict[str, Any]]()

    def add(name: str, stage: str, configured: Any, force: Any, status: str) -> None:
        rows.append({"knob": name, "stage": stage, "configured": configured, "in_force": force, "status": status})

    for name, knob in trl_settings.KNOBS.items():
        read = knob.only in ("", values["loss_type"]) and not (knob.stage == "sampling" and shadow.s.processors == "none")
        status = knob.status(values[name], made, shadow.exercised, read)
        if name.startswith("vllm_") and not values["use_vllm"]:
            status = "beside the step"
        add(name, knob.stage, values[name], shadow.arguments.get(name), status)
    stages = {entry["stage"]: entry for entry in made["stages"]}
    adapters = {} if shadow.s.lora is None else dataclasses.asdict(shadow.s.lora)
    status = "proven" if stages["weights"]["compared"] and not stages["weights"]["unproven"] else "not proven"
    for name, value in adapters.items():
        add(f"lora_{name}", "weights", value, None, status)
    unproven, named = trl_settings.unknown(words), trl_settings.given(words)
    for name, force in sorted(shadow.arguments.items()):
        if name not in trl_settings.KNOBS:  # the rest of what the trainer knows
            add(name, "", named.get(name), force, "not proven" if name in unproven else "beside the step")
    return rows


def main() -> None:
    """Recompute the records of a run; a defect of ours is written, too, and is never the change's."""
    own, words = train.split_words(sys.argv[1:])
    parser = train.parser()
    parser.add_argument("--record-dir", type=Path, required=True)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--seeds", type=int, help="of the learning level; not used here")
    arguments = parser.parse_args(own)
    write(arguments, arguments.record_dir, words)
    for name in extra_runs.VARIANTS if arguments.variants else ():
        print(f"seatrial: shadow: variant {name}", flush=True)
        place = arguments.record_dir / "variants" / name
        write(extra_runs.arguments_of(name, arguments), place, extra_runs.words_of(name, words))
    print("seatrial: shadow complete", flush=True)


def write(arguments: Any, record: Path, words: list[str]) -> None:
    write_findings(record / "shadow.json", lambda: recompute(arguments, record, words))


if __name__ == "__main__":
    main()
