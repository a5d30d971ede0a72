"""How long weights took from the policy to the generator, by part, and which part dominates.

- Both generations of NeMo-RL are read: timers in the metrics (`.../weight_transfer/producer/sparse_encode`, the older one),
  and the `REFIT_*` lines of the log with `refit/transfer/*` metrics (HEAD's sparse transports).
- Parts are sums over concurrent tasks: their shares say where the work is, not how long anybody waited.
- A broadcast over NCCL is timed as a whole: export, broadcast and load are then one part, called transfer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from seatrial.files import read_text
from seatrial.model.series import Metrics

PREPARE = "timing/train/prepare_for_generation/"
TOTALS = (f"{PREPARE}total", "timing/train/weight_sync")
WHOLE = f"{PREPARE}transfer_and_update_weights"
OLDER = f"{PREPARE}weight_transfer/"
NESTED = ("sparse_nonzero",)
"""Timers inside another one."""
WORDS = (
    ("collect", ("collect", "export", "metadata")),
    ("decode", ("decode", "unpack", "deserialize")),
    ("encode", ("encode", "pack", "serialize", "compress", "nonzero")),
    ("broadcast", ("broadcast", "send", "put", "receive", "transfer")),
    ("load", ("load", "apply")),
)
"""Which part a timer of the older generation is of, by a word in its name; the first that fits."""
LINE = re.compile(r"\bREFIT_(?:S3|ZMQ)_(TIMING|RELAY_FLUSH|GLOBAL_COMMIT) ((?:\w+=\S+ ?)+)")
KEYS = {
    "TIMING": {
        **{"export_pull_s": "collect", "encode_s": "encode", "serialize_s": "encode", "compress_s": "encode"},
        **{"zmq_send_s": "broadcast", "s3_put_s": "broadcast", "manifest_post_s": "broadcast", "receiver_s3_download_s": "broadcast"},
        **{"receiver_zmq_decode_s": "decode", "receiver_deserialize_s": "decode", "receiver_sparse_apply_s": "load"},
    },
    "RELAY_FLUSH": {"seconds": "broadcast"},
    "GLOBAL_COMMIT": {"seconds": "load"},
}
METRICS = {"refit/transfer/relay_flush_s": "broadcast", "refit/transfer/global_commit_s": "load"}
MEANING = {
    "collect": "export of the weights, not the broadcast",
    "encode": "weight preparation, not the broadcast",
    "broadcast": "the wire itself",
    "decode": "the consumer's unpacking, not the broadcast",
    "load": "the generator's weight loader, not the broadcast",
    "transfer": "export, broadcast and load are timed as one by this transport",
    "other": "waiting and preparation around the transfer",
}


@dataclass(frozen=True, slots=True)
class Transfer:
    """Seconds by part, over all steps."""

    seconds: dict[str, float]
    source: str
    """Where the parts were read: `timers`, `log` or `metrics`."""
    total: float | None = None
    """What training waited for, over all steps."""

    def dominating(self) -> tuple[str, float] | None:
        """The part with the most seconds, and its share."""
        whole = sum(self.seconds.values())
        if whole <= 0:
            return None
        part = max(self.seconds, key=lambda name: self.seconds[name])
        return part, self.seconds[part] / whole

    def __str__(self) -> str:
        """For a report."""
        most = self.dominating()
        waited = f"{self.total:.3g} s in all, " if self.total is not None else ""
        return f"{waited}{most[0]} dominates ({most[1]:.0%}): {MEANING[most[0]]}" if most else f"{waited}no part was timed"


def read_transfer(directory: Path, metrics: Metrics, prefix: str = "") -> Transfer | None:
    """What a phase says about its transfers; None when nothing does. `prefix` is that of its metrics."""
    total = next((sum(series.values) for name in TOTALS if (series := metrics.series.get(prefix + name))), None)
    log = directory / "run.log"
    for source, parts in (
        ("timers", _sums(_timers(metrics, prefix))),
        ("log", _sums(_lines(log) if log.is_file() else iter(()))),
        ("metrics", _sums(_of_metrics(metrics, prefix))),
        ("timers", _whole(metrics, prefix, total)),
    ):
        if parts:
            return Transfer(parts, source, total)
    return None


def _sums(timed: Iterator[tuple[str, float]]) -> dict[str, float]:
    made: dict[str, float] = {}
    for part, seconds in timed:
        made[part] = made.get(part, 0.0) + seconds
    return made


def _timers(metrics: Metrics, prefix: str) -> Iterator[tuple[str, float]]:
    """The timers of the older generation."""
    for tag, series in metrics.series.items():
        name = tag.rpartition("/")[2]
        if tag.startswith(prefix + OLDER) and name not in NESTED:
            yield next((part for part, words in WORDS if any(word in name for word in words)), "other"), sum(series.values)


def _lines(log: Path) -> Iterator[tuple[str, float]]:
    """The key=value lines of HEAD."""
    for match in LINE.finditer(read_text(log)):
        for item in match[2].split():
            key, _, text = item.partition("=")
            if (part := KEYS[match[1]].get(key)) and re.fullmatch(r"\d+(?:\.\d*)?(?:e-?\d+)?", text):
                yield part, float(text)


def _of_metrics(metrics: Metrics, prefix: str) -> Iterator[tuple[str, float]]:
    for name, part in METRICS.items():
        if series := metrics.series.get(prefix + name):
            yield part, sum(series.values)


def _whole(metrics: Metrics, prefix: str, total: float | None) -> dict[str, float]:
    """One timer around everything."""
    series = metrics.series.get(prefix + WHOLE)
    if series is None:
        return {}
    seconds = sum(series.values)
    return {"transfer": seconds, "other": max(0.0, (total if total is not None else seconds) - seconds)}
