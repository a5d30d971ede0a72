"""Git by its command line.

- Reading only, but for worktrees beside a checkout: no lock is taken, no index of the user is refreshed, no hook,
  pager, external diff or text conversion runs.
- Nothing of the caller's environment can point git at another repository (GIT_DIR, GIT_INDEX_FILE and the like are dropped).
- Output is bytes, `-z` wherever paths are listed; `text` keeps undecodable bytes (surrogateescape).
- Every failure is a UserError that names the repository and the command that fixes it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from seatrial.model.errors import UserError

TIMEOUT_SECONDS = 120.0

_SETTINGS = (
    *("core.quotePath=false", "core.fsmonitor=false", "core.hooksPath=/dev/null"),
    *("status.renames=false", "submodule.recurse=false", "diff.noprefix=false"),
)
_PREFIX = ("git", "--no-pager", "--literal-pathspecs", *(part for setting in _SETTINGS for part in ("-c", setting)))

# How git is configured and how it reaches other machines.
_PASSED_ON = ("GIT_CONFIG", "GIT_EXEC_PATH", "GIT_SSH", "GIT_SSL", "GIT_ASKPASS", "GIT_PROXY")

# The user's configuration must not change what a diff says or whether it can be applied.
DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-relative", "-O/dev/null", "--submodule=short")


def git(
    repo: Path,
    *arguments: str,
    index: Path | None = None,
    stdin: bytes = b"",
    ok: Iterable[int] = (0,),
    into: IO[bytes] | None = None,
    seconds: float = TIMEOUT_SECONDS,
) -> bytes:
    """Run git in `repo` and return its standard output (nothing when it goes `into` a file).

    `index` is a scratch index to use instead of the repository's own. Exit codes outside `ok` raise a UserError.
    """
    try:
        done = subprocess.run(
            command_line(repo, *arguments),
            input=stdin,
            stdout=into or subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(index),
            timeout=seconds,
            check=False,
        )
    except FileNotFoundError as error:
        raise UserError(f"{repo}: git is not installed, or not on PATH", "install git, for example: apt-get install git") from error
    except subprocess.TimeoutExpired as error:
        message = f"{repo}: `git {arguments[0]}` did not finish within {seconds:.0f} s"
        raise UserError(message, f"see what holds it: {_at(repo)} {arguments[0]}") from error
    if done.returncode not in ok:
        raise _explain(repo, arguments[0], done.returncode, text(done.stderr).strip())
    return done.stdout or b""


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


def joined(paths: Iterable[str]) -> bytes:
    """Paths as `-z` input."""
    return b"".join(path.encode("utf-8", "surrogateescape") + b"\0" for path in paths)


def top_level(path: Path) -> Path:
    """The root of the checkout that `path` lies in."""
    if not path.exists():
        raise UserError(f"{path}: no such directory", "give the path of a git checkout")
    if not path.is_dir():
        raise UserError(f"{path}: not a directory", "give the path of a git checkout")
    if line(git(path, "rev-parse", "--is-inside-work-tree")) != "true":
        raise UserError(f"{path}: a git repository without a work tree", "give a checkout: git worktree add ../checkout")
    return Path(line(git(path, "rev-parse", "--show-toplevel")))


def commit_of(repo: Path, revision: str) -> str | None:
    """The commit that `revision` names here, or None when it is unknown."""
    data = git(repo, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}", ok=(0, 1, 128))
    found = line(data)
    return found if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", found) else None


def tree_of(repo: Path, commit: str) -> str | None:
    """The id of the files of a commit, or None when it is unknown here. Different commits may have the same."""
    data = git(repo, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{tree}}", ok=(0, 1, 128))
    return line(data) or None


def is_ancestor(repo: Path, commit: str, other: str) -> bool:
    """Whether `other` holds everything that `commit` holds."""
    return line(git(repo, "merge-base", commit, other, ok=(0, 1))) == commit


def scratch_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory outside the repository for a scratch index."""
    return tempfile.TemporaryDirectory(prefix="seatrial-git-")


def command_line(repo: Path, *arguments: str) -> list[str]:
    """The words that run git in `repo` without the settings that would change what it does."""
    return [*_PREFIX, "-C", os.fspath(repo), *arguments]


def environment(index: Path | None = None) -> dict[str, str]:
    """The caller's environment, without what would point git at another repository."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name.startswith(_PASSED_ON)}
    kept.update(GIT_OPTIONAL_LOCKS="0", GIT_TERMINAL_PROMPT="0", LC_ALL="C")
    if index is not None:
        kept["GIT_INDEX_FILE"] = os.fspath(index)
    return kept


def _explain(repo: Path, command: str, code: int, stderr: str) -> UserError:
    """A failure of git in the user's words."""
    if "dubious ownership" in stderr:
        fix = re.search(r"git config --global --add safe\.directory .+", stderr)
        return UserError(
            f"{repo}: git refuses a checkout that another user owns",
            fix.group(0) if fix else "git config --global --add safe.directory " + str(repo),
        )
    if "not a git repository" in stderr:
        return UserError(f"{repo}: not a git repository", f"give the path of a checkout, or make it one: {_at(repo)} init")
    if "Permission denied" in stderr or "unable to read" in stderr or "could not open" in stderr:
        return UserError(f"{repo}: git cannot read it: {stderr}", f"make it readable for you: ls -la {repo}")
    if "bad revision 'HEAD'" in stderr or "does not have any commits yet" in stderr:
        return no_commits(repo)
    return UserError(
        f"{repo}: `git {command}` failed with exit code {code}: {stderr or 'no message'}",
        f"run it by hand: {_at(repo)} {command}",
    )


def no_commits(repo: Path) -> UserError:
    """The error for a repository that has nothing to name its state by."""
    return UserError(
        f"{repo}: the repository has no commits yet",
        f"{_at(repo)} add -A && {_at(repo)} commit -m start",
    )


def _at(repo: Path) -> str:
    """The start of a command that a user can copy, whatever the path holds."""
    return f"git -C {shlex.quote(str(repo))}"
