"""podman, for real: an image of a shell and nothing else, in a store of its own that goes with the test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

IMAGE = "localhost/seatrial-test:1"
FILES = ("/bin/sh", "/bin/cat", "/bin/sleep")


def libraries(program: str) -> set[str]:
    told = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return {word for word in told.split() if word.startswith("/")}


def settings(root: Path) -> dict[str, str]:
    """A store, a runtime and limits for this test alone; the limits are those of a machine that may not raise them."""
    runtime = "runc" if shutil.which("runc") else "crun"
    limits = '"nofile=1024:1024", "nproc=1024:1024"'
    (root / "containers.conf").write_text(f'[engine]\nruntime = "{runtime}"\n[containers]\nnetns = "none"\ndefault_ulimits = [{limits}]\n')
    storage = f'[storage]\ndriver = "vfs"\ngraphroot = "{root / "graph"}"\nrunroot = "{root / "run"}"\n'
    (root / "storage.conf").write_text(storage)
    return {**os.environ, "CONTAINERS_CONF": str(root / "containers.conf"), "CONTAINERS_STORAGE_CONF": str(root / "storage.conf")}


@pytest.fixture
def podman(tmp_path: Path) -> dict[str, str]:
    """The variables with which podman has the image; a skip where podman cannot run."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    env = settings(tmp_path)
    with tarfile.open(tmp_path / "image.tar", "w") as tar:
        for name in {*FILES, *(library for program in FILES for library in libraries(program))}:
            tar.add(Path(name).resolve(), name)
    made = subprocess.run(["podman", "import", str(tmp_path / "image.tar"), IMAGE], env=env, capture_output=True, text=True, check=False)
    tried = subprocess.run(
        ["podman", "run", "--rm", IMAGE, "/bin/sh", "-c", "exit 0"], env=env, capture_output=True, text=True, check=False
    )
    if made.returncode or tried.returncode:
        pytest.skip(f"podman cannot run a container here: {(made.stderr if made.returncode else tried.stderr).strip()[-200:]}")
    return env


def seatrial(env: dict[str, str], cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "seatrial.cli.main", *words]
    return subprocess.run(argv, env=env, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_command_runs_in_a_container_and_leaves_its_files_here(podman: dict[str, str], tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    script = 'echo "$NAMED-$HIDDEN" > told; exit 7'
    env = {**podman, "NAMED": "yes", "HIDDEN": "no"}
    done = seatrial(env, project, "hermetic", "--image", IMAGE, "--engine", "podman", "--env", "NAMED", "--", "/bin/sh", "-c", script)
    assert done.returncode == 7, done.stdout + done.stderr
    assert (project / "told").read_text() == "yes-\n"
    assert (project / "told").stat().st_uid == os.getuid()
    left = subprocess.run(["podman", "ps", "--all", "--quiet"], env=podman, capture_output=True, text=True, check=True).stdout
    assert left == ""


@pytest.mark.slow
def test_a_script_that_hangs_in_a_container_leaves_no_container(podman: dict[str, str], tmp_path: Path) -> None:
    words = ("hermetic", "--image", IMAGE, "--engine", "podman", "--deadline", "0.1", "--", "/bin/sleep", "600")
    done = seatrial(podman, tmp_path, *words)
    assert done.returncode == 1, done.stdout + done.stderr
    left = subprocess.run(["podman", "ps", "--all", "--quiet"], env=podman, capture_output=True, text=True, check=True).stdout
    assert left == ""
