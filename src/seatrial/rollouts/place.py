"""The directory of a campaign: where everything lies, and files that are written once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import orjson

from seatrial.files import write_error
from seatrial.model.record import Record


@dataclass(frozen=True, slots=True)
class Place:
    """Paths below the directory of a campaign."""

    root: Path

    @property
    def campaign(self) -> Path:
        """The resolved campaign.toml."""
        return self.root / "campaign.json"

    @property
    def manifest(self) -> Path:
        """Written last when a campaign starts: without it there is none."""
        return self.root / "manifest.json"

    @property
    def inputs(self) -> Path:
        """Every row, in order."""
        return self.root / "inputs.jsonl"

    @property
    def index(self) -> Path:
        """Where each row starts in `inputs`, and where the last one ends."""
        return self.root / "inputs.index"

    @property
    def shards(self) -> Path:
        """A directory per shard."""
        return self.root / "shards"

    def shard(self, number: int) -> Path:
        """attempt-*.jsonl, lease.json, state-*.json."""
        return self.shards / f"{number:05d}"

    @property
    def rounds(self) -> Path:
        """A directory per launch: plan.json, and the jobs."""
        return self.root / "rounds"

    @property
    def stop(self) -> Path:
        """Why the campaign stopped by itself; collectors look for it."""
        return self.root / "stop.json"

    @property
    def model(self) -> Path:
        """The policy's model, as the first collector found it."""
        return self.root / "model.json"

    @property
    def merged(self) -> Path:
        """rollouts.jsonl, failures.jsonl, merge.json."""
        return self.root / "merged"

    @property
    def profile(self) -> Path:
        """profile.json and its other forms."""
        return self.root / "profile"


def write_once(path: Path, value: Record) -> None:
    """Write a small file whole, unless it is there already: the first writer wins."""
    temporary = path.with_name(f".{path.stem}-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        temporary.write_bytes(orjson.dumps(value.model_dump()))
        os.link(temporary, path)  # unlike a rename it never replaces
    except FileExistsError:
        pass
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)
