"""Stand-ins for Slurm's commands: they keep jobs as files, record how they were called, and say what a test wants."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from seatrial.core.jobs import Ending, Result
from seatrial.runtime.jobdir import job_dir

_HEAD = """#!/bin/sh
echo "$(basename "$0") $*" >>"$FAKE_SLURM/calls"
if [ -f "$FAKE_SLURM/down" ]; then
    echo "$(basename "$0"): error: Unable to contact slurm controller (connect failure)" >&2; exit 1
fi
"""
_COMMANDS = {
    "sbatch": """case " $* " in *" --test-only "*)
    cat >"$FAKE_SLURM/tested"
    if [ -f "$FAKE_SLURM/refuses" ]; then echo "sbatch: error: Requested node configuration is not available" >&2; exit 1; fi
    echo "sbatch: Job 7 to start at 2026-11-15T00:00:00 on nodes n1" >&2; exit 0;;
esac
for script; do :; done
id=$(($(ls "$FAKE_SLURM/jobs" | wc -l) + 41))
sed -n 's/^#SBATCH --job-name=//p' "$script" >"$FAKE_SLURM/jobs/$id"
echo "PENDING|N/A|Resources" >"$FAKE_SLURM/state.$id"
echo "$id"
""",
    "squeue": """for job in "$FAKE_SLURM"/jobs/*; do
    id=$(basename "$job")
    [ -f "$FAKE_SLURM/state.$id" ] || continue
    IFS='|' read -r state ended reason <"$FAKE_SLURM/state.$id"
    echo "$id|$state|$ended|$reason|(null)|$(cat "$job")"
done
""",
    "sacct": 'echo "Slurm accounting storage is disabled" >&2; exit 1\n',
    "scancel": "",
}


@dataclass(frozen=True, slots=True)
class FakeSlurm:
    """A cluster of files."""

    root: Path

    def variables(self) -> dict[str, str]:
        """What a child process needs to see it."""
        return {"FAKE_SLURM": str(self.root), "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", "SLURM_CONF": ""}

    def says(self, state: str, reason: str = "None", slurm: str = "41") -> None:
        """From now on a job is in this state; an empty one makes Slurm forget it."""
        file = self.root / f"state.{slurm}"
        if not state:
            file.unlink()
            return
        fresh = file.with_suffix(".new")
        fresh.write_text(f"{state}|N/A|{reason}\n")
        fresh.replace(file)

    def flag(self, name: str, on: bool = True) -> None:
        """`down`: nothing answers. `refuses`: sbatch says no."""
        (self.root / name).touch() if on else (self.root / name).unlink()

    def calls(self, command: str) -> list[str]:
        """How a command was called."""
        file = self.root / "calls"
        return [line for line in file.read_text().splitlines() if line.startswith(f"{command} ")] if file.exists() else []


def make_slurm(root: Path) -> FakeSlurm:
    """The commands and no job."""
    (root / "bin").mkdir(parents=True)
    (root / "jobs").mkdir()
    for name, body in _COMMANDS.items():
        (root / "bin" / name).write_text(_HEAD + body)
        (root / "bin" / name).chmod(0o755)
    return FakeSlurm(root)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """The stand-ins, first on PATH."""
    fake = make_slurm(tmp_path / "slurm")
    for key, value in fake.variables().items():
        monkeypatch.setenv(key, value)
    return fake


def leave_result(run: Path, ending: Ending, exit_code: int | None, message: str = "", number: int = 1, slurm: str = "41") -> None:
    """What the script of a trial's job leaves."""
    moment = int(time.time())
    result = Result(
        job="trial",
        index=0,
        slurm=slurm,
        restart=0,
        ending=ending,
        component="client",
        exit_code=exit_code,
        node="n1",
        started=moment,
        ended=moment,
        message=message,
    )
    file = job_dir(run / "jobs" / str(number), "trial").result_file(0)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(result.model_dump_json())
