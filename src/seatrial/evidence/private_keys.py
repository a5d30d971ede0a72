"""Private keys in text that arrives line by line: key blocks, and dumps of their bytes.

- Blocks: PEM, OpenSSH, PGP, SSH2, PuTTY, Ansible Vault. From BEGIN on, a line is closed unless it is clearly prose or a log line of
  another process; END closes the block. With the whole text at hand (`spans`), everything from BEGIN to END is closed.
- Dumps: xxd, hexdump, od, byte arrays of C, Go, Python and Node. A dump is decoded as it passes; once its bytes say that a private key
  begins, every further row is closed, up to END.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from seatrial.evidence.secret_values import stamps

MARK = "[redacted:private-key]"

_DASHES = r"[-\u2010-\u2015\u2212]"
_BEGIN = re.compile(rf"{_DASHES}{{2,6}}\s?BEGIN(?:[ +_]|%20)([A-Za-z0-9 +_./%]{{1,60}}?)\s?(?:{_DASHES}{{2,6}}|(?=[\s\"'\\,]*$))")
_END = re.compile(rf"{_DASHES}{{2,6}}\s?END(?:[ +_]|%20)([A-Za-z0-9 +_./%]{{1,60}}?)\s?(?:{_DASHES}{{2,6}}|(?=[\s\"'\\,]*$))")
_PUBLIC = ("PUBLIC", "CERTIFICATE", "SIGNATURE", "SIGNED", "PARAMETERS", "CRL", "PKCS7", "CMS")
_SECRET = ("KEY", "PRIVATE", "SECRET", "MESSAGE", "ENCRYPTED", "VAULT", "SAFE")
_PUTTY = re.compile(r"PuTTY-User-Key-File-\d+:")
_PUTTY_END = re.compile(r"Private-(?:MAC|Hash):")
_VAULT = re.compile(r"\$ANSIBLE_VAULT;[\d.]+;\w+")
_HEX_ROW = re.compile(r"[0-9a-fA-F]{2,}$")
ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]")
_ROW = re.compile(r"(?:(?<=^[+-])|(?<![A-Za-z0-9+/=_.-]))[A-Za-z0-9+/]{64}(?:[A-Za-z0-9+/]{6}){0,2}(?![A-Za-z0-9+/=_.-])")
_SHORT_ROW = re.compile(r"[A-Za-z0-9+/]{2,80}={0,2}")
_LONG_RUN = re.compile(r"(?<![A-Za-z0-9+/=_-])[A-Za-z0-9+/=_-]{24,}")
_WORD = re.compile(
    r"[A-Z]?[a-z]{2,}(?:[-_'][A-Za-z]+)*|a|A|I|INFO|WARNING|WARN|ERROR|DEBUG|(?:[A-Z][a-z]+)+(?:Error|Exception|Warning)|\w+=\S+"
)
_NUMBER = re.compile(r"[-+]?[\d.]+(?:[eE][-+]?\d+)?(?:%|[a-zA-Z]{1,3})?|[\d:.TZ+-]+")
_TRIM = "{}[]()<>\"',:;.|!?#*\\"
_LONGEST_BLOCK = 3000
_MOST_FOREIGN = 40
_LOOK_BACK = 400


class KeyBlocks:
    """Follows one stream."""

    def __init__(self) -> None:
        self._end: re.Pattern[str] | None = None
        self._left = self._foreign = 0
        self._after_row = False

    @property
    def open(self) -> bool:
        """Whether an earlier line decides about the next one."""
        return self._end is not None or self._after_row

    def line(self, line: str, clear: Callable[[str], str]) -> str | None:
        """The line, closed where it belongs to a block; `clear` redacts what stands before and after. None where it does not."""
        if self._end is not None:
            return self._inside(line, self._end, clear)
        if "BEGIN" in line or "PuTTY-User" in line or "$ANSIBLE_VAULT" in line:
            return self._open(line, clear)
        return None

    def _open(self, line: str, clear: Callable[[str], str]) -> str | None:
        plain = ANSI.sub("", line) if "\x1b" in line else line
        begin = _of_secret(_BEGIN, plain)
        if begin is None:
            for opening, closing in ((_PUTTY, _PUTTY_END), (_VAULT, _HEX_ROW)):
                if found := opening.search(plain):
                    self._enter(closing)
                    return clear(plain[: found.start()]) + MARK + _newline(line)
            return None
        before = clear(plain[: begin.start()])
        end = _END.search(plain, begin.end())
        if end is not None:
            return before + MARK + (self.line(rest := plain[end.end() :], clear) or clear(rest))
        if _is_mention(plain[begin.end() :]):  # mentioned in a sentence; a key that follows is closed row by row
            self._after_row = True
            return None
        self._enter(_END)
        return before + MARK + _newline(line)

    def _enter(self, end: re.Pattern[str]) -> None:
        self._end, self._left, self._foreign = end, _LONGEST_BLOCK, 0

    def _inside(self, line: str, end: re.Pattern[str], clear: Callable[[str], str]) -> str | None:
        plain = ANSI.sub("", line) if "\x1b" in line else line
        self._left -= 1
        if end is _HEX_ROW:
            if _HEX_ROW.search(plain.rstrip("\r\n\"'\\, ")):
                return MARK + _newline(line)
            self._end = None
            return self.line(line, clear)
        if end is _END and _of_secret(_BEGIN, plain):
            self._end = None
            return self.line(line, clear)
        if found := end.search(plain):
            self._end = None
            rest = plain[found.end() :] if end is _END else _newline(line)
            return MARK + (self.line(rest, clear) or clear(rest))
        if _foreign(plain):
            self._foreign += 1
            if self._foreign > _MOST_FOREIGN or self._left < 0:
                self._end = None
            return None
        self._foreign = 0
        if self._left < 0:
            self._end = None
        return MARK + _newline(line)

    def row(self, line: str) -> str:
        """The line without rows of a key that stand in no block."""
        if len(line) >= 64 and any(map(_is_key_row, _ROW.findall(line))):
            self._after_row = True
            return _ROW.sub(lambda row: MARK if _is_key_row(row[0]) else row[0], line)
        if self._after_row:
            self._after_row = False
            words = ANSI.sub("", line).split()
            last = words[-1].strip("\"',\\+") if words else ""
            if _SHORT_ROW.fullmatch(last) and not _foreign(line) and (last.endswith("=") or not last.isalpha()):
                return MARK + _newline(line)
        return line


def spans(lines: Sequence[str]) -> list[bool]:
    """Which lines lie in a block whose BEGIN or END is among them, both markers included."""
    closed = [False] * len(lines)
    begun: int | None = None
    for at, line in enumerate(lines):
        if "BEGIN" not in line and "END" not in line:
            continue
        plain = ANSI.sub("", line) if "\x1b" in line else line
        begin, end = _of_secret(_BEGIN, plain), _of_secret(_END, plain)
        if begin and end and begin.start() < end.start():
            continue  # on one line
        if end is not None:
            first = begun if begun is not None and at - begun <= _LONGEST_BLOCK else _back(lines, at)
            closed[first + (begun is not None) : at] = [True] * (at - first - (begun is not None))
            begun = None
        if begin is not None and not _is_mention(plain[begin.end() :]):
            begun = at
    return closed


def _back(lines: Sequence[str], end: int) -> int:
    """Where a block begins whose BEGIN is not there: the rows before END that are not clearly something else."""
    first = end
    while first > max(0, end - _LOOK_BACK) and lines[first - 1].strip() and not _foreign(ANSI.sub("", lines[first - 1])):
        first -= 1
    return first


def _of_secret(mark: re.Pattern[str], line: str) -> re.Match[str] | None:
    """The first BEGIN or END whose label says that it is of a secret."""
    labels = ((found, found[1].upper()) for found in mark.finditer(line))
    secret = (found for found, label in labels if any(word in label for word in _SECRET) and not any(word in label for word in _PUBLIC))
    return next(secret, None)


def _is_mention(rest: str) -> bool:
    """Whether what stands behind BEGIN shows that a sentence speaks of a key."""
    rest = rest.partition("\r")[0]
    return re.search(r"\s[a-zA-Z]{2,}\b(?!=)", rest) is not None and not _LONG_RUN.search(rest)


def _is_key_row(row: str) -> bool:
    upper, lower = sum(c.isupper() for c in row), sum(c.islower() for c in row)
    return upper >= 5 and lower >= 5 and len(row) - upper - lower >= 2


def _foreign(line: str) -> bool:
    """Whether a line is clearly prose, or a log line, and no part of a key."""
    if any(_mixed(run) for run in _LONG_RUN.findall(line)):
        return False
    tokens = line[stamps(line) :].split()
    if len(tokens) < 2:
        return False
    last = tokens[-1].strip("\"',\\+")
    if re.fullmatch(r"[A-Za-z0-9+/]{2,}={1,2}", last) or (len(last) >= 8 and last.isalnum() and _mixed(last)):
        return False
    trimmed = [token.strip(_TRIM) for token in tokens]
    words = sum(1 for token in trimmed if _WORD.fullmatch(token))
    numbers = sum(1 for token in trimmed if token and _NUMBER.fullmatch(token))
    return words >= 1 and words + numbers >= 2 and 2 * (words + numbers) >= len(tokens)


def _mixed(run: str) -> bool:
    """Whether a run of letters could be a row of a key: base64 with capitals and digits, or hex."""
    if run.strip("=-_").isalpha() and not any(c.isupper() for c in run[1:]):
        return False
    digits = any(c.isdigit() for c in run)
    return digits and ((any(c.isupper() for c in run) and any(c.islower() for c in run)) or bool(re.fullmatch(r"[0-9a-f]{24,}", run)))


def _newline(line: str) -> str:
    return line[len(line.rstrip("\r\n")) :]


HINTS = (
    *("2d2d", "2D2D", "2d 2d", "2D 2D", "0x2d,", "0x2D,", "45, 45, 45", "45,45,45", "45 45 45", "45  45  45", "45   45   45", " 055 055"),
    *("026455", "-   -", "3082", "30 82", "8230", "0x2d\t", "0x2d 0x", "0x2D 0x", "x2d\\", "x2D\\", "2d:2d", "2D:2D", "00101101"),
    *(LABELS := ("privateExponent:", "prime1:", "prime2:", "exponent1:", "exponent2:", "coefficient:", "priv:")),
)
"""A dump of a private key has one of these in its first row: the dashes of BEGIN, the first bytes of DER, or a label of openssl."""
_DUMP_BEGIN = re.compile(rb"BEGIN[A-Z0-9]{0,24}PRIVATEKEY|PuTTY-User-Key|AGE-SECRET-KEY-|openssh-key-v1")
_DUMP_END = re.compile(rb"END[A-Z0-9]{0,24}PRIVATEKEY")
_DER = re.compile(rb"^\x30\x82..\x02\x01[\x00\x01](?:\x02\x82|\x02\x81|\x30[\x0d\x10\x13]|\x04\x20)", re.DOTALL)
_TEXT = re.compile(r"\s+[|>].*$")
_SEPARATORS = str.maketrans(",│┊", "   ")
_OFFSET = re.compile(r"(?:0x)?[0-9a-fA-F]{4,16}(?:-[0-9a-fA-F]{4,16})?:?")
_HEX = re.compile(r"(?:[0-9a-fA-F]{2}){1,32}")
_DUMP_HEX_ROW = re.compile(r"(?:[0-9a-fA-F]{2}){8,}")
_OCTAL_WORD, _OCTAL_BYTE, _DECIMAL = re.compile(r"[01][0-7]{5}"), re.compile(r"[0-3][0-7]{2}"), re.compile(r"\d{1,3}")
_CHARACTER = re.compile(r"[!-~]|\\[0abfnrtv\\]|[0-3][0-7]{2}|sp|nl|ht|cr|nul|del")
_ARRAY = re.compile(r"0x[0-9a-fA-F]{2}\b")
_ESCAPED = re.compile(r"\\x([0-9a-fA-F]{2})")
_COLONS = re.compile(r"(?:[0-9a-fA-F]{2}:){3,}(?:[0-9a-fA-F]{2})?")
_BITS = re.compile(r"[01]{8}")
_RUN = re.compile(r"(?:[0-9a-fA-F]{2}){40,}|(?:0x[0-9a-fA-F]{2},\s*){20,}(?:0x[0-9a-fA-F]{2})?|(?:\d{1,3}(?:,\s?|\s)){40,}\d{1,3}")
_KEPT = 120
_MOST_FOREIGN_ROWS = 3
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
                return line[:begin] + MARK + _newline(line)
            self._close()
        if len(body) >= 100 and (cleared := _RUN.sub(_without_key, line)) != line:
            return cleared
        read = dict(_readings(body))
        if not read:
            if body not in ("", "*"):
                self._foreign += 1
                if self._foreign > _MOST_FOREIGN_ROWS:
                    self._close()
            return line
        self._foreign, self._left = 0, self._left - 1
        inside = self._inside
        first = not self._tails
        for order, data in read.items():
            tail = (self._tails.get(order, b"") + data.translate(None, b" \n\r"))[-_KEPT - len(data) :]
            if _DUMP_BEGIN.search(tail) or (first and _DER.match(data)):
                self._inside = inside = True
                self._left = _LONGEST
                tail = tail if _DUMP_END.search(tail) else b""
            if inside and (_DUMP_END.search(tail) or self._left < 0):
                self._inside, tail = False, b""
            self._tails[order] = tail[-_KEPT:]
        return line[:begin] + MARK + _newline(line) if inside else line

    def _close(self) -> None:
        self._tails, self._inside, self._numbers, self._foreign = {}, False, False, 0


def _without_key(run: re.Match[str]) -> str:
    return MARK if any(_DUMP_BEGIN.search(data.translate(None, b" \n\r")) or _DER.match(data) for _, data in _readings(run[0])) else run[0]


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
        if _DUMP_HEX_ROW.fullmatch(tokens[0]):
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
