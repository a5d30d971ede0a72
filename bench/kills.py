"""Kill a trial with SIGKILL at moments of its run, and resume it.

    python bench/kills.py --kills 60                  # the fake loop of the tests: the whole command line, small processes
    python bench/kills.py --kills 6 --loop trl        # real training; needs the loop's environment in the cache (`seatrial env list`)

- One whole trial is timed first, from its directory's first appearance to its end. The kills are spread over this time, one random
  moment in each of equal parts.
- A trial that ended before its kill does not count: its part is drawn again, of the time that it took.
- Each kill is followed by `seatrial resume`; every second one is killed again while it resumes.
- A trial must end with a Pass whose files are as they were recorded, or be refused before anything ran (no trial.json). Anything else
  is printed, and the exit code is 1; 77 where the environment is not in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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
ENDED = "ended before the kill"
START_S = 0.3
"""A resume takes about so long before it touches the trial."""
TRIES = 20
"""Draws of one moment."""


def program(loop: str) -> tuple[str, ...]:
    """What `seatrial` is for this loop."""
    return FAKE if loop == "fake" else REAL


def words(loop: str, out: Path) -> list[str]:
    """The command line of the trial."""
    levels = ("--level", "0-1", "--python", sys.executable) if loop == "fake" else ("--level", "0")
    return [*program(loop), "run", loop, *levels, "--out", str(out)]


def cached(loop: str) -> bool:
    """Whether the loop's environment is built: a trial that builds one takes another time each run."""
    said = subprocess.run([*REAL, "env", "list", "--json"], capture_output=True, text=True, check=True, cwd="/").stdout
    return any(one["name"] == loop and one["kind"] == "envs" and one["complete"] for one in json.loads(said))


def run(command: list[str], kill_after: float | None = None, out: Path | None = None) -> tuple[int, str, float]:
    """Run to the end, or to a kill after so many seconds: exit code (negative: killed), what was said, and seconds. With `out`, seconds
    count from when this directory is there."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=ENVIRON, cwd="/")
        while out is not None and not out.exists() and process.poll() is None:
            time.sleep(0.001)
        began = time.monotonic()
        try:
            process.wait(kill_after)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        seconds = time.monotonic() - began
        said.seek(0)
        return process.returncode, said.read(), seconds


def one(loop: str, out: Path, moment: float, again: float | None) -> str | float:
    """What became of one trial that was killed at a moment, and of its resume at another; its seconds if it ended before."""
    cli = program(loop)
    code, _, seconds = run(words(loop, out), moment, out)
    if code >= 0:
        return seconds
    started = (out / "trial.json").exists()
    twice = ""
    if again is not None and started:
        code, _, _ = run([*cli, "resume", str(out)], again)
        twice = ", killed twice" if code < 0 else ""
    code, said, _ = run([*cli, "resume", str(out)])
    if code == 2 and not started and not any(out.rglob("run.log")):
        return "refused before anything ran"
    if code == 0:
        code, said, _ = run([*cli, "report", str(out), "--format", "json"])
        intact = code == 0 and not json.loads(said)["trial"]["alterations"]
        return f"resumed{twice}" if intact else f"LOST: report {code}\n{said[:2000]}"
    return f"LOST: resume {code}\n{said[-2000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="of running trials")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--loop", default="fake")
    chosen = parser.parse_args()
    if chosen.loop != "fake" and not cached(chosen.loop):
        print(f"the environment of {chosen.loop} is not in the cache: build it with `seatrial env build {chosen.loop}`")
        return 77
    place = Path(tempfile.mkdtemp(prefix="seatrial-kills-"))
    code, said, whole = run(words(chosen.loop, place / "whole"), out=place / "whole")
    if code != 0:
        print(said)
        return 1
    print(f"one whole trial: {whole:.1f} s", flush=True)
    rng, found, tries = random.Random(chosen.seed), Counter[str](), 0
    began = time.monotonic()
    for number in range(chosen.kills):
        outcome = ENDED
        for _ in range(TRIES):
            moment = whole * (number + rng.random()) / chosen.kills
            again = whole * rng.random() + START_S if number % 2 else None
            ended = one(chosen.loop, place / str(number), moment, again)
            shutil.rmtree(place / str(number), ignore_errors=True)
            tries += 1
            if isinstance(ended, str):
                outcome = ended
                break
            whole = min(whole, ended)
        found[outcome.split("\n")[0]] += 1
        print(f"{number + 1:3} killed after {moment:.2f} s of {whole:.1f}: {outcome}", flush=True)
    print(f"{json.dumps(found)}, {tries} trials in {time.monotonic() - began:.0f} s")
    shutil.rmtree(place, ignore_errors=True)
    return 1 if found[ENDED] or any(name.startswith("LOST") for name in found) else 0


if __name__ == "__main__":
    sys.exit(main())
