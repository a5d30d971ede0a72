"""The GPUs of this machine by NVML, through ctypes (no process is started), and the kind of machine that results are compared on."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path

LIBRARY = "libnvidia-ml.so.1"
NVML_STRING = 96


class GpuError(RuntimeError):
    """NVML is there and does not work."""


class Gpus:
    """NVML, open as long as this lives: opening it is what takes time."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._nvml: ctypes.CDLL | None = None
        self._devices: list[ctypes.c_void_p] = []
        try:
            nvml = ctypes.CDLL(library)
        except OSError as error:
            if "cannot open shared object file" in str(error) and "No such file" in str(error):
                return
            raise GpuError(f"{library} cannot be loaded: {error}") from error
        _call(nvml, "nvmlInit_v2")
        count = ctypes.c_uint()
        _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(count.value):
            self._devices.append(ctypes.c_void_p())
            _call(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(self._devices[-1]))
        self._nvml = nvml

    def used(self) -> list[int]:
        return [self._used(device) for device in self._devices]

    def _used(self, device: ctypes.c_void_p) -> int:
        if hasattr(self._nvml, "nvmlDeviceGetMemoryInfo_v2"):
            memory = (ctypes.c_ulonglong * 5)(40 | 2 << 24)  # version (the size and 2), total, reserved, free, used
            _call(self._nvml, "nvmlDeviceGetMemoryInfo_v2", device, memory)
            return int(memory[4])
        memory = (ctypes.c_ulonglong * 3)()  # total, free, used: with what the driver reserves for itself
        _call(self._nvml, "nvmlDeviceGetMemoryInfo", device, memory)
        return int(memory[2])

    def names(self) -> list[str]:
        found = []
        for device in self._devices:
            name = ctypes.create_string_buffer(NVML_STRING)
            _call(self._nvml, "nvmlDeviceGetName", device, name, ctypes.c_uint(NVML_STRING))
            found.append(name.value.decode(errors="replace"))
        return found

    def close(self) -> None:
        """NVML counts who opened it."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml, self._devices = None, []


def names_here(library: str = LIBRARY) -> list[str]:
    found = Gpus(library)
    try:
        return found.names()
    finally:
        found.close()


def devices_here(devices: Path = Path("/dev")) -> bool:
    """Whether the kernel shows a GPU of NVIDIA, whatever NVML says."""
    return any(path.name[6:].isdigit() for path in devices.glob("nvidia*"))


def _call(nvml: ctypes.CDLL | None, name: str, *arguments: object) -> None:
    try:
        code = getattr(nvml, name)(*arguments)
    except AttributeError as error:
        raise GpuError(f"NVML has no {name}: {error}") from error
    if code:
        text, why = getattr(nvml, "nvmlErrorString", None), b""
        if text is not None:
            text.restype = ctypes.c_char_p
            why = text(ctypes.c_int(code))
        raise GpuError(f"{name} failed with code {code}" + (f": {why.decode(errors='replace')}" if why else ""))


def machine_here(gpus: Sequence[str] = ()) -> str:
    """Processors, and the GPUs that are named. Seatrial's history has the same words, since runs are compared by it."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has no affinity
    cpus = f"{platform.machine()}, {count} CPUs"
    return f"{cpus}, {gpu_counts(gpus)}" if gpus else cpus


def gpu_counts(gpus: Sequence[str]) -> str:
    """GPUs as `2 x NAME`."""
    return ", ".join(f"{list(gpus).count(gpu)} x {gpu}" for gpu in sorted(set(gpus)))
