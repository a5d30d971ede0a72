"""What must be the same for a map to be trusted, and what else a result may hang on.

- `given`: Python, the root, our own version, installed distributions, pytest's ini options. Another one of these: nothing recorded holds.
- `options`: options that the project's own conftests added; `command`: those of pytest that turn a pass into a failure. They belong to
  every test.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from seatrial.evidence.git import command_line, environment
from seatrial.model.errors import UserError
from seatrial.regress.select.files.digests import Version
from seatrial.regress.select.files.facts import sha

# Options that say how tests are run, not what they find.
HOW = frozenset(
    (
        "numprocesses",
        "maxprocesses",
        "maxworkerrestart",
        "dist",
        "tx",
        "distload",
        "rsyncdir",
        "rsyncignore",
        "testrunuid",
        "px",
        "looponfail",
    )
) | {"loadscopereorder", "loadgroup", "maxschedchunk", "quiet"}
OUTCOME = ("runxfail", "pythonwarnings", "override_ini")
VERSION = "version of selection"


def given(config: pytest.Config, root: Path) -> dict[str, str]:
    """The circumstances of a session, each under the word that is told when it differs."""
    return {
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "root": str(root),
        VERSION: _version(),
        "set of distributions": sha("\n".join(_distributions()).encode()),
        "set of pytest options": sha("\n".join(sorted(f"{key}={_plain(value)}" for key, value in _ini(config).items())).encode()),
    }


def _version() -> str:
    """Of our own text: what a digest means, and what is noticed at all, changes with it."""
    own = sorted(Path(__file__).parent.rglob("*.py"))
    return sha(b"\0".join(path.read_bytes() for path in own))


def _ini(config: pytest.Config) -> dict[str, object]:
    """The options of the ini file; newer versions of pytest keep them under another name."""
    found = getattr(config, "_inicfg", None)
    return dict(config.inicfg if found is None else found)


def _plain(value: object) -> str:
    """An ini value without pytest's wrapping, which also tells where it came from."""
    return repr(getattr(value, "value", value))


def _distributions() -> Iterable[str]:
    found: set[str] = set()
    for entry in sys.path:
        try:
            found.update(path.name for path in Path(entry or ".").iterdir() if path.name.endswith((".dist-info", ".egg-info")))
        except OSError:
            continue
    return sorted(found)


def commit(root: Path) -> str:
    """HEAD, or "" where there is no git."""
    if "GIT_DIR" not in os.environ and not any((above / ".git").exists() for above in (root, *root.parents)):
        return ""  # git would say so too, after a process more
    try:
        call = command_line(root, "rev-parse", "--verify", "HEAD")
        done = subprocess.run(call, env=environment(root), capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired, UserError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def top(root: Path) -> Path:
    """The top of the git repository that `root` belongs to; `root` itself where there is none, or where git ignores it."""
    for above in (root, *root.parents):
        if (above / ".git").exists():
            break
    else:
        return root
    try:
        call = command_line(above, "check-ignore", "-q", str(root))
        ignored = subprocess.run(call, env=environment(above), capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired, UserError):
        return root if above == root else above
    return root if above != root and ignored.returncode == 0 else above


def options(config: pytest.Config, before: frozenset[str]) -> Version:
    """Values of the options that came with the project's conftests; `before` are the names that were there without them."""
    found = {key: value for key, value in vars(config.option).items() if key not in before and key not in HOW}
    return "", "@options of the project", _digest(found)


def command(config: pytest.Config) -> Version:
    """Options of pytest itself under which the same test may end otherwise: `--runxfail`, `-W`, `-o`."""
    return "", "@options of the command line", _digest({key: getattr(config.option, key, None) for key in OUTCOME})


def _digest(values: dict[str, object]) -> str:
    return sha("\n".join(f"{key}={value!r}" for key, value in sorted(values.items())).encode("utf-8", "surrogateescape"))
