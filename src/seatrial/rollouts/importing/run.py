"""Make a campaign directory out of rollouts that Gym or Skills collected.

- What should be there: with Gym's materialized inputs exactly their keys; without them every repetition that any task of the same agent
  (Skills: any task) has. What is not there shows as missing in merge and profile.
- Everything that is there goes into the journal: a key that comes twice is counted as a duplicate, and as a conflict when its rewards
  differ; the first one wins, and a rollout beats a failure.
- Bad lines are refused with file and line; `partial` imports the rest and keeps them in the manifest.
- A dataset per agent, since agents may have different repetitions. Files are read twice, and never held in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.files import write_json
from seatrial.model.errors import UserError
from seatrial.model.guarded import open_file
from seatrial.rollouts.importing.heads import fingerprint, head, reward_key_of, task_row
from seatrial.rollouts.importing.lines import Kind, Line, in_order, lines
from seatrial.rollouts.importing.survey import Group, Survey
from seatrial.rollouts.inputs.ids import Ids, canonical, content_of
from seatrial.rollouts.inputs.reading import BadRowError, parse, sha256_of
from seatrial.rollouts.inputs.writing import SAY_EVERY, Faults, InputFile, Progress, Written, row_writer
from seatrial.rollouts.journal.attempt import Attempt
from seatrial.rollouts.journal.holder import Holder
from seatrial.rollouts.manifest import Imported, ImportedFile, Manifest, building, describe
from seatrial.rollouts.place import Place
from seatrial.rollouts.record import encode
from seatrial.rollouts.units import Units


@dataclass(slots=True)
class _Source:
    """What is read: rollouts, and the files that say which tasks there are."""

    kind: Kind
    rollouts: tuple[Path, ...]
    inputs: tuple[Path, ...]
    """Gym's materialized inputs; none when there are only rollouts."""

    @property
    def of_tasks(self) -> tuple[Path, ...]:
        return self.inputs or self.rollouts


def import_rollouts(
    kind: Kind,
    files: Sequence[Path],
    out: Place,
    *,
    name: str = "imported",
    inputs: Sequence[Path] = (),
    reward_key: str | None = None,
    partial: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """The campaign of `files` in `out`. `inputs`: Gym's materialized inputs; Gym's failure files go among `files`. `reward_key`: the column
    that is the reward, where the usual ones are not meant. `partial`: import what is good beside bad lines."""
    if kind == "skills" and inputs:
        raise UserError("materialized inputs are Gym's: rollouts of Skills carry their rows", "leave out the inputs")
    source = _Source(kind, in_order(kind, files), in_order("gym", inputs))
    if not source.rollouts:
        raise UserError("nothing to import: no file was named", "name the files that hold the rollouts")
    survey, groups = _survey(source, name)
    with building(out) as draft:
        written, numbers = _write_rows(source, survey, groups, draft)
        identity = {"work": {"seed": 0, "seed_rule": "none"}}
        manifest = describe(name, identity, written, {group.name: group.labels for group in groups})
        writer = _Journal(source, survey, numbers, reward_key)
        with Units(draft, manifest) as units:
            writer.write(draft, units, {group.name: group.labels for group in groups}, progress)
        if not partial:
            writer.faults.refuse("mend these lines, or import the others with --partial")
        manifest = manifest.model_copy(update={"imported": writer.summary()})
        write_json(draft.manifest, manifest)
    return manifest


def _survey(source: _Source, name: str) -> tuple[Survey, list[Group]]:
    faults = Faults()
    kind: Kind = "gym" if source.inputs else source.kind
    survey = Survey(lines(kind, source.of_tasks, faults))
    if source.inputs:
        # What is owed must be certain. Bad lines of rollouts are told when they are read for good.
        faults.refuse("mend the materialized inputs, or leave them out")
    if not survey.tasks:
        faults.refuse("name the files that hold the rollouts")
        raise UserError(f"{source.of_tasks[0]}: there is no rollout in it", "name the files that hold the rollouts")
    return survey, survey.groups(name, exact=bool(source.inputs))


def _write_rows(source: _Source, survey: Survey, groups: Sequence[Group], place: Place) -> tuple[Written, dict[int, int]]:
    """inputs.jsonl, and the number of each task's row."""
    numbers: dict[int, int] = {}
    streams = [open_file(path) for path in source.of_tasks]
    try:
        with row_writer(place) as writer:
            for group in groups:
                ids = Ids(group.name)
                for number in group.tasks:
                    task = survey.tasks[number]
                    streams[task.file].seek(task.offset)
                    where = f"{source.of_tasks[task.file]} (task {number})"
                    try:
                        data = task_row(parse(streams[task.file].read(task.length)), is_input=bool(source.inputs))
                    except BadRowError as error:
                        raise UserError(f"{where}: {error}", "mend the line") from error
                    text = canonical(data)
                    writer.add(ids.give(text), content_of(text), group.name, data, agent=task.agent, tags=(), source=where)
                    numbers[number] = len(numbers)
            first = source.of_tasks[0]
            size, digest = first.stat().st_size, sha256_of(first)
            files = (InputFile(dataset=group.name, path=str(first), sha256=digest, bytes=size, rows=len(group.tasks)) for group in groups)
            return Written(files=tuple(files), sha256=writer.finish()), numbers
    finally:
        for stream in streams:
            stream.close()


class _Journal:
    """Turns lines into records of one attempt."""

    def __init__(self, source: _Source, survey: Survey, numbers: dict[int, int], reward_key: str | None) -> None:
        self.faults = Faults()
        self._source = source
        self._survey = survey
        self._numbers = numbers
        self._reward_key = reward_key
        self._ok = [0] * len(source.rollouts)
        self._failed = [0] * len(source.rollouts)

    def write(self, place: Place, units: Units, labels: dict[str, tuple[int, ...]], progress: Progress | None) -> None:
        """All rollouts, in the order in which they lie there."""
        shard = place.shard(0)
        shard.mkdir(parents=True)
        holder = Holder.here().model_copy(update={"number": 1})
        with Attempt.open(shard, holder) as attempt:
            for count, line in enumerate(lines(self._source.kind, self._source.rollouts, self.faults), 1):
                try:
                    attempt.append(self._record(line, units, labels))
                except BadRowError as error:
                    self.faults.add(f"{self._source.rollouts[line.file]}:{line.number}", error)
                if progress and count % SAY_EVERY == 0:
                    progress(f"{count} rollouts read")

    def _record(self, line: Line, units: Units, labels: dict[str, tuple[int, ...]]) -> bytes:
        index = self._numbers.get(line.task)
        known = labels[units.dataset_of(index)] if index is not None else ()
        if index is None or line.label not in known:
            raise BadRowError(f"task {line.task}, repetition {line.label} is not in the inputs")
        task = self._survey.tasks[line.task]
        if not self._source.inputs and fingerprint(line.data) != task.fingerprint:
            raise BadRowError(f"another problem than line {line.number} of {self._source.rollouts[task.file]}: the files are not aligned")
        if self._reward_key is None:
            self._reward_key = reward_key_of(line.data)
        unit = units.units_of_row(index)[known.index(line.label)]
        made = head(line.data, self._reward_key, unit=unit, task=units.task_of(index), repeat=line.label)
        counts = self._ok if made.ok else self._failed
        counts[line.file] += 1
        return encode(made, {**line.data, "reward": made.reward} if made.ok else line.data)

    def summary(self) -> Imported:
        """Where it all came from."""
        return Imported(
            kind=self._source.kind,
            reward_key=self._reward_key,
            files=tuple(
                ImportedFile(path=str(path), sha256=sha256_of(path), bytes=path.stat().st_size, rollouts=ok, failures=failed)
                for path, ok, failed in zip(self._source.rollouts, self._ok, self._failed, strict=True)
            ),
            bad=self.faults.total,
            bad_lines=tuple(self.faults.first),
        )
