"""The flags of `seatrial bisect` and `seatrial bisect nightly`, the plan that they make, and what is refused before anything runs."""

from __future__ import annotations

import posixpath
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seatrial.core.records import replace

if TYPE_CHECKING:
    from seatrial.bisect.bisect_records import BisectPlan, Edit, EnvironmentPlan, Patch, Repo
    from seatrial.loops.nightly_scripts import Nightly


def choose_environment(flags: Flags, main: Path, bad: str) -> EnvironmentPlan:
    """How environments are made; what cannot be had for any commit is refused."""
    from seatrial.bisect.environment_cache import detect_environment
    from seatrial.core.errors import UserError

    # A trial and a nightly bring environments of their own.
    asked = "none" if flags.env is None and (flags.trial or flags.nightly) else flags.env
    found = detect_environment(main, bad, asked)
    if flags.python:
        _check_python(flags.python, found)
    for package in flags.packages or ():
        _check_package(package)
    if flags.packages and found.kind == "none":
        raise UserError(
            f"--with {flags.packages[0]}: no environment is built, so there is none to install it into",
            "install it where you call from, or name a lock: --env pip:LOCKFILE",
        )
    build, packages = tuple(shlex.split(flags.build or "")), tuple(flags.packages or ())
    return replace(found, python=flags.python or "", build=build, packages=packages)


def _check_python(version: str, plan: EnvironmentPlan) -> None:
    from seatrial.core.errors import BlockedError, UserError
    from seatrial.runtime.venvs import find_python

    if not re.fullmatch(r"3\.\d+", version):
        raise UserError(f"--python {version}: not a version of Python", "name it by major and minor, such as 3.12")
    try:
        if plan.kind != "none":
            find_python(version)
    except BlockedError as error:
        raise UserError(f"--python {version}: {error.message}", error.fix) from error


def _check_package(package: str) -> None:
    """An environment is shared by commits and kept by what was asked for; what lies in a directory may change under it."""
    from seatrial.bisect.lockfile import is_local
    from seatrial.core.errors import UserError

    if not package.strip() or package.startswith("-") or "\n" in package or is_local(package):
        raise UserError(
            f"--with {package}: not a requirement by name",
            "name a package, such as pytest or 'pytest<9'; what lies in a directory is installed with --build 'pip install …'",
        )


def check_trial(words: Sequence[str], main: Path) -> None:
    """Read the words as `seatrial run` will, so that a wrong loop, level or option is not found out by a run."""
    import typer
    from typer.exceptions import TyperException

    from seatrial.cli.request import given_options
    from seatrial.cli.run import run
    from seatrial.core.errors import UserError
    from seatrial.loops import get_loop
    from seatrial.trial.plan import parse_levels

    app = typer.Typer(add_completion=False)
    app.command("run")(run)
    ours = list(words)[: list(words).index("--")] if "--" in words else list(words)
    try:
        context = typer.main.get_command(app).make_context("seatrial run", [word.replace("{tree}", str(main)) for word in ours])
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


def unknown_program(plan: BisectPlan) -> str | None:
    """A warning when nothing shows that the program of the command exists."""
    from seatrial.bisect.commit_history import missing_words

    main, program = plan.repos[0], plan.command[:1]
    if plan.trial or not program or "{" in program[0] or shutil.which(program[0]) or missing_words(Path(main.path), program, main.bad):
        return None
    where = "" if plan.environment.kind == "none" else "; it may be in the environments"
    return f"{program[0]} is neither on PATH nor a file of the repository{where}"


_OF_A_RUN = ("tree", "output", "checkpoints")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def check_metrics(text: str | None) -> None:
    """Refuse a place outside of the files of one run: runs that share it would be judged by each other's metrics."""
    from seatrial.core.errors import UserError

    if text is None:
        return
    fix = f"a path in the tree, or one that begins with {{{'}, {'.join(_OF_A_RUN)}}}"
    strange = [name for name in _PLACEHOLDER.findall(text) if name not in _OF_A_RUN]
    if strange:
        raise UserError(f"--metrics {text}: {{{strange[0]}}} is no place of a run", fix)
    if not text or text.startswith(("/", "~")):
        raise UserError(f"--metrics {text}: not in the files of a run, and all runs would share it", fix)
    if ".." in text.split("/"):
        raise UserError(f"--metrics {text}: leads out of the files of a run", fix)


def check_places(words: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a place without a name, or for the first repository, which stands first in `names`."""
    from seatrial.core.errors import UserError

    others = ", ".join(names[1:]) or "none"
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or not value:
            raise UserError(f"--place {word}: takes the name of a repository and a path", "--place NAME=PATH")
        if name == names[0]:
            raise UserError(f"--place {word}: {name} is the first repository, whose tree holds the others", f"further ones are: {others}")


def check_distinct(repos: Sequence[Repo]) -> None:
    """Refuse two repositories at one place."""
    from seatrial.core.errors import UserError

    taken: dict[str, str] = {}
    for repo in repos:
        place = posixpath.normpath(repo.place)
        if place in taken:
            raise UserError(f"{taken[place]} and {repo.name} are to lie at the same place, {place}", f"--place {repo.name}=PATH")
        taken[place] = repo.name


Good = Annotated[list[str] | None, typer.Option("--good", metavar="[NAME=]REV", help="A commit where it works.")]
Bad = Annotated[list[str] | None, typer.Option("--bad", metavar="[NAME=]REV", help="A commit where it does not. Default: HEAD.")]
Repos = Annotated[
    list[str] | None,
    typer.Option("--repo", metavar="[NAME=]PATH", help="The checkout; repeat for several, the first is where the command runs. Default: ."),
]
Places = Annotated[
    list[str] | None, typer.Option("--place", metavar="NAME=PATH", help="Where a further repository lies in the tree of the first.")
]
Check = Annotated[
    str | None,
    typer.Option("--check", metavar="EXPR", help="Judge by a check over the metrics that the command leaves, not by its exit code."),
]
Metrics = Annotated[
    str | None, typer.Option("--metrics", metavar="PATH", help="Where the command leaves them, in the tree. Default: {output}.")
]
Failure = Annotated[
    str | None, typer.Option("--failure", metavar="REGEX", help="Only a log that holds this is bad; other failures are skipped.")
]
AnyFailure = Annotated[bool, typer.Option("--any-failure", help="Every failure is bad, also another than the one at the bad end.")]
EnvironmentOf = Annotated[
    str | None,
    typer.Option(
        "--env", metavar="KIND", help="none, pip:LOCKFILE, uv. Default: uv.lock, requirements.lock or requirements.txt if there is one."
    ),
]
WithPackages = Annotated[
    list[str] | None,
    typer.Option(
        "--with", metavar="PACKAGE", help="Install this beside the lock, such as pytest; pinned versions stay. Repeat for several."
    ),
]
PythonOf = Annotated[str | None, typer.Option("--python", metavar="VERSION", help="Python of the environments, such as 3.12.")]
Build = Annotated[
    str | None, typer.Option("--build", metavar="COMMAND", help="Builds the tree before each run; a commit that does not build is skipped.")
]
Edits = Annotated[
    list[str] | None,
    typer.Option("--edit", metavar="FILE CLAUSES", help="sed clauses for a file of the tree; two words. The checkout stays as it is."),
]
Patches = Annotated[
    list[str] | None,
    typer.Option(
        "--patch", metavar="REV|FILE[@SINCE]", help="Apply this where it is missing, to commits from SINCE on: for ranges broken otherwise."
    ),
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, max=64, help="Commits that are run at once.")]
OnCluster = Annotated[str | None, typer.Option("--on", metavar="slurm:PROFILE", help="Run each commit as a Slurm job.")]
Repeat = Annotated[
    int | None,
    typer.Option("--repeat", min=1, help="At most so many runs of one commit, while it is ambiguous. Default: 1; with --check 10."),
]
Confidence = Annotated[float, typer.Option("--confidence", min=0.5, max=0.9999, help="With noise: stop at this probability.")]
Minutes = Annotated[float | None, typer.Option("--minutes", min=0.01, help="Deadline of one run. Default: 60, or the nightly's own.")]
Retries = Annotated[int, typer.Option("--retries", min=0, help="New tries of a run that the machine failed, not the commit.")]
FirstParent = Annotated[bool, typer.Option("--first-parent", help="Only the commits of the main line, not those of merged branches.")]
Descend = Annotated[
    bool, typer.Option("--descend/--no-descend", help="Follow a first bad commit that moves a submodule into the submodule.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Directory of the bisect. Default: a new one below bisects/.")]
Replay = Annotated[
    Path | None,
    typer.Option("--replay", metavar="LOG", help="Take the marks of a `git bisect log`, or of a runs.jsonl; edit it as you like."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and in how many rounds; run nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON; progress goes to standard error.")]

METRIC_REPEAT = 10
"""Runs of one commit at most, when a metric is measured and nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Everything that was said."""

    words: tuple[str, ...]
    good: Sequence[str] | None
    bad: Sequence[str] | None
    repos: Sequence[str] | None
    places: Sequence[str] | None = None
    trial: bool = False
    check: str | None = None
    metrics: str | None = None
    failure: str | None = None
    any_failure: bool = False
    env: str | None = None
    packages: Sequence[str] | None = None
    python: str | None = None
    build: str | None = None
    edits: Sequence[str] | None = None
    patches: Sequence[str] | None = None
    jobs: int = 1
    on: str | None = None
    repeat: int | None = None
    confidence: float = 0.99
    minutes: float | None = None
    retries: int = 2
    first_parent: bool = False
    descend: bool = True
    nightly: str | None = None
    notes: Sequence[str] = ()


NAMES = {"repo": "repos", "place": "places", "edit": "edits", "patch": "patches", "with_": "packages"}
"""Flags that may be repeated are called after one of their values."""


def said(context: typer.Context, **own: Any) -> Flags:
    """What was said on the command line; what a command has found out itself goes on top."""
    given = {NAMES.get(name, name): value for name, value in context.params.items()}
    known = {field.name for field in fields(Flags)}
    return Flags(**{name: value for name, value in {**given, **own, "words": context.obj or ()}.items() if name in known})


def make_plan(flags: Flags) -> tuple[BisectPlan, dict[str, Path]]:
    """The plan, and the files of patches by the names that it has for them.

    Revisions are resolved, and what cannot work is refused; nothing is written.
    """
    from seatrial.bisect.bisect_records import BisectPlan
    from seatrial.bisect.commit_history import uncommitted
    from seatrial.bisect.worktrees import check_edits
    from seatrial.core.errors import UserError
    from seatrial.metrics.checks import parse
    from seatrial.trial.run_dir import now

    repos = _repos(flags)
    main = Path(repos[0].path)
    if flags.check is not None:
        parse(flags.check)
    if flags.any_failure and flags.failure is not None:
        raise UserError("--any-failure and --failure contradict each other", "give one of them")
    check_metrics(flags.metrics)
    edits = _edits(flags.edits)
    check_edits(edits)
    command, extra, found = _command(flags, main, repos[0].bad)
    environment = choose_environment(flags, main, repos[0].bad)
    idle = f"--python {flags.python} changes nothing: no environment is built, so commits run in the one you call from"
    patches = _patches(flags.patches, main)
    plan = BisectPlan(
        created=now(),
        repos=repos,
        first_parent=flags.first_parent,
        command=command,
        extra=extra,
        trial=flags.trial,
        check=flags.check,
        metrics=flags.metrics or (found.metrics if found else "{output}"),
        failure=_pattern(flags.failure),
        any_failure=flags.any_failure,
        nightly=flags.nightly,
        environment=environment,
        variables=dict(found.variables) if found else {},
        edits=edits,
        patches=tuple(patches),
        jobs=flags.jobs,
        on=flags.on,
        repeat=flags.repeat or (METRIC_REPEAT if flags.check else 1),
        confidence=flags.confidence,
        retries=flags.retries,
        minutes=flags.minutes or (found.minutes if found else 60.0),
        descend=flags.descend,
        notes=(
            *flags.notes,
            *((idle,) if flags.python and environment.kind == "none" else ()),
            *(note for repo in repos for note in uncommitted(Path(repo.path))),
        ),
    )
    _refuse_secrets(plan)
    return plan, {patch.source: file for patch, file in patches.items() if file}


def _refuse_secrets(plan: BisectPlan) -> None:
    """What is to be run is stored, so that it can be resumed; a secret must not be."""
    import os

    from seatrial.core.errors import UserError
    from seatrial.evidence.redact import Redactor

    said = [text for text in (plan.check, plan.failure, plan.metrics) if text]
    words = (*plan.command, *plan.extra, *plan.environment.build, *plan.environment.packages, *(edit.clauses for edit in plan.edits), *said)
    shown = Redactor(os.environ).value(list(words))  # word by word: a shell's quotes between them would blur where a value ends
    if shown != list(words):
        raise UserError(
            f"what is to be run holds a secret, which would be stored with the bisect: {shlex.join(shown)}",
            "export it, and let a shell put it in: -- sh -c 'exec COMMAND --token \"$TOKEN\"'",
        )


def _repos(flags: Flags) -> tuple[Repo, ...]:
    """The repositories with their ends as commits."""
    from seatrial.bisect.bisect_records import Repo
    from seatrial.bisect.commit_history import resolve_commit
    from seatrial.core.errors import UserError
    from seatrial.evidence.git import top_level
    from seatrial.trial.trial_request import named_path

    named = [named_path(text) for text in flags.repos or ["."]]
    paths = {name or top_level(path).name: top_level(path) for name, path in named}
    if len(paths) < len(named):
        raise UserError("two repositories have the same name", "give them distinct names: --repo NAME=PATH")
    good, bad = _by_name("--good", flags.good, paths), _by_name("--bad", flags.bad, paths)
    check_places(flags.places or (), list(paths))
    places = _by_name("--place", flags.places, paths)
    repos: list[Repo] = []
    for name, path in paths.items():
        if name not in good:
            of = f" of {name}" if len(paths) > 1 else ""
            fix = "seatrial bisect --good REV --bad REV -- COMMAND" if not of else f"--good {name}=REV"
            raise UserError(f"no good commit{of} is named", fix)
        ends = (resolve_commit(path, good[name], "--good"), resolve_commit(path, bad.get(name, "HEAD"), "--bad"))
        first = not repos
        repos.append(
            Repo(name=name, path=str(path), good=ends[0], bad=ends[1], place="." if first else _place(name, path, places, repos[0]))
        )
    check_distinct(repos)
    return tuple(repos)


def _by_name(flag: str, words: Sequence[str] | None, paths: Mapping[str, Path]) -> dict[str, str]:
    """`NAME=VALUE` by name; a value without a name is for the only repository, or for the first."""
    from seatrial.core.errors import UserError

    found: dict[str, str] = {}
    for word in words or ():
        name, separator, value = word.partition("=")
        if not separator or name not in paths:
            _refuse_a_stranger(flag, name if separator else "", word, paths)
            name, value = next(iter(paths)), word
        if name in found:
            raise UserError(
                f"{flag} names two values for {name}: {found[name]} and {value}", f"give one, or one per repository: {flag} NAME=VALUE"
            )
        found[name] = value
    return found


def _refuse_a_stranger(flag: str, name: str, word: str, paths: Mapping[str, Path]) -> None:
    """`NAME=REV` of a repository that there is not; a revision may hold a `=` itself."""
    from seatrial.core.errors import UserError
    from seatrial.evidence.git import commit_of

    if name and (flag == "--place" or commit_of(next(iter(paths.values())), word) is None):
        known = ", ".join(paths)
        raise UserError(f"{flag} {word}: no repository is called {name}; there are {known}", f"name one of them, or add --repo {name}=PATH")


def _place(name: str, path: Path, places: Mapping[str, str], main: Repo) -> str:
    """Where a further repository lies: where it was said, where it is a submodule of the first, or beside it."""
    from seatrial.bisect.worktrees import BESIDE

    if name in places:
        return places[name]
    inside = path.is_relative_to(main.path) and path != Path(main.path)
    return path.relative_to(main.path).as_posix() if inside else f"../{BESIDE}/{name}"


def _edits(words: Sequence[str] | None) -> tuple[Edit, ...]:
    from seatrial.bisect.bisect_records import Edit
    from seatrial.core.errors import UserError

    for word in words or ():
        if "\n" not in word:
            raise UserError(f"--edit {word}: takes two words, a file and clauses", "--edit tests/run.sh 's/MAX_STEPS=100/MAX_STEPS=20/'")
    return tuple(Edit(file=file, clauses=clauses) for file, _, clauses in (word.partition("\n") for word in words or ()))


def _patches(words: Sequence[str] | None, main: Path) -> dict[Patch, Path | None]:
    """The patches, each with its file if it is one. `@REV` at the end says from which commit on."""
    from seatrial.bisect.bisect_records import Patch
    from seatrial.bisect.commit_history import resolve_commit
    from seatrial.evidence.git import commit_of

    found: dict[Patch, Path | None] = {}
    for word in words or ():
        source, separator, since = word.rpartition("@")
        if not separator or Path(word).is_file() or commit_of(main, word):
            source, since = word, ""
        start = resolve_commit(main, since, "--patch") if since else None
        if Path(source).is_file():
            # Two files of one name stay two.
            found[Patch(source=f"{len(found) + 1:02d}-{Path(source).name}", since=start)] = Path(source).absolute()
        else:
            found[Patch(source=resolve_commit(main, source, "--patch"), since=start)] = None
    return found


def _pattern(text: str | None) -> str | None:
    import re

    from seatrial.core.errors import UserError

    try:
        re.compile(text or "")
    except re.error as error:
        raise UserError(
            f"--failure {text!r} is not a regular expression: {error}", "correct it; special characters need a backslash"
        ) from error
    return text


def _command(flags: Flags, main: Path, bad: str) -> tuple[tuple[str, ...], tuple[str, ...], Nightly | None]:
    """The command, its extra arguments, and what a loop knows of the script of a nightly."""
    from seatrial.core.errors import UserError
    from seatrial.evidence.git import git, text
    from seatrial.loops.nightly_scripts import describe_nightly

    if flags.nightly is not None:
        script = text(git(main, "show", f"{bad}:{flags.nightly}"))
        return ("bash", flags.nightly), flags.words, describe_nightly(flags.nightly, script)
    if flags.trial:
        check_trial(flags.words, main)
    elif not flags.words:
        raise UserError("no command to run", "seatrial bisect --good REV --bad REV -- COMMAND; or --trial -- LOOP --level 0")
    return flags.words, (), None
