"""Requirements of `--with`, looked at before anything is built: what no installer could read is bad input."""

from __future__ import annotations

import re
from pathlib import Path

from seatrial.model.errors import UserError
from seatrial.regress.bisect.environments.locks import is_local

_CLAUSE = r"\s*(?:===\s*[^\s,;)]+|(?:[<>=!~]=|[<>])\s*v?(?:\d+!)?\d[\w.*+-]*)\s*"
_CLAUSES = rf"{_CLAUSE}(?:,{_CLAUSE})*,?\s*"
_MARKER = r"(?:;\s*\S.*)?"
_NAMED = re.compile(
    r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?\s*(?:\[[\w\s,.-]*\])?\s*"
    rf"(?:@\s*\S+(?:\s+{_MARKER})?|(?:\({_CLAUSES}\)|{_CLAUSES})?\s*{_MARKER})",
    re.ASCII,
)
"""The form of PEP 508; what a marker says is left to the installer."""
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:\S+")


def check_requirement(text: str, project: Path) -> None:
    """A UserError unless it has the form of a requirement: a name with versions, an address, or a path that is there."""
    wanted = text.strip()
    if _NAMED.fullmatch(wanted) or _ADDRESS.fullmatch(wanted):
        return
    fix = "name a package, such as pytest or 'pytest<9'"
    if wanted and not wanted.startswith("-") and is_local(wanted):
        path = Path(re.sub(r"\[[^]]*\]$", "", wanted))  # extras may follow a path
        if (project / path).exists():
            return
        raise UserError(f"--with {text}: {project / path} does not exist", f"correct the path, or {fix}")
    raise UserError(f"--with {text}: not a requirement", fix)
