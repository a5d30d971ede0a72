"""Verifiers: who scores an answer, made from a `[verifiers]` table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from seatrial.core import registry
from seatrial.core.errors import UserError
from seatrial.rollouts.campaign import Dataset, SandboxLimits, Verify, api_key_of
from seatrial.rollouts.rollout_record import Verifier
from seatrial.rollouts.verifiers.text_verifiers import Asker, Choice, Exact, Truth

__all__ = ["Asker", "installed_verifier", "make_verifier"]


def installed_verifier(name: str) -> Verify | None:
    """What an installed distribution calls by this name: an entry point `seatrial.verifiers`, which is a function (it is called with row
    and text, in a process of its own), or a class like those here (it is made with Verify and Truth)."""
    extension = registry.find(registry.VERIFIERS, name)
    return Verify(kind="function", function=extension.value) if extension else None


def make_verifier(verify: Verify, limits: SandboxLimits, base: Path, policy: Asker | None, datasets: Mapping[str, Dataset]) -> Verifier:
    """The verifier that a table means. `base` is where relative paths start, `policy` whom a judge without a URL asks, `datasets` by
    name say where rows have their question and answer. Processes start with the first answer; `close` ends them."""
    truth = Truth(datasets)
    if verify.kind in ("exact", "choice"):
        return (Exact if verify.kind == "exact" else Choice)(verify, truth)
    if verify.kind == "math":
        from seatrial.rollouts.verifiers.process_verifiers import Mathematics

        return Mathematics(verify, truth)
    if verify.kind == "code":
        from seatrial.rollouts.verifiers.process_verifiers import Programs

        return Programs(verify, limits)
    if verify.kind == "function":
        extension = next((found for found in registry.extensions(registry.VERIFIERS) if found.value == verify.function), None)
        found = extension.load() if extension else None
        if extension and isinstance(found, type):
            made: Verifier = found(verify, truth)
            if not all(callable(getattr(made, part, None)) for part in ("score", "close")):
                raise extension.error("is no verifier: it has no score or no close (seatrial.rollouts.rollout_record.Verifier)")
            return made
        from seatrial.rollouts.verifiers.process_verifiers import Function

        return Function(verify, base)
    from seatrial.rollouts.verifiers.judge_verifier import Judge, ServerAsker

    asker = ServerAsker([verify.url], verify.model, api_key_of(verify.key_env)) if verify.url else policy
    if asker is None:
        raise UserError("a verifier of kind judge has no url, and there is no policy to ask", "say url in its [verifiers] table")
    return Judge(verify, truth, asker)
