"""The Gym that a campaign uses: its interpreter, where its servers' code lies, and what may be said to it.

- Everything that is certain to fail later is refused here, before anything starts.
- Arguments that Seatrial sets itself, and those that Gym would silently ignore, are refused with the reason.
"""

from __future__ import annotations

import difflib
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.launch.environments import Environments
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.guarded import parse_json
from seatrial.model.verdict import Boundary
from seatrial.rollouts.campaign import Gym
from seatrial.rollouts.gym import ENVIRONMENT, LOCK
from seatrial.rollouts.gym.generation import Generation, find_generation

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
_SEAM = "its inputs are materialized already, so Gym would ignore it"
_COLLECT_OURS = {
    **{key: _OURS[key] for key in ("head_server", "head_server.host", "head_server.port", "config_paths")},
    **dict.fromkeys(("limit", "num_repeats", "num_repeats_add_seed", "prompt_config", "skills", "agent_name", "agent"), _SEAM),
    **dict.fromkeys(("responses_create_params", "temperature", "top_p", "max_output_tokens"), f"say [sampling]: {_SEAM}"),
    **dict.fromkeys(("input_jsonl_fpath", "output_jsonl_fpath", "input", "output", "i", "o"), "Seatrial writes and reads these files"),
    **dict.fromkeys(("resume_from_cache", "resume", "disable_aggregation", "no_serve"), "it is always set"),
}


@dataclass(frozen=True, slots=True)
class Installation:
    """A Gym that can be started."""

    python: Path
    prefix: Path
    """Of its environment."""
    base: Path
    """Of the interpreter that the environment was made with."""
    root: Path
    """Where the code of Gym's own servers lies."""
    generation: Generation

    def command(self, words: Sequence[str]) -> tuple[str, ...]:
        """One of Gym's. By its interpreter: the first line of a script may be too long for the kernel."""
        return str(self.python), str(self.python.parent / words[0]), *words[1:]


def find(gym: Gym) -> Installation:
    """The Gym of a campaign, which is asked where it lies and which one it is; a BlockedError or UserError says what is missing."""
    if gym.python:
        python = Path(gym.python).expanduser().absolute()
        if not python.is_file():
            raise UserError(f"campaign: gym.python: {python} is not there", "name the interpreter of an environment with nemo-gym")
    else:
        if gym.environment != ENVIRONMENT:
            raise UserError(f"campaign: gym.environment: {gym.environment!r} is not known", f"say {ENVIRONMENT!r}, or gym.python")
        environment = Environments().find(ENVIRONMENT, LOCK)
        if environment is None:
            message = f"the environment {ENVIRONMENT} is not built in {Environments().root}"
            raise BlockedError(Boundary.ENVIRONMENT, message, f"seatrial env build {ENVIRONMENT}")
        python = environment.python
    prefix, base, origin, version = _ask(python)
    fix = "install nemo-gym in it, or leave gym.python out: seatrial env build gym"
    if origin is None:
        raise UserError(f"{python}: nemo-gym is not installed there", fix)
    package = Path(origin).parent
    generation = find_generation(python.parent, package, version)
    if generation is None:
        raise UserError(f"{python}: nemo-gym is there, but neither gym nor ng_run is in {python.parent}", fix)
    return Installation(python, Path(prefix), Path(base), package.parent, generation)


def _ask(python: Path) -> tuple[str, str, str | None, str | None]:
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", _QUESTION], capture_output=True, text=True, timeout=_ASK_S, stdin=subprocess.DEVNULL
        )
        prefix, base, origin, version = parse_json(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError) as error:
        raise BlockedError(Boundary.ENVIRONMENT, f"{python} does not run: {error}", "rebuild the environment") from error
    return prefix, base, origin, version


def check(gym: Gym, installation: Installation) -> None:
    """Refuse what would fail later, or be ignored."""
    _refuse("gym.run_arguments", gym.run_arguments, _OURS)
    _refuse("gym.collect_arguments", gym.collect_arguments, _COLLECT_OURS)
    _check_generation(gym, installation.generation)
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
            raise UserError(f"campaign: [gym]: there is no {path} below {' or '.join(map(str, roots))}", _close(path, roots))
        if any(letter in path for letter in ",[]'\" "):
            raise UserError(f"campaign: gym.config_paths: {path!r}: Gym cannot take a sign in this path", "rename it")


def _check_generation(gym: Gym, generation: Generation) -> None:
    if gym.driver == "collector" and generation.lacks:
        missing = " and ".join(generation.lacks)
        message = f"{generation}: its collector has no {missing}, so it would not hand on the rows it is given as they are made"
        raise UserError(f'campaign: gym.driver = "collector": {message}', 'say driver = "agents", or use NeMo Gym 0.3 or newer')
    said = {
        "gym.run_arguments": (gym.run_arguments, generation.start),
        "gym.collect_arguments": (gym.collect_arguments, generation.collect),
    }
    for where, (arguments, (program, *_)) in said.items():
        flag = next((argument for argument in arguments if argument.startswith("-")), None)
        if flag and not generation.modern:
            raise UserError(f"campaign: {where}: {flag}: {program} of NeMo Gym {generation.version} takes no flags", "say +key=value")


def config_paths(gym: Gym) -> tuple[str, ...]:
    """Gym's configuration files: as the campaign names them, or those of the named resources servers and the model server."""
    if gym.config_paths:
        return gym.config_paths
    return (*(_config("resources_servers", name) for name in gym.resources), _config("responses_api_models", gym.model_type))


def _config(kind: str, name: str) -> str:
    """`mcqa`, or `mcqa/flavour`, as Gym's own flags take them."""
    server, _, flavour = name.partition("/")
    return f"{kind}/{server}/configs/{flavour or server}.yaml"


def _close(path: str, roots: Iterable[Path]) -> str:
    parts = Path(path).parts
    known = {f"{parts[0]}/{found.name}" for root in roots for found in (root / parts[0]).glob("*") if found.is_dir()}
    close = difflib.get_close_matches("/".join(parts[:2]), sorted(known), n=3)
    return f"did you mean {', '.join(close)}?" if close else "name a file of Gym, or of your own gym.directory"


def key_of(argument: str) -> str:
    """`+a.b=1`, `++a.b=1` and `--a-b` name the keys a.b, a.b and a_b."""
    name = argument.partition("=")[0]
    return name.lstrip("-").replace("-", "_") if name.startswith("-") else name.lstrip("+~")


def _refuse(where: str, arguments: Iterable[str], ours: Mapping[str, str]) -> None:
    for argument in arguments:
        key = key_of(argument)
        why = ours.get(key) or ours.get(key.partition(".")[0])
        if why:
            raise UserError(f"campaign: {where}: {argument.partition('=')[0]} cannot be said", why)
