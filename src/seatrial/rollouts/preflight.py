"""What can be known before a campaign starts is known then: API keys, the sandbox, packages, and Gym's environment."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

from seatrial.launch.environments import Environments
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.verdict import Boundary
from seatrial.rollouts.campaign import Campaign


def prepare(campaign: Campaign, progress: Callable[[str], None]) -> None:
    """Raises a UserError or a BlockedError for what would stop every shard; builds Gym's environment where it is ours."""
    verifiers = [] if campaign.gym else [campaign.verifier_of(dataset) for dataset in campaign.datasets]
    for variable in (campaign.policy.key_env, *(verify.key_env for verify in verifiers)):
        if variable and not os.environ.get(variable):
            raise UserError(f"the variable {variable} is to hold an API key, and is not set here", f"export {variable}=…")
    kinds = {verify.kind for verify in verifiers}
    if "math" in kinds and importlib.util.find_spec("math_verify") is None:
        raise UserError("the verifier math needs math-verify, which is not installed", 'pip install "seatrial[rollouts]"')
    if "code" in kinds or campaign.sandbox_service:
        _check_sandbox()
    if campaign.gym:
        _prepare_gym(campaign, progress)


def _check_sandbox() -> None:
    from seatrial.rollouts.sandbox import why_not

    if (reason := why_not()) is not None:
        fix = "install bubblewrap (apt-get install bubblewrap) where user namespaces are allowed, or leave out code rewards"
        raise BlockedError(Boundary.ENVIRONMENT, f"no sandbox here: {reason}", fix)


def _prepare_gym(campaign: Campaign, progress: Callable[[str], None]) -> None:
    from seatrial.rollouts.gym import LOCK

    assert campaign.gym is not None
    if campaign.gym.python is None and campaign.gym.environment is not None:
        Environments().build(campaign.gym.environment, LOCK, progress)
