"""The configuration files of a private cluster, as text.

- Close to real clusters where launchers fail on them: consumable cores and memory, GPUs as generic resources, preemption.
- Nothing of the machine is used: no cgroups, no PMIx, no file outside the cluster's root.
- `main` is the default partition, `low` is requeued whenever another partition needs its nodes, `high` goes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MEMORY_MB = 64000
"""What each node claims to have."""


@dataclass(frozen=True)
class Node:
    """One node as Slurm shall see it."""

    name: str
    address: str
    port: int
    hostname: str


@dataclass(frozen=True)
class Accounting:
    """Where slurmdbd and its database listen."""

    port: int
    database_port: int
    password: str


@dataclass(frozen=True)
class Shape:
    """All that the files say."""

    root: Path
    user: str
    hostname: str
    """This machine's name, where the controller runs."""
    address: str
    """This machine's address as the nodes see it."""
    controller_port: int
    nodes: tuple[Node, ...]
    cpus: int
    devices: tuple[str, ...]
    """The character devices that play the GPUs of each node."""
    munge: bool
    accounting: Accounting | None
    plugin: Path | None
    min_job_age: int
    settings: Mapping[str, str]
    """Lines of slurm.conf to set or replace."""


def write(shape: Shape) -> None:
    """Write every file that Slurm reads under `shape.root`."""
    root = shape.root
    (root / "slurm.conf").write_text(slurm_conf(shape), encoding="utf-8")
    (root / "gres.conf").write_text("".join(["AutoDetect=off\n", *(f"Name=gpu File={path}\n" for path in shape.devices)]), encoding="utf-8")
    # Also when empty: without this file Slurm would read the machine's own.
    (root / "plugstack.conf").write_text(f"required {shape.plugin}\n" if shape.plugin else "", encoding="utf-8")
    if shape.accounting:
        secret = root / "slurmdbd.conf"
        secret.touch(mode=0o600)
        secret.write_text(slurmdbd_conf(shape, shape.accounting), encoding="utf-8")


def slurm_conf(shape: Shape) -> str:
    """slurm.conf; a setting of the caller replaces ours."""
    general = {**_identity(shape), **_behaviour(shape), **_bookkeeping(shape), **shape.settings}
    gpus = f" Gres=gpu:{len(shape.devices)}" if shape.devices else ""
    nodes = (
        f"NodeName={node.name} NodeHostname={node.hostname} NodeAddr={node.address} Port={node.port}"
        f" CPUs={shape.cpus} RealMemory={MEMORY_MB}{gpus}"
        for node in shape.nodes
    )
    partitions = (
        "PartitionName=main Default=YES Nodes=ALL PriorityTier=5 PreemptMode=OFF",
        "PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF",
        "PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE",
    )
    return "\n".join([*(f"{key}={value}" for key, value in general.items()), *nodes, *partitions, ""])


def _identity(shape: Shape) -> dict[str, str]:
    root = shape.root
    # A requeued job is held for cred_expire + 1 seconds; the default would be two minutes.
    auth = f"socket={root}/munge.socket,cred_expire=5" if shape.munge else "cred_expire=5"
    kind = "munge" if shape.munge else "none"
    return {
        "ClusterName": "private",
        "SlurmctldHost": f"{shape.hostname}({shape.address})",
        "SlurmctldPort": str(shape.controller_port),
        "SlurmUser": shape.user,
        "SlurmdUser": shape.user,
        "AuthType": f"auth/{kind}",
        "CredType": f"cred/{kind}",
        "AuthInfo": auth,
        "StateSaveLocation": f"{root}/state",
        "SlurmdSpoolDir": f"{root}/spool/%n",
        "SlurmctldPidFile": f"{root}/run/slurmctld.pid",
        "SlurmdPidFile": f"{root}/run/%n.pid",
        "SlurmctldLogFile": f"{root}/log/slurmctld.log",
        "SlurmdLogFile": f"{root}/log/%n.log",
        # On loopback nobody else shall reach the daemons. Elsewhere they must listen on the address that the nodes see.
        **({"CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny"} if shape.address == "127.0.0.1" else {}),
        "PlugStackConfig": f"{root}/plugstack.conf",
    }


def _behaviour(shape: Shape) -> dict[str, str]:
    return {
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "DefMemPerCPU": str(MEMORY_MB // shape.cpus),
        "SlurmdParameters": "config_overrides",  # nodes claim more than the machine has
        "GresTypes": "gpu",
        "MaxArraySize": "1001",
        "MinJobAge": str(shape.min_job_age),
        "KillWait": "5",
        # A dead node is noticed after some 15 s. A ping of it must have failed first, which takes MessageTimeout or more.
        "SlurmdTimeout": "10",
        "MessageTimeout": "5",
        "ReturnToService": "2",
        # No word with "defer" in it: Slurm takes any such substring for the option `defer`.
        # Het jobs start by backfill only. Not more often: a start by backfill is not saved before the job's first step is.
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,bf_interval=3",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
    }


def _bookkeeping(shape: Shape) -> dict[str, str]:
    found = {"JobCompType": "jobcomp/filetxt", "JobCompLoc": f"{shape.root}/jobcomp.txt"}
    if shape.accounting:
        found |= {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": shape.address,
            "AccountingStoragePort": str(shape.accounting.port),
            "AccountingStorageTRES": "gres/gpu",
        }
        if shape.munge:  # AuthInfo does not reach the connection to slurmdbd
            found["AccountingStoragePass"] = f"{shape.root}/munge.socket"
    return found


def slurmdbd_conf(shape: Shape, accounting: Accounting) -> str:
    """slurmdbd.conf: a database over TCP, because the client library knows no other socket than the machine's."""
    root = shape.root
    lines = {
        "AuthType": "auth/munge" if shape.munge else "auth/none",
        **({"AuthInfo": f"socket={root}/munge.socket"} if shape.munge else {}),
        "DbdHost": "localhost",
        "DbdAddr": shape.address,
        "DbdPort": str(accounting.port),
        "SlurmUser": shape.user,
        "LogFile": f"{root}/log/slurmdbd.log",
        "PidFile": f"{root}/run/slurmdbd.pid",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "127.0.0.1",
        "StoragePort": str(accounting.database_port),
        "StorageUser": "slurm",
        "StoragePass": accounting.password,
        "StorageLoc": "slurm",
    }
    return "".join(f"{key}={value}\n" for key, value in lines.items())
