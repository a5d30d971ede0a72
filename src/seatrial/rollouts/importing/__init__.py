"""Rollouts that somebody else collected, as a campaign directory: merge, profile and select work on it."""

from seatrial.rollouts.importing.run import import_rollouts

__all__ = ["import_rollouts"]
