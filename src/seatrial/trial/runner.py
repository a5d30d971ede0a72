"""Runs a trial: plan, evidence, preflight, levels, verdict, reports. Everything goes through the run directory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import seatrial
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import read_model, read_table, write_json, write_text
from seatrial.core.loop import Context, Loop
from seatrial.core.records import (
    Alteration,
    Baseline,
    Finding,
    ImportProof,
    LevelResult,
    Plan,
    PlannedLevel,
    Record,
    SideResult,
    Trial,
    replace,
)
from seatrial.core.specs import Level
from seatrial.core.verdict import Boundary, Verdict
from seatrial.evidence.changes import CHANGED_FILE, changed_code
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import write_repos
from seatrial.loops import loop_of
from seatrial.report.outcomes import RECORD, altered_words
from seatrial.runtime.interrupt import Interruptible
from seatrial.runtime.process import ProcessSpec, end_leftovers, run
from seatrial.runtime.ray import check_nodes
from seatrial.trial import pre_tests, run_dir, staging, verify
from seatrial.trial import preflight as disk
from seatrial.trial.conclude import (
    conclude,
    is_final,
    judge_level,
    moved,
    not_run,
    report,
    store,
    unless_moved,
    unless_unused,
)
from seatrial.trial.level import Limits, RunContext, level_imports, run_level
from seatrial.trial.preflight import RAY_NODES, child_environment, preflight
from seatrial.trial.progress import Ended, Found, Judged, Listener, Planned, SideJudged, Stage
from seatrial.trial.staging import Interpreter, engine_interpreters, environment_record, find_interpreter, level_script, stage
from seatrial.trial.verify import refuse_other_change, refuse_other_environment

DEADLINE_S = 300


def ray_findings(bench: RunContext, environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """One finding per node and package; a node that is missing, silent or imports from elsewhere is not ok."""
    nodes = environ.get(RAY_NODES)
    if nodes is None:
        return ()
    evidence = bench.context.run_dir / "evidence"
    facts, roots = evidence / "ray-nodes.json", {}
    for repo in (repo for repo in bench.context.changes if not repo.synced):  # a copy is made later, and each level proves it
        roots.update(dict.fromkeys(repo.packages, repo.import_root or repo.path))
    facts.unlink(missing_ok=True)  # those of an earlier attempt say nothing about this cluster
    words = [word for package, root in roots.items() for word in ("--root", f"{package}={root}")]
    variables = ("--env", f"PYTHONPATH={os.pathsep.join(bench.import_path())}")
    spec = ProcessSpec(
        argv=(str(bench.context.python), "-m", "seatrial.instruments.ray_nodes", "--out", str(facts), "--nodes", nodes, *words, *variables),
        env=child_environment(bench.environ, bench.import_path(), {}),
        cwd=bench.instruments,
        log=evidence / "ray-nodes.log",
        run_id=f"{bench.context.run_dir.name}-ray-nodes-{time.time_ns()}",
        deadline_s=DEADLINE_S + 60,
        stall_s=DEADLINE_S + 60,
        line_filter=bench.redactor.lines().line,
    )
    run(spec)
    try:
        found = read_table(facts) if facts.is_file() else {}
    except UserError as error:  # its process was killed while it wrote
        found = {"error": error.message}
    return check_nodes(found, int(nodes), roots)


@dataclass(frozen=True, slots=True)
class Request:
    plan: Plan
    out: Path
    """The run directory, already made."""
    python: Path | None = None
    """A user's own interpreter for the loop; None takes the environment that Seatrial builds."""
    limits: Limits = field(default_factory=Limits)
    options: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    """The configuration in force, for the evidence."""
    baseline: Baseline | None = None
    """The unchanged side to compare with, once the trial has its verdict (see `baseline`)."""
    sides: tuple[str, ...] | None = None
    """Keys of the tests that go before the levels; None runs all of them. A rerun of one level has no use for any."""
    base: bool = False
    """The trial is of the state before a change: that it uses none of the changed files takes nothing from it."""


def start(request: Request, listener: Listener, known: tuple[LevelResult, ...] = ()) -> Trial:
    """Run a new trial to its verdict. `known` are results of levels whose files are there already: these do not run."""
    _require_room(request)
    redactor = staging.redactor(request.plan.arguments)
    with run_dir.locked(request.out):
        trial = _store(request, redactor)
        found = {path: one for result in known for path, one in run_dir.level_digests(request.out, result.directory).items()}
        trial = replace(trial, levels=known, files={**trial.files, **found})
        listener(Planned(str(request.out), trial.plan))
        return TrialRunner(request, listener, redactor).conduct(trial)


def prepare(request: Request, listener: Listener) -> Trial:
    """Store a new trial with its evidence, and build its environment if it is ours; nothing runs yet. What blocks it is raised."""
    staging.refuse(request.plan.arguments)
    _require_room(request)
    redactor = staging.redactor(request.plan.arguments)
    with run_dir.locked(request.out):
        trial = _store(request, redactor)
        listener(Planned(str(request.out), trial.plan))
        conductor = TrialRunner(request, listener, redactor)
        if conductor.has_environment_here():
            trial, _ = conductor.environment(trial)
        run_dir.save(request.out, trial)
        return trial


def _require_room(request: Request) -> None:
    """BlockedError before anything is written, when a disk is too full for what was asked for."""
    if request.plan.levels:
        disk.require_room(loop_of(request.plan), request.plan, request.out, request.python, os.environ)


def _store(request: Request, redactor: Redactor) -> Trial:
    """The planned trial, with what `resume` needs to run it; trial.json comes last. The caller holds the directory."""
    run_dir.require_new(request.out)
    evidence = request.out / run_dir.EVIDENCE
    write_json(evidence / "config.json", redactor.value(dict(request.config)))
    _store_request(request, redactor)
    changes = write_repos(request.plan.changes, evidence, redactor)
    write_json(evidence / CHANGED_FILE, redactor.record(changed_code(changes)))
    trial = Trial(
        id=request.out.name,
        seatrial=seatrial.__version__,
        created=run_dir.now(),
        plan=replace(request.plan, arguments=redactor.value(request.plan.arguments), changes=changes),
        command=tuple(redactor.value(sys.argv)),
        status="planned",
        baseline=request.baseline,
        files=run_dir.evidence_digests(request.out),
    )
    run_dir.save(request.out, trial)
    return trial


class _Stored(Record):
    python: str | None
    limits: dict[Literal["deadline_minutes", "stall_minutes"], float | None]
    options: dict[str, str]
    sides: tuple[str, ...] | None = None
    base: bool = False


def _store_request(request: Request, redactor: Redactor) -> None:
    """What `resume` needs and no other file holds."""
    limits = {"deadline_minutes": request.limits.deadline_minutes, "stall_minutes": request.limits.stall_minutes}
    python = str(request.python.absolute()) if request.python else None
    stored = {"python": python, "limits": limits, "options": dict(request.options)}
    sides = None if request.sides is None else list(request.sides)
    write_json(request.out / run_dir.EVIDENCE / "request.json", redactor.names(stored | {"sides": sides, "base": request.base}))


def resume(path: Path, listener: Listener) -> Trial:
    """Finish a trial that was killed, interrupted or blocked."""
    path = path.absolute()
    trial = run_dir.read(path)
    secret = next((word for word in trial.plan.arguments if "[redacted:" in word), None)
    if secret:
        raise UserError(f"{path}: a loop argument is a secret that was not stored: {secret}", "start a new trial with `seatrial run`")
    with run_dir.locked(path):
        for place in ("levels", "sides"):
            for pids in path.glob(f"{place}/**/*.pids"):
                end_leftovers(pids)
        recorded = run_dir.read(path)
        trial = _verified(path, recorded)
        if trial.alterations:
            listener(Stage("resume", altered_words(trial.alterations)))
        if is_over(recorded, trial.alterations):
            listener(Stage("resume", "nothing to do: every level of this trial has its verdict"))
            report(path, loop_of(trial.plan), trial)
            return trial
        if any(one.path == RECORD for one in trial.alterations):  # what it says of levels is not believed: all of them run
            trial = replace(trial, levels=(), sides=(), alterations=())
        request = request_of(path, trial)
        refuse_other_change(trial.plan.changes, path, Redactor(os.environ))
        listener(Planned(str(path), trial.plan))
        return TrialRunner(request, listener, Redactor(os.environ)).conduct(trial)


def _verified(path: Path, recorded: Trial) -> Trial:
    """The stored trial, as its files support it. Without its evidence an unfinished one is refused."""
    trial = verify.verified(path, recorded if recorded.status == "done" else run_dir.load(path))
    lost = [one for one in trial.alterations if not one.owner and one.path != RECORD]
    if lost and trial.status != "done":
        raise UserError(f"{path}: {altered_words(lost)}", "restore these files, or start a new trial")
    return trial


def is_over(trial: Trial, altered: Sequence[Alteration]) -> bool:
    """Whether nothing is left to run: every result is final, or files were altered, which no rerun of the rest makes good."""
    results: tuple[SideResult | LevelResult, ...] = (*trial.sides, *trial.levels)
    final = all(is_final(result) or result.verdict is Verdict.SKIPPED for result in results)
    return trial.status == "done" and (final or any(one.path != RECORD for one in altered))


def request_of(path: Path, trial: Trial) -> Request:
    """What was asked for, from the run directory."""
    stored = read_model(path / run_dir.EVIDENCE / "request.json", _Stored)
    python = Path(stored.python) if stored.python else None
    return Request(trial.plan, path, python, Limits(**stored.limits), stored.options, sides=stored.sides, base=stored.base)


def _stays(trial: Trial, result: LevelResult | SideResult) -> bool:
    """Whether a result is kept: it came to a verdict, or its files were altered since."""
    return is_final(result) or any(one.owner and one.owner == result.directory for one in trial.alterations)


class TrialRunner:
    def __init__(self, request: Request, listener: Listener, redactor: Redactor) -> None:
        self.request, self.listener, self.redactor = request, listener, redactor
        self.loop: Loop = loop_of(request.plan)
        self.levels = {level.number: level for level in self.loop.levels()}

    def conduct(self, trial: Trial) -> Trial:
        """From a stored plan to a stored verdict; interruption and blocks end in a judged directory too."""
        path = self.request.out
        with Interruptible() as stop:
            if not trial.plan.levels:
                return self._finish(trial, ())
            try:
                trial, bench = self._prepare(trial)
            except BlockedError as error:
                finding = Finding(name="environment", ok=False, boundary=error.boundary, message=error.message, fix=error.fix)
                self.listener(Found(finding))
                trial = replace(trial, findings=(*trial.findings, finding))
                return self._finish(trial, self._blocked(trial, finding), interrupted=stop.signal is not None)
            bad = next((finding for finding in trial.findings if not finding.ok), None)
            if bad:
                return self._finish(self._sides(self._begun(trial), bench, bad), self._blocked(trial, bad))
            trial = self._sides(self._begun(trial), bench)
            shut = pre_tests.shut(trial.sides)
            if shut:
                return self._finish(
                    trial, self._without_running(trial, Verdict.SKIPPED, pre_tests.behind(shut)), interrupted=stop.signal is not None
                )
            kept = {result.number: result for result in trial.levels if _stays(trial, result)}
            results: list[LevelResult] = []
            for planned in trial.plan.levels:
                if stop.signal is not None:
                    cut = self._not_run(planned, Verdict.BLOCKED, "interrupted before this level ran", Boundary.ENVIRONMENT)
                    cut = replace(cut, code="interrupted")
                    results.append(kept.get(planned.number, cut))
                    continue
                result = kept.pop(planned.number, None)
                if result is None:
                    result = self._level(bench, planned, results)
                    trial = self._with_digests(trial, result)
                results.append(result)
                trial = replace(trial, levels=(*results, *kept.values()), imports=self._imports(trial.plan))
                run_dir.save(path, trial)
                self.listener(Judged(result))
            why = moved(trial.plan.changes, path, self.redactor)
            trial = replace(trial, sides=tuple(unless_moved(trial.sides, why)))
            judged = results
            changes = [replace(repo, changed=()) if self.request.base else repo for repo in trial.plan.changes]
            results = unless_unused(changes, unless_moved(results, why, Boundary.ENVIRONMENT), path, self.loop)
            for before, result in zip(judged, results, strict=True):
                if result.directory and result != before:  # a level that was kept is not written again
                    write_json(path / result.directory / "result.json", result)
                if result.verdict is not before.verdict:
                    self.listener(Judged(result))
            return self._finish(trial, tuple(results), interrupted=stop.signal is not None)

    def has_environment_here(self) -> bool:
        """Whether the environment is ours or on this machine, and not only where a job will run."""
        own = self.request.python
        return own.is_file() if own else self.loop.environment is not None

    def environment(self, trial: Trial) -> tuple[Trial, Interpreter]:
        """Where the loop runs, stored; built where there is none and it is ours."""
        path = self.request.out
        interpreter = find_interpreter(self.loop, self.request.python, lambda text: self.listener(Stage("environment", text)))
        environment = self.redactor.record(environment_record(interpreter.python, interpreter.lock))
        refuse_other_environment(trial.environment, environment)
        place = path / run_dir.EVIDENCE / "environment.json"
        if trial.environment != environment or not place.is_file():
            files = {name: found for name, found in trial.files.items() if name != str(place.relative_to(path))}
            if files != trial.files:  # before the file changes, so that a kill in between looks like no edit
                run_dir.save(path, replace(trial, files=files))
            write_json(place, environment)
        files = {**trial.files, **run_dir.evidence_digests(path)}
        return replace(trial, environment=environment, files=files), interpreter

    def _prepare(self, trial: Trial) -> tuple[Trial, RunContext]:
        """Evidence and preflight: everything that is known before the first process of the loop starts."""
        self.listener(Stage("evidence", "repositories, environment, commands"))
        trial, interpreter = self.environment(trial)
        plan = trial.plan
        bench = self._bench(plan, interpreter)
        self._write_commands(bench, trial)
        self.listener(Stage("preflight"))
        findings = (*interpreter.findings, *preflight(self.loop, plan, bench.context, os.environ), *ray_findings(bench, os.environ))
        findings = tuple(map(self.redactor.record, findings))
        for finding in findings:
            self.listener(Found(finding))
        return replace(trial, findings=findings), bench

    def _bench(self, plan: Plan, interpreter: Interpreter) -> RunContext:
        given = self.request.plan.arguments  # those of the trial are redacted
        context = Context.of(plan, self.request.out, interpreter.python, engine_interpreters(), given, self.request.options)
        instruments = stage(self.request.out, self.loop.name)
        return RunContext(self.loop, context, instruments, dict(os.environ), self.redactor, self.request.limits, self.listener)

    def _begun(self, trial: Trial) -> Trial:
        """The trial while it runs, stored. What runs again has no digests meanwhile."""
        results: tuple[LevelResult | SideResult, ...] = (*trial.levels, *trial.sides)
        kept = [result for result in results if _stays(trial, result)]
        trial = replace(trial, status="running", files=run_dir.kept_only(trial.files, kept))
        run_dir.save(self.request.out, trial)
        return trial

    def _with_digests(self, trial: Trial, result: LevelResult | SideResult) -> Trial:
        """The trial with the digests of a run that just came to a verdict; any other runs again."""
        if not is_final(result) or not result.directory:
            return trial
        return replace(trial, files={**trial.files, **run_dir.level_digests(self.request.out, result.directory)})

    def _write_commands(self, bench: RunContext, trial: Trial) -> None:
        """command.sh of every level that is to run, before anything does."""
        kept = {result.number for result in trial.levels if _stays(trial, result)}
        for planned in trial.plan.levels:
            if planned.skip or planned.number in kept:
                continue
            level, directory = self.levels[planned.number], run_dir.level_directory(self.request.out, planned)
            script = level_script(f"level {level.number}: {level.title}", self.loop, level, bench.context, directory)
            write_text(directory / "command.sh", self.redactor.text(script))

    def _sides(self, trial: Trial, bench: RunContext, bad: Finding | None = None) -> Trial:
        """The tests that go before the levels, each stored as soon as it is judged; a finding blocks them, too."""
        kept = {side.key: side for side in trial.sides if _stays(trial, side)}
        results: list[SideResult] = []
        wanted = self.request.sides
        for tests in self.loop.side_tests(bench.context) if wanted != () else ():
            if wanted is not None and tests.key not in wanted:
                continue
            result = kept.pop(tests.key, None)
            if result is None and bad is not None:
                result = pre_tests.not_run(tests, Verdict.BLOCKED, f"preflight: {bad.name}: {bad.message}")
            shut = pre_tests.shut(results)
            if result is None and shut is not None:
                result = pre_tests.not_run(tests, Verdict.SKIPPED, pre_tests.behind(shut))
            if result is None:
                result = pre_tests.run_probe(bench, tests) if tests.kind == "probe" else pre_tests.run_side(bench, tests)
                trial = self._with_digests(trial, result)
            results.append(result)
            trial = replace(trial, sides=(*results, *kept.values()))
            run_dir.save(self.request.out, trial)
            self.listener(SideJudged(result))
        run_dir.save(self.request.out, trial)
        return trial

    def _level(self, bench: RunContext, planned: PlannedLevel, earlier: Sequence[LevelResult]) -> LevelResult:
        """Run one level, unless it cannot run, or an earlier one made all evidence worthless."""
        if planned.skip:
            return self._not_run(planned, Verdict.SKIPPED, planned.skip)
        wrong = next((r for r in earlier if r.verdict is Verdict.BLOCKED and r.code == "wrong-import"), None)
        if wrong:
            return self._not_run(planned, Verdict.BLOCKED, f"not run: level {wrong.number} found a {wrong.reason}", Boundary.ENVIRONMENT)
        level: Level = self.levels[planned.number]
        directory = run_dir.level_directory(self.request.out, planned)
        try:
            return judge_level(bench, level, directory, run_level(bench, level, directory))
        except BlockedError as error:
            return self._not_run(planned, Verdict.BLOCKED, error.message, error.boundary)

    def _not_run(self, planned: PlannedLevel, verdict: Verdict, reason: str, boundary: Boundary | None = None) -> LevelResult:
        return not_run(self.levels[planned.number], planned, verdict, reason, boundary)

    def _blocked(self, trial: Trial, finding: Finding) -> tuple[LevelResult, ...]:
        """Every level that has no final result yet, blocked by what the preflight found."""
        follow = (finding.fix,) if finding.fix else ()
        return self._without_running(trial, Verdict.BLOCKED, f"preflight: {finding.name}: {finding.message}", finding.boundary, follow)

    def _without_running(
        self, trial: Trial, verdict: Verdict, why: str, boundary: Boundary | None = None, follow_ups: tuple[str, ...] = ()
    ) -> tuple[LevelResult, ...]:
        """Every level as it is kept, skipped, or not run for this reason."""
        kept = {result.number: result for result in trial.levels if _stays(trial, result)}
        made = []
        for planned in trial.plan.levels:
            skipped = bool(planned.skip)
            result = self._not_run(planned, Verdict.SKIPPED if skipped else verdict, planned.skip or why, None if skipped else boundary)
            made.append(kept.get(planned.number, result if skipped else replace(result, follow_ups=follow_ups)))
        return tuple(made)

    def _imports(self, plan: Plan) -> tuple[ImportProof, ...]:
        seen: dict[str, ImportProof] = {}
        for planned in plan.levels:
            for item in level_imports(run_dir.level_directory(self.request.out, planned)):
                seen.setdefault(item.model_dump_json(), item)
        return tuple(seen.values())

    def _finish(self, trial: Trial, results: tuple[LevelResult, ...], interrupted: bool = False) -> Trial:
        trial = conclude(trial, results, finished=not interrupted)
        self.listener(Stage("report"))
        store(self.request.out, self.loop, trial)
        self.listener(Ended(trial, str(self.request.out)))
        return trial
