"""What the rungs that train share: a model in Megatron's DDP with one of Megatron's optimizers, a loss, and comparisons of tensors.

- The loss is a policy gradient's: random advantages, the same for everybody who asks with the same seed.
- A difference that is not a number counts as infinite, a name or shape that only one side has is an error: nothing drops out.
- The balancing loss of experts is off: it is made per rank, so two ranks with halves of a batch rightly differ from one with the whole.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from seatrial.probes.bridge import forward
from seatrial.probes.bridge.session import Session, tokens, unwrapped
from seatrial.probes.bridge.weights import SHOWN, same

LR = 1e-3
BETAS = (0.9, 0.95)
EPSILON = 1e-5
"""Large enough that Adam does not blow rounding noise of gradients that are zero up to whole updates."""
CLIP = 1.0
UNBALANCED: dict[str, Any] = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}

Tensors = Mapping[str, Any]


class Batch:
    """Token ids (row, position) and one advantage per row."""

    def __init__(self, ids: Any, advantages: Any) -> None:
        self.ids, self.advantages = ids, advantages

    def loss(self, logits: Any) -> Any:
        """The policy gradient's loss, differentiable: its mean over halves of a batch is its value over the whole."""
        logp = chosen(logits, self.ids)
        return -(self.advantages.to(logp.device)[:, None] * logp).mean()

    def rows(self, start: int, end: int) -> Batch:
        """Some of its rows."""
        return Batch(self.ids[start:end], self.advantages[start:end])


def batch(session: Session, rows: int = 8, width: int = 16, seed: int = 3) -> Batch:
    """The same batch on every rank."""
    import torch

    ids = tokens(forward.vocabulary(session), rows, width, seed)
    return Batch(ids, torch.randn(rows, generator=torch.Generator().manual_seed(seed)))


def chosen(logits: Any, ids: Any) -> Any:
    """Log-probabilities of the tokens that follow, in float32."""
    import torch

    given = torch.log_softmax(logits[:, :-1].float(), -1)
    return given.gather(-1, ids[:, 1:, None].to(given.device)).squeeze(-1)


def loss(session: Session, chunks: list[Any], given: Batch) -> Any:
    """The loss of a model on a batch."""
    return given.loss(forward.logits(session, chunks, given.ids))


class Trainer:
    """A model in Megatron's DDP, with Megatron's optimizer over it: distributed if `sharded`."""

    def __init__(self, session: Session, sharded: bool, load: bool = True, hook: Any = None, decay: float = 0.0, lr: float = LR) -> None:
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.transformer.module import Float16Module

        self.session = session
        provider = session.provider(load=load, **UNBALANCED)
        if hook is not None:
            provider.register_pre_wrap_hook(hook)
        wrapping = DistributedDataParallelConfig(use_distributed_optimizer=sharded, grad_reduce_in_fp32=True)
        # Float16Module makes every parameter a half, norms too, as training does.
        half = Float16Module if session.dtype != "float32" else None
        self.chunks: list[Any] = session.build(provider=provider, wrap_with_ddp=True, ddp_config=wrapping, mixed_precision_wrapper=half)
        config = OptimizerConfig(
            optimizer="adam",
            lr=lr,
            weight_decay=decay,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=EPSILON,
            clip_grad=CLIP,
            use_distributed_optimizer=sharded,
            bf16=session.dtype == "bfloat16",
            params_dtype=session.torch_dtype(),
        )
        self.optimizer: Any = get_megatron_optimizer(config, self.chunks)
        # Which parameters are decayed is settled by the scheduler as it is made; both values stay as they are.
        OptimizerParamScheduler(
            self.optimizer,
            init_lr=lr,
            max_lr=lr,
            min_lr=lr,
            lr_warmup_steps=0,
            lr_decay_steps=1000,
            lr_decay_style="constant",
            start_wd=decay,
            end_wd=decay,
            wd_incr_steps=1000,
            wd_incr_style="constant",
        )

    def step(self, given: Batch) -> tuple[float, float]:
        """One update from this rank's part of a batch: its loss, and the norm of the gradient of all ranks."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        value = loss(self.session, self.chunks, given)
        value.backward()
        for chunk in self.chunks:
            chunk.finish_grad_sync()
        stepped, norm, _ = self.optimizer.step()
        if not stepped:
            raise RuntimeError("Megatron's optimizer skipped a step: it found gradients that are not finite")
        return float(value.detach()), float(norm)

    def parameters(self) -> dict[str, Any]:
        """Copies of all parameters, by Megatron's names."""
        return parameters(self.chunks)


def parameters(chunks: list[Any]) -> dict[str, Any]:
    """Copies of all parameters on the CPU, by Megatron's names."""
    (chunk,) = chunks
    return {name: value.detach().to("cpu", copy=True) for name, value in unwrapped(chunk).named_parameters()}


def furthest(left: Tensors, right: Tensors) -> tuple[float, str]:
    """The largest difference between two sets of tensors, and where it is."""
    if not left or left.keys() != right.keys():
        raise ValueError(f"names differ, or there are none: {sorted(left.keys() ^ right.keys())[:SHOWN]}")
    return max((distance(left[name], right[name]), name) for name in left)


def distance(left: Any, right: Any) -> float:
    """The largest difference between two tensors of one shape; infinite where there is no number."""
    if left.shape != right.shape:
        raise ValueError(f"shapes differ: {tuple(left.shape)} and {tuple(right.shape)}")
    found = float((left.detach().cpu().double() - right.detach().cpu().double()).abs().max()) if left.numel() else 0.0
    return math.inf if math.isnan(found) else found


def unequal(left: Tensors, right: Tensors) -> list[str]:
    """Names of tensors that are not the same bits, or that one side lacks."""
    return [name for name in {**left, **right} if name not in left or name not in right or not same(left[name], right[name])]


def fed_by(session: Session, chunks: list[Any], tensors: list[Any], plain: Tensors) -> set[str]:
    """Exported tensors that come from the given ones: those that change when these are changed by hand. They are put back."""
    import torch

    with torch.no_grad():
        kept = [value.clone() for value in tensors]
        for value in tensors:
            value.add_(1.0)
        found = set(unequal(plain, session.export(chunks)))
        for value, old in zip(tensors, kept, strict=True):
            value.copy_(old)
    return found


def in_transformers(session: Session, exported: Tensors, place: Path) -> Any:
    """The exported tensors as a checkpoint in a new directory, loaded by transformers."""
    from safetensors.torch import save_file

    place.mkdir()
    for path in session.directory.iterdir():
        if path.suffix in (".json", ".py") and not path.name.endswith(".index.json"):
            shutil.copy(path, place / path.name)
    save_file({name: value.contiguous().clone() for name, value in exported.items()}, place / "model.safetensors", {"format": "pt"})
    moved = copy.copy(session)
    moved.directory = place
    return moved.hf()


def evaluated(chunks: list[Any], work: Callable[[], Any]) -> Any:
    """What `work` gives without gradients and in evaluation mode; the chunks train on afterwards."""
    import torch

    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        made = work()
    for chunk in chunks:
        chunk.train()
    return made
