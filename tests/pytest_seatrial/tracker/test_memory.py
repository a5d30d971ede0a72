"""Memory that is really read: the process tree, children, peaks that are over, and GPUs by NVML or a stand-in for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_seatrial import gpus, memory_sampler
from seatrial.functional import hermetic
from tests.pytest_seatrial.tracker.tracked import latest, session

pytestmark = pytest.mark.slow

TESTS = """
import subprocess, sys, pytest
MB = 2 ** 20
ALLOCATE = "x = bytearray(200 * 2**20); x[::4096] = b'1' * len(x[::4096]); "

def test_itself(tracker):
    before = tracker.get_max_mem()
    held = bytearray(200 * MB)
    held[::4096] = b"1" * len(held[::4096])
    tracker.log_max_mem("mem")
    tracker.track("change", tracker.get_max_mem() - before)

def test_next_test_begins_anew(tracker):
    tracker.track("now", tracker.get_max_mem())

def test_child_that_lives(tracker):
    before = tracker.get_max_mem()
    code = ALLOCATE + "print('ready', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\\n"
    tracker.track("change", tracker.get_max_mem() - before)
    child.communicate(b"\\n", timeout=30)

def test_wrong_name(tracker):
    tracker.log_max_mem("mem")
    with pytest.raises(ValueError, match="tracked twice"):
        tracker.log_max_mem("mem")
"""
OVER = """
import subprocess, sys
def test_over(tracker):
    subprocess.run([sys.executable, "-c", "x = bytearray(300 * 2**20); x[::4096] = b'1' * len(x[::4096])"], check=True, timeout=60)
    tracker.log_max_mem("child")
    x = bytearray(400 * 2**20)
    x[::4096] = b'1' * len(x[::4096])
    del x
    tracker.log_max_mem("own")
"""
NVML = """
typedef struct { unsigned long long total, free, used; } memory;
int nvmlInit_v2(void) { return %(init)d; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "other"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(unsigned long)(index + 1); return 0; }
int nvmlDeviceGetMemoryInfo(void *device, memory *out) {
  out->used = (unsigned long long)device << 30;
  return %(read)d;
}
int nvmlDeviceGetName(void *device, char *name, unsigned length) {
  name[0] = 'H'; name[1] = '0' + (int)(long)device; name[2] = 0;
  return 0;
}
"""


def test_200_mb_in_the_test_and_in_its_child_are_seen(tmp_path: Path) -> None:
    done = session(tmp_path, TESTS)
    assert done.returncode == 0, done.stdout
    found = latest(tmp_path)["metrics"]
    own, child = found["test_it::test_itself"], found["test_it::test_child_that_lives"]
    if "gpu" in own["mem/where"]:
        pytest.skip("a GPU is here, so the number is a GPU's")
    assert own["mem/where"] == "process tree"
    assert 0.19 < own["change"] < 0.25
    assert own["mem"] > own["change"]
    assert found["test_it::test_next_test_begins_anew"]["now"] < own["mem"] - 0.15
    assert 0.19 < child["change"] < 0.25


def test_a_peak_that_is_over_before_anybody_looks_is_known_by_the_kernel(tmp_path: Path) -> None:
    done = session(tmp_path, OVER)
    assert done.returncode == 0, done.stdout
    found = latest(tmp_path)["metrics"]["test_it::test_over"]
    if "gpu" in found["own/where"]:
        pytest.skip("a GPU is here, so the number is a GPU's")
    assert 0.29 < found["child"] < 0.38
    assert 0.39 < found["own"] < 0.5


def test_a_childs_mark_that_is_its_parents_says_nothing() -> None:
    assert memory_sampler.risen((500, 100), (500, 500)) == 0
    assert memory_sampler.risen((500, 100), (500, 700)) == 700
    assert memory_sampler.risen((500, 100), (600, 100)) == 600


def test_a_process_that_has_ended_holds_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(timeout=30)
    assert memory_sampler.tree(child.pid) == 0
    assert memory_sampler.tree(os.getpid()) > 0


def nvml(directory: Path, init: int = 0, read: int = 0) -> str:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here for a stand-in of NVML")
    source, library = directory / "nvml.c", directory / "libnvidia-ml.so.1"
    source.write_text(NVML % {"init": init, "read": read})
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", str(library), str(source)], check=True, timeout=60)
    return str(library)


def test_without_the_library_there_are_no_gpus_and_no_error() -> None:
    assert gpus.names_here("libseatrial-no-such.so.1") == []
    assert gpus.Gpus("libseatrial-no-such.so.1").used() == []


def test_gpus_are_read_through_the_library(tmp_path: Path) -> None:
    library = nvml(tmp_path)
    assert gpus.names_here(library) == ["H1", "H2"]
    assert gpus.Gpus(library).used() == [1 << 30, 2 << 30]


def test_a_library_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(gpus.GpuError, match="nvmlInit_v2 failed with code 18: Driver/library version mismatch"):
        gpus.names_here(nvml(tmp_path, init=18))
    (tmp_path / "text.so").write_text("not a library")
    with pytest.raises(gpus.GpuError, match="cannot be loaded"):
        gpus.Gpus(str(tmp_path / "text.so"))


def test_a_failing_gpu_that_is_there_is_an_error_and_never_the_trees_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "devices_here", lambda: True)
    sampler = memory_sampler.MemorySampler(os.getpid(), nvml(tmp_path, read=15))
    try:
        with pytest.raises(gpus.GpuError, match="nvmlDeviceGetMemoryInfo failed"):
            sampler.peaks()
    finally:
        sampler.stop()


def test_the_number_is_the_fullest_gpus_and_the_file_names_the_types(tmp_path: Path) -> None:
    nvml(tmp_path)
    done = session(tmp_path, 'def test_gpu(tracker): tracker.log_max_mem("mem")', LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 0, done.stdout
    read = latest(tmp_path)
    found = read["metrics"]["test_it::test_gpu"]
    assert (found["mem"], found["mem/where"], read["gpu_types"]) == (2.0, "gpu 1", ["H1", "H2"])


def test_a_library_without_a_driver_is_told_and_means_no_gpu(tmp_path: Path) -> None:
    if gpus.devices_here():
        pytest.skip("GPUs are here")
    nvml(tmp_path, init=9)
    done = session(tmp_path, 'def test_gpu(tracker): tracker.log_max_mem("mem")', LD_LIBRARY_PATH=str(tmp_path))
    read = latest(tmp_path)
    assert done.returncode == 0
    assert read["metrics"]["test_it::test_gpu"]["mem/where"] == "process tree"
    assert any("nvmlInit_v2 failed with code 9" in note for note in read["notes"])
    assert "RuntimeWarning: GPUs cannot be read: nvmlInit_v2 failed with code 9" in done.stdout


@pytest.mark.parametrize("here", [True, False])
def test_containers_ask_the_same_place_for_gpus(monkeypatch: pytest.MonkeyPatch, here: bool) -> None:
    monkeypatch.setattr(hermetic, "devices_here", lambda: here)
    assert hermetic.make_box("docker", "image", (), ()).gpus is here


def test_other_devices_of_the_driver_are_no_gpus(tmp_path: Path) -> None:
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    assert not gpus.devices_here(tmp_path)
    (tmp_path / "nvidia11").touch()
    assert gpus.devices_here(tmp_path)
