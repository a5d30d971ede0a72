"""Processes that a test starts: what they do is told, however they are started, and whatever becomes of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pytest_seatrial.select.trace.trace_events import read_logs
from tests.pytest_seatrial.select.trace.traced import trace

pytestmark = pytest.mark.slow

FILES = {
    "pkg/__init__.py": "",
    "pkg/work.py": "import os, signal\ndef double(x): return 2 * x\ndef end(): double(1); os.kill(os.getpid(), signal.SIGKILL)\n",
    "pkg/__main__.py": "from pkg.work import double\nprint(double(3))\n",
    "script.py": "from pkg.work import double\ndef main(): print(double(2))\nif __name__ == '__main__': main()\n",
}


@pytest.mark.parametrize("how", ["['script.py']", "['-m', 'pkg']", "['-c', 'import pkg.work; pkg.work.double(1)']", "['-S', 'script.py']"])
def test_python_commands(tmp_path: Path, how: str) -> None:
    told = trace(tmp_path, FILES, f"import subprocess\nrecorder.switch(7)\nsubprocess.run([sys.executable, *{how}], check=True)")
    argv = [sys.executable, *eval_list(how)]
    assert (json.dumps(argv), str(tmp_path / "project")) in told.of("spawn", 7)
    if "-S" in how:  # no site, so nothing of ours: nobody said hello, which is what the brain looks for
        assert told.children == []
        return
    [(process, _)] = told.children
    assert process.argv == tuple(argv)
    assert process.kind == "python"
    assert "pkg/work.py:double" in told.hits(7)
    if "script" in how:
        assert "script.py" in told.paths("whole", 7)
    if "-m" in how:
        assert "pkg/__main__.py" in told.paths("whole", 7)


def eval_list(text: str) -> list[str]:
    return [str(part) for part in json.loads(text.replace("'", '"'))]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_and_pools(tmp_path: Path, method: str) -> None:
    script = f"""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from pkg.work import double
    context = multiprocessing.get_context("{method}")
    recorder.switch(1)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(double, 2).result(60) == 4
        recorder.switch(2)
        assert pool.submit(double, 2).result(60) == 4
    recorder.switch(3)
    process = context.Process(target=double, args=(1,)); process.start(); process.join()
    """
    told = trace(tmp_path, FILES, script)
    for epoch in (1, 2, 3):
        assert told.hits(epoch, own=False) == {"pkg/work.py:double"}
        assert told.hits(epoch, children=False) == set()
    logs = {process.log for process, _ in told.children}
    assert all(process.parent in logs for process, _ in told.children if process.kind == "fork" and method == "forkserver")


def test_a_killed_child_has_told_everything(tmp_path: Path) -> None:
    script = "import subprocess\nrecorder.switch(1)\nsubprocess.run([sys.executable, '-c', 'import pkg.work; pkg.work.end()'])"
    assert trace(tmp_path, FILES, script).hits(1) == {"pkg/work.py:end", "pkg/work.py:double"}


def test_the_childs_own_sitecustomize_still_runs_and_its_path_is_as_ever(tmp_path: Path) -> None:
    files = {**FILES, "site/sitecustomize.py": "import sys\nsys.marked = True\n"}
    script = """
    import subprocess
    env = {**os.environ, "PYTHONPATH": os.environ["PYTHONPATH"] + os.pathsep + "site"}
    code = "import sys, json; print(json.dumps([sys.marked, sys.path, sorted(m for m in sys.modules if 'seatrial' in m)]))"
    print(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout)
    """
    marked, path, modules = json.loads(trace(tmp_path, files, script).output)
    assert marked is True
    assert not any(part.endswith("select/start") for part in path)
    assert modules == []


def test_a_start_that_fails_is_told_and_the_child_goes_on(tmp_path: Path) -> None:
    script = """
    import subprocess
    told = json.loads(os.environ["SEATRIAL_SELECT"]); del told["root"]
    env = {**os.environ, "SEATRIAL_SELECT": json.dumps(told)}
    subprocess.run([sys.executable, "-c", "print('well')"], env=env, check=True)
    """
    told = trace(tmp_path, FILES, script)
    assert "well" in told.output
    [(process, events)] = told.children
    assert events == []
    assert "KeyError" in process.trouble[0]


def test_a_daemon_that_closes_descriptors_does_not_find_our_lines_in_its_files(tmp_path: Path) -> None:
    code = "import os, pkg.work; os.closerange(3, 64); f = [open(f'own{i}', 'w') for i in range(9)]; pkg.work.double(1)"
    told = trace(tmp_path, FILES, f"import subprocess\nrecorder.switch(1)\nsubprocess.run([sys.executable, '-c', {code!r}], check=True)")
    assert [path.read_text() for path in (tmp_path / "project").glob("own*")] == [""] * 9
    assert told.hits(1) == {"pkg/work.py:double"}


def test_torn_and_foreign_lines_are_told(tmp_path: Path) -> None:
    (tmp_path / "5-x.log").write_bytes(b'["hello", 1, "python", "[]"]\nrubbish\n["hit", 1, "3", ""]\n["hit", 1, "4"')
    (tmp_path / "6-x.log.lost").write_bytes(b"")
    (torn, events), (lost, _) = read_logs(tmp_path)
    assert [event.kind for event in events] == ["hello", "hit"]
    assert torn.trouble == ("line 2 cannot be read", "line 4 is torn")
    assert "events could not be written" in lost.trouble


def test_a_session_inside_a_recorded_child_takes_nothing_from_the_outer_one(tmp_path: Path) -> None:
    inner = """
    import sys
    from pathlib import Path
    from pytest_seatrial.select.trace.startup import start
    recorder = start(Path("../inner"), Path("."), Path("../cache"), [], None)
    import pkg.work
    recorder.switch(1)
    pkg.work.double(1)
    assert len([number for number in recorder.drain().hits if number >= 0]) == 1
    recorder.stop()
    import pkg.late
    pkg.late.f()
    """
    files = {**FILES, "inner.py": inner, "pkg/late.py": "def f(): return 1\n"}
    told = trace(tmp_path, files, "import subprocess\nrecorder.switch(3)\nsubprocess.run([sys.executable, 'inner.py'], check=True)")
    assert "pkg/work.py" in told.paths("whole", 3)
    assert "pkg/late.py:f" in told.hits(3)
