"""The checks that others rely on, computed on one refit of the stand-in engine.

They have an advantage here that they do not have in life: byte sums, norms and XOR-reduce are compared, per runtime tensor, with an
engine that was loaded rightly, and on the replica that is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from seatrial.instruments.bits import fingerprint
from seatrial.instruments.refit import agreement
from seatrial.instruments.refit.map_learner import bits
from tests.real import fused
from tests.real.fused import Rank, Weights


class SelfCompare(TorchDispatchMode):  # type: ignore[misc]
    """As NeMo-RL's verify_samples_per_payload: the bits each write left in its target, looked at again at the end."""

    def __init__(self, ranks: list[Rank]) -> None:
        super().__init__()
        self.storages = {value.untyped_storage().data_ptr() for rank in ranks for _, value in fingerprint.named_state(rank)}
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and args[0].untyped_storage().data_ptr() in self.storages:
            self.kept.append((args[0], args[0].clone()))
        return made

    @property
    def mismatches(self) -> int:
        return sum(int((bits(now.reshape(-1)) != bits(then.reshape(-1))).sum()) for now, then in self.kept)


@dataclass
class Scene:
    """One refit of a stand-in engine: what we say, and the state that the other checks judge."""

    ranks: list[Rank]
    right: list[Rank]
    truth: Weights
    said: list[str] = field(default_factory=list)
    mismatches: int = 0
    replicas: list[list[Rank]] = field(default_factory=list)
    """Others that samples are drawn from."""


def xor(words: torch.Tensor) -> int:
    """All words folded into one."""
    while len(words) > 1:
        half = len(words) // 2
        words = torch.cat([words[:half] ^ words[half : 2 * half], words[2 * half :]])
    return int(words.sum())


def reductions(rank: Rank) -> dict[str, dict[str, float]]:
    """Per runtime tensor: byte sum, norm, XOR-reduce."""
    made: dict[str, dict[str, float]] = {"byte sum": {}, "norm": {}, "XOR": {}}
    for name, value in fingerprint.named_state(rank):
        flat = value.detach().reshape(-1)
        made["byte sum"][name] = int(flat.contiguous().view(torch.uint8).sum(dtype=torch.int64))
        made["norm"][name] = float(f"{float(flat.double().norm()):.6g}")  # as a float32 norm would be compared
        made["XOR"][name] = xor(bits(flat).to(torch.int64))
    return made


def seen(scene: Scene) -> dict[str, Any]:
    """What the other checks see."""
    pairs = [(reductions(rank), reductions(right)) for rank, right in zip(scene.ranks, scene.right, strict=True)]
    row: dict[str, Any] = {check: any(repr(left[check]) != repr(right[check]) for left, right in pairs) for check in pairs[0][0]}
    shape = scene.ranks[0].shape
    drawn = [fused.logprobs(fused.served(ranks), shape) for ranks in (scene.ranks, *scene.replicas)]
    own = fused.logprobs(scene.truth, shape)
    error = agreement.token_mult_prob_error([line for each in drawn for line in each], own * len(drawn))
    row |= {"self-comparison": scene.mismatches > 0, "token_mult_prob_error": error.value, "max |dlogp|": error.max_abs}
    noise = agreement.token_mult_prob_error(fused.logprobs(fused.served(scene.right), shape), own).value
    return row | {"error >= 1.05": not error.value < 1.05, "clean error": noise}
