"""Recorded text in Markdown: summary.md, step summaries and tables, on GitHub and elsewhere.

- Everything recorded (a line of a log, a name, a reason) goes through `prose`, `cell` or `code`. It stays readable as plain text, and
  can be no markup: no HTML, link, image, heading, list, table, fence or emphasis of its own.
- Code in backticks stays code. What GitHub makes more of becomes code, too: an address of the web or of a person, which would be a
  link, a mention (`@name`) and a reference (`#12`), which would call somebody, a picture (`:100:`, as in `train.py:100:`), and a path
  that would be emphasis (`a/__init__.py`).
- Text stays on its line, shows hidden characters (see `text.visible`), and is cut at `LONGEST`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from seatrial.core.records import Matrix, Measured, Rerun, settings
from seatrial.core.text import number, one_line

LONGEST = 4000
"""Characters of one recorded text; the run directory has the rest."""
_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
_TAKEN = re.compile(
    r"""
    (?<![A-Za-z])(?i:(?:https?|ftp)://|www\.|mailto:|xmpp:)[^\s`]+    # a link
    | (?<![\w.+-])[\w.+-]+@[\w-]+\.[\w.@+-]*\w                         # a mail address
    | [^\s`]{0,100}:(?:[a-z][a-z0-9_+-]*|100|1234|[+]1|-1)(?:(?=:(?:\s|$))|:[^\s`]*)    # a picture
    | (?<![\w@])@\w[\w/-]*                                              # a mention
    | (?<![\w&/.-])(?:[\w.-]+/[\w.-]+)?\#\d+\b | \bGH-\d+\b            # an issue
    | (?<![\w./-])[\w./-]*(?:(?<![^\W_])_|_(?![^\W_]))[\w./-]*          # a path such as a/__init__.py, which would be emphasis
    """,
    re.VERBOSE,
)
"""Words that GitHub, or any Markdown, would take for more than words; they become code."""
_MARKUP = re.compile(
    r"""
    \\(?=[!-/:-@\[-`{-~]|$)          # a backslash that would escape what follows
    | `
    | (?<!\ )\*|\*(?!\ )             # emphasis, not a product
    | (?<![^\W_])_|_(?![^\W_])
    | \|
    """,
    re.VERBOSE,
)
_START = re.compile(r"(\d+)([.)])(?=\s|$)|([#>+=\[-])")


def prose(sentence: str) -> str:
    """A sentence: code stays code, everything else is plain words."""
    return "".join(code(text) if is_code else _plain(text, begins) for is_code, text, begins in _cut_up(_short(sentence)))


def cell(sentence: str) -> str:
    """The same in a table, where a bar ends a cell even in code."""
    return re.sub(r"(?<!\\)\|", r"\\|", prose(sentence))


def code(text: str) -> str:
    """Recorded text as a piece of code in a sentence."""
    text = _short(text)
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if longest else ""
    return f"{fence}{pad}{text}{pad}{fence}" if text else ""


def pieces(sentence: str) -> Iterator[tuple[bool, str]]:
    """A sentence cut into code (True) and words (False)."""
    return ((is_code, text) for is_code, text, _ in _cut_up(sentence))


def _cut_up(sentence: str) -> Iterator[tuple[bool, str, bool]]:
    """The same, and whether a piece begins the sentence."""
    done = 0
    for found in _CODE.finditer(sentence):
        yield False, sentence[done : found.start()], not done
        yield True, found[2].strip() if len(found[1]) > 1 else found[2], False
        done = found.end()
    yield False, sentence[done:], not done


def _short(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST].rstrip()} … ({len(text) - LONGEST} characters more)"


def _plain(text: str, begins: bool) -> str:
    done, made = 0, ""
    for called in _TAKEN.finditer(text):
        made += _escaped(text[done : called.start()]) + code(called[0])
        done = called.end()
    made += _escaped(text[done:])
    if begins and (block := _START.match(made)):  # it would begin a block of its own
        return made[: block.end(1)] + "\\" + made[block.end(1) :] if block[1] else f"\\{made}"
    return made


def _escaped(text: str) -> str:
    text = _MARKUP.sub(r"\\\g<0>", text)
    if "](" in text:
        text = re.sub(r"[\[\]]", r"\\\g<0>", text)
    for twice in "~$":
        text = text.replace(twice, f"\\{twice}") if text.count(twice) > 1 else text
    text = re.sub(r"&(?=#?\w+;)", "&amp;", text)
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)


def matrix_md(matrix: Matrix) -> str:
    """The matrix; recorded texts are no markup, and cannot end a line or a cell."""
    head = [
        f"Isolation of level {matrix.level}, {prose(matrix.title)}, of {prose(matrix.trial)}",
        "",
        *(f"- {prose(text)}" for text in matrix.conclusion),
        "",
        "| run | settings | verdict | original failure | missed check | reason | log |",
        "|---|---|---|---|---|---|---|",
        _row("original", "", f"{matrix.verdict}", "", matrix.measured, matrix.reason, matrix.log),
    ]
    return "\n".join([*head, *(_rerun(item) for item in matrix.reruns)]) + "\n"


def _rerun(item: Rerun) -> str:
    verdict = "not run" if item.verdict is None else str(item.verdict)
    if item.reduced and item.verdict == "Pass":
        verdict = "reduced-optimization pass"
    failure = f"{item.failure} ({item.note})" if item.note else item.failure
    return _row(item.name, settings(item.arguments, item.options), verdict, failure, item.measured, item.reason, item.log)


def _row(name: str, changed: str, verdict: str, failure: str, measured: Measured | None, reason: str, log: str) -> str:
    missed = f"{measured.name}: {number(measured.value)}" if measured else ""
    return f"| {' | '.join(map(cell, (name, changed, verdict, failure, missed, reason, log)))} |"
