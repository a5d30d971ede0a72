"""Prompts and rewards that a random model learns within a minute of CPU, and the control that a picture reaches the model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from seatrial.instruments import facts
from seatrial.instruments.facts import prompts

IMAGE_SIDE = 16


def even_share(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Share of tokens with an even id; an empty completion earns 0."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) if len(ids) else 0.0 for ids in completion_ids]


def image_share(completion_ids: Sequence[Sequence[int]], bright: Sequence[bool], **_: Any) -> list[float]:
    """Even ids for dark images, odd ids for bright ones."""
    shares = even_share(completion_ids)
    return [1.0 - share if light and len(ids) else share for share, light, ids in zip(shares, bright, completion_ids, strict=True)]


def is_flat(row: int) -> bool:
    """Every fifth dataset row earns the same whatever is said: its group has no spread."""
    return row % 5 == 4


def patchy_share(completion_ids: Sequence[Sequence[int]], row: Sequence[int], **_: Any) -> list[float]:
    """The share of even ids, or a half for a flat row."""
    return [0.5 if is_flat(number) else share for number, share in zip(row, even_share(completion_ids), strict=True)]


def digit_share(completions: Sequence[Any], row: Sequence[int], **_: Any) -> list[float | None]:
    """Share of digits in the text of a completion; an empty text, or a flat row, has no such reward, and says so."""
    texts = zip(row, map(_said, completions), strict=True)
    return [sum(letter.isdigit() for letter in text) / len(text) if text and not is_flat(number) else None for number, text in texts]


def _said(completion: Any) -> str:
    """The text of a completion: plain, or the assistant's message."""
    return completion if isinstance(completion, str) else str(completion[0]["content"])


REWARDS: dict[str, Callable[..., Any]] = {
    "even_share": even_share,
    "patchy_share": patchy_share,
    "digit_share": digit_share,
    "image_share": image_share,
}


def reward_names(arguments: Any) -> tuple[str, ...]:
    return ("image_share",) if arguments.images else tuple(arguments.rewards.split(","))


def text_prompts(count: int, seed: int) -> list[str]:
    """Prompts of very unequal length: every third is cut to its first word, every third is said twice."""
    made = prompts(count, seed)
    return [
        text if index % 3 == 0 else f"{index} {text.split()[0]}" if index % 3 == 1 else f"{text} {text}" for index, text in enumerate(made)
    ]


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def text_dataset(count: int, seed: int, chat: bool = False) -> Any:
    """The prompts as a dataset, plain or as conversations; each row knows its number."""
    from datasets import Dataset

    made = text_prompts(count, seed)
    return Dataset.from_dict({"prompt": [message(text) if chat else text for text in made], "row": list(range(len(made)))})


def image(bright: bool, draw: random.Random) -> Any:
    """A noisy dark or bright picture."""
    from PIL import Image

    low, high = (170, 255) if bright else (0, 85)
    return Image.frombytes("RGB", (IMAGE_SIDE, IMAGE_SIDE), bytes(draw.randint(low, high) for _ in range(3 * IMAGE_SIDE**2)))


def is_bright(row: int) -> bool:
    """Pictures are dark and bright in turn."""
    return row % 2 == 1


def image_prompts(count: int, seed: int) -> list[tuple[str, Any]]:
    draw = random.Random(seed)
    return [(text, image(is_bright(index), draw)) for index, text in enumerate(text_prompts(count, seed))]


def image_dataset(count: int, seed: int) -> Any:
    from datasets import Dataset

    rows = [
        {"prompt": message(text), "image": picture, "bright": is_bright(index), "row": index}
        for index, (text, picture) in enumerate(image_prompts(count, seed))
    ]
    return Dataset.from_list(rows)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _logits(trainer: Any, picture: Any) -> Any:
    message = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "add 1 = ?"}]}]
    inputs = trainer.processing_class.apply_chat_template(message, tokenize=True, return_dict=True, return_tensors="pt")
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model(**{key: value.to(model.device) for key, value in inputs.items()}).logits[0, -1].float()


def image_control(trainer: Any, path: Path) -> None:
    """Measure and record how much the picture changes the answer."""
    dark, bright = image(False, random.Random(1)), image(True, random.Random(2))
    reference = _logits(trainer, dark)
    row = {
        "fact": "images",
        "other_picture_max_diff": float((_logits(trainer, bright) - reference).abs().max()),
        "same_picture_max_diff": float((_logits(trainer, dark) - reference).abs().max()),
        "processor": type(trainer.processing_class.image_processor).__name__,
    }
    facts.append(path, row)
