"""Hash and delta coding of CUDA tensors: bits.cu, compiled for the device at first use by NVRTC, which comes with torch.

- All tensors of a call are one launch, over a table of their addresses. Values are those of the CPU, bit for bit.
- Encoding takes scratch memory of 3 bytes per 16 bytes of weights; where that is not free, tensors are encoded in groups.
- Results that are Python numbers cost one synchronization per group.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from seatrial.instruments.bits import plain
from seatrial.instruments.bits.plain import Sums


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


TILE_BYTES, ROW_BYTES, ROWS = plain.BLOCK_BYTES, 512, 32
TILE_UNITS = TILE_BYTES // 2
CAPACITY = TILE_UNITS // 8  # entries that a tile has room for at first: sparse coding ends there
ALIGNMENT = 16
THREADS = 256
SHAPE = {"UNROLL": 2, "QUEUE": 192, "AHEAD": 4}  # what bits.cu is compiled with; other values give the same results
BLOCKS = {"hash_tiles": 4, "encode_tiles": 4, "apply_tiles": 16}  # blocks per multiprocessor, as measured on an H200
CROWDED = 32  # above one entry in so many units, adding where the memory is costs more than a load and a store
OPERATIONS = {"add": 0, "subtract": 1, "overwrite": 2}
MODULUS = 1 << 64
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Delta(NamedTuple):
    """What changed in the tensors of a plan: three arrays for all of them, on the device."""

    counts: Any  # 32 per tile, also for rows that a tensor does not have
    offsets: Any
    values: Any
    ends: Sequence[int]  # where the entries of each tensor end
    changed: Sequence[int] = ()
    sums: Sequence[Sums] = ()


class Kernels:
    """The kernels on one device."""

    def __init__(self, index: int) -> None:
        import torch

        self.device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(self.device)
        self.processors = properties.multi_processor_count
        queue = SHAPE["QUEUE"] * (16 + 16 + 2) + ROWS * 4
        self.shared = {"encode_tiles": (plain.WORDS + plain.SHIFT) * 4 + THREADS // 32 * (-(-queue // 16) * 16)}
        with torch.cuda.device(self.device):
            torch.empty(1, device=self.device)  # torch's context is current from here on
            self._driver, compiler = libraries()
            options = [f"--gpu-architecture=sm_{properties.major}{properties.minor}", f"-DTHREADS={THREADS}"]
            options += [f"-D{name}={value}" for name, value in SHAPE.items()]
            cubin = compiled(compiler, Path(__file__).with_name("bits.cu").read_bytes(), options)
            self._module = ctypes.c_void_p()
            self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), cubin), "cuModuleLoadData")
            self._functions: dict[str, ctypes.c_void_p] = {}
            words = [word - (1 << 32) if word >> 31 else word for word in plain.TABLE]
            self.keys = torch.tensor(words, dtype=torch.int32, device=self.device)

    @staticmethod
    def _check(code: int, what: str) -> None:
        if code:
            raise CudaError(f"{what} failed with CUDA error {code}")

    def _function(self, name: str) -> ctypes.c_void_p:
        if name not in self._functions:
            made = ctypes.c_void_p()
            self._check(self._driver.cuModuleGetFunction(ctypes.byref(made), self._module, name.encode()), name)
            if size := self.shared.get(name):
                self._check(self._driver.cuFuncSetAttribute(made, MAX_DYNAMIC_SHARED, size), name)
            self._functions[name] = made
        return self._functions[name]

    def launch(self, name: str, work: int, *arguments: Any, per_block: int = THREADS // 32, threads: int = THREADS) -> None:
        """Start a kernel on torch's current stream. Arguments: tensors (their address), None, or ctypes numbers."""
        import torch

        if not work:
            return
        boxes = [
            item if isinstance(item, ctypes._SimpleCData) else ctypes.c_void_p(0 if item is None else item.data_ptr()) for item in arguments
        ]
        pointers = (ctypes.c_void_p * len(boxes))(*(ctypes.cast(ctypes.byref(box), ctypes.c_void_p) for box in boxes))
        grid = min(-(-work // per_block), self.processors * BLOCKS.get(name, 8) if per_block > 1 else work)
        stream, shared = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream), self.shared.get(name, 0)
        with torch.cuda.device(self.device):
            code = self._driver.cuLaunchKernel(self._function(name), grid, 1, 1, threads, 1, 1, shared, stream, pointers, None)
        self._check(code, name)

    def empty(self, size: int, dtype: Any) -> Any:
        """Scratch; never of size zero, so that it has an address."""
        import torch

        return torch.empty(max(1, size), dtype=dtype, device=self.device)


@cache
def kernels(index: int) -> Kernels:
    """The kernels on this device, compiled once per process."""
    return Kernels(index)


def usable(tensor: Any) -> bool:
    """Whether the kernels can work on this tensor's own memory."""
    aligned = tensor.is_cuda and tensor.data_ptr() % ALIGNMENT == 0 and tensor.is_contiguous()
    return bool(aligned and not tensor.is_neg() and not tensor.is_conj() and plain.in_memory(tensor))


class KernelPlan:
    """Where tensors of one device lie: made once, used as long as they stay there.

    `bases`, as large as the tensors, are what `encode` compares with and brings up to date. All must be `usable`.
    """

    def __init__(self, tensors: Sequence[Any], bases: Sequence[Any] = ()) -> None:
        for tensor in (*tensors, *bases):
            plain.check_memory(tensor)
            if not usable(tensor):
                raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous on a GPU, or not aligned to {ALIGNMENT} bytes")
        self.tensors, self.bases = list(tensors), list(bases)
        self.nbytes = [tensor.nbytes for tensor in tensors]
        if bases and self.nbytes != [base.nbytes for base in bases]:
            raise ValueError("a base is not as large as its tensor")
        self.kernels = kernels(tensors[0].device.index)
        self._addresses: list[int] = []
        self._place()

    def _place(self) -> None:
        """The table on the device; made again when a tensor has moved."""
        import torch

        addresses = [tensor.data_ptr() for tensor in (*self.tensors, *self.bases)]
        if addresses == self._addresses:
            return
        rows, ends, tile = array("q"), array("q"), 0
        olds = addresses[len(self.tensors) :] or [0] * len(self.tensors)
        for now, old, nbytes in zip(addresses[: len(olds)], olds, self.nbytes, strict=True):
            rows.extend((now, old, nbytes, tile))
            tile -= -nbytes // TILE_BYTES
            ends.append(tile)
        rows.extend((0, 0, 0, tile))
        self.table, self.tile_ends = (torch.frombuffer(item, dtype=torch.int64).to(self.kernels.device) for item in (rows, ends))
        self.tiles, self._addresses = tile, addresses

    def _fold(self, sums_of: Any, entries: Any, changed: Any) -> Any:
        """Per tensor: both sums, entries, changed units; on the device."""
        import torch

        out = torch.empty((len(self.tensors), 4), dtype=torch.int64, device=self.kernels.device)
        self.kernels.launch("fold_tiles", len(self.tensors), self.table, sums_of, entries, changed, out, per_block=1, threads=1024)
        return out

    def sums(self) -> list[Sums]:
        """The two sums of every tensor, each read once."""
        import torch

        self._place()
        ours = self.kernels
        made = ours.empty(self.tiles * 2, torch.int64)
        ours.launch("hash_tiles", self.tiles, self.table, ctypes.c_uint64(self.tiles), ours.keys, made)
        return [(row[0] % MODULUS, row[1] % MODULUS) for row in self._fold(made, None, None).tolist()]

    def encode(self, overwrite: bool) -> Delta:
        """What changed from the bases to the tensors; the bases become the tensors. Where memory is short, in two halves."""
        import torch

        self._place()
        if not self.tiles:
            none, zeros = self.kernels.empty(1, torch.uint8)[:0], [0] * len(self.tensors)
            return Delta(none, none, none.view(torch.int16), zeros, zeros, [(0, 0)] * len(zeros))
        try:
            encoding = _Encoding(self, overwrite)
        except torch.cuda.OutOfMemoryError:
            if len(self.tensors) == 1:
                raise
            half = len(self.tensors) // 2
            one = KernelPlan(self.tensors[:half], self.bases[:half]).encode(overwrite)
            two = KernelPlan(self.tensors[half:], self.bases[half:]).encode(overwrite)
            counts, offsets, values = (torch.cat(pair) for pair in zip(one[:3], two[:3], strict=True))
            ends = [*one.ends, *(one.ends[-1] + end for end in two.ends)]
            return Delta(counts, offsets, values, ends, [*one.changed, *two.changed], [*one.sums, *two.sums])
        return encoding.run()

    def planes(self, delta: Delta) -> list[tuple[Any, Any, Any]]:
        """Counts, offsets and values of every tensor, as views."""
        sizes = [end - start for start, end in zip((0, *delta.ends[:-1]), delta.ends, strict=True)]
        lines = [(-(-nbytes // TILE_BYTES) * ROWS, -(-nbytes // ROW_BYTES)) for nbytes in self.nbytes]
        counts = [own[:used] for own, (_, used) in zip(delta.counts.split([whole for whole, _ in lines]), lines, strict=True)]
        return list(zip(counts, delta.offsets.split(sizes), delta.values.split(sizes), strict=True))

    def joined(self, planes: Sequence[tuple[Any, Any, Any]]) -> Delta:
        """The reverse of `planes`."""
        import torch

        pad = torch.zeros(ROWS, dtype=torch.uint8, device=self.kernels.device)
        counts, ends, end = [], [], 0
        for (own, offsets, values), nbytes in zip(planes, self.nbytes, strict=True):
            rows = -(-nbytes // ROW_BYTES)
            if own.numel() != rows or offsets.numel() != values.numel():
                raise ValueError(f"planes with {own.numel()} counts, {offsets.numel()} offsets, {values.numel()} values for {rows} rows")
            counts += [own, pad[: -rows % ROWS]]
            end += offsets.numel()
            ends.append(end)
        _, offsets, values = zip(*planes, strict=True)
        return Delta(torch.cat(counts), torch.cat(offsets), torch.cat(values), ends)

    def apply(self, delta: Delta, operation: str) -> None:
        """Apply to the tensors in place: "add", "subtract" or "overwrite".

        Counts that do not fit their entries are refused before anything is written: the device finds out, and the kernel stops.
        """
        import torch

        self._place()
        ours, units = self.kernels, sum(self.nbytes) // 2
        entries = delta.offsets.numel()
        if delta.counts.numel() != self.tiles * ROWS or entries != delta.values.numel() or (entries and not self.tiles):
            raise ValueError(f"{delta.counts.numel()} counts, {entries} offsets, {delta.values.numel()} values for {self.tiles} tiles")
        if not self.tiles:
            return
        due = torch.frombuffer(array("q", delta.ends), dtype=torch.int64).pin_memory().to(ours.device, non_blocking=True)
        held = ours.empty(self.tiles + 1, torch.int32)
        held[:1] = 0
        work, tiles = self.tiles, ctypes.c_uint64(self.tiles)
        ours.launch("count_tiles", work, self.table, tiles, delta.counts, held[1:], per_block=THREADS)
        starts = torch.cumsum(held, 0, dtype=torch.int64)
        wrong = (starts[self.tile_ends] != due).to(torch.int32)
        flags = (ctypes.c_int(OPERATIONS[operation]), ctypes.c_int(entries * CROWDED > units))
        ours.launch("apply_tiles", work, self.table, tiles, delta.counts, delta.offsets, delta.values, starts, *flags, wrong.amax())
        if bad := wrong.nonzero().view(-1).tolist():
            raise ValueError(f"the counts of tensors {bad} do not fit their entries; nothing was written")


class _Encoding:
    """A pass over all tiles, a second over those that had no room, then the slots are joined. Scratch is taken before the first."""

    def __init__(self, plan: KernelPlan, overwrite: bool) -> None:
        import torch

        self.plan, self.overwrite, ours = plan, overwrite, plan.kernels
        self.counts, self.sums = ours.empty(plan.tiles * ROWS, torch.uint8), ours.empty(plan.tiles * 2, torch.int64)
        self.changed = ours.empty(plan.tiles, torch.int32)
        self.slots = self._room(plan.tiles, CAPACITY)

    def _room(self, work: int, capacity: int) -> tuple[Any, Any, Any, Any]:
        """Slots of offsets and values, entries per tile, and which had no room."""
        import torch

        ours = self.plan.kernels
        counted = ours.empty(work * 2, torch.int32)
        return ours.empty(work * capacity, torch.uint8), ours.empty(work * capacity, torch.int16), counted[:work], counted[work:]

    def _walk(self, listed: Any, work: int, capacity: int, room: tuple[Any, Any, Any, Any]) -> None:
        plan, (slots, values, entries, full) = self.plan, room
        given = (ctypes.c_uint64(work), plan.kernels.keys, listed, ctypes.c_int(self.overwrite), ctypes.c_uint32(capacity))
        results = (self.counts, slots, values, entries, self.changed, full, self.sums)
        plan.kernels.launch("encode_tiles", work, plan.table, *given, *results)

    def run(self) -> Delta:
        import torch

        plan, ours = self.plan, self.plan.kernels
        self._walk(None, plan.tiles, CAPACITY, self.slots)
        entries, full = self.slots[2:]
        totals = plan._fold(self.sums, entries, self.changed)
        found = torch.cat([totals.view(-1), full.sum().view(1)]).tolist()  # the one synchronization
        every, listed, late = entries, None, None
        if found[-1]:
            listed = full.nonzero().view(-1)
            late = self._room(len(listed), TILE_UNITS)
            self._walk(listed.to(torch.int32), len(listed), TILE_UNITS, late)
            every = entries.index_add(0, listed, late[2])
            found = plan._fold(self.sums, every, self.changed).view(-1).tolist()
        starts = torch.cumsum(every, 0, dtype=torch.int64) - every
        ends = list(itertools.accumulate(found[2 : len(plan.tensors) * 4 : 4]))
        offsets, values = ours.empty(ends[-1], torch.uint8), ours.empty(ends[-1], torch.int16)
        self._join(CAPACITY, self.slots, starts, offsets, values)
        if late and listed is not None:
            self._join(TILE_UNITS, late, starts[listed] + entries[listed], offsets, values)
        count = len(plan.tensors) * 4
        sums_of = [(one % MODULUS, two % MODULUS) for one, two in zip(found[0:count:4], found[1:count:4], strict=True)]
        return Delta(self.counts[: plan.tiles * ROWS], offsets[: ends[-1]], values[: ends[-1]], ends, found[3:count:4], sums_of)

    def _join(self, capacity: int, slots: tuple[Any, Any, Any, Any], starts: Any, offsets: Any, values: Any) -> None:
        work = slots[2].numel()
        given = (ctypes.c_uint64(work), ctypes.c_uint32(capacity), *slots[:3], starts, offsets, values)
        self.plan.kernels.launch("compact_tiles", work, *given)


def sums(tensors: Sequence[Any]) -> list[Sums]:
    """The two sums of every tensor of one CUDA device. What is not contiguous or aligned is copied first."""
    if not tensors:
        return []
    return KernelPlan([item if usable(item) else plain.flat(item).clone() for item in tensors]).sums()
