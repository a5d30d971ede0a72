"""Redaction: no secret reaches the run directory.

- Replaced are: exact values of environment variables whose name says secret, tokens of known shapes, credentials in
  URLs, authorization headers, private key blocks, and values that stand behind a name that says secret.
- The replacement is `[redacted:<kind>]` and holds no part of the value. Redacting twice changes nothing.
- Text is cheap to clear: a pattern runs only where a literal that it needs occurs.
- `text` takes any piece of text; a log that is streamed goes through `lines`, which remembers an open private key block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from seatrial.files import write_bytes
from seatrial.model.secret_names import Says, looks_random, says_password, says_secret

MINIMUM_LENGTH = 6
"""Shorter values of environment variables are not replaced: "1" or "true" would blank half a log."""

_BEFORE = r"(?<![A-Za-z0-9_-])"
_SHAPES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    # (literals, one of which must occur; kind; pattern, whose group, if it has one, is kept)
    (("hf_", "api_org_"), "hf-token", r"(?<![A-Za-z0-9])(?:hf|api_org)_[A-Za-z0-9]{30,}"),
    (("sk-",), "sk-key", _BEFORE + r"sk-(?=[A-Za-z0-9_-]*\d)[A-Za-z0-9_-]{20,}"),
    (("_live_", "_test_"), "stripe-key", r"(?<![A-Za-z0-9])[sr]k_(?:live|test)_[A-Za-z0-9]{16,}"),
    (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), "github-token", r"(?<![A-Za-z0-9])gh[pousr]_[A-Za-z0-9]{30,}"),
    (("github_pat_",), "github-token", r"(?<![A-Za-z0-9])github_pat_[A-Za-z0-9_]{22,}"),
    (("glpat-",), "gitlab-token", r"(?<![A-Za-z0-9])glpat-[A-Za-z0-9_.-]{18,}"),
    (("AKIA", "ASIA"), "aws-key-id", r"(?<![A-Za-z0-9])A[KS]IA[0-9A-Z]{16}(?![A-Za-z0-9])"),
    (("xox",), "slack-token", r"(?<![A-Za-z0-9])xox[abeoprs]-[A-Za-z0-9-]{10,}"),
    (("hooks.slack.com",), "slack-webhook", r"(hooks\.slack\.com/services/)[A-Za-z0-9/_-]{20,}"),
    (("nvapi-",), "nvidia-key", r"(?<![A-Za-z0-9])nvapi-[A-Za-z0-9_-]{20,}"),
    (("AIza",), "google-key", r"(?<![A-Za-z0-9])AIza[0-9A-Za-z_-]{35}"),
    (("ya29.",), "google-token", r"(?<![A-Za-z0-9])ya29\.[0-9A-Za-z_-]{20,}"),
    (("npm_",), "npm-token", r"(?<![A-Za-z0-9])npm_[A-Za-z0-9]{36}(?![A-Za-z0-9_])"),
    (("pypi-",), "pypi-token", r"(?<![A-Za-z0-9])pypi-[A-Za-z0-9_-]{50,}"),
    (("gsk_",), "groq-key", r"(?<![A-Za-z0-9])gsk_[A-Za-z0-9]{40,}"),
    (("wandb_v1_",), "wandb-key", r"(?<![A-Za-z0-9])wandb_v1_[A-Za-z0-9_-]{20,}"),
    (("wandb",), "wandb-key", r"(wandb:? login (?:--\S+ )*)[0-9a-f]{40}(?![0-9a-f])"),
    (("eyJ",), "jwt", r"(?<![A-Za-z0-9])eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),
    (("earer ",), "bearer-token", r"([Bb]earer )[A-Za-z0-9._~+/=-]{16,}"),
    (("password ",), "netrc-password", r"(\blogin\s+\S+\s+password\s+)(?!\[redacted)\S+"),
)
_COMPILED = ((literals, kind, re.compile(pattern)) for literals, kind, pattern in _SHAPES)
_PATTERNS = tuple((literals, (r"\1" if pattern.groups else "") + f"[redacted:{kind}]", pattern) for literals, kind, pattern in _COMPILED)
_URL = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,20}://)([^\s/\"'<>?#]{1,512})@")
_STEM_LITERALS = ("token", "secret", "passw", "passphrase", "credential", "key", "auth", "pwd", "signature")
_STEM = re.compile("|".join(_STEM_LITERALS))
_NAME_END = re.compile(r"[A-Za-z0-9_.-]{0,128}")
_NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")
_LONGEST_NAME = 128
_LONGEST_PEEK = 1024
_BETWEEN = re.compile(r"(?:\\*[\"'])?\]?\s{0,4}(?:=>|:=|[:=])\s{0,4}")
_BETWEEN_FLAG = re.compile(r"(?:\\*[\"'])?\s*[,\s=]\s*")
_VALUE = re.compile(
    r"(?P<string>[bru]?\"(?:\\.|[^\"\\\n])*\"|[bru]?'(?:\\.|[^'\\\n])*')"
    r"|(?P<mark>\\+[\"'])(?P<escaped>[^\n]*?)(?P=mark)"
    r"|[\"']?(?P<bare>[^\s\"'&;,)}\]<>][^\s\"'&;,)}<>]*)"
)
_SCHEME = re.compile(r"(?i)(?:\\*[\"'])?(?P<scheme>basic|bearer|token|digest|negotiate|apikey|aws4-hmac-sha256)\s+(?P<rest>[^\n\"'\\]+)")
_PLAIN = re.compile(
    r"(?i)[-+.\d]*(?:e[-+]?\d+)?|none|null|nil|true|false|undefined|str|string|bytes|optional|required|empty|disabled|enabled"
)
# Text shows how a value is found more often than the value: placeholders, variables, templates, calls.
_PLACEHOLDER = re.compile(r"(?i)\*+|x+|\.\.\.|<.*>|\$\{?\w*\}?|\$\(.*|%[\w().-]*|\{+[\w.!:]*\}*|\[redacted.*|\[\w*\]?|[a-z_][\w.]*[(\[].*")
_KEY_BEGIN = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----")
_KEY_END = re.compile(r"-----END [A-Z0-9 ]*PRIVATE KEY-----")
_KEY_BODY = re.compile(r"(?:^|[\s+\-|])(?:[A-Za-z0-9+/]{4})*[A-Za-z0-9+/]{2}[A-Za-z0-9+/=]{2}$|^$|^[A-Za-z-]+: \S+$")
_ASCII_LOWER = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}


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

    def text(self, text: str) -> str:
        """`text` without secrets; the number of lines stays the same."""
        return "\n".join(map(self.lines().line, text.split("\n")))

    def value(self, value: Any) -> Any:
        """The same JSON-like value with its strings redacted; a string under a name that says secret is replaced."""
        return self._value(value, "")

    def lines(self, *, program: bool = False) -> RedactingLines:
        """A redactor for text that arrives line by line; `program` is for source code."""
        return RedactingLines(self, program)

    def file(self, path: Path) -> None:
        """Rewrite a log that another program wrote itself, without secrets; one that has none is left as it is."""
        if not path.is_file():
            return
        text = path.read_bytes().decode("utf-8", "surrogateescape")
        cleared = "\n".join(map(self.lines(program=True).line, text.split("\n")))
        if cleared != text:
            write_bytes(path, cleared.encode("utf-8", "surrogateescape"))

    def piece(self, text: str, *, program: bool) -> str:
        """Redact one line without regard to private key blocks, which `lines` follows."""
        for value, name in self._values:
            if value in text:
                text = text.replace(value, f"[redacted:{name}]")
        for literals, replacement, pattern in _PATTERNS:
            for literal in literals:
                if literal in text:
                    text = pattern.sub(replacement, text)
                    break
        if "://" in text and "@" in text:
            text = _URL.sub(_without_credentials, text)
        lowered = text.lower() if text.isascii() else text.translate(_ASCII_LOWER)
        for literal in _STEM_LITERALS:
            if literal in lowered:
                return _assignments(text, lowered, program)
        return text

    def _value(self, value: Any, name: str) -> Any:
        says = says_secret(name) if name else Says.NOTHING
        if isinstance(value, str):
            if _value_is_secret(value, name, says) and not value.startswith("--"):
                return f"[redacted:{name}]"
            return self.text(value)
        if isinstance(value, Mapping):
            return {key: self._value(entry, key if isinstance(key, str) else "") for key, entry in value.items()}
        if isinstance(value, list | tuple):
            items = [self._value(entry, _flag(before) or name) for before, entry in zip(("", *value), value, strict=False)]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, int) and not isinstance(value, bool) and says_password(name):
            return f"[redacted:{name}]"
        return value


class RedactingLines:
    """Redacts a stream line by line; knows when it is inside a private key block."""

    def __init__(self, redactor: Redactor, program: bool) -> None:
        self._redactor = redactor
        self._program = program
        self._inside = False

    def line(self, line: str) -> str:
        """One line, with or without its newline, without secrets."""
        if self._inside:
            if _KEY_END.search(line):
                self._inside = False
            elif not _KEY_BODY.search(line.strip()[-_LONGEST_NAME:]):
                # Not key material: the block was torn, and the log must not vanish behind it.
                self._inside = False
                return self.line(line)
            return "[redacted:private-key]" + line[len(line.rstrip("\r\n")) :]
        if "PRIVATE KEY-----" in line and (begin := _KEY_BEGIN.search(line)):
            end = _KEY_END.search(line, begin.end())
            rest = self.line(line[end.end() :]) if end else line[len(line.rstrip("\r\n")) :]
            # A mention in a sentence opens nothing; the marker of a block ends its line, or the block follows in it.
            body = line[begin.end() : end.start() if end else None].rstrip("\r\n")
            self._inside = end is None and not body.strip()
            if end or self._inside or re.search(r"[A-Za-z0-9+/]{40}", body):
                return self._redactor.piece(line[: begin.start()], program=self._program) + "[redacted:private-key]" + rest
        return self._redactor.piece(line, program=self._program)


def _flag(argument: Any) -> str:
    """The name of a `--flag` in an argument list, whose value follows; a bare `--token` is an access token."""
    name = argument.lstrip("-") if isinstance(argument, str) and argument.startswith("--") else ""
    return "access-token" if name == "token" else name


def _is_secret(name: str, value: str) -> bool:
    """Whether the exact value of this environment variable is to be replaced wherever it occurs."""
    if len(value) < MINIMUM_LENGTH or (_PLAIN.fullmatch(value) and not says_password(name)):
        return False
    says = says_secret(name)
    if says is Says.NOTHING or (says is Says.WEAK and not looks_random(value)):
        return False
    # GOOGLE_APPLICATION_CREDENTIALS and the like hold the path of a secret, which is worth knowing.
    return not (value.startswith(("/", "~", "./")) and Path(value).expanduser().exists())


def _spellings(value: str) -> list[str]:
    """A value as it may be printed: as it is, in JSON, in a URL; of several lines each for itself."""
    lines = [part.strip() for part in value.splitlines()] if "\n" in value else [value]
    return [form for part in lines for form in (part, json.dumps(part)[1:-1], quote(part, safe="")) if len(form) >= MINIMUM_LENGTH]


def _value_is_secret(value: str, name: str, says: Says) -> bool:
    if says is Says.NOTHING or value.startswith("[redacted"):
        return False
    if says is Says.WEAK:
        return looks_random(value)
    if len(value) < 4 or value.removeprefix("self.").lower() == name.lower():
        return False
    return says_password(name) if value.isdigit() else not (_PLAIN.fullmatch(value) or _PLACEHOLDER.fullmatch(value))


def _without_credentials(match: re.Match[str]) -> str:
    scheme, user = match.groups()
    if "[redacted" in user or not (":" in user or looks_random(user)):
        return match.group(0)
    return f"{scheme}[redacted:url-credentials]@"


def _assignments(text: str, lowered: str, program: bool) -> str:
    """Replace values behind names that say secret: `name=value`, `"name": "value"`, `--name value`, headers."""
    pieces: list[str] = []
    done = seen = 0
    for stem in _STEM.finditer(lowered):
        if stem.start() < seen:
            continue
        start, seen = _name_around(text, stem.start(), done)
        name = text[start:seen].strip(".-")
        says = says_secret(name)
        if says is Says.NOTHING:
            continue
        flag = text.startswith("--", start) and not program
        if flag and name.lower() == "token":
            says = Says.STRONG
        found = _value_behind(text, seen, name, says, flag=flag, program=program)
        if found:
            pieces += (text[done : found[0]], f"[redacted:{name}]")
            done = seen = found[1]
    return "".join((*pieces, text[done:])) if pieces else text


def _name_around(text: str, position: int, floor: int) -> tuple[int, int]:
    """Where the name that holds this position begins and ends."""
    start, floor = position, max(floor, position - _LONGEST_NAME)
    while start > floor and text[start - 1] in _NAME_CHARACTERS:
        start -= 1
    if text[max(floor, start - 4) : start].lower() == "api " and text[start : start + 3].lower() == "key":
        start -= 4  # "API key: …" in prose
    end = _NAME_END.match(text, position)
    return start, end.end() if end else position


def _value_behind(text: str, end: int, name: str, says: Says, *, flag: bool, program: bool) -> tuple[int, int] | None:
    """Where the secret behind a name stands, or None."""
    between = _BETWEEN.match(text, end) or (_BETWEEN_FLAG.match(text, end) if flag else None)
    if not between:
        return None
    begin = between.end()
    if name.lower().endswith("authorization") and (scheme := _SCHEME.match(text, begin)):
        return None if scheme.group("rest").startswith("[redacted") else scheme.span("rest")
    # Its beginning decides, so that a line that is one long value is not read again for every name in it.
    first = _span(text, begin, begin + _LONGEST_PEEK, program)
    if first is None:
        return None
    content = text[slice(*first)]
    if not _value_is_secret(content, name, says) or (program and not looks_random(content)):
        return None
    return _span(text, begin, len(text), program)


def _span(text: str, begin: int, end: int, program: bool) -> tuple[int, int] | None:
    """The inside of the value that begins here; in program text only a literal is one."""
    value = _VALUE.match(text, begin, end)
    if not value:
        return None
    if value.group("string"):
        start, finish = value.span("string")
        return text.index(text[finish - 1], start) + 1, finish - 1
    if value.group("mark"):
        return value.span("escaped")
    return None if program else value.span("bare")
