"""The data and the sampling of a run: which prompts come when, the probabilities that tokens were drawn from, and where completions end."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from seatrial.instruments.shadow import formulas
from seatrial.instruments.shadow.draws import LIMIT, Draws, Sum
from seatrial.instruments.shadow.interface import Diverged, Findings, ShadowSettings, World
from seatrial.instruments.shadow.network import FLOOR, SLACK, Network, ShadowPolicy
from seatrial.instruments.shadow.rounds import Round

Tensor = Any
PIXEL = 1e-5  # how far rounding may move a pixel
SURE = 16  # rows of a generation from which on chance does not explain an order that repeats itself, or has one stride
MANY = 6  # rows that hardly come twice in the same order by chance


class Data:
    """Follows the prompts of a run. `own_law`: the loop is of the version whose laws are known."""

    def __init__(self, settings: ShadowSettings, world: World, found: Findings) -> None:
        self.s, self.world, self.found = settings, world, found
        self.own_law = False
        self.seen: list[int] = []  # dataset rows in the order in which they were drawn
        self.mixing = Sum()
        self.orders: list[list[int]] = []  # in which rows of a generation came to the loss
        self.ordered = False  # whether prompts come in the order of the seed

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


SMALLEST = -80.0  # the log-probability below which fp32 may have none


class Sampling:
    """Follows what a generator draws. `own_law`: transformers is of the version that the shadow has."""

    def __init__(self, settings: ShadowSettings, world: World, found: Findings, actor: Network, exercised: Counter[str]) -> None:
        self.s, self.world, self.found, self.actor, self.exercised = settings, world, found, actor, exercised
        self.own_law = False
        self.draws = Draws()
        self.states: set[bytes] = set()  # random states that generations started from

    def follow(self, made: Round, rows: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        """The scores that tokens were drawn from are ours, after every processor; draws are collected for a test over all of them."""
        prompts, pad = [made.prompts[row] for row in rows], self.world.pad
        if "sequences" in tensors:
            sequences, width = tensors["sequences"], tensors["prompt_ids"].shape[1]
        else:
            width, long = max(map(len, prompts)), max(len(made.completions[row]) for row in rows)
            padded = [([pad] * (width - len(made.prompts[row])), made.prompts[row], made.completions[row]) for row in rows]
            sequences = torch.tensor([[*left, *prompt, *rest, *[pad] * (long - len(rest))] for left, prompt, rest in padded])
        own_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
        given = tensors.get("prompt_mask")
        if given is not None and len(given) < len(own_mask):  # several completions of each prompt were asked for
            given = given.repeat_interleave(len(own_mask) // len(given), 0)
        if given is not None and not torch.equal(given.long(), own_mask):
            row = int((given.long() != own_mask).any(1).nonzero()[0])
            raise Diverged("sampling", "the attention mask of generation", own_mask[row], given[row], row=row)
        length = sequences.shape[1] - width
        mask = torch.cat([own_mask, torch.ones(len(prompts), length, dtype=torch.long)], 1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits, single = (
                policy.forward(self.actor.arguments(policy), sequences, mask, positions, **pictures(self.world, made, rows, policy)).logits[
                    :, width - 1 : -1
                ]
                for policy in (self.actor.policy, self.actor.single)
            )
        words = next((tensors[name].shape[-1] for name in ("scores", "shares") if name in tensors), logits.shape[-1])
        if words != logits.shape[-1]:
            raise Diverged("sampling", "words that tokens were drawn from", logits.shape[-1], words)
        allowed = SLACK * float((logits - single.double()).abs().max()) / self.s.temperature + FLOOR
        open_rows = torch.ones(len(prompts), dtype=torch.bool)
        if "random_state" in tensors:
            self._redraw(tensors, sequences[:, width:], rows)
        self.draws.begin()
        for place in range(length):
            end = width + place
            own, near = formulas.processed(logits[:, place], sequences[:, :end], mask[:, :end], self.s, self.exercised)
            seen = own
            if "scores" in tensors:
                seen = tensors["scores"][:, place].double()
                self._scores(own, seen, near, open_rows, rows, place, allowed)
            elif "shares" in tensors:
                # Against the likeliest token: one at an edge, which rounding lets in or out, would move the sum of all.
                seen, top = tensors["shares"][:, place].double().log(), own.argmax(-1, keepdim=True)
                mine, got = own - own.gather(1, top), seen - seen.gather(1, top)
                tiny = torch.isfinite(mine) & (mine < SMALLEST)
                self._scores(mine, got, near | tiny, open_rows, rows, place, 2 * allowed)
            if "logprobs" in tensors:
                sure = open_rows & ~near.any(1)  # a token at an edge, which rounding lets in or out, moves the sum of all
                self._drawn(own, sequences[:, end], tensors["logprobs"][:, place], sure, rows, place, allowed)
            self.draws.add(seen, sequences[:, width + place], open_rows, self.s.group)
            open_rows = open_rows & ~torch.isin(sequences[:, width + place], torch.tensor(self.world.eos))

    def _redraw(self, tensors: Mapping[str, Tensor], drawn: Tensor, rows: Sequence[int]) -> None:
        """From the recorded probabilities and random state the same tokens are drawn again; no state is used twice.

        Another release may draw in another way: it does, if most of its tokens are others.
        """
        state = tensors["random_state"].numpy().tobytes()
        if state in self.states:
            raise Diverged("sampling", "the random state that a generation starts from", "a new one", "that of an earlier generation")
        self.states.add(state)
        chance = torch.Generator()
        chance.set_state(tensors["random_state"])
        own = torch.cat([torch.multinomial(part, 1, generator=chance) for part in tensors["shares"].unbind(1)], 1)
        ends = torch.isin(drawn, torch.tensor(self.world.eos)).int()
        open_cells = (ends.cumsum(1) - ends) == 0
        wrong = (own != drawn) & open_cells
        if int(wrong.sum()) * 2 > int(open_cells.sum()) and not self.own_law:
            return
        if bool(wrong.any()):
            place, row = (int(value) for value in wrong.T.nonzero()[0])
            what = "the token that the recorded probabilities and random state give"
            raise Diverged("sampling", what, int(own[row, place]), int(drawn[row, place]), row=rows[row], position=place)
        self.found.count("sampling", int(open_cells.sum()))

    def _drawn(self, own: Tensor, drawn: Tensor, said: Tensor, open_rows: Tensor, rows: Sequence[int], place: int, allowed: float) -> None:
        """A generator of its own says how likely each drawn token was; by our forward pass it was just as likely."""
        mine = torch.log_softmax(own, -1).gather(1, drawn.unsqueeze(1)).squeeze(1)
        off = torch.where(open_rows, (mine - said.double()).abs(), torch.zeros_like(mine))
        if not float(off.max()) <= 2 * allowed:
            row = int(torch.nan_to_num(off, nan=math.inf).argmax())
            where = {"row": rows[row], "position": place, "token": int(drawn[row])}
            raise Diverged("sampling", "log-probability of a drawn token, as its generator said it", mine[row], said[row], **where)
        self.found.count("sampling", int(open_rows.sum()), float(off.max()) / (2 * allowed))

    def _scores(self, own: Tensor, got: Tensor, near: Tensor, open_rows: Tensor, rows: Sequence[int], place: int, allowed: float) -> None:
        both = torch.isfinite(own) & torch.isfinite(got)
        gap = torch.where(both, (own - got).abs(), torch.zeros_like(own))
        odd = (torch.isfinite(own) != torch.isfinite(got)) & ~near
        wrong = ((gap > allowed) | odd | torch.isnan(got)) & open_rows.unsqueeze(1)
        if bool(wrong.any()):
            row, token = (int(value) for value in wrong.nonzero()[0])
            count = int(wrong.any(1).sum())
            what = f"scores that tokens were drawn from ({count} of {len(own)} rows at this position)"
            raise Diverged("sampling", what, own[row, token], got[row, token], row=rows[row], position=place, token=token)
        self.found.count("sampling", int(open_rows.sum()), float(gap[open_rows].max()) / allowed if bool(open_rows.any()) else 0.0)

    def stopped(self, rest: Sequence[int], row: int) -> None:
        """After its end token a row is filled up with padding."""
        if any(token != self.world.pad for token in rest):
            raise Diverged("length", "what follows the end token of a completion", "padding", list(rest), row=row)

    def lengths(self, made: Round) -> None:
        """Every completion ends with its end token, or at the limit."""
        for row, ids in enumerate(made.completions):
            ended = bool(ids) and ids[-1] in self.world.eos
            if len(ids) > self.s.max_tokens or (not ended and len(ids) != self.s.max_tokens):
                raise Diverged("length", "the length of a completion without an end token", self.s.max_tokens, len(ids), row=row)
            self.exercised["ended" if ended else "truncated"] += 1
        self.found.count("length", len(made.completions))

    def plausible(self) -> None:
        for name, value in self.draws.results().items():
            if not abs(value) <= LIMIT:
                raise Diverged("sampling", f"{name} over {self.draws.tokens} tokens", f"a score within {LIMIT:g}", value)
            self.found.count("sampling", 1, abs(value) / LIMIT)


def pictures(world: World, made: Round, rows: Sequence[int], policy: ShadowPolicy) -> dict[str, Tensor]:
    """The pictures that a forward pass of these rows needs."""
    made_of = world.pictures_of([made.rows[row] for row in rows])
    return {} if made_of is None else {"pixel_values": made_of.to(policy.dtype)}
