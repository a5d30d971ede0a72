"""Files and directories that are opened, asked for or listed, and sources that are read as text."""

from __future__ import annotations

from pathlib import Path

from tests.pytest_seatrial.select.trace.traced import trace

FILES = {"data/a.yaml": "x: 1", "mod.py": "def f():\n    return 1\n"}


def test_reads_writes_and_what_is_not_there(tmp_path: Path) -> None:
    told = trace(
        tmp_path,
        FILES,
        """
        import shutil, sqlite3
        recorder.switch(1)
        open("data/a.yaml").close(); Path("data/a.yaml").read_text()
        try: open("absent.json")
        except FileNotFoundError: pass
        recorder.switch(2)
        Path("new.txt").write_text("x"); open("log.txt", "a").close(); os.rename("new.txt", "moved.txt"); os.remove("log.txt")
        recorder.switch(3)
        with open("data/a.yaml", "r+") as file: pass
        recorder.switch(4)
        shutil.copy("data/a.yaml", "copied.yaml")
        os.close(os.open("data/a.yaml", os.O_RDONLY))
        recorder.switch(5)
        sqlite3.connect("made.db").close()
        open("/etc/hostname").close(); open("../outside", "w").close()
        """,
    )
    assert told.paths("read", 1) == {"data/a.yaml", "absent.json"}
    assert told.paths("write", 1) == set()
    assert told.paths("write", 2) == {"new.txt", "log.txt", "moved.txt"}
    assert told.paths("read", 2) == set()
    assert told.paths("read", 3) == told.paths("write", 3) == {"data/a.yaml"}
    assert told.paths("read", 4) == {"data/a.yaml"}
    assert "copied.yaml" in told.paths("write", 4)
    assert told.paths("read", 5) == set()
    assert told.paths("write", 5) == {"made.db"}
    assert told.paths("trouble") == set()


def test_listings_and_questions(tmp_path: Path) -> None:
    told = trace(
        tmp_path,
        FILES,
        """
        import glob
        recorder.switch(1); os.listdir("data")
        recorder.switch(2); list(os.scandir("data"))
        recorder.switch(3); list(Path("data").iterdir())
        recorder.switch(4); glob.glob("data/*.yaml")
        recorder.switch(5); list(os.walk("."))
        recorder.switch(6); Path("no.yaml").exists(); os.path.exists("no2.yaml"); Path("data/a.yaml").is_file(); os.path.isdir("data")
        """,
    )
    for epoch in (1, 2, 3, 4):
        assert told.paths("list", epoch) == {"data"}, epoch
    assert told.paths("list", 5) >= {"", "data"}
    assert told.paths("exists", 6) == {"no.yaml", "no2.yaml", "data/a.yaml", "data"}
    assert told.paths("read", 6) == set()


def test_links_count_under_both_names(tmp_path: Path) -> None:
    script = """
    os.symlink("data/a.yaml", "link.yaml"); os.symlink(os.path.abspath("data"), "../elsewhere")
    recorder.switch(1); open("link.yaml").close()
    recorder.switch(2); open("../elsewhere/a.yaml").close()
    """
    told = trace(tmp_path, FILES, script)
    assert told.paths("read", 1) == {"link.yaml", "data/a.yaml"}
    assert told.paths("read", 2) == {"data/a.yaml"}


def test_files_opened_at_import_belong_to_the_module(tmp_path: Path) -> None:
    told = trace(tmp_path, {**FILES, "conf.py": "X = open('data/a.yaml').read()"}, "recorder.switch(1)\nimport conf")
    assert ("data/a.yaml", "conf.py") in told.of("read", 1)


def test_sources_read_as_text_are_told_each_time(tmp_path: Path) -> None:
    script = """
    import inspect, traceback, mod
    for epoch in (1, 2):
        recorder.switch(epoch)
        assert "return 1" in inspect.getsource(mod.f)
    """
    told = trace(tmp_path, FILES, script)
    assert "mod.py" in told.paths("read", 1)
    assert "mod.py" in told.paths("read", 2)


def test_a_link_writes_itself_and_a_descriptor_of_a_directory_is_a_place(tmp_path: Path) -> None:
    script = """
    recorder.switch(1); os.symlink(os.path.abspath("data/a.yaml"), "../l"); open("../l").close()
    recorder.switch(2); os.link("data/a.yaml", "../h")
    place = os.open("data", os.O_RDONLY)
    recorder.switch(3); os.close(os.open("a.yaml", os.O_RDONLY, dir_fd=place))
    recorder.switch(4); os.path.exists("a\\0b")
    """
    told = trace(tmp_path, FILES, script)
    for epoch in (1, 2, 3):
        assert "data/a.yaml" in told.paths("read", epoch), epoch
    assert "data/a.yaml" not in told.paths("write")
    assert told.paths("exists", 4) == set()
    assert told.paths("trouble") == set()
