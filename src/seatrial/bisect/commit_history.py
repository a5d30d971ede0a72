"""The commits to search: read from one repository, aligned over several, cached beside the plan.

- `read_history` asks git for the commits between a good and a bad end.
- `aligned` puts several repositories in order of commit time; each keeps its own order, and each point pins all of them.
- `load_or_query` stores git's answer in the bisect directory, so a report needs no repository.
"""

from __future__ import annotations

import heapq
import os
import posixpath
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from pydantic import model_validator

from seatrial.bisect.bisect_records import VERSION, History, Pin, Point, Repo
from seatrial.core.errors import UserError
from seatrial.core.files import read_model, write_text
from seatrial.core.records import Record, replace
from seatrial.evidence.git import commit_of, fields, git, is_ancestor, line, printable
from seatrial.evidence.lazy_redactor import LazyRedactor
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import read_status

_FORMAT = "--format=tformat:%H%n%P%n%T%n%ct%n%s"
_LOG = ("--no-replace-objects", "log", "-z", "--no-show-signature", "--no-color", "--no-decorate", "--no-notes", "--encoding=UTF-8")
_SHOWN = 12
"""Characters of a commit in messages."""
_NAMED = 5
"""Uncommitted files that a note names."""


def resolve_commit(repo: Path, revision: str, what: str) -> str:
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
    good, bad = resolve_commit(path, repo.good, "--good"), resolve_commit(path, repo.bad, "--bad")
    _check_ends(path, good, bad)
    line_only = ("--first-parent",) if first_parent else ()
    # `good^@` leaves out what lies behind the good end, and not the good end itself. It is also a tip, because the line of
    # first parents may pass beside it.
    data = git(path, *_LOG, _FORMAT, "--topo-order", "--reverse", *line_only, bad, good, "--not", f"{good}^@", "--")
    rows = [entry.split("\n", 4) for entry in fields(data)]
    rows.sort(key=lambda row: row[0] != good)  # Stable. The good end has no parent among them, so it may come first.
    cut = sorted(({row[0] for row in rows} - {good}) & _cuts(path))
    if cut:
        message = f"{path}: a shallow clone, cut at {cut[0][:_SHOWN]} between the ends: the commits behind it are missing"
        raise UserError(message, _unshallow(path))
    index = {row[0]: place for place, row in enumerate(rows)}
    return History(tuple(_point(repo, row, index, first_parent) for row in rows))


def introduced(repo: Path, script: str, bad: str) -> tuple[str, tuple[str, ...]]:
    """The newest commit before `bad` that put the script where it is, and what the user must know about it. A rename counts as the start:
    before it, a command with this path cannot run. The note says where the old name began."""
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
    inside = _inside(path)
    if inside is None:
        raise UserError(f"{path}: not a path inside the repository", "give a path from the top of the repository")
    data = git(repo, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}:{inside}", ok=(0, 1, 128))
    if not data:
        resolve_commit(repo, commit, "commit")  # An unknown commit is not a missing file: every point would be skipped in silence.
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


def contents_by_commit(history: History) -> History:
    """The history for trees that a patch changes by what comes before a commit: the same files no longer mean the same tree."""
    return History(tuple(replace(point, contents=f"{point.contents}@{point.commit}") for point in history.points))


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


def _cuts(repo: Path) -> set[str]:
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
    options = ("-r", "-z", "--root", "--no-commit-id", "--name-status", "--diff-filter=R", "--find-renames")
    words = fields(git(repo, "--no-replace-objects", "diff-tree", *options, commit))
    renames = zip(words[0::3], words[1::3], words[2::3], strict=True)
    return next((old for _, old, new in renames if new == path), None)


def _renaming(repo: Path, path: str, old: str, commit: str) -> str:
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


def aligned(histories: Sequence[tuple[Repo, History]]) -> History:
    """One line of points over all repositories. The histories must be read with `first_parent`."""
    names = Counter(repo.name for repo, _ in histories)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise UserError(f"two repositories have the name {twice[0]}", "give each a name of its own")
    for repo, history in histories:
        # Side branches would be laid one after the other, as states that never were.
        for place, point in enumerate(history.points):
            # The line may pass beside the good end; then its first commit has no parent here.
            allowed = ((), (0,)) if place == 1 else ((),) if place == 0 else ((place - 1,),)
            if point.parents not in allowed:
                raise ValueError(f"{repo.name}: the history is not a line at {point.commit}: read it with first_parent")
    standing = [history.points[0] for _, history in histories]
    points = [_joined(standing, 0, ())]
    for _, which, place in heapq.merge(*(_moves(which, history) for which, (_, history) in enumerate(histories))):
        standing[which] = histories[which][1].points[place]
        points.append(_joined(standing, which, (len(points) - 1,)))
    return History(tuple(points))


def _moves(which: int, history: History) -> Iterator[tuple[int, int, int]]:
    """Time, repository and index of each commit after the good end; times never go back."""
    time = history.points[0].time
    for place, point in enumerate(history.points[1:], start=1):
        time = max(time, point.time)
        yield time, which, place


def _joined(standing: Sequence[Point], moved: int, parents: tuple[int, ...]) -> Point:
    return replace(
        standing[moved],
        parents=parents,
        pins=tuple(pin for point in standing for pin in point.pins),
        contents="+".join(point.contents for point in standing),
    )


HISTORY = "history.json"


class CachedHistory(Record):
    """One answer of git."""

    version: int = VERSION
    key: str = ""
    points: tuple[Point, ...] = ()
    moves: tuple[tuple[str, str | None, str], ...] = ()
    """Path, commit before (None: it is new) and commit after."""
    why: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Parents stand before their children, each point stands once."""
        for index, point in enumerate(self.points):
            if not all(0 <= parent < index for parent in point.parents):
                raise ValueError(f"points.{index}: a parent does not stand before it")
        if len({point.id for point in self.points}) < len(self.points):
            raise ValueError("points: one stands twice")
        return self


def cleared_history(history: History, redactor: Redactor) -> History:
    return History(tuple(replace(point, subject=redactor.text(point.subject)) for point in history.points))


def load_or_query(file: Path, key: str, ask: Callable[[], CachedHistory], redactor: Redactor, *, frozen: bool) -> CachedHistory:
    """What git says, kept in `file`; a frozen session takes it from there, and writes nothing."""
    if frozen and os.path.lexists(file):
        kept = read_model(file, CachedHistory)
        if kept.key == key:
            return kept
    said = replace(ask(), key=key)
    if not frozen:
        points = cleared_history(History(said.points), redactor).points
        # On one line: a history may have tens of thousands of points.
        write_text(file, replace(said, points=points, why=redactor.text(said.why)).model_dump_json() + "\n")
    return said
