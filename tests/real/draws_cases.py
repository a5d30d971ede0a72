"""The tests over drawn tokens: honest draws stay far within the limit, dishonest ones do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from seatrial.instruments.shadow.draws import LIMIT, Draws

ROWS, WORDS, POSITIONS, ROUNDS, GROUP = 36, 60, 8, 4, 4
Sampler = Callable[[Any, Any, int], Any]
"""From probabilities [rows, words], a generator and the position to tokens."""


def plain(shares: Any, chance: Any, _: int) -> Any:
    return torch.multinomial(shares, 1, generator=chance).squeeze(1)


def largest(seed: int, sampler: Sampler, peaked: float = 1.5) -> float:
    """The largest score of a run whose tokens a sampler drew."""
    world, chance, draws = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1), Draws()
    for _ in range(ROUNDS):
        draws.begin()
        prompts = torch.randn(ROWS // GROUP, POSITIONS, WORDS, generator=world, dtype=torch.float64) * peaked
        scores = prompts.repeat_interleave(GROUP, 0)
        for place in range(POSITIONS):
            drawn = sampler(scores[:, place].softmax(-1), chance, place)
            draws.add(scores[:, place], drawn, torch.ones(ROWS, dtype=torch.bool), GROUP)
    return max(abs(value) for value in draws.results().values())


def case_honest_draws_raise_no_alarm() -> None:
    """Also where one token has nearly all of the probability."""
    worst = max(largest(seed, plain, peaked) for seed in range(60) for peaked in (0.3, 1.5, 6.0))
    assert worst < 0.85 * LIMIT, worst


def case_dishonest_draws_are_seen() -> None:
    """Each bends the draw without bending the scores."""

    def greedy_first(shares: Any, chance: Any, place: int) -> Any:
        return shares.argmax(-1) if place == 0 else plain(shares, chance, place)

    def colder(shares: Any, chance: Any, place: int) -> Any:
        return plain(shares**1.5, chance, place)

    def same_noise(shares: Any, _: Any, place: int) -> Any:
        return plain(shares, torch.Generator().manual_seed(place), place)

    def twins(shares: Any, chance: Any, place: int) -> Any:
        return plain(shares, chance, place)[::2].repeat_interleave(2)

    def first_of_group_greedy(shares: Any, chance: Any, place: int) -> Any:
        drawn = plain(shares, chance, place)
        drawn[::GROUP] = shares[::GROUP].argmax(-1)
        return drawn

    def impossible(shares: Any, chance: Any, place: int) -> Any:
        drawn = plain(shares, chance, place)
        drawn[0] = shares[0].argmin()
        return drawn

    for sampler in (greedy_first, colder, same_noise, twins, first_of_group_greedy):
        assert largest(5, sampler) > LIMIT, sampler.__name__
    assert largest(5, impossible, 9.0) > LIMIT
