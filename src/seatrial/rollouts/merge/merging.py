"""`merge`: reads the journal, refuses what is incomplete, and puts rollouts.jsonl, failures.jsonl and merge.json in their place.

- Order: rollouts by unit number, each the winning record as it stands in the journal (`ok` beats failed; then the lowest attempt
  number, token and offset). The same journal gives the same bytes, whoever merges and how often.
- Both files are complete and on disk before the first is renamed. merge.json is removed before, unless it says the same, and written
  last: where it is, it belongs to the files beside it. A merge that was killed leaves hidden temporaries, which the next one removes.
- One merge at a time, by lease: a second one waits, at most `wait_s`.
- The journal is only read.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from seatrial.files import read_model, sync_directory, write_error, write_json
from seatrial.launch.interrupt import check_stop
from seatrial.model.errors import UserError
from seatrial.model.words import counted
from seatrial.rollouts.journal.holder import Holder
from seatrial.rollouts.journal.lease import Lease
from seatrial.rollouts.journal.scan import FAILED, OK, OWED, Scan, Scanner
from seatrial.rollouts.manifest import Manifest, check_inputs
from seatrial.rollouts.merge.index import Index
from seatrial.rollouts.merge.result import FAILURES, LISTED, RESULT, ROLLOUTS, MergeRefusedError, MergeResult, Source
from seatrial.rollouts.merge.writing import copy_winners
from seatrial.rollouts.place import Place
from seatrial.rollouts.record import KEY
from seatrial.rollouts.units import Units

WAIT_S = 120.0
"""For another merge."""


def merge(
    place: Place,
    manifest: Manifest,
    units: Units,
    *,
    partial: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    wait_s: float = WAIT_S,
) -> MergeResult:
    """Merge a campaign; raises a MergeRefusedError when units are missing and `partial` is not said, a HeldError when another merge
    does not end."""
    with Lease.acquire(place.merged / ".lease", Holder.here(), wait_s) as lease:

        def tick() -> None:
            check_stop()
            lease.renew()

        _sweep(place.merged)
        # Rollouts are those of the rows that the manifest names only while nobody has edited them.
        check_inputs(place, manifest)
        index = Index(units.total)
        progress("reading the journal")
        scanner = Scanner(place, units, index)
        scan = scanner.update(tick=tick)
        missing = _ids(units, _units_with(scan, OWED))
        if scan.owed and not partial:
            raise MergeRefusedError(place, manifest.units, scan.ok, scan.failed, missing, _complete(place, manifest))
        progress(f"writing {counted(scan.ok, 'rollout')}")
        rollouts, failures = (place.merged / f".{name}.{lease.holder.label}" for name in (ROLLOUTS, FAILURES))
        try:
            result = MergeResult(
                **_counts(manifest, scan),
                missing_ids=missing,
                conflict_ids=_ids(units, sorted(scan.conflicting)),
                rollouts=copy_winners(index, _units_with(scan, OK), rollouts, tick),
                failures=copy_winners(index, _units_with(scan, FAILED), failures, tick),
                failed_by_kind=_kinds(failures),
                sources=_sources(place, scanner),
            )
            # A merge that was taken over while it slept must not replace what its successor wrote.
            lease.check()
            _publish(place.merged, rollouts, failures, result)
        finally:
            rollouts.unlink(missing_ok=True)
            failures.unlink(missing_ok=True)
    return result


def _complete(place: Place, manifest: Manifest) -> str:
    """How what is missing can be had: only a campaign that collects can be resumed."""
    if manifest.imported:
        return "import again, with the files that hold the others, into a new directory"
    if manifest.rescored:
        return f"complete {manifest.rescored}, and repeat the rescore command"
    return f"seatrial rollouts resume {shlex.quote(str(place.root))}"


def _counts(manifest: Manifest, scan: Scan) -> dict[str, Any]:
    return {
        "campaign": manifest.name,
        "inputs_sha256": manifest.inputs_sha256,
        "expected": manifest.units,
        "ok": scan.ok,
        "failed": scan.failed,
        "missing": scan.owed,
        "coverage": scan.ok / manifest.units,
        "partial": scan.owed > 0,
        "duplicates": scan.duplicates,
        "conflicts": scan.conflicts,
        "torn": scan.torn + scan.tails,
        "foreign": scan.foreign,
    }


def _units_with(scan: Scan, state: int) -> Iterator[int]:
    return (unit for unit, settled in enumerate(scan.settled) if settled == state)


def _ids(units: Units, numbers: Iterable[int]) -> tuple[str, ...]:
    """The first of them, as people know them."""
    return tuple(f"{units.row(units.row_of(number)).id}/{units.repeat_of(number)}" for number in islice(numbers, LISTED))


def _kinds(failures: Path) -> dict[str, int]:
    with failures.open("rb") as stream:
        found = Counter(orjson.loads(line)[KEY].get("kind", "") for line in stream)
    return dict(sorted(found.items()))


def _sources(place: Place, scanner: Scanner) -> tuple[Source, ...]:
    return tuple(
        Source(path=path.relative_to(place.root).as_posix(), bytes=read.offset, records=read.records, torn=read.torn + read.tail)
        for path, read in scanner.files.items()
    )


def _says(file: Path, result: MergeResult) -> bool:
    """Whether it is there and says the same: then whoever reads while the merge is repeated must not miss it."""
    try:
        return file.is_file() and read_model(file, MergeResult) == result
    except UserError:
        return False


def _sweep(directory: Path) -> None:
    """Remove the temporaries of merges that were killed."""
    for name in (ROLLOUTS, FAILURES, RESULT):
        for left in directory.glob(f".{name}.*"):
            left.unlink(missing_ok=True)


def _publish(directory: Path, rollouts: Path, failures: Path, result: MergeResult) -> None:
    try:
        if not _says(directory / RESULT, result):
            (directory / RESULT).unlink(missing_ok=True)
            sync_directory(directory)
        rollouts.replace(directory / ROLLOUTS)
        failures.replace(directory / FAILURES)
        sync_directory(directory)
    except OSError as error:
        raise write_error(directory, error) from error
    write_json(directory / RESULT, result)
