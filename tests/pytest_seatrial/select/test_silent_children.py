"""Programs that do not report: what they may have read is assumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pytest_seatrial.select.projects import Small

pytestmark = pytest.mark.slow

NEIGHBOUR = {
    "tools/s.py": "import sys, os\nsys.path.insert(0, os.path.dirname(__file__))\nimport lib\nprint(lib.value())\n",
    "tools/lib.py": "def value():\n    return 1\n",
}
ASKS = "import os, subprocess, sys\n\ndef test_it(): assert subprocess.check_output({}, text=True).strip() == '1'\n"


def _missed(tmp_path: Path, files: dict[str, str], edited: str, old: str, new: str) -> None:
    project = Small(tmp_path, files)
    project.settled()
    project.edit(edited, old, new)
    after = project.run()
    assert (after.ran, after.code) == ({"test_it"}, 1), after.out


@pytest.mark.parametrize("command", ["[sys.executable, '-I', 'tools/s.py']", "[sys.executable, 'tools/s.py'], env={}"])
def test_a_neighbour_of_a_script_that_does_not_report(tmp_path: Path, command: str) -> None:
    _missed(tmp_path, {**NEIGHBOUR, "test_a.py": ASKS.format(command)}, "tools/lib.py", "return 1", "return 2")


def test_a_python_that_does_not_report_started_by_a_shell_script(tmp_path: Path) -> None:
    files = {**NEIGHBOUR, "run.sh": "$PY -I tools/s.py\n"}
    files["test_a.py"] = ASKS.format("['bash', 'run.sh'], env=dict(os.environ, PY=sys.executable)")
    _missed(tmp_path, files, "tools/lib.py", "return 1", "return 2")


def test_imports_in_the_text_of_a_command(tmp_path: Path) -> None:
    files = {"leaf.py": "V = 1\n", "test_a.py": ASKS.format("[sys.executable, '-E', '-c', 'import leaf; print(leaf.V)']")}
    _missed(tmp_path, files, "leaf.py", "V = 1", "V = 2")


@pytest.mark.parametrize(("edited", "old"), [("Makefile", "sh a.sh"), ("a.sh", "echo 1")])
def test_a_makefile_is_read_without_being_named(tmp_path: Path, edited: str, old: str) -> None:
    files = {"Makefile": "all:\n\t@sh a.sh\n", "a.sh": "echo 1\n", "test_a.py": ASKS.format("['make', '-s', 'all']")}
    _missed(tmp_path, files, edited, old, "echo 2")


def test_a_glob_in_a_shell_command(tmp_path: Path) -> None:
    files = {"sub/data.txt": "1\n", "test_a.py": ASKS.format("'cat sub/*.txt', shell=True")}
    _missed(tmp_path, files, "sub/data.txt", "1", "2")
