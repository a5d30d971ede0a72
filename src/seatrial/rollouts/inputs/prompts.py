"""What a row asks and expects. Rows stay as the user wrote them: a plain one becomes a request when it is rolled out.

A row with `responses_create_params` is Gym's, any other is a plain one (`format = "auto"`); a dataset may insist on one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seatrial.rollouts.campaign import Dataset

PARAMS = "responses_create_params"
_ANSWERS = ("expected_answer", "answer")


def is_gym(data: Mapping[str, Any], dataset: Dataset) -> bool:
    """Whether a row is Gym's."""
    return PARAMS in data if dataset.format == "auto" else dataset.format == "gym"


def prompt_messages(data: Mapping[str, Any], dataset: Dataset) -> list[Mapping[str, Any]]:
    """The messages that a row asks with: of a Gym row its `input` (items that are no messages included), of a plain one its prompt
    behind the dataset's system message. The row must have passed `check`."""
    said = data[PARAMS]["input"] if is_gym(data, dataset) else data[dataset.prompt]
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
    if dataset.system is not None and not is_gym(data, dataset):
        return [{"role": "system", "content": dataset.system}, *messages]
    return messages


def expected(data: Mapping[str, Any], dataset: Dataset) -> Any:
    """The expected answer as the row has it: the dataset's `answer` column, else expected_answer, else answer; None without."""
    columns = _ANSWERS if dataset.answer is None else (dataset.answer,)
    return next((data[column] for column in columns if data.get(column) is not None), None)
