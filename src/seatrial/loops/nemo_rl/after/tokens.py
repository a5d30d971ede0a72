"""The sequences of a level with the log-probabilities of generator and trainer: `train_data_step<N>.jsonl`.

- One row is one sequence. Its values are lists of one: NeMo-RL writes batches of one.
- A prompt is known by its token ids: those before the first token that counts in the loss.
- A torn row, or one whose lists differ in length, is a UserError with file and line: half a log must not look like a
  whole one.
- Sampling settings are those of the configuration that the run printed; of several the last one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from seatrial.files import read_error
from seatrial.loops.claims import ABSENT, lookup
from seatrial.loops.nemo_rl.after.dump import read_configs
from seatrial.loops.nemo_rl.after.results import ONLY, token_files
from seatrial.model.errors import UserError
from seatrial.model.guarded import open_file, parse_json
from seatrial.model.tokens import TokenRow

STEP = re.compile(r"train_data_step(\d+)\.jsonl")
SETTINGS = ("temperature", "top_p", "top_k", "max_new_tokens")
LISTS = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")


def tokens(directory: Path) -> Iterator[TokenRow]:
    """All sequences of a level, by run and step."""
    configs: dict[str, Mapping[str, Any]] = {}
    found = sorted(token_files(directory), key=lambda item: (item[0], _step(item[1])))
    for prefix, path in found:
        run = prefix.rstrip("/") or ONLY
        phase = run.split("/")[0] if (directory / run.split("/")[0]).is_dir() else ONLY
        if phase not in configs:
            configs[phase] = _config(directory / phase / "run.log")
        yield from _rows(path, run, configs[phase])


def _step(path: Path) -> int:
    match = STEP.fullmatch(path.name)
    return int(match[1]) if match else 0


def _config(log: Path) -> Mapping[str, Any]:
    printed = read_configs(log) if log.is_file() else []
    return (printed[-1] if printed else None) or {}


def _rows(path: Path, run: str, config: Mapping[str, Any]) -> Iterator[TokenRow]:
    known = {name: lookup(config, f"policy.generation.{name}") for name in SETTINGS}
    settings = tuple((name, str(value)) for name, value in known.items() if value != ABSENT)
    for number, line in enumerate(_lines(path), 1):
        if not line:
            continue
        try:
            entry = parse_json(line)
            yield _row(entry, f"{path.name}:{number}", run, _step(path), number - 1, settings, known["max_new_tokens"])
        except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"{path}:{number}: not a sequence of a training step: {what}", "the log is torn: run the level again"
            ) from error


def _lines(path: Path) -> Iterator[str]:
    """One after another: a step of a real run may hold a hundred megabytes."""
    try:
        with open_file(path) as stream:
            for line in stream:
                yield line.decode("utf-8", "replace").rstrip("\n")
    except OSError as error:
        raise read_error(path, error) from error


def _row(
    entry: Mapping[str, Any], source: str, run: str, step: int, row: int, settings: tuple[tuple[str, str], ...], limit: Any
) -> TokenRow:
    length = int(_one(entry["input_lengths"]))
    lists = {name: _list(entry[name]) for name in LISTS}
    sizes = {name: len(values) for name, values in lists.items()}
    if len(set(sizes.values())) > 1 or not 0 < length <= sizes["token_ids"]:
        raise ValueError(f"input_lengths is {length}, and the lists have {sizes}")
    mask = tuple(bool(value) for value in lists["token_loss_mask"][:length])
    reward = entry.get("rewards")
    return TokenRow(
        source=source,
        run=run,
        step=step,
        row=row,
        prompt=_identity(lists["token_ids"][: mask.index(True) if any(mask) else length]),
        generation=tuple(map(float, lists["generation_logprobs"][:length])),
        training=tuple(map(float, lists["prev_logprobs"][:length])),
        mask=mask,
        masked_out=not _one(entry["sample_loss_mask"]),
        length=length,
        reward=float(_one(reward)) if reward is not None else None,
        truncated=sum(mask) >= limit if type(limit) is int else None,
        settings=settings,
    )


def _identity(ids: list[Any]) -> str:
    """Short, and the same for the same token ids."""
    digest = hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:12]
    return f"{digest} ({len(ids)} tokens)"


def _one(value: Any) -> Any:
    """The value of a batch of one."""
    return value[0] if isinstance(value, list) else value


def _list(value: Any) -> list[Any]:
    """The list of a batch of one."""
    found = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value
    if not isinstance(found, list):
        raise TypeError(f"{type(found).__name__} instead of a list")
    return found
