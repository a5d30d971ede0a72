"""When the map is trusted and when it is not: damage, other circumstances, branches, interruption, workers."""

from __future__ import annotations

import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_seatrial.select import selection_session, selection_state
from pytest_seatrial.select import source_digests as module
from pytest_seatrial.select.source_digests import Shelf, facts
from tests.pytest_seatrial.select.projects import Small

pytestmark = pytest.mark.slow

FILES = {
    "code_s.py": "def one():\n    return 1\n\ndef two():\n    return 2\n",
    "test_one.py": "import code_s\n\ndef test_one():\n    assert code_s.one() == 1\n",
    "test_two.py": "import code_s\n\ndef test_two():\n    assert code_s.two() == 2\n",
}


@pytest.fixture
def small(tmp_path: Path) -> Small:
    return Small(tmp_path / "p", FILES)


def git(small: Small, *arguments: str) -> None:
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=small.root, check=True, capture_output=True, timeout=60)


def test_a_damaged_state_file_is_set_aside_and_everything_runs(small: Small) -> None:
    small.settled()
    place = small.root / ".seatrial-select.sqlite"
    place.write_bytes(b"not a database at all" * 100)
    session = small.run()
    assert session.code == 0
    assert session.ran == {"test_one", "test_two"}
    assert "damaged" in session.out
    assert (small.root / ".seatrial-select.sqlite.damaged-1").exists()
    assert small.run().ran == set()


@pytest.mark.parametrize("key", ["Python", "set of distributions", "schema", "root"])
def test_a_map_of_other_circumstances_is_not_trusted(tmp_path: Path, key: str) -> None:
    place = tmp_path / "state.sqlite"
    given = {"Python": "3", "root": "/r", "set of distributions": "d"}
    found = selection_state.RecordedOutcome("t", (frozenset({("a.py", "f", "1")}),))
    selection_state.save_state(place, given, "c", [found], lambda path, block: "1")
    assert selection_state.load_state(place, given).told == ""
    assert selection_state.load_state(place, given).known.records == {"t": [(1,)]}
    with sqlite3.connect(place) as base:
        base.execute("update meta set value = 'other' where key = ?", (key,))
    assert f"another {key}" in selection_state.load_state(place, given).told
    selection_state.save_state(place, given, "c", [], lambda path, block: "1")
    assert selection_state.load_state(place, given).known.records == {}


def test_another_ini_file_is_noticed(small: Small) -> None:
    small.settled()
    small.write("pytest.ini", "[pytest]\npythonpath = .\naddopts = --tb=short\n")
    session = small.run()
    assert "another set of pytest options" in session.out
    assert session.ran == {"test_one", "test_two"}


def test_a_failure_takes_back_the_record_that_it_refutes_and_only_eight_commits_are_kept(tmp_path: Path) -> None:
    place = tmp_path / "state.sqlite"
    passed = selection_state.RecordedOutcome("t", (frozenset({("a.py", "f", "1")}),))
    for number in range(10):
        selection_state.save_state(place, {}, f"c{number}", [passed], lambda path, block: "1")
    assert len(selection_state.load_state(place, {}).known.records["t"]) == 8
    selection_state.save_state(place, {}, "c9", [selection_state.RecordedOutcome("t", None)], lambda path, block: "2")
    assert len(selection_state.load_state(place, {}).known.records["t"]) == 8
    selection_state.save_state(place, {}, "c9", [selection_state.RecordedOutcome("t", None)], lambda path, block: "1")
    loaded = selection_state.load_state(place, {})
    assert loaded.known.records == {}
    assert loaded.known.failed == {"t"}


def test_switching_between_branches_costs_nothing(small: Small) -> None:
    git(small, "init", "-q", "-b", "main")
    small.write(".gitignore", ".seatrial-select*\n__pycache__\n.pytest_cache\n")
    git(small, "add", "-A")
    git(small, "commit", "-q", "-m", "one")
    small.settled()
    git(small, "checkout", "-q", "-b", "side")
    small.edit("code_s.py", "return 2", "return 1 + 1")
    git(small, "commit", "-q", "-a", "-m", "two")
    assert small.run().ran == {"test_two"}
    git(small, "checkout", "-q", "main")
    assert small.run().ran == set()
    git(small, "checkout", "-q", "side")
    assert small.run().ran == set()


def test_workers_of_xdist_select_and_record_alike(small: Small) -> None:
    assert small.run("-n", "2").ran == {"test_one", "test_two"}
    again = small.run("-n", "2")
    assert (again.ran, again.code) == (set(), 0), again.out
    assert "no test is affected" in again.out
    assert small.run().ran == set()
    small.edit("code_s.py", "return 2", "return 1 + 1")
    assert small.run("-n", "2").ran == {"test_two"}
    small.edit("code_s.py", "return 1\n", "return int(1)\n")
    assert small.run().ran == {"test_one"}
    assert not (small.root / ".seatrial-select").exists()


def test_tests_that_ended_before_an_interrupt_are_recorded(small: Small) -> None:
    waits = (
        "import os\nimport time\n\ndef test_zzz():\n    open('../ready', 'w').close()\n    time.sleep(60 if 'WAIT' in os.environ else 0)\n"
    )
    small.write("test_zzz.py", waits)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "SEATRIAL_SELECT", "PYTHONPATH"))}
    # A suite that runs in the background of a shell hands on that interrupts are ignored.
    heeds = "import signal, sys, pytest; signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", heeds, "--seatrial-select", "-p", "no:timeout"]
    process = subprocess.Popen(command, cwd=small.root, env={**clean, "WAIT": "1"}, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (small.root.parent / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 2
    finally:
        process.kill()
        process.wait(20)
    assert small.run().ran == {"test_zzz"}


def test_a_file_that_changed_while_tests_ran_is_not_trusted(small: Small) -> None:
    meddles = (
        "from pathlib import Path\n\ndef test_zzz():\n    path = Path('code_s.py')\n    path.write_text(path.read_text() + 'X = 1\\n')\n"
    )
    small.write("test_zzz.py", meddles)
    small.run()
    assert small.run("--deselect", "test_zzz.py").ran == {"test_one", "test_two"}


def test_it_works_beside_testmon(small: Small) -> None:
    pytest.importorskip("testmon", reason="pytest-testmon is not installed")
    first = small.run("--testmon")
    assert first.ran == {"test_one", "test_two"}
    assert small.run("--testmon").ran == set()
    small.edit("code_s.py", "return 2", "return 1 + 1")
    assert small.run("--testmon").ran == {"test_two"}


SOURCE = b"import a.b\nfrom . import c\nX = load()\ndef f():\n    return g.remote()\n"


def test_facts_survive_the_cache(tmp_path: Path) -> None:
    found = facts(SOURCE)
    assert type(found).from_bytes(found.to_bytes()) == found
    assert found.remote == {"f"}
    assert "load" in found.level
    assert Shelf(tmp_path / "select", "1")(SOURCE) == found
    assert Shelf(tmp_path / "select", "1")(SOURCE) == found
    assert len(list((tmp_path / "select").glob("??/*"))) == 1
    assert Shelf(tmp_path / "select", "2")(SOURCE) == found
    assert len(list((tmp_path / "select").glob("??/*"))) == 2, "what facts mean changes with our own text"
    assert Shelf(None, "1")(SOURCE) == found


def test_facts_are_found_once_for_all_checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Shelf(tmp_path / "select", "1")(SOURCE)
    monkeypatch.setattr(module, "facts", None)
    assert Shelf(tmp_path / "select", "1")(SOURCE) == found


def test_facts_that_were_damaged_or_that_others_may_write_are_found_anew(tmp_path: Path) -> None:
    found = Shelf(tmp_path / "select", "1")(SOURCE)
    other = facts(b"")
    (kept,) = (tmp_path / "select").glob("??/*")
    data = kept.read_bytes()
    for at in range(len(data)):
        kept.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert Shelf(tmp_path / "select", "1")(SOURCE) == found
    kept.write_bytes(hashlib.blake2b(other.to_bytes(), digest_size=16).digest() + other.to_bytes())
    assert Shelf(tmp_path / "select", "1")(SOURCE) == other, "this test can tell"
    kept.chmod(0o666)
    assert Shelf(tmp_path / "select", "1")(SOURCE) == found


def test_a_checkout_holds_one_file_of_ours_and_the_code_is_kept_elsewhere(small: Small) -> None:
    small.settled()
    small.run("-n2")
    assert [path.name for path in small.root.iterdir() if path.name.startswith(".seatrial")] == [".seatrial-select.sqlite"]
    assert any((small.root.parent / "cache" / "seatrial" / "select").glob("??/*"))


def test_code_that_nobody_used_for_a_month_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = selection_session.cache_place()
    assert place is not None
    old, new = place / "aa" / "old", place / "aa" / "new"
    old.parent.mkdir(parents=True)
    for path in (old, new):
        path.write_bytes(b"")
    os.utime(old, (1.0, 1.0))
    selection_session.sweep_cache()
    assert (old.exists(), new.exists()) == (False, True)
