"""Children that record although Seatrial is not installed for them, and those that do not although others with their command line did."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pytest_seatrial.select.projects import Small

pytestmark = pytest.mark.slow

BARE = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
SCRIPT = {"script.py": "import helper\nprint(helper.f())\n", "helper.py": "def f():\n    return 1\n\ndef unused():\n    return 3\n"}
HEAD = "import os, subprocess, sys\n\ndef out(*args, **more): return subprocess.check_output(*args, text=True, **more).strip()\n\n"


def _bare() -> str:
    found = subprocess.run([BARE, "-c", "import seatrial"], capture_output=True, timeout=60, check=False) if BARE.exists() else None
    if found is None or found.returncode == 0:
        pytest.skip("needs a Python without Seatrial")
    return str(BARE)


@pytest.mark.parametrize("command", ["[{0!r}, 'script.py']", "['sh', '-c', '{0} script.py']"])
def test_a_python_without_seatrial_records_with_an_empty_cache(tmp_path: Path, command: str) -> None:
    test = HEAD + f"def test_it(): assert out({command.format(_bare())}) == '1'\n"
    small = Small(tmp_path / "p", {**SCRIPT, "test_a.py": test})
    assert small.settled() == {"test_it"}
    small.edit("helper.py", "return 3", "return 4")
    assert small.run().ran == set()
    small.edit("helper.py", "return 1", "return 2")
    after = small.run()
    assert (after.ran, after.code) == ({"test_it"}, 1), after.out


def test_a_failure_of_ours_while_a_module_is_loaded_leaves_the_module_to_python(tmp_path: Path) -> None:
    broken = (
        "import sys\n"
        "import pytest_seatrial.select.trace.import_loader as code\n"
        "def fails(*args): raise RuntimeError('ours')\n"
        "def pytest_configure(config): code._make = fails\n"
    )
    files = {
        "broken_s.py": broken,
        "code_s.py": "def f():\n    return 1\n",
        "test_a.py": "import code_s\n\ndef test_it(): assert code_s.f() == 1\n",
    }
    small = Small(tmp_path / "p", files)
    first = small.run("-p", "broken_s")
    assert (first.ran, first.code) == ({"test_it"}, 0), first.out
    assert small.run("-p", "broken_s").ran == set()
    small.edit("code_s.py", "return 1", "return 2")
    assert small.run("-p", "broken_s").ran == {"test_it"}


WAYS = {
    "a cleared environment": "out([sys.executable, 'script.py'], env={})",
    "without our variable": "out([sys.executable, 'script.py'], env={k: v for k, v in os.environ.items() if k != 'SEATRIAL_SELECT'})",
    "by a shell": "out(['sh', '-c', 'env -i ' + sys.executable + ' script.py'])",
}


@pytest.mark.parametrize("way", WAYS)
def test_another_test_with_the_same_command_line_does_not_speak_for_a_silent_child(tmp_path: Path, way: str) -> None:
    heard = "out(['sh', '-c', sys.executable + ' script.py'])" if way == "by a shell" else "out([sys.executable, 'script.py'])"
    test = HEAD + f"def test_heard(): assert {heard} == '1'\n\ndef test_silent(): assert {WAYS[way]} == '1'\n"
    small = Small(tmp_path / "p", {**SCRIPT, "test_a.py": test})
    small.settled()
    small.edit("helper.py", "return 1", "return 2")
    after = small.run()
    assert after.ran == {"test_heard", "test_silent"}, after.out


@pytest.mark.parametrize("silent", [WAYS["a cleared environment"], "out(['sh', '-c', 'env -i ' + sys.executable + ' script.py'])"])
def test_a_child_that_is_heard_does_not_speak_for_a_silent_one_of_the_same_test(tmp_path: Path, silent: str) -> None:
    script = "import os\nif 'SEATRIAL_SELECT' not in os.environ:\n    import helper\n    print(helper.f())\n"
    heard = "out([sys.executable, 'script.py'])"
    test = HEAD + f"def test_both():\n    {heard}\n    assert {silent} == '1'\n"
    small = Small(tmp_path / "p", {**SCRIPT, "script.py": script, "test_a.py": test})
    small.settled()
    small.edit("helper.py", "return 1", "return 2")
    after = small.run()
    assert (after.ran, after.code) == ({"test_both"}, 1), after.out


def test_children_that_are_all_heard_stay_precise(tmp_path: Path) -> None:
    run = "out([sys.executable, 'script.py'])"
    test = HEAD + f"def test_twice(): assert {run} == {run} == '1'\n\ndef test_shell(): out(['sh', '-c', sys.executable + ' script.py'])\n"
    small = Small(tmp_path / "p", {**SCRIPT, "test_a.py": test})
    small.settled()
    small.edit("helper.py", "return 3", "return 4")
    after = small.run()
    assert after.ran == set(), after.out
