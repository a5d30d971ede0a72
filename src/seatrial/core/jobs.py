"""Jobs as data: programs that run together, on a cluster or on this machine; profiles of clusters; placeholders.

- A job has components: services, and exactly one client. The client decides how the job ends; a service that ends before it, even with
  exit code 0, fails the job.
- A job is one allocation, a heterogeneous one (components in several groups), or an array of units.
- `Profile` is `[slurm.NAME]` of seatrial.toml: how one cluster, or one partition of it, is used. Seatrial runs where sbatch is.
- In a script placeholders become quoted variables, which the node sets: their values are never shell text. On this machine they are
  replaced by the values at once.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from seatrial.core.records import Record
from seatrial.core.secret_names import Says, looks_random, says_secret
from seatrial.core.verdict import Verdict

PLACEHOLDERS = {
    "port": "SEATRIAL_PORT",
    "bind": "SEATRIAL_BIND",
    "copy": "SEATRIAL_COPY",
    "rank": "SEATRIAL_RANK",
    "head": "SEATRIAL_HEAD",
    "head_port": "SEATRIAL_HEAD_PORT",
    "index": "SEATRIAL_INDEX",
    "job": "SEATRIAL_JOB",
}
"""Placeholders and the variables that carry the same value into every component:
port (chosen on the node), bind (address to listen on: loopback unless the job spans nodes), copy (number of this
replica), rank (of a task within its copy), head and head_port (first node of the copy, and a second port there),
index (unit of the array), job (the job directory). `{url:NAME}` and `{urls:NAME}` are the first and all endpoints of
a service or a pre-hosted server; variables SEATRIAL_URL_NAME and SEATRIAL_URLS_NAME carry them."""

PLACEHOLDER = re.compile(r"\{(?:(" + "|".join(PLACEHOLDERS) + r")|(urls?):([a-z][a-z0-9-]*))\}")


def variable_of(match: re.Match[str]) -> str:
    """The variable that holds the value of a placeholder."""
    plain, kind, name = match.groups()
    return PLACEHOLDERS[plain] if plain else f"SEATRIAL_{kind.upper()}_{shell_name(name)}"


def shell_name(name: str) -> str:
    """The name of a component as part of a variable."""
    return name.upper().replace("-", "_")


def _no_secrets(environment: dict[str, str]) -> dict[str, str]:
    """Scripts and job files are read by everybody: a secret must come with the caller's own environment."""
    for key, value in environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            raise ValueError(f"{key!r} is not the name of a variable")
        says = says_secret(key)
        if says is Says.STRONG or (says is Says.WEAK and looks_random(value)):
            raise ValueError(f"{key} looks like a secret; leave it out and export it where you submit: it is passed on")
    return environment


Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,39}$")]
Variables = Annotated[dict[str, str], AfterValidator(_no_secrets)]
Mount = Annotated[str, StringConstraints(pattern=r"^[^,:\s]+:[^,:\s]+(:[a-z+]+)?$")]
Count = Annotated[int, Field(ge=1)]
Units = Annotated[int, Field(ge=1, le=4_000_001)]
"""Units of an array: Slurm itself takes no more."""


class Ready(Record):
    """When a service can be used: its port answers, and `path`, if given, answers 200."""

    path: Annotated[str, StringConstraints(pattern=r"^/[!-~]*$")] | None = "/health"
    deadline_s: Annotated[int, Field(gt=0)] = 1200


class Placed(Record):
    """Where the copies of a program run, and in what."""

    group: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]*$")] = ""
    """Components of one group share nodes; several groups make a heterogeneous job."""
    replicas: Count = 1
    """Copies, each with its own port, endpoint and log."""
    per_node: Count | None = None
    """At most so many copies on one node; None for as many as fit."""
    cpus: Count = 1
    memory_mb: Count | None = None
    """Memory of one copy on each of its nodes; None shares the job's."""
    environment: Variables = Field(default_factory=dict)
    workdir: str | None = None
    container: str | None = None
    """A name that the profile knows."""
    image: str | None = None
    mounts: tuple[Mount, ...] = ()


class Component(Placed):
    """One program of a job, in as many copies as `replicas` says."""

    name: Name
    command: tuple[str, ...] = Field(min_length=1)
    role: Literal["service", "client"] = "service"
    nodes: Count = 1
    """Nodes that one copy spans."""
    tasks: Count = 1
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of one copy, on each of its nodes."""
    port: bool = False
    """Whether each copy gets a port of its own on its node."""
    ready: Ready | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.container and self.image:
            raise ValueError("container (a name of the profile) and image (a literal) exclude each other")
        if self.ready and not self.port:
            raise ValueError("ready needs port = true")
        if self.role == "client" and (self.replicas > 1 or self.ready):
            raise ValueError("the client is one, and nobody waits for it to be ready: no replicas, no ready")
        if self.tasks < self.nodes or self.tasks % self.nodes:
            raise ValueError(
                f"tasks = {self.tasks} cannot be spread evenly over nodes = {self.nodes}: tasks counts all of a copy's processes"
            )
        for text in (*self.command, *self.environment.values()):
            self._check_placeholders(text)
        return self

    def _check_placeholders(self, text: str) -> None:
        """A placeholder without value, and what looks like a misspelt one, would reach the program as it stands."""
        for word in re.findall(r"\{([a-z_]+)\}", text):
            if word in ("port", "head", "head_port") and not self.port:
                raise ValueError(f"{{{word}}} needs port = true")
            close = difflib.get_close_matches(word, PLACEHOLDERS, n=1, cutoff=0.75)
            if close and word not in PLACEHOLDERS:
                raise ValueError(f"{{{word}}} is no placeholder; did you mean {{{close[0]}}}?")

    @property
    def exclusive_gpus(self) -> bool:
        """Whether its steps own what they ask for; the others share."""
        return self.gpus > 0


class After(Record):
    """A job that must have ended before this one starts."""

    job: Name
    when: Literal["ok", "any"] = "ok"
    """`ok`: every unit done, which the job checks itself, since Slurm forgets. `any`: ended, however."""


class Job(Record):
    """What is submitted as one."""

    name: Name
    components: tuple[Component, ...] = Field(min_length=1)
    array: Units | None = None
    """Number of units; each runs all components with its own `{index}`."""
    parallel: Count | None = None
    after: tuple[After, ...] = ()
    after_ids: tuple[Annotated[str, StringConstraints(pattern=r"^[0-9]+(_[0-9]+)?$")], ...] = ()
    """Slurm jobs that are not ours and must have ended well."""
    servers: Mapping[Name, Annotated[str, StringConstraints(pattern=r"^https?://[!-~]+$")]] = Field(default_factory=dict)
    """Servers that run elsewhere already, by URL; the client starts when they answer."""
    minutes: Count | None = None
    warn_s: Annotated[int, Field(ge=0)] | None = None
    """So long before the time limit the client is asked to stop (SIGTERM); None: 120 s, or a quarter of a short limit."""
    settle_s: Annotated[int, Field(ge=0)] = 60
    """How long results of earlier jobs may take to show on the node; shared file systems are late."""
    launcher: str | None = None
    """A script of the loop's own (`ray.sub`) that is submitted instead of ours, starts Ray and runs the client in it."""
    requeue: bool = True
    exclusive: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [item.name for item in self.components] + list(self.servers)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two components or servers are called {twice[0]}")
        clients = [item.name for item in self.components if item.role == "client"]
        if len(clients) != 1:
            raise ValueError(f"a job has exactly one client; this one has {len(clients)}: {', '.join(clients) or 'none'}")
        if self.array and len(self.groups()) > 1:
            raise ValueError("Slurm refuses arrays of heterogeneous jobs: put the components into one group, or leave out array")
        if self.minutes and self.warn_s is not None and self.warn_s >= 60 * self.minutes:
            raise ValueError(f"warn_s = {self.warn_s} leaves nothing of minutes = {self.minutes}: the client would be stopped at once")
        if self.parallel and not self.array:
            raise ValueError("parallel needs array")
        endpoints = {*self.servers, *(item.name for item in self.components if item.port)}
        for item in self.components:
            for text in (*item.command, *item.environment.values()):
                for match in PLACEHOLDER.finditer(text):
                    if match[3] and match[3] not in names:
                        raise ValueError(f"component {item.name}: {match[0]} names no service; known: {', '.join(names)}")
                    if match[3] and match[3] not in endpoints:
                        raise ValueError(f"component {item.name}: {match[0]}: {match[3]} has no port = true")
        return self

    def groups(self) -> tuple[str, ...]:
        """Groups in the order in which components name them."""
        return tuple(dict.fromkeys(item.group for item in self.components))

    def units(self) -> range:
        """Indices of the units; a job without array has one, 0."""
        return range(self.array or 1)

    @property
    def client(self) -> Component:
        """The component that decides."""
        return next(item for item in self.components if item.role == "client")

    def warning_s(self, minutes: int) -> int:
        """How long before a limit of `minutes` the client is warned."""
        return min(120, 15 * minutes) if self.warn_s is None else self.warn_s

    def services(self) -> tuple[Component, ...]:
        """All others."""
        return tuple(item for item in self.components if item.role == "service")


class Batch(Record):
    """Jobs that are submitted together, in this order; a job may come after earlier ones."""

    jobs: tuple[Job, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        seen: list[str] = []
        for job in self.jobs:
            if job.name in seen:
                raise ValueError(f"two jobs are called {job.name}")
            for after in job.after:
                if after.job not in seen:
                    raise ValueError(f"job {job.name} comes after {after.job}, which no earlier job is called")
            seen.append(job.name)
        return self


class Ending(StrEnum):
    """How a unit ended."""

    DONE = "done"
    """The client exited with 0 while every service was alive."""
    CLIENT_FAILED = "client-failed"
    SERVICE_ENDED = "service-ended"
    """A service ended before the client, with whatever exit code."""
    NOT_READY = "not-ready"
    """A service did not become ready before its deadline."""
    INPUTS_MISSING = "inputs-missing"
    """A job it comes after is not done."""
    TIME_LIMIT = "time-limit"
    """The client was asked to stop because the time limit was near."""
    STOPPED = "stopped"


class Result(Record):
    """results/<index>.json: written before the services are stopped."""

    job: str
    index: int
    slurm: str
    """Slurm's id of the unit, such as 12 or 12_3; "local" on this machine."""
    restart: int
    """How often it was requeued before."""
    ending: Ending
    component: str
    """Who ended it, such as `client` or `server.1`."""
    exit_code: int | None
    """Exact; None when nobody exited."""
    node: str
    started: int
    ended: int
    """Seconds since 1970."""
    message: str = ""


class Submission(Record):
    """<job>/submission.json: what was handed to Slurm. Written before sbatch is called, and again with the id."""

    job: str
    name: str
    """Unique name of the Slurm job: a reused id is noticed by it."""
    slurm: str | None
    """Slurm's id; None while it is not known."""
    profile: str
    units: tuple[int, ...]
    submitted: int
    cluster: str = ""
    """SLURM_CONF, or empty for the machine's own cluster."""
    cluster_name: str = ""
    """What that cluster calls itself: another machine that shares the file system may belong to another one."""


class UnitState(StrEnum):
    """Where a unit stands."""

    WAITING = "waiting"
    """Not started, or requeued."""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    BLOCKED = "blocked"
    """Something beside the client ended it: a service, the time limit, a person, the cluster."""
    LOST = "lost"
    """Neither Slurm nor a result knows it."""
    UNKNOWN = "unknown"
    """The controller does not answer: nothing can be said, and nothing is lost."""


_VERDICTS = {
    UnitState.DONE: Verdict.PASS,
    UnitState.FAILED: Verdict.FAIL,
    UnitState.BLOCKED: Verdict.BLOCKED,
    UnitState.LOST: Verdict.BLOCKED,
}


class UnitStatus(Record):
    """What is known of one unit, from Slurm and from its result."""

    job: str
    index: int
    slurm: str
    """Slurm's id, such as 12 or 12_3; empty while it is not known."""
    state: UnitState
    scheduler: str = ""
    """Slurm's own word, such as RUNNING or NODE_FAIL; empty when Slurm knows nothing."""
    reason: str = ""
    result: Result | None = None

    @property
    def verdict(self) -> Verdict | None:
        """None while it has not ended."""
        return _VERDICTS.get(self.state)


Option = Annotated[str, StringConstraints(pattern=r"^--?[A-Za-z][^\n]*$")]
Word = Annotated[str, StringConstraints(pattern=r"^[^\s'\"\\$`;&|<>]+$")]


_SET_BY_US = {
    "sbatch": (
        *("--array", "-a", "--job-name", "-J", "--output", "-o", "--error", "-e", "--open-mode", "--comment", "--signal", "--requeue"),
        *("--no-requeue", "--dependency", "-d", "--kill-on-invalid-dep", "--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node"),
        *("--cpus-per-task", "-c", "--gres", "--gpus", "-G", "--gpus-per-node", "--gpus-per-task", "--mem", "--time", "-t", "--account"),
        *("-A", "--partition", "-p", "--qos", "-q", "--exclusive", "--parsable", "--test-only", "--wrap", "--wait", "-W", "--export"),
        *("--chdir", "-D", "--container-image", "--container-mounts"),
    ),
    "srun": (
        *("--nodelist", "-w", "--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--cpus-per-task", "-c", "--exact", "--overlap"),
        *("--gres", "--gpus", "-G", "--gpus-per-node", "--gpus-per-task", "--mem", "--het-group", "--kill-on-bad-exit", "-K", "--input"),
        *("-i", "--output", "-o", "--error", "-e", "--chdir", "-D", "--container-image", "--container-mounts"),
    ),
}
"""Options that follow from the job or from other keys: a second value would make Slurm do what nobody follows."""


class Profile(Record):
    """One way to use a cluster."""

    account: Word | None = Field(default=None, description="account that is charged")
    partition: Word | None = Field(default=None, description="partition; none takes the cluster's default")
    qos: Word | None = Field(default=None, description="quality of service")
    time: Annotated[str, StringConstraints(pattern=r"^(\d+-)?\d{1,2}:\d{2}:\d{2}$")] = Field(
        default="1:00:00", description="time limit, [days-]hours:minutes:seconds, unless a job has its own"
    )
    nodes: Count = Field(default=1, description="nodes of a trial")
    gpus_per_node: Annotated[int, Field(ge=0)] = Field(default=8, description="GPUs that one node has")
    gpus: Annotated[int, Field(ge=0)] | None = Field(default=None, description="GPUs per node of a trial; none takes what its levels need")
    cpus: Count = Field(default=4, description="CPUs of a trial on each node")
    memory_mb: Count | None = Field(default=None, description="memory of a job on each node; none takes the cluster's default")
    gres: Word = Field(default="gpu", description="name of the GPU resource, such as gpu or gpu:h100")
    exclusive: bool = Field(default=False, description="take whole nodes")
    containers: dict[str, str] = Field(default_factory=dict, description="images by name")
    container: str | None = Field(default=None, description="container of a trial, by its name in containers")
    image: str | None = Field(default=None, description="container of a trial, as a literal image")
    mounts: tuple[Mount, ...] = Field(default=(), description="mounts of every container, source:target[:flags]")
    environment: Variables = Field(default_factory=dict, description="variables of every component")
    prolog: tuple[str, ...] = Field(default=(), description="shell lines that run first on the first node, such as module load")
    setup: tuple[str, ...] = Field(default=(), description="shell lines that run in the client's own step and container, right before it")
    sbatch: tuple[Option, ...] = Field(default=(), description="more options of sbatch, such as --reservation=x")
    srun: tuple[Option, ...] = Field(default=(), description="more options of every srun, such as --mpi=pmix")
    ray: Literal["none", "symmetric-run", "ray.sub"] = Field(default="none", description="how Ray is started for a trial")
    ray_sub: str | None = Field(default=None, description="path of the loop's own ray.sub")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.container and self.image:
            raise ValueError("container (a name of containers) and image (a literal) exclude each other")
        if self.container and self.container not in self.containers:
            known = ", ".join(self.containers) or "none; name them in containers"
            raise ValueError(f"container: no image is called {self.container!r}; known: {known}; a literal one belongs into image")
        for key, options in (("sbatch", self.sbatch), ("srun", self.srun)):
            for option in options:
                _refuse_ours(key, option)
        return self


def _refuse_ours(key: str, option: str) -> None:
    """A ValueError for an option that Seatrial sets; Slurm takes long ones abbreviated, and values right behind short ones."""
    long = option.startswith("--")
    flag = option.partition("=")[0].split()[0] if long else option[:2]
    for ours in _SET_BY_US[key]:
        if flag == ours or (long and len(flag) > 4 and ours.startswith(flag)):
            raise ValueError(f"{key}: {option} is set by Seatrial ({ours}), from the job or from another key of the profile; leave it out")


def bash_word(text: str) -> str:
    """One shell word, placeholders as quoted variables, everything else quoted literally."""
    done, place = "", 0
    for match in PLACEHOLDER.finditer(text):
        before = text[place : match.start()]
        done += (shlex.quote(before) if before else "") + f'"${variable_of(match)}"'
        place = match.end()
    return done + (shlex.quote(text[place:]) if text[place:] or not done else "")


def fill(text: str, variables: Mapping[str, str]) -> str:
    """The text with every placeholder replaced by its value."""
    return PLACEHOLDER.sub(lambda match: variables[variable_of(match)], text)


def referred(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the services whose endpoints these texts need, each once."""
    return tuple(dict.fromkeys(match[3] for text in texts for match in PLACEHOLDER.finditer(text) if match[3]))


def grouped(words: Sequence[str]) -> list[str]:
    """Words of a command as lines that a person can read: an option and its values on one line each."""
    groups: list[str] = []
    for word in words:
        if groups and not word.startswith("-"):
            groups[-1] += f" {word}"
        else:
            groups.append(word)
    return groups
