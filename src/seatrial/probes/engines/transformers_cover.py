"""What a plain model in a generation process holds: its hashes, its coordinate map, and the coverage over all refits.

Runs inside a loop's interpreter. Weights go in by name, so the map is learned through the simplest of loaders; what it adds is that
every other tensor of the model is watched, too. A buffer that changed since the start is in the hashes under its own name, with a mark
that no exported weights have: nobody sent it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from seatrial.probes import fingerprint
from seatrial.probes.refit import coordinates, coverage


class Covered:
    """See the module. `model` is the live one."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.weights = dict(model.named_parameters())
        self._buffers = fingerprint.tensors(model.named_buffers())
        self._watch: coverage.Watch | None = None

    def load(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """The loader of this engine: each name into its parameter."""
        for name, value in pairs:
            self.weights[name].data.copy_(value)

    def hashes(self) -> dict[str, str]:
        """What the live parameters hold right now, and every buffer that is not what it was."""
        buffers = fingerprint.tensors(self.model.named_buffers())
        moved = {name: f"moved-{buffers.get(name)}" for name in fingerprint.differing(self._buffers, buffers)}
        return fingerprint.tensors(self.weights.items()) | moved

    def map(self) -> dict[str, Any]:
        """Learn the coordinate map through the loader, and watch all tensors from here on; the fact."""
        before = fingerprint.model(self.model)
        learned = coordinates.learn(self.model, self.load, dict(self.weights))
        elements = sum(value.numel() for value in self.weights.values())
        restored = not fingerprint.differing(before, fingerprint.model(self.model))
        self._watch = coverage.Watch(self.model, learned)
        mapped = {"elements": elements, "runs": learned.count, "duplicates": learned.duplicates, "restored": restored}
        return {**mapped, "misplaced": coverage.misplaced(learned)}

    def look(self) -> None:
        """Take note of what a refit changed."""
        if self._watch is not None:
            self._watch.look()

    def cover(self) -> dict[str, Any]:
        """The coverage over all refits so far; the fact. The policy adds what only it knows."""
        assert self._watch is not None, "the map comes first"
        self.look()
        return coverage.classify(self.model, self._watch.map, self._watch.touched, self._watch.moved).row("0", [])
