"""Why a module's output differs although its inputs agree: its parameters, their place, or its function; and settings that differ.

Only what was compared is said: a setting is named when both models have it and the values are not the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from seatrial.probes.bridge.session import unwrapped

EPSILONS = ("eps", "variance_epsilon", "epsilon")


def unequal(exported: dict[str, Any], disk: dict[str, Any], below: str = "") -> list[str]:
    """Tensors of the checkpoint that the export lacks or changes, and names that only the export has; whatever precision is on disk."""
    import torch

    names = [name for name in {**disk, **exported} if name.startswith(below)]
    both = [name for name in names if name in disk and name in exported]
    same = {name for name in both if torch.equal(disk[name].to(exported[name].dtype), exported[name])}
    return [name for name in names if name not in same]


def kind(module: Any, hf_name: str, what: str, exported: dict[str, Any], disk: dict[str, Any]) -> str:
    """What is wrong with the module of Megatron, as far as its own weight and the export can tell.

    The export alone proves no innocence: weights that were exchanged on import are exchanged back by it.
    """
    own = [name for name in disk if name.startswith(f"{hf_name}.")]
    if not own and hf_name.endswith("lm_head"):
        return "place of the parameters, or function: the head has none of its own, it is tied to the embedding"
    if not own or (what and "part" not in what and "layer" not in what):
        return "function: no parameters take part between what agrees and what does not"
    wrong = unequal(exported, disk, f"{hf_name}.")
    if wrong:
        return f"parameters: {', '.join(wrong[:3])}" + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
    if _holds(module, disk.get(f"{hf_name}.weight")):
        return "function: the parameters are those of the checkpoint"
    return "place of the parameters, or function: the export gives them back as they were in the checkpoint"


def _holds(module: Any, stored: Any) -> bool:
    """Whether the module has this very weight; fused and divided ones have another shape, and nothing is said about them."""
    import torch

    mine: Any = getattr(module, "weight", None)
    if stored is None or mine is None or mine.shape != stored.shape:
        return False
    return bool(torch.equal(mine.detach().cpu(), stored.to(mine.dtype)))


def settings(chunks: list[Any], hf: Any, megatron_name: str, hf_name: str, what: str) -> str:
    """Settings of the two modules that differ, in words; empty when none was found."""
    return "; ".join(_differences(unwrapped(chunks[0]), hf, megatron_name, hf_name, what))


def _differences(ours: Any, hf: Any, megatron_name: str, hf_name: str, what: str) -> Iterator[str]:
    mine, theirs = dict(ours.named_modules()).get(megatron_name), dict(hf.named_modules()).get(hf_name)
    one, two = _epsilon(mine), _epsilon(theirs)
    if one is not None and two is not None and one != two:
        yield f"epsilon is {one:g}, in transformers {two:g}"
    if "rotary" in what:
        yield from _rotary(ours, hf)
        attention = dict(hf.named_modules())[hf_name.rpartition(".")[0]]
        core = dict(ours.named_modules())[megatron_name.rpartition(".")[0]].core_attention
        one, two = getattr(core, "softmax_scale", None), getattr(attention, "scaling", None)
        if isinstance(one, float) and isinstance(two, float) and abs(one - two) > 1e-6 * abs(two):
            yield f"softmax scale is {one:g}, in transformers {two:g}"
    if what == "activation":
        block = dict(hf.named_modules())[hf_name.rpartition(".")[0]]
        yield from _activation(ours.config, getattr(block, "act_fn", None))


def _epsilon(module: Any) -> float | None:
    found = next((getattr(module, name) for name in EPSILONS if hasattr(module, name)), None)
    return found if isinstance(found, float) else None


def _rotary(ours: Any, hf: Any) -> Iterator[str]:
    """The frequencies that angles are made of; a base that is wrong shows in all but the first."""
    import torch

    mine = getattr(getattr(ours, "rotary_pos_emb", None), "inv_freq", None)
    theirs = next((module.inv_freq for module in hf.modules() if torch.is_tensor(getattr(module, "inv_freq", None))), None)
    if mine is None or theirs is None:
        return
    if mine.shape != theirs.shape:
        yield f"{mine.numel()} rotary frequencies, in transformers {theirs.numel()}"
    elif not torch.allclose(mine.cpu().float(), theirs.cpu().float(), rtol=1e-5, atol=0):
        yield f"the last rotary frequency is {float(mine[-1]):g}, in transformers {float(theirs[-1]):g}: base or scaling of the angles"


def _activation(config: Any, theirs: Any) -> Iterator[str]:
    """Both activations of the same numbers."""
    import torch

    if theirs is None:
        return
    numbers = torch.linspace(-4, 4, 33)
    one, two = config.activation_func(numbers), theirs(numbers)
    if not torch.allclose(one, two, atol=1e-4):
        name = getattr(config.activation_func, "__name__", config.activation_func)
        yield f"activation is {name}, in transformers {type(theirs).__name__}"
