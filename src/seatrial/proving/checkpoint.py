"""Whether the weights of a directory can be read at all: safetensors files whose headers cover them to the last byte.

Looks at the headers alone, so that a torn copy is told by its name before an engine stumbles over it.
"""

from __future__ import annotations

import struct
from pathlib import Path

from seatrial.model.errors import UserError
from seatrial.model.guarded import open_file, parse_json

_LONGEST_HEADER = 100_000_000


def require_weights(directory: Path, said: str) -> None:
    """A UserError unless there are safetensors in `directory` and all of them are whole; `said` is how the user named it."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{said}: no weights (*.safetensors) in it", f"name the directory of a checkpoint, or copy its weights into {directory}"
        )
    for file in files:
        if trouble := _trouble(file):
            raise UserError(f"{file}: {trouble}", "copy the file again: its header and its size do not fit")


def _trouble(file: Path) -> str:
    """What is wrong with a file; "" when nothing is."""
    try:
        size = file.stat().st_size
        with open_file(file) as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if not 0 < length <= min(_LONGEST_HEADER, size - 8):
                return f"torn: a header of {length} bytes in a file of {size}"
            header = parse_json(stream.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (OSError, struct.error, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        return f"not a safetensors file: {type(error).__name__}: {error}"
    return "" if end == size - 8 - length else f"torn: {size - 8 - length} bytes of weights, its header tells of {end}"
