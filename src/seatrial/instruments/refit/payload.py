"""The wire format of a refit, and tensors as its bytes. A payload with one wrong bit is refused.

    magic (8) | length of the body (8) | length of the header (8) | sums of the header (16) | body | header (strict JSON, payload_header.py)

- The header comes last, so a body of any size is written piece by piece; a file appears under its name only when it is whole.
- The body is a sequence of frames, each coded for itself. Planes are [offset, length] in the uncoded body and may lie in several frames
  (packed buckets). Sums cover every byte; they find faults and do not resist an adversary.
- Planes by mode: raw: the bytes of the tensor; sparse: gaps, low bytes of the values, high bytes (apart, because they compress better);
  bitmap: bits, low, high; dense: one value per unit; same: none. Planes are coded on the CPU.
"""

from __future__ import annotations

import importlib
import io
import json
import mmap
import os
import struct
import tempfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

from seatrial.instruments.bits import plain
from seatrial.instruments.bits.delta import Coded, from_gaps, gaps_of, mode_of
from seatrial.instruments.bits.fingerprint import Stream
from seatrial.instruments.refit.payload_header import CODECS, Entry, Header, Pair, RefitRefused, parse

MAGIC = b"SEAREFIT"
PREAMBLE = struct.Struct("<8sQQQQ")
CHUNK = 1 << 22

Data = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Body:
    codec: str
    frames: tuple[Pair, ...]
    body: int
    sums: Pair


def write(chunks: Iterable[Data], header: Callable[[Body], Header], codec: str = "none", path: Path | None = None) -> bytes | Path:
    """Write the chunks as frames, then the header that is made of them; to a file if there is a path, which then appears whole."""
    if path is None:
        sink = io.BytesIO()
        _write(sink, chunks, header, codec)
        return sink.getvalue()
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            _write(stream, chunks, header, codec)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _write(sink: IO[bytes], chunks: Iterable[Data], header: Callable[[Body], Header], codec: str) -> None:
    code, sums, frames = _coder(codec), Stream(), []
    sink.write(bytes(PREAMBLE.size))
    for chunk in chunks:
        sent = code(chunk)
        sums.update(sent)
        sink.write(sent)
        frames.append((len(chunk), len(sent)))
    length = sum(sent for _, sent in frames)
    made = header(Body(codec, tuple(frames), length, sums.finish()))
    # `vars` instead of `asdict`, which copies every number of every plane.
    text = json.dumps(made, default=vars, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    sink.write(text)
    sink.seek(0)
    sink.write(PREAMBLE.pack(MAGIC, length, len(text), *_sums(memoryview(text))))


class Payload:
    """A payload that was read and found whole."""

    def __init__(self, header: Header, body: memoryview, size: int) -> None:
        self.header, self.size, self._body = header, size, body
        self._decode = _decoder(header.codec)
        self._starts = list(accumulate(header.frames, lambda so_far, frame: (so_far[0] + frame[0], so_far[1] + frame[1]), initial=(0, 0)))
        self._kept: tuple[int, memoryview] = (-1, memoryview(b""))

    def plane(self, place: Pair) -> memoryview:
        start, length = place
        if self.header.codec == "none":
            return self._body[start : start + length]
        parts, end = [], start + length
        first = bisect_right(self._starts, start, key=lambda both: both[0]) - 1
        for index in range(first, len(self.header.frames)):
            begin = self._starts[index][0]
            if begin >= end:
                break
            low, high = max(start, begin), min(end, self._starts[index + 1][0])
            if low < high:
                parts.append(self._frame(index)[low - begin : high - begin])
        return parts[0] if len(parts) == 1 else memoryview(bytearray().join(parts))

    def _frame(self, index: int) -> memoryview:
        """One frame, uncoded; the last one is kept, since small tensors share a bucket."""
        if self._kept[0] != index:
            size, (_, start), (_, end) = self.header.frames[index][0], *self._starts[index : index + 2]
            data = bytearray(self._decode(self._body[start:end], size))
            if len(data) != size:
                raise RefitRefused("corrupt", detail=f"frame {index} has {len(data)} bytes uncoded, the header says {size}")
            self._kept = (index, memoryview(data))
        return self._kept[1]


def read(data: Data | str | os.PathLike[str]) -> Payload:
    """Read a payload, from memory or from a file, and refuse it unless every byte is as it was written."""
    whole = memoryview(data).cast("B") if isinstance(data, (bytes, bytearray, memoryview)) else _mapped(Path(data))
    if len(whole) < PREAMBLE.size:
        raise RefitRefused("truncated", detail=f"{len(whole)} bytes are no payload: its preamble alone has {PREAMBLE.size}")
    magic, body, head, *sums = PREAMBLE.unpack(whole[: PREAMBLE.size])
    if magic != MAGIC:
        raise RefitRefused("corrupt", detail=f"it begins with {bytes(magic)!r}, not with {MAGIC!r}")
    wanted = PREAMBLE.size + body + head
    if len(whole) != wanted:
        reason = "truncated" if len(whole) < wanted else "corrupt"
        raise RefitRefused(reason, detail=f"the payload has {len(whole)} bytes and says {wanted}")
    text = whole[PREAMBLE.size + body :]
    if _sums(text) != tuple(sums):
        raise RefitRefused("corrupt", detail="the sums of its header differ")
    header = parse(bytes(text))
    content = whole[PREAMBLE.size : PREAMBLE.size + body]
    if header.body != body or _sums(content) != header.sums:
        raise RefitRefused("corrupt", detail="the sums of its body differ")
    return Payload(header, content, len(whole))


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as stream:
        if os.fstat(stream.fileno()).st_size == 0:
            return memoryview(b"")
        # A private map: tensors over it may claim to be writable, and nothing reaches the file.
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY))


def _sums(data: memoryview) -> Pair:
    stream = Stream()
    for start in range(0, len(data), CHUNK):
        stream.update(data[start : start + CHUNK])
    return stream.finish()


def best_codec(wanted: str) -> str:
    """The codec that can be had here: zlib where zstd cannot be imported."""
    if wanted not in CODECS:
        raise ValueError(f"payload: the codec {wanted!r} is none of {', '.join(CODECS)}")
    if wanted == "zstd":
        try:
            importlib.import_module("zstandard")
        except ImportError:
            return "zlib"
    return wanted


def _coder(codec: str) -> Callable[[Data], Any]:
    if codec == "zstd":
        compressor = importlib.import_module("zstandard").ZstdCompressor(level=1)
        return lambda data: compressor.compress(data)
    return (lambda data: zlib.compress(data, 1)) if codec == "zlib" else lambda data: data


def _decoder(codec: str) -> Callable[[memoryview, int], bytes]:
    if codec == "zstd":
        try:
            zstandard = importlib.import_module("zstandard")
        except ImportError:
            fix = "install zstandard in the generator's environment, or let the policy send with zlib"
            raise RefitRefused("layout", fix=fix, detail="it is coded with zstd, which cannot be imported here") from None
        return lambda data, size: _zstd(zstandard, data, size)
    return _inflate


def _zstd(library: Any, data: memoryview, size: int) -> bytes:
    """A frame that says another size is not decoded: it shall not fill the memory. Nothing may follow it."""
    try:
        says = library.frame_content_size(data)
        if says != size:
            raise RefitRefused("corrupt", detail=f"a frame says that it has {says} bytes uncoded, the header says {size}")
        return bytes(library.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False))
    except library.ZstdError as error:
        raise RefitRefused("corrupt", detail=f"a frame cannot be decoded: {error}") from error


def _inflate(data: memoryview, size: int) -> bytes:
    """At most one byte more than there should be: a wrong length shall not fill the memory. Nothing may follow it."""
    decoder = zlib.decompressobj()
    try:
        made = decoder.decompress(data, size + 1)
    except zlib.error as error:
        raise RefitRefused("corrupt", detail=f"a frame cannot be decoded: {error}") from error
    if len(made) == size and (not decoder.eof or decoder.unused_data):
        raise RefitRefused("corrupt", detail="a frame goes on after its content, or ends before its checksum")
    return made


def flat(tensor: Any) -> Any:
    import torch

    plain.check_memory(tensor)
    return tensor.detach().view(-1).view(torch.uint8)


def to_bytes(tensor: Any) -> memoryview:
    return memoryview(flat(tensor).cpu().numpy())


def from_bytes(data: memoryview, device: Any) -> Any:
    """Bytes as a tensor; without a copy if they may be written to and stay on the CPU."""
    import torch

    if not len(data):
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8).to(device)


def dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def of_coded(coded: Coded) -> list[memoryview]:
    if coded.mode == "same":
        return []
    if coded.mode == "dense":
        return [to_bytes(coded.dense)]
    halves = flat(coded.values).view(-1, 2)
    split = [to_bytes(halves[:, side].contiguous()) for side in (0, 1)]
    return [to_bytes(gaps_of(coded) if coded.mode == "sparse" else coded.bitmap), *split]


def fit(entry: Entry, nbytes: int) -> bool:
    """Whether the planes have lengths that a tensor of so many bytes can have in this mode; nothing is decoded for it."""
    units, lengths = -(-nbytes // 2), [length for _, length in entry.planes]
    if len(lengths) < 2:
        return sum(lengths) == {"same": 0, "raw": nbytes, "dense": 2 * units}[entry.mode]
    first, low, high = lengths
    places = first >= low if entry.mode == "sparse" else first == -(-units // 8)
    return places and low == high and mode_of(low, units) == entry.mode


def to_coded(entry: Entry, nbytes: int, payload: Payload, device: Any) -> Coded:
    """A coded tensor from the planes of a payload, whose lengths fit; a sparse one is on the CPU, and refused if it is not well-formed."""
    import torch

    sparse = entry.mode == "sparse"
    planes = [from_bytes(payload.plane(place), "cpu" if sparse else device) for place in entry.planes]
    if entry.mode == "same":
        return Coded("same", nbytes, 0)
    if entry.mode == "dense":
        return Coded("dense", nbytes, entry.changed, dense=planes[0])
    first, low, high = planes
    values = torch.stack((low, high), 1).view(torch.int16).view(-1)
    if not sparse:
        return Coded("bitmap", nbytes, entry.changed, bitmap=first, values=values)
    try:
        return from_gaps(first, values, nbytes, entry.changed)
    except ValueError as error:
        raise RefitRefused("corrupt", (entry.name,), detail=str(error)) from error


def uncounted(current: Any, base: Any) -> int | None:
    """How many elements differ in any bit; None for elements of two bytes, which the coding counts itself."""
    import torch

    size = current.element_size()
    if size == 2:
        return None
    if not current.numel():
        return 0
    kind = {1: torch.uint8, 4: torch.int32, 8: torch.int64}.get(size)
    if kind is not None:
        return int(torch.count_nonzero(current.detach().view(-1).view(kind) != base.detach().view(-1).view(kind)))
    return int((flat(current) != flat(base)).view(-1, size).any(1).sum())


def nonfinite(tensor: Any) -> int:
    """How many elements are NaN or infinite. A sum is finite only if all of its parts are, and is much cheaper than a look at each."""
    import torch

    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return 0
    wide = tensor.float() if tensor.element_size() == 1 else tensor
    if torch.isfinite(wide.sum()):
        return 0
    return int(torch.count_nonzero(~torch.isfinite(wide)))


def buckets(chunks: Iterable[Data], size: int) -> Iterator[memoryview]:
    """The same bytes in buckets of `size`; only the last may be smaller. A tensor may lie in several."""
    bucket, filled = bytearray(size), 0
    for chunk in chunks:
        rest = memoryview(chunk)
        while len(rest):
            part = rest[: size - filled]
            bucket[filled : filled + len(part)] = part
            filled, rest = filled + len(part), rest[len(part) :]
            if filled == size:
                yield memoryview(bucket)
                filled = 0
    if filled:
        yield memoryview(bucket)[:filled]
