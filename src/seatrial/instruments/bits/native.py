"""The C kernels of bits.c for CPU tensors: the functions of `plain`, with the same values, compiled on first use and cached.

- The compiler is $CC, or the first of cc, gcc, clang. Without one, or with SEATRIAL_NATIVE=0, the kernels in plain torch run.
- The key of the cache covers source, flags, compiler and processor. Two processes may build at once: the last rename wins.
- Loading a library runs its code. So the cache is used only if file, directory and `native/` belong to root or to us and no other user
  can write there; otherwise every process uses a private temporary directory. A file ends with a hash of itself: a torn one is rebuilt.
- A library that does not give a known hash is not used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from seatrial.instruments.bits.plain import BLOCK_BYTES, ROW_UNITS, TABLE, Planes, Sums

SOURCE = Path(__file__).with_name("bits.c")
FLAGS = ("-O3", "-shared", "-fPIC", "-std=gnu11")
COMPILERS = ("cc", "gcc", "clang")
SECONDS = 120
GAPS_SPARE = 8
SEAL_BYTES = 16
KNOWN_INPUT = (bytes(range(251)) * (5 * BLOCK_BYTES // 251 + 1))[: 5 * BLOCK_BYTES] + b"seatrial"
"""Blocks that differ: four that are taken at once, one alone, and a part of one."""
KNOWN_SUMS = (0xA9EE5DCCADEB67E4, 0x110BE082777C2858)


class NoLibraryError(Exception):
    """The kernels cannot be compiled or used here; one line says why."""


class Library:
    """The kernels: `calls` are those of bits.c. Addresses are integers or bytes; nothing here checks what lies there."""

    def __init__(self, path: Path) -> None:
        self.calls = ctypes.CDLL(str(path))
        self._keys = (ctypes.c_uint32 * len(TABLE))(*TABLE)
        pointer, size, whole = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for name, result, arguments in (
            ("bits_sums", None, (pointer, size, ctypes.c_uint64, pointer, pointer)),
            ("bits_encode", None, (pointer, pointer, size, whole, pointer, pointer, pointer, pointer, pointer)),
            ("bits_check", whole, (pointer, size, pointer, size, size)),
            ("bits_apply", None, (pointer, size, pointer, pointer, pointer, whole)),
            ("bits_apply_dense", None, (pointer, size, pointer, whole)),
            ("bits_to_bitmap", None, (pointer, pointer, size, pointer)),
            ("bits_from_bitmap", ctypes.c_int64, (pointer, size, pointer, pointer)),
            ("bits_to_gaps", size, (pointer, pointer, size, size, pointer)),
            ("bits_from_gaps", ctypes.c_int64, (pointer, size, size, pointer, pointer)),
            ("bits_to_dense", None, (pointer, pointer, pointer, size, pointer)),
        ):
            function = getattr(self.calls, name)
            function.restype, function.argtypes = result, arguments

    def add_sums(self, data: int | bytes, nbytes: int, first_block: int, sums: Sums) -> Sums:
        """The sums with the blocks of these bytes added, of which the first has this position."""
        held = (ctypes.c_uint64 * 2)(*sums)
        self.calls.bits_sums(data, nbytes, first_block, self._keys, held)
        return held[0], held[1]

    def encode(self, current: int, base: int, nbytes: int, overwrite: bool, planes: tuple[int, int, int]) -> tuple[int, int, Sums]:
        """Entries and changed units, and the sums of current. The planes (counts, offsets, values) have room for all units."""
        told = (ctypes.c_uint64 * 4)()
        self.calls.bits_encode(current, base, nbytes, overwrite, self._keys, *planes, told)
        return told[2], told[3], (told[0], told[1])

    def check(self, counts: int, rows: int, offsets: int, entries: int, nbytes: int) -> bool:
        """Whether these planes are of a tensor with so many bytes."""
        return bool(self.calls.bits_check(counts, rows, offsets, entries, nbytes))

    def apply(self, target: int, nbytes: int, planes: tuple[int, int, int], sign: int) -> None:
        """Set (sign 0), add to (1) or subtract from (-1) the units of the entries; the planes are checked."""
        self.calls.bits_apply(target, nbytes, *planes, sign)


def library() -> Library | None:
    """The kernels, or None where there are none."""
    return None if os.environ.get("SEATRIAL_NATIVE") == "0" else _loaded()[0]


def why_not() -> str:
    """Why `library()` is None, in one line; empty if it is not."""
    return "SEATRIAL_NATIVE=0" if os.environ.get("SEATRIAL_NATIVE") == "0" else _loaded()[1]


@functools.cache
def _loaded() -> tuple[Library | None, str]:
    try:
        return _load(), ""
    except (NoLibraryError, OSError) as error:
        return None, f"{type(error).__name__}: {error}"


def _load() -> Library:
    command, version = _compiler()
    source = SOURCE.read_bytes()
    last = NoLibraryError("never tried")
    for flags in (("-march=native", *FLAGS), FLAGS):
        key = hashlib.blake2b(digest_size=12)
        for part in (source, repr((command, flags)).encode(), version, _processor()):
            key.update(len(part).to_bytes(8, "little") + part)
        try:
            with tempfile.TemporaryDirectory(prefix="seatrial-native-") as spare:
                return _checked(_built([*command, *flags], key.hexdigest(), Path(spare)))
        except NoLibraryError as error:
            last = error
    raise last


def _compiler() -> tuple[list[str], bytes]:
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise NoLibraryError(f"no C compiler: CC={os.environ['CC']!r} is not a command line: {error}") from error
    if named:
        command = named
    else:
        found = next((path for path in map(shutil.which, COMPILERS) if path), None)
        if found is None:
            raise NoLibraryError(f"no C compiler: none of {', '.join(COMPILERS)} is on PATH, and CC is not set")
        command = [found]
    return command, _run([*command, "--version"])


def _run(command: list[str]) -> bytes:
    """The output of a compiler that ends well in time."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoLibraryError(f"{command[0]}: {error}") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or "(nothing said)"
        raise NoLibraryError(f"{shlex.join(command)} ended with code {done.returncode}: {said.splitlines()[0][:300]}")
    return done.stdout


def _processor() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    kept = [line for line in lines if line.startswith(("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU "))]
    return "\n".join([platform.machine(), platform.processor(), *kept]).encode()


def cache() -> Path:
    """Where compiled kernels are kept: beside the environments."""
    if chosen := os.environ.get("SEATRIAL_CACHE"):
        return Path(chosen) / "native"
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seatrial" / "native"
    except RuntimeError as error:
        raise NoLibraryError(f"no place to keep compiled kernels in: {error}; set SEATRIAL_CACHE") from error


def _built(compile_: list[str], key: str, spare: Path) -> Path:
    """The compiled library: from the cache, or built into it, or into `spare` if the cache is not ours alone or cannot be written."""
    place = cache() / key / "bits.so"
    if _whole(place):
        return place
    made = spare / "bits.so"
    _run([*compile_, "-o", str(made), str(SOURCE)])
    try:
        place.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        if not (_private(place.parent.parent) and _private(place.parent)):
            return made  # loaded from the spare directory, which may go once it is: this process alone has it
        _keep(made.read_bytes(), place)
    except OSError:
        return made
    return place


def _private(path: Path) -> bool:
    """Whether nobody but root and us can have put this there or can change it."""
    found = path.stat()
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _whole(place: Path) -> bool:
    """Whether a library is kept there, in a place that is ours alone, as it was written."""
    try:
        if not all(_private(path) for path in (place.parent.parent, place.parent, place)):
            return False
        data = place.read_bytes()
    except OSError:
        return False
    return data[-SEAL_BYTES:] == _seal(data[:-SEAL_BYTES])


def _seal(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=SEAL_BYTES).digest()


def _keep(data: bytes, place: Path) -> None:
    """Write a library with its seal, which a loader does not look at; whole or not at all."""
    handle, temporary = tempfile.mkstemp(prefix=".bits.so.", dir=place.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data + _seal(data))
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(place)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _checked(path: Path) -> Library:
    try:
        loaded = Library(path)
    except (OSError, AttributeError) as error:
        raise NoLibraryError(f"{path}: cannot be loaded ({error}); remove it to have it built again") from error
    found = loaded.add_sums(KNOWN_INPUT, len(KNOWN_INPUT), 0, (0, 0))
    if found != KNOWN_SUMS:
        raise NoLibraryError(f"{path}: gives wrong sums {found}; remove it to have it built again")
    return loaded


def _library() -> Library:
    found = library()
    if found is None:
        raise RuntimeError(f"the C kernels are not here: {why_not()}")
    return found


def _zeros(size: int) -> Any:
    import torch

    return torch.zeros(size, dtype=torch.uint8)


def _room(size: int) -> Any:
    """Bytes that are not set: room for every unit costs nothing, the system gives memory only where it is written."""
    import torch

    return torch.empty(size, dtype=torch.uint8)


def _addresses(planes: Planes) -> tuple[int, int, int]:
    return planes.counts.data_ptr(), planes.offsets.data_ptr(), planes.values.data_ptr()


def _rows(nbytes: int) -> int:
    return -(-nbytes // (2 * ROW_UNITS))


# The functions of `plain`.


def add_sums(data: Any, first_block: int, sums: Sums) -> Sums:
    return _library().add_sums(data.data_ptr(), data.numel(), first_block, sums)


def encode(current: Any, base: Any, overwrite: bool) -> tuple[Planes, int, Sums]:
    import torch

    nbytes = current.numel()
    units = -(-nbytes // 2)
    room = Planes(_room(_rows(nbytes)), _room(units), torch.empty(units, dtype=torch.int16))
    entries, changed, sums = _library().encode(current.data_ptr(), base.data_ptr(), nbytes, overwrite, _addresses(room))
    return Planes(room.counts, room.offsets[:entries].clone(), room.values[:entries].clone()), changed, sums


def check(planes: Planes, nbytes: int) -> None:
    rows, entries = planes.counts.numel(), planes.offsets.numel()
    counts, offsets, _ = _addresses(planes)
    fits = rows == _rows(nbytes) and entries == planes.values.numel()
    if not fits or not _library().check(counts, rows, offsets, entries, nbytes):
        raise ValueError(
            f"{rows} rows, {entries} offsets and {planes.values.numel()} values are not of one tensor with {nbytes} bytes, "
            "or offsets do not ascend within their rows"
        )


def apply(target: Any, planes: Planes, sign: int) -> None:
    _library().apply(target.data_ptr(), target.numel(), _addresses(planes), sign)


def apply_dense(target: Any, dense: Any, sign: int) -> None:
    _library().calls.bits_apply_dense(target.data_ptr(), target.numel(), dense.data_ptr(), sign)


def to_bitmap(planes: Planes, nbytes: int) -> Any:
    bitmap = _zeros(-(-nbytes // 16))
    _library().calls.bits_to_bitmap(*_addresses(planes)[:2], nbytes, bitmap.data_ptr())
    return bitmap


def from_bitmap(bitmap: Any, values: Any, nbytes: int) -> Planes:
    return _decoded("a bitmap", values, nbytes, _library().calls.bits_from_bitmap, bitmap.data_ptr(), nbytes)


def to_gaps(planes: Planes, nbytes: int) -> Any:
    entries = planes.offsets.numel()
    room = _room(entries + -(-nbytes // 2) // 255 + GAPS_SPARE)
    return room[: _library().calls.bits_to_gaps(*_addresses(planes)[:2], entries, nbytes, room.data_ptr())].clone()


def from_gaps(gaps: Any, values: Any, nbytes: int) -> Planes:
    return _decoded("gaps", values, nbytes, _library().calls.bits_from_gaps, gaps.data_ptr(), gaps.numel(), nbytes)


def _decoded(what: str, values: Any, nbytes: int, decode: Any, *given: int) -> Planes:
    """Counts and offsets as `decode` fills them in: as many entries as there are values, -1 for what no encoder makes."""
    counts, offsets = _zeros(_rows(nbytes)), _room(-(-nbytes // 2))
    entries = decode(*given, counts.data_ptr(), offsets.data_ptr())
    if entries != values.numel():
        raise ValueError(f"{what} of {entries} entries (-1: not well-formed) for {values.numel()} values")
    return Planes(counts, offsets[:entries].clone(), values)


def to_dense(planes: Planes, nbytes: int) -> Any:
    dense = _zeros(nbytes + nbytes % 2)
    _library().calls.bits_to_dense(*_addresses(planes), nbytes, dense.data_ptr())
    return dense
