"""The learning signal of one run: per validation prompt, the score after the last step minus the one before the first.

Read from verl's own dumps of its validations, and appended to the run's metrics: `signal/gain`, and with the directory
of a control run `signal/gain_over_control`. The step of a point is the number of its prompt.
"""

from __future__ import annotations

import json
from pathlib import Path

from seatrial.probes import facts


def by_prompt(directory: Path, last: int) -> dict[str, float]:
    """Gain by prompt; a prompt that was not scored both times is an error."""
    first, final = (_scores(directory / "validation" / f"{step}.jsonl") for step in (0, last))
    if not first or first.keys() != final.keys():
        raise RuntimeError(f"{directory}: {len(first)} prompts were validated before and {len(final)} after, or not the same ones")
    return {prompt: final[prompt] - first[prompt] for prompt in sorted(first)}


def _scores(path: Path) -> dict[str, float]:
    """The mean score of each prompt in a dump."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["input"], []).append(float(row["score"]))
    return {prompt: sum(scores) / len(scores) for prompt, scores in found.items()}


def last_validation(directory: Path) -> int:
    """The step of the last dump."""
    return max(int(path.stem) for path in (directory / "validation").glob("*.jsonl"))


def write(directory: Path, control: Path | None) -> None:
    """Append the gains in the form of verl's file logger."""
    own = by_prompt(directory, last_validation(directory))
    other = by_prompt(control, last_validation(control)) if control else {}
    if control and own.keys() != other.keys():
        raise RuntimeError(f"{directory} and {control} were validated with different prompts")
    for number, (prompt, gain) in enumerate(own.items(), 1):
        data = {"signal/gain": gain}
        if control:
            data["signal/gain_over_control"] = gain - other[prompt]
        facts.append(directory / "metrics.jsonl", {"step": number, "data": data})
