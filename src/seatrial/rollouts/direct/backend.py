"""The direct backend: a unit is one request to the policy and one call of its dataset's verifier.

- One turn only. A row that needs tools to be executed needs NeMo Gym.
- Rows come out in Gym's shape, the response as a Responses object whichever interface was asked. The row's own columns and tags stay
  beside it, except the prompt, which stands in the parameters, and the tests of code, which may be megabytes.
- The key is taken out of every answer by the client; the collector redacts what else a message may show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from seatrial.rollouts.campaign import Campaign, Dataset
from seatrial.rollouts.direct import answer as answers
from seatrial.rollouts.direct.client import Client
from seatrial.rollouts.direct.model import choose
from seatrial.rollouts.direct.request import build, sort_sampling
from seatrial.rollouts.inputs.prompts import PARAMS, is_gym, prompt_messages
from seatrial.rollouts.place import Place
from seatrial.rollouts.record import FailureKind
from seatrial.rollouts.work import Outcome, RolloutError, Score, Unit, Verifier

AGENT = "seatrial_direct"
_PATHS = {"chat": "chat/completions", "responses": "responses"}


class DirectBackend:
    """Asks an OpenAI-compatible server and verifies; a `Backend`."""

    def __init__(
        self,
        campaign: Campaign,
        urls: Sequence[str],
        verifiers: Mapping[str, Verifier],
        key: str | None,
        *,
        place: Place | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`place` is where the model's name is pinned."""
        self._api = campaign.policy.api
        self._model = campaign.policy.model
        self._sampling = sort_sampling(campaign.sampling)
        self._datasets = {dataset.name: dataset for dataset in campaign.datasets}
        self._left_out = {dataset.name: _left_out(campaign, dataset) for dataset in campaign.datasets}
        self._verifiers, self._place = verifiers, place
        self._client = Client(urls, _PATHS[self._api], key, campaign.requests, progress)

    async def open(self) -> None:
        """Connect, and find the model's name; raises BlockedError when nobody answers, UserError for a wrong key or model."""
        await self._client.open()
        self._model = await choose(self._client, self._model, self._place)

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
            _row(unit, self._left_out[row.dataset], kept, score),
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


def _left_out(campaign: Campaign, dataset: Dataset) -> frozenset[str]:
    """Columns of a dataset that are not repeated in each rollout."""
    verify = campaign.verifier_of(dataset)
    return frozenset({dataset.prompt, *((verify.tests,) if verify.kind == "code" else ())})


def _row(unit: Unit, left_out: frozenset[str], kept: Mapping[str, Any], score: Score) -> dict[str, Any]:
    own = {key: value for key, value in unit.row.data.items() if key not in left_out}
    tags = {"tags": [*unit.row.tags]} if unit.row.tags else {}
    return {
        **tags,
        **own,
        **score.fields,
        **kept,
        "reward": score.reward,
        "_ng_task_index": unit.row.index,
        "_ng_rollout_index": unit.repeat,
        "agent_ref": {"name": AGENT},
        "task_id": unit.row.id,
        "dataset": unit.row.dataset,
    }
