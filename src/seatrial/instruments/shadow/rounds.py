"""One generation and all that follows from it: rows, rewards, advantages, masks, and which rows each loss used."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from seatrial.instruments.shadow import formulas
from seatrial.instruments.shadow.interface import Diverged, ShadowSettings

Tensor = Any


@dataclass
class Round:
    """Completions of one generation over all ranks, in the order of rank and row."""

    prompts: list[list[int]]
    completions: list[list[int]]
    rows: list[int] = field(default_factory=list)  # the dataset row of each completion
    rewards: dict[str, list[float]] = field(default_factory=dict)
    table: Tensor = None  # rewards [completions, functions]
    taken: Tensor = None  # the same table as the trainer has it
    advantages: Tensor = None  # one per completion, or one per token
    returns: Tensor = None
    values: Tensor = None  # what the critic made of each token when the round began
    total: Tensor = None  # the weighted reward of each completion
    rewarded: Tensor = None  # rewards of tokens, with a KL penalty where there is one
    ids: Tensor = None
    attention: Tensor = None
    mask: Tensor = None
    old: Tensor = None
    entropies: Tensor = None  # of the weights that drew the round
    ref: Tensor = None
    said: Tensor = None  # what another generator said of its tokens [B, T], as the trainer was told
    correction: Tensor = None  # what the loss is multiplied by for that
    used: dict[str, list[Counter[int]]] = field(default_factory=dict)  # by model, for each iteration, how often each row was used

    taken_rows: list[int] = field(default_factory=list)  # rows of the policy's loss, in order, in the first iteration

    def per_rank(self, world: int) -> int:
        return len(self.prompts) // world

    def prepare(self, names: Sequence[str], pad: int, eos: Sequence[int], s: ShadowSettings) -> None:
        missing = [name for name in names if name not in self.rewards]
        if missing:
            raise Diverged("reward", "a reward function was not called", missing[0], "no call")
        self.table = torch.tensor([self.rewards[name] for name in names], dtype=torch.float64).T
        self.total = formulas.total_rewards(self.table, s)
        wide, long = max(map(len, self.prompts)), max(map(len, self.completions))
        rows = list(zip(self.prompts, self.completions, strict=True))
        self.ids = torch.tensor([[pad] * (wide - len(p)) + p + c + [pad] * (long - len(c)) for p, c in rows])
        self.mask = torch.tensor([[1] * len(c) + [0] * (long - len(c)) for c in self.completions])
        if s.mask_truncated:
            ends = (*eos, pad)
            self.mask = self.mask * torch.tensor([[int(bool(c) and c[-1] in ends)] for c in self.completions])
        prompt_mask = torch.tensor([[0] * (wide - len(p)) + [1] * len(p) for p in self.prompts])
        self.attention = torch.cat([prompt_mask, self.mask], 1)

    def estimate(self, s: ShadowSettings) -> None:
        if s.estimator == "gae" or s.reward_beta:
            self.rewarded = formulas.token_rewards(self.total, self.mask, self.old, self.ref, s)
        if s.estimator == "gae":
            self.advantages, self.returns = formulas.gae(self.rewarded, self.values, self.mask, s.gamma, s.lam)
            return
        table = self.table if self.rewarded is None else self.rewarded.sum(1, keepdim=True)
        self.advantages = formulas.advantages(table, s)

    def take(self, ids: Tensor, mask: Tensor | None, rank: int, pad: int, s: ShadowSettings, model: str = "policy") -> list[int]:
        """Which rows went into a forward pass of a rank, known by their tokens; each is used once per iteration."""
        used = self.used.setdefault(model, [])
        start, count = rank * self.per_rank(s.world), self.per_rank(s.world)
        same: dict[tuple[int, ...], list[int]] = {}
        for place in range(start, start + count):
            same.setdefault((*self.prompts[place], *self.completions[place]), []).append(place)
        done = sum(use[place] for use in used for place in range(start, start + count))
        turn = done // max(1, s.micro_batch * s.splits)
        while len(used) <= turn:
            used.append(Counter())
        found = []
        for index, row in enumerate(ids.tolist()):
            key = _key(row, same, pad, int(mask[index].sum()) if mask is not None else None)
            if key is None:
                raise Diverged("data", "a row of the loss that was never generated", "a generated row", row, row=index)
            free = next((place for place in same[key] if not used[turn][place]), None)
            if free is None:
                what = "a generated row stands in the loss more than once per iteration"
                raise Diverged("data", what, "once", f"row {same[key][0]} again", row=index)
            used[turn][free] += 1
            found.append(free)
        self.taken_rows += found if model == "policy" and turn == 0 else []
        return found

    def order(self, rank: int, world: int) -> list[int]:
        """The rows of a rank in the order in which the loss first used them, without those whose tokens do not tell them apart."""
        count = Counter((*prompt, *completion) for prompt, completion in zip(self.prompts, self.completions, strict=True))
        alone = [row for row in self.taken_rows if count[(*self.prompts[row], *self.completions[row])] == 1]
        return [row for row in alone if row // self.per_rank(world) == rank]

    def told(self, rows: Sequence[int], dtype: Any) -> tuple[Tensor, Tensor]:
        """What another generator said of the tokens of these rows, and the correction for it; None, None without one."""
        said = None if self.said is None else self.said[rows].to(dtype)
        return said, None if self.correction is None else self.correction[rows].to(dtype)

    def close(self, s: ShadowSettings, model: str = "policy") -> None:
        whole, turns = Counter(range(len(self.prompts))), self.used.get(model, [])
        if len(turns) == s.iterations and all(use == whole for use in turns):
            return
        used = Counter({row: sum(use[row] for use in turns) for row in whole})
        row = next((row for row in whole if used[row] != s.iterations), 0)
        raise Diverged("data", "how often a generated row was used in a loss", s.iterations, used[row], row=row)


@dataclass
class MicroBatch:
    round: Round
    rank: int
    rows: list[int]
    loss: float | None  # the trainer's own, where it is known
    trainer: dict[str, Tensor]  # what the trainer calls advantages, masks and log-probabilities
    terms: Any = None  # the `formulas.Terms` of the policy's loss, once they are computed
    values: Tensor = None  # of a critic's: what it predicted
    own_logps: Tensor = None
    own_loss: float = math.nan
    own_policy: float = math.nan  # the loss of the micro-batch alone, as it is logged: without entropy, router and accumulation
    own_router: float = math.nan


def _key(row: list[int], same: Mapping[tuple[int, ...], Any], pad: int, tokens: int | None) -> tuple[int, ...] | None:
    """The generated row that a padded one holds; with a sampled padding token at its end, the mask tells which."""
    start = next((place for place, token in enumerate(row) if token != pad), len(row))
    end, matches = len(row), []
    while end > start:
        if tuple(row[start:end]) in same:
            matches.append(tuple(row[start:end]))
        if row[end - 1] != pad:
            break
        end -= 1
    exact = [key for key in matches if len(key) == tokens]
    return next(iter(exact or matches), None)


def ragged(ids: Tensor, lengths: Tensor) -> list[list[Any]]:
    return [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]


def without_padding(ids: list[int], pad: int) -> list[int]:
    start = next((place for place, token in enumerate(ids) if token != pad), len(ids))
    return ids[start:]


def until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    """A row up to and with its first end token."""
    return next((ids[: place + 1] for place, token in enumerate(ids) if token in ends), ids)
