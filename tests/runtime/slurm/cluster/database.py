"""Accounting for a private cluster: a MariaDB and a slurmdbd of its own.

- The database lives under the cluster's root, listens on 127.0.0.1 with a random password, and is thrown away by the next `up`.
- It is tuned for a short life: no durability, small logs. Making it takes most of the bring-up.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from seatrial.runtime.servers import port_in_use
from tests.runtime.slurm.cluster.conf import Accounting
from tests.runtime.slurm.cluster.processes import Processes
from tests.runtime.slurm.cluster.tools import tool

_MAKE_S = 120.0
_QUICK = ("--innodb-log-file-size=4M", "--innodb-buffer-pool-size=32M", "--innodb-flush-log-at-trx-commit=0", "--innodb-doublewrite=0")

Ready = Callable[[str, Callable[[], bool]], None]
"""Waits for a daemon by its name and a condition, and raises when it ends instead."""


def start(root: Path, processes: Processes, accounting: Accounting, environ: Mapping[str, str], ready: Ready) -> None:
    """Make a database, start it, and start slurmdbd on it; returns when slurmdbd listens."""
    data = root / "database"
    places = ["--no-defaults", f"--datadir={data}", f"--user={pwd.getpwuid(os.geteuid()).pw_name}"]
    argv = [tool("mariadb-install-db"), *places, "--auth-root-authentication-method=normal", "--skip-test-db", "--cross-bootstrap", *_QUICK]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_MAKE_S, cwd=root)
    if done.returncode:
        raise RuntimeError(f"mariadb-install-db: {done.stdout}{done.stderr}")
    grant = root / "run" / "grant.sql"
    grant.touch(mode=0o600)
    statements = (  # each on a line of its own, or the server skips it in silence
        "CREATE DATABASE slurm;",
        f"CREATE USER slurm@'127.0.0.1' IDENTIFIED BY '{accounting.password}';",
        "GRANT ALL ON slurm.* TO slurm@'127.0.0.1';",
    )
    grant.write_text("\n".join([*statements, ""]), encoding="utf-8")
    where = [f"--port={accounting.database_port}", "--bind-address=127.0.0.1", f"--socket={root}/run/mariadb.socket"]
    where += [f"--pid-file={root}/run/mariadb.pid", f"--init-file={grant}", "--skip-name-resolve", "--innodb-lock-wait-timeout=900"]
    processes.start("mariadbd", [tool("mariadbd"), *places, *where, *_QUICK], environ)
    ready("mariadbd", lambda: port_in_use(accounting.database_port))
    processes.start("slurmdbd", [tool("slurmdbd"), "-D"], environ)
    ready("slurmdbd", lambda: port_in_use(accounting.port))
