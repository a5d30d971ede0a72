"""A merged campaign in the files that users of NeMo-Skills and NeMo Gym know.

- Skills: `rollouts-rs<seed>.jsonl` for each repetition, rows in the order of the inputs, so that line n is the same task in each of them
  that is complete; then and only then `rollouts-rs<seed>.jsonl.done` stands beside it. A directory per dataset where there are several.
- Gym: `<stem>_materialized_inputs.jsonl`, `<stem>.jsonl` and `<stem>_failures.jsonl`, as `gym eval profile` reads them.
- Written from the merge, whose hash is checked first; each file atomically. A marker goes before its file changes, and comes after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import orjson

from seatrial.files import replacing, sync_directory, write_bytes
from seatrial.model.errors import UserError
from seatrial.model.guarded import open_file
from seatrial.rollouts import manifest as manifests
from seatrial.rollouts.inputs.prompts import PARAMS, prompt_messages
from seatrial.rollouts.inputs.reading import sha256_of
from seatrial.rollouts.inputs.rows import ROLLOUT_INDEX, TASK_INDEX
from seatrial.rollouts.manifest import Manifest
from seatrial.rollouts.merge.result import FAILURES, ROLLOUTS, Written, read_result
from seatrial.rollouts.place import Place
from seatrial.rollouts.record import TornError, check, head_of, row_of, unit_of
from seatrial.rollouts.results.targets import spare_campaigns
from seatrial.rollouts.units import Units

DIRECT_AGENT = "seatrial_direct"
"""As direct/backend.py writes it; importing that would load an HTTP client for a name."""


def write_skills_layout(place: Place, directory: Path | None = None) -> tuple[Path, ...]:
    """The files of Skills, in `directory` (else `skills` in the campaign's); gives all that were written, markers included."""
    manifest = manifests.load(place)
    target = directory or place.root / "skills"
    spare_campaigns(target, place.root / "skills")
    made: list[Path] = []
    with _whole(place), Units(place, manifest) as units:
        records = _Ahead(_records(place, ROLLOUTS))
        end = 0
        for file in manifest.files:
            labels = manifest.repeats[file.dataset]
            end += file.rows * len(labels)
            home = target / file.dataset if len(manifest.files) > 1 else target
            paths = {label: home / f"rollouts-rs{label}.jsonl" for label in labels}
            _spare(manifest, paths.values())
            made += _write_seeds(paths, records, end, file.rows, units)
    return tuple(made)


@contextmanager
def _whole(place: Place) -> Iterator[None]:
    """A UserError for a record whose checksum holds, though no collector wrote it: the merge copies rows as they stand."""
    try:
        yield
    except TornError as error:
        raise UserError(f"{place.merged}: a record was edited: {error}", f"restore the shards of {place.root}, and merge again") from error


def _spare(manifest: Manifest, paths: Iterable[Path]) -> None:
    """Refuse to replace the inputs of the campaign."""
    for path in paths:
        if any(manifests.is_input(path, file) for file in manifest.files):
            raise UserError(f"{path}: is an input of the campaign", "export to another directory")


def _write_seeds(paths: Mapping[int, Path], records: _Ahead, end: int, expected: int, units: Units) -> list[Path]:
    """The files of one dataset, whose units end at `end`: a path for each label, `expected` rows in each."""
    for path in paths.values():
        _unmark(path)
    counts = dict.fromkeys(paths, 0)
    with ExitStack() as stack:
        streams = {label: stack.enter_context(replacing(path)) for label, path in paths.items()}
        for unit, line in records.before(end):
            label = units.repeat_of(unit)
            streams[label].write(_row(line, units, unit))
            counts[label] += 1
    markers = [_marker(path) for label, path in paths.items() if counts[label] == expected]
    for marker in markers:
        write_bytes(marker, b"")
    return [*paths.values(), *markers]


class _Ahead:
    """Records in order, which can be taken up to a unit."""

    def __init__(self, records: Iterator[tuple[int, bytes]]) -> None:
        self._records = records
        self._next = next(records, None)

    def before(self, end: int) -> Iterator[tuple[int, bytes]]:
        """Those of units below `end` that were not taken yet."""
        while self._next is not None and self._next[0] < end:
            yield self._next
            self._next = next(self._records, None)


def write_gym_layout(place: Place, directory: Path | None = None, stem: str = "rollouts") -> tuple[Path, ...]:
    """Gym's three files, in `directory` (else `gym` in the campaign's). Materialized inputs hold every unit, also one without rollout."""
    manifest = manifests.load(place)
    if manifest.imported and manifest.imported.kind == "skills":
        raise UserError(f"{place.root}: rollouts of NeMo-Skills have no responses that Gym could read", "profile them here")
    target = directory or place.root / "gym"
    spare_campaigns(target, place.root / "gym")
    inputs, rollouts, failures = (target / f"{stem}{more}.jsonl" for more in ("_materialized_inputs", "", "_failures"))
    _spare(manifest, (inputs, rollouts, failures))
    with _whole(place), Units(place, manifest) as units, ExitStack() as stack:
        # The last to be opened is the first to appear: rollouts come after what they are read with.
        stack.enter_context(replacing(rollouts)).writelines(_row(line, units, unit) for unit, line in _records(place, ROLLOUTS))
        stack.enter_context(replacing(failures)).writelines(_failures(place, units))
        stack.enter_context(replacing(inputs)).writelines(_inputs(place, manifest, units))
    return inputs, rollouts, failures


def _inputs(place: Place, manifest: Manifest, units: Units) -> Iterator[bytes]:
    datasets = {} if manifest.imported else {item.name: item for item in manifests.load_campaign(place).datasets}
    for index in range(units.rows):
        row = units.row(index)
        data = dict(row.data)
        if PARAMS not in data:
            data[PARAMS] = {"input": prompt_messages(data, datasets[row.dataset])}
        data["agent_ref"] = {"name": row.agent or DIRECT_AGENT}
        for unit in units.units_of_row(index):
            yield _line({**data, TASK_INDEX: index, ROLLOUT_INDEX: units.repeat_of(unit)})


def _failures(place: Place, units: Units) -> Iterator[bytes]:
    for unit, line in _records(place, FAILURES):
        head = head_of(line, check(line))
        agent = units.row(units.row_of(unit)).agent or DIRECT_AGENT
        said = {"_ng_failure_class": head.kind, "_ng_failure_terminal": True, "error": head.message, "agent_ref": {"name": agent}}
        yield _row(line, units, unit, said)


def _records(place: Place, name: str) -> Iterator[tuple[int, bytes]]:
    """Unit and line of each merged record, in order."""
    path = place.merged / name
    result = read_result(place)
    if result is None:
        raise UserError(f"{place.root}: not merged yet", f"seatrial rollouts merge {place.root}")
    written: Written = result.rollouts if name == ROLLOUTS else result.failures
    if sha256_of(path) != written.sha256:
        raise UserError(f"{path}: not what the merge wrote", f"seatrial rollouts merge {place.root}")
    with open_file(path) as stream:
        for line in stream:
            check(line)
            yield unit_of(line), line


def _row(line: bytes, units: Units, unit: int, more: dict[str, Any] | None = None) -> bytes:
    """A record as other tools know it, with the key that its row has in this campaign: an imported one may have had another."""
    return _line({**row_of(line), **(more or {}), TASK_INDEX: units.row_of(unit), ROLLOUT_INDEX: units.repeat_of(unit)})


def _line(row: dict[str, Any]) -> bytes:
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


def _marker(path: Path) -> Path:
    return path.with_name(f"{path.name}.done")


def _unmark(path: Path) -> None:
    if _marker(path).exists():
        _marker(path).unlink()
        sync_directory(path.parent)
