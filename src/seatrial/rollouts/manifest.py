"""The manifest of a campaign: what is owed, and what its results depend on. Without a manifest there is no campaign.

- A campaign directory appears at once and whole: it is built beside its place and renamed. A refusal or a kill leaves none, and of
  two starts into one place only one succeeds.
- Results depend on `identity` (settings), on the content of the input files and on the files of functions that score. `changes` names
  what is different, key by key.
- Number of shards: `work.shards`; else ceil(units * rollout_s / (concurrency * 60 * target_minutes)), since a shard keeps
  `requests.concurrency` rollouts open, each taking `work.rollout_s`. At least 1, at most as many as units.
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import model_validator

from seatrial import __version__
from seatrial.files import read_model, sync_directory, write_error, write_json
from seatrial.model.errors import UserError
from seatrial.model.guarded import real_path
from seatrial.model.record import Record
from seatrial.rollouts.campaign import Campaign, SeedRule
from seatrial.rollouts.functions import sha256_of_function
from seatrial.rollouts.inputs.reading import sha256_of
from seatrial.rollouts.inputs.writing import InputFile as InputFile
from seatrial.rollouts.inputs.writing import Progress, Written, write_inputs
from seatrial.rollouts.place import Place

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
    """The column that became the reward."""
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
    """UTC, ISO 8601."""
    seatrial: str
    identity: Mapping[str, Any]
    """See `identity_of`; of an import only the rule of its seeds."""
    imported: Imported | None = None
    """Such a campaign collects nothing and has no campaign.json."""
    rescored: str | None = None
    """The campaign directory whose rollouts were scored anew: here nothing is collected."""
    files: tuple[InputFile, ...]
    """In the order of their rows."""
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


def make(campaign: Campaign, base: Path, place: Place, progress: Progress | None = None) -> Manifest:
    """Read and check all inputs and make the campaign directory. Raises a UserError that lists every bad row."""
    with building(place) as draft:
        written = write_inputs(campaign, base, draft, progress)
        repeats = {dataset.name: campaign.work.labels(dataset.repeats) for dataset in campaign.datasets}
        save_campaign(draft, campaign)
        manifest = describe(campaign.name, identity_of(campaign, base), written, repeats)
        shards = shard_count(campaign, manifest.units)
        manifest = manifest.model_copy(update={"shards": shards, "deal": "rows" if manifest.rows >= shards else "units"})
        write_json(draft.manifest, manifest)
    return manifest


def identity_of(campaign: Campaign, base: Path) -> dict[str, Any]:
    """Campaign.identity(), and the content of each function that scores, where its file can be found."""
    identity = campaign.identity()
    for name, verify in campaign.verifiers.items():
        if verify.function is not None:
            identity["verifiers"][name][_CONTENT] = sha256_of_function(verify.function, base)
    return identity


def check_functions(manifest: Manifest, campaign: Campaign, base: Path) -> None:
    """See that functions in files are those of the start; for whoever is about to load them, perhaps long after.

    Modules are left out: where collectors have an environment of their own, theirs is another file.
    """
    before, now = _flat(manifest.identity), _flat(identity_of(campaign, base))
    files = [f"verifiers.{name}.{_CONTENT}" for name, verify in campaign.verifiers.items() if ".py:" in (verify.function or "")]
    if found := [said for key in files if (said := _function_change(before, now, key))]:
        raise UserError(f"results depend on what has changed: {'; '.join(found)}", "change it back, or start a new campaign")


def describe(name: str, identity: Mapping[str, Any], written: Written, repeats: Mapping[str, tuple[int, ...]]) -> Manifest:
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
    """How many shards so many units make; the formula stands above."""
    work = campaign.work
    wanted = work.shards or math.ceil(units * work.rollout_s / (campaign.requests.concurrency * 60 * work.target_minutes))
    return max(1, min(wanted, units))


@contextmanager
def building(place: Place) -> Iterator[Place]:
    """A place to build a campaign directory in, which becomes `place` when the block ends well and is removed when it does not."""
    root = real_path(place.root)
    _check_free(root)
    draft = Place(root.parent / f".{root.name}.{secrets.token_hex(4)}")
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


def load(place: Place) -> Manifest:
    """The manifest of a campaign directory."""
    if not place.manifest.is_file():
        raise UserError(f"{place.root}: no manifest.json, so it is no campaign", "name a directory that `seatrial rollouts start` made")
    return read_model(place.manifest, Manifest)


def load_campaign(place: Place) -> Campaign:
    """The campaign as it was started."""
    if not place.campaign.is_file() and load(place).imported:
        raise UserError(f"{place.root}: its rollouts were imported: there is nothing to collect", "merge, profile and select work on it")
    return read_model(place.campaign, Campaign)


def save_campaign(place: Place, campaign: Campaign) -> None:
    """Store the campaign, all defaults said, so that `load_campaign` gives the same."""
    # An environment beside an own interpreter is refused when it is said; its default need not be.
    unsaid = {"gym": {"environment"}} if campaign.gym and campaign.gym.python else None
    stored = campaign.model_dump(mode="json", exclude=unsaid)
    if campaign.policy.server:
        # So with a server: what its kind has no use for is refused when it is said.
        stored["policy"]["server"] = campaign.policy.server.model_dump(mode="json", exclude_unset=True)
    write_json(place.campaign, stored)


def check_inputs(place: Place, manifest: Manifest) -> None:
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
    contents = [(name, _content_change(known[name], base / asked[name].path, may_be_gone)) for name in asked if name in both]
    return found + [f"datasets.{name}: {said}" for name, said in contents if said]


def _function_change(before: Mapping[str, Any], now: Mapping[str, Any], key: str) -> str | None:
    """What is to be said of the content of a function. Where another function is named, that is said already."""
    function = key.removesuffix(f".{_CONTENT}") + ".function"
    if not key.endswith(f".{_CONTENT}") or before.get(function) != now[function] or before.get(key) in (None, now[key]):
        return None
    return f"{function}: content changed ({now[function]})" if now[key] else f"{function}: {now[function]} cannot be found any more"


def _content_change(file: InputFile, path: Path, may_be_gone: bool) -> str | None:
    try:
        if path.stat().st_size == file.bytes and sha256_of(path) == file.sha256:
            return None
    except OSError as error:
        return None if may_be_gone else f"{path} cannot be read any more: {error.strerror or error}"
    return f"content changed ({path})"


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
