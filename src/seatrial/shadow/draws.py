"""Are these tokens a plausible draw? Calibrated tests over all drawn tokens, given the probabilities they should have.

Each test has a z value that is about standard normal for an honest sampler. A test fails beyond `LIMIT`: below 1e-9 per test,
so that sixty clean trials with several tests each raise no alarm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

LIMIT = 6.5


@dataclass
class Draws:
    """Sums over all drawn tokens of a run."""

    surprise: float = 0.0
    variance: float = 0.0
    ranks: list[float] = field(default_factory=list)
    twins: float = 0.0
    twin_variance: float = 0.0
    impossible: int = 0
    tokens: int = 0

    def add(self, scores: Any, drawn: Any, open_rows: Any, group: int) -> None:
        """One position: processed scores [B, V], the tokens drawn, and which rows are still open."""
        table = torch.log_softmax(scores, -1)
        shares = table.exp()
        finite = torch.where(shares > 0, table, torch.zeros_like(table))
        mean = (shares * finite).sum(-1)
        spread = (shares * finite**2).sum(-1) - mean**2
        taken = table.gather(1, drawn.unsqueeze(1)).squeeze(1)
        below = torch.where(table > taken.unsqueeze(1), shares, torch.zeros_like(shares)).sum(-1)
        level = torch.where(table == taken.unsqueeze(1), shares, torch.zeros_like(shares)).sum(-1)
        for row in open_rows.nonzero().flatten().tolist():
            if not math.isfinite(float(taken[row])):
                self.impossible += 1
                continue
            self.tokens += 1
            self.surprise += float(taken[row] - mean[row])
            self.variance += float(spread[row])
            self.ranks.append(float(below[row] + level[row] / 2))
        self._add_twins(shares, drawn, open_rows, group)

    def _add_twins(self, shares: Any, drawn: Any, open_rows: Any, group: int) -> None:
        """Rows of one group with the same distribution: how often two neighbours draw the same token."""
        for start in range(0, len(drawn) - group + 1, group):
            for row in range(start, start + group - 1, 2):
                if bool(open_rows[row]) and bool(open_rows[row + 1]) and torch.allclose(shares[row], shares[row + 1], atol=1e-9):
                    chance = float((shares[row] ** 2).sum())
                    self.twins += float(drawn[row] == drawn[row + 1]) - chance
                    self.twin_variance += chance * (1 - chance)

    def results(self) -> dict[str, float]:
        """The z value of each test; infinite where a token was drawn that had no chance."""
        if self.impossible:
            return {"tokens that had no chance": math.inf}
        made = {}
        if self.variance > 0:
            made["mean log-probability of the drawn tokens"] = self.surprise / math.sqrt(self.variance)
        if self.twin_variance > 1:
            made["equal first tokens within groups"] = self.twins / math.sqrt(self.twin_variance)
        if len(self.ranks) > 20:
            # The mid-rank of a draw among the probabilities has mean 1/2 and a variance of at most 1/12: conservative.
            made["rank of the drawn tokens"] = (sum(self.ranks) / len(self.ranks) - 0.5) * math.sqrt(12 * len(self.ranks))
        return made
