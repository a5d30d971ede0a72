"""The CUDA kernels cannot run here; that they compile, and that nothing on a CPU is taken for theirs, can be shown."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.instruments.bits import delta, fingerprint, gpu, plain

SOURCE = Path(gpu.__file__).with_name("bits.cu")


def standin(**wrong: object) -> SimpleNamespace:
    """What is asked of a tensor before its memory is touched: 40 elements of two bytes."""
    given: dict[str, Any] = {"is_cuda": True, "address": 1024, "contiguous": True, "negative": False, "numel": 40, "held": 80, **wrong}
    return SimpleNamespace(
        **{"is_cuda": given["is_cuda"], "shape": (4, 10), "dtype": "bf16", "device": "cuda"},
        data_ptr=lambda: given["address"],
        is_contiguous=lambda: given["contiguous"],
        is_neg=lambda: given["negative"],
        is_conj=lambda: False,
        numel=lambda: given["numel"],
        element_size=lambda: 2,
        stride=lambda: (10, 1),
        storage_offset=lambda: 0,
        untyped_storage=lambda: SimpleNamespace(nbytes=lambda: given["held"]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape", [gpu.SHAPE, {"UNROLL": 1, "QUEUE": 96, "AHEAD": 1}, {"UNROLL": 4, "QUEUE": 288, "AHEAD": 8}])
def test_the_kernels_compile_for_a_device(shape: dict[str, int], tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    options = [f"-D{name}={value}" for name, value in {**shape, "THREADS": gpu.THREADS}.items()]
    done = subprocess.run(
        [nvcc, "-arch=sm_90", "-cubin", *options, "-o", tmp_path / "bits.cubin", "-x", "cu", SOURCE],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "bits.cubin").stat().st_size


def test_the_numbers_in_the_source_are_those_of_the_specification() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    assert gpu.ROWS * gpu.ROW_BYTES == gpu.TILE_BYTES == plain.BLOCK_BYTES
    assert f"#define ROWS {gpu.ROWS}\n#define ROW_BYTES {gpu.ROW_BYTES}\n" in text
    assert f"#define KEYS {(plain.WORDS + plain.SHIFT) // 4} " in text
    assert all(f"0x{value:X}ull" in text for value in plain.GAMMA)


@pytest.mark.parametrize(
    ("wrong", "usable"),
    [
        *(({}, True), ({"is_cuda": False}, False), ({"address": 8}, False), ({"contiguous": False}, False), ({"negative": True}, False)),
        *(({"address": 0}, False), ({"address": 0, "numel": 0}, True), ({"held": 79}, False), ({"held": 0}, False)),
    ],
)
def test_only_plain_aligned_tensors_of_a_gpu_are_worked_on_in_place(wrong: dict[str, object], usable: bool) -> None:
    assert gpu.usable(standin(**wrong)) is usable


@pytest.mark.parametrize("wrong", [{"address": 0}, {"held": 0}, {"held": 79}], ids=["no address", "freed", "too small"])
def test_a_tensor_without_its_memory_is_refused_and_never_copied(wrong: dict[str, object]) -> None:
    said = r"types\.SimpleNamespace of bf16\(4, 10\) on cuda has no memory of its own(?s:.*)gather it with full_tensor\(\) first"
    for call in (lambda tensor: gpu.KernelPlan([tensor]), lambda tensor: gpu.sums([tensor]), lambda tensor: fingerprint.sums([tensor])):
        with pytest.raises(TypeError, match=said):
            call(standin(**wrong))
    with pytest.raises(TypeError, match=said):
        delta.encode(standin(), standin(**wrong))


def test_no_tensor_is_no_work() -> None:
    assert gpu.sums([]) == []
