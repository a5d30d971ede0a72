"""Tiny models with random weights, made locally and downloaded from nowhere: `python -m seatrial.instruments.engines.tiny_models KIND DIR`.

Runs inside an engine's interpreter. A directory as a checkpoint has it: config, safetensors, tokenizer (one token per printable
character). Layouts are those that refits break on: an untied Llama, a Qwen2 with tied embeddings, a Qwen3 mixture of experts. No
weight is a plain 0 or 1: a norm or bias that was never loaded must not look like one that was.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

KINDS = ("tiny-llama", "tiny-qwen2", "tiny-moe")
SEED = 7
_CHARACTERS = [chr(code) for code in range(32, 127)]
_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


def ensure(kind: str, directory: Path) -> Path:
    if kind not in KINDS:
        raise ValueError(f"no tiny model {kind!r}; known: {', '.join(KINDS)}")
    return whole(directory, lambda place: _make(kind, place))


def whole(directory: Path, make: Callable[[Path], object]) -> Path:
    """What `make` puts into an empty directory, unless it is there; a torn checkpoint is never left behind."""
    if (directory / "config.json").is_file():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        make(temporary)
        temporary.rename(directory)
    except OSError:
        if not (directory / "config.json").is_file():  # else another process was first, which is fine
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


def _make(kind: str, directory: Path) -> None:
    import torch

    words = tokenizer()
    torch.manual_seed(SEED)
    model = _model(kind, len(words), words.pad_token_id, words.eos_token_id)
    for value in model.parameters():
        if value.dim() == 1:
            value.data.add_(0.1 * torch.randn_like(value))
    model.save_pretrained(directory)
    words.save_pretrained(directory)


def tokenizer(tokens: Sequence[str] = ("<pad>", "<eos>", "<unk>", *_CHARACTERS), **more: Any) -> Any:
    """One token per character of the list, which has padding, end and unknown among its tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: place for place, word in enumerate(tokens)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", **more)


def _model(kind: str, vocabulary: int, pad: int, eos: int) -> Any:
    import transformers

    shape: dict[str, Any] = {**_SIZES, "vocab_size": vocabulary, "max_position_embeddings": 256}
    shape |= {"pad_token_id": pad, "eos_token_id": eos, "bos_token_id": None, "tie_word_embeddings": kind == "tiny-qwen2"}
    if kind == "tiny-llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    if kind == "tiny-qwen2":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape))
    experts = {"head_dim": 32, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape, **experts))


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in KINDS:
        raise SystemExit(f"usage: tiny_models {{{','.join(KINDS)}}} DIR")
    print(f"seatrial: {sys.argv[1]}: {ensure(sys.argv[1], Path(sys.argv[2]))}", flush=True)


if __name__ == "__main__":
    main()
