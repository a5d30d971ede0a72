"""Import proofs, and proof of use: which files each process of a loop imported, loaded and ran.

- Instruments inside each process write the rows; `judge_imports` compares the files with the checkouts again.
- A package imported from the right place proves nothing about a file that nothing loads, nor about a function that nothing calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from seatrial.core.errors import UserError
from seatrial.core.guarded import BadValue, parse_json, real_path
from seatrial.core.journal import read_journal
from seatrial.core.records import ImportProof, RepoState
from seatrial.core.text import first_few
from seatrial.evidence.changes import LAMBDA, MODULE, ChangedCode, ChangedFile, ChangedFunction

Roots = dict[str, tuple[str, ...]]


def read_imports(path: Path) -> tuple[ImportProof, ...]:
    """The proofs in an imports.jsonl; none when no process got as far as writing it. A torn row is an error."""
    if not path.exists():
        return ()
    proofs, fix = [], "the process was killed while it wrote; run the level again"
    for number, row, ended in read_journal(path):
        if not ended:
            raise UserError(f"{path}:{number}: the last row has no end", fix)
        try:
            proofs.append(ImportProof.model_validate(parse_json(row)))
        except BadValue as error:
            raise UserError(f"{path}:{number}: not valid JSON: {error.what}", fix) from error
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(f"{path}:{number}: {'.'.join(map(str, first['loc'])) or 'row'}: {first['msg']}", fix) from error
    return tuple(proofs)


def judge_imports(proofs: Sequence[ImportProof], repos: Sequence[RepoState], processes_expected: Iterable[str]) -> tuple[str, ...]:
    """Why the imports are not proven, one sentence each; nothing when every process runs the checkouts under test.

    Without expected processes (a run that broke off), only what was reported is judged.
    """
    expected = tuple(processes_expected)
    roots = {package: _places(repo) for repo in repos for package in repo.packages}
    somewhere = {proof.package for proof in proofs if _is_right(proof, roots)}
    problems: list[str] = []
    for process in sorted({*expected, *(proof.process for proof in proofs)}):
        reported = [proof for proof in proofs if proof.process == process]
        if not reported:
            problems.append(f"{process}: never reported what it imported")
            continue
        problems += _judge_process(process, reported, roots, somewhere)
    imported = {proof.package for proof in proofs if proof.method == "imported"}
    for repo in repos if expected and not problems else ():
        if repo.packages and not imported.intersection(repo.packages):
            problems.append(f"no process imported {' or '.join(repo.packages)}: the loop does not use {repo.name}")
    return tuple(dict.fromkeys(problems))


def comes_from(file: str, package: str, root: str) -> bool:
    """Whether `file` is `package` as the checkout at `root` provides it, links resolved.

    Lying somewhere below the checkout is not enough: an environment inside it holds installed copies.
    """
    real = real_path(Path(file))
    for base in (Path(root), Path(root, "src")):
        place = real_path(base.joinpath(*package.split(".")))
        if real == place or place in real.parents or (real.parent == place.parent and real.name.startswith(f"{place.name}.")):
            return True
    return False


def _places(repo: RepoState) -> tuple[str, ...]:
    """Where the packages of a checkout may come from."""
    return (repo.import_root or repo.path, *((repo.synced,) if repo.synced else ()))


def _expected(proof: ImportProof, roots: Roots) -> tuple[str, ...]:
    """Where this package must come from; what the process itself was told counts only for what is not of the change."""
    return roots.get(proof.package, (proof.expected,) if proof.expected else ())


def _is_right(proof: ImportProof, roots: Roots) -> bool:
    file = proof.file
    return file is not None and any(comes_from(file, proof.package, root) for root in _expected(proof, roots))


def _judge_process(process: str, reported: list[ImportProof], roots: Roots, somewhere: set[str]) -> Iterator[str]:
    for package in sorted(roots):
        if not any(proof.package == package for proof in reported):
            yield f"{process}: did not report {package}, which is under test"
    for proof in reported:
        expected = " or ".join(_expected(proof, roots))
        if not expected:
            continue
        if proof.file is None:
            if proof.method == "imported" or proof.package not in somewhere:
                yield f"{process}: could not import {proof.package}, expected from {expected}"
        elif not _is_right(proof, roots):
            verb = "imported" if proof.method == "imported" else "would import"
            yield f"{process}: {verb} {proof.package} from {proof.file}, expected from {expected}"
        elif not proof.ok:
            yield f"{process}: reported {proof.package} from {proof.file} as not proven"


EXECUTED_FILE = "executed.jsonl"
CUSTOMIZE = ("sitecustomize", "usercustomize")


def read_loaded(paths: Iterable[Path]) -> frozenset[str]:
    """Absolute paths of all files that the processes loaded, links resolved. A torn row is an error."""
    found: set[str] = set()
    for where, entry in _rows(paths, "loaded files"):
        try:
            found.update(str(real_path(Path(entry["root"], file))) for file in entry["files"])
        except (KeyError, TypeError) as error:
            raise _torn(where, "loaded files", error) from error
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class Executed:
    """What the processes of a level ran of the changed files."""

    recorded: bool = False
    why: str = ""
    ran: frozenset[tuple[str, str, str, int, int]] = field(default_factory=frozenset)
    """Repository, path, name, first line, and of a lambda its column."""

    def __or__(self, other: Executed) -> Executed:
        return Executed(self.recorded or other.recorded, self.why or other.why, self.ran | other.ran)

    def has(self, file: ChangedFile, function: ChangedFunction) -> bool:
        """Whether a function ran; code outside of functions ran if its file was imported."""
        name = function.name.rpartition(".")[2]
        if function.at_import:
            return self.imported(file)
        if name == LAMBDA and function.column:
            return (file.repo, file.path, name, function.line, function.column) in self.ran
        return any(row[:4] == (file.repo, file.path, name, function.line) for row in self.ran)

    def imported(self, file: ChangedFile) -> bool:
        """Whether a file was imported at all."""
        return any(row[:3] == (file.repo, file.path, MODULE) for row in self.ran)


def read_executed(path: Path) -> Executed:
    """The rows of one level; a level without such a file recorded nothing. A torn row is an error."""
    if not path.is_file():
        return Executed()
    recorded, why = False, ""
    ran: set[tuple[str, str, str, int, int]] = set()
    for where, entry in _rows([path], "executed functions"):
        try:
            if "ran" in entry:
                ran.update((entry["repo"], entry["path"], str(name), int(line), int(column)) for name, line, column in entry["ran"])
            elif entry["method"]:
                recorded = True
            else:
                why = f"Python {entry['python']}: {entry['why']}"
        except (KeyError, TypeError, ValueError) as error:
            raise _torn(where, "executed functions", error) from error
    return Executed(recorded, why, frozenset(ran))


def _rows(paths: Iterable[Path], what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in paths:
        for number, row, _ in read_journal(path):
            if not row:
                continue
            try:
                entry = parse_json(row)
            except ValueError as error:
                raise _torn(f"{path}:{number}", what, error) from error
            if not isinstance(entry, dict):
                raise _torn(f"{path}:{number}", what, TypeError(type(entry).__name__))
            yield f"{path}:{number}", entry


def _torn(where: str, what: str, error: Exception) -> UserError:
    return UserError(f"{where}: not a row of {what}: {error}", "run the level again")


def unused(repo: RepoState, loaded: frozenset[str]) -> str | None:
    """Why this change was not tested by the files that were loaded, or None."""
    roots = {real_path(place) for place in _trees(repo)}
    if not any(roots.intersection(Path(file).parents) for file in loaded):
        return f"no process of the loop loaded any file of {repo.name}"
    code = [file for file in repo.changed if file.endswith(".py")]
    if code and len(code) == len(repo.changed) and not any(_is_loaded(repo, file, loaded) for file in code):
        return f"no process of the loop loaded any of the changed files of {repo.name} ({first_few(code)})"
    return None


def not_loaded(repo: RepoState, loaded: frozenset[str]) -> str | None:
    """Changed Python files that nothing loaded, as a limitation."""
    left = [file for file in repo.changed if file.endswith(".py") and not _is_loaded(repo, file, loaded)]
    return f"changed but never loaded, so not tested: {first_few(left)} of {repo.name}" if left else None


def required(repo: RepoState, code: ChangedCode) -> tuple[tuple[ChangedFile, ChangedFunction], ...]:
    """The code of which something must run: changed functions; where there are none, changed code outside of functions.

    Tests and scripts of the checkout count only where no package of it changed.
    """
    files = [file for file in code.of(repo.name) if file.in_package] or list(code.of(repo.name))
    pieces = [(file, function) for file in files for function in file.functions if not function.compiled]
    return tuple(piece for piece in pieces if not piece[1].at_import) or tuple(pieces)


def idle(repo: RepoState, code: ChangedCode, executed: Executed) -> str | None:
    """Why this change was not tested by the functions that ran, or None."""
    pieces = required(repo, code)
    unread = [file for file in code.of(repo.name) if not file.readable]
    if any(executed.imported(file) for file in unread) or not (pieces or unread):
        return None
    if any(executed.has(file, function) for file, function in pieces):
        return None
    if not pieces:
        return f"no process of the loop imported {first_few([file.path for file in unread])} of {repo.name}"
    if pieces[0][1].at_import:
        files = list(dict.fromkeys(file.path for file, _ in pieces))
        return f"no process of the loop imported any of the changed files of {repo.name} ({first_few(files)})"
    return f"none of the changed functions of {repo.name} ran ({_listed(pieces)})"


def limitations(repo: RepoState, code: ChangedCode, executed: Executed) -> Iterator[str]:
    """What of a change a Pass does not speak of."""
    files = [file for file in code.of(repo.name) if executed.imported(file)]
    pieces = [(file, function) for file in files for function in file.functions]
    never = [piece for piece in pieces if not piece[1].at_import and not piece[1].compiled and not executed.has(*piece)]
    if never:
        yield f"changed but never ran, so not tested: {_listed(never)} of {repo.name}"
    outside = [piece for piece in pieces if piece[1].at_import]
    if outside:
        yield f"changed outside of functions, which runs at import; nothing shows that it was used: {_listed(outside)} of {repo.name}"
    compiled = [piece for piece in pieces if piece[1].compiled and not executed.has(*piece)]
    if compiled:
        yield f"changed, and handed to another compiler than Python's, so nothing shows that it ran: {_listed(compiled)} of {repo.name}"
    gone = [f"{name} ({file.path})" for file in code.of(repo.name) for name in file.deleted] + list(code.deleted.get(repo.name, ()))
    if gone:
        yield f"deleted, so nothing of it can be seen to run: {first_few(gone)} of {repo.name}"
    unseen = code.unseen.get(repo.name, ())
    if unseen:
        yield f"changed, but not Python, so nothing shows whether it was used: {first_few(unseen)} of {repo.name}"
    unread = [file.path for file in code.of(repo.name) if not file.readable]
    if unread:
        yield f"could not be parsed here, so it is not known which of its functions changed: {first_few(unread)} of {repo.name}"
    if not gone and not unseen and not unread and not any(file.functions for file in code.of(repo.name)):
        yield f"no code of {repo.name} differs from its base, comments, docstrings and layout aside: there is nothing to run"


def loads_itself(repo: RepoState) -> tuple[Path, ...]:
    """Files at the import root of a checkout that every Python loads as it starts, whatever the loop does."""
    if repo.import_root is None:
        return ()
    root = Path(repo.import_root)
    places = [place for name in CUSTOMIZE for place in (root / f"{name}.py", root / name / "__init__.py")]
    return tuple(place for place in places if place.is_file())


def _trees(repo: RepoState) -> list[Path]:
    """The checkout, and the tree that holds a verified copy of it while the trial runs."""
    return [Path(place) for place in (repo.path, repo.synced) if place]


def _is_loaded(repo: RepoState, file: str, loaded: frozenset[str]) -> bool:
    return any(str(real_path(tree / file)) in loaded for tree in _trees(repo))


def _listed(pieces: Sequence[tuple[ChangedFile, ChangedFunction]]) -> str:
    """Functions with their file and line; code outside of them by its file alone."""
    named = [file.path if function.name == MODULE else f"{function.name} ({file.path}:{function.line})" for file, function in pieces]
    return first_few(named)
