"""Print the interpreter of the embedded loop's environment: it has the peers that benchmarks compare with."""

from __future__ import annotations

from seatrial.launch.environments import Environments
from seatrial.loops import get_loop

loop = get_loop("trl")
found = Environments().find(loop.name, loop.lock())
print(found.python if found else "missing: run `seatrial env build trl`")
