"""Ray inside a Slurm allocation: by `ray symmetric-run`, or by the loop's own launcher script.

- Whole nodes: `ray stop` ends every Ray of a node, and Ray refuses to start beside another. So the job is exclusive.
- The client's exact exit code is the step's; that Ray did not come up, or broke, is 99 (Blocked), never success (ray_step.py).
- A launcher script is submitted as it is; what it needs is handed to it by variables, and the client leaves the same
  result as in every other job.
- `check_nodes` judges what the probe ray_nodes.py saw on every node: a node that is missing or silent, or imports from
  elsewhere, is a finding that is not ok.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from seatrial.core.errors import UserError
from seatrial.core.jobs import Component, Job, Profile, fill
from seatrial.core.records import Finding, Record
from seatrial.core.verdict import Boundary
from seatrial.runtime.jobdir import JobDir

STEP = "ray_step.py"
"""The program that is staged into the job directory."""
_PLAIN = re.compile(r"[A-Za-z0-9@+=./_-]+")
"""Paths that survive a launcher script, which does not quote them."""


def with_ray(
    client: Component, nodes: int, *, ray: str = "ray", python: str = "python3", options: Sequence[str] = (), deadline_s: int = 600
) -> Component:
    """The client, inside a Ray cluster over `nodes` whole nodes that is started for it and stopped after it.

    `ray` and `python` are the loop's own; `options` are those of `ray start`, the same on every node. The job must be
    exclusive (`ray_job` sees to it).
    """
    wrapper = [python, f"{{job}}/{STEP}", "nodes", "--rank", "{rank}", "--nodes", str(nodes), "--address", "{head}:{head_port}"]
    wrapper += ["--state", "{job}/ray/{index}", "--ray", ray, "--deadline", str(deadline_s)]
    given = ["--disable-usage-stats", f"--num-gpus={client.gpus}", *options]
    wrapper += [f"--option={option}" for option in given]
    changed = {"command": (*wrapper, "--", *client.command), "nodes": nodes, "tasks": nodes, "port": True}
    return Component.model_validate({**client.model_dump(), **changed})


def ray_job(job: Job, nodes: int, *, ray: str = "ray", python: str = "python3", options: Sequence[str] = ()) -> Job:
    """The job with its client inside Ray, on nodes of its own."""
    components = [with_ray(item, nodes, ray=ray, python=python, options=options) if item is job.client else item for item in job.components]
    return Job.model_validate({**job.model_dump(), "components": components, "exclusive": True})


class RaySub(Record):
    """How a launcher script is submitted unchanged: `sbatch OPTIONS script` in `cwd`, with `environment` added to the caller's."""

    script: str
    cwd: str
    environment: dict[str, str]
    options: tuple[str, ...]


def ray_sub(job: Job, profile: Profile, directory: Path, name: str) -> RaySub:
    """The resolved job as its own launcher script runs it; `directory` is the job's, `name` Slurm's unique name.

    The caller stages `STEP` into `directory` first. Options given to sbatch win over those in the script.
    """
    script = _script(job)
    client = job.client
    directory = directory.absolute()
    if len(job.components) > 1 or job.array:
        raise UserError(
            f"job {job.name}: {script.name} runs one client, no services and no array", "use pre-hosted servers, or symmetric-run"
        )
    lacking = [key for key in ("account", "partition") if getattr(profile, key) is None]
    if lacking:
        raise UserError(f"job {job.name}: {script.name} needs {' and '.join(lacking)} in the profile", "its own values are placeholders")
    if not profile.gpus_per_node:
        raise UserError(f"job {job.name}: {script.name} counts GPUs to know that every node is there", "set gpus_per_node in the profile")
    if client.image is None or any(letter.isspace() for letter in client.image):
        raise UserError(f"job {job.name}: {script.name} runs in a container, so its client needs an image without spaces", "name one")
    known = {"SEATRIAL_INDEX": "0", "SEATRIAL_JOB": str(directory)}
    for server, url in job.servers.items():
        label = server.upper().replace("-", "_")
        known |= {f"SEATRIAL_URL_{label}": url, f"SEATRIAL_URLS_{label}": url}
    words = [_fill(word, known, job.name) for word in client.command]
    environment = {key: _fill(value, known, job.name) for key, value in client.environment.items()}
    # Again for the client: where an image has the variable too, the image's value wins over the job's.
    step = ["env", *(f"{key}={value}" for key, value in environment.items()), "python3", str(directory / STEP), "result"]
    step += ["--job", job.name, "--client", client.name, "--results", str(directory / "results"), "--script"]
    cwd = _place(job, client.workdir or str(script.parent))
    if not Path(cwd).is_dir():
        raise UserError(
            f"job {job.name}: workdir: {cwd} is not there; {script.name} is submitted from it", "name a directory that all nodes see"
        )
    # "$0" is the driver script in a directory that is named after the job: Slurm's own variables do not reach it.
    environment |= known | {
        "COMMAND": f'exec {shlex.join(step)} "$0" -- {shlex.join(words)}',
        "CONTAINER": client.image,
        "MOUNTS": ",".join(_mounts(client, _place(job, str(directory)), cwd)),
        "GPUS_PER_NODE": str(profile.gpus_per_node),
        "BASE_LOG_DIR": str(directory / "logs"),
    }
    return RaySub(
        script=str(script),
        cwd=cwd,
        environment=environment,
        options=_options(job, profile, directory, name),
    )


def launcher_call(given: RaySub) -> str:
    """A script that a person can read: how the launcher is submitted."""
    lines = ["#!/bin/bash", f"# {Path(given.script).name} is the loop's own launcher; this is how Seatrial submits it.", "set -eu"]
    lines += [f"cd -- {shlex.quote(given.cwd)}"]
    lines += [f"export {key}={shlex.quote(value)}" for key, value in sorted(given.environment.items())]
    options = " \\\n    ".join(shlex.quote(word) for word in given.options)
    return "\n".join([*lines, f"exec sbatch \\\n    {options} \\\n    {shlex.quote(given.script)}", ""])


def _script(job: Job) -> Path:
    assert job.launcher is not None
    path = Path(job.launcher).expanduser().absolute()
    if not path.is_file():
        raise UserError(f"job {job.name}: launcher: {path} is not there", "correct the path (ray_sub in the profile of a trial)")
    return path


def _place(job: Job, path: str) -> str:
    if not _PLAIN.fullmatch(path):
        raise UserError(f"job {job.name}: {path}: the launcher script cannot cope with a sign in this path", "use plain letters and digits")
    return path


def _mounts(client: Component, directory: str, cwd: str) -> list[str]:
    """The client's, the job's directory, and the directory of the submission, where the launcher starts everything."""
    wanted = [*client.mounts, f"{directory}:{directory}"]
    inside = [Path(mount.split(":")[1]) for mount in wanted]
    if not any(Path(cwd).is_relative_to(place) for place in inside):
        wanted.append(f"{cwd}:{cwd}")
    return list(dict.fromkeys(wanted))


def _options(job: Job, profile: Profile, directory: Path, name: str) -> tuple[str, ...]:
    minutes = str(job.minutes) if job.minutes else profile.time
    options = [f"--job-name={name}", f"--nodes={job.client.nodes}", f"--account={profile.account}", f"--partition={profile.partition}"]
    options += [f"--time={minutes}", "--exclusive", "--dependency=singleton", "--requeue" if job.requeue else "--no-requeue"]
    options += [f"--output={JobDir(directory).path / 'logs' / 'slurm.log'}", "--open-mode=append"]
    options += [f"--gres={profile.gres}:{profile.gpus_per_node}"]
    options += [f"--mem={job.client.memory_mb}M"] if job.client.memory_mb else []
    options += [f"--qos={profile.qos}"] if profile.qos else []
    return (*options, *profile.sbatch)


def _fill(text: str, known: Mapping[str, str], job: str) -> str:
    try:
        return fill(text, known)
    except KeyError as error:
        name = str(error.args[0]).removeprefix("SEATRIAL_").lower()
        raise UserError(
            f"job {job}: {text!r}: the launcher script gives its client no {name}", "use symmetric-run, or leave it out"
        ) from error


def check_nodes(facts: Mapping[str, Any], expected_nodes: int, roots: Mapping[str, str]) -> tuple[Finding, ...]:
    """What ray_nodes.py saw, judged: every node there and heard, each package of `roots` from its checkout, one Python everywhere.

    `roots` maps packages to the checkouts they must come from. A fact that is missing counts against the node.
    """
    told = facts.get("nodes")
    nodes: Sequence[Mapping[str, Any]] = [node for node in told if isinstance(node, Mapping)] if isinstance(told, list) else ()
    findings = [_count(nodes, expected_nodes, str(facts.get("error") or ""))]
    cluster = partial(_finding, Boundary.CLUSTER)
    heard = [node for node in nodes if not node.get("error")]
    for node in nodes:
        if node.get("error"):
            findings.append(cluster("ray node answers", False, f"{_who(node)}: {node['error']}", "see Ray's logs of that node"))
    for package, root in roots.items():
        findings += [_package(node, package, root) for node in heard]
    versions = sorted({str(node.get("python_version")) for node in heard})
    if len(versions) > 1:
        findings.append(cluster("ray nodes alike", False, f"Python differs between nodes: {', '.join(versions)}", "use one environment"))
    return tuple(findings)


def _count(nodes: Sequence[Mapping[str, Any]], expected: int, error: str) -> Finding:
    names = ", ".join(_who(node) for node in nodes) or "none"
    message = f"{len(nodes)} of {expected} expected nodes are in the Ray cluster: {names}" + (f"; {error}" if error else "")
    fix = "see Ray's logs of the missing node; is another Ray on it?"
    return _finding(Boundary.CLUSTER, "ray nodes complete", len(nodes) == expected and not error, message, fix)


def _package(node: Mapping[str, Any], package: str, root: str) -> Finding:
    rows = [row for row in node.get("imports") or () if row.get("package") == package]
    if len(rows) != 1:
        message = f"{_who(node)}: {package} was not looked up there"
        return _finding(Boundary.ENVIRONMENT, f"ray import {package}", False, message, "name it in --packages of the probe")
    where = rows[0].get("file")
    # The node itself compared with the checkout, links resolved as it sees them.
    well = bool(rows[0].get("ok")) and rows[0].get("expected") == root
    message = f"{_who(node)}: {package} from {where}" if where else f"{_who(node)}: {package} cannot be imported"
    fix = f"PYTHONPATH of the workers there must begin with {root}, and {root} must be visible there"
    return _finding(Boundary.ENVIRONMENT, f"ray import {package}", well, message if well else f"{message}, expected from {root}", fix)


def _who(node: Mapping[str, Any]) -> str:
    return f"{node.get('host') or 'unknown host'} ({str(node.get('node_id'))[:8]})"


def _finding(boundary: Boundary, name: str, ok: bool, message: str, fix: str) -> Finding:
    return Finding(name=name, ok=ok, boundary=boundary, message=message, fix="" if ok else fix)
