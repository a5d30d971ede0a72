"""What NeMo-RL's own scripts assert about their metrics, as checks.

- `assertions_in` reads a script without running it: the expressions of its `check_metrics.py` calls. A shell variable
  whose value is not known stays in them as it is written: nobody may take that for something that was evaluated.
- A script that runs several cases has a metrics file in a folder for each: the folder goes before the tags.
- `own_checks` takes the expressions from the facts of a level, and puts the phase before the tags.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from seatrial.files import read_text
from seatrial.loops.facts import read_facts
from seatrial.loops.nemo_rl.runs.shell import Reader
from seatrial.model.knowledge import CheckSpec, Level

CHECKER = "check_metrics.py"
WIDTH = "--table-width"
"""The checker's only option, which takes a value."""
FACTS = Path("imports") / "facts.jsonl"
PLAIN_RUN = "run"
"""The phase whose metrics have no prefix."""
TAG = re.compile(r"""\bdata\[\s*(["'])""")
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
        found.extend(_expressions(words))

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


def expressions(words: tuple[str, ...]) -> list[str]:
    """The expressions of one call of the checker, as they are handed over."""
    return [expr for _, expr in _expressions(words)]


def _expressions(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """What follows the metrics file in a call of the checker, with the case of that file."""
    called = next((index for index, word in enumerate(words) if PurePosixPath(word).name == CHECKER), None)
    if called is None:
        return []
    given = list(words[called + 1 :])
    if WIDTH in given:
        del given[given.index(WIDTH) : given.index(WIDTH) + 2]
    stop = next((index for index, word in enumerate(given) if REDIRECTION.match(word)), len(given))
    case = CASE.search(given[0]) if given else None
    return [(case[1] if case else "", expr) for expr in given[1:stop]]
