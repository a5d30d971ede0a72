"""Values behind names that say secret: `name=value`, `"name": "value"`, `--name value`, headers, and values on the lines after.

- The name decides (`core.secret_names`): behind a STRONG one any value goes that is not evidently no secret (`None`, `str`,
  `${VARIABLE}`, `get_secret()`), behind a WEAK one what looks like a credential.
- In program text the right side of `token = …` is an expression: only literals go, and what stands in strings and comments.
"""

# ruff: noqa: E501 - a pattern is read in one piece

from __future__ import annotations

import re

from seatrial.core.secret_names import STEM_LITERALS, Says, has_stem, looks_random, says_password, says_secret

_STEM = re.compile("|".join(re.escape(literal.strip("_:=")) for literal in STEM_LITERALS))
_NAME_END = re.compile(r"[A-Za-z0-9_.-]{0,128}")
_NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")
_LONGEST_NAME = 128
_LONGEST_PEEK, _LONGEST_WORD = 1024, 200
_SPACE = r"[ \t]{0,60}"
_ANSI_GAP = r"(?:\x1b\[[0-9;]*m)*"
_BETWEEN = re.compile(
    rf"{_ANSI_GAP}(?:\\*[\"'`]|%22|%27|&quot;|&#3[49];)?(?:[\])]|%5D){{0,2}}{_SPACE}(?:\\{{1,4}}(?=[:=]))?(?:{_ANSI_GAP}(?::{_SPACE}[A-Za-z_][\w\[\].]{{0,60}}(?: ?\| ?[\w.\[\]]{{1,40}}){{0,3}}{_SPACE}=(?={_SPACE}[bruf]?[\"'])|=>|:=|<-|->|→|[?+|!]?={{1,3}}|:(?!:)|%3[DdAa]|\\u003d))"
    rf"{_SPACE}{_ANSI_GAP}(?:%22|%27|&quot;|&#3[49];|[&!][A-Za-z][\w!.-]{{0,40}}[ \t]+)?"
)
_BETWEEN_FLAG = re.compile(r"(?:\\*[\"'])?\s*[,\s=]\s*")
_BETWEEN_PAIR = re.compile(r"\\*[\"'][ \t]{0,8},[ \t]{0,40}(?=[bruf]?\\*[\"'])")
_BETWEEN_CALL = re.compile(r"\([ \t]*(?=[bru]?\\*[\"'])")
_BETWEEN_COLUMNS = re.compile(r"[ \t]{0,60}[|│┃][ \t]{0,8}|\t+[ \t]*|[ \t]{2,60}")
_ALIGNED = re.compile(r"(?:\t+|[ \t]{2,60}|[ \t]{0,60}[|│┃][ \t]{0,8})(?=(?P<value>[^\s|│┃=:]{6,200})[ \t]*[|│┃]?[ \t]*$)")
"""What stands between a name that begins a line and the one word behind it."""
_SETTER = re.compile(r"(?i)(?:set\w*|put\w*|option|property|conf|config|header|with\w*)\([ \t]*[bru]?\\*[\"']$")
_CELL = re.compile(r"[ \t]{0,60}[|│┃][ \t]{0,8}(?=[^\s|│┃]*\d)(?=[^\s|│┃]*[A-Za-z])[^\s|│┃]{6,}[ \t]*$")
_REDACTED = re.compile(r"\[redacted:[^\[\]\n]{0,300}\]")
_BETWEEN_LOOSE = re.compile(
    r"(?:\\*[\"'`])?(?:[ \t]+(?:is|was|set to|changed to|lautet|ist|for [\w.-]{1,40}(?: [\w.-]{1,40})?|of [\w.-]{1,40})[ \t]{0,4}:?[ \t]{0,4}|[ \t]+(?:-[\w]{1,3}[ \t]+)?|,[ \t]{0,4}|\t+)"
)
_BETWEEN_WORDS = re.compile(r"[ \t]+(?:is |was |set to |lautet )?(?=[\"'])")
_STRING = r"[bruf]{0,2}\"(?:\\.|[^\"\\\n])*\"|[bruf]{0,2}'(?:\\.|[^'\\\n])*'"
_VALUE = re.compile(
    rf"(?P<string>(?:{_STRING})(?:[ \t]{{0,8}}[+.]?[ \t]{{0,8}}(?:{_STRING}))*)"
    r"|(?P<mark>\\+[\"'])(?P<escaped>[^\n]*?)(?P=mark)"
    r"|[\"'`]?(?P<bare>(?:[^\s\"'`&;,)}\]<>]|\](?=[^\s\"',}]))(?:[^\s\"'`&;,)}<>]|[,;)}](?![\w.-]{1,64}[\"']?[=:])(?=[^\s\"'`\]\[,;)}<>&])|[\"'](?=\w))*)"
)
_REST = re.compile(r"(?:[^\s,;&]|[ \t](?![\w.-]{1,64}[=:]|#|--|//)|[,;&](?!\s?[\"']?[\w.-]{1,64}[\"']?\s?[=:]))+")
_HEADER_REST = re.compile(r"(?:\\*[\"'])?(?P<rest>[^\n\"'\\]+)")
_SCHEME = re.compile(
    r"(?i)[bruf]?(?:\\*[\"'])?(?P<scheme>basic|bearer|token|digest|negotiate|apikey|key|hmac|aws4-hmac-sha256|[a-z0-9-]{2,30})\s+(?P<rest>[^\n'\\\"]+(?:\"[^\"\n]*\"[^\n'\\\"]*)*)"
)
_PLAIN = re.compile(
    r"(?i)[-+.\d]*(?:e[-+]?\d+)?(?:[a-z%]{1,3}|/[\d.]+|/s)?|none|null|nil|true|false|undefined|str|string|bytes|int|float|bool|any|dict|list|object|callable"
    r"|optional|required|empty|disabled|enabled|missing|unset|set|yes|no|on|off|ok|lambda|nan|inf|passed|failed|redacted|hidden|default|auto|all|and|or|not"
)
# Text shows how a value is found more often than the value: placeholders, variables, templates, calls.
_PLACEHOLDER = re.compile(
    r"(?i)(?:\{[^{}]*\}|[^\w\s])*|\*+|x+|\.+|…|-+|<.*>|\$\{?\w*(?::-)?\}?|\$\(.*|\$env:\w+|%[\w().-]*%?|\{+[\w.!: -]*\}*|\[redacted.*|\[\w*\]?|#.*|\\+n?"
    r"|[a-z_][\w.]*[(\[](?![\"']).*|[a-z_][\w.]*(?:get|env|input|open|load|read|getpass|prompt|fetch|secret|path|field|option|argument|config|vault|environ|column)\w*[(\[].*"
)
_FILLER = re.compile(
    r"(?i)change[-_ ]?me.*|your[-_ ].*|<.*|dummy.*|fake.*|example.*|placeholder.*|empty|todo|foo|bar|baz|test|unused|n/?a|password|token|secret|key|api[-_ ]key"
)
_DOTTED = re.compile(r"(?:[a-zA-Z_]\w*\.)+([a-zA-Z_]\w*)")
_CODE_START = re.compile(r"[\w.]+[(\[]")
_LITERAL_FIRST = re.compile(r"[{(\[]\s*(?:[\w.]+\s*[:=]\s*|[bru]?[\"'][^\"'\n]*[\"']\s*:\s*)?[bru]?[\"']")
_VERB = re.compile(r"\b(?:cannot|can|must|to|not|will|should|may|tests|checks|all|and|or|a|the|first|this|each|every|per|one) $")
_SHELL_VALUE = re.compile(r"=[\"']?(?=\S{0,200}?\d)(?=\S{0,200}?[A-Za-z])\S{8}")
COLUMN_NAMES = frozenset(
    (
        *("username", "hostname", "server", "description", "comment", "created", "updated", "expires", "status", "source", "number"),
        *("account", "address", "project", "version", "service", "endpoint", "required", "optional", "string", "boolean", "integer"),
        *("password", "passwd", "secret", "api_key", "last_login", "created_at", "updated_at", "database", "region", "namespace"),
    )
)
"""A word behind the name of a column that is one too."""
_PROSE_FOLLOWS = re.compile(r"[A-Za-z]+ [A-Za-z]{2,}\b")
_METAVARIABLES = frozenset(["password", "passwd", "pass", "token", "key", "api_key", "apikey", "string", "str", "value", "text", "secret"])
_PATH = re.compile(r"(?:[/~.]|[A-Za-z]:\\)")
_STAMPS = re.compile(
    r"(?:(?:\x1b\[[0-9;]*m)+|\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?\s|\[?\d\d:\d\d:\d\d[\d.,]*\]?\s|\([\w ]+pid=\d+[^)\n]{0,80}\)(?:\s|(?=\x1b))|\[[\w .:/=-]{1,40}\](?::\s|\s)"
    r"|(?:INFO|WARNING|WARN|ERROR|DEBUG)\b:?\s(?:[\w./-]{1,40}:\s)?|[IWEF]\d{4} [\d:.]+ +\d+ [\w.]+:\d+\] |(?:stdout|stderr)(?: \|)? |[\w.-]{1,40}\s+\| )*"
)  # fmt: skip
MARKS = " \t|│┃>+*#-"
_CONFIG_START = re.compile(
    r"(?:export|set|setx|declare|local|readonly|env|SET|let|const|var|val)?(?:[ \t]+-\w+)?[ \t]*[\"'`]?(?:\$env:|\$)?(?:[\w-]+[.:])*"
)
_VALUE_KEYS = frozenset(["value", "default", "plaintext", "content", "data", "string", "current", "text", "secret"])

NAMED = re.compile(
    r"[\s+|│>]*(?P<item>-\s+|\{\s*)?(?:\\*[\"'])?(?:name|key|Name|Key|variable|header)(?:\\*[\"'])?\s*[:=]\s*(?:\\*[\"'])?(?P<name>[\w.-]{2,128})(?:\\*[\"'])?\s*,?\s*$"
)
VALUE_LINE = re.compile(
    r"(?P<before>[\s+|│>-]*(?:\{\s*)?(?:\\*[\"'])?(?:value|Value|content|default|string)(?:\\*[\"'])?\s*[:=]\s*)(?:\"[^\"\n]*\"?|'[^'\n]*'?|\\+\"[^\n]*\\+\"|(?!\[redacted)[^\s,].*?)(?=,?\s*$)"
)  # fmt: skip
_NAMED_ANYWHERE = re.compile(
    r"(?:(?:\\*[\"'])?\b(?:name|key|Name|Key|variable|header)(?:\\*[\"'])?\s*[:=]\s*(?:\\*[\"'])?|<key>|<name>|\bvariable\s+\\*[\"'])(?P<name>[\w.-]{2,128})(?:\\*[\"']|</key>|</name>)?[\s,{]*$"
)
_VALUE_ANYWHERE = re.compile(
    r"(?P<before>(?:\\*[\"'])?\b(?:value|Value|content|default|string)(?:\\*[\"'])?\s*[:=]\s*)(?:\"[^\"\n]*\"?|'[^'\n]*'?|\\+\"[^\n]*\\+\"|(?!\[redacted)[^\s,].*?)(?=,?\s*$)"
    r"|(?P<tag><(?:string|value|data)>)(?!\[redacted)[^<\n]+"
)  # fmt: skip
_OPEN = re.compile(
    r"(?<![A-Za-z0-9_.-])(?P<name>[A-Za-z0-9_.-]{2,300})(?:(?:\\*[\"'])?\]?[ \t]{0,60}(?:=>|:=|[:=])[ \t]{0,8}(?P<opening>[|>][-+]?\d?|<<[-~]?[\"']?\w+[\"']?|\\|\"\"\"|'''|[bruf]?[\"'(\[{`])?|(?P<tag>[^<>\n]{0,100}>)|(?P<flag>(?:\\*[\"'],?)?[ \t]*\\?))\s*$"
)
_STATEMENT = re.compile(r"\s*(?:class|def|async def|if|elif|else|for|while|with|try|except|match|case)\b[^\n]*:\s*$")
_ASKED = re.compile(r"(?:\?|ipdb>|\(Pdb\+*\)|>>>|In \[\d+\]:)[ \t]+(?:pp?[ \t]+|print\()?(?P<name>[A-Za-z_][\w.]{1,100})\)?[ \t]*$")
"""A name whose value is the next line: a key of YAML, a question to a debugger."""
_FORM = re.compile(r"form-data;[^\n]{0,100}?\bname=[\"']?(?P<name>[\w.\[\]-]{2,128})[\"']?\s*$")
_ALONE = re.compile(r"[\w.]{3,100}")
_INPUT_VALUE = re.compile(r"(input_value=)(?!\[redacted)(?:'[^'\n]*'|\"[^\"\n]*\"|[^,\]\n]+)")
_NETRC = re.compile(r"^\W*(?:machine\s+\S+|default|login\s+\S+)\s*$")
_NETRC_SECRET = re.compile(r"^(?P<before>\W*(?:password|passwd|account)\s+)(?!\[redacted)(?P<value>\S+)(?=\s*$)")
_ONE_WORD = re.compile(r"^(?P<before>[\s+|│>-]*+)(?!\[redacted)\S+(?=\s*$)")
_PROSE = re.compile(r"[A-Za-z]{1,20}[.:!?]?")


def is_plain(value: str) -> bool:
    """Whether a value is a number or a word that no secret is."""
    return _PLAIN.fullmatch(value) is not None


def value_is_secret(value: str, name: str, says: Says) -> bool:
    """Whether `value` behind a name that says so much is to go."""
    if says is Says.NOTHING or value.startswith("[redacted"):
        return False
    if says is Says.WEAK:
        return looks_random(value)
    if len(value) < 4 or _same(value, name):
        return False
    if name.lower().endswith("pwd") and _PATH.match(value):
        return False
    if value.isdigit():
        return says_password(name)
    if (dotted := _DOTTED.fullmatch(value)) and not any(c.isdigit() for c in value) and says_secret(dotted[1]) is not Says.NOTHING:
        return False  # settings.api_key
    return not (_PLAIN.fullmatch(value) or _PLACEHOLDER.fullmatch(value))


def _same(value: str, name: str) -> bool:
    one, other = (text.lower().replace("-", "_").strip("_.$") for text in (value.removeprefix("self."), name))
    return one == other or (len(one) >= 3 and other.endswith(f"_{one}"))


def is_program_secret(literal: str) -> bool:
    """Whether a literal of a program, named by a secret, may be one: `changeme` and `your-key` are none."""
    return _FILLER.fullmatch(literal) is None


def mapping_secret(value: str, name: str) -> bool:
    """Whether the value of a field beside the field with this name is to go."""
    says = says_secret(name)
    return value_is_secret(value, name, says if says is not Says.NOTHING or name != "PWD" else Says.STRONG)


def assignments(text: str, lowered: str, program: bool) -> str:
    """Replace values behind names that say secret, on this line."""
    pieces: list[str] = []
    done = seen = 0
    for stem in _STEM.finditer(lowered):
        if stem.start() < seen:
            continue
        start, seen = _name_around(text, stem.start(), done)
        name = text[start:seen].strip(".-")
        says = _says(name, text, start, seen)
        if says is Says.NOTHING:
            continue
        found = _value_behind(text, start, seen, name, says, program=program)
        if found:
            pieces += (text[done : found[0]], f"[redacted:{name}]")
            done = seen = found[1]
    return "".join((*pieces, text[done:])) if pieces else text


def _says(name: str, text: str, start: int, end: int) -> Says:
    """What a name says where it stands: as a flag, as a variable of a shell, in a query or a connection string."""
    says = says_secret(name)
    bare = name.rpartition(".")[2].lower()
    if name == "pass" and _VERB.search(text[max(0, start - 12) : start]):
        return Says.WEAK
    if says is Says.NOTHING and name == "PWD":
        return (
            Says.STRONG
            if text[end : end + 1] == "=" and not _PATH.match(text, end + 1) and text[max(0, start - 1) : start] in (";", "{", '"', "'")
            else says
        )
    if says is Says.WEAK and name.isupper() and name.endswith("_TOKEN") and _SHELL_VALUE.match(text, end):
        return Says.STRONG
    if says is Says.WEAK and (text.startswith("--", start) or text.startswith("-", start)) and bare == "token":
        return Says.STRONG
    return says


def _name_around(text: str, position: int, floor: int) -> tuple[int, int]:
    """Where the name that holds this position begins and ends."""
    start, floor = position, max(floor, position - _LONGEST_NAME)
    while start > floor and text[start - 1] in _NAME_CHARACTERS:
        start -= 1
    if text[start : start + 3].lower() == "key" and text[max(floor, start - 7) : start].lower().endswith(("api ", "access ", "secret ")):
        start = text.rindex(" ", floor, start - 1) + 1 if " " in text[floor : start - 1] else floor  # "API key: …" in prose
    end = _NAME_END.match(text, position)
    return start, end.end() if end else position


def _value_behind(text: str, start: int, end: int, name: str, says: Says, *, program: bool) -> tuple[int, int] | None:
    """Where the secret behind a name stands, or None."""
    flag = text.startswith("-", start) and (not program or _in_string(text, start))
    pair = False
    between = _BETWEEN.match(text, end)
    if between is None and flag:
        between = _BETWEEN_FLAG.match(text, end)
        if between and "," in between[0] and between[0][0] in "\"'" and text[between.end() : between.end() + 1] not in ("\\", '"', "'"):
            return None  # `add_argument("--token", type=str)`: the next argument is none of the command line
    if between is None:
        pair = True
        between = _BETWEEN_PAIR.match(text, end)
        if between is None and says is Says.STRONG and not program and (name.isupper() or "." in name.strip(".") or _CELL.match(text, end)):
            between = _BETWEEN_COLUMNS.match(text, end)
            pair = pair and not (between and between[0].strip())
    if between is None and not program and says is Says.STRONG and not flag and not text[stamps(text) : start].strip(MARKS):
        between = _ALIGNED.match(text, end)
        if between and (between["value"].lower() in COLUMN_NAMES or between["value"].isupper()):
            between = None
        pair = pair and between is None
    if between is None and (text[start] == "." or name.rpartition(".")[2].lower().startswith(("set", "with"))):
        between = _BETWEEN_CALL.match(text, end)
    if between is None and not program and says is Says.STRONG:
        between = _BETWEEN_WORDS.match(text, end)
        if between and not _near_quoted(text, between.end(), name):
            between = None
        pair = pair and between is None
    if between is None and not program and (between := _BETWEEN_LOOSE.match(text, end)) and not _near(text, between.end(), name, says):
        return None
    if not between:
        return None
    begin = between.end()
    header = name.lower().rpartition(".")[2]
    if header.endswith("authorization") and (scheme := _SCHEME.match(text, begin)):
        rest = scheme.group("rest")
        return None if rest.startswith(("[redacted", "$", "{", "<")) else scheme.span("rest")
    if header.endswith("cookie") and text[begin : begin + 1] not in ("{", "[", "") and (rest_of := _HEADER_REST.match(text, begin)):
        worth = "=" in rest_of["rest"] and not rest_of["rest"].startswith(("[redacted", "$"))
        return rest_of.span("rest") if worth and not program else None
    if text.startswith("[[", begin) and (close := text.find("]]", begin)) > 0 and says is Says.STRONG:
        return None if text.startswith("[redacted", begin + 2) or text.startswith("[redacted", begin + 1) else (begin + 2, close)
    if text[begin : begin + 1] in ("{", "[", "(") and says is Says.STRONG:
        return _bracketed(text, begin) if not program or _LITERAL_FIRST.match(text, begin) else None
    # Its beginning decides, so that a line that is one long value is not read again for every name in it.
    quoted = text[begin : begin + 1] in ("\\", '"', "'") or text[begin + 1 : begin + 2] in ('"', "'")
    first = _span(text, begin, begin + (_LONGEST_PEEK if quoted else _LONGEST_WORD))
    if first is None:
        return None
    content = text[slice(*first[:2])]
    if flag and content.isupper() and content.rstrip("])").lower() in _METAVARIABLES:
        return None
    if not value_is_secret(content, name, says) or (
        pair and not (_worth(content, name) or _SETTER.search(text[max(0, start - 40) : start]))
    ):
        return None
    signed = flag and start == stamps(text) and text[start + 1 : start + 2] != "-"
    if signed and (content.endswith(":") or between[0] == "," or (not between[0].strip() and _PROSE_FOLLOWS.match(text, begin))):
        return None  # a removed line of a diff: `-token usage: 0.5`
    if program and not _program_secret(text, start, between[0], content, quoted=first[2]):
        return None
    span = _span(text, begin, len(text))
    if span is None or span[2] or program or pair or (flag and not (signed and "=" in between[0])) or says is not Says.STRONG:
        return span[:2] if span else None
    return _to_the_end(text, start, span)


def _near(text: str, begin: int, name: str, says: Says) -> bool:
    """Whether a word that stands behind a name, with nothing between, looks like its value: `password hunter22`, "the API key is …"."""
    span = _span(text, begin, begin + _LONGEST_PEEK)
    word = text[slice(*span[:2])] if span else ""
    if name.lower().endswith("authorization"):
        return _SCHEME.match(text, begin) is not None and looks_random(text[begin : begin + _LONGEST_PEEK])
    if len(word) < 8 or word.isupper() or not any(c.isdigit() for c in word) or not any(c.isalpha() for c in word):
        return False
    path = "/" in word and not (len(word) >= 32 and "." not in word and not _PATH.match(word))
    if path or any(c in word for c in ":= ") or word[0] in "-<{[":
        return False
    return (says is Says.STRONG or looks_random(word)) and (len(word) >= 32 or says_secret(word) is Says.NOTHING)


def _near_quoted(text: str, begin: int, name: str) -> bool:
    """Whether a quoted string behind a name is its value: any behind `password`, behind others what looks like a credential."""
    span = _span(text, begin, begin + _LONGEST_PEEK)
    content = text[slice(*span[:2])] if span and span[2] else ""
    if len(content) < 6 or _FILLER.fullmatch(content) or says_secret(content) is not Says.NOTHING:
        return False
    return looks_random(content) or (says_password(name) and not name[:1].isupper())


def _worth(content: str, name: str) -> bool:
    """Two quoted strings in a row are a name and its value where the name is that of a variable or a header, or the value says so."""
    return name.isupper() or "-" in name or looks_random(content) or any(c.isdigit() for c in content)


def _to_the_end(text: str, start: int, span: tuple[int, int, bool]) -> tuple[int, int]:
    """A bare value that begins a line of a configuration goes to its end: a pass phrase has several words."""
    at = stamps(text)
    while at < start and text[at] in MARKS:
        at += 1
    config: object = _CONFIG_START.fullmatch(text, at, start)
    if not config and start and text[start - 1] in "\"'":  # the first name of a string
        close = text.find(text[start - 1], span[1])
        config, text = (close > 0) or None, text[: max(close, 0)]
    rest = _REST.match(text, span[0]) if config else None
    return span[0], max(span[1], rest.end() if rest else 0)


def _program_secret(text: str, start: int, between: str, content: str, *, quoted: bool) -> bool:
    """In program text a literal is a secret; a bare word only in a string or a comment, or where no expression looks like it."""
    if quoted or _in_string(text, start):
        return not _FILLER.fullmatch(content)
    odd = any(c.isdigit() for c in content) or not content.replace("_", "").replace(".", "").isalnum()
    if re.search(r"(?:^|\s)(?:#|//|\*|--)\s", text[max(0, start - 200) : start]):  # a comment
        return odd and not _CODE_START.match(content)
    if looks_random(content) and not _CODE_START.match(content) and "." not in content:
        return True
    return ":" in between and odd and content[0].islower() and content.isalnum()


def _in_string(text: str, position: int) -> bool:
    """Whether a string is open at this position of a line of a program."""
    quote = ""
    for at in range(max(0, position - 2000), position):
        c = text[at]
        if c in "\"'" and text[at - 1 : at] != "\\" and c == (quote or c):
            quote = "" if quote else c
    # The name itself may be quoted: then the string is that of the name.
    return bool(quote) and text[position - 1 : position] != quote


def _bracketed(text: str, begin: int) -> tuple[int, int] | None:
    """What is in the brackets behind a name, where it holds a string; on one line."""
    closing = {"{": "}", "[": "]", "(": ")"}[text[begin]]
    end = _REDACTED.sub(lambda done: "-" * len(done[0]), text[: begin + 4096]).find(closing, begin)
    inside = text[begin + 1 : end if end > 0 else begin + 4096]
    literals = [literal for pair in re.findall(r"\"([^\"\n]*)\"|'([^'\n]*)'", inside) for literal in pair if literal]
    kept = all(
        literal.startswith("[redacted") or not value_is_secret(literal, "", Says.STRONG) or _FILLER.fullmatch(literal)
        for literal in literals
    )
    if kept or inside.lstrip().startswith("[redacted"):
        return None
    return begin + 1, begin + 1 + len(inside)


def _span(text: str, begin: int, end: int) -> tuple[int, int, bool] | None:
    """The inside of the value that begins here, and whether it is a literal."""
    value = _VALUE.match(text, begin, end)
    if not value:
        return None
    if value.group("string"):
        start, finish = value.span("string")
        return text.index(text[finish - 1], start) + 1 if text[finish - 1] in text[start : start + 3] else start + 1, finish - 1, True
    if value.group("mark"):
        return (*value.span("escaped"), True)
    return (*value.span("bare"), False)


class OpenNames:
    """Names whose value stands on a later line: `password:` and the value below, `name: X` and `value: y`, .netrc."""

    def __init__(self) -> None:
        self._name, self._says, self._indent, self._left, self._block = "", Says.NOTHING, 0, 0, False
        self._quoted = self._config = self._brace = self._alone = False
        self._beside, self._beside_left = "", 0
        self._netrc, self._netrc_below = 0, False

    @property
    def open(self) -> bool:
        """Whether an earlier line decides about the next one."""
        return bool(self._left or self._beside_left or self._netrc or self._alone)

    def line(self, line: str, cleared: str, *, program: bool, stem: bool = True) -> str:
        """`cleared`, the line as it is by itself, without the values that earlier lines have named; remembers what it names."""
        if not stem and not self.open and "mach" not in line and "ogin" not in line:
            return cleared
        at = stamps(line)
        return cleared[:at] + self._line(line[at:], cleared[at:], program)

    def _line(self, line: str, cleared: str, program: bool) -> str:
        if self._left:
            cleared = self._below(line, cleared, program)
        if self._beside_left:
            self._beside_left -= 1
            if "[redacted" not in cleared and (found := _VALUE_ANYWHERE.search(cleared)):
                before = found["before"] or found["tag"]
                content = cleared[found.start() + len(before) : found.end()].strip("\"'\\ ")
                if mapping_secret(content, self._beside):
                    cleared = f"{cleared[: found.start()]}{before}[redacted:{self._beside}]{cleared[found.end() :]}"
                self._beside_left = 0
        if self._alone and "input_value=" in cleared:  # pydantic: the field, then what it was given
            cleared = _INPUT_VALUE.sub(r"\1[redacted:input]", cleared)
        alone = line.strip(MARKS + "\r\n")
        self._alone = says_secret(alone) is Says.STRONG if _ALONE.fullmatch(alone) else False
        if self._netrc:
            self._netrc -= 1
            if self._netrc_below and (word := _ONE_WORD.match(cleared)):
                cleared = f"{word['before']}[redacted:netrc-password]{cleared[word.end() :]}"
            self._netrc_below = line.strip(MARKS + "\r\n") in ("password", "passwd")
            cleared = _NETRC_SECRET.sub(r"\g<before>[redacted:netrc-password]", cleared)
        elif (
            "pass" in line
            and (found := _NETRC_SECRET.match(cleared))
            and not _PROSE.fullmatch(found["value"])
            and not is_plain(found["value"])
        ):
            cleared = f"{found['before']}[redacted:netrc-password]{cleared[found.end() :]}"
        self._remember(line)
        return cleared

    def _below(self, line: str, cleared: str, program: bool) -> str:
        payload_at = indent(line)
        payload = line[payload_at:].strip()
        if not payload:
            self._left -= 1
            return cleared
        block, self._left = self._block, self._left - 1
        deeper = payload_at > self._indent
        if not block:
            self._left = 0
        elif not deeper:
            self._left = 0
            if payload[0] in "\"')]}`":
                return cleared
        content = payload.removeprefix("- ").removeprefix(": ").rstrip(",").strip("\"'`\\ ")
        content = re.sub(r"</[\w:.-]+>$", "", content).strip()
        entry = re.match(r"[\"']?([\w.-]{1,64})[\"']?\s*[:=](?:\s+|$)(?P<value>.*)", content)
        if entry and not (block and self._says is Says.STRONG and self._quoted):
            self._left, self._block = (5 if deeper else 0), True
            worth = entry["value"].strip("\"', ")
            if (entry[1].lower() in _VALUE_KEYS or self._brace) and value_is_secret(worth, self._name, self._says) and worth in cleared:
                return cleared.replace(worth, f"[redacted:{self._name}]", 1)
            return cleared
        if line[:payload_at].rstrip().endswith(("-", "*")):  # an item of a list
            self._left, self._block = max(self._left, 5), True
        single = len(content.split()) == 1
        if not value_is_secret(content, self._name, self._says) or content.startswith(("Traceback", "File ", "[redacted", "#", "//", "<")):
            return cleared
        if program and not (payload[0] in "\"'" or (self._quoted and block) or (single and looks_random(content))):
            return cleared
        if not self._config and not (single and any(c.isdigit() for c in content)):
            return cleared  # a sentence ends with the name; what follows is most likely the next one
        if not deeper and payload[0] not in "\"'" and (not single or _PROSE.fullmatch(content)):
            return cleared
        at = line.find(content, payload_at)
        return f"{line[:at]}[redacted:{self._name}]{line[at + len(content) :]}" if at >= 0 else cleared

    def _remember(self, line: str) -> None:
        if ("machine" in line or "login" in line or "default" in line) and _NETRC.match(line):
            self._netrc = 4
        tail = line[-300:].rstrip()
        if not has_stem(tail.lower()):
            return
        if found := _ASKED.match(tail.lstrip(MARKS)) or _FORM.search(tail):
            self._name, self._says = found["name"].strip("[]"), says_secret(found["name"].strip("[]"))
            self._left = 0 if self._says is Says.NOTHING else 3
            self._indent, self._config, self._block, self._quoted, self._brace = -1, True, False, False, False
            return
        if found := _NAMED_ANYWHERE.search(tail):
            if says_secret(found["name"]) is not Says.NOTHING:
                self._beside, self._beside_left = found["name"], 4
            return
        found = None if _STATEMENT.match(line) else _OPEN.search(tail)
        if not found:
            return
        name, opening = found["name"].strip(".-"), found["opening"] or ""
        says = says_secret(name)
        if says is Says.NOTHING or (found["flag"] is not None and not found["name"].startswith("-")):
            return
        if found["tag"] is not None and f"<{name}" not in tail and not re.search(rf"<[\w:.-]*{re.escape(name)}", tail):
            return
        self._name, self._says, self._indent = name, says, indent(line)
        before = line[: len(line.rstrip()) - len(tail) + found.start()].strip(MARKS + "\"'`<{[(?!")
        self._config = (
            before in ("", "export", "set", "declare", "local", "readonly", "env", "let", "const", "var")
            or bool(opening)
            or found["flag"] is not None
        )
        self._brace = opening == "{"
        self._block = opening not in ("", "\\") and not opening.startswith("<<")
        self._quoted = opening in ("|", ">", "|-", ">-", '"""', "'''", '"', "'")
        self._left = 40 if self._block else 2


def stamps(line: str) -> int:
    """How long the stamps are that a log puts before a line: times, levels, processes."""
    found = _STAMPS.match(line)
    return found.end() if found else 0


def indent(line: str) -> int:
    return len(line) - len(line.lstrip(MARKS))
