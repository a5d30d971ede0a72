"""Import proofs: made inside a process, read and judged outside."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.core.records import ImportProof, RepoState
from seatrial.evidence import imports
from seatrial.evidence.imports import judge_imports, read_imports
from seatrial.instruments import provenance
from tests.evidence.conftest import put

PROBE = Path(provenance.__file__)


def run(path: list[Path], code: str, *arguments: str) -> str:
    """Run code in another interpreter with the probe and `path` on its import path."""
    command = [sys.executable, "-S", "-c", code, *arguments]
    environment = {"PYTHONPATH": ":".join(map(str, [*path, PROBE.parent]))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def report(path: list[Path], file: Path, process: str, expected: dict[str, str], *more: str) -> list[str]:
    """Report from another process; returns what the probe itself finds wrong."""
    code = (
        "import json, provenance, sys\n"
        "expected = json.loads(sys.argv[3])\n"
        "rows = provenance.report(sys.argv[1], sys.argv[2], [*expected, *sys.argv[4:]], expected)\n"
        "print(json.dumps(provenance.verify(rows)))"
    )
    answer = run(path, code, str(file), process, json.dumps(expected), *more)
    problems: list[str] = json.loads(answer)
    return problems


def repo(root: Path, *packages: str) -> RepoState:
    return RepoState(name="repo", path=str(root), commit="c", branch=None, packages=packages, import_root=str(root))


def proof(process: str = "driver", package: str = "pkg", file: str | None = "/repo/pkg/__init__.py", **more: object) -> ImportProof:
    return ImportProof.model_validate({"process": process, "package": package, "file": file, "expected": "/repo", "ok": True, **more})


def test_the_checkout_under_test_is_proven(tmp_path: Path) -> None:
    root = tmp_path / "check out"
    put(root, {"pkg/__init__.py": "__version__ = '1.2'", "ns/inner/__init__.py": "", "bare/x.py": "", "single.py": ""})
    names = ("pkg", "ns.inner", "bare", "single")
    file = tmp_path / "imports.jsonl"
    assert report([root], file, "driver", dict.fromkeys(names, str(root)), "json") == []
    proofs = read_imports(file)
    assert [(p.package, p.file, p.version, p.ok, p.method) for p in proofs[:3]] == [
        ("pkg", str(root / "pkg/__init__.py"), "1.2", True, "imported"),
        ("ns.inner", str(root / "ns/inner/__init__.py"), None, True, "imported"),
        ("bare", str(root / "bare"), None, True, "imported"),
    ]
    assert proofs[-1].expected is None
    assert judge_imports(proofs, [repo(root, *names)], ["driver"]) == ()


def test_an_installed_copy_is_caught_by_both(tmp_path: Path) -> None:
    root, installed = tmp_path / "checkout", tmp_path / "checkout/.venv/lib/site-packages"
    put(root, {"pkg/__init__.py": ""})
    put(installed, {"pkg/__init__.py": ""})
    file = tmp_path / "imports.jsonl"
    problem = f"worker: imported pkg from {installed / 'pkg/__init__.py'}, expected from {root}"
    assert report([installed, root], file, "worker", {"pkg": str(root)}) == [problem]
    assert not read_imports(file)[0].ok
    assert judge_imports(read_imports(file), [repo(root, "pkg")], ["worker"]) == (problem,)


def test_a_package_that_cannot_be_imported_is_a_problem(tmp_path: Path) -> None:
    put(tmp_path, {"broken/__init__.py": "raise RuntimeError('no GPU')"})
    file = tmp_path / "imports.jsonl"
    expected = dict.fromkeys(("broken", "absent"), str(tmp_path))
    problems = [f"driver: could not import {name}, expected from {tmp_path}" for name in expected]
    assert report([tmp_path], file, "driver", expected) == problems
    assert judge_imports(read_imports(file), [repo(tmp_path, "broken", "absent")], ["driver"]) == tuple(problems)


def test_links_are_followed(tmp_path: Path) -> None:
    put(tmp_path / "real", {"pkg/__init__.py": ""})
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/pkg").symlink_to(tmp_path / "real/pkg")
    for number, (path, root) in enumerate([("link", "real"), ("real", "link"), ("site", "link")]):
        file = tmp_path / f"{number}.jsonl"
        assert report([tmp_path / path], file, "driver", {"pkg": str(tmp_path / root)}) == []
        assert judge_imports(read_imports(file), [repo(tmp_path / root, "pkg")], ["driver"]) == ()


@pytest.mark.parametrize("judge", [imports.comes_from, provenance.comes_from])
@pytest.mark.parametrize(
    ("file", "package", "right"),
    [
        ("/r/pkg/__init__.py", "pkg", True),
        ("/r/src/pkg/__init__.py", "pkg", True),
        ("/r/pkg", "pkg", True),
        ("/r/pkg.py", "pkg", True),
        ("/r/pkg.cpython-311-x86_64-linux-gnu.so", "pkg", True),
        ("/r/a/b/__init__.py", "a.b", True),
        ("/r/../r/pkg/__init__.py", "pkg", True),
        ("/r/pkg2/__init__.py", "pkg", False),
        ("/r2/pkg/__init__.py", "pkg", False),
        ("/r/build/lib/pkg/__init__.py", "pkg", False),
        ("/r/.venv/lib/python3.11/site-packages/pkg/__init__.py", "pkg", False),
        ("/r/__init__.py", "pkg", False),
        ("/r/a/__init__.py", "a.b", False),
    ],
)
def test_the_place_in_the_checkout_decides(judge: Callable[[str, str, str], bool], file: str, package: str, right: bool) -> None:
    assert judge(file, package, "/r") is right
    assert judge(file, package, "/r/") is right


def test_silence_proves_nothing() -> None:
    root = Path("/repo")
    assert judge_imports([], [repo(root, "pkg")], ["driver", "generator"]) == (
        "driver: never reported what it imported",
        "generator: never reported what it imported",
    )
    assert judge_imports([proof(package="torch", expected=None)], [repo(root, "pkg")], ["driver"]) == (
        "driver: did not report pkg, which is under test",
    )
    assert judge_imports([proof(method="found")], [repo(root, "pkg")], ["driver"]) == (
        "no process imported pkg: the loop does not use repo",
    )


def test_a_process_that_does_not_use_a_package_says_where_it_would_come_from() -> None:
    root = Path("/repo")
    both = [proof(), proof(process="generator", method="found")]
    assert judge_imports(both, [repo(root, "pkg")], ["driver", "generator"]) == ()
    wrong = proof(process="generator", method="found", file="/elsewhere/pkg/__init__.py")
    assert judge_imports([proof(), wrong], [repo(root, "pkg")], ["driver", "generator"]) == (
        "generator: would import pkg from /elsewhere/pkg/__init__.py, expected from /repo",
    )


def test_a_process_may_lack_a_package_that_another_has_from_the_right_place() -> None:
    root, lacks = Path("/repo"), proof(process="worker", method="found", file=None, ok=False)
    assert judge_imports([proof(), lacks], [repo(root, "pkg")], ["driver", "worker"]) == ()
    located = proof(process="imports-worker", method="found")
    assert judge_imports([located, lacks], [repo(root, "pkg")], []) == (), "a run that broke off"
    problem = ("worker: could not import pkg, expected from /repo",)
    assert judge_imports([lacks], [repo(root, "pkg")], []) == problem
    elsewhere = proof(file="/elsewhere/pkg/__init__.py")
    assert judge_imports([elsewhere, lacks], [repo(root, "pkg")], [])[1:] == problem, "who has it must have it from there"
    broken = proof(process="worker", file=None, ok=False)
    assert judge_imports([proof(), broken], [repo(root, "pkg")], ["driver", "worker"]) == problem, "it was there, and failed"
    assert judge_imports([located, lacks], [repo(root, "pkg")], ["worker"]) == ("no process imported pkg: the loop does not use repo",)


def test_a_synced_copy_is_as_good_as_the_checkout() -> None:
    synced = repo(Path("/repo"), "pkg").model_copy(update={"synced": "/loop/vendored"})
    copy = proof(file="/loop/vendored/src/pkg/__init__.py", expected="/loop/vendored")
    assert judge_imports([proof(), copy], [synced], ["driver"]) == ()
    assert judge_imports([copy], [repo(Path("/repo"), "pkg")], ["driver"]) == (
        "driver: imported pkg from /loop/vendored/src/pkg/__init__.py, expected from /repo",
    )
    other = proof(file="/loop/other/src/pkg/__init__.py", expected="/loop/other")
    assert judge_imports([other], [synced], ["driver"]) == (
        "driver: imported pkg from /loop/other/src/pkg/__init__.py, expected from /repo or /loop/vendored",
    )


def test_a_run_that_broke_off_is_judged_by_what_it_reported() -> None:
    assert judge_imports([proof(method="found")], [repo(Path("/repo"), "pkg")], []) == ()


def test_every_report_is_judged_also_of_processes_nobody_expected() -> None:
    good, bad = proof(), proof(file="/elsewhere/pkg/__init__.py")
    problem = "imported pkg from /elsewhere/pkg/__init__.py, expected from /repo"
    assert judge_imports([good, bad, bad], [repo(Path("/repo"), "pkg")], ["driver"]) == (f"driver: {problem}",)
    stranger = proof("rank1", file="/elsewhere/pkg/__init__.py")
    assert judge_imports([good, stranger], [repo(Path("/repo"), "pkg")], ["driver"]) == (f"rank1: {problem}",)
    assert judge_imports([proof(ok=False)], [repo(Path("/repo"), "pkg")], ["driver"]) == (
        "driver: reported pkg from /repo/pkg/__init__.py as not proven",
    )
    assert judge_imports([good], [repo(Path("/repo"), "pkg")], ["driver"]) == ()


@pytest.mark.parametrize("tail", ['{"process": "dri', '{"process": "driver"}\n', "\n", "[]\n", '{"process": "driver", "x": 1'])
def test_a_torn_row_is_an_error_with_its_line(tmp_path: Path, tail: str) -> None:
    file = tmp_path / "imports.jsonl"
    file.write_text(proof().model_dump_json() + "\n" + tail)
    with pytest.raises(UserError, match=r"imports\.jsonl:2: "):
        read_imports(file)


def test_an_absent_file_holds_no_proofs(tmp_path: Path) -> None:
    assert read_imports(tmp_path / "imports.jsonl") == ()


def test_rows_of_many_processes_do_not_tear(tmp_path: Path) -> None:
    file = str(tmp_path / "imports.jsonl")
    packages = ["json", "os.path", "email"] * 20
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: provenance.report(file, f"rank{n}", packages, {}), range(32)))
    rows = read_imports(Path(file))
    assert len(rows) == 32 * 60
    assert [row.process for row in rows[:60]] == [rows[0].process] * 60


def test_found_runs_no_code(tmp_path: Path) -> None:
    bomb = "raise SystemExit('imported')"
    put(tmp_path, {"pkg/__init__.py": bomb, "pkg/sub/__init__.py": bomb, "ns/deep/mod.py": bomb, "provenance_shadow.py": bomb})
    environment = {"PYTHONPATH": str(tmp_path)}
    packages = ["pkg", "pkg.sub", "ns", "ns.deep", "ns.deep.mod", "absent", "pkg.absent", "sys", "fingerprint"]
    done = subprocess.run(
        [sys.executable, "-S", str(PROBE), "--found", *packages], env=environment, capture_output=True, text=True, check=True
    )
    rows = [ImportProof.model_validate(row) for row in json.loads(done.stdout)]
    assert {row.package: row.file and str(Path(row.file).relative_to(tmp_path)) for row in rows} == {
        "pkg": "pkg/__init__.py",
        "pkg.sub": "pkg/sub/__init__.py",
        "ns": "ns",
        "ns.deep": "ns/deep",
        "ns.deep.mod": "ns/deep/mod.py",
        "absent": None,
        "pkg.absent": None,
        "sys": None,
        "fingerprint": None,
    }
    assert {row.method for row in rows} == {"found"}


def test_the_probe_stands_alone() -> None:
    tree = ast.parse(PROBE.read_text(), feature_version=(3, 9))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert all(name.split(".")[0] in sys.stdlib_module_names for name in names)
    spec = importlib.util.spec_from_file_location("provenance_by_file", PROBE)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_versions_of_other_packages_come_from_their_metadata() -> None:
    (row,) = provenance.imported(["typing_extensions"], "driver")
    assert row["version"]
    assert row["ok"]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_while_a_process_starts(enabled: bool) -> None:
    """And is as it was afterwards, also where the start fails; what was made stays out of its sight."""
    code = (
        "import gc, json, provenance, sys\n"
        "gc.enable() if sys.argv[1] == 'True' else gc.disable()\n"
        "with provenance.uncollected():\n"
        "    kept, rests = [[]], not gc.isenabled()\n"
        "after, frozen = gc.isenabled(), not any(found is kept for found in gc.get_objects())\n"
        "try:\n"
        "    with provenance.uncollected():\n"
        "        raise KeyError\n"
        "except KeyError:\n"
        "    print(json.dumps([rests, after, frozen, gc.isenabled()]))\n"
    )
    assert json.loads(run([], code, str(enabled))) == [True, enabled, True, enabled]
