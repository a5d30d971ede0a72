"""What a trial plans, measures and concludes, as stored in the run directory.

- These types are the schemas of trial.json, checks.json, result.json, report.json, isolate.json and localize.json.
- Unknown keys are refused, instances are frozen, and the shipped JSON Schemas are generated from these types.
- In localize.json errors are per token of the loss, |generator - trainer| in log-probability; a mult error is the mean of exp(error).
  Non-finite numbers are stored as the strings "NaN", "Infinity", "-Infinity".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from seatrial.core.errors import FindingCode, Severity, code_of
from seatrial.core.verdict import Boundary, Verdict

SCHEMA_VERSION = 1
TRIAL_VERSION = 2
"""Schema of trial.json and report.json. Since 2 a trial holds the digests of its files."""


class Record(BaseModel):
    """Base of everything that is stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Model = TypeVar("Model", bound=BaseModel)


def replace(record: Model, **changes: Any) -> Model:
    """A copy with other values in some fields, checked as when a record is made: a misspelt field or a wrong type is an error."""
    kind = type(record)
    if unknown := sorted(changes.keys() - kind.model_fields.keys()):
        raise TypeError(f"{kind.__name__} has no field {', '.join(unknown)}")
    return kind.model_validate({**{name: getattr(record, name) for name in record.model_fields_set}, **changes})


class CheckResult(Record):
    """One assertion with what it measured."""

    name: str
    """The expression as written, or the name of a proof."""
    kind: Literal["expression", "proof"] = "expression"
    passed: bool
    value: float | str | None = None
    """The measured value; non-finite numbers are stored as the strings "NaN", "Infinity", "-Infinity"."""
    threshold: str = ""
    """What the value is compared with, for example `< 1.05`."""
    steps: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    """Steps that should have had a finite point and did not."""
    message: str = ""
    boundary: Boundary = Boundary.METRICS
    """Where a miss of this check points to."""
    run: str = ""
    """The run of the level that it is about; empty where the level has one."""
    stage: str = ""
    """The stage of a training step that it proves."""
    step: int | None = None
    tensor: str = ""
    tag: str = ""
    """The metric that it measured, where it measured one."""
    subject: Literal["", "bound"] = ""
    """What it is about, where others decide by that: `bound` are the general limits of a metric, which a script's own replace."""
    line: int | None = None
    """The line of the log that shows it, where the check was read there."""
    measured: bool = False
    """It was missed by what it measured, which its message tells, and not for want of a value."""
    settings: tuple[str, ...] = ()
    """The settings that were not as the level claims, where it is about settings."""


class Finding(Record):
    """One result of the preflight."""

    name: str
    ok: bool
    """False blocks the trial."""
    boundary: Boundary = Boundary.ENVIRONMENT
    message: str
    fix: str = ""
    code: FindingCode = Field(default_factory=lambda data: code_of(data.get("name", "")))
    warns: bool = False
    """Worth a look, although it blocks nothing."""
    path: str = ""

    @property
    def severity(self) -> Severity:
        """What it means for the trial."""
        return Severity.BLOCKS if not self.ok else Severity.WARNS if self.warns else Severity.OK


class SubmoduleState(Record):
    """One submodule of a repository under test."""

    path: str
    commit: str
    state: Literal["clean", "uninitialised", "other-commit", "conflict"]


class RepoState(Record):
    """The exact state of one repository of the change."""

    name: str
    path: str
    commit: str
    branch: str | None
    """None when HEAD is detached."""
    dirty: tuple[str, ...] = ()
    """Changed, staged and untracked paths, relative to the repository."""
    submodules: tuple[SubmoduleState, ...] = ()
    changed: tuple[str, ...] = ()
    """Files that differ from the base of the change and still exist; none when no base is known."""
    base: str | None = None
    """The commit before the change; None when it is a guess."""
    packages: tuple[str, ...] = ()
    """Python packages that this checkout provides and whose import is proven."""
    import_root: str | None = None
    """The directory that goes first on the import path (the checkout itself or its src)."""
    origin: str | None = None
    patch: str | None = None
    """Name of the file with the full patch beside this record; None when clean."""
    synced: str | None = None
    """The directory of another tree that holds a verified copy of this one while the trial runs: imports may come from there."""
    companion: bool = False
    """Driven, not under test: its state is recorded and its import proven, but nothing of it has to be used."""


class ImportProof(Record):
    """From which file one process kind imported one package."""

    process: str
    """The process kind: `driver`, `generator`, `rank1`, …"""
    package: str
    file: str | None
    """The file that was imported; None when it cannot be imported."""
    version: str | None = None
    expected: str | None = None
    """The checkout it must come from; None when the package is not under test."""
    ok: bool
    method: Literal["imported", "found"] = "imported"
    """`imported`: read from the module after a real import; `found`: located without importing it."""


class Cost(Record):
    """What a level is expected to take."""

    minutes: float
    cpu_seconds: float = 0
    gpus: int = 0
    disk_mb: int = 0
    memory_mb: int = 0


class PlannedLevel(Record):
    """One level of a plan and why it is in it."""

    number: int
    name: str
    title: str
    reasons: tuple[str, ...]
    cost: Cost
    skip: str | None = None
    """Why the level will not be run, when that is known beforehand."""


class Plan(Record):
    """What would run and why."""

    loop: str
    levels: tuple[PlannedLevel, ...]
    model: str
    changes: tuple[RepoState, ...] = ()
    unmatched: tuple[str, ...] = ()
    """Changed paths that no level names; they fan out to the default levels."""
    not_needed: tuple[str, ...] = ()
    """Changed paths that are known to need no level."""
    arguments: tuple[str, ...] = ()
    options: dict[str, str] = Field(default_factory=dict)
    known_issues: dict[str, str] = Field(default_factory=dict)
    """Upstream issues, by the id of the signature that they explain."""


class Diagnosis(Record):
    """What triage concluded from a log."""

    boundary: Boundary | None = None
    verdict: Verdict | None = None
    """The verdict that the log alone supports; None when it shows no failure."""
    cause: str = ""
    file: str | None = None
    line: int | None = None
    """1-based line number of the decisive line, counting newline characters only."""
    excerpt: tuple[str, ...] = ()
    signature: str | None = None
    advice: str = ""
    exception: str | None = None
    """Class of the exception that ended the run; None when nothing was raised."""
    survived: bool = False
    """The run went on after it: what it measured afterwards is inconclusive, and a missed check outranks it."""
    times: int = 1
    milestone: str | None = None
    noise: tuple[str, ...] = ()


class PhaseOutcome(Record):
    """How one process of a level ended."""

    name: str
    exit_code: int | None
    """None when it was ended by Seatrial."""
    ended: Literal["exited", "deadline", "stalled", "interrupted", "lost"]
    seconds: float
    cpu_seconds: float = 0
    signal: int | None = None


class OwnVerdict(Record):
    """What a run came to by itself, where the comparison with its base changed that."""

    verdict: Verdict
    reason: str
    boundary: Boundary | None = None


ResultCode = Literal["", "wrong-import", "interrupted", "job-ended"]
"""Why a level has no verdict, where others decide by that: other code was imported than what is under test, Seatrial was asked to stop
before the level ran, or its job on a cluster ended before it was judged."""


class LevelResult(Record):
    """The judged outcome of one level."""

    number: int
    name: str
    title: str
    verdict: Verdict
    reason: str
    code: ResultCode = ""
    boundary: Boundary | None = None
    own: OwnVerdict | None = None
    """The verdict of the level by itself, where the comparison with the base replaced it."""
    vacuous: bool = False
    checks: tuple[CheckResult, ...] = ()
    diagnosis: Diagnosis | None = None
    phases: tuple[PhaseOutcome, ...] = ()
    steps_reached: int | None = None
    steps_expected: int | None = None
    proves: str = ""
    limitations: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Parts of the level that were not run, each with the reason: they are Skipped."""
    arguments: tuple[str, ...] = ()
    """Loop arguments that override the level's own settings, redacted."""
    not_taken: tuple[str, ...] = ()
    """Names of variants of the level, such as transports, that it was not run with."""
    follow_ups: tuple[str, ...] = ()
    key_lines: tuple[str, ...] = ()
    directory: str = ""
    seconds: float = 0
    cpu_seconds: float = 0


class Deliverable(Record):
    """One line of the summary: what was asked for and what proves it."""

    name: str
    verdict: Verdict | Literal["Not requested"]
    proof: str


class SideResult(Record):
    """How the tests of one repository, or a probe, ended, which go before the levels."""

    key: str
    name: str
    """Of the deliverable."""
    verdict: Verdict
    reason: str
    command: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kind: Literal["pytest", "probe"] = "pytest"
    gate: bool = False
    """Whether its Fail ends the trial: nothing else runs then."""
    boundary: Boundary | None = None
    own: OwnVerdict | None = None
    """The verdict of the tests by themselves, where the comparison with the base replaced it."""
    passed: int = 0
    """Tests; of a probe, its rungs that count."""
    failed: int = 0
    errors: int = 0
    skipped: int = 0
    directory: str = ""
    seconds: float = 0


class Comparison(Record):
    """One deliverable beside the same one on the unchanged side."""

    deliverable: str
    before: Verdict | None
    """None when the baseline has no such deliverable."""
    after: Verdict
    word: Literal["pass", "fail (pre-existing)", "fixed", "newly broken", "not comparable"]
    excuses: bool = False
    """The unchanged side fails in the same way: the failure says nothing about the change."""
    note: str = ""


class BitDifference(Record):
    """The first place where two runs of a level differ."""

    phase: str
    source: Literal["record", "metrics"]
    step: int | None
    stage: str = ""
    name: str
    """The digest, value or metric; `row` when one side ends earlier."""
    expected: str
    found: str


class BitComparison(Record):
    """A level beside the same level on the unchanged side, bit by bit."""

    level: int
    outcome: Literal["identical", "differs", "not comparable"]
    sources: tuple[Literal["record", "metrics"], ...] = ()
    compared: int = 0
    """Digests, values and metrics that were equal before the first difference."""
    difference: BitDifference | None = None
    reason: str = ""


NoBase = Literal["unknown", "same files", "switched off", "fault", "cluster"]


class Baseline(Record):
    """The unchanged side."""

    source: str
    """A revision, or the directory of a recorded trial; empty when there is none."""
    origin: Literal["requested", "base"] = "requested"
    """`requested`: --baseline named it; `base`: the state before the change."""
    absent: NoBase | None = None
    expect: Literal["identical"] | None = None
    """What the user demands of the comparison."""
    changes: tuple[RepoState, ...] = ()
    directory: str = ""
    comparisons: tuple[Comparison, ...] = ()
    bits: tuple[BitComparison, ...] = ()
    reused: tuple[int, ...] = ()
    """Levels whose result comes from an earlier run of the same base."""
    notes: tuple[str, ...] = ()
    """Why it may not be comparable: another model, other options, another environment."""


class EnvironmentRecord(Record):
    """The interpreter and packages that a loop runs in."""

    python: str
    python_version: str
    packages: dict[str, str]
    lock: str | None = None
    """Hash of the lock file the environment was built from; None for a user's own environment."""
    fingerprint: str
    """Hash over interpreter version and packages; `resume` refuses another one."""
    platform: str = ""
    cpu_count: int = 0
    gpus: tuple[str, ...] = ()


class FileDigest(Record):
    """A file of a run directory as it was when it was recorded."""

    size: int
    sha256: str


class Alteration(Record):
    """A file of a run directory that is not as it was recorded."""

    path: str
    """Relative to the run directory."""
    code: Literal["changed", "removed", "added", "linked", "edited", "unrecorded"]
    """`linked`: a link took the place of the file; `edited`: the record itself; `unrecorded`: no digest was ever kept."""
    owner: str = ""
    """The directory of the level or tests that it belongs to; empty for the evidence of the whole trial."""


class Trial(Record):
    """trial.json: the plan, where it stands and what it concluded."""

    schema_version: int = Field(default=TRIAL_VERSION)
    id: str
    seatrial: str
    created: str
    """UTC, ISO 8601."""
    plan: Plan
    command: tuple[str, ...]
    """How Seatrial was called, redacted."""
    status: Literal["planned", "running", "done"]
    ended: str | None = None
    verdict: Verdict | None = None
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    imports: tuple[ImportProof, ...] = ()
    environment: EnvironmentRecord | None = None
    sides: tuple[SideResult, ...] = ()
    levels: tuple[LevelResult, ...] = ()
    baseline: Baseline | None = None
    files: dict[str, FileDigest] = Field(default_factory=dict)
    """Digests of the evidence and of every level and test that came to a verdict, by path relative to the run directory."""
    alterations: tuple[Alteration, ...] = ()
    seal: str = ""
    """SHA-256 of everything else in trial.json; a record that was edited by hand does not fit it."""

    def __eq__(self, other: object) -> bool:
        """Whether two trials say the same; the seal is made when one is stored."""
        if not isinstance(other, Trial):
            return NotImplemented
        return self.model_dump(exclude={"seal"}) == other.model_dump(exclude={"seal"})

    __hash__ = None  # type: ignore[assignment]


class Report(Record):
    """report.json: the trial with its deliverables, for machines."""

    schema_version: int = Field(default=TRIAL_VERSION)
    result: Verdict
    answer: str
    requested_coverage: str
    model: str
    deliverables: tuple[Deliverable, ...]
    evidence: tuple[str, ...]
    limitations: tuple[str, ...]
    follow_ups: tuple[str, ...]
    trial: Trial


ISOLATION_VERSION = 1
OPTION = "isolation"
"""Option of a rerun: the loop arguments that it sets, so that the loop does not claim what they change on purpose."""
Failure = Literal["gone", "still there", "another failure", "no evidence", "not run"]


def settings(arguments: Sequence[str], options: Mapping[str, str]) -> str:
    """What a rerun changes, in one line: options as `--set` takes them, then loop arguments."""
    return " ".join([*(f"options.{name}={value}" for name, value in options.items()), *arguments])


class Measured(Record):
    """A check that the original missed, as one run measured it."""

    name: str
    value: float | str | None
    threshold: str = ""


class Rerun(Record):
    """One rerun of the failed level."""

    name: str
    arguments: tuple[str, ...]
    options: dict[str, str] = Field(default_factory=dict)
    suspect: str
    """What the rerun points to when the failure is gone."""
    reduced: bool = False
    verdict: Verdict | None = None
    """Of the rerun itself; None when it was not run. It is never the verdict of the trial."""
    reason: str = ""
    failure: Failure = "not run"
    note: str = ""
    measured: Measured | None = None
    log: str = ""
    directory: str


class Matrix(Record):
    """isolate.json."""

    schema_version: int = Field(default=ISOLATION_VERSION)
    trial: str
    level: int
    title: str
    verdict: Verdict
    """Of the level in the trial: the matrix does not change it."""
    reason: str
    measured: Measured | None = None
    log: str
    reruns: tuple[Rerun, ...]
    complete: bool
    """Every rerun that was asked for was judged Pass or Fail."""
    interrupted: bool = False
    suspects: tuple[str, ...] = ()
    conclusion: tuple[str, ...]


LOCALIZATION_VERSION = 1
Value = float | str


class StepError(Record):
    """The error of one training step, computed again from its tokens, beside the metric that the loop logged."""

    run: str
    step: int
    sequences: int
    tokens: int
    """Tokens in the loss, without those of sequences that were taken out of it."""
    error: Value
    with_masked_out: Value
    """The same over all sequences: what the step would show if none had been taken out of the loss."""
    metric: Value | None = None
    """The loop's own number; None when it logged none for this step."""
    batches: int | None = None
    """Batches that the step was trained in when the metric is the mean over that many; None when it agrees with no split."""
    agrees: bool | None = None
    """Whether tokens and metric are of the same run; None when there is nothing to compare."""
    non_finite: int = 0


class WorstSequence(Record):
    """One of the sequences with the largest error."""

    source: str
    run: str
    step: int
    row: int
    prompt: str
    length: int
    tokens: int
    error: Value
    position: int
    """Of its worst token; position 0 is the first token of the prompt."""
    position_error: Value
    masked_out: bool
    truncated: bool | None


class Association(Record):
    """Whether the error follows one property of the sequences."""

    name: str
    statistic: str
    """What `value` is, in words."""
    value: float | None
    p: float | None
    """Of a permutation or rank test; None when nothing could be tested."""
    rows: int
    follows: bool
    sentence: str


class Bar(Record):
    """One bar of a plot."""

    label: str
    value: Value
    count: int


class NonFinite(Record):
    """Tokens whose log-probability is NaN or infinite on one side at least."""

    in_loss: int = 0
    outside: int = 0
    """Outside the loss: they can still make the loop's metric NaN."""
    places: tuple[str, ...] = ()
    """The first of them: file and line, position, values."""


class Localization(Record):
    """localize.json."""

    schema_version: int = Field(default=LOCALIZATION_VERSION)
    trial: str
    level: int
    name: str
    sequences: int
    tokens: int
    """Tokens in the loss, with those of sequences that were taken out of it."""
    prompts: int
    masked_out: int
    empty: int
    """Sequences without a token in the loss."""
    percentiles: dict[str, Value]
    """Of the error per token, to within 1.2 %; the largest is exact."""
    above: dict[str, float]
    """Share of tokens whose error is larger, by threshold."""
    sequences_above: float
    """Share of sequences whose mult error is larger than 1.05."""
    non_finite: NonFinite
    steps: tuple[StepError, ...]
    worst: tuple[WorstSequence, ...]
    associations: tuple[Association, ...]
    conclusion: tuple[str, ...]
    histogram: tuple[Bar, ...]
    by_position: tuple[Bar, ...]
    by_part: tuple[Bar, ...]
    by_length: tuple[Bar, ...]
