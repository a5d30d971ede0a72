"""Metrics in the metrics.json schema, `{tag: {"step": value}}`, tags sorted and steps ascending.

It is strict JSON: NaN and infinities are the strings "NaN", "Infinity" and "-Infinity", which `read_metrics` reads
back as numbers.
"""

from __future__ import annotations

from seatrial.files import number_to_json
from seatrial.model.series import Metrics, Scalar


def to_metrics_json(metrics: Metrics) -> dict[str, Scalar | dict[str, float | str]]:
    """Series by step, and scalars at the top level."""
    content: dict[str, Scalar | dict[str, float | str]] = {
        tag: {str(step): number_to_json(value) for step, value in zip(series.steps, series.values, strict=True)}
        for tag, series in metrics.series.items()
    }
    for tag, scalar in metrics.scalars.items():
        content[tag] = number_to_json(scalar) if isinstance(scalar, float) else scalar
    return dict(sorted(content.items()))
