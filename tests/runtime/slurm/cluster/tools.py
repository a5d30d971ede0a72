"""What a private cluster needs from the machine: programs, a compiler for the fake pyxis, devices to play GPUs, free ports.

- `missing` is for skips: it names the exact command that installs what is absent.
- Ports lie below the range from which the kernel serves outgoing connections: nobody takes the port of a controller that
  a test has killed. Processes start their search at different places, so clusters that come up together do not meet.
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import subprocess
from pathlib import Path

from seatrial.runtime.servers import port_in_use

HEADER = Path("/usr/include/slurm/spank.h")
SOURCE = Path(__file__).with_name("fake_pyxis.c")

_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_PORTS = range(12000, 32000)
_count = itertools.count()


def installed(program: str) -> bool:
    """Whether a program, or a file given by its path, is there."""
    return shutil.which(program, path=_PATH) is not None or Path(program).exists()


def tool(name: str) -> str:
    """Path of a program; also where an ordinary user's PATH does not look."""
    found = shutil.which(name, path=_PATH)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed: run `sh scripts/slurm.sh` as root")
    return found


def missing(accounting: bool, pyxis: bool, namespaces: bool) -> str | None:
    """What to run before such a cluster can come up here; None when it can."""
    wanted = [("slurm-wlm", "slurmctld"), ("slurm-wlm", "slurmd"), ("slurm-wlm", "sbatch")]
    if accounting:
        wanted += [("slurmdbd", "slurmdbd"), ("mariadb-server", "mariadbd"), ("mariadb-server", "mariadb-install-db")]
    if pyxis:
        wanted += [("gcc", "gcc"), ("libc6-dev", "/usr/include/stdio.h"), ("libslurm-dev", str(HEADER))]
    if namespaces:
        wanted += [("munge", "munged"), ("iproute2", "ip"), ("util-linux", "unshare"), ("util-linux", "nsenter")]
    packages = dict.fromkeys(package for package, program in wanted if not installed(program))
    if packages:
        return f"apt-get install --no-install-recommends {' '.join(packages)} (or, as root: sh scripts/slurm.sh)"
    if namespaces and os.geteuid() != 0:
        return "run as root: network namespaces and bridges are root's"
    return None


def build_pyxis(target: Path) -> Path:
    """Compile the fake pyxis against this machine's Slurm."""
    target.parent.mkdir(parents=True, exist_ok=True)
    argv = [tool("gcc"), "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(target), str(SOURCE)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{SOURCE} does not compile:\n{done.stderr}")
    return target


def gpu_devices(directory: Path, count: int) -> tuple[str, ...]:
    """`count` character devices: Slurm takes nothing else for a GPU. Clones of /dev/null, or terminals when we may not make any."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"nvidia{index}" for index in range(count)]
    try:
        for path in paths:
            if not path.exists():
                os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        return tuple(f"/dev/tty{index}" for index in range(count))
    return tuple(str(path) for path in paths)


def free_ports(count: int) -> list[int]:
    """Neighbouring ports that nobody uses."""
    blocks = len(_PORTS) // count
    first = os.getpid() + 101 * next(_count)
    for index in range(blocks):
        start = _PORTS[(first + index) % blocks * count]
        ports = list(range(start, start + count))
        if not any(port_in_use(port) for port in ports):
            return ports
    raise RuntimeError(f"no {count} free ports side by side in {_PORTS}")
