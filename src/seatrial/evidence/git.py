"""Git and Git LFS by their command line and file formats.

- Reading only, but for worktrees beside a checkout: no lock is taken, no index of the user is refreshed.
- Nothing that the checkout configures runs: no filter, hook, pager, diff driver, monitor or helper; nothing is fetched (see
  `seatrial.instruments.safe_git`). Every command has a deadline.
- Git LFS itself never runs on a checkout. LFS pointers are recognised, because a pointer in a work tree is no contents.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from seatrial.core.errors import UserError
from seatrial.core.files import LFS_POINTER, is_lfs_pointer, read_text
from seatrial.core.guarded import endless, is_file, open_file
from seatrial.instruments import safe_git
from seatrial.runtime.command import NoAnswerError, run_command

TIMEOUT_SECONDS = 120.0

# The user's configuration must not change what a diff says or whether it can be applied.
DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-relative", "-O/dev/null", "--submodule=short")

_MOST_FILES = 500_000
_LFS = "lfs"
"""What Git LFS keeps, which git itself never opens; there may be a lot of it."""
_OF_OBJECTS = re.compile("pack|info|[0-9a-f]{2}")
_LONGEST_PATH = 65_536
_LONGEST_NAME = 4096
"""Of a revision; git itself takes no longer ref."""
_MOST_ALTERNATES = 50
_LOOK_SECONDS = 5.0
"""A directory of git that held no pipe is believed for so long."""
_MOST_KNOWN = 1000
_LOOKED: dict[str, float] = {}


class NotARepositoryError(UserError):
    """There is no git directory."""


class MissingObjectsError(UserError):
    """A partial clone lacks what a command needs, and nothing is fetched."""


def git(
    repo: Path,
    *arguments: str,
    index: Path | None = None,
    stdin: bytes = b"",
    ok: Iterable[int] = (0,),
    into: IO[bytes] | None = None,
    seconds: float = TIMEOUT_SECONDS,
    own: bool = False,
) -> bytes:
    """Run git in `repo` and return its standard output (nothing when it goes `into` a file).

    - `index` is a scratch index to use instead of the repository's own; a directory `objects` beside it takes new objects.
    - `own`: a repository that Seatrial made, with a configuration of its own. Filters of the user run, and a partial clone may fetch.
    - Exit codes outside `ok` raise a UserError.
    """
    try:
        done = run_command(command_line(repo, *arguments), seconds, env=environment(repo, index, own=own), stdin=stdin, into=into)
    except (NoAnswerError, OSError, ValueError, subprocess.TimeoutExpired) as error:  # also of the call that asks git for its version
        why = error if isinstance(error, NoAnswerError) else NoAnswerError(str(error), cause=error)
        if why.missing:
            raise UserError(f"{repo}: git is not installed, or not on PATH", "install git, for example: apt-get install git") from error
        if why.late:
            message = f"{repo}: `git {arguments[0]}` did not finish within {seconds:.0f} s"
            raise UserError(message, f"see what holds it: {_at(repo)} {arguments[0]}") from error
        raise UserError(f"{repo}: `git {arguments[0]}` cannot be called: {error}", "correct what names the commit or the file") from error
    if done.code not in ok:
        raise _explain(repo, arguments[0], done.code, text(done.complaint).strip())
    return done.data


def text(data: bytes) -> str:
    """Bytes of git as text; undecodable bytes survive a round trip."""
    return data.decode("utf-8", "surrogateescape")


def printable(path: str) -> str:
    """A path that can be stored as UTF-8: undecodable bytes become visible escapes such as `\\xe9`."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def line(data: bytes) -> str:
    """The one line that a command printed, without its newline."""
    return text(data).removesuffix("\n")


def fields(data: bytes) -> list[str]:
    """The NUL-terminated fields of `-z` output; output that does not end with NUL is torn and an error."""
    if not data:
        return []
    if not data.endswith(b"\0"):
        raise UserError(
            f"git printed a torn list ({len(data)} bytes, no NUL at the end)", "run the command again; update git if it persists"
        )
    return text(data[:-1]).split("\0")


def unparsable(root: Path, command: str, entry: str) -> UserError:
    """The error for output of git that has another form than documented."""
    return UserError(f"{root}: cannot parse what `git {command}` printed: {entry!r}", "update git (2.30 or newer), or report this line")


def joined(paths: Iterable[str]) -> bytes:
    """Paths as `-z` input."""
    return b"".join(path.encode("utf-8", "surrogateescape") + b"\0" for path in paths)


def smudge_drivers(repo: Path) -> frozenset[str]:
    """Those among them that change files on their way into the work tree."""
    pattern = r"^filter\..*\.(smudge|process)$"
    rows = [entry.partition("\n") for entry in fields(git(repo, "config", "-z", "--get-regexp", pattern, ok=(0, 1)))]
    return frozenset(key.split(".", 1)[1].rpartition(".")[0] for key, _, command in rows if command.strip() not in ("", "cat"))


def quoted(path: Path) -> bytes:
    """A line of `objects/info/alternates`; quoted, because a path may hold anything."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return b'"' + escaped.encode("utf-8", "surrogateescape") + b'"\n'


def top_level(path: Path) -> Path:
    """The root of the checkout that `path` lies in."""
    if not path.exists():
        raise UserError(f"{path}: no such directory", "give the path of a git checkout")
    if not path.is_dir():
        raise UserError(f"{path}: not a directory", "give the path of a git checkout")
    if line(git(path, "rev-parse", "--is-inside-work-tree")) != "true":
        raise UserError(f"{path}: a git repository without a work tree", "give a checkout: git worktree add ../checkout")
    top = Path(line(git(path, "rev-parse", "--show-toplevel")))
    git_dir = line(git(path, "rev-parse", "--absolute-git-dir"))
    if not (top / ".git").exists() or line(git(top, "rev-parse", "--absolute-git-dir")) != git_dir:
        message = f"{path}: its git directory {git_dir} claims {top} as its work tree (core.worktree), which is another place"
        raise UserError(message, f"give the top of a checkout, or unset it: {_at(path)} config --unset core.worktree")
    return top


def commit_of(repo: Path, revision: str) -> str | None:
    """The commit that `revision` names here, or None when it is unknown."""
    if "\0" in revision or len(revision) > _LONGEST_NAME:
        return None
    found = _named_by(repo, f"{revision}^{{commit}}")
    return found if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", found) else None


def tree_of(repo: Path, commit: str) -> str | None:
    """The id of the files of a commit, or None when it is unknown here. Different commits may have the same."""
    return _named_by(repo, f"{commit}^{{tree}}") or None


def _named_by(repo: Path, revision: str) -> str:
    return line(git(repo, "rev-parse", "--verify", "--quiet", "--end-of-options", revision, ok=(0, 1, 128)))


def is_ancestor(repo: Path, commit: str, other: str) -> bool:
    """Whether `other` holds everything that `commit` holds."""
    return line(git(repo, "merge-base", commit, other, ok=(0, 1))) == commit


def scratch_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory outside the repository for a scratch index."""
    return tempfile.TemporaryDirectory(prefix="seatrial-git-")


def command_line(repo: Path, *arguments: str) -> list[str]:
    """The words that run git in `repo`; they go with `environment`."""
    return safe_git.command_line(repo, *arguments)


def environment(repo: Path, index: Path | None = None, *, own: bool = False) -> dict[str, str]:
    """The environment in which git runs nothing that the checkout configures; a UserError where that cannot be had."""
    if not own:
        _refuse_pipes(repo)
    try:
        env = safe_git.environment(repo, filters=own, network=own)
    except safe_git.Held as error:
        raise waited_for(Path(error.place), error.named_by) from error
    except safe_git.GitRefused as error:
        if error.code is not None:
            raise _explain(repo, "config --list", error.code, error.said) from error
        raise UserError(f"{repo}: {error.said}", f"update git, and see what holds it: {_at(repo)} config --list") from error
    if index is not None:
        env["GIT_INDEX_FILE"] = str(index)
        if (objects := index.parent / "objects").is_dir():
            env["GIT_OBJECT_DIRECTORY"] = str(objects)
    return env


def filter_drivers(repo: Path) -> frozenset[str]:
    """Names of the filters that are configured for `repo`, and that Seatrial does not run."""
    environment(repo)
    return safe_git.read_configuration(repo).drivers


def waited_for(place: Path, named_by: str = "") -> UserError:
    """The error for what git would open, and never get to the end of; `named_by` is the file of settings that includes it."""
    if not named_by:
        kind = endless(place) or "a named pipe"
        return UserError(f"{place}: {kind}, which git would wait for", f"remove it: rm {shlex.quote(str(place))}")
    kind = "a named pipe" if place.is_fifo() else "no file"
    return UserError(f"{place}: {kind}, which git would wait for", f"delete the line that includes it in {named_by}")


def _refuse_pipes(repo: Path) -> None:
    """Refuse a repository whose own files, which git opens as it needs them, are named pipes or devices: a ref, the index, an object."""
    now = time.monotonic()
    for directory, among_all in _git_directories(repo):
        if now - _LOOKED.get(directory, -math.inf) > _LOOK_SECONDS:
            for place in _pipes_below(Path(directory)) if among_all else _pipes_among_objects(Path(directory)):
                raise waited_for(place)
            if len(_LOOKED) > _MOST_KNOWN:
                _LOOKED.clear()
            _LOOKED[directory] = now


def _git_directories(repo: Path) -> Iterator[tuple[str, bool]]:
    """The directory of git that `repo` belongs to, and the one that it shares with other worktrees; none of a repository without one.
    Then those of objects elsewhere, of which git opens only what is called as in such a directory."""
    place = next((above / ".git" for above in (repo, *repo.absolute().parents) if os.path.lexists(above / ".git")), None)
    if place is None:
        return
    if endless(place):
        raise waited_for(place)
    own = place if place.is_dir() else _named_in(place, "gitdir: ")
    if own is None:
        return
    if endless(own / "commondir"):
        raise waited_for(own / "commondir")
    shared = _named_in(own / "commondir", "") or own
    yield from ((directory, True) for directory in dict.fromkeys((str(own), str(shared))))
    others, seen = [shared / "objects"], set[Path]()
    while others and len(seen) < _MOST_ALTERNATES:
        objects = others.pop()
        listed = objects / "info" / "alternates"
        if is_file(listed) and (size := listed.stat().st_size) > _LONGEST_PATH:  # every git would go through it
            fix = "leave in it only the directories that hold objects of this repository"
            raise UserError(f"{listed}: {size} bytes, which every git would read", fix)
        for name in _lines_of(listed) if objects not in seen else ():
            yield str(objects / name), False
            others.append(objects / name)
        seen.add(objects)


def _named_in(file: Path, start: str) -> Path | None:
    """The path in a file of git that holds one, from where the file lies."""
    said = next(iter(_lines_of(file)), "")
    return file.parent / said.removeprefix(start) if said and said.startswith(start) else None


def _lines_of(file: Path) -> list[str]:
    """The lines of a small file; none of what is no file, or cannot be read."""
    try:
        with open_file(file) as stream:
            said = os.fsdecode(stream.read(_LONGEST_PATH))
    except (OSError, ValueError):
        return []
    return [row for row in said.split("\n") if row and not row.startswith("#") and "\0" not in row]


def _pipes_among_objects(directory: Path) -> Iterator[Path]:
    """The same in a directory that a repository names as one of objects, and that may be any: `/`, or that of somebody else."""
    try:
        places = [place for place in directory.iterdir() if _OF_OBJECTS.fullmatch(place.name)]
    except OSError:
        return
    for place in places:
        yield from [place] if endless(place) else _pipes_below(place)


def _pipes_below(directory: Path) -> Iterator[Path]:
    """Named pipes and devices in a directory of git. The kind of a file comes with its name, so that nothing else is looked at."""
    left, seen, count = [os.fspath(directory)], set[tuple[int, int]](), 0
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    count += 1
                    if entry.is_file(follow_symlinks=False):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        left += [entry.path] if entry.name != _LFS else []
                        continue
                    try:
                        found = entry.stat()
                    except OSError:
                        continue
                    if endless(Path(entry.path)):
                        yield Path(entry.path)
                    elif stat.S_ISDIR(found.st_mode) and (found.st_dev, found.st_ino) not in seen:  # a link to one
                        seen.add((found.st_dev, found.st_ino))
                        left.append(entry.path)
        except OSError:
            continue
        if count > _MOST_FILES:
            return


def _explain(repo: Path, command: str, code: int, stderr: str) -> UserError:
    """A failure of git in the user's words."""
    if "dubious ownership" in stderr:
        fix = re.search(r"git config --global --add safe\.directory .+", stderr)
        command = fix[0] if fix else f"git config --global --add safe.directory {repo}"
        return UserError(f"{repo}: git refuses a checkout that another user owns", command)
    if "promisor remote" in stderr or "lazy fetching disabled" in stderr or ("transport" in stderr and "not allowed" in stderr):
        return MissingObjectsError(
            f"{repo}: a partial clone lacks objects that are needed, and Seatrial fetches nothing from a checkout's remotes: {stderr}",
            f"let git fetch all of them: {_at(repo)} fetch --refetch --no-filter origin",
        )
    if "not a git repository" in stderr:
        return NotARepositoryError(f"{repo}: not a git repository", f"give the path of a checkout, or make it one: {_at(repo)} init")
    if "Permission denied" in stderr or "unable to read" in stderr or "could not open" in stderr:
        return UserError(f"{repo}: git cannot read it: {stderr}", f"make it readable for you: ls -la {repo}")
    if "bad revision 'HEAD'" in stderr or "does not have any commits yet" in stderr:
        return no_commits(repo)
    return UserError(
        f"{repo}: `git {command}` failed with exit code {code}: {stderr or 'no message'}", f"run it by hand: {_at(repo)} {command}"
    )


def no_commits(repo: Path) -> UserError:
    """The error for a repository that has nothing to name its state by."""
    return UserError(f"{repo}: the repository has no commits yet", f"{_at(repo)} add -A && {_at(repo)} commit -m start")


def _at(repo: Path) -> str:
    """The start of a command that a user can copy, whatever the path holds."""
    return f"git -C {shlex.quote(str(repo))}"


DRIVER = "lfs"
"""The filter that `.gitattributes` names for files of Git LFS."""
_OID = re.compile(rb"^oid sha256:([0-9a-f]{64})$", re.MULTILINE)


def pointers(place: Path) -> list[str]:
    """Paths in the work tree at `place` that are pointers and not what they point to."""
    attributes = [place / path for path in fields(git(place, "ls-files", "-z")) if path.rpartition("/")[2] == ".gitattributes"]
    if not any("filter=lfs" in read_text(file) for file in attributes if file.is_file()):
        return []
    held = fields(git(place, "grep", "-l", "-z", "--cached", "-F", LFS_POINTER, ok=(0, 1)))
    return [path for path in held if is_lfs_pointer(place / path)]


def pointer_of(path: Path) -> bytes | None:
    """The pointer that Git LFS would give git for the contents of a file; None for one that goes to git as it is."""
    if is_lfs_pointer(path) or path.stat().st_size == 0:
        return None
    digest, size = digest_of(path)
    return f"{LFS_POINTER}\noid sha256:{digest}\nsize {size}\n".encode()


def smudge(source: Path, place: Path) -> None:
    """Replace pointers in the work tree at `place` by what they point to, where Git LFS keeps it for the checkout `source`."""
    kept = source / line(git(source, "rev-parse", "--git-common-dir")) / "lfs" / "objects"
    if not kept.is_dir():
        return
    for path in pointers(place):
        target = place / path
        if target.is_symlink() or (found := _OID.search(target.read_bytes()[:1024])) is None:
            continue
        name = found[1].decode()
        held = kept / name[:2] / name[2:4] / name
        if held.is_file() and digest_of(held)[0] == name:
            target.unlink()  # never write through a hard link
            shutil.copyfile(held, target)


def digest_of(path: Path) -> tuple[str, int]:
    """SHA-256 and size of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest(), stream.tell()
