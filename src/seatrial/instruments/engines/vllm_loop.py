"""Driver of the refit probe with a real vLLM server: a transformers policy that trains, refitted into the server after every step.

    python -m seatrial.instruments.engines.vllm_loop --model DIR --out DIR --steps N [--transport …] [--fault NAME] [-- SERVER OPTIONS]

This process is the policy. It starts the server, sends weights through vLLM's own weight-update routes, and reads back after every refit
what the workers really hold.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seatrial.instruments import provenance
from seatrial.instruments.engines import transformers_loop
from seatrial.instruments.engines.transformers_loop import OWN_FAULTS, Loop
from seatrial.instruments.engines.vllm_server import Sample, ServerError, VllmClient, VllmServer
from seatrial.instruments.refit import refit_driver
from seatrial.instruments.refit.payload_header import RefitRefused
from seatrial.instruments.refit.refit_driver import say

FAULTS: dict[str, str] = {
    "skip-refit": "what is sent never reaches the server, which is taken to have it",
    "flip-bit": "one bit of one live weight is wrong after each refit",
    "swap-tensors": "two live tensors of the same shape change places after each refit",
    "dead-generator": "the server is killed before the third refit",
    **refit_driver.FAULTS,
    **OWN_FAULTS,
}
FAULTY = 3  # the refit, counted from 1, before which the server is killed


class Policy(transformers_loop.TrainedPolicy):
    """Exports under the names of a checkpoint, which is what vLLM loads: experts one by one."""

    def export(self) -> dict[str, Any]:
        return by_checkpoint_name(self.model, super().export())


def by_checkpoint_name(model: Any, held: dict[str, Any]) -> dict[str, Any]:
    """Parameters under the names of a checkpoint."""
    from transformers.core_model_loading import revert_weight_conversion

    return {name: value.contiguous() for name, value in revert_weight_conversion(model, held).items()}


class Engine:
    """A vLLM server as a generator of the refit driver. `place`: a directory that both sides see."""

    def __init__(self, server: VllmServer, place: Path, fault: str | None) -> None:
        self.server, self.client, self.fault = server, VllmClient(server.url), fault
        self.reference, self.payload = place / "reference.safetensors", place / "payload.bin"
        self.refits = 0

    def expect(self, export: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        save_file(export, self.reference)

    def ask(self, do: str, *given: Any) -> Any:
        """One request; a server that is gone is the refusal "dead"."""
        try:
            return getattr(self, do)(*given)
        except ServerError as error:
            code, cause = self._code(), self.cause()
            if code is not None:
                raise RefitRefused("dead", detail=f"the generation process ended with code {code} at {do!r}{cause}") from None
            raise RuntimeError(f"the generation process failed at {do!r}: {error}{cause}") from None

    def _code(self) -> int | None:
        """How the server ended; None when it lives."""
        try:
            return self.server.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return None

    def cause(self, first: bool = False) -> str:
        """The last error that the engine itself logged, or the first; the server only says that there was one."""
        log = self.server.log.read_text(encoding="utf-8", errors="replace")
        said = re.findall(r"^\(EngineCore.* ERROR .*\] (\w+(?:Error|Exception): .*)$", log, re.MULTILINE)
        return f": {said[0 if first else -1]}" if said else ""

    def rpc(self, method: str, **given: Any) -> Any:
        """Call a method of the extension in the one worker that the server is started with."""
        (answer,) = self.client.rpc(method, **given)
        return answer

    def map(self) -> dict[str, Any]:
        mapped: dict[str, Any] = self.rpc("seatrial_map", reference=str(self.reference))
        self.client.start()
        return mapped

    def state(self) -> dict[str, Any]:
        read, held = self.rpc("seatrial_read", reference=str(self.reference)), self.rpc("seatrial_version")
        found = {"hashes": read["hashes"], "methods": read["methods"]}
        return {**found, "version": held["version"], "incarnation": held["incarnation"]}

    def explain(self) -> dict[str, Any]:
        wrong: dict[str, Any] = self.rpc("seatrial_verify", reference=str(self.reference))["wrong"]
        return wrong

    def apply(self, path: str) -> None:
        self.refits += 1
        if self.fault == "dead-generator" and self.refits == FAULTY:
            os.killpg(self.server.process.pid, signal.SIGKILL)
        if self.fault == "skip-refit" and self.refits > 1:
            return
        try:
            self.client.refit(path, self.refits)
        except ServerError as error:
            refused = self.rpc("seatrial_version")["refused"]  # the route says only that it failed
            if refused is None:
                raise
            raise RefitRefused(refused["reason"], refused["names"], detail=refused["text"]) from error
        if self.fault in ("flip-bit", "swap-tensors") and self.refits > 1:
            say(f"broken on purpose: {self.rpc('seatrial_break', fault=self.fault)}")

    def sample(self, prompts: Sequence[Sequence[int]], length: int, seed: int) -> dict[str, Any]:
        return stamped(self.client.sample(prompts, length, seed))

    def logprobs(self, rows: Sequence[Sequence[int]], width: int) -> list[list[float]]:
        """What the server gives the tokens after the prompts; NaN where it has numbers that JSON cannot say."""
        try:
            return self.client.logprobs(rows, [width] * len(rows))
        except ServerError as error:
            if "not JSON compliant" not in str(error):
                raise
            return [[math.nan] * (len(row) - width) for row in rows]

    def cover(self) -> dict[str, Any]:
        covered: dict[str, Any] = self.rpc("seatrial_coverage")
        return covered

    def close(self) -> None:
        self.server.end()


def stamped(made: Sequence[Sample]) -> dict[str, Any]:
    """Samples, as the refit driver takes them; the client has seen that all are of one version and life."""
    tokens, given = [sample.tokens for sample in made], [sample.logprobs for sample in made]
    return {"tokens": tokens, "logprobs": given, "version": made[0].version, "incarnation": made[0].incarnation}


def device() -> str:
    """Where the policy trains: beside the server, on a GPU if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = transformers_loop.parser(__doc__, FAULTS)
    parser.add_argument("server", nargs="*", help="options for the server, after --")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that the server is ended, too
    transports = transformers_loop.prepared(arguments)
    with provenance.uncollected():
        policy = Policy(arguments.model, arguments.fault == "frozen-policy", device())
    dtype = str(policy.model.dtype).removeprefix("torch.")
    options, faults = ("--dtype", dtype, *arguments.server), arguments.fault is not None
    with VllmServer(arguments.model, arguments.out / "server.log", say, options, faults=faults) as server:
        engine = Engine(server, arguments.out, arguments.fault)
        Loop(policy, engine, arguments.out, transports, arguments.fault).run(arguments.steps)
    say("run complete")


if __name__ == "__main__":
    main()
