"""Seconds of the weight transfer by part, from metrics and log lines of both generations of NeMo-RL."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.series import Metrics, Series
from seatrial.loops.nemo_rl.weight_transfer import MEANING, WORDS, read_transfer

PREPARE = "timing/train/prepare_for_generation"
WORKER = "(MegatronPolicyWorker[rank=0] pid=7) "
HEAD_LOG = (
    f"2026-11-15T10:00:00Z {WORKER}REFIT_BASELINE_INIT event=end chunks=3 export_pull_s=9.0 snapshot_s=1.0 seconds=11.0\n"
    f"{WORKER}REFIT_ZMQ_TIMING total_s=4.5 export_pull_s=1.0 encode_s=2.5 serialize_s=0.25 compress_s=0.25 zmq_send_s=0.5 payloads=3 "
    "chunks=2 wire_mb=1.5 shard_rank=0 changed_pct=1.2 receiver_zmq_decode_s=0.5 receiver_total_s=7.0\n"
    f"{WORKER}REFIT_ZMQ_TIMING total_s=4.5 export_pull_s=1.0 encode_s=1.0 payloads=3 shard_rank=1\n"
    "REFIT_ZMQ_RELAY_FLUSH transfer_id=ab12 payloads=3 seconds=0.250 fanout_service_s=0.100\n"
    "REFIT_ZMQ_GLOBAL_COMMIT transfer_id=ab12 payloads=3 seconds=0.750\n"
)


def metrics_of(**values: tuple[float, ...]) -> Metrics:
    series = {tag: Series(tag, tuple(range(1, len(points) + 1)), points) for tag, points in values.items()}
    return Metrics(series=series)


def test_the_timers_of_the_older_generation(tmp_path: Path) -> None:
    timers = {
        f"{PREPARE}/total": (5.0, 5.0),
        f"{PREPARE}/transfer_and_update_weights": (4.0, 4.0),
        f"{PREPARE}/weight_transfer/producer/collect_tensors": (0.5, 0.5),
        f"{PREPARE}/weight_transfer/producer/sparse_encode": (3.0, 3.2),
        f"{PREPARE}/weight_transfer/producer/sparse_nonzero": (2.0, 2.0),
        f"{PREPARE}/weight_transfer/producer/payload_broadcast": (0.05, 0.05),
        f"{PREPARE}/weight_transfer/consumer/decode_sparse": (0.5, 0.7),
        f"{PREPARE}/weight_transfer/consumer/load_delta": (0.5, 0.5),
        f"{PREPARE}/weight_transfer/consumer/surprise": (0.1, 0.1),
    }
    found = read_transfer(tmp_path, metrics_of(**{f"delta/{tag}": points for tag, points in timers.items()}), "delta/")
    assert found is not None
    assert found.seconds == pytest.approx({"collect": 1.0, "encode": 6.2, "broadcast": 0.1, "decode": 1.2, "load": 1.0, "other": 0.2})
    assert (found.source, found.total) == ("timers", 10.0)
    assert str(found) == "10 s in all, encode dominates (64%): weight preparation, not the broadcast"


def test_the_log_lines_of_head(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(HEAD_LOG)
    found = read_transfer(tmp_path, metrics_of(**{f"{PREPARE}/total": (5.0,), "refit/transfer/relay_flush_s": (9.0,)}))
    assert found is not None
    # The baseline is made once, before training; totals hold the other numbers.
    assert found.seconds == pytest.approx({"collect": 2.0, "encode": 4.0, "broadcast": 0.75, "decode": 0.5, "load": 0.75})
    assert found.source == "log"
    assert found.dominating() == ("encode", 0.5)


def test_the_metrics_of_head_where_there_is_no_log(tmp_path: Path) -> None:
    found = read_transfer(
        tmp_path, metrics_of(**{"refit/transfer/relay_flush_s": (0.5, 0.5), "refit/transfer/global_commit_s": (2.0, 1.0)})
    )
    assert found is not None
    assert (found.seconds, found.source, found.total) == ({"broadcast": 1.0, "load": 3.0}, "metrics", None)
    assert str(found) == "load dominates (75%): the generator's weight loader, not the broadcast"


def test_a_broadcast_is_timed_as_a_whole(tmp_path: Path) -> None:
    found = read_transfer(tmp_path, metrics_of(**{f"{PREPARE}/total": (1.0, 1.0), f"{PREPARE}/transfer_and_update_weights": (0.9, 0.7)}))
    assert found is not None
    assert found.seconds == pytest.approx({"transfer": 1.6, "other": 0.4})
    assert "timed as one" in str(found)


def test_nothing_was_timed(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("REFIT_ZMQ_TIMING encode_s=torn\nREFIT_ZMQ_DELTA_CHANGE changed_elements=1\n")
    assert read_transfer(tmp_path, Metrics()) is None
    idle = read_transfer(tmp_path, metrics_of(**{f"{PREPARE}/transfer_and_update_weights": (0.0,)}))
    assert idle is not None
    assert (idle.dominating(), str(idle)) == (None, "no part was timed")


def test_every_part_has_a_meaning() -> None:
    assert {part for part, _ in WORDS} | {"transfer", "other"} == set(MEANING)
