"""A tiny project with guards, and pytest run on it in a process of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.pytest_seatrial.pytest_server import run_pytest

DEADLINE_SECONDS = 120
GUIDE = """
[groups.hf_gated]
reason = "needs access to gated models"

[groups.mcore]
mode = "only"
"""
FOUR_KINDS = """
import pytest

def test_plain(): pass

@pytest.mark.hf_gated
def test_gated(): pass

@pytest.mark.mcore
def test_mcore(): pass

@pytest.mark.mcore
@pytest.mark.hf_gated
def test_both(): pass
"""


@dataclass(frozen=True)
class Ran:
    """What pytest answered."""

    code: int
    text: str

    def tests(self, word: str) -> set[str]:
        """Names of the tests with this outcome, as `-v` prints them, alone and under xdist."""
        alone = re.findall(rf"::(\w+)(?:\[[^\]]*\])? {word}", self.text)
        return {*alone, *re.findall(rf"{word} \S+::(\w+)", self.text)}


def project(folder: Path, toml: str = GUIDE, tests: str = FOUR_KINDS, **files: str) -> Path:
    """A project with one test file; more files by name, with __ for a slash and the suffix .py."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    (folder / "seatrial.toml").write_text(toml)
    (folder / "test_it.py").write_text(tests)
    for name, text in files.items():
        file = folder / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def pytest_in(folder: Path, *args: str, env: Mapping[str, str] | None = None) -> Ran:
    """Run pytest; variables of the outer session that would reach it are left out."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "HF_", "CUDA_VISIBLE", "COV_"))}
    done = run_pytest(
        ["-v", "-p", "no:cacheprovider", *args],
        cwd=folder,
        env={**clean, "COLUMNS": "300", "PYTHONDONTWRITEBYTECODE": "1", **(env or {})},
        timeout=DEADLINE_SECONDS,
    )
    return Ran(done.returncode, done.stdout + done.stderr)
