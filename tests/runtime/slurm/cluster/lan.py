"""A small network for the nodes of one private cluster: a bridge, and per node a host of its own.

- A node's host is a process that holds a network, a UTS and a mount namespace: own address, host name, ports and /etc/hosts.
  It outlives the node's slurmd, as a machine does. The machine's own files are never edited.
- What the node runs sees no processes but its own, and a /tmp/ray of its own: `ray stop` ends every Ray that it sees.
- The nodes reach each other and this machine, and nothing else: a connection to the outside fails at once.
- The bridge carries the cluster's root as its alias, so `down` finds it without any record, also after a crash. Namespaces
  have no name and vanish with the last process in them.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.runtime.slurm.cluster.processes import Processes
from tests.runtime.slurm.cluster.tools import tool

_SUBNETS = [ipaddress.IPv4Network(f"10.213.{number}.0/24") for number in range(256)]
_HOST = 'hostname "$1" && mount --bind "$2" /etc/hosts && ip link set lo up && exec sleep infinity'
_BOOT = 'mkdir -p /tmp/ray && mount -t tmpfs -o mode=1777 none /tmp/ray && "$@"; exit $?'
"""The shell stays, as process 1: it collects what others orphan, and everything ends with it."""
_READY_S = 10.0
_SUFFIX = "-host"


class Lan:
    """The network of the cluster at `root`; does nothing until `up`."""

    def __init__(self, root: Path, processes: Processes) -> None:
        self._root = root
        self._processes = processes
        self.gateway = ""
        """This machine's address in the network."""

    def up(self, nodes: Sequence[str]) -> dict[str, str]:
        """Make the network and a host for every node; returns the nodes' addresses."""
        bridge, subnet = self._make_bridge()
        self.gateway = str(subnet[254])
        addresses = {name: str(subnet[number]) for number, name in enumerate(nodes, 1)}
        _ip("addr", "add", f"{self.gateway}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        names = {"localhost": "127.0.0.1", socket.gethostname().partition(".")[0]: self.gateway, **addresses}
        (self._root / "hosts").write_text("".join(f"{address} {name}\n" for name, address in names.items()), encoding="utf-8")
        for name in nodes:
            argv = [
                tool("unshare"),
                "--net",
                "--uts",
                "--mount",
                "--propagation=slave",
                "sh",
                "-ec",
                _HOST,
                "sh",
                name,
                f"{self._root}/hosts",
            ]
            self._processes.start(_host(name), argv, dict(os.environ))
        for number, (name, address) in enumerate(addresses.items(), 1):
            self._connect(name, address, bridge, f"{bridge}n{number}")
        return addresses

    def inside(self, node: str, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on that node's host."""
        return [tool("nsenter"), f"--target={self._processes.pid(_host(node))}", "--net", "--uts", "--mount", *argv]

    def boot(self, node: str, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` there with a process table that begins, and ends, with it."""
        own = [tool("unshare"), "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return self.inside(node, [*own, "sh", "-c", _BOOT, "sh", *argv])

    def inhabitants(self, node: str | None = None) -> set[int]:
        """PIDs of everything on that node's host, or on all of them, but the hosts themselves."""
        names = [_host(node)] if node else [name for name in self._processes.names() if name.endswith(_SUFFIX)]
        hosts = {pid for name in names if (pid := self._processes.pid(name)) is not None}
        spaces = {_network(pid) for pid in hosts} - {_network(os.getpid()), None}
        if not spaces:
            return set()
        pids = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
        return {pid for pid in pids - hosts if _network(pid) in spaces}

    def down(self) -> None:
        """Remove the bridge and its cables. The hosts are processes and must have been ended."""
        if not Path("/sys/class/net").is_dir() or os.geteuid() != 0 or not (self._root / "hosts").exists():
            return
        for bridge in self._bridges():
            for cable in json.loads(_ip("-json", "link", "show", "master", bridge) or "[]"):
                _ip("link", "delete", cable["ifname"], check=False)  # it may vanish with its namespace meanwhile
            _ip("link", "delete", bridge)

    def _bridges(self) -> list[str]:
        links = json.loads(_ip("-json", "link", "show", "type", "bridge") or "[]")
        return [link["ifname"] for link in links if link.get("ifalias") == str(self._root)]

    def _make_bridge(self) -> tuple[str, ipaddress.IPv4Network]:
        """The kernel refuses a second bridge of the same name: whoever makes the bridge has the subnet."""
        routes = json.loads(_ip("-json", "-4", "route", "show", "table", "all"))
        taken = [ipaddress.ip_network(route["dst"]) for route in routes if route["dst"][0].isdigit()]
        for subnet in _SUBNETS:
            if any(subnet.overlaps(other) for other in taken if isinstance(other, ipaddress.IPv4Network)):
                continue
            name = f"seaslurm{subnet.network_address.packed[2]}"
            argv = [tool("ip"), "link", "add", "name", name, "type", "bridge"]
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                _ip("link", "set", name, "alias", str(self._root))  # `add` takes an alias and drops it
                return name, subnet
            if "File exists" not in done.stderr:
                raise RuntimeError(f"cannot make a bridge: {done.stderr.strip()}")
        raise RuntimeError(f"no subnet of {_SUBNETS[0]} to {_SUBNETS[-1]} is free")

    def _connect(self, node: str, address: str, bridge: str, cable: str) -> None:
        host = self._processes.pid(_host(node))
        ends = time.monotonic() + _READY_S
        while host is None or not _is_ready(host):
            host = self._processes.pid(_host(node))
            if host is None or time.monotonic() > ends:
                raise RuntimeError(f"the host of {node} did not come up: {self._root}/log/{_host(node)}.out")
            time.sleep(0.01)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(host))
        _ip("link", "set", cable, "master", bridge, "up")
        for words in (["addr", "add", f"{address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            subprocess.run(self.inside(node, [tool("ip"), *words]), check=True, capture_output=True)


def _host(node: str) -> str:
    return f"{node}{_SUFFIX}"


def _is_ready(pid: int) -> bool:
    """The host's last act is to become `sleep`."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "sleep"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _network(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def _ip(*words: str, check: bool = True) -> str:
    done = subprocess.run([tool("ip"), *words], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
