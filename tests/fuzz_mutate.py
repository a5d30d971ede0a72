"""Mutations that know the structure of a file: values, keys and rows of JSON and TOML, records of a journal, and the file itself."""

from __future__ import annotations

import json
import os
import random
import re
import zlib
from pathlib import Path
from typing import Any

from seatrial.rollouts.rollout_record import KEY

RAW = "\ue000raw:"
"""Begins a text that is written as it stands, without quotes: a number that no JSON library would write."""
NUMBERS = (
    *("0", "-0", "-1", "1", "2", "0.5", "1e999", "-1e999", "NaN", "Infinity", "null", "true", "false", "1e308", "1e18", "2147483648"),
    *("9" * 19, "9" * 25, "9" * 310, "9" * 5000, "-" + "9" * 25, "9223372036854775807", "18446744073709551616", "1e-320", "100000", "3"),
)
TEXTS = (
    *("", "a", "\ud800", "\x00", "../..", "/", "/dev/null", "~", "\n", "\x1b[31m", "NaN", "Infinity", "-Infinity", "1", "2025-01-01"),
    *(
        "9999-99-99T99:99:99",
        "0001-01-01T00:00:00",
        "9999-12-31T23:59:59.999999+23:59",
        "x" * 5000,
        "é",
        "\u2028",
        "[redacted:x]",
        "%s",
        "{}",
    ),
    *(
        "²",
        "٣",
        "-1",
        "1e999",
        "trl",
        "pass",
        "fail",
        "done",
        "[/red]",
        "`|`",
        "--help",
        "$(x)",
        "'",
        '"',
        "\\",
        "a/b",
        ".",
        "..",
        "(",
        "[",
    ),
)
TOML = (
    *("0", "-1", "1e999", "nan", "inf", "-inf", "true", '""', '"a"', "[]", "{}", "[[]]", "[1, 'a']", "9" * 19, "9" * 5000, "1979-05-27"),
    *("1979-05-27T07:32:00Z", "07:32:00", "0x" + "f" * 300, "'''\n'''", '"\\ud800"', '"\\u0000"', "{a = 1}", "[" * 200 + "]" * 200, "0.1"),
    *('"../.."', '"/dev/null"', "[true]", '["x", "x"]', "1_0", "1e-320", "100000000", "-0.0", '"٣"', '"("', '"$(x)"', "=", "1e308"),
)
KEYS = ("a", "x.y", '"', "name", "é", "1", '" "')
SHAPES = (
    *(
        "empty",
        "cut",
        "null",
        "crlf",
        "bom",
        "utf16",
        "latin",
        "directory",
        "dangling",
        "loop",
        "device",
        "zero",
        "fifo",
        "absent",
        "twice",
    ),
    *("unreadable", "line", "deep", "text", "newline", "noend", "full"),
)


def hostile(rng: random.Random) -> Any:
    """A value that nobody expects there."""
    kind = rng.random()
    if kind < 0.45:
        return RAW + rng.choice(NUMBERS)
    if kind < 0.75:
        return rng.choice(TEXTS)
    if kind < 0.78:
        return RAW + rng.choice(("[" * 99 + "]" * 99, "[" * 3000 + "]" * 3000, '{"a":' * 150 + "1" + "}" * 150))
    return rng.choice(([], {}, [None], [[]], {"a": None}, {"": {}}, [True, 1, "x"], {"1": 1, "-1": "x"}, [{}], [1e308, -1e308], ["\ud800"]))


def changed(rng: random.Random, value: Any, often: int = 1) -> Any:
    """JSON with a few values replaced, deleted, moved or doubled, and keys renamed."""
    holder = [value]
    for _ in range(often):
        places = list(_places(holder))
        above, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind < 4 or above is holder:
            above[key] = hostile(rng)
        elif kind == 4:
            del above[key]
        elif kind == 5 and isinstance(above, dict):
            above[rng.choice(TEXTS)] = above.pop(key)
        elif kind == 5:
            above.append(above[key])
        elif kind == 6:
            other, there = rng.choice(places[1:])
            above[key] = _copied(other[there])
        else:
            above[key] = [above[key]] if rng.random() < 0.5 else {"a": above[key]}
    return holder[0]


def _copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _places(value: Any) -> Any:
    """Every table or list with one of its keys, outermost first."""
    found: list[tuple[Any, Any]] = []
    level = [value]
    while level and len(found) < 5000:
        inner = []
        for one in level:
            for key in list(one) if isinstance(one, dict) else range(len(one)):
                found.append((one, key))
                if isinstance(one[key], dict | list):
                    inner.append(one[key])
        level = inner
    return found


def written(value: Any, indent: int | None = None) -> bytes:
    """JSON with its raw values as they stand; half of a surrogate pair is written as an escape."""
    text = json.dumps(value, indent=indent)
    return re.sub(r'"\\ue000raw:([^"]*(?:\\"[^"]*)*)"', lambda found: found[1].replace('\\"', '"'), text).encode("utf-8", "surrogatepass")


def json_changed(rng: random.Random, data: bytes) -> bytes:
    """A JSON file with a few values changed; a key may stand twice."""
    try:
        made = written(changed(rng, json.loads(data), rng.choice((1, 1, 1, 2, 4))), rng.choice((None, 2)))
    except (ValueError, IndexError, TypeError, KeyError, RecursionError):  # a list that became empty under our hands
        return data
    if rng.random() < 0.08 and (found := re.search(rb'"(\w+)": ', made)):
        made = made[: found.start()] + found[0] + b"0, " + made[found.start() :]
    return made


def rows_changed(rng: random.Random, data: bytes) -> bytes:
    """A JSONL file with one or two of its rows changed, dropped, doubled, cut, or moved."""
    lines = data.split(b"\n")
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(lines))
        kind = rng.random()
        if kind < 0.7 and lines[at]:
            lines[at] = sealed(json_changed(rng, lines[at])) if _is_record(lines[at]) else json_changed(rng, lines[at]).replace(b"\n", b" ")
        elif kind < 0.76:
            del lines[at]
            lines = lines or [b""]
        elif kind < 0.84:
            lines.insert(at, rng.choice(lines))
        elif kind < 0.92:
            lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
        else:
            lines.insert(at, rng.choice((b"[]", b"1", b"null", b"{}", b"\x00", b"\xff", b"[" * 3000, b'""', b" ", b"\r")))
    return b"\n".join(lines)


def _is_record(line: bytes) -> bool:
    return line.startswith(b'{"' + KEY.encode())


def sealed(line: bytes) -> bytes:
    """A changed record of a journal with a checksum that holds again: written as `record.encode` writes it."""
    try:
        row = json.loads(line)
        head = row.pop(KEY)
        head.pop("crc"), head.pop("end")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return line
    inner, body = (json.dumps(part, separators=(",", ":")).encode() for part in (head, row))
    start = b'{"%s":{"crc":"' % KEY.encode()
    end = len(start) + 8 + len(b'","end":"') + 6 + 2 + len(inner) - 1
    covered = b'","end":"%06d",%s%s%s' % (end, inner[1:], b"" if body == b"{}" else b",", body[1:])
    return b"%s%08x%s" % (start, zlib.crc32(covered), covered)


def toml_changed(rng: random.Random, data: bytes) -> bytes:
    """A TOML file with values changed, keys renamed, lines doubled or dropped."""
    lines = data.decode("utf-8", "replace").split("\n")
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(lines))
        key, equals, _ = lines[at].partition(" = ")
        kind = rng.random()
        if equals and kind < 0.65:
            lines[at] = f"{key} = {rng.choice(TOML)}"
        elif kind < 0.75:
            lines.insert(at, lines[at])
        elif kind < 0.85:
            del lines[at]
            lines = lines or [""]
        elif kind < 0.93 and equals:
            lines[at] = f"{rng.choice(KEYS)} = {rng.choice(TOML)}"
        else:
            lines[at] = rng.choice(("[a]", "[[a]]", "[", "a = 1", "[run]", f"{key} =", "\x00", "a.b.c = 1", lines[at].swapcase()))
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def reshaped(rng: random.Random, path: Path, shape: str | None = None) -> str:
    """The file itself becomes something else; says what."""
    shape = shape or rng.choice(SHAPES)
    data = path.read_bytes()
    match shape:
        case "empty":
            path.write_bytes(b"")
        case "cut":
            path.write_bytes(data[: rng.randrange(len(data) + 1)])
        case "null":
            at = rng.randrange(len(data) + 1)
            path.write_bytes(data[:at] + b"\0" * rng.choice((1, 8, 4096)) + data[at:])
        case "crlf":
            path.write_bytes(data.replace(b"\n", b"\r\n"))
        case "bom":
            path.write_bytes(b"\xef\xbb\xbf" + data)
        case "utf16":
            path.write_bytes(data.decode("utf-8", "replace").encode("utf-16"))
        case "latin":
            at = rng.randrange(len(data) + 1)
            path.write_bytes(data[:at] + rng.choice((b"\xe9", b"\xff\xfe", b"\xed\xa0\x80", b"\xc3")) + data[at:])
        case "twice":
            path.write_bytes(data + data)
        case "unreadable":
            path.chmod(0)
        case "line":
            path.write_bytes(data + b"x" * 200_000)
        case "deep":
            path.write_bytes(rng.choice((b"[", b'{"a":', b"(", b"-")) * 3000)
        case "text":
            path.write_bytes(
                rng.choice((b"null", b"[]", b"1", b'"a"', b"{}", b"true", b"NaN", b"version https://git-lfs.github.com/spec/v1\n"))
            )
        case "newline":
            path.write_bytes(b"\n" + data)
        case "noend":
            path.write_bytes(data.rstrip(b"\n"))
        case _:
            path.unlink()
            _replaced(path, shape)
    return shape


def _replaced(path: Path, shape: str) -> None:
    match shape:
        case "directory":
            (path / "inner").mkdir(parents=True)
        case "dangling":
            path.symlink_to("nothing-is-here")
        case "loop":
            path.symlink_to(path.name)
        case "device":
            path.symlink_to(os.devnull)
        case "zero":
            path.symlink_to("/dev/zero")
        case "full":
            path.symlink_to("/dev/full")
        case "fifo":
            os.mkfifo(path)


def mutate(rng: random.Random, path: Path) -> str:
    """Change a file by its kind, or reshape it; says how."""
    if rng.random() < 0.25:
        return reshaped(rng, path)
    data = path.read_bytes()
    if path.suffix == ".jsonl":
        path.write_bytes(rows_changed(rng, data))
    elif path.suffix == ".json":
        path.write_bytes(json_changed(rng, data))
    elif path.suffix == ".toml":
        path.write_bytes(toml_changed(rng, data))
    else:
        at, end = sorted(rng.randrange(len(data) + 1) for _ in "ab")
        junk = rng.choice((*NUMBERS, *TEXTS)).encode("utf-8", "surrogatepass")
        path.write_bytes(data[:at] + junk + data[min(end, at + rng.choice((0, 0, 4, 40))) :])
    return "changed"
