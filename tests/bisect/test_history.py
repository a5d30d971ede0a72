"""The range is read right from real repositories, and ends that make no range are refused with the fix."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from seatrial.bisect.bisect_records import History, Pin, Repo
from seatrial.bisect.commit_history import exists, introduced, missing_words, read_history, resolve_commit, uncommitted
from seatrial.core.errors import UserError
from tests.bisect.repos import Commit, Entry, Link, build, linear, run_git


def repo_of(path: Path, good: str, bad: str, name: str = "main", place: str = ".") -> Repo:
    return Repo(name=name, path=str(path), good=good, bad=bad, place=place)


def read(path: Path, good: str, bad: str, first_parent: bool = False) -> History:
    return read_history(repo_of(path, good, bad), first_parent)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Five commits in a row; the last undoes the one before it."""
    path = tmp_path_factory.mktemp("line") / "repo"
    return path, build(path, [*linear(4), Commit({"number.txt": "2\n"}, subject="Undo: naïve\tü")])


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """0-1-3-5-6, with 2 off 0 and 4 off 2, merged by 5."""
    path = tmp_path_factory.mktemp("merged") / "repo"
    commits = [
        *(Commit({"a": "0"}), Commit({"a": "1"}), Commit({"b": "2"}, parents=(0,)), Commit({"a": "3"}, parents=(1,))),
        *(Commit({"b": "4"}, parents=(2,)), Commit({"b": "4"}, parents=(3, 4)), Commit({"a": "6"})),
    ]
    return path, build(path, commits)


def shallow(path: Path, place: Path, depth: int) -> Path:
    run_git(place, "clone", "--quiet", f"--depth={depth}", f"file://{path}", "clone")
    return place / "clone"


def test_a_line(line: tuple[Path, list[str]]) -> None:
    path, ids = line
    history = read_history(repo_of(path, ids[1], "main", place="third/library"), False)
    assert [point.commit for point in history.points] == ids[1:]
    assert [point.parents for point in history.points] == [(), (0,), (1,), (2,)]
    assert history.points[-1].subject == "Undo: naïve\tü"
    assert history.points[0].time == 1_700_000_060
    assert history.points[0].pins == (Pin(repo="main", commit=ids[1], place="third/library"),)
    assert history.points[1].contents == history.points[3].contents != history.points[2].contents
    assert history.points[2].contents == run_git(path, "rev-parse", f"{ids[3]}^{{tree}}")


def test_a_merge_brings_in_what_was_not_behind_the_good_end(merged: tuple[Path, list[str]]) -> None:
    path, ids = merged
    history = read(path, ids[1], ids[6])
    by_commit = {point.commit: {history.points[parent].commit for parent in point.parents} for point in history.points}
    # 2 and 4 are not ancestors of 1, though 2 is a child of its parent: the parent of 2 is known to be good.
    wanted: dict[str, set[str]] = {
        ids[1]: set(),
        ids[2]: set(),
        ids[3]: {ids[1]},
        ids[4]: {ids[2]},
        ids[5]: {ids[3], ids[4]},
        ids[6]: {ids[5]},
    }
    assert by_commit == wanted
    assert (history.points[0].commit, history.points[-1].commit) == (ids[1], ids[6])
    assert all(parent < index for index, point in enumerate(history.points) for parent in point.parents)


def test_first_parents(merged: tuple[Path, list[str]]) -> None:
    path, ids = merged
    history = read(path, ids[0], ids[6], first_parent=True)
    assert [point.commit for point in history.points] == [ids[0], ids[1], ids[3], ids[5], ids[6]]
    assert [point.parents for point in history.points] == [(), (0,), (1,), (2,), (3,)]


def test_first_parents_that_pass_beside_the_good_end(merged: tuple[Path, list[str]]) -> None:
    path, ids = merged
    history = read(path, ids[4], ids[6], first_parent=True)
    assert [point.commit for point in history.points] == [ids[4], ids[1], ids[3], ids[5], ids[6]]
    assert [point.parents for point in history.points] == [(), (), (1,), (2,), (3,)]


def test_settings_and_replacements_of_the_user_change_nothing(tmp_path: Path) -> None:
    ids = build(tmp_path / "repo", linear(4))
    before = read(tmp_path / "repo", ids[0], ids[3])
    settings = {"log.showSignature": "true", "log.decorate": "full", "log.showRoot": "false", "log.follow": "true", "color.ui": "always"}
    for name, value in settings.items():
        run_git(tmp_path / "repo", "config", name, value)
    run_git(tmp_path / "repo", "replace", ids[2], ids[1])
    assert read(tmp_path / "repo", ids[0], ids[3]) == before
    assert introduced(tmp_path / "repo", "number.txt", ids[3]) == (ids[0], ())


@pytest.mark.parametrize(
    ("good", "bad", "said", "fix"),
    [
        ("main~1", "main~1", "the same commit", "an older --good"),
        ("main", "main~2", "the ends are swapped", "--good {2} --bad {4}, if"),
        ("main~9", "main", "--good main~9: names no commit", "fetch --all --tags"),
        ("main", "nowhere", "--bad nowhere: names no commit", "log --oneline"),
        ("main", "", "--bad (empty): names no commit", "log --oneline"),
    ],
)
def test_ends_that_make_no_range(line: tuple[Path, list[str]], good: str, bad: str, said: str, fix: str) -> None:
    path, ids = line
    with pytest.raises(UserError) as caught:
        read(path, good, bad)
    assert said in caught.value.message
    assert str(path) in caught.value.message
    assert fix.format(*(each[:12] for each in ids)) in caught.value.fix


def test_ends_on_two_branches(merged: tuple[Path, list[str]]) -> None:
    path, ids = merged
    with pytest.raises(UserError, match=f"not an ancestor .*they part at {ids[0][:12]}") as caught:
        read(path, ids[2], ids[3])
    assert caught.value.fix.startswith(f"--good {ids[0][:12]}")


def test_ends_without_a_common_history(tmp_path: Path) -> None:
    ids = build(tmp_path / "repo", [Commit({"a": "1"}), Commit({"b": "1"}, parents=())])
    with pytest.raises(UserError, match="no common history"):
        read(tmp_path / "repo", ids[0], ids[1])


def test_a_branch_that_only_the_remote_has(line: tuple[Path, list[str]], tmp_path: Path) -> None:
    path, ids = line
    shutil.copytree(path, tmp_path / "repo")
    run_git(tmp_path / "repo", "update-ref", "refs/remotes/origin/feature", ids[2])
    with pytest.raises(UserError) as caught:
        resolve_commit(tmp_path / "repo", "feature", "--bad")
    assert caught.value.fix == "--bad origin/feature, which exists"


def test_not_a_repository(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a git repository"):
        resolve_commit(tmp_path, "HEAD", "--good")


def test_a_shallow_clone_without_the_good_end(line: tuple[Path, list[str]], tmp_path: Path) -> None:
    path, ids = line
    clone = shallow(path, tmp_path, 2)
    with pytest.raises(UserError, match="shallow clone") as caught:
        read(clone, ids[1], "HEAD")
    assert caught.value.fix.endswith("fetch --unshallow")
    # The good end may be where it is cut.
    assert len(read(clone, ids[3], "HEAD").points) == 2


def test_a_shallow_clone_that_is_cut_on_a_side_branch(merged: tuple[Path, list[str]], tmp_path: Path) -> None:
    path, ids = merged
    clone = shallow(path, tmp_path, 3)
    with pytest.raises(UserError, match=f"cut at {ids[4][:12]} between the ends") as caught:
        read(clone, ids[3], "HEAD")
    assert caught.value.fix.endswith("fetch --unshallow")


def test_the_commit_that_added_a_script(tmp_path: Path) -> None:
    body = "".join(f"line {number}\n" for number in range(20))
    commits = [
        *(Commit({"x": "0"}), Commit({"old.sh": body}), Commit({"x": "1"}), Commit({"old.sh": None, "suite/new.sh": body + "more\n"})),
        *(Commit({"again.sh": "1\n"}), Commit({"again.sh": None}), Commit({"again.sh": "two\n"}), Commit({"x": "2"})),
    ]
    ids = build(tmp_path / "repo", commits)
    assert introduced(tmp_path / "repo", "x", "main") == (ids[0], ())
    found, notes = introduced(tmp_path / "repo", "./suite/new.sh", "main")
    assert found == ids[3]
    assert f"since {ids[3][:12]}; it was old.sh from {ids[1][:12]} on" in notes[0]
    found, notes = introduced(tmp_path / "repo", "again.sh", "main")
    assert found == ids[6]
    assert notes == (f"again.sh was added 2 times; the newest is {ids[6][:12]}, the others: {ids[4][:12]}",)


def test_a_script_that_came_by_a_merge(tmp_path: Path) -> None:
    commits = [
        *(Commit({"x": "0"}), Commit({"side.sh": "1\n"}, parents=(0,)), Commit({"x": "1"}, parents=(0,))),
        *(Commit({"side.sh": "changed\n", "evil.sh": "1\n"}, parents=(2, 1)), Commit({"x": "2"})),
    ]
    ids = build(tmp_path / "repo", commits)
    assert introduced(tmp_path / "repo", "side.sh", "main") == (ids[1], ())
    assert introduced(tmp_path / "repo", "evil.sh", "main") == (ids[3], ())


def test_a_script_whose_addition_cannot_be_found(line: tuple[Path, list[str]], tmp_path: Path) -> None:
    path, ids = line
    with pytest.raises(UserError, match=r"there is no gone\.sh at"):
        introduced(path, "gone.sh", ids[4])
    with pytest.raises(UserError, match=r"there is no \.\./number\.txt"):
        introduced(path, "../number.txt", ids[4])
    with pytest.raises(UserError, match=r"the commit that added number\.txt is not in this clone") as caught:
        introduced(shallow(path, tmp_path, 2), "number.txt", "HEAD")
    assert "fetch --unshallow" in caught.value.fix


def test_a_script_that_the_bad_end_added(tmp_path: Path) -> None:
    ids = build(tmp_path / "repo", [Commit({"x": "0"}), Commit({"new.sh": "1\n"})])
    with pytest.raises(UserError, match=r"the bad end \w+ is the commit that added new\.sh"):
        introduced(tmp_path / "repo", "new.sh", ids[1])


def test_words_that_a_commit_must_have(tmp_path: Path) -> None:
    files: dict[str, Entry] = {"tests/test_a.py": "1", "conf/x.yaml": "1", "odd=name": "1", "third": Link("1" * 40), "a b": "1"}
    ids = build(tmp_path / "repo", [Commit({"first": "1"}), Commit(files)])
    command = ("python", "-m", "pytest", "tests/test_a.py::test_x[tests::y]", "--config=conf/x.yaml", "./tests/", "odd=name", "third")
    more = ("{tree}/a b", "{output}/x", "..", ".", "/etc/passwd", "../repo/first", "", "nothing", "config=first")
    found = missing_words(tmp_path / "repo", (*command, *more), ids[1])
    assert found == ("tests/test_a.py", "conf/x.yaml", "tests", "odd=name", "third", "a b", "first")
    assert [path for path in found if exists(tmp_path / "repo", ids[0], path)] == ["first"]


def test_an_unknown_commit_is_not_a_missing_file(line: tuple[Path, list[str]]) -> None:
    path, _ = line
    with pytest.raises(UserError, match=r"commit 1111.*: names no commit"):
        exists(path, "1" * 40, "number.txt")
    with pytest.raises(UserError, match="not a path inside"):
        exists(path, "main", "/number.txt")


def test_uncommitted_changes_are_named(tmp_path: Path) -> None:
    build(tmp_path / "repo", linear(1))
    assert uncommitted(tmp_path / "repo") == ()
    for number in range(6):
        (tmp_path / "repo" / f"z{number}").write_text("1", encoding="utf-8")
    (tmp_path / "repo" / "number.txt").write_text("changed", encoding="utf-8")
    (note,) = uncommitted(tmp_path / "repo")
    assert "not tested" in note
    assert "number.txt" in note
    assert note.endswith("and 2 more")


def test_the_repository_is_only_read(tmp_path: Path) -> None:
    path = tmp_path / "repo"
    ids = build(path, linear(3))
    (path / "number.txt").write_text("changed", encoding="utf-8")

    def files() -> dict[Path, tuple[int, bytes]]:
        return {each: (each.stat().st_mtime_ns, each.read_bytes()) for each in path.rglob("*") if each.is_file()}

    before = files()
    assert len(read(path, ids[0], ids[2]).points) == 3
    assert introduced(path, "number.txt", ids[2])[0] == ids[0]
    assert missing_words(path, ("number.txt",), ids[2]) == ("number.txt",)
    assert uncommitted(path)
    assert files() == before
