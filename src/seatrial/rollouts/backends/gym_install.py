"""The NeMo Gym that a campaign uses: its interpreter, generation, code, lock, and the arguments that it accepts.

- What is certain to fail later is refused here, before anything starts; so are arguments that Seatrial sets or Gym would ignore.
- Since 0.4 there is one program, `gym`; before, there were ng_run, ng_collect_rollouts and others. Both take Hydra overrides, have the same
  head, and agents with the same /run. Features are looked up in the code: a checkout may lie between two versions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.core import files
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.guarded import parse_json
from seatrial.core.verdict import Boundary
from seatrial.rollouts.campaign import Gym
from seatrial.runtime.command import NoAnswerError, run_command
from seatrial.runtime.environments import Environments

GYM_ENVIRONMENT = "gym"
GYM_LOCK = Path(__file__).parent / "gym.lock"
"""Of the environment that `seatrial env build gym` makes."""


_SEAM = ("resume_from_cache", "disable_aggregation", "_failures.jsonl")
"""What we need of Gym's collector: that it rolls out the rows it is given, hands them on as they are made, and says when it begins."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Of one installation."""

    version: str
    modern: bool = True
    """Whether it has `gym`."""
    liveness: bool = True
    """Whether its servers answer 200 on /. Others answer 404 there, once they are up."""
    lacks: tuple[str, ...] = ()

    @property
    def start(self) -> tuple[str, ...]:
        """The command that starts servers: a program of its environment, and words."""
        return ("gym", "env", "start") if self.modern else ("ng_run",)

    @property
    def collect(self) -> tuple[str, ...]:
        """The command that collects from servers that run, and goes on with what was begun."""
        return ("gym", "eval", "run", "--no-serve", "--resume") if self.modern else ("ng_collect_rollouts", "+resume_from_cache=true")

    def __str__(self) -> str:
        return f"NeMo Gym {self.version}, {' '.join(self.start)}"


def find_generation(programs: Path, package: Path, version: str | None) -> Generation | None:
    """By the programs and the code of the package nemo_gym; None where neither generation's programs are there."""
    known = version or "of unknown version"
    if (programs / "gym").is_file():
        return Generation(known)
    if not (programs / "ng_run").is_file():
        return None
    paths = (package / name for name in ("rollout_collection.py", "server_utils.py"))
    collector, servers = (files.read_text(path) if path.is_file() else "" for path in paths)
    return Generation(known, modern=False, liveness="setup_liveness" in servers, lacks=tuple(key for key in _SEAM if key not in collector))


SERVER_KINDS = ("resources_servers", "responses_api_agents", "responses_api_models")
_ASK_S = 60.0
_QUESTION = """
import importlib.metadata, importlib.util, json, sys
found = importlib.util.find_spec("nemo_gym")
version = next((one.version for one in importlib.metadata.distributions(name="nemo-gym")), None)
print(json.dumps([sys.prefix, sys.base_prefix, found.origin if found else None, version]))
"""
_NODE = "it is chosen on the node, for each instance"
_OURS = {
    "head_server": _NODE,
    "head_server.host": _NODE,
    "head_server.port": _NODE,
    "port_range_low": _NODE,
    "port_range_high": _NODE,
    "ray_head_node_address": "each instance has a Ray of its own",
    "config_paths": "say gym.config_paths or gym.resources",
    "policy_base_url": "say [policy]",
    "policy_model_name": "say policy.model",
    "policy_api_key": "say policy.key_env: what stands here is read by everybody on the node",
    "nemo_gym_log_dir": "Gym's logs stand in gym.log of the attempt, without secrets",
    "dry_run": "nothing would be started",
}
_IGNORED_BY_GYM = "its inputs are materialized already, so Gym would ignore it"
_COLLECT_OURS = {
    **{key: _OURS[key] for key in ("head_server", "head_server.host", "head_server.port", "config_paths")},
    **dict.fromkeys(("limit", "num_repeats", "num_repeats_add_seed", "prompt_config", "skills", "agent_name", "agent"), _IGNORED_BY_GYM),
    **dict.fromkeys(("responses_create_params", "temperature", "top_p", "max_output_tokens"), f"say [sampling]: {_IGNORED_BY_GYM}"),
    **dict.fromkeys(("input_jsonl_fpath", "output_jsonl_fpath", "input", "output", "i", "o"), "Seatrial writes and reads these files"),
    **dict.fromkeys(("resume_from_cache", "resume", "disable_aggregation", "no_serve"), "it is always set"),
}


@dataclass(frozen=True, slots=True)
class Installation:
    """A Gym that can be started."""

    python: Path
    prefix: Path
    base: Path
    """Of the interpreter that the environment was made with."""
    root: Path
    """Where the code of Gym's own servers lies."""
    generation: Generation

    def command(self, words: Sequence[str]) -> tuple[str, ...]:
        """One of Gym's. By its interpreter: the first line of a script may be too long for the kernel."""
        return str(self.python), str(self.python.parent / words[0]), *words[1:]


def find_gym(gym: Gym) -> Installation:
    """The Gym of a campaign, which is asked where it lies and which one it is; a BlockedError or UserError says what is missing."""
    if gym.python:
        python = Path(gym.python).expanduser().absolute()
        if not python.is_file():
            raise UserError(f"campaign: gym.python: {python} is not there", "name the interpreter of an environment with nemo-gym")
    else:
        if gym.environment != GYM_ENVIRONMENT:
            raise UserError(f"campaign: gym.environment: {gym.environment!r} is not known", f"say {GYM_ENVIRONMENT!r}, or gym.python")
        environment = Environments().find(GYM_ENVIRONMENT, GYM_LOCK)
        if environment is None:
            message = f"the environment {GYM_ENVIRONMENT} is not built in {Environments().root}"
            raise BlockedError(Boundary.ENVIRONMENT, message, f"seatrial env build {GYM_ENVIRONMENT}")
        python = environment.python
    try:
        prefix, base, origin, version = parse_json(run_command([python, "-I", "-c", _QUESTION], _ASK_S).out)
    except (NoAnswerError, ValueError, TypeError) as error:
        raise BlockedError(Boundary.ENVIRONMENT, f"{python} does not run: {error}", "rebuild the environment") from error
    fix = "install nemo-gym in it, or leave gym.python out: seatrial env build gym"
    if origin is None:
        raise UserError(f"{python}: nemo-gym is not installed there", fix)
    package = Path(origin).parent
    generation = find_generation(python.parent, package, version)
    if generation is None:
        raise UserError(f"{python}: nemo-gym is there, but neither gym nor ng_run is in {python.parent}", fix)
    return Installation(python, Path(prefix), Path(base), package.parent, generation)


def check_gym(gym: Gym, installation: Installation) -> None:
    _refuse("gym.run_arguments", gym.run_arguments, _OURS)
    _refuse("gym.collect_arguments", gym.collect_arguments, _COLLECT_OURS)
    generation = installation.generation
    if gym.driver == "collector" and generation.lacks:
        missing = " and ".join(generation.lacks)
        message = f"{generation}: its collector has no {missing}, so it would not hand on the rows it is given as they are made"
        raise UserError(f'campaign: gym.driver = "collector": {message}', 'say driver = "agents", or use NeMo Gym 0.3 or newer')
    started = ("gym.run_arguments", gym.run_arguments, generation.start[0])
    for where, arguments, program in (started, ("gym.collect_arguments", gym.collect_arguments, generation.collect[0])):
        flag = next((argument for argument in arguments if argument.startswith("-")), None)
        if flag and not generation.modern:
            raise UserError(f"campaign: {where}: {flag}: {program} of NeMo Gym {generation.version} takes no flags", "say +key=value")
    if gym.directory and not Path(gym.directory).expanduser().is_dir():
        raise UserError(f"campaign: gym.directory: {gym.directory} is no directory", "name the root of your Gym checkout")
    if any(letter in str(installation.root) for letter in " \t'\"$&;()"):
        raise UserError(f"{installation.root}: Gym cannot run from a path with such signs in it", "build the environment elsewhere")
    if gym.shared_environments and not (installation.prefix / "bin" / "activate").is_file():
        fix = "leave gym.shared_environments out, or use a venv"
        raise UserError(f"{installation.prefix} is no venv (no bin/activate), so Gym's servers cannot share it", fix)
    roots = [Path(gym.directory).expanduser(), installation.root] if gym.directory else [installation.root]
    for path in config_paths(gym):
        if not any((root / path).is_file() for root in roots):
            parts = Path(path).parts
            known = {f"{parts[0]}/{found.name}" for root in roots for found in (root / parts[0]).glob("*") if found.is_dir()}
            close = difflib.get_close_matches("/".join(parts[:2]), sorted(known), n=3)
            fix = f"did you mean {', '.join(close)}?" if close else "name a file of Gym, or of your own gym.directory"
            raise UserError(f"campaign: [gym]: there is no {path} below {' or '.join(map(str, roots))}", fix)
        if any(letter in path for letter in ",[]'\" "):
            raise UserError(f"campaign: gym.config_paths: {path!r}: Gym cannot take a sign in this path", "rename it")


def config_paths(gym: Gym) -> tuple[str, ...]:
    if gym.config_paths:
        return gym.config_paths
    return (*(_config("resources_servers", name) for name in gym.resources), _config("responses_api_models", gym.model_type))


def _config(kind: str, name: str) -> str:
    """`mcqa`, or `mcqa/flavour`, as Gym's own flags take them."""
    server, _, flavour = name.partition("/")
    return f"{kind}/{server}/configs/{flavour or server}.yaml"


def argument_key(argument: str) -> str:
    """`+a.b=1`, `++a.b=1` and `--a-b` name the keys a.b, a.b and a_b."""
    name = argument.partition("=")[0]
    return name.lstrip("-").replace("-", "_") if name.startswith("-") else name.lstrip("+~")


def _refuse(where: str, arguments: Iterable[str], ours: Mapping[str, str]) -> None:
    for argument in arguments:
        key = argument_key(argument)
        why = ours.get(key) or ours.get(key.partition(".")[0])
        if why:
            raise UserError(f"campaign: {where}: {argument.partition('=')[0]} cannot be said", why)
