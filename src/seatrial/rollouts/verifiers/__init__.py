"""Verifiers: who scores an answer, made from a `[verifiers]` table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from seatrial.core.errors import UserError
from seatrial.rollouts.campaign import Dataset, SandboxLimits, Verify
from seatrial.rollouts.rollout_record import Verifier
from seatrial.rollouts.verifiers.text_verifiers import Asker, Truth

__all__ = ["Asker", "make_verifier"]


def make_verifier(verify: Verify, limits: SandboxLimits, base: Path, policy: Asker | None, datasets: Mapping[str, Dataset]) -> Verifier:
    """The verifier that a table means. `base` is where relative paths start, `policy` whom a judge without a URL asks, `datasets` by
    name say where rows have their question and answer. Processes start with the first answer; `close` ends them."""
    truth = Truth(datasets)
    # Each kind is imported where it is asked for: a worker process needs one of them.
    if verify.kind == "exact":
        from seatrial.rollouts.verifiers.text_verifiers import Exact

        return Exact(verify, truth)
    if verify.kind == "choice":
        from seatrial.rollouts.verifiers.text_verifiers import Choice

        return Choice(verify, truth)
    if verify.kind == "math":
        from seatrial.rollouts.verifiers.process_verifiers import Mathematics

        return Mathematics(verify, truth)
    if verify.kind == "code":
        from seatrial.rollouts.verifiers.process_verifiers import Programs

        return Programs(verify, limits)
    if verify.kind == "function":
        from seatrial.rollouts.verifiers.process_verifiers import Function

        return Function(verify, base)
    from seatrial.rollouts.verifiers.judge_verifier import Judge, server

    asker = server(verify) if verify.url else policy
    if asker is None:
        raise UserError("a verifier of kind judge has no url, and there is no policy to ask", "say url in its [verifiers] table")
    return Judge(verify, truth, asker)
