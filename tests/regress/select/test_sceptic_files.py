"""Files that are read by ways around `open(name)`."""

from __future__ import annotations

from pathlib import Path

import pytest

from regress.select.projects import Small

LINKED = """
import os, pathlib

def test_it(tmp_path):
    {}
    assert (tmp_path / "link").read_text() == "1"
"""
BELOW = """
import os

def test_it():
    directory = os.open("data", os.O_RDONLY)
    file = os.open("a.txt", os.O_RDONLY, dir_fd=directory)
    assert os.read(file, 1) == b"1"
    os.close(file)
    os.close(directory)
"""


@pytest.mark.parametrize(
    "made",
    [
        '(tmp_path / "link").symlink_to(pathlib.Path("data/a.txt").resolve())',
        'os.symlink(os.path.abspath("data/a.txt"), tmp_path / "link")',
    ],
)
def test_a_file_read_through_a_link_that_the_test_made(tmp_path: Path, made: str) -> None:
    project = Small(tmp_path, {"data/a.txt": "1", "test_a.py": LINKED.format(made)})
    project.settled()
    project.edit("data/a.txt", "1", "2")
    after = project.run()
    assert (after.ran, after.code) == ({"test_it"}, 1), after.out


def test_a_file_read_through_a_hard_link_that_the_test_made(tmp_path: Path) -> None:
    project = Small(tmp_path, {"data/a.txt": "1", "test_a.py": LINKED.format('os.link("data/a.txt", tmp_path / "link")')})
    assert project.run().code == 0
    project.edit("data/a.txt", "1", "2")
    after = project.run()
    assert (after.ran, after.code) == ({"test_it"}, 1), after.out


def test_a_file_named_relative_to_an_open_directory(tmp_path: Path) -> None:
    project = Small(tmp_path, {"data/a.txt": "1", "test_a.py": BELOW})
    project.settled()
    project.edit("data/a.txt", "1", "2")
    after = project.run()
    assert (after.ran, after.code) == ({"test_it"}, 1), after.out
