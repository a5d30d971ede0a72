"""Sampling that depends only on weights, prompt, step and index: not on rank, batch or process.

Each completion draws from its own generator, seeded from (seed, step, prompt, index within its group). Two ranks
therefore sample what one rank samples, and a separate generation process samples what the trainer would.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch


def seeds(prompts: Sequence[str], step: int, seed: int) -> list[int]:
    """One seed per completion; repeats of a prompt are told apart by their order."""
    seen: Counter[str] = Counter()
    made = []
    for prompt in prompts:
        text = f"{seed}\0{step}\0{seen[prompt]}\0{prompt}"
        seen[prompt] += 1
        made.append(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big"))
    return made


def forward(model: Any, rows: Sequence[Sequence[int]], pad: int, **extra: Any) -> Any:
    """Logits of left-padded rows, with positions counted from each row's first token, without a cache."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, **extra).logits


@torch.no_grad()  # type: ignore[untyped-decorator]
def sample(
    model: Any, prompt_ids: Sequence[Sequence[int]], row_seeds: Sequence[int], length: int, eos: int, pad: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Completions and the log-probabilities of their tokens, at temperature 1."""
    draws = [torch.Generator().manual_seed(seed) for seed in row_seeds]
    completions: list[list[int]] = [[] for _ in prompt_ids]
    logprobs: list[list[float]] = [[] for _ in prompt_ids]
    for _ in range(length):
        open_rows = [i for i, ids in enumerate(completions) if not ids or ids[-1] != eos]
        if not open_rows:
            break
        logits = forward(model, [[*prompt_ids[i], *completions[i]] for i in open_rows], pad)[:, -1]
        table = torch.log_softmax(logits.float(), -1).cpu()
        for row, i in enumerate(open_rows):
            token = int(torch.multinomial(table[row].exp(), 1, generator=draws[i]))
            completions[i].append(token)
            logprobs[i].append(float(table[row, token]))
    return completions, logprobs


@torch.no_grad()  # type: ignore[untyped-decorator]
def logprobs_of(
    model: Any, prompt_ids: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], pad: int, heat: float = 1.0, **extra: Any
) -> list[list[float]]:
    """Log-probabilities of given completions under `model`, at temperature `heat`."""
    rows = [[*prompt, *completion] for prompt, completion in zip(prompt_ids, completions, strict=True)]
    table = torch.log_softmax(forward(model, rows, pad, **extra).float() / heat, -1)
    result = []
    for row, completion in enumerate(completions):
        length = len(completion)
        places = torch.arange(table.shape[1] - length - 1, table.shape[1] - 1)
        result.append(table[row, places, torch.tensor(completion, dtype=torch.long)].cpu().tolist())
    return result
