"""Event files that the loop really wrote, read by Seatrial's own reader."""

from __future__ import annotations

import math
import shutil
import struct
from pathlib import Path

import pytest

from seatrial.core.series import Metrics
from seatrial.core.verdict import ExitCode
from seatrial.metrics.read import read_metrics
from tests.real.drive import Ran, call, run

pytestmark = pytest.mark.real

STEPS = 5


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A short run that writes event files beside Seatrial's own rows; the loop puts them below its output directory."""
    return run(tmp_path_factory.mktemp("events"), "trl", "--level", "0", "--", "--report_to", "tensorboard", "--max_steps", str(STEPS))


@pytest.fixture(scope="module")
def events(logged: Ran) -> Path:
    """The event file."""
    assert logged.code == ExitCode.PASS, logged.output
    (found,) = logged.place(0).rglob("events.out.tfevents.*")
    return found


def single(value: float) -> float:
    """A number as an event file can hold it: 32 bits."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def rows(logged: Ran) -> Metrics:
    """The level's metrics.jsonl."""
    return read_metrics([logged.place(0) / "metrics.jsonl"])


def test_event_file_equals_the_rows(logged: Ran, events: Path) -> None:
    found, own = read_metrics([events]), rows(logged)
    assert not found.damage
    assert not found.overlaps
    logged_by_the_loop = {tag: series for tag, series in own.series.items() if not tag.startswith("rollout/")}  # the rest is the witness's
    assert len(logged_by_the_loop) > 20
    assert logged_by_the_loop.keys() <= found.series.keys()
    assert logged_by_the_loop["train/loss"].steps == tuple(range(1, STEPS + 1))  # a generation is logged once, and used twice
    for tag, series in logged_by_the_loop.items():
        assert found.series[tag].steps == series.steps, tag
        assert found.series[tag].values == tuple(map(single, series.values)), tag


def test_event_file_holds_only_the_closing_summary_beyond_the_rows(logged: Ran, events: Path) -> None:
    extra = {tag: read_metrics([events]).series[tag] for tag in read_metrics([events]).series.keys() - rows(logged).series.keys()}
    assert "train/train_runtime" in extra
    assert all(series.steps == (STEPS,) for series in extra.values()), sorted(extra)


def test_check_command_reads_the_directory_of_the_loop(events: Path, tmp_path: Path) -> None:
    done = call(tmp_path, "check", events.parent, 'max(data["train/grad_norm"]) > 0', f'len(data["train/loss"]) == {STEPS}')
    assert done.returncode == ExitCode.PASS, done.stdout


@pytest.mark.parametrize("lost", [1, 5, 100])
def test_truncated_event_file_reports_its_damage(events: Path, tmp_path: Path, lost: int) -> None:
    torn = tmp_path / events.name
    shutil.copyfile(events, torn)
    with torn.open("r+b") as stream:
        stream.truncate(torn.stat().st_size - lost)
    whole, found = read_metrics([events]), read_metrics([torn])
    assert found.damage
    assert all(item.path == str(torn) for item in found.damage)
    for tag, series in found.series.items():
        kept = dict(zip(whole.series[tag].steps, whole.series[tag].values, strict=True))
        assert all(kept[step] == value for step, value in zip(series.steps, series.values, strict=True)), "what is left is unchanged"


def test_truncated_event_file_cannot_pass_a_check(events: Path, tmp_path: Path) -> None:
    torn = tmp_path / events.name
    torn.write_bytes(events.read_bytes()[:-5])
    done = call(tmp_path, "check", torn, 'max(data["train/grad_norm"]) > 0')
    assert done.returncode == ExitCode.FAIL, done.stdout
    assert "undamaged" in done.stdout


def test_flipped_bit_is_damage(events: Path, tmp_path: Path) -> None:
    torn = tmp_path / events.name
    data = bytearray(events.read_bytes())
    data[math.ceil(len(data) * 0.9)] ^= 0x10
    torn.write_bytes(data)
    assert read_metrics([torn]).damage
