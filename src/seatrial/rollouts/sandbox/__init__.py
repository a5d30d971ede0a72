"""Real isolation for untrusted code, with what Linux offers."""

from __future__ import annotations

from seatrial.rollouts.sandbox.sandbox import Ran, Sandbox, SandboxError, why_not

__all__ = ["Ran", "Sandbox", "SandboxError", "why_not"]
