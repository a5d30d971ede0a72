"""What can be known before a round is launched is known then: API keys, the sandbox, packages, functions that score, and Gym.

Nothing is asked of servers, and nothing of the user's is run: a function is looked for in the text of its file.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.guarded import BadValue, parse_python, read_file
from seatrial.core.verdict import Boundary
from seatrial.evidence.redact import Redactor
from seatrial.rollouts.backends.openai_format import PARAMETERS, sort_sampling
from seatrial.rollouts.campaign import NUMBERS, Campaign, Gym, api_key_of
from seatrial.rollouts.manifest import file_of
from seatrial.rollouts.verifiers.judge_verifier import check_template
from seatrial.runtime.environments import Environments
from seatrial.runtime.local_jobs import gpus_here


def check_campaign(campaign: Campaign, *, here: bool) -> None:
    """Raises a UserError or a BlockedError for what would stop every shard.

    `here`: the collectors run on this machine. Whether another one, or a container, has a sandbox is seen there.
    """
    sort_sampling(campaign.sampling)  # names what cannot stand there
    server = campaign.policy.server
    if here and server and server.kind in ("vllm", "sglang") and not gpus_here():
        raise UserError(
            f"policy.server: {server.kind} needs GPUs, and this machine has none",
            'start it on a cluster (--on slurm:PROFILE), name a pre-hosted one (policy.url), or serve by kind = "command"',
        )
    verifiers = [] if campaign.gym else [campaign.verifier_of(dataset) for dataset in campaign.datasets]
    for variable in (campaign.policy.key_env, *(verify.key_env for verify in verifiers)):
        api_key_of(variable)
    for verify in verifiers:
        if verify.kind == "judge" and verify.prompt is not None:
            check_template(verify.prompt)
    kinds = {verify.kind for verify in verifiers}
    boxed = campaign.collector.container or campaign.collector.image
    if "math" in kinds and not boxed and importlib.util.find_spec("math_verify") is None:
        raise UserError("the verifier math needs math-verify, which is not installed", 'pip install "seatrial[rollouts]"')
    for spec in dict.fromkeys(verify.function for verify in verifiers if verify.function):
        _check_function(spec, boxed=bool(boxed))
    if here and ("code" in kinds or campaign.sandbox_service):
        _check_sandbox()
    if campaign.gym and not boxed:
        _check_gym(campaign.gym, here=here)


def campaign_warnings(campaign: Campaign) -> list[str]:
    """What may be meant, and is probably a slip: a parameter that nobody may know, close to one that many do."""
    found = []
    for key in campaign.sampling:
        close = difflib.get_close_matches(key, PARAMETERS | NUMBERS, n=1, cutoff=0.8)
        if close and close[0] != key:
            found.append(f"sampling.{key} is passed on as it is; did you mean {close[0]}?")
    return found


def _check_function(spec: str, *, boxed: bool) -> None:
    """See that a function that scores is there; whether it works is seen when it is called."""
    module, _, name = spec.rpartition(":")
    if not module or not name.isidentifier():
        raise UserError(f"verifiers: function = {spec!r} names no function", "write module:name, or path/file.py:name")
    file = file_of(spec, Path.cwd())
    if file is None:
        # A container may have it, and so may an import hook, such as that of an editable install.
        if not boxed and importlib.util.find_spec(module.partition(".")[0]) is None:
            raise UserError(f"verifiers: function: there is no module {module}", f"install it, or write path/file.py:{name}")
        return
    try:
        tree = parse_python(read_file(file)) if file.suffix == ".py" else None
    except OSError as error:
        raise UserError(f"verifiers: function: {file}: cannot read: {error.strerror}", "correct the path") from error
    except BadValue as error:
        raise UserError(
            f"verifiers: function: {file}: not Python: {error.what}{f' ({error.where})' if error.where else ''}", "correct the file"
        ) from error
    if tree is not None and not _may_define(tree, name):
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        raise UserError(f"verifiers: function: {file} has no {name}", f"it has: {', '.join(functions) or 'no function'}")


def _may_define(tree: ast.Module, name: str) -> bool:
    """Whether a module could have this name: only what is certain is refused."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name in (name, "__getattr__"):
            return True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"):
            return True
    return False


def _check_sandbox() -> None:
    from seatrial.rollouts.sandbox import why_not

    if (reason := why_not()) is not None:
        fix = "install bubblewrap (apt-get install bubblewrap) where user namespaces are allowed, or leave out code rewards"
        raise BlockedError(Boundary.ENVIRONMENT, f"no sandbox here: {reason}", fix)


def _check_gym(gym: Gym, *, here: bool) -> None:
    """See that what the campaign says of Gym is so, where Gym is installed already."""
    from seatrial.rollouts.backends import gym_install
    from seatrial.rollouts.backends.gym_install import GYM_ENVIRONMENT, GYM_LOCK

    paths = [os.environ.get("PATH", os.defpath)]
    if gym.python or gym.environment != GYM_ENVIRONMENT or Environments().find(GYM_ENVIRONMENT, GYM_LOCK) is not None:
        found = gym_install.find_gym(gym)
        gym_install.check_gym(gym, found)
        paths = [str(found.python.parent), str(found.base / "bin"), *paths]
    if here and not gym.shared_environments and shutil.which("uv", path=os.pathsep.join(paths)) is None:
        fix = "pip install uv, or say gym.shared_environments = true where Gym's own environment has all that the servers need"
        raise BlockedError(Boundary.ENVIRONMENT, "Gym makes an environment for each of its servers with uv, which is not on PATH", fix)


def build_environments(campaign: Campaign, progress: Callable[[str], None]) -> None:
    """Build Gym's environment, where it is ours and is not there yet; what could not be checked before is checked then."""
    from seatrial.rollouts.backends.gym_install import GYM_LOCK

    gym = campaign.gym
    if gym and gym.python is None and gym.environment is not None and Environments().find(gym.environment, GYM_LOCK) is None:
        Environments().build(gym.environment, GYM_LOCK, progress, line_filter=Redactor(os.environ).lines().line)
        _check_gym(gym, here=False)
