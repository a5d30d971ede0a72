"""A trial inside Ray: before any level runs, a worker of every node says from where it would import the change.

The job that started Ray says how many nodes there must be. Where there is no Ray, nothing is asked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from seatrial.files import read_table
from seatrial.launch.process import ProcessSpec, run
from seatrial.launch.ray import check_nodes
from seatrial.model.errors import UserError
from seatrial.model.record import Finding
from seatrial.trial.level import Bench
from seatrial.trial.machine import RAY_NODES
from seatrial.trial.preflight import child_environment

DEADLINE_S = 300


def ray_findings(bench: Bench, environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """One finding per node and package; a node that is missing, silent or imports from elsewhere is not ok."""
    nodes = environ.get(RAY_NODES)
    if nodes is None:
        return ()
    evidence = bench.context.run_dir / "evidence"
    facts, roots = evidence / "ray-nodes.json", {}
    for repo in (repo for repo in bench.context.changes if not repo.synced):  # a copy is made later, and each level proves it
        roots.update(dict.fromkeys(repo.packages, repo.import_root or repo.path))
    facts.unlink(missing_ok=True)  # those of an earlier attempt say nothing about this cluster
    words = [word for package, root in roots.items() for word in ("--root", f"{package}={root}")]
    variables = ("--env", f"PYTHONPATH={os.pathsep.join(bench.import_path())}")
    spec = ProcessSpec(
        argv=(str(bench.context.python), "-m", "seatrial.probes.ray_nodes", "--out", str(facts), "--nodes", nodes, *words, *variables),
        env=child_environment(bench.environ, bench.import_path(), {}),
        cwd=bench.instruments,
        log=evidence / "ray-nodes.log",
        run_id=f"{bench.context.run_dir.name}-ray-nodes-{time.time_ns()}",
        deadline_s=DEADLINE_S + 60,
        stall_s=DEADLINE_S + 60,
        line_filter=bench.redactor.lines().line,
    )
    run(spec)
    try:
        found = read_table(facts) if facts.is_file() else {}
    except UserError as error:  # its process was killed while it wrote
        found = {"error": error.message}
    return check_nodes(found, int(nodes), roots)
