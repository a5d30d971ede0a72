"""The Bridge under test inside the vendored tree of the NeMo-RL checkout for one phase, and Megatron-Core's dataset helpers.

- Each file that is changed is saved first, with a manifest; a marker in the git directory says so.
- `python -m seatrial.instruments.nemo_rl.vendored_bridge CHECKOUT` restores what a killed run left.
- The helpers are built in a node-local copy of Megatron-LM: nothing is written into that checkout.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from seatrial.instruments import safe_git
from seatrial.instruments.nemo_rl.nemo_process import USAGE, DriverChild, Failed, say

NOT_EQUAL = 91
"""Exit code: the vendored tree could not be made equal to the Bridge under test, or could not be restored."""
MARKER = "seatrial-sync.json"
LOCK = "seatrial.lock"
NEW = ".seatrial-new"
GIT_SECONDS = 120

Digests = dict[str, str]
Manifest = dict[str, "tuple[str | None, str | None]"]
"""The digests of each file before and after; None where there is no file."""


def git(tree: Path, *words: str) -> str:
    """What git prints in this tree; a checkout of another user is read like one's own, and nothing that it configures runs."""
    command = safe_git.command_line(tree, "-c", "safe.directory=*", *words)
    try:
        env = safe_git.environment(tree, trusted=True)
        done = subprocess.run(command, env=env, capture_output=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired, safe_git.GitRefused) as error:
        raise Failed(USAGE, f"{tree}: git cannot be asked: {error}") from error
    if done.returncode:
        raise Failed(USAGE, f"{tree}: git {words[0]}: {os.fsdecode(done.stderr).strip() or 'failed'}")
    return os.fsdecode(done.stdout)


def git_directory(tree: Path) -> Path:
    return Path(git(tree, "rev-parse", "--absolute-git-dir").rstrip("\n"))


def file_digest(file: Path) -> str | None:
    """Of what the file holds, or where the link points; None for a directory, and where nothing is."""
    try:
        mode = file.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISLNK(mode):
        return "link " + hashlib.sha256(os.fsencode(file.readlink())).hexdigest()
    return hashlib.sha256(file.read_bytes()).hexdigest() if stat.S_ISREG(mode) else None


def contents(tree: Path, *which: str) -> Digests:
    named = dict.fromkeys(name for name in git(tree, "ls-files", "-z", *which).split("\0") if name)
    return {name: found for name in named if (found := file_digest(tree / name)) is not None}


def start_sync(source: Path, target: Path, keep: Path, marker: Path) -> None:
    """Make `target` equal to `source`; what it held is saved in `keep`, and the marker says so."""
    if source.resolve() == target.resolve():
        say(f"{target} is the tree under test itself")
        return
    require_clean(target)
    with _told("sync"):
        _replace(source, target, keep, marker)


def _replace(source: Path, target: Path, keep: Path, marker: Path) -> None:
    wanted = contents(source, "--cached", "--others", "--exclude-standard")
    if not wanted:
        raise Failed(USAGE, f"{source}: git knows no file there")
    names = sorted({*wanted, *contents(target, "--cached")})
    both = {name: (file_digest(target / name), wanted.get(name)) for name in names}
    manifest = {name: pair for name, pair in both.items() if pair[0] != pair[1]}
    _save(target, keep, manifest)
    _write(marker, {"target": str(target), "keep": str(keep)})
    for name, (_, after) in _removals_first(manifest, 1):
        # Without the times of the source: bytecode of the file that was there must not pass for that of the new one.
        _remove(target, name) if after is None else _put(source / name, target / name, shutil.copy)
    different = [name for name, found in wanted.items() if file_digest(target / name) != found]
    different += [name for name, (_, after) in manifest.items() if after is None and file_digest(target / name) is not None]
    if different:
        raise Failed(NOT_EQUAL, f"sync failed: {target / different[0]} is not that of {source} ({len(different)} files differ)")
    say(f"{target} holds a copy of {source} now: {len(wanted)} files compared, {len(manifest)} changed, what was there is in {keep}")


def restore_tree(marker: Path) -> None:
    """Put back what `start` replaced, by the marker that it left; nothing to do without one."""
    if not marker.is_file():
        return
    said = _table(marker, f"see which vendored tree holds a copy (git status), restore it by hand, then remove {marker}")
    if not all(isinstance(said.get(name), str) for name in ("target", "keep")):
        raise Failed(USAGE, f"{marker}: names no tree: restore it by hand, then remove the file")
    target, keep = Path(said["target"]), Path(said["keep"])
    by_hand = f"restore it by hand (git -C {target} status), then remove {marker}"
    if not (keep / "manifest.json").is_file():
        raise Failed(USAGE, f"{target} holds a copy that a killed run left, and what was there is not in {keep} any more: {by_hand}")
    pairs = _table(keep / "manifest.json", by_hand)
    if not all(isinstance(pair, list) and len(pair) == 2 and {*map(type, pair)} <= {str, type(None)} for pair in pairs.values()):
        raise Failed(USAGE, f"{keep / 'manifest.json'}: not what a sync writes: {by_hand}")
    manifest: Manifest = {name: tuple(pair) for name, pair in pairs.items()}
    with _told("restore"):
        left = _put_back(target, keep / "files", manifest)
    if left:
        raise Failed(NOT_EQUAL, f"restore failed: {target / left[0]} was edited since ({len(left)} files); saved in {keep}: {by_hand}")
    marker.unlink()
    say(f"{target} is as it was before: {len(manifest)} files restored and compared")


def _table(path: Path, fix: str) -> dict[str, Any]:
    """What a sync wrote; Failed, with what to do, where that is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Failed(USAGE, f"{path}: cannot be read: {error}: {fix}") from error
    if not isinstance(found, dict):
        raise Failed(USAGE, f"{path}: not what a sync writes: {fix}")
    return found


def alone(checkout: Path, ending: contextlib.ExitStack) -> Path:
    """Keep other drivers out, and restore what a killed one left; returns the place of the marker that tells it."""
    try:
        place = git_directory(checkout)
        handle = ending.enter_context((place / LOCK).open("ab"))
    except (Failed, OSError) as error:
        raise Failed(USAGE, f"{checkout}: not a git checkout that can be written: {error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Failed(USAGE, f"another trial drives {checkout}: wait for its end, or use a worktree of your own") from error
    marker = place / MARKER
    if marker.is_file():
        say("an earlier run was killed while the vendored tree held its copy: restoring it")
        restore_tree(marker)
    return marker


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """A file that cannot be read or written ends the phase with its name."""
    try:
        yield
    except OSError as error:
        raise Failed(NOT_EQUAL, f"{what} failed: {error}") from error


def require_clean(target: Path) -> None:
    """Refuse a target whose own changes could be lost, or that is no repository of its own."""
    top = git(target, "rev-parse", "--show-toplevel").rstrip("\n") if target.is_dir() else ""
    if not top or Path(top).resolve() != target.resolve():
        raise Failed(USAGE, f"{target}: not a checkout of its own: git submodule update --init --recursive")
    changed = git(target, "status", "--porcelain", "-z", "--ignore-submodules=all").split("\0")[0]
    if changed:
        raise Failed(USAGE, f"{target} has uncommitted changes ({changed.strip()}), which could be lost: commit or stash them")


def _save(target: Path, keep: Path, manifest: Manifest) -> None:
    for name, (before, _) in manifest.items():
        if any((target / parent).is_symlink() for parent in Path(name).parents):
            raise Failed(NOT_EQUAL, f"sync failed: {target / name} lies behind a link")
        if before is not None:
            saved = keep / "files" / name
            saved.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(target / name, saved, follow_symlinks=False)
            if file_digest(saved) != before:
                raise Failed(NOT_EQUAL, f"sync failed: {saved} is no copy of {target / name}")
    keep.mkdir(parents=True, exist_ok=True)
    _write(keep / "manifest.json", manifest)


def _put_back(target: Path, saved: Path, manifest: Manifest) -> list[str]:
    """Restore each file that is as we left it; returns those that are neither that nor restored."""
    left = []
    for name, (before, after) in _removals_first(manifest, 0):
        place = target / name
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            place.with_name(place.name + NEW).unlink()  # of a run that was killed as it wrote
        now = file_digest(place)
        if now == after != before:
            _remove(target, name) if before is None else _put(saved / name, place, shutil.copy2)
            now = file_digest(place)
        if now != before:
            left.append(name)
    return left


def _removals_first(manifest: Manifest, side: int) -> list[tuple[str, tuple[str | None, str | None]]]:
    return sorted(manifest.items(), key=lambda item: (item[1][side] is not None, item[0]))


def _put(source: Path, place: Path, copy: Callable[..., object]) -> None:
    """Copy a file or link; whoever looks sees the old one or the new one."""
    place.parent.mkdir(parents=True, exist_ok=True)
    new = place.with_name(place.name + NEW)
    new.unlink(missing_ok=True)
    copy(source, new, follow_symlinks=False)
    new.replace(place)


def _write(file: Path, value: object) -> None:
    new = file.with_name(file.name + NEW)
    new.write_text(json.dumps(value, indent=1), encoding="utf-8")
    new.replace(file)


def _remove(target: Path, name: str) -> None:
    (target / name).unlink()
    for parent in list(Path(name).parents)[:-1]:
        with contextlib.suppress(OSError):  # there are other files in it
            (target / parent).rmdir()


NOT_BUILT = 92
"""Exit code: the helpers could not be built."""
DATASETS = Path("megatron", "core", "datasets")
SUFFIX = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX') or '')"
BUILD_SECONDS = 600
COLOUR = re.compile(r"\x1b\[[0-9;]*[mK]")
ERROR = re.compile(r"\berror: |No module named|No space left|No such file|not found|cannot ")


def build_helpers(core: Path, python: Path, log: Path, child: DriverChild) -> Path:
    """The copy of the Megatron-LM at `core`, with helpers that `python` can import. It is the caller's to remove."""
    if not (core / DATASETS / "Makefile").is_file():
        raise Failed(NOT_BUILT, f"helpers failed: {core / DATASETS / 'Makefile'} is missing: git submodule update --init --recursive")
    copy = Path(tempfile.mkdtemp(prefix="seatrial-megatron-")) / core.name
    try:
        shutil.copytree(core, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        built = _make(copy / DATASETS, python, log, child)
    except (OSError, subprocess.TimeoutExpired) as error:
        remove_helpers(copy)
        raise Failed(NOT_BUILT, f"helpers failed: {error}") from error
    except Failed:
        remove_helpers(copy)
        raise
    # Without the name of the file: in a log it stands for helpers that are missing.
    say(f"helpers built for {python} in {built.parent}")
    return copy


def remove_helpers(copy: Path) -> None:
    shutil.rmtree(copy.parent, ignore_errors=True)


def helper_variables(environment: Mapping[str, str], core: Path, copy: Path) -> dict[str, str]:
    """The copy stands in front of the original on the import path, and is where Megatron-Core is expected from."""
    path = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path.insert(path.index(str(core)) if str(core) in path else 0, str(copy))
    expected = environment.get("SEATRIAL_UNDER_TEST", "").split(os.pathsep)
    moved = [f"megatron.core={copy}" if entry == f"megatron.core={core}" else entry for entry in expected]
    return {"PYTHONPATH": os.pathsep.join(path), "SEATRIAL_UNDER_TEST": os.pathsep.join(moved)}


def _make(folder: Path, python: Path, log: Path, child: DriverChild) -> Path:
    suffix = subprocess.run([python, "-c", SUFFIX], capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    if not re.fullmatch(r"\.cpython-\d[\w.-]*\.so", suffix):
        raise Failed(NOT_BUILT, f"helpers failed: {python} names no suffix for extension modules, but {suffix!r}")
    environment = {**os.environ, "PATH": os.pathsep.join((str(python.parent), os.environ.get("PATH", os.defpath)))}
    with log.open("wb") as output:
        words = ["make", "--no-print-directory", "-C", str(folder), f"LIBEXT={suffix}"]
        code = child.run(words, environment, folder, output, BUILD_SECONDS)
    built = folder / f"helpers_cpp{suffix}"
    if code or not built.is_file():
        missing = "" if code else f", and there is no {built.name}"
        raise Failed(NOT_BUILT, f"helpers failed: make ended with {code}{missing}: {_cause(log)}")
    return built


def _cause(log: Path) -> str:
    """The first line that tells of an error, else what was said last; make itself only adds that it failed."""
    text = COLOUR.sub("", log.read_text(encoding="utf-8", errors="replace"))
    lines = [line.strip() for line in text.split("\n") if line.strip() and not line.startswith("make: ***")]
    return next((line for line in lines if ERROR.search(line)), lines[-1] if lines else "it said nothing")


def main(words: list[str]) -> int:
    try:
        with contextlib.ExitStack() as ending:
            alone(Path(words[0]).absolute(), ending)
    except Failed as error:
        say(str(error))
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
