"""An import as settings of a campaign, so that its rollouts can be scored anew with no more said than a verifier."""

from __future__ import annotations

from typing import Any

from seatrial.model.errors import UserError
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.manifest import Manifest
from seatrial.rollouts.place import Place
from seatrial.rollouts.units import Units

NOBODY = "http://127.0.0.1:9/v1"
"""A campaign names a policy. Scoring asks none, and nobody answers at the port for what is to be discarded."""
_PROMPTS = ("problem", "question", "prompt")
"""Columns in which rows of Skills have it."""


def settings_of(place: Place, manifest: Manifest) -> dict[str, Any]:
    """What a campaign.toml of these rows would say, but for the verifier."""
    datasets, first = [], 0
    with Units(place, manifest) as units:
        for file in manifest.files:
            row = units.row(first).data
            prompt = next((column for column in _PROMPTS if column in row), "prompt")
            datasets.append({"name": file.dataset, "path": file.path, "prompt": prompt})
            first += file.rows
    return {"name": manifest.name, "datasets": datasets, "policy": {"url": NOBODY}}


def check_judges(place: Place, campaign: Campaign) -> None:
    """Refuse a judge that would ask the policy: an import has none."""
    for dataset in campaign.datasets:
        verify = campaign.verifier_of(dataset)
        if verify.kind == "judge" and verify.url is None and campaign.policy.url == NOBODY:
            message = f"{place.root}: was imported, so there is no policy that could be the judge"
            raise UserError(message, "say where the judge is: --set verifiers.judge.kind=judge --set verifiers.judge.url=URL")
