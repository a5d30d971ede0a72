"""`seatrial bisect`: which commit broke it, or moved the metric."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from seatrial.cli import bisect_options as flag
from seatrial.cli.bisect_options import unknown_program
from seatrial.core.guarded import real_path
from seatrial.core.records import replace

if TYPE_CHECKING:
    from seatrial.bisect.bisect_records import BisectAnswer, BisectPlan
    from seatrial.bisect.git_bisect_log import EarlierMarks
    from seatrial.evidence.redact import Redactor


class BisectGroup(TyperGroup):
    """Says what is missing when the command to run stands without `--`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a subcommand."""
        from seatrial.core.errors import UserError

        if args and self.get_command(ctx, args[0]) is None:
            fix = f"if it is the command to run, put -- before it: seatrial bisect --good REV -- {shlex.join(args)}"
            raise UserError(f"`seatrial bisect` has no command {args[0]!r}", fix)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=BisectGroup,
    rich_markup_mode=None,
    add_completion=False,
    invoke_without_command=True,
    subcommand_metavar="[-- COMMAND… | nightly | resume | report | clean]",
)

BISECTS = Path("bisects")


@app.callback(invoke_without_command=True)
def bisect(
    context: typer.Context,
    good: flag.Good = None,
    bad: flag.Bad = None,
    repo: flag.Repos = None,
    place: flag.Places = None,
    check: flag.Check = None,
    metrics: flag.Metrics = None,
    trial: Annotated[
        bool, typer.Option("--trial", help="Run a trial on each commit; after `--` stand the words of `seatrial run`.")
    ] = False,
    failure: flag.Failure = None,
    any_failure: flag.AnyFailure = False,
    env: flag.EnvironmentOf = None,
    with_: flag.WithPackages = None,
    python: flag.PythonOf = None,
    build: flag.Build = None,
    edit: flag.Edits = None,
    patch: flag.Patches = None,
    jobs: flag.Jobs = 1,
    on: flag.OnCluster = None,
    repeat: flag.Repeat = None,
    confidence: flag.Confidence = 0.99,
    minutes: flag.Minutes = None,
    retries: flag.Retries = 2,
    first_parent: flag.FirstParent = False,
    descend: flag.Descend = True,
    out: flag.Out = None,
    replay: flag.Replay = None,
    dry_run: flag.DryRun = False,
    json: flag.AsJson = False,
) -> None:
    """Find the commit that broke a test or moved a metric.

    seatrial bisect --good v1.0 --bad HEAD -- pytest tests/test_x.py
    Exit codes of COMMAND: 0 good, 125 skip, 128 and above abort, else bad. Your checkout, index and stash are never touched.
    Exit code: 0 one commit was found, 99 only a range, 2 the question is wrong (such as swapped ends), 130 interrupted.
    """
    if context.invoked_subcommand is not None:
        return
    _begin(flag.said(context), out, replay, dry_run, json)


@app.command()
def nightly(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="TEST_SCRIPT", help="A script of the repository, such as tests/test_suites/llm/x.sh.")],
    good: Annotated[str | None, typer.Option("--good", help="Default: the commit that added the script.")] = None,
    bad: Annotated[str | None, typer.Option("--bad", help="Default: HEAD.")] = None,
    repo: Annotated[Path | None, typer.Option("--repo", help="The checkout. Default: .")] = None,
    check: flag.Check = None,
    metrics: flag.Metrics = None,
    failure: flag.Failure = None,
    any_failure: flag.AnyFailure = False,
    env: flag.EnvironmentOf = None,
    with_: flag.WithPackages = None,
    python: flag.PythonOf = None,
    build: flag.Build = None,
    edit: flag.Edits = None,
    patch: flag.Patches = None,
    jobs: flag.Jobs = 1,
    on: flag.OnCluster = None,
    repeat: flag.Repeat = None,
    confidence: flag.Confidence = 0.99,
    minutes: flag.Minutes = None,
    retries: flag.Retries = 2,
    first_parent: flag.FirstParent = False,
    descend: flag.Descend = True,
    out: flag.Out = None,
    replay: flag.Replay = None,
    dry_run: flag.DryRun = False,
    json: flag.AsJson = False,
) -> None:
    """Find the commit that broke a nightly; the good end is the commit that added its script.

    What stands after `--` is given to the script at every commit. That changes what is measured, and the report says so.
    """
    from seatrial.bisect.commit_history import introduced, resolve_commit
    from seatrial.evidence.git import top_level

    path = top_level(repo or Path())
    last = resolve_commit(path, bad or "HEAD", "--bad")
    first, notes = (good, ()) if good else introduced(path, script, last)
    for note in notes:
        typer.echo(f"seatrial: {note}", err=True)
    asked = flag.said(context, good=[first], bad=[last], repos=[str(path)], nightly=script, notes=notes)
    _begin(asked, out, replay, dry_run, json)


@app.command()
def resume(
    directory: Annotated[Path, typer.Argument(help="The directory of a bisect.")],
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, max=64, help="Commits that are run at once, from now on.")] = None,
    json: flag.AsJson = False,
) -> None:
    """Go on with a bisect that was interrupted or killed; runs that ended are not run again."""
    from seatrial.bisect import bisect_dir
    from seatrial.core.files import write_json
    from seatrial.trial.run_dir import locked

    path = _absolute(directory)
    plan = bisect_dir.load_plan(path)
    if jobs is not None:
        with locked(path):
            write_json(path / bisect_dir.PLAN, replace(plan, jobs=jobs))
    _conduct(path, json)


@app.command()
def report(directory: Annotated[Path, typer.Argument(help="The directory of a bisect.")], json: flag.AsJson = False) -> None:
    """Write the reports anew from plan and journal (after an edit by hand, too), and print the summary; nothing is run."""
    from seatrial.bisect.bisect_runner import judge_bisect

    _close(_absolute(directory), judge_bisect(_absolute(directory), _redactor()), json)


@app.command()
def clean(
    directories: Annotated[list[Path] | None, typer.Argument(help="Directories of bisects. Default: all below bisects/.")] = None,
    environments: Annotated[bool, typer.Option("--environments", help="Remove the cached environments of commits, too.")] = False,
) -> None:
    """End what a killed bisect left running, and remove its trees and stores. Journals, logs and reports stay."""
    from seatrial.bisect import bisect_dir
    from seatrial.bisect.environment_cache import BisectEnvironments

    found = directories or sorted(plan.parent for plan in BISECTS.glob(f"*/{bisect_dir.PLAN}"))
    if not found:
        typer.echo(f"there are no bisects below {BISECTS.absolute()}; name directories that were made with --out")
    for directory in found:
        gone = bisect_dir.clean_bisect(_absolute(directory), lambda text: typer.echo(f"seatrial: {text}", err=True))
        typer.echo(f"{directory}: {f'removed {len(gone)} trees and stores' if gone else 'nothing was left'}")
    if environments:
        typer.echo(f"removed {len(BisectEnvironments().remove())} environments")


def _begin(asked: flag.Flags, out: Path | None, replay: Path | None, dry_run: bool, json: bool) -> NoReturn:
    """From flags to an answer."""
    from seatrial.bisect import bisect_dir
    from seatrial.bisect.bisect_runner import announcement, read_histories

    marks = _marks(replay, asked) if replay else None
    if marks:
        asked = _with_ends(asked, marks)
    plan, patches = flag.make_plan(asked)
    history = read_histories(plan)
    rows = marks.rows(history, plan) if marks else ()
    for note in (*plan.notes, *(marks.notes if marks else ())):
        typer.echo(f"seatrial: {note}", err=True)
    if dry_run:
        _show(plan, announcement(history, rows, plan))
        raise typer.Exit
    path = bisect_dir.create_bisect(BISECTS, _absolute(out) if out else None, plan)
    for name, file in patches.items():
        (path / bisect_dir.PATCHES).mkdir(exist_ok=True)
        shutil.copy(file, path / bisect_dir.PATCHES / name)
    for row in rows:
        bisect_dir.append_run(path / bisect_dir.JOURNAL, row)
    _conduct(path, json)


def _marks(replay: Path, asked: flag.Flags) -> EarlierMarks:
    from seatrial.bisect.git_bisect_log import read_marks
    from seatrial.evidence.git import top_level
    from seatrial.trial.trial_request import named_path

    return read_marks(replay, top_level(named_path(next(iter(asked.repos or ["."])))[1]))


def _with_ends(asked: flag.Flags, marks: EarlierMarks) -> flag.Flags:
    """A log names its own ends, unless others are named."""
    from seatrial.bisect.bisect_records import Mark
    from seatrial.core.errors import UserError

    good, bad = marks.end(Mark.GOOD), marks.end(Mark.BAD)
    if good and good == bad and not (asked.good or asked.bad):
        raise UserError(
            f"{marks.path}: marks the same commit {good[:12]} as the good and the bad end",
            "correct it, or name the ends: --good REV --bad REV",
        )
    return dataclasses.replace(asked, good=asked.good or ([good] if good else None), bad=asked.bad or ([bad] if bad else None))


def _absolute(path: Path) -> Path:
    """As it was named, without what leads up and down again."""
    return real_path(path) if ".." in path.parts else path.absolute()


def _show(plan: BisectPlan, ahead: str) -> None:
    """What would be run."""
    for repo in plan.repos:
        typer.echo(f"{repo.name}: {repo.good[:12]} (good) to {repo.bad[:12]} (bad), {repo.path}")
    typer.echo(ahead)
    kind = plan.environment
    beside = f", with {', '.join(kind.packages)}" if kind.packages else ""
    built = f"{kind.kind}, from {kind.lock} of each commit{beside}"
    typer.echo(f"environment: {'the one you call from' if kind.kind == 'none' else built}")
    words = ("seatrial", "run", *plan.command) if plan.trial else (*plan.command, *plan.extra)
    typer.echo(f"command: {shlex.join(words)}")
    if warning := unknown_program(plan):
        typer.echo(f"seatrial: {warning}", err=True)
    typer.echo(f"judged by: {plan.check or ('the verdict of the trial' if plan.trial else 'the exit code')}")


def _conduct(path: Path, json: bool) -> NoReturn:
    from seatrial.bisect import bisect_dir
    from seatrial.bisect.bisect_runner import run_bisect
    from seatrial.cli.request import profile_named
    from seatrial.core.errors import UserError
    from seatrial.trial.trial_request import load_config

    plan = bisect_dir.load_plan(path)
    profile = profile_named(load_config(None, None), plan.on) if plan.on else None
    typer.echo(f"seatrial: {path}", err=True)
    try:
        found = run_bisect(path, _redactor(), lambda text: typer.echo(f"seatrial: {text}", err=True), profile)
    except KeyboardInterrupt:
        typer.echo(f"seatrial: interrupted; go on with: {bisect_dir.resume_command(path)}", err=True)
        raise
    except UserError:
        typer.echo(f"seatrial: what ran is kept, with its logs, in {path}", err=True)
        raise
    _close(path, found, json)


def _close(path: Path, found: BisectAnswer, json: bool) -> NoReturn:
    """Print the answer and exit with it."""
    from seatrial.core.files import read_text
    from seatrial.core.verdict import ExitCode

    typer.echo(read_text(path / ("report.json" if json else "summary.md")))
    typer.echo(f"report: {path / 'report.html'}", err=json)
    raise typer.Exit(ExitCode.PASS if found.state == "found" else ExitCode.BLOCKED)


def _redactor() -> Redactor:
    import os

    from seatrial.evidence.redact import Redactor

    return Redactor(os.environ)
