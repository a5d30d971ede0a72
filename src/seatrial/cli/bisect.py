"""`seatrial bisect`: which commit broke it, or moved the metric."""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from seatrial.core.guarded import real_path
from seatrial.core.records import replace

if TYPE_CHECKING:
    from seatrial.bisect.bisect_records import BisectAnswer
    from seatrial.bisect.find_commit import PlannedBisect
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

AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON; progress goes to standard error.")]


def with_flags_of(other: Callable[..., None], *without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command that also takes the flags of another one but `without`; like all of these it reads them from the context."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        shared = inspect.signature(other, eval_str=True).parameters

        @functools.wraps(command)
        def called(**words: Any) -> None:
            command(**{name: words[name] for name in own})

        # typer reads the signature; the annotations that `wraps` copied are those of the command
        more = [shared[name] for name in shared if name not in (*own, *without)]
        called.__signature__ = inspect.Signature([*own.values(), *more])  # type: ignore[attr-defined]
        called.__annotations__ = {}
        return called

    return decorate


@app.callback(invoke_without_command=True)
def bisect(
    context: typer.Context,
    good: Annotated[list[str] | None, typer.Option("--good", metavar="[NAME=]REV", help="A commit where it works.")] = None,
    bad: Annotated[list[str] | None, typer.Option("--bad", metavar="[NAME=]REV", help="A commit where it does not. Default: HEAD.")] = None,
    repo: Annotated[
        list[str] | None,
        typer.Option(
            "--repo", metavar="[NAME=]PATH", help="The checkout; repeat for several, the first is where the command runs. Default: ."
        ),
    ] = None,
    place: Annotated[
        list[str] | None, typer.Option("--place", metavar="NAME=PATH", help="Where a further repository lies in the tree of the first.")
    ] = None,
    check: Annotated[
        str | None,
        typer.Option("--check", metavar="EXPR", help="Judge by a check over the metrics that the command leaves, not by its exit code."),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option("--metrics", metavar="PATH", help="Where the command leaves them, in the tree. Default: {output}.")
    ] = None,
    trial: Annotated[
        bool, typer.Option("--trial", help="Run a trial on each commit; after `--` stand the words of `seatrial run`.")
    ] = False,
    failure: Annotated[
        str | None, typer.Option("--failure", metavar="REGEX", help="Only a log that holds this is bad; other failures are skipped.")
    ] = None,
    any_failure: Annotated[
        bool, typer.Option("--any-failure", help="Every failure is bad, also another than the one at the bad end.")
    ] = False,
    env: Annotated[
        str | None,
        typer.Option(
            "--env", metavar="KIND", help="none, pip:LOCKFILE, uv. Default: uv.lock, requirements.lock or requirements.txt if there is one."
        ),
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option(
            "--with", metavar="PACKAGE", help="Install this beside the lock, such as pytest; pinned versions stay. Repeat for several."
        ),
    ] = None,
    python: Annotated[str | None, typer.Option("--python", metavar="VERSION", help="Python of the environments, such as 3.12.")] = None,
    build: Annotated[
        str | None,
        typer.Option("--build", metavar="COMMAND", help="Builds the tree before each run; a commit that does not build is skipped."),
    ] = None,
    edit: Annotated[
        list[str] | None,
        typer.Option("--edit", metavar="FILE CLAUSES", help="sed clauses for a file of the tree; two words. The checkout stays as it is."),
    ] = None,
    patch: Annotated[
        list[str] | None,
        typer.Option(
            "--patch",
            metavar="REV|FILE[@SINCE]",
            help="Apply this where it is missing, to commits from SINCE on: for ranges broken otherwise.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, max=64, help="Commits that are run at once.")] = 1,
    on: Annotated[str | None, typer.Option("--on", metavar="slurm:PROFILE", help="Run each commit as a Slurm job.")] = None,
    repeat: Annotated[
        int | None,
        typer.Option("--repeat", min=1, help="At most so many runs of one commit, while it is ambiguous. Default: 1; with --check 10."),
    ] = None,
    confidence: Annotated[float, typer.Option("--confidence", min=0.5, max=0.9999, help="With noise: stop at this probability.")] = 0.99,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.01, help="Deadline of one run. Default: 60, or the nightly's own.")
    ] = None,
    retries: Annotated[int, typer.Option("--retries", min=0, help="New tries of a run that the machine failed, not the commit.")] = 2,
    first_parent: Annotated[
        bool, typer.Option("--first-parent", help="Only the commits of the main line, not those of merged branches.")
    ] = False,
    descend: Annotated[
        bool, typer.Option("--descend/--no-descend", help="Follow a first bad commit that moves a submodule into the submodule.")
    ] = True,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Directory of the bisect. Default: a new one below bisects/.")] = None,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", metavar="LOG", help="Take the marks of a `git bisect log`, or of a runs.jsonl; edit it as you like."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and in how many rounds; run nothing.")] = False,
    json: AsJson = False,
) -> None:
    """Find the commit that broke a test or moved a metric.

    seatrial bisect --good v1.0 --bad HEAD -- pytest tests/test_x.py
    Exit codes of COMMAND: 0 good, 125 skip, 128 and above abort, else bad. Your checkout, index and stash are never touched.
    Exit code: 0 one commit was found, 99 only a range, 2 the question is wrong (such as swapped ends), 130 interrupted.
    """
    if context.invoked_subcommand is None:
        _begin(context)


@app.command()
@with_flags_of(bisect, "place", "trial")
def nightly(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="TEST_SCRIPT", help="A script of the repository, such as tests/test_suites/llm/x.sh.")],
    good: Annotated[str | None, typer.Option("--good", help="Default: the commit that added the script.")] = None,
    bad: Annotated[str | None, typer.Option("--bad", help="Default: HEAD.")] = None,
    repo: Annotated[Path | None, typer.Option("--repo", help="The checkout. Default: .")] = None,
) -> None:
    """Find the commit that broke a nightly; the good end is the commit that added its script.

    What stands after `--` is given to the script at every commit. That changes what is measured, and the report says so.
    """
    named = {name: [str(value)] if value else None for name, value in (("good", good), ("bad", bad), ("repo", repo))}
    _begin(context, nightly=script, **named)


@app.command()
def resume(
    directory: Annotated[Path, typer.Argument(help="The directory of a bisect.")],
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, max=64, help="Commits that are run at once, from now on.")] = None,
    json: AsJson = False,
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
    _run(path, json)


@app.command()
def report(directory: Annotated[Path, typer.Argument(help="The directory of a bisect.")], json: AsJson = False) -> None:
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
    from seatrial.bisect.find_commit import BISECTS

    found = directories or sorted(plan.parent for plan in BISECTS.glob(f"*/{bisect_dir.PLAN}"))
    if not found:
        typer.echo(f"there are no bisects below {BISECTS.absolute()}; name directories that were made with --out")
    for directory in found:
        gone = bisect_dir.clean_bisect(_absolute(directory), _tell)
        typer.echo(f"{directory}: {f'removed {len(gone)} trees and stores' if gone else 'nothing was left'}")
    if environments:
        typer.echo(f"removed {len(BisectEnvironments().remove())} environments")


def _begin(context: typer.Context, **own: Any) -> NoReturn:
    """From flags to an answer; what a command has found out itself goes on top of them."""
    from seatrial.bisect.find_commit import BisectRequest, plan_bisect

    given = {**context.params, **own, "words": context.obj or ()}
    asked = BisectRequest(**{field.name: given[field.name] for field in fields(BisectRequest) if field.name in given})
    planned = plan_bisect(asked, given["replay"], check_trial)
    for note in planned.notes:
        _tell(note)
    if given["dry_run"]:
        _show(planned)
        raise typer.Exit
    _run(planned.create(_absolute(given["out"]) if given["out"] else None), given["json"])


def check_trial(words: Sequence[str], main: Path) -> None:
    """Read the words as `seatrial run` will, so that a wrong loop, level or option is not found out by a run."""
    from typer.exceptions import TyperException

    from seatrial.cli.request import given_options
    from seatrial.cli.run import run
    from seatrial.core.errors import UserError
    from seatrial.loops import get_loop
    from seatrial.trial.plan import parse_levels

    command = typer.Typer(add_completion=False)
    command.command("run")(run)
    ours = list(words)[: list(words).index("--")] if "--" in words else list(words)
    try:
        context = typer.main.get_command(command).make_context("seatrial run", [word.replace("{tree}", str(main)) for word in ours])
    except TyperException as error:
        raise UserError(f"--trial: {error}", "after `--` stand the words of `seatrial run`; see: seatrial run --help") from error
    asked = context.params
    if asked["out"] is not None:
        raise UserError("--trial: --out is chosen for each commit", "leave it out; the trial of each run is kept in its steps/ directory")
    if asked["loop"] is None:
        return  # the seatrial.toml of each commit names it
    options = given_options(asked["opt"], {name: asked[name] for name in ("device", "verl", "nemo_rl")})
    loop = get_loop(asked["loop"]).configured({name: str(value) for name, value in options.items()})
    if asked["level"] is not None:
        parse_levels(asked["level"], loop)


def _absolute(path: Path) -> Path:
    """As it was named, without what leads up and down again."""
    return real_path(path) if ".." in path.parts else path.absolute()


def _show(planned: PlannedBisect) -> None:
    from seatrial.bisect.bisect_runner import announcement
    from seatrial.bisect.find_commit import unknown_program

    plan = planned.plan
    for repo in plan.repos:
        typer.echo(f"{repo.name}: {repo.good[:12]} (good) to {repo.bad[:12]} (bad), {repo.path}")
    typer.echo(announcement(planned.history, planned.rows, plan))
    kind = plan.environment
    beside = f", with {', '.join(kind.packages)}" if kind.packages else ""
    built = f"{kind.kind}, from {kind.lock} of each commit{beside}"
    typer.echo(f"environment: {'the one you call from' if kind.kind == 'none' else built}")
    words = ("seatrial", "run", *plan.command) if plan.trial else (*plan.command, *plan.extra)
    typer.echo(f"command: {shlex.join(words)}")
    if warning := unknown_program(plan):
        typer.echo(f"seatrial: {warning}", err=True)
    typer.echo(f"judged by: {plan.check or ('the verdict of the trial' if plan.trial else 'the exit code')}")


def _run(path: Path, json: bool) -> NoReturn:
    from seatrial.bisect import bisect_dir
    from seatrial.bisect.bisect_runner import run_bisect
    from seatrial.cli.request import profile_named
    from seatrial.core.errors import UserError
    from seatrial.trial.trial_request import load_config

    plan = bisect_dir.load_plan(path)
    profile = profile_named(load_config(None, None), plan.on) if plan.on else None
    typer.echo(f"seatrial: {path}", err=True)
    try:
        found = run_bisect(path, _redactor(), _tell, profile)
    except KeyboardInterrupt:
        typer.echo(f"seatrial: interrupted; go on with: {bisect_dir.resume_command(path)}", err=True)
        raise
    except UserError:
        typer.echo(f"seatrial: what ran is kept, with its logs, in {path}", err=True)
        raise
    _close(path, found, json)


def _tell(text: str) -> None:
    typer.echo(f"seatrial: {text}", err=True)


def _close(path: Path, found: BisectAnswer, json: bool) -> NoReturn:
    from seatrial.core.files import read_text
    from seatrial.core.verdict import ExitCode

    typer.echo(read_text(path / ("report.json" if json else "summary.md")))
    typer.echo(f"report: {path / 'report.html'}", err=json)
    raise typer.Exit(ExitCode.PASS if found.state == "found" else ExitCode.BLOCKED)


def _redactor() -> Redactor:
    import os

    from seatrial.evidence.redact import Redactor

    return Redactor(os.environ)
