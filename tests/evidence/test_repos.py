"""Repository state and the patch that restores it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.core.records import RepoState
from seatrial.evidence import repos
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import repo_state, repo_states, write_repos
from tests.evidence.conftest import MakeRepo, commit, put, run_git

PLAIN = Redactor({})


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below `root` with its executable bit and content, git's own aside."""
    found = {}
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if name != ".git"]
        for name in files:
            path = Path(directory, name)
            if name == ".git":
                continue
            content = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
            found[str(path.relative_to(root))] = (0 if path.is_symlink() else path.stat().st_mode & 0o100, content)
    return found


def restore(root: Path, evidence: Path, target: Path) -> dict[str, tuple[int, bytes]]:
    """A clean checkout of the recorded commit with the recorded patch applied."""
    (state,) = [RepoState.model_validate(entry) for entry in json.loads((evidence / "repos.json").read_text())]
    run_git(root.parent, "clone", "-q", "--recurse-submodules", str(root), str(target))
    run_git(target, "checkout", "-q", state.commit)
    assert state.patch is not None
    run_git(target, "apply", str(evidence / state.patch))
    return tree(target)


def test_a_clean_repository(make_repo: MakeRepo, tmp_path: Path) -> None:
    root = make_repo("Megatron-Bridge", {"src/megatron/bridge/__init__.py": ""})
    (state,) = write_repos([repo_state(root)], tmp_path / "evidence", PLAIN)
    assert state == RepoState(
        name="Megatron-Bridge",
        path=str(root),
        commit=run_git(root, "rev-parse", "HEAD"),
        branch="main",
        packages=("megatron.bridge",),
        import_root=str(root / "src"),
    )
    assert sorted(path.name for path in (tmp_path / "evidence").iterdir()) == ["repos.json"]


def test_a_subdirectory_stands_for_its_repository(make_repo: MakeRepo) -> None:
    root = make_repo()
    assert repo_state(root / "pkg").path == str(root)


def test_the_patch_restores_the_tree(make_repo: MakeRepo, tmp_path: Path) -> None:
    root = make_repo(
        "mein Prüfling",
        {
            "staged.py": "a\n",
            "unstaged.py": "a\nb\n",
            "gone.txt": "x\n",
            "moved.txt": "long enough\n" * 9,
            "bin": bytes(range(256)),
            "run.sh": "#!/bin/sh\n",
            ".gitignore": "*.log\n",
        },
    )
    put(root, {"staged.py": "a\nstaged\n", "bin": bytes(range(255, -1, -1)), "new staged ü.txt": "ü\n"})
    run_git(root, "add", "-A")
    run_git(root, "mv", "moved.txt", "dir moved.txt")
    put(
        root,
        {
            "unstaged.py": "a\r\nb\x0c\x1c\n",
            'deep/new "quoted"\tname.txt': "no newline at end",
            "empty": "",
            "new.bin": b"\0\1" * 99,
            "staged.py": "a\nstaged\nand more\n",
            "-dash": "x\n",
            ":(top)magic": "x\n",
        },
    )
    put(root, {os.fsdecode(b"latin-\xe9.txt"): "x\n"})
    (root / "gone.txt").unlink()
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("staged.py")
    expected = tree(root)
    put(root, {"ignored.log": "not part of the change\n"})
    before = (root / ".git/index").read_bytes()

    (state,) = write_repos([repo_state(root)], tmp_path / "evidence", PLAIN)

    assert state.patch == "mein_Prüfling.patch"
    assert restore(root, tmp_path / "evidence", tmp_path / "clone") == expected
    assert (root / ".git/index").read_bytes() == before
    assert "ignored.log" not in state.dirty
    assert "latin-\\xe9.txt" in state.dirty
    assert state.model_dump_json()
    assert {
        "staged.py",
        "gone.txt",
        "moved.txt",
        "dir moved.txt",
        "new staged ü.txt",
        "empty",
        "link",
        "run.sh",
        'deep/new "quoted"\tname.txt',
    } <= set(state.dirty)


def test_the_users_settings_do_not_change_the_patch(make_repo: MakeRepo, tmp_path: Path) -> None:
    root = make_repo()
    for setting in (
        "diff.noprefix=true",
        "diff.external=false",
        "color.ui=always",
        "status.showUntrackedFiles=no",
        "diff.context=0",
        "core.pager=false",
        "diff.mnemonicPrefix=true",
    ):
        run_git(root, "config", *setting.split("="))
    put(root, {"a.txt": "two\n", "b.txt": "new\n"})
    expected = tree(root)
    write_repos([repo_state(root)], tmp_path / "evidence", PLAIN)
    assert restore(root, tmp_path / "evidence", tmp_path / "clone") == expected


def test_marks_that_hide_changes_do_not(make_repo: MakeRepo, tmp_path: Path) -> None:
    root = make_repo(files={"a.txt": "1\n", "b.txt": "1\n", "c.txt": "1\n"})
    run_git(root, "update-index", "--assume-unchanged", "a.txt")
    run_git(root, "update-index", "--skip-worktree", "b.txt", "c.txt")
    put(root, {"a.txt": "2\n", "b.txt": "2\n"})
    (root / "c.txt").unlink()  # as in a sparse checkout
    assert run_git(root, "status", "--porcelain") == ""
    state = repo_state(root)
    assert state.dirty == ("a.txt", "b.txt")
    write_repos([state], tmp_path / "evidence", PLAIN)
    patch = (tmp_path / "evidence/repo.patch").read_text()
    assert patch.count("+2\n") == 2


def test_a_change_of_the_same_size_in_the_same_second_is_seen(make_repo: MakeRepo) -> None:
    root = make_repo()
    for content in ("aaa\n", "bbb\n", "ccc\n"):
        put(root, {"a.txt": content})
        assert repo_state(root).dirty == ("a.txt",)
        run_git(root, "commit", "-qam", "x")
        assert repo_state(root).dirty == ()


def test_where_a_checkout_is_imported_from_is_no_part_of_its_state(make_repo: MakeRepo, tmp_path: Path) -> None:
    state = repo_state(make_repo("repo")).model_copy(update={"companion": True, "synced": "/loop/vendored", "changed": ("a",)})
    assert write_repos([state], tmp_path / "evidence", PLAIN) == (state,)


def test_a_conflict_is_recorded_as_it_stands(make_repo: MakeRepo, tmp_path: Path) -> None:
    root = make_repo()
    run_git(root, "checkout", "-qb", "other")
    commit(root, {"a.txt": "theirs\n"})
    run_git(root, "checkout", "-q", "main")
    commit(root, {"a.txt": "ours\n"})
    with pytest.raises(AssertionError):
        run_git(root, "merge", "other")
    expected = tree(root)
    write_repos([repo_state(root)], tmp_path / "evidence", PLAIN)
    assert restore(root, tmp_path / "evidence", tmp_path / "clone") == expected
    assert b"<<<<<<<" in expected["a.txt"][1]


def test_a_detached_head_has_no_branch(make_repo: MakeRepo) -> None:
    root = make_repo()
    run_git(root, "checkout", "-q", "--detach")
    assert repo_state(root).branch is None


def test_a_worktree_is_a_checkout(make_repo: MakeRepo, tmp_path: Path) -> None:
    root = make_repo()
    run_git(root, "worktree", "add", "-q", "-b", "side", str(tmp_path / "side"))
    put(tmp_path / "side", {"a.txt": "side\n"})
    state = repo_state(tmp_path / "side")
    assert (state.branch, state.dirty) == ("side", ("a.txt",))
    assert repo_state(root).dirty == ()


def test_the_callers_git_variables_are_ignored(make_repo: MakeRepo, monkeypatch: pytest.MonkeyPatch) -> None:
    root, other = make_repo("one"), make_repo("two")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / "nowhere"))
    assert repo_state(root).path == str(root)
    assert repo_state(root).dirty == ()


@pytest.mark.parametrize(
    ("url", "stored"),
    [
        ("https://user:hunter2@github.com/x/y.git", "https://github.com/x/y.git"),
        ("https://sometoken@github.com/x/y.git", "https://github.com/x/y.git"),
        ("https://github.com/x/y.git", "https://github.com/x/y.git"),
        ("ssh://git@github.com/x/y.git", "ssh://git@github.com/x/y.git"),
        ("ssh://git:pw@github.com/x/y.git", "ssh://git@github.com/x/y.git"),
        ("git@github.com:x/y.git", "git@github.com:x/y.git"),
        ("/data/my repo@2", "/data/my repo@2"),
    ],
)
def test_the_origin_loses_its_credentials(make_repo: MakeRepo, url: str, stored: str) -> None:
    root = make_repo()
    run_git(root, "config", "remote.origin.url", url)
    assert repo_state(root).origin == stored


def _with_submodule(make_repo: MakeRepo) -> Path:
    inner = make_repo("inner lib", {"f.py": "1\n"})
    root = make_repo()
    run_git(root, "submodule", "add", "-q", str(inner), "3rdparty/inner lib (x)")
    commit(root, {}, "submodule")
    return root


def test_submodules(make_repo: MakeRepo, tmp_path: Path) -> None:
    root = _with_submodule(make_repo)
    path = "3rdparty/inner lib (x)"
    sub = root / path
    recorded = run_git(sub, "rev-parse", "HEAD")
    assert [entry.model_dump() for entry in repo_state(root).submodules] == [{"path": path, "commit": recorded, "state": "clean"}]
    assert repo_state(root).dirty == ()

    put(sub, {"f.py": "2\n", "new/g.py": "3\n"})
    expected = tree(root)
    state = repo_state(root)
    assert state.dirty == (f"{path}/f.py", f"{path}/new/g.py")
    assert state.submodules[0].state == "clean"
    write_repos([state], tmp_path / "evidence", PLAIN)
    assert restore(root, tmp_path / "evidence", tmp_path / "clone") == expected

    other = commit(sub, {})
    state = repo_state(root)
    assert (state.submodules[0].commit, state.submodules[0].state) == (other, "other-commit")
    assert state.dirty == (path,)
    write_repos([state], tmp_path / "evidence", PLAIN)
    assert f"+Subproject commit {other}" in (tmp_path / "evidence/repo.patch").read_text()

    run_git(root, "submodule", "deinit", "-q", "-f", path)
    assert [(entry.commit, entry.state) for entry in repo_state(root).submodules] == [(recorded, "uninitialised")]


def test_a_moved_and_dirty_submodule_is_restored_at_its_commit(make_repo: MakeRepo, tmp_path: Path) -> None:
    root = _with_submodule(make_repo)
    path = "3rdparty/inner lib (x)"
    other = commit(root / path, {"f.py": "2\n"})
    run_git(root / path, "push", "-q", "origin", "HEAD:refs/heads/side")
    put(root / path, {"f.py": "3\n"})
    write_repos([repo_state(root)], tmp_path / "evidence", PLAIN)
    clone = tmp_path / "clone"
    run_git(tmp_path, "clone", "-q", "--recurse-submodules", str(root), str(clone))
    run_git(clone / path, "fetch", "-q", "origin", "side")
    run_git(clone / path, "checkout", "-q", other)
    run_git(clone, "apply", str(tmp_path / "evidence/repo.patch"))
    assert tree(clone) == tree(root)


def test_a_gitlink_without_gitmodules_is_a_submodule(make_repo: MakeRepo) -> None:
    root = make_repo()
    inner = make_repo("repo/vendored")
    run_git(root, "add", "vendored")
    run_git(root, "commit", "-qm", "gitlink")
    assert [(entry.path, entry.state) for entry in repo_state(root).submodules] == [("vendored", "clean")]
    put(inner, {"a.txt": "changed\n"})
    assert repo_state(root).dirty == ("vendored/a.txt",)


def test_what_a_patch_cannot_hold_is_said_in_it(make_repo: MakeRepo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_repo()
    make_repo("repo/nested")
    put(root, {"checkpoint.bin": b"x" * 5000, "small.txt": "kept\n"})
    monkeypatch.setattr(repos, "UNTRACKED_LIMIT", 1000)
    (state,) = write_repos([repo_state(root)], tmp_path / "evidence", PLAIN)
    assert state.dirty == ("checkpoint.bin", "nested/", "small.txt")
    patch = (tmp_path / "evidence/repo.patch").read_text()
    assert f"left out 'checkpoint.bin': 5000 bytes, sha256 {hashlib.sha256(b'x' * 5000).hexdigest()}" in patch
    assert "left out 'nested/': a git repository of its own" in patch
    assert set(restore(root, tmp_path / "evidence", tmp_path / "clone")) == {"a.txt", "pkg/__init__.py", "small.txt"}


def test_secrets_stay_out_of_the_patch_and_the_rest_applies(make_repo: MakeRepo, tmp_path: Path) -> None:
    root = make_repo()
    noise = b"\0" + hashlib.sha512(b"seed").digest() * 400
    put(
        root,
        {
            "code.py": 'token = load(key)\npassword: str = "default"\nx = "s3same-value"\n',
            ".env": "DB_PASSWORD=hunter2\n",
            "noise.bin": noise,
        },
    )
    put(root, {"key.pem": "-----BEGIN PRIVATE KEY-----\nMIIEvQIB\n-----END PRIVATE KEY-----\n"})
    write_repos([repo_state(root)], tmp_path / "evidence", Redactor({"MY_SECRET": "s3same-value"}))
    patch = (tmp_path / "evidence/repo.patch").read_text()
    assert patch.startswith("# seatrial: 5 lines are redacted")
    for secret in ("s3same-value", "hunter2", "MIIEvQIB"):
        assert secret not in patch
    restored = restore(root, tmp_path / "evidence", tmp_path / "clone")
    assert restored["code.py"][1] == b'token = load(key)\npassword: str = "default"\nx = "[redacted:MY_SECRET]"\n'
    assert restored["noise.bin"][1] == noise


def test_names_are_distinct(make_repo: MakeRepo, tmp_path: Path) -> None:
    roots = [make_repo("a/lib"), make_repo("b/lib"), make_repo("c/Lib")]
    states = repo_states(roots)
    assert [state.name for state in states] == ["lib", "lib-2", "Lib-3"]
    with pytest.raises(UserError, match="given twice"):
        repo_states([roots[0], roots[0] / "pkg"])
    with pytest.raises(UserError, match="same name"):
        write_repos([repo_state(root) for root in roots[:2]], tmp_path / "evidence", PLAIN)


def test_a_name_is_a_file_name(make_repo: MakeRepo) -> None:
    assert repo_state(make_repo(), "../x/y z").name == "_x_y_z"


def test_a_repository_that_moves_while_it_is_recorded_is_an_error(make_repo: MakeRepo, tmp_path: Path) -> None:
    root = make_repo()
    state = repo_state(root)
    put(root, {"late.txt": "x\n"})
    with pytest.raises(UserError, match="changed while"):
        write_repos([state], tmp_path / "evidence", PLAIN)
