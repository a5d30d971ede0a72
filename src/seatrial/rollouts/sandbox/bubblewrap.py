"""The command line of bubblewrap and its seccomp filter: what a sandboxed program sees of this machine and may ask of its kernel.

- Own pid, network, ipc, uts and mount namespaces; no network, not even loopback. Read-only /usr and interpreter; no home, no secrets.
  Writable: /tmp and /dev/shm, of limited size. As root each program gets a user id of its own, else a user namespace.
- The filter closes what namespaces leave open: memory that no process is charged for (memfd, System V), new user namespaces, socket
  families that a network namespace does not confine, io_uring, bpf, perf, keys, userfaultfd, ptrace, file handles. Refused calls fail
  with EPERM; clone3 with ENOSYS, so that libc falls back to clone.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import platform
import shutil
import struct
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


def find_bubblewrap() -> str | None:
    return shutil.which("bwrap")


def uid_of(slot: int) -> int | None:
    """The user id of a slot: nobody else's. None where ids cannot be chosen, so that a user namespace must do."""
    ids = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
    if os.geteuid() != 0 or ids != ["0", "0", str(2**32 - 1)]:  # not root, or root of a container that has a few ids only
        return None
    return _FIRST_UID + (os.getpid() & 0x3FFFFF) * SLOTS + slot


def python() -> str:
    # That of the installation: an environment may hold a copy instead of a link.
    real = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    prefix = Path(os.path.realpath(sys.base_prefix))
    if _in_usr(prefix):
        return str(real)
    return f"{_RELOCATED}/{real.relative_to(prefix)}"


def interpreter() -> list[str]:
    """How a program is started: its standard library and nothing else, UTF-8 everywhere. Not -S: programs call exit()."""
    return [python(), "-I", "-B", "-X", "utf8"]


def bubblewrap_command(bwrap: str, limits: SandboxLimits, uid: int | None, seccomp: int, status: int, block: int) -> list[str]:
    """Everything before the launcher's own arguments; the last three are file descriptors."""
    words = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
    if uid is None:
        words += ["--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY), "--disable-userns", "--cap-drop", "ALL"]
    else:
        # What the launcher needs to become somebody else; they go with the user id.
        words += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    words += ["--die-with-parent", "--new-session", "--clearenv"]
    # One arena for each thread would use up the address space of a program with threads.
    variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
    variables |= {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}
    if not _in_usr(Path(os.path.realpath(sys.base_prefix))):
        variables["LD_LIBRARY_PATH"] = f"{_RELOCATED}/lib"
    for name, value in variables.items():
        words += ["--setenv", name, value]
    words += [*_read_only(), "--proc", "/proc", "--dev", "/dev"]
    words += ["--perms", "1777", "--size", str(_SHM), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    words += ["--perms", "1777", "--size", str(limits.disk_mb << 20), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
    return [*words, "--seccomp", str(seccomp), "--json-status-fd", str(status), "--block-fd", str(block), "--"]


def launcher_command(limits: SandboxLimits, uid: int | None, argv: list[str], cpu_s: float | None = None) -> list[str]:
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
    return [*interpreter(), "-S", "-c", inside_source("launcher"), json.dumps(plan)]


@functools.cache
def inside_source(name: str) -> str:
    return resources.files("seatrial.rollouts.sandbox.inside").joinpath(f"{name}.py").read_text(encoding="utf-8")


def _in_usr(prefix: Path) -> bool:
    return prefix.is_relative_to("/usr")


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


_REFUSED = {
    "x86_64": {
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "memfd_create": 319, "memfd_secret": 447,
        "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240, "mount": 165, "umount2": 166, "pivot_root": 155,
        "unshare": 272, "setns": 308, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
        "mount_setattr": 442, "open_by_handle_at": 304, "name_to_handle_at": 303, "userfaultfd": 323, "bpf": 321,
        "perf_event_open": 298, "add_key": 248, "request_key": 249, "keyctl": 250, "io_uring_setup": 425,
        "io_uring_enter": 426, "io_uring_register": 427, "chroot": 161, "fanotify_init": 300, "landlock_create_ruleset": 444,
    },
    "aarch64": {
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "memfd_create": 279, "memfd_secret": 447,
        "shmget": 194, "msgget": 186, "semget": 190, "mq_open": 180, "mount": 40, "umount2": 39, "pivot_root": 41,
        "unshare": 97, "setns": 268, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
        "mount_setattr": 442, "open_by_handle_at": 265, "name_to_handle_at": 264, "userfaultfd": 282, "bpf": 280,
        "perf_event_open": 241, "add_key": 217, "request_key": 218, "keyctl": 219, "io_uring_setup": 425,
        "io_uring_enter": 426, "io_uring_register": 427, "chroot": 51, "fanotify_init": 262, "landlock_create_ruleset": 444,
    },
}  # fmt: skip
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_SOCKET = {"x86_64": (41, 53), "aarch64": (198, 199)}
"""socket and socketpair."""
_CLONE3 = 435
_X32 = 0x40000000
"""Numbers from here on are those of x32, another interface of the same kernel."""
_NEW_NAMESPACES = 0x7E020000
"""Flags of clone: a new user, pid, net, ipc, uts, mount or cgroup namespace. (Low bits are a signal.)"""
_FAMILIES = (1, 2, 10)
"""unix, inet and inet6."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST = 0, 4, 16
"""Where the kernel puts them: the call's number, the architecture, the low half of its first argument."""
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000


def seccomp_supported() -> bool:
    return platform.machine() in _ARCHITECTURE


def seccomp_filter() -> bytes:
    machine = platform.machine()
    steps = [_step(_LOAD, 0, 0, _ARCH), _step(_EQUAL, 1, 0, _ARCHITECTURE[machine]), _give(_KILL), _step(_LOAD, 0, 0, _NUMBER)]
    if machine == "x86_64":
        steps += [_step(_AT_LEAST, 0, 1, _X32), _give(_FAIL | errno.EPERM)]
    steps += [_step(_EQUAL, 0, 1, _CLONE3), _give(_FAIL | errno.ENOSYS)]
    for number in sorted(_REFUSED[machine].values()):
        steps += [_step(_EQUAL, 0, 1, number), _give(_FAIL | errno.EPERM)]
    flags = [_step(_LOAD, 0, 0, _FIRST), _step(_ANY_BIT, 0, 1, _NEW_NAMESPACES), _give(_FAIL | errno.EPERM), _give(_ALLOW)]
    steps += [_step(_EQUAL, 0, len(flags), _CLONE[machine]), *flags]
    for number in _SOCKET[machine]:
        family = [_step(_LOAD, 0, 0, _FIRST)]
        for allowed in _FAMILIES:
            family += [_step(_EQUAL, 0, 1, allowed), _give(_ALLOW)]
        family.append(_give(_FAIL | errno.EPERM))
        steps += [_step(_EQUAL, 0, len(family), number), *family]
    return b"".join([*steps, _give(_ALLOW)])


def _step(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _give(answer: int) -> bytes:
    return _step(_RETURN, 0, 0, answer)
