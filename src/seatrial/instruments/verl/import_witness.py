"""The import witness of a verl process, and the refit probe where it is asked for: importing this module starts them.

verl imports it as it is imported itself (`VERL_USE_EXTERNAL_MODULES`): in the driver, in every Ray worker, and in what
they spawn. What it reads and writes is said by `seatrial.instruments.witness`.
"""

from __future__ import annotations

import os
import sys

from seatrial.instruments import provenance
from seatrial.instruments.engines import attach
from seatrial.instruments.verl.verl_process import main_module, process_kind
from seatrial.instruments.witness import watch_this_process

MAIN = main_module(sys.orig_argv)
WITNESS = watch_this_process(os.environ, process_kind(sys.orig_argv), provenance.found([MAIN], "")[0]["file"] if MAIN else None)
attach.start(os.environ, "verl")
