"""Are these tokens a plausible draw? Calibrated tests over all drawn tokens, given the probabilities they should have.

Every test sums differences with mean zero for an honest sampler: their sum, their variance and a bound of each. The score is
`t / sqrt(V + b |t| / 3)`: by Freedman's inequality a score beyond `LIMIT` has a chance below 2e-9, whatever the probabilities look like,
so that sixty clean trials with a hundred tests each raise no alarm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

LIMIT = 6.5
UNLIKELY = 1e-9  # A drawn token may not be less likely than this, over all tokens of a run


@dataclass
class Sum:
    """One test: the sum of its differences, their variance, and the largest that one can be."""

    total: float = 0.0
    variance: float = 0.0
    bound: float = 0.0

    def add(self, differences: Any, variances: Any, bound: float) -> None:
        self.total += float(differences.sum())
        self.variance += float(variances.sum())
        self.bound = max(self.bound, bound)

    def score(self) -> float:
        spread = math.sqrt(self.variance + self.bound * abs(self.total) / 3)
        return self.total / spread if spread else 0.0


@dataclass
class Cells:
    """All rows at one position: probabilities, the tokens drawn, and their places among the probabilities."""

    shares: Any
    drawn: Any
    places: Any  # between -1/2 and 1/2, with mean zero
    variances: Any
    open_rows: Any


@dataclass
class Draws:
    """Sums over all drawn tokens of a run."""

    tests: dict[str, Sum] = field(default_factory=dict)
    counts: Any = None  # for each token of the vocabulary: how often it was drawn, beyond what was to be expected
    spreads: Any = None
    last: list[Cells] = field(default_factory=list)  # the positions of the last generation, and of this one
    now: list[Cells] = field(default_factory=list)
    impossible: int = 0
    least: float = 1.0  # the smallest chance of a token that was drawn: of it, or of one as unlikely
    tokens: int = 0

    def begin(self) -> None:
        self.last, self.now = self.now, []

    def add(self, scores: Any, drawn: Any, open_rows: Any, group: int) -> None:
        """The next position: processed scores [B, V], the tokens drawn, and which rows are still open."""
        table = torch.log_softmax(scores, -1)
        shares = table.exp()
        taken = table.gather(1, drawn.unsqueeze(1)).squeeze(1)
        self.impossible += int((open_rows & ~torch.isfinite(taken)).sum())
        open_rows = open_rows & torch.isfinite(taken)
        self.tokens += int(open_rows.sum())
        cells = _cells(shares, drawn, open_rows)
        position = len(self.now)
        if bool(open_rows.any()):
            self._surprise(table, shares, taken, open_rows, group, position)
            self._sum("rank of the drawn tokens", cells.places[open_rows], cells.variances[open_rows], 0.5)
            self._vocabulary(shares, drawn, open_rows)
            self._pairs(cells, position)
        self.now.append(cells)

    def _sum(self, name: str, differences: Any, variances: Any, bound: float) -> None:
        self.tests.setdefault(name, Sum()).add(differences, variances, bound)

    def _surprise(self, table: Any, shares: Any, taken: Any, open_rows: Any, group: int, position: int) -> None:
        """Log-probabilities against their expectation: over all, by position, and by place within the group."""
        finite = torch.where(shares > 0, table, torch.zeros_like(table))
        mean = (shares * finite).sum(-1)
        spread = (shares * finite**2).sum(-1) - mean**2
        off, bound = taken - mean, float((taken - mean)[open_rows].abs().max())
        name = "mean log-probability of the drawn tokens"
        self._sum(name, off[open_rows], spread[open_rows], bound)
        self._sum(f"{name} at position {position}", off[open_rows], spread[open_rows], bound)
        members = torch.arange(len(off)) % group
        for member in range(group):
            rows = open_rows & (members == member)
            self._sum(f"{name} of completion {member} of each group", off[rows], spread[rows], bound)
        tail = torch.where(table <= taken.unsqueeze(1), shares, torch.zeros_like(shares)).sum(-1)
        self.least = min(self.least, float(tail[open_rows].min()))

    def _vocabulary(self, shares: Any, drawn: Any, open_rows: Any) -> None:
        if self.counts is None:
            self.counts, self.spreads = torch.zeros(shares.shape[1], dtype=shares.dtype), torch.zeros(shares.shape[1], dtype=shares.dtype)
        self.counts += torch.bincount(drawn[open_rows], minlength=len(self.counts)) - shares[open_rows].sum(0)
        self.spreads += (shares * (1 - shares))[open_rows].sum(0)

    def _pairs(self, cells: Cells, position: int) -> None:
        """A draw knows nothing of the row above it, of the position before it, and of the generation before."""
        rows = Cells(*(value[:-1] for value in vars(cells).values())), Cells(*(value[1:] for value in vars(cells).values()))
        self._pair("the next row", *rows)
        if self.now:
            self._pair("the next position", self.now[-1], cells)
        if position < len(self.last) and len(self.last[position].drawn) == len(cells.drawn):
            self._pair("the next generation", self.last[position], cells)

    def _pair(self, name: str, one: Cells, two: Cells) -> None:
        both = one.open_rows & two.open_rows
        if not bool(both.any()):
            return
        places = (one.places * two.places)[both]
        self._sum(f"rank of the drawn tokens against those of {name}", places, (one.variances * two.variances)[both], 0.25)
        if name != "the next position":  # the next position's probabilities follow from the token before
            chance = (one.shares * two.shares).sum(-1)[both]
            self._sum(f"tokens equal to those of {name}", (one.drawn == two.drawn)[both].double() - chance, chance * (1 - chance), 1.0)

    def results(self) -> dict[str, float]:
        """The score of each test; infinite where a token was drawn that had no chance."""
        if self.impossible or self.least * max(1, self.tokens) < UNLIKELY:
            return {"tokens that had no chance": math.inf}
        made = {name: test.score() for name, test in self.tests.items()}
        if self.counts is not None:
            scores = self.counts / (self.spreads + self.counts.abs() / 3).clamp(min=1e-30).sqrt()
            token = int(scores.abs().argmax())
            made[f"how often token {token} was drawn"] = float(scores[token])
        return made


def _cells(shares: Any, drawn: Any, open_rows: Any) -> Cells:
    """The place of each drawn token in the order of falling probability, as the middle of its own share."""
    order = shares.argsort(dim=-1, descending=True, stable=True)
    ranked = shares.gather(1, order)
    middles = ranked.cumsum(-1) - ranked / 2 - 0.5
    variances = (ranked * middles**2).sum(-1)
    at = (order == drawn.unsqueeze(1)).int().argmax(-1, keepdim=True)
    return Cells(shares, drawn, middles.gather(1, at).squeeze(1), variances, open_rows)
