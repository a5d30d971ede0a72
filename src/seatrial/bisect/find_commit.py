"""Plans a bisect from what is asked, and runs it: `find_commit` is `seatrial.bisect`; `seatrial bisect` plans with the same function.

Revisions are resolved, and what cannot work is refused, before anything is written.
"""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from seatrial.bisect.bisect_dir import JOURNAL, PATCHES, append_run, create_bisect
from seatrial.bisect.bisect_records import BisectAnswer, BisectPlan, BisectRun, Edit, EnvironmentPlan, History, Mark, Patch, Repo
from seatrial.bisect.bisect_runner import read_histories, run_bisect
from seatrial.bisect.commit_history import introduced, missing_words, resolve_commit, uncommitted
from seatrial.bisect.environment_cache import detect_environment
from seatrial.bisect.git_bisect_log import read_marks
from seatrial.bisect.lockfile import is_local
from seatrial.bisect.worktrees import BESIDE, check_edits
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.records import replace as replace_record
from seatrial.evidence.git import commit_of, git, text, top_level
from seatrial.evidence.redact import Redactor
from seatrial.loops.nightly_scripts import Nightly, describe_nightly
from seatrial.metrics.checks import parse
from seatrial.runtime.venvs import find_python
from seatrial.trial.run_dir import now
from seatrial.trial.trial_request import named_path

BISECTS = Path("bisects")
METRIC_REPEAT = 10
"""Runs of one commit at most, when a metric is measured and nothing else is asked for."""
CheckTrial = Callable[[Sequence[str], Path], None]
"""Refuses words that `seatrial run` would not take; the path is that of the checkout."""
_OF_A_RUN = ("tree", "output", "checkpoints")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectRequest:
    """What is asked for. Fields are called as the parameters of `seatrial bisect` are, where they are explained."""

    words: tuple[str, ...]
    """The command; with `trial` the words of `seatrial run`, with `nightly` further arguments of the script."""
    good: Sequence[str] | None = None
    bad: Sequence[str] | None = None
    repo: Sequence[str] | None = None
    place: Sequence[str] | None = None
    trial: bool = False
    check: str | None = None
    metrics: str | None = None
    failure: str | None = None
    any_failure: bool = False
    env: str | None = None
    with_: Sequence[str] | None = None
    python: str | None = None
    build: str | None = None
    edit: Sequence[str] | None = None
    patch: Sequence[str] | None = None
    jobs: int = 1
    on: str | None = None
    repeat: int | None = None
    confidence: float = 0.99
    minutes: float | None = None
    retries: int = 2
    first_parent: bool = False
    descend: bool = True
    nightly: str | None = None
    """The script of the repository that is bisected; its good end is the commit that added it, unless another one is named."""


@dataclass(frozen=True, slots=True)
class PlannedBisect:
    """A bisect that can be run."""

    plan: BisectPlan
    files: Mapping[str, Path]
    """The files of patches, by the names that they have in the plan."""
    history: History
    rows: tuple[BisectRun, ...] = ()
    """Of an earlier bisect, which are known already."""
    notes: tuple[str, ...] = ()

    def create(self, out: Path | None) -> Path:
        path = create_bisect(BISECTS, out, self.plan)
        for name, file in self.files.items():
            (path / PATCHES).mkdir(exist_ok=True)
            shutil.copy(file, path / PATCHES / name)
        for row in self.rows:
            append_run(path / JOURNAL, row)
        return path


@dataclass(frozen=True, slots=True)
class BisectResult:
    """What a bisect found, and where its journal, logs and reports are."""

    answer: BisectAnswer
    directory: Path

    @property
    def commit(self) -> str | None:
        """The commit that broke it; None when only a range was found."""
        return self.answer.suspects[0].commit if self.answer.state == "found" and self.answer.suspects else None


def find_commit(
    command: Sequence[str],
    *,
    good: str,
    bad: str = "HEAD",
    repo: str | Path = ".",
    check: str | None = None,
    failure: str | None = None,
    any_failure: bool = False,
    env: str | None = None,
    jobs: int = 1,
    repeat: int | None = None,
    confidence: float = 0.99,
    minutes: float = 60.0,
    retries: int = 2,
    first_parent: bool = False,
    descend: bool = True,
    out: str | Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> BisectResult:
    """Find the commit that broke a command, or moved a metric (`seatrial bisect`). Your checkout is never touched.

    With `check` the command leaves its metrics in the directory $SEATRIAL_OUTPUT. `tell` is called with lines on the progress.
    Interrupted, it raises a KeyboardInterrupt; `seatrial bisect resume` goes on.
    """
    if isinstance(command, str):
        raise UserError(f"bisect: the command {command!r} is one text", f"give it word by word: {shlex.split(command)}")
    if not command:
        raise UserError("no command to run", 'bisect(["pytest", "tests/test_x.py"], good=REV)')
    asked = BisectRequest(
        words=tuple(command),
        good=[good],
        bad=[bad],
        repo=[str(repo)],
        check=check,
        failure=failure,
        any_failure=any_failure,
        env=env,
        jobs=jobs,
        repeat=repeat,
        confidence=confidence,
        minutes=minutes,
        retries=retries,
        first_parent=first_parent,
        descend=descend,
    )
    directory = plan_bisect(asked).create(None if out is None else Path(out))
    return BisectResult(run_bisect(directory, Redactor(os.environ), tell), directory)


def plan_bisect(asked: BisectRequest, replay: Path | None = None, check_trial: CheckTrial | None = None) -> PlannedBisect:
    """The plan, with the marks of an earlier bisect in `replay`."""
    if asked.check is not None:
        parse(asked.check)
    if asked.any_failure and asked.failure is not None:
        raise UserError("--any-failure and --failure contradict each other", "give one of them")
    try:
        re.compile(asked.failure or "")
    except re.error as error:
        raise UserError(
            f"--failure {asked.failure!r} is not a regular expression: {error}", "correct it; special characters need a backslash"
        ) from error
    _check_metrics(asked.metrics)
    notes: tuple[str, ...] = ()
    if asked.nightly is not None and not asked.good:
        path = top_level(named_path(next(iter(asked.repo or ["."])))[1])
        last = resolve_commit(path, next(iter(asked.bad or ["HEAD"])), "--bad")
        first, notes = introduced(path, asked.nightly, last)
        asked = replace(asked, good=[first], bad=[last])
    marks = read_marks(replay, top_level(named_path(next(iter(asked.repo or ["."])))[1])) if replay else None
    if marks:  # a log names its own ends, unless others are named
        good, bad = marks.end(Mark.GOOD), marks.end(Mark.BAD)
        if good and good == bad and not (asked.good or asked.bad):
            raise UserError(
                f"{marks.path}: marks the same commit {good[:12]} as the good and the bad end",
                "correct it, or name the ends: --good REV --bad REV",
            )
        asked = replace(asked, good=asked.good or ([good] if good else None), bad=asked.bad or ([bad] if bad else None))
    repos = _repos(asked)
    patches = _patches(asked.patch, Path(repos[0].path))
    plan = _plan(asked, repos, tuple(patches), notes, check_trial)
    history = read_histories(plan)
    files = {patch.source: file for patch, file in patches.items() if file}
    if marks is None:
        return PlannedBisect(plan, files, history, notes=plan.notes)
    return PlannedBisect(plan, files, history, marks.rows(history, plan), (*plan.notes, *marks.notes))


def _plan(
    asked: BisectRequest, repos: tuple[Repo, ...], patches: tuple[Patch, ...], notes: tuple[str, ...], check_trial: CheckTrial | None
) -> BisectPlan:
    main, bad = Path(repos[0].path), repos[0].bad
    for word in asked.edit or ():
        if "\n" not in word:
            raise UserError(f"--edit {word}: takes two words, a file and clauses", "--edit tests/run.sh 's/MAX_STEPS=100/MAX_STEPS=20/'")
    edits = tuple(Edit(file=file, clauses=clauses) for file, _, clauses in (word.partition("\n") for word in asked.edit or ()))
    check_edits(edits)
    command: tuple[str, ...] = asked.words
    extra: tuple[str, ...] = ()
    found: Nightly | None = None
    if asked.nightly is not None:
        command, extra = ("bash", asked.nightly), asked.words
        found = describe_nightly(asked.nightly, text(git(main, "show", f"{bad}:{asked.nightly}")))
    elif asked.trial and check_trial:
        check_trial(asked.words, main)
    elif not asked.trial and not asked.words:
        raise UserError("no command to run", "seatrial bisect --good REV --bad REV -- COMMAND; or --trial -- LOOP --level 0")
    environment = _environment(asked, main, bad)
    if asked.python and environment.kind == "none":
        notes += (f"--python {asked.python} changes nothing: no environment is built, so commits run in the one you call from",)
    same = ("first_parent", "trial", "check", "failure", "any_failure", "nightly", "jobs", "on", "confidence", "retries", "descend")
    plan = BisectPlan(
        **{name: getattr(asked, name) for name in same},
        created=now(),
        repos=repos,
        command=command,
        extra=extra,
        metrics=asked.metrics or (found.metrics if found else "{output}"),
        environment=environment,
        variables=dict(found.variables) if found else {},
        edits=edits,
        patches=patches,
        repeat=asked.repeat or (METRIC_REPEAT if asked.check else 1),
        minutes=asked.minutes or (found.minutes if found else 60.0),
        notes=(*notes, *(note for repo in repos for note in uncommitted(Path(repo.path)))),
    )
    _refuse_secrets(plan)
    return plan


def _refuse_secrets(plan: BisectPlan) -> None:
    """What is to be run is stored, so that it can be resumed; a secret must not be."""
    judged = [text for text in (plan.check, plan.failure, plan.metrics) if text]
    run = (*plan.command, *plan.extra, *plan.environment.build, *plan.environment.packages, *(edit.clauses for edit in plan.edits))
    words = [*run, *judged]
    shown = Redactor(os.environ).value(words)  # word by word: a shell's quotes between them would blur where a value ends
    if shown != words:
        raise UserError(
            f"what is to be run holds a secret, which would be stored with the bisect: {shlex.join(shown)}",
            "export it, and let a shell put it in: -- sh -c 'exec COMMAND --token \"$TOKEN\"'",
        )


def _environment(asked: BisectRequest, main: Path, bad: str) -> EnvironmentPlan:
    """How environments are made; what cannot be had for any commit is refused."""
    # A trial and a nightly bring environments of their own.
    found = detect_environment(main, bad, "none" if asked.env is None and (asked.trial or asked.nightly) else asked.env)
    version, packages = asked.python, tuple(asked.with_ or ())
    if version and not re.fullmatch(r"3\.\d+", version):
        raise UserError(f"--python {version}: not a version of Python", "name it by major and minor, such as 3.12")
    if version and found.kind != "none":
        try:
            find_python(version)
        except BlockedError as error:
            raise UserError(f"--python {version}: {error.message}", error.fix) from error
    for package in packages:
        # An environment is shared by commits and kept by what was asked for; what lies in a directory may change under it.
        if not package.strip() or package.startswith("-") or "\n" in package or is_local(package):
            raise UserError(
                f"--with {package}: not a requirement by name",
                "name a package, such as pytest or 'pytest<9'; what lies in a directory is installed with --build 'pip install …'",
            )
    if packages and found.kind == "none":
        raise UserError(
            f"--with {packages[0]}: no environment is built, so there is none to install it into",
            "install it where you call from, or name a lock: --env pip:LOCKFILE",
        )
    return replace_record(found, python=version or "", build=tuple(shlex.split(asked.build or "")), packages=packages)


def _check_metrics(place: str | None) -> None:
    """Refuse a place outside of the files of one run: runs that share it would be judged by each other's metrics."""
    if place is None:
        return
    fix = f"a path in the tree, or one that begins with {{{'}, {'.join(_OF_A_RUN)}}}"
    strange = [name for name in _PLACEHOLDER.findall(place) if name not in _OF_A_RUN]
    if strange:
        raise UserError(f"--metrics {place}: {{{strange[0]}}} is no place of a run", fix)
    if not place or place.startswith(("/", "~")):
        raise UserError(f"--metrics {place}: not in the files of a run, and all runs would share it", fix)
    if ".." in place.split("/"):
        raise UserError(f"--metrics {place}: leads out of the files of a run", fix)


def _repos(asked: BisectRequest) -> tuple[Repo, ...]:
    paths: dict[str, Path] = {}
    for name, path in map(named_path, asked.repo or ["."]):
        top = top_level(path)
        if (key := name or top.name) in paths:
            raise UserError("two repositories have the same name", "give them distinct names: --repo NAME=PATH")
        paths[key] = top
    good, bad = _by_name("--good", asked.good, paths), _by_name("--bad", asked.bad, paths)
    main, *others = paths
    for word in asked.place or ():
        name, _, value = word.partition("=")
        if not value:
            raise UserError(f"--place {word}: takes the name of a repository and a path", "--place NAME=PATH")
        if name == main:
            further = ", ".join(others) or "none"
            raise UserError(f"--place {word}: {name} is the first repository, whose tree holds the others", f"further ones are: {further}")
    places = _by_name("--place", asked.place, paths)
    repos: list[Repo] = []
    for name, path in paths.items():
        if name not in good:
            of = f" of {name}" if others else ""
            fix = f"--good {name}=REV" if others else "seatrial bisect --good REV --bad REV -- COMMAND"
            raise UserError(f"no good commit{of} is named", fix)
        ends = (resolve_commit(path, good[name], "--good"), resolve_commit(path, bad.get(name, "HEAD"), "--bad"))
        # A submodule of the first lies where it is, any other repository beside it.
        inside = path.is_relative_to(paths[main]) and path != paths[main]
        own = path.relative_to(paths[main]).as_posix() if inside else f"../{BESIDE}/{name}"
        repos.append(Repo(name=name, path=str(path), good=ends[0], bad=ends[1], place=places.get(name, own) if repos else "."))
    check_distinct(repos)
    return tuple(repos)


def check_distinct(repos: Sequence[Repo]) -> None:
    taken: dict[str, str] = {}
    for repo in repos:
        place = posixpath.normpath(repo.place)
        if place in taken:
            raise UserError(f"{taken[place]} and {repo.name} are to lie at the same place, {place}", f"--place {repo.name}=PATH")
        taken[place] = repo.name


def _by_name(flag: str, words: Sequence[str] | None, paths: Mapping[str, Path]) -> dict[str, str]:
    """`NAME=VALUE` by name; a value without a name is for the only repository, or for the first."""
    found: dict[str, str] = {}
    main = next(iter(paths))
    for word in words or ():
        name, separator, value = word.partition("=")
        if not separator or name not in paths:
            # A revision may hold a `=` itself.
            if separator and name and (flag == "--place" or commit_of(paths[main], word) is None):
                known = ", ".join(paths)
                raise UserError(
                    f"{flag} {word}: no repository is called {name}; there are {known}", f"name one of them, or add --repo {name}=PATH"
                )
            name, value = main, word
        if name in found:
            raise UserError(
                f"{flag} names two values for {name}: {found[name]} and {value}", f"give one, or one per repository: {flag} NAME=VALUE"
            )
        found[name] = value
    return found


def _patches(words: Sequence[str] | None, main: Path) -> dict[Patch, Path | None]:
    """The patches, each with its file if it is one. `@REV` at the end says from which commit on."""
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


def unknown_program(plan: BisectPlan) -> str | None:
    """A warning when nothing shows that the program of the command exists."""
    main, program = plan.repos[0], plan.command[:1]
    if plan.trial or not program or "{" in program[0] or shutil.which(program[0]) or missing_words(Path(main.path), program, main.bad):
        return None
    where = "" if plan.environment.kind == "none" else "; it may be in the environments"
    return f"{program[0]} is neither on PATH nor a file of the repository{where}"
