"""Redaction: no secret reaches the run directory.

- Replaced are: exact values of environment variables whose name says secret, private key blocks (`private_keys`), tokens of known
  shapes and what commands and headers carry (`secret_shapes`), and values behind a name that says secret (`secret_values`), on
  the same line or on the next ones.
- The replacement is `[redacted:<kind>]` and holds no part of the value. Redacting twice changes nothing.
- `text` and `rows` see the whole text; a log that is streamed goes through `lines`, which remembers what an earlier line opened.
- When unsure, closed: a lost word costs a reader little, a leaked one costs a key.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus

from pydantic import BaseModel

from seatrial.core.files import replacing, write_bytes
from seatrial.core.guarded import open_file
from seatrial.core.secret_names import STEM_LITERALS, Says, has_stem, looks_random, says_password, says_secret
from seatrial.core.text import word_set
from seatrial.evidence import secret_shapes
from seatrial.evidence.private_keys import LABELS, MARK, KeyBlocks, KeyDumps, spans
from seatrial.evidence.secret_blocks import Ahead, SecretBlocks, look_ahead, table_columns
from seatrial.evidence.secret_values import OpenNames, assignments, is_plain, mapping_secret, stamps, value_is_secret


class Needs(IntEnum):
    """Which rules a line needs."""

    NOTHING = 0
    TOKENS = 1
    ALL = 2


_ZEROS = str.maketrans("123456789,", "000000000 ")
_SHAPE = bytes(ord("0") if 48 <= code < 58 else ord(" ") if code in (0x2C, 0x1C, 0x1D, 0x1E, 0x1F) else code for code in range(256))
_ZERO_RUN = re.compile(r"0{2,}")
_PORT = re.compile(r":(?:0{4,5}|\*):")
"""The middle of a line of .pgpass, which a comma may cut."""
_OPTION = re.compile(
    r"(?:^|[\"'])-(?:[A-Za-z]*[uUaApPwkNXEb]|-(?:(?:proxy-)?(?:user|cert)|auth|cookie|value|secret|body|plaintext|pass))", re.MULTILINE
)
"""The options that rules of commands ask for."""
_BEFORE_OPTIONS = ("\n-", '"-', "'-")
_ESCAPE_START = re.compile(r"\\[nrtux']")
_ROW = re.compile(r"[A-Za-z0-9+/]{64}")
_VALUE = re.compile(
    r"^[^A-Za-z0-9_(\[]*(?:[vV]alue|content|default|string|data)[\"'\\]*(?:[:=]|$)|^\W*<(?:value|string|data)>(?:$|[^\s\"',])",
    re.MULTILINE,
)
_VALUE_HINTS = ("value", "content", "default", "string", "data")
_SHORT = re.compile(r"(?:^|[^A-Za-z]|[a-z](?=P[WwA]|S[Ii]))(?:pw|PW|Pw|pat|PAT|Pat|sid|SID|Sid)(?![a-z])", re.MULTILINE)
"""Names of secrets that are too short for a stem; another name on the line may bring the rules to them."""
_SHORT_HINTS = ("pw", "pat", "sid")
_AT = re.compile(r"(?<!^)@(?!0{1,3}(?![\w.]))|^@(?!$)", re.MULTILINE)
"""`bob@host`, but neither a bare `@` nor `pass@8`."""
_NETRC = re.compile(r"\b(?:machine|login)$", re.MULTILINE)
_DUMP = re.compile(r"0[dD]:0[dD]")
_HASH = re.compile(r"\$.*\$|(?:pbkdf0|bcrypt|argon0|scrypt|sha0|md0)[a-z0_]*\$")
_WHOLE = frozenset(("TRUE", "FALSE", "0d", "0D", "0x0d", "0x0D"))
_PARTS = (
    *(label.translate(_ZEROS) for label in LABELS),
    *("BEGIN", "PuTTY", "ANSIBLE_VAULT", "apiVersion", "stringData", "binaryData", "encryptedData", "FlyV"),
)


_OF_QUERIES = word_set("code= jwt=")
_BOUNDED = word_set(
    "enter paste provide insert community identified echo printf vault bearer basic sqlplus rman expdp impdp alias config code phrase"
    " recovery net obscure user"
)
_AS_WORDS = re.compile(
    r"\b(?:enter|paste|provide)\b|\bbearer|\b(?:insert|identified|echo|printf|vault|basic|sqlplus|rman|expdp|impdp|recovery|net|mc)$"
    r"|^(?:obscure|community)$|^phrase|^code(?:[:=]|$)|\buser(?:=|$)",
    re.MULTILINE,
)
"""Where the rules of these literals look for them; what their patterns ask for beside them are blanks."""
_AS_WORDS_HINTS = (*sorted(_BOUNDED - word_set("alias config")), "mc")
_VERDICT = re.compile(r"[^\w=]*(?:PASS|Pass)[^\w=]*")
_MEASURED = re.compile(r"[\w/]*?(?P<name>\w{6,})[\"']?[:=][-+]?0+\.0+(?:e[-+]?0+)?\}*")
_NAME_RUN = re.compile(r"[A-Za-z0-9_.-]+")
_BARE = word_set("token key secret password passphrase pass passwd passe pwd auth session cookie code jwt apikey credentials credential")
_TELLING = (
    *("passw", "passphrase", "passcode", "secret", "credential", "apikey", "api_key", "basicauth", "digestauth", "basic_auth"),
    *(
        part.strip("<")
        for literal in secret_shapes.STEM_LITERALS
        for part in literal.split()
        if has_stem(part) and part.strip("<=") not in _BARE
    ),
)
"""What a name with a stem must not hold to be none of a secret: whatever a rule asks for, but for words that it takes as a whole."""
_LONGEST_NAME, _LONGEST_WORD, _MOST_WORDS = 100, 200, 40_000


def _part(literal: str) -> str:
    """The longest part of a literal that stands within one word, as it looks there."""
    return max(literal.translate(_ZEROS).split(), key=len, default="")


_STEMLESS = {
    _ZERO_RUN.sub("0", _part(literal))
    for literal in secret_shapes.STEMLESS_LITERALS
    if literal.strip() not in ("true", "false") and literal[:1] != ":"
}
_LITERALS = (
    *(":::", "::add-", "::set-", "::save-"),
    *(f"{mark}{literal}" for literal in sorted(_OF_QUERIES) for mark in "?&"),
    *sorted(_STEMLESS - _BOUNDED - _OF_QUERIES - {"@"}),
)


def _any_of(literals: Iterable[str]) -> re.Pattern[str]:
    """A pattern for whichever of these literals: a tree of their letters, which is a third of the cost of a look for each."""
    tree: dict[str, Any] = {}
    for literal in literals:
        node = tree
        for letter in literal:
            node = node.setdefault(letter, {})
        node[""] = {}

    def written(node: dict[str, Any]) -> str:
        if "" in node:
            return ""
        ways = [re.escape(letter) + written(below) for letter, below in sorted(node.items())]
        return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"

    return re.compile(written(tree))


_NEEDLES = _any_of(
    (
        *_LITERALS,
        *(part.lower() for part in _PARTS),
        *(*STEM_LITERALS, *_AS_WORDS_HINTS, *_VALUE_HINTS, *_SHORT_HINTS),
        *("machine", "login", "true", "false", "0d"),
    )
)
"""Words without any of these, in small letters, need none of the looks of `_has_needle`."""


class PlainLines:
    """Remembers words, for the values that a redactor replaces."""

    def __init__(self, values: Iterable[str]) -> None:
        self._values = tuple({part for value in values if (part := _part(value))})
        self._plain: set[bytes] = set()
        self._needs: dict[bytes, Needs] = {}

    def needs(self, line: str) -> Needs:
        """Which rules this line, which has no colours, needs by itself."""
        if not line.isascii():
            line = " ".join(line.split())
        if _may_be_dump(line):
            return Needs.ALL
        words = line.encode("utf-8", "surrogatepass").translate(_SHAPE).split()
        return Needs.NOTHING if self._plain.issuperset(words) else self._of_words(words)

    def _of_words(self, words: list[bytes]) -> Needs:
        if len(self._plain) + len(self._needs) > _MOST_WORDS:
            self._plain, self._needs = set(), {}
        found, fresh, plain, known = Needs.NOTHING, list[bytes](), self._plain, self._needs
        for word in words:
            if word in plain:
                continue
            needs = known.get(word)
            if needs is None:
                fresh.append(word)
            elif needs is Needs.ALL:
                return needs
            else:
                found = needs
        # Most new words are plain: one look at all of them, and only then at each.
        text = b"\n".join(fresh).decode("utf-8", "surrogatepass")
        if fresh and self._is_plain(text) and not secret_shapes.may_hold_token(text.replace("$", " ")):
            self._plain.update(word for word in fresh if len(word) <= _LONGEST_WORD)
            return found
        for word in fresh:
            text = word.decode("utf-8", "surrogatepass")
            if not self._is_plain(text):
                needs = Needs.ALL
            else:
                token = secret_shapes.may_hold_token(text.replace("$", " ")) and secret_shapes.may_be_in_word(text)
                needs = Needs.TOKENS if token else Needs.NOTHING
            if len(word) > _LONGEST_WORD:
                pass
            elif needs is Needs.NOTHING:
                self._plain.add(word)
            else:
                self._needs[word] = needs
            if needs is Needs.ALL:
                return needs
            found = max(found, needs)
        return found

    def _is_plain(self, text: str) -> bool:
        """Whether each of these words, one on a line, is plain but for tokens. Cheap tests come before the patterns."""
        for value in self._values:
            if value in text:
                return False
        if ((":00" in text or ":*:" in text) and _PORT.search(text)) or (len(text) >= 64 and _ROW.search(text)):
            return False
        while '\\"' in text:  # within a literal, a quote says nothing by itself
            text = text.replace('\\"', '"')
        if "\x1b" in text:
            return False
        key = _ZERO_RUN.sub("0", text) if "00" in text else text
        lowered = key.lower()
        return not (
            (_NEEDLES.search(lowered) and _has_needle(text, key, lowered))
            or ("@" in key and _AT.search(key))
            or ("\\" in key and _ESCAPE_START.search(key))
            or ((key[0] == "-" or _has_any(_BEFORE_OPTIONS, key)) and _OPTION.search(key))
            or ("$" in key and _HASH.search(key))
        )


def _has_needle(text: str, key: str, lowered: str) -> bool:
    """Whether words hold a literal that a rule needs, or a name that says secret; `key` is the text with runs of zeros made one."""
    return (
        _has_any(_LITERALS, lowered)
        or _has_any(_PARTS, key)
        or "0d0d" in text
        or "0D0D" in text
        or (":" in text and _DUMP.search(text) is not None)
        or not _WHOLE.isdisjoint(text.split("\n"))
        or (_has_any(_AS_WORDS_HINTS, lowered) and _AS_WORDS.search(lowered) is not None)
        or (_has_any(_VALUE_HINTS, lowered) and _VALUE.search(key) is not None)
        or (_has_any(_SHORT_HINTS, lowered) and _SHORT.search(key) is not None)
        or _NETRC.search(key) is not None
        or any(map(_says_secret, _with_stem(key, lowered)))
    )


def _has_any(hints: Sequence[str], text: str) -> bool:
    for hint in hints:  # noqa: SIM110 - a generator takes three times as long
        if hint in text:
            return True
    return False


def _with_stem(text: str, lowered: str) -> list[str]:
    """The words with a stem of a name that says secret."""
    stems = [literal for literal in STEM_LITERALS if literal in lowered]
    return [word for word in text.split("\n") if _has_any(stems, word.lower())] if stems else []


def _says_secret(word: str) -> bool:
    """Whether a word with a stem may name a secret, as `num_tokens`, `adapter_path` and `rollout_corr/kl_token:0.5` do not."""
    if _VERDICT.fullmatch(word):
        return False
    measured = _MEASURED.fullmatch(word)
    if measured and not says_password(measured["name"]) and len(measured["name"]) <= _LONGEST_NAME:
        return False  # no number is a secret
    return "<" in word or has_stem(_NAME_RUN.sub(lambda run: " " if _names_none(run[0]) else run[0], word).lower())


def _may_be_dump(line: str) -> bool:
    """Whether a line has one of `private_keys.HINTS` that spans words or whose digits count; written out because every line is asked."""
    return (
        ("30" in line and ("3082" in line or "30 82" in line or "8230" in line))
        or ("55" in line and (" 055 055" in line or "026455" in line))
        or (
            "45" in line
            and ("45 45 45" in line or "45,45,45" in line or "45  45  45" in line or "45   45   45" in line or "45, 45, 45" in line)
        )
        or "00101101" in line
        or "-   -" in line
    )


def _names_none(run: str) -> bool:
    lowered = run.lower()
    return (
        len(run) <= _LONGEST_NAME
        and not any(telling in lowered for telling in _TELLING)
        and re.split(r"[.-]", lowered.rstrip("0123456789_"))[-1] not in _BARE
        and says_secret(run.strip(".-")) is Says.NOTHING
    )


plain_lines = lru_cache(maxsize=16)(PlainLines)
"""The memory of words for some values, which all redactors of a process share."""
MINIMUM_LENGTH = 6
"""Shorter values of environment variables are not replaced: "1" or "true" would blank half a log."""

_ASCII_LOWER = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}
_SOURCE_FOLLOWS = re.compile(r"^\s*File \"[^\"]+\", line \d+|^\s*File \"[^\"]+\", line \d+, in|\bFile \"[^\"]+\", line \d+, in \S+\s*$")

_COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[()][A-Z0-9])")
_CHANGED = re.compile(r"(\[redacted:[\w.-]+\]\"\s*->\s*\")(?!\[redacted)[^\"\n]+(\")")
"""What a Terraform plan shows of a secret that changes."""
_LITERAL = re.compile(r"\"(?:\\.|[^\"\\\n])*(?:\"|$)|'(?:\\.|[^'\\\n])*(?:'|$)|[^\"']+")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)")
_ESCAPED = re.compile(r"\\[nrtux\"']")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_DEEPEST = 4
"""Text in literals in literals is read so far."""

_TEXTS = word_set(".json .jsonl .log .txt .out .err .yaml .yml .toml .ini .cfg .env .csv .tsv .md .xml .html .sh .py")
_LARGEST_TEXT = 64_000_000
R = TypeVar("R", bound=BaseModel)


class Redactor:
    """Replaces secrets in text and in JSON-like values; made once per trial from its environment."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        found: dict[str, str] = {}
        for name, value in sorted(environ.items()):
            if _is_secret(name, value):
                for spelling in _spellings(value):
                    found.setdefault(spelling, name)
        # Longest first: a secret that contains another one must not leave its other half behind.
        self._values = sorted(found.items(), key=lambda item: -len(item[0]))
        self._plain = plain_lines(frozenset(found))

    def text(self, text: str) -> str:
        """`text` without secrets; the number of lines stays the same."""
        return "\n".join(self.rows(text.split("\n")))

    def rows(self, rows: Sequence[str], *, program: bool = False, depth: int = 0) -> list[str]:
        """Lines that belong together, without secrets: a key block is closed from BEGIN to END, whatever stands between."""
        closed = spans(rows) if any("END" in row for row in rows) else []
        lines = RedactingLines(self, program, depth, look_ahead(rows))
        made = []
        for at, row in enumerate(rows):
            cleared = lines.line(row)
            made.append(MARK + row[len(row.rstrip("\r\n")) :] if closed and closed[at] else cleared)
        return made

    def tokens(self, text: str) -> str:
        """`text` without what is a secret wherever it stands: values of the environment, key blocks, tokens, credentials in URLs.

        For names of files and branches, and for facts, whose numbers and hashes stand behind any name.
        """
        blocks = KeyBlocks()

        def clear(line: str) -> str:
            return secret_shapes.tokens(self._known(line))

        return "\n".join(
            cleared if (cleared := blocks.line(row, clear)) is not None else clear(blocks.row(row)) for row in text.split("\n")
        )

    def names(self, value: Any) -> Any:
        """The same JSON-like value; its strings and keys lose what is a secret wherever it stands (see `tokens`)."""
        if isinstance(value, str):
            return self.tokens(value)
        if isinstance(value, Mapping):
            return {self.names(key): self.names(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self.names, value))
        return value

    def record(self, record: R) -> R:
        """The same record as `names` leaves it."""
        before = record.model_dump(mode="json")
        after = self.names(before)
        return record if repr(after) == repr(before) else type(record).model_validate(after)

    def sweep(self, directory: Path) -> None:
        """Clear the text files below a directory that other programs wrote: metrics, facts, configurations, logs of their own."""
        for path in sorted(directory.rglob("*")):
            if path.suffix in _TEXTS and path.is_file() and not path.is_symlink() and path.stat().st_size <= _LARGEST_TEXT:
                self.file(path, facts=True)

    def lines(self, *, program: bool = False) -> RedactingLines:
        """A redactor for text that arrives line by line; `program` is for source code."""
        return RedactingLines(self, program)

    def literals(self, line: str, depth: int) -> str:
        """A line whose literals hold text with escapes (JSON, `repr`): that text is read as the lines that it is."""
        if depth >= _DEEPEST or _ESCAPED.search(line) is None:
            return line

        def replaced(match: re.Match[str]) -> str:
            if "\\" not in match[0]:
                return match[0]
            mark = match[0][0] if match[0][0] in "\"'" else ""
            if not mark and "\\n" not in match[0]:
                return match[0]
            body = match[0].removeprefix(mark)
            closing = mark if mark and body.endswith(mark) else ""
            inner = _ESCAPE.sub(_unescaped, body.removesuffix(closing))
            cleared = "\n".join(self.rows(inner.split("\n"), depth=depth + 1))
            return match[0] if cleared == inner else mark + _escaped(cleared, mark) + closing

        return _LITERAL.sub(replaced, line)

    def file(self, path: Path, *, facts: bool = False) -> None:
        """Rewrite a file that another program wrote itself, without secrets; one that has none is left as it is.

        Of `facts` only tokens are taken out.
        """
        if not path.is_file() or path.is_symlink():
            return
        text = path.read_bytes().decode("utf-8", "surrogateescape")
        cleared = self.tokens(text) if facts else self.text(text)
        if cleared != text:
            write_bytes(path, cleared.encode("utf-8", "surrogateescape"))

    def log(self, path: Path) -> None:
        """Rewrite a log of any size without secrets, line by line; one that has none is left as it is."""
        if all(cleared == row for row, cleared in self._log_rows(path)):
            return
        mode = path.stat().st_mode
        with replacing(path) as stream:
            stream.writelines(cleared for _, cleared in self._log_rows(path))
        path.chmod(mode & 0o777)

    def _log_rows(self, path: Path) -> Iterator[tuple[bytes, bytes]]:
        clear = self.lines().line
        with open_file(path) as rows:
            while row := rows.readline(_LARGEST_TEXT):
                yield row, clear(row.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")

    def has_nothing(self, line: str) -> bool:
        """Whether a line by itself evidently has no secret and names none."""
        needs = self._plain.needs(line)
        return needs is Needs.NOTHING or (needs is Needs.TOKENS and secret_shapes.tokens(line) == line)

    def piece(self, text: str, *, program: bool) -> tuple[str, bool]:
        """One line without regard to its neighbours, which `lines` follows; and whether it holds a word that says secret."""
        lowered = _lowered(text)
        stem = has_stem(lowered)
        text = secret_shapes.contexts(secret_shapes.tokens(self._known(text)), lowered, stem)
        if stem:
            text = secret_shapes.pairs(text, mapping_secret)
            text = assignments(text, _lowered(text), program)
            if "->" in text and "[redacted" in text:
                text = _CHANGED.sub(r"\1[redacted:changed]\2", text)
        return text, stem

    def _known(self, text: str) -> str:
        for value, name in self._values:
            if value in text:
                text = text.replace(value, f"[redacted:{name}]")
        return text

    def value(self, value: Any, name: str = "") -> Any:
        """The same JSON-like value with its strings redacted; a string under a name that says secret is replaced."""
        says = says_secret(name) if name else Says.NOTHING
        if isinstance(value, str):
            if value_is_secret(value, name, says) and not value.startswith("--"):
                return f"[redacted:{name}]"
            return self.text(value)
        if isinstance(value, Mapping):
            return self._mapping(value, name if says is Says.STRONG else "")
        if isinstance(value, list | tuple):
            items = [self.value(entry, _flag(before) or name) for before, entry in zip(("", *value), value, strict=False)]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, int) and not isinstance(value, bool) and says_password(name):
            return f"[redacted:{name}]"
        return value

    def _mapping(self, value: Mapping[Any, Any], name: str) -> dict[Any, Any]:
        """Names are redacted like text. A value may be named by its key, by a field beside it, or by the mapping it lies in."""
        beside = next((value[key] for key in ("name", "key", "Name", "Key") if isinstance(value.get(key), str)), "")
        named = beside if beside and says_secret(beside) is not Says.NOTHING else name
        made = dict[Any, Any]()
        table = table_columns(value)
        of_secret = value.get("kind") == "Secret"
        for key, entry in value.items():
            if table and key == table[1]:
                made[key] = [self._row(row, table[2]) for row in entry]
            elif of_secret and key in ("data", "stringData") and isinstance(entry, Mapping):
                made[key] = {self.tokens(str(name)): "[redacted:secret-data]" for name in entry}
            else:
                known = key if isinstance(key, str) else ""
                inner = named if named and known in ("value", "Value", "default", "plaintext", "content") else known
                made[self.tokens(key) if known else key] = self.value(entry, inner)
        return made

    def _row(self, row: Any, columns: Sequence[str]) -> Any:
        """A row of a table in JSON: each cell stands under the name of its column."""
        if not isinstance(row, list | tuple) or len(row) != len(columns):
            return self.value(row)
        return [self.value(cell, name) for cell, name in zip(row, columns, strict=True)]


class RedactingLines:
    """Redacts a stream line by line; knows what an earlier line opened: a key block, a name whose value follows, a traceback."""

    def __init__(self, redactor: Redactor, program: bool, depth: int = 0, ahead: Ahead | None = None) -> None:
        self._redactor = redactor
        self._program = program
        self._depth = depth
        self._source = False
        self._open = False
        self._keys = KeyBlocks()
        self._dumps = KeyDumps()
        self._names = OpenNames()
        self._blocks = SecretBlocks(ahead)

    def line(self, line: str) -> str:
        """One line, with or without its newline, without secrets; one that has none keeps its colours."""
        plain = line
        if "\x1b" in line:
            plain = line.replace("\x1b[0m", "").replace("\x1b[36m", "")  # Ray's, which are on every line
            plain = _COLOUR.sub("", plain) if "\x1b" in plain else plain
        if not self._open and self._redactor.has_nothing(plain):
            self._source = _begins_source(plain)
            self._blocks.skip(plain)
            return line
        if "'\"'\"'" in plain or "'\\''" in plain:  # a shell's quote within quotes
            bare = plain.replace("'\"'\"'", "'").replace("'\\''", "'")
            cleared = plain if (cleared := self._line(bare)) == bare else cleared
        else:
            cleared = self._line(plain)
        self._open = self._keys.open or self._dumps.open or self._names.open or self._blocks.open
        return line if cleared == plain else cleared

    def _line(self, line: str) -> str:
        closed = self._keys.line(line, lambda text: self._redactor.piece(text, program=self._program)[0])
        if closed is not None:
            self._blocks.skip(line)
            return closed
        begin = stamps(line.rstrip("\r\n"))
        line = self._keys.row(self._dumps.line(self._redactor.literals(line, self._depth) if "\\" in line else line, begin))
        program = self._program or self._source
        self._source = _begins_source(line)
        cleared, stem = self._redactor.piece(line, program=program)
        cleared = self._names.line(line, cleared, program=program, stem=stem)
        return self._blocks.line(line, cleared, program=program)


def _begins_source(line: str) -> bool:
    """Whether the next line of a traceback is one of a program."""
    return "File " in line and _SOURCE_FOLLOWS.search(line) is not None


def _lowered(text: str) -> str:
    """`text` in small letters, of the same length."""
    return text.lower() if text.isascii() else text.translate(_ASCII_LOWER)


def _flag(argument: Any) -> str:
    """The name of a `--flag` in an argument list, whose value follows; a bare `--token` is an access token."""
    name = argument.lstrip("-") if isinstance(argument, str) and argument.startswith("-") else ""
    return "access-token" if name == "token" else name if len(name) > 1 else ""


def _is_secret(name: str, value: str) -> bool:
    """Whether the exact value of this environment variable is to be replaced wherever it occurs."""
    if len(value) < MINIMUM_LENGTH or (is_plain(value) and not says_password(name)):
        return False
    says = says_secret(name)
    if says is Says.NOTHING or (says is Says.WEAK and not looks_random(value)):
        return False
    # GOOGLE_APPLICATION_CREDENTIALS and the like hold the path of a secret, which is worth knowing.
    return not (value.startswith(("/", "~", "./")) and Path(value).expanduser().exists())


def _spellings(value: str) -> list[str]:
    """A value as it may be printed: as it is, in JSON, in a URL, in HTML, in base64; of several lines each for itself."""
    lines = [part.strip() for part in value.splitlines()] if "\n" in value else [value]
    forms = []
    for part in lines:
        data = part.encode("utf-8", "surrogateescape")
        encoded = base64.b64encode(data).decode().rstrip("=")
        # The last letter of an unpadded group depends on what follows.
        encoded = encoded[: len(encoded) - (1 if len(data) % 3 else 0)]
        forms += [part, json.dumps(part)[1:-1], quote(part, safe="", errors="surrogateescape"), html.escape(part)]
        forms += [quote_plus(part, errors="surrogateescape"), *([encoded] if len(data) > MINIMUM_LENGTH else []), data.hex()]
    return [form for form in dict.fromkeys(forms) if len(form) >= MINIMUM_LENGTH]


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    return chr(int(code[1:], 16)) if code[0] in "ux" and len(code) > 1 else _ESCAPES.get(code, code)


def _escaped(text: str, mark: str) -> str:
    """The text as it stands in a literal; where there were no quotes only its newlines need it."""
    if not mark:
        return text.replace("\n", "\\n").replace("\r", "\\r")
    encoded = json.dumps(text)[1:-1]
    return encoded if mark == '"' else encoded.replace('\\"', '"').replace("'", "\\'")
