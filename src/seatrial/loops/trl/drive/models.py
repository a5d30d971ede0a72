"""Tiny models and tokenizers, made locally: nothing is downloaded.

The same name gives the same bits on every machine with the same libraries: weights come from a fixed seed.
`dense` is a two-layer Qwen2 with tied embeddings, `untied` a two-layer Llama without, `moe` a two-layer Qwen3-MoE with
four experts, `vlm` a LLaVA with a one-layer CLIP tower whose image processor needs only Pillow.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from seatrial.loops.trl.drive import disk

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=?.,:;!()[]<>_ "
SPECIAL = ("<unk>", "<eos>", "<pad>", "<image>")
"""Padding is not token 0, since arithmetic with a zero would hide faults; the end token is odd, so that ending early earns nothing."""
KINDS = ("dense", "untied", "moe", "vlm")
SEED = 20261115


def tokenizer() -> Any:
    """One token per character, plus padding, end, unknown and image tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *ALPHABET])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left")
    made.add_special_tokens({"additional_special_tokens": ["<image>"]})
    made.chat_template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    return made


def _sizes(words: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(words),
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,  # the usual 0.02 gives almost the same chance to every token, and hides faults of sampling
        "pad_token_id": words.pad_token_id,
        "eos_token_id": words.eos_token_id,
        "bos_token_id": None,
    }


def _dense(words: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    # Projections that are not square: swapped sizes would go unseen otherwise.
    return Qwen2ForCausalLM(Qwen2Config(**_sizes(words), head_dim=32, intermediate_size=256, tie_word_embeddings=True))


def _untied(words: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    # vLLM's attention on a CPU wants heads of at least 32.
    sizes = {**_sizes(words), "hidden_size": 128}
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=256, tie_word_embeddings=False))


def _moe(words: Any) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **_sizes(words),
            intermediate_size=128,
            moe_intermediate_size=64,
            head_dim=24,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            tie_word_embeddings=False,
        )
    )


def _vlm(words: Any) -> Any:
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen2Config

    vision = CLIPVisionConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8)
    text = Qwen2Config(**_sizes(words), intermediate_size=256, tie_word_embeddings=False)
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=words.convert_tokens_to_ids("<image>"),
            vision_feature_layer=-1,
            vision_feature_select_strategy="default",
            image_seq_length=4,
        )
    )


def _processor(words: Any) -> Any:
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return LlavaProcessor(
        image_processor=images,
        tokenizer=words,
        patch_size=8,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=words.chat_template,
    )


def cache(interpreter: str) -> Path:
    """Where the models of an interpreter are kept, by what makes them."""
    own = os.environ.get("SEATRIAL_CACHE")
    root = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seatrial"
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers", "safetensors")]
    made_of = "\n".join([interpreter, *versions]).encode() + Path(__file__).read_bytes()
    return root / "models" / hashlib.sha256(made_of).hexdigest()[:16]


def copy(source: Path, directory: Path) -> None:
    """Copy a model in one move; safe when two processes do it at once."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        shutil.copytree(source, temporary, dirs_exist_ok=True)
        os.rename(temporary, directory)  # noqa: PTH104 - fails when another process was first, which is fine
    except OSError:
        if not (directory / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def ensure(kind: str, directory: Path) -> Path:
    """Make the model of this kind in `directory` unless it is there; safe when two processes do it at once."""
    import torch

    if (directory / "config.json").is_file():
        return directory
    torch.manual_seed(SEED)
    words = tokenizer()
    model = {"dense": _dense, "untied": _untied, "moe": _moe, "vlm": _vlm}[kind](words)
    with torch.no_grad():  # completions that end early are a part of every batch
        model.get_output_embeddings().weight[words.eos_token_id] *= 2.5
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        model.save_pretrained(temporary)
        written = disk.compare(disk.named(model), temporary)
        if written["wrong"] or not written["compared"] + written["renamed"]:
            raise RuntimeError(f"the made model was not saved as it is: {written['wrong'][:3]}")
        (_processor(words) if kind == "vlm" else words).save_pretrained(temporary)
        os.rename(temporary, directory)  # noqa: PTH104 - fails when another process was first, which is fine
    except OSError:
        if not (directory / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


if __name__ == "__main__":
    ensure(sys.argv[1], Path(sys.argv[2]))
