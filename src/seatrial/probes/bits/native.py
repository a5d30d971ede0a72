"""The C kernels (bits.c): compiled on first use by the machine's own compiler, kept in a cache, called with raw addresses.

- The compiler is $CC, or the first of cc, gcc, clang. Without one, or when it fails, `library()` is None and `why_not()` says why;
  the kernels in plain torch are used then. SEATRIAL_NATIVE=0 asks for that.
- The cache is `native/` beside the environments; its key covers source, flags, compiler and processor, because the code is made
  for this processor. Two processes may build at once: whoever renames last wins, both files are the same.
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
import subprocess
import tempfile
from pathlib import Path

from seatrial.probes.bits.keys import BLOCK_BYTES, TABLE, Sums

SOURCE = Path(__file__).with_name("bits.c")
FLAGS = ("-O3", "-shared", "-fPIC", "-std=gnu11")
COMPILERS = ("cc", "gcc", "clang")
SECONDS = 120
GAPS_SPARE = 8
KNOWN_INPUT = bytes(range(256)) * (2 * BLOCK_BYTES // 256) + b"seatrial"
KNOWN_SUMS = (0x9376B019981F1138, 0xA03961602CE1C899)


class NoLibraryError(Exception):
    """The kernels cannot be compiled or used here; one line says why."""


class Library:
    """The kernels. Addresses are integers or bytes; nothing here checks what lies there."""

    def __init__(self, path: Path) -> None:
        self._calls = ctypes.CDLL(str(path))
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
            function = getattr(self._calls, name)
            function.restype, function.argtypes = result, arguments

    def add_sums(self, data: int | bytes, nbytes: int, first_block: int, sums: Sums) -> Sums:
        """The sums with the blocks of these bytes added, of which the first has this position."""
        held = (ctypes.c_uint64 * 2)(*sums)
        self._calls.bits_sums(data, nbytes, first_block, self._keys, held)
        return held[0], held[1]

    def encode(self, current: int, base: int, nbytes: int, overwrite: bool, planes: tuple[int, int, int]) -> tuple[int, int, Sums]:
        """Entries and changed units, and the sums of current. The planes (counts, offsets, values) have room for all units."""
        told = (ctypes.c_uint64 * 4)()
        self._calls.bits_encode(current, base, nbytes, overwrite, self._keys, *planes, told)
        return told[2], told[3], (told[0], told[1])

    def check(self, counts: int, rows: int, offsets: int, entries: int, nbytes: int) -> bool:
        """Whether these planes are of a tensor with so many bytes."""
        return bool(self._calls.bits_check(counts, rows, offsets, entries, nbytes))

    def apply(self, target: int, nbytes: int, planes: tuple[int, int, int], sign: int) -> None:
        """Set (sign 0), add to (1) or subtract from (-1) the units of the entries; the planes are checked."""
        self._calls.bits_apply(target, nbytes, *planes, sign)

    def apply_dense(self, target: int, nbytes: int, values: int, sign: int) -> None:
        """The same for all units."""
        self._calls.bits_apply_dense(target, nbytes, values, sign)

    def to_bitmap(self, counts: int, offsets: int, nbytes: int, bitmap: int) -> None:
        """Set a bit per entry; the bitmap is zero before."""
        self._calls.bits_to_bitmap(counts, offsets, nbytes, bitmap)

    def from_bitmap(self, bitmap: int, nbytes: int, counts: int, offsets: int) -> int:
        """Counts and offsets of the set bits, and how many these are; -1 for a bitmap that `to_bitmap` does not make."""
        return int(self._calls.bits_from_bitmap(bitmap, nbytes, counts, offsets))

    def to_gaps(self, counts: int, offsets: int, entries: int, nbytes: int, gaps: int) -> int:
        """The gaps between entries, and how many bytes these take. Room: one per entry, one per 255 units, and GAPS_SPARE."""
        return int(self._calls.bits_to_gaps(counts, offsets, entries, nbytes, gaps))

    def from_gaps(self, gaps: int, size: int, nbytes: int, counts: int, offsets: int) -> int:
        """Counts, which are zero before, and offsets, and how many these are; -1 for gaps that `to_gaps` does not make."""
        return int(self._calls.bits_from_gaps(gaps, size, nbytes, counts, offsets))

    def to_dense(self, planes: tuple[int, int, int], nbytes: int, dense: int) -> None:
        """The value of every entry at the place of its unit; `dense` is zero before."""
        self._calls.bits_to_dense(*planes, nbytes, dense)


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
    """The compiler's words, and what it says about itself."""
    if named := shlex.split(os.environ.get("CC", "")):
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
    """What -march=native depends on."""
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
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seatrial" / "native"


def _built(compile_: list[str], key: str, spare: Path) -> Path:
    """The compiled library: from the cache, or built into it, or into `spare` if the cache cannot be written."""
    place = cache() / key / "bits.so"
    if place.is_file():
        return place
    made = spare / "bits.so"
    _run([*compile_, "-o", str(made), str(SOURCE)])
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".bits.so.", dir=place.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(made.read_bytes())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(place)
    except OSError:
        return made  # loaded from the spare directory, which may go once it is: this process alone has it
    return place


def _checked(path: Path) -> Library:
    """The library at this place, if it computes what it should."""
    try:
        loaded = Library(path)
    except (OSError, AttributeError) as error:
        raise NoLibraryError(f"{path}: cannot be loaded ({error}); remove it to have it built again") from error
    found = loaded.add_sums(KNOWN_INPUT, len(KNOWN_INPUT), 0, (0, 0))
    if found != KNOWN_SUMS:
        raise NoLibraryError(f"{path}: gives wrong sums {found}; remove it to have it built again")
    return loaded
