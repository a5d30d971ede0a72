"""The Bridge under test in the vendored tree: equal while the script runs, restored afterwards, nobody's work lost."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from seatrial.instruments.nemo_rl import vendored_bridge
from seatrial.instruments.nemo_rl.nemo_process import Failed
from tests.loops.nemo_driver import Stage, commit, git, put

BEFORE = {
    "src/megatron/bridge/__init__.py": "VERSION = 1\n",
    "src/megatron/bridge/same.py": "same\n",
    "src/megatron/bridge/gone/old.py": "old\n",
    "turns": "a file\n",
    ".gitignore": "*.pyc\nbuilt.so\n",
}
AFTER = {
    "src/megatron/bridge/__init__.py": "VERSION = 2\n",
    "src/megatron/bridge/same.py": "same\n",
    "turns/into": "a directory\n",
    ".gitignore": "*.pyc\n",
}
TELL = "cat $VENDORED/src/megatron/bridge/__init__.py $VENDORED/new.py > $EXP_DIR/seen; ls $VENDORED/src/megatron/bridge >> $EXP_DIR/seen"


def tree(root: Path) -> dict[str, tuple[str, int, int]]:
    """Content, mode and time of every file."""
    files = [path for path in root.rglob("*") if not path.is_dir() and ".git" not in path.relative_to(root).parts]
    return {str(path.relative_to(root)): _file(path) for path in files}


def _file(path: Path) -> tuple[str, int, int]:
    known = path.lstat()
    return str(path.readlink()) if path.is_symlink() else path.read_text(), known.st_mode, known.st_mtime_ns


def make(tmp_path: Path, body: str = TELL) -> tuple[Stage, Path, Path]:
    """A stage, the Bridge under test with an untracked and an ignored file, and the vendored one with an ignored file."""
    stage = Stage(tmp_path, body)
    source, target = stage.bridges(BEFORE, AFTER)
    put(source, {"new.py": "untracked\n", "x.pyc": "ignored\n"})
    (source / "link").symlink_to("new.py")
    (source / "new.py").chmod(0o755)
    put(target, {"built.so": "of a build\n", "src/megatron/bridge/gone/cache.pyc": "ignored\n"})
    return stage, source, target


def test_the_script_sees_the_bridge_under_test_and_nobody_does_afterwards(tmp_path: Path) -> None:
    stage, source, target = make(tmp_path)
    before = tree(target)
    code, log = stage.run("--sync", f"{source}={target}", VENDORED=str(target))
    assert code == 0, log
    assert (stage.out / "results" / "seen").read_text() == "VERSION = 2\nuntracked\n__init__.py\ngone\nsame.py\n"
    assert tree(target) == before, "also the times: bytecode and git's index still fit"
    assert git(target, "status", "--porcelain") == ""
    assert not (stage.checkout / ".git" / vendored_bridge.MARKER).exists()
    manifest = json.loads((stage.out / "vendored-before" / "manifest.json").read_text())
    assert set(manifest) == {
        "src/megatron/bridge/__init__.py",
        "src/megatron/bridge/gone/old.py",
        "turns",
        "turns/into",
        "new.py",
        "link",
        ".gitignore",
    }
    assert (stage.out / "vendored-before" / "files" / "turns").read_text() == "a file\n"
    assert "6 files compared, 7 changed" in log
    assert "is as it was before: 7 files restored and compared" in log


def test_a_failing_script_and_a_signal_restore_too(tmp_path: Path) -> None:
    stage, source, target = make(tmp_path, "echo started; sleep 60")
    before = tree(target)
    process = stage.start("--sync", f"{source}={target}")
    assert process.stdout is not None
    while "started" not in process.stdout.readline():
        assert process.poll() is None
    assert (target / "new.py").exists()
    process.send_signal(signal.SIGTERM)
    assert process.wait(45) == 143
    assert tree(target) == before


def test_what_a_killed_run_left_is_restored_at_the_next_start(tmp_path: Path) -> None:
    stage, source, target = make(tmp_path, "cat $VENDORED/src/megatron/bridge/__init__.py > $EXP_DIR/seen")
    before, marker = tree(target), stage.checkout / ".git" / vendored_bridge.MARKER
    vendored_bridge.start_sync(source, target, tmp_path / "killed", marker)
    (target / "new.py.seatrial-new").write_text("half")
    code, log = stage.run(VENDORED=str(target))
    assert code == 0
    assert log.startswith("seatrial: an earlier run was killed while the vendored tree held its copy: restoring it\n")
    assert (stage.out / "results" / "seen").read_text() == "VERSION = 1\n", "it ran without the leftovers"
    assert tree(target) == before
    assert not marker.exists()


def test_a_run_killed_halfway_is_restored_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, source, target = make(tmp_path)
    before, marker = tree(target), stage.checkout / ".git" / vendored_bridge.MARKER
    put_file, files = vendored_bridge._put, []

    def cut(*words: object) -> None:
        files.append(words)
        if len(files) == 3:
            raise KeyboardInterrupt
        put_file(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(vendored_bridge, "_put", cut)
    with pytest.raises(KeyboardInterrupt):
        vendored_bridge.start_sync(source, target, tmp_path / "killed", marker)
    monkeypatch.setattr(vendored_bridge, "_put", put_file)
    assert tree(target) != before
    vendored_bridge.restore_tree(marker)
    assert tree(target) == before


def test_uncommitted_changes_are_refused(tmp_path: Path) -> None:
    stage, source, target = make(tmp_path)
    put(target, {"mine.py": "work\n"})
    before = tree(target)
    code, log = stage.run("--sync", f"{source}={target}")
    assert code == 2
    assert "has uncommitted changes (?? mine.py), which could be lost" in log
    assert tree(target) == before
    assert not (stage.checkout / ".git" / vendored_bridge.MARKER).exists()


def test_a_file_edited_meanwhile_is_left_alone_and_named(tmp_path: Path) -> None:
    stage, source, target = make(tmp_path, "echo edited > $VENDORED/new.py")
    code, log = stage.run("--sync", f"{source}={target}", VENDORED=str(target))
    assert code == vendored_bridge.NOT_EQUAL
    assert f"restore failed: {target / 'new.py'} was edited since (1 files)" in log
    assert (target / "new.py").read_text() == "edited\n"
    assert (target / "src/megatron/bridge/__init__.py").read_text() == "VERSION = 1\n", "the others are restored"
    assert (stage.out / "results").is_dir()
    code, log = stage.run("--out", str(tmp_path / "again"))
    assert code == vendored_bridge.NOT_EQUAL
    assert "was edited since (1 files)" in log, "it stays a problem until somebody looks at it"
    (target / "new.py").unlink()
    assert stage.run("--out", str(tmp_path / "third"), VENDORED=str(target))[0] == 0


def test_a_difference_ends_the_phase_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, source, target = make(tmp_path)
    before, marker = tree(target), tmp_path / "marker"
    monkeypatch.setattr(vendored_bridge, "_put", lambda *_: None)
    with pytest.raises(Failed, match=r"sync failed: .* is not that of .*\(5 files differ\)") as caught:
        vendored_bridge.start_sync(source, target, tmp_path / "keep", marker)
    assert caught.value.code == vendored_bridge.NOT_EQUAL
    monkeypatch.undo()
    vendored_bridge.restore_tree(marker)
    assert tree(target) == before


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    stage, source, target = make(tmp_path)
    before = tree(target)
    put(stage.out, {"vendored-before": "in the way"})
    code, log = stage.run("--sync", f"{source}={target}")
    assert code == vendored_bridge.NOT_EQUAL
    assert "seatrial: driver stopped: sync failed: " in log
    assert tree(target) == before


def test_links_out_of_the_tree_are_not_followed(tmp_path: Path) -> None:
    source = commit(tmp_path / "bridge", {"deep/file": "new\n"})
    target = commit(tmp_path / "vendored", {"other": "x\n"})
    put(tmp_path / "outside", {"file": "mine\n"})
    (target / "deep").symlink_to(tmp_path / "outside")
    git(target, "add", "-A")
    git(target, "commit", "-qm", "link")
    with pytest.raises(Failed, match="lies behind a link"):
        vendored_bridge.start_sync(source, target, tmp_path / "keep", tmp_path / "marker")
    assert (tmp_path / "outside" / "file").read_text() == "mine\n"


def test_submodules_stay_as_they_are(tmp_path: Path) -> None:
    stage, source, target = make(tmp_path)
    for place, text in ((source, "theirs"), (target, "ours")):
        commit(place / "3rdparty" / "Megatron-LM", {"core.py": text})
        git(place, "add", "3rdparty/Megatron-LM")
        git(place, "commit", "-qm", "submodule")
    vendored_bridge.start_sync(source, target, tmp_path / "keep", stage.checkout / ".git" / vendored_bridge.MARKER)
    assert (target / "3rdparty" / "Megatron-LM" / "core.py").read_text() == "ours"
    assert not any("3rdparty" in name for name in json.loads((tmp_path / "keep" / "manifest.json").read_text()))


def test_an_empty_submodule_and_the_tree_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage, source, target = make(tmp_path)
    empty = stage.checkout / "empty"
    empty.mkdir()
    with pytest.raises(Failed, match="not a checkout of its own: git submodule update --init") as caught:
        vendored_bridge.start_sync(source, empty, tmp_path / "keep", tmp_path / "marker")
    assert caught.value.code == 2
    put(target, {"mine.py": "under test"})
    vendored_bridge.start_sync(target, target, tmp_path / "keep", tmp_path / "marker")
    assert "is the tree under test itself" in capsys.readouterr().out
    vendored_bridge.restore_tree(tmp_path / "marker")
    assert (target / "mine.py").exists()


def test_a_marker_whose_copies_are_gone_needs_a_person(tmp_path: Path) -> None:
    _, source, target = make(tmp_path)
    marker = tmp_path / "marker"
    vendored_bridge.start_sync(source, target, tmp_path / "keep", marker)
    (tmp_path / "keep").rename(tmp_path / "deleted")
    with pytest.raises(Failed, match=r"is not in .*/keep any more: restore it by hand \(git -C") as caught:
        vendored_bridge.restore_tree(marker)
    assert caught.value.code == 2
    assert marker.exists()
