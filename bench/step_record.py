"""What the instruments of a step cost the loop: CPU seconds of a recorded run against the same run without them.

    python bench/step_record.py [--rounds 5]

The peer is TRL itself, on level 0's settings. Drivers are forked from one process that has imported everything, so that imports, which
both share, do not hide the cost; "with imports" adds them again, as a user pays them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.mutants.harness import Server, phases_of

from seatrial.loops.trl.loop import LOOP
from seatrial.runtime.environments import Environments

BAR = 1.15


def cpu_seconds(server: Server, place: Path, python: Path, recorded: bool) -> float:
    """Of one run of level 0's driver, without its variants."""
    phase = phases_of(0, place, python)[0]
    left_out = ("--variants",) if recorded else ("--variants", "--record")
    words = [word for word in phase.argv[3:] if word not in left_out]
    place.mkdir(parents=True)
    answer = server.ask(module="train", argv=words, log=str(place / "log"), timeout=300)
    if answer["exit"] != 0:
        raise RuntimeError(f"the run failed: {place / 'log'}")
    return float(answer["cpu"])


def main() -> int:
    """Print both figures and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    built = Environments().find("trl", LOOP.environments()["trl"])
    if built is None:
        sys.exit("the environment trl is not built; run: seatrial env build trl")
    work = Path(tempfile.mkdtemp(prefix="step-record-"))
    server = Server(built.python)
    pairs = []
    try:
        for number in range(rounds + 1):  # the first pair warms up
            plain = cpu_seconds(server, work / f"{number}-plain", built.python, recorded=False)
            pairs.append((plain, cpu_seconds(server, work / f"{number}-recorded", built.python, recorded=True)))
    finally:
        server.close()
    plain, ours = (statistics.median(values) for values in zip(*pairs[1:], strict=True))
    imports = server.imports
    print(f"batch record, level 0, {rounds} rounds: TRL alone {plain:.2f} CPU s, recorded {ours:.2f} CPU s: {ours / plain:.3f} times")
    whole = (ours + imports) / (plain + imports)
    print(f"with imports ({imports:.1f} CPU s): {whole:.3f} times (bar: {BAR})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
