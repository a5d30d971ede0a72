"""Rung import: the HF weights reach every parameter, and every tensor on disk is read.

Before the Bridge loads, every parameter is filled with NaN: what still has one afterwards was never written. Rows of the vocabulary's
padding have no weights on disk and may keep theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seatrial.probes.bridge import weights
from seatrial.probes.bridge.rank import Rank
from seatrial.probes.bridge.session import Session, unwrapped

VOCABULARY = ("word_embeddings.weight", "output_layer.weight")


def run(rank: Rank) -> None:
    """Fill with NaN, import, look."""
    import torch

    stored = weights.on_disk(rank.directory)
    session = rank.session()
    chunks = session.build(load=False)
    model = unwrapped(chunks[0])
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(torch.nan)
    read = _load(session, chunks)
    config = rank.config()
    tied = weights.copies(stored, weights.tied(config))
    unreached, padding = _left(model, config.vocab_size)
    rank.write(
        "import",
        parameters=sum(1 for _ in model.parameters()),
        unreached=weights.listed(unreached),
        padding_rows=padding,
        stored=len(stored),
        read=sum(name in read for name in stored),
        unread=weights.listed(name for name in stored if name not in read and name not in tied),
        tied_heads=weights.listed(name for name in tied if name not in read),
        nan_on_disk=weights.listed(_with_nan(stored)),
    )


def _load(session: Session, chunks: list[Any]) -> set[str]:
    """Import as training does; the names that were read from disk."""
    read: set[str] = set()
    source = session.bridge.hf_pretrained.state.source
    plain = source.load_tensors

    def load_tensors(keys: list[str]) -> Any:
        read.update(keys)
        return plain(keys)

    source.load_tensors = load_tensors
    try:
        session.bridge.load_hf_weights(chunks)
    finally:
        del source.load_tensors
    return read


def _left(model: Any, vocabulary: int) -> tuple[list[dict[str, Any]], int]:
    """Parameters that still hold NaN, and how many rows of padding do."""
    unreached, padding = [], 0
    for name, value in model.named_parameters():
        empty = value.isnan()
        if name.endswith(VOCABULARY):
            padding += int(empty[vocabulary:].flatten(1).any(1).sum())
            empty = empty[:vocabulary]
        count = int(empty.sum())
        if count:
            unreached.append({"name": name, "looks": f"{count} of {empty.numel()} values never written"})
    return unreached, padding


def _with_nan(stored: Mapping[str, Any]) -> list[str]:
    return [name for name, value in stored.items() if value.is_floating_point() and bool(value.isnan().any())]
