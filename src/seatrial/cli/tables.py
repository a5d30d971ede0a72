"""What is wrong in a TOML file, in the user's words: the table and the key, the message, and known keys for an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seatrial.model.guarded import BadValue, parse_toml

if TYPE_CHECKING:
    from pydantic import BaseModel

_WORDS = {
    "tuple_type": "a list is meant",
    "list_type": "a list is meant",
    "model_type": "a table is meant",
    "dict_type": "a table is meant",
}
_EXAMPLES = {"mounts": '"/source:/target"', "name": '"small-letters-and-digits"', "time": '"4:00:00"', "url": '"https://host/v1"'}


def read_toml(file: Path) -> dict[str, Any]:
    """The file as data, or a UserError that names file and line."""
    from seatrial.files import read_text
    from seatrial.model.errors import UserError

    try:
        return parse_toml(read_text(file))
    except BadValue as error:
        raise UserError(f"{file}: {error}", "correct the file") from error


def place_of(data: Any, path: tuple[int | str, ...]) -> str:
    """`jobs.collect.components.server.gpus`: tables of a list by their names, where they have one."""
    words = []
    for step in path:
        try:
            data = data[step]
        except (LookupError, TypeError):
            data = None
        named = isinstance(step, int) and isinstance(data, dict) and "name" in data
        words.append(str(data["name"] if named else step))
    return ".".join(words) or "(the file)"


def message_of(error: Any) -> str:
    """pydantic's error in words of a TOML file."""
    if error["type"] in ("extra_forbidden", "missing"):
        return "unknown key" if error["type"] == "extra_forbidden" else "is missing"
    if error["type"] in _WORDS:
        return f"{_WORDS[error['type']]} (got {error['input']!r})"
    if error["type"] == "string_pattern_mismatch":
        keys = [word for word in error["loc"] if word in _EXAMPLES]
        example = f"; an example is {_EXAMPLES[keys[-1]]}" if keys else f" (it must match {error['ctx']['pattern']})"
        return f"{error['input']!r} cannot stand here{example}"
    got = "" if error["type"] == "value_error" else f" (got {error['input']!r})"
    return str(error["msg"]).removeprefix("Value error, ") + got


def fix_of(error: Any, tables: Mapping[str, type[BaseModel]], whole: type[BaseModel], page: str) -> str:
    """Known keys of the table for an unknown one, else where to read on; `tables` by the names of keys that hold them."""
    if error["type"] != "extra_forbidden":
        named = [word for word in error["loc"] if isinstance(word, str)]
        return f"correct {named[-1]}; {page} lists the keys" if named else f"correct the file; {page} shows how"
    outer = [word for word in error["loc"][:-1] if word in tables]
    known = list(tables[outer[-1]].model_fields if outer else whole.model_fields)
    close = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
    return f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"
