"""Programs that cannot be traced: what they are told on the command line, or in scripts, stands for what they do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.pytest_seatrial.select.projects import Small

pytestmark = pytest.mark.slow

FILES = {
    "tools/s.py": "import lib\nprint(lib.f())\n",
    "tools/path.py": "import os, sys\nsys.path.insert(0, os.path.dirname(__file__))\nimport lib\n",
    "tools/lib.py": "import deep\n\ndef f():\n    return deep.g()\n",
    "tools/deep.py": "def g():\n    return 1\n",
    "leaf.py": "def h():\n    return 1\n",
    "run.sh": "$PY -I tools/path.py\n",
    "Makefile": "all:\n\t@sh scripts/a.sh\n",
    "scripts/a.sh": "cat data/one.txt\n",
    "data/one.txt": "1\n",
    "sub/data.txt": "1\n",
    "test_far.py": "def test_far():\n    pass\n",
}
WAYS = {
    "isolated": ("[sys.executable, '-I', 'tools/path.py']", "", "tools/deep.py"),
    "without variables": ("[sys.executable, 'tools/s.py']", ", env={}", "tools/deep.py"),
    "by a shell script": ("['sh', 'run.sh']", ", env={**os.environ, 'PY': sys.executable}", "tools/deep.py"),
    "text of a program": ("[sys.executable, '-E', '-c', 'import sys; sys.path.insert(0, \"\"); import leaf; leaf.h()']", "", "leaf.py"),
    "make": ("['make', '-s', 'all']", "", "scripts/a.sh"),
    "make's own file": ("['make', '-s', 'all']", "", "Makefile"),
    "a pattern": ("'cat sub/*.txt'", ", shell=True", "sub/data.txt"),
    "a new file of a pattern": ("'cat sub/*.txt'", ", shell=True", "sub/new.txt"),
    "a directory": ("['ls', 'sub']", "", "sub/new.txt"),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_program_is_told_to_use_counts(tmp_path: Path, way: str) -> None:
    argv, more, file = WAYS[way]
    if argv.startswith("['make'") and shutil.which("make") is None:
        pytest.skip("needs make")
    tests = f"import os, subprocess, sys\n\ndef test_runs():\n    subprocess.run({argv}, check=True{more})\n"
    small = Small(tmp_path / "p", {**FILES, "test_u.py": tests})
    small.settled()
    path = small.root / file
    small.write(file, (path.read_text() if path.exists() else "") + ("def other(): pass\n" if file.endswith(".py") else "# other\n"))
    session = small.run()
    assert session.ran == {"test_runs"}, session.out
