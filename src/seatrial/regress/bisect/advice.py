"""What helps against an end that does not hold, chosen by what happened there.

- Only what the row, the log and the user's checkout show is used; where they show nothing in particular, the advice is general.
"""

from __future__ import annotations

import re
from pathlib import Path

from seatrial.regress.bisect.history import exists, inside_tree
from seatrial.regress.bisect.record import Plan, Run, SkipKind

_FLAG = re.compile(r"(^|\s)(--[a-z]|git )")
_MODULE = re.compile(r"No module named '?([A-Za-z_]\w*)")


def for_skip(plan: Plan, row: Run, name: str) -> tuple[str, str]:
    """Why an end (`good` or `bad`) cannot be judged, and what helps; some reasons say that themselves."""
    another = f"name another commit with --{name}"
    why, separator, remedy = row.reason.rpartition("; ")
    if row.skip in (SkipKind.BUILD, SkipKind.BUILD_COMMAND, SkipKind.TREE) and separator and _FLAG.search(remedy):
        return why, f"{remedy}; or {another}"
    return row.reason, _for_skip(plan, row, name, another)


def _for_skip(plan: Plan, row: Run, name: str, another: str) -> str:
    if row.skip is SkipKind.BUILD_COMMAND:
        return f"correct --build, or {another}"
    if row.skip is SkipKind.BUILD:
        return f"choose another lock or none with --env, or another version with --python; or {another}"
    if row.skip is SkipKind.UNEDITED:
        return f"correct the file of --edit, or {another} that has it"
    if row.skip is SkipKind.ABSENT:
        return f"{another} that has it; or bring it with --patch, or give the command a copy that lies outside of the tree"
    if row.skip is SkipKind.OTHER_FAILURE and plan.failure is not None:
        other = "; it fails there, if in another way" if name == "good" else ""
        return f"correct --failure, which must match one line of the log{other}; or {another}"
    return f"{another}, or correct the command"


def for_failing_good(plan: Plan, row: Run, log: Path) -> str:
    """For a good end that fails."""
    failure, older = row.failure, "name an older commit with --good"
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    if file := _not_committed(plan, text):
        return (
            f"{file} is not committed, so no tree has it: give the command a copy that lies outside of the tree, or bring it with --patch"
        )
    if failure and failure.kind == "timeout":
        return f"allow more time with --minutes (now {plan.minutes:g}), or {older}"
    if failure and failure.missed:
        return f"correct the threshold of the check, or {older}"
    if module := _MODULE.search(failure.shown if failure and failure.shown else row.reason) or _MODULE.search(text):
        if plan.environment.kind == "none":
            return f"install {module[1]} where you call from, or let an environment be built for each commit: --env pip:LOCKFILE"
        return f"add the package to the environments with --with {module[1]}, or use your own for all commits: --env none; or {older}"
    return f"{older}; or the command fails for a reason that has nothing to do with the commits: read the log"


def _not_committed(plan: Plan, log: str) -> str | None:
    """A file that the command names, that the checkout has and the good end has not, and that the log complains about."""
    main = plan.repos[0]
    for word in (*plan.command, *plan.extra):
        for part in (word, word.partition("=")[2]):
            path = inside_tree(part)
            if path and Path(path).name in log and Path(main.path, path).is_file() and not exists(Path(main.path), main.good, path):
                return path
    return None
