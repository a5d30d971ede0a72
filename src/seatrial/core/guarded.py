"""The guarded readers of outside data: numbers, JSON, TOML, Python literals and programs.

- Whatever the input is, the answer is a value or a `BadValue`: never another exception, never a hang, never a warning on stderr.
  A caller turns a `BadValue` into `Damage` with file and line, or into a `UserError` with file and fix.
- Nesting is bounded (`DEPTH`), so that what was read can be walked, validated and written again.
- An integer has at most 308 digits, so that it fits into a double; in JSON a longer one is infinite, as 1e999 is. Text has no lone
  surrogates, so that it can be written as UTF-8.
- JSON keeps `NaN` and `Infinity`, since trainers write them; the caller decides what they mean.
"""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import stat
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET
    from io import BufferedReader

DEPTH = 100
"""Nested lists and tables that a value may have."""
DIGITS = 308
"""Digits of an integer that still fits into a double."""
_NO_FILES = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
STEP_DIGITS = 18
"""Digits of a step, a count or an exit code: what a database and a format string still hold."""
LITERAL_LENGTH = 1_000_000
TOML_LENGTH = 4_000_000
_PARTS = 100
_DOTTED = re.compile(rf"""(?<![\w"'-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){{{_PARTS}}}""")
"""A dotted key whose parts alone would cost quadratic time."""
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_MARKED = re.compile(r"\\u[dD][89a-fA-F]")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_COLON = re.compile(rb'"\s*:')
_SIGNS = re.compile(r"[-+~(\[{][-+~(\[{\s]{" + str(DEPTH) + "}")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?(?:nan|inf(?:inity)?)", re.IGNORECASE | re.ASCII)
_NAN = re.compile(r"[-+]?(?:nan(?:\((?:ind|snan|qnan|0x[0-9a-f]+)?\))?|1\.#(?:qnan|snan|ind)0*)", re.IGNORECASE)
_INFINITE = re.compile(r"([-+]?)(?:inf(?:inity)?|1\.#inf0*)", re.IGNORECASE)
_WHOLE = re.compile(rf"[-+]?[0-9]{{1,{STEP_DIGITS}}}", re.ASCII)


class BadValue(ValueError):
    """Outside data that cannot be read: what is wrong, and where in the text, if that is known."""

    def __init__(self, what: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.line = line
        self.column = column

    @property
    def where(self) -> str:
        """`line 3 column 7`, or empty."""
        return "" if self.line is None else f"line {self.line} column {self.column}"


def open_file(path: Path, *, piped: bool = False, buffering: int = -1) -> BufferedReader:
    """Open a file of others for reading. An OSError for what is none: a named pipe may hold its reader for ever, a device may never end.
    The null device is an empty file. `piped`: a shell's pipe will do (`<(command)`, /dev/stdin), since it is read only once."""
    try:
        found = path.stat()
    except ValueError as error:
        raise OSError(errno.EINVAL, "the name holds a null character", str(path)) from error
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode) or _is_null(found) or (piped and _is_pipe(path, found))):
        kind = next((name for test, name in _NO_FILES if test(found.st_mode)), "a special file")
        raise OSError(errno.EINVAL, f"is {kind}, not a file", str(path))
    return cast("BufferedReader", path.open("rb", buffering))


def real_path(path: Path) -> Path:
    """The path without links; where links lead in a circle, as far as they lead. `Path.resolve` would raise a RuntimeError."""
    try:
        return Path(os.path.realpath(path))
    except ValueError:  # a null character
        return path


def endless(path: Path) -> str | None:
    """What a place is whose reader may wait for ever, or never come to its end: a named pipe, or a device but the null device."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    if _is_null(found) or stat.S_ISSOCK(found.st_mode):  # a socket cannot be opened
        return None
    return next((name for test, name in _NO_FILES if test(found.st_mode)), None)


def is_file(path: Path) -> bool:
    """Whether there is a file at a place that other data name. `Path.is_file` raises an OSError for a name that is too long."""
    return os.path.isfile(path)  # noqa: PTH113


def exists(path: Path) -> bool:
    """Whether there is anything at a place that other data name; see `is_file`."""
    return os.path.exists(path)  # noqa: PTH110


def read_file(path: Path) -> bytes:
    """The whole content; errors as of `open_file`."""
    with open_file(path, piped=True) as stream:
        return stream.read()


def _is_null(found: os.stat_result) -> bool:
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == Path(os.devnull).stat().st_rdev


def _is_pipe(path: Path, found: os.stat_result) -> bool:
    """Whether a pipe has no name of its own: whoever made it writes to it."""
    return stat.S_ISFIFO(found.st_mode) and str(path).startswith(("/dev/fd/", "/dev/stdin", "/proc/"))


def parse_json(text: str | bytes, *, twice: Callable[[str], None] | None = None, finite: bool = False) -> Any:
    """JSON as data. Of a key that stands twice the last value counts, and `twice` hears its name. With `finite`, NaN is refused."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "backslashreplace")
        elif not isinstance(text, str):  # a value that another file holds, and that should be a text
            raise BadValue("not a text")
        text = text.removeprefix("\ufeff")
        value = (_DECODER if twice is None and not finite else _decoder(twice, finite)).decode(text)
    except json.JSONDecodeError as error:
        raise BadValue(error.msg, error.lineno, error.colno) from error
    except RecursionError as error:
        raise BadValue(f"nested deeper than {DEPTH}") from error
    except MemoryError as error:
        raise BadValue("too large for the memory") from error
    if text.count("[") + text.count("{") > DEPTH:
        require_flat(value)
    return _writable(value) if _MARKED.search(text) or _SURROGATE.search(text) else value


def parse_json_once(text: str | bytes, *, finite: bool = False) -> Any:
    """JSON as data; a key that stands twice is a `BadValue`, since neither value is the one that was meant."""

    def refuse(key: str) -> None:
        raise BadValue(f"the key {key!r} stands twice in one object")

    return parse_json(text, twice=refuse, finite=finite)


def has_every_key(value: Any, data: bytes) -> bool:
    """Whether a value that a fast reader made of this text certainly lost no key that stands twice. A text holds at least as many `":` as
    keys: when the tables have as many keys as that, none was lost. False where it may have, or is nested too deeply to tell."""
    keys, level = 0, [value] if isinstance(value, dict | list) else []
    for _ in range(DEPTH):
        keys += sum(len(one) for one in level if isinstance(one, dict))
        level = [inner for one in level for inner in _inner(one) if isinstance(inner, dict | list)]
        if not level:
            break
    return not level and keys == len(_COLON.findall(data))


def parse_toml(text: str) -> dict[str, Any]:
    """TOML as data."""
    if len(text) > TOML_LENGTH:
        raise BadValue(f"longer than {TOML_LENGTH} characters")
    if found := _DOTTED.search(text):
        raise BadValue(f"a key of {_PARTS} parts or more", text.count("\n", 0, found.start()) + 1, 1)
    import tomllib  # here: the pytest plugin, which reads JSON, is to start quickly

    try:
        value = tomllib.loads(text.removeprefix("\ufeff"))
    except RecursionError as error:
        raise BadValue(f"nested deeper than {DEPTH}") from error
    except (ValueError, OverflowError, MemoryError) as error:  # tomllib's own error, a number of 5,000 digits, a date that does not exist
        raise BadValue(str(error) or type(error).__name__) from error
    require_flat(value)
    _require_small(value)
    return value


def parse_xml(path: Path) -> ET.Element:
    """The root of an XML file, such as a junit.xml."""
    import xml.etree.ElementTree as ET

    try:
        root = ET.parse(path).getroot()
    except (ET.ParseError, LookupError, ValueError, RecursionError, MemoryError) as error:  # LookupError: an unknown encoding
        raise BadValue(f"not valid XML: {error}") from error
    level = [root]
    for _ in range(DEPTH):
        level = [inner for outer in level for inner in outer]
    if level:
        raise BadValue(f"nested deeper than {DEPTH}")
    return root


def parse_literal(text: str, value: Callable[[ast.expr], Any] = ast.literal_eval) -> Any:
    """A Python literal as data: never evaluated. `value` turns the syntax tree into data, where more than literals is allowed."""
    if len(text) > LITERAL_LENGTH:
        raise BadValue(f"longer than {LITERAL_LENGTH} characters")
    if "\0" in text:
        raise BadValue("a null character")
    if _SIGNS.search(text):
        raise BadValue(f"nested deeper than {DEPTH}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the parser warns of odd escapes and numbers on stderr
            found = value(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as error:
        raise BadValue(error.msg or "not a Python literal", error.lineno, error.offset) from error
    except (ValueError, TypeError, RecursionError, MemoryError, OverflowError) as error:
        known = isinstance(error, TypeError | OverflowError)  # what the others say holds an address, or nothing
        raise BadValue(f"not a Python literal: {error}" if known else "not a Python literal") from error
    require_flat(found)
    _require_small(found)
    return _writable(found) if _SURROGATE.search(text) or "\\u" in text or "\\U" in text else found


def parse_python(source: str | bytes) -> ast.Module:
    """The syntax tree of a program, which is never run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except SyntaxError as error:
        raise BadValue(error.msg or "not Python", error.lineno, error.offset) from error
    except (ValueError, RecursionError, MemoryError) as error:  # a null character, a number of 5,000 digits, an unknown encoding
        raise BadValue(str(error) or "nested too deeply") from error


def parse_float(text: str) -> float:
    """A decimal number, `nan` or `inf` as text; 1e999 is infinite. Python's `float` would take `1_000` and other scripts' digits."""
    text = text.strip()
    if not _FLOAT.fullmatch(text):
        odd = parse_not_finite(text)
        if odd is None:
            raise BadValue(f"not a number: {_short(text)!r}")
        return odd
    return float(text)


def parse_not_finite(text: str) -> float | None:
    """NaN or an infinity as C libraries, Python and JavaScript spell it (`-nan(ind)`, `1.#QNAN`); None for other text."""
    text = text.strip()
    if _NAN.fullmatch(text):
        return float("nan")
    found = _INFINITE.fullmatch(text)
    return None if found is None else float("-inf" if found[1] == "-" else "inf")


def parse_whole(text: str) -> int:
    """A step, a count or an exit code as text."""
    if not _WHOLE.fullmatch(text):
        raise BadValue(f"not a whole number of at most {STEP_DIGITS} digits: {_short(text)!r}")
    return int(text)


def parse_step(text: str) -> int | None:
    """A step as text; None where it is negative, or has more digits than any run has steps."""
    return int(text) if _WHOLE.fullmatch(text) and text[0] not in "-+" else None


def parse_count(text: str) -> int:
    """Digits of a log or a script, with or without commas, as a count. One that nothing reaches stays a huge one: never 0, never small."""
    digits = text.strip().replace(",", "")
    if not digits.isascii() or not digits.isdecimal():
        raise BadValue(f"not a count: {_short(text)!r}")
    return int(digits) if len(digits) <= STEP_DIGITS else 10**STEP_DIGITS


def parse_time(text: str) -> float:
    """The seconds since the epoch of an ISO time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise BadValue(f"not a time: {_short(text)!r}") from error


def as_float(value: object) -> float:
    """A number that was read: an int, a float or a bool; beyond a double it is infinite."""
    if not isinstance(value, int | float):
        raise BadValue(f"not a number: {_short(repr(value))}")
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def writable(text: str) -> str:
    """Text that can be written as UTF-8: half of a surrogate pair becomes the replacement character."""
    return _SURROGATE.sub(_REPLACEMENT, text)


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= DIGITS else float(digits)


_DECODER = json.JSONDecoder(parse_int=_whole)


def _decoder(twice: Callable[[str], None] | None, finite: bool) -> json.JSONDecoder:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        if twice is not None and len(built) < len(pairs):
            for key, count in Counter(key for key, _ in pairs).items():
                if count > 1:
                    twice(writable(key))
        return built

    def refuse(name: str) -> None:
        raise BadValue(f'{name} is no JSON; what is not finite is written as a string: "{name}"')

    return json.JSONDecoder(parse_int=_whole, object_pairs_hook=build, parse_constant=refuse if finite else None)


def _inner(value: Any) -> Any:
    """The items of a list or a table, without keys."""
    return value.values() if isinstance(value, dict) else value


def require_flat(value: Any) -> None:
    """Raise where a value is nested too deeply; works level by level, so it needs no depth of its own."""
    level = [value] if isinstance(value, dict | list | tuple | set) else []
    for _ in range(DEPTH):
        if not level:
            return
        level = [inner for outer in level for inner in _inner(outer) if isinstance(inner, dict | list | tuple | set)]
    if level:
        raise BadValue(f"nested deeper than {DEPTH}")


def _require_small(value: Any) -> None:
    """Raise for an integer beyond a double, at any depth."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict | list | tuple | set):
            left.extend(_inner(one))
        elif isinstance(one, int) and one.bit_length() > 1023:
            raise BadValue(f"an integer of {one.bit_length()} bits")


def _writable(value: Any) -> Any:
    """The value with text that can be written, keys too."""
    if isinstance(value, str):
        return writable(value)
    if isinstance(value, dict):
        return {_writable(key): _writable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_writable(inner) for inner in value]
    if isinstance(value, tuple):
        return tuple(_writable(inner) for inner in value)
    return value


def _short(text: str) -> str:
    """A text short enough for a message."""
    return text if len(text) <= 80 else f"{text[:79]}…"
