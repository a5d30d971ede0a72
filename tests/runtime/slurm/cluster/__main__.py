"""The private Slurm by hand: `python -m tests.runtime.slurm.cluster up|down|env ROOT [--accounting] [--namespaces]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.runtime.slurm.cluster.private import PrivateSlurm


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.runtime.slurm.cluster", description=__doc__)
    parser.add_argument("action", choices=["up", "down", "env"])
    parser.add_argument("root", type=Path)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--accounting", action="store_true", help="slurmdbd with a MariaDB of its own")
    parser.add_argument("--namespaces", action="store_true", help="each node with its own host name and address (root only)")
    parser.add_argument("--min-job-age", type=int, default=300, help="seconds until a finished job is forgotten")
    words = parser.parse_args()
    cluster = PrivateSlurm(
        words.root,
        nodes=words.nodes,
        accounting=words.accounting,
        network="namespaces" if words.namespaces else "loopback",
        min_job_age=words.min_job_age,
        keep=True,
    )
    if words.action == "up":
        cluster.up()
    if words.action == "down":
        cluster.down()
    else:
        sys.stdout.writelines(f"export {key}={value}\n" for key, value in cluster.env.items())
    return 0


if __name__ == "__main__":
    sys.exit(main())
