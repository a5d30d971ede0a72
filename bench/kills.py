"""Kill a trial with SIGKILL at moments spread over all that it writes, and resume it.

    python bench/kills.py --kills 60                  # the fake loop of the tests: the whole command line, small processes
    python bench/kills.py --kills 6 --loop trl        # real training

Each kill is followed by `seatrial resume`; every second one is killed a second time while it resumes. It must end with a Pass whose
files are as they were recorded, or be refused before anything ran (no trial.json). Anything else is printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAKE = (sys.executable, str(ROOT / "tests" / "trial" / "fake_cli.py"))
REAL = (str(Path(sys.executable).with_name("seatrial")),)
ENVIRON = {**os.environ, "SEATRIAL_HISTORY": "off", "SEATRIAL_BASE_CACHE": "off"}


def words(loop: str, out: Path) -> list[str]:
    """The command line of the trial."""
    if loop == "fake":
        return [*FAKE, "run", "fake", "--level", "0-1", "--out", str(out), "--python", sys.executable]
    return [*REAL, "run", loop, "--level", "0", "--out", str(out)]


def written(out: Path) -> int:
    """How many files and directories there are, without those that are staged."""
    return sum(len(folders) + len(names) for parent, folders, names in os.walk(out) if "instruments" not in parent)


def run(command: list[str], out: Path | None = None, count: int = 0, pause: float = 0) -> tuple[int, str]:
    """Run to the end, or until a while after so many files are there: exit code, and what was said."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=ENVIRON, cwd="/")
        if out is not None:
            while written(out) < count and process.poll() is None:
                time.sleep(0.002)
            time.sleep(pause)
            process.kill()
        process.wait()
        said.seek(0)
        return process.returncode, said.read()


def one(loop: str, out: Path, count: int, pause: float, twice: bool) -> str:
    """What became of one trial that was killed."""
    cli = list(FAKE if loop == "fake" else REAL)
    code, _ = run(words(loop, out), out, count, pause)
    if code >= 0:
        return "ended before the kill"
    if twice and (out / "trial.json").exists():
        run([*cli, "resume", str(out)], out, written(out) + 3, pause)
    code, said = run([*cli, "resume", str(out)])
    ran = any(out.rglob("run.log"))
    if code == 2 and not ran and not (out / "trial.json").exists():
        return "refused before anything ran"
    if code == 0:
        code, said = run([*cli, "report", str(out), "--format", "json"])
        return "resumed" if code == 0 and not json.loads(said)["trial"]["alterations"] else f"LOST: report {code}\n{said[:2000]}"
    return f"LOST: resume {code}\n{said[-2000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--first", type=int, default=0, help="begin with this one")
    parser.add_argument("--loop", default="fake")
    chosen = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="seatrial-kills-"))
    code, said = run(words(chosen.loop, place / "whole"))
    if code != 0:
        print(said)
        return 1
    files = written(place / "whole")
    print(f"one whole trial: {files} files and directories", flush=True)
    found: Counter[str] = Counter()
    for number in range(chosen.first, chosen.kills):
        count, pause = round(1 + files * number / chosen.kills), 0.04 * (number % 6)
        outcome = one(chosen.loop, place / str(number), count, pause, twice=number % 2 == 1)
        found[outcome.split("\n")[0]] += 1
        print(f"{number + 1:3} killed {pause:.2f} s after {count} of {files}: {outcome}", flush=True)
        shutil.rmtree(place / str(number), ignore_errors=True)
    print(json.dumps(found))
    shutil.rmtree(place, ignore_errors=True)
    return 1 if any(name.startswith("LOST") for name in found) else 0


if __name__ == "__main__":
    sys.exit(main())
