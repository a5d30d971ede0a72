"""The shadow of a verl run: assembles its record and recomputes it in a process that imports nothing of the change.

    python -m seatrial.loops.verl.drive.shadow --shadow-out FILE [options of train.py] -- [Hydra overrides]

It gets the same words as the trainer, so that what was configured is known without the trainer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seatrial.loops.verl.drive import assemble, configured, layout, reward, train
from seatrial.probes.prompts import prompts
from seatrial.shadow.result import write_findings
from seatrial.shadow.settings import Settings

VERSION = "0.9.1"
"""The verl whose metrics are known."""


def recompute(arguments: Any, words: list[str]) -> dict[str, Any]:
    """The findings on one run, as JSON."""
    import torch
    import transformers
    from transformers import AutoTokenizer

    from seatrial.loops.verl.drive.recompute import RoundShadow
    from seatrial.shadow.settings import World

    torch.set_num_threads(1)
    path = train.model_path(arguments)
    tokenizer = AutoTokenizer.from_pretrained(path)
    settings = configured.settings(words)
    asked = prompts(arguments.prompts + arguments.validation, train.SEED)[: arguments.prompts]
    world = World(
        prompts=[chat(tokenizer, text) for text in asked],
        rewards={assemble.REWARD: lambda completions, _: [reward.even_share(text) for text in _texts(tokenizer, completions)]},
        model=path,
        eos=(tokenizer.eos_token_id,),
        pad=tokenizer.pad_token_id,
        loop="verl",
        versions={"verl": VERSION},
        layout=_layout(path, words),
    )
    run: Path = arguments.out
    assemble.assemble(run, settings.rows(), tokenizer, world.prompts)
    shadow = RoundShadow(run, settings, world, lambda text: print(f"seatrial: shadow: {text}", flush=True))
    made = shadow.run().to_json()
    made["knobs"] = knobs(words, made, shadow, settings)
    made["imports"] = {module.__name__: str(module.__file__) for module in (torch, transformers)}
    return made


def chat(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a dataset row's prompt, by the model's own template."""
    said = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
    return list(tokenizer(said, add_special_tokens=False)["input_ids"])


def _texts(tokenizer: Any, completions: Sequence[Sequence[int]]) -> list[str]:
    return [tokenizer.decode(list(ids), skip_special_tokens=True) for ids in completions]


def _layout(path: Path, words: Sequence[str]) -> Any:
    """How Megatron's fused tensors belong to the release's; None where the engine has the release's own."""
    if configured.strategy(configured.given(words)) != configured.MEGATRON:
        return None
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def released(named: Mapping[str, Any]) -> Mapping[str, Any] | None:
        made = layout.exported(named, config.num_key_value_heads, head)
        if made and "lm_head.weight" in made and made["lm_head.weight"].shape[0] == 1:
            made["score.weight"] = made.pop("lm_head.weight")  # a critic's
        return made

    return released


def knobs(words: list[str], made: dict[str, Any], shadow: Any, settings: Settings) -> list[dict[str, Any]]:
    """Each knob: configured, and whether this run proved it."""
    values = configured.knob_values(words)
    estimator = "gae" if settings.estimator == "gae" else "grpo"
    rows = []
    for name, knob in configured.knobs(words).items():
        status = knob.status(values[name], made, shadow.exercised, knob.only in ("", estimator))
        rows.append({"knob": name, "stage": knob.stage, "configured": values[name], "in_force": None, "status": status})
    return rows


def main() -> None:
    """Recompute one run and write what was found; a defect of ours is written, too, and is never the change's."""
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = train.parser()
    parser.add_argument("--shadow-out", type=Path, required=True)
    arguments = parser.parse_args(words[:split])
    write_findings(arguments.shadow_out, lambda: recompute(arguments, words[split + 1 :]))
    print("seatrial: shadow complete", flush=True)


if __name__ == "__main__":
    main()
