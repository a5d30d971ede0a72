"""One sequence of a training step as generator and trainer saw it, token by token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One sampled sequence. The per-token tuples are of equal length; position 0 is the first token of the prompt."""

    source: str
    """File and line, for example `train_data_step1.jsonl:3`."""
    run: str
    """Which run of the level it is of: `run`, `delta`, …"""
    step: int
    row: int
    """Index in its step."""
    prompt: str
    """Identifies the prompt: rows of one prompt have the same text."""
    generation: tuple[float, ...]
    """Log-probabilities of the generator; those of the prompt are not looked at."""
    training: tuple[float, ...]
    """Log-probabilities that the trainer computed for the same tokens."""
    mask: tuple[bool, ...]
    """Tokens that count in the loss."""
    masked_out: bool = False
    """The whole sequence was taken out of the loss."""
    length: int = 0
    """Tokens that are no padding."""
    reward: float | None = None
    truncated: bool | None = None
    """Whether generation was cut off by the length limit; None when the loop does not say."""
    settings: tuple[tuple[str, str], ...] = ()
    """Sampling settings in force, such as temperature and top_p, where known."""
