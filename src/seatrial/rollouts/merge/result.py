"""merge.json: what a merge found and wrote. No time stands in it, so the same journal gives the same bytes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from seatrial.files import read_model
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.record import Record
from seatrial.model.verdict import Boundary
from seatrial.rollouts.place import Place

LISTED = 1000
"""So many ids of missing or conflicting units are named."""
ROLLOUTS, FAILURES, RESULT = "rollouts.jsonl", "failures.jsonl", "merge.json"
_SHOWN = 5


class Written(Record):
    """A file of the merge."""

    rows: int
    bytes: int
    sha256: str


class Source(Record):
    """A file of the journal, as far as it was read."""

    path: str
    """Below the campaign directory."""
    bytes: int
    records: int
    torn: int


class MergeResult(Record):
    """merge.json; written last, and removed first by the next merge."""

    campaign: str
    inputs_sha256: str
    """Of the rows, as in the manifest."""
    expected: int
    ok: int
    failed: int
    """For good; they stand in failures.jsonl."""
    missing: int
    coverage: float
    """Units with a rollout, as a share of those expected."""
    partial: bool
    """Whether it was written although something is missing."""
    failed_by_kind: Mapping[str, int]
    duplicates: int
    """Records beside the winning one."""
    conflicts: int
    """Units whose results contradict each other: the same unit, another reward. The first attempt's counts."""
    torn: int
    """Lines that are no records: their units were owed again."""
    foreign: int
    """Records of other shards or campaigns: never counted."""
    missing_ids: tuple[str, ...] = ()
    """`task/repetition`, the first LISTED."""
    conflict_ids: tuple[str, ...] = ()
    rollouts: Written
    failures: Written
    sources: tuple[Source, ...]

    @property
    def sha256(self) -> str:
        """Of rollouts.jsonl."""
        return self.rollouts.sha256


class MergeRefusedError(BlockedError):
    """Something is missing, and nobody said that this is fine; `complete` says how it can be had."""

    def __init__(self, place: Place, expected: int, ok: int, failed: int, missing_ids: Sequence[str], complete: str) -> None:
        missing = expected - ok - failed
        more = f" and {missing - _SHOWN} more" if missing > _SHOWN else ""
        message = (
            f"{place.root}: incomplete: {missing} of {expected} units have no result ({ok} ok, {failed} failed for good); "
            f"the first: {', '.join(missing_ids[:_SHOWN])}{more}"
        )
        root = shlex.quote(str(place.root))
        super().__init__(Boundary.ROLLOUT, message, f"{complete}, or merge what there is: seatrial rollouts merge {root} --partial")
        self.expected, self.ok, self.failed, self.missing = expected, ok, failed, missing


def read_result(place: Place) -> MergeResult | None:
    """The last merge, or None when there is none; a UserError when its files are not the ones it wrote."""
    if not (place.merged / RESULT).is_file():
        return None
    result = read_model(place.merged / RESULT, MergeResult)
    for name, written in ((ROLLOUTS, result.rollouts), (FAILURES, result.failures)):
        path = place.merged / name
        size = path.stat().st_size if path.is_file() else None
        if size != written.bytes:
            raise UserError(
                f"{path}: {size} bytes instead of {written.bytes}: not what the merge wrote",
                f"seatrial rollouts merge {shlex.quote(str(place.root))}",
            )
    return result
