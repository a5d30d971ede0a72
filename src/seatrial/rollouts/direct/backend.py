"""The direct backend: a unit is one request to the policy and one call of its dataset's verifier.

- One turn only. A row that needs tools to be executed needs NeMo Gym.
- Rows come out in Gym's shape, the response as a Responses object whichever interface was asked.
- The key is taken out of every answer by the client; the collector redacts what else a message may show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from seatrial.model.errors import UserError
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.direct import answer as answers
from seatrial.rollouts.direct.client import Client
from seatrial.rollouts.direct.request import build, sort_sampling
from seatrial.rollouts.inputs.prompts import PARAMS, is_gym, prompt_messages
from seatrial.rollouts.record import FailureKind
from seatrial.rollouts.work import Outcome, RolloutError, Score, Unit, Verifier

AGENT = "seatrial_direct"
_PATHS = {"chat": "chat/completions", "responses": "responses"}


class DirectBackend:
    """Asks an OpenAI-compatible server and verifies; a `Backend`."""

    def __init__(self, campaign: Campaign, urls: Sequence[str], verifiers: Mapping[str, Verifier], key: str | None) -> None:
        self._api = campaign.policy.api
        self._model = campaign.policy.model
        self._sampling = sort_sampling(campaign.sampling)
        self._datasets = {dataset.name: dataset for dataset in campaign.datasets}
        self._verifiers = verifiers
        self._client = Client(urls, _PATHS[self._api], key, campaign.requests)

    async def open(self) -> None:
        """Connect, and find the model's name; raises BlockedError when nobody answers, UserError for a wrong key or model."""
        await self._client.open()
        listed = await self._client.models()
        if self._model is None and len(listed) != 1:
            found = f"the server lists {len(listed)}: {', '.join(listed[:5])}" if listed else "the server lists none"
            raise UserError(f"campaign: policy.model is not said, and {found}", "say policy.model")
        if self._model is not None and listed and self._model not in listed:
            raise UserError(
                f"campaign: policy.model: the server has no {self._model!r}; it has {', '.join(listed[:5])}", "name one of them"
            )
        self._model = self._model or listed[0]

    async def roll(self, unit: Unit) -> Outcome:
        """One request, read and scored."""
        row = unit.row
        dataset = self._datasets[row.dataset]
        own = row.data[PARAMS] if is_gym(row.data, dataset) else {"input": prompt_messages(row.data, dataset)}
        try:
            asked = build(own, self._sampling, api=self._api, model=self._model or "", seed=unit.seed, vllm=self._client.is_vllm)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RolloutError(FailureKind.HTTP_4XX, f"{row.source}: not asked: {type(error).__name__}: {error}") from error
        answer = answers.read(await self._client.post(asked.body), self._api, unit.number)
        kept = {PARAMS: asked.params, "response": answer.response}
        try:
            score = await self._verifiers[row.dataset].score(row, answer.text, answer.output)
        except RolloutError as error:
            error.row = {**kept, **error.row}
            raise
        if not math.isfinite(score.reward):
            raise RolloutError(FailureKind.REWARD, f"the verifier gave {score.reward}, which is not finite", row=kept)
        return Outcome(
            _row(unit, kept, score),
            score.reward,
            score.answer,
            answer.input_tokens,
            answer.output_tokens,
            1,
            answer.finish,
            score.metrics,
        )

    async def alive(self) -> str | None:
        """None, or why no server answers."""
        return await self._client.alive()

    async def close(self) -> None:
        """Close the connections and end the verifiers."""
        await self._client.close()
        for verifier in {id(verifier): verifier for verifier in self._verifiers.values()}.values():
            await verifier.close()


def _row(unit: Unit, kept: Mapping[str, Any], score: Score) -> dict[str, Any]:
    return {
        **score.fields,
        **kept,
        "reward": score.reward,
        "_ng_task_index": unit.row.index,
        "_ng_rollout_index": unit.repeat,
        "agent_ref": {"name": AGENT},
        "task_id": unit.row.id,
        "dataset": unit.row.dataset,
    }
