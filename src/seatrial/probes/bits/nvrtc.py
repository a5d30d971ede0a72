"""CUDA's run-time compiler, which every CUDA build of torch brings: source in, machine code for one device out."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class CudaError(RuntimeError):
    """A call of the driver or of the compiler failed."""


def libraries() -> tuple[Any, Any]:
    """libcuda, and the NVRTC that torch brought."""
    import torch

    root = Path(torch.__file__).parent
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines() if "libnvrtc.so" in line}
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    beside = [*root.parent.glob("nvidia/*/lib/libnvrtc.so.*"), *root.glob("lib/libnvrtc*.so.*"), *toolkit.glob("lib64/libnvrtc.so.*")]
    usable = [path for path in (*mapped, *map(str, beside)) if "builtins" not in path and ".alt." not in path]
    if not usable:
        raise CudaError(f"no libnvrtc beside torch ({root}) nor in {toolkit}")
    return ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(usable[0])


def compiled(compiler: Any, source: bytes, options: Sequence[str]) -> bytes:
    """A cubin; the compiler's own log when it fails."""
    program = ctypes.c_void_p()
    compiler.nvrtcCreateProgram(ctypes.byref(program), source, b"bits.cu", 0, None, None)
    words = (ctypes.c_char_p * len(options))(*(word.encode() for word in options))
    code, size = compiler.nvrtcCompileProgram(program, len(options), words), ctypes.c_size_t()
    if code:
        compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetProgramLog(program, log)
        raise CudaError(f"bits.cu does not compile with {' '.join(options)}: {log.value.decode(errors='replace')}")
    compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
    made = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetCUBIN(program, made)
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return made.raw
