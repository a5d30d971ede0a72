"""Restore what a killed run left in the vendored tree: `python -m seatrial.instruments.nemo_rl.recover CHECKOUT`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from seatrial.instruments.nemo_rl.nemo_process import Failed, say
from seatrial.instruments.nemo_rl.run_functional import alone


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
