"""One forward pass of a model that may be spread over ranks: whole logits on every one of them.

- Tensor parallel: Megatron gathers the vocabulary. Padding of the vocabulary is cut off: what is left is what transformers gives.
- Pipeline: Megatron's own schedule runs the stages; the last one's logits are broadcast.
- Context parallel: the sequence is cut as Megatron cuts it (each rank an early and a late piece), and put together again.
- Sequence parallel needs nothing here; the width must divide by the ranks.
On a single rank the result can be differentiated. Nothing here changes between training and evaluation mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seatrial.probes.bridge.session import Session


def logits(session: Session, chunks: list[Any], tokens: Any) -> Any:
    """Logits (row, position, vocabulary) of token ids (row, position), in the precision that the model gives."""
    import torch
    from megatron.core import parallel_state

    whole = tokens.to(session.device)
    positions = torch.arange(whole.shape[1], device=session.device).expand(whole.shape)
    mine = _my_places(whole.shape[1])
    inputs, positions = whole[:, mine], positions[:, mine]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        made = _through_stages(session, chunks, inputs, positions)
    else:
        (chunk,) = chunks
        made = chunk(inputs, positions, None, runtime_gather_output=True)
    return _whole_sequence(made, mine)[..., : vocabulary(session)]


def logprobs(session: Session, chunks: list[Any], rows: Sequence[Sequence[int]], start: int) -> Any:
    """Log-probabilities (row, token) of the tokens from position `start` on, each given what stands before it."""
    import torch

    tokens = torch.tensor(rows, device=session.device)
    given = logits(session, chunks, tokens[:, :-1])[:, start - 1 :].float()
    return torch.log_softmax(given, -1).gather(-1, tokens[:, start:, None]).squeeze(-1)


def reference(session: Session, tokens: Any, dtype: str) -> Any:
    """What transformers gives, by its plain code: grouped kernels of experts have no float64."""
    import torch

    model = plain_hf(session, dtype)
    with torch.no_grad():
        return model(input_ids=tokens.to(session.device), use_cache=False).logits


def plain_hf(session: Session, dtype: str) -> Any:
    """The transformers model without fused kernels."""
    model = session.hf(dtype)
    model.set_experts_implementation("eager")
    return model


def distance(made: Any, wanted: Any) -> dict[str, Any]:
    """How far logits are from others. `margin`: by how much the others prefer their next token where these choose another one."""
    made, wanted = made.detach().double().cpu(), wanted.detach().double().cpu()
    apart = (made - wanted).abs()
    chosen, best = made.argmax(-1), wanted.argmax(-1)
    lost = wanted.max(-1).values - wanted.gather(-1, chosen[..., None])[..., 0]
    cosine = (made * wanted).sum(-1) / (made.norm(dim=-1) * wanted.norm(dim=-1))
    return {
        "max": float(apart.max()),
        "mean": float(apart.mean()),
        "median": float(apart.max(-1).values.median()),
        "agree": float((chosen == best).double().mean()),
        "margin": float(lost.max()),
        "cosine": float(cosine.min()),
        "scale": float(wanted.abs().max()),
        "positions": chosen.numel(),
    }


def vocabulary(session: Session) -> int:
    """How many tokens the HF configuration names; a Megatron model may have more rows, as padding."""
    from transformers import AutoConfig

    found: int = AutoConfig.from_pretrained(session.directory, local_files_only=True).get_text_config().vocab_size
    return found


def _my_places(width: int) -> list[int]:
    """The positions that this context-parallel rank has: one piece from the front and its mirror from the back, so that work is even."""
    from megatron.core import parallel_state

    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if width % (2 * size) and size > 1:
        raise ValueError(f"{width} positions do not divide into {2 * size} pieces: context parallel over {size} ranks needs that")
    if size == 1:
        return list(range(width))
    piece = width // (2 * size)
    return [place * piece + offset for place in (rank, 2 * size - 1 - rank) for offset in range(piece)]


def _whole_sequence(made: Any, mine: list[int]) -> Any:
    """The pieces of all context-parallel ranks in the order of the sequence."""
    import torch
    from megatron.core import parallel_state

    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return made
    group = parallel_state.get_context_parallel_group()
    places = [torch.empty(len(mine), dtype=torch.long, device=made.device) for _ in range(size)]
    torch.distributed.all_gather(places, torch.tensor(mine, device=made.device), group=group)
    pieces = [torch.empty_like(made) for _ in range(size)]
    torch.distributed.all_gather(pieces, made.contiguous(), group=group)
    return torch.cat(pieces, 1)[:, torch.cat(places).argsort()]


def _through_stages(session: Session, chunks: list[Any], inputs: Any, positions: Any) -> Any:
    """Megatron's forward-only schedule; every stage gets what the last one made."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def collect(output: Any, non_loss_data: bool) -> Any:
        return output if non_loss_data else (output.sum(), {})

    def step(_data: Any, chunk: Any) -> tuple[Any, Any]:
        return chunk(inputs, positions, None, runtime_gather_output=True), collect

    made = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[None] * len(chunks),
        model=chunks,
        num_microbatches=1,
        seq_length=inputs.shape[1] * parallel_state.get_context_parallel_world_size(),
        micro_batch_size=inputs.shape[0],
        forward_only=True,
        collect_non_loss_data=True,
    )
    box: list[Any] = [made[0].detach().cpu() if parallel_state.is_pipeline_last_stage() else None]
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    torch.distributed.broadcast_object_list(box, src=source, group=parallel_state.get_pipeline_model_parallel_group())
    return box[0].to(session.device)
