"""What a run needs and nothing is downloaded for: a tiny model with its tokenizer, and prompts as parquet files.

The same name gives the same bits on every machine with the same libraries: weights come from a fixed seed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}" + START + "{{ m.role }}\n{{ m.content }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
)
SEED = 20261115
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def tokenizer() -> Any:
    """Qwen2's own tokenizer with one token per printable character, newline and ChatML mark: verl asks for both by the model's family."""
    from transformers import Qwen2Tokenizer

    # Space and newline are written as byte-level tokenizers write them.
    words = [PAD, START, END, "\u0120", "\u010a", *(chr(code) for code in range(33, 127))]
    made = Qwen2Tokenizer(vocab={word: place for place, word in enumerate(words)}, merges=[], eos_token=END, padding_side="left")
    made.add_special_tokens({"additional_special_tokens": [START]})
    made.chat_template = TEMPLATE
    return made


def model(directory: Path, tied: bool = True) -> Path:
    """A two-layer Qwen2 in `directory`, unless it is there; safe when two processes do it at once."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if (directory / "config.json").is_file():
        return directory
    words = tokenizer()
    torch.manual_seed(SEED)
    special = {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id, "bos_token_id": None}
    made = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(words), max_position_embeddings=256, tie_word_embeddings=tied, **SIZES, **special))
    for value in made.parameters():
        if value.dim() == 1:  # biases of 0 and norms of 1 would hide that one was never loaded
            value.data.add_(0.1 * torch.randn_like(value))
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        made.save_pretrained(temporary)
        words.save_pretrained(temporary)
        os.rename(temporary, directory)  # noqa: PTH104 - fails when another process was first, which is fine
    except OSError:
        if not (directory / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


def data(path: Path, texts: list[str], split: str) -> Path:
    """The prompts in the form that verl's dataset reads."""
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
