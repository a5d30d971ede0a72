"""The policy's side of a refit: a baseline, versions, and payloads that are prepared, then committed or rolled back.

- The baseline is what the generator holds by its own word: a copy of the export whose fingerprint it gave back last. `prepare`
  moves the baseline to the new export in the pass that finds the differences, and keeps them: `rollback` restores it exactly.
- `commit` needs the fingerprint of what the generator really holds. Another one than was sent rolls back and is refused.
- A version that was prepared is never used again: a generator may hold it although the policy took it back.
- After a failure nothing is known of the generator: the next payload is full, whatever transport is asked for, unless a kind is given.
- What is sent is the baseline after that pass, never the export: a policy that trains on meanwhile cannot tear a payload.
- A value that is not finite is sent bit for bit and reported.
Besides the baseline this takes memory for what changed since the last commit, and for one group of tensors while a payload is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seatrial.probes import fingerprint
from seatrial.probes.bits import delta, plain
from seatrial.probes.refit import payload, planes
from seatrial.probes.refit.errors import RefitRefused
from seatrial.probes.refit.header import KINDS, TRANSPORTS, Entry, Header

BUCKET = 1 << 26
"""Bytes of a bucket of the packed transport, and of the tensors that are encoded in one call."""


@dataclass(frozen=True)
class Prepared:
    """What a payload holds, for facts and reports."""

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
        dtype, shape = planes.dtype_name(tensor), tuple(tensor.shape)
        self.entries.append(Entry(name, dtype, shape, *hashes, mode, changed, tuple(places)))
        count = planes.nonfinite(tensor)
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
            pieces = planes.buckets(chunks, self.bucket) if transport == "packed" else chunks
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
            delta.revert(planes.flat(self._base[name]), coded)
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
        """The body, tensor by tensor; the baseline follows."""
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
        pairs = [(planes.flat(current[name]), planes.flat(base)) for name, base in zip(names, bases, strict=True)]
        # An overwrite has no inverse: what is undone is the difference, what is sent is encoded against the old bytes.
        old = [base.clone() for _, base in pairs] if (draft.transport, draft.kind) == ("sparse", "overwrite") else []
        changed = [planes.uncounted(current[name], base) for name, base in zip(names, bases, strict=True)]
        coded, sums = map(list, zip(*delta.encode_many(pairs, "difference"), strict=True))
        draft.undo += [(name, made) for name, made in zip(names, coded, strict=True) if made.mode != "same"]
        if old:
            coded = [made for made, _ in delta.encode_many([(base, was) for (_, base), was in zip(pairs, old, strict=True)], "overwrite")]
        for name, base, made, count, both in zip(names, bases, coded, changed, sums, strict=True):
            sparse = draft.transport == "sparse"
            chunks = planes.of_coded(made) if sparse else [planes.to_bytes(base)]
            draft.add(
                name,
                base,
                (fingerprint.from_sums(base, both), self.hashes[name] if sparse else None),
                made.mode if sparse else "raw",
                made.changed if count is None else count,
                chunks,
            )
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
            codec=body.codec,
            frames=body.frames,
            body=body.body,
            sums=body.sums,
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
