"""Drives the refits of one generator and writes a fact about each; the host judges them. Runs inside a loop's interpreter.

- Each refit is compared before (the negative control) and after, name by name, by the bits that the generator's live weights have.
- A payload becomes the base of the next delta only when the generator's own fingerprint is the policy's; otherwise the next one is full.
- `EXPORT_FAULTS` damage what a policy exports: wrong weights that arrive exactly as they were sent, which only a comparison with the
  policy's own bits can see.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from seatrial.instruments import facts
from seatrial.instruments.bits import fingerprint
from seatrial.instruments.refit import tensor_coverage
from seatrial.instruments.refit.agreement import Mismatch, token_mult_prob_error
from seatrial.instruments.refit.payload_header import UNMAPPED, RefitRefused
from seatrial.instruments.refit.weight_transfer import Producer

Export = dict[str, Any]
NO_SUCH_FAULT = "fault"
"""Where the driver met the error (`where` of its `probe_error`) when the model cannot have the fault that was asked for."""


class NoSuchFault(ValueError):
    """This model cannot have the fault."""


def _named(export: Mapping[str, Any], pattern: str) -> str:
    found = next((name for name in export if re.search(pattern, name)), None)
    if found is None:
        raise NoSuchFault(f"no exported name matches {pattern!r}: this model cannot have the fault")
    return found


def _gate_up_swapped(export: Export, _: Export) -> Export:
    gate = _named(export, r"gate_proj\.weight$")
    up = gate.replace("gate_proj", "up_proj")
    return {**export, gate: export[up].clone(), up: export[gate].clone()}


def _final_norm_reset(export: Export, _: Export) -> Export:
    name = _named(export, r"^model\.norm\.weight$")
    return {**export, name: export[name] * 0 + 1}


def _layer_partly_frozen(export: Export, first: Export) -> Export:
    frozen = [name for name in export if ".layers.0." in name and "o_proj" in name]
    _named(dict.fromkeys(frozen), "weight")
    return {**export, **{name: first[name] for name in frozen}}


def _q_rows_reversed(export: Export, _: Export) -> Export:
    name = _named(export, r"q_proj\.weight$")
    return {**export, name: export[name].flip(0).contiguous()}


def _k_bias_zeroed(export: Export, _: Export) -> Export:
    name = _named(export, r"k_proj\.bias$")
    return {**export, name: export[name] * 0}


EXPORT_FAULTS: dict[str, tuple[str, Callable[[Export, Export], Export]]] = {
    "gate-up-swapped": ("gate and up of one layer change places on export", _gate_up_swapped),
    "final-norm-reset": ("the final norm is exported as ones", _final_norm_reset),
    "layer-partly-frozen": ("layer 0 keeps exporting some of its first weights", _layer_partly_frozen),
    "q-rows-reversed": ("the rows of one query projection are exported in reverse", _q_rows_reversed),
    "k-bias-zeroed": ("one key bias is exported as zeros", _k_bias_zeroed),
}


def broken(fault: str | None, export: Export, first: Export) -> Export:
    """The export with a fault of this module in it; `first` is what was exported at the start. Other faults change nothing."""
    return EXPORT_FAULTS[fault][1](export, first) if fault in EXPORT_FAULTS else export


FAULTS = {
    "truncated-payload": "the payload of the third refit loses its last byte",
    "replayed-payload": "the third refit brings the payload of the second again",
    **{name: text for name, (text, _) in EXPORT_FAULTS.items()},
}
"""Faults between the policy and what it sends."""
FAULTY = 2
"""The refit that faults of the payload hit: the first sparse one when all transports take turns."""
REPLICA = "0"
SHOWN = 5

Compare = Callable[[], Mismatch | None]
"""How far the log-probabilities of generator and policy are apart right now; None before the first sample."""


def say(text: str) -> None:
    print(f"seatrial: {text}", flush=True)


class RefittedGenerator(Protocol):
    """A generation process, seen from the policy."""

    payload: Path
    """Where the generator reads what is sent."""

    def expect(self, export: dict[str, Any]) -> None:
        """Tell the generator, if it needs it to read its weights, what it should hold next."""

    def ask(self, do: str, *arguments: Any) -> Any:
        """One request and its answer. A refusal raises RefitRefused; so does a process that is gone, with the reason "dead".

        - `map`: learn the coordinate map; the fact.
        - `state`: version, incarnation, hashes by exported name, methods (how each was read), and where it can: zeros, nans.
        - `apply`, path: take a payload.
        - `explain`: where wrong weights are held, by name.
        - `sample`, ...: tokens, logprobs, version, incarnation. `logprobs`, ...: of given tokens.
        - `cover`: the coverage over all refits so far; the fact.
        """

    def close(self) -> None:
        """End the process."""


class RefitDriver:
    """See the module. `first` is what policy and generator hold before the first refit."""

    def __init__(
        self, generator: RefittedGenerator, path: Path, first: dict[str, Any], transports: Sequence[str], fault: str | None
    ) -> None:
        self.generator, self.facts, self.transports, self.fault = generator, path, transports, fault
        self.producer = Producer(first)
        self.count = 0
        self.step = 0
        self._owned = tensor_coverage.Owned()
        self.first = {name: value.clone() for name, value in first.items()} if fault in EXPORT_FAULTS else {}
        """The first export, which faults of the export bring back."""
        self._history: list[dict[str, str]] = []
        self._last_payload = b""

    def write(self, fact: str, **fields: Any) -> None:
        facts.append(self.facts, {"fact": fact, **fields})

    def begin(self, export: dict[str, Any]) -> None:
        """Let the generator learn the map. A loader that raises is what the probe found: it is a fact before the run ends by it."""
        self.generator.expect(export)
        try:
            mapped = self.generator.ask("map")
        except RuntimeError as error:
            if not isinstance(error, RefitRefused):
                self.write("probe_error", where=UNMAPPED, error=str(error))
            raise
        self.write("map", replica=REPLICA, **mapped)

    def end(self) -> None:
        """What became of every tensor of both sides. What changed shows only over two refits: without them there is no fact."""
        if len(self._history) > 1:
            mine = {"never_changed": tensor_coverage.never_changed(self._history), "unexported": self._owned.unexported()}
            self.write(**{**self.generator.ask("cover"), "fact": "coverage", "replica": REPLICA, **mine})

    def samples(self, made: dict[str, Any], own: Sequence[Sequence[float]], unstamped: int | None = None) -> Mismatch:
        """Facts of samples that the generator made after the last refit; `own`: what the policy gives their tokens."""
        held = {"replica": REPLICA, "incarnation": made["incarnation"]}
        for index in range(len(made["tokens"])):
            version = None if index == unstamped else made["version"]
            self.write("sample", id=f"{self.count - 1}-{index}", version=version, **held)
        found = token_mult_prob_error(made["logprobs"], own)
        self.write("mismatch", step=self.step, of="sampled", **dataclasses.asdict(found))
        return found

    def refit(self, step: int, model: Any, export: dict[str, Any], compare: Compare) -> tuple[dict[str, Any], RefitRefused | None]:
        """Compare, send, compare again, commit or roll back; the fact, and why it was refused."""
        self.step = step
        self.generator.expect(export)
        before, stale = self.generator.ask("state"), compare()
        self._owned.look(model, export)
        row, sent = self.prepare(export, before["hashes"])
        row["stale_max_dlogp"] = stale.max_abs if stale else None
        refused = self.send()
        dead = refused is not None and refused.reason == "dead"
        held = {**before, "hashes": {}} if dead else self.generator.ask("state")
        fresh = None if dead else compare()
        row |= self._compared(row, sent, before, held, refused)
        row |= {"fresh_max_dlogp": fresh.max_abs if fresh else None, "refused": str(refused) if refused else None}
        row["committed"] = self.settle(row["consumed"], held["version"], refused)
        if refused is None:
            live = {key: held[key] for key in ("hashes", "zeros", "nans") if key in held}
            self.write("hashes", side="live", step=step, replica=REPLICA, version=row["version"], **live)
        if not dead:
            self.write("version", replica=REPLICA, incarnation=held["incarnation"], version=held["version"], root=row["consumed"])
        self.write("refit", **row)
        if fresh:
            self.write("mismatch", step=step, of="recomputed", **dataclasses.asdict(fresh))
        self._tell(row)
        self.count += 1
        if refused is not None and dead:
            raise refused
        return row, refused

    def prepare(self, export: dict[str, Any], held: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Make the payload; what is known before it is sent, and the hashes of what the policy itself holds."""
        try:
            given = broken(self.fault if self.count > 1 else None, export, self.first)
        except NoSuchFault as error:
            self.write("probe_error", where=NO_SUCH_FAULT, error=str(error))
            raise
        self.producer.prepare(given, self.transports[self.count % len(self.transports)], path=self.generator.payload)
        sent = self.producer.prepared
        assert sent is not None
        hashes = sent.hashes if given is export else fingerprint.tensors(export.items())
        self._history.append(hashes)
        self.write("hashes", side="sent", version=sent.version, step=self.step, hashes=hashes)
        row = {"index": self.count, "step": self.step, "replica": REPLICA, "names": len(export)}
        row |= {key: value for key, value in dataclasses.asdict(sent).items() if key not in ("hashes", "root", "base_version")}
        row |= {"produced": fingerprint.tree(hashes).root, "stale_names": len(fingerprint.differing(hashes, held))}
        return row, hashes

    def send(self) -> RefitRefused | None:
        """Put the payload on its way, with the fault that it has there; why it was refused."""
        path = self.generator.payload
        last, self._last_payload = self._last_payload, path.read_bytes() if self.fault == "replayed-payload" else b""
        if self.count == FAULTY and self.fault == "truncated-payload":
            os.truncate(path, path.stat().st_size - 1)
        elif self.count == FAULTY and self.fault == "replayed-payload":
            path.write_bytes(last)
        try:
            self.generator.ask("apply", str(path))
        except RefitRefused as error:
            return error
        return None

    def _compared(
        self, row: dict[str, Any], sent: dict[str, str], before: dict[str, Any], held: dict[str, Any], refused: RefitRefused | None
    ) -> dict[str, Any]:
        after, methods = held["hashes"], held["methods"]
        unproven = [name for name in after if name not in methods]
        wrong = [] if refused else fingerprint.differing(sent, after)
        found = self.generator.ask("explain") if wrong else {}
        for name in wrong[:SHOWN]:
            known = found.get(name)
            place = f", held as {known['runtime']}: {known['count']} of {known['total']} elements" if known else ""
            say(f"wrong after refit {row['index']}: {name}{place}")
        for name in unproven[:SHOWN]:
            say(f"refit {row['index']}: no method proves {name}")
        return {
            **{"consumed": fingerprint.tree(after).root if after else None, "incarnation": held["incarnation"]},
            **{"wrong_names": wrong, "wrong": {name: found.get(name) for name in wrong}},
            **{"methods": dict(Counter(methods[name] for name in sent if name in methods)), "unproven": unproven},
            "touched_names": len(fingerprint.differing(before["hashes"], after)) if after else 0,
        }

    def settle(self, root: str | None, version: int, refused: RefitRefused | None) -> bool:
        """Take what the generator holds for the base of the next delta, or take the payload back."""
        if refused is not None or root is None:
            self.producer.rollback()
            return False
        try:
            self.producer.commit(root, version)
        except RefitRefused as error:
            say(str(error))
            return False
        return True

    def _tell(self, row: dict[str, Any]) -> None:
        counted = "" if row.get("changed") is None else f", {row['changed']} of {row['elements']} elements changed"
        carried = f"{row['names']} tensors, {row['transport']} ({row['kind']}){counted}"
        state = f"refused: {row['refused']}" if row["refused"] else f"{len(row['wrong_names'])} wrong after"
        say(f"refit {row['index']}: {carried}, {row['bytes']} bytes, {state}, {row['stale_names']} stale before")
