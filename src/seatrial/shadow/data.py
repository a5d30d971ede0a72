"""The data of a run: which prompts come when, whole groups of them, each row with its picture, rows mixed before the loss."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from seatrial.shadow.draws import LIMIT, Sum
from seatrial.shadow.result import Diverged, Findings
from seatrial.shadow.rounds import Round
from seatrial.shadow.settings import Settings, World

Tensor = Any
PIXEL = 1e-5
"""How far rounding may move a pixel."""
SURE = 16
"""Rows of a generation from which on chance does not explain an order that repeats itself, or has one stride."""
MANY = 6
"""Rows that hardly come twice in the same order by chance."""


class Data:
    """Follows the prompts of a run. `own_law`: the loop is of the version whose laws are known."""

    def __init__(self, settings: Settings, world: World, found: Findings) -> None:
        self.s, self.world, self.found = settings, world, found
        self.own_law = False
        self.seen: list[int] = []
        """Dataset rows in the order in which they were drawn."""
        self.mixing = Sum()
        self.orders: list[list[int]] = []
        """In which rows of a generation came to the loss."""
        self.ordered = False
        """Whether prompts come in the order of the seed."""

    def follow(self, made: Round) -> None:
        """Whole groups of dataset prompts, each prompt as often as the sampler's law says."""
        s, world = self.s, self.world
        known = {tuple(ids): row for row, ids in enumerate(world.prompts)}
        if len(made.prompts) != s.rows():
            raise Diverged("data", "completions per generation", s.rows(), len(made.prompts))
        for place, ids in enumerate(made.prompts):
            row = known.get(tuple(ids))
            if row is None:
                raise Diverged("data", "a prompt that is not in the dataset was generated from", "a row of the dataset", ids, row=place)
            made.rows.append(row)
        for start in range(0, len(made.rows), s.group):
            group = made.rows[start : start + s.group]
            if len(set(group)) != 1:
                raise Diverged("data", f"a group of {s.group} completions", "one prompt", group, row=start)
        fresh = made.rows[:: s.group]
        per_epoch = len(world.prompts) // s.prompts() * s.prompts()
        epoch = self.seen[len(self.seen) // per_epoch * per_epoch :] if per_epoch else []
        twice = [row for row, count in Counter([*epoch, *fresh]).items() if count > 1]
        if twice and per_epoch:
            raise Diverged("data", "prompts drawn again within one epoch", "each once", f"dataset row {twice[0]}", row=twice[0])
        own_order = [row % per_epoch for row in range(len(self.seen), len(self.seen) + len(fresh))] if per_epoch else fresh
        order = sorted(fresh) if s.arrival else fresh
        if s.shuffle and len(fresh) > MANY and order == own_order:
            raise Diverged("data", "the order of the prompts", "shuffled", "the dataset's own")
        if not s.shuffle and order != own_order:
            raise Diverged("data", "the order of the prompts", own_order, order)
        self.seen += fresh
        if s.shuffle and per_epoch and not s.arrival:
            self._shuffled(per_epoch)
        self.found.count("data", len(made.rows))

    def _shuffled(self, per_epoch: int) -> None:
        """Prompts come in the order of the seed, where the sampler's law is known; else in an order that chance explains."""
        s, count, seen = self.s, len(self.world.prompts), self.seen
        if s.seeded_order:
            chance = torch.Generator().manual_seed(s.seed)
            epochs = [torch.randperm(count, generator=chance).tolist()[:per_epoch] for _ in range(0, len(seen), per_epoch)]
            expected = [row for epoch in epochs for row in epoch][: len(seen)]
            if len(seen) <= s.prompts():  # the first generation tells whether another version has this law
                self.ordered = self.own_law or (seen == expected and len(seen) > MANY)
            if seen != expected and self.ordered:
                place = next(index for index, (got, own) in enumerate(zip(seen, expected, strict=True)) if got != own)
                raise Diverged("data", f"prompt {place + 1} in the order of seed {s.seed}", expected[place], seen[place], row=place)
        epoch = seen[(len(seen) - 1) // per_epoch * per_epoch :]
        before = seen[-len(epoch) - per_epoch : -len(epoch)][: len(epoch)]
        if len(epoch) > MANY and epoch == before:
            raise Diverged("data", "the order of the prompts", "another in each epoch", "that of the epoch before")
        neighbours = sum(abs(one - two) == 1 for one, two in itertools.pairwise(epoch))
        test = Sum()
        test.add(torch.tensor(neighbours - 2.0 * (len(epoch) - 1) / count), torch.tensor(2.0), 1.0)
        if test.score() > LIMIT:
            raise Diverged("data", "the order of the prompts", "shuffled", f"{neighbours} of {len(epoch) - 1} in the dataset's own order")

    def pictured(self, made: Round, rows: Sequence[int], tensors: Mapping[str, Tensor], where: str) -> None:
        """Each row comes with the picture of its dataset row."""
        own = self.world.pictures_of([made.rows[row] for row in rows])
        if own is None:
            return
        got = tensors.get("pixel_values")
        if got is None or got.shape != own.shape:
            raise Diverged("data", f"pictures in the {where}", list(own.shape), "none" if got is None else list(got.shape))
        off = (got.double() - own.double()).abs().flatten(1).max(1).values
        if not float(off.max()) <= PIXEL:
            row = int(torch.nan_to_num(off, nan=math.inf).argmax())
            means = own[row].double().mean(), got[row].double().mean()
            raise Diverged("data", f"mean of a row's picture in the {where}", *means, row=rows[row])
        self.found.count("data", len(rows))

    def mixed(self, made: Round) -> None:
        """Rows of a generation come to the loss in another order than they were drawn, where the loop's law says so."""
        if not self.s.mixes_rows or not self.own_law:
            return
        what = "the order of a generation's rows in the loss"
        for rank in range(self.s.world):
            order = made.order(rank, self.s.world)
            if len(order) <= SURE:
                continue
            for other in self.orders:
                both = set(order) & set(other)
                if len(both) > SURE and [row for row in order if row in both] == [row for row in other if row in both]:
                    raise Diverged("data", what, "another each time", "that of an earlier generation")
            self.orders.append(order)
            strides = Counter((two - one) % len(made.prompts) for one, two in itertools.pairwise(order))
            stride, often = strides.most_common(1)[0]
            if often * 4 > 3 * len(order):
                raise Diverged("data", what, "shuffled", f"{often} of {len(order) - 1} rows lie {stride} after the one before")
            neighbours = sum(two - one == 1 for one, two in itertools.pairwise(order))
            self.mixing.add(torch.tensor(neighbours - (len(order) - 1) / max(1, len(order))), torch.tensor(1.0), 1.0)
        if self.mixing.score() > LIMIT:
            raise Diverged("data", what, "shuffled", "that in which they were drawn")
