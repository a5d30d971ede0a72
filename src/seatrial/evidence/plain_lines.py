"""Lines that no rule of the redactor can touch, told word by word.

- A log says the same words again and again, with other numbers. So digits are made zero, and what a word can hold is worked out once.
- A word is plain if it has no literal that a rule needs, no name that says secret, no beginning of an option or an escape. Of a literal
  with blanks its longest part counts. A word that only its length makes a candidate for a token needs the rules for tokens, no others.
- When unsure, not plain: then the rules themselves look.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any

from seatrial.evidence import secret_shapes
from seatrial.evidence.key_dumps import LABELS
from seatrial.model.secret_names import STEM_LITERALS, Says, has_stem, says_password, says_secret


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
_ESCAPE = re.compile(r"\\[nrtux']")
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
    "BEGIN",
    "PuTTY",
    "ANSIBLE_VAULT",
    "apiVersion",
    "stringData",
    "binaryData",
    "encryptedData",
    "FlyV",
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OF_QUERIES = _words("code= jwt=")
_BOUNDED = _words(
    "enter paste provide insert community identified echo printf vault bearer basic sqlplus rman expdp impdp alias config code phrase"
    " recovery net obscure user"
)
_AS_WORDS = re.compile(
    r"\b(?:enter|paste|provide)\b|\bbearer|\b(?:insert|identified|echo|printf|vault|basic|sqlplus|rman|expdp|impdp|recovery|net|mc)$"
    r"|^(?:obscure|community)$|^phrase|^code(?:[:=]|$)|\buser(?:=|$)",
    re.MULTILINE,
)
"""Where the rules of these literals look for them; what their patterns ask for beside them are blanks."""
_AS_WORDS_HINTS = (*sorted(_BOUNDED - _words("alias config")), "mc")
_VERDICT = re.compile(r"[^\w=]*(?:PASS|Pass)[^\w=]*")
_MEASURED = re.compile(r"[\w/]*?(?P<name>\w{6,})[\"']?[:=][-+]?0+\.0+(?:e[-+]?0+)?\}*")
_NAME_RUN = re.compile(r"[A-Za-z0-9_.-]+")
_BARE = _words("token key secret password passphrase pass passwd passe pwd auth session cookie code jwt apikey credentials credential")
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


@lru_cache(maxsize=16)
def plain_lines(values: frozenset[str]) -> PlainLines:
    """The memory of words for these values, which all redactors of a process share."""
    return PlainLines(values)


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
            needs = self._of_word(word.decode("utf-8", "surrogatepass"))
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

    def _of_word(self, word: str) -> Needs:
        if not self._is_plain(word):
            return Needs.ALL
        if not secret_shapes.may_hold_token(word.replace("$", " ")):
            return Needs.NOTHING
        return Needs.TOKENS if secret_shapes.may_be_in_word(word) else Needs.NOTHING

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
            or ("\\" in key and _ESCAPE.search(key))
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
    return not _VERDICT.fullmatch(word) and not _is_measured(word) and _may_name(word)


def _is_measured(word: str) -> bool:
    """`rollout_corr/kl_token:0.5`, where no number is a secret."""
    found = _MEASURED.fullmatch(word)
    return found is not None and not says_password(found["name"]) and len(found["name"]) <= _LONGEST_NAME


def _may_be_dump(line: str) -> bool:
    """Whether a line has one of `key_dumps.HINTS` that spans words or whose digits count; written out because every line is asked."""
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


def _may_name(word: str) -> bool:
    """Whether a word with a stem may name a secret, as `num_tokens` and `adapter_path` do not."""
    return "<" in word or has_stem(_NAME_RUN.sub(lambda run: " " if _names_none(run[0]) else run[0], word).lower())


def _names_none(run: str) -> bool:
    lowered = run.lower()
    return (
        len(run) <= _LONGEST_NAME
        and not any(telling in lowered for telling in _TELLING)
        and re.split(r"[.-]", lowered.rstrip("0123456789_"))[-1] not in _BARE
        and says_secret(run.strip(".-")) is Says.NOTHING
    )
