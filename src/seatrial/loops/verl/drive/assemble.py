"""Makes one batch record of the parts that verl's processes wrote: rows in the order in which a step is made.

Runs beside the change. A round is one version of the weights: what the server generated with it, the rewards, the micro-batches and
updates of the critic and of the actor that follow, and what was logged. Nothing is left out: what belongs to no round comes last.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from seatrial.instruments.batch_record import ROWS, TENSORS, BatchRecord
from seatrial.loops.verl.drive.record_parts import PARTS, REWARDS
from seatrial.shadow.record import Event, events

REWARD = "even_share"


def assemble(run: Path, rows: int, tokenizer: Any, prompts: Sequence[Sequence[int]]) -> None:
    """Write record.jsonl of a run, once; `rows` completions are made per round, of the `prompts` of the dataset.

    The parts are removed when the record is whole; what an attempt that was killed has left is written anew.
    """
    if not (run / PARTS).is_dir():
        return
    (run / ROWS).unlink(missing_ok=True)
    shutil.rmtree(run / TENSORS, ignore_errors=True)
    known = {tuple(ids): row for row, ids in enumerate(prompts)}
    parts = run / PARTS
    record = BatchRecord(run)
    made = _by_version(parts / "server")
    calls = _lines(parts / REWARDS)
    engines = {role: _rounds(parts / role) for role in ("critic", "actor")}
    logged = {int(row["step"]): row["data"] for row in _lines(run / "metrics.jsonl")}
    for started in (found[0] for _, found in sorted(engines["actor"].items())[:1]):
        _copy(record, started)
    for started in (found[0] for _, found in sorted(engines["critic"].items())[:1]):
        _copy(record, started)
    for version in sorted({*made, *(key for found in engines.values() for key in found)}):
        if version in made:
            _generated(record, made[version])
            mine, calls = calls[:rows], calls[rows:]
            _rewarded(record, made[version], mine, tokenizer, known)
        for role in ("critic", "actor"):
            for event in engines[role].get(version, ()):
                if not event.kind.endswith("started"):
                    _copy(record, event)
        if version + 1 in logged:
            record.add("logged", "logging", logged[version + 1], step=version + 1)
    shutil.rmtree(parts)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Rows that a run wrote. A ValueError that names the line which is none: left out, it would look as if a row had no reward."""
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n") if path.is_file() else (), 1):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: line {number}: {error}") from error
        if row is not None and not isinstance(row, dict):
            raise ValueError(f"{path}: line {number}: not a table")
        found += [row] if row is not None else []
    return found


def _by_version(directory: Path) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = {}
    for event in _events(directory):
        found.setdefault(int(event.values["version"]), []).append(event)
    return found


def _rounds(directory: Path) -> dict[int, list[Event]]:
    """Events by round; an update belongs to the round of its micro-batches."""
    found: dict[int, list[Event]] = {}
    now = 0
    for event in _events(directory):
        now = int(event.values.get("round", now))
        found.setdefault(now, []).append(event)
    return found


def _events(directory: Path) -> Iterator[Event]:
    return events(directory) if (directory / ROWS).is_file() else iter(())


def _copy(record: BatchRecord, event: Event) -> None:
    record.add(event.kind, "", event.values, event.tensors(), step=event.step)


def _ordered(found: Sequence[Event]) -> list[dict[str, Any]]:
    """Tensors of the completions of a round, prompt by prompt: which prompt is asked for first differs between runs."""
    groups: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for event in found:
        tensors = event.tensors()
        groups.setdefault(tuple(tensors["prompt"].tolist()), []).append(tensors)
    return [tensors for _, group in sorted(groups.items()) for tensors in group]


def _generated(record: BatchRecord, found: Sequence[Event]) -> None:
    rows = _ordered(found)
    pad = torch.nn.utils.rnn.pad_sequence
    tensors = {
        "prompt_ids": pad([row["prompt"] for row in rows], batch_first=True),
        "prompt_ids/lengths": torch.tensor([len(row["prompt"]) for row in rows]),
        "completion_ids": pad([row["tokens"] for row in rows], batch_first=True),
        "completion_ids/lengths": torch.tensor([len(row["tokens"]) for row in rows]),
        "scores": pad([row["scores"] for row in rows], batch_first=True),
    }
    asked = sorted({tuple(sorted(event.values["asked"].items())) for event in found}, key=str)
    record.add(
        "generated",
        "sampling",
        {"asked": [dict(pairs) for pairs in asked]},
        tensors,
    )


def _rewarded(
    record: BatchRecord, found: Sequence[Event], calls: list[dict[str, Any]], tokenizer: Any, known: Mapping[tuple[int, ...], int]
) -> None:
    """Each completion with the call that was given its text; a call with another text keeps that text, as tokens."""
    made = [(known.get(tuple(row["prompt"].tolist())), row["tokens"].tolist()) for row in _ordered(found)]
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for _, tokens in made]
    left, taken = list(calls), dict[int, dict[str, Any]]()
    # What fits best is taken first, so that a wrong call takes no right one away.
    for fits in (("row", "text"), ("row",), ("text",), ()):
        for place, (row, _) in enumerate(made):
            wanted = {"row": row, "text": texts[place]}
            call = next((call for call in left if all(call[key] == wanted[key] for key in fits)), None)
            if place not in taken and call is not None:
                left.remove(call)
                taken[place] = call
    ids, rows, rewards = [], [], []
    for place, call in sorted(taken.items()):
        same = call["text"] == texts[place]
        ids.append(made[place][1] if same else tokenizer(call["text"], add_special_tokens=False)["input_ids"])
        rows.append(int(call["row"]))
        rewards.append(float(call["reward"]))
    width = max([1, *map(len, ids)])
    given = {
        "completion_ids": torch.tensor([[*row, *[0] * (width - len(row))] for row in ids], dtype=torch.long).reshape(len(ids), width),
        "lengths": torch.tensor([len(row) for row in ids], dtype=torch.long),
        "rewards": torch.tensor(rewards, dtype=torch.float64),
        "rows": torch.tensor(rows, dtype=torch.long),
    }
    record.add("rewarded", "reward", {"function": REWARD}, given)
