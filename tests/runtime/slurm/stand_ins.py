"""Stand-ins for Slurm's commands: they write down how they were called and answer what a test says."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_PROGRAM = """#!{python} -SE
import json, os, sys, time
name, place = os.path.basename(sys.argv[0]), {place!r}
with open(os.path.join(place, "calls"), "a") as calls:
    calls.write(json.dumps([name, sys.argv[1:], dict(os.environ), sys.stdin.read()]) + "\\n")
answers = json.load(open(os.path.join(place, "answers")))
out, err, code, seconds = answers.get(name, ["", "", 0, 0])
time.sleep(seconds)
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""
TOOLS = ("sbatch", "squeue", "sacct", "scancel", "scontrol")


@dataclass
class StandIns:
    """The commands that stand on PATH."""

    place: Path
    answers: dict[str, tuple[str, str, int, float]] = field(default_factory=dict)

    def put(self, tools: tuple[str, ...]) -> None:
        for name in tools:
            file = self.place / name
            file.write_text(_PROGRAM.format(python=sys.executable, place=str(self.place)))
            file.chmod(0o755)
        (self.place / "calls").write_text("")
        self.answer("", "")

    def answer(self, tool: str, out: str = "", err: str = "", code: int = 0, seconds: float = 0) -> None:
        """What a command answers from now on."""
        self.answers[tool] = (out, err, code, seconds)
        (self.place / "answers").write_text(json.dumps(self.answers))

    def calls(self, tool: str | None = None) -> list[list[str]]:
        """Words of every call so far."""
        return [words for name, words, _, _ in self._all() if tool in (None, name)]

    def environment(self) -> dict[str, str]:
        """Variables of the last call."""
        found: dict[str, str] = self._all()[-1][2]
        return found

    def stdin(self) -> str:
        """What the last call was given to read."""
        return str(self._all()[-1][3])

    def _all(self) -> list[tuple[str, list[str], dict[str, str], str]]:
        return [tuple(json.loads(line)) for line in (self.place / "calls").read_text().splitlines()]


def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tools: tuple[str, ...] = TOOLS) -> StandIns:
    """Put stand-ins on PATH, and nothing else of Slurm."""
    place = tmp_path / "bin"
    place.mkdir()
    found = StandIns(place)
    found.put(tools)
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    return found
