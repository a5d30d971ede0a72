"""Slurm's commands, and the one script that sbatch is given.

- Commands run without a shell and with a time limit. `ControllerDown`: the controller did not answer, so nothing is known.
- `resolve` applies a profile to a job: names of containers become images; mounts, variables and the time limit are merged.
- In the script all input is quoted as one shell word; placeholders become variables that the node sets.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

import seatrial
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.guarded import BadValue, parse_count, parse_time, parse_whole
from seatrial.core.jobs import Batch, Component, Job, Profile, bash_word, grouped, referred, shell_name
from seatrial.core.records import replace
from seatrial.core.verdict import Boundary
from seatrial.runtime.command import Answer, NoAnswerError, run_command
from seatrial.runtime.jobdir import Layout, NodeGroup, PlacedStep, job_dir, layout
from seatrial.runtime.ray import launcher_call, ray_sub
from seatrial.runtime.servers import foreign_target

TIMEOUT_S = 60.0
_STEERING = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SACCT_", "SCANCEL_")
_PLAIN = {"SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0"}
"""For listings: times that can be parsed, and lists of indices that are not cut."""
_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/etc/slurm-llnl/slurm.conf")
"""Where a machine keeps its own, the second where the controller hands it out."""
_NO_ANSWER = re.compile(r"unable to contact|timed out|zero bytes|connect|communication|temporarily|try again|configuration file", re.I)

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", re.ASCII)
_MOST_UNITS = 1 << 22
"""More than any array of Slurm has."""


class ControllerDown(BlockedError):
    """The controller, or the command that asks it, did not answer."""

    def __init__(self, message: str) -> None:
        super().__init__(Boundary.CLUSTER, message, "try again when `scontrol ping` says UP; submitted jobs are not lost")


class SlurmRefused(BlockedError):
    """Slurm said no."""

    def __init__(self, message: str, fix: str = "correct the profile in seatrial.toml or the job, and submit again") -> None:
        super().__init__(Boundary.CLUSTER, message, fix)


@dataclass(frozen=True, slots=True)
class SlurmRow:
    """What Slurm says of one unit."""

    job: str
    """Slurm's id, without index."""
    index: int | None
    """Unit of an array; None for a job without array, and for all units that are not listed by themselves."""
    part: str
    """Number of a part of a heterogeneous job, or empty."""
    state: str
    """Slurm's word, such as RUNNING."""
    reason: str
    name: str
    comment: str
    ended: float | None
    """Seconds since 1970."""


def own_cluster() -> str:
    """The SLURM_CONF of this process, to be stored with a submission."""
    return os.environ.get("SLURM_CONF", "")


def require(tool: str) -> str:
    """The path of a command of Slurm's."""
    path = shutil.which(tool)
    if path is None:
        fix = "run seatrial where Slurm's commands are, such as on a login node; or use --on local"
        raise BlockedError(Boundary.CLUSTER, f"{tool} is not on PATH: there is no Slurm here", fix)
    return path


def sbatch(script: Path, options: Sequence[str], cluster: str, added: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Submit a script, with variables added to the caller's; returns the id."""
    done = _call("sbatch", ["--parsable", *options, str(script)], cluster, added=added, cwd=cwd)
    found = re.findall(r"^([0-9]+)(?:;.*)?$", done.out, re.M)  # a site's own sbatch may greet first
    if done.code == 0 and found:
        return str(found[-1])
    if done.code <= 0:
        text = _text(done.out) or _text(done.error) or "nothing"
        raise ControllerDown(f"sbatch: ended with {done.code} and gave no id, but said: {text}")
    raise _error("sbatch", done)


def check_script(script: str | Path, options: Sequence[str], cluster: str) -> str:
    """Ask whether a script (its text, or its path) could be submitted; returns what Slurm says, such as when it would start."""
    words, text = ([str(script)], "") if isinstance(script, Path) else ([], script)
    done = _call("sbatch", ["--test-only", *options, *words], cluster, text)
    if done.code:
        raise _error("sbatch", done)
    return _text(done.error)


def squeue(cluster: str, ids: Sequence[str] = (), names: Sequence[str] = ()) -> list[SlurmRow]:
    """Jobs that the controller knows, by id or else by name, each unit and each part in its own row."""
    chosen = ["-j", ",".join(ids)] if ids else ["-n", ",".join(names)]
    done = _call("squeue", ["-h", "-r", "-a", "-t", "all", *chosen, "-o", "%i|%T|%e|%r|%k|%j"], cluster)
    if done.code and "Invalid job id" in done.error:
        return []
    if done.code:
        raise ControllerDown(f"squeue: {_text(done.error)}")
    rows = []
    for line in done.out.splitlines():
        words = line.split("|", 5)
        if len(words) == 6:  # a site's own squeue may say more
            unit, state, ended, reason, comment, name = words
            rows += _rows(unit, state, reason, name, comment, ended)
    return rows


def sacct(cluster: str, ids: Sequence[str] = (), names: Sequence[str] = (), since: float = 0.0) -> list[SlurmRow] | None:
    """The same from accounting, oldest first; None where there is none. Its exit codes are masked and not asked for."""
    start = datetime.fromtimestamp(max(since, 0.0)).isoformat(timespec="seconds")
    chosen = ["-j", ",".join(ids)] if ids else ["--name", ",".join(names), "-S", start]
    done = _call("sacct", ["-a", "-X", "-n", "-P", "-D", *chosen, "-o", "JobID,State,Submit,End,JobName"], cluster)
    if "accounting storage is disabled" in done.error:
        return None
    if done.code:
        raise ControllerDown(f"sacct: {_text(done.error)}")
    lines = [words for line in done.out.splitlines() if len(words := line.split("|", 4)) == 5]
    rows = []
    for unit, state, _, ended, name in sorted(lines, key=lambda words: words[2]):
        rows += _rows(unit, state.partition(" ")[0], "", name, "", ended)
    return rows


def scancel(cluster: str, ids: Sequence[str]) -> None:
    """Cancel jobs; one that has ended already is no error."""
    done = _call("scancel", list(ids), cluster)
    wrong = [line for line in done.error.splitlines() if "Invalid job id" not in line and "already" not in line]
    if done.code and wrong:
        raise _error("scancel", done)


def setting(cluster: str, name: str) -> str:
    """A value of the cluster's configuration, such as MaxArraySize or ClusterName."""
    done = _call("scontrol", ["show", "config"], cluster)
    found = re.search(rf"^{name}\s*=\s*(\S+)", done.out, re.M)
    if found is None:
        raise _error("scontrol", done)
    return found[1]


def largest_array(cluster: str) -> int:
    """How many units an array may have there."""
    said = setting(cluster, "MaxArraySize")
    try:
        return parse_whole(said)
    except BadValue as error:
        raise ControllerDown(f"scontrol: MaxArraySize is {said[:40]!r}, which is no number") from error


def cluster_name(cluster: str) -> str:
    """What the cluster calls itself, by its configuration file; empty when that is not to be found, which hinders nothing."""
    for place in [cluster] if cluster else _CONFIGURATIONS:
        try:
            text = Path(place).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        found = re.search(r"^\s*ClusterName\s*=\s*(\S+)", text, re.M | re.I)
        return found[1] if found else ""
    return ""


def _call(
    tool: str, words: list[str], cluster: str, stdin: str = "", added: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Answer:
    path = require(tool)
    if cluster and not Path(cluster).is_file():
        raise ControllerDown(f"SLURM_CONF={cluster}: no such file")  # Slurm's commands would try for a minute
    kept = {key: value for key, value in os.environ.items() if key == "SLURM_CONF_SERVER" or not key.startswith(_STEERING)}
    env = {**kept, **({"SLURM_CONF": cluster} if cluster else {}), **(_PLAIN if tool in ("squeue", "sacct") else {}), **(added or {})}
    try:
        # A session of its own: Ctrl-C must not end sbatch between the submission and the id.
        return run_command(
            [path, *words],
            TIMEOUT_S,
            cwd=cwd,
            env=env,
            stdin=stdin.encode("utf-8", "replace"),
            own_session=True,
        )
    except NoAnswerError as error:
        if error.late:
            raise ControllerDown(f"{tool} did not answer within {TIMEOUT_S:.0f} s") from error
        raise SlurmRefused(f"{tool} cannot be started: {error.why}", "run it by hand, and correct what it says") from error


def _error(tool: str, done: Answer) -> BlockedError:
    text = _text(done.error) or _text(done.out) or f"exit code {done.code}"
    return ControllerDown(f"{tool}: {text}") if _NO_ANSWER.search(text) else SlurmRefused(f"{tool}: {text}")


def _text(output: str) -> str:
    """What a command said, on one line and without its own name."""
    lines = (re.sub(r"^(sbatch|squeue|sacct|scancel|scontrol): (error: )?", "", line.strip()) for line in output.splitlines())
    return "; ".join(line for line in lines if line)


def _rows(unit: str, state: str, reason: str, name: str, comment: str, ended: str) -> list[SlurmRow]:
    """`12`, `12_3`, `12+1` (a part) and `12_[0-5,9%2]` (units that ended or wait together)."""
    found = re.fullmatch(r"(\d+)(?:_(\d+)|_\[([^\]]*)\]?|\+(\d+))?", unit, re.ASCII)
    if found is None:
        return []  # a step, or a line of another plugin
    job, single, several, part = found.groups()
    try:  # Slurm may know no time, or write one that does not exist
        moment = parse_time(ended) if _TIME.fullmatch(ended) else None
    except BadValue:
        moment = None
    comment = "" if comment == "(null)" else comment
    indices: list[int | None] = [None]
    if single:
        indices = [parse_count(single)]
    elif several:
        indices = list(_indices(several))
    return [SlurmRow(job, index, part or "", state, reason, name, comment, moment) for index in indices]


def _indices(text: str) -> list[int]:
    """`0-5,7,10-20:5%2` as numbers; of a range that is longer than Slurm's arrays, its start."""
    found: list[int] = []
    for item in text.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", item, re.ASCII)
        if match:
            first, last, step = (parse_count(number) for number in (match[1], match[2] or match[1], match[3] or "1"))
            found += range(first, last + 1, max(step, 1))[:_MOST_UNITS]
    return found


def resolve(job: Job, profile: Profile) -> Job:
    """The job with everything of the profile in it; a component's own values win."""
    minutes = job.minutes if job.minutes is not None else time_minutes(profile.time)
    if job.warn_s is not None and job.warn_s >= 60 * minutes:
        raise UserError(
            f"job {job.name}: warn_s = {job.warn_s} leaves nothing of the profile's time {profile.time}", "lower it, or give minutes"
        )
    components = tuple(_resolved_component(item, profile) for item in job.components)
    return replace(job, components=components, minutes=minutes, exclusive=job.exclusive or profile.exclusive)


def _resolved_component(item: Component, profile: Profile) -> Component:
    image = image_of(item.container, item.image, profile, f"component {item.name}")
    if item.mounts and image is None:
        raise UserError(f"component {item.name}: mounts without a container", "name a container or an image, or leave out mounts")
    return replace(
        item,
        container=None,
        image=image,
        mounts=tuple(dict.fromkeys((*profile.mounts, *item.mounts))) if image else (),
        environment={**profile.environment, **item.environment},
    )


def image_of(name: str | None, literal: str | None, profile: Profile, what: str) -> str | None:
    """The image that a name or a literal stands for."""
    if name is None:
        return literal
    if name not in profile.containers:
        known = ", ".join(sorted(profile.containers)) or "none"
        fix = f'add {name} = "IMAGE" to the containers of the profile in seatrial.toml, or give a literal image with the key image'
        raise UserError(f"{what}: the profile knows no container {name!r}; known: {known}", fix)
    return profile.containers[name]


def time_minutes(text: str) -> int:
    """`[days-]hours:minutes:seconds` in minutes, rounded up: Slurm counts in minutes."""
    days, _, clock = text.rpartition("-")
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return max(1, (int(days or 0) * 24 + hours) * 60 + minutes + (seconds > 0))


GRACE_S = 15
"""Between asking a service to end and killing it."""


def render(job: Job, profile: Profile, batch: Path, name: str, units: Mapping[str, int] | None = None) -> str:
    """The script of `job` for the batch directory `batch`; `name` is the unique name of the Slurm job.

    `units` holds the number of units of the jobs that it comes after.
    """
    job = resolve(job, profile)
    if job.launcher and profile.setup:
        raise UserError("setup: a loop's own launcher runs no setup lines of ours", "leave it out, and use the launcher's own way")
    if job.launcher:
        return launcher_call(ray_sub(job, profile, job_dir(batch, job).path, name))
    plan = layout(job, profile.gpus_per_node)
    directory = job_dir(batch, job)
    checked = [after.job for after in job.after if after.when == "ok"]  # by the job itself, before it starts
    context = {
        "job": job,
        "version": seatrial.__version__,
        "sentence": _sentence(job, plan),
        "directory": str(directory.path),
        "directives": _directives(job, profile, directory.path, name, batch),
        "groups": [_group_options(group, profile) for group in plan.groups],
        "spans_nodes": plan.spans_nodes,
        "components": [_component(item, job) for item in job.components],
        "prolog": profile.prolog,
        "setup": profile.setup,
        "inputs": [{"directory": str(job_dir(batch, name).path), "units": (units or {})[name]} for name in checked],
        "services": [_step(step, plan, profile, batch) for step in plan.steps if step.component.role == "service"],
        "client": next(_step(step, plan, profile, batch) for step in plan.steps if step.component.role == "client"),
        "grace_s": GRACE_S,
        "servers": {key: foreign_target(key, url, 0).url for key, url in job.servers.items()},
    }
    return _template().render(context)


def render_batch(batch: Batch, profile: Profile, directory: Path, names: Mapping[str, str]) -> dict[str, str]:
    """The scripts of all jobs, by job."""
    units = {job.name: len(job.units()) for job in batch.jobs}
    return {job.name: render(job, profile, directory, names[job.name], units) for job in batch.jobs}


def _template() -> Template:
    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        autoescape=False,
        comment_start_string="<#",  # bash has a use of its own for {#
        comment_end_string="#>",
    )
    environment.filters["word"] = bash_word
    environment.filters["literal"] = shlex.quote
    text = (package_files("seatrial.runtime") / "job.sh.j2").read_text(encoding="utf-8")
    return environment.from_string(text)


def _sentence(job: Job, plan: Layout) -> str:
    services = [f"{item.replicas} x {item.name}" if item.replicas > 1 else item.name for item in job.services()]
    what = f"{', '.join(services)} and the client {job.client.name}" if services else f"the client {job.client.name}"
    nodes = sum(group.nodes for group in plan.groups)
    where = f"on {nodes} node{'s' if nodes > 1 else ''}" + (f" in {len(plan.groups)} groups" if len(plan.groups) > 1 else "")
    return f"{what} {where}" + (f", {job.array} units" if job.array else "")


def _directives(job: Job, profile: Profile, directory: Path, name: str, batch: Path) -> list[str]:
    assert job.minutes is not None
    if "%" in str(directory):
        raise UserError(f"{directory}: Slurm reads a % in a path as its own", "choose a batch directory without %")
    log = str(directory / "logs" / ("slurm-%a.log" if job.array else "slurm.log"))
    lines = [f"--job-name={name}", f"--comment={comment(batch)}", f"--output={_quoted(log)}", "--open-mode=append"]
    lines.append(f"--time={job.minutes}")
    warning = job.warning_s(job.minutes)
    lines += [f"--signal=B:USR1@{warning}"] if warning else []
    lines.append("--requeue" if job.requeue else "--no-requeue")
    if job.array:
        lines.append(f"--array=0-{job.array - 1}" + (f"%{job.parallel}" if job.parallel else ""))
    named = (("account", profile.account), ("partition", profile.partition), ("qos", profile.qos))
    lines += [f"--{key}={value}" for key, value in named if value]
    lines += ["--exclusive"] if job.exclusive else []
    return [*lines, *profile.sbatch]


def comment(batch: Path) -> str:
    """What marks jobs of this batch in Slurm."""
    return "seatrial:" + "".join(sign if sign.isalnum() or sign in "._-" else "_" for sign in batch.absolute().name)


def _quoted(path: str) -> str:
    """A path in an #SBATCH line, which knows double quotes only."""
    if any(sign in path for sign in '"\\\n'):
        raise UserError(f"{path}: a batch directory with quotes or backslashes in its name cannot be given to sbatch", "rename it")
    return path if re.fullmatch(r"[\w./+:@,=%-]+", path) else f'"{path}"'


def _group_options(group: NodeGroup, profile: Profile) -> list[str]:
    lines = [f"--nodes={group.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={group.cpus}"]
    lines += [f"--gres={profile.gres}:{group.gpus}"] if group.gpus else []
    memory = group.memory_mb or profile.memory_mb
    return [*lines, f"--mem={memory}M"] if memory else lines


def _component(item: Component, job: Job) -> dict[str, Any]:
    texts = (*item.command, *item.environment.values())
    every = tuple(other.name for other in job.services() if other.port) + tuple(job.servers)
    names = every if item.role == "client" else referred(texts)
    copies = {other.name: other.replicas for other in job.components}
    lines = []
    for name in names:
        variable = shell_name(name)
        if name in job.servers:
            lines.append(f"export SEATRIAL_URLS_{variable}={bash_word(job.servers[name])}")
        else:
            lines.append(f"SEATRIAL_URLS_{variable}=$(urls {name} {copies[name]}) || exit 99")
        lines.append(f'export SEATRIAL_URLS_{variable} SEATRIAL_URL_{variable}="${{SEATRIAL_URLS_{variable}%%,*}}"')
    return {**dict(item), "urls": lines, "lines": grouped([bash_word(word) for word in item.command])}


def _step(step: PlacedStep, plan: Layout, profile: Profile, batch: Path) -> dict[str, Any]:
    item = step.component
    options = [f"--het-group={step.group}"] if len(plan.groups) > 1 else []
    options += [f'--nodelist="$(nodes_of {step.group} {step.node} {item.nodes})"', f"--nodes={item.nodes}"]
    # --wait=0: a cluster may be set up to end the other tasks some seconds after the first.
    options += ["--wait=0", f"--ntasks={item.tasks}", f"--ntasks-per-node={item.tasks // item.nodes}", f"--cpus-per-task={item.cpus}"]
    options += ["--exact", f"--gres={profile.gres}:{item.gpus}"] if item.exclusive_gpus else ["--overlap", "--gres=none"]
    options += [f"--mem={item.memory_mb}M"] if item.memory_mb else ["--mem=0"]
    if item.image:
        mounts = ",".join((*item.mounts, f"{batch.absolute()}:{batch.absolute()}"))
        options += [shlex.quote(f"--container-image={item.image}"), shlex.quote(f"--container-mounts={mounts}")]
    options += [bash_word(word) for word in profile.srun]
    return {"name": step.name, "options": options, "ready": item.ready}
