import os
import subprocess
import sys
from pathlib import Path

import pytest
from fleet import pool

ROOT = Path(__file__).parents[1]


def run(*words):
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=30, env=os.environ, check=False)
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_digit_sums_in_a_pool(method):
    assert pool.sums([12, 345], method) == [3, 12]


def test_palindromes_in_a_process():
    assert pool.palindromes([121, 123, 7]) == [121, 7]


def test_the_summary_program():
    assert run(sys.executable, "scripts/summary.py", "apple", "bread") == (0, "total 8")


def test_the_summary_program_without_names():
    assert run(sys.executable, "scripts/summary.py") == (2, "nothing asked")


def test_the_shell_script_counts():
    assert run("sh", "scripts/tally.sh") == (0, "words 3")
