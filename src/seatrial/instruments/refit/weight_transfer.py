"""Both ends of a refit: the policy's `Producer` commits or rolls back payloads, the generator's `Consumer` applies them whole.

- The producer's baseline is what the generator confirmed. `prepare` moves it to the new export in the pass that finds the differences,
  and keeps them: `rollback` restores it exactly. `commit` needs the fingerprint of what the generator really holds.
- A prepared version is never used again. After a failure the next payload is full, whatever transport is set, unless a kind is given.
- The producer sends the baseline after that pass, never the export: a policy that trains on meanwhile cannot tear a payload.
- The consumer checks everything before it writes the first bit, and hashes the live weights afterwards; if they are not what was sent, or
  if anything failed, it puts every bit back.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from seatrial.instruments.bits import delta, fingerprint, plain
from seatrial.instruments.refit import payload
from seatrial.instruments.refit.payload_header import KINDS, TRANSPORTS, Entry, Header, RefitRefused

BUCKET = 1 << 26
"""Bytes of a bucket of the packed transport, and of the tensors that are encoded in one call."""


@dataclass(frozen=True)
class Prepared:
    version: int
    transport: str
    kind: str
    base_version: int | None
    root: str
    hashes: dict[str, str]
    changed: int
    """Elements that differ from the baseline."""
    elements: int
    bytes: int
    modes: dict[str, int]
    """How many tensors were sent in which mode."""
    nonfinite: dict[str, int]
    """Elements that are NaN or infinite, by name."""


@dataclass
class _Draft:
    """A payload in the making: what it took from the baseline, and what it says about each tensor."""

    transport: str
    kind: Any
    undo: list[tuple[str, Any]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    nonfinite: dict[str, int] = field(default_factory=dict)
    length: int = 0

    def add(self, name: str, tensor: Any, hashes: tuple[str, str | None], mode: str, changed: int, chunks: list[memoryview]) -> None:
        """Note one tensor, with its own hash and its base's, whose bytes come next in the body."""
        places = []
        for chunk in chunks:
            places.append((self.length, len(chunk)))
            self.length += len(chunk)
        dtype, shape = payload.dtype_name(tensor), tuple(tensor.shape)
        self.entries.append(Entry(name, dtype, shape, *hashes, mode, changed, tuple(places)))
        count = payload.nonfinite(tensor)
        if count:
            self.nonfinite[name] = count


class Producer:
    """See the module. `version` is the one that the export has already."""

    def __init__(self, export: Mapping[str, Any], version: int = 0, codec: str = "none", bucket: int = BUCKET) -> None:
        import torch

        self.version, self.codec, self.bucket = version, payload.best_codec(codec), bucket
        for tensor in export.values():
            plain.check_memory(tensor)
        self._base = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in export.items()}
        self.hashes = fingerprint.tensors(self._base.items())
        self.acknowledged: str | None = None
        """The root that the generator gave back last; None when nothing is known of it."""
        self.prepared: Prepared | None = None
        """What is pending, until it is committed or rolled back."""
        self._last = version
        """The last version that was given out, committed or not."""
        self._undo: list[tuple[str, Any]] = []
        self._failed = False

    @property
    def root(self) -> str:
        """The root of the baseline, which a pending payload has not changed."""
        return fingerprint.tree(self.hashes).root

    def prepare(self, export: Mapping[str, Any], transport: str, kind: str | None = None, path: Path | None = None) -> bytes | Path:
        """A payload that brings a generator from the baseline to `export`. `prepared` says what is in it."""
        if self.prepared is not None:
            raise RuntimeError(f"refit: version {self.prepared.version} is pending: commit it or roll it back first")
        if transport not in TRANSPORTS or kind not in (None, *KINDS):
            raise ValueError(f"refit: transport {transport!r}, kind {kind!r}; known: {', '.join(TRANSPORTS)}; {', '.join(KINDS)}")
        current = self._checked(export)
        transport = "full" if self._failed and kind is None else transport
        if transport != "sparse":
            kind = "overwrite"
        elif kind is None:
            kind = "difference" if self.acknowledged == self.root else "overwrite"
        draft = _Draft(transport, kind)
        self._last += 1
        try:
            chunks = self._chunks(current, draft)
            pieces = payload.buckets(chunks, self.bucket) if transport == "packed" else chunks
            data = payload.write(pieces, lambda body: self._header(draft, body), self.codec, path)
        except BaseException:
            self._revert(draft.undo)
            raise
        self._undo = draft.undo
        self.prepared = self._describe(draft, data)
        return data

    def commit(self, root: str, version: int) -> None:
        """The generator holds `root` at `version`: the pending payload is the baseline from here on, or is refused and rolled back."""
        pending = self._pending("commit")
        if (root, version) != (pending.root, pending.version):
            self.rollback()
            detail = f"sent version {pending.version} with root {pending.root}, the generator holds version {version} with root {root}"
            raise RefitRefused("mismatch", fix="the next payload is full; find out why this one did not arrive", detail=detail)
        self.version, self.hashes, self.acknowledged = version, pending.hashes, root
        self.prepared, self._undo, self._failed = None, [], False

    def rollback(self) -> None:
        """The pending payload did not arrive: the baseline becomes what it was, bit for bit."""
        self._pending("roll back")
        undo, self._undo, self.prepared = self._undo, [], None
        self._revert(undo)

    def _pending(self, what: str) -> Prepared:
        if self.prepared is None:
            raise RuntimeError(f"refit: nothing to {what}: no payload is pending")
        return self.prepared

    def _revert(self, undo: list[tuple[str, Any]]) -> None:
        self._failed, self.acknowledged = True, None
        for name, coded in reversed(undo):
            delta.revert(payload.flat(self._base[name]), coded)
        wrong = fingerprint.differing(self.hashes, fingerprint.tensors(self._base.items()))
        if wrong:
            raise RuntimeError(f"refit: the baseline is lost, make a new Producer: not restored: {', '.join(wrong[:5])}")

    def _checked(self, export: Mapping[str, Any]) -> dict[str, Any]:
        """The export in the order of the baseline, contiguous; names, dtypes and shapes must be those of the baseline."""
        unknown, absent = sorted(export.keys() - self._base.keys()), sorted(self._base.keys() - export.keys())
        if unknown or absent:
            raise RefitRefused(
                "unknown-name" if unknown else "absent-name", unknown or absent, detail="the export has other names than before"
            )
        for tensor in export.values():
            plain.check_memory(tensor)
        current = {name: export[name].detach().contiguous() for name in self._base}
        other = [name for name, base in self._base.items() if _layout(current[name]) != _layout(base)]
        if other:
            raise RefitRefused("layout", other, detail="dtype, shape or device changed since the last export")
        return current

    def _chunks(self, current: Mapping[str, Any], draft: _Draft) -> Iterator[memoryview]:
        for names in self._groups():
            yield from self._group(names, current, draft)

    def _groups(self) -> Iterator[list[str]]:
        """Names whose tensors are encoded in one call: many small ones, or a single large one."""
        group: list[str] = []
        size = 0
        for name, base in self._base.items():
            nbytes = base.numel() * base.element_size()
            if group and size + nbytes > BUCKET:
                yield group
                group, size = [], 0
            group.append(name)
            size += nbytes
        if group:
            yield group

    def _group(self, names: list[str], current: Mapping[str, Any], draft: _Draft) -> Iterator[memoryview]:
        bases = [self._base[name] for name in names]
        pairs = [(payload.flat(current[name]), payload.flat(base)) for name, base in zip(names, bases, strict=True)]
        # An overwrite has no inverse: what is undone is the difference, what is sent is encoded against the old bytes.
        old = [base.clone() for _, base in pairs] if (draft.transport, draft.kind) == ("sparse", "overwrite") else []
        changed = [payload.uncounted(current[name], base) for name, base in zip(names, bases, strict=True)]
        coded, sums = map(list, zip(*delta.encode_many(pairs, "difference"), strict=True))
        draft.undo += [(name, made) for name, made in zip(names, coded, strict=True) if made.mode != "same"]
        if old:
            coded = [made for made, _ in delta.encode_many([(base, was) for (_, base), was in zip(pairs, old, strict=True)], "overwrite")]
        for name, base, made, count, both in zip(names, bases, coded, changed, sums, strict=True):
            sparse = draft.transport == "sparse"
            chunks = payload.of_coded(made) if sparse else [payload.to_bytes(base)]
            hashes = fingerprint.from_sums(base, both), self.hashes[name] if sparse else None
            draft.add(name, base, hashes, made.mode if sparse else "raw", made.changed if count is None else count, chunks)
            yield from chunks

    def _header(self, draft: _Draft, body: payload.Body) -> Header:
        sparse = draft.transport == "sparse"
        return Header(
            transport=draft.transport,
            kind=draft.kind,
            version=self._last,
            base_version=self.version if sparse else None,
            base_root=self.root if sparse else None,
            target_root=fingerprint.tree({entry.name: entry.hash for entry in draft.entries}).root,
            tensors=tuple(draft.entries),
            **vars(body),
        )

    def _describe(self, draft: _Draft, data: bytes | Path) -> Prepared:
        hashes = {entry.name: entry.hash for entry in draft.entries}
        return Prepared(
            version=self._last,
            transport=draft.transport,
            kind=draft.kind,
            base_version=self.version if draft.transport == "sparse" else None,
            root=fingerprint.tree(hashes).root,
            hashes=hashes,
            changed=sum(entry.changed for entry in draft.entries),
            elements=sum(base.numel() for base in self._base.values()),
            bytes=len(data) if isinstance(data, bytes) else data.stat().st_size,
            modes=dict(Counter(entry.mode for entry in draft.entries)),
            nonfinite=draft.nonfinite,
        )


def _layout(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.device


@dataclass(frozen=True)
class Applied:
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
        other = [
            name
            for name, tensor in self.weights.items()
            if (payload.dtype_name(tensor), tuple(tensor.shape)) != (sent[name].dtype, sent[name].shape)
        ]
        scattered = [name for name, tensor in self.weights.items() if not tensor.is_contiguous()]
        if other or scattered:
            raise RefitRefused("layout", other or scattered, detail="" if other else "live weights are not contiguous")
        _check_shared(self.weights, sent)
        misfit = [name for name, entry in sent.items() if not payload.fit(entry, _nbytes(self.weights[name]))]
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
        return payload.to_coded(entry, _nbytes(target), given, target.device)

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
                count = payload.uncounted(target, kept)
                # Encoding brings its base up to date, so it gets a copy: until the undo is noted, `kept` is all there is.
                coded, _ = delta.encode(payload.flat(target), payload.flat(kept.clone()))
                undo.append((entry.name, coded))
            except BaseException:
                del undo[noted:]  # an interrupt may come after it was noted: nothing may be undone twice
                target.copy_(kept)
                raise
            changed += coded.changed if count is None else count
        return changed

    def _write(self, target: Any, entry: Entry, given: payload.Payload, ready: delta.Coded | None) -> None:
        if entry.mode == "raw":
            payload.flat(target).copy_(payload.from_bytes(given.plane(entry.planes[0]), target.device))
        else:
            delta.apply(payload.flat(target), ready or self._coded(entry, given), cast("delta.Kind", given.header.kind))

    def _restore(self, undo: list[tuple[str, Any]], before: Mapping[str, str]) -> None:
        for name, coded in reversed(undo):
            delta.revert(payload.flat(self.weights[name]), coded)
        lost = fingerprint.differing(before, self.state()["hashes"])
        if lost:
            raise RuntimeError(f"refit: the generator's weights are lost, load them anew: not restored: {', '.join(lost[:5])}")


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


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
