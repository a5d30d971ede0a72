"""The wire format without tensors: what is written is read back, and whatever else comes is refused with a reason."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial.instruments.refit import payload
from seatrial.instruments.refit.payload_header import REASONS, Entry, Header, RefitRefused, parse

CHUNKS = [b"abcdef" * 100, b"", b"xy"]


def entry(name: str, start: int, length: int) -> Entry:
    return Entry(name, "bfloat16", (length // 2,), "h", None, "raw", 0, ((start, length),))


ENTRIES = (entry("a", 0, 600), entry("b", 600, 0), entry("c", 600, 2))


def header(body: payload.Body, **changes: Any) -> Header:
    fields: dict[str, Any] = {"transport": "full", "kind": "overwrite", "version": 3, "base_version": None, "base_root": None}
    fields |= {"target_root": "r", "tensors": ENTRIES, **dataclasses.asdict(body), **changes}
    return Header(**fields)


def written(codec: str = "none", chunks: list[bytes] | None = None, **changes: Any) -> bytes:
    made = payload.write(CHUNKS if chunks is None else chunks, lambda body: header(body, **changes), codec)
    assert isinstance(made, bytes)
    return made


def refusal(data: Any) -> RefitRefused:
    with pytest.raises(RefitRefused) as raised:
        payload.read(data)
    return raised.value


@pytest.mark.parametrize("codec", ["none", "zlib"])
@pytest.mark.parametrize("chunks", [CHUNKS, [b"abcdef" * 100 + b"xy"], [b"abc", b"def" + b"abcdef" * 99 + b"x", b"y"]])
def test_planes_come_back_however_the_body_was_cut(codec: str, chunks: list[bytes]) -> None:
    found = payload.read(written(codec, chunks))
    assert [bytes(found.plane(item.planes[0])) for item in found.header.tensors] == CHUNKS
    assert found.header.tensors == ENTRIES
    assert found.header.frames == tuple((len(chunk), sent) for chunk, (_, sent) in zip(chunks, found.header.frames, strict=True))
    assert bytes(found.plane((0, 6))) == b"abcdef", "again, after others"


@pytest.mark.parametrize("codec", ["none", "zlib"])
def test_file_appears_whole_and_reads_as_the_bytes_do(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "weights"
    assert payload.write(CHUNKS, header, codec, path) == path
    assert path.read_bytes() == written(codec)
    assert [item.name for item in tmp_path.iterdir()] == ["weights"]
    assert bytes(payload.read(path).plane((0, 600))) == CHUNKS[0]
    assert bytes(payload.read(str(path)).plane((600, 2))) == b"xy"


def test_failed_write_leaves_the_old_file_and_no_part_of_the_new(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    payload.write(CHUNKS, header, path=path)
    before = path.read_bytes()

    def torn() -> Any:
        yield b"abc"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        payload.write(torn(), header, path=path)
    assert [item.name for item in tmp_path.iterdir()] == ["weights"]
    assert path.read_bytes() == before


@pytest.mark.parametrize("codec", ["none", "zlib"])
def test_truncated_at_every_length(codec: str) -> None:
    data = written(codec)
    assert {refusal(data[:length]).reason for length in range(len(data))} == {"truncated"}


def test_empty_and_short_files_are_truncated(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    for content in (b"", b"SEAREFIT", written()[:-1]):
        path.write_bytes(content)
        assert refusal(path).reason == "truncated"


def test_longer_than_it_says_is_corrupt() -> None:
    assert refusal(written() + b"\0").reason == "corrupt"


@pytest.mark.parametrize("codec", ["none", "zlib"])
def test_every_flipped_byte_is_seen(codec: str) -> None:
    data = written(codec)
    for index in range(len(data)):
        flipped = bytearray(data)
        flipped[index] ^= 1 << index % 8
        assert refusal(flipped).reason in ("corrupt", "truncated"), index


def test_zeros_at_the_end_of_a_body_are_not_lost() -> None:
    """The sums pad with zeros: the lengths must tell bodies apart that differ only in these."""
    data = written(chunks=[b"a", b"\0"], tensors=(entry("a", 0, 2),))
    start = payload.PREAMBLE.size
    assert refusal(data[: start + 1] + data[start + 2 :]).reason == "truncated"


def changed(**changes: Any) -> bytes:
    """The JSON of a header with other values."""
    whole = dataclasses.asdict(payload.read(written()).header)
    return json.dumps(whole | changes).encode()


def tensor(index: int = 0, **changes: Any) -> bytes:
    """The JSON of a header with one other tensor."""
    whole = [dataclasses.asdict(item) for item in ENTRIES]
    whole[index] |= changes
    return changed(tensors=whole)


def sparse(**changes: Any) -> bytes:
    """The JSON of a sparse header whose first tensor is changed."""
    whole = [dataclasses.asdict(item) | {"base": "h", "mode": "same", "planes": ()} for item in ENTRIES]
    whole[0] |= {"mode": "sparse", "base": "was", "planes": [[0, 300], [300, 151], [451, 151]]} | changes
    return changed(**SPARSE, tensors=whole)


SPARSE: dict[str, Any] = {"transport": "sparse", "base_version": 2, "base_root": "b"}
WRONG: list[tuple[str, Callable[[], bytes]]] = [
    ("format 2; known: 1", lambda: changed(format=2)),
    ("has the keys", lambda: changed(extra=1)),
    ("has the keys", lambda: tensor(extra=1)),
    ("has the keys", lambda: b"[]"),
    ("has the keys", lambda: changed(tensors=[1])),
    ("not valid", lambda: b"{"),
    ("not valid", lambda: b"\xff"),
    ("a key occurs twice", lambda: b'{"format": 1, "format": 1}'),
    ("NaN is not a number", lambda: changed(version=float("nan"))),
    ("transport is 'other'", lambda: changed(transport="other")),
    ("kind is None", lambda: changed(kind=None)),
    ("codec is 'lz4'", lambda: changed(codec="lz4")),
    ("version 0 is where both sides start", lambda: changed(version=0)),
    ("True is not a count", lambda: changed(version=True)),
    ("'3' is not a count", lambda: changed(version="3")),
    ("-1 is not a count", lambda: tensor(changed=-1)),
    ("belong to sparse payloads", lambda: changed(base_version=1)),
    ("belong to sparse payloads", lambda: changed(base_root="x")),
    ("belong to sparse payloads", lambda: changed(**SPARSE | {"base_root": None})),
    ("cannot build on 3", lambda: changed(**SPARSE | {"base_version": 3})),
    ("a full payload overwrites", lambda: changed(kind="difference")),
    ("mode of a is 'raw'", lambda: changed(**SPARSE)),
    ("mode of a is 'sparse'", lambda: tensor(mode="sparse")),
    ("a base hash belongs to a tensor of a sparse payload", lambda: tensor(base="b")),
    ("a base hash belongs to a tensor of a sparse payload", lambda: sparse(base=None)),
    ("a base hash belongs to a tensor of a sparse payload", lambda: sparse(base=1)),
    ("a: the same as its base, with another hash", lambda: sparse(mode="same", planes=[])),
    ("4 planes in mode sparse", lambda: sparse(planes=[[0, 100], [100, 200], [300, 151], [451, 151]])),
    ("target_root is a text", lambda: changed(target_root=None)),
    ("base_root a text", lambda: changed(base_root=1)),
    ("no tensor in it", lambda: changed(tensors=[])),
    ("the name 'a' occurs twice", lambda: tensor(1, name="a")),
    ("are texts", lambda: tensor(name=1)),
    ("0 planes in mode raw", lambda: tensor(planes=[])),
    ("a plane begins at 1", lambda: tensor(planes=[[1, 600]])),
    ("a plane begins at 600, the one before it ends at 599", lambda: tensor(planes=[[0, 599]])),
    ("the planes end at 603", lambda: tensor(2, planes=[[600, 3]])),
    ("its frames are not its body", lambda: changed(frames=[[602, 601]])),
    ("a frame has one length", lambda: changed(frames=[[603, 602]])),
    ("not valid", lambda: changed(frames=[[1]])),
    ("not valid", lambda: changed(sums=None)),
    ("-2 is not a count", lambda: tensor(shape=[-2])),
]


@pytest.mark.parametrize(("message", "text"), WRONG, ids=[f"{index}-{item[0]}" for index, item in enumerate(WRONG)])
def test_header_is_strict(message: str, text: Callable[[], bytes]) -> None:
    assert parse(changed()).tensors == ENTRIES, "without a change it is fine"
    assert parse(sparse()).tensors[0].base == "was"
    with pytest.raises(RefitRefused, match=r"refused \(corrupt\): its header is not valid") as raised:
        parse(text())
    assert message in str(raised.value)


def test_header_of_another_body_is_refused() -> None:
    one, two = written(), written(chunks=[b"abcdeg" * 100, b"", b"xy"])
    size = len(one) - payload.read(one).header.body - payload.PREAMBLE.size
    assert refusal(two[: payload.PREAMBLE.size] + two[payload.PREAMBLE.size : -size] + one[-size:]).reason == "corrupt"


def test_frame_of_another_length_than_it_says_is_refused() -> None:
    """Right sums over a wrong content: a broken coder."""
    found = payload.read(written("zlib"))
    wrong = dataclasses.replace(found.header, frames=((601, found.header.frames[0][1]), *found.header.frames[1:]))
    with pytest.raises(RefitRefused, match="frame 0 has 600 bytes uncoded, the header says 601"):
        payload.Payload(wrong, found._body, 0).plane((0, 600))


def test_a_frame_ends_where_its_content_does() -> None:
    found = payload.read(written("zlib", [b"abcdef" * 100 + b"xy"]))
    (size, sent), body = found.header.frames[0], bytes(found._body)
    for content in (body + b"\0", body[:-1], body[:-4]):
        wrong = dataclasses.replace(found.header, frames=((size, len(content)),))
        with pytest.raises(RefitRefused, match="a frame goes on after its content, or ends before its checksum"):
            payload.Payload(wrong, memoryview(content), 0).plane((0, size))
    assert len(found.plane((0, size))) == size > sent


def test_planes_of_many_frames() -> None:
    """Frames of no byte, planes over several frames, and none over none, at the start, between and at the end."""
    chunks = [b"", b"abc", b"", b"", b"de", b"f", b""]
    found = payload.read(written("zlib", chunks, tensors=(entry("a", 0, 6),)))
    for start in range(7):
        for length in range(7 - start):
            assert bytes(found.plane((start, length))) == b"abcdef"[start : start + length]


def test_codecs() -> None:
    assert payload.best_codec("none") == "none"
    assert payload.best_codec("zstd") in ("zstd", "zlib")
    with pytest.raises(ValueError, match="the codec 'lz4' is none of none, zlib, zstd"):
        payload.best_codec("lz4")


def test_a_codec_that_is_not_here_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    data = written("zlib")
    found = payload.read(data)
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    assert payload.best_codec("zstd") == "zlib"
    with pytest.raises(RefitRefused, match="fix: install zstandard"):
        payload.Payload(dataclasses.replace(found.header, codec="zstd"), found._body, 0)


def test_refusals_say_what_and_survive_a_process() -> None:
    error = RefitRefused("mismatch", [f"n{index}" for index in range(7)], "send it in full")
    assert str(error) == f"refit: refused (mismatch): {REASONS['mismatch']}: n0, n1, n2, n3, n4 and 2 more; fix: send it in full"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.reason, again.names) == (str(error), "mismatch", error.names)
    with pytest.raises(ValueError, match="'bad luck' is no reason"):
        RefitRefused("bad luck")
