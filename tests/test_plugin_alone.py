"""`pytest-seatrial` stands alone: it needs pytest and nothing else, and the few facts that Seatrial has too are the same in both."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pytest_seatrial
import seatrial
from pytest_seatrial import gpus, guarded_text, results_collector
from pytest_seatrial.results_collector import read_origin
from seatrial.core import guarded
from seatrial.functional import hermetic
from seatrial.history import import_results
from seatrial.history.auto_import import OFF, VARIABLE

ROOT = Path(pytest_seatrial.__file__).parent
PACKAGE = ROOT.parents[1]
CORE = Path(seatrial.__file__).parent
LATER = {"_pytest", "xdist", "ray"}
"""May be imported where they are needed: pytest's own, and what a test session may have loaded."""
REFUSED = ("aiohttp", "typer", "rich", "pydantic", "psutil", "orjson", "jinja2", "seatrial")
PLUGINS = ("pytest_seatrial.tracker", "pytest_seatrial.guards", "pytest_seatrial.select.select_plugin")
DEADLINE_S = 120


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Top-level packages that a file imports, and whether it does so at once."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    at_once = {
        id(node) for statement in tree.body if not isinstance(statement, ast.FunctionDef | ast.ClassDef) for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from ((name.partition(".")[0], id(node) in at_once) for name in names)


def test_the_plugin_imports_pytest_and_the_standard_library_alone() -> None:
    own = {*sys.stdlib_module_names, "pytest", "pytest_seatrial"}
    found = [(path, *one) for path in ROOT.rglob("*.py") for one in imports(path)]
    assert {name for _, name, at_once in found if at_once} <= own
    assert [(path.name, name) for path, name, _ in found if name not in own | LATER] == [("results_collector.py", "seatrial")]


def test_seatrial_is_imported_only_inside_a_try() -> None:
    tree = ast.parse((ROOT / "results_collector.py").read_text(encoding="utf-8"))
    guarded = [node for each in ast.walk(tree) if isinstance(each, ast.Try) for node in each.body if isinstance(node, ast.ImportFrom)]
    assert [node.module for node in guarded if (node.module or "").startswith("seatrial.")] == ["seatrial.history.auto_import"]


def test_seatrial_does_not_need_the_plugin() -> None:
    naming = [path for path in CORE.rglob("*.py") if b"pytest" in path.read_bytes()]
    assert [path for path in naming for name, _ in imports(path) if name in ("pytest_seatrial", "pytest")] == []


def test_both_have_the_same_git() -> None:
    assert (ROOT / "safe_git.py").read_bytes() == (CORE / "instruments" / "safe_git.py").read_bytes()


def test_both_name_a_machine_alike(tmp_path: Path) -> None:
    for names in ([], ["B"], ["B", "A", "B"]):
        assert gpus.machine_here(names) == import_results.machine_here(names)
        assert gpus.gpu_counts(names) == import_results.gpu_counts(names)
    for name in ("nvidiactl", "nvidia0"):
        (tmp_path / name).touch()
        assert gpus.devices_here(tmp_path) is hermetic.devices_here(tmp_path) is (name == "nvidia0")


def test_both_take_history_to_be_off_at_the_same_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.history.auto_import.import_unit_results", lambda *_, **__: "kept")
    config = type("Config", (), {"rootpath": tmp_path, "getini": lambda *_: ""})()
    for word, lines in ((OFF, []), (OFF.upper(), []), ("", ["kept"])):
        monkeypatch.setenv(VARIABLE, word)
        assert results_collector.history_line(config, tmp_path) == lines


@pytest.mark.parametrize(("lacks", "said"), [("seatrial", ""), ("seatrial.history", ""), ("pydantic", "cannot be imported: no pydantic")])
def test_without_seatrial_nothing_is_said_and_a_broken_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str, said: str
) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "seatrial.history.auto_import":
                raise ModuleNotFoundError(f"no {lacks}", name=lacks)

    monkeypatch.delenv(VARIABLE)
    monkeypatch.delitem(sys.modules, "seatrial.history.auto_import")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    config = type("Config", (), {"rootpath": tmp_path, "getini": lambda *_: ""})()
    lines = results_collector.history_line(config, tmp_path)
    assert (len(lines), said in "".join(lines)) == (bool(said), True)


DEEP = 2000
TEXTS = (
    *("", "a = 1", "\ufeffa = 1", "a = [", f"a = {'[' * DEEP}{']' * DEEP}", f"a = {'9' * 400}", "a = 0000-00-00", "a = " + "9" * 5000),
    *(".".join("a" * DEEP) + " = 1", "a = " + "{" + ".".join("a" * 90) + " = {b.b.b.b.b.b.b.b.b.b.b.b.b.b.b.b = 1}}", 'a = "\\ud800"'),
)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_both_read_and_refuse_the_same_toml(text: str) -> None:
    try:
        expected = guarded.parse_toml(text)
    except guarded.BadValue:
        with pytest.raises(ValueError):
            guarded_text.parse_toml(text)
    else:
        assert guarded_text.parse_toml(text) == expected


@pytest.mark.parametrize("data", [b"{", b"[" * 100_000, b"[" * DEEP + b"]" * DEEP, b"9" * 400, b"9" * 5000, b"\xff", b""])
def test_json_that_cannot_be_read_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        guarded_text.parse_json(data)


def git(folder: Path, *words: str) -> None:
    names = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True)


def committed(folder: Path) -> Path:
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "a.py").write_text("A = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "a")
    return folder


@pytest.mark.parametrize("mark", ["--no-assume-unchanged", "--assume-unchanged", "--skip-worktree"])
def test_a_change_deep_in_submodules_is_seen_also_where_the_index_hides_it(tmp_path: Path, mark: str) -> None:
    inner, middle, outer = (committed(tmp_path / name) for name in ("inner", "middle", "outer"))
    git(middle, "submodule", "add", "-q", str(inner), "in")
    git(middle, "commit", "-q", "-m", "b")
    git(outer, "submodule", "add", "-q", str(middle), "mid")
    git(outer, "submodule", "update", "-q", "--init", "--recursive")
    git(outer, "commit", "-q", "-m", "b")
    assert read_origin(outer).dirty is False
    git(outer / "mid" / "in", "update-index", mark, "a.py")
    assert read_origin(outer).dirty is False
    (outer / "mid" / "in" / "a.py").write_text("A = 22\n")
    assert read_origin(outer).dirty is True


def test_a_git_that_waits_for_a_pipe_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_collector, "GIT_S", 0.5)
    root = committed(tmp_path / "outer")
    (root / ".git" / "index").unlink()
    os.mkfifo(root / ".git" / "index")
    origin = read_origin(root)
    assert (origin.project, origin.commit) == ("outer", None)
    assert "timed out" in origin.notes[0]


def test_a_branch_that_is_a_secret_is_not_written(tmp_path: Path) -> None:
    root = committed(tmp_path / "outer")
    run = "abcDEF123456" * 2
    tokens = (f"hf_{run}", f"ghp_{run}", f"github_pat_{run}_{run}", f"sk-proj-{run}", f"xoxb-1234-5678-{run}", f"AKIA{run.upper()}")
    harmless = (
        "task-scheduler-2024-rewrite",
        "hf_transformers_v5_migration_work",
        "sk-learn-upgrade-to-1.5",
        "feature/a1b2c3d4e5f6a7b8c9d0",
    )
    for name, shown in (*((f"try/{token}", "try/[redacted]") for token in tokens), *((name, name) for name in harmless)):
        (root / ".git" / "HEAD").write_text(f"ref: refs/heads/{name}\n")
        assert read_origin(root).branch == shown


RUNNER = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"refused: {{name}}", name=name)

REFUSED = {refused!r}
sys.meta_path.insert(0, Refuse())
sys.path += {paths!r}
import pytest
code = pytest.main(sys.argv[1:])
assert not {{name.partition(".")[0] for name in sys.modules}} & set(REFUSED)
sys.exit(code)
"""
TESTS = """
import pytest

def test_one(tracker):
    import subprocess, sys
    tracker.track("x", 1)
    assert tracker.get_max_mem() > 0
    subprocess.run([sys.executable, "-c", "import a"], check=True)

@pytest.mark.needs(modules=["no_such_module"])
def test_needs(): ...

@pytest.mark.gated
@pytest.mark.gpu_hours(0.5)
def test_gated(): ...
"""


def project(folder: Path) -> Path:
    root = committed(folder)
    (root / "pytest.ini").write_text("[pytest]\n")
    (root / "seatrial.toml").write_text("[groups.gated]\n")
    (root / "test_it.py").write_text(TESTS)
    return root


def environment(home: Path) -> dict[str, str]:
    """Without what an outer session tells, or turns off."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "SEATRIAL_", "COV_", "PYTHONPATH"))}
    return {**kept, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "XDG_DATA_HOME": str(home / "data")}


def sessions(words: list[str], root: Path, env: dict[str, str]) -> None:
    """A recorded session, and one in which what passed is not affected."""
    for said in ("1 passed, 2 skipped", "2 skipped, 1 deselected"):
        call = [*words, "-p", "no:cacheprovider", "--seatrial-select"]
        done = subprocess.run(call, cwd=root, env=env, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
        assert (done.returncode, said in done.stdout) == (0, True), done.stdout + done.stderr
        assert "history" not in done.stdout
    assert (root / "unit_results.json").is_file()


def test_a_session_needs_nothing_of_seatrial(tmp_path: Path) -> None:
    paths = [str(Path(pytest.__file__).parents[1]), str(ROOT.parent)]
    (tmp_path / "runner.py").write_text(RUNNER.format(refused=REFUSED, paths=paths))
    words = [sys.executable, "-S", str(tmp_path / "runner.py"), *(word for name in PLUGINS for word in ("-p", name))]
    sessions(words, project(tmp_path / "work"), {**environment(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})


@pytest.mark.slow
def test_it_installs_beside_pins_that_seatrial_refuses(tmp_path: Path) -> None:
    pins = ("psutil==5.9.8", "rich==13.9.4")
    python = tmp_path / "venv" / "bin" / "python"
    shutil.copytree(PACKAGE, tmp_path / "package", ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__"))
    calls = (
        [sys.executable, "-m", "venv", tmp_path / "venv"],
        [python, "-m", "pip", "install", "-q", "pytest", *pins],
        [python, "-m", "pip", "install", "-q", "--no-deps", tmp_path / "package"],
        [python, "-m", "pip", "check"],
    )
    for call in calls:
        done = subprocess.run(list(map(str, call)), capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
    sessions([str(python), "-m", "pytest"], project(tmp_path / "work"), environment(tmp_path))
    frozen = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True, timeout=600).stdout.splitlines()
    assert {*pins} <= {*frozen}
    assert not [line for line in frozen if line.startswith("seatrial")]
