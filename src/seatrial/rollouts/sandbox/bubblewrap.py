"""The command line of bubblewrap: what a sandboxed program sees of this machine.

- Its own pid, network, ipc, uts and mount namespaces; nothing of the network, not even this machine's loopback.
- Read-only: /usr, the links into it, the loader's cache, and the interpreter that Seatrial runs on, without what is installed in it. An
  interpreter that is not in /usr is seen as /python, so nothing shows where it lies. No home, no /work, no secrets.
- Writable: /tmp and /dev/shm, each of limited size. The root itself is read-only.
- As root, each program gets a user id of its own, or limits on processes would not hold (the kernel exempts root). Otherwise it
  runs in a user namespace of its own, where they hold too.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import sys
from importlib import resources
from pathlib import Path
from typing import Any

from seatrial.rollouts.campaign import SandboxLimits

SLOTS = 256
"""User ids of one Seatrial process, so sandboxes at a time."""
_FIRST_UID = 1_000_000_000
_NOBODY = 65534
_SHM = 8 << 20
_OPEN_FILES = 64
"""Of a process. Few: what stands in the buffers of sockets is memory that nobody is charged for."""
_RELOCATED = "/python"
"""At the top: bubblewrap gives parents the permissions that they have outside, and a home is closed to others."""
_LINKED = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_BARE = ("/etc/ld.so.cache", "/etc/alternatives")


def find() -> str | None:
    """bubblewrap, if it is installed."""
    return shutil.which("bwrap")


def uid_of(slot: int) -> int | None:
    """The user id of a slot: nobody else's. None where ids cannot be chosen, so that a user namespace must do."""
    if os.geteuid() != 0 or not _all_uids():
        return None
    return _FIRST_UID + (os.getpid() & 0x3FFFFF) * SLOTS + slot


@functools.cache
def _all_uids() -> bool:
    """Whether this process is root of the machine, not of a container that has a few ids only."""
    return Path("/proc/self/uid_map").read_text(encoding="ascii").split() == ["0", "0", str(2**32 - 1)]


def python() -> str:
    """The interpreter, as the program sees it."""
    # That of the installation: an environment may hold a copy instead of a link.
    real = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    prefix = Path(os.path.realpath(sys.base_prefix))
    if _in_usr(prefix):
        return str(real)
    return f"{_RELOCATED}/{real.relative_to(prefix)}"


def interpreter() -> list[str]:
    """How a program is started: its standard library and nothing else, UTF-8 everywhere. Not -S: programs call exit()."""
    return [python(), "-I", "-B", "-X", "utf8"]


def command(bwrap: str, limits: SandboxLimits, uid: int | None, seccomp: int, status: int, block: int) -> list[str]:
    """Everything before the launcher's own arguments; the last three are file descriptors."""
    words = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
    if uid is None:
        words += ["--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY), "--disable-userns", "--cap-drop", "ALL"]
    else:
        # What the launcher needs to become somebody else; they go with the user id.
        words += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    words += ["--die-with-parent", "--new-session", "--clearenv"]
    for name, value in _environment().items():
        words += ["--setenv", name, value]
    words += [*_read_only(), "--proc", "/proc", "--dev", "/dev"]
    words += ["--perms", "1777", "--size", str(_SHM), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    words += ["--perms", "1777", "--size", str(limits.disk_mb << 20), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
    return [*words, "--seccomp", str(seccomp), "--json-status-fd", str(status), "--block-fd", str(block), "--"]


def launch(limits: SandboxLimits, uid: int | None, argv: list[str], cpu_s: float | None = None) -> list[str]:
    """The launcher's arguments; `cpu_s` instead of the limits' own."""
    cpu, memory = math.ceil(limits.cpu_s if cpu_s is None else cpu_s), limits.memory_mb << 20
    plan: dict[str, Any] = {
        "uid": uid,
        "argv": argv,
        "limits": {
            # Address space is more than memory; the watcher measures memory itself. This stops what it would be too slow for.
            "RLIMIT_AS": (2 * memory, 2 * memory),
            "RLIMIT_CPU": (cpu, cpu + 1),
            # One more, for bubblewrap: in a user namespace it counts.
            "RLIMIT_NPROC": (limits.processes + 1, limits.processes + 1),
            "RLIMIT_FSIZE": (limits.disk_mb << 20, limits.disk_mb << 20),
            "RLIMIT_NOFILE": (_OPEN_FILES, _OPEN_FILES),
            "RLIMIT_CORE": (0, 0),
            "RLIMIT_MEMLOCK": (0, 0),
            "RLIMIT_MSGQUEUE": (0, 0),
        },
    }
    return [*interpreter(), "-S", "-c", _launcher(), json.dumps(plan)]


@functools.cache
def _launcher() -> str:
    return inside("launcher")


def inside(name: str) -> str:
    """The text of a module that runs in the sandbox."""
    return resources.files("seatrial.rollouts.sandbox.inside").joinpath(f"{name}.py").read_text(encoding="utf-8")


def _in_usr(prefix: Path) -> bool:
    return prefix.is_relative_to("/usr")


def _environment() -> dict[str, str]:
    found = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
    # One arena for each thread would use up the address space of a program with threads.
    found |= {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}
    return found if _in_usr(Path(os.path.realpath(sys.base_prefix))) else {**found, "LD_LIBRARY_PATH": f"{_RELOCATED}/lib"}


@functools.cache
def _read_only() -> tuple[str, ...]:
    words = ["--ro-bind", "/usr", "/usr"]
    for name in _LINKED:
        if Path(name).is_symlink():
            words += ["--symlink", str(Path(name).readlink()), name]
        elif Path(name).is_dir():
            words += ["--ro-bind", name, name]
    words += ["--perms", "0755", "--dir", "/etc"]
    for name in _BARE:
        words += ["--ro-bind-try", name, name]
    prefix = Path(os.path.realpath(sys.base_prefix))
    seen = str(prefix) if _in_usr(prefix) else _RELOCATED
    if not _in_usr(prefix):
        words += ["--ro-bind", str(prefix), seen]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # Debian's Python has its packages in other places.
    places = (f"lib/{version}/site-packages", f"lib/{version}/dist-packages", "lib/python3/dist-packages")
    for packages in (*places, f"local/lib/{version}/dist-packages"):
        if (prefix / packages).is_dir():
            words += ["--size", "4096", "--tmpfs", f"{seen}/{packages}", "--remount-ro", f"{seen}/{packages}"]
    return tuple(words)
