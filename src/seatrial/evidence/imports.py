"""Import proofs: every process kind of a loop shows from which file it imported the packages under test.

- Proofs are written by the probe `probes/provenance.py` inside each process, one JSON row per package.
- `judge_imports` does not trust the rows' own judgement; it compares the files with the checkouts again.
- What was not reported is a problem: silence proves nothing. A process may report where a package that it does not use
  would come from, or that it has no such package when another process has it from the right place; but some process must
  really have imported one of the packages of each checkout.
- A verified copy of a checkout in another tree (`RepoState.synced`) is as good as the checkout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from seatrial.files import read_text
from seatrial.model.errors import UserError
from seatrial.model.guarded import BadValue, parse_json, real_path
from seatrial.model.record import ImportProof, RepoState

Roots = dict[str, tuple[str, ...]]


def read_imports(path: Path) -> tuple[ImportProof, ...]:
    """The proofs in an imports.jsonl; none when no process got as far as writing it. A torn row is an error."""
    if not path.exists():
        return ()
    rows = read_text(path).split("\n")
    if rows[-1]:
        raise _torn(path, len(rows), "the last row has no end")
    proofs = []
    for number, row in enumerate(rows[:-1], 1):
        try:
            proofs.append(ImportProof.model_validate(parse_json(row)))
        except BadValue as error:
            raise _torn(path, number, f"not valid JSON: {error.what}") from error
        except ValidationError as error:
            first = error.errors()[0]
            raise _torn(path, number, f"{'.'.join(map(str, first['loc'])) or 'row'}: {first['msg']}") from error
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


def _torn(path: Path, number: int, what: str) -> UserError:
    return UserError(f"{path}:{number}: {what}", "the process was killed while it wrote; run the level again")
