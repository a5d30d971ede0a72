"""Secrets whose name stands on an earlier or a later line: sections, manifests of Kubernetes, tables.

- A section is what a name that says secret opens: `<secret>`, `secret {`, `"secret": {`, `secret:` with deeper lines, `[secret]`.
  In it goes what stands behind `value`, `default`, `content` and the like; in `secrets`, `credentials` and the data of a Secret
  everything but what evidently describes a secret (`username`, `region`, …).
- A value that stands before its name: with the whole text at hand (`ahead`) the name decides. In a stream nobody knows yet, so the first
  `value:` of an item goes, and base64 under a `data:` whose kind is still to come.
- A table whose header names a secret column loses that column: CSV, TSV, Markdown, psql, aligned columns, lists of lists in JSON.
"""

# ruff: noqa: E501 - a pattern is read in one piece

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from seatrial.core.secret_names import Says, has_stem, looks_random, says_secret
from seatrial.core.text import word_set
from seatrial.evidence.secret_values import MARKS, NAMED, VALUE_LINE, indent, is_plain, is_program_secret, stamps, value_is_secret

VALUE_KEYS = word_set(
    "value values default plaintext content contents data string text current raw val literal "
    "result body payload secure secret secretstring secrettext password token key"
)
_DESCRIBES = word_set(
    "name names username user users login host hostname port region type kind id uid description desc comment note url uri endpoint path file"
    " files filename format version enabled disabled required optional sensitive expires expiry created updated namespace labels annotations"
    " metadata apiversion provider project team owner email mode scope scopes role algorithm length min max policy title label environment"
    " method interval external driver bucket zone account arn tags immutable ref refs rotation"
)
"""Entries of a section that say something about a secret."""
_EVERY = re.compile(
    r"(?i)(?:secrets|credentials?|creds|passwords|passphrases|api_?keys|secret_?data|string_?data|auth_?data|private_?keys|access_?keys)$"
)
_NAME = r"[A-Za-z_][\w.:-]{0,127}"
_OPEN_TAG = re.compile(rf"<(?P<name>{_NAME})(?P<attributes>(?:\s[^<>\n]{{0,500}})?)(?<!/)>[^<>\n]*$")
_OPEN_TAG_CUT = re.compile(rf"<(?P<name>{_NAME})(?P<attributes>(?:\s[^<>\n]{{0,500}})?)$")
_ENTRY_NAME = re.compile(r"<string>(?P<name>[\w.-]{2,128})</string>$")
_ENTRY_TAG = re.compile(r"<(?P<tag>entry|item|pair|property)\b[^<>]*>\s*$")
_TYPE = re.compile(r"[\"']type[\"']\s*:\s*[\"'](?P<name>[\w.-]{2,128})[\"'],?$")
"""`"type": "random_password"` in a state of Terraform: the values of this object are such."""
_ATTRIBUTE = re.compile(r"(?:name|key|id)\s*=\s*[\"']([^\"']{1,128})[\"']")
_OPEN_BRACE = re.compile(
    rf"(?:^|[\s,{{\[(\"'])(?P<name>{_NAME})(?P<labels>[\"']?(?:\s+[\"'][\w./-]{{1,128}}[\"']){{0,3}})\s*(?P<sep>=>|:=|[:=])?\s*(?:\[\s*)?[{{\[(]\s*$"
)
_OPEN_YAML = re.compile(rf"(?:-\s+)?[\"']?(?P<name>{_NAME})[\"']?\s*:\s*(?:[&!][\w!.-]+)?\s*$")
_HEADER = re.compile(r"\[{1,2}\s*(?P<name>[\w.\"' :/-]{1,128}?)\s*\]{1,2}\s*$")
_ONE_LINE = re.compile(
    rf"(?<![\w.-])(?P<name>{_NAME})(?P<labels>(?:\s+\"[\w./-]{{1,128}}\"){{0,3}})(?:\s*\{{|\()(?P<inside>[^{{}}()\n]{{1,2000}})[)}}]"
)
_STATEMENT = re.compile(
    r"(?:class|def|async def|if|elif|else|for|while|with|try|except|match|case|return|function|func|fn|public|private|void)\b"
)
_ENTRY = re.compile(
    r"(?P<before>(?:^|(?<=[\s,{\[(<]))(?!redacted:)[\"'<]?(?:(?<=<)[A-Za-z][\w-]{0,40}:)?(?P<key>[A-Za-z_.][\w./-]{0,127})(?:[\"']?\s*(?:=>|:=|[:=])(?:\s+|(?=[^\s/:=]))|(?:\s[^<>\n]{0,200})?>\s*(?:<!\[CDATA\[)?))"
    r"(?P<value>\"(?:\\.|[^\"\\\n])*\"?|'[^'\n]*'?|[^\s<>{}\[\]\"',;][^\n<>]*?)(?=\s*(?:$|[,;}\])](?:\s|$|[}\])\"'])|\]\]>|</|/?>))"
)
_EMPTY_ENTRY = re.compile(
    r"(?:-\s+)?[\"'<]?(?:(?<=<)[A-Za-z][\w-]{0,40}:)?(?P<key>[A-Za-z_.][\w./-]{0,127})(?:[\"']?\s*(?:=>|:=|[:=])\s*(?P<opening>[|>][-+]?\d?|<<[-~]?[\"']?(?P<word>\w+)[\"']?|\"\"\"|''')?|[^<>\n]{0,200}>\s*(?P<cdata><!\[CDATA\[)?)\s*$"
)
_ITEM = re.compile(r"-\s+(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s\"'{\[<][^\n]*?)\s*,?\s*$")
_YAML_LINE = re.compile(r"(?:-\s+)?[\"']?[\w./-]{1,128}[\"']?\s*[:=](?:\s|$)|-\s+\S|---\s*$")
_QUOTES = "\"'`"
_LONGEST, _MOST_FOREIGN = 200, 6

_KIND = re.compile(r"^\W*[\"']?kind[\"']?\s*:\s*[\"']?(?P<kind>\w+)[\"']?\s*,?\s*$")
_SECRET_KINDS = ("Secret", "SealedSecret")
_DATA = re.compile(r"^\W*[\"']?(?P<name>data|stringData|binaryData|encryptedData)[\"']?\s*:\s*\{?\s*$")
_DATA_BELOW = re.compile(r"^\W*(?:data|string_?[dD]ata|binary_?[dD]ata)[\"']?\s*[:=]\s*\{?\s*$")
_API = re.compile(r"^\W*[\"']?apiVersion[\"']?\s*:")
_SECRET_OBJECT = re.compile(r"[\"']?\bkind[\"']?\s*:\s*[\"']?Secret\b")
_DATA_OBJECT = re.compile(r"(?P<before>[\"']?\b(?:data|stringData)[\"']?\s*:\s*\{)(?P<inside>[^{}]+)\}")
_STRING_VALUE = re.compile(r"(?<!\[redacted)(:\s*)(?:\"(?!\[redacted)[^\"]*\"|'(?!\[redacted)[^']*'|(?!\[redacted)[^\s\"',{}]+)")
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})+(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
_OBJECTS_APART = 400

_ITEM_START = re.compile(r"[\s+|│>#*]*(?:-|-?\s*\{|\(|<(?!/|\?)[\w:.-]+(?:\s[^<>]*)?>|\[\[[\w.\"-]+\]\])?\s*$")
_TAGGED_NAME = re.compile(r"^\W*<(?:name|key)>(?P<name>[^<>\n]{1,128})</(?:name|key)>\s*$")
_TAGGED_VALUE = re.compile(r"^(?P<before>\W*<(?:value|string|data)>)(?!\[redacted)[^<\n]+(?=</)")
_MODEL = re.compile(r"[A-Za-z][\w.-]*(?:/[\w.-]+)+")
"""`Qwen/Qwen3-8B`, `data/train.jsonl`."""
_NEXT_ITEM = re.compile(r"[\s+|│>#*]*(?:-\s|-$|\{|\}|---|\[\[|</?(?:property|env|entry|item|add)\b)")
_NAMES_ITS_VALUE = re.compile(r"(?i)[\s+|│>#*-]*[\"']?(?:name|key|variable|header|desc|id|label)\b|[^:]*[={\[]|.*[:{\[]\s*$")
"""A line before `value:` that says whose value it is, or that it is one of a configuration."""
_VALUE_BELOW = re.compile(r"[\s+|│>]*(?:-\s+)[\"']?[vV]alue[\"']?:\s*(?:[|>][-+]?\d?)?\s*$")
_ITEM_LINES = 6


@dataclass(slots=True)
class _Section:
    name: str
    says: Says
    kind: str
    """How it ends: indent, brace, tag, header."""
    indent: int = 0
    every: bool = False
    base64: bool = False
    """Only what is base64 goes: nobody knows yet whether this is a Secret."""
    padded: bool = False
    """Nor does anything say that this is an object of Kubernetes: base64 must look like nothing else."""
    describes: bool = True
    depth: int = 1
    left: int = _LONGEST
    foreign: int = 0
    cut: bool = False
    """The tag goes on on the next line."""


@dataclass(slots=True)
class _OpenValue:
    """A value of several lines: until the lines are no deeper, or until a word."""

    indent: int
    until: str = ""
    left: int = 60


@dataclass(slots=True)
class Ahead:
    """What the whole text says about its lines: values whose names come later, and data of Secrets."""

    values: dict[int, str] = field(default_factory=dict)
    secret_data: frozenset[int] = frozenset()


def look_ahead(rows: Sequence[str]) -> Ahead:
    """Find what a line needs to know about later ones."""
    values: dict[int, str] = {}
    data = set[int]()
    for at, row in enumerate(rows):
        if ("ame" in row or "ey" in row) and (name := _late_name(row)):
            for before in range(at - 1, max(-1, at - _ITEM_LINES), -1):
                body = _unsigned(rows[before][stamps(rows[before]) :])
                if VALUE_LINE.match(body) or _TAGGED_VALUE.match(body):
                    values[before] = name
                    break
                if _NEXT_ITEM.match(body) or (before < at and _late_name(rows[before], secret=False)):
                    break
        if "kind" in row and (kind := _KIND.match(row[stamps(row) :])) and kind["kind"] in _SECRET_KINDS:
            data |= _data_lines(rows, at)
    return Ahead(values, frozenset(data))


def _late_name(row: str, *, secret: bool = True) -> str:
    body = _unsigned(row[stamps(row) :])
    named = NAMED.match(body)
    if named and named["item"]:
        return ""
    name = named["name"] if named else tagged["name"] if (tagged := _TAGGED_NAME.match(body)) else ""
    return name if name and (not secret or says_secret(name) is not Says.NOTHING) else ""


def _unsigned(body: str) -> str:
    """A removed line of a diff without its sign, which looks like that of an item."""
    return f" {body[1:]}" if body[:1] == "-" and (body[1:2] != " " or body[2:3] == " ") else body


def _data_lines(rows: Sequence[str], kind: int) -> set[int]:
    """Where the data of a Secret begins that stands before its kind."""
    depth, found = indent(rows[kind][stamps(rows[kind]) :]), set[int]()
    for at in range(kind - 1, max(-1, kind - _OBJECTS_APART), -1):
        body = rows[at][stamps(rows[at]) :]
        if body.strip().startswith("---") or (body.strip() and indent(body) < depth):
            break
        if indent(body) == depth and _DATA.match(body):
            found.add(at)
    return found


class SecretBlocks:
    """Follows one text or stream."""

    def __init__(self, ahead: Ahead | None = None) -> None:
        self._ahead = ahead
        self._at = -1
        self._section: _Section | None = None
        self._value: _OpenValue | None = None
        self._tables = _Tables()
        self._before = ""
        self._below, self._below_left = 0, 0
        self._kind, self._api = "", False

    @property
    def open(self) -> bool:
        """Whether an earlier line decides about the next one."""
        return (
            self._section is not None or self._value is not None or self._api or bool(self._kind or self._below_left) or self._tables.open
        )

    def skip(self, line: str) -> None:
        """Count a line that holds nothing of interest."""
        self._at += 1
        self._before = line

    def line(self, line: str, cleared: str, *, program: bool) -> str:
        """`cleared`, the line as it is by itself, without what other lines name."""
        self._at += 1
        text = line.rstrip("\r\n")
        at = stamps(text)
        body, done = text[at:], cleared[at:].rstrip("\r\n")
        ending = line[at + len(body) :]
        sign = body[:1] if body[:1] in ("+", ">") or self._is_removed(body) else ""
        if sign:  # a diff or a quotation
            body, done = f" {body[1:]}", f" {done[1:]}"
        made = self._line(body, done, program)
        self._before = line
        made = sign + made[1:] if sign else made
        # What looks like the name of a container before a line may be the first column of a table.
        first = columns.start() if (columns := _FIRST_COLUMNS.search(text, 0, at)) else at
        table = self._tables.line(text[first:at] + body, cleared[first:at] + (f" {made[1:]}" if sign else made), program)
        return cleared[:first] + (sign + table[1:] if sign and first == at else table) + ending

    def _is_removed(self, body: str) -> bool:
        """Whether a dash is the sign of a diff, not that of an item of a list."""
        if body[:1] != "-" or (body[1:2] == " " and body[2:3] != " "):
            return False
        before = self._before[stamps(self._before) :]
        return body[1:2] != " " or not before or before[:1] in ("+", "-") or before.startswith("@@ ")

    def _line(self, body: str, cleared: str, program: bool) -> str:
        if self._value is not None and (closed := self._inside_value(body)) is not None:
            return closed
        if not program:
            cleared = self._late(body, cleared)
            cleared = self._manifest(body, cleared)
            if self._data_begins(body):
                return cleared
        if self._section is not None:
            cleared = self._inside(self._section, body, cleared, program)
        elif self._value is None and ("{" in body or "(" in body) and has_stem(body.lower()):
            cleared = _ONE_LINE.sub(lambda found: _one_line(found, program), cleared)
        if self._section is None or self._section.base64:
            self._open(body, program)
        return cleared

    def _late(self, body: str, cleared: str) -> str:
        """A value whose name has not come yet."""
        if self._below_left:  # the value of an item, whose name may come behind it
            self._below_left -= 1
            value = cleared.strip(MARKS + _QUOTES)
            if indent(body) <= self._below or not (_odd(value) and len(value.split()) == 1):
                self._below_left = 0
            elif value:
                return cleared.replace(value, "[redacted:value-before-name]", 1)
        elif "alue" in body and _VALUE_BELOW.match(body):
            self._below, self._below_left = indent(body), 20
        if self._ahead is not None:
            name = self._ahead.values.get(self._at, "")
        else:
            name = "value-before-name" if "alue" in body or "content" in body or "default" in body or "string" in body else ""
        if not name:
            return cleared
        found = VALUE_LINE.match(cleared) or _TAGGED_VALUE.match(cleared)
        value = cleared[found.end("before") : found.end()].strip(_QUOTES + ", ") if found else ""
        if not found or value[:1] in ("|", ">"):
            return cleared
        if self._ahead is None:
            before = self._before[stamps(self._before.rstrip("\r\n")) :].rstrip()
            first = body.lstrip(" \t+|│>").startswith(("- ", "{ ")) or (before != "" and _ITEM_START.match(before) is not None)
            # The line before is one of the same mapping that names the value, or the one that opened it.
            sibling = _NAMES_ITS_VALUE.match(before) is not None and _YAML_LINE.match(before.lstrip(MARKS)) is not None
            if _MODEL.fullmatch(value) and not looks_random(value):
                return cleared
            if not (value_is_secret(value, "", Says.STRONG) if first else _odd(value) and not sibling):
                return cleared
        return f"{cleared[: found.end('before')]}[redacted:{name}]{cleared[found.end() :]}"

    def _manifest(self, body: str, cleared: str) -> str:
        if "Secret" in body and "kind" in body and _SECRET_OBJECT.search(body):
            cleared = _DATA_OBJECT.sub(
                lambda found: found["before"] + _STRING_VALUE.sub(r"\1[redacted:secret-data]", found["inside"]) + "}", cleared
            )
        if body.startswith("---"):
            self._api, self._kind = False, ""
        elif "apiVersion" in body and _API.match(body):
            self._api, self._kind = True, ""
        elif "kind" in body and (found := _KIND.match(body)):
            self._kind, self._api = found["kind"] if found["kind"] in _SECRET_KINDS else "", False
        return cleared

    def _data_begins(self, body: str) -> bool:
        if "ata" not in body or not (found := _DATA.match(body)):
            return False
        sure = self._kind != "" or found["name"] != "data" or (self._ahead is not None and self._at in self._ahead.secret_data)
        if not sure and self._ahead is not None:
            return False
        kind = "brace" if body.rstrip().endswith("{") else "indent"
        self._section = _Section("secret-data", Says.STRONG, kind, indent(body), every=True, base64=not sure, describes=False)
        self._section.padded = not sure and not self._api
        return True

    def _open(self, body: str, program: bool) -> None:
        tail = body[-400:].strip()
        if not tail or not has_stem(tail.lower()) or _STATEMENT.match(tail):
            return
        found, within, cut = None, "", False
        if tail.endswith(">") and (found := _OPEN_TAG.search(tail)):
            named = _ATTRIBUTE.search(found["attributes"])
            names, kind = (found["name"].rpartition(":")[2], named[1] if named else ""), "tag"
        elif tail.endswith("</string>") and (found := _ENTRY_NAME.search(tail)) and (above := _ENTRY_TAG.search(self._before)):
            names, kind, within = (found["name"], ""), "tag", above["tag"]
        elif "<" in tail and tail[-1] not in ">{[(" and (found := _OPEN_TAG_CUT.search(tail)):
            names, kind, cut = (found["name"].rpartition(":")[2], ""), "tag", True
        elif "type" in tail and not program and (found := _TYPE.search(tail)) and says_secret(found["name"]) is Says.STRONG:
            names, kind = (found["name"], ""), "brace"
        elif tail[-1] in "{[(" and (found := _OPEN_BRACE.search(tail)):
            names, kind = (found["name"], *re.findall(r"[\w./-]+", found["labels"])), "brace"
        elif tail[-1] == "]" and (found := _HEADER.fullmatch(tail)):
            names, kind = (found["name"].strip(_QUOTES).rpartition(".")[2].rpartition(":")[2].strip(), ""), "header"
        elif not program and tail[-1] == ":" and (found := _OPEN_YAML.fullmatch(body.strip().lstrip(MARKS))):
            names, kind = (found["name"], ""), "indent"
        else:
            return
        name, says = max(((name, says_secret(name.strip(":.-"))) for name in names), key=lambda one: one[1])
        if says is not Says.NOTHING:
            tag = within or (found["name"] if kind == "tag" else name)
            every = _EVERY.search(name) is not None and not within
            self._section = _Section(tag, says, kind, indent(body), every=every, left=_LONGEST if every else 60, cut=cut)

    def _inside(self, section: _Section, body: str, cleared: str, program: bool) -> str:
        if not body.strip():
            return cleared
        section.left -= 1
        cut, section.cut = section.cut, section.cut and ">" not in body
        if section.left < 0 or self._ends(section, body) or (cut and body.rstrip().endswith("/>")):
            self._section = None
            if section.kind != "tag" or "<" not in body:
                return cleared
        empty = _EMPTY_ENTRY.fullmatch(body.strip().lstrip(MARKS))
        if empty and (empty["opening"] or empty["cdata"] or body.rstrip().endswith(">")) and self._takes(section, empty["key"]):
            until = empty["word"] or {'"""': '"""', "'''": "'''"}.get(empty["opening"] or "", "")
            if empty["cdata"] or body.rstrip().endswith(">"):
                until = f"</{empty['key']}"
            self._value = _OpenValue(indent(body), until)
            return cleared
        if _DATA_BELOW.match(body):
            section.every = True
            return cleared
        if section.kind == "tag" and "<" not in body and not cut:
            return self._replaced(section, cleared, body.strip(), program) if len(body.split()) == 1 else cleared
        if section.every and (item := _ITEM.match(body.lstrip(" \t+|│>"))) and not _ENTRY.search(body):
            return self._replaced(section, cleared, item["value"], program)
        for found in reversed(list(_ENTRY.finditer(cleared))):
            value = found["value"]
            if self._takes(section, found["key"]) and self._goes(section, found["key"], value, program):
                cleared = f"{cleared[: found.start('value')]}{_quoted(value, section.name)}{cleared[found.end('value') :]}"
        return cleared

    def _ends(self, section: _Section, body: str) -> bool:
        if section.kind == "tag":
            return re.search(rf"</(?:[\w.-]+:)?{re.escape(section.name)}\s*>", body) is not None
        if section.kind == "brace":
            section.depth += sum(map(body.count, "{[(")) - sum(map(body.count, "}])"))
            return section.depth <= 0
        if section.kind == "header":
            return _HEADER.fullmatch(body.strip()) is not None or self._is_foreign(section, body)
        depth, item = indent(body), body.lstrip(" \t+|│>").startswith("- ")
        if depth > section.indent or (item and depth - 2 >= section.indent):
            return False
        return _YAML_LINE.match(body.lstrip(MARKS)) is not None or self._is_foreign(section, body)

    def _is_foreign(self, section: _Section, body: str) -> bool:
        if _YAML_LINE.match(body.lstrip(MARKS)):
            return False
        section.foreign += 1
        return section.foreign > _MOST_FOREIGN

    def _takes(self, section: _Section, key: str) -> bool:
        plain = key.rpartition(":")[2].rpartition(".")[2].lower().replace("-", "").replace("_", "")
        if section.every:
            return not section.describes or plain not in _DESCRIBES
        return plain in VALUE_KEYS

    def _goes(self, section: _Section, key: str, value: str, program: bool) -> bool:
        content = value.strip(_QUOTES + ", ")
        if "[redacted" in content or not content:
            return False
        if not section.describes:
            return not is_plain(content) and (not section.base64 or _is_base64(content, sure=not section.padded))
        if program and not (value[0] in _QUOTES and is_program_secret(content)):
            return False
        return value_is_secret(content, section.name if not section.every else key, section.says)

    def _replaced(self, section: _Section, cleared: str, value: str, program: bool) -> str:
        if value in cleared and self._goes(section, "", value, program):
            return cleared.replace(value, _quoted(value, section.name), 1)
        return cleared

    def _inside_value(self, body: str) -> str | None:
        value = self._value
        if value is None:
            return None
        value.left -= 1
        stripped = body.strip()
        if not stripped:
            return body
        ended = value.until in stripped if value.until else indent(body) <= value.indent
        if ended or value.left < 0:
            self._value = None
            text, end, rest = body.partition(value.until) if value.until else ("", "", body)
            if not (value.until and text.strip(" \t|│>+]")):
                return None
            return f"[redacted:value]{end}{rest}"
        return body[: len(body) - len(body.lstrip(MARKS))] + "[redacted:value]"


def _one_line(found: re.Match[str], program: bool) -> str:
    """`secret "x" { value = "…" }`."""
    names = (found["name"], *re.findall(r"[\w./-]+", found["labels"]))
    name, says = max(((name, says_secret(name)) for name in names), key=lambda one: one[1])
    if says is Says.NOTHING:
        return found[0]

    def entry(pair: re.Match[str]) -> str:
        content = pair["value"].strip(_QUOTES)
        if (
            pair["key"].lower() not in VALUE_KEYS
            or not value_is_secret(content, name, says)
            or (program and pair["value"][0] not in _QUOTES)
        ):
            return pair[0]
        return pair["before"] + _quoted(pair["value"], name)

    start, end = found.start("inside") - found.start(), found.end("inside") - found.start()
    return found[0][:start] + _ENTRY.sub(entry, found["inside"]) + found[0][end:]


def _quoted(value: str, name: str) -> str:
    quote = value[0] if value[0] in _QUOTES and value.endswith(value[0]) and len(value) > 1 else ""
    return f"{quote}[redacted:{name}]{quote}"


def _odd(value: str) -> bool:
    """Whether a value looks like a credential of any kind."""
    letters = any(c.isalpha() for c in value)
    return (
        len(value) >= 8 and letters and any(c.isdigit() for c in value) and not any(c in value for c in "/ ([{") and "." not in value
    ) or looks_random(value)


def _is_base64(value: str, *, sure: bool) -> bool:
    mixed = len(value) >= 16 and not value.isupper() and any(c.isupper() for c in value) and looks_random(value)
    if not _BASE64.fullmatch(value) or not (sure or value.endswith("=") or mixed):
        return False
    try:
        base64.b64decode(value, validate=True)
    except ValueError:
        return False
    return True


_FIELD = r"[\"']?[A-Za-z_][\w./-]{0,63}[\"']?"
_TITLE = r"[\"']?[A-Za-z_][\w./-]{0,30}(?: [\w.()-]{1,30}){0,3}[\"']?"
_HEADMARKS = " \t#\ufeff"
_HEAD = rf"[{_HEADMARKS}]*"
_FRAME = "frame"
"""A table of pandas: one blank between columns, a number before each row."""
_GUESSED = (":", _FRAME, "")
"""Of these a header is no more than a guess: what looks like a credential goes, nothing else."""
_HEADS = (
    (",", re.compile(rf"{_HEAD}(?:{_FIELD}|(?=,))(?:\s?,\s?{_FIELD})+\s*$")),
    (";", re.compile(rf"{_HEAD}(?:{_FIELD}|(?=;))(?:\s?;\s?{_FIELD})+\s*$")),
    ("|", re.compile(rf"\s*[|│┃]?\s*{_FIELD}(?:\s*[|│┃]\s*{_FIELD})+\s*[|│┃]?\s*$")),
    ("\t", re.compile(rf"{_HEAD}{_FIELD}(?:\t\s*{_FIELD})+\s*$")),
    (" ", re.compile(rf"\s*{_FIELD}(?:[ \t]{{2,}}{_FIELD})+\s*$")),
    (",", re.compile(rf"{_HEAD}{_TITLE}(?:,{_TITLE})+\s*$")),
    (":", re.compile(rf"{_HEAD}{_FIELD}(?::{_FIELD})+\s*$")),
    (_FRAME, re.compile(rf"\s{{2,}}{_FIELD}(?:[ \t]+{_FIELD})+\s*$")),
    ("", re.compile(rf"{_HEAD}{_FIELD}\s*$")),
)
_CELLS = {
    ",": re.compile(r"\s*(\"(?:[^\"]|\"\")*\"|'[^']*'|[^,]*?)\s*(?:,|$)"),
    ";": re.compile(r"\s*(\"(?:[^\"]|\"\")*\"|'[^']*'|[^;]*?)\s*(?:;|$)"),
    "|": re.compile(r"\s*([^|│┃]*?)\s*(?:[|│┃]|$)"),
    "\t": re.compile(r"\s*([^\t]*?)\s*(?:\t|$)"),
    " ": re.compile(r"\s*(\S+(?: \S+)*)\s*"),
    ":": re.compile(r"\s*(\"[^\"]*\"|[^:]*?)\s*(?::|$)"),
    _FRAME: re.compile(r"\s*(\S+)\s*"),
    "": re.compile(r"\s*(\S.*?)\s*$"),
}
_USERS = frozenset(("user", "username", "login", "email", "account", "host", "hostname", "server"))
_FIRST_COLUMNS = re.compile(r"(?:[\w.-]{1,40}\s+\| )+$")
_RULE = re.compile(r"[\s|+:=\-─━═┼╋┡╇┩├┤┌┐└┘┏┓┗┛┬┴┳┻│┃╞╪╡]+$")
_LONGEST_TABLE, _MOST_MISSES = 5000, 2
_LIST = re.compile(r"\[(?P<inside>[^\[\]\n]{3,4000})\]")
_LIST_ITEM = re.compile(r"\"(?:\\.|[^\"\\])*\"|'[^']*'|[^\s,\"']+")
_LIST_NAME = re.compile(rf"[\"']{_NAME}[\"']")


class _Tables:
    """Follows the table whose header came last."""

    def __init__(self) -> None:
        self._columns: dict[int, tuple[str, Says]] = {}
        self._separator, self._fields, self._left, self._misses = "", 0, 0, 0
        self._unruled = False

    @property
    def open(self) -> bool:
        return bool(self._columns)

    def line(self, body: str, cleared: str, program: bool) -> str:
        if "[[" in body or ("[" in body and "olumns" in body):
            cleared = _lists(cleared)
        if self._columns:
            made = self._row(body, cleared, program)
            if made is not None:
                return made
        if len(body) < 2000 and has_stem(body.lower()):
            self._header(body)
        return cleared

    def _header(self, body: str) -> None:
        for separator, head in _HEADS:
            if (separator not in ("|", _FRAME) and separator not in body) or not head.match(body):
                continue
            names = [name.strip(_QUOTES + _HEADMARKS) for name, _ in _cells(body, separator)]
            found = _secret_columns(names)
            if separator in _GUESSED and not any(says is Says.STRONG for _, says in found.values()):
                continue
            if separator in (":", _FRAME) and not _USERS.intersection(map(str.lower, names)):
                continue
            self._unruled = separator == " " and not (all(name.isupper() for name in names) or body[:1] == " ")
            if found:
                self._columns, self._separator, self._fields = found, separator, len(names)
                self._left, self._misses = _LONGEST_TABLE, 0
            return

    def _row(self, body: str, cleared: str, program: bool) -> str | None:
        self._left -= 1
        if _RULE.fullmatch(body):
            self._unruled = False
            return cleared
        if self._unruled:  # a line of words; a header has a rule below
            self._columns = {}
            return None
        cells = _cells(cleared, self._separator)
        shift = 1 if len(cells) == self._fields + 1 and self._separator in (" ", _FRAME) else 0
        frame = self._separator != _FRAME or (shift == 1 and cells[0][0].isdigit())
        ragged = len(cells) - shift != self._fields
        if ragged and self._separator in (",", ";", "\t") and not program:
            cleared = self._cut_row(cells, cleared)
        if ragged or not frame or self._left < 0 or (self._separator == "" and not _odd(cells[0][0])):
            self._misses += 1
            if self._misses > _MOST_MISSES or self._left < 0:
                self._columns = {}
            return cleared if "[redacted" in cleared else None
        self._misses = 0
        for at in sorted(self._columns, reverse=True):
            value, start = cells[at + shift]
            name, says = self._columns[at]
            content = value.strip(_QUOTES)
            if program and not (value[:1] in _QUOTES and value and is_program_secret(content)):
                continue
            if value_is_secret(content, name, says) and (self._separator not in _GUESSED or _odd(content)):
                cleared = cleared[:start] + _quoted(value, name) + cleared[start + len(value) :]
        return cleared

    def _cut_row(self, cells: Sequence[tuple[str, int]], cleared: str) -> str:
        """A row that lacks cells at its end, or has too many: what looks like a credential in the column goes."""
        for at in sorted(self._columns, reverse=True):
            if len(cells) > 1 and at < len(cells) and _odd(cells[at][0].strip(_QUOTES)) and not cells[at][0].startswith("[redacted"):
                value, start = cells[at]
                cleared = cleared[:start] + _quoted(value, self._columns[at][0]) + cleared[start + len(value) :]
        return cleared


def _secret_columns(names: Sequence[str]) -> dict[int, tuple[str, Says]]:
    """Which columns hold secrets; `pass` does so beside a user, else it counts what passed."""
    users = any(name.lower() in _USERS for name in names)
    telling = ((at, name) for at, name in enumerate(names) if users or name.lower() not in ("pass", "passes"))
    return {at: (name, says) for at, name in telling if (says := says_secret(name)) is not Says.NOTHING}


def _cells(text: str, separator: str) -> list[tuple[str, int]]:
    """The cells of a row, and where each begins."""
    found, at, pattern = list[tuple[str, int]](), 0, _CELLS[separator]
    if separator == "|":
        at = len(text) - len(text.lstrip(" \t|│┃"))
        text = text[: len(text.rstrip(" \t|│┃"))]
    while at < len(text) and (cell := pattern.match(text, at)):
        if cell.end() == at:
            break
        found.append((cell[1], cell.start(1)))
        at = cell.end()
    if separator in (",", ";", ":") and text.endswith(separator):
        found.append(("", len(text)))
    return found


def _lists(text: str) -> str:
    """Lists of lists, of which the first holds names."""
    columns: dict[int, tuple[str, Says]] = {}
    fields = done = 0
    made = []
    for found in _LIST.finditer(text):
        items = list(_LIST_ITEM.finditer(found["inside"]))
        if columns and len(items) == fields:
            for at, (name, says) in sorted(columns.items()):
                item = items[at]
                if value_is_secret(item[0].strip(_QUOTES), name, says):
                    start, end = found.start("inside") + item.start(), found.start("inside") + item.end()
                    made += [text[done:start], _quoted(item[0], name)]
                    done = end
        elif len(items) > 1 and all(_LIST_NAME.fullmatch(item[0]) for item in items):
            columns, fields = _secret_columns([item[0].strip(_QUOTES) for item in items]), len(items)
    return "".join((*made, text[done:])) if made else text


def table_columns(value: Mapping[object, object]) -> tuple[str, str, list[str]] | None:
    """The keys of columns and rows of a table in JSON, and the names of its columns."""
    for columns in ("columns", "header", "headers", "fields"):
        names = value.get(columns)
        if isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names):
            for rows in ("data", "rows", "values"):
                if isinstance(value.get(rows), list | tuple):
                    return columns, rows, [str(name) for name in names]
    return None
