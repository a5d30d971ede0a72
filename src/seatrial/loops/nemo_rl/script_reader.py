"""Reads NeMo-RL's shell scripts without running them: commands, variables with literal values, and assertions on metrics.

What cannot be known without running the script is reported as unread, never guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from seatrial.checks.probe_facts import read_facts
from seatrial.core.files import read_text
from seatrial.core.specs import CheckSpec, Level

KEPT = "\ue000"
"""Stands for a `$` that the shell does not expand."""
HERE = re.compile(r"(?<!<)<<(?!<)-?[ \t]*(['\"]?)(\w+)\1([^\n]*\n).*?^[ \t]*\2[ \t]*$", re.DOTALL | re.MULTILINE)
DEPTH = 4
"""Parentheses within each other that are followed."""


def _between(depth: int) -> str:
    """The pattern of what stands between two parentheses; possessive, for a text that does not fit must not be tried in many ways."""
    deeper = rf"|\({_between(depth - 1)}\)" if depth else ""
    return rf"""(?:[^()'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*+"{deeper})*+"""


OUTPUT = re.compile(rf"\$\(({_between(DEPTH)})\)", re.DOTALL)
"""The output of a command, or a sum."""
LEXEME = re.compile(
    rf"""(?P<skipped>\\\n|(?<![^\s;|&()])\#[^\n]*|\d*>&\d) | \\(?P<escaped>.) | '(?P<single>[^']*)'
    | "(?P<double>(?:[^"\\$]|\\.|\$\({_between(DEPTH)}\)|\$)*+)" | (?P<output>\$\({_between(DEPTH)}\))
    | (?P<blank>[ \t]+) | (?P<end>\n|;;?|&&|\|\|?|&(?!>)|[()]) | (?P<plain>\$\{{[^}}\n]*\}}|[^\s\\'";|&()$]+|.)""",
    re.VERBOSE | re.DOTALL,
)
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
ARRAY = re.compile(r"\$\{(\w+)\[@\]\}")
ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
UNKNOWN = re.compile(r"\$\(|`|\$$")
"""In a value: the output of a command."""
LEADING = ("then", "else", "do", "{", "!", "time")
ASKING = ("if", "elif", "while", "until")
"""What stands before a command whose exit code decides."""
DECLARING = ("local", "export", "readonly", "declare")
BRANCHES = ("if", "case", "while", "until")
CLOSING = ("fi", "esac", "done")

Values = dict[str, tuple[str, ...]]
"""The words that a variable stands for: one, or those of an array."""


@dataclass(frozen=True, slots=True)
class Command:
    """The words of a simple command, and the mark that ends it. An array is the words `NAME=(`, its members, and `)`."""

    words: tuple[str, ...]
    end: str = "\n"


def commands(text: str) -> Iterator[Command]:
    words: list[str] = []
    word: str | None = None
    array = False
    for match in LEXEME.finditer(HERE.sub(lambda here: here[3], text) + "\n"):
        kind, mark = match.lastgroup, match[0]
        if kind == "skipped":
            continue
        if kind not in ("blank", "end"):
            if kind in ("double", "output"):
                yield from _inside(mark)
            word = (word or "") + _unquoted(match)
            continue
        opens = mark == "(" and not array and word is not None and word.endswith("=")
        if word is not None:
            words.append(word + "(" if opens else word)
            word = None
        if array and mark == ")":
            words.append(mark)
        elif not array and not opens and kind == "end":
            yield Command(tuple(words), mark)
            words = []
        array = opens or (array and mark != ")")


def _inside(mark: str) -> Iterator[Command]:
    """The commands whose output stands in a lexeme; a sum, `$((…))`, has none."""
    for found in OUTPUT.finditer(mark):
        if not found[1].startswith("("):
            yield from commands(found[1])


def _unquoted(match: re.Match[str]) -> str:
    if match["double"] is not None:
        return re.sub(r"\\([\"\\$`])", lambda pair: pair[1].replace("$", KEPT), match["double"])
    fixed = match["single"] if match["single"] is not None else match["escaped"]
    return fixed.replace("$", KEPT) if fixed is not None else match[0]


def expand(word: str, values: Values) -> tuple[str, ...]:
    """What a word stands for: several words where it is an array."""
    if (match := ARRAY.fullmatch(word)) and match[1] in values:
        return values[match[1]]
    return (VARIABLE.sub(lambda found: " ".join(values.get(found[1] or found[2], (found[0],))), word),)


@dataclass(slots=True)
class Reader:
    """Goes through a script once and calls `seen` with the words of each command, once for each set of known values."""

    seen: Callable[[tuple[str, ...]], None]
    functions: dict[str, Sequence[Command]] = field(default_factory=dict)
    active: list[str] = field(default_factory=list)
    reached: set[Command] = field(default_factory=set)
    """Commands that were come to; those of a function that nobody is known to call are not."""

    def read(self, text: str) -> None:
        self._run(tuple(commands(text)), [{}])

    def _run(self, script: Sequence[Command], known: list[Values]) -> None:
        blocks: list[str] = []
        at = 0
        while at < len(script):
            if name := _defined(script, at):
                body = _body(script, at + 2)
                self.functions[name] = body
                at += 2 + len(body)
                continue
            words = _bare(script[at].words)
            self.reached.add(script[at])
            at += 1
            if not words:
                continue
            if words[0] in (*BRANCHES, "for"):
                blocks.append(words[0])
            elif words[0] in CLOSING and blocks:
                blocks.pop()
            known = _loop(words, known) if words[0] == "for" else known
            sure = not any(block in BRANCHES for block in blocks)
            if own := without_keywords(words):
                for values in known:
                    self._command(own, values, sure)

    def _command(self, words: tuple[str, ...], values: Values, sure: bool) -> None:
        if words[0].endswith("=("):
            _assign(values, words[0][:-2], tuple(part for word in words[1:-1] for part in expand(word, values)), sure)
            return
        rest = words[1:] if words[0] in DECLARING else words
        pairs = [(match[1], match[2]) for word in rest if (match := ASSIGNMENT.fullmatch(word))]
        if len(pairs) == len(rest) or words[0] in DECLARING:
            for name, value in pairs:
                _assign(values, name, expand(value, values), sure)
            return
        called = tuple(part for word in words for part in expand(word, values))
        if called[0] == "read" and "<<<" in called:
            names = [word for word in called[1 : called.index("<<<")] if not word.startswith("-")]
            for name, value in zip(names, " ".join(called[called.index("<<<") + 1 :]).split(), strict=False):
                _assign(values, name, (value,), sure)
        elif called[0] in self.functions and called[0] not in self.active:
            self.active.append(called[0])
            self._run(self.functions[called[0]], [values | {str(number): (word,) for number, word in enumerate(called[1:], 1)}])
            self.active.pop()
        else:
            self.seen(tuple(word.replace(KEPT, "$") for word in called))


def _assign(values: Values, name: str, words: tuple[str, ...], sure: bool) -> None:
    """Set a variable; one that has no literal value, or perhaps another one, is not known."""
    if any(UNKNOWN.search(word) for word in words) or not (sure or values.get(name) == words):
        values.pop(name, None)
    else:
        values[name] = words


def _bare(words: tuple[str, ...], keywords: Sequence[str] = LEADING) -> tuple[str, ...]:
    while words and words[0] in keywords:
        words = words[1:]
    return words


def without_keywords(words: tuple[str, ...]) -> tuple[str, ...]:
    """A command alone: also without what asks for its exit code."""
    return _bare(words, (*LEADING, *ASKING))


def _loop(words: tuple[str, ...], known: list[Values]) -> list[Values]:
    """The known values of each round of a `for`; where its words are not known, neither is its variable."""
    if len(words) < 4 or words[2] != "in":
        return known
    made = []
    for values in known:
        rounds = [part for word in words[3:] for part in expand(word, values)]
        if any("$" in part or "*" in part for part in rounds):
            made.append({name: value for name, value in values.items() if name != words[1]})
        else:
            made += [values | {words[1]: (part,)} for part in rounds]
    return made


def _defined(script: Sequence[Command], at: int) -> str | None:
    """The name of the function whose definition begins here: `name`, `(`, `)`."""
    head = script[at : at + 2]
    if len(head) == 2 and len(head[0].words) == 1 and head[0].end == "(" and not head[1].words and head[1].end == ")":
        return head[0].words[0]
    return None


def _body(script: Sequence[Command], at: int) -> Sequence[Command]:
    """The commands from here to the brace that closes the first one."""
    depth = 0
    for index in range(at, len(script)):
        first = script[index].words[:1]
        depth += (first == ("{",)) - (first == ("}",))
        if depth == 0 and script[index].words:
            return script[at : index + 1]
    return script[at:]


CHECKER = "check_metrics.py"
WIDTH = "--table-width"
"""The checker's only option, which takes a value."""
FACTS = Path("imports") / "facts.jsonl"
PLAIN_RUN = "run"
"""The phase whose metrics have no prefix."""
TAG = re.compile(r"""\bdata\[\s*(["'])""")
SAYING = ("echo", "printf", "[", "[[", "test")
"""Commands that mention a file and do not run it."""
REDIRECTION = re.compile(r"\d*[<>]")
CASE = re.compile(r"\$\{?EXP_(?:NAME|DIR)\}?/([\w.-]+)/metrics\.json")


def assertions_in(script: Path) -> tuple[str, ...]:
    """The expressions that a script hands to the checker, each once, in order."""
    return tuple(dict.fromkeys(prefixed(expr, f"{case}/" if case else "") for case, expr in _read(script)))


def unread(script: Path, handed: Iterable[str]) -> list[str]:
    """Of the expressions that the shell really handed to the checker: those that `assertions_in` does not have, or has of fewer
    cases. They would never be evaluated."""
    return list((Counter(handed) - Counter(expr for _, expr in _read(script))).elements())


def _read(script: Path) -> list[tuple[str, str]]:
    """Case ("" is the only one) and expression of each, as often as they are handed to the checker."""
    found: list[tuple[str, str]] = []

    def seen(words: tuple[str, ...]) -> None:
        if (call := called(words)) is not None:
            case = CASE.search(call.metrics)
            found.extend((case[1] if case else "", expr) for expr in call.expressions)

    Reader(seen).read(read_text(script))
    return found


def unexpanded(expressions: tuple[str, ...] | list[str]) -> list[str]:
    return [expr for expr in expressions if "$" in expr]


def own_checks(level: Level, directory: Path) -> tuple[CheckSpec, ...]:
    """The assertions of the scripts that a level ran, but those that the level makes itself. One that was not expanded is no
    check, but a missed proof."""
    made: dict[str, CheckSpec] = {}
    known = {check.expr for check in level.checks}
    for row in read_facts(directory / FACTS).of("assertions"):
        for expr in row["expressions"]:
            text = prefixed(expr, "" if row["phase"] == PLAIN_RUN else f"{row['phase']}/")
            if text not in known and not unexpanded([text]):
                made[text] = CheckSpec(expr=text, why=f"{PurePosixPath(row['script']).name} asserts it itself")
    return tuple(made.values())


def prefixed(expr: str, prefix: str) -> str:
    """An expression about tags with a prefix."""
    return TAG.sub(lambda match: f"data[{match[1]}{prefix}", expr)


@dataclass(frozen=True, slots=True)
class CheckerCall:
    metrics: str
    """"" where none is given."""
    expressions: tuple[str, ...]


def called(words: tuple[str, ...]) -> CheckerCall | None:
    """The call of the checker that a command is; None for another command."""
    at = next((index for index, word in enumerate(words) if PurePosixPath(word).name == CHECKER), None)
    if at is None or words[0] in SAYING:
        return None
    given = list(words[at + 1 :])
    if WIDTH in given:
        del given[given.index(WIDTH) : given.index(WIDTH) + 2]
    stop = next((index for index, word in enumerate(given) if REDIRECTION.match(word)), len(given))
    return CheckerCall(given[0] if stop else "", tuple(given[1:stop]))


def read_calls(text: str, seen: Callable[[tuple[str, ...]], None]) -> list[str]:
    """Read a script, command by command, to `seen`; what mentions the checker and is unreadable is given back as it is written."""
    empty: list[str] = []

    def seen_too(words: tuple[str, ...]) -> None:
        if (call := called(words)) is not None and not call.expressions:
            empty.append(" ".join(words))
        seen(words)

    reader = Reader(seen_too)
    reader.read(text)
    bodies = [text[here.end(3) : here.end()] for here in HERE.finditer(text)]
    hidden = [line.strip() for body in bodies for line in body.splitlines() if CHECKER in line]
    unread = [" ".join(one.words) for one in commands(text) if _mentions(one) and (one not in reader.reached or _within(one))]
    return list(dict.fromkeys((*hidden, *unread, *empty)))


def _mentions(command: Command) -> bool:
    own = without_keywords(command.words)
    return any(CHECKER in word for word in own) and own[0] not in SAYING


def _within(command: Command) -> bool:
    """Whether the checker stands inside of a word (`bash -c "… check_metrics.py …"`), other than in a command that is read on its own."""
    rests = [OUTPUT.sub("", word) for word in command.words]
    return any(CHECKER in rest and PurePosixPath(rest).name != CHECKER for rest in rests)
