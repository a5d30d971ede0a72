"""From a job and a profile to the one script that sbatch is given.

- Everything that comes from input is quoted as one shell word; placeholders become variables that the node sets.
- GPU steps own what they ask for (`--exact --gres`); all others share (`--overlap --gres=none`).
- Containers stand on the srun lines only; the batch directory is always mounted, since the nodes write there.
- What the options of an allocation are follows from `layout`; ids of other jobs come with the command line of sbatch.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

import seatrial
from seatrial.launch.jobdir import job_dir
from seatrial.launch.layout import Group, Layout, Step, layout
from seatrial.launch.ray import launcher_call, ray_sub
from seatrial.launch.slurm.resolve import resolve
from seatrial.launch.words import bash_word, grouped, referred
from seatrial.model.errors import UserError
from seatrial.model.job import Batch, Component, Job, shell_name
from seatrial.model.profile import Profile

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
        "inputs": _inputs(job, batch, units or {}),
        "services": [_step(step, plan, profile, batch) for step in plan.steps if step.component.role == "service"],
        "client": next(_step(step, plan, profile, batch) for step in plan.steps if step.component.role == "client"),
        "grace_s": GRACE_S,
        "servers": {key: _asked(url) for key, url in job.servers.items()},
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
    text = (package_files("seatrial.launch.slurm") / "job.sh.j2").read_text(encoding="utf-8")
    return environment.from_string(text)


def _sentence(job: Job, plan: Layout) -> str:
    """What the job is, for a person who opens the script."""
    services = [f"{item.replicas} x {item.name}" if item.replicas > 1 else item.name for item in job.services()]
    what = f"{', '.join(services)} and the client {job.client.name}" if services else f"the client {job.client.name}"
    nodes = sum(group.nodes for group in plan.groups)
    where = f"on {nodes} node{'s' if nodes > 1 else ''}" + (f" in {len(plan.groups)} groups" if len(plan.groups) > 1 else "")
    return f"{what} {where}" + (f", {job.array} units" if job.array else "")


def _directives(job: Job, profile: Profile, directory: Path, name: str, batch: Path) -> list[str]:
    """Options of the whole job."""
    assert job.minutes is not None
    log = str(directory / "logs" / ("slurm-%a.log" if job.array else "slurm.log")) if "%" not in str(directory) else ""
    if not log:
        raise UserError(f"{directory}: Slurm reads a % in a path as its own", "choose a batch directory without %")
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


def _group_options(group: Group, profile: Profile) -> list[str]:
    """What one group of the allocation asks for."""
    lines = [f"--nodes={group.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={group.cpus}"]
    lines += [f"--gres={profile.gres}:{group.gpus}"] if group.gpus else []
    memory = group.memory_mb or profile.memory_mb
    return [*lines, f"--mem={memory}M"] if memory else lines


def _component(item: Component, job: Job) -> dict[str, Any]:
    """What the template needs of a component."""
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


def _asked(url: str) -> str:
    """What to ask a server that runs elsewhere: an OpenAI-compatible one lists its models."""
    return url.rstrip("/") + "/models" if url.rstrip("/").endswith("/v1") else url


def _inputs(job: Job, batch: Path, units: Mapping[str, int]) -> list[dict[str, Any]]:
    """Jobs whose units this one checks itself before it starts."""
    wanted = [after.job for after in job.after if after.when == "ok"]
    return [{"directory": str(job_dir(batch, name).path), "units": units[name]} for name in wanted]


def _step(step: Step, plan: Layout, profile: Profile, batch: Path) -> dict[str, Any]:
    """The srun line of one copy."""
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
