"""The shadow of a verl run: that of every loop, with what verl logs once per round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from seatrial.shadow import formulas, logged, updates
from seatrial.shadow.recompute import Shadow
from seatrial.shadow.record import Moment
from seatrial.shadow.result import Diverged
from seatrial.shadow.rounds import Round
from seatrial.shadow.settings import Settings

ALWAYS = ("actor/grad_norm", "actor/lr", "actor/pg_loss", "critic/score/mean")


class RoundShadow(Shadow):
    """Collects what is to be logged over the optimizer steps of a round."""

    def _generated(self, moment: Moment) -> None:
        for asked in moment.first().values.get("asked", ()):
            self._asked(asked)
        super()._generated(moment)
        self.steps: dict[str, list[float]] = {}
        """Metrics of each optimizer step."""

    def _asked(self, asked: Mapping[str, Any]) -> None:
        """What the generation server was asked for is what was configured; it applies the temperature only."""
        s = self.s
        wanted = {"temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k or -1, "repetition_penalty": 1.0}
        for name, value in wanted.items():
            if asked.get(name) != value:
                raise Diverged("sampling", f"the {name} that the generation server was asked for", value, asked.get(name))
            self.found.count("sampling", 1)

    def _end(self) -> None:
        if self.round is not None:
            self._close(self.round)

    def _add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.steps.setdefault(name, []).append(value)

    def _expect(self, norm: float, rate: float) -> None:
        s, batch = self.s, self.actor.batch
        terms = [part.terms for part in batch if part.terms is not None]
        together = float(sum(int(each.mask.sum()) for each in terms))
        with torch.no_grad():
            made = {"actor/grad_norm": norm, "actor/loss": sum(part.own_loss for part in batch)}
            made["actor/pg_loss"] = _summed([each.policy for each in terms], terms, together, s)
            if s.entropy_coef:
                made["actor/entropy_loss"] = _summed([each.entropies for each in terms], terms, together, s)
            if s.beta:
                made["actor/kl_loss"] = _summed([each.kl for each in terms], terms, together, s)
                self.exercised["kl"] += sum(bool((each.kl * each.mask > 1e-9).any()) for each in terms if each.kl is not None)
            clipped, dual, drift = [], [], []
            for each in terms:
                ratio, advantage = each.ratio, each.advantage
                bounded = ratio.clamp(1 - s.epsilon_low, 1 + s.epsilon_high)
                loss = torch.max(-advantage * ratio, -advantage * bounded)
                clipped.append(_mean((-advantage * bounded > -advantage * ratio).double(), each.mask))
                dual.append(_mean(((loss > -advantage * s.dual_clip) & (advantage < 0)).double(), each.mask) if s.dual_clip else 0.0)
                drift.append(_mean(-ratio.log(), each.mask))
                self.exercised["clipped_low"] += int((((ratio < 1 - s.epsilon_low) & (advantage < 0)) * each.mask).sum())
                self.exercised["clipped_high"] += int((((ratio > 1 + s.epsilon_high) & (advantage > 0)) * each.mask).sum())
            self.exercised["dual_clipped"] += sum(value > 0 for value in dual)
            made |= {"actor/pg_clipfrac": _average(clipped), "actor/pg_clipfrac_lower": _average(dual), "actor/ppo_kl": _average(drift)}
        self._add(made)

    def _expect_values(self, norm: float, rate: float) -> None:
        critic = self._critic()
        for part in critic.batch:
            mask, rows = part.round.mask[part.rows].double(), part.rows
            _, out = formulas.value_terms(part.values, part.round.values[rows], part.round.returns[rows], critic.s.value_clip or math.inf)
            self._add({"critic/vf_clipfrac": _mean(out.double(), mask), "critic/vpred_mean": _mean(part.values, mask)})
        loss = sum(part.own_loss for part in critic.batch)
        self._add({"critic/grad_norm": norm, "critic/loss": loss, "critic/vf_loss": loss})

    def _logged(self, moment: Moment) -> None:
        made = self.round
        if not self._proves("logging") or not self._proves("gradient") or made is None or made.ids is None:
            return
        expected = {name: _average(values) for name, values in self.steps.items()}
        expected |= self._round(made)
        expected["actor/lr"] = updates.rate(self.actor.steps + 1, self.s)
        if self.critic is not None:
            expected["critic/lr"] = updates.rate(self.critic.steps + 1, self.critic.s)
        tokens = int(made.mask.sum())
        self.found.count("logging", logged.compare(expected, moment.first().values, tokens, self.world.loop in self.same, ALWAYS))

    def _round(self, made: Round) -> dict[str, float]:
        """The metrics of a generation."""
        s, mask = self.s, made.mask
        lengths, asked = (torch.tensor([len(ids) for ids in rows], dtype=torch.float64) for rows in (made.completions, made.prompts))
        inside = mask.bool()
        advantages = made.advantages if made.advantages.dim() == 2 else made.advantages.unsqueeze(1).expand(-1, mask.shape[1])
        returns = made.returns if made.returns is not None else advantages
        rewards = made.rewarded.sum(1) if made.rewarded is not None else made.total
        found = {
            **_three("critic/score", made.total),
            **_three("critic/rewards", rewards),
            **_three("critic/advantages", advantages[inside]),
            **_three("critic/returns", returns[inside]),
            **_three("response_length", lengths),
            **_three("prompt_length", asked),
            "response_length/clip_ratio": float((lengths == lengths.max()).double().mean()),
            "response/aborted_ratio": 0.0,
        }
        if made.entropies is not None and s.loss_type == "token-mean":
            found["actor/entropy"] = _mean(made.entropies, mask.double())
        if made.values is not None:
            values, known = made.values[inside], returns[inside]
            found |= _three("critic/values", values)
            found["critic/vf_explained_var"] = float(1 - (known - values).var() / (known.var() + 1e-5))
        if s.reward_beta:
            penalty = formulas.kl_estimate(made.old, made.ref, s.reward_kl) * mask
            self.exercised["reward_kl"] += int((penalty.abs() > 1e-9).sum())
            found["actor/reward_kl_penalty"] = float((penalty.sum(1) / mask.sum(1)).mean())
            found["actor/reward_kl_penalty_coeff"] = s.reward_beta
        return found


def _three(name: str, values: Any) -> dict[str, float]:
    return {f"{name}/mean": float(values.mean()), f"{name}/max": float(values.max()), f"{name}/min": float(values.min())}


def _mean(values: Any, mask: Any) -> float:
    return float((values * mask).sum() / mask.sum())


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _summed(values: Sequence[Any], terms: Sequence[formulas.Terms], tokens: float, s: Settings) -> float:
    """Over the micro-batches of a step."""
    return sum(float(formulas.reduced(value, each.mask, 0.0, s, tokens)) for value, each in zip(values, terms, strict=True))
