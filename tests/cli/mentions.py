"""What a text for people or agents says of the command line, held against the command line itself.

- A line of a code block that calls `seatrial` must parse as it stands: command, flags, arguments, loop, levels, environment.
- Inline code that begins with `seatrial` must name a command, and flags that this command has.
- Inline code that begins with a flag must name one that some command has.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import typer.main

from seatrial import loops
from seatrial.cli import main
from seatrial.core.errors import UserError
from seatrial.trial.plan import parse_levels

FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
FLAG = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
ENDS = {"|", "&&", "||", ";", ">"}
UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""What a wrong command line raises; typer exports only one kind of it."""


def problems(text: str) -> list[str]:
    """Everything that a text says of the command line and that is not so."""
    blocks = FENCE.findall(text)
    inline = INLINE.findall(FENCE.sub("", text))
    found = [_whole(words) for block in blocks for words in calls(block)]
    found += [_mention(code) for code in inline if re.match(r"seatrial( |$)|--?[A-Za-z]", code)]
    return [problem for problem in found if problem]


def calls(block: str) -> Iterator[list[str]]:
    """The words behind each `seatrial` of a code block."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while "seatrial" in words:
            words = words[words.index("seatrial") + 1 :]
            end = next((place for place, word in enumerate(words) if word in ENDS), len(words))
            yield words[:end]


def resolve(words: Sequence[str]) -> tuple[Any, list[str]]:
    """The command that words name, and what is left of them; a group when they stop there."""
    found, rest = root(), list(words)
    while rest and hasattr(found, "get_command") and not (rest[0].startswith("-") and runs_alone(found)):
        inner = found.get_command(typer.Context(found), rest[0])
        if inner is None:
            raise LookupError(f"no command {rest[0]!r}")
        found, rest = inner, rest[1:]
    return found, rest


def runs_alone(command: Any) -> bool:
    """Whether a command does something without a further one."""
    return not hasattr(command, "get_command") or bool(command.invoke_without_command)


@cache
def root() -> Any:
    """The whole command line."""
    return typer.main.get_command(main.app)


def flags(command: Any) -> set[str]:
    """Every flag of a command."""
    return {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts) if flag.startswith("-")} | {
        "--help"
    }


@cache
def all_flags() -> frozenset[str]:
    """Every flag of any command."""
    commands = [resolve([name])[0] for name in main.COMMANDS]
    groups = [group for group in commands if hasattr(group, "list_commands")]
    commands += [
        group.get_command(context, name) for group in groups for context in [typer.Context(group)] for name in group.list_commands(context)
    ]
    return frozenset({flag for command in (root(), *commands) for flag in flags(command)})


def _whole(words: list[str]) -> str | None:
    """What is wrong with a call that is to be typed as it stands."""
    call = f"seatrial {shlex.join(words)}"
    try:
        command, rest = resolve(main.split_arguments(words)[0])
        if not runs_alone(command):
            return f"{call}: no command"
        given = command.make_context(command.name, rest).params
        _require_known(words[0], given)
    except (LookupError, UserError, UsageError) as error:
        return f"{call}: {error}"
    return None


def _require_known(name: str, given: dict[str, Any]) -> None:
    """A loop, its levels and its options, or an environment, that a call names must exist."""
    if name == "env" and given.get("name") and given["name"] not in loops.environments():
        raise LookupError(f"no environment {given['name']!r}")
    if given.get("loop"):
        loop = loops.get_loop(given["loop"])
        if given.get("level") is not None:
            parse_levels(str(given["level"]), loop)
        options = {text.partition("=")[0].removeprefix("options.") for text in given.get("settings") or () if text.startswith("options.")}
        options |= {text.partition("=")[0] for text in given.get("opt") or ()}
        if unknown := options - {option.name for option in loop.options}:
            raise LookupError(f"no option {', '.join(unknown)}")


def _mention(code: str) -> str | None:
    """What is wrong with code that stands in a sentence; it may be a part of a call."""
    ours = main.split_arguments(code.removeprefix("seatrial").split())[0]
    named = set(FLAG.findall(" ".join(ours)))
    try:
        known = flags(resolve([word for word in ours if word != "…"])[0]) if code.startswith("seatrial") else all_flags()
    except LookupError as error:
        return f"{code}: {error}"
    return f"{code}: no flag {', '.join(sorted(named - known))}" if named - known else None
