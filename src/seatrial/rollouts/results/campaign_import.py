"""`import`: makes a campaign directory from rollouts that NeMo Gym or NeMo-Skills collected; merge, profile and select work on it.

- Gym: the key of a line is (`_ng_task_index`, `_ng_rollout_index`). Skills: a file per seed; line n is task n - 1 in all of them, unless
  rows carry `_ng_task_index`. A torn or keyless line is named with file and line; `partial` imports the rest.
- With Gym's materialized inputs exactly their keys are expected; without them every repetition that any task of the agent has. A key that
  comes twice is a duplicate, and a conflict when rewards differ; the first wins, and a rollout beats a failure.
- The reward is `reward`, else the first of is_correct, symbolic_correct, judge_correct in the first row. A dataset per agent; its tasks are
  the input rows, or what the rollouts keep of them. Files are read twice and never held in memory.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from seatrial.core.errors import UserError
from seatrial.core.files import write_json
from seatrial.core.guarded import BadValue, open_file, parse_json
from seatrial.core.records import replace
from seatrial.rollouts.backends.openai_format import count_of
from seatrial.rollouts.campaign import PARAMS, Campaign
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.inputs import (
    ROLLOUT_INDEX,
    SAY_EVERY,
    TASK_INDEX,
    BadRowError,
    Faults,
    InputFile,
    Progress,
    RowIds,
    Written,
    canonical,
    content_of,
    parse,
    row_writer,
    sha256_of,
)
from seatrial.rollouts.journal.attempts import Attempt, LeaseHolder
from seatrial.rollouts.manifest import NO_SEED, Imported, ImportedFile, Manifest, Units, building, make_manifest
from seatrial.rollouts.rollout_record import FailureKind, Head, encode

NOBODY = "http://127.0.0.1:9/v1"
"""A campaign names a policy. Scoring asks none, and nobody answers at the port for what is to be discarded."""
_PROMPTS = ("problem", "question", "prompt")
"""Columns in which rows of Skills have it."""


def settings_of(place: CampaignDir, manifest: Manifest) -> dict[str, Any]:
    """What a campaign.toml of these rows would say, but for the verifier."""
    datasets, first = [], 0
    with Units(place, manifest) as units:
        for file in manifest.files:
            row = units.row(first).data
            prompt = next((column for column in _PROMPTS if column in row), "prompt")
            datasets.append({"name": file.dataset, "path": file.path, "prompt": prompt})
            first += file.rows
    return {"name": manifest.name, "datasets": datasets, "policy": {"url": NOBODY}}


def check_judges(place: CampaignDir, campaign: Campaign) -> None:
    """Refuse a judge that would ask the policy: an import has none."""
    for dataset in campaign.datasets:
        verify = campaign.verifier_of(dataset)
        if verify.kind == "judge" and verify.url is None and campaign.policy.url == NOBODY:
            message = f"{place.root}: was imported, so there is no policy that could be the judge"
            raise UserError(message, "say where the judge is: --set verifiers.judge.kind=judge --set verifiers.judge.url=URL")


REWARDS = ("reward", "is_correct", "symbolic_correct", "judge_correct")
_PROBLEM = ("id", "problem", "question", "prompt", "expected_answer")
_ANSWERS = ("extracted_answer", "predicted_answer")
_GENERATED = frozenset(
    {
        *("generation", "predicted_answer", "judgement", "num_generated_tokens", "num_input_tokens", "finish_reason", "error", "logprobs"),
        *("generation_start_time", "generation_end_time", "generation_time", "reasoning_content", "serialized_output", "tokens"),
        *("_full_generation", "_async_position", "reward_model_score", "code_execution", "num_code_executions", *REWARDS),
    }
)


def agent_of(data: Mapping[str, Any]) -> str | None:
    """Gym: who rolled it out."""
    reference = data.get("agent_ref")
    name = reference.get("name") if isinstance(reference, Mapping) else None
    if not isinstance(name, str | None):
        raise BadRowError('agent_ref is not {"name": "…"}')
    return name


def task_row(data: Mapping[str, Any], *, is_input: bool) -> dict[str, Any]:
    """The input row of a materialized one (`is_input`), or of a rollout."""
    if PARAMS not in data:
        return {key: value for key, value in data.items() if key not in _GENERATED and not key.startswith("_ng_")}
    if is_input:
        kept = {key: value for key, value in data.items() if not key.startswith("_ng_")}
    else:
        kept = {key: data[key] for key in ("expected_answer", "agent_ref") if key in data}
    return {PARAMS: _without_seed(data[PARAMS]), **{key: value for key, value in kept.items() if key != PARAMS}}


def _without_seed(params: Any) -> Any:
    """A request without what is unsaid in it, and without the seed of one repetition."""
    if not isinstance(params, Mapping):
        raise BadRowError(f"{PARAMS} is not an object")
    said = {key: value for key, value in params.items() if value is not None}
    metadata = said.get("metadata")
    if isinstance(metadata, Mapping) and isinstance(metadata.get("extra_body"), str):
        try:
            extra = parse_json(metadata["extra_body"])
        except BadValue:
            return said
        if isinstance(extra, dict) and "seed" in extra:
            del extra["seed"]
            others = {key: value for key, value in metadata.items() if key != "extra_body"}
            said["metadata"] = {**others, **({"extra_body": json.dumps(extra)} if extra else {})}
            if not said["metadata"]:
                del said["metadata"]
    return said


def fingerprint(data: Mapping[str, Any]) -> str | None:
    """What tells two problems apart, of a row that Skills aligns by its line; None for one that carries its key."""
    if TASK_INDEX in data:
        return None
    said = {key: data[key] for key in _PROBLEM if key in data}
    return content_of(canonical(said)) if said else None


def head_of_rollout(data: Mapping[str, Any], reward_key: str | None, *, unit: int, task: str, repeat: int) -> Head:
    """The head of a rollout's record. Raises BadRowError for a row that has no reward and does not say that it failed."""
    reward = None if reward_key is None else data.get(reward_key)
    failure = data.get("_ng_failure_class") or (data.get("error") if reward is None else None)
    if failure:
        message = f"{failure}: {data['error']}" if data.get("error") not in (None, failure) else str(failure)
        return Head(unit, task, repeat, NO_SEED, "failed", kind=FailureKind.AGENT, final=True, message=message[:500])
    if not isinstance(reward, int | float):
        said = f"no reward: {reward_key or ', '.join(REWARDS)} {'is no number' if reward is not None else 'is missing'}"
        numbers = [key for key, value in data.items() if _is_metric(key, value, reward_key)]
        there = f" (numbers stand in {', '.join(numbers[:10])})" if numbers else ""
        raise BadRowError(said, f"name the column that is the reward: --reward COLUMN{there}, or import the other lines with --partial")
    if not math.isfinite(reward):
        raise BadRowError(f"{reward_key} is {reward}")
    given, made, finish, turns = _response(data)
    answer = next((data[key] for key in _ANSWERS if data.get(key) is not None), None)
    return Head(
        unit=unit,
        task=task,
        repeat=repeat,
        seed=NO_SEED,
        outcome="ok",
        reward=float(reward),
        answer=None if answer is None else str(answer),
        input_tokens=given,
        output_tokens=made,
        finish=finish,
        turns=turns,
        metrics={key: float(value) for key, value in data.items() if _is_metric(key, value, reward_key)},
    )


def _is_metric(key: str, value: Any, reward_key: str | None) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and key != reward_key and not key.startswith("_ng_")


def _response(data: Mapping[str, Any]) -> tuple[int | None, int | None, str | None, int | None]:
    """Tokens in and out, finish reason and turns: of Gym from the response, of Skills from its columns."""
    response = data.get("response")
    if not isinstance(response, Mapping):
        said = data.get("finish_reason")
        made = count_of(data.get("num_generated_tokens"))
        return count_of(data.get("num_input_tokens")), made, said if isinstance(said, str) else None, None
    usage, reason = _table(response.get("usage")), _table(response.get("incomplete_details")).get("reason")
    finish = "length" if reason == "max_output_tokens" else reason or ("stop" if response.get("status") == "completed" else None)
    output = response.get("output")
    items = [_table(item) for item in output] if isinstance(output, list) else []
    # Answers of the model: runs of its items between those that others gave it.
    own = [item.get("type") != "function_call_output" and item.get("role") != "user" for item in items]
    turns = sum(mine and not before for mine, before in zip(own, [False, *own], strict=False))
    return count_of(usage.get("input_tokens")), count_of(usage.get("output_tokens")), finish, turns


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


Kind = Literal["gym", "skills"]
_NO_KEY = (
    f"Gym's collector writes {TASK_INDEX} and {ROLLOUT_INDEX}; a file without them whose lines are different tasks: import skills FILE"
)
_SEED = re.compile(r"-rs(\d+)\.jsonl$")


class RolloutLine(NamedTuple):
    """One line with its key."""

    file: int
    number: int
    offset: int
    length: int
    task: int
    label: int
    data: dict[str, Any]


def seed_of(path: Path) -> int:
    match = _SEED.search(path.name)
    return int(match[1]) if match else 0


def in_order(kind: Kind, paths: Sequence[Path]) -> tuple[Path, ...]:
    """Files as they are read: those of Skills by the number of their seed, not by its letters (rs2 before rs10)."""
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: no such file", "name the files that hold the rollouts")
        if path.name.endswith("-async"):
            raise UserError(f"{path}: NeMo-Skills is still writing it", "wait for the job, or resume it, and import the .jsonl")
    if kind == "gym":
        return tuple(paths)
    ordered = tuple(sorted(paths, key=seed_of))
    for first, second in pairwise(ordered):
        if seed_of(first) == seed_of(second):
            raise UserError(f"{first} and {second}: two files of seed {seed_of(first)}", "import one file per seed")
    return ordered


def read_lines(kind: Kind, paths: Sequence[Path], faults: Faults) -> Iterator[RolloutLine]:
    """Every good line of the files; the others go to `faults`."""
    for file, path in enumerate(paths):
        label = seed_of(path) if kind == "skills" else None
        for number, offset, text in _texts(path):
            where = f"{path}:{number}"
            try:
                data = parse(text)
            except BadRowError as error:
                faults.add(where, str(error))  # what it advises is for rows that can be written anew
                continue
            try:
                task = number - 1 if label is not None and TASK_INDEX not in data else _index(data, TASK_INDEX)
                repeat = _index(data, ROLLOUT_INDEX) if label is None else label
                agent_of(data)
            except BadRowError as error:
                faults.add(where, error)
                continue
            yield RolloutLine(file, number, offset, len(text), task, repeat, data)


def _texts(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and content of each line that is not blank."""
    offset = 0
    try:
        with open_file(path) as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, offset, line
                offset += len(line)
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror or error}", "check the path and its permissions") from error


def _index(data: Mapping[str, Any], key: str) -> int:
    value = data.get(key)
    if key not in data:
        raise BadRowError(f"no {key}", _NO_KEY)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadRowError(f"{key} is {value!r}, not a number from 0")
    return value


@dataclass(slots=True)
class ImportedTask:
    """Where a task was seen first, and what with."""

    file: int
    offset: int
    length: int
    agent: str | None
    fingerprint: str | None
    labels: int = 0
    """A bit for each label, by its place in `Survey.bits`."""


class AgentGroup(NamedTuple):
    """Tasks of one agent with the same repetitions: a dataset."""

    name: str
    labels: tuple[int, ...]
    tasks: tuple[int, ...]


class Survey:
    """Learns the tasks, line by line."""

    def __init__(self, found: Iterable[RolloutLine]) -> None:
        self.tasks: dict[int, ImportedTask] = {}
        self.bits: dict[int, int] = {}
        for line in found:
            task = self.tasks.get(line.task)
            if task is None:
                task = ImportedTask(line.file, line.offset, line.length, agent_of(line.data), fingerprint(line.data))
                self.tasks[line.task] = task
            task.labels |= 1 << self.bits.setdefault(line.label, len(self.bits))

    def groups(self, unnamed: str, *, exact: bool) -> list[AgentGroup]:
        """Datasets, by agent; `unnamed` is the one without. `exact`: a task is owed what it was seen with, else what any of its agent
        was seen with."""
        union: dict[str | None, int] = {}
        for task in self.tasks.values():
            union[task.agent] = union.get(task.agent, 0) | task.labels
        members: dict[tuple[str | None, int], list[int]] = {}
        for number in sorted(self.tasks):
            task = self.tasks[number]
            members.setdefault((task.agent, task.labels if exact else union[task.agent]), []).append(number)
        names: dict[str, int] = {}
        groups: list[AgentGroup] = []
        for (agent, bits), tasks in members.items():
            name = agent or unnamed
            names[name] = names.get(name, 0) + 1
            shown = name if names[name] == 1 else f"{name}.{names[name]}"
            groups.append(AgentGroup(shown, tuple(sorted(label for label, bit in self.bits.items() if bits >> bit & 1)), tuple(tasks)))
        return groups


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
    out: CampaignDir,
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
    faults = Faults()
    survey = Survey(read_lines("gym" if source.inputs else source.kind, source.of_tasks, faults))
    if source.inputs:
        # What is owed must be certain. Bad lines of rollouts are told when they are read for good.
        faults.refuse("mend the materialized inputs, or leave them out")
    if not survey.tasks:
        faults.refuse("name the files that hold the rollouts")
        raise UserError(f"{source.of_tasks[0]}: there is no rollout in it", "name the files that hold the rollouts")
    groups = survey.groups(name, exact=bool(source.inputs))
    with building(out) as draft:
        written, numbers = _write_rows(source, survey, groups, draft)
        identity = {"work": {"seed": 0, "seed_rule": "none"}}
        manifest = make_manifest(name, identity, written, {group.name: group.labels for group in groups})
        writer = _Journal(source, survey, numbers, reward_key)
        with Units(draft, manifest) as units:
            writer.write(draft, units, {group.name: group.labels for group in groups}, progress)
        if not partial:
            writer.faults.refuse("mend these lines, or import the others with --partial")
        manifest = replace(manifest, imported=writer.summary())
        write_json(draft.manifest, manifest)
    return manifest


def _write_rows(source: _Source, survey: Survey, groups: Sequence[AgentGroup], place: CampaignDir) -> tuple[Written, dict[int, int]]:
    numbers: dict[int, int] = {}
    streams = [open_file(path) for path in source.of_tasks]
    try:
        with row_writer(place) as writer:
            for group in groups:
                ids = RowIds(group.name)
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
        self._source, self._survey, self._numbers, self._reward_key = source, survey, numbers, reward_key
        self._ok = [0] * len(source.rollouts)
        self._failed = [0] * len(source.rollouts)

    def write(self, place: CampaignDir, units: Units, labels: dict[str, tuple[int, ...]], progress: Progress | None) -> None:
        shard = place.shard(0)
        shard.mkdir(parents=True)
        holder = replace(LeaseHolder.here(), number=1)
        with Attempt.open(shard, holder) as attempt:
            for count, line in enumerate(read_lines(self._source.kind, self._source.rollouts, self.faults), 1):
                try:
                    attempt.append(self._record(line, units, labels))
                except BadRowError as error:
                    self.faults.add(f"{self._source.rollouts[line.file]}:{line.number}", error)
                if progress and count % SAY_EVERY == 0:
                    progress(f"{count} rollouts read")

    def _record(self, line: RolloutLine, units: Units, labels: dict[str, tuple[int, ...]]) -> bytes:
        index = self._numbers.get(line.task)
        known = labels[units.dataset_of(index)] if index is not None else ()
        if index is None or line.label not in known:
            raise BadRowError(f"task {line.task}, repetition {line.label} is not in the inputs")
        task = self._survey.tasks[line.task]
        if not self._source.inputs and fingerprint(line.data) != task.fingerprint:
            raise BadRowError(f"another problem than line {line.number} of {self._source.rollouts[task.file]}: the files are not aligned")
        if self._reward_key is None:
            self._reward_key = next((key for key in REWARDS if line.data.get(key) is not None), None)
        unit = units.units_of_row(index)[known.index(line.label)]
        made = head_of_rollout(line.data, self._reward_key, unit=unit, task=units.task_of(index), repeat=line.label)
        counts = self._ok if made.ok else self._failed
        counts[line.file] += 1
        return encode(made, {**line.data, "reward": made.reward} if made.ok else line.data)

    def summary(self) -> Imported:
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
