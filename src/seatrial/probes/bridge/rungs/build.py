"""Rung build: the provider builds a model from the HF configuration, and has the sizes that the configuration says."""

from __future__ import annotations

from seatrial.probes.bridge.rank import Rank
from seatrial.probes.bridge.session import unwrapped


def run(rank: Rank) -> None:
    """Build without weights."""
    session = rank.session()
    (chunk,) = session.build(load=False)
    model = unwrapped(chunk)
    parameters = {name: list(value.shape) for name, value in model.named_parameters()}
    rank.write("build", provider=type(session.bridge._model_bridge).__name__, parameters=parameters)
