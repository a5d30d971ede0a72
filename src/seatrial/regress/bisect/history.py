"""The commits between a good and a bad end, read from the user's repository.

- Reading only; a history of any length costs one `git log`.
- `read_history` refuses what would make the answer wrong: ends that are equal, swapped or on different lines, and a shallow clone
  that cuts the range (a commit at the cut holds the changes of all that are missing behind it).
- Replacement objects (`git replace`) are not followed: the trees of the steps do not know them either.
- `exists` and `missing_words` say which files of the command a commit lacks, so that it is skipped rather than blamed.
"""

from __future__ import annotations

import os
import posixpath
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from seatrial.evidence.git import commit_of, fields, git, is_ancestor, line, printable
from seatrial.evidence.lazy_redactor import LazyRedactor
from seatrial.evidence.worktree import read_status
from seatrial.model.errors import UserError
from seatrial.regress.bisect.record import History, Pin, Point, Repo

_FORMAT = "--format=tformat:%H%n%P%n%T%n%ct%n%s"
_LOG = ("--no-replace-objects", "log", "-z", "--no-show-signature", "--no-color", "--no-decorate", "--no-notes", "--encoding=UTF-8")
_SHOWN = 12
"""Characters of a commit in messages."""
_NAMED = 5
"""Uncommitted files that a note names."""


def resolve(repo: Path, revision: str, what: str) -> str:
    """The commit that `revision` names in `repo`; `what` is the option that it was given by."""
    found = commit_of(repo, revision) if revision else None
    if found is not None:
        return found
    git(repo, "rev-parse", "--git-dir")  # Not a repository at all: this says so.
    message = f"{what} {revision or '(empty)'}: names no commit in {repo}"
    if _cuts(repo):
        raise UserError(f"{message}, which is a shallow clone", _unshallow(repo))
    if revision and commit_of(repo, f"origin/{revision}") is not None:
        raise UserError(message, f"{what} origin/{revision}, which exists")
    raise UserError(message, f"{_at(repo)} fetch --all --tags, or choose one from: {_at(repo)} log --oneline")


def read_history(repo: Repo, first_parent: bool) -> History:
    """The points from the good end to the bad one of `repo`: parents before children, the ends first and last."""
    path = Path(repo.path)
    good, bad = resolve(path, repo.good, "--good"), resolve(path, repo.bad, "--bad")
    _check_ends(path, good, bad)
    line_only = ("--first-parent",) if first_parent else ()
    # `good^@` leaves out what lies behind the good end, and not the good end itself. It is also a tip, because the line of
    # first parents may pass beside it.
    data = git(path, *_LOG, _FORMAT, "--topo-order", "--reverse", *line_only, bad, good, "--not", f"{good}^@", "--")
    rows = [entry.split("\n", 4) for entry in fields(data)]
    rows.sort(key=lambda row: row[0] != good)  # Stable. The good end has no parent among them, so it may come first.
    _check_whole(path, {row[0] for row in rows} - {good})
    index = {row[0]: place for place, row in enumerate(rows)}
    return History(tuple(_point(repo, row, index, first_parent) for row in rows))


def introduced(repo: Path, script: str, bad: str) -> tuple[str, tuple[str, ...]]:
    """The newest commit before `bad` that put the script where it is, and what the user must know about it.

    A rename counts as the start: before it, a command with this path cannot run. The note says where the old name began.
    """
    path = _inside(script)
    if path is None or not exists(repo, bad, path):
        raise UserError(
            f"{repo}: there is no {script} at {bad[:_SHOWN]}", f"give its path from the top of the repository: {_at(repo)} ls-files"
        )
    commit, *older = _additions(repo, path, bad)
    if commit == bad:
        raise UserError(f"{repo}: the bad end {bad[:_SHOWN]} is the commit that added {path}", "give a later commit: --bad REV")
    notes = []
    if older:
        earlier = ", ".join(each[:_SHOWN] for each in older)
        notes.append(f"{path} was added {len(older) + 1} times; the newest is {commit[:_SHOWN]}, the others: {earlier}")
    old = _renamed_from(repo, commit, path)
    if old is not None:
        notes.append(_renaming(repo, path, old, commit))
    return commit, tuple(notes)


def exists(repo: Path, commit: str, path: str) -> bool:
    """Whether `commit` has a file, directory or submodule at `path`."""
    inside = _inside(path)
    if inside is None:
        raise UserError(f"{path}: not a path inside the repository", "give a path from the top of the repository")
    data = git(repo, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}:{inside}", ok=(0, 1, 128))
    if not data:
        resolve(repo, commit, "commit")  # An unknown commit is not a missing file: every point would be skipped in silence.
    return bool(data)


def missing_words(repo: Path, command: Sequence[str], bad: str) -> tuple[str, ...]:
    """The tracked paths that the words of `command` name at `bad`; a commit that lacks one of them cannot run the command."""
    found: dict[str, None] = {}
    for word in command:
        for part in (word, word.partition("=")[2]):
            path = inside_tree(part)
            if path is not None and exists(repo, bad, path):
                found[path] = None
    return tuple(found)


def told_apart(history: History) -> History:
    """The history for trees that a patch changes by what comes before a commit: the same files no longer mean the same tree."""
    return History(tuple(point.model_copy(update={"contents": f"{point.contents}@{point.commit}"}) for point in history.points))


def inside_tree(word: str) -> str | None:
    """The path that a word of the command may name in the tree."""
    return _inside(word.split("::")[0].removeprefix("{tree}/"))


def uncommitted(repo: Path) -> tuple[str, ...]:
    """A note when the checkout has changes that no commit holds: they are not tested."""
    redactor = LazyRedactor(os.environ)
    dirty = [redactor.tokens(printable(path)) for path in read_status(repo).dirty]
    if not dirty:
        return ()
    more = f" and {len(dirty) - _NAMED} more" if len(dirty) > _NAMED else ""
    return (f"{repo}: uncommitted changes are not tested, only commits are: {', '.join(dirty[:_NAMED])}{more}",)


def _point(repo: Repo, row: list[str], index: dict[str, int], first_parent: bool) -> Point:
    commit, listed, tree, time, subject = row
    parents = listed.split()[: 1 if first_parent else None]
    return Point(
        repo=repo.name,
        commit=commit,
        subject=printable(subject),
        time=int(time),
        parents=tuple(index[parent] for parent in dict.fromkeys(parents) if parent in index),
        outside=tuple(parent for parent in dict.fromkeys(parents) if parent not in index) if index[commit] else (),
        pins=(Pin(repo=repo.name, commit=commit, place=repo.place),),
        contents=tree,
    )


def _check_ends(repo: Path, good: str, bad: str) -> None:
    """Refuse ends between which there is nothing to search."""
    if good == bad:
        raise UserError(f"{repo}: --good and --bad name the same commit {good[:_SHOWN]}", "give an older --good or a newer --bad")
    if is_ancestor(repo, good, bad):
        return
    if is_ancestor(repo, bad, good):
        message = f"{repo}: the ends are swapped: the bad end {bad[:_SHOWN]} comes before the good end {good[:_SHOWN]}"
        raise UserError(message, f"--good {bad[:_SHOWN]} --bad {good[:_SHOWN]}, if the older one is the good one")
    message = f"{repo}: the good end {good[:_SHOWN]} is not an ancestor of the bad end {bad[:_SHOWN]}"
    base = line(git(repo, "merge-base", good, bad, ok=(0, 1))).split("\n")[0]
    if base:
        raise UserError(f"{message}; they part at {base[:_SHOWN]}", f"--good {base[:_SHOWN]}, if that commit is good")
    if _cuts(repo):
        raise UserError(f"{message} in this shallow clone", _unshallow(repo))
    raise UserError(f"{message}; they have no common history", "give two ends of one line of history")


def _check_whole(repo: Path, inside: set[str]) -> None:
    cut = sorted(inside & _cuts(repo))
    if cut:
        message = f"{repo}: a shallow clone, cut at {cut[0][:_SHOWN]} between the ends: the commits behind it are missing"
        raise UserError(message, _unshallow(repo))


def _cuts(repo: Path) -> set[str]:
    """The commits at which a shallow clone is cut."""
    if line(git(repo, "rev-parse", "--is-shallow-repository")) != "true":
        return set()
    place = repo / line(git(repo, "rev-parse", "--git-path", "shallow"))
    return set(place.read_text(encoding="ascii").split())


def _additions(repo: Path, path: str, tip: str) -> list[str]:
    """The commits up to `tip` that added `path`, newest first; never empty for a path that `tip` has."""
    options = (
        "--root",
        "-m",
        "--diff-filter=A",
        "--no-renames",
        "--no-follow",
        "--name-only",
        "--date-order",
        "--format=tformat:%x01%H %P",
    )
    data = git(repo, *_LOG, *options, tip, "--", path)
    shown = [commit.split() for commit in re.findall(rb"\x01([0-9a-f ]+)", data)]
    names = [commit[0].decode("ascii") for commit in shown]
    # A merge is shown once for each parent that lacks the file, and added it only when all of them do.
    times = Counter(names)
    found = [name for name, (_, *parents) in dict(zip(names, shown, strict=True)).items() if times[name] >= len(parents)]
    # At a cut everything seems to be added.
    if not found or found[0] in _cuts(repo):
        raise UserError(f"{repo}: the commit that added {printable(path)} is not in this clone", f"{_unshallow(repo)}, or give --good REV")
    return found


def _renamed_from(repo: Path, commit: str, path: str) -> str | None:
    """The old name, when `commit` made `path` by a rename."""
    options = ("-r", "-z", "--root", "--no-commit-id", "--name-status", "--diff-filter=R", "--find-renames")
    words = fields(git(repo, "--no-replace-objects", "diff-tree", *options, commit))
    renames = zip(words[0::3], words[1::3], words[2::3], strict=True)
    return next((old for _, old, new in renames if new == path), None)


def _renaming(repo: Path, path: str, old: str, commit: str) -> str:
    """The note about a script that had another name before."""
    name: str | None = old
    oldest, start = old, commit
    while name is not None:
        oldest, start = name, _additions(repo, name, f"{start}^")[0]
        name = _renamed_from(repo, start, name)
    return (
        f"{path} has its name since {commit[:_SHOWN]}; it was {printable(oldest)} from {start[:_SHOWN]} on. The search starts at the "
        f"rename, where the command can run; to go back further give --good {start[:_SHOWN]} and a command that runs there"
    )


def _inside(path: str) -> str | None:
    """The path as git names it, or None when it cannot be one inside the repository."""
    tidy = posixpath.normpath(path) if path else "."
    outside = tidy in (".", "..") or tidy.startswith(("/", "../")) or "\0" in tidy
    return None if outside else tidy


def _unshallow(repo: Path) -> str:
    return f"{_at(repo)} fetch --unshallow"


def _at(repo: Path) -> str:
    return f"git -C {shlex.quote(str(repo))}"
