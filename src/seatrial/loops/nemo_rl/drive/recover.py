"""Restore what a killed run left in the vendored tree: `python -m seatrial.loops.nemo_rl.drive.recover CHECKOUT`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from seatrial.loops.nemo_rl.drive.functional import alone
from seatrial.loops.nemo_rl.drive.process import Failed, say


def main(words: list[str]) -> int:
    """Keep other drivers out, and restore."""
    try:
        with contextlib.ExitStack() as ending:
            alone(Path(words[0]).absolute(), ending)
    except Failed as error:
        say(str(error))
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
