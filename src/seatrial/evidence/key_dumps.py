"""Private keys in dumps of bytes: xxd, hexdump, od, byte arrays of C, Go, Python and Node.

- A dump is decoded as it passes. Once the bytes say that a private key begins, every further row of the dump is closed, up to END.
- The tools' groups of two and four bytes are read in both byte orders; blanks do not count, because `od -c` shows none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from seatrial.evidence.key_blocks import MARK

HINTS = (
    *(
        "2d2d",
        "2D2D",
        "2d 2d",
        "2D 2D",
        "0x2d,",
        "0x2D,",
        "45, 45, 45",
        "45,45,45",
        "45 45 45",
        "45  45  45",
        "45   45   45",
        " 055 055",
        "026455",
    ),
    *("-   -", "3082", "30 82", "8230", "0x2d\t", "0x2d 0x", "0x2D 0x", "x2d\\", "x2D\\", "2d:2d", "2D:2D", "00101101"),
    *(LABELS := ("privateExponent:", "prime1:", "prime2:", "exponent1:", "exponent2:", "coefficient:", "priv:")),
)
"""A dump of a private key has one of these in its first row: the dashes of BEGIN, the first bytes of DER, or a label of openssl."""
_BEGIN = re.compile(rb"BEGIN[A-Z0-9]{0,24}PRIVATEKEY|PuTTY-User-Key|AGE-SECRET-KEY-|openssh-key-v1")
_END = re.compile(rb"END[A-Z0-9]{0,24}PRIVATEKEY")
_DER = re.compile(rb"^\x30\x82..\x02\x01[\x00\x01](?:\x02\x82|\x02\x81|\x30[\x0d\x10\x13]|\x04\x20)", re.DOTALL)
_TEXT = re.compile(r"\s+[|>].*$")
_SEPARATORS = str.maketrans(",│┊", "   ")
_OFFSET = re.compile(r"(?:0x)?[0-9a-fA-F]{4,16}(?:-[0-9a-fA-F]{4,16})?:?")
_HEX = re.compile(r"(?:[0-9a-fA-F]{2}){1,32}")
_HEX_ROW = re.compile(r"(?:[0-9a-fA-F]{2}){8,}")
_OCTAL_WORD, _OCTAL_BYTE, _DECIMAL = re.compile(r"[01][0-7]{5}"), re.compile(r"[0-3][0-7]{2}"), re.compile(r"\d{1,3}")
_CHARACTER = re.compile(r"[!-~]|\\[0abfnrtv\\]|[0-3][0-7]{2}|sp|nl|ht|cr|nul|del")
_ARRAY = re.compile(r"0x[0-9a-fA-F]{2}\b")
_ESCAPED = re.compile(r"\\x([0-9a-fA-F]{2})")
_COLONS = re.compile(r"(?:[0-9a-fA-F]{2}:){3,}(?:[0-9a-fA-F]{2})?")
_BITS = re.compile(r"[01]{8}")
_RUN = re.compile(r"(?:[0-9a-fA-F]{2}){40,}|(?:0x[0-9a-fA-F]{2},\s*){20,}(?:0x[0-9a-fA-F]{2})?|(?:\d{1,3}(?:,\s?|\s)){40,}\d{1,3}")
_NUMBER = re.compile(r"\d+")
_KEPT = 120
_MOST_FOREIGN = 3
_LONGEST = 4000


class KeyDumps:
    """Follows one stream."""

    def __init__(self) -> None:
        self._tails: dict[str, bytes] = {}
        self._inside = self._numbers = False
        self._foreign = self._left = 0

    @property
    def open(self) -> bool:
        """Whether an earlier line began a dump."""
        return bool(self._tails)

    def line(self, line: str, begin: int) -> str:
        """The line, closed where it is a row of a dumped key; `begin` is where its log prefix ends."""
        if not self._tails and not any(hint in line for hint in HINTS):
            return line
        body = line[begin:].lstrip(" \t\"',+>-").rstrip(" \t\r\n\"',+>")
        if body in LABELS:
            self._close()
            self._numbers, self._tails = True, {"colons": b""}
            return line
        if self._numbers:
            if _COLONS.fullmatch(body):
                return line[:begin] + MARK + line[len(line.rstrip("\r\n")) :]
            self._close()
        if len(body) >= 100 and (cleared := _RUN.sub(_without_key, line)) != line:
            return cleared
        read = dict(_readings(body))
        if not read:
            if body not in ("", "*"):
                self._foreign += 1
                if self._foreign > _MOST_FOREIGN:
                    self._close()
            return line
        self._foreign, self._left = 0, self._left - 1
        inside = self._inside
        first = not self._tails
        for order, data in read.items():
            tail = (self._tails.get(order, b"") + data.translate(None, b" \n\r"))[-_KEPT - len(data) :]
            if _BEGIN.search(tail) or (first and _DER.match(data)):
                self._inside = inside = True
                self._left = _LONGEST
                tail = tail if _END.search(tail) else b""
            if inside and (_END.search(tail) or self._left < 0):
                self._inside, tail = False, b""
            self._tails[order] = tail[-_KEPT:]
        return line[:begin] + MARK + line[len(line.rstrip("\r\n")) :] if inside else line

    def _close(self) -> None:
        self._tails, self._inside, self._numbers, self._foreign = {}, False, False, 0


def _without_key(run: re.Match[str]) -> str:
    return MARK if any(_BEGIN.search(data.translate(None, b" \n\r")) or _DER.match(data) for _, data in _readings(run[0])) else run[0]


def _readings(body: str) -> Iterator[tuple[str, bytes]]:
    """What the bytes of a row may be, by how they are written."""
    if (found := _ARRAY.findall(body)) and len(found) >= 4:
        yield "array", bytes(int(one, 16) for one in found)
        return
    if (found := _ESCAPED.findall(body)) and len(found) >= 4:
        yield "escapes", bytes.fromhex("".join(found))
        return
    if _COLONS.fullmatch(body):
        yield "colons", bytes.fromhex(body.replace(":", ""))
        return
    tokens = _TEXT.sub("", body).strip("[](){}").translate(_SEPARATORS).split()
    if not tokens:
        return
    if len(tokens) == 1:
        if _HEX_ROW.fullmatch(tokens[0]):
            yield "plain", bytes.fromhex(tokens[0])
        return
    for rows in (tokens[1:] if _OFFSET.fullmatch(tokens[0]) else [], tokens):
        yield from _grouped(rows)


def _grouped(tokens: list[str]) -> Iterator[tuple[str, bytes]]:
    if not tokens:
        return
    width = len(tokens[0])
    if width % 2 == 0 and _HEX.fullmatch(tokens[0]):
        groups = []
        for token in tokens:
            if len(token) > width or not _HEX.fullmatch(token):
                break
            groups.append(bytes.fromhex(token))
        yield f"hex{width}", b"".join(groups)
        yield f"swapped{width}", b"".join(group[::-1] for group in groups)
    if _BITS.fullmatch(tokens[0]):
        bits = [int(token, 2) for token in tokens if _BITS.fullmatch(token)]
        yield "bits", bytes(bits)
        return
    if all(map(_OCTAL_WORD.fullmatch, tokens)):
        yield "octal words", b"".join(int(token, 8).to_bytes(2, "little") for token in tokens)
    if all(map(_OCTAL_BYTE.fullmatch, tokens)):
        yield "octal", bytes(int(token, 8) for token in tokens)
    if all(map(_DECIMAL.fullmatch, tokens)) and len(tokens) >= 4 and all(int(token) < 256 for token in tokens):
        yield "decimal", bytes(map(int, tokens))
    if all(map(_CHARACTER.fullmatch, tokens)) and len(tokens) >= 4:
        yield "characters", b"".join(token.encode() if len(token) == 1 else b"" for token in tokens)
