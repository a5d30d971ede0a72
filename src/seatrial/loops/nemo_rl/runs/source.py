"""What the Python code of a NeMo-RL checkout can read of a configuration, found by search: nothing is imported.

NeMo-RL takes any key that is added with `++`, and leftover keys of its YAML files, whether its code reads them or not.
Two signs tell that none does, and both are sure: names that no code holds; and names that the classes of the
configuration declare only in other sections, and that no code looks up by their text.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from seatrial.files import read_text

FOLDERS = ("nemo_rl", "examples")
PASSED_ON = (
    *("data", "env", "env_vars", "hf_config_overrides", "nemo_gym", "optimizer", "scheduler", "freeze_config"),
    *("wandb", "swanlab", "mlflow", "tensorboard"),
)
"""Sections that are handed on whole to other code: their keys need not occur in NeMo-RL. So are those named `…kwargs`."""
_SILENT = re.compile(r"^[ \t]*#.*$|(\"\"\"|''')[\s\S]*?\1", re.MULTILINE)
"""Comments on lines of their own, and texts of several lines: a name in them is not read."""
_WORD = re.compile(r"[A-Za-z_]\w*")
_QUOTED = re.compile(r"[\"'](\w+)[\"']")
_CLASS = re.compile(r"^class (\w+)\(([^)]*)\):((?:\n(?:[ \t][^\n]*)?)*)", re.MULTILINE)
_FIELD = re.compile(r"^    (\w+): ((?:[^\n=\[]|\[[^\]]*\])*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Source:
    """The names in the code."""

    words: frozenset[str]
    quoted: frozenset[str]
    """Names that stand alone between quotation marks: keys of a dictionary, perhaps."""
    sections: Mapping[str, frozenset[str]]
    """The sections that declare a key, by the name of the key."""

    def unread(self, key: str, added: str | None) -> str | None:
        """Why no code reads a dotted key, or None; `added` is the first part of it that no YAML file has."""
        parts = list(_own_parts(key))
        unknown = [part for part in parts if part not in self.words]
        if unknown:
            return f"nothing in this checkout reads {unknown[0]}"
        first = sum(not part.isdecimal() for part in added.split(".")) - 1 if added else len(parts)
        for place, (section, name) in enumerate(pairwise(parts), 1):
            if place < first or name in self.quoted:
                continue
            declared = self.sections.get(name, frozenset())
            if declared and section not in declared:
                return f"nothing in this checkout reads {name} below {section} (it belongs below {', '.join(sorted(declared))})"
        return None


def _own_parts(key: str) -> Iterator[str]:
    """The parts of a key that NeMo-RL itself must know: up to a section that is handed on; numbers are places in a list."""
    for part in key.split("."):
        if not part.isdecimal():
            yield part
        if part in PASSED_ON or part.endswith("kwargs"):
            return


@lru_cache(maxsize=8)
def read_source(checkout: Path) -> Source:
    """Read the code of a checkout once; it does not change while a trial is planned."""
    texts = [_SILENT.sub("", read_text(path)) for folder in FOLDERS for path in (checkout / folder).rglob("*.py")]
    words = frozenset(word for text in texts for word in _WORD.findall(text))
    quoted = frozenset(word for text in texts for word in _QUOTED.findall(text))
    return Source(words, quoted, _sections(texts))


def _sections(texts: list[str]) -> Mapping[str, frozenset[str]]:
    """Which sections declare a key: fields whose type names a class that has it, itself or by inheritance."""
    bases: dict[str, set[str]] = defaultdict(set)
    fields: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, parents, body in (match for text in texts for match in _CLASS.findall(text)):
        bases[name] |= set(_WORD.findall(parents))
        for field, kind in _FIELD.findall(body):
            fields[name][field] |= set(_WORD.findall(kind))
    kin = {name: _ancestors(name, bases) for name in bases}
    made: dict[str, set[str]] = defaultdict(set)
    for field, kind in ((field, kind) for each in fields.values() for field, kind in each.items()):
        for relative in (other for named in kind & kin.keys() for other in kin if other in kin[named] or named in kin[other]):
            for key in fields.get(relative, {}):
                made[key].add(field)
    return {key: frozenset(value) for key, value in made.items()}


def _ancestors(name: str, bases: Mapping[str, set[str]]) -> set[str]:
    """A class and what it is derived from."""
    found, left = set[str](), [name]
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += [base for base in bases.get(one, ()) if base in bases]
    return found
