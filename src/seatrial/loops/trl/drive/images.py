"""The control of the image task: does the picture reach the model at all?

The same text with a dark and with a bright picture must give different logits, and the same picture twice the same
logits. A processor that drops or blanks pictures passes every training metric; it does not pass this.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from seatrial.loops.trl.drive import tasks
from seatrial.probes import facts


@torch.no_grad()  # type: ignore[untyped-decorator]
def _logits(trainer: Any, picture: Any) -> Any:
    message = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "add 1 = ?"}]}]
    inputs = trainer.processing_class.apply_chat_template(message, tokenize=True, return_dict=True, return_tensors="pt")
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model(**{key: value.to(model.device) for key, value in inputs.items()}).logits[0, -1].float()


def control(trainer: Any, path: Path) -> None:
    """Measure and record how much the picture changes the answer."""
    dark, bright = tasks.image(False, random.Random(1)), tasks.image(True, random.Random(2))
    reference = _logits(trainer, dark)
    row = {
        "fact": "images",
        "other_picture_max_diff": float((_logits(trainer, bright) - reference).abs().max()),
        "same_picture_max_diff": float((_logits(trainer, dark) - reference).abs().max()),
        "processor": type(trainer.processing_class.image_processor).__name__,
    }
    facts.append(path, row)
