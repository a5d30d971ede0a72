from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.metrics.readings import FileReading
from seatrial.metrics.tensorboard import read_events
from tests.metrics.writer import event, field, record, simple, tensor, varint, version, write_series

DATA = Path(__file__).parent.parent / "data" / "metrics"


def points(reading: FileReading) -> dict[str, list[tuple[int, float]]]:
    return {tag: list(zip(found.steps, found.values, strict=True)) for tag, found in reading.points.items()}


def read(tmp_path: Path, data: bytes) -> FileReading:
    path = tmp_path / "events.out.tfevents.1.host.1.0"
    path.write_bytes(data)
    return read_events(path)


def test_real_file() -> None:
    reading = read_events(next((DATA / "logger_run").glob("events*")))
    assert reading.damage == []
    assert points(reading)["train/loss"] == [(1, 6.953125), (2, 6.6875), (3, 6.5), (4, 6.375)]
    assert points(reading)["val/loss"] == [(2, 6.4921875), (4, 6.2421875)]
    assert len(reading.points) == 10


def test_real_file_with_text_summaries() -> None:
    reading = read_events(next((DATA / "trainer_run").rglob("events*")))
    assert reading.damage == []
    assert len(reading.points) == 29
    assert not any("text" in tag for tag in reading.points)
    assert reading.points["train/reward"].steps == list(range(1, 21))


def test_steps_of_every_size(tmp_path: Path) -> None:
    steps = [0, 1, 127, 128, 16383, 16384, 2**21 - 1, 2**21, 2**31, 2**62, -5]
    reading = read(tmp_path, version() + b"".join(event(step, simple("loss", step % 7)) for step in steps))
    assert reading.points["loss"].steps == steps
    assert reading.points["loss"].values == [float(step % 7) for step in steps]


def test_tags_of_every_length_and_alphabet(tmp_path: Path) -> None:
    tags = ["", "a", "x" * 120, "y" * 127, "z" * 128, "w" * 20000, "é/ü", "a>b"]
    data = version() + b"".join(event(step, simple(tag, step)) for step in (1, 2, 300) for tag in tags)
    assert points(read(tmp_path, data)) == {tag: [(1, 1.0), (2, 2.0), (300, 300.0)] for tag in tags}


def test_several_values_in_one_summary(tmp_path: Path) -> None:
    reading = read(tmp_path, event(3, simple("a", 1.5), simple("b", 2.5)) + event(4, simple("a", 3.5)))
    assert points(reading) == {"a": [(3, 1.5), (4, 3.5)], "b": [(3, 2.5)]}


def test_non_finite_values_are_kept(tmp_path: Path) -> None:
    values = (
        read(tmp_path, event(1, simple("x", math.nan)) + event(2, simple("x", math.inf)) + event(3, simple("x", -math.inf)))
        .points["x"]
        .values
    )
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]


def test_many_records_are_verified_in_batches(tmp_path: Path) -> None:
    data = version() + b"".join(event(step, simple("loss", step)) for step in range(1, 401))
    assert read(tmp_path, data).points["loss"].values == [float(step) for step in range(1, 401)]
    middle = len(data) // 2
    broken = read(tmp_path, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    assert len(broken.points["loss"].steps) == 399
    assert len(broken.damage) == 1


def dtype(number: int) -> bytes:
    return b"\x08" + varint(number)


SCALAR_TENSORS = {
    "float content": (dtype(1) + field(4, struct.pack("<f", 0.5)), 0.5),
    "float list": (dtype(1) + field(5, struct.pack("<f", 0.5)), 0.5),
    "float unpacked": (dtype(1) + struct.pack("<Bf", 5 << 3 | 5, 0.5), 0.5),
    "double content": (dtype(2) + field(4, struct.pack("<d", 0.1)), 0.1),
    "double list": (dtype(2) + field(6, struct.pack("<d", 0.1)), 0.1),
    "int32 list": (dtype(3) + field(7, varint(-3)), -3.0),
    "int32 unpacked": (dtype(3) + b"\x38" + varint(7), 7.0),
    "uint8 content": (dtype(4) + field(4, b"\xff"), 255.0),
    "int64 list": (dtype(9) + field(10, varint(2**40)), float(2**40)),
    "int64 content": (dtype(9) + field(4, struct.pack("<q", -9)), -9.0),
    "bool list": (dtype(10) + field(11, b"\x01"), 1.0),
    "half list": (dtype(19) + field(13, varint(0x3E00)), 1.5),
    "half content": (dtype(19) + field(4, struct.pack("<e", 1.5)), 1.5),
    "bfloat16 list": (dtype(14) + field(13, varint(0x3FC0)), 1.5),
    "bfloat16 content": (dtype(14) + field(4, struct.pack("<H", 0x3FC0)), 1.5),
    "uint64 list": (dtype(23) + b"\x8a\x01" + varint(len(varint(2**63))) + varint(2**63), float(2**63)),
    "a zero is left out": (dtype(1), 0.0),
    "one element in one dimension": (dtype(1) + field(2, field(2, b"\x08\x01")) + field(4, struct.pack("<f", 2.0)), 2.0),
}


@pytest.mark.parametrize("name", SCALAR_TENSORS)
def test_scalars_stored_as_tensors(tmp_path: Path, name: str) -> None:
    content, expected = SCALAR_TENSORS[name]
    reading = read(tmp_path, event(5, tensor("loss", content)) + event(6, tensor("loss", content, plugin=None)))
    assert points(reading) == {"loss": [(5, expected), (6, expected)]}
    assert reading.damage == []


def test_other_plugins_are_no_metrics(tmp_path: Path) -> None:
    text = tensor("note", dtype(7) + field(8, b"hello"), plugin="text")
    histogram = tensor("weights", dtype(2) + field(2, field(2, b"\x08\x03")) + field(4, bytes(24)), plugin="histograms")
    single = tensor("curve", dtype(1) + field(4, bytes(4)), plugin="pr_curves")
    reading = read(tmp_path, event(1, text) + event(1, histogram) + event(1, single))
    assert reading.points == {}
    assert reading.damage == []


def test_the_two_forms_mix_in_the_order_written(tmp_path: Path) -> None:
    double = tensor("loss", dtype(2) + field(4, struct.pack("<d", 0.1)))
    reading = read(tmp_path, event(1, simple("loss", 0.5)) + event(1, double) + event(2, simple("loss", 0.25)))
    assert points(reading) == {"loss": [(1, 0.5), (1, 0.1), (2, 0.25)]}


@pytest.mark.parametrize("content", [dtype(7) + field(8, b"text"), dtype(1) + field(4, bytes(3)), dtype(3) + field(7, b"\x01\x02")])
def test_a_scalar_that_cannot_be_read_is_damage(tmp_path: Path, content: bytes) -> None:
    reading = read(tmp_path, event(5, tensor("loss", content)) + event(6, simple("other", 1.0)))
    assert [damage.where for damage in reading.damage] == ["record 1"]
    assert points(reading) == {"other": [(6, 1.0)]}


def test_a_record_that_is_no_event_is_damage(tmp_path: Path) -> None:
    reading = read(tmp_path, version() + record(b"\xff\xff\xff") + event(1, simple("loss", 1.0)))
    assert [(damage.where, damage.count) for damage in reading.damage] == [("record 2", 1)]
    assert points(reading) == {"loss": [(1, 1.0)]}


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    path = write_series(tmp_path / "events.out.tfevents.1.h.1.0", "train/loss", {step: step / 8 for step in range(1, 6)})
    data = path.read_bytes()
    good = set(points(read_events(path))["train/loss"])
    for offset in range(len(data)):
        reading = read(tmp_path, data[:offset] + bytes([data[offset] ^ 0x10]) + data[offset + 1 :])
        left = set(points(reading).get("train/loss", []))
        assert reading.damage, offset
        assert left <= good, offset
        assert len(good - left) <= 1, offset  # reading goes on behind the damage


def test_every_cut_is_found_except_between_records(tmp_path: Path) -> None:
    records = [version(), *(event(step, simple("loss", step)) for step in range(1, 4))]
    data = b"".join(records)
    ends = [sum(map(len, records[:count])) for count in range(len(records) + 1)]
    for cut in range(len(data)):
        reading = read(tmp_path, data[:cut])
        complete = sum(end <= cut for end in ends) - 2
        assert len(points(reading).get("loss", [])) == max(0, complete)
        assert bool(reading.damage) is (cut not in ends), cut
        for damage in reading.damage:
            assert damage.count == 1
            assert damage.where == f"offset {max(end for end in ends if end <= cut)}"


def test_reading_goes_on_behind_a_damaged_length(tmp_path: Path) -> None:
    records = [version(), *(event(step, simple("loss", step)) for step in range(1, 10))]
    start = sum(map(len, records[:4]))
    data = bytearray(b"".join(records))
    data[start : start + 4] = b"\xff\xff\xff\xff"
    reading = read(tmp_path, bytes(data))
    assert reading.points["loss"].steps == [1, 2, 3, 5, 6, 7, 8, 9]
    (damage,) = reading.damage
    assert damage.where == f"offset {start}"
    assert f"{len(records[4])} bytes are lost" in damage.what


def test_a_file_that_ends_in_zeros(tmp_path: Path) -> None:
    reading = read(tmp_path, version() + event(1, simple("loss", 1.0)) + bytes(100_000))
    assert points(reading) == {"loss": [(1, 1.0)]}
    (damage,) = reading.damage
    assert damage.count == 0
    assert "the last 100000 bytes are lost" in str(damage)


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    reading = read(tmp_path, b"step,loss\n1,0.5\n" * 10)
    assert reading.points == {}
    assert reading.damage


def test_many_damaged_records_are_one_entry(tmp_path: Path) -> None:
    records = [bytearray(event(step, simple("loss", step))) for step in range(1, 21)]
    for broken in records[::2]:
        broken[-1] ^= 1
    reading = read(tmp_path, b"".join(records))
    assert len(reading.points["loss"].steps) == 10
    (damage,) = reading.damage
    assert damage.count == 10
    assert damage.where.endswith("…")


def test_empty_file_has_no_points(tmp_path: Path) -> None:
    reading = read(tmp_path, b"")
    assert reading.points == {}
    assert reading.damage == []


def test_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: cannot read"):
        read_events(tmp_path / "nowhere")
