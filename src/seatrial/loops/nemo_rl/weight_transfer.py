"""Weights from the policy to the generator: time by part, and proofs of the requested transport (level 2)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from seatrial.checks.probe_facts import proof
from seatrial.core.files import read_text
from seatrial.core.records import CheckResult
from seatrial.core.series import Metrics, Series
from seatrial.core.verdict import Boundary
from seatrial.loops.nemo_rl.nemo_metrics import DELTA_TRACES, updates

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
    for tag, series in metrics.series.items():
        name = tag.rpartition("/")[2]
        if tag.startswith(prefix + OLDER) and name not in NESTED:
            yield next((part for part, words in WORDS if any(word in name for word in words)), "other"), sum(series.values)


def _lines(log: Path) -> Iterator[tuple[str, float]]:
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
    series = metrics.series.get(prefix + WHOLE)
    if series is None:
        return {}
    seconds = sum(series.values)
    return {"transfer": seconds, "other": max(0.0, (total if total is not None else seconds) - seconds)}


RESHARD = "nccl_reshard bulk comm group"
PAYLOADS = "refit/transfer/payloads"
SAMPLES, MISMATCHES = "refit/delta_verify/samples", "refit/delta_verify/mismatches"


def transported(phase: str, directory: Path, text: str, metrics: Metrics) -> Iterator[CheckResult]:
    """Weights went to the generator by this transport, and by no other."""
    prefix = f"{phase}/"
    loss, series = (metrics.series.get(prefix + name) for name in ("train/loss", WHOLE))
    # The first transfer carries what both sides began with, and may be left out.
    late = [step for step in loss.steps if step > 1] if loss else []
    absent = [step for step in late if not ((series.get(step) if series else None) or 0) > 0]
    missed = f"none at step {', '.join(map(str, absent[:5]))}" if absent else ""
    name = f"trained weights were transferred at every step ({phase})"
    value = f"{len(late) - len(absent)} of {len(late)} steps"
    yield proof(name, bool(late) and not absent, value, Boundary.REFIT, "all", missed, run=phase)
    found = read_transfer(directory / phase, metrics, prefix)
    yield proof(f"weight transfer ({phase})", found is not None, str(found or "not timed"), Boundary.REFIT, run=phase)
    if phase == "delta":
        yield sparse(metrics)
        yield from (check for check in (verified(metrics),) if check)
    else:
        traces = [tag for tag in DELTA_TRACES if prefix + tag in metrics.series]
        name, value = f"no sparse transport was used ({phase})", f"{len(traces)} traces of one"
        yield proof(name, not traces, value, Boundary.REFIT, "0", ", ".join(traces), run=phase)
    if phase == "reshard":
        there = RESHARD in text
        yield proof("the reshard transport was set up", there, "yes" if there else "no line says so", Boundary.REFIT)


def sparse(metrics: Metrics) -> CheckResult:
    """The delta transport carried changed elements at every step after the first update."""
    changed, sent = (metrics.series.get(f"delta/{tag}") for tag in (DELTA_TRACES[0], PAYLOADS))
    older = metrics.series.get(f"delta/{OLDER}producer/sparse_encode")
    used = [series for series in ((changed, sent) if changed or sent else (older,)) if series]
    late = _after_updates(metrics)
    idle = [f"{series.tag} is {_shown(series, step)} at step {step}" for series in used for step in late if not (series.get(step) or 0) > 0]
    whole = len(used) == (2 if changed or sent else 1)
    value = "; ".join(
        f"{series.tag.removeprefix('delta/')} {min(series.values):g} to {max(series.values):g}" for series in used if series.values
    )
    name = "the delta transport carried changed elements"
    return proof(name, bool(late) and whole and not idle, value or "no trace", Boundary.REFIT, "> 0", "; ".join(idle[:2]))


def verified(metrics: Metrics) -> CheckResult | None:
    """Elements were compared on both sides after a transfer, and none differed; the older generation compares none."""
    if f"delta/{DELTA_TRACES[0]}" not in metrics.series:
        return None
    samples, wrong = (metrics.series.get(f"delta/{tag}") for tag in (SAMPLES, MISMATCHES))
    taken = sum((samples.get(step) or 0) for step in _after_updates(metrics)) if samples else 0
    differ = sum(wrong.values) if wrong else 0
    value = f"{taken:g} samples, {differ:g} differ"
    return proof("the delta transport was verified by samples", taken > 0 and not differ, value, Boundary.REFIT, "> 0, and none differs")


def _after_updates(metrics: Metrics) -> list[int]:
    """Steps whose transfer carries trained weights."""
    loss, first = metrics.series.get("delta/train/loss"), min(updates(metrics, "delta/"), default=None)
    return [step for step in loss.steps if step > first] if loss and first is not None else []


def _shown(series: Series, step: int) -> str:
    value = series.get(step)
    return "not logged" if value is None else f"{value:g}"
