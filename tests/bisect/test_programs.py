"""Which programs of a command would run with the packages of another environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from seatrial.bisect.step_preparer import foreign


def put(place: Path, text: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    place.chmod(0o755)


@pytest.fixture
def bins(tmp_path: Path) -> tuple[Path, str]:
    """The programs of an environment, and a PATH on which they come first."""
    own, other, shims = tmp_path / "venv" / "bin", tmp_path / "other" / "bin", tmp_path / "manager" / "shims"
    for name in ("python", "python3", "inside"):
        put(own / name, "#!/bin/sh\n")
    for name, text in {
        "inside": "#!/usr/bin/python3\n",
        "pytest": f"#!{other}/python3.11\n",
        "long": f"#!/bin/sh\n'''exec' \"{other}/python\" \"$0\" \"$@\"\n' '''\n",
        "by-env": "#!/usr/bin/env python3\n",
        "by-env-other": "#!/usr/bin/env python3.99\n",
        "make": "#!/bin/sh\n# runs python\n",
        "timeout": "#!/bin/sh\n",
        "env": "#!/bin/sh\n",
        "binary": "\x7fELF",
        "python3.99": "\x7fELF",
    }.items():
        put(other / name, text)
    put(shims / "black", '#!/usr/bin/env bash\nexec "/opt/pyenv" exec "$program" "$@"\n')
    put(shims / "ruff", "#!/bin/sh\n# asdf-plugin: python 3.12\n")
    put(shims / "node", "#!/bin/sh\n# asdf-plugin: nodejs 20\n")
    put(shims / "mypy", "\x7fELF")
    return own, os.pathsep.join(map(str, (own, other, shims)))


@pytest.mark.parametrize(
    "command",
    [
        "pytest -q",
        "long",
        "by-env-other",
        "python3.99 -c 1",
        "black .",
        "ruff",
        "mypy",
        "timeout 60 pytest",
        "env A=1 timeout -s KILL 9 pytest",
    ],
)
def test_python_of_another_environment(bins: tuple[Path, str], command: str) -> None:
    found = foreign(command.split(), *bins)
    assert found is not None
    assert found[0] in command.split()
    assert not found[1].is_relative_to(bins[0])


@pytest.mark.parametrize(
    "command",
    ["inside", "python -m pytest", "by-env", "make pytest", "binary", "node x.js", "no-such-program", "/bin/pytest", "timeout 60 inside"],
)
def test_what_may_run(bins: tuple[Path, str], command: str) -> None:
    assert foreign(command.split(), *bins) is None


def test_nothing_to_run(bins: tuple[Path, str]) -> None:
    assert foreign((), *bins) is None
    assert foreign(("env",), *bins) is None
