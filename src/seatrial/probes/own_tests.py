"""The Bridge's own unit tests that match a diff, run on a CPU with our shims, and what they say about the change.

- A Pass has tests that passed, none whose failure is the change's, and Megatron imported from the checkout. None passed, or no end in
  time, is Blocked. Tests that need CUDA or Transformer Engine count as not run, pre-existing failures as such.
- The same files run at the base revision in a worktree of their own; the cache keeps their results. A run without a proper end is no
  baseline, and a base that is what is under test is refused.
- A test that passed at the base and fails now is the change's, whatever its message says; so is a file that no longer collects. Else a
  message that says what this machine lacks (own_tests.toml, or a package) means that the test was not run; else a test that failed in the
  same way at the base is pre-existing; everything that is left is the change's. A module of the checkout itself that is missing, and a
  name that cannot be imported, are never the machine's.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Field

import seatrial
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import read_model, read_text, write_json
from seatrial.core.guarded import real_path
from seatrial.core.records import Record, RepoState
from seatrial.core.text import failure_identity
from seatrial.core.verdict import Boundary, Verdict
from seatrial.evidence.git import commit_of, tree_of
from seatrial.evidence.redact import Redactor
from seatrial.instruments.megatron.shims import IMPORTED
from seatrial.loops import bridge_tests
from seatrial.runtime.environments import default_root
from seatrial.runtime.interrupt import check_stop
from seatrial.runtime.process import Outcome, ProcessSpec
from seatrial.runtime.process import run as run_process
from seatrial.trial.base_worktrees import unchanged
from seatrial.trial.pre_tests import CUT, JUNIT, LOG, WHOLE, JUnitCase, cleaned_cases, judge_side, said_in
from seatrial.trial.preflight import child_environment
from seatrial.trial.staging import stage

MEGATRON = "3rdparty/Megatron-LM"
_PATH = re.compile(r"(?<![\w./$}>*~-])(?:\./)?((?:tests|examples|scripts|src)/[^\s`'\"()|,;:]+)")
_PLACEHOLDER = re.compile(r"[^\w./+-]|\.\.|[Ff]oo\b")


@dataclass(frozen=True, slots=True)
class Guides:
    """What the guides name in vain."""

    dead: tuple[str, ...]
    """`guide:line: path`, the first mention in each guide."""
    elsewhere: int
    """Different paths that are no part of this checkout: other repositories', as far as can be told."""


def dead_paths(root: Path) -> Guides:
    dead: list[str] = []
    elsewhere: set[str] = set()
    for guide in sorted((root / "skills").rglob("*.md")):
        name = guide.relative_to(root)
        for path, line in _named(read_text(guide)).items():
            if any((place / path).exists() for place in (root, guide.parent, root / MEGATRON)):
                continue
            parts = PurePosixPath(path).parts
            if len(parts) > 2 and root.joinpath(*parts[:2]).is_dir():
                dead.append(f"{name}:{line}: {path}")
            else:
                elsewhere.add(path)
    return Guides(tuple(dead), len(elsewhere))


def _named(text: str) -> dict[str, int]:
    """Each path of a guide, and the line that names it first."""
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        for path in _PATH.findall(line):
            plain = path.rstrip("./")
            if not _PLACEHOLDER.search(plain):
                found.setdefault(plain, number)
    return found


PLUGIN = "seatrial.instruments.megatron.shims"
EACH_S = 300
"""One test may take this long, where pytest-timeout is installed."""


@dataclass(frozen=True, slots=True)
class OwnTestsRun:
    """One pytest process and what it left."""

    outcome: Outcome
    cases: tuple[JUnitCase, ...] | None
    """None without a whole junit.xml."""
    said: str
    imported: dict[str, str | None]
    shims: tuple[str, ...] = ()


def run_pytest(python: Path, checkout: Path, files: Sequence[str], instruments: Path, out: Path, deadline_s: float) -> OwnTestsRun:
    """Run test files of a checkout to their end. `out` is a directory without an earlier run. Raises `Interrupted`."""
    redactor, out, checkout = Redactor(os.environ), out.absolute(), checkout.absolute()
    roots = [instruments.absolute(), checkout / "src", checkout / MEGATRON]
    extra = {
        **{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        **{"PYTEST_TIMEOUT": str(EACH_S), IMPORTED: str(out / "imported.json")},
    }
    environment = child_environment(os.environ, [str(root) for root in roots if root.is_dir()], extra)
    # The tests import their helpers from the directory that pytest is started in.
    del environment["PYTHONSAFEPATH"]
    command = (str(python), "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "--continue-on-collection-errors")
    spec = ProcessSpec(
        argv=(*command, "--junitxml", str(out / JUNIT), *WHOLE, *files),
        env=environment,
        cwd=checkout,
        log=out / LOG,
        run_id=f"{out.name}-own-tests-{time.time_ns()}",
        deadline_s=deadline_s,
        stall_s=deadline_s,
        line_filter=redactor.lines().line,
    )
    outcome = run_process(spec)
    check_stop()
    left = _left(out / "imported.json")
    return OwnTestsRun(outcome, cleaned_cases(out / JUNIT, redactor), said_in(out / LOG), left.files, left.shims)


class _Imported(Record):
    """What the tests' own process says of its imports."""

    files: dict[str, str | None] = Field(default_factory=dict)
    shims: tuple[str, ...] = ()


def _left(path: Path) -> _Imported:
    """Nothing where the process left nothing, or was killed while it wrote: then nothing shows that the checkout was imported."""
    try:
        return read_model(path, _Imported) if path.is_file() else _Imported()
    except UserError:
        return _Imported()


def origin(ran: OwnTestsRun, checkout: Path) -> str:
    """Why what ran was not the checkout under test; "" when it was."""
    for package, root in (("megatron.bridge", checkout / "src"), ("megatron.core", checkout / MEGATRON)):
        file = ran.imported.get(package)
        needed = package == "megatron.bridge" or (root / "megatron").is_dir()
        if needed and (file is None or not real_path(Path(file)).is_relative_to(real_path(root))):
            return f"vacuous: {package} was imported from {file or 'nowhere'}, not from {root}"
    return ""


def own_modules(checkout: Path) -> frozenset[str]:
    roots = (checkout, checkout / "src", checkout / MEGATRON)
    return frozenset({"megatron", *(entry.stem for root in roots if root.is_dir() for entry in root.iterdir())})


SHIMS = Path(seatrial.__file__).parent / "instruments" / "megatron"


class Recorded(Record):
    """What the tests gave at a commit."""

    commit: str
    files: tuple[str, ...]
    cases: tuple[JUnitCase, ...]


def commit_to_compare(repo: RepoState, base: str) -> str:
    """The commit of a revision; one that holds the same files as what is under test is refused."""
    root = Path(repo.path)
    commit = commit_of(root, base)
    if commit is None:
        raise UserError(f"{root}: no revision {base}", f"name one that it has: git -C {root} log --oneline")
    if not repo.dirty and tree_of(root, commit) == tree_of(root, repo.commit):
        raise UserError(f"{base} is what is under test: it would excuse every failure", "name the revision before the change")
    return commit


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseRun:
    """Where and with what the tests run."""

    python: Path
    instruments: Path
    out: Path
    deadline_s: float
    """Of the run at the base."""
    tell: Callable[[str], None]


def baseline(place: BaseRun, repo: RepoState, commit: str, files: Sequence[str]) -> tuple[JUnitCase, ...]:
    """The cases of those files at a commit. A BlockedError or UserError says why there are none."""
    kept = default_root() / "bridge-tests" / f"{commit}-{_hash(files)}-{environment_hash(place.python, Path(repo.path))}.json"
    if kept.is_file():
        return read_model(kept, Recorded).cases
    out = place.out / "base"
    with unchanged([(repo, commit)], out / "tree") as (state,):
        root = Path(state.path)
        there = [file for file in files if (root / file).is_file()]
        if not there:
            raise BlockedError(Boundary.ENVIRONMENT, f"none of the test files exists at {commit[:12]}", "")
        place.tell(f"running {len(there)} test files of the Bridge at its base {commit[:12]}, once: {out / LOG}")
        ran = run_pytest(place.python, root, there, place.instruments, out, place.deadline_s)
        wrong = origin(ran, root)
    if ran.outcome.ended != "exited" or ran.outcome.exit_code not in (0, 1) or not ran.cases or wrong:
        how = wrong or f"{ran.outcome.ended}, exit code {ran.outcome.exit_code}: {ran.said.strip()[-300:]}"
        raise BlockedError(Boundary.ENVIRONMENT, f"the tests do not run at {commit[:12]}: {how}", f"see {out / LOG}")
    write_json(kept, Recorded(commit=commit, files=tuple(there), cases=ran.cases))
    return ran.cases


def environment_hash(python: Path, checkout: Path) -> str:
    """Over the interpreter, the packages beside it, our shims, and whether the submodule is there."""
    packages = sorted(found.name for found in python.parent.parent.glob("lib/python*/site-packages/*.dist-info"))
    shims = sorted(SHIMS.glob("*.py"))
    contents = [hashlib.sha256(file.read_bytes()).hexdigest() for file in shims]
    return _hash([str(python.absolute()), *packages, *contents, str((checkout / MEGATRON / "megatron").is_dir())])


def _hash(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


SIGNATURES = Path(__file__).with_name("own_tests.toml")
Kind = Literal["real", "not run", "pre-existing"]
_MODULE = re.compile(r"(?:ModuleNotFoundError|ImportError): (?:.*: )?No module named '([\w.]+)'")
_BADNESS = ("passed", "skipped", "failed", "error")


class Named(Record):
    """One failure, and what it is put down to."""

    name: str
    message: str
    why: str


@dataclass(frozen=True, slots=True)
class Signature:
    """A message that says what a machine lacks."""

    id: str
    part: str
    pattern: str
    ambiguous: bool = False


@cache
def signatures() -> tuple[Signature, ...]:
    return tuple(Signature(**entry) for entry in tomllib.loads(read_text(SIGNATURES))["signature"])


def by_name(cases: Sequence[JUnitCase]) -> dict[str, JUnitCase]:
    """The cases, each once: pytest writes a second one where a test also failed while it was cleaned up."""
    found: dict[str, JUnitCase] = {}
    for case in cases:
        old = found.get(case.name)
        if old is None or _BADNESS.index(case.outcome) > _BADNESS.index(old.outcome):
            found[case.name] = case
    return found


def lacking(message: str, own: Collection[str]) -> Signature | None:
    """What the machine lacks according to the message of a failure; `own` are the top-level modules of the checkout."""
    if "cannot import name" in message:
        return None
    if known := next((signature for signature in signatures() if re.match(signature.pattern, message)), None):
        return known
    module = _MODULE.match(message)
    root = module[1].partition(".")[0] if module else ""
    return Signature("package", f"the package {root}", "") if root and root not in own else None


def failures(now: Mapping[str, JUnitCase], before: Mapping[str, JUnitCase] | None, own: Collection[str]) -> Iterator[tuple[Kind, Named]]:
    """Every failure of `now` with its kind; `before` are the same tests at the base, None when there is none."""
    for case in now.values():
        if case.outcome in ("failed", "error"):
            kind, why = _kind(case, now, before, own)
            yield kind, Named(name=case.name, message=case.message, why=why)


def _kind(case: JUnitCase, now: Mapping[str, JUnitCase], before: Mapping[str, JUnitCase] | None, own: Collection[str]) -> tuple[Kind, str]:
    old = before.get(case.name) if before is not None else None
    if old is not None and old.outcome == "passed":
        return "real", "it passed at the base"
    if lost := [name for name in unseen(now, before or {}) if name.startswith((f"{case.name}.", f"{case.name}::"))]:
        return "real", f"{len(lost)} tests of this file passed at the base"
    same = old is not None and old.outcome in ("failed", "error") and failure_identity(old.message) == failure_identity(case.message)
    need = lacking(case.message, own)
    if need is not None and (same or not need.ambiguous):
        return "not run", f"needs {need.part} ({need.id})"
    if same:
        return "pre-existing", "it failed in the same way at the base"
    if before is None:
        return "real", "there is no base to compare with"
    if old is None:
        return "real", "it is new"
    return "real", f"at the base it was {old.outcome}" + (f": {old.message}" if old.message else "")


def unseen(now: Mapping[str, JUnitCase], before: Mapping[str, JUnitCase]) -> list[str]:
    """Tests that passed at the base and of which nothing is known now."""
    return [name for name, case in before.items() if case.outcome == "passed" and name not in now]


SHOWN = 20


@dataclass(frozen=True, slots=True)
class Selection:
    files: tuple[str, ...]
    notes: tuple[str, ...]
    dead: tuple[str, ...]
    """`guide:line: path` of what the checkout's own guides name and what is not there."""


class OwnTests(Record):
    """What the Bridge's own tests showed."""

    verdict: Verdict
    reason: str
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    base: str | None = None
    """The commit that was compared with; None when there is no baseline."""
    passed: int = 0
    skipped: int = 0
    failed: int = 0
    """Failures that are the change's."""
    not_run: int = 0
    """Failures for want of CUDA, Transformer Engine or a package: these tests say nothing."""
    needs: dict[str, int] = Field(default_factory=dict)
    """How many of `not_run` lack which part."""
    pre_existing: int = 0
    failures: tuple[Named, ...] = ()
    missing: tuple[Named, ...] = ()
    """Of `not_run`."""
    known: tuple[Named, ...] = ()
    """Of `pre_existing`. All three lists end after some; the counts are whole."""
    shims: tuple[str, ...] = ()
    """Stand-ins that took part: a limitation of every pass."""
    seconds: float = 0


def select_own_tests(repo: RepoState) -> Selection:
    root = Path(repo.path)
    files, notes = bridge_tests.tests_for_diff(repo)
    guides = dead_paths(root)
    if guides.elsewhere:
        text = f"{guides.elsewhere} paths that its skills name are in no directory of this checkout: other repositories', it seems"
        notes = (*notes, text)
    if not (root / MEGATRON / "megatron").is_dir():
        notes = (*notes, f"{MEGATRON} is not populated: the environment's own Megatron-Core was used")
    return Selection(files, notes, guides.dead)


def judge_own_tests(
    ran: OwnTestsRun, checkout: Path, selection: Selection, base: str | None, before: Sequence[JUnitCase] | None
) -> OwnTests:
    """The verdict; `before` are the cases at the commit `base`."""
    now, old = by_name(ran.cases or ()), by_name(before) if before is not None else None
    sorted_ = list(failures(now, old, own_modules(checkout)))
    kinds = {kind: tuple(named for one, named in sorted_ if one == kind) for kind in ("real", "not run", "pre-existing")}
    outcomes = [case.outcome for case in now.values()]
    gone = _gone(now, old or {})
    verdict, reason = _verdict(ran, checkout, old, kinds["real"], outcomes.count("passed"))
    skipped, absent, known = outcomes.count("skipped"), len(kinds["not run"]), len(kinds["pre-existing"])
    others = {"skipped": skipped, "need what is not here": absent, "failed before": known}
    counted = ", ".join(f"{count} {word}" for word, count in others.items() if count)
    return OwnTests(
        verdict=verdict,
        reason=f"{reason} ({counted})" if counted else reason,
        files=selection.files,
        notes=(*selection.notes, *([gone] if gone else [])),
        dead=selection.dead,
        base=base if before is not None else None,
        passed=outcomes.count("passed"),
        skipped=skipped,
        failed=len(kinds["real"]),
        not_run=absent,
        needs=dict(Counter(named.why for named in kinds["not run"])),
        pre_existing=known,
        failures=kinds["real"][:SHOWN],
        missing=kinds["not run"][:SHOWN],
        known=kinds["pre-existing"][:SHOWN],
        shims=ran.shims,
        seconds=round(ran.outcome.seconds, 2),
    )


def _gone(now: dict[str, JUnitCase], before: dict[str, JUnitCase]) -> str:
    names = unseen(now, before)
    names += [name for name, case in before.items() if case.outcome == "passed" and name in now and now[name].outcome == "skipped"]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} tests that passed at the base did not run now: {', '.join(names[:3])}{more}" if names else ""


def _verdict(
    ran: OwnTestsRun, checkout: Path, before: dict[str, JUnitCase] | None, real: Sequence[Named], passed: int
) -> tuple[Verdict, str]:
    """By the first rule that applies. A failure is a Fail only where it is known that the base has it not."""
    if ran.outcome.ended == "exited" and not ran.cases:
        return _nothing(ran, checkout, before or {})
    if ran.outcome.ended in ("deadline", "stalled"):
        return Verdict.BLOCKED, f"no end within the {ran.outcome.seconds:.0f} s that were left for them"
    if ran.outcome.ended != "exited" or ran.cases is None:
        return judge_side(ran.outcome, ran.cases, ran.said, ())
    if real:
        more = f"; and {len(real) - 3} more" if len(real) > 3 else ""
        named = "; ".join(f"{one.name}: {one.message} ({one.why})" for one in real[:3])
        blamed = Verdict.FAIL if before is not None else Verdict.BLOCKED
        return blamed, f"{len(real)} of {len(ran.cases)} tests failed: {named}{more}"
    if wrong := origin(ran, checkout):
        return Verdict.BLOCKED, wrong
    bad = any(case.outcome in ("failed", "error") for case in ran.cases)
    if ran.outcome.exit_code != int(bad):
        return Verdict.FAIL, f"exit code {ran.outcome.exit_code} does not fit what {JUNIT} says"
    if cut := CUT.search(ran.said):
        return Verdict.FAIL, f"it stopped before its last test: {cut[1]}"
    if not passed:
        return Verdict.BLOCKED, f"vacuous: none of {len(ran.cases)} tests passed"
    return Verdict.PASS, f"{passed} tests passed"


def _nothing(ran: OwnTestsRun, checkout: Path, before: dict[str, JUnitCase]) -> tuple[Verdict, str]:
    """No test ran: the change's fault when they ran at the base, or when it is the checkout that cannot be imported."""
    verdict, reason = judge_side(ran.outcome, ran.cases, ran.said, ())
    last = ran.said.splitlines()[-1] if ran.said.splitlines() else ""
    message = last.removeprefix("E").strip()
    own = "ImportError:" in message or "ModuleNotFoundError:" in message
    if any(case.outcome == "passed" for case in before.values()):
        return Verdict.FAIL, f"no test ran, and at the base they did: {reason}"
    return (Verdict.FAIL, reason) if own and lacking(message, own_modules(checkout)) is None else (verdict, reason)


def own_tests(python: Path, repo: RepoState, out: Path, deadline_s: float, base: str | None, tell: Callable[[str], None]) -> OwnTests:
    """Choose, run at the base and now, compare. Both runs have `deadline_s` together, the base at most half of it. `base` is a revision,
    None when none is known."""
    ends = time.monotonic() + deadline_s
    selection, out = select_own_tests(repo), out.absolute()
    if not selection.files:
        reason = f"{repo.path}: none of the focused tests exists"
        return OwnTests(verdict=Verdict.SKIPPED, reason=reason, notes=selection.notes, dead=selection.dead)
    place = BaseRun(python=python, instruments=stage(out), out=out, deadline_s=deadline_s / 2, tell=tell)
    commit, before, note = _before(place, repo, selection.files, base)
    selection = replace(selection, notes=(*selection.notes, *([note] if note else [])))
    tell(f"running {len(selection.files)} test files of the Bridge: {out / LOG}")
    try:
        ran = run_pytest(python, Path(repo.path), selection.files, place.instruments, out, ends - time.monotonic())
    except BlockedError as error:
        return OwnTests(verdict=Verdict.BLOCKED, reason=error.message, files=selection.files, notes=selection.notes, dead=selection.dead)
    return judge_own_tests(ran, Path(repo.path), selection, commit, before)


def _before(
    place: BaseRun, repo: RepoState, files: tuple[str, ...], base: str | None
) -> tuple[str | None, tuple[JUnitCase, ...] | None, str]:
    """The commit of the base and its cases; a note when there are none."""
    if base is None:
        note = "no base is known (name --base): a failure that was there before counts as the change's, "
        return None, None, f"{note}and a test that ran without CUDA before and needs it now is not seen"
    try:
        commit = commit_to_compare(repo, base)
        return commit, baseline(place, repo, commit, files), ""
    except (BlockedError, UserError) as error:
        return None, None, f"there is no baseline: {error.message}"
