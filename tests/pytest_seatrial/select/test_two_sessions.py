"""Sessions beside each other: one state file, one directory, one cache."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_seatrial.select import selection_session, selection_state
from pytest_seatrial.select.trace import import_loader
from tests.pytest_seatrial.select.projects import Small

WRITER = """
import sys
import time
from pathlib import Path
from pytest_seatrial.select import selection_state as state

name, place = sys.argv[1], Path(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for at in range(25):
    versions = frozenset({("a.py", f"f{n}", "1") for n in range(at, at + 40)})
    state.save_state(place, {"root": "/r"}, "c", [state.RecordedOutcome(f"{name}{at}", (versions,))], lambda path, block: "1")
print("done", flush=True)
"""


def _passed(test: str) -> list[selection_state.RecordedOutcome]:
    return [selection_state.RecordedOutcome(test, (frozenset({("a.py", "f", "1")}),))]


def _now(path: str, block: str) -> str:
    return "1"


def test_two_processes_that_record_at_once_lose_nothing(tmp_path: Path) -> None:
    place = tmp_path / "state.sqlite"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, name, str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("\n")
            writer.stdin.flush()
        for writer in writers:
            out, err = writer.communicate(timeout=120)
            assert (out, writer.returncode) == ("done\n", 0), err
    finally:
        for writer in writers:
            writer.kill()
            writer.wait(20)
    loaded = selection_state.load_state(place, {"root": "/r"})
    assert loaded.told == ""
    assert set(loaded.known.records) == {f"{name}{at}" for name in ("one", "two") for at in range(25)}
    assert [path.name for path in tmp_path.iterdir() if "damaged" in path.name] == []


def test_what_another_session_writes_just_before_ours_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "state.sqlite"
    connect = selection_state._connect

    def late(path: Path) -> sqlite3.Connection:
        with monkeypatch.context() as patch:
            patch.setattr(selection_state, "_connect", connect)
            selection_state.save_state(place, {}, "c", _passed("theirs"), _now)
        return connect(path)

    monkeypatch.setattr(selection_state, "_connect", late)
    selection_state.save_state(place, {}, "c", _passed("ours"), _now)
    monkeypatch.undo()
    assert set(selection_state.load_state(place, {}).known.records) == {"theirs", "ours"}
    assert [path.name for path in tmp_path.iterdir()] == [place.name]


def test_a_session_that_loaded_before_another_wrote_keeps_both(tmp_path: Path) -> None:
    small = Small(tmp_path / "p", {"test_a.py": "def test_a(): pass\n", "test_b.py": "def test_b(): pass\n"})
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "SEATRIAL_SELECT", "PYTHONPATH"))}
    commands = [[sys.executable, "-m", "pytest", "-q", "--seatrial-select", name] for name in ("test_a.py", "test_b.py")]
    both = [subprocess.Popen(one, cwd=small.root, env=clean, stdout=subprocess.PIPE, text=True) for one in commands]
    try:
        for one in both:
            out, _ = one.communicate(timeout=120)
            assert one.returncode == 0, out
            assert "nothing was recorded" not in out
    finally:
        for one in both:
            one.kill()
            one.wait(20)
    assert small.run().ran == set()


def test_a_locked_file_is_not_trusted_and_not_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection_state, "WAIT_S", 0.05)
    place = tmp_path / "state.sqlite"
    selection_state.save_state(place, {}, "c", _passed("t"), _now)
    other = sqlite3.connect(place, isolation_level=None)
    try:
        other.execute("begin exclusive")
        assert "locked" in selection_state.load_state(place, {}).told
        with pytest.raises(sqlite3.OperationalError):
            selection_state.save_state(place, {}, "c", _passed("u"), _now)
    finally:
        other.close()
    assert [path.name for path in tmp_path.iterdir()] == [place.name]
    assert set(selection_state.load_state(place, {}).known.records) == {"t"}


def test_a_file_that_cannot_be_opened_is_not_trusted_and_stays(tmp_path: Path) -> None:
    place = tmp_path / "state.sqlite"
    place.mkdir()
    assert "cannot be read" in selection_state.load_state(place, {}).told
    assert place.is_dir()


def test_a_damaged_file_that_cannot_be_renamed_is_only_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "state.sqlite"
    place.write_bytes(b"no database" * 100)

    def refused(self: Path, target: Path) -> Path:
        raise PermissionError(13, "no", str(self))

    monkeypatch.setattr(Path, "replace", refused)
    assert "damaged" in selection_state.load_state(place, {}).told
    assert place.exists()


def test_a_file_without_our_tables_is_not_trusted_and_gets_them(tmp_path: Path) -> None:
    place = tmp_path / "state.sqlite"
    with sqlite3.connect(place) as base:
        base.execute("create table other (x)")
    assert selection_state.load_state(place, {}).told
    selection_state.save_state(place, {}, "c", _passed("t"), _now)
    assert set(selection_state.load_state(place, {}).known.records) == {"t"}


def test_tables_of_another_form_are_set_aside(tmp_path: Path) -> None:
    place = tmp_path / "state.sqlite"
    selection_state.save_state(place, {}, "c", _passed("t"), _now)
    with sqlite3.connect(place) as base:
        base.execute("drop table versions")
        base.execute("create table versions (other text)")
    selection_state.save_state(place, {}, "c", _passed("u"), _now)
    assert set(selection_state.load_state(place, {}).known.records) == {"u"}
    assert (tmp_path / "state.sqlite.damaged-1").exists()


def test_a_number_is_never_given_twice(tmp_path: Path) -> None:
    place = tmp_path / "state.sqlite"
    many = tuple(frozenset({("a.py", f"f{number}", "1")}) for number in range(150))
    selection_state.save_state(place, {}, "c", [selection_state.RecordedOutcome("t", many)], _now)
    selection_state.save_state(
        place, {}, "c", [selection_state.RecordedOutcome("t", None)], _now
    )  # its record goes, and with it all sets and versions
    assert not selection_state.load_state(place, {}).known.sets
    selection_state.save_state(place, {}, "c", _passed("u"), _now)
    loaded = selection_state.load_state(place, {})
    assert loaded.known.records == {"u": [(151,)]}
    assert loaded.known.versions == {151: ("a.py", "f", "1")}


def test_what_is_known_already_is_not_written_again(tmp_path: Path) -> None:
    place = tmp_path / "state.sqlite"
    selection_state.save_state(place, {}, "c", [*_passed("t"), *_passed("u")], _now)
    before = place.read_bytes()
    selection_state.save_state(place, {}, "c", _passed("t"), _now, selection_state.load_state(place, {}))
    assert place.read_bytes() == before
    selection_state.save_state(place, {}, "c", [selection_state.RecordedOutcome("t", None)], _now, selection_state.load_state(place, {}))
    assert place.read_bytes() != before


def test_a_record_that_holds_again_is_the_newest_again(tmp_path: Path) -> None:
    place = tmp_path / "state.sqlite"
    for commit, digest in (("c", "1"), ("d", "2"), ("c", "1")):
        found = selection_state.RecordedOutcome("t", (frozenset({("a.py", "f", digest)}),))
        selection_state.save_state(place, {}, commit, [found], _now, selection_state.load_state(place, {}))
    assert selection_state.load_state(place, {}).known.records == {"t": [(1,), (2,)]}


@pytest.mark.parametrize("outcome", [_passed("ours"), [selection_state.RecordedOutcome("ours", None)], []])
def test_what_was_written_since_the_start_is_kept(tmp_path: Path, outcome: list[selection_state.RecordedOutcome]) -> None:
    place = tmp_path / "state.sqlite"
    selection_state.save_state(place, {}, "c", _passed("ours"), _now)
    start = selection_state.load_state(place, {})
    selection_state.save_state(place, {}, "c", _passed("theirs"), _now)
    selection_state.save_state(place, {}, "c", outcome, _now, start)
    assert "theirs" in selection_state.load_state(place, {}).known.records


@pytest.mark.parametrize("outcome", [_passed("new"), []])
def test_a_row_that_another_hand_changed_since_the_start_is_not_sealed(
    tmp_path: Path, outcome: list[selection_state.RecordedOutcome]
) -> None:
    place = tmp_path / "state.sqlite"
    selection_state.save_state(
        place, {}, "c", [selection_state.RecordedOutcome("t", (frozenset({("a.py", "f", "1")}), frozenset({("b.py", "f", "1")})))], _now
    )
    start = selection_state.load_state(place, {})
    with sqlite3.connect(place) as base:
        base.execute("update records set sets = '1'")
    base.close()
    selection_state.save_state(place, {}, "c", outcome, _now, start)
    assert "damaged" in selection_state.load_state(place, {}).told


def test_names_that_are_no_text_are_sealed_and_read_again(tmp_path: Path) -> None:
    place = tmp_path / "state.sqlite"
    versions = frozenset({("a\udcff.txt", "*", "1"), ("b\n.txt", "*", "1"), ("\u00fc.txt", "*", "1")})
    selection_state.save_state(place, {}, "c", [selection_state.RecordedOutcome("t[\u00fc]", (versions,))], _now)
    selection_state.save_state(
        place, {}, "d", [selection_state.RecordedOutcome("t[\u00fc]", (versions,))], _now, selection_state.load_state(place, {})
    )
    loaded = selection_state.load_state(place, {})
    assert loaded.told == ""
    assert set(loaded.known.versions.values()) == versions
    assert loaded.known.records == {"t[\u00fc]": [(1,), (1,)]}


def test_the_directory_of_a_session_elsewhere_is_left_alone(tmp_path: Path) -> None:
    above = tmp_path / ".seatrial-select"
    elsewhere = above / "other-host-999999-abc"
    dead = above / f"{socket.gethostname()}-999999-abc"
    old = above / "other-host-999999-old"
    for one in (elsewhere, dead, old):
        one.mkdir(parents=True)
    os.utime(old, (1.0, 1.0))
    os.utime(dead, (time.time() - 3600, time.time() - 3600))
    own, lock = selection_session._directory(above)
    try:
        assert elsewhere.exists()
        assert not dead.exists()
        assert not old.exists()
        os.utime(own, (1.0, 1.0))
        second, other = selection_session._directory(above)
        os.close(other)
        assert own.exists()  # it is locked
        assert second != own
    finally:
        os.close(lock)


def test_the_cache_is_ours_alone(tmp_path: Path) -> None:
    above = tmp_path / "select"
    old = os.umask(0o002)
    try:
        made = import_loader.compiled(b"X = 1\n", "/p/a.py", "a.py", str(above), None, "")
    finally:
        os.umask(old)
    assert made is not None
    (kept,) = above.glob("??/*")
    assert [path.stat().st_mode & 0o777 for path in (above, kept.parent, kept)] == [0o700, 0o700, 0o600]
    assert import_loader._load(str(kept)) is not None


@pytest.mark.parametrize("which", ["file", "directory"])
def test_code_that_others_may_write_is_not_run(tmp_path: Path, which: str) -> None:
    above = tmp_path / "select"
    import_loader.compiled(b"X = 1\n", "/p/a.py", "a.py", str(above), None, "")
    (kept,) = above.glob("??/*")
    (kept if which == "file" else kept.parent).chmod(0o770)
    assert import_loader._load(str(kept)) is None


def test_code_of_another_user_is_not_run(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give files away")
    above = tmp_path / "select"
    import_loader.compiled(b"X = 1\n", "/p/a.py", "a.py", str(above), None, "")
    (kept,) = above.glob("??/*")
    os.chown(kept, 12345, 12345)
    assert import_loader._load(str(kept)) is None


def test_without_a_home_there_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert selection_session.cache_place() is None
    selection_session.sweep_cache()
    assert import_loader.compiled(b"X = 1\n", "/p/a.py", "a.py", "", None, "") is not None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("order", [1, -1])
def test_a_test_that_failed_in_one_process_has_failed(tmp_path: Path, order: int) -> None:
    """Every process runs every test with `--dist each`."""
    place = tmp_path / "state"
    selection_state.save_state(place, {}, "c", [*_passed("t"), selection_state.RecordedOutcome("t", None)][::order], _now)
    known = selection_state.load_state(place, {}).known
    assert "t" in known.failed
    assert "t" not in known.records
