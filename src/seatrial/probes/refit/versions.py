"""Version stamps: which weights a sample was drawn from, and which weights each replica holds. Standard library only.

- Replicas report (version, root, incarnation) whenever they start or were refitted; samples are stamped when they are dispatched.
- `problems` names every replica or sample that breaks the order: versions never fall, all replicas hold the same version and the
  same root while samples are dispatched, and a sample's version is one that a replica held at that moment.
- A problem of many samples is one sentence with their number and the first of them. An empty list says: nothing was wrong in what
  was reported; `seen` says how much that was.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Replica:
    version: int
    root: str
    incarnation: str


class Ledger:
    """What was dispatched and reported so far, in that order."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._roots: dict[int, tuple[str, str]] = {}
        self._samples: set[str] = set()
        self._stamp = 0
        self._found: dict[tuple[str, str], list[str]] = {}
        self._reports = 0

    @property
    def seen(self) -> dict[str, int]:
        """How many samples, reports and replicas this is about."""
        return {"samples": len(self._samples), "reports": self._reports, "replicas": len(self._replicas)}

    def report(self, replica: str, version: int, root: str, incarnation: str) -> None:
        """A replica says what it holds. `incarnation` changes when its process does."""
        _check(version, f"replica {replica}")
        self._reports += 1
        before = self._replicas.get(replica)
        if before is not None and version < before.version:
            restarted = incarnation != before.incarnation
            how = "restarted and came back with" if restarted else "went back to"
            self._note("fell", replica, f"replica {replica} {how} version {version} after version {before.version}")
        if before is not None and (version, incarnation) == (before.version, before.incarnation) and root != before.root:
            self._note("changed", replica, f"replica {replica} holds other weights than before under version {version}")
        first = self._roots.setdefault(version, (replica, root))
        if first[1] != root and first[0] != replica:
            self._note("differs", replica, f"replica {replica} holds root {root} as version {version}, replica {first[0]} holds {first[1]}")
        self._replicas[replica] = _Replica(version, root, incarnation)

    def dispatch(self, sample: str, version: int | None) -> None:
        """A sample is drawn now, from weights of this version."""
        if sample in self._samples:
            self._note("twice", sample, f"sample {sample} was dispatched twice")
        self._samples.add(sample)
        newest = max((held.version for held in self._replicas.values()), default=None)
        for name, held in self._replicas.items():
            if newest is not None and held.version < newest:
                self._note("late", name, f"replica {name} held version {held.version} when version {newest} was dispatched", sample)
        if version is None:
            self._note("bare", "", "without a version", sample)
            return
        _check(version, f"sample {sample}")
        if version < self._stamp:
            self._note("order", str(version), f"stamped with version {version} after version {self._stamp}", sample)
        self._stamp = max(self._stamp, version)
        if not any(held.version == version for held in self._replicas.values()):
            self._note("unheld", str(version), f"stamped with version {version}, which no replica held", sample)

    def problems(self) -> list[str]:
        """What is wrong, one sentence each; replicas that are behind now included."""
        made = []
        for (kind, _), (text, *samples) in self._found.items():
            if kind == "late":
                made.append(f"{text} (first at sample {samples[0]}, {len(samples)} samples)")
            elif samples:
                made.append(f"{_count(samples)} {text}")
            else:
                made.append(text)
        newest = max((held.version for held in self._replicas.values()), default=0)
        behind = [(name, held.version) for name, held in self._replicas.items() if held.version < newest]
        return made + [f"replica {name} is behind: version {version}, the newest is {newest}" for name, version in behind]

    def _note(self, kind: str, key: str, text: str, sample: str | None = None) -> None:
        entry = self._found.setdefault((kind, key), [text])
        if sample is not None:
            entry.append(sample)


def _count(samples: list[str]) -> str:
    return f"sample {samples[0]} is" if len(samples) == 1 else f"{len(samples)} samples, the first {samples[0]}, are"


def _check(version: object, what: str) -> None:
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ValueError(f"versions: {what}: {version!r} is no version; versions are integers from 0 on")
