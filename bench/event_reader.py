"""Seatrial's event reader beside TensorBoard's, on the same file, in CPU seconds.

    python bench/event_reader.py [--peer-python PATH]

Writes one file of 300,000 points in 50 tags, reads it with `read_metrics` here and with EventAccumulator in the Python
at --peer-python (one that has tensorboard; without it only our figure is printed). Checks that both found the same
points, prints both figures and their ratio. Nothing is asserted about speed.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from seatrial.core.series import Metrics
from seatrial.metrics.read import read_metrics
from seatrial.metrics.tensorboard import crc32c, masked

TAGS = 50
STEPS = 6000
REPEATS = 3

# Prints CPU seconds, the number of points and their digest; the digest must be made as in `digest` below.
PEER = """
import hashlib, struct, sys, time
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
best = None
for _ in range(int(sys.argv[2])):
    start = time.process_time()
    accumulator = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
    accumulator.Reload()
    series = {tag: accumulator.Scalars(tag) for tag in accumulator.Tags()["scalars"]}
    taken = time.process_time() - start
    best = taken if best is None else min(best, taken)
found, count = hashlib.sha256(), 0
for tag in sorted(series):
    for event in series[tag]:
        found.update(struct.pack("<qd", event.step, event.value))
        count += 1
    found.update(tag.encode())
print(best, count, found.hexdigest())
"""


def record(data: bytes) -> bytes:
    """One framed record."""
    length = struct.pack("<Q", len(data))
    sums = masked([crc32c(length), crc32c(data)])
    return length + struct.pack("<I", sums[0]) + data + struct.pack("<I", sums[1])


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


def nested(key: int, data: bytes) -> bytes:
    return bytes([key]) + varint(len(data)) + data


def write_file(path: Path) -> None:
    """300,000 points as a SummaryWriter writes them."""
    source = random.Random(0)
    with path.open("wb") as stream:
        stream.write(record(struct.pack("<Bd", 0x09, 1.7e9) + nested(0x1A, b"brain.Event:2")))
        for step in range(1, STEPS + 1):
            for index in range(TAGS):
                value = nested(0x0A, f"train/group/metric_{index}".encode()) + struct.pack("<Bf", 0x15, source.gauss(0, 1))
                event = struct.pack("<BdB", 0x09, 1.7e9 + step, 0x10) + varint(step) + nested(0x2A, nested(0x0A, value))
                stream.write(record(event))


def digest(metrics: Metrics) -> tuple[int, str]:
    """The number of points and a hash over all of them."""
    found = hashlib.sha256()
    for tag in sorted(metrics.series):
        series = metrics.series[tag]
        for step, value in zip(series.steps, series.values, strict=True):
            found.update(struct.pack("<qd", step, value))
        found.update(tag.encode())
    return sum(map(len, metrics.series.values())), found.hexdigest()


def ours(path: Path) -> tuple[float, int, str]:
    """CPU seconds (the best of some), points, digest."""
    taken = []
    metrics = Metrics()
    for _ in range(REPEATS):
        start = time.process_time()
        metrics = read_metrics([path])
        taken.append(time.process_time() - start)
    return min(taken), *digest(metrics)


def peer(path: Path, python: str) -> tuple[float, int, str]:
    """The same of EventAccumulator."""
    command = [python, "-c", PEER, str(path), str(REPEATS)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, count, found = output.split()[-3:]
    return float(seconds), int(count), found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="a Python that has tensorboard")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "events.out.tfevents.1700000000.bench.1.0"
        write_file(path)
        print(f"file: {path.stat().st_size / 1e6:.1f} MB, {TAGS} tags, {TAGS * STEPS} points; CPU seconds, best of {REPEATS}")
        our_seconds, our_count, our_digest = ours(path)
        print(f"seatrial read_metrics, every checksum verified: {our_seconds:.2f} s, {our_count} points")
        if options.peer_python is None:
            print("EventAccumulator: not measured (give --peer-python)")
            return 0
        peer_seconds, peer_count, peer_digest = peer(path, options.peer_python)
        print(f"tensorboard EventAccumulator: {peer_seconds:.2f} s, {peer_count} points")
        print(f"ratio: {peer_seconds / our_seconds:.1f}")
        equal = our_digest == peer_digest
        print("points: equal" if equal else "points: DIFFERENT")
        return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
