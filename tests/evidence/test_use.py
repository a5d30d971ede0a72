"""A change that no process loaded was not tested, however well the run went."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import seatrial.instruments.provenance as probe
from seatrial.core.errors import UserError
from seatrial.core.records import RepoState
from seatrial.evidence.imports import Executed, loads_itself, not_loaded, read_executed, read_loaded, unused


def repo(root: Path, *changed: str) -> RepoState:
    return RepoState(name="lib", path=str(root), commit="0" * 40, branch="main", changed=changed, packages=("lib",), import_root=str(root))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A package with a module that is imported and one that is not, below a path with a space."""
    root = tmp_path / "my lib"
    (root / "lib").mkdir(parents=True)
    for name in ("__init__", "used", "idle"):
        (root / "lib" / f"{name}.py").write_text("")
    return root


def load(checkout: Path, out: Path, code: str) -> frozenset[str]:
    """Run `code` in an interpreter of its own and read what it loaded."""
    ending = f"import provenance; provenance.loaded({str(out)!r}, 'driver', [{str(checkout)!r}])"
    path = {"PYTHONPATH": f"{checkout}:{Path(probe.__file__).parent}"}
    subprocess.run([sys.executable, "-c", f"{code}; {ending}"], env=path, check=True)
    return read_loaded([out])


def test_a_loaded_change_was_used(checkout: Path, tmp_path: Path) -> None:
    loaded = load(checkout, tmp_path / "loaded.jsonl", "import lib.used")
    assert unused(repo(checkout, "lib/used.py"), loaded) is None
    assert not_loaded(repo(checkout, "lib/used.py"), loaded) is None


def test_a_changed_file_that_nothing_loads_was_not_tested(checkout: Path, tmp_path: Path) -> None:
    loaded = load(checkout, tmp_path / "loaded.jsonl", "import lib.used")
    assert unused(repo(checkout, "lib/idle.py"), loaded) == "no process of the loop loaded any of the changed files of lib (lib/idle.py)"
    assert unused(repo(checkout, "lib/idle.py", "lib/used.py"), loaded) is None
    assert not_loaded(repo(checkout, "lib/idle.py", "lib/used.py"), loaded) == "changed but never loaded, so not tested: lib/idle.py of lib"


def test_a_package_that_nothing_imports_was_not_tested(checkout: Path, tmp_path: Path) -> None:
    loaded = load(checkout, tmp_path / "loaded.jsonl", "pass")
    assert unused(repo(checkout), loaded) == "no process of the loop loaded any file of lib"


def test_a_file_loaded_from_the_synced_copy_counts(checkout: Path, tmp_path: Path) -> None:
    loaded = load(checkout, tmp_path / "loaded.jsonl", "import lib.used")
    synced = repo(tmp_path / "original", "lib/used.py", "lib/idle.py").model_copy(update={"synced": str(checkout)})
    assert unused(synced, loaded) is None
    assert not_loaded(synced, loaded) == "changed but never loaded, so not tested: lib/idle.py of lib"
    assert unused(synced.model_copy(update={"synced": None}), loaded) == "no process of the loop loaded any file of lib"


def test_data_files_cannot_be_seen_and_do_not_block(checkout: Path, tmp_path: Path) -> None:
    loaded = load(checkout, tmp_path / "loaded.jsonl", "import lib")
    assert unused(repo(checkout, "lib/idle.py", "lib/table.json"), loaded) is None


def test_without_a_known_diff_one_loaded_file_is_enough(checkout: Path, tmp_path: Path) -> None:
    assert unused(repo(checkout), load(checkout, tmp_path / "loaded.jsonl", "import lib")) is None


def test_a_torn_row_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "loaded.jsonl"
    path.write_text(json.dumps({"process": "driver", "root": "/r", "files": []}) + '\n{"process": "gen')
    with pytest.raises(UserError, match=r"loaded\.jsonl:2"):
        read_loaded([path])


def test_what_the_interpreter_loads_itself_was_not_loaded_by_the_loop(checkout: Path, tmp_path: Path) -> None:
    """A checkout at the front of the import path has its sitecustomize run by every Python: that is no use of it."""
    (checkout / "sitecustomize.py").write_text("import lib.used\n")
    start = "import provenance; provenance.begin()"
    loaded = load(checkout, tmp_path / "loaded.jsonl", start)
    assert unused(repo(checkout, "lib/used.py"), loaded) == "no process of the loop loaded any file of lib"
    assert str(checkout / "lib" / "idle.py") in load(checkout, tmp_path / "loaded.jsonl", f"{start}; import lib.idle")
    assert loads_itself(repo(checkout)) == (checkout / "sitecustomize.py",)


def test_executed_rows_are_joined_and_torn_ones_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "executed.jsonl"
    rows = [
        {"process": "driver", "pid": 1, "method": None, "python": "3.8.1", "why": "no counter"},
        {"process": "rank1", "pid": 2, "method": "counter", "python": "3.11.7"},
        {"process": "rank1", "pid": 2, "repo": "lib", "path": "lib/used.py", "ran": [["f", 3, 0]]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_executed(path)
    assert (found.recorded, found.why, found.ran) == (True, "Python 3.8.1: no counter", frozenset({("lib", "lib/used.py", "f", 3, 0)}))
    assert read_executed(tmp_path / "none.jsonl") == Executed()
    for torn in ('{"process": "gen', "[1]", '{"ran": 3}', '{"ran": [["f"]], "repo": "lib", "path": "x"}'):
        path.write_text(torn)
        with pytest.raises(UserError, match=r"executed\.jsonl:1: not a row of executed functions"):
            read_executed(path)
