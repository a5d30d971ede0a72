"""Print the interpreter of an environment that has the peers which benchmarks compare with: the embedded loop's, or `gym`."""

from __future__ import annotations

import sys

from seatrial.loops import environments
from seatrial.rollouts.backends import gym_install
from seatrial.runtime.environments import Environments

name = sys.argv[1] if len(sys.argv) > 1 else "trl"
found = Environments().find(name, {**environments(), gym_install.GYM_ENVIRONMENT: gym_install.GYM_LOCK}[name])
print(found.python if found else f"missing: run `seatrial env build {name}`")
