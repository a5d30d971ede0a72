"""What NeMo-RL's own scripts assert about their metrics, as checks.

- `assertions_in` reads a script without running it: the expressions of its `check_metrics.py` calls. A shell variable
  whose value is not known stays in them as it is written: nobody may take that for something that was evaluated.
- What mentions the checker and cannot be read as a call of it, or asserts nothing, is `unreadable`: it must be told, never left out.
- A script that runs several cases has a metrics file in a folder for each: the folder goes before the tags.
- `own_checks` takes the expressions from the facts of a level, and puts the phase before the tags.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from seatrial.files import read_text
from seatrial.loops.facts import read_facts
from seatrial.loops.nemo_rl.runs.shell import HERE, OUTPUT, Command, Reader, commands, without_keywords
from seatrial.model.knowledge import CheckSpec, Level

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
    """Those that hold a shell variable whose value is not known."""
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
class Call:
    """One call of the checker, as it is written."""

    metrics: str
    """"" where none is given."""
    expressions: tuple[str, ...]


def called(words: tuple[str, ...]) -> Call | None:
    """The call of the checker that a command is; None for another command."""
    at = next((index for index, word in enumerate(words) if PurePosixPath(word).name == CHECKER), None)
    if at is None or words[0] in SAYING:
        return None
    given = list(words[at + 1 :])
    if WIDTH in given:
        del given[given.index(WIDTH) : given.index(WIDTH) + 2]
    stop = next((index for index, word in enumerate(given) if REDIRECTION.match(word)), len(given))
    return Call(given[0] if stop else "", tuple(given[1:stop]))


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
