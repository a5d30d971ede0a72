"""What can be known before a round is launched is known then: API keys, the sandbox, packages, and Gym's environment."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from seatrial.launch.environments import Environments
from seatrial.launch.local.machine import gpus_here
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.verdict import Boundary
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.direct.request import sort_sampling
from seatrial.rollouts.keys import key_of


def check(campaign: Campaign, *, here: bool) -> None:
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
        key_of(variable)
    kinds = {verify.kind for verify in verifiers}
    boxed = campaign.collector.container or campaign.collector.image
    if "math" in kinds and not boxed and importlib.util.find_spec("math_verify") is None:
        raise UserError("the verifier math needs math-verify, which is not installed", 'pip install "seatrial[rollouts]"')
    if here and ("code" in kinds or campaign.sandbox_service):
        _check_sandbox()


def _check_sandbox() -> None:
    from seatrial.rollouts.sandbox import why_not

    if (reason := why_not()) is not None:
        fix = "install bubblewrap (apt-get install bubblewrap) where user namespaces are allowed, or leave out code rewards"
        raise BlockedError(Boundary.ENVIRONMENT, f"no sandbox here: {reason}", fix)


def build(campaign: Campaign, progress: Callable[[str], None]) -> None:
    """Build Gym's environment, where it is ours and is not there yet."""
    from seatrial.rollouts.gym import LOCK

    if campaign.gym and campaign.gym.python is None and campaign.gym.environment is not None:
        Environments().build(campaign.gym.environment, LOCK, progress)
