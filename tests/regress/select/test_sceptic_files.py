"""Files that are read by ways around `open(name)`."""

from __future__ import annotations

from pathlib import Path

import pytest

from regress.select.projects import Small

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize(
    "asked", ['os.path.exists("a\\0b")', 'os.path.exists("n" * 5000)', 'os.path.isfile("\\udcff\\udc00")', 'glob.glob("a\\0*")']
)
def test_a_name_that_no_file_can_have_breaks_nothing(tmp_path: Path, asked: str) -> None:
    project = Small(tmp_path, {"test_a.py": f"import glob, os\n\ndef test_it(): assert not {asked}\n"})
    assert project.settled() == {"test_it"}


def test_a_link_on_the_way_that_points_elsewhere(tmp_path: Path) -> None:
    files = {"one/x": "1", "two/x": "2", "test_a.py": "def test_it(): assert open('data/x').read() == '1'\n"}
    project = Small(tmp_path, files)
    (tmp_path / "data").symlink_to("one")
    project.settled()
    (tmp_path / "data").unlink()
    (tmp_path / "data").symlink_to("two")
    after = project.run()
    assert (after.ran, after.code) == ({"test_it"}, 1), after.out


def test_a_file_whose_name_is_no_text(tmp_path: Path) -> None:
    files = {"test_a.py": "def test_it(): assert open(b'data\\xff.txt').read() == '1'\n\ndef test_other(): pass\n"}
    project = Small(tmp_path, files)
    data = tmp_path / "data\udcff.txt"
    data.write_text("1")
    project.settled()
    data.write_text("2")
    after = project.run()
    assert (after.ran, after.code) == ({"test_it"}, 1), after.out
