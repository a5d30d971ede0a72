"""The whole command line with the fake loop in place of the real ones: `python fake_cli.py run fake …`.

`FAKE_WORDS` holds the words of the levels as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import seatrial.loops
from seatrial.cli.main import run
from seatrial.core.loop import Loop
from tests.trial.fake import FakeLoop

WORDS = {int(number): word for number, word in json.loads(os.environ.get("FAKE_WORDS", "{}")).items()}


def get_loop(name: str) -> Loop:
    return FakeLoop(WORDS)


if __name__ == "__main__":
    seatrial.loops.get_loop = get_loop
    run()
