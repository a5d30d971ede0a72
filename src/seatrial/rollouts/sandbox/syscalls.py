"""The system calls that a sandboxed program may not make, as a seccomp filter for bubblewrap.

Namespaces and a dropped user id do most of the work. The filter closes what they leave open:
- memory that no process is charged for, so that no watcher sees it: memfd, System V shared memory, queues and semaphores;
- new user namespaces, in which the program would be root and could mount file systems without a size limit;
- socket families that a network namespace does not confine, such as vsock, which reaches the host of a virtual machine;
- corners of the kernel that no answer to a task needs: io_uring, bpf, perf, keys, userfaultfd, ptrace, handles of files.

Refused calls fail with EPERM; clone3, whose flags a filter cannot read, with ENOSYS, so that libc falls back to clone.
"""

from __future__ import annotations

import errno
import platform
import struct

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


def supported() -> bool:
    """Whether the calls of this machine's processor are known here."""
    return platform.machine() in _ARCHITECTURE


def program() -> bytes:
    """The filter, as the kernel takes it."""
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
