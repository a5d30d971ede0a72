"""Nothing of a run survives: daemons, orphans, and what a killed Seatrial left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import psutil
import pytest

from seatrial.core import files
from seatrial.core.errors import UserError
from seatrial.runtime import process, process_tree
from seatrial.runtime.process import end_leftovers, pid_file, run
from seatrial.runtime.process_tree import PidFile, ProcessTree, announced
from tests.runtime.children import DAEMON, ended, gone, lines, spec, wait_for, wait_until
from tests.runtime.small_jobs import ALMOST_A_MINUTE


@pytest.mark.parametrize("before", ["pass", "import signal; signal.signal(15, signal.SIG_IGN)", "os.environ.clear()"])
def test_a_daemon_that_outlives_the_child_is_ended(tmp_path: Path, before: str) -> None:
    outcome = run(spec(tmp_path, DAEMON.format(before=before, after="print('done')"), grace_s=0.3))
    assert (outcome.ended, outcome.exit_code) == ("exited", 0)
    daemon = int((tmp_path / "daemon").read_text())
    assert gone(daemon)
    assert lines(tmp_path)[0] == "done"
    assert f"left processes behind, which are ended now: {daemon} python" in lines(tmp_path)[1]
    assert outcome.seconds < ALMOST_A_MINUTE


def test_an_orphan_without_marker_is_ended(tmp_path: Path) -> None:
    hidden = "os.execve('/bin/sh', ['sh', '-c', 'echo $$ > daemon; exec sleep 60'], {})"
    run(spec(tmp_path, DAEMON.format(before=hidden, after="")))
    assert gone(int((tmp_path / "daemon").read_text()))


@pytest.mark.usefixtures("begun")
def test_a_daemon_is_ended_at_the_deadline(tmp_path: Path) -> None:
    stays = "open('pid', 'w').write('there'); time.sleep(60)"
    outcome = run(spec(tmp_path, DAEMON.format(before="pass", after=stays), deadline_s=0.2, grace_s=0.5))
    assert outcome.ended == "deadline"
    assert gone(int((tmp_path / "daemon").read_text()))


def test_cpu_of_a_daemon_counts(tmp_path: Path) -> None:
    outcome = run(spec(tmp_path, DAEMON.format(before="\n        while time.process_time() < 0.3: pass", after="")))
    assert outcome.cpu_seconds >= 0.3


def test_other_children_of_seatrial_are_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        short = subprocess.Popen(["sh", "-c", "exit 7"])
        run(spec(tmp_path, DAEMON.format(before="pass", after="")))
        assert other.poll() is None
        assert short.wait() == 7
        other.kill()


def test_two_runs_at_once_keep_apart(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    outcomes = []
    waits = "while not os.path.exists('go'): time.sleep(0.01)"
    longer = threading.Thread(target=lambda: outcomes.append(run(spec(tmp_path / "a", DAEMON.format(before="pass", after=waits)))))
    longer.start()
    first = int(wait_for(tmp_path / "a" / "daemon"))
    run(spec(tmp_path / "b", DAEMON.format(before="pass", after="")))
    assert gone(int((tmp_path / "b" / "daemon").read_text()))
    assert psutil.pid_exists(first)
    (tmp_path / "a" / "go").touch()
    longer.join()
    assert outcomes[0].exit_code == 0
    assert gone(first)


def test_a_run_that_ends_leaves_one_that_just_starts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child of the second run exists, and its run does not know it yet, while the first one looks for what it left behind."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    started, first_ended = threading.Event(), threading.Event()
    start = process._start

    def slow_start(spec: process.ProcessSpec) -> subprocess.Popen[bytes]:
        child = start(spec)
        if spec.cwd == tmp_path / "b":
            started.set()
            first_ended.wait(60)
        return child

    monkeypatch.setattr(process, "_start", slow_start)
    outcomes = []
    second = threading.Thread(target=lambda: outcomes.append(run(spec(tmp_path / "b", "sh", "-c", "sleep 0.2; exit 5"))))
    waits = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)"
    first = threading.Thread(target=lambda: outcomes.append(run(spec(tmp_path / "a", waits))))
    first.start()
    second.start()
    assert started.wait(60)
    (tmp_path / "a" / "go").touch()
    first.join()
    first_ended.set()
    second.join()
    assert [(outcome.ended, outcome.exit_code) for outcome in outcomes] == [("exited", 0), ("exited", 5)]


HIDDEN = "os.execve('/bin/sh', ['sh', '-c', 'echo $$ > daemon; exec sleep 60'], {})"


def test_a_hidden_orphan_in_the_session_of_its_run_is_ended_with_it(tmp_path: Path) -> None:
    """As a worker that overwrote its environment with its title, and whose server was killed."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    longer = threading.Thread(target=lambda: run(spec(tmp_path / "a", "sh", "-c", "echo $$ > pid; until [ -e go ]; do sleep 0.05; done")))
    longer.start()
    wait_for(tmp_path / "a" / "pid")
    run(spec(tmp_path / "b", DAEMON.replace("os.setsid()", "pass").format(before=HIDDEN, after="")))
    assert gone(int((tmp_path / "b" / "daemon").read_text()))
    (tmp_path / "a" / "go").touch()
    longer.join()


def test_a_hidden_orphan_that_left_its_session_is_ended_with_the_last_run(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    until = "echo $$ > pid; until [ -e go ]; do sleep 0.05; done"
    others = {name: threading.Thread(target=run, args=(spec(tmp_path / name, "sh", "-c", until),)) for name in ("a", "c")}
    others["a"].start()
    wait_for(tmp_path / "a" / "pid")
    run(spec(tmp_path / "b", DAEMON.format(before=HIDDEN, after="")))
    daemon = int((tmp_path / "b" / "daemon").read_text())
    others["c"].start()  # after the orphan was there
    wait_for(tmp_path / "c" / "pid")
    for name in ("a", "c"):
        assert psutil.pid_exists(daemon)
        (tmp_path / name / "go").touch()
        others[name].join()
    assert gone(daemon)


@pytest.mark.slow
def test_many_runs_at_once(tmp_path: Path) -> None:
    def several(number: int) -> list[int | None]:
        directory = tmp_path / str(number)
        directory.mkdir()
        return [run(spec(directory, "sh", "-c", f"sleep 0.0{number}; exit {number}")).exit_code for _ in range(4)]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(several, range(8))) == [[number] * 4 for number in range(8)]


SEATRIAL = """
import sys
from pathlib import Path
from seatrial.runtime.process import run
sys.path.insert(0, sys.argv[3])
from tests.runtime.children import DAEMON, spec
run(spec(Path(sys.argv[1]), DAEMON.format(before="pass", after="print(os.getpid(), flush=True); time.sleep(60)"), run_id=sys.argv[2]))
"""


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The directory of a run whose Seatrial was killed with SIGKILL while a daemon of it was running."""
    argv = [sys.executable, "-c", SEATRIAL, str(tmp_path), f"killed-{tmp_path}", str(Path(__file__).parents[2])]
    with subprocess.Popen(argv) as seatrial:
        wait_for(tmp_path / "run.log")
        seatrial.kill()
    return tmp_path


def test_a_killed_seatrial_takes_its_child_along_and_leftovers_are_ended(killed: Path) -> None:
    child, daemon = int(lines(killed)[0]), int((killed / "daemon").read_text())
    wait_until(lambda: ended(child), "the child ended with its Seatrial")
    assert psutil.Process(daemon).is_running()
    record = pid_file(killed / "run.log")
    assert end_leftovers(record) == 1
    assert ended(daemon)
    assert not record.exists()
    assert end_leftovers(record) == 0


KILLED_AT_THE_START = """
import os, signal, sys
from pathlib import Path
from seatrial.runtime import process
sys.path.insert(0, sys.argv[3])
from tests.runtime.children import DAEMON, spec, wait_for
start = process._start
def killed_after(spec):
    start(spec)
    wait_for(Path(sys.argv[1]) / "daemon")
    os.kill(os.getpid(), signal.SIGKILL)
process._start = killed_after
process.run(spec(Path(sys.argv[1]), DAEMON.format(before="pass", after="time.sleep(60)"), run_id=sys.argv[2]))
"""


def test_a_seatrial_that_is_killed_before_it_knows_its_child_leaves_nothing_unknown(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", KILLED_AT_THE_START, str(tmp_path), f"killed-{tmp_path}", str(Path(__file__).parents[2])]
    assert subprocess.run(argv, timeout=ALMOST_A_MINUTE, check=False).returncode == -signal.SIGKILL
    daemon = psutil.Process(int((tmp_path / "daemon").read_text()))
    assert daemon.is_running()
    record = pid_file(tmp_path / "run.log")
    assert end_leftovers(record) >= 1  # the child itself may still be dying
    assert ended(daemon.pid)
    assert not record.exists()


def test_what_leftovers_start_when_they_are_asked_to_end_is_ended_too(tmp_path: Path) -> None:
    again = "trap 'setsid sleep 60 & echo $! > second; exit' TERM; echo $$ > first; while :; do sleep 0.05; done"
    with subprocess.Popen(["sh", "-c", again], cwd=tmp_path, env={**os.environ, "SEATRIAL_RUN": str(tmp_path)}) as left:
        wait_for(tmp_path / "first")
        started = psutil.Process(left.pid).create_time()
        record = PidFile(run_id=str(tmp_path), pid=left.pid, started=started, owner=os.getpid(), owner_started=0)
        files.write_json(tmp_path / "run.log.pids", record)
        assert end_leftovers(tmp_path / "run.log.pids") >= 2
    assert ended(int((tmp_path / "second").read_text()))


STARTS_ANOTHER = """
import os, signal, time
def another(*_):
    if os.fork():
        os._exit(0)
    os.setsid()
    with open("another.part", "w") as part:
        part.write(str(os.getpid()))
    os.rename("another.part", "another")
    time.sleep(60)
signal.signal(signal.SIGUSR1, another)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open("first", "w") as file:
    file.write(str(os.getpid()))
time.sleep(60)
"""


def starting_another(below: Path, monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    """In the last of so many looks at all processes, after they were listed, the first starts another and ends."""
    marked, looked = process_tree.marked, iter(range(looks - 1, -1, -1))

    def then(run_id: str) -> list[int]:
        found = list(marked(run_id))
        if next(looked, None) == 0:
            os.kill(int((below / "first").read_text()), signal.SIGUSR1)
            wait_for(below / "another")
            wait_until(lambda: ended(int((below / "first").read_text())), "the first has ended")
        return found

    monkeypatch.setattr(process_tree, "marked", then)


def test_what_starts_another_and_ends_while_it_is_looked_for_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of processes is never of one moment."""
    run_id = str(tmp_path)
    with announced(run_id):
        argv = [sys.executable, "-S", "-c", STARTS_ANOTHER]
        child = subprocess.Popen(argv, cwd=tmp_path, env={**os.environ, "SEATRIAL_RUN": run_id}, start_new_session=True)
        wait_for(tmp_path / "first")
        process_tree.adopt_orphans()
        tree = ProcessTree(child.pid, run_id)
        starting_another(tmp_path, monkeypatch, looks=1)
        assert not tree.end(0, time.sleep)
    child.returncode = tree.status  # or Popen says that it still runs
    assert ended(int((tmp_path / "another").read_text()))


def test_the_same_of_what_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [sys.executable, "-S", "-c", STARTS_ANOTHER]
    with subprocess.Popen(argv, cwd=tmp_path, env={**os.environ, "SEATRIAL_RUN": str(tmp_path)}) as left:
        wait_for(tmp_path / "first")
        started = psutil.Process(left.pid).create_time()
        record = PidFile(run_id=str(tmp_path), pid=left.pid, started=started, owner=os.getpid(), owner_started=0)
        files.write_json(tmp_path / "run.log.pids", record)
        starting_another(tmp_path, monkeypatch, looks=2)
        assert end_leftovers(tmp_path / "run.log.pids", grace_s=0.1) == 2
    assert ended(int((tmp_path / "another").read_text()))


def test_parents_are_asked_to_end_before_their_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one of them takes the end of its child for a result. Pids say nothing: they start again from the beginning."""
    # Each starts the one before it, so that numbers fall from parents to children.
    parents = {8: os.getpid(), **{pid: pid + 1 for pid in range(2, 8)}}
    asked: list[int] = []
    monkeypatch.setattr(process_tree, "by_parent", lambda: {parent: [pid] for pid, parent in parents.items() if pid not in asked})
    monkeypatch.setattr(process_tree, "marked", lambda _: sorted(parents.keys() - set(asked)))
    monkeypatch.setattr(process_tree, "processes", lambda pids: [mock.Mock(pid=pid) for pid in pids])
    monkeypatch.setattr(process_tree, "is_alive", lambda process: process.pid not in asked)
    monkeypatch.setattr(process_tree, "send", lambda process, _: asked.append(process.pid))
    with announced(str(tmp_path)):
        tree = ProcessTree(8, str(tmp_path))
        tree.status = 0  # or its end would be waited for
        assert not tree.end(60, lambda _: None)
    assert asked == [8, 7, 6, 5, 4, 3, 2]


def test_leftovers_of_a_later_start_or_another_run_are_left_alone(killed: Path) -> None:
    record, daemon = pid_file(killed / "run.log"), psutil.Process(int((killed / "daemon").read_text()))
    written = files.read_model(record, PidFile)
    files.write_json(record, written.model_copy(update={"run_id": "another"}))
    assert end_leftovers(record) == 0
    files.write_json(record, written.model_copy(update={"started": time.time() + 3600}))
    assert end_leftovers(record) == 0
    assert daemon.is_running()
    daemon.kill()


def test_a_run_that_is_still_under_way_is_not_ended(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        record = PidFile(run_id="x", pid=1, started=0, owner=other.pid, owner_started=psutil.Process(other.pid).create_time())
        files.write_json(tmp_path / "run.log.pids", record)
        with pytest.raises(UserError, match=f"process {other.pid} is still running this"):
            end_leftovers(tmp_path / "run.log.pids")
        other.send_signal(signal.SIGKILL)
    assert end_leftovers(tmp_path / "run.log.pids") == 0


def test_the_pid_file_names_the_child(tmp_path: Path) -> None:
    seen: list[PidFile] = []
    run(spec(tmp_path, "sleep", "0.3"), lambda _: seen.append(files.read_model(tmp_path / "run.log.pids", PidFile)))
    assert seen[0].owner == os.getpid()
    assert seen[0].pid not in (None, os.getpid())
    assert abs(seen[0].started - time.time()) < 600


def test_a_torn_pid_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run.log.pids").write_text("{")
    with pytest.raises(UserError, match=r"run\.log\.pids"):
        end_leftovers(tmp_path / "run.log.pids")


def test_ended_orphans_of_no_run_are_collected_and_own_children_are_not(tmp_path: Path) -> None:
    """Of a Seatrial that was killed, or of a helper: nobody else would, and a long session would fill the table of processes."""
    process_tree.adopt_orphans()
    leave = "sleep 0.05 & echo $! > orphan"
    subprocess.run(["sh", "-c", leave], cwd=tmp_path, start_new_session=True, check=True)
    with subprocess.Popen(["sh", "-c", "exit 7"]) as own, subprocess.Popen(["sh", "-c", "exit 8"], start_new_session=True) as leader:
        orphan = int((tmp_path / "orphan").read_text())
        wait_until(lambda: all(map(ended, (orphan, own.pid, leader.pid))), "all have ended")
        run(spec(tmp_path, "true"))
        assert gone(orphan)
        assert (own.wait(), leader.wait()) == (7, 8)
