"""Histories that would have an innocent commit blamed."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.bisect.bisect_records import COPIED, BisectRun, History, Mark, SkipKind
from seatrial.bisect.bisect_runner import current_answer
from seatrial.bisect.git_stores import machine_or_tree
from seatrial.bisect.posterior import SearchSettings, answer, assess, bits, known_by_contents
from seatrial.core.errors import UserError
from tests.bisect.bisects import history, runs
from tests.bisect.calls import Place
from tests.bisect.repos import Commit
from tests.bisect.untouched import untouched

EXACT = SearchSettings(repeat=1, confidence=0.99, metric=None)
NO_BAD = ("sh", "-c", "! test -e bad")


def with_contents(*contents: str) -> History:
    """Points in a row with these contents."""
    past = history(len(contents))
    return History(tuple(point.model_copy(update={"contents": text}) for point, text in zip(past.points, contents, strict=True)))


def known(past: History, *marks: tuple[int, Mark]) -> tuple[BisectRun, ...]:
    """Rows, and what follows from them for equal contents."""
    rows = runs(past, *marks)
    return (*rows, *known_by_contents(past, rows))


def test_what_is_landed_again_is_to_blame_the_second_time() -> None:
    past = with_contents("a", "b", "broken", "b", "c", "broken", "d")
    rows = known(past, (0, Mark.GOOD), (6, Mark.BAD), (4, Mark.GOOD), (5, Mark.BAD))
    found = answer(assess(past, rows, EXACT))
    assert (found.state, [suspect.commit for suspect in found.suspects]) == ("found", [past.points[5].commit])


def test_landed_reverted_and_landed_again_with_nothing_between() -> None:
    past = with_contents("a", "broken", "a", "broken")
    found = answer(assess(past, known(past, (0, Mark.GOOD), (3, Mark.BAD)), EXACT))
    assert (found.state, [suspect.commit for suspect in found.suspects]) == ("found", [past.points[3].commit])


def test_a_commit_that_changes_nothing_is_no_suspect() -> None:
    past = with_contents("a", "a", "b", "b", "b", "c")
    state = assess(past, known(past, (0, Mark.GOOD), (5, Mark.BAD)), EXACT)
    assert bits(state.suspects) == [2, 5]


def test_a_merge_that_takes_one_side_whole_is_no_suspect() -> None:
    past = with_contents("a", "b", "c", "c", "d")
    sides = {2: (0,), 3: (1, 2)}
    points = (point.model_copy(update={"parents": sides.get(index, point.parents)}) for index, point in enumerate(past.points))
    forked = History(tuple(points))
    state = assess(forked, known(forked, (0, Mark.GOOD), (4, Mark.BAD)), EXACT)
    assert bits(state.suspects) == [1, 2, 4]


@pytest.mark.parametrize("marks", [(Mark.BAD, Mark.BAD), (Mark.GOOD, Mark.GOOD), (Mark.BAD, Mark.GOOD)])
def test_ends_that_do_not_hold_leave_no_suspects(marks: tuple[Mark, Mark]) -> None:
    past = history(4)
    found = current_answer(past, runs(past, (0, marks[0]), (3, marks[1])), EXACT)
    assert (found.state, found.suspects, found.notes) == ("open", (), ())


def test_a_full_disk_is_the_machines_fault() -> None:
    """All that `git reset` says then; the reason is not among it."""
    said = "tree: `git reset` failed with exit code 128: error: unable to write file model.bin"
    assert machine_or_tree(UserError(said, "")).kind is SkipKind.ENVIRONMENT
    assert machine_or_tree(UserError("tree: `git reset` failed: invalid path", "")).kind is SkipKind.TREE


@pytest.mark.slow
def test_copies_are_known_as_such_and_do_not_count_as_runs(tmp_path: Path) -> None:
    empty = [Commit(subject=f"nothing {index}") for index in range(6)]
    place = Place(tmp_path, [Commit({"a": "1"}), Commit({"b": "1"}), *empty, Commit({"bad": "1"}), Commit({"c": "1"})])
    done = place.bisect("--repeat", "3", "--env", "none", command=NO_BAD)
    copies = [row for row in done.rows if row.reason.startswith("the same files as")]
    assert done.found(8)
    assert copies
    assert all(COPIED in row.notes and not row.directory for row in copies)


@pytest.mark.slow
def test_a_branch_that_was_bad_before_it_forked_is_not_blamed(tmp_path: Path) -> None:
    """The good end has a mend that the branch lacks."""
    commits = [
        Commit({"bad": "1"}),
        Commit({"bad": None, "mended": "1"}),
        Commit({"side": "1"}, parents=(0,)),
        Commit({"side": "2"}),
        Commit({"side": "2"}, parents=(1, 3)),
        Commit({"bad": "1"}, subject="broken again"),
        Commit({"late": "1"}),
    ]
    place = Place(tmp_path, commits)
    place.ids[0], fork = place.ids[1], place.ids[0]
    with untouched(place.repo):
        done = place.bisect("--env", "none", command=NO_BAD)
        again = place.go_on("report")
        main_line = place.bisect("--env", "none", "--first-parent", command=NO_BAD, out="main")
    assert (done.code, done.suspects) == (99, [])
    assert f"so is {fork[:12]} before it" in done.summary
    assert "--first-parent" in done.summary
    assert (again.code, again.suspects) == (99, [])
    assert main_line.found(5)


@pytest.mark.slow
def test_a_branch_that_forked_early_and_broke_later_is_to_blame(tmp_path: Path) -> None:
    commits = [
        Commit({"a": "1"}),
        Commit({"b": "1"}),
        Commit({"bad": "1"}, parents=(0,)),
        Commit({"side": "2"}),
        Commit({"side": "2", "bad": "1"}, parents=(1, 3)),
    ]
    place = Place(tmp_path, commits)
    place.ids[0] = place.ids[1]
    assert place.bisect("--env", "none", command=NO_BAD).found(2)


@pytest.mark.slow
def test_ends_with_the_same_files_are_refused_before_anything_runs(tmp_path: Path) -> None:
    place = Place(tmp_path, [Commit({"a": "1"}), Commit({"a": "2"}), Commit({"a": "1"})])
    done = place.bisect("--env", "none", command=NO_BAD)
    assert done.code == 2
    assert "have the same files" in done.err
    assert not (done.directory / "steps").exists()
