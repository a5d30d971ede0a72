"""Slurm's commands, called without a shell, with a time limit, and with answers that are told apart.

- `ControllerDown`: the controller did not answer, so nothing is known. An id that Slurm does not know is no error:
  its row is absent from the answer.
- `Refused`: Slurm answered and said no. After a `ControllerDown` of sbatch the job may be in the queue all the same; an answer
  without an id, and an sbatch that was killed, count as one.
- Variables of the caller that would change options (SBATCH_PARTITION, SQUEUE_USERS, what an outer job left behind) are
  kept away: what the script says is what is submitted, and nothing is filtered out of a listing.
- `cluster` is the SLURM_CONF to use; empty means the machine's own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from seatrial.model.errors import BlockedError
from seatrial.model.guarded import BadValue, parse_count, parse_time, parse_whole
from seatrial.model.verdict import Boundary

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


class Refused(BlockedError):
    """Slurm said no."""

    def __init__(self, message: str, fix: str = "correct the profile in seatrial.toml or the job, and submit again") -> None:
        super().__init__(Boundary.CLUSTER, message, fix)


@dataclass(frozen=True, slots=True)
class Row:
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
    found = re.findall(r"^([0-9]+)(?:;.*)?$", done.stdout, re.M)  # a site's own sbatch may greet first
    if done.returncode == 0 and found:
        return str(found[-1])
    if done.returncode <= 0:
        text = _text(done.stdout) or _text(done.stderr) or "nothing"
        raise ControllerDown(f"sbatch: ended with {done.returncode} and gave no id, but said: {text}")
    raise _error("sbatch", done)


def check_script(script: str | Path, options: Sequence[str], cluster: str) -> str:
    """Ask whether a script (its text, or its path) could be submitted; returns what Slurm says, such as when it would start."""
    words, text = ([str(script)], "") if isinstance(script, Path) else ([], script)
    done = _call("sbatch", ["--test-only", *options, *words], cluster, text)
    if done.returncode:
        raise _error("sbatch", done)
    return _text(done.stderr)


def squeue(cluster: str, ids: Sequence[str] = (), names: Sequence[str] = ()) -> list[Row]:
    """Jobs that the controller knows, by id or else by name, each unit and each part in its own row."""
    chosen = ["-j", ",".join(ids)] if ids else ["-n", ",".join(names)]
    done = _call("squeue", ["-h", "-r", "-a", "-t", "all", *chosen, "-o", "%i|%T|%e|%r|%k|%j"], cluster)
    if done.returncode and "Invalid job id" in done.stderr:
        return []
    if done.returncode:
        raise ControllerDown(f"squeue: {_text(done.stderr)}")
    rows = []
    for line in done.stdout.splitlines():
        words = line.split("|", 5)
        if len(words) == 6:  # a site's own squeue may say more
            unit, state, ended, reason, comment, name = words
            rows += _rows(unit, state, reason, name, comment, ended)
    return rows


def sacct(cluster: str, ids: Sequence[str] = (), names: Sequence[str] = (), since: float = 0.0) -> list[Row] | None:
    """The same from accounting, oldest first; None where there is none. Its exit codes are masked and not asked for."""
    start = datetime.fromtimestamp(max(since, 0.0)).isoformat(timespec="seconds")
    chosen = ["-j", ",".join(ids)] if ids else ["--name", ",".join(names), "-S", start]
    done = _call("sacct", ["-a", "-X", "-n", "-P", "-D", *chosen, "-o", "JobID,State,Submit,End,JobName"], cluster)
    if "accounting storage is disabled" in done.stderr:
        return None
    if done.returncode:
        raise ControllerDown(f"sacct: {_text(done.stderr)}")
    lines = [words for line in done.stdout.splitlines() if len(words := line.split("|", 4)) == 5]
    rows = []
    for unit, state, _, ended, name in sorted(lines, key=lambda words: words[2]):
        rows += _rows(unit, state.partition(" ")[0], "", name, "", ended)
    return rows


def scancel(cluster: str, ids: Sequence[str]) -> None:
    """Cancel jobs; one that has ended already is no error."""
    done = _call("scancel", list(ids), cluster)
    wrong = [line for line in done.stderr.splitlines() if "Invalid job id" not in line and "already" not in line]
    if done.returncode and wrong:
        raise _error("scancel", done)


def setting(cluster: str, name: str) -> str:
    """A value of the cluster's configuration, such as MaxArraySize or ClusterName."""
    done = _call("scontrol", ["show", "config"], cluster)
    found = re.search(rf"^{name}\s*=\s*(\S+)", done.stdout, re.M)
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
) -> subprocess.CompletedProcess[str]:
    path = require(tool)
    if cluster and not Path(cluster).is_file():
        raise ControllerDown(f"SLURM_CONF={cluster}: no such file")  # Slurm's commands would try for a minute
    try:
        # A session of its own: Ctrl-C must not end sbatch between the submission and the id.
        return subprocess.run(
            [path, *words],
            env={**_environment(tool, cluster), **(added or {})},
            cwd=cwd,
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise ControllerDown(f"{tool} did not answer within {TIMEOUT_S:.0f} s") from error


def _environment(tool: str, cluster: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key == "SLURM_CONF_SERVER" or not key.startswith(_STEERING)}
    return {**kept, **({"SLURM_CONF": cluster} if cluster else {}), **(_PLAIN if tool in ("squeue", "sacct") else {})}


def _error(tool: str, done: subprocess.CompletedProcess[str]) -> BlockedError:
    text = _text(done.stderr) or _text(done.stdout) or f"exit code {done.returncode}"
    return ControllerDown(f"{tool}: {text}") if _NO_ANSWER.search(text) else Refused(f"{tool}: {text}")


def _text(output: str) -> str:
    """What a command said, on one line and without its own name."""
    lines = (re.sub(r"^(sbatch|squeue|sacct|scancel|scontrol): (error: )?", "", line.strip()) for line in output.splitlines())
    return "; ".join(line for line in lines if line)


def _rows(unit: str, state: str, reason: str, name: str, comment: str, ended: str) -> list[Row]:
    """`12`, `12_3`, `12+1` (a part) and `12_[0-5,9%2]` (units that ended or wait together)."""
    found = re.fullmatch(r"(\d+)(?:_(\d+)|_\[([^\]]*)\]?|\+(\d+))?", unit, re.ASCII)
    if found is None:
        return []  # a step, or a line of another plugin
    job, single, several, part = found.groups()
    moment = _moment(ended)
    comment = "" if comment == "(null)" else comment
    indices: list[int | None] = [None]
    if single:
        indices = [parse_count(single)]
    elif several:
        indices = list(_indices(several))
    return [Row(job, index, part or "", state, reason, name, comment, moment) for index in indices]


def _moment(text: str) -> float | None:
    """When a job ended; None where Slurm knows no time, or writes one that does not exist."""
    try:
        return parse_time(text) if _TIME.fullmatch(text) else None
    except BadValue:
        return None


def _indices(text: str) -> list[int]:
    """`0-5,7,10-20:5%2` as numbers; of a range that is longer than Slurm's arrays, its start."""
    found: list[int] = []
    for item in text.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", item, re.ASCII)
        if match:
            first, last, step = (parse_count(number) for number in (match[1], match[2] or match[1], match[3] or "1"))
            found += range(first, last + 1, max(step, 1))[:_MOST_UNITS]
    return found
