"""What rungs share beyond the forward pass: checkpoints compared bit for bit, and a model in Megatron's DDP with an optimizer and a loss.

- The truth are the safetensors files, cast to the precision that the model was built in. A tied output head may be absent on either side;
  where it is, it must be the embedding. Lists are capped (`listed`); their counts are not.
- The loss is a policy gradient's with random advantages. The balancing loss of experts is off: it is made per rank, so two ranks with
  halves of a batch rightly differ from one with the whole.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from seatrial.instruments.bits import fingerprint
from seatrial.instruments.bridge import forward
from seatrial.instruments.bridge.rungs import BridgeSession, tokens, unwrapped

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


def compare_checkpoints(made: Mapping[str, Any], stored: Mapping[str, Any], dtype: Any, tied: bool) -> dict[str, Any]:
    """Fields of a fact: what of `made` is not what is `stored`, cast to `dtype`."""
    wanted = {name: value.to(dtype) if value.is_floating_point() else value for name, value in stored.items()}
    hashes = fingerprint.tensors(wanted.items())
    reshaped, retyped, wider = [], [], []
    unequal: list[dict[str, str]] = []
    for name in (name for name in made if name in wanted):
        got, want = made[name], wanted[name]
        if got.shape != want.shape:
            reshaped.append({"name": name, **_reshaped(got, want)})
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


def _reshaped(got: Any, want: Any) -> dict[str, Any]:
    """What a tensor of the wrong shape looks like, and whether it is right but for rows of padding after it."""
    text = f"{list(got.shape)} instead of {list(want.shape)}"
    if got.dim() == 2 and got.dtype == want.dtype and got.t().shape == want.shape and same(got.t(), want):
        return {"looks": f"{text}: transposed", "padded": False}
    rows = want.shape[0] if want.dim() else 0
    if got.dim() == want.dim() > 0 and got.shape[1:] == want.shape[1:] and got.shape[0] > rows and same(got[:rows].to(want.dtype), want):
        return {"looks": f"{text}: right, with {got.shape[0] - rows} more rows after it (padding kept)", "padded": True}
    return {"looks": text, "padded": False}


def looks(name: str, got: Any, wanted: Mapping[str, Any], hashes: Mapping[str, str]) -> str:
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


LR = 1e-3
BETAS = (0.9, 0.95)
EPSILON = 1e-5
"""Large enough that Adam does not blow rounding noise of gradients that are zero up to whole updates."""
CLIP = 1.0
UNBALANCED: dict[str, Any] = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}

Tensors = Mapping[str, Any]


class Batch:
    def __init__(self, ids: Any, advantages: Any) -> None:
        self.ids, self.advantages = ids, advantages

    def loss(self, logits: Any) -> Any:
        """The policy gradient's loss, differentiable: its mean over halves of a batch is its value over the whole."""
        logp = chosen(logits, self.ids)
        return -(self.advantages.to(logp.device)[:, None] * logp).mean()

    def rows(self, start: int, end: int) -> Batch:
        return Batch(self.ids[start:end], self.advantages[start:end])


def batch(session: BridgeSession, rows: int = 8, width: int = 16, seed: int = 3) -> Batch:
    """The same batch on every rank."""
    import torch

    ids = tokens(forward.vocabulary(session), rows, width, seed)
    return Batch(ids, torch.randn(rows, generator=torch.Generator().manual_seed(seed)))


def chosen(logits: Any, ids: Any) -> Any:
    """Log-probabilities of the tokens that follow, in float32."""
    import torch

    given = torch.log_softmax(logits[:, :-1].float(), -1)
    return given.gather(-1, ids[:, 1:, None].to(given.device)).squeeze(-1)


def loss(session: BridgeSession, chunks: list[Any], given: Batch) -> Any:
    return given.loss(forward.logits(session, chunks, given.ids))


class Trainer:
    """A model in Megatron's DDP, with Megatron's optimizer over it: distributed if `sharded`."""

    def __init__(
        self, session: BridgeSession, sharded: bool, load: bool = True, hook: Any = None, decay: float = 0.0, lr: float = LR
    ) -> None:
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
        return parameters(self.chunks)


def parameters(chunks: list[Any]) -> dict[str, Any]:
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


def fed_by(session: BridgeSession, chunks: list[Any], tensors: list[Any], plain: Tensors) -> set[str]:
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


def in_transformers(session: BridgeSession, exported: Tensors, place: Path) -> Any:
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
