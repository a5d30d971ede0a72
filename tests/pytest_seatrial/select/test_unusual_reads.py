"""Files that are read by ways around `open(name)`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pytest_seatrial.select.projects import Small

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


MEASURED = """
import os, pathlib, shutil

def test_it():
    assert {} == 1

def test_whether_it_is_there():
    assert os.path.exists("data/a.txt") and pathlib.Path("data/a.txt").exists() and not pathlib.Path("data/a.txt").is_symlink()
    assert os.access("data/a.txt", os.R_OK) and shutil.which("sh") and os.path.realpath("data/a.txt")
"""


@pytest.mark.parametrize(
    "size",
    [
        'os.path.getsize("data/a.txt")',
        'os.stat("data/a.txt").st_size',
        'pathlib.Path("data/a.txt").stat().st_size',
        'os.stat("a.txt", dir_fd=os.open("data", os.O_RDONLY)).st_size',
    ],
)
def test_the_size_of_a_file_is_read_from_it(tmp_path: Path, size: str) -> None:
    project = Small(tmp_path, {"data/a.txt": "1", "test_a.py": MEASURED.format(size)})
    project.settled()
    project.write("data/a.txt", "12")
    assert project.run().ran == {"test_it"}


@pytest.mark.parametrize("asked", ['os.access("new.txt", os.F_OK)', "stat()"])
def test_a_name_that_was_asked_for_and_appears(tmp_path: Path, asked: str) -> None:
    text = f"""
        import os

        def stat():
            try:
                return os.stat("new.txt")
            except FileNotFoundError:
                return None

        def test_it():
            assert not {asked}
        """
    project = Small(tmp_path, {"test_a.py": text})
    project.settled()
    project.write("new.txt", "")
    assert project.run().ran == {"test_it"}


def test_what_asks_for_files_is_as_able_as_before(tmp_path: Path) -> None:
    text = """
        import multiprocessing, os, pickle, shutil, subprocess, sys

        def test_it(tmp_path):
            assert os.stat in os.supports_dir_fd and os.access in os.supports_effective_ids
            assert pickle.loads(pickle.dumps(os.stat)) is os.stat
            (tmp_path / "a").mkdir()
            (tmp_path / "a" / "b").write_text("")
            shutil.copytree(tmp_path / "a", tmp_path / "c")
            shutil.rmtree(tmp_path / "a")
            assert os.stat(path=tmp_path / "c" / "b", follow_symlinks=False).st_size == 0
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                assert pool.map(os.stat, [str(tmp_path)])[0].st_size
        """
    project = Small(tmp_path, {"test_a.py": text})
    project.settled()
