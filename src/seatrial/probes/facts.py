"""The channel from inside a loop to the run directory: one JSON object per line, appended whole.

Runs inside a loop's interpreter: standard library only. A row is written by a single `write` on a descriptor
opened for appending, so rows of several processes never interleave, and a killed process leaves at most one torn
last line, which the reader reports.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any


def plain(value: Any) -> Any:
    """Strict JSON: non-finite numbers become marked strings; tensors and NumPy scalars become numbers."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def append(path: str | os.PathLike[str], row: dict[str, Any]) -> None:
    """Append one row."""
    data = (json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n").encode()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, data)
    finally:
        os.close(handle)
