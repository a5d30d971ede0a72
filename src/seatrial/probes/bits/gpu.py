"""Hash and delta coding of CUDA tensors: bits.cu, compiled for the device at first use by NVRTC.

- NVRTC comes with every CUDA build of torch; neither nvcc nor a C++ compiler is needed.
- All tensors of a call are one launch, over a table of their addresses. Values are those of the CPU, bit for bit.
- Encoding takes scratch memory of 3 bytes per 16 bytes of weights; where that is not free, tensors are encoded in groups.
- Everything runs on torch's current stream; results that are Python numbers cost one synchronization per group.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from seatrial.probes.bits import keys
from seatrial.probes.bits.keys import Sums

TILE_BYTES, ROW_BYTES, ROWS = keys.BLOCK_BYTES, 512, 32
TILE_UNITS = TILE_BYTES // 2
CAPACITY = TILE_UNITS // 8
"""Entries that a tile has room for at first: sparse coding ends there."""
ALIGNMENT = 16
THREADS = 256
SHAPE = {"UNROLL": 2, "QUEUE": 192, "AHEAD": 4}
"""What bits.cu is compiled with; other values give the same results."""
BLOCKS = {"hash_tiles": 16, "encode_tiles": 2, "apply_tiles": 8}
"""Blocks per multiprocessor, as measured on an H200."""
OPERATIONS = {"add": 0, "subtract": 1, "overwrite": 2}
TABLES = 8
"""How many tables are kept."""
MODULUS = 1 << 64
MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""


class CudaError(RuntimeError):
    """A call of the driver or of the compiler failed."""


class Planes:
    """Sparse planes of one tensor on the device, how many units changed, and the sums of its current bits.

    The planes of all tensors of a call lie in three arrays; views of them are made when they are asked for.
    """

    __slots__ = ("_arrays", "_entries", "_rows", "changed", "sums")

    def __init__(self, arrays: tuple[Any, Any, Any], rows: tuple[int, int], entries: tuple[int, int], changed: int, sums: Sums) -> None:
        self._arrays, self._rows, self._entries, self.changed, self.sums = arrays, rows, entries, changed, sums

    @property
    def counts(self) -> Any:
        """Entries per row."""
        return self._arrays[0][self._rows[0] : self._rows[1]]

    @property
    def offsets(self) -> Any:
        """Of the entries in their rows."""
        return self._arrays[1][self._entries[0] : self._entries[1]]

    @property
    def values(self) -> Any:
        """Of the entries."""
        return self._arrays[2][self._entries[0] : self._entries[1]]


def _libraries() -> tuple[Any, Any]:
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


def _compile(nvrtc: Any, source: bytes, options: Sequence[str]) -> bytes:
    """A cubin; the compiler's own log when it fails."""
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"bits.cu", 0, None, None)
    words = (ctypes.c_char_p * len(options))(*(word.encode() for word in options))
    code, size = nvrtc.nvrtcCompileProgram(program, len(options), words), ctypes.c_size_t()
    if code:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CudaError(f"bits.cu does not compile with {' '.join(options)}: {log.value.decode(errors='replace')}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    made = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, made)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return made.raw


class Kernels:
    """The kernels on one device."""

    def __init__(self, index: int, shape: dict[str, int] | None = None, blocks: dict[str, int] | None = None) -> None:
        import torch

        shape, self.blocks = {**SHAPE, **(shape or {})}, {**BLOCKS, **(blocks or {})}
        self.device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(self.device)
        self.processors = properties.multi_processor_count
        queue = shape["QUEUE"] * (16 + 16 + 2) + ROWS * 4
        self.shared = {"encode_tiles": (keys.WORDS + keys.SHIFT) * 4 + THREADS // 32 * (-(-queue // 16) * 16)}
        with torch.cuda.device(self.device):
            torch.empty(1, device=self.device)  # torch's context is current from here on
            self._driver, nvrtc = _libraries()
            options = [f"--gpu-architecture=sm_{properties.major}{properties.minor}", f"-DTHREADS={THREADS}"]
            options += [f"-D{name}={value}" for name, value in shape.items()]
            cubin = _compile(nvrtc, Path(__file__).with_name("bits.cu").read_bytes(), options)
            self._module = ctypes.c_void_p()
            self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), cubin), "cuModuleLoadData")
            self._functions: dict[str, ctypes.c_void_p] = {}
            self._tables: dict[tuple[tuple[int, ...], ...], tuple[Any, int]] = {}
            words = [word - (1 << 32) if word >> 31 else word for word in keys.TABLE]
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
        grid = min(-(-work // per_block), self.processors * self.blocks.get(name, 8) if per_block > 1 else work)
        stream, shared = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream), self.shared.get(name, 0)
        with torch.cuda.device(self.device):
            code = self._driver.cuLaunchKernel(self._function(name), grid, 1, 1, threads, 1, 1, shared, stream, pointers, None)
        self._check(code, name)

    def table(self, pieces: Sequence[tuple[int, ...]]) -> tuple[Any, int]:
        """The pieces (current, base, nbytes, counts, offsets, values, first entry) on the device, and how many tiles they have.

        Weights mostly stay where they are, so the last tables are kept; a table is a function of the addresses and sizes in it.
        """
        import torch

        key = tuple(pieces)
        if key in self._tables:
            return self._tables[key]
        rows, tiles = array("q"), 0
        for current, base, nbytes, counts, offsets, values, first in pieces:
            rows.extend((current, base, nbytes, tiles, counts, offsets, values, first))
            tiles -= -nbytes // TILE_BYTES
        rows.extend((0, 0, 0, tiles, 0, 0, 0, 0))
        made = torch.frombuffer(rows, dtype=torch.int64).pin_memory().to(self.device, non_blocking=True), tiles
        while len(self._tables) >= TABLES:
            self._tables.pop(next(iter(self._tables)))
        self._tables[key] = made
        return made

    def fold(self, table: Any, count: int, sums: Any, entries: Any, changed: Any) -> Any:
        """Per piece: both sums, entries, changed units; on the device."""
        import torch

        out = torch.empty((count, 4), dtype=torch.int64, device=self.device)
        self.launch("fold_tiles", count, table, sums, entries, changed, out, per_block=1, threads=1024)
        return out

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
    plain = tensor.data_ptr() % ALIGNMENT == 0 and tensor.is_contiguous() and tensor.is_cuda
    return bool(plain and not tensor.is_neg() and not tensor.is_conj())


def sums(tensors: Sequence[Any]) -> list[tuple[int, int]]:
    """The two sums of every tensor; all are on one CUDA device, and each is read once."""
    if not tensors:
        return []
    # A copy of what is not contiguous or aligned must live until the kernel has run: the list holds it.
    held = [tensor if usable(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous().clone() for tensor in tensors]
    ours = kernels(held[0].device.index)
    import torch

    table, tiles = ours.table([(item.data_ptr(), 0, item.nbytes, 0, 0, 0, 0) for item in held])
    made = ours.empty(tiles * 2, torch.int64)
    ours.launch("hash_tiles", tiles, table, ctypes.c_uint64(tiles), ours.keys, made)
    found = ours.fold(table, len(held), made, None, None).tolist()
    return [(row[0] % MODULUS, row[1] % MODULUS) for row in found]


def encode(pairs: Sequence[tuple[Any, Any]], kind: str) -> list[Planes]:
    """Sparse planes of every (current, base); each base becomes its current. All are `usable`, on one device, equal in size."""
    if not pairs:
        return []
    pieces = []
    for current, base in pairs:
        now, old, nbytes = current.data_ptr(), base.data_ptr(), current.nbytes
        if (now | old) % ALIGNMENT or nbytes != base.nbytes or not current.is_contiguous() or not base.is_contiguous():
            raise ValueError(f"encode: a tensor of shape {tuple(current.shape)} is not contiguous, aligned, or as large as its base")
        pieces.append((now, old, nbytes))
    return _grouped(kernels(pairs[0][0].device.index), pieces, kind == "overwrite")


def _grouped(ours: Kernels, pieces: Sequence[tuple[int, int, int]], overwrite: bool) -> list[Planes]:
    """Encode at once, or in halves where memory does not suffice. Scratch is taken before anything is written."""
    import torch

    try:
        encoding = _Encoding(ours, pieces, overwrite)
    except torch.cuda.OutOfMemoryError:
        if len(pieces) == 1:
            raise
        half = len(pieces) // 2
        return _grouped(ours, pieces[:half], overwrite) + _grouped(ours, pieces[half:], overwrite)
    return encoding.planes()


class _Encoding:
    """One group: a pass over all tiles, a second over those that had no room, then the slots are joined."""

    def __init__(self, ours: Kernels, pieces: Sequence[tuple[int, int, int]], overwrite: bool) -> None:
        import torch

        self.ours, self.pieces, self.overwrite = ours, pieces, overwrite
        self.table, self.tiles = ours.table([(now, old, nbytes, 0, 0, 0, 0) for now, old, nbytes in pieces])
        self.counts, self.sums = ours.empty(self.tiles * ROWS, torch.uint8), ours.empty(self.tiles * 2, torch.int64)
        self.changed = ours.empty(self.tiles, torch.int32)
        self.slots = self._room(self.tiles, CAPACITY)

    def _room(self, work: int, capacity: int) -> tuple[Any, Any, Any, Any]:
        """Slots of offsets and values, entries per tile, and which had no room."""
        import torch

        ours = self.ours
        counted = ours.empty(work * 2, torch.int32)
        return ours.empty(work * capacity, torch.uint8), ours.empty(work * capacity, torch.int16), counted[:work], counted[work:]

    def _walk(self, listed: Any, work: int, capacity: int, room: tuple[Any, Any, Any, Any]) -> None:
        """Encode these tiles into their slots."""
        ours, (slots, values, entries, full) = self.ours, room
        given = (ctypes.c_uint64(work), ours.keys, listed, ctypes.c_int(self.overwrite), ctypes.c_uint32(capacity))
        ours.launch("encode_tiles", work, self.table, *given, self.counts, slots, values, entries, self.changed, full, self.sums)

    def planes(self) -> list[Planes]:
        """Run."""
        import torch

        ours, count = self.ours, len(self.pieces)
        first = self.slots
        self._walk(None, self.tiles, CAPACITY, first)
        entries, full = first[2], first[3]
        totals = ours.fold(self.table, count, self.sums, entries, self.changed)
        found = torch.cat([totals.view(-1), full.sum().view(1)]).tolist()  # the one synchronization
        every, listed, late = entries, None, None
        if found[-1]:
            listed = full.nonzero().view(-1)
            late = self._room(len(listed), TILE_UNITS)
            self._walk(listed.to(torch.int32), len(listed), TILE_UNITS, late)
            every = entries.index_add(0, listed, late[2])
            found = ours.fold(self.table, count, self.sums, every, self.changed).view(-1).tolist()
        starts = torch.cumsum(every, 0, dtype=torch.int64) - every
        rows = [found[at * 4 : at * 4 + 4] for at in range(count)]
        total = sum(row[2] for row in rows)
        offsets, values = ours.empty(total, torch.uint8), ours.empty(total, torch.int16)
        self._join(CAPACITY, first, starts, offsets, values)
        if late and listed is not None:
            self._join(TILE_UNITS, late, starts[listed] + entries[listed], offsets, values)
        return self._cut(rows, (self.counts, offsets, values))

    def _join(self, capacity: int, slots: tuple[Any, Any, Any, Any], starts: Any, offsets: Any, values: Any) -> None:
        work = slots[2].numel()
        given = (ctypes.c_uint64(work), ctypes.c_uint32(capacity), *slots[:3], starts, offsets, values)
        self.ours.launch("compact_tiles", work, *given)

    def _cut(self, rows: Sequence[Sequence[int]], arrays: tuple[Any, Any, Any]) -> list[Planes]:
        """Every tensor's part; the counts of a tensor begin with its first tile."""
        made, line, entry = [], 0, 0
        for (_, _, nbytes), (one, two, entries, changed) in zip(self.pieces, rows, strict=True):
            sums_of = (one % MODULUS, two % MODULUS)
            made.append(Planes(arrays, (line, line - (-nbytes // ROW_BYTES)), (entry, entry + entries), changed, sums_of))
            line, entry = line - (-nbytes // TILE_BYTES) * ROWS, entry + entries
        return made


def apply(targets: Sequence[Any], planes: Sequence[tuple[Any, Any, Any]], operation: str) -> None:
    """Apply (counts, offsets, values) to every target in place: "add", "subtract" or "overwrite".

    Planes whose counts do not fit their entries are refused before anything is written.
    """
    import torch

    if not targets:
        return
    ours = kernels(targets[0].device.index)
    pieces, lasts, wanted, first, tile = [], [], [], 0, 0
    for target, (counts, offsets, values) in zip(targets, planes, strict=True):
        nbytes, entries = target.nbytes, offsets.numel()
        address = target.data_ptr()
        if address % ALIGNMENT or not target.is_contiguous() or values.numel() != entries or counts.numel() != -(-nbytes // ROW_BYTES):
            raise ValueError(f"apply: a target of shape {tuple(target.shape)} is not contiguous or aligned, or its planes do not fit it")
        pieces.append((address, 0, nbytes, counts.data_ptr(), offsets.data_ptr(), values.data_ptr(), first))
        first, tile = first + entries, tile - (-nbytes // TILE_BYTES)
        lasts.append(tile)
        wanted.append(first)
    table, tiles = ours.table(pieces)
    # Whether every tensor's rows end where its planes end is found on the device: the kernel writes nothing if one does not.
    due = torch.frombuffer(array("q", [*lasts, *wanted]), dtype=torch.int64).view(2, -1).pin_memory().to(ours.device, non_blocking=True)
    held = torch.zeros(tiles + 1, dtype=torch.int32, device=ours.device)
    ours.launch("count_tiles", tiles, table, ctypes.c_uint64(tiles), held[1:], per_block=THREADS)
    starts = torch.cumsum(held, 0, dtype=torch.int64)
    wrong = (starts[due[0]] != due[1]).to(torch.int32)
    ours.launch("apply_tiles", tiles, table, ctypes.c_uint64(tiles), starts, ctypes.c_int(OPERATIONS[operation]), wrong.amax())
    if bad := wrong.nonzero().view(-1).tolist():
        raise ValueError(f"apply: the counts of tensors {bad} do not fit their entries; nothing was written")
