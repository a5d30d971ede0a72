"""What the scripts left below PHASE/results: event files, dumps, token logs, by run.

A script may train several times: `logs/NAME/exp_001` or `NAME/logs/exp_001` is a run called NAME, and `logs/exp_001` is
the script's only one. Several `exp_*` of one run follow each other: the later resumed the earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

RESULTS = "results"
DUMP = "metrics.json"
ONLY = "run"
"""The phase of a level with one training phase: its metrics carry no prefix."""


def runs(directory: Path) -> Iterator[tuple[str, Path]]:
    """Prefix and log directory of every run of a level."""
    for place in sorted(directory.glob(f"*/{RESULTS}")):
        phase = "" if place.parent.name == ONLY else f"{place.parent.name}/"
        for logs in sorted(path for path in place.rglob("logs") if path.is_dir()):
            case = "".join(f"{part}/" for part in logs.parent.relative_to(place).parts)
            named = sorted(path for path in logs.iterdir() if path.is_dir() and not path.name.startswith("exp_"))
            yield from ((f"{phase}{case}{path.name}/", path) for path in named)
            if not named:
                yield f"{phase}{case}", logs


def metric_files(directory: Path) -> Mapping[str, tuple[Path, ...]]:
    """The event files of each run, by prefix; the dump of the script where a run has none."""
    made: dict[str, tuple[Path, ...]] = {}
    for prefix, logs in runs(directory):
        events = tuple(sorted(path for path in logs.rglob("*tfevents*") if path.is_file()))
        dump = logs.parent / DUMP
        if events or dump.is_file():
            made[prefix] = events or (dump,)
    return made


def dumps(directory: Path) -> dict[str, Path]:
    """The script's own dump of each run, by prefix, where there is one."""
    return {prefix: logs.parent / DUMP for prefix, logs in runs(directory) if (logs.parent / DUMP).is_file()}


def token_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Prefix and path of every file with the sequences of a step."""
    for prefix, logs in runs(directory):
        for path in sorted(logs.rglob("train_data_step*.jsonl")):
            yield prefix, path
