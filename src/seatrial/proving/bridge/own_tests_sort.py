"""Which failures of the Bridge's own tests are the change's: by signature, and by what the same tests did at the base.

- A test that passed at the base and fails now is the change's, whatever its message says; so is a file that no longer collects.
- Else a message that says what this machine lacks (own_tests.toml, or a package) means that the test was not run.
- Else a test that failed in the same way at the base is pre-existing; everything that is left is the change's.
- A module of the checkout itself that is missing, and a name that cannot be imported, are never the machine's.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from seatrial.files import read_text
from seatrial.model.record import Record
from seatrial.report.text import generic
from seatrial.trial.sides import Case

SIGNATURES = Path(__file__).with_name("own_tests.toml")
Kind = Literal["real", "not run", "pre-existing"]
_MODULE = re.compile(r"(?:ModuleNotFoundError|ImportError): (?:.*: )?No module named '([\w.]+)'")
_BADNESS = ("passed", "skipped", "failed", "error")


class Named(Record):
    """One failure, and what it is put down to."""

    name: str
    message: str
    why: str


@dataclass(frozen=True, slots=True)
class Signature:
    """A message that says what a machine lacks."""

    id: str
    part: str
    pattern: str
    ambiguous: bool = False


@cache
def signatures() -> tuple[Signature, ...]:
    """Those of own_tests.toml."""
    return tuple(Signature(**entry) for entry in tomllib.loads(read_text(SIGNATURES))["signature"])


def by_name(cases: Sequence[Case]) -> dict[str, Case]:
    """The cases, each once: pytest writes a second one where a test also failed while it was cleaned up."""
    found: dict[str, Case] = {}
    for case in cases:
        old = found.get(case.name)
        if old is None or _BADNESS.index(case.outcome) > _BADNESS.index(old.outcome):
            found[case.name] = case
    return found


def lacking(message: str, own: Collection[str]) -> Signature | None:
    """What the machine lacks according to the message of a failure; `own` are the top-level modules of the checkout."""
    if "cannot import name" in message:
        return None
    if known := next((signature for signature in signatures() if re.match(signature.pattern, message)), None):
        return known
    module = _MODULE.match(message)
    root = module[1].partition(".")[0] if module else ""
    return Signature("package", f"the package {root}", "") if root and root not in own else None


def failures(now: Mapping[str, Case], before: Mapping[str, Case] | None, own: Collection[str]) -> Iterator[tuple[Kind, Named]]:
    """Every failure of `now` with its kind; `before` are the same tests at the base, None when there is none."""
    for case in now.values():
        if case.outcome in ("failed", "error"):
            kind, why = _kind(case, now, before, own)
            yield kind, Named(name=case.name, message=case.message, why=why)


def _kind(case: Case, now: Mapping[str, Case], before: Mapping[str, Case] | None, own: Collection[str]) -> tuple[Kind, str]:
    old = before.get(case.name) if before is not None else None
    if old is not None and old.outcome == "passed":
        return "real", "it passed at the base"
    if lost := [name for name in unseen(now, before or {}) if name.startswith((f"{case.name}.", f"{case.name}::"))]:
        return "real", f"{len(lost)} tests of this file passed at the base"
    same = old is not None and old.outcome in ("failed", "error") and generic(old.message) == generic(case.message)
    need = lacking(case.message, own)
    if need is not None and (same or not need.ambiguous):
        return "not run", f"needs {need.part} ({need.id})"
    if same:
        return "pre-existing", "it failed in the same way at the base"
    if before is None:
        return "real", "there is no base to compare with"
    if old is None:
        return "real", "it is new"
    return "real", f"at the base it was {old.outcome}" + (f": {old.message}" if old.message else "")


def unseen(now: Mapping[str, Case], before: Mapping[str, Case]) -> list[str]:
    """Tests that passed at the base and of which nothing is known now."""
    return [name for name, case in before.items() if case.outcome == "passed" and name not in now]
