"""Every way of loading a module is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pytest_seatrial.select.trace.traced import trace

F = "def f(): return 1\n"


@pytest.mark.parametrize("cached", [False, True])
def test_a_spec_from_a_file_is_instrumented_also_when_python_has_it_compiled(tmp_path: Path, cached: bool) -> None:
    script = """
    import importlib.util, py_compile
    if CACHED: py_compile.compile("plug/x.py")
    recorder.switch(1)
    spec = importlib.util.spec_from_file_location("anything", "plug/x.py")
    module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
    recorder.switch(2)
    module.f()
    """
    told = trace(tmp_path, {"plug/x.py": F}, script.replace("CACHED", str(cached)))
    assert told.hits(2) == {"plug/x.py:f"}
    assert ("", "plug/x.py") in told.of("load", 1)


def test_a_dynamic_import_is_an_edge_also_when_the_module_is_there_already(tmp_path: Path) -> None:
    files = {
        "a.py": "import importlib\ndef get(name): return importlib.import_module(name)",
        "b.py": "def get(name): return __import__(name)",
        "plug.py": "X = 1",
    }
    told = trace(tmp_path, files, "import a, b, plug\nrecorder.switch(1)\na.get('plug')\nrecorder.switch(2)\nassert b.get('plug').X == 1")
    assert told.of("load", 1) == {("a.py", "plug.py")}
    assert told.of("load", 2) == {("b.py", "plug.py")}


def test_reload_run_path_and_exec_of_text_are_seen(tmp_path: Path) -> None:
    files = {"a.py": F, "script.py": F + "f()", "text.py": F}
    told = trace(
        tmp_path,
        files,
        """
        import importlib, runpy, a
        recorder.switch(1); importlib.reload(a)
        recorder.switch(2); a.f()
        recorder.switch(3); runpy.run_path("script.py")
        recorder.switch(4); runpy.run_module("a")
        recorder.switch(5); compile(open("text.py").read(), "text.py", "exec")
        """,
    )
    assert ("", "a.py") in told.of("load", 1)
    assert told.hits(2) == {"a.py:f"}
    assert told.paths("read", 3) == {"script.py"}
    assert told.paths("whole", 4) == {"a.py"}
    assert told.paths("read", 5) == {"text.py"}


def test_a_loader_with_its_own_compiler_keeps_it_and_its_file_is_whole(tmp_path: Path) -> None:
    script = """
    import importlib.util
    from importlib.machinery import SourceFileLoader
    class Own(SourceFileLoader):
        def source_to_code(self, data, path, **kwargs): return compile(b"X = 42", path, "exec")
    spec = importlib.util.spec_from_file_location("a", "a.py", loader=Own("a", "a.py"))
    module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
    assert module.X == 42
    """
    assert trace(tmp_path, {"a.py": F}, script).wholes() == {("a.py", "a.py")}


@pytest.mark.parametrize("text", ["# torch.compile\n", "# triton\n", "# numba\n"])
def test_files_for_other_compilers_are_whole(tmp_path: Path, text: str) -> None:
    told = trace(tmp_path, {"a.py": text + F}, "import a\nrecorder.switch(1)\na.f()")
    assert told.wholes() == {("a.py", "a.py")}
    assert told.hits(1) == set()


def test_files_that_the_user_leaves_out_are_whole(tmp_path: Path) -> None:
    assert trace(tmp_path, {"gen/a.py": F}, "import gen.a", skip=("gen/*",)).wholes() == {("gen/a.py", "gen/a.py")}


def test_namespace_packages_encodings_and_a_linked_root(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "project")
    (tmp_path / "project" / "space").mkdir(parents=True)
    (tmp_path / "project" / "space" / "b.py").write_bytes("# coding: latin-1\ndef f(): return 'ä'\n".encode("latin-1"))
    told = trace(tmp_path, {}, "import space.b\nrecorder.switch(1)\nassert space.b.f() == chr(228)", root="link")
    assert told.hits(1) == {"space/b.py:f"}


def test_a_module_that_fails_leaves_no_context_and_no_frames_of_ours(tmp_path: Path) -> None:
    script = """
    import traceback
    try:
        import bad
    except ZeroDivisionError:
        text = traceback.format_exc()
    import good
    recorder.switch(1); good.f()
    assert "importlib" not in text and "seatrial" not in text, text
    assert "line 2" in text
    try:
        import broken
    except SyntaxError as error:
        assert error.filename.endswith("broken.py") and error.lineno == 1
    """
    told = trace(tmp_path, {"bad.py": "import good\n1 / 0\n", "good.py": F, "broken.py": "def f(:\n"}, script)
    assert told.hits(1) == {"good.py:f"}
    assert ("broken.py", "broken.py") in told.of("whole")


def test_environments_below_the_root_are_not_the_projects(tmp_path: Path) -> None:
    files = {"env/pyvenv.cfg": "", "env/lib/x.py": F, "vendor/site-packages/y.py": F}
    script = "sys.path[:0] = ['env/lib', 'vendor/site-packages']\nrecorder.switch(1)\nimport x, y\nx.f(), y.f()"
    told = trace(tmp_path, files, script)
    assert not [event for event in told.own if event.epoch == 1 and event.kind != "exists"]


def test_an_import_that_finds_nothing_may_find_something_tomorrow(tmp_path: Path) -> None:
    told = trace(tmp_path, {"a.py": "try:\n    import extra\nexcept ImportError:\n    extra = None\n"}, "import a")
    assert ("extra.py", "a.py") in told.of("exists")


def test_what_was_imported_before_is_whole(tmp_path: Path) -> None:
    script = """
    import early
    recorder.stop()
    from pytest_seatrial.select.trace.startup import start
    again = start(Path("../again"), Path("."), Path("../cache"), [], None)
    told = again.drain().events
    assert ["whole", 0, "early.py", ""] in [told[at : at + 4] for at in range(0, len(told), 4)]
    again.stop()
    """
    trace(tmp_path, {"early.py": F}, script)
