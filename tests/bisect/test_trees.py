"""Trees: every part at its commit, nothing of it in the user's repositories, and nothing left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from seatrial.bisect.bisect_records import Pin, SkipKind
from seatrial.bisect.git_stores import Stores, TreeError
from seatrial.bisect.worktrees import make_tree, moved_submodules, remove_tree
from seatrial.core.errors import UserError
from seatrial.core.files import LFS_POINTER as POINTER
from seatrial.evidence.git import commit_of, git
from tests.bisect.repos import Commit, Entry, Link, Symlink, build, gitmodules, linear, populate, run_git, submodule
from tests.bisect.untouched import quiet, repo_of, untouched


class World:
    """`user` has the submodule `mid`, which has the submodule `leaf`."""

    def __init__(self, root: Path, more: dict[str, Entry] | None = None, populated: bool = True) -> None:
        self.leaf, self.mid, self.user, self.tree = (root / name for name in ("leaf", "mid", "user", "step/tree"))
        self.stores_root = root / "stores"
        self.leaves = build(self.leaf, linear(3))
        self.mids = build(self.mid, [Commit(submodule("in/leaf", self.leaf, self.leaves[0])), Commit({"in/leaf": Link(self.leaves[1])})])
        first = {"a.txt": "0\n", **(more or {}), **submodule("sub/mid", self.mid, self.mids[0])}
        self.ids = build(self.user, [Commit(first), Commit({"a.txt": "1\n", "sub/mid": Link(self.mids[1])}), Commit({"a.txt": "2\n"})])
        if populated:
            populate(self.user)

    def stores(self) -> Stores:
        return Stores(self.stores_root, [repo_of(self.user, self.ids), repo_of(self.leaf, self.leaves, "sub/mid/in/leaf")], quiet)

    def pin(self, index: int) -> Pin:
        return Pin(repo="user", commit=self.ids[index])

    def entries(self) -> list[Path]:
        return list(self.stores_root.glob("*.git/worktrees/*"))


def number(tree: Path) -> str:
    return (tree / "sub/mid/in/leaf/number.txt").read_text(encoding="utf-8").strip()


def test_every_part_is_at_its_commit(tmp_path: Path) -> None:
    world = World(tmp_path)
    with untouched(world.user, world.mid, world.leaf):
        stores = world.stores()
        for index, expected in ((0, "0"), (1, "1"), (2, "1")):
            assert make_tree(stores, [world.pin(index)], world.tree) == ()
            assert (world.tree / "a.txt").read_text(encoding="utf-8") == f"{index}\n"
            assert number(world.tree) == expected
            assert git(world.tree, "status", "--porcelain") == b""
        assert commit_of(world.tree / "sub/mid", "HEAD") == world.mids[1]
        remove_tree(stores, world.tree)
        assert not world.tree.exists()
        assert world.entries() == []
        remove_tree(stores, world.tree)  # nothing to do


@pytest.mark.slow
def test_submodules_that_the_user_never_populated(tmp_path: Path) -> None:
    world = World(tmp_path, populated=False)
    with untouched(world.user, world.mid, world.leaf):
        make_tree(world.stores(), [world.pin(1)], world.tree)
        assert number(world.tree) == "1"


@pytest.mark.slow
def test_pins_replace_what_is_recorded(tmp_path: Path) -> None:
    world = World(tmp_path)
    stores = world.stores()
    overlay = Pin(repo="leaf", commit=world.leaves[2], place="sub/mid/in/leaf")
    make_tree(stores, [world.pin(0), overlay], world.tree)
    assert number(world.tree) == "2"
    # A submodule by its path, as it was before a commit moved it.
    make_tree(stores, [world.pin(2), Pin(repo="sub/mid", commit=world.mids[0], place="sub/mid")], world.tree)
    assert number(world.tree) == "0"
    with pytest.raises(TreeError, match="has no submodule sub/none"):
        make_tree(stores, [world.pin(2), Pin(repo="sub/none", commit=world.mids[0], place="sub/none")], world.tree)


@pytest.mark.slow
def test_repositories_beside(tmp_path: Path) -> None:
    world = World(tmp_path)
    stores = world.stores()
    for place in ("new/place", "../beside/leaf"):
        make_tree(stores, [world.pin(0), Pin(repo="leaf", commit=world.leaves[2], place=place)], world.tree)
        assert (world.tree / place / "number.txt").read_text(encoding="utf-8") == "2\n"
    remove_tree(stores, world.tree)
    assert list(world.tree.parent.iterdir()) == []
    assert world.entries() == []


@pytest.mark.slow
def test_places_that_are_taken_or_outside(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    world = World(tmp_path, {"out": Symlink(str(tmp_path / "outside")), "full/x.txt": "x\n"})
    stores = world.stores()
    for place, message in (
        ("full", "has files of its own"),
        ("a.txt", "files of its own"),
        ("out/leaf", "out of the tree"),
        ("out", "out of"),
    ):
        with pytest.raises(TreeError, match=message):
            make_tree(stores, [world.pin(0), Pin(repo="leaf", commit=world.leaves[2], place=place)], world.tree)
        assert not world.tree.exists()
    for place in ("/etc", "../leaf", "a/../../b", "../beside", "x/.git"):
        with pytest.raises(UserError, match="no place in the tree"):
            make_tree(stores, [world.pin(0), Pin(repo="leaf", commit=world.leaves[2], place=place)], world.tree)
    assert list((tmp_path / "outside").iterdir()) == []
    assert world.entries() == []


@pytest.mark.slow
def test_a_lost_submodule_commit_leaves_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    run_git(world.user, "update-index", "--cacheinfo", f"160000,{'1' * 40},sub/mid")
    run_git(world.user, "commit", "--quiet", "--message=lost")
    lost = run_git(world.user, "rev-parse", "HEAD")
    with untouched(world.user), pytest.raises(TreeError, match="does not have 1111") as caught:
        make_tree(world.stores(), [Pin(repo="user", commit=lost)], world.tree)
    assert caught.value.kind is SkipKind.TREE
    assert f"git -C {world.user}/sub/mid fetch origin {'1' * 40}" in caught.value.fix
    assert not world.tree.exists()
    assert world.entries() == []


@pytest.mark.slow
def test_missing_objects_are_not_a_tree(tmp_path: Path) -> None:
    ids = build(tmp_path / "user", linear(2))
    stores = Stores(tmp_path / "stores", [repo_of(tmp_path / "user", ids)], quiet)
    with pytest.raises(TreeError) as caught:
        make_tree(stores, [Pin(repo="user", commit="1" * 40)], tmp_path / "tree")
    assert caught.value.kind is SkipKind.TREE
    blob = run_git(tmp_path / "user", "rev-parse", f"{ids[0]}:number.txt")
    (tmp_path / "user/.git/objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(TreeError):
        make_tree(stores, [Pin(repo="user", commit=ids[0])], tmp_path / "tree")
    assert not (tmp_path / "tree").exists()
    make_tree(stores, [Pin(repo="user", commit=ids[1])], tmp_path / "tree")


def test_a_submodule_that_is_left_out(tmp_path: Path) -> None:
    modules = gitmodules({"sub": "/nowhere"}) + "\tupdate = none\n"
    ids = build(tmp_path / "user", [Commit({".gitmodules": modules, "sub": Link("1" * 40)})])
    stores = Stores(tmp_path / "stores", [repo_of(tmp_path / "user", ids)], quiet)
    assert "sub is left empty" in make_tree(stores, [Pin(repo="user", commit=ids[0])], tmp_path / "tree")[0]
    assert list((tmp_path / "tree/sub").iterdir()) == []


@pytest.mark.slow
def test_pointers_are_refused_unless_the_user_has_them_too(tmp_path: Path) -> None:
    files: dict[str, Entry] = {"data/.gitattributes": "*.bin filter=lfs\n", "data/x.bin": f"{POINTER}\noid sha256:0\n"}
    ids = build(tmp_path / "user", [Commit(files)])
    stores = Stores(tmp_path / "stores", [repo_of(tmp_path / "user", ids)], quiet)
    make_tree(stores, [Pin(repo="user", commit=ids[0])], tmp_path / "tree")
    (tmp_path / "user/data/x.bin").write_bytes(b"contents")
    with pytest.raises(TreeError, match=r"1 files of Git LFS are pointers .* such as data/x\.bin"):
        make_tree(stores, [Pin(repo="user", commit=ids[0])], tmp_path / "tree")


def test_moved_submodules(tmp_path: Path) -> None:
    links = [Commit({"a": Link("1" * 40), "f": "f"}), Commit({"a": Link("2" * 40), "b": Link("3" * 40), "f": "g"}), Commit({"b": None})]
    ids = build(tmp_path / "user", links, checkout=False)
    moved = [moved_submodules(tmp_path / "user", commit) for commit in ids]
    assert moved == [(), (("a", "1" * 40, "2" * 40), ("b", None, "3" * 40)), ()]


@pytest.mark.slow
def test_several_trees_at_once(tmp_path: Path) -> None:
    world = World(tmp_path, populated=False)
    stores = world.stores()

    def make(index: int) -> str:
        tree = tmp_path / f"step{index}" / "tree"
        make_tree(stores, [world.pin(index % 3)], tree)
        found = number(tree)
        remove_tree(stores, tree)
        return found

    with untouched(world.user, world.mid, world.leaf), ThreadPoolExecutor(6) as pool:
        assert list(pool.map(make, range(24))) == ["0", "1", "1"] * 8
    assert world.entries() == []


LOOP = """
import sys
from pathlib import Path
from seatrial.bisect.bisect_records import Pin, Repo
from seatrial.bisect.git_stores import Stores
from seatrial.bisect.worktrees import make_tree
root, user, *ids = sys.argv[1:]
stores = Stores(Path(root, "stores"), [Repo(name="user", path=user, good=ids[0], bad=ids[-1])], print)
print("ready", flush=True)
while True:
    for commit in ids:
        make_tree(stores, [Pin(repo="user", commit=commit)], Path(root, "step/tree"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(6))
def test_killed_at_any_moment(tmp_path: Path, moment: int) -> None:
    world = World(tmp_path, populated=moment % 2 == 0)
    with untouched(world.user, world.mid, world.leaf):
        command = [sys.executable, "-c", LOOP, str(tmp_path), str(world.user), *world.ids]
        with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.013 * moment)
            os.killpg(process.pid, signal.SIGKILL)
        stores = world.stores()
        make_tree(stores, [world.pin(1)], world.tree)
        assert number(world.tree) == "1"
        assert git(world.tree, "status", "--porcelain") == b""
        remove_tree(stores, world.tree)
    assert world.entries() == []
    assert not world.tree.exists()


def test_a_store_that_a_kill_left_half_made(tmp_path: Path) -> None:
    world = World(tmp_path)
    store = world.stores_root / "user.git"
    store.mkdir(parents=True)
    for name in ("config.lock", "HEAD.lock"):
        (store / name).write_text("")
    make_tree(world.stores(), [world.pin(1)], world.tree)
    assert number(world.tree) == "1"


@pytest.mark.slow
def test_a_locked_and_a_half_removed_tree(tmp_path: Path) -> None:
    world = World(tmp_path)
    stores = world.stores()
    make_tree(stores, [world.pin(0)], world.tree)
    for entry in world.entries():
        (entry / "locked").write_text("initializing", encoding="utf-8")
    (world.tree / ".git").unlink()
    (world.stores_root / "user.git/worktrees/torn").mkdir()
    make_tree(stores, [world.pin(1)], world.tree)
    assert number(world.tree) == "1"
    remove_tree(stores, world.tree)
    assert world.entries() == []
