"""The C kernels without torch: how they are built and when they are not used, and the delta coding on raw buffers."""

from __future__ import annotations

import ctypes
import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seatrial.instruments.bits import delta, native
from tests.instruments import bits_reference as reference

ANSWER = (
    "from seatrial.instruments.bits import native; l = native.library(); "
    "print(l and l.add_sums(b'abc', 3, 0, (0, 0)) == native.library().add_sums(b'abc', 3, 0, (0, 0)), '|', native.why_not())"
)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache, and nothing loaded."""
    monkeypatch.setenv("SEATRIAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SEATRIAL_NATIVE", raising=False)
    monkeypatch.setattr(native, "FLAGS", ("-O0", *native.FLAGS[1:]))  # compiled in a moment
    native._loaded.cache_clear()
    yield tmp_path / "cache" / "native"
    native._loaded.cache_clear()


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def built(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.so"))


@pytest.mark.slow
def test_two_processes_may_build_at_once_and_a_third_builds_nothing(fresh: Path) -> None:
    code = [sys.executable, "-c", ANSWER]
    both = [subprocess.Popen(code, stdout=subprocess.PIPE, text=True, env={**os.environ}) for _ in range(2)]
    assert [child.communicate(timeout=120)[0].strip() for child in both] == ["True |"] * 2
    (library,) = built(fresh)
    assert [path.name for path in library.parent.iterdir()] == ["bits.so"], "no temporary file stays"
    before = library.stat().st_mtime_ns
    subprocess.run(code, stdout=subprocess.DEVNULL, timeout=120, check=True)
    assert library.stat().st_mtime_ns == before
    assert built(fresh) == [library]


def test_it_can_be_turned_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEATRIAL_NATIVE", "0")
    assert native.library() is None
    assert native.why_not() == "SEATRIAL_NATIVE=0"
    assert built(fresh) == []


def test_no_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.library() is None
    assert "no C compiler: none of cc, gcc, clang is on PATH" in native.why_not()


def test_a_compiler_that_does_not_exist(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc -m64")
    assert native.library() is None
    assert "/nowhere/cc" in native.why_not()


def test_a_compiler_that_fails(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing = script(tmp_path / "cc", '[ "$1" = --version ] && exit 0\necho "bits.c: no such instruction" >&2\nexit 4')
    monkeypatch.setenv("CC", str(failing))
    assert native.library() is None
    assert "ended with code 4: bits.c: no such instruction" in native.why_not()
    assert built(fresh) == []


def test_a_compiler_without_march_native_is_asked_again_without_it(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    picky = script(tmp_path / "cc", 'case "$*" in *-march=native*) echo "unknown flag" >&2; exit 1;; esac\nexec cc "$@"')
    monkeypatch.setenv("CC", str(picky))
    found = native.library()
    assert found is not None, native.why_not()
    assert found.add_sums(b"abc", 3, 0, (0, 0)) == reference.sums(b"abc")
    assert len(built(fresh)) == 1


def test_a_command_line_that_nobody_can_read_is_no_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc '-O2")
    assert native.library() is None
    assert 'no C compiler: CC="cc \'-O2" is not a command line: No closing quotation' in native.why_not()
    assert built(fresh) == []


def test_a_user_without_a_home_has_no_compiled_kernels(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("SEATRIAL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert native.library() is None
    assert "Could not determine home directory.; set SEATRIAL_CACHE" in native.why_not()


def test_the_known_input_has_blocks_of_every_kind() -> None:
    size, block = len(native.KNOWN_INPUT), reference.BLOCK
    assert size == 5 * block + 8, "four at once, one alone, a part of one"
    assert len({native.KNOWN_INPUT[start : start + block] for start in range(0, size, block)}) == 6
    assert reference.sums(native.KNOWN_INPUT) == native.KNOWN_SUMS


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("x *= 0xFF51AFD7ED558CCDull", "x *= 0xFF51AFD7ED558CCFull"),
        ("fold(found, TOGETHER, block, sums)", "found[3][0] = found[2][0]; fold(found, TOGETHER, block, sums)"),
    ],
    ids=["every block", "four at once"],
)
def test_a_miscompiled_library_is_not_used(right: str, wrong: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "bits.c"
    source = native.SOURCE.read_text(encoding="utf-8")
    assert source.count(right) == 1
    other.write_text(source.replace(right, wrong))
    monkeypatch.setattr(native, "SOURCE", other)
    assert native.library() is None
    assert "gives wrong sums" in native.why_not()


@pytest.mark.slow
def test_a_torn_file_in_the_cache_is_built_again(fresh: Path) -> None:
    code = [sys.executable, "-c", ANSWER]  # other processes: a loader that knows the place already does not look again
    subprocess.run(code, stdout=subprocess.DEVNULL, timeout=120, check=True)
    (library,) = built(fresh)
    whole = library.read_bytes()
    library.write_bytes(whole[: len(whole) // 2])
    assert subprocess.run(code, capture_output=True, text=True, timeout=120, check=True).stdout.strip() == "True |"
    assert built(fresh) == [library]
    assert library.read_bytes() == whole, "it was built again"


def test_a_cache_that_cannot_be_written(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("SEATRIAL_CACHE", str(tmp_path / "file"))
    assert native.library() is not None, native.why_not()
    assert native.library() is native.library()


@pytest.fixture
def compiled(fresh: Path, tmp_path: Path) -> Iterator[Callable[[], bool]]:
    """Ask for a library from something that compiles at once; whether the cache's file was taken, and not one in a private place."""
    compiler, spare, place = script(tmp_path / "cc", 'echo compiled > "$2"'), tmp_path / "spare", fresh / "key" / "bits.so"
    spare.mkdir()

    def ask() -> bool:
        found = native._built([str(compiler)], "key", spare)
        assert found in (place, spare / "bits.so")
        assert found.read_bytes().startswith(b"compiled\n")
        return found == place

    before = os.umask(0)
    yield ask
    os.umask(before)


def test_what_is_made_in_the_cache_is_for_its_owner_alone(compiled: Callable[[], bool], fresh: Path) -> None:
    assert compiled()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (fresh, fresh / "key", fresh / "key/bits.so")] == [0o700, 0o700, 0o644]
    assert [path.name for path in (fresh / "key").iterdir()] == ["bits.so"]


@pytest.mark.parametrize("which", [".", "key", "key/bits.so"])
@pytest.mark.parametrize("how", ["group may write", "all may write", "of another user"])
def test_a_library_that_somebody_else_may_have_planted_is_not_used(which: str, how: str, compiled: Callable[[], bool], fresh: Path) -> None:
    assert compiled()
    planted = b"planted"
    (fresh / "key/bits.so").write_bytes(planted + native._seal(planted))
    if how != "of another user":
        (fresh / which).chmod(0o720 if how == "group may write" else 0o702)
    elif os.geteuid():
        pytest.skip("giving a file away needs root")
    else:
        os.chown(fresh / which, 65534, -1)
    taken = compiled()
    assert taken is (which == "key/bits.so"), "a file that is not ours is replaced; in a directory that is not ours nothing is kept"
    assert (fresh / "key/bits.so").read_bytes().startswith(planted) is not taken


@pytest.mark.parametrize("torn", [b"", b"compiled\n", b"compiled\n" + bytes(16)])
def test_a_file_that_is_not_as_it_was_written_is_built_again(torn: bytes, compiled: Callable[[], bool], fresh: Path) -> None:
    assert compiled()
    whole = (fresh / "key/bits.so").read_bytes()
    (fresh / "key/bits.so").write_bytes(torn)
    assert compiled()
    assert (fresh / "key/bits.so").read_bytes() == whole


def test_what_cannot_be_brought_to_the_disk_is_not_kept(compiled: Callable[[], bool], fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, f"No space left on device ({handle})")

    monkeypatch.setattr(os, "fsync", full)
    assert not compiled()
    assert list((fresh / "key").iterdir()) == []


class Buffers:
    """Current and base in memory of ours, and planes with room for every unit, all ending where a guard begins."""

    def __init__(self, current: bytes, base: bytes) -> None:
        self.nbytes, self.units = len(current), -(-len(current) // 2)
        self.rows = -(-self.nbytes // 512)
        self.current, self.base = self.buffer(current), self.buffer(base)
        self.counts, self.offsets = self.buffer(bytes(self.rows)), self.buffer(bytes(self.units))
        self.values = self.buffer(bytes(2 * self.units))

    def buffer(self, data: bytes) -> ctypes.Array[ctypes.c_char]:
        return ctypes.create_string_buffer(data + b"guard", len(data) + 5)

    def planes(self) -> tuple[int, int, int]:
        return ctypes.addressof(self.counts), ctypes.addressof(self.offsets), ctypes.addressof(self.values)

    def check_guards(self) -> None:
        for held in (self.current, self.base, self.counts, self.offsets, self.values):
            assert held.raw[-5:] == b"guard"


def library() -> native.Library:
    found = native.library()
    assert found is not None, native.why_not()
    return found


@pytest.mark.parametrize("nbytes", [0, 1, 2, 511, 512, 513, 1023, 16385, 33001])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_raw_buffers_there_and_back(nbytes: int, share: float) -> None:
    draw = random.Random(nbytes)
    base = draw.randbytes(nbytes)
    current = bytes(draw.randrange(256) if draw.random() < share else byte for byte in base)
    for overwrite in (False, True):
        held = Buffers(current, base)
        where = ctypes.addressof(held.base)
        entries, changed, sums = library().encode(ctypes.addressof(held.current), where, nbytes, overwrite, held.planes())
        counts, offsets, values, expected = reference.planes(current, base, overwrite)
        assert (entries, changed, sums) == (len(values), expected, reference.sums(current))
        assert list(held.counts.raw[: held.rows]) == counts
        assert list(held.offsets.raw[:entries]) == offsets
        assert reference.units(held.values.raw[: 2 * entries]) == values
        assert held.base.raw[:nbytes] == current == held.current.raw[:nbytes]
        place = held.planes()
        assert library().check(place[0], held.rows, place[1], entries, nbytes)
        if not overwrite:
            library().apply(where, nbytes, place, -1)
            assert held.base.raw[:nbytes] == base
        library().apply(where, nbytes, place, 0 if overwrite else 1)
        assert held.base.raw[:nbytes] == current
        held.check_guards()


@pytest.mark.parametrize(
    ("counts", "offsets", "nbytes"),
    [
        ([2, 1], [5, 9], 1024),
        ([2, 0], [5, 9, 10], 1024),
        ([2, 0], [9, 5], 1024),
        ([2, 0], [5, 5], 1024),
        ([0, 1], [1], 513),
        ([0, 255], [0, 1], 513),
        ([255, 0], list(range(255)), 1024),
        ([255, 0], [*range(255), 254], 1024),
        ([254, 0], list(range(254)), 300),
    ],
    ids=["too few", "too many", "descending", "twice", "past the end", "full but short", "full lacks one", "full repeats", "small tensor"],
)
def test_planes_that_do_not_fit_are_seen(counts: list[int], offsets: list[int], nbytes: int) -> None:
    kept = bytes(counts[: -(-nbytes // 512)]), bytes(offsets)
    one, two = (ctypes.create_string_buffer(data, len(data) or 1) for data in kept)
    assert not library().check(ctypes.addressof(one), len(kept[0]), ctypes.addressof(two), len(kept[1]), nbytes)


@pytest.mark.parametrize(
    ("entries", "units", "mode"),
    [(0, 0, "same"), (0, 9, "same"), (1, 9, "sparse"), (1, 8, "bitmap"), (14, 16, "bitmap"), (15, 16, "dense"), (1, 1, "dense")],
)
def test_the_mode_goes_by_the_share_of_entries(entries: int, units: int, mode: str) -> None:
    assert delta.mode_of(entries, units) == mode
