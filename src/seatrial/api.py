"""The public Python API: what the command line does, as functions that return results and raise errors. They never print or exit.

- Keyword arguments are called as the flags of the command are. What stands after `--` there is `arguments` or `server` here.
- A UserError names the fix. A BlockedError says at which boundary something other than the change stops the run. A verdict is never an
  error: a Fail is returned.
- Rooms are imported when a function is called, so that a command loads only what it needs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, TypeVar, Unpack

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.verdict import Verdict

if TYPE_CHECKING:
    from seatrial.bisect.find_commit import find_commit as bisect
    from seatrial.checks.refit_judge import RefitProbe
    from seatrial.core import records
    from seatrial.core.config import Loaded
    from seatrial.core.records import CheckResult, LevelResult
    from seatrial.core.series import Metrics
    from seatrial.probes.bridge_verdict import BridgeProbe
    from seatrial.rollouts.collect_campaign import collect
    from seatrial.trial.files_judge import FileVerdict
    from seatrial.trial.progress import Event
    from seatrial.trial.trial_request import TrialRequest

__all__ = [
    "BlockedError",
    "CheckedMetrics",
    "ProbeResult",
    "Trial",
    "TrialInterrupted",
    "UserError",
    "Verdict",
    "bisect",
    "check",
    "collect",
    "judge",
    "plan",
    "probe_bridge",
    "probe_refit",
    "run",
]

if not TYPE_CHECKING:
    from seatrial import bisect  # the room, which can be called: it calls `find_commit`

    def __getattr__(name: str) -> Any:
        if name != "collect":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from seatrial.rollouts.collect_campaign import collect

        return collect


Paths = str | Path | Sequence[str | Path]
"""One path, or several."""
Probe = TypeVar("Probe", "RefitProbe", "BridgeProbe")


def _silent(_: object) -> None:
    """Nobody listens."""


def _words(found: Paths) -> list[str]:
    return [str(found)] if isinstance(found, str | Path) else [str(one) for one in found]


def _paths(found: Paths) -> list[Path]:
    return [Path(word) for word in _words(found)]


def _path(found: str | Path | None) -> Path | None:
    return None if found is None else Path(found)


def _levels(found: str | int | Sequence[int] | None) -> str | None:
    return found if found is None or isinstance(found, str) else ",".join(map(str, [found] if isinstance(found, int) else found))


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial in its run directory: its verdict, levels, checks and metrics."""

    directory: Path
    record: records.Trial
    """trial.json, as the files of the run directory support it."""

    @classmethod
    def load(cls, path: str | Path) -> Trial:
        """Read a run directory. Every file is compared with its digest: a Pass of which something was altered is Blocked."""
        from seatrial.trial import verify

        directory = Path(path).absolute()
        if not (directory / "trial.json").is_file():
            raise UserError(f"{path}: no trial.json here", "give a run directory, such as trials/<time>-<loop>-<id>")
        return cls(directory, verify.load(directory))

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of the whole trial; None until it has one."""
        return self.record.verdict

    @property
    def reason(self) -> str:
        """Why, in one sentence."""
        return self.record.reason

    @property
    def levels(self) -> tuple[LevelResult, ...]:
        """The results of the levels, in the order of the plan."""
        return self.record.levels

    def checks(self, level: int | None = None) -> tuple[CheckResult, ...]:
        """The checks of one level, or of all."""
        if level is not None and level not in (known := [found.number for found in self.levels]):
            listed = ", ".join(map(str, known)) or "none"
            raise UserError(f"{self.directory}: level {level} has no result here", f"levels with one: {listed}")
        return tuple(found for one in self.levels if level in (None, one.number) for found in one.checks)

    def metrics(self, level: int | None = None) -> Metrics:
        """The metrics of one level, which must be named where the trial has several: each level is a run of its own."""
        from seatrial.trial.level import metrics_of_run

        return metrics_of_run(self.directory, level)

    def to_pandas(self) -> Any:
        """The metrics of all levels as a DataFrame with the columns level, tag, step and value. Needs pandas."""
        from importlib import import_module

        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise UserError(f"to_pandas needs pandas, which is not installed in {sys.prefix}", "pip install pandas") from error
        rows = [
            (level.number, tag, step, value)
            for level in self.levels
            if level.directory and (self.directory / level.directory).is_dir()
            for tag, series in self.metrics(level.number).series.items()
            for step, value in zip(series.steps, series.values, strict=True)
        ]
        return pandas.DataFrame(rows, columns=["level", "tag", "step", "value"])

    def _repr_html_(self) -> str:
        """What a notebook shows. Recorded text is escaped: it may come from a log."""
        from html import escape

        from seatrial.core.text import visible
        from seatrial.report.outcomes import outcomes

        def cell(value: object) -> str:
            return escape(visible(str(value)))

        rows = []
        for found in outcomes(self.record):
            missed = [one.name for one in found.result.checks if not one.passed] if found.result else []
            words = (found.label, found.verdict, found.boundary or "", found.reason, "; ".join(missed))
            rows.append(f"<tr>{''.join(f'<td>{cell(word)}</td>' for word in words)}</tr>")
        heads = "".join(f"<th>{name}</th>" for name in ("Level", "Verdict", "Boundary", "Reason", "Missed checks"))
        verdict = cell(self.verdict or self.record.status)
        head = f"<p><strong>{verdict}</strong>: {cell(self.reason)}<br><code>{cell(self.directory)}</code></p>"
        return f"{head}<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


class TrialInterrupted(KeyboardInterrupt):
    """A trial was stopped by Ctrl-C or SIGTERM. What ran is stored, and `seatrial resume` finishes it."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(f"interrupted; finish it with: seatrial resume {trial.directory}")
        self.trial = trial


class Planning(TypedDict, total=False):
    """The keyword arguments of `plan`, which `run` takes, too."""

    level: str | int | Sequence[int] | None
    model: str | Path | None
    change: Paths
    auto: bool
    base: str | None
    no_base: bool
    python: str | Path | None
    options: Mapping[str, object] | None
    settings: Sequence[str]
    config: str | Path | None
    arguments: Sequence[str]


def plan(
    loop: str | None = None,
    *,
    level: str | int | Sequence[int] | None = None,
    model: str | Path | None = None,
    change: Paths = (),
    auto: bool = False,
    base: str | None = None,
    no_base: bool = False,
    python: str | Path | None = None,
    options: Mapping[str, object] | None = None,
    settings: Sequence[str] = (),
    config: str | Path | None = None,
    arguments: Sequence[str] = (),
    configuration: Loaded | None = None,
) -> TrialRequest:
    """What would run, why, and what it would cost (`seatrial plan`). Its `levels` say it; `run` takes it.

    `options` are those of the loop, by name; `settings` are KEY=VALUE as for `--set`; `arguments` go to the loop verbatim.
    A `configuration` that is read already takes the place of everything but `auto`.
    """
    from seatrial.trial.trial_request import ask, load_config

    found = configuration or load_config(
        _path(config), settings, loop, _levels(level), None if model is None else str(model), _words(change), base, _path(python),
        arguments, options, no_base,
    )  # fmt: skip
    return ask(found, auto)


def run(
    loop: str | TrialRequest | None = None,
    *,
    baseline: str | Path | None = None,
    expect: Literal["identical"] | None = None,
    out: str | Path | None = None,
    fault: str | None = None,
    listener: Callable[[Event], None] = _silent,
    history: bool = True,
    **planning: Unpack[Planning],
) -> Trial:
    """Run levels of a loop on a change, here, to a verdict and a report (`seatrial run`).

    Takes the name of a loop with the keyword arguments of `plan`, or what `plan` returned. `listener` is called with every event;
    `history` records the metrics in the history. Ctrl-C and SIGTERM raise TrialInterrupted.
    """
    from seatrial.trial.trial_request import TrialRequest, require_fault, run_request, runner_request

    if isinstance(loop, TrialRequest) and planning:
        name = next(iter(planning))
        raise UserError(f"run: {name} is given beside a plan", f"plan with it: run(plan(…, {name}=…))")
    asked = loop if isinstance(loop, TrialRequest) else plan(loop, **planning)
    if fault is not None:
        require_fault(fault, asked.loop, [one.number for one in asked.levels])
    named = None if baseline is None else str(baseline)
    wanted = runner_request(asked, baseline=named, expect=expect, out=_path(out), fault=fault, here=True)
    found = Trial(wanted.out, run_request(asked, wanted, listener))
    if found.record.status == "running":
        raise TrialInterrupted(found)
    if history:
        from seatrial.history.auto_import import auto_import

        auto_import(found.directory)
    return found


def judge(loop: str, *, log: str | Path, metrics: Paths = (), level: int | None = None, expect_steps: int | None = None) -> FileVerdict:
    """Judge the files that any run left (`seatrial judge`): its log, and metrics where there are some. Runs nothing."""
    import os

    from seatrial.evidence.redact import Redactor
    from seatrial.loops import get_loop
    from seatrial.trial.files_judge import judge_files, redacted
    from seatrial.trial.plan import parse_levels

    known, file = get_loop(loop), Path(log)
    if expect_steps is not None and expect_steps < 1:
        raise UserError(f"expect_steps is {expect_steps}: a run takes at least one step", "leave it out where the number is not known")
    if not file.is_file():
        wrong = "a directory, not a log file" if file.is_dir() else "no such log file"
        raise UserError(f"{file}: {wrong}", "name the file that holds the output of the run")
    chosen = None
    if level is not None:
        (number,) = parse_levels(str(level), known)
        chosen = next(item for item in known.levels() if item.number == number)
    return redacted(judge_files(known, file, _paths(metrics), chosen, expect_steps), Redactor(os.environ))


@dataclass(frozen=True, slots=True)
class CheckedMetrics:
    """What `check` found."""

    checks: tuple[CheckResult, ...]
    """One per expression; one more, which is missed, where metrics are damaged."""
    metrics: Metrics

    @property
    def passed(self) -> bool:
        """Whether every check is met."""
        return all(one.passed for one in self.checks)


def check(metrics: str | Path, *expressions: str, level: int | None = None, also: Paths = ()) -> CheckedMetrics:
    """Judge checks over the metrics of one run (`seatrial check`): of a file, of a directory, or of a level of a trial."""
    from seatrial.metrics.checks import evaluate, parse, undamaged
    from seatrial.trial.level import metrics_of_run

    if not expressions:
        raise UserError("check: no expression is given", "name one, such as 'max(data[\"train/loss\"]) < 1.05'")
    for expression in expressions:
        parse(expression)  # a wrong expression is said before large files are read
    found = metrics_of_run(Path(metrics), level, _paths(also))
    made = tuple(evaluate(expression, found) for expression in expressions)
    return CheckedMetrics((*made, undamaged(found)) if found.damage else made, found)


@dataclass(frozen=True, slots=True)
class ProbeResult(Generic[Probe]):
    """A probe with its verdict."""

    record: Probe
    """probe.json."""
    directory: Path | None
    """Where probe.json, summary.md and the evidence are; None where facts were judged and no `out` was named."""

    @property
    def verdict(self) -> Verdict:
        """The verdict of the probe."""
        return self.record.judged.verdict

    @property
    def reason(self) -> str:
        """Why, in one sentence."""
        return self.record.judged.reason


def probe_refit(
    *,
    model: str | Path | None = None,
    engine: Literal["vllm", "transformers"] | None = None,
    steps: int | None = None,
    transport: Literal["full", "packed", "sparse", "all"] | None = None,
    python: str | Path | None = None,
    fault: str | None = None,
    attach: str | None = None,
    weights: str | Path | None = None,
    facts: str | Path | None = None,
    out: str | Path | None = None,
    deadline: float = 30,
    server: Sequence[str] = (),
    command: Sequence[str] | None = None,
    tell: Callable[[str], None] = _silent,
    tell_build: Callable[[str], None] = _silent,
) -> ProbeResult[RefitProbe]:
    """Show bit for bit that a generator has its policy's weights (`seatrial probe refit`).

    Trains a policy and refits a generator; or looks at a server that runs (`attach`, `weights`); or judges `facts` that another run left.
    `tell` is called with lines on the progress, `tell_build` with those of an environment that is built. `command` is how the caller was
    called, for the record. Ctrl-C and SIGTERM raise a KeyboardInterrupt that has the `directory`.
    """
    from seatrial.probes.refit_run import RefitOptions, run_refit_probe

    options = RefitOptions(
        model=None if model is None else str(model),
        engine=engine,
        steps=steps,
        transport=transport,
        python=_path(python),
        fault=fault,
        attach=attach,
        weights=_path(weights),
        facts=_path(facts),
        out=_path(out),
        minutes=deadline,
        server=tuple(server),
        command=sys.argv if command is None else command,
    )
    return ProbeResult(*run_refit_probe(options, tell, tell_build))


def probe_bridge(
    *,
    change: Paths = (),
    model: Paths = (),
    all: bool = False,
    rungs: str | Sequence[str] | None = None,
    fault: str | None = None,
    engine: Literal["transformers", "vllm"] = "transformers",
    engine_python: str | Path | None = None,
    steps: int = 20,
    python: str | Path | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    tests: bool = True,
    base: str | None = None,
    no_base: bool = False,
    card: str | Path | None = None,
    out: str | Path | None = None,
    deadline: float = 60,
    command: Sequence[str] | None = None,
    tell: Callable[[str], None] = _silent,
    tell_build: Callable[[str], None] = _silent,
) -> ProbeResult[BridgeProbe]:
    """Climb the conformance ladder of a Megatron-Bridge checkout (`seatrial probe bridge`).

    A card for a run of which there can be none is a UserError after the verdict was stored in `out`. The rest is as in `probe_refit`.
    """
    from seatrial.probes.bridge_run import BridgeOptions, run_bridge_probe

    options = BridgeOptions(
        change=_words(change),
        model=_words(model),
        everything=all,
        rungs=rungs if rungs is None or isinstance(rungs, str) else ",".join(rungs),
        fault=fault,
        engine=engine,
        engine_python=_path(engine_python),
        steps=steps,
        python=_path(python),
        device=device,
        tests=tests,
        base=base,
        run_base=not no_base,
        card=_path(card),
        out=_path(out),
        minutes=deadline,
        command=sys.argv if command is None else command,
    )
    return ProbeResult(*run_bridge_probe(options, tell, tell_build))
