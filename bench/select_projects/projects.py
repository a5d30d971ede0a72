"""The projects of the mutation benchmark, and their environments and trees under ~/.cache/seatrial/bench/select-NAME.

- Two real projects come from PyPI as source distributions of fixed versions, with their own tests; the third is ours (rays/).
- Each has one environment: its requirements, pytest and pytest-testmon. Ray is not installed again: the environment of our own tests
  is joined by a .pth file. Seatrial is joined as a copy (lib/), so that edits during a benchmark do not reach it.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "packages" / "pytest-seatrial" / "src" / "pytest_seatrial"
HOME = Path.home() / ".cache" / "seatrial" / "bench"
COMMON = ("pytest>=9,<10", "pytest-testmon==2.2.0")
DATA = (".yaml", ".yml", ".json", ".toml", ".txt", ".sh", ".md", ".cfg")


@dataclass(frozen=True)
class Project:
    """Where a project comes from, and what of it is mutated."""

    name: str
    sdist: str
    requirements: tuple[str, ...]
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    joined: Callable[[], Path] | None = None
    test_s: float = 30
    said: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """Arguments of every pytest run."""
        return tuple(f"--ignore={name}" for name in self.left_out)

    @property
    def place(self) -> Path:
        return HOME / f"select-{self.name}"

    @property
    def python(self) -> Path:
        return self.place / "venv" / "bin" / "python"

    @property
    def site(self) -> Path:
        return next((self.place / "venv" / "lib").glob("python3*")) / "site-packages"


def prepare(project: Project) -> None:
    """The environment and the clean tree; both are kept for the next time."""
    mark = project.place / "prepared"
    wanted = repr((project.sdist, COMMON, project.requirements, sys.version_info[:2], _digest(HERE / "rays") if not project.sdist else ""))
    if mark.exists() and mark.read_text() == wanted:
        return
    mark.unlink(missing_ok=True)
    shutil.rmtree(project.place / "venv", ignore_errors=True)
    project.place.mkdir(parents=True, exist_ok=True)
    _call(sys.executable, "-m", "venv", str(project.place / "venv"))
    _call(str(project.python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *COMMON, *project.requirements)
    if project.joined is not None:
        (project.site / "joined.pth").write_text(f"{project.joined()}\n")
    (project.site / "bench_lib.pth").write_text(f"{project.place / 'lib'}\n")
    _clean_tree(project)
    for old in project.place.glob("worker-*"):
        shutil.rmtree(old)
    mark.write_text(wanted)


def claim(project: Project) -> IO[str]:
    """Keep the project for this process; the kernel lets it go when the process ends."""
    project.place.mkdir(parents=True, exist_ok=True)
    file = (project.place / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"{project.name}: another benchmark works in {project.place}; --report prints what it has so far") from None
    return file


def join_seatrial(project: Project) -> None:
    """Copy what is under test beside the environment, with its digest."""
    digest = _digest(SOURCE)
    lib = project.place / "lib"
    mark = lib / "digest"
    if not mark.exists() or mark.read_text() != digest:
        shutil.rmtree(lib, ignore_errors=True)
        shutil.copytree(SOURCE, lib / "pytest_seatrial", ignore=shutil.ignore_patterns("__pycache__"))
        # As pip leaves it: runs here write no bytecode, and would compile us in every child process.
        _call(str(project.python), "-m", "compileall", "-q", str(lib))
        mark.write_text(digest)
    shutil.copy(HERE / "bench_report.py", lib / "bench_report.py")


def tree(project: Project, worker: int) -> Path:
    """A worker's copy of the clean tree, as a git repository with one commit."""
    place = project.place / f"worker-{worker}" / "tree"
    if not (place / ".git" / "HEAD").exists():
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(project.place / "clean", place)
        git = ("git", "-C", str(place), "-c", "user.name=bench", "-c", "user.email=bench@localhost")
        _call(*git, "init", "-q")
        _call(*git, "add", "-A", "-f")
        _call(*git, "commit", "-q", "-m", "clean")
    return place


def files(project: Project, root: Path) -> dict[str, list[str]]:
    """Files by share: source, tests, data."""
    own = [path for path in sorted(root.rglob("*")) if path.is_file() and ".git" not in path.relative_to(root).parts]

    def under(name: str, folders: tuple[str, ...]) -> bool:
        return any(name == folder or name.startswith(f"{folder}/") for folder in folders)

    # A mutation of a test that is never run would show nothing.
    names = [name for name in (str(path.relative_to(root)) for path in own) if not under(name, project.left_out)]

    return {
        "source": [name for name in names if name.endswith(".py") and under(name, project.sources)],
        "tests": [name for name in names if name.endswith(".py") and under(name, project.tests)],
        "data": [name for name in names if name.endswith(DATA) and under(name, project.data)],
    }


def _clean_tree(project: Project) -> None:
    clean = project.place / "clean"
    shutil.rmtree(clean, ignore_errors=True)
    if not project.sdist:
        shutil.copytree(HERE / project.name, clean, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        return
    fetched = project.place / "sdist"
    shutil.rmtree(fetched, ignore_errors=True)
    name = project.sdist.split("==")[0]
    pip = [str(project.python), "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps", "--no-binary", name]
    _call(*pip, "-d", str(fetched), project.sdist)
    with tarfile.open(next(fetched.glob("*.tar.gz"))) as archive:
        archive.extractall(fetched, filter="data")
    shutil.move(next(path for path in fetched.iterdir() if path.is_dir()), clean)


def _digest(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            total.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
