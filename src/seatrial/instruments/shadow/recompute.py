"""Recomputes every recorded step from dataset rows, drawn tokens and configured values, and compares stage by stage.

What the trainer calls advantages, masks or log-probabilities is read only where that chain breaks, to name the stage (`locate_stage`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from seatrial.instruments.batch_record import Event, Moment, moments, text_digest
from seatrial.instruments.shadow import expected_logs, formulas, locate_stage
from seatrial.instruments.shadow.interface import Diverged, Findings, ShadowSettings, World
from seatrial.instruments.shadow.network import Network, ShadowPolicy, completion_terms, token_values
from seatrial.instruments.shadow.rounds import MicroBatch, Round, ragged, until_end, without_padding
from seatrial.instruments.shadow.sampling import Data, Sampling, pictures

Tensor = Any


class Shadow:
    def __init__(self, record: Path, settings: ShadowSettings, world: World, progress: Callable[[str], None] = lambda _: None) -> None:
        self.record, self.s, self.world, self.progress = record, settings, world, progress
        self.found = Findings()
        for stage, reason in settings.unsupported.items():
            self.found.stages[stage].unproven = reason
        self.actor = Network(world.model, settings, self.found, layout=world.layout)
        where = {"model": "critic"}
        self.critic = Network(world.model, settings.critic, self.found, where, True, world.layout) if settings.critic else None
        if self.actor.release:
            self.policy, self.single = self.actor.policy, self.actor.single
        self.round: Round | None = None
        self.parts: list[Moment] = []  # of a generation that is not whole yet
        self.fresh: list[Round] = []  # generated for the step that is being recorded
        self.calls: dict[str, list[Moment]] = {}  # of reward functions that were not asked for every row yet
        self.passes = 0  # forward passes of one process so far
        self.tokens = 0  # prompt and completion tokens so far
        self.expected: dict[str, float] = {}  # what is to be logged for the last step
        self.blurred = 0.0  # the largest share of a generation's rows whose rewards rounding alone may tell apart
        self.unsure = False  # whether fp32 rounded too much at a step since the last log
        self.window: list[dict[str, float]] = []  # the same of every step since the last log
        self.arguments: dict[str, Any] = {}  # what the trainer's own settings say, read back from it
        self.same: set[str] = set()  # packages of which the run used the shadow's own version
        self.logs: list[tuple[int, Mapping[str, Any]]] = []  # what was logged, by step
        self.of_rounds: tuple[str, ...] = ()  # metrics that only a step with a generation logs
        self.losses: list[float] = []  # the loss of each step
        self.exercised: Counter[str] = Counter()  # how often something happened that gives a setting an effect
        self.data = Data(settings, world, self.found)
        self.sampling = Sampling(settings, world, self.found, self.actor, self.exercised)

    def run(self) -> Findings:
        step = 0
        try:
            for moment in moments(self.record, self.s.world):
                step = moment.step
                getattr(self, f"_{moment.kind}", lambda _: None)(moment)
            if not self.found.steps:
                raise Diverged("update", "optimizer steps in the record", self.s.max_steps, 0)
            self._end()
            self.actor.saved(self.record / "final")
            if self._proves("sampling"):
                self.sampling.plausible()
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
        self.data.own_law = self.actor.own_law = self.world.loop in self.same
        self.sampling.own_law = "transformers" in self.same
        self.actor.start(moment, "peft" in self.same)

    def _value_started(self, moment: Moment) -> None:
        self._critic().start(moment)

    def _critic(self) -> Network:
        if self.critic is None:
            raise Diverged("value", "a critic was trained", "no critic is configured", "a critic")
        return self.critic

    # data, sampling, length, reward

    def _generated(self, moment: Moment) -> None:
        """A generation may come in parts."""
        self.parts.append(moment)
        rows = sum(len(_generated_ids(event)) for part in self.parts for event in part.ranks)
        if rows < self.s.rows():
            return
        parts, self.parts = self.parts, []
        self._whole(parts)

    def _whole(self, parts: Sequence[Moment]) -> None:
        if self.round is not None:
            self._close(self.round)
        made, said = Round([], []), list[list[float]]()
        events = [part.ranks[rank] for rank in range(self.s.world) for part in parts]
        for event in events:
            tensors = event.tensors()
            if "completion_ids" in tensors:
                made.prompts += ragged(tensors["prompt_ids"], tensors["prompt_ids/lengths"])
                made.completions += ragged(tensors["completion_ids"], tensors["completion_ids/lengths"])
                said += ragged(tensors["told"], tensors["told/lengths"]) if "told" in tensors else []
            else:
                width = tensors["prompt_ids"].shape[1]
                made.prompts += [without_padding(ids, self.world.pad) for ids in tensors["sequences"][:, :width].tolist()]
                for ids in tensors["sequences"][:, width:].tolist():
                    made.completions.append(until_end(ids, self.world.eos))
                    self.sampling.stopped(ids[len(made.completions[-1]) :], len(made.completions) - 1)
        self.data.follow(made)
        start = 0
        for event in events:
            tensors, count = event.tensors(), len(_generated_ids(event))
            rows, start = range(start, start + count), start + count
            self.data.pictured(made, rows, tensors, "generation")
            if self._proves("sampling") and self.actor.known:
                self.sampling.follow(made, rows, tensors)
        self.sampling.lengths(made)
        if said:
            long = max(map(len, made.completions))
            made.said = torch.tensor([[*row, *[0.0] * (long - len(row))] for row in said], dtype=torch.float64)
        elif self.s.correction:
            raise Diverged("sampling", "log-probabilities that the generator said", "one for each token", "none")
        self.round = made
        self.fresh.append(made)

    def _close(self, made: Round) -> None:
        made.close(self.s)
        self.data.mixed(made)
        if self.s.critic is not None:
            made.close(self.s.critic, "critic")
        self.found.count("data", len(made.prompts))

    def _current(self, stage: str, what: str) -> Round:
        """The generation that something is made of; Diverged where there is none, or only a part of one."""
        if self.parts:
            got = sum(len(_generated_ids(event)) for part in self.parts for event in part.ranks)
            raise Diverged("data", "completions per generation", self.s.rows(), got)
        if self.round is None:
            raise Diverged(stage, f"{what} before anything was generated", "a generation", "none")
        return self.round

    def _rewarded(self, moment: Moment) -> None:
        name = moment.first().values["function"]
        made = self._current("reward", f"rewards of {name} were asked for")
        self.calls.setdefault(name, []).append(moment)
        count = sum(len(event.tensors()["rows"]) for call in self.calls[name] for event in call.ranks)
        if count < len(made.completions):  # a function may be asked in parts
            return
        events = [call.ranks[rank] for rank in range(self.s.world) for call in self.calls[name]]
        del self.calls[name]
        got, rows, rewards = list[list[int]](), list[int](), list[float]()
        for event in events:
            tensors = event.tensors()
            got += ragged(tensors["completion_ids"], tensors["lengths"])
            rows += tensors["rows"].tolist()
            rewards += tensors["rewards"].tolist()
        if len(got) != len(made.completions):
            raise Diverged("length", f"completions that {name} was given", len(made.completions), len(got))
        _same("length", f"the completion that {name} was given", made.completions, got)
        _same("data", f"the dataset row that {name} was given", made.rows, rows)
        self._texts(name, made, [event.values for event in events])
        own = [math.nan if value is None else float(value) for value in self.world.rewards[name](made.completions, made.rows)]
        _same("reward", f"the reward of {name}", own, rewards)
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
            self.round.taken = moment.first().tensors().get("trainer/rewards")

    # what the loss is made of

    def _ready(self, made: Round) -> None:
        """What the loss of a round is made of, with the weights that drew it."""
        if made.ids is not None:
            return
        made.prepare(list(self.world.rewards), self.world.pad, self.world.eos, self.s)
        locate_stage.rewards(made)
        width = made.mask.shape[1]
        if not self._proves("gradient") or not self.actor.known:
            return
        given = pictures(self.world, made, range(len(made.rows)), self.policy)
        with torch.no_grad():
            if self.s.is_split() or self.s.reward_beta or self.s.correction:
                output = self.policy.forward(self.actor.arguments(self.policy), made.ids, made.attention, **given)
                made.old, made.entropies = completion_terms(output, made.ids, width, self.s.temperature)
            if self.s.beta or self.s.reward_beta:
                base = self.actor.arguments(self.policy, self.actor.reference, adapted=False)
                output = self.policy.forward(base, made.ids, made.attention, **given)
                made.ref, _ = completion_terms(output, made.ids, width, self.s.temperature)
            if self.critic is not None:
                output = self.critic.policy.forward(self.critic.arguments(self.critic.policy), made.ids, made.attention)
                made.values = token_values(output, width)
        if self.s.correction and made.said is not None:
            made.correction = formulas.correction(made.old, made.said, made.mask, self.s)
            self._corrected(made)
        made.estimate(self.s)

    def _corrected(self, made: Round) -> None:
        """What gives the settings of the correction an effect."""
        free = formulas.correction(made.old, made.said, made.mask, dataclasses.replace(self.s, correction_bounds=(-math.inf, math.inf)))
        self.exercised["corrected"] += int(((free - 1).abs() > 1e-3).sum())
        self.exercised["corrected_low"] += int((free < self.s.correction_bounds[0]).sum())
        self.exercised["corrected_high"] += int((free > self.s.correction_bounds[1]).sum())

    def _value_loss(self, moment: Moment) -> None:
        self._loss(moment, self._critic(), "critic")

    def _loss(self, moment: Moment, of: Network | None = None, model: str = "policy") -> None:
        """Which rows a forward pass with gradients was made of."""
        network = of or self.actor
        made, s = self._current("data", "a loss was computed"), network.s
        self._ready(made)
        for rank, event in enumerate(moment.ranks):
            if event.values.get("training") is False:
                raise network.diverged("gradient", "the mode of the model in the loss's forward pass", "training", "evaluation")
            tensors = event.tensors()
            mask = tensors.get("attention_mask")
            rows = made.take(tensors["input_ids"], mask, rank, self.world.pad, s, model)
            if len(rows) != s.micro_batch and not s.free_split:
                raise network.diverged("data", "rows of a micro-batch", s.micro_batch, len(rows))
            self.data.pictured(made, rows, tensors, "loss")
            if mask is not None:
                self._attention(made, rows, tensors["input_ids"], mask.long())
            trainer = {name.removeprefix("trainer/"): value for name, value in tensors.items() if name.startswith("trainer/")}
            network.batch.append(MicroBatch(made, rank, rows, event.values.get("trainer/loss"), trainer))

    def _attention(self, made: Round, rows: list[int], ids: Tensor, got: Tensor) -> None:
        """What the loss's forward pass attended to: the tokens of the row and nothing else."""
        what = "attention mask of the loss's forward pass"
        wanted, wide = made.attention[rows], made.attention.shape[1] - made.mask.shape[1]
        if self.s.arrival:  # rows are padded as the loop likes
            for place, row in enumerate(rows):
                own, taken = made.ids[row][wanted[place] > 0].tolist(), ids[place][got[place] > 0].tolist()
                if taken != own:
                    raise Diverged("mask", what, own, taken, row=row)
        else:
            if got.shape != wanted.shape:  # other rows decide how far a batch is padded: the counts must agree
                wanted, got, wide = wanted.sum(1, keepdim=True), got.sum(1, keepdim=True), 0
            if not torch.equal(got, wanted):
                row, position = (int(value) for value in (got != wanted).nonzero()[0])
                raise Diverged("mask", what, wanted[row], got[row], row=rows[row], position=position - wide)
        self.found.count("mask", len(rows) * made.mask.shape[1])

    # the step

    def _updated(self, moment: Moment) -> None:
        self.progress(f"step {moment.step}")
        s, actor = self.s, self.actor
        actor.s = dataclasses.replace(s, accumulation=self._accumulated())
        norm, rate = actor.step(moment, self._gradient, self._locate)
        self.exercised["clipped_norm"] += 0.0 < s.max_grad_norm < norm
        self.passes += actor.s.accumulation
        self.tokens += sum(len(ids) for made in self.fresh for ids in (*made.prompts, *made.completions))
        if actor.proves("gradient") and not math.isnan(norm):
            self._expect(norm, rate)
            for stage in ("advantage", "reference", "logprob", "ratio", "kl", "loss", "clip"):
                if actor.proves(stage) and (s.beta or s.reward_beta or stage not in ("reference", "kl")):
                    self.found.count(stage, sum(len(part.rows) for part in actor.batch))
        if s.sync_steps and moment.step % s.sync_steps == 0:
            self.exercised["reference_syncs"] += 1
            actor.reference = {
                name: (value.double() * (1 - s.sync_alpha) + actor.weights[name].double() * s.sync_alpha).to(value.dtype)
                for name, value in actor.reference.items()
            }
        actor.batch, self.fresh = [], []
        self.found.steps += 1

    def _accumulated(self) -> int:
        """Forward passes that the next optimizer step takes: at the end of an epoch, what is left."""
        whole = self.s.passes(len(self.world.prompts)) if self.s.partial else 0
        return min(self.s.accumulation, whole - self.passes % whole) if whole else self.s.accumulation

    def _ended(self, moment: Moment) -> None:
        values = moment.first().values
        self.actor.untouched(values["weights"], "after the last optimizer step")
        if self._proves("logging") and values.get("history") is not None:
            compared = expected_logs.history(self.logs, values["history"], self.losses, self.actor.steps, self.world.loop in self.same)
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

    def _gradient(self, part: MicroBatch, policy: ShadowPolicy, pieces: str = "all") -> dict[str, Tensor]:
        """The gradient of one micro-batch; `pieces` takes the policy's or the KL part alone."""
        s, made, dtype = self.actor.s, part.round, policy.dtype
        leaves, weights = self.actor.leaves(policy)
        ids, mask = made.ids[part.rows], made.mask[part.rows].to(dtype)
        coef = policy.router_coef if s.router_coef is None else s.router_coef
        routed = {"output_router_logits": True} if policy.has_router and coef else {}
        output = policy.forward(weights, ids, made.attention[part.rows], **routed, **pictures(self.world, made, part.rows, policy))
        logps, entropies = completion_terms(output, ids, mask.shape[1], s.temperature)
        old = made.old[part.rows].to(dtype) if made.old is not None else logps.detach()
        ref = made.ref[part.rows].to(dtype) if made.ref is not None and s.beta else None
        terms = formulas.Terms(logps, old, ref, entropies, mask, self._advantages(part).to(dtype), s, *made.told(part.rows, dtype))
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

    def _value_gradient(self, part: MicroBatch, policy: ShadowPolicy) -> dict[str, Tensor]:
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
        if got is None or (got.dim() == 1 and got.shape != own.shape) or locate_stage.advantages_off(part, self.s) is not None:
            return own
        return got.double() if got.dim() == 1 else locate_stage.widened(got.double(), part.round.mask[part.rows])

    def _locate(self, wrong: locate_stage.WrongStage) -> None:
        """The gradient is wrong: name the stage. Always raises."""
        for index, part in enumerate(wrong.batch):
            locate_stage.inputs(part, index, self.s)
        locate_stage.clipping(wrong)
        pieces = {"policy": 1.0}
        if self.s.beta:
            pieces["kl"] = self.s.beta
        if self.s.entropy_coef and self.s.loss_type in formulas.REDUCTIONS:
            pieces["entropy"] = self.s.entropy_coef
        locate_stage.weights(wrong, pieces, lambda part, piece: self._gradient(part, self.policy, piece))
        if self.s.loss_type not in formulas.REDUCTIONS:
            locate_stage.tokens(wrong, self._directions)
        locate_stage.unexplained(wrong)

    def _directions(self, part: MicroBatch, families: Tensor, some: Mapping[str, Tensor]) -> Tensor:
        """For weights [families, rows, tokens], the gradients of the weighted log-probabilities of a micro-batch by some tensors."""
        named = {name: value.to(self.policy.dtype) for name, value in self.actor.weights.items()}
        leaves = {name: named[name].detach().clone().requires_grad_(True) for name in some}
        ids, width = part.round.ids[part.rows], part.round.mask.shape[1]
        given = pictures(self.world, part.round, part.rows, self.policy)
        output = self.policy.forward(self.policy.arguments({**named, **leaves}), ids, part.round.attention[part.rows], **given)
        logps, _ = completion_terms(output, ids, width, self.s.temperature)
        made = []
        for family in families:
            found = torch.autograd.grad((family * logps).sum(), list(leaves.values()), retain_graph=True, allow_unused=True)
            parts = [torch.zeros_like(leaf) if value is None else value for leaf, value in zip(leaves.values(), found, strict=True)]
            made.append(torch.cat([locate_stage.kept(value, like).flatten() for value, like in zip(parts, some.values(), strict=True)]))
        return torch.stack(made)

    def _value_locate(self, wrong: locate_stage.WrongStage) -> None:
        """The critic's gradient is wrong: name the stage. Always raises."""
        critic = self._critic()
        for index, part in enumerate(wrong.batch):
            locate_stage.value_inputs(part, index, critic.diverged)
        locate_stage.clipping(wrong)
        locate_stage.weights(wrong, {"policy": 1.0}, lambda part, _: self._value_gradient(part, critic.policy))
        locate_stage.unexplained(wrong, "value loss")

    # what was logged, and the end

    def _expect(self, norm: float, rate: float) -> None:
        s = self.actor.s
        self.expected = expected_logs.of_step(self.actor.batch, norm, rate, s, self.exercised)
        self.losses.append(self.expected["loss"])
        whole = s.passes(len(self.world.prompts))
        if whole:
            self.expected["epoch"] = self.passes / whole
        if self.fresh:
            ends = (*self.world.eos, self.world.pad)
            generated = expected_logs.over([expected_logs.of_round(made, list(self.world.rewards), ends, s) for made in self.fresh])
            generated["num_tokens"] = float(self.tokens)
            self.expected, self.of_rounds = self.expected | generated, tuple(generated)
            self.blurred = max(self.blurred, *(expected_logs.blurred(made.table, s) for made in self.fresh))
        self.window.append(self.expected)
        self.unsure = self.unsure or self.actor.noisy

    def _expect_values(self, norm: float, rate: float) -> None:
        """What the trainer should log for this step of the critic; a loop says which metrics there are."""

    def _logged(self, moment: Moment) -> None:
        self.logs.append((moment.step, moment.first().values))
        self.expected, self.window = expected_logs.over(self.window), []
        sure, self.unsure = not self.unsure, False
        if self._proves("logging") and self.expected and sure:
            tokens = int(self.round.mask.sum()) if self.round is not None else 0
            if self.world.loop in self.same:
                expected_logs.unexpected(self.expected, moment.first().values, self.of_rounds)
            slacks = {"frac_reward_zero_std": self.blurred + 1e-6}
            compared = expected_logs.compare(self.expected, moment.first().values, tokens, self.world.loop in self.same, slacks=slacks)
            self.found.count("logging", compared)
            self.expected = {}


def _same(stage: str, what: str, own: Sequence[Any], got: Sequence[Any]) -> None:
    """Raise Diverged at the first row that is not ours."""
    for row, (mine, theirs) in enumerate(zip(own, got, strict=True)):
        if not expected_logs.same_number(mine, theirs):
            raise Diverged(stage, what, mine, theirs, row=row)


def _generated_ids(event: Event) -> Tensor:
    tensors = event.tensors()
    return tensors["completion_ids"] if "completion_ids" in tensors else tensors["sequences"]


def _tokens(batch: Sequence[MicroBatch]) -> float:
    return float(sum(int(part.round.mask[part.rows].sum()) for part in batch))


def _gradients(loss: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By each leaf; zero where it has no part in the loss."""
    made = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: (torch.zeros_like(leaf) if value is None else value).detach()
        for (name, leaf), value in zip(leaves.items(), made, strict=True)
    }
