"""What tests need: Skipped with the reason where it is absent, an error where the marker is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_seatrial import gpus
from pytest_seatrial.suite_groups import Needs, gpus_here, parse
from tests.pytest_seatrial.tracker.guarded import project, pytest_in

pytestmark = pytest.mark.slow

TESTS = """
import pytest

@pytest.mark.needs(gpus=2)
def test_gpus(): pass

@pytest.mark.needs(modules=["json", "no_such_module"], programs=["no-such-program"])
def test_two_absent(): pass

@pytest.mark.needs(env=["NEEDED"], files=["pytest.ini"], modules=["json"], programs=["sh"])
def test_all_there(): pass

@pytest.mark.needs(files=["no/such"])
class TestIt:
    @pytest.mark.needs(env=["NEEDED"])
    def test_class(self): pass
"""


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_test_whose_needs_are_absent_is_skipped_with_the_reason_and_counted(tmp_path: Path, workers: str) -> None:
    ran = pytest_in(project(tmp_path, "", TESTS), workers, "-rs", env={"NEEDED": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert ran.code == 0, ran.text
    assert ran.tests("PASSED") == {"test_all_there"}
    assert ran.tests("SKIPPED") == {"test_gpus", "test_two_absent", "test_class"}
    for words in ("needs 2 GPUs (0 here)", "needs module no_such_module, program no-such-program", "needs file no/such"):
        assert f"seatrial: {words}" in ran.text
        assert f"1 {words}" in ran.text
    assert "3 skipped by seatrial: " in ran.text


def test_needs_hold_beside_an_expression_of_markers(tmp_path: Path) -> None:
    tests = "import pytest\n@pytest.mark.mcore\n@pytest.mark.needs(env=['NEEDED'])\ndef test_it(): pass\n"
    assert pytest_in(project(tmp_path, tests=tests), "-m", "mcore").tests("SKIPPED") == {"test_it"}


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("needs(gpu=2)", "needs: unknown key 'gpu'; did you mean gpus?"),
        ("needs(2)", "needs: give names, such as needs(gpus=2) (got 2)"),
        ("needs(modules='json')", "needs: modules: must be a list of texts"),
        ("gpu_hours()", "gpu_hours: give hours, or minutes=, and one of them"),
        ("gpu_hours(float('nan'))", "gpu_hours: hours: must be a number, not below 0 (got nan)"),
    ],
)
def test_wrong_arguments_are_an_error_that_names_the_test(tmp_path: Path, marker: str, message: str) -> None:
    tests = f"import pytest\ndef test_fine(): pass\n@pytest.mark.{marker}\ndef test_wrong(): pass\n"
    ran = pytest_in(project(tmp_path, "", tests), "-n2" if "gpu=" in marker else "-n0")
    assert ran.code == 4, ran.text
    assert ran.text.count(f"ERROR: test_it.py::test_wrong: {message}") == 1
    assert not ran.tests("PASSED")


def test_modules_are_looked_up_without_importing_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    effect = f"open({str(tmp_path / 'imported')!r}, 'w')"
    for name, text in {"broken": "raise OSError('libx.so')", "effect": effect, "entire": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        (tmp_path / name / "core.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    wanted = parse({"modules": ["broken.core", "effect.core", "entire.core", "entire.gone", "gone.core", "entire.core.deep"]})
    assert wanted.absent(tmp_path) == ["module entire.gone", "module gone.core", "module entire.core.deep (entire.core is no package)"]
    assert not {"broken", "effect", "entire", "entire.core"} & sys.modules.keys()
    assert not (tmp_path / "imported").exists()


def test_namespaces_in_namespaces_are_packages_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outer_ns" / "inner_ns").mkdir(parents=True)
    (tmp_path / "outer_ns" / "inner_ns" / "core.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    wanted = parse({"modules": ["outer_ns.inner_ns.core", "outer_ns.inner_ns.gone", "os.path", "json"]})
    assert wanted.absent(tmp_path) == ["module outer_ns.inner_ns.gone"]


def test_files_are_looked_for_in_the_folder_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    wanted = Needs(files=("a", "~/a", str(tmp_path / "a"), "b", "~/b"))
    assert wanted.absent(tmp_path) == ["file b", "file ~/b"]


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("", 0), ("-1", 0), ("0,1", 2), (" 2 , 3", 2), ("0,9,1", 1), ("0,-1,1", 1), ("GPU-abc,MIG-d", 2), ("1,1", 0), ("none", 0)],
)
def test_gpus_are_those_that_cuda_shows(monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int) -> None:
    monkeypatch.setattr(gpus, "names_here", lambda: ["GPU"] * 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_here() == (count, "")
    assert Needs(gpus=5).absent(Path()) == [f"5 GPUs ({count} here)"]
    assert (Needs(gpus=1).absent(Path()) == []) == (count > 0)


def test_a_driver_that_does_not_answer_is_no_gpu_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> list[str]:
        raise gpus.GpuError("nvmlInit_v2 failed with code 9")

    monkeypatch.setattr(gpus, "names_here", fails)
    assert Needs(gpus=1).absent(Path()) == ["1 GPU (0 here: nvmlInit_v2 failed with code 9)"]
