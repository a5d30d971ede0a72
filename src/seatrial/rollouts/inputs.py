"""The rows of a campaign: read one at a time from JSONL and Parquet, checked, and written to inputs.jsonl with ids, agents and tags.

- JSONL: UTF-8 with or without a byte order mark, CRLF or LF; blank lines hold no row. Parquet: by batches; values that JSON cannot hold
  (bytes, decimals, NaN) are refused with their column. The file is hashed while it is read, always to its end.
- An id is 16 hex digits of the sha256 over the dataset's name and the row as canonical JSON (without Gym's `_ng_*`), so it survives added,
  removed and reordered rows. Equal rows get `-2`, `-3`. `content_of` leaves the name out, to join equal rows of two datasets.
- What would fail for certain later is refused here. Every bad row of every file is counted; the first 20 are named.
- Rows are streamed: memory grows by a hash and an offset per row. `weight` chooses among a file's rows, `limit` takes the first of those.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from seatrial.core.errors import UserError
from seatrial.core.guarded import BadValue, open_file
from seatrial.core.records import Record
from seatrial.rollouts.campaign import PARAMS, RESPONSES_KEYS, Campaign, Dataset, expected, is_gym
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.fast_json import parse_json_fast, unstorable
from seatrial.rollouts.verifiers.text_verifiers import column as column_of
from seatrial.rollouts.verifiers.text_verifiers import why_no_choice

_BATCH = 256
_BOM = b"\xef\xbb\xbf"
_FORMATS = "rows are JSONL (an object per line) or Parquet: convert other files, mend or take out single lines"


class BadRowError(ValueError):
    """A row that cannot be used, why, and what to do where that is something else than to mend the row."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.fix = fix


Found = tuple[int, dict[str, Any] | BadRowError]
"""The line of a row (Parquet: its number), counted from 1, and the row, or why it is none."""


class RowSource:
    """A file of rows. Its size and hash are known when `rows` has come to its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self.sha256 = ""
        self.enough = False
        """Set it, and the rest of the file is hashed and counted, but not parsed."""
        self.skipped = 0
        """Rows after that."""

    def rows(self) -> Iterator[Found]:
        """Each row until there is enough; blank lines hold none."""
        try:
            with open_file(self.path) as stream:
                is_parquet = stream.read(4) == b"PAR1"
            yield from self._parquet_rows() if is_parquet else self._jsonl_rows()
        except OSError as error:
            raise UserError(f"{self.path}: cannot read: {error.strerror or error}", "check the path and its permissions") from error

    def _jsonl_rows(self) -> Iterator[Found]:
        digest = hashlib.sha256()
        with open_file(self.path) as stream:
            for number, line in enumerate(stream, 1):
                digest.update(line)
                self.bytes += len(line)
                text = (line.removeprefix(_BOM) if number == 1 else line).strip()
                if text and self.enough:
                    self.skipped += 1
                elif text:
                    try:
                        row: dict[str, Any] | BadRowError = parse(text)
                    except BadRowError as error:
                        row = error
                    yield number, row
        self.sha256 = digest.hexdigest()

    def _parquet_rows(self) -> Iterator[Found]:
        try:
            import pyarrow as arrow
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise UserError(f"{self.path}: Parquet needs pyarrow: {error}", 'pip install "seatrial[rollouts]"') from error
        self.bytes, self.sha256 = self.path.stat().st_size, sha256_of(self.path)
        number = 0
        try:
            with parquet.ParquetFile(self.path) as file:
                for batch in file.iter_batches(batch_size=_BATCH, use_threads=False):
                    for row in batch.to_pylist():
                        number += 1
                        odd = ((column, said) for column, value in row.items() if (said := unstorable(value)))
                        bad = next((BadRowError(f"column {column!r} holds {said}: JSON cannot say it") for column, said in odd), None)
                        yield number, bad or row
                        if self.enough:
                            self.skipped = file.metadata.num_rows - number
                            return
        except (arrow.ArrowException, ValueError, OverflowError, MemoryError, LookupError) as error:  # names that are no text, odd times
            raise UserError(f"{self.path}: not a whole Parquet file (after row {number}): {error}", "write it again") from error


def sha256_of(path: Path) -> str:
    with open_file(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def parse(text: bytes) -> dict[str, Any]:
    """A line as an object. Raises BadRowError, also for what would not survive being written again; see `parse_json_fast`."""
    try:
        row = parse_json_fast(text)
    except BadValue as error:
        column = "" if error.column is None else f" (column {error.column})"
        raise BadRowError(f"not JSON: {error.what}{column}", _FORMATS) from error
    if not isinstance(row, dict):
        raise BadRowError(f"not an object: {text[:40].decode(errors='replace')}", _FORMATS)
    return row


_ID_DIGITS = 16
_ALL = 1 << 64


def canonical(data: Mapping[str, Any]) -> bytes:
    """What is hashed of a row. A TypeError for what JSON does not hold."""
    kept = {key: value for key, value in data.items() if not key.startswith("_ng_")}
    return orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)


def content_of(text: bytes) -> str:
    """The same for equal rows, in whatever dataset and campaign; takes what `canonical` gives."""
    return hashlib.sha256(text).hexdigest()[:_ID_DIGITS]


class RowIds:
    """Gives the rows of one dataset their ids, in order."""

    def __init__(self, dataset: str) -> None:
        self._name = dataset.encode() + b"\n"
        self._seen: set[int] = set()
        self._again: dict[int, int] = {}
        self.duplicates = 0

    def give(self, text: bytes) -> str:
        """The id of a row; takes what `canonical` gives."""
        digits = hashlib.sha256(self._name + text).hexdigest()[:_ID_DIGITS]
        # Numbers instead of texts: half the memory, over as many rows as there are.
        number = int(digits, 16)
        if number not in self._seen:
            self._seen.add(number)
            return digits
        self.duplicates += 1
        self._again[number] = self._again.get(number, 1) + 1
        return f"{digits}-{self._again[number]}"


def is_chosen(task: str, weight: float) -> bool:
    """Whether a row belongs to the share `weight`; a larger share keeps all rows of a smaller one."""
    return int.from_bytes(hashlib.sha256(f"weight:{task}".encode()).digest()[:8], "big") < weight * _ALL


TASK_INDEX, ROLLOUT_INDEX = "_ng_task_index", "_ng_rollout_index"
_HINTS = {
    "seed": "say work.seed: each rollout gets its own",
    "max_tokens": "the Responses API calls it max_output_tokens",
    "messages": "the Responses API calls it input",
}

_LIKELY = {
    "prompt": ("problem", "question", "instruction", "query", "input", "text"),
    "answer": ("expected_answer", "answer", "solution", "gold", "target", "label", "ground_truth", "correct_answer"),
}
"""How others call these columns."""


def agent_of(data: Mapping[str, Any], dataset: Dataset, campaign: Campaign) -> str | None:
    """Who rolls a row out: the row's own agent_ref, else the dataset's agent, else the campaign's; Gym needs one."""
    reference = data.get("agent_ref")
    if reference is not None:
        name = reference.get("name") if isinstance(reference, Mapping) else None
        if not isinstance(name, str) or not name:
            raise BadRowError('agent_ref is not {"name": "…"}')
        return name
    name = dataset.agent or (campaign.gym.agent if campaign.gym else None)
    if campaign.gym and name is None:
        message = "no agent: the row has no agent_ref, the dataset no agent, and gym.agent is not said"
        raise BadRowError(message, "say gym.agent, or agent of the dataset in [[datasets]]")
    return name


def tags_of(data: Mapping[str, Any], dataset: Dataset) -> tuple[str, ...]:
    """The dataset's tags, and `column=value` for each of its tag columns; a list gives several, None gives none."""
    tags = list(dataset.tags)
    for column in dataset.tag_columns:
        value = data.get(column)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str | int | float):
                tags.append(f"{column}={item}")
            elif item is not None:
                raise BadRowError(f"tag column {column!r} holds a {type(item).__name__}")
    return tuple(dict.fromkeys(tags))


def check_row(data: Mapping[str, Any], dataset: Dataset, campaign: Campaign) -> None:
    """See that a row can be asked and scored."""
    if is_gym(data, dataset):
        _check_params(data, dataset)
    else:
        _check_prompt(data, dataset)
    columns = ", ".join(list(data)[:10]) or "none"
    if dataset.answer is not None and data.get(dataset.answer) is None:
        raise BadRowError(f"no answer: the column {dataset.answer!r} is missing or empty; there are: {columns}", _say("answer", data))
    if campaign.gym:
        return
    verify = campaign.verifier_of(dataset)
    if verify.kind in ("exact", "choice", "math") and expected(data, dataset) is None:
        message = f"no answer: the verifier {verify.kind} needs a column expected_answer or answer, or the dataset's key answer"
        raise BadRowError(message, _say("answer", data))
    if verify.kind == "choice" and (why := why_no_choice(data, expected(data, dataset))):
        raise BadRowError(why)
    try:
        tests = column_of(data, verify.tests) if verify.kind == "code" else ()
    except ValueError:
        tests = None
    if tests is None:
        fix = 'say tests = "COLUMN" of a [verifiers.NAME] with kind = "code", or correct these rows'
        raise BadRowError(f"no tests: the verifier code needs the column {verify.tests!r}; there are: {columns}", fix)


def _check_params(data: Mapping[str, Any], dataset: Dataset) -> None:
    params = data.get(PARAMS)
    if not isinstance(params, Mapping):
        raise BadRowError(f"no {PARAMS}" if params is None else f"{PARAMS} is not an object")
    if unknown := sorted(params.keys() - RESPONSES_KEYS):
        hint = next((f" ({_HINTS[key]})" for key in unknown if key in _HINTS), "")
        raise BadRowError(f"{PARAMS} has keys that the Responses API does not have: {', '.join(unknown)}{hint}")
    if params.get("stream"):
        raise BadRowError(f"{PARAMS}.stream: answers are taken whole, not as a stream")
    if not isinstance(params.get("metadata") or {}, Mapping):
        raise BadRowError(f"{PARAMS}.metadata is not an object")
    if dataset.system is not None:
        raise BadRowError("the dataset's system message is for plain rows: this one has its own input")
    _check_messages(f"{PARAMS}.input", params.get("input"), need_role=False)


def _check_prompt(data: Mapping[str, Any], dataset: Dataset) -> None:
    if PARAMS in data:
        raise BadRowError(f'it has {PARAMS}, so it is Gym\'s: the dataset says format = "plain"')
    if dataset.prompt not in data:
        columns = ", ".join(list(data)[:10]) or "none"
        neither = f"neither {PARAMS} nor" if dataset.format == "auto" else "no"
        raise BadRowError(f"{neither} a column {dataset.prompt!r}; there are: {columns}", _say("prompt", data))
    _check_messages(f"column {dataset.prompt!r}", data[dataset.prompt], need_role=True)


def _say(key: str, data: Mapping[str, Any]) -> str:
    """What to do when a column has another name than we look for."""
    likely = next((name for name in _LIKELY[key] if data.get(name) is not None), "COLUMN")
    return f'say which column holds the {key}: {key} = "{likely}" of [[datasets]] (--{key} {likely} with --input), or correct these rows'


def _check_messages(where: str, value: Any, *, need_role: bool) -> None:
    """A text or a list of messages, and not an empty one; Gym's input may hold items without a role, such as tool results."""
    if isinstance(value, str) and value.strip():
        return
    if not isinstance(value, list) or not value:
        empty = value in ([], None) or isinstance(value, str)
        raise BadRowError(f"{where} is {'empty' if empty else 'no text and no list of messages'}")
    for number, item in enumerate(value):
        if not isinstance(item, Mapping) or (need_role and not {"role", "content"} <= item.keys()):
            raise BadRowError(f"{where}[{number}] is no message with role and content")


Progress = Callable[[str], None]
SAY_EVERY = 50_000
_SHOWN = 20


class InputFile(Record):
    """A file whose rows are in inputs.jsonl."""

    dataset: str
    path: str
    sha256: str
    bytes: int
    rows: int
    skipped: int = 0
    """Left out by limit or weight."""
    duplicates: int = 0
    """Rows that are the same as an earlier one of the file: each is a task of its own."""


class Written(NamedTuple):
    """What became of the inputs."""

    files: tuple[InputFile, ...]
    sha256: str


class Faults:
    """Bad rows: the first ones in words, what to do about them, and how many."""

    def __init__(self) -> None:
        self.first: list[str] = []
        self.total = 0
        self._fixes: list[str] = []

    def add(self, where: str, what: object) -> None:
        self.total += 1
        if len(self.first) < _SHOWN:
            self.first.append(f"{where}: {what}")
            self._fixes.append(what.fix if isinstance(what, BadRowError) else "")

    def refuse(self, fix: str) -> None:
        """Raise a UserError with all of them, if there are any; `fix` is for those that bring none of their own."""
        if self.total:
            more = f"\n… and {self.total - len(self.first)} more" if self.total > len(self.first) else ""
            rows = "row" if self.total == 1 else "rows"
            fixes = "; ".join(dict.fromkeys(own or fix for own in self._fixes))
            raise UserError(f"{self.total} bad {rows}; nothing was started:\n" + "\n".join(self.first) + more, fixes)


@contextmanager
def row_writer(place: CampaignDir) -> Iterator[RowWriter]:
    """Writes inputs.jsonl and its index."""
    with place.inputs.open("wb") as stream:
        yield RowWriter(stream, place.index)


class RowWriter:
    """Writes inputs.jsonl, and knows where each row starts."""

    def __init__(self, stream: BinaryIO, index: Path) -> None:
        self._stream, self._index = stream, index
        self._digest = hashlib.sha256()
        self._offsets = array("Q", [0])

    def add(self, task: str, content: str, dataset: str, data: Any, *, agent: str | None, tags: tuple[str, ...], source: str) -> None:
        """One row, as `Units.row` reads it."""
        stored = {"id": task, "content": content, "dataset": dataset, "agent": agent, "tags": tags, "source": source, "data": data}
        line = orjson.dumps(stored, option=orjson.OPT_APPEND_NEWLINE)
        self._stream.write(line)
        self._digest.update(line)
        self._offsets.append(self._offsets[-1] + len(line))

    def finish(self) -> str:
        """Make it durable, write the index; gives the hash."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        with self._index.open("wb") as index:
            self._offsets.tofile(index)
            index.flush()
            os.fsync(index.fileno())
        return self._digest.hexdigest()


def write_inputs(campaign: Campaign, base: Path, place: CampaignDir, progress: Progress | None = None) -> Written:
    """All rows of a campaign into inputs.jsonl and inputs.index of `place`. Raises a UserError that names the bad ones."""
    faults = Faults()
    with row_writer(place) as writer:
        files = tuple(_DatasetReader(campaign, dataset, base, writer, faults).run(progress) for dataset in campaign.datasets)
        faults.refuse("correct these rows, or take them out of the file; what a row must have: docs/rollouts.md")
        for file in files:
            if not file.rows:
                raise UserError(f"{file.path}: dataset {file.dataset}: none of {file.skipped} rows is left", "raise its weight")
        return Written(files=files, sha256=writer.finish())


class _DatasetReader:
    """Takes the rows of one dataset."""

    def __init__(self, campaign: Campaign, dataset: Dataset, base: Path, writer: RowWriter, faults: Faults) -> None:
        self._campaign = campaign
        self._dataset = dataset
        self._source = RowSource((base / dataset.path).absolute())
        self._writer = writer
        self._faults = faults
        self._ids = RowIds(dataset.name)
        self._indices: set[int] = set()
        self._seen_columns: set[str] = set()
        self._taken = 0
        self._skipped = 0

    def run(self, progress: Progress | None) -> InputFile:
        seen = 0
        for seen, (line, found) in enumerate(self._source.rows(), 1):
            where = f"{self._source.path}:{line}"
            try:
                if isinstance(found, BadRowError):
                    raise found
                self._take(found, where)
            except BadRowError as bad:
                self._faults.add(where, bad)
            except orjson.JSONEncodeError as error:
                self._faults.add(where, f"cannot be stored: {error}")
            if self._dataset.limit is not None and self._taken >= self._dataset.limit:
                self._source.enough = True
            if progress and seen % SAY_EVERY == 0:
                progress(f"{self._dataset.name}: {seen} rows read")
        if not seen:
            self._faults.add(str(self._source.path), BadRowError("empty: there is no row in it", "name a file that holds rows"))
        for column in self._dataset.tag_columns:
            if seen and column not in self._seen_columns and not self._faults.total:
                wrong = BadRowError(f"no row has the tag column {column!r}", "correct tag_columns of [[datasets]]")
                self._faults.add(str(self._source.path), wrong)
        return InputFile(
            dataset=self._dataset.name,
            path=str(self._source.path),
            sha256=self._source.sha256,
            bytes=self._source.bytes,
            rows=self._taken,
            skipped=self._skipped + self._source.skipped,
            duplicates=self._ids.duplicates,
        )

    def _take(self, data: dict[str, Any], where: str) -> None:
        check_row(data, self._dataset, self._campaign)
        index = data.get(TASK_INDEX)
        if index is not None and (isinstance(index, bool) or not isinstance(index, int) or index < 0):
            raise BadRowError(f"{TASK_INDEX} is {index!r}, not a number from 0")
        if index in self._indices:  # Gym takes two rows with one index for two rollouts of one task
            raise BadRowError(f"{TASK_INDEX} {index} stands in an earlier row too")
        if index is not None:
            self._indices.add(index)
        agent, tags = agent_of(data, self._dataset, self._campaign), tags_of(data, self._dataset)
        self._seen_columns.update(column for column in self._dataset.tag_columns if column in data)
        text = canonical(data)
        task = self._ids.give(text)
        if not is_chosen(task, self._dataset.weight):
            self._skipped += 1
            return
        self._taken += 1
        if not self._faults.total:
            self._writer.add(task, content_of(text), self._dataset.name, data, agent=agent, tags=tags, source=where)
