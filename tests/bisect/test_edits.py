"""Edits and patches: what they change, where they are refused, and what they cannot reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.bisect.bisect_records import Edit, Pin, SkipKind
from seatrial.bisect.git_stores import Stores, TreeError
from seatrial.bisect.worktrees import apply_edits, apply_patches, check_edits, make_tree
from seatrial.core.errors import UserError
from tests.bisect.repos import Commit, Link, Script, build, gitmodules, run_git
from tests.bisect.untouched import quiet, repo_of, untouched


def edit(clauses: str, file: str = "run.sh") -> Edit:
    return Edit(file=file, clauses=clauses)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    place = tmp_path / "tree"
    (place / "sub").mkdir(parents=True)
    (place / "run.sh").write_text("STEPS=30\nNODES=2\n", encoding="utf-8")
    (place / "run.sh").chmod(0o755)
    return place


def test_clauses_change_the_file_and_keep_its_mode(tree: Path) -> None:
    (tree / "link.sh").symlink_to("run.sh")
    assert apply_edits(tree, [edit("s/STEPS=30/STEPS=3/\n/NODES/d"), edit("s/3/4/", "link.sh")]) == ()
    assert (tree / "run.sh").read_text(encoding="utf-8") == "STEPS=4\n"
    assert (tree / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (tree / "link.sh").is_symlink()
    assert sorted(path.name for path in tree.iterdir()) == ["link.sh", "run.sh", "sub"]


def test_an_edit_without_effect_is_noted(tree: Path) -> None:
    assert apply_edits(tree, [edit("s/ABSENT/x/")]) == ("run.sh",)


@pytest.mark.parametrize(
    ("clauses", "message"),
    [
        ("s/a/b", "line 1: unterminated `s' command"),
        ("p\nfoo bar", "line 2: "),
        ("s/.*/touch x/e", "e/r/w commands disabled in sandbox mode"),
        ("w /tmp/x", "disabled in sandbox mode"),
        ("r /etc/passwd", "disabled in sandbox mode"),
    ],
)
def test_bad_clauses_are_refused_before_anything_runs(tree: Path, clauses: str, message: str) -> None:
    with untouched(tree):
        with pytest.raises(UserError) as caught:
            check_edits([edit(clauses)])
        assert message in caught.value.message
        assert caught.value.message.startswith("--edit run.sh: sed does not accept ")
        with pytest.raises(UserError):
            apply_edits(tree, [edit("s/30/3/"), edit(clauses)])


def test_only_files_inside_the_tree(tmp_path: Path, tree: Path) -> None:
    outside = tmp_path / "outside.sh"
    outside.write_text("STEPS=30\n", encoding="utf-8")
    (tree / "out.sh").symlink_to(outside)
    (tree / "up").symlink_to("..")
    for file in ("/etc/passwd", "../outside.sh", "sub/../../outside.sh", ".git", "sub/.git/config", ""):
        with pytest.raises(UserError, match="not a file of the tree"):
            check_edits([edit("s/30/3/", file)])
    for file in ("out.sh", "up/outside.sh"):
        with pytest.raises(TreeError, match="leads out of the tree"):
            apply_edits(tree, [edit("s/30/3/", file)])
    for file in ("absent.sh", "sub"):
        with pytest.raises(TreeError, match="does not exist at this commit") as caught:
            apply_edits(tree, [edit("s/30/3/", file)])
        assert caught.value.kind is SkipKind.UNEDITED
    assert outside.read_text(encoding="utf-8") == "STEPS=30\n"


def test_sed_itself_fails(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.bisect.worktrees.SED_S", 0.2)
    with pytest.raises(UserError, match="did not end within"):
        apply_edits(tree, [edit(":a;ba")])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="sed is not installed"):
        check_edits([edit("p")])


LINES = "".join(f"line {index}\n" for index in range(20))


class World:
    """A file that is broken from commit 1 on and mended by commit 3; commit 2 changes it elsewhere; commit 4 rewrites it."""

    def __init__(self, root: Path) -> None:
        broken, mended = LINES.replace("line 3\n", "broken\n"), LINES.replace("line 3\n", "mended\n")
        top = ("line 19\n", "end\n")
        commits = [
            Commit({"a.txt": LINES, "run.sh": Script("x\n")}),
            Commit({"a.txt": broken}),
            Commit({"a.txt": broken.replace(*top)}),
            Commit({"a.txt": mended.replace(*top)}, subject="Mend it"),
            Commit({"a.txt": "rewritten\n"}),
            Commit({".gitmodules": gitmodules({"s": "/nowhere"}), "s": Link("1" * 40)}),
            Commit({"b.txt": "b\n"}, parents=(2,)),
            Commit({"a.txt": mended.replace(*top)}, parents=(2, 6), subject="Merge"),
        ]
        self.user, self.tree = root / "user", root / "tree"
        self.ids = build(self.user, commits)
        self.patch = root / "mend.patch"
        self.patch.write_text(run_git(self.user, "diff", self.ids[2], self.ids[3]) + "\n", encoding="utf-8")
        self.stores = Stores(root / "stores", [repo_of(self.user, self.ids)], quiet)

    def apply(self, index: int, *patches: str) -> tuple[str, ...]:
        make_tree(self.stores, [Pin(repo="user", commit=self.ids[index])], self.tree)
        return apply_patches(self.stores, self.tree, "user", patches, self.ids[index])

    def text(self) -> str:
        return (self.tree / "a.txt").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["commit", "file", "merge"])
def test_a_patch_goes_in_where_it_is_not(tmp_path: Path, kind: str) -> None:
    world = World(tmp_path)
    patch = {"commit": world.ids[3][:12], "file": str(world.patch), "merge": world.ids[7]}[kind]
    before = {path: path.read_bytes() for path in world.user.rglob("*") if path.is_file()}
    for index in (1, 2):
        assert world.apply(index, patch) == ()
        assert "mended\n" in world.text()
        assert ("end\n" in world.text().splitlines(keepends=True)) == (index == 2)
    if kind != "merge":
        assert world.apply(3, patch) == (f"--patch {Path(patch).name}: is in already at {world.ids[3][:12]}",)
        # The same change by another commit: nothing is left to do.
        assert world.apply(7, patch) == (f"--patch {Path(patch).name}: is in already at {world.ids[7][:12]}",)
        assert "mended\n" in world.text()
    for index in (0,) if kind == "commit" else (0, 4):
        with pytest.raises(TreeError, match="does not apply to") as caught:
            world.apply(index, patch)
        assert caught.value.kind is SkipKind.TREE
    assert {path: path.read_bytes() for path in world.user.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_patch_goes_in_again_where_it_was_reverted(tmp_path: Path) -> None:
    mend = "This reverts commit {}."
    texts = ["broken\n", "mended\n", "broken\n", "other\n"]
    ids = build(tmp_path / "user", [Commit({"a.txt": texts[0]}), Commit({"a.txt": texts[1]}, subject="Mend it")])
    for text, message in ((texts[2], f"Revert\n\n{mend.format(ids[1])}"), (texts[3], "Go on")):
        (tmp_path / "user" / "a.txt").write_text(text, encoding="utf-8")
        run_git(tmp_path / "user", "commit", "--quiet", "--all", f"--message={message}")
        ids.append(run_git(tmp_path / "user", "rev-parse", "HEAD"))
    stores, tree = Stores(tmp_path / "stores", [repo_of(tmp_path / "user", ids)], quiet), tmp_path / "tree"

    def apply(index: int) -> tuple[str, ...]:
        make_tree(stores, [Pin(repo="user", commit=ids[index])], tree)
        return apply_patches(stores, tree, "user", [ids[1]], ids[index])

    assert apply(1) == (f"--patch {ids[1]}: is in already at {ids[1][:12]}",)
    assert apply(2) == ()
    assert (tree / "a.txt").read_text(encoding="utf-8") == "mended\n"
    with pytest.raises(TreeError, match="does not apply"):
        apply(3)  # it was taken out, and cannot be put in


@pytest.mark.slow
def test_a_patch_of_the_history_whose_lines_were_changed_again_is_left_out(tmp_path: Path) -> None:
    world = World(tmp_path)
    mode = tmp_path / "mode.patch"
    mode.write_text("diff --git a/run.sh b/run.sh\nold mode 100755\nnew mode 100644\n", encoding="utf-8")
    (note,) = world.apply(4, str(mode), world.ids[3])
    assert "is in its history, what it changed was changed again, and it was left out" in note
    assert world.text() == "rewritten\n"
    assert (world.tree / "run.sh").stat().st_mode & 0o111 == 0  # what was applied before it stays


@pytest.mark.slow
def test_patches_then_edits(tmp_path: Path) -> None:
    world = World(tmp_path)
    mode = tmp_path / "mode.patch"
    mode.write_text("diff --git a/run.sh b/run.sh\nold mode 100755\nnew mode 100644\n", encoding="utf-8")
    assert world.apply(2, world.ids[3], str(mode)) == ()
    assert (world.tree / "run.sh").stat().st_mode & 0o111 == 0
    assert len(apply_patches(world.stores, world.tree, "user", [str(mode)], world.ids[2])) == 1  # is in already
    assert apply_edits(world.tree, [edit("s/mended/edited/", "a.txt")]) == ()
    assert "edited\n" in world.text()
    assert world.apply(2) == ()  # a new tree has none of it
    assert "broken\n" in world.text()


@pytest.mark.slow
def test_patches_that_were_asked_for_wrongly(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(UserError, match="neither a file nor a commit"):
        world.apply(1, "nowhere")
    for text in ("", "hello\n", "--- a/a.txt\n+++ b/a.txt\n@@ -1,3 +1,3 @@\n torn\n"):
        world.patch.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match="not a patch"):
            world.apply(1, str(world.patch))
    with pytest.raises(UserError, match="not a patch"):
        world.apply(1, str(tmp_path / "absent.patch"))
    with pytest.raises(TreeError, match="moves a submodule"):
        world.apply(4, world.ids[5])


@pytest.mark.slow
def test_a_patch_whose_parent_a_shallow_clone_lacks(tmp_path: Path) -> None:
    world = World(tmp_path)
    run_git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{world.user}", str(tmp_path / "shallow"))
    ids = [run_git(tmp_path / "shallow", "rev-parse", "HEAD")]
    run_git(tmp_path / "shallow", "checkout", "--quiet", "--orphan", "other")
    run_git(tmp_path / "shallow", "commit", "--quiet", "--message=other")
    other = run_git(tmp_path / "shallow", "rev-parse", "HEAD")
    stores = Stores(tmp_path / "s2", [repo_of(tmp_path / "shallow", ids)], quiet)
    make_tree(stores, [Pin(repo="shallow", commit=other)], tmp_path / "tree2")
    with pytest.raises(UserError, match="the clone is shallow"):
        apply_patches(stores, tmp_path / "tree2", "shallow", ids, other)
