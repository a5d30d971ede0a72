"""Recomputes every recorded step from dataset rows, drawn tokens and configured values, and compares stage by stage.

The proof is the chain: rows of the dataset, tokens drawn from the right distribution, our own rewards, and from these the gradient
that torch's optimizer saw and the weights that it left. What the trainer calls advantages, masks or log-probabilities is read only
where that chain breaks, to name the stage (see `locate`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from seatrial.instruments.batch_record import text_digest
from seatrial.shadow import formulas, locate, logged
from seatrial.shadow.draws import LIMIT, Draws, Sum
from seatrial.shadow.network import FLOOR, SLACK, Network
from seatrial.shadow.policy import Policy, completion_terms, token_values
from seatrial.shadow.record import Moment, moments
from seatrial.shadow.result import Diverged, Findings
from seatrial.shadow.rounds import MicroBatch, Round, ragged, until_end, without_padding
from seatrial.shadow.settings import Settings

Tensor = Any
SMALLEST = -80.0
"""The log-probability below which fp32 may have none."""
PIXEL = 1e-5
"""How far rounding may move a pixel."""
MANY = 6
"""Rows that hardly come twice in the same order by chance."""


@dataclass(frozen=True)
class World:
    """What the shadow knows beside the settings: the dataset, the tokenizer, the rewards, the model's files."""

    prompts: Sequence[Sequence[int]]
    """Token ids of each dataset row."""
    rewards: Mapping[str, Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[float | None]]]
    """Reward functions, given completions and dataset rows."""
    model: Path
    eos: tuple[int, ...]
    pad: int
    loop: str = ""
    """The package of the loop."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the packages whose laws and metrics are known: a run of the same version follows each of them."""
    texts: Sequence[str] = ()
    """The prompt of each dataset row, where reward functions are given it."""
    decode: Callable[[Sequence[int]], str] = lambda _: ""
    """The text of a completion, as reward functions are given it."""
    pictures: Tensor = None
    """Pixel values of each dataset row, where prompts have a picture."""
    layout: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor] | None] | None = None
    """Makes the release's tensors of recorded ones, where the loop fuses or renames them."""


class Shadow:
    """One pass over a record."""

    def __init__(self, record: Path, settings: Settings, world: World, progress: Callable[[str], None] = lambda _: None) -> None:
        self.record, self.s, self.world, self.progress = record, settings, world, progress
        self.found = Findings()
        for stage, reason in settings.unsupported.items():
            self.found.stages[stage].unproven = reason
        self.actor = Network(world.model, settings, self.found, layout=world.layout)
        where = {"model": "critic"}
        self.critic = Network(world.model, settings.critic, self.found, where, True, world.layout) if settings.critic else None
        if self.actor.release:
            self.policy, self.single = self.actor.policy, self.actor.single
        self.draws = Draws()
        self.round: Round | None = None
        self.generated_at = 0
        self.seen: list[int] = []
        """Dataset rows in the order in which they were drawn."""
        self.tokens = 0
        """Prompt and completion tokens so far."""
        self.expected: dict[str, float] = {}
        """What is to be logged for the last step."""
        self.window: list[dict[str, float]] = []
        """The same of every step since the last log."""
        self.arguments: dict[str, Any] = {}
        """What the trainer's own settings say, read back from it."""
        self.same: set[str] = set()
        """Packages of which the run used the shadow's own version."""
        self.mixing = Sum()
        self.ordered = False
        """Whether prompts come in the order of the seed."""
        self.states: set[bytes] = set()
        """Random states that generations started from."""
        self.logs: list[tuple[int, Mapping[str, Any]]] = []
        """What was logged, by step."""
        self.of_rounds: tuple[str, ...] = ()
        """Metrics that only a step with a generation logs."""
        self.losses: list[float] = []
        """The loss of each step."""
        self.exercised: Counter[str] = Counter()
        """How often something happened that gives a setting an effect."""

    def run(self) -> Findings:
        """Recompute until the record ends or a stage diverges."""
        step = 0
        try:
            for moment in moments(self.record, self.s.world):
                step = moment.step
                getattr(self, f"_{moment.kind}", lambda _: None)(moment)
            if not self.found.steps:
                raise Diverged("update", "optimizer steps in the record", self.s.max_steps, 0)
            self._end()
            self._plausible()
        except Diverged as divergence:
            self.found.diverge(divergence, step)
        return self.found

    def _end(self) -> None:
        """A loop whose record holds whole rounds checks the last one, too."""

    def _proves(self, stage: str) -> bool:
        return not self.found.stages[stage].unproven

    # the start

    def _started(self, moment: Moment) -> None:
        event = moment.first()
        self.arguments = event.values.get("arguments", {})
        got = event.values.get("versions", {})
        self.same = {name for name, version in self.world.versions.items() if got.get(name) == version}
        self.actor.start(moment, "peft" in self.same)

    def _value_started(self, moment: Moment) -> None:
        self._critic().start(moment)

    def _critic(self) -> Network:
        if self.critic is None:
            raise Diverged("value", "a critic was trained", "no critic is configured", "a critic")
        return self.critic

    # data, sampling, length, reward

    def _generated(self, moment: Moment) -> None:
        if self.round is not None:
            self._close(self.round)
        self.generated_at = moment.step
        made = Round([], [])
        for event in moment.ranks:
            tensors = event.tensors()
            if "completion_ids" in tensors:
                made.prompts += ragged(tensors["prompt_ids"], tensors["prompt_ids/lengths"])
                made.completions += ragged(tensors["completion_ids"], tensors["completion_ids/lengths"])
            else:
                width = tensors["prompt_ids"].shape[1]
                made.prompts += [without_padding(ids, self.world.pad) for ids in tensors["prompt_ids"].tolist()]
                for ids in tensors["sequences"][:, width:].tolist():
                    made.completions.append(until_end(ids, self.world.eos))
                    self._stopped(ids[len(made.completions[-1]) :], len(made.completions) - 1)
        self._data(made)
        count = made.per_rank(self.s.world)
        for rank, event in enumerate(moment.ranks):
            self._pictured(made, range(rank * count, (rank + 1) * count), event.tensors(), "generation")
        if self._proves("sampling") and self.actor.known:
            for rank, event in enumerate(moment.ranks):
                self._sampling(made, range(rank * count, (rank + 1) * count), event.tensors())
        self._lengths(made)
        self.round = made

    def _stopped(self, rest: Sequence[int], row: int) -> None:
        """After its end token a row is filled up with padding."""
        if any(token != self.world.pad for token in rest):
            raise Diverged("length", "what follows the end token of a completion", "padding", list(rest), row=row)

    def _close(self, made: Round) -> None:
        """Every row of a round was used as often as configured."""
        made.close(self.s)
        self._mixed(made)
        if self.s.critic is not None:
            made.close(self.s.critic, "critic")
        self.found.count("data", len(made.prompts))

    def _mixed(self, made: Round) -> None:
        """Rows of a generation come to the loss in another order than they were drawn, where the loop's law says so."""
        if not self.s.mixes_rows:
            return
        for rank in range(self.s.world):
            order = made.order(rank, self.s.world)
            neighbours = sum(two - one == 1 for one, two in itertools.pairwise(order))
            self.mixing.add(torch.tensor(neighbours - (len(order) - 1) / max(1, len(order))), torch.tensor(1.0), 1.0)
        if self.mixing.score() > LIMIT:
            raise Diverged("data", "the order of a generation's rows in the loss", "shuffled", "that in which they were drawn")

    def _data(self, made: Round) -> None:
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

    def _seen(self, made: Round, rows: Sequence[int], policy: Policy) -> dict[str, Tensor]:
        """The pictures that a forward pass of these rows needs."""
        if self.world.pictures is None:
            return {}
        return {"pixel_values": self.world.pictures[[made.rows[row] for row in rows]].to(policy.dtype)}

    def _pictured(self, made: Round, rows: Sequence[int], tensors: Mapping[str, Tensor], where: str) -> None:
        """Each row comes with the picture of its dataset row."""
        if self.world.pictures is None:
            return
        got, own = tensors.get("pixel_values"), self.world.pictures[[made.rows[row] for row in rows]]
        if got is None or got.shape != own.shape:
            raise Diverged("data", f"pictures in the {where}", list(own.shape), "none" if got is None else list(got.shape))
        off = (got.double() - own.double()).abs().flatten(1).max(1).values
        if not float(off.max()) <= PIXEL:
            row = int(torch.nan_to_num(off, nan=math.inf).argmax())
            means = own[row].double().mean(), got[row].double().mean()
            raise Diverged("data", f"mean of a row's picture in the {where}", *means, row=rows[row])
        self.found.count("data", len(rows))

    def _shuffled(self, per_epoch: int) -> None:
        """Prompts come in the order of the seed, where the sampler's law is known; else in an order that chance explains."""
        s, count, seen = self.s, len(self.world.prompts), self.seen
        if s.seeded_order:
            chance = torch.Generator().manual_seed(s.seed)
            epochs = [torch.randperm(count, generator=chance).tolist()[:per_epoch] for _ in range(0, len(seen), per_epoch)]
            expected = [row for epoch in epochs for row in epoch][: len(seen)]
            if len(seen) <= s.prompts():  # the first generation tells whether another version has this law
                self.ordered = self.world.loop in self.same or (seen == expected and len(seen) > MANY)
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

    def _sampling(self, made: Round, rows: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
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
        if given is not None and not torch.equal(given.long(), own_mask):
            row = int((given.long() != own_mask).any(1).nonzero()[0])
            raise Diverged("sampling", "the attention mask of generation", own_mask[row], given[row], row=row)
        length = sequences.shape[1] - width
        mask = torch.cat([own_mask, torch.ones(len(prompts), length, dtype=torch.long)], 1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits, single = (
                policy.forward(self.actor.arguments(policy), sequences, mask, positions, **self._seen(made, rows, policy)).logits[
                    :, width - 1 : -1
                ]
                for policy in (self.policy, self.single)
            )
        allowed = SLACK * float((logits - single.double()).abs().max()) / self.s.temperature + FLOOR
        open_rows = torch.ones(len(prompts), dtype=torch.bool)
        if "random_state" in tensors:
            self._redraw(tensors, sequences[:, width:], rows)
        self.draws.begin()
        for place in range(length):
            own, near = formulas.processed(logits[:, place], sequences[:, : width + place], self.s, self.exercised)
            if "scores" in tensors:
                self._scores(own, tensors["scores"][:, place].double(), near, open_rows, rows, place, allowed)
            elif "shares" in tensors:
                mine, got = torch.log_softmax(own, -1), tensors["shares"][:, place].double().log()
                self._scores(mine, got, near | (mine < SMALLEST), open_rows, rows, place, 2 * allowed)
            if "logprobs" in tensors and self.s.is_plain_sampling():
                self._drawn(own, sequences[:, width + place], tensors["logprobs"][:, place], open_rows, rows, place, allowed)
            self.draws.add(own, sequences[:, width + place], open_rows, self.s.group)
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
        if int(wrong.sum()) * 2 > int(open_cells.sum()) and "transformers" not in self.same:
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

    def _lengths(self, made: Round) -> None:
        """Every completion ends with its end token, or at the limit."""
        for row, ids in enumerate(made.completions):
            ended = bool(ids) and ids[-1] in self.world.eos
            if len(ids) > self.s.max_tokens or (not ended and len(ids) != self.s.max_tokens):
                raise Diverged("length", "the length of a completion without an end token", self.s.max_tokens, len(ids), row=row)
            self.exercised["ended" if ended else "truncated"] += 1
        self.found.count("length", len(made.completions))

    def _rewarded(self, moment: Moment) -> None:
        made, name = self.round, moment.first().values["function"]
        if made is None:
            raise Diverged("reward", "rewards were asked for before anything was generated", "a generation", name)
        got: list[list[int]] = []
        rows: list[int] = []
        rewards: list[float] = []
        for event in moment.ranks:
            tensors = event.tensors()
            got += ragged(tensors["completion_ids"], tensors["lengths"])
            rows += tensors["rows"].tolist()
            rewards += tensors["rewards"].tolist()
        if len(got) != len(made.completions):
            raise Diverged("length", f"completions that {name} was given", len(made.completions), len(got))
        for row, (ids, wanted) in enumerate(zip(got, made.completions, strict=True)):
            if ids != wanted:
                raise Diverged("length", f"the completion that {name} was given", wanted, ids, row=row)
        for row, (asked, wanted_row) in enumerate(zip(rows, made.rows, strict=True)):
            if asked != wanted_row:
                raise Diverged("data", f"the dataset row that {name} was given", wanted_row, asked, row=row)
        self._texts(name, made, [event.values for event in moment.ranks])
        own = [math.nan if value is None else float(value) for value in self.world.rewards[name](made.completions, made.rows)]
        for row, (mine, theirs) in enumerate(zip(own, rewards, strict=True)):
            if not (mine == theirs or (math.isnan(mine) and math.isnan(theirs))):
                raise Diverged("reward", f"the reward of {name}", mine, theirs, row=row)
        if name in made.rewards:
            raise Diverged("reward", f"calls of {name} for one generation", 1, 2)
        self.found.count("reward", len(own))
        made.rewards[name] = own

    def _texts(self, name: str, made: Round, values: Sequence[Mapping[str, Any]]) -> None:
        """A reward function was given the prompt of the dataset row, and the text of the completion."""
        if not self.world.texts or "prompts" not in values[0]:
            return
        own = {"prompts": [self.world.texts[row] for row in made.rows], "texts": list(map(self.world.decode, made.completions))}
        for key, stage, what in (("prompts", "data", "prompt"), ("texts", "reward", "text of a completion")):
            got = [digest for part in values for digest in part[key]]
            for row, text in enumerate(own[key]):
                if row >= len(got) or got[row] != text_digest(text):
                    raise Diverged(stage, f"the {what} that {name} was given", repr(text), "another", row=row)
            self.found.count(stage, len(own[key]))

    def _scored(self, moment: Moment) -> None:
        if self.round is not None:
            self.round.taken = moment.first().tensors().get("rewards")

    # what the loss is made of

    def _ready(self, made: Round) -> None:
        """What the loss of a round is made of, with the weights that drew it."""
        if made.ids is not None:
            return
        made.prepare(list(self.world.rewards), self.world.pad, self.world.eos, self.s)
        locate.rewards(made)
        width = made.mask.shape[1]
        if not self._proves("gradient") or not self.actor.known:
            return
        seen = self._seen(made, range(len(made.rows)), self.policy)
        with torch.no_grad():
            if self.s.is_split() or self.s.reward_beta:
                output = self.policy.forward(self.actor.arguments(self.policy), made.ids, made.attention, **seen)
                made.old, made.entropies = completion_terms(output, made.ids, width, self.s.temperature)
            if self.s.beta or self.s.reward_beta:
                base = self.actor.arguments(self.policy, self.actor.reference, adapted=False)
                output = self.policy.forward(base, made.ids, made.attention, **seen)
                made.ref, _ = completion_terms(output, made.ids, width, self.s.temperature)
            if self.critic is not None:
                output = self.critic.policy.forward(self.critic.arguments(self.critic.policy), made.ids, made.attention)
                made.values = token_values(output, width)
        made.estimate(self.s)

    def _loss(self, moment: Moment) -> None:
        self._taken(moment, self.actor, "policy")

    def _value_loss(self, moment: Moment) -> None:
        self._taken(moment, self._critic(), "critic")

    def _taken(self, moment: Moment, network: Network, model: str) -> None:
        """Which rows a forward pass with gradients was made of."""
        made, s = self.round, network.s
        if made is None:
            raise network.diverged("data", "a loss was computed before anything was generated", "a generation", "a loss")
        self._ready(made)
        for rank, event in enumerate(moment.ranks):
            if event.values.get("training") is False:
                raise network.diverged("gradient", "the mode of the model in the loss's forward pass", "training", "evaluation")
            tensors = event.tensors()
            mask = tensors.get("attention_mask")
            rows = made.take(tensors["input_ids"], mask, rank, self.world.pad, s, model)
            if len(rows) != s.micro_batch and not s.free_split:
                raise network.diverged("data", "rows of a micro-batch", s.micro_batch, len(rows))
            self._pictured(made, rows, tensors, "loss")
            if mask is not None:
                self._attention(made, rows, tensors["input_ids"], mask.long())
            trainer = {name.removeprefix("trainer/"): value for name, value in tensors.items() if name.startswith("trainer/")}
            network.batch.append(MicroBatch(made, rank, rows, event.values["loss"], trainer))

    def _attention(self, made: Round, rows: list[int], ids: Tensor, got: Tensor) -> None:
        """What the loss's forward pass attended to: the tokens of the row and nothing else."""
        if self.s.arrival:  # rows are padded as the loop likes
            self._attended(made, rows, ids, got)
            return
        wanted, wide = made.attention[rows], made.attention.shape[1] - made.mask.shape[1]
        if got.shape != wanted.shape:  # other rows decide how far a batch is padded: the counts must agree
            wanted, got, wide = wanted.sum(1, keepdim=True), got.sum(1, keepdim=True), 0
        if not torch.equal(got, wanted):
            row, position = (int(value) for value in (got != wanted).nonzero()[0])
            what = "attention mask of the loss's forward pass"
            raise Diverged("mask", what, wanted[row], got[row], row=rows[row], position=position - wide)
        self.found.count("mask", len(rows) * made.mask.shape[1])

    def _attended(self, made: Round, rows: list[int], ids: Tensor, got: Tensor) -> None:
        """The attended tokens are those of the row, wherever the padding stands."""
        for place, row in enumerate(rows):
            wanted = made.ids[row][made.attention[row] > 0].tolist()
            taken = ids[place][got[place] > 0].tolist()
            if taken != wanted:
                raise Diverged("mask", "attention mask of the loss's forward pass", wanted, taken, row=row)
        self.found.count("mask", len(rows) * made.mask.shape[1])

    # the step

    def _updated(self, moment: Moment) -> None:
        self.progress(f"step {moment.step}")
        s, actor = self.s, self.actor
        norm, rate = actor.step(moment, self._gradient, self._locate)
        self.exercised["clipped_norm"] += 0.0 < s.max_grad_norm < norm
        self.tokens += self._fresh_tokens(moment.step)
        if actor.proves("gradient") and not math.isnan(norm):
            self._expect(moment.step, norm, rate)
            for stage in ("advantage", "reference", "logprob", "ratio", "kl", "loss", "clip"):
                if actor.proves(stage) and (s.beta or s.reward_beta or stage not in ("reference", "kl")):
                    self.found.count(stage, sum(len(part.rows) for part in actor.batch))
        if s.sync_steps and moment.step % s.sync_steps == 0:
            self.exercised["reference_syncs"] += 1
            actor.reference = {
                name: (value.double() * (1 - s.sync_alpha) + actor.weights[name].double() * s.sync_alpha).to(value.dtype)
                for name, value in actor.reference.items()
            }
        actor.batch = []
        self.found.steps += 1

    def _ended(self, moment: Moment) -> None:
        """What training left is what its last step left, and its history is what it logged."""
        values = moment.first().values
        self.actor.untouched(values["weights"], "after the last optimizer step")
        if self._proves("logging") and values.get("history") is not None:
            compared = logged.history(self.logs, values["history"], self.losses, self.actor.steps, self.world.loop in self.same)
            self.found.count("logging", compared)

    def _value_updated(self, moment: Moment) -> None:
        critic = self._critic()
        norm, rate = critic.step(moment, self._value_gradient, self._value_locate)
        self.exercised["critic_clipped_norm"] += 0.0 < critic.s.max_grad_norm < norm
        if critic.proves("gradient"):
            self._expect_values(norm, rate)
            for stage in ("value", "advantage", "loss", "clip"):
                self.found.count(stage, sum(len(part.rows) for part in critic.batch) if critic.proves(stage) else 0)
        critic.batch = []

    def _gradient(self, part: MicroBatch, policy: Policy, pieces: str = "all") -> dict[str, Tensor]:
        """The gradient of one micro-batch; `pieces` takes the policy's or the KL part alone."""
        s, made, dtype = self.s, part.round, policy.dtype
        leaves, weights = self.actor.leaves(policy)
        ids, mask = made.ids[part.rows], made.mask[part.rows].to(dtype)
        coef = policy.router_coef if s.router_coef is None else s.router_coef
        routed = {"output_router_logits": True} if policy.has_router and coef else {}
        output = policy.forward(weights, ids, made.attention[part.rows], **routed, **self._seen(made, part.rows, policy))
        logps, entropies = completion_terms(output, ids, mask.shape[1], s.temperature)
        old = made.old[part.rows].to(dtype) if made.old is not None else logps.detach()
        ref = made.ref[part.rows].to(dtype) if made.ref is not None and s.beta else None
        terms = formulas.Terms(logps, old, ref, entropies, mask, self._advantages(part).to(dtype), s)
        tokens, together = float(made.mask.sum()), _tokens(self.actor.batch)
        loss = torch.zeros((), dtype=dtype)
        if pieces in ("all", "policy"):
            loss = loss + formulas.reduced(terms.policy, mask, tokens, s, together)
        if terms.kl is not None and pieces in ("all", "kl"):
            loss = loss + (s.beta if pieces == "all" else 1.0) * formulas.reduced(terms.kl, mask, tokens, s, together)
        policy_loss = float(loss.detach())
        if s.entropy_coef and (pieces == "entropy" or (pieces == "all" and s.loss_type in formulas.REDUCTIONS)):
            loss = loss - (s.entropy_coef if pieces == "all" else 1.0) * formulas.reduced(entropies, mask, tokens, s, together)
        elif pieces == "all" and s.entropy_coef:
            effective = mask if terms.entropy_mask is None else mask * terms.entropy_mask
            loss = loss - s.entropy_coef * (entropies * effective).sum() / effective.sum().clamp(min=1.0) / s.accumulation
        if pieces == "all" and routed:
            loss = loss + coef * output.aux_loss / s.accumulation
        if policy is self.policy and pieces == "all":
            part.terms, part.own_logps, part.own_loss = terms, logps.detach(), float(loss.detach())
            part.own_policy = policy_loss * (1 if s.loss_type in formulas.BY_TOKENS else s.accumulation)
            part.own_router = float(output.aux_loss.detach()) if routed else math.nan
        return _gradients(loss, leaves)

    def _value_gradient(self, part: MicroBatch, policy: Policy) -> dict[str, Tensor]:
        """The gradient of the value loss of one micro-batch."""
        critic, made, dtype = self._critic(), part.round, policy.dtype
        leaves, weights = critic.leaves(policy)
        mask = made.mask[part.rows].to(dtype)
        values = token_values(policy.forward(weights, made.ids[part.rows], made.attention[part.rows]), mask.shape[1])
        old, returns = made.values[part.rows].to(dtype), made.returns[part.rows].to(dtype)
        terms, clipped = formulas.value_terms(values, old, returns, critic.s.value_clip or math.inf)
        loss = formulas.reduced(terms, mask, 0.0, critic.s, _tokens(critic.batch))
        if policy is critic.policy:
            part.values, part.own_loss = values.detach(), float(loss.detach())
            self.exercised["value_clipped"] += int((clipped & mask.bool()).sum())
        return _gradients(loss, leaves)

    def _advantages(self, part: MicroBatch) -> Tensor:
        """Expected advantages; the trainer's where they are the same but for rounding, which a tiny spread enlarges."""
        own, got = part.round.advantages[part.rows], part.trainer.get("advantages")
        if got is None or (got.dim() == 1 and got.shape != own.shape) or locate.advantages_off(part, self.s) is not None:
            return own
        return got.double() if got.dim() == 1 else locate.widened(got.double(), part.round.mask[part.rows])

    def _locate(self, wrong: locate.Wrong) -> None:
        """The gradient is wrong: name the stage. Always raises."""
        for index, part in enumerate(wrong.batch):
            locate.inputs(part, index, self.s)
        locate.clipping(wrong)
        pieces = {"policy": 1.0}
        if self.s.beta:
            pieces["kl"] = self.s.beta
        if self.s.entropy_coef and self.s.loss_type in formulas.REDUCTIONS:
            pieces["entropy"] = self.s.entropy_coef
        locate.weights(wrong, pieces, lambda part, piece: self._gradient(part, self.policy, piece))
        if self.s.loss_type not in formulas.REDUCTIONS:
            locate.tokens(wrong, self._directions)
        locate.unexplained(wrong)

    def _directions(self, part: MicroBatch, families: Tensor, some: Mapping[str, Tensor]) -> Tensor:
        """For weights [families, rows, tokens], the gradients of the weighted log-probabilities of a micro-batch by some tensors."""
        named = {name: value.to(self.policy.dtype) for name, value in self.actor.weights.items()}
        leaves = {name: named[name].detach().clone().requires_grad_(True) for name in some}
        ids, width = part.round.ids[part.rows], part.round.mask.shape[1]
        seen = self._seen(part.round, part.rows, self.policy)
        output = self.policy.forward(self.policy.arguments({**named, **leaves}), ids, part.round.attention[part.rows], **seen)
        logps, _ = completion_terms(output, ids, width, self.s.temperature)
        made = []
        for family in families:
            found = torch.autograd.grad((family * logps).sum(), list(leaves.values()), retain_graph=True, allow_unused=True)
            parts = [torch.zeros_like(leaf) if value is None else value for leaf, value in zip(leaves.values(), found, strict=True)]
            made.append(torch.cat([locate.kept(value, like).flatten() for value, like in zip(parts, some.values(), strict=True)]))
        return torch.stack(made)

    def _value_locate(self, wrong: locate.Wrong) -> None:
        """The critic's gradient is wrong: name the stage. Always raises."""
        critic = self._critic()
        for index, part in enumerate(wrong.batch):
            locate.value_inputs(part, index, critic.diverged)
        locate.clipping(wrong)
        locate.weights(wrong, {"policy": 1.0}, lambda part, _: self._value_gradient(part, critic.policy))
        locate.unexplained(wrong, "value loss")

    # what was logged, and the end

    def _expect(self, step: int, norm: float, rate: float) -> None:
        """What the trainer should log for this step."""
        s = self.s
        self.expected = logged.of_step(self.actor.batch, norm, rate, s, self.exercised)
        self.losses.append(self.expected["loss"])
        generations = len(self.world.prompts) // s.prompts()
        if generations:
            self.expected["epoch"] = step * s.accumulation / (generations * s.iterations * s.splits)
        made = self.round
        if self.generated_at == step and made is not None:
            ends = (*self.world.eos, self.world.pad)
            generated = logged.of_round(made, list(self.world.rewards), ends, self.s) | {"num_tokens": float(self.tokens)}
            self.expected, self.of_rounds = self.expected | generated, tuple(generated)
        self.window.append(self.expected)

    def _fresh_tokens(self, step: int) -> int:
        """Tokens that were generated for this step."""
        made = self.round
        return sum(map(len, (*made.prompts, *made.completions))) if made is not None and self.generated_at == step else 0

    def _expect_values(self, norm: float, rate: float) -> None:
        """What the trainer should log for this step of the critic; a loop says which metrics there are."""

    def _logged(self, moment: Moment) -> None:
        self.logs.append((moment.step, moment.first().values))
        self.expected, self.window = logged.over(self.window), []
        if self._proves("logging") and self.expected:
            tokens = int(self.round.mask.sum()) if self.round is not None else 0
            if self.world.loop in self.same:
                logged.unexpected(self.expected, moment.first().values, self.of_rounds)
            self.found.count("logging", logged.compare(self.expected, moment.first().values, tokens, self.world.loop in self.same))
            self.expected = {}

    def _plausible(self) -> None:
        """The drawn tokens of the whole run are a plausible draw."""
        for name, value in self.draws.results().items() if self._proves("sampling") else ():
            if not abs(value) <= LIMIT:
                raise Diverged("sampling", f"{name} over {self.draws.tokens} tokens", f"a score within {LIMIT:g}", value)
            self.found.count("sampling", 1, abs(value) / LIMIT)


def _tokens(batch: Sequence[MicroBatch]) -> float:
    """Tokens of all micro-batches of an optimizer step."""
    return float(sum(int(part.round.mask[part.rows].sum()) for part in batch))


def _gradients(loss: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By each leaf; zero where it has no part in the loss."""
    made = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: (torch.zeros_like(leaf) if value is None else value).detach()
        for (name, leaf), value in zip(leaves.items(), made, strict=True)
    }
