"""Megatron's dataset helpers in a node-local copy: named as Python wants it, and the checkout untouched."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from seatrial.instruments.nemo_rl import vendored_bridge
from seatrial.instruments.nemo_rl.nemo_process import DriverChild, Failed
from tests.loops.nemo_driver import Stage, put

MAKEFILE = """LIBEXT = $(shell python3-config-that-is-not-there --extension-suffix)
OUT = helpers_cpp$(LIBEXT)
$(OUT): helpers.cpp
\t@which python3
\tcp $< $@
"""
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


def core(root: Path, makefile: str = MAKEFILE) -> Path:
    """A Megatron-LM with what is needed of it."""
    place = put(root / "Megatron-LM", {"megatron/core/__init__.py": "", ".git": "gitdir: x"})
    put(place, {"megatron/core/datasets/helpers.cpp": "// code\n"})
    put(place, {"megatron/core/datasets/Makefile": makefile})
    return place


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.fixture(autouse=True)
def node_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies are made."""
    place = tmp_path / "node"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


def test_the_copy_has_helpers_that_python_can_import(tmp_path: Path, node_local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = core(tmp_path)
    before = files(place)
    copy = vendored_bridge.build_helpers(place, Path(sys.executable), tmp_path / "log", DriverChild())
    assert copy.is_relative_to(node_local)
    built = copy / vendored_bridge.DATASETS / f"helpers_cpp{SUFFIX}"
    assert built.is_file()
    assert built.name.startswith("helpers_cpp.cpython-")
    assert files(place) == before
    assert not (copy / ".git").exists()
    assert capsys.readouterr().out == f"seatrial: helpers built for {sys.executable} in {built.parent}\n"
    assert str(Path(sys.executable).parent) in (tmp_path / "log").read_text(), "make asks the Python of the workers"
    vendored_bridge.remove_helpers(copy)
    assert files(node_local) == []


@pytest.mark.parametrize(
    ("makefile", "said"),
    [
        ("default:\n\t@echo No space left on device >&2; false\n", "make ended with 2: No space left on device"),
        (
            "default:\n\t@printf 'g++ x\\n\\033[01mh.cpp:12: fatal error: \\033[Kpybind11.h: No such file\\nstopped.\\n' >&2; false\n",
            "make ended with 2: h.cpp:12: fatal error: pybind11.h: No such file",
        ),
        ("default: ; @echo built nothing\n", f"make ended with 0, and there is no helpers_cpp{SUFFIX}: "),
        ("default:\n\tcp helpers.cpp helpers_cpp\n", "there is no helpers_cpp"),
    ],
)
def test_a_failed_build_ends_the_phase(tmp_path: Path, node_local: Path, makefile: str, said: str) -> None:
    place = core(tmp_path, makefile)
    with pytest.raises(Failed) as caught:
        vendored_bridge.build_helpers(place, Path(sys.executable), tmp_path / "log", DriverChild())
    assert caught.value.code == vendored_bridge.NOT_BUILT
    assert said in str(caught.value)
    assert list(node_local.iterdir()) == []


def test_a_python_without_a_suffix_and_an_empty_submodule(tmp_path: Path, node_local: Path) -> None:
    with pytest.raises(Failed, match=r"Makefile is missing: git submodule update"):
        vendored_bridge.build_helpers(tmp_path, Path(sys.executable), tmp_path / "log", DriverChild())
    with pytest.raises(Failed, match="names no suffix for extension modules, but ''"):
        vendored_bridge.build_helpers(core(tmp_path), Path("/bin/true"), tmp_path / "log", DriverChild())
    assert list(node_local.iterdir()) == []


def test_a_full_disk_is_told(tmp_path: Path, node_local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copytree", full)
    with pytest.raises(Failed, match=r"helpers failed: .*No space left on device") as caught:
        vendored_bridge.build_helpers(core(tmp_path), Path(sys.executable), tmp_path / "log", DriverChild())
    assert caught.value.code == vendored_bridge.NOT_BUILT
    assert list(node_local.iterdir()) == []


def test_the_copy_goes_before_the_original() -> None:
    path = os.pathsep.join(("/bridge/src", "/lm", "/rl"))
    expected = os.pathsep.join(("megatron.bridge=/bridge/src", "megatron.core=/lm"))
    made = vendored_bridge.helper_variables({"PYTHONPATH": path, "SEATRIAL_UNDER_TEST": expected}, Path("/lm"), Path("/tmp/x/lm"))
    assert made["PYTHONPATH"] == os.pathsep.join(("/bridge/src", "/tmp/x/lm", "/lm", "/rl"))
    assert made["SEATRIAL_UNDER_TEST"] == os.pathsep.join(("megatron.bridge=/bridge/src", "megatron.core=/tmp/x/lm"))
    assert vendored_bridge.helper_variables({}, Path("/lm"), Path("/copy")) == {"PYTHONPATH": "/copy", "SEATRIAL_UNDER_TEST": ""}


def test_the_script_runs_with_the_copy_which_goes_afterwards(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "echo $PYTHONPATH > $EXP_DIR/path")
    place = core(tmp_path)
    code, log = stage.run("--helpers", str(place), PYTHONPATH=os.pathsep.join((str(Path(vendored_bridge.__file__).parents[3]), str(place))))
    assert code == 0, log
    path = (stage.out / "results" / "path").read_text().strip().split(os.pathsep)
    copy = Path(path[-2])
    assert (path[-1], copy.name) == (str(place), "Megatron-LM")
    assert "seatrial-megatron-" in str(copy)
    assert not copy.exists()


def test_a_failed_build_runs_no_script(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    code, log = stage.run("--helpers", str(core(tmp_path, "default: ; false\n")))
    assert code == 92
    assert "seatrial: driver stopped: helpers failed: make ended with 2: " in log
    assert not (stage.out / "results").exists()
