"""Files for other tools: tasks selected by pass rate, and a merged campaign in the layouts of NeMo-Skills and NeMo Gym.

- `select` writes rows as the user wrote them, plus `pass_rate`. Both bounds are inclusive; a task needs `min_n` rollouts that worked.
  Left-out tasks are counted by reason. Input files are never overwritten; nothing is written when no task is left.
- Skills: `rollouts-rs<seed>.jsonl` per repetition, line n being the same task in each; `.done` stands beside complete ones.
- Gym: `<stem>_materialized_inputs.jsonl`, `<stem>.jsonl` and `<stem>_failures.jsonl`, as `gym eval profile` reads them.
- The merge's hash is checked first; files are written atomically.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import orjson

from seatrial.core.errors import UserError
from seatrial.core.files import replacing, sync_directory, write_bytes
from seatrial.core.guarded import open_file
from seatrial.core.records import Record
from seatrial.rollouts import manifest as manifests
from seatrial.rollouts.campaign import PARAMS, prompt_messages
from seatrial.rollouts.campaign_dir import CampaignDir, spare_campaigns
from seatrial.rollouts.inputs import ROLLOUT_INDEX, TASK_INDEX, sha256_of
from seatrial.rollouts.manifest import Manifest, Units
from seatrial.rollouts.results.campaign_merge import FAILURES, ROLLOUTS, Written, read_result
from seatrial.rollouts.results.profile_build import make_profile
from seatrial.rollouts.results.profile_data import Task
from seatrial.rollouts.rollout_record import TornError, check, head_of, row_of, unit_of

RATE = "pass_rate"
_SHOWN = 20


class Selected(Record):
    """What was written, and what was not."""

    path: str
    rows: int
    tasks: int
    left_out: Mapping[str, int]
    """Tasks by the first reason that held them back."""


def select_tasks(
    place: CampaignDir,
    *,
    low: float,
    high: float,
    out: Path,
    dataset: str | None = None,
    tag: str | None = None,
    min_n: int = 1,
    sort: Literal["order", "pass-rate"] = "order",
    with_rate: bool = False,
    pass_at: float = 1.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Selected:
    """Write the rows of all tasks whose pass rate is `low` to `high`; a rollout passes with a reward of `pass_at` and more."""
    if not 0 <= low <= high <= 1:
        raise UserError(f"a band from {low:g} to {high:g}", "a pass rate lies from 0 to 1; say the lower bound first")
    manifest = manifests.load_manifest(place)
    if out.is_dir():
        raise UserError(f"{out}: is a directory", "name a file")
    spare_campaigns(out)
    names = [file.dataset for file in manifest.files]
    if own := next((file for file in manifest.files if manifests.is_input(out, file)), None):
        raise UserError(f"{out}: is the input of dataset {own.dataset}", "write to another file")
    if dataset is not None and dataset not in names:
        raise UserError(f"no dataset is called {dataset}", f"there are: {', '.join(names)}")
    most = max(len(labels) for labels in manifest.repeats.values())
    if not 1 <= min_n <= most:
        raise UserError(f"at least {min_n} rollouts: tasks have up to {most}", f"choose from 1 to {most}")
    tasks = make_profile(place, pass_at=pass_at, ks=(1,), progress=progress).tasks
    tags = sorted({name for task in tasks for name in task.tags})
    if tag is not None and tag not in tags:
        more = f" and {len(tags) - _SHOWN} more" if len(tags) > _SHOWN else ""
        fix = f"there are: {', '.join(tags[:_SHOWN])}{more}" if tags else "leave it out: no task has any"
        raise UserError(f"no task has the tag {tag}", fix)
    reasons = [_why_not(task, low, high, dataset, tag, min_n) for task in tasks]
    chosen = [task for task, reason in zip(tasks, reasons, strict=True) if reason is None]
    left_out = dict(Counter(reason for reason in reasons if reason))
    if not chosen:
        said = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise UserError(f"none of {len(tasks)} tasks is left: {said}; {out} was not written", "widen the band, or collect more rollouts")
    if sort == "pass-rate":
        chosen.sort(key=lambda task: -(task.pass_rate or 0.0))
    with Units(place, manifest) as units, replacing(out) as stream:
        for task in chosen:
            row = units.row(task.index)
            if with_rate and RATE in row.data:
                fix = "select without adding the rate, or rename that column"
                raise UserError(f"{row.source}: the row has a {RATE} of its own", fix)
            stream.write(_json_line({**row.data, RATE: task.pass_rate} if with_rate else row.data))
    return Selected(path=str(out), rows=len(chosen), tasks=len(tasks), left_out=left_out)


def _why_not(task: Task, low: float, high: float, dataset: str | None, tag: str | None, min_n: int) -> str | None:
    if dataset is not None and task.dataset != dataset:
        return "of another dataset"
    if tag is not None and tag not in task.tags:
        return f"without the tag {tag}"
    if task.pass_rate is None or task.n < min_n:
        return f"with fewer than {min_n} rollouts"
    if task.pass_rate < low:
        return f"below {low:g}"
    return f"above {high:g}" if task.pass_rate > high else None


DIRECT_AGENT = "seatrial_direct"
"""As direct_backend.py writes it; importing that would load an HTTP client for a name."""


def write_skills_layout(place: CampaignDir, directory: Path | None = None) -> tuple[Path, ...]:
    """The files of Skills, in `directory` (else `skills` in the campaign's); gives all that were written, markers included."""
    manifest = manifests.load_manifest(place)
    target = directory or place.root / "skills"
    spare_campaigns(target, place.root / "skills")
    made: list[Path] = []
    with _whole(place), Units(place, manifest) as units:
        records = _records(place, ROLLOUTS)
        record, end = next(records, None), 0
        for file in manifest.files:
            labels = manifest.repeats[file.dataset]
            end += file.rows * len(labels)
            home = target / file.dataset if len(manifest.files) > 1 else target
            paths = {label: home / f"rollouts-rs{label}.jsonl" for label in labels}
            _spare(manifest, paths.values())
            markers = {label: path.with_name(f"{path.name}.done") for label, path in paths.items()}
            for marker in (marker for marker in markers.values() if marker.exists()):
                marker.unlink()
                sync_directory(marker.parent)
            counts = dict.fromkeys(paths, 0)
            with ExitStack() as stack:
                streams = {label: stack.enter_context(replacing(path)) for label, path in paths.items()}
                while record is not None and record[0] < end:
                    unit, line = record
                    label = units.repeat_of(unit)
                    streams[label].write(_row(line, units, unit))
                    counts[label] += 1
                    record = next(records, None)
            complete = [marker for label, marker in markers.items() if counts[label] == file.rows]
            for marker in complete:
                write_bytes(marker, b"")
            made += [*paths.values(), *complete]
    return tuple(made)


@contextmanager
def _whole(place: CampaignDir) -> Iterator[None]:
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


def write_gym_layout(place: CampaignDir, directory: Path | None = None, stem: str = "rollouts") -> tuple[Path, ...]:
    """Gym's three files, in `directory` (else `gym` in the campaign's). Materialized inputs hold every unit, also one without rollout."""
    manifest = manifests.load_manifest(place)
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


def _inputs(place: CampaignDir, manifest: Manifest, units: Units) -> Iterator[bytes]:
    datasets = {} if manifest.imported else {item.name: item for item in manifests.load_campaign(place).datasets}
    for index in range(units.rows):
        row = units.row(index)
        data = dict(row.data)
        if PARAMS not in data:
            data[PARAMS] = {"input": prompt_messages(data, datasets[row.dataset])}
        data["agent_ref"] = {"name": row.agent or DIRECT_AGENT}
        for unit in units.units_of_row(index):
            yield _json_line({**data, TASK_INDEX: index, ROLLOUT_INDEX: units.repeat_of(unit)})


def _failures(place: CampaignDir, units: Units) -> Iterator[bytes]:
    for unit, line in _records(place, FAILURES):
        head = head_of(line, check(line))
        agent = units.row(units.row_of(unit)).agent or DIRECT_AGENT
        said = {"_ng_failure_class": head.kind, "_ng_failure_terminal": True, "error": head.message, "agent_ref": {"name": agent}}
        yield _row(line, units, unit, said)


def _records(place: CampaignDir, name: str) -> Iterator[tuple[int, bytes]]:
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
    return _json_line({**row_of(line), **(more or {}), TASK_INDEX: units.row_of(unit), ROLLOUT_INDEX: units.repeat_of(unit)})


def _json_line(row: Mapping[str, Any]) -> bytes:
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
