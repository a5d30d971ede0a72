"""What is on disk against what is in memory: loaded weights, saved weights, the saved adapter's settings, tied weights.

Files are read with the safetensors library, not with the code under test. A wrong mapping on load makes policy,
reference and generator wrong in the same way; no training metric shows it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from seatrial.probes import facts, fingerprint

ADAPTER = ("r", "lora_alpha", "lora_dropout", "bias", "use_rslora")


def compare(model: Any, directory: Path) -> dict[str, Any]:
    """Tensors of the files in `directory` against the parameters, bit for bit: by name, or by content where names differ."""
    from safetensors.torch import load_file

    live = fingerprint.tensors(model.named_parameters(remove_duplicate=False))
    stored: dict[str, str] = {}
    for file in sorted(directory.glob("*.safetensors")):
        stored |= fingerprint.tensors(load_file(file).items())
    both = [name for name in stored if name in live]
    contents = set(live.values())
    renamed = [name for name in stored if name not in live and stored[name] in contents]
    wrong = [name for name in both if stored[name] != live[name]]
    return {"stored": len(stored), "compared": len(both), "renamed": len(renamed), "wrong": wrong}


def loaded(model: Any, directory: Path, path: Path) -> None:
    """After loading: the model holds what the files say; tied weights are one tensor."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    wanted = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    tied = head is not None and head.weight.data_ptr() == table.weight.data_ptr()
    facts.append(path, {"fact": "loaded", **compare(model, directory), "tied": tied, "tie_wanted": wanted})


def saved(trainer: Any, directory: Path, path: Path) -> None:
    """Save the trained model with the trainer's own code, and read it back."""
    trainer.save_model(str(directory))
    facts.append(path, {"fact": "saved", **compare(trainer.accelerator.unwrap_model(trainer.model), directory)})


def adapter(model: Any, directory: Path, path: Path) -> None:
    """The settings that a checkpoint stores for the adapter are those it was trained with."""
    live = next(iter(model.peft_config.values())).to_dict()
    stored = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    wrong = [name for name in ADAPTER if live.get(name) != stored.get(name)]
    facts.append(path, {"fact": "adapter", "compared": len(ADAPTER), "wrong": wrong})
