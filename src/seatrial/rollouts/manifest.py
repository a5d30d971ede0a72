"""The manifest of a campaign and the units that it defines. Without a manifest there is no campaign.

- A campaign directory appears at once and whole: it is built beside its place and renamed. Of two starts into one place one succeeds.
- Results depend on `identity` (settings), the content of the input files and the files of scoring functions; `changes` names differences.
  A scoring function's file is found and hashed without running or importing anything; modules that it imports are not watched.
- Units are row x repetition, numbered 0..N-1: rows in the order of inputs.jsonl, the repetitions of a row after each other. A unit's seed
  comes from the campaign's seed, the row's id and the repetition. All but the row itself is arithmetic: eight bytes of memory per row.
- Number of shards: `work.shards`, else ceil(units * rollout_s / (concurrency * 60 * target_minutes)), between 1 and the number of units.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import operator
import os
import secrets
import shutil
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from importlib.machinery import PathFinder
from itertools import accumulate, islice
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

import orjson
from pydantic import model_validator

from seatrial import __version__
from seatrial.core.errors import UserError
from seatrial.core.files import read_model, sync_directory, write_error, write_json
from seatrial.core.guarded import open_file, read_file, real_path
from seatrial.core.records import Record, replace
from seatrial.rollouts.campaign import Campaign, SeedRule
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.inputs import InputFile, Progress, Written, sha256_of, write_inputs
from seatrial.rollouts.rollout_record import InputRow, Unit


def file_of(spec: str, base: Path) -> Path | None:
    """The file that `spec` means; a relative path and a search begin at `base`."""
    module = spec.rpartition(":")[0]
    if module.endswith(".py"):
        return base / module
    importlib.invalidate_caches()
    where: Sequence[str] | None = [str(base), *sys.path]
    found = None
    for part in module.split("."):
        # By the last part of its name alone: with the whole one, packages above it would have to be imported.
        found = PathFinder.find_spec(part, where) if where is not None else None
        if found is None:
            return None
        where = None if found.submodule_search_locations is None else [*found.submodule_search_locations]
    return Path(found.origin) if found is not None and found.has_location and found.origin is not None else None


_CONTENT = "function_sha256"


class ImportedFile(Record):
    """A file of rollouts that was imported."""

    path: str
    sha256: str
    bytes: int
    rollouts: int
    failures: int


class Imported(Record):
    """Where rollouts came from that we did not collect."""

    kind: Literal["gym", "skills"]
    reward_key: str | None
    files: tuple[ImportedFile, ...]
    bad: int = 0
    """Lines that are not in the journal."""
    bad_lines: tuple[str, ...] = ()
    """The first of them: file, line, why."""


class Manifest(Record):
    """manifest.json."""

    version: Literal[1] = 1
    name: str
    made: str
    seatrial: str
    identity: Mapping[str, Any]
    """See `identity_of`; of an import only the rule of its seeds."""
    imported: Imported | None = None
    """Such a campaign collects nothing and has no campaign.json."""
    rescored: str | None = None
    """The campaign directory whose rollouts were scored anew: here nothing is collected."""
    files: tuple[InputFile, ...]
    inputs_sha256: str
    rows: int
    units: int
    repeats: Mapping[str, tuple[int, ...]]
    """Labels of the repetitions of each dataset."""
    shards: int
    deal: Literal["rows", "units"]
    """`rows`: all repetitions of a row in one shard (row % shards), where a server remembers the prompt. `units`: unit % shards."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """What is owed is arithmetic over these numbers: a file in which they contradict each other says nothing."""
        rows = {file.dataset: file.rows for file in self.files}
        units = sum(count * len(self.repeats.get(name, ())) for name, count in rows.items())
        once = all(labels and len(set(labels)) == len(labels) for labels in self.repeats.values())
        if rows.keys() != self.repeats.keys() or not once or (self.rows, self.units) != (sum(rows.values()), units):
            raise ValueError("rows, repeats and units contradict each other")
        work, datasets = self.identity.get("work"), self.identity.get("datasets", [])
        seeded = isinstance(work, Mapping) and type(work.get("seed")) is int and work.get("seed_rule") in get_args(SeedRule)
        if not 1 <= self.shards <= max(self.units, 1) or not seeded:
            raise ValueError("shards or identity.work are not those of a campaign")
        named = isinstance(datasets, list | tuple) and all(isinstance(one, Mapping) and "name" in one for one in datasets)
        if not named or min(rows.values(), default=0) < 0:
            raise ValueError("datasets or files are not those of a campaign")
        return self


def create_campaign(campaign: Campaign, base: Path, place: CampaignDir, progress: Progress | None = None) -> Manifest:
    """Read and check all inputs and make the campaign directory. Raises a UserError that lists every bad row."""
    with building(place) as draft:
        written = write_inputs(campaign, base, draft, progress)
        repeats = {dataset.name: campaign.work.labels(dataset.repeats) for dataset in campaign.datasets}
        save_campaign(draft, campaign)
        manifest = make_manifest(campaign.name, identity_of(campaign, base), written, repeats)
        shards = shard_count(campaign, manifest.units)
        manifest = replace(manifest, shards=shards, deal="rows" if manifest.rows >= shards else "units")
        write_json(draft.manifest, manifest)
    return manifest


def identity_of(campaign: Campaign, base: Path) -> dict[str, Any]:
    """Campaign.identity(), and the content of each function that scores, where its file can be found."""
    identity = campaign.identity()
    for name, verify in campaign.verifiers.items():
        if verify.function is not None:
            file = file_of(verify.function, base)
            try:
                content = sha256_of(file) if file is not None else None
            except OSError:
                content = None
            identity["verifiers"][name][_CONTENT] = content
    return identity


def check_functions(manifest: Manifest, campaign: Campaign, base: Path) -> None:
    """See that functions in files are those of the start; for whoever is about to load them, perhaps long after.

    Modules are left out: where collectors have an environment of their own, theirs is another file.
    """
    before, now = _flat(manifest.identity), _flat(identity_of(campaign, base))
    files = [f"verifiers.{name}.{_CONTENT}" for name, verify in campaign.verifiers.items() if ".py:" in (verify.function or "")]
    if found := [said for key in files if (said := _function_change(before, now, key))]:
        raise UserError(f"results depend on what has changed: {'; '.join(found)}", "change it back, or start a new campaign")


def make_manifest(name: str, identity: Mapping[str, Any], written: Written, repeats: Mapping[str, tuple[int, ...]]) -> Manifest:
    """The manifest of inputs that were written, in one shard."""
    return Manifest(
        name=name,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        seatrial=__version__,
        identity=identity,
        files=written.files,
        inputs_sha256=written.sha256,
        rows=sum(file.rows for file in written.files),
        units=sum(file.rows * len(repeats[file.dataset]) for file in written.files),
        repeats=repeats,
        shards=1,
        deal="rows",
    )


def shard_count(campaign: Campaign, units: int) -> int:
    work = campaign.work
    wanted = work.shards or math.ceil(units * work.rollout_s / (campaign.requests.concurrency * 60 * work.target_minutes))
    return max(1, min(wanted, units))


@contextmanager
def building(place: CampaignDir) -> Iterator[CampaignDir]:
    """A place to build a campaign directory in, which becomes `place` when the block ends well and is removed when it does not."""
    root = real_path(place.root)
    _check_free(root)
    draft = CampaignDir(root.parent / f".{root.name}.{secrets.token_hex(4)}")
    try:
        draft.root.mkdir(parents=True)
        try:
            yield draft
            sync_directory(draft.root)
            # Renames over nothing and over an empty directory; of two that start at once the second finds the first one's.
            draft.root.rename(root)
        except BaseException:
            shutil.rmtree(draft.root, ignore_errors=True)
            raise
        sync_directory(root.parent)
    except OSError as error:
        _check_free(root)
        raise write_error(root, error) from error


def _check_free(root: Path) -> None:
    if (root / "manifest.json").exists():
        raise UserError(f"{root}: holds a campaign already", f"seatrial rollouts resume {root}, or name another directory")
    if root.exists() and not (root.is_dir() and not any(root.iterdir())):
        raise UserError(f"{root}: is there already, and is no empty directory", "name another directory")


def load_manifest(place: CampaignDir) -> Manifest:
    if not place.manifest.is_file():
        raise UserError(f"{place.root}: no manifest.json, so it is no campaign", "name a directory that `seatrial rollouts start` made")
    return read_model(place.manifest, Manifest)


def load_campaign(place: CampaignDir) -> Campaign:
    if not place.campaign.is_file() and load_manifest(place).imported:
        raise UserError(f"{place.root}: its rollouts were imported: there is nothing to collect", "merge, profile and select work on it")
    return read_model(place.campaign, Campaign)


def save_campaign(place: CampaignDir, campaign: Campaign) -> None:
    """Store the campaign, all defaults said, so that `load_campaign` gives the same."""
    # An environment beside an own interpreter is refused when it is said; its default need not be.
    unsaid = {"gym": {"environment"}} if campaign.gym and campaign.gym.python else None
    stored = campaign.model_dump(mode="json", exclude=unsaid)
    if campaign.policy.server:
        # So with a server: what its kind has no use for is refused when it is said.
        stored["policy"]["server"] = campaign.policy.server.model_dump(mode="json", exclude_unset=True)
    write_json(place.campaign, stored)


def check_inputs(place: CampaignDir, manifest: Manifest) -> None:
    """See that inputs.jsonl is what the manifest says; reads all of it."""
    if sha256_of(place.inputs) != manifest.inputs_sha256:
        raise UserError(f"{place.inputs}: its content is not what manifest.json says", "restore the file, or start a new campaign")


def is_input(path: Path, file: InputFile) -> bool:
    """Whether a path is this input: by its place, or by its content, since the file may have been moved."""
    if not path.is_file():
        return False
    if Path(file.path).exists() and path.samefile(file.path):
        return True
    return path.stat().st_size == file.bytes and sha256_of(path) == file.sha256


def changes(manifest: Manifest, campaign: Campaign, base: Path, *, may_be_gone: bool = False) -> list[str]:
    """Keys and input files that differ from when the campaign was started, each in words; empty when nothing does.

    `may_be_gone`: a file that cannot be read is no change, because the campaign has its rows.
    """
    known = {file.dataset: file for file in manifest.files}
    asked = {dataset.name: dataset for dataset in campaign.datasets}
    both = known.keys() & asked.keys()
    before, now = _flat(_by_name(manifest.identity, both)), _flat(_by_name(identity_of(campaign, base), both))
    keys = [key for key in dict.fromkeys((*before, *now)) if not key.endswith(f".{_CONTENT}")]
    found = [f"{key}: {_shown(before, key)} -> {_shown(now, key)}" for key in keys if _shown(before, key) != _shown(now, key)]
    found += [said for key in now if (said := _function_change(before, now, key))]
    found += [f"datasets.{name}: removed" for name in known if name not in both]
    found += [f"datasets.{name}: added" for name in asked if name not in both]
    if (old := [name for name in known if name in both]) != (new := [name for name in asked if name in both]):
        found.append(f"datasets: order {', '.join(old)} -> {', '.join(new)}")
    for name in (name for name in asked if name in both):
        file, path = known[name], base / asked[name].path
        try:
            if path.stat().st_size != file.bytes or sha256_of(path) != file.sha256:
                found.append(f"datasets.{name}: content changed ({path})")
        except OSError as error:
            if not may_be_gone:
                found.append(f"datasets.{name}: {path} cannot be read any more: {error.strerror or error}")
    return found


def _function_change(before: Mapping[str, Any], now: Mapping[str, Any], key: str) -> str | None:
    """What is to be said of the content of a function. Where another function is named, that is said already."""
    function = key.removesuffix(f".{_CONTENT}") + ".function"
    if not key.endswith(f".{_CONTENT}") or before.get(function) != now[function] or before.get(key) in (None, now[key]):
        return None
    return f"{function}: content changed ({now[function]})" if now[key] else f"{function}: {now[function]} cannot be found any more"


def _by_name(identity: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    """Datasets by name, so that one more does not look like a change of all that follow."""
    datasets = {item["name"]: item for item in identity.get("datasets", ()) if item["name"] in names}
    return {**identity, "datasets": datasets}


def _flat(value: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Dotted keys. A table of the campaign that is empty has none; further down it is a value."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{above}{key}.") if isinstance(item, Mapping) and (item or not above) else {f"{above}{key}": item}
    return flat


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return json.dumps(flat[key], ensure_ascii=False) if key in flat else "(none)"


NO_SEED = -1
_KEPT = 32
_BEFORE_ID = b'{"id":"'
_ID_WITHIN = 64


def derive_seed(seed: int, task: str, repeat: int) -> int:
    """31 bits: every server takes them."""
    digest = hashlib.sha256(f"{seed}:{task}:{repeat}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class Units:
    """Units and rows of a campaign directory; use it as a context manager."""

    def __init__(self, place: CampaignDir, manifest: Manifest) -> None:
        self.total = manifest.units
        self.rows = manifest.rows
        self._shards = manifest.shards
        self._by_rows = manifest.deal == "rows"
        self._names = [file.dataset for file in manifest.files]
        self._labels = [manifest.repeats[name] for name in self._names]
        counts = [file.rows for file in manifest.files]
        self._row_starts = list(accumulate(counts, initial=0))
        self._unit_starts = list(accumulate((rows * len(labels) for rows, labels in zip(counts, self._labels, strict=True)), initial=0))
        work = manifest.identity["work"]
        self._seed: int = work["seed"]
        self._rule: str = work["seed_rule"]
        self._path = place.inputs
        self._offsets = _read_index(place, manifest)
        self.row: Callable[[int], InputRow] = lru_cache(_KEPT)(self._read)
        """A row, read when it is asked for."""
        try:
            with open_file(place.inputs) as stream:
                self._handle = os.dup(stream.fileno())
        except OSError as error:
            raise _changed(f"{place.inputs}: cannot read: {error.strerror or error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def of_shard(self, shard: int) -> Iterator[int]:
        if not 0 <= shard < self._shards:
            raise IndexError(f"shard {shard} of {self._shards}")
        if not self._by_rows:
            yield from range(shard, self.total, self._shards)
            return
        for row in range(shard, self.rows, self._shards):
            yield from self.units_of_row(row)

    def shard_of(self, number: int) -> int:
        """The shard that a unit belongs to."""
        return (self.row_of(number) if self._by_rows else self._known(number)) % self._shards

    def row_of(self, number: int) -> int:
        part = self._part_of_unit(number)
        return self._row_starts[part] + (number - self._unit_starts[part]) // len(self._labels[part])

    def repeat_of(self, number: int) -> int:
        part = self._part_of_unit(number)
        labels = self._labels[part]
        return labels[(number - self._unit_starts[part]) % len(labels)]

    def units_of_row(self, index: int) -> range:
        part = self._part_of_row(index)
        width = len(self._labels[part])
        first = self._unit_starts[part] + (index - self._row_starts[part]) * width
        return range(first, first + width)

    def spans(self) -> Iterator[tuple[int, int]]:
        """The units of each row, in order: the first, and the one behind the last."""
        for part, labels in enumerate(self._labels):
            width = len(labels)
            for first in range(self._unit_starts[part], self._unit_starts[part + 1], width):
                yield first, first + width

    def dataset_of(self, index: int) -> str:
        """The dataset of a row, which is not read for it."""
        return self._names[self._part_of_row(index)]

    def unit(self, number: int) -> Unit:
        row, repeat = self.row(self.row_of(number)), self.repeat_of(number)
        seed = derive_seed(self._seed, row.id, repeat) if self._rule == "derived" else repeat if self._rule == "repeat" else NO_SEED
        return Unit(number=number, row=row, repeat=repeat, seed=seed)

    def task_of(self, index: int) -> str:
        """The id of a row, of which no more is read: it stands first."""
        self._part_of_row(index)
        start = os.pread(self._handle, _ID_WITHIN, self._offsets[index])
        task, closed, _ = start.removeprefix(_BEFORE_ID).partition(b'"')
        if not start.startswith(_BEFORE_ID) or not closed:
            raise _changed(f"{self._path}:{index + 1}: not the row that was written")
        return task.decode(errors="backslashreplace")

    def _read(self, index: int) -> InputRow:
        self._part_of_row(index)
        start, end = self._offsets[index], self._offsets[index + 1]
        line = os.pread(self._handle, end - start, start)
        try:
            stored = orjson.loads(line)
            about = stored["id"], stored["dataset"], stored["data"], stored["agent"]
            return InputRow(index, *about, tuple(stored["tags"]), stored["source"])
        except (ValueError, KeyError, TypeError) as error:
            raise _changed(f"{self._path}:{index + 1}: not the row that was written: {error}") from error

    def _known(self, number: int) -> int:
        if not 0 <= number < self.total:
            raise IndexError(f"unit {number} of {self.total}")
        return number

    def _part_of_unit(self, number: int) -> int:
        return bisect_right(self._unit_starts, self._known(number)) - 1

    def _part_of_row(self, index: int) -> int:
        if not 0 <= index < self.rows:
            raise IndexError(f"row {index} of {self.rows}")
        return bisect_right(self._row_starts, index) - 1


def _read_index(place: CampaignDir, manifest: Manifest) -> array[int]:
    """The index, which must fit the manifest and the inputs."""
    offsets = array("Q")
    try:
        offsets.frombytes(read_file(place.index))
        size = place.inputs.stat().st_size
    except (OSError, ValueError) as error:
        raise _changed(f"{place.index}: cannot read: {error}") from error
    if len(offsets) != manifest.rows + 1 or offsets[-1] != size:
        raise _changed(f"{place.inputs}: {size} bytes and {len(offsets) - 1} rows; the manifest says {manifest.rows} rows")
    if offsets[0] != 0 or any(map(operator.ge, offsets, islice(offsets, 1, None))):
        raise _changed(f"{place.index}: rows do not follow one another")
    return offsets


def _changed(message: str) -> UserError:
    return UserError(message, "the campaign directory was edited; restore it, or start a new campaign")
