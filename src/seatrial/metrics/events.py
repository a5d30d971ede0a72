"""TensorBoard event files into points.

- Takes scalars in both forms: `simple_value`, and tensors of the scalars plugin (any number type). Text, images and
  histograms are no metrics and are passed over.
- Every checksum is verified, always; bytes that cannot be read are reported as `Damage`, never dropped silently
  (see tfrecord.py). The stock reader stops at the first damaged byte without a word.
- Points keep the order in which they were written; NaN and infinities are kept.
- Most records of a tag differ only in time, step and value, so the bytes between step and value name the series:
  one dictionary lookup instead of parsing. Everything else takes the general way.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

from seatrial.files import require_file
from seatrial.metrics.points import Points, Reading
from seatrial.metrics.protobuf import FIXED32, MalformedError, fields, signed
from seatrial.metrics.tensor import scalar
from seatrial.metrics.tfrecord import read_records
from seatrial.model.errors import UserError
from seatrial.model.series import Damage


@dataclass(slots=True)
class _Raw:
    """Points whose values are still bytes: four for a float, eight for a double."""

    steps: list[int] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)

    def points(self) -> Points:
        joined = b"".join(self.values)
        if len(joined) == 4 * len(self.values):
            return Points(self.steps, list(struct.unpack(f"<{len(self.values)}f", joined)))
        return Points(self.steps, [struct.unpack("<f" if len(raw) == 4 else "<d", raw)[0] for raw in self.values])


def read_events(path: Path) -> Reading:
    """The points of one event file, and what could not be read of it."""
    try:
        require_file(path)
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror or error}", "check the path and its permissions") from error
    records, damage = read_records(data, str(path))
    scan = _Scan(str(path))
    scan.read(records)
    return Reading({tag: raw.points() for tag, raw in scan.series.items()}, damage=damage + scan.damage)


class _Scan:
    """Collects the points of one file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.series: dict[str, _Raw] = {}
        self.damage: list[Damage] = []
        self._shapes: dict[bytes, _Raw] = {}
        self._plugins: dict[str, str] = {}

    def read(self, records: list[bytes]) -> None:
        """Read records by their shape where it is known, in general otherwise."""
        shapes = self._shapes
        for index, record in enumerate(records):
            raw = None
            # 09: time as double, 10: step as integer of one to three bytes, then the shape, then a float.
            if len(record) > 16 and record[0] == 0x09 and record[9] == 0x10:
                step, start = record[10], 11
                if step > 127:
                    step, start = step & 127 | record[11] << 7, 12
                    if step > 16383:
                        step, start = step & 16383 | record[12] << 14, 13
                if step < 1 << 21:
                    raw = shapes.get(record[start:-4])
                    if raw is not None:
                        raw.steps.append(step)
                        raw.values.append(record[-4:])
            if raw is None:
                try:
                    self._event(record)
                except MalformedError as error:
                    self.damage.append(Damage(self.path, f"record {index + 1}", 1, f"not a readable event: {error}"))

    def _event(self, record: bytes) -> None:
        step, summaries = 0, []
        for number, _, value in fields(record):
            if number == 2 and isinstance(value, int):
                step = signed(value)
            elif number == 5 and isinstance(value, bytes):
                summaries.append(value)
        for summary in summaries:
            for number, _, value in fields(summary):
                if number == 1 and isinstance(value, bytes):
                    self._value(step, value)

    def _value(self, step: int, data: bytes) -> None:
        """One value of a summary: kept if it is a scalar in either form."""
        name, simple, tensor, metadata = b"", None, None, b""
        for number, wire, value in fields(data):
            if not isinstance(value, bytes):
                continue
            if number == 1:
                name = value
            elif number == 2 and wire == FIXED32:
                simple = value
            elif number == 8:
                tensor = value
            elif number == 9:
                metadata = value
        tag = name.decode("utf-8", errors="backslashreplace")
        if metadata:
            self._plugins[tag] = _plugin(metadata)
        if simple is not None:
            self._add(tag, step, simple)
            self._shapes.setdefault(_usual_shape(name), self.series[tag])
        elif tensor is not None and self._plugins.get(tag, "") in ("", "scalars"):
            number_read = scalar(tensor)
            if number_read is not None:
                self._add(tag, step, struct.pack("<d", number_read))
            elif self._plugins.get(tag) == "scalars":
                raise MalformedError(f"{tag!r} at step {step} is not one number")

    def _add(self, tag: str, step: int, value: bytes) -> None:
        raw = self.series.setdefault(tag, _Raw())
        raw.steps.append(step)
        raw.values.append(value)


def _plugin(metadata: bytes) -> str:
    """The name of the plugin that a SummaryMetadata belongs to."""
    for number, _, value in fields(metadata):
        if number == 1 and isinstance(value, bytes):
            for inner, _, name in fields(value):
                if inner == 1 and isinstance(name, bytes):
                    return name.decode("utf-8", errors="backslashreplace")
    return ""


def _usual_shape(name: bytes) -> bytes:
    """What stands between step and value when an event holds one summary with one simple value and nothing else."""
    value = b"\x0a" + _length(len(name)) + name + b"\x15"
    summary = b"\x0a" + _length(len(value) + 4) + value
    return b"\x2a" + _length(len(summary) + 4) + summary


def _length(number: int) -> bytes:
    """A length as varint."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])
