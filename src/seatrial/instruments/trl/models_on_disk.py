"""Tiny models made locally with the same bits everywhere, and whether the weights in memory are those on disk.

Files are read with the safetensors library, not with the code under test: a wrong mapping on load makes policy, reference and
generator wrong in the same way, and no training metric shows it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seatrial.instruments import facts
from seatrial.instruments.bits import fingerprint
from seatrial.instruments.engines import tiny_models

ADAPTER_FILE = "adapter_model.safetensors"
VOLATILE = ("inference_mode", "revision", "base_model_name_or_path", "auto_mapping")  # settings of an adapter that saving may change
UNSETTLED = ("transformers_version", "use_cache", "_name_or_path", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")
"""Settings of a model that training or saving may change: trainers align the special tokens with the tokenizer's."""
PICTURES = ("preprocessor_config.json", "processor_config.json")
KEPT = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", *PICTURES)
"""Files of a model that a trained one needs, too, where the first had them."""


def named(model: Any) -> dict[str, str]:
    """Fingerprints of all parameters, tied ones under each of their names."""
    return fingerprint.tensors(model.named_parameters(remove_duplicate=False))


def compare_tensors(live: Mapping[str, str], directory: Path) -> dict[str, Any]:
    """Tensors of the files in `directory` against the fingerprints of parameters: by name, or by content where names differ."""
    from safetensors.torch import load_file

    stored: dict[str, str] = {}
    for file in sorted(directory.glob("*.safetensors")):
        stored |= fingerprint.tensors(load_file(file).items())
    both = [name for name in stored if name in live]
    contents = set(live.values())
    renamed = [name for name in stored if name not in live and stored[name] in contents]
    wrong = [name for name in both if stored[name] != live[name]]
    kept = set(stored.values())
    lost = [name for name, value in live.items() if name not in stored and value not in kept]
    return {"stored": len(stored), "compared": len(both), "renamed": len(renamed), "wrong": wrong, "lost": lost}


def built(model: Any, path: Path) -> None:
    """Before training, and before a checkpoint is restored: what the seed made of new weights and of the random state."""
    facts.append(path, {"fact": "built", "weights": fingerprint.model(model), "generators": fingerprint.generators()})


def loaded(model: Any, directory: Path, path: Path) -> None:
    """After loading: the model holds what the files say; tied weights are one tensor."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    wanted = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    tied = head is not None and head.weight.data_ptr() == table.weight.data_ptr()
    live = named(model)
    facts.append(path, {"fact": "loaded", **compare_tensors(live, directory), "tied": tied, "tie_wanted": wanted})


def saved(trainer: Any, source: Path, made: bool, directory: Path, path: Path) -> None:
    """Save the trained model with the trainer's own code, and read it back; it needs the files that `source` has.

    A model that was `made` here keeps its settings; another's may have been written by another version.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    live = named(model)
    words = _words(trainer.processing_class)
    trainer.save_model(str(directory))
    row = compare_tensors(live, directory)
    files = [name for name in KEPT if (source / name).is_file()]
    odd = [name for name in files if not (directory / name).is_file()]
    odd += [f"{name} of the tokenizer" for name in _lost_words(words, directory)]
    if made:
        odd += [f"{name} of config.json" for name in _changed_settings(source / "config.json", directory / "config.json")]
    if named(model) != live:
        odd.append("the model in memory, which saving changed")
    facts.append(path, {"fact": "saved", **row, "files": files, "odd": odd})


def _words(processor: Any) -> dict[str, Any]:
    """What a tokenizer does, as its library tells it: it may be part of a processor."""
    tokenizer = getattr(processor, "tokenizer", processor)
    made = {name: getattr(tokenizer, name, None) for name in ("eos_token", "pad_token", "padding_side", "chat_template")}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return made | ({"vocabulary": _lasting(json.loads(backend.to_str()))} if backend is not None else {})


def _table(path: Path) -> dict[str, Any]:
    """A file of settings that training has saved; a ValueError that names it where it holds none."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: saved, but cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: saved, but holds no table of settings")
    return found


def _lasting(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer without what each call sets anew."""
    return {name: value for name, value in tokenizer.items() if name not in ("padding", "truncation")}


def _lost_words(words: Mapping[str, Any], directory: Path) -> list[str]:
    """What saved files say otherwise than the tokenizer did before; a file that is missing is told elsewhere."""
    settings, whole, template = (directory / name for name in ("tokenizer_config.json", "tokenizer.json", "chat_template.jinja"))
    stored = _table(settings) if settings.is_file() else {}
    if template.is_file():
        stored["chat_template"] = template.read_text(encoding="utf-8")
    if whole.is_file():
        stored["vocabulary"] = _lasting(_table(whole))
    return [name for name, value in words.items() if value is not None and stored and _named(stored.get(name)) != value]


def _named(token: Any) -> Any:
    """A token as its text: it may be stored with its properties."""
    return token["content"] if isinstance(token, dict) and "content" in token else token


def _changed_settings(source: Path, target: Path) -> list[str]:
    """Settings of a model that saving changed or lost."""
    if not source.is_file() or not target.is_file():
        return []
    before, after = (_settled(_table(path)) for path in (source, target))
    return [name for name, value in before.items() if name not in after or after[name] != value]


def _settled(config: dict[str, Any]) -> dict[str, Any]:
    return {name: _settled(value) if isinstance(value, dict) else value for name, value in config.items() if name not in UNSETTLED}


def saved_adapter(model: Any, asked: Mapping[str, Any], directory: Path, path: Path, fact: str = "adapter") -> None:
    """The settings that a checkpoint stores for the adapter are those it was trained with, and that were `asked` for; its tokenizer is
    beside it. Its weights are told by the names that they have in the model.
    """
    from safetensors.torch import load_file

    live = {name: _listed(value) for name, value in next(iter(model.peft_config.values())).to_dict().items() if name not in VOLATILE}
    stored = _table(directory / "adapter_config.json")
    wrong = [name for name, value in {**live, **asked}.items() if name not in stored or _listed(value) != _listed(stored[name])]
    wrong += [name for name in KEPT[1:4] if not (directory / name).is_file()]
    factors = {name: value for name, value in load_file(directory / ADAPTER_FILE).items() if "magnitude" not in name}
    tensors = {name.replace(".weight", ".default.weight"): value for name, value in factors.items()}
    facts.append(path, {"fact": fact, "compared": len(live), "wrong": wrong, "weights": fingerprint.tensors(tensors.items())})


def _listed(value: Any) -> Any:
    """As JSON holds it: sets and tuples are lists, and the order of target modules means nothing."""
    if isinstance(value, (list, tuple, set)):
        return sorted(map(str, value))
    return {str(key): _listed(item) for key, item in value.items()} if isinstance(value, dict) else value


ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=?.,:;!()[]<>_ "
SPECIAL = ("<unk>", "<eos>", "<pad>", "<image>")
"""Padding is not token 0, since arithmetic with a zero would hide faults; the end token is odd, so that ending early earns nothing."""
KINDS = ("dense", "untied", "moe", "vlm")
SEED = 20261115


def tokenizer() -> Any:
    made = tiny_models.tokenizer((*SPECIAL, *ALPHABET), padding_side="left")
    made.add_special_tokens({"additional_special_tokens": ["<image>"]})
    made.chat_template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    return made


def sizes(words: Any) -> dict[str, Any]:
    """Settings that all kinds share; projections are not square, or swapped sizes would go unseen."""
    # A spread of 0.02, which is usual, gives almost the same chance to every token, and hides faults of sampling.
    made: dict[str, Any] = {
        "vocab_size": len(words),
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "initializer_range": 0.1,
        "max_position_embeddings": 256,
    }
    made |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None}
    return made | {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id}


def new_model(kind: str, words: Any) -> Any:
    import transformers

    shape = {**sizes(words), "tie_word_embeddings": kind == "dense"}
    if kind == "dense":
        settings = {**shape, "head_dim": 32, "intermediate_size": 256}
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**settings))
    if kind == "untied":  # vLLM's attention on a CPU wants heads of at least 32
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**shape, "hidden_size": 128, "intermediate_size": 256}))
    if kind == "moe":
        experts = {"moe_intermediate_size": 64, "head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape, **experts, intermediate_size=128))
    sides = {"hidden_size": 32, "intermediate_size": 64, "image_size": 16, "patch_size": 8}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sides, num_hidden_layers=1, num_attention_heads=2),
        text_config=transformers.Qwen2Config(**shape, intermediate_size=256),
        image_token_index=words.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=4,
    )
    return transformers.LlavaForConditionalGeneration(config)


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


def model_cache(interpreter: str) -> Path:
    """Where the models of an interpreter are kept, by what makes them."""
    own = os.environ.get("SEATRIAL_CACHE")
    root = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seatrial"
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers", "safetensors")]
    made_of = "\n".join([interpreter, *versions]).encode() + Path(__file__).read_bytes() + Path(tiny_models.__file__).read_bytes()
    return root / "models" / hashlib.sha256(made_of).hexdigest()[:16]


def copy_model(source: Path, directory: Path) -> None:
    """Copy a model in one move; safe when two processes do it at once."""
    tiny_models.whole(directory, lambda place: shutil.copytree(source, place, dirs_exist_ok=True))


def ensure_model(kind: str, directory: Path) -> Path:
    """Make the model of this kind in `directory` unless it is there; safe when two processes do it at once."""
    return tiny_models.whole(directory, lambda place: _make(kind, place))


def _make(kind: str, directory: Path) -> None:
    import torch

    torch.manual_seed(SEED)
    words = tokenizer()
    model = new_model(kind, words)
    with torch.no_grad():  # completions that end early are a part of every batch
        model.get_output_embeddings().weight[words.eos_token_id] *= 2.5
    model.save_pretrained(directory)
    written = compare_tensors(named(model), directory)
    if written["wrong"] or not written["compared"] + written["renamed"]:
        raise RuntimeError(f"the made model was not saved as it is: {written['wrong'][:3]}")
    (_processor(words) if kind == "vlm" else words).save_pretrained(directory)


if __name__ == "__main__":
    ensure_model(sys.argv[1], Path(sys.argv[2]))
