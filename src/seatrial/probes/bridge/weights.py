"""Checkpoints compared bit for bit: what lies on disk against what the Bridge exports or saves, and what a wrong tensor looks like.

- The truth are the safetensors files, read with the safetensors library, cast to the precision that the model was built in.
- Bits are compared, so NaN and -0.0 count. A tied output head may be absent on either side; where it is, it must be the embedding.
- Lists are capped (`listed`); their counts are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from seatrial.probes import fingerprint

SHOWN = 20
CHEAP = 1 << 22
"""Elements up to which a wrong tensor's rows are looked for in its neighbours."""


def listed(found: Iterable[Any]) -> dict[str, Any]:
    """A list for a fact: how many, and the first of them."""
    whole = list(found)
    return {"count": len(whole), "first": whole[:SHOWN]}


def on_disk(directory: Path) -> dict[str, Any]:
    """Every tensor of the safetensors files of a directory. A name in two files is an error: one of the two would be lost."""
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        part = load_file(file)
        twice = sorted(found.keys() & part.keys())
        if twice:
            raise ValueError(f"{file}: {twice[0]} is in another file too")
        found |= part
    if not found:
        raise ValueError(f"{directory}: no tensors in *.safetensors")
    return found


def tied(config: Any) -> bool:
    """Whether the configuration says that the output head is the embedding."""
    return bool(getattr(config, "tie_word_embeddings", False))


def copies(stored: Mapping[str, Any], tied: bool) -> dict[str, str]:
    """Names of a tied checkpoint that hold the bits of another name: an output head that was written although it is the embedding."""
    if not tied:
        return {}
    heads = [name for name in stored if name.endswith("lm_head.weight")]
    tables = [name for name in stored if name.endswith(("embed_tokens.weight", "word_embeddings.weight", "wte.weight"))]
    return {head: table for head in heads for table in tables if same(stored[head], stored[table])}


def same(left: Any, right: Any) -> bool:
    """Equal in dtype, shape and every bit."""
    return fingerprint.tensor_hash(left) == fingerprint.tensor_hash(right)


def compare(made: Mapping[str, Any], stored: Mapping[str, Any], dtype: Any, tied: bool) -> dict[str, Any]:
    """Fields of a fact: what of `made` is not what is `stored`, cast to `dtype`."""
    wanted = {name: value.to(dtype) if value.is_floating_point() else value for name, value in stored.items()}
    hashes = fingerprint.tensors(wanted.items())
    reshaped, retyped, wider = [], [], []
    unequal: list[dict[str, str]] = []
    for name in (name for name in made if name in wanted):
        got, want = made[name], wanted[name]
        if got.shape != want.shape:
            reshaped.append({"name": name, "looks": _reshaped(got, want)})
        elif got.dtype == stored[name].dtype != want.dtype and same(got, stored[name]):
            wider.append(name)
        elif got.dtype != want.dtype:
            retyped.append({"name": name, "looks": f"{got.dtype} instead of {want.dtype}"})
        elif fingerprint.tensor_hash(got) != hashes[name]:
            unequal.append({"name": name, "looks": looks(name, got, wanted, hashes) if len(unequal) < SHOWN else ""})
    absent = [name for name in wanted if name not in made]
    extra = [name for name in made if name not in wanted]
    unwritten, written = copies(wanted, tied), copies(made, tied)
    return {
        "stored": len(stored),
        "made": len(made),
        "equal": sum(name in wanted for name in made) - len(reshaped) - len(retyped) - len(unequal),
        "missing": listed(name for name in absent if name not in unwritten),
        "extra": listed(name for name in extra if name not in written),
        "unequal": listed(unequal),
        "reshaped": listed(reshaped),
        "retyped": listed(retyped),
        "wider": listed(wider),
        "tied_absent": listed(name for name in absent if name in unwritten),
        "tied_extra": listed(name for name in extra if name in written),
    }


def _reshaped(got: Any, want: Any) -> str:
    """What a tensor of the wrong shape looks like."""
    text = f"{list(got.shape)} instead of {list(want.shape)}"
    if got.dim() == 2 and got.dtype == want.dtype and got.t().shape == want.shape and same(got.t(), want):
        return f"{text}: transposed"
    rows = want.shape[0] if want.dim() else 0
    if got.dim() == want.dim() > 0 and got.shape[1:] == want.shape[1:] and got.shape[0] > rows and same(got[:rows].to(want.dtype), want):
        return f"{text}: right, with {got.shape[0] - rows} more rows after it (padding kept)"
    return text


def looks(name: str, got: Any, wanted: Mapping[str, Any], hashes: Mapping[str, str]) -> str:
    """What a tensor of the right shape and wrong bits looks like."""
    mine, want = fingerprint.tensor_hash(got), wanted[name]
    other = next((other for other, value in hashes.items() if value == mine), None)
    if other is not None:
        return f"is {other}"
    if got.isnan().any():
        return f"{int(got.isnan().sum())} of {got.numel()} values are NaN"
    if not got.any():
        return "all zeros"
    if got.dim() == 2 and got.shape[0] == got.shape[1] and same(got.t().contiguous(), want):
        return "transposed"
    if got.numel() <= CHEAP:
        found = _mixed(name, got, wanted)
        if found:
            return found
    return f"max difference {float((got.double() - want.double()).abs().max()):.3g}"


def _mixed(name: str, got: Any, wanted: Mapping[str, Any]) -> str:
    """Whether all rows are rows of the checkpoint, in another order or of neighbours in the same layer."""
    rows = _rows(got)
    if rows == _rows(wanted[name]):
        return "rows permuted"
    layer = fingerprint.layer(name)
    near = [
        other
        for other, value in wanted.items()
        if fingerprint.layer(other) == layer and value.shape[1:] == got.shape[1:] and value.numel() <= CHEAP and rows & _rows(value)
    ]
    held: Counter[bytes] = sum((_rows(wanted[other]) for other in near), Counter())
    return f"rows of {', '.join(near)}" if not rows - held else ""


def _rows(value: Any) -> Counter[bytes]:
    import torch

    whole = value.detach().cpu().contiguous()
    data = whole.reshape(whole.shape[0] if whole.dim() else 1, -1).view(torch.uint8)
    return Counter(bytes(row) for row in data.numpy())
