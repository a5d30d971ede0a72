"""Do policy and generator agree? Version stamps, pairs of sent and received refits, and the mismatch of log-probabilities.

Standard library only; the host's checks use it too.
- `Ledger`: versions never fall, all replicas hold the same version and root while samples are dispatched, and a sample's version is one
  that a replica held at that moment.
- `problems`: processes of an attached run are paired by the number of the refit, so a generator that missed one, got one twice or was
  started again does not agree.
- `token_mult_prob_error`: the mean over all tokens of exp|difference|, and its distribution over sequences. Numerical noise is about 1.01,
  and a stale tensor may add less: it can fail a refit, never prove one. A difference that is not finite makes the value NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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

    def report(self, replica: str, version: int, root: str, incarnation: str) -> None:
        """A replica says what it holds. `incarnation` changes when its process does."""
        _check(version, f"replica {replica}")
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


Row = Mapping[str, Any]
SHOWN = 3


def problems(rows: Iterable[Row]) -> list[str]:
    kept = list(rows)
    hashes = [row for row in kept if row.get("fact") == "hashes"]
    sides = {side: [row for row in hashes if row.get("side") == side] for side in ("sent", "relayed", "received")}
    found = [f"the probe met an error in {row.get('where')}: {row.get('error')}" for row in kept if row.get("fact") == "probe_error"]
    found += _attachments([row for row in kept if row.get("fact") == "attached"])
    found += [f"map of {row['replica']}: {text}" for row in kept if row.get("fact") == "map" for text in _map(row)]
    found += _uncovered(kept)
    found += [f"{_who(row)}: {text}" for side in sides.values() for row in side for text in row["problems"]]
    found += [f"nothing was {side}" for side in ("sent", "received") if not sides[side]]
    exported = {row["version"] for row in sides["sent"]}
    for version in sorted(exported | {row["version"] for row in [*sides["received"], *sides["relayed"]]}):
        found += _version(version, *([row for row in side if row["version"] == version] for side in sides.values()))
    return found + _counts(sides["sent"], sides["received"])


def _attachments(rows: list[Row]) -> list[str]:
    """Both sides must have been found, and whatever was found must have had what is watched."""
    found = []
    for side in ("generator", "policy"):
        mine = [row for row in rows if row["side"] == side]
        if not any(row["found"] for row in mine):
            found.append(f"no process has a {side} whose entry points are known here")
    for row in rows:
        if not row["optional"] and not row["found"]:
            what = "has no " + (", ".join(row["missing"]) or "entry point") if row["owner_found"] else "is not there"
            found.append(f"{row['module']}: {row['owner'] or 'the module'} {what} in this version")
    return list(dict.fromkeys(found))


def _map(row: Row) -> list[str]:
    made = [] if row["restored"] else ["the weights were not restored bit for bit after it was learned"]
    return made + [f"{name}: {text}" for name, text in row.get("misplaced", {}).items()]


def _uncovered(rows: list[Row]) -> list[str]:
    """Replicas that learned their map again (another model, another export) without a refit after it, which shows the coverage: what was
    written before speaks of the model that was there before."""
    maps: dict[str, int] = {}
    waiting: set[str] = set()
    for row in rows:
        if row.get("fact") == "map":
            maps[row["replica"]] = maps.get(row["replica"], 0) + 1
            waiting.add(row["replica"])
        elif row.get("fact") == "coverage":
            waiting.discard(row["replica"])
    return [f"map of {name}: learned again, and no refit after that shows the coverage" for name in sorted(waiting) if maps[name] > 1]


def _version(version: int, sent: list[Row], relayed: list[Row], received: list[Row]) -> list[str]:
    """One refit: every name that arrived has the hash with which it was sent, and every name that was sent arrived."""
    origin: dict[str, set[str]] = {}
    for row in sent:
        for name, value in row["hashes"].items():
            origin.setdefault(name, set()).add(value)
    found = [f"refit {version}: senders disagree on {name}" for name, values in origin.items() if len(values) > 1][:SHOWN]
    for row in [*relayed, *received]:
        off = [name for name, value in row["hashes"].items() if value not in origin.get(name, ())]
        if off:
            found.append(
                f"refit {version}: {_who(row)} got {len(off)} of {len(row['hashes'])} names otherwise than sent: {', '.join(off[:SHOWN])}"
            )
    arrived = {name for row in received for name in row["hashes"]}
    lost = [name for name in origin if name not in arrived]
    if received and lost:
        found.append(f"refit {version}: {len(lost)} names were sent and reached no generator: {', '.join(lost[:SHOWN])}")
    return found


def _counts(sent: list[Row], received: list[Row]) -> list[str]:
    last = max((row["version"] for row in sent), default=0)
    got: dict[str, list[int]] = {}
    for row in received:
        got.setdefault(row["incarnation"], []).append(row["version"])
    off = {name: seen for name, seen in got.items() if len(seen) != last or any(a != b for a, b in enumerate(seen, 1))}
    return [f"generator {name}: refits {seen}, although {last} were sent" for name, seen in off.items()]


def _who(row: Row) -> str:
    return f"{row['side']} by {row.get('replica') or row['process']}"


OUTLIER = 1.05
"""The mean of a sequence above which it counts as an outlier; upstream's usual bound for the mean of all tokens."""


@dataclass(frozen=True)
class Mismatch:
    value: float
    """The mean of exp|difference| over all tokens."""
    tokens: int
    sequences: int
    p50: float
    """Percentiles of the sequences' own means, by nearest rank."""
    p90: float
    p99: float
    max_sequence: float
    outlier_share: float
    """Share of the sequences with tokens whose mean is above the bound, or not a number."""
    nonfinite: int
    """Tokens whose difference is not finite."""
    max_abs: float
    """The largest |difference|."""


def token_mult_prob_error(generator: Sequence[Sequence[float]], policy: Sequence[Sequence[float]], outlier: float = OUTLIER) -> Mismatch:
    """Compare the log-probabilities of the same tokens, sequence by sequence; other lengths are a ValueError."""
    if len(generator) != len(policy):
        raise ValueError(f"mismatch: {len(generator)} sequences of the generator, {len(policy)} of the policy")
    gaps = [_gaps(index, left, right) for index, (left, right) in enumerate(zip(generator, policy, strict=True))]
    every = [gap for row in gaps for gap in row]
    bad = sum(not math.isfinite(gap) for gap in every)
    means = sorted(_mean(row) for row in gaps if row) if not bad else []
    # Written so that a NaN counts as an outlier.
    outliers = sum(not _mean(row) <= outlier for row in gaps if row)
    return Mismatch(
        value=_mean(every),
        tokens=len(every),
        sequences=len(gaps),
        p50=_percentile(means, 50),
        p90=_percentile(means, 90),
        p99=_percentile(means, 99),
        max_sequence=_percentile(means, 100),
        outlier_share=outliers / sum(map(bool, gaps)) if every else math.nan,
        nonfinite=bad,
        max_abs=max(every) if every and not bad else math.nan,
    )


def _gaps(index: int, left: Sequence[float], right: Sequence[float]) -> list[float]:
    if len(left) != len(right):
        raise ValueError(f"mismatch: sequence {index} has {len(left)} tokens at the generator and {len(right)} at the policy")
    return [abs(a - b) for a, b in zip(left, right, strict=True)]


def _mean(gaps: Sequence[float]) -> float:
    """The mean of exp(gap); NaN without tokens or with one that is not finite."""
    if not gaps or not all(map(math.isfinite, gaps)):
        return math.nan
    return math.fsum(map(_exp, gaps)) / len(gaps)


def _exp(gap: float) -> float:
    try:
        return math.exp(gap)
    except OverflowError:
        return math.inf


def _percentile(ascending: Sequence[float], percent: int) -> float:
    """By nearest rank: a value that occurred, not one between two."""
    return ascending[math.ceil(percent / 100 * len(ascending)) - 1] if ascending else math.nan
