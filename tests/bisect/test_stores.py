"""Stores: what they borrow, what they fetch, and that the user's repositories are only read."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.bisect import git_stores as fetching
from seatrial.bisect.bisect_records import SkipKind
from seatrial.bisect.git_stores import FetchFailed, Stores, TreeError, declared, gitlink, resolve_url
from seatrial.evidence.git import commit_of, git, line
from tests.bisect.repos import Commit, Link, build, gitmodules, linear, populate, run_git, submodule
from tests.bisect.untouched import quiet, repo_of, untouched


class World:
    """A library, and a repository that has it as a submodule."""

    def __init__(self, root: Path, populated: bool = True) -> None:
        self.library, self.user, self.root = root / "library", root / "user", root / "stores"
        self.inner = build(self.library, linear(4))
        first = {"a.txt": "0\n", **submodule("third/library", self.library, self.inner[0])}
        self.ids = build(self.user, [Commit(first, tag="v1"), Commit({"third/library": Link(self.inner[1])})])
        if populated:
            populate(self.user)

    def stores(self) -> Stores:
        return Stores(self.root, [repo_of(self.user, self.ids)], quiet)


def history(git_dir: Path, commit: str) -> list[str]:
    return line(git(git_dir, "rev-list", "--reverse", commit)).split()


def test_objects_and_tags_are_borrowed(tmp_path: Path) -> None:
    world = World(tmp_path)
    with untouched(world.user, world.library):
        git_dir = world.stores().git_dir("user")
        assert git_dir == tmp_path / "stores" / "user.git"
        assert history(git_dir, world.ids[1]) == world.ids
        assert line(git(git_dir, "describe", "--tags", world.ids[1])).startswith("v1-1-g")
        assert line(git(git_dir, "count-objects")).startswith("0 objects")


@pytest.mark.slow
def test_a_half_made_store_is_made_whole(tmp_path: Path) -> None:
    world = World(tmp_path)
    git_dir = world.stores().git_dir("user")
    (git_dir / "objects" / "info" / "alternates").unlink()
    (git_dir / "HEAD").unlink()
    assert commit_of(world.stores().git_dir("user"), world.ids[0]) == world.ids[0]


def test_clones_worktrees_and_odd_paths(tmp_path: Path) -> None:
    ids = build(tmp_path / "first", linear(2))
    odd = tmp_path / 'an "odd" \\ path'
    run_git(tmp_path, "clone", "--quiet", "--shared", str(tmp_path / "first"), str(odd))
    run_git(odd, "worktree", "add", "--quiet", "--detach", str(tmp_path / "linked"))
    with untouched(tmp_path / "first", odd, tmp_path / "linked"):
        for number, path in enumerate((odd, tmp_path / "linked")):
            stores = Stores(tmp_path / f"s{number}", [repo_of(path, ids, name="an odd/name")], quiet)
            assert history(stores.git_dir("an odd/name"), ids[1]) == ids


@pytest.mark.slow
def test_a_shallow_clone_stays_readable(tmp_path: Path) -> None:
    ids = build(tmp_path / "first", linear(3))
    shallow = tmp_path / "shallow"
    run_git(tmp_path, "clone", "--quiet", "--depth=2", f"file://{tmp_path}/first", str(shallow))
    stores = Stores(tmp_path / "stores", [repo_of(shallow, ids[1:])], quiet)
    assert history(stores.git_dir("shallow"), ids[2]) == ids[1:]
    run_git(shallow, "fetch", "--quiet", "--unshallow")
    again = Stores(tmp_path / "stores", [repo_of(shallow, ids)], quiet)
    assert history(again.git_dir("shallow"), ids[2]) == ids


@pytest.mark.slow
def test_a_partial_clone_gets_the_rest_into_the_store(tmp_path: Path) -> None:
    ids = build(tmp_path / "first", linear(3))
    run_git(tmp_path / "first", "config", "uploadpack.allowFilter", "true")
    user = tmp_path / "user"
    run_git(tmp_path, "clone", "--quiet", "--filter=blob:none", f"file://{tmp_path}/first", str(user))
    with untouched(user):
        git_dir = Stores(tmp_path / "stores", [repo_of(user, ids)], quiet).git_dir("user")
        assert git(git_dir, "show", f"{ids[0]}:number.txt", own=True) == b"0\n"


def test_credentials_are_not_stored(tmp_path: Path) -> None:
    ids = build(tmp_path / "user", linear(1))
    run_git(tmp_path / "user", "remote", "add", "origin", "https://me:hunter2@example.org/a.git")
    git_dir = Stores(tmp_path / "stores", [repo_of(tmp_path / "user", ids)], quiet).git_dir("user")
    assert "url = https://example.org/a.git" in (git_dir / "config").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("state", ["populated", "kept", "absent"])
def test_submodules_come_from_the_user_or_are_fetched(tmp_path: Path, state: str) -> None:
    world = World(tmp_path, populated=state != "absent")
    if state == "kept":
        run_git(world.user, "submodule", "--quiet", "deinit", "--force", "--all")
    told: list[str] = []
    stores = Stores(world.root, [repo_of(world.user, world.ids)], told.append)
    with untouched(world.user, world.library):
        git_dir = stores.submodule("user", "third/library", world.inner[1])
        assert history(git_dir, world.inner[1]) == world.inner[:2]
        assert len(told) == (state == "absent")
    # A commit that the user's submodule does not have: fetched once, and remembered by the store.
    run_git(world.library, "commit", "--quiet", "--allow-empty", "--message=new")
    new = run_git(world.library, "rev-parse", "HEAD")
    with untouched(world.user, world.library):
        told.clear()
        for _ in range(2):
            assert stores.submodule("user", "third/library", new) == git_dir
        again = Stores(world.root, [repo_of(world.user, world.ids)], told.append).submodule("user", "third/library", new)
        assert again == git_dir
        assert told == [f"fetching third/library at {new[:12]} from {world.library}"]
    assert not list(world.root.rglob("*.pids"))


@pytest.mark.slow
def test_a_shallow_submodule_is_unshallowed(tmp_path: Path) -> None:
    world = World(tmp_path, populated=False)
    run_git(world.user, "config", "submodule.third/library.url", f"file://{world.library}")
    run_git(world.user, "submodule", "--quiet", "update", "--init", "--depth=1")
    with untouched(world.user):
        for _ in range(2):  # the second time it is whole already
            git_dir = world.stores().submodule("user", "third/library", world.inner[1])
            assert history(git_dir, world.inner[1]) == world.inner[:2]


@pytest.mark.slow
def test_a_lost_commit_is_reported_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    stores, gone = world.stores(), "1" * 40
    with untouched(world.user), pytest.raises(TreeError, match="not our ref") as caught:
        stores.submodule("user", "third/library", gone)
    assert caught.value.kind is SkipKind.TREE
    assert caught.value.fix.startswith(f"git -C {world.user}/third/library fetch origin {gone}")
    monkeypatch.setattr("seatrial.bisect.git_stores.fetch", None)  # it is not asked for again
    with pytest.raises(TreeError, match="not our ref"):
        stores.submodule("user", "third/library", gone)


@pytest.mark.slow
def test_a_remote_that_cannot_be_reached_is_not_a_loss(tmp_path: Path) -> None:
    world = World(tmp_path, populated=False)
    world.library.rename(tmp_path / "away")
    stores = world.stores()
    with pytest.raises(TreeError) as caught:
        stores.submodule("user", "third/library", world.inner[1])
    assert caught.value.kind is SkipKind.ENVIRONMENT
    assert "submodule update --init -- third/library" in caught.value.fix
    (tmp_path / "away").rename(world.library)
    assert history(stores.submodule("user", "third/library", world.inner[1]), world.inner[1]) == world.inner[:2]


@pytest.mark.slow
def test_a_fetch_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = build(tmp_path / "user", linear(1))
    git_dir = Stores(tmp_path / "stores", [repo_of(tmp_path / "user", ids)], quiet).git_dir("user")
    monkeypatch.setenv("GIT_SSH_COMMAND", "sleep 300 #")
    with pytest.raises(FetchFailed, match="did not end within 0 s") as caught:
        fetching.fetch(git_dir, "ssh://example.org/a.git", "1" * 40, unshallow=False, deadline_s=0.1)
    assert not caught.value.lost
    assert not list(git_dir.glob("*.pids"))


@pytest.mark.slow
def test_a_server_that_gives_only_what_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, populated=False)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "protocol.version")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "0")
    assert history(world.stores().submodule("user", "third/library", world.inner[1]), world.inner[1]) == world.inner[:2]


@pytest.mark.slow
def test_a_submodule_in_a_submodule(tmp_path: Path) -> None:
    world = World(tmp_path)
    outer = tmp_path / "outer"
    ids = build(outer, [Commit(submodule("x/user", "../user", world.ids[0])), Commit({"x/user": Link(world.ids[1])})])
    stores = Stores(tmp_path / "more", [repo_of(outer, ids)], quiet)
    git_dir = stores.submodule("outer", "x/user/third/library", world.inner[0], at=ids[0])
    assert history(git_dir, world.inner[0]) == world.inner[:1]
    with pytest.raises(TreeError, match="no submodule of outer"):
        stores.submodule("outer", "x/other", world.inner[0])


def test_what_a_commit_says_of_its_submodules(tmp_path: Path) -> None:
    text = gitmodules({"a.b/c": "../c.git"}).replace('"a.b/c"', '"na.me"') + '[submodule "d"]\n\tpath = d\n\turl = /d\n\tupdate = none\n'
    commit = build(tmp_path / "r", [Commit({".gitmodules": text, "a.b/c": Link("2" * 40)})])[0]
    assert (found := declared(tmp_path / "r", commit, "a.b/c")).name == "na.me"
    assert (found.url, found.left_out) == ("../c.git", False)
    assert declared(tmp_path / "r", commit, "d").left_out
    assert declared(tmp_path / "r", commit, "forgotten").url == ""
    assert gitlink(tmp_path / "r", commit, "a.b/c") == "2" * 40
    assert gitlink(tmp_path / "r", commit, ".gitmodules") is None
    assert gitlink(tmp_path / "r", commit, "a.b") is None


@pytest.mark.parametrize(
    ("base", "url", "expected"),
    [
        ("https://h/a/b.git", "../c.git", "https://h/a/c.git"),
        ("https://h/a/b.git/", "./c.git", "https://h/a/b.git/c.git"),
        ("git@h:a/b.git", "../../x/c.git", "git@h:x/c.git"),
        ("git@h:b.git", "../c.git", "git@h:c.git"),
        ("/srv/b", "../c/", "/srv/c"),
        ("/srv/b", "https://h/c", "https://h/c"),
    ],
)
def test_relative_urls(base: str, url: str, expected: str) -> None:
    assert resolve_url(base, url) == expected
