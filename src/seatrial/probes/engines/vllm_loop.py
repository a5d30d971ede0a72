"""Driver of the refit probe with a real vLLM server: a transformers policy that trains, refitted into the server after every step.

    python -m seatrial.probes.engines.vllm_loop --model DIR --out DIR --steps N [--transport …] [--fault NAME] [-- SERVER OPTIONS]

Runs inside an interpreter with torch, transformers and vLLM. This process is the policy; the server is started by it, gets its
weights through vLLM's own weight-update routes, and is ended with it. What its workers really hold is read back after every refit,
and compared with the export element for element. Everything found goes to DIR/facts.jsonl; the judgement is made outside.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seatrial.probes import fingerprint, provenance
from seatrial.probes.engines import export_faults, transformers_loop
from seatrial.probes.engines.serve import Server
from seatrial.probes.engines.transformers_loop import REPLICA, Loop
from seatrial.probes.engines.transformers_remote import say
from seatrial.probes.engines.vllm_client import Client, ServerError
from seatrial.probes.refit.errors import RefitRefused

FAULTS: dict[str, str] = {
    "skip-refit": "what is sent never reaches the server, which is taken to have it",
    "flip-bit": "one bit of one live weight is wrong after each refit",
    "swap-tensors": "two live tensors of the same shape change places after each refit",
    "truncated": "the payload of the second refit loses its last byte",
    "replayed": "the first payload is sent again instead of the third",
    "dead-generator": "the server is killed before the third refit",
    "unstamped-sample": "one sample carries no version",
    "unsynced-buffer": "a buffer of the policy changes at each step, and nobody exports it",
    "frozen-policy": "the policy never changes: a vacuous run, which must be Blocked",
    **{name: text for name, (text, _) in export_faults.FAULTS.items()},
}


class Policy(transformers_loop.Policy):
    """Exports under the names of a checkpoint, which is what vLLM loads: experts one by one."""

    def export(self) -> dict[str, Any]:
        """The weights as they are sent: tied ones once."""
        from transformers.core_model_loading import revert_weight_conversion

        held = {name: value.detach() for name, value in self.model.named_parameters()}
        return {name: value.contiguous() for name, value in revert_weight_conversion(self.model, held).items()}


class Engine:
    """The server as the loop asks it."""

    def __init__(self, server: Server, out: Path, fault: str | None) -> None:
        self.server, self.client, self.fault = server, Client(server.url), fault
        self.reference, self._payload = out / "reference.safetensors", out / "payload.bin"
        self.refits = 0

    def expect(self, export: dict[str, Any]) -> None:
        """Write down what the server should hold."""
        from safetensors.torch import save_file

        save_file(export, self.reference)

    def map(self) -> dict[str, Any]:
        """Let the worker learn the coordinate map; the fact."""
        (mapped,) = self.client.rpc("seatrial_map", reference=str(self.reference))
        self.client.start()
        return dict(mapped)

    def ask(self, do: str, *given: Any) -> Any:
        """One request of the loop; a server that is gone is the refusal "dead"."""
        try:
            return getattr(self, do)(*given)
        except ServerError as error:
            if self.server.process.poll() is not None:
                raise RefitRefused("dead", detail=f"the server was gone when it was asked to {do}") from error
            raise

    def state(self) -> dict[str, Any]:
        """What the worker holds, by exported name."""
        (read,), (held,) = self.client.rpc("seatrial_read", reference=str(self.reference)), self.client.versions()
        (verified,) = self.client.rpc("seatrial_verify", reference=str(self.reference))
        found = {"hashes": read["hashes"], "methods": dict(Counter(read["methods"].values())), "wrong": verified["wrong"]}
        unproven = [name for name in read["hashes"] if name not in read["methods"]]
        return {**found, "unproven": unproven, "version": held["version"], "incarnation": held["incarnation"]}

    def apply(self, data: bytes) -> None:
        """Send one payload through the server's own routes."""
        self.refits += 1
        if self.fault == "dead-generator" and self.refits == 3:
            self.server.end()
        if self.fault == "skip-refit" and self.refits > 1:
            return
        self._payload.write_bytes(data)
        try:
            self.client.refit(str(self._payload), self.refits)
        except ServerError as error:
            (held,) = self.client.versions()  # the route says only that it failed
            if held["refused"] is None:
                raise
            raise RefitRefused(held["refused"]["reason"], held["refused"]["names"], detail=held["refused"]["text"]) from error
        if self.fault in ("flip-bit", "swap-tensors") and self.refits > 1:
            say(f"broken on purpose: {self.client.rpc('seatrial_break', fault=self.fault)}")

    def sample(self, prompts: Sequence[Sequence[int]], length: int, seed: int) -> tuple[list[list[int]], int]:
        """Completions, and the version that the server held when they were asked for."""
        done = self.client.sample(prompts, length, seed)
        return [sample.tokens for sample in done], done[0].version

    def logprobs(self, rows: Sequence[Sequence[int]], width: int) -> list[list[float]]:
        """What the server gives the tokens after the prompts; NaN where it has numbers that JSON cannot say."""
        try:
            return self.client.logprobs(rows, [width] * len(rows))
        except ServerError as error:
            if "not JSON compliant" not in str(error):
                raise
            return [[math.nan] * (len(row) - width) for row in rows]

    def cover(self) -> dict[str, Any]:
        """The coverage over all refits so far."""
        (covered,) = self.client.rpc("seatrial_coverage")
        return dict(covered)


class ServedLoop(Loop):
    """The loop over a server: the baseline moves only when the live weights were read back and are right."""

    def __init__(self, policy: Policy, engine: Engine, out: Path, transports: Sequence[str], fault: str | None) -> None:
        super().__init__(policy, engine, out, transports, fault)  # type: ignore[arg-type]  # asked in the same way
        self.engine = engine

    def begin(self) -> None:
        """The map is learned from what the server should hold."""
        self.engine.expect(self.policy.export())
        super().begin()

    def refit(self, index: int) -> None:
        """Compare, send, compare again, and write it all down. A dead server ends the run."""
        export = self.policy.export()
        self.engine.expect(export)
        before, stale = self.remote.ask("state"), self.gap()
        row, hashes = self.prepare(index, export, before["hashes"], stale)
        self.seen.append(hashes)
        refused = None
        try:
            self.remote.ask("apply", self.payload(index))
        except RefitRefused as error:
            refused = error
        self.finish(row, hashes, before, refused)

    def finish(self, row: dict[str, Any], sent: dict[str, str], before: dict[str, Any], refused: RefitRefused | None) -> None:
        """Read the live weights, commit if they are what was sent, and write the facts."""
        dead = refused is not None and refused.reason == "dead"
        held = {**before, "hashes": {}} if dead else self.remote.ask("state")
        after, fresh = held["hashes"], None if dead else self.gap()
        wrong = [] if refused else fingerprint.differing(sent, after)
        root = fingerprint.tree(after).root if after else None
        row |= {"consumed": root, "incarnation": held["incarnation"], "wrong_names": wrong, "methods": held["methods"]}
        row["unproven"] = [] if dead else held["unproven"]
        row |= {"touched_names": len(fingerprint.differing(before["hashes"], after)) if after else 0}
        row |= {"fresh_max_dlogp": fresh.max_abs if fresh else None, "refused": str(refused) if refused else None}
        if refused is None:
            row["wrong"] = {name: held["wrong"].get(name) for name in wrong}
            self.write("hashes", side="live", step=row["step"], replica=REPLICA, version=row["version"], hashes=after)
        for name in wrong[:5]:
            say(f"wrong after refit {row['index']}: {name}: {held['wrong'].get(name)}")
        self.settle(root, held["version"], refused)
        if after:
            self.write("version", replica=REPLICA, incarnation=held["incarnation"], version=held["version"], root=root)
        self.write("refit", **row)
        if fresh:
            self.write("mismatch", step=row["step"], **dataclasses.asdict(fresh))
        if refused is not None and dead:
            raise refused

    def settle(self, root: str | None, version: int, refused: RefitRefused | None) -> None:
        """Commit, or roll back. A server that took a version and holds it wrongly still counts it: the next one must be higher."""
        if refused is not None or root is None:
            self.producer.rollback()
            return
        try:
            self.producer.commit(root, version)
        except RefitRefused as error:
            say(str(error))
            self.producer.version = max(self.producer.version, version)


def device() -> str:
    """Where the policy trains: beside the server, on a GPU if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    """Parse, start the server, run."""
    parser = transformers_loop.parser(__doc__, FAULTS)
    parser.add_argument("server", nargs="*", help="options for the server, after --")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that the server is ended, too
    transports = transformers_loop.prepared(arguments)
    with provenance.uncollected():
        policy = Policy(arguments.model, arguments.fault == "frozen-policy", device())
    dtype = str(policy.model.dtype).removeprefix("torch.")
    options, faults = ("--dtype", dtype, *arguments.server), arguments.fault is not None
    with Server(arguments.model, arguments.out / "server.log", say, options, faults=faults) as server:
        engine = Engine(server, arguments.out, arguments.fault)
        ServedLoop(policy, engine, arguments.out, transports, arguments.fault).run(arguments.steps)
    say("run complete")


if __name__ == "__main__":
    main()
