"""Small projects whose tests are run by a real pytest, in a process of its own.

- `Small(tmp_path, files)` writes the files; `run()` selects and records, and says which tests ran.
- Nothing of the outer session reaches the inner one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.pytest_seatrial.pytest_server import run_pytest

LINE = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S+)", re.MULTILINE)
SKIPPED = re.compile(r"^SKIPPED \[(\d+)\]", re.MULTILINE)


@dataclass(frozen=True)
class Session:
    """One run of pytest."""

    code: int
    out: str

    @property
    def ran(self) -> set[str]:
        """Names of the tests that ran: what follows the file, for short."""
        return {test.partition("::")[2] for _, test in LINE.findall(self.out)}

    @property
    def skipped(self) -> int:
        return sum(int(count) for count in SKIPPED.findall(self.out))


class Small:
    """A project in a directory."""

    def __init__(self, root: Path, files: dict[str, str]) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self.write("pytest.ini", "[pytest]\npythonpath = .\n")
        for name, text in files.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        # Of a text of the same size and second, Python would run what it compiled before.
        for kept in self.root.rglob("__pycache__"):
            shutil.rmtree(kept, ignore_errors=True)

    def pytest(self, *arguments: str, env: dict[str, str] | None = None, python: str = sys.executable) -> Session:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "SEATRIAL_SELECT", "PYTHONPATH"))}
        clean["XDG_CACHE_HOME"] = str(self.root.parent / "cache")
        arguments = ("-rA", "-q", "-p", "no:timeout", *arguments)
        everything = {**clean, **(env or {})}
        if python == sys.executable:
            done = run_pytest(arguments, cwd=self.root, env=everything, timeout=120, merged=True)
        else:
            done = subprocess.run(
                [python, "-m", "pytest", *arguments],
                cwd=self.root,
                env=everything,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=120,
                check=False,
            )
        return Session(done.returncode, done.stdout)

    def run(self, *arguments: str, env: dict[str, str] | None = None) -> Session:
        return self.pytest("--seatrial-select-why", *arguments, env=env)

    def settled(self, *arguments: str) -> set[str]:
        """Record everything, see that nothing is selected then, and give the names of all tests."""
        first = self.run(*arguments)
        assert first.code == 0, first.out
        second = self.run(*arguments)
        assert (second.ran, second.code) == (set(), 0), second.out
        assert "no test is affected by the change" in second.out
        return first.ran
