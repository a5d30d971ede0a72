"""Rung roundtrip: what the Bridge exports right after the import is the checkpoint on disk, bit for bit, in fp32 and in bf16.

bf16 goes the way that training goes: the weights are imported, then Megatron's Float16Module casts the model. Without that wrapper
Megatron's local norms stay fp32, and so does their export.
"""

from __future__ import annotations

from seatrial.probes.bridge import weights
from seatrial.probes.bridge.rank import Rank


def run(rank: Rank) -> None:
    """Import and export in both precisions."""
    from megatron.core.transformer.module import Float16Module

    stored = weights.on_disk(rank.directory)
    tied = weights.tied(rank.config())
    for dtype in ("float32", "bfloat16"):
        session = rank.session(dtype)
        made = session.export(session.build(mixed_precision_wrapper=Float16Module))
        rank.write("roundtrip", dtype=dtype, **weights.compare(made, stored, session.torch_dtype(), tied))
