"""`resume --retry-failed`: units that failed for good are owed again, without touching a record.

`forgiven.json` in a shard's directory names the newest attempt at that moment: final failures of attempts up to it count as failures
that may heal. Later ones are final again.
"""

from __future__ import annotations

from pathlib import Path

from seatrial.files import read_model, write_json
from seatrial.model.record import Record
from seatrial.rollouts.journal.attempt import attempt_files
from seatrial.rollouts.place import Place

_FILE = "forgiven.json"


class Forgiven(Record):
    """forgiven.json."""

    attempt: int


def forgiven(shard_dir: Path) -> int:
    """The last attempt whose final failures are owed again; 0 when none are."""
    file = shard_dir / _FILE
    return read_model(file, Forgiven).attempt if file.is_file() else 0


def forgive(place: Place) -> None:
    """Owe every final failure again that stands in the journal now."""
    for shard_dir in sorted(place.shards.glob("[0-9]*")):
        files = attempt_files(shard_dir)
        if files:
            write_json(shard_dir / _FILE, Forgiven(attempt=files[-1].number))
