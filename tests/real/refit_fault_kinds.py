"""Broken loaders of the stand-in engine, by name. Those that break only a later load look at `armed`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from seatrial.instruments.refit.map_learner import bits
from tests.real.fused import Rank, Shape, Weights

TIED = ("model.embed_tokens.weight", "lm_head.weight")


class SwapQK(Rank):
    """q goes to the slot of k, and k to that of q."""

    def slot(self, part: str) -> int:
        return {"q_proj": 1, "k_proj": 0}.get(part, super().slot(part))


class VOverK(Rank):
    """v goes to the slot of k."""

    def slot(self, part: str) -> int:
        return 1 if part == "v_proj" else super().slot(part)


class KernelLayoutRight(Rank):
    """After each load gate and up are swapped into the layout that the kernels read."""

    loads = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = super().load_weights(weights)
        if self.swaps():
            for name, value in self.named_parameters():
                if "gate_up_proj" in name or "w13" in name:
                    value.copy_(torch.cat(value.clone().chunk(2, -2)[::-1], -2))
        self.loads += 1
        return loaded

    def swaps(self) -> bool:
        return True

    def reads(self, part: str) -> int:
        return {"gate_proj": 1, "up_proj": 0}.get(part, super().reads(part))


class KernelLayout(KernelLayoutRight):
    """Only the first load swaps; the kernels go on reading swapped halves."""

    def swaps(self) -> bool:
        return self.loads == 0


class Skip(Rank):
    """Once armed, one name is taken and not written."""

    def consume(self, own: Weights, name: str, value: torch.Tensor) -> bool:
        return (self.armed and name == "model.layers.1.self_attn.k_proj.weight") or super().consume(own, name, value)


class StaleHead(Rank):
    """The tied head is a copy that is made at the first load and never again."""

    def __init__(self, shape: Shape, rank: int) -> None:
        super().__init__(shape, rank)
        self.lm_head.weight = nn.Parameter(self.model.embed_tokens.weight.clone(), requires_grad=False)
        self.made = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = super().load_weights(weights)
        if not self.made:
            self.lm_head.weight.copy_(self.model.embed_tokens.weight)
            self.made = True
        return loaded


class Xor(Rank):
    """Once armed, tied names arrive as XOR with what is held; both go to one storage, so the second undoes the first."""

    def consume(self, own: Weights, name: str, value: torch.Tensor) -> bool:
        if name not in TIED:
            return super().consume(own, name, value)
        target = own[name]
        mine = value[self.rank * len(target) : (self.rank + 1) * len(target)]
        held = target[: len(mine)]
        if not self.armed:
            held.copy_(mine)
            return True
        if name == TIED[0]:  # the producer computed one difference and sends it under both names
            self.change = bits(held.reshape(-1)) ^ bits(mine.reshape(-1))
        held.copy_((bits(held.reshape(-1)) ^ self.change).view(held.dtype).reshape(held.shape))
        return True


class NanMask(Rank):
    """Once armed, NaN in what is sent means: not sent."""

    def fuse(self, target: torch.Tensor, slot: int, slots: int, value: torch.Tensor) -> None:
        held = target.chunk(slots, 0)[slot]
        super().fuse(target, slot, slots, torch.where(value.isnan(), held, value) if self.armed else value)


class NoScale(Rank):
    """Once armed, fp8 bits are written and their scale is not."""

    def scale(self, target: torch.Tensor, value: torch.Tensor) -> None:
        if not self.armed:
            super().scale(target, value)


class StaleA(Rank):
    """Once armed, A is not computed again from A_log."""

    def consume(self, own: Weights, name: str, value: torch.Tensor) -> bool:
        return (self.armed and name.endswith("A_log")) or super().consume(own, name, value)


class PaddingWritten(Rank):
    """Once armed, the padded rows of the vocabulary hold whatever was in memory."""

    def consume(self, own: Weights, name: str, value: torch.Tensor) -> bool:
        done = super().consume(own, name, value)
        if self.armed and name == TIED[0]:
            rows = len(own[name])
            used = max(0, min(rows, len(value) - self.rank * rows))
            own[name][used:] = torch.randn(rows - used, own[name].shape[1], generator=torch.Generator().manual_seed(3)).to(own[name].dtype)
        return done


class SwapExperts(Rank):
    """Experts 2 and 3 take each other's place."""

    def place(self, expert: int) -> int:
        return (0, 1, 3, 2)[expert]


KINDS: dict[str, type[Rank]] = {
    "swap-qk": SwapQK,
    "v-over-k": VOverK,
    "kernel-layout": KernelLayout,
    "kernel-layout-right": KernelLayoutRight,
    "skip": Skip,
    "stale-head": StaleHead,
    "xor": Xor,
    "nan-mask": NanMask,
    "no-scale": NoScale,
    "stale-a": StaleA,
    "padding": PaddingWritten,
    "swap-experts": SwapExperts,
}
