"""What the driver of NeMo-RL works on: a checkout with a script, a vendored Bridge, a Bridge under test, and a stand-in for uv."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
VENDORED = "3rdparty/Megatron-Bridge-workspace/Megatron-Bridge"
FOLDER = "tests/functional/smoke"
HEAD = """#!/bin/bash
set -eou pipefail
PROJECT_ROOT=$(cd -- "$(dirname -- "$0")/../.." && pwd)
EXP_DIR=$PROJECT_ROOT/tests/functional/${EXP_NAME:-smoke}
export PYTHONPATH=$PROJECT_ROOT:${PYTHONPATH:-}
rm -rf $EXP_DIR
mkdir -p $EXP_DIR/logs
"""
UV = '#!/bin/bash\n[ "$1" = run ] || exit 64\nshift\nexec "$@"\n'


def git(place: Path, *words: str) -> str:
    """Git as nobody in particular."""
    who = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *who, "-C", str(place), *words], check=True, capture_output=True, text=True).stdout


def put(root: Path, files: dict[str, str]) -> Path:
    """Write files."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def commit(root: Path, files: dict[str, str]) -> Path:
    """A repository with these files."""
    put(root, files)
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "start")
    return root


class Stage:
    """A checkout whose one script runs `body`."""

    def __init__(self, root: Path, body: str = "echo trained > $EXP_DIR/run.log", git_too: bool = True) -> None:
        self.root, self.checkout, self.out = root, root / "rl", root / "phase"
        put(root / "bin", {"uv": UV})
        (root / "bin" / "uv").chmod(0o755)
        (root / "home").mkdir()
        files = {"tests/functional/smoke.sh": HEAD + body + "\n", ".gitignore": f"{FOLDER}/\n3rdparty/\n"}
        put(self.checkout, files)
        if git_too:
            git(self.checkout, "init", "-q", "-b", "main")

    @property
    def folder(self) -> Path:
        return self.checkout / FOLDER

    def environment(self, **more: str) -> dict[str, str]:
        """That of a phase."""
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        plain = {"PATH": path, "HOME": str(self.root / "home"), "PYTHONPATH": str(SOURCE), "TMPDIR": str(self.root)}
        return {**plain, "PYTHONDONTWRITEBYTECODE": "1", **more}

    def words(self, *more: str) -> list[str]:
        """Arguments of the driver."""
        return ["--checkout", str(self.checkout), "--script", f"{FOLDER}.sh", "--out", str(self.out), *more]

    def start(self, *more: str, python: str = sys.executable, **variables: str) -> subprocess.Popen[str]:
        """The driver as a process of its own."""
        command = [python, "-m", "seatrial.instruments.nemo_rl.run_functional", *self.words(*more)]
        return subprocess.Popen(
            command, env=self.environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.checkout
        )

    def run(self, *more: str, **variables: str) -> tuple[int, str]:
        """Exit code and log of the driver."""
        process = self.start(*more, **variables)
        text, _ = process.communicate(timeout=60)
        return process.returncode, text

    def bridges(self, before: dict[str, str], after: dict[str, str]) -> tuple[Path, Path]:
        """A Bridge under test, and the vendored one."""
        return commit(self.root / "bridge", after), commit(self.checkout / VENDORED, before)
