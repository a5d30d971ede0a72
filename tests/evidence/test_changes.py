"""What a change touches, and against which base."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.evidence import changes as module
from seatrial.evidence import repos
from seatrial.evidence.changes import ChangedLine, ChangedPath, changed_lines, read_changes
from tests.evidence.conftest import MakeRepo, commit, put, run_git

LONG = "".join(f"line {number}\n" for number in range(40))


def test_committed_uncommitted_and_untracked_work_counts(make_repo: MakeRepo) -> None:
    root = make_repo(files={"kept": "1\n", "edited": "1\n", "gone": "no more\n", "old name": LONG, "link": "x\n"})
    base = run_git(root, "rev-parse", "HEAD")
    commit(root, {"edited": "2\n", "committed ü": "1\n"})
    run_git(root, "mv", "old name", "new name")
    put(root, {"untracked\tfile": "1\n", "dir/deep": "1\n"})
    (root / "gone").unlink()
    (root / "link").unlink()
    (root / "link").symlink_to("kept")
    assert read_changes(root, base).paths == (
        ChangedPath("committed ü", "A"),
        ChangedPath("dir/deep", "A"),
        ChangedPath("edited", "M"),
        ChangedPath("gone", "D"),
        ChangedPath("link", "T"),
        ChangedPath("new name", "R", "old name"),
        ChangedPath("untracked\tfile", "A"),
    )


def test_a_base_that_moved_on_is_met_at_the_merge_base(make_repo: MakeRepo) -> None:
    root = make_repo()
    fork = run_git(root, "rev-parse", "HEAD")
    run_git(root, "checkout", "-qb", "topic")
    commit(root, {"mine": "1\n"})
    run_git(root, "checkout", "-q", "main")
    commit(root, {"theirs": "1\n"})
    run_git(root, "checkout", "-q", "topic")
    changes = read_changes(root, "main")
    assert (changes.base, changes.base_reason) == (fork, "the merge base of main and HEAD")
    assert changes.paths == (ChangedPath("mine", "A"),)
    assert read_changes(root) == changes


def test_origin_comes_before_local_branches(make_repo: MakeRepo, tmp_path: Path) -> None:
    upstream = make_repo("upstream")
    run_git(tmp_path, "clone", "-q", str(upstream), "clone")
    commit(tmp_path / "clone", {"mine": "1\n"})
    changes = read_changes(tmp_path / "clone")
    assert changes.base_reason == "the merge base of origin/HEAD and HEAD"
    assert [change.path for change in changes.paths] == ["mine"]


def test_on_the_main_branch_uncommitted_work_then_the_last_commit(make_repo: MakeRepo) -> None:
    root = make_repo()
    first = run_git(root, "rev-parse", "HEAD")
    second = commit(root, {"b.txt": "1\n"})
    clean = read_changes(root)
    assert (clean.base, [change.path for change in clean.paths]) == (first, ["b.txt"])
    assert "the last commit" in clean.base_reason
    put(root, {"c.txt": "1\n"})
    dirty = read_changes(root)
    assert (dirty.base, dirty.base_reason) == (second, "uncommitted work against HEAD")
    assert [change.path for change in dirty.paths] == ["c.txt"]


def test_the_first_commit_is_every_file(make_repo: MakeRepo) -> None:
    root = make_repo()
    changes = read_changes(root)
    assert "no parent" in changes.base_reason
    assert changes.paths == (ChangedPath("a.txt", "A"), ChangedPath("pkg/__init__.py", "A"))


@pytest.mark.parametrize("base", ["origin/nowhere", "--help", "", "0" * 40])
def test_an_unknown_base_is_named(make_repo: MakeRepo, base: str) -> None:
    with pytest.raises(UserError, match="unknown base") as error:
        read_changes(make_repo(), base)
    assert repr(base) in error.value.message
    assert "fetch" in error.value.fix


def test_unrelated_histories(make_repo: MakeRepo) -> None:
    root = make_repo()
    run_git(root, "checkout", "-q", "--orphan", "other")
    commit(root, {"x": "1\n"})
    with pytest.raises(UserError, match="no common commit"):
        read_changes(root, "main")
    assert [change.path for change in read_changes(root).paths] == ["a.txt", "pkg/__init__.py", "x"]


def test_no_commits(tmp_path: Path) -> None:
    run_git(tmp_path, "init", "-q")
    with pytest.raises(UserError, match="no commits yet"):
        read_changes(tmp_path)


def _with_submodule(make_repo: MakeRepo) -> tuple[Path, Path]:
    inner = make_repo("inner", {"lib/f.py": LONG, "gone.py": "old = 1\n"})
    root = make_repo()
    run_git(root, "submodule", "add", "-q", str(inner), "3rdparty/in ner")
    commit(root, {}, "submodule")
    return root, root / "3rdparty/in ner"


def test_a_submodule_shows_its_insides(make_repo: MakeRepo) -> None:
    root, sub = _with_submodule(make_repo)
    run_git(sub, "mv", "lib/f.py", "lib/g.py")
    run_git(sub, "rm", "-q", "gone.py")
    commit(sub, {"committed.py": "fresh = 2\n"})
    put(sub, {"untracked.py": "loose = 3\n"})
    run_git(root, "commit", "-qam", "bump")
    expected = (
        ChangedPath("3rdparty/in ner", "M"),
        ChangedPath("3rdparty/in ner/committed.py", "A"),
        ChangedPath("3rdparty/in ner/gone.py", "D"),
        ChangedPath("3rdparty/in ner/lib/g.py", "R", "3rdparty/in ner/lib/f.py"),
        ChangedPath("3rdparty/in ner/untracked.py", "A"),
    )
    assert read_changes(root, "HEAD~1").paths == expected
    lines = changed_lines(root, "HEAD~1")
    assert {"fresh = 2", "old = 1", "loose = 3"} <= set(lines)
    assert {line.path for line in lines.lines if line.text == "fresh = 2"} <= {path.path for path in read_changes(root, "HEAD~1").paths}
    run_git(root, "submodule", "deinit", "-q", "-f", "3rdparty/in ner")
    assert read_changes(root, "HEAD~1").paths == expected[:1]


def test_a_submodule_whose_old_commit_is_unknown_is_listed_itself(make_repo: MakeRepo) -> None:
    root, _ = _with_submodule(make_repo)
    run_git(root, "update-index", "--cacheinfo", f"160000,{'1' * 40},3rdparty/in ner")
    run_git(root, "commit", "-qm", "a commit that nobody has")
    assert read_changes(root, "HEAD").paths == (ChangedPath("3rdparty/in ner", "M"),)


def test_an_added_submodule_is_listed(make_repo: MakeRepo) -> None:
    root, _ = _with_submodule(make_repo)
    assert read_changes(root, "HEAD~1").paths == (ChangedPath(".gitmodules", "A"), ChangedPath("3rdparty/in ner", "A"))


def test_lines_are_text_without_marks_and_headers(make_repo: MakeRepo) -> None:
    root = make_repo(files={"secret_path.py": "kept\n-- removed\n"})
    put(root, {"secret_path.py": "kept\n++ added\n", "new.py": "from peft import LoraConfig\n", "bin": b"\0lora"})
    lines = changed_lines(root, "HEAD")
    assert sorted(lines) == ["++ added", "-- removed", "from peft import LoraConfig"]
    assert lines.complete


def test_a_line_has_its_place(make_repo: MakeRepo) -> None:
    odd = 'odd "na\tme" ü\\.py'
    root = make_repo(files={"a b.py": "def first():\n    x = 1\n    y = 2\n", "gone.py": "z = 1\n", odd: "1\n"})
    put(root, {"a b.py": "def first():\n    x = 1\n    y = 3\n    w = 4\n", odd: "1\n2\n", "new.py": "@@ -1 +1 @@\n"})
    (root / "gone.py").unlink()
    assert set(changed_lines(root, "HEAD").lines) == {
        ChangedLine("a b.py", 3, "    y = 2", removed=True, within="def first():"),
        ChangedLine("a b.py", 3, "    y = 3", within="def first():"),
        ChangedLine("a b.py", 4, "    w = 4", within="def first():"),
        ChangedLine("gone.py", 1, "z = 1", removed=True),
        ChangedLine(odd, 2, "2"),
        ChangedLine("new.py", 1, "@@ -1 +1 @@"),
    }


def test_cut_lines_say_so(make_repo: MakeRepo, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_repo()
    put(root, {"big.py": LONG})
    monkeypatch.setattr(module, "LINES_LIMIT", 200)
    lines = changed_lines(root, "HEAD")
    assert not lines.complete
    assert "line 0" in list(lines)


def test_files_too_large_to_read_are_listed_and_said(make_repo: MakeRepo, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_repo()
    put(root, {"checkpoint.bin": b"x" * 5000})
    monkeypatch.setattr(repos, "UNTRACKED_LIMIT", 1000)
    assert read_changes(root, "HEAD").paths == (ChangedPath("checkpoint.bin", "A"),)
    assert not changed_lines(root, "HEAD").complete


@pytest.mark.parametrize(
    "data",
    [
        ["garbage", "path"],
        [":100644 100644 a b M"],
        [":100644 100644 a b M", ""],
        [":100644 100644 a M", "path"],
        [":100644 100644 a b X", "path"],
        [":100644 100644 a b", "path"],
        [":100644 100644 a b R090", "old"],
        [":100644 100644 a b M090", "path"],
        [":100644 100644 a b R", "old", "new"],
    ],
)
def test_unparsable_output_is_an_error(data: list[str]) -> None:
    with pytest.raises(UserError, match="cannot parse"):
        list(module._records(Path("/repo"), data))
