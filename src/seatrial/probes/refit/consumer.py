"""The generator's side of a refit: weights that are brought to a new version whole, or not at all.

- Everything a payload says is checked before the first bit is written: its own bytes, its version, the version and the fingerprint
  of what it builds on (taken from the live weights, not remembered), names, dtypes, shapes, and all that is coded sparsely.
- After writing, the live weights are hashed. If they are not what was sent, or if anything went wrong on the way, every bit is put
  back, which is proven by hash, and the refit is refused.
- Two names over the same memory are written once: a difference must not be added twice.
It takes memory for two copies of one tensor, and twice for what changes until the new version is proven.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from seatrial.probes import fingerprint
from seatrial.probes.bits import delta
from seatrial.probes.refit import payload, planes
from seatrial.probes.refit.errors import RefitRefused
from seatrial.probes.refit.header import Entry, Header


@dataclass(frozen=True)
class Applied:
    """What a refit did."""

    version: int
    root: str
    """Of the live weights, hashed after writing."""
    changed: int
    """Elements of the live weights that changed."""
    bytes: int


class Consumer:
    """`weights` are the live tensors themselves (parameters, buffers), by their exported names."""

    def __init__(self, weights: Mapping[str, Any], version: int = 0) -> None:
        self.weights, self.version = dict(weights), version

    def state(self) -> dict[str, Any]:
        """What is held right now."""
        hashes = fingerprint.tensors(self.weights.items())
        return {"version": self.version, "root": fingerprint.tree(hashes).root, "hashes": hashes}

    def apply(self, data: payload.Data | str | os.PathLike[str]) -> Applied:
        """Bring the live weights to the payload's version, or refuse and leave every bit as it was."""
        given = payload.read(data)
        before = self.state()
        self._check(given.header, before)
        ready = {entry.name: self._coded(entry, given) for entry in given.header.tensors if entry.mode == "sparse"}
        undo: list[tuple[str, Any]] = []
        try:
            changed = self._write_all(given, ready, undo)
            hashes: dict[str, str] = self.state()["hashes"]
            wrong = [entry.name for entry in given.header.tensors if hashes[entry.name] != entry.hash]
            if wrong:
                raise RefitRefused("mismatch", wrong, fix="the weights were put back; send them in full")
        except ValueError as error:  # planes that do not fit their tensor
            self._restore(undo, before["hashes"])
            raise RefitRefused("corrupt", detail=str(error)) from error
        except BaseException:
            self._restore(undo, before["hashes"])
            raise
        self.version = given.header.version
        return Applied(self.version, fingerprint.tree(hashes).root, changed, given.size)

    def _check(self, header: Header, held: Mapping[str, Any]) -> None:
        if header.version <= self.version:
            raise RefitRefused("replay", detail=f"version {header.version} was sent, version {self.version} is held")
        if header.base_version not in (None, self.version):
            detail = f"version {header.version} builds on version {header.base_version}, version {self.version} is held"
            raise RefitRefused("gap", fix="send it in full", detail=detail)
        sent = {entry.name: entry for entry in header.tensors}
        for reason, names in (("unknown-name", sent.keys() - self.weights.keys()), ("absent-name", self.weights.keys() - sent.keys())):
            if names:
                raise RefitRefused(reason, sorted(names))
        other = [name for name, tensor in self.weights.items() if _layout(tensor) != (sent[name].dtype, sent[name].shape)]
        scattered = [name for name, tensor in self.weights.items() if not tensor.is_contiguous()]
        if other or scattered:
            raise RefitRefused("layout", other or scattered, detail="" if other else "live weights are not contiguous")
        _check_shared(self.weights, sent)
        misfit = [name for name, entry in sent.items() if not planes.fit(entry, _nbytes(self.weights[name]))]
        if misfit:
            raise RefitRefused("corrupt", misfit, detail="planes have other lengths than their tensors need")
        if fingerprint.tree({name: entry.hash for name, entry in sent.items()}).root != header.target_root:
            raise RefitRefused("corrupt", detail="its hashes do not fold into its root")
        if header.base_root is not None:
            self._check_base(header, held)

    def _check_base(self, header: Header, held: Mapping[str, Any]) -> None:
        base = {entry.name: str(entry.base) for entry in header.tensors}
        if fingerprint.tree(base).root != header.base_root:
            raise RefitRefused("corrupt", detail="its base hashes do not fold into its base root")
        differing = fingerprint.differing(base, held["hashes"])
        if differing:
            detail = f"it builds on root {header.base_root}, root {held['root']} is held, and they differ in"
            raise RefitRefused("wrong-base", differing, fix="send it in full", detail=detail)

    def _coded(self, entry: Entry, given: payload.Payload) -> delta.Coded:
        target = self.weights[entry.name]
        return planes.to_coded(entry, _nbytes(target), given, target.device)

    def _write_all(self, given: payload.Payload, ready: Mapping[str, delta.Coded], undo: list[tuple[str, Any]]) -> int:
        written, changed = set(), 0
        for entry in given.header.tensors:
            target = self.weights[entry.name].detach()
            place = (target.device, target.data_ptr())
            if entry.mode == "same" or not target.numel() or place in written:
                continue
            written.add(place)
            kept, noted = target.clone(), len(undo)
            try:
                self._write(target, entry, given, ready.get(entry.name))
                count = planes.uncounted(target, kept)
                # Encoding brings its base up to date, so it gets a copy: until the undo is noted, `kept` is all there is.
                coded, _ = delta.encode(planes.flat(target), planes.flat(kept.clone()))
                undo.append((entry.name, coded))
            except BaseException:
                del undo[noted:]  # an interrupt may come after it was noted: nothing may be undone twice
                target.copy_(kept)
                raise
            changed += coded.changed if count is None else count
        return changed

    def _write(self, target: Any, entry: Entry, given: payload.Payload, ready: delta.Coded | None) -> None:
        """Write one tensor; `ready` if it was decoded already."""
        if entry.mode == "raw":
            planes.flat(target).copy_(planes.from_bytes(given.plane(entry.planes[0]), target.device))
        else:
            delta.apply(planes.flat(target), ready or self._coded(entry, given), cast("delta.Kind", given.header.kind))

    def _restore(self, undo: list[tuple[str, Any]], before: Mapping[str, str]) -> None:
        for name, coded in reversed(undo):
            delta.revert(planes.flat(self.weights[name]), coded)
        lost = fingerprint.differing(before, self.state()["hashes"])
        if lost:
            raise RuntimeError(f"refit: the generator's weights are lost, load them anew: not restored: {', '.join(lost[:5])}")


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _layout(tensor: Any) -> tuple[str, tuple[int, ...]]:
    return planes.dtype_name(tensor), tuple(tensor.shape)


def _check_shared(weights: Mapping[str, Any], sent: Mapping[str, Entry]) -> None:
    """Memory that two names share is shared wholly, and both are sent the same bits: one of them would be lost."""
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), name)
        for name, tensor in weights.items()
        if tensor.numel()
    )
    for (device, start, end, name), (other_device, other_start, other_end, other) in pairwise(spans):
        if device != other_device or other_start >= end:
            continue
        if (start, end) != (other_start, other_end):
            raise RefitRefused("layout", (name, other), detail="two live weights share a part of their memory")
        if sent[name].shape == sent[other].shape and sent[name].hash != sent[other].hash:
            raise RefitRefused("layout", (name, other), detail="they are one memory here, and were sent with different bits")
