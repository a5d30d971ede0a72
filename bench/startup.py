"""How long `seatrial --help` takes and what the core weighs. Peer: the same interpreter doing nothing."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = 7


def cpu(command: list[str]) -> float:
    """Least CPU milliseconds over several runs."""
    times = []
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    return min(times)


def installed_mb() -> float:
    """What `pip install seatrial` puts on disk, without pip itself, in a new environment."""
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        packages = next(Path(folder).glob("lib/python*/site-packages"))

        def size() -> int:
            return sum(path.stat().st_blocks * 512 for path in packages.rglob("*") if path.is_file() and not path.is_symlink())

        before = size()
        subprocess.run([f"{folder}/bin/pip", "install", "-q", str(root)], check=True, stderr=subprocess.DEVNULL)
        return (size() - before) / 1e6


def main() -> None:
    """Print the figures."""
    seatrial = str(Path(sys.executable).with_name("seatrial"))
    ours, peer = cpu([seatrial, "--help"]), cpu([sys.executable, "-c", "pass"])
    print(f"startup: seatrial --help {ours:.0f} ms CPU (bar: 150), bare python {peer:.0f} ms, ratio {ours / peer:.1f}")
    print(f"install: the core takes {installed_mb():.0f} MB (bar: 60)")


if __name__ == "__main__":
    main()
