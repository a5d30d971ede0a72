"""Levels of a base that ran before: kept in the user's cache, and taken from there when everything is the same.

- The key of a level covers all that it depends on: the base's commits, the state of companions, the environment, the CPU,
  the variables that a loop reads, model, arguments, options, and Seatrial's own code. What a key cannot cover (a user's
  own environment, an interpreter, a model that a hub holds) is not kept.
- Kept is a level that passed, with every process at its own end. A failure may be the machine's: it is seen again each time.
- An entry appears whole, by a rename, and holds the digest of each of its files. One that is damaged is not used.
- `SEATRIAL_BASE_CACHE` names another directory; `off` keeps nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import seatrial
from seatrial import loops
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import read_model, read_text, sync_directory, write_json, write_text
from seatrial.core.records import LevelResult, Plan, PlannedLevel, Record, RepoState, Trial
from seatrial.core.verdict import Verdict
from seatrial.runtime.environments import MARKER, default_root
from seatrial.trial.base_worktrees import under_test
from seatrial.trial.run_dir import WEIGHTS, sha256
from seatrial.trial.staging import engine_interpreters

VARIABLE = "SEATRIAL_BASE_CACHE"
FILES = "level"
PLACES = ("imports.jsonl", "loaded.jsonl")
"""Files of a level that say from where it imported what."""
KEPT = 300
"""Entries that stay; the oldest go first."""
WHOLE = 128 * 1024 * 1024
"""Bytes of a level beyond which it is not kept."""
READ = (
    *("ACCELERATE", "ATEN", "CUBLAS", "CUDA", "DNNL", "GLOO", "HF_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL", "NCCL", "NRL_"),
    *("NVTE", "ONEDNN", "OMP_", "OPENBLAS", "PYTHON", "PYTORCH", "RAY_", "SGLANG", "TOKENIZERS", "TORCH", "TRANSFORMERS", "TRITON", "TZ"),
    *("VLLM", "XLA"),
    *(f"{name.replace('-', '_').upper()}_" for name in loops.names()),
)
"""How the names of variables begin that a loop's libraries read."""


class Entry(Record):
    """complete.json of an entry."""

    seatrial: str
    level: int
    name: str
    roots: dict[str, str]
    """Where the repositories of the base lay while it ran."""
    files: dict[str, str]
    """SHA-256 of every file, by its path below `level/`."""


@dataclass(frozen=True, slots=True)
class Key:
    """Identifies a level of a base; empty when it cannot be kept."""

    text: str = ""
    reason: str = ""
    """Why it cannot be kept."""


def root() -> Path | None:
    """Where entries lie; None when nothing is to be kept."""
    chosen = os.environ.get(VARIABLE)
    if chosen == "off":
        return None
    return Path(chosen).absolute() if chosen else default_root() / "base"


def level_key(plan: Plan, trial: Trial, base: Sequence[RepoState], level: PlannedLevel, evidence: Path) -> Key:
    """The key of one level of the base of `trial`. `plan` holds the arguments as they are, `evidence` patches of companions."""
    environment = trial.environment
    if environment is None or environment.lock is None:
        return Key(reason="the environment was not built by Seatrial")
    try:
        parts = {
            "seatrial": _own_code(),
            "loop": plan.loop,
            "level": [level.number, level.name],
            "base": sorted(_base(repo, base) for repo in under_test(plan)),
            "companions": sorted(_companion(repo, evidence) for repo in trial.plan.changes if repo.companion),
            "environment": [environment.fingerprint, environment.lock, environment.platform, *environment.gpus, environment.cpu_count],
            "engines": sorted(str(python) for python in engine_interpreters().values()),
            "cpu": _cpu(),
            "variables": _variables(os.environ),
            "model": _model(plan.model),
            "arguments": [_word(word, plan) for word in plan.arguments],
            "options": {name: _word(value, plan) for name, value in sorted(plan.options.items())},
        }
    except _NoKeyError as error:
        return Key(reason=str(error))
    return Key(hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40])


class _NoKeyError(Exception):
    """What a key cannot cover."""


def _base(repo: RepoState, base: Sequence[RepoState]) -> list[str]:
    commit = next(state.commit for state in base if state.name == repo.name)
    populated = [module.path for module in repo.submodules if module.state != "uninitialised"]
    return [repo.name, commit, *repo.packages, *populated]


def _companion(repo: RepoState, evidence: Path) -> list[str]:
    modules = [f"{module.path} {module.commit} {module.state}" for module in repo.submodules]
    if not repo.dirty:
        return [repo.name, repo.commit, *modules]
    if repo.patch is None:
        raise _NoKeyError(f"{repo.name} has uncommitted work without a patch")
    return [repo.name, repo.commit, *modules, *_digests([evidence / repo.patch])]


def _model(model: str) -> list[str]:
    """Names of models that the loop makes say all; others by their content."""
    place = Path(model)
    if place.is_absolute() and place.exists():
        return _digests([place])
    if "/" in model:
        raise _NoKeyError(f"the model {model} comes from a hub")
    return [model]


def _word(word: str, plan: Plan) -> list[str]:
    """An argument or the value of an option; a file that it names counts by its content, a checkout by its state."""
    if "[redacted:" in word:
        raise _NoKeyError("a loop argument is a secret")
    for repo in plan.changes:
        if word == repo.path:
            return ["checkout", repo.name]
    named = Path(word.rpartition("=")[2])
    if not named.is_absolute() or not named.exists():
        return [word]
    if any(named.is_relative_to(repo.path) for repo in plan.changes):
        raise _NoKeyError(f"{word} lies in a checkout")
    if named.is_file() and os.access(named, os.X_OK):
        raise _NoKeyError(f"{word} is a program, and its packages are not known")
    return [word, *_digests([named])]


def _digests(places: Iterable[Path]) -> list[str]:
    """Names and contents of files, and of all files below directories."""
    made = []
    for place in places:
        try:
            for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
                if file.is_file():
                    made.append(f"{file.relative_to(place) if place.is_dir() else file.name} {sha256(file)}")
        except OSError as error:
            raise _NoKeyError(f"{place}: cannot be read: {error.strerror or error}") from error
    return made


@cache
def _own_code() -> str:
    """Seatrial's own files: drivers, probes and shims, and what judges them."""
    home = Path(seatrial.__file__).parent
    files = [file for file in sorted(home.rglob("*")) if file.is_file() and "__pycache__" not in file.parts]
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file.relative_to(home)} {sha256(file)}\n".encode())
    return whole.hexdigest()


def _cpu() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return [platform.machine(), platform.processor()]
    found = {name.strip(): text.strip() for name, _, text in (line.partition(":") for line in lines)}
    return [platform.machine(), found.get("model name", ""), found.get("flags", "")]


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that a loop's libraries read; secrets only by their names."""
    return {name: value for name, value in sorted(environ.items()) if name.startswith(READ) and "TOKEN" not in name and "KEY" not in name}


def load(key: Key, level: PlannedLevel, target: Path, roots: Mapping[str, str]) -> LevelResult | None:
    """Put the files of a kept level into `target`; its result, as if the base had lain at `roots`. None without a whole entry."""
    place = root()
    if place is None or not key.text or not (place / key.text / MARKER).is_file():
        return None
    entry_dir = place / key.text
    try:
        entry = read_model(entry_dir / MARKER, Entry)
        if (entry.level, entry.name) != (level.number, level.name) or not _whole(entry, entry_dir / FILES):
            return None
        result = read_model(entry_dir / FILES / "result.json", LevelResult)
        if not _keepable(result):
            return None
        shutil.copytree(entry_dir / FILES, target, dirs_exist_ok=True)
        os.utime(entry_dir / MARKER)
    except (UserError, OSError):
        return None
    moved = [(old, roots[name]) for name, old in entry.roots.items() if name in roots]
    for name in PLACES:
        if (target / name).is_file():
            write_text(target / name, _moved(read_text(target / name), moved))
    result = LevelResult.model_validate_json(_moved(result.model_dump_json(), moved))
    write_json(target / "result.json", result)
    return result


def _moved(text: str, places: Sequence[tuple[str, str]]) -> str:
    """JSON in which the base lies elsewhere."""
    for old, new in places:
        for plain in (False, True):
            text = text.replace(_quoted(old, plain), _quoted(new, plain))
    return text


def _quoted(text: str, plain: bool) -> str:
    """A text as it stands within JSON, `plain` with ASCII letters alone."""
    return json.dumps(text, ensure_ascii=plain)[1:-1]


def _whole(entry: Entry, files: Path) -> bool:
    """Whether every file is there, and as it was."""
    there = {str(file.relative_to(files)) for file in files.rglob("*") if file.is_file()}
    return there == set(entry.files) and all(sha256(files / name) == digest for name, digest in entry.files.items())


def _keepable(result: LevelResult) -> bool:
    ended = all(phase.ended == "exited" and phase.signal is None for phase in result.phases)
    return result.verdict is Verdict.PASS and result.own is None and bool(result.phases) and ended


def store(key: Key, result: LevelResult, source: Path, changes: Sequence[RepoState]) -> bool:
    """Keep a level of a base that ran; False where it cannot be. Another process may have kept it in the meantime."""
    place = root()
    if place is None or not key.text or not _keepable(result):
        return False
    files = list(_kept(source))
    if sum(file.stat().st_size for file in files) > WHOLE:
        return False
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place, prefix=".new-") as scratch:
            made = Path(scratch) / key.text
            for file in files:
                goal = made / FILES / file.relative_to(source)
                goal.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, goal)
            digests = {str(file.relative_to(made / FILES)): sha256(file) for file in (made / FILES).rglob("*") if file.is_file()}
            roots = {repo.name: repo.path for repo in changes if not repo.companion}
            entry = Entry(seatrial=seatrial.__version__, level=result.number, name=result.name, roots=roots, files=digests)
            write_json(made / MARKER, entry)
            # What lies there is damaged, or it would have been used; or another process has just put it there.
            if (place / key.text).exists():
                (place / key.text).rename(Path(scratch) / "old")
            made.rename(place / key.text)
        sync_directory(place)
        _prune(place)
    except (OSError, UserError, BlockedError):
        return False
    return True


def _kept(source: Path) -> Iterator[Path]:
    for file in sorted(source.rglob("*")):
        inside = file.relative_to(source).parts
        if file.is_file() and not file.is_symlink() and inside[0] != "attempts" and file.suffix not in WEIGHTS:
            yield file


def _prune(place: Path) -> None:
    entries = [entry for entry in place.iterdir() if (entry / MARKER).is_file()]
    entries.sort(key=lambda entry: (entry / MARKER).stat().st_mtime, reverse=True)
    for entry in entries[KEPT:]:
        shutil.rmtree(entry, ignore_errors=True)
