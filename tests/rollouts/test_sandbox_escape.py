"""Attempts to get out of the sandbox, or to take more than its limits: all contained, quickly, and nothing is left afterwards."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from seatrial.rollouts.sandbox.sandbox import Sandbox
from tests.rollouts.sandboxes import LIMITS, left_over, needs_sandbox, ran

ANYBODYS = "/usr/bin/python3.11"
pytestmark = [pytest.mark.slow, needs_sandbox()]

FORK_BOMB = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""
THREADS = """
import threading, time
while True:
    threading.Thread(target=time.sleep, args=(9,)).start()
"""
MANY_SMALL = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(os.urandom(1)) * (40 << 20)
        time.sleep(99)
time.sleep(99)
"""
SHARED = """
import mmap
held = []
while True:
    held.append(mmap.mmap(-1, 1 << 20))
    held[-1].write(b"x" * (1 << 20))
"""
DEAF = """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
time.sleep(99)
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 99)
        time.sleep(99)
    os._exit(0)
"""
KILLER = """
import os, signal
for pid in (1, os.getppid(), 0, -1):
    try: os.kill(pid, signal.SIGKILL)
    except OSError: pass
"""
FILES = """
number = 0
while True:
    open(f"/tmp/{number}", "w").close()
    number += 1
"""
ENDLESS: dict[str, tuple[str, set[str]]] = {
    "a fork bomb": (FORK_BOMB, {"processes"}),
    "a bomb of threads": (THREADS, {"processes", "done"}),
    "memory": ("x = []\nwhile True: x.append(bytearray(1 << 20))", {"memory"}),
    "one huge allocation": ("bytearray(1 << 40)", {"done"}),
    "memory over many small processes": (MANY_SMALL, {"memory"}),
    "shared memory": (SHARED, {"memory"}),
    "a gigabyte of output": ("import os\nwhile True: os.write(1, b'x' * (1 << 16))", {"output"}),
    "a gigabyte of errors": ("import os\nwhile True: os.write(2, b'x' * (1 << 16))", {"output"}),
    "endless work": ("while True: pass", {"timeout"}),
    "sleeping for ever": ("import time\ntime.sleep(1e6)", {"timeout"}),
    "deaf to signals": (DEAF, {"timeout"}),
    "a daemon that closes everything": (DAEMON, {"done"}),
    "files without end": (FILES, {"files", "timeout"}),
    "killing everybody": (KILLER, {"killed"}),
}
ENVIRONMENTS = """
import glob, os
print(dict(os.environ))
for name in glob.glob("/proc/*/environ"):
    try: print(open(name).read())
    except OSError: pass
"""


@pytest.mark.parametrize("name", ENDLESS)
def test_what_would_go_on_for_ever_is_ended(name: str) -> None:
    program, endings = ENDLESS[name]
    timely = LIMITS if "timeout" in endings else LIMITS.model_copy(update={"wall_s": 45.0, "cpu_s": 20.0})
    result = ran(program, limits=timely)
    assert result.ending in endings, (result.ending, result.stderr[-500:])
    assert result.seconds < 60  # it would be for ever; on a loaded machine the end takes its time
    assert len(result.stdout) <= LIMITS.output_kb << 10


REFUSED = {
    "reading /root": "os.listdir('/root')",
    "reading /work": "os.listdir('/work')",
    "reading /home": "os.listdir('/home')",
    "secrets": "open('/etc/shadow')",
    "writing to the root": "open('/x', 'w')",
    "writing to /usr": "open('/usr/x', 'w')",
    "writing to the interpreter": "open(os.__file__, 'a')",
    "writing to /etc": "open('/etc/x', 'w')",
    "writing to /dev": "open('/dev/x', 'w')",
    "writing to /proc/sys": "open('/proc/sys/kernel/hostname', 'w').write('x')",
    "the environment of the first process": "assert not open('/proc/1/environ').read(); raise OSError",
    "memory of the kernel": "open('/proc/kcore', 'rb').read(1)",
    "a device": "open('/dev/vda', 'rb')",
    "making a device": "os.mknod('/tmp/d', 0o60600, os.makedev(254, 0)); open('/tmp/d', 'rb')",
    "a link in /tmp out of it": "os.symlink('/root', '/tmp/l'); os.listdir('/tmp/l')",
    "a link to a process's root": "os.symlink('/proc/1/root/work', '/tmp/l'); os.listdir('/tmp/l')",
    "a way up": "os.chdir('../../../../../work')",
    "chroot": "os.chroot('/tmp')",
    "becoming root": "os.setuid(0)",
    "a setuid program": "assert subprocess.run(['su', '-c', 'id', 'root'], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0",
    "mount": "assert libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0",
    "a user namespace": "assert libc.unshare(0x10000000) == 0",
    "a user namespace by clone": "assert libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0",
    "ptrace": "assert libc.ptrace(16, os.getppid(), 0, 0) == 0",
    "anonymous files": "os.memfd_create('x')",
    "system V memory": "assert libc.shmget(0, 1 << 30, 0o1600) >= 0",
    "vsock, which leaves a virtual machine": "socket.socket(socket.AF_VSOCK)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "raw packets": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "a server elsewhere": "socket.create_connection(('1.1.1.1', 53), 1)",
    "names": "socket.getaddrinfo('example.com', 80)",
    "a huge name": "open('/tmp/' + 'x' * 300, 'w')",
    "filling /tmp": "[open(f'/tmp/{i}', 'wb').write(b'x' * (1 << 20)) for i in range(20)]",
    "filling /dev/shm": "[open(f'/dev/shm/{i}', 'wb').write(b'x' * (1 << 20)) for i in range(20)]",
    "a large file": "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); open('/tmp/x', 'wb').truncate(1 << 30)",
    "many open files": "x = [open('/dev/null') for _ in range(1000)]",
    "raising a limit": "resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))",
    "the packages of Seatrial": "import seatrial",
    "a library that is installed": "import pydantic",
}  # fmt: skip


def test_everything_forbidden_fails() -> None:
    """One program makes every attempt, each in a process of its own, and says which did not fail."""
    lines = ["import ctypes, os, resource, signal, socket, subprocess, sys", "libc = ctypes.CDLL(None, use_errno=True)", "attempts = {}"]
    for name, code in REFUSED.items():
        lines += [f"def attempt():\n    {code}", f"attempts[{name!r}] = attempt"]
    lines += [
        "for name, attempt in attempts.items():",
        "    child = os.fork()",
        "    if child == 0:",
        "        try: attempt()",
        "        except (OSError, ValueError, ImportError, AssertionError, PermissionError): os._exit(0)",
        "        os._exit(1)",
        "    if os.waitpid(child, 0)[1]: print(name)",
        "    for place in ('/tmp', '/dev/shm'):",
        "        for left in os.listdir(place):",
        "            if left != 'main.py': os.unlink(f'{place}/{left}')",
        "print('tried', len(attempts))",
    ]
    result = ran("\n".join(lines))
    assert (result.stdout, result.stderr) == (f"tried {len(REFUSED)}\n", "")


def test_a_server_on_this_machine_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), 1):
            result = ran(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)")
    assert "ConnectionRefusedError" in result.stderr


def test_processes_of_the_machine_are_not_seen() -> None:
    result = ran("import os\nprint(sorted(n for n in os.listdir('/proc') if n.isdigit()), os.readlink('/proc/self'))")
    assert result.stdout.strip() == "['1', '2'] 2"


def test_no_secret_and_no_path_of_ours_is_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-do-not-tell")
    result = ran(ENVIRONMENTS)
    assert "'HOME': '/tmp'" in result.stdout
    assert "sk-do-not-tell" not in result.stdout
    assert str(Path.cwd()) not in result.stdout


def test_a_crash_leaves_no_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = ran("import os\nos.abort()")
    assert (result.ending, result.exit_code) == ("done", 134)
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_does_not_read_its_input_holds_nobody_up() -> None:
    assert ran("print(1)", stdin="x" * (16 << 20)).stdout == "1\n"


def test_nothing_outlives_a_seatrial_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio\nfrom tests.rollouts.sandboxes import LIMITS\nfrom seatrial.rollouts.sandbox.sandbox import Sandbox\n"
        "asyncio.run(Sandbox(LIMITS.model_copy(update={'wall_s': 60.0})).run('import time\\ntime.sleep(60)'))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    owner = subprocess.Popen([sys.executable, "-c", code], env=environment)
    stops = time.monotonic() + 60
    while len(family := psutil.Process(owner.pid).children(recursive=True)) < 3 and time.monotonic() < stops:
        time.sleep(0.02)
    owner.kill()
    owner.wait()
    gone, alive = psutil.wait_procs(family, timeout=45)
    assert (len(gone), alive) == (3, [])


def test_a_cancelled_run_leaves_nothing() -> None:
    """At every moment of its short life: while it is made, begins, runs and ends."""

    async def cancel(after_s: float) -> None:
        task = asyncio.create_task(Sandbox(LIMITS).run("import time\ntime.sleep(0.02)"))
        await asyncio.sleep(after_s)
        task.cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(task, return_exceptions=True)

    async def often() -> None:
        await cancel(0)
        for step in range(24):
            await cancel(step * 0.003)

    asyncio.run(often())
    assert left_over() == []


@pytest.mark.timeout(60)
def test_a_run_whose_loop_ends_leaves_nothing() -> None:
    """`asyncio.run` cancels every task that is left, those within the start too."""

    async def leave(turns: int) -> None:
        task = asyncio.create_task(Sandbox(LIMITS).run("import time\ntime.sleep(60)"))
        for _ in range(turns):
            await asyncio.sleep(0)
        assert not task.done()

    for turns in (1, 2, 3, 4, 6, 9, 40):
        asyncio.run(leave(turns))
    assert left_over() == []


@pytest.mark.skipif(os.geteuid() != 0 or not Path(ANYBODYS).exists(), reason=f"needs root, to become somebody else, and {ANYBODYS}")
def test_a_user_who_is_not_root_is_as_safe(tmp_path: Path) -> None:
    """The same limits hold in a user namespace: a fork bomb, memory over many processes, and what is forbidden."""
    code = (
        "from tests.rollouts.sandboxes import ran\nfrom tests.rollouts.test_sandbox_escape import ENDLESS, REFUSED\n"
        "from seatrial.rollouts.sandbox.sandbox import why_not\nassert why_not() is None, why_not()\n"
        "for name in ('a fork bomb', 'memory over many small processes', 'files without end', 'a daemon that closes everything'):\n"
        "    program, endings = ENDLESS[name]\n    result = ran(program)\n    assert result.ending in endings, (name, result)\n"
        "import tests.rollouts.test_sandbox_escape as t\nt.test_everything_forbidden_fails()\n"
    )
    source = Path(__file__).parents[2]
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    environment = {"PYTHONPATH": f"{source / 'src'}:{source}:{packages}", "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [ANYBODYS, "-c", code]
    done = subprocess.run(
        command, user=65534, group=65534, extra_groups=[], env=environment, cwd="/", capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
