"""The import witness of a verl process: importing this module starts it.

verl imports it as it is imported itself (`VERL_USE_EXTERNAL_MODULES`): in the driver, in every Ray worker, and in what
they spawn. It reads
- SEATRIAL_IMPORTS: the level directory, where imports.jsonl and loaded.jsonl are appended to;
- SEATRIAL_UNDER_TEST: `package=root` entries, joined like a search path;
- SEATRIAL_WATCH: further packages worth recording, separated by commas.
"""

from __future__ import annotations

import os

from seatrial.loops.verl.drive.witness import watch_this_process

WITNESS = watch_this_process(os.environ)
