"""One training run with real verl on this CPU: makes model and data, starts verl's own `main_ppo`, cleans up after Ray, writes the gains.

    python -m seatrial.instruments.verl.train --out DIR --model MODEL [options] -- [Hydra overrides]

verl gets everything after `--`; the last override of a key wins, so that what a user appends counts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from seatrial.instruments import facts, provenance
from seatrial.instruments.engines import tiny_models
from seatrial.instruments.facts import prompts

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}" + START + "{{ m.role }}\n{{ m.content }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
)
MODEL_SEED = 20261115
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def make_tokenizer() -> Any:
    """Qwen2's own tokenizer with one token per printable character, newline and ChatML mark: verl asks for both by the model's family."""
    from transformers import Qwen2Tokenizer

    # Space and newline are written as byte-level tokenizers write them.
    words = [PAD, START, END, "\u0120", "\u010a", *(chr(code) for code in range(33, 127))]
    made = Qwen2Tokenizer(vocab={word: place for place, word in enumerate(words)}, merges=[], eos_token=END, padding_side="left")
    made.add_special_tokens({"additional_special_tokens": [START]})
    made.chat_template = TEMPLATE
    return made


def make_model(directory: Path, tied: bool = True) -> Path:
    """A two-layer Qwen2 in `directory`, unless it is there; safe when two processes do it at once."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if (directory / "config.json").is_file():
        return directory
    words = make_tokenizer()
    torch.manual_seed(MODEL_SEED)
    special = {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id, "bos_token_id": None}
    made = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(words), max_position_embeddings=256, tie_word_embeddings=tied, **SIZES, **special))
    for value in made.parameters():
        if value.dim() == 1:  # biases of 0 and norms of 1 would hide that one was never loaded
            value.data.add_(0.1 * torch.randn_like(value))

    def save(place: Path) -> None:
        made.save_pretrained(place)
        words.save_pretrained(place)

    return tiny_models.whole(directory, save)


def write_prompts(path: Path, texts: list[str], split: str) -> Path:
    import pyarrow
    from pyarrow import parquet

    rows = [
        {
            "data_source": split,
            "prompt": [{"role": "user", "content": text}],
            "ability": "even",
            "reward_model": {"style": "rule", "ground_truth": text},
            "extra_info": {"split": split, "index": index},
        }
        for index, text in enumerate(texts)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def by_prompt(directory: Path, last: int) -> dict[str, float]:
    """Gain by prompt; a prompt that was not scored both times is an error."""
    first, final = (_scores(directory / "validation" / f"{step}.jsonl") for step in (0, last))
    if not first or first.keys() != final.keys():
        raise RuntimeError(f"{directory}: {len(first)} prompts were validated before and {len(final)} after, or not the same ones")
    return {prompt: final[prompt] - first[prompt] for prompt in sorted(first)}


def _scores(path: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["input"], []).append(float(row["score"]))
    return {prompt: sum(scores) / len(scores) for prompt, scores in found.items()}


def last_validation(directory: Path) -> int:
    return max(int(path.stem) for path in (directory / "validation").glob("*.jsonl"))


def write_gains(directory: Path, control: Path | None) -> None:
    own = by_prompt(directory, last_validation(directory))
    other = by_prompt(control, last_validation(control)) if control else {}
    if control and own.keys() != other.keys():
        raise RuntimeError(f"{directory} and {control} were validated with different prompts")
    for number, (prompt, gain) in enumerate(own.items(), 1):
        data = {"signal/gain": gain}
        if control:
            data["signal/gain_over_control"] = gain - other[prompt]
        facts.append(directory / "metrics.jsonl", {"step": number, "data": data})


MADE = "tiny-dense"
DATA_SEED = 42
SHORT = "/tmp"
"""Ray puts sockets below its directory, and the path of a socket holds 107 bytes: a run directory is too deep."""
SCRATCH = "str-"
DAY = 24 * 3600


def say(text: str) -> None:
    print(f"seatrial: {text}", flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--out", type=Path, required=True, help="directory of this run: metrics.jsonl, facts.jsonl, checkpoints")
    made.add_argument("--model", required=True, help=f"a local model directory, or {MADE}")
    made.add_argument("--models", type=Path, required=True, help="where locally made models are kept")
    made.add_argument("--untied", action="store_true", help=f"{MADE} with an output layer of its own")
    made.add_argument("--prompts", type=int, default=64)
    made.add_argument("--validation", type=int, default=32, help="validation prompts, none of them in the training data")
    made.add_argument("--resume-from", type=Path, help="a checkpoint of another run")
    made.add_argument("--signal", action="store_true", help="write the gain of each validation prompt when training is done")
    made.add_argument("--control", type=Path, help="directory of the run that the gains are compared with")
    return made


def model_path(arguments: argparse.Namespace) -> Path:
    name = f"{MADE}-untied" if arguments.untied else MADE
    return Path(arguments.models) / name if arguments.model == MADE else Path(arguments.model)


def places(arguments: argparse.Namespace, scratch: str) -> list[str]:
    out: Path = arguments.out
    model = model_path(arguments)
    if arguments.model == MADE:
        make_model(model, not arguments.untied)
    texts = prompts(arguments.prompts + arguments.validation, DATA_SEED)
    here = Path(__file__).parent
    found = {
        "actor_rollout_ref.model.path": model,
        "critic.model.path": model,
        "data.train_files": write_prompts(out / "train.parquet", texts[: arguments.prompts], "train"),
        "data.val_files": write_prompts(out / "validation.parquet", texts[arguments.prompts :], "validation"),
        "reward.custom_reward_function.path": here / "verl_process.py",
        "trainer.v1.sampler.custom_sampler.path": here / "sampler.py",
        "trainer.default_local_dir": out / "checkpoints",
        "trainer.rollout_data_dir": out / "rollouts",
        "trainer.validation_data_dir": out / "validation",
        "hydra.run.dir": out / "hydra",
        "+ray_kwargs.ray_init._temp_dir": scratch,
    }
    if arguments.resume_from:
        found["trainer.resume_from_path"] = arguments.resume_from
    return [f"{key}={quoted(str(value))}" for key, value in found.items()]


def quoted(text: str) -> str:
    """A value for Hydra: a run directory may hold any character. Backslashes count only in front of a quote there."""
    return '"' + re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + ('\\"' if found[2] else ""), text) + '"'


def sweep() -> None:
    """Remove what runs that were killed have left: directories of processes that are gone. Another container may share the directory and
    not the processes, so only old ones are taken."""
    for path in Path(SHORT).glob(f"{SCRATCH}*-*"):
        pid = path.name.split("-")[1]
        try:
            old = time.time() - path.stat().st_mtime > DAY
        except OSError:
            continue  # another run was first
        if old and pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)


def main() -> None:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    arguments = parser().parse_args(words[:split])
    arguments.out.mkdir(parents=True, exist_ok=True)
    sweep()
    scratch = tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-", dir=SHORT)
    # Without a token of its own Ray leaves one in the user's home, and every later cluster there takes it up.
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        say("building the model and the data")
        with provenance.uncollected():
            overrides = places(arguments, scratch)
            from verl.trainer import main_ppo

        facts.append(arguments.out / "facts.jsonl", {"fact": "model", "made": arguments.model == MADE})
        say(f"starting verl; Ray works in {scratch}")
        sys.argv = ["main_ppo", *overrides, *words[split + 1 :]]
        main_ppo.main()
    finally:
        import ray

        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)
    if arguments.signal:
        write_gains(arguments.out, arguments.control)
    say("run complete")


if __name__ == "__main__":
    main()
