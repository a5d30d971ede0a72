"""The facts of a refit as typed rows, and the facts that contradict each other.

A row that lacks a key or has a wrong value is a problem with its reason, never skipped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from seatrial.checks.probe_facts import Facts
from seatrial.instruments.refit.payload_header import KINDS, TRANSPORTS

Text = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)]
"""Replicas and incarnations are names; some write them as numbers."""
Number = Annotated[float, BeforeValidator(lambda value: float(value) if value in ("NaN", "Infinity", "-Infinity") else value)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Word = Annotated[str, Field(min_length=1)]


class TypedRow(BaseModel):
    """Base of all rows: what a newer writer adds is not ours to refuse."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class Refit(TypedRow):
    """One refit of one replica."""

    index: Count
    step: Count
    version: Count
    transport: Word
    kind: str | None = None
    names: Count
    bytes: Count
    changed: Count | None = None
    elements: Count | None = None
    modes: dict[str, Count] = {}
    """How many tensors travelled in which form; "same" carries nothing."""
    produced: Word | None
    consumed: Word | None
    wrong_names: list[str]
    wrong: dict[str, dict[str, Any] | None] = {}
    """What is known of each wrong name: the runtime tensor it is in, how many elements."""
    stale_names: Count
    touched_names: Count
    stale_max_dlogp: Number | None = None
    fresh_max_dlogp: Number | None = None
    replica: Text
    incarnation: Text
    methods: dict[str, Count]
    unproven: list[str] = []
    """Names that were read and that no method proves."""
    nonfinite: dict[str, Count] = {}
    """Names that were sent with values that are not finite, and how many."""
    refused: Word | None
    committed: bool | None = None
    """Whether the policy took it for the base of its next delta; None where nobody said."""


class Hashes(TypedRow):
    """Hashes by exported name: as the policy sent them, as they arrived, or as they lie in the runtime."""

    side: Literal["sent", "relayed", "received", "live"]
    version: Count
    step: Count | None = None
    replica: Text | None = None
    incarnation: Text | None = None
    hashes: dict[str, Word]
    zeros: list[str] = []
    nans: dict[str, Count] = {}
    casts: dict[str, str] = {}
    """Names that the runtime holds in another dtype: their hash stands for equality after the same cast."""
    runtime: dict[str, str] = {}
    """Every tensor that the worker generates with, where a hook saw them."""
    complete: bool = True
    """Whether every tensor of the transfer was seen."""
    problems: list[str] = []


class Padding(TypedRow):
    """Elements of a runtime tensor that no exported element reaches."""

    elements: Count
    constant: bool


class Coverage(TypedRow):
    """How each tensor of one replica's runtime gets its bits."""

    replica: Text
    tensors: Count
    """How many tensors the runtime has."""
    written: list[str]
    shared: dict[str, str]
    derived: dict[str, str]
    recomputed: list[str] = []
    """Those of the derived ones that the loader always gives the same bits; the others must be opaque."""
    moved: dict[str, str] = {}
    """Tensors whose bits changed over the refits, although nothing that was sent explains it."""
    constant: list[str]
    idle: list[str]
    """Those of the constant ones that are parameters: nothing that was exported reaches them."""
    unconsumed: dict[str, Count]
    unwritten: dict[str, Count]
    opaque: dict[str, str]
    never_changed: list[str]
    unexported: list[str] | None = None
    """What of the policy's own state changed and is not exported; None where nobody watched the policy."""
    padding: dict[str, Padding] = {}


class Map(TypedRow):
    """The coordinate map of one replica."""

    replica: Text
    elements: Count
    runs: Count
    duplicates: dict[str, Count]
    restored: bool
    casts: dict[str, str] = {}
    misplaced: dict[str, str]
    """Runtime tensors that hold what their name does not say: a loader that swaps gives a map that is as swapped."""


class Version(TypedRow):
    """What a replica says it holds."""

    replica: Text
    incarnation: Text
    version: Count
    root: str | None = None


class Sample(TypedRow):
    """One sampled sequence, with the version that its replica held when it was asked for."""

    id: Annotated[Text, Field(min_length=1)]
    version: Count | None
    replica: Text
    incarnation: Text | None = None


class Mismatch(TypedRow):
    """token_mult_prob_error after the refit of one step, with its spread over sequences."""

    step: Count
    of: Literal["recomputed", "sampled"] = "recomputed"
    """Which log-probabilities of the generator: those it computes for samples of the version before, or those it sampled with."""
    value: Number
    tokens: Count
    sequences: Count
    p50: Number
    p90: Number
    p99: Number
    max_sequence: Number
    outlier_share: Number
    nonfinite: Count
    max_abs: Number


class Attached(TypedRow):
    """What a hook found of one class or module of upstream."""

    side: Literal["policy", "generator"]
    module: Word
    owner: str
    owner_found: bool
    found: list[str]
    missing: list[str]
    optional: bool


class ProbeError(TypedRow):
    where: Word
    error: str


R = TypeVar("R", bound=TypedRow)


@dataclass(frozen=True, slots=True)
class Rows:
    """Every fact that the judge reads, and what was wrong with them."""

    refits: tuple[Refit, ...] = ()
    hashes: tuple[Hashes, ...] = ()
    coverages: tuple[Coverage, ...] = ()
    maps: tuple[Map, ...] = ()
    replicas: tuple[Version | Sample, ...] = ()
    """Versions and samples in the order in which they were written."""
    mismatches: tuple[Mismatch, ...] = ()
    """Of recomputed log-probabilities."""
    sampled: tuple[Mismatch, ...] = ()
    """Of those that samples came with."""
    errors: tuple[ProbeError, ...] = ()
    problems: tuple[str, ...] = field(default=())

    def lives(self) -> set[tuple[str, str]]:
        rows = (*self.refits, *self.replicas, *self.hashes)
        return {(row.incarnation, row.replica) for row in rows if row.incarnation is not None and row.replica is not None}

    def versions(self) -> tuple[Version, ...]:
        return tuple(row for row in self.replicas if isinstance(row, Version))

    def samples(self) -> tuple[Sample, ...]:
        return tuple(row for row in self.replicas if isinstance(row, Sample))


def typed(facts: Facts) -> Rows:
    """Read the rows; damage, rows that are malformed, unknown or there twice, and errors that a probe met are problems."""
    problems = [str(damage) for damage in facts.damage]
    problems += [f"the probe met an error in {row.get('where')}: {row.get('error')}" for row in facts.of("probe_error")]
    unknown = dict.fromkeys(row["fact"] for row in facts.rows if row["fact"] not in KNOWN)
    problems += [f"fact {kind!r}: no such kind; name only files that the refit probe wrote" for kind in unknown]
    problems += _twice(facts)

    def read(kind: str, model: type[R]) -> tuple[R, ...]:
        return tuple(made for row in facts.of(kind) if (made := _read(kind, model, row, problems)))

    for attached in read("attached", Attached):
        if attached.found and not attached.owner_found:
            problems.append(f"the hooks found {attached.found[0]} in {attached.module}, and not {attached.owner}, which it is part of")
    hashes = read("hashes", Hashes)
    problems += [
        f"not everything {row.side} at version {row.version} was seen: {'; '.join(row.problems)}"
        for row in hashes
        if not row.complete or row.problems
    ]
    problems += _conflicts(hashes)
    compared = read("mismatch", Mismatch)
    ordered = [_read(row["fact"], _ORDERED[row["fact"]], row, problems) for row in facts.rows if row["fact"] in _ORDERED]
    return Rows(
        refits=read("refit", Refit),
        hashes=hashes,
        coverages=read("coverage", Coverage),
        maps=read("map", Map),
        replicas=tuple(row for row in ordered if isinstance(row, Version | Sample)),
        mismatches=tuple(row for row in compared if row.of == "recomputed"),
        sampled=tuple(row for row in compared if row.of == "sampled"),
        errors=read("probe_error", ProbeError),
        problems=tuple(problems),
    )


def _twice(facts: Facts) -> list[str]:
    """Rows that are there twice, word for word: a file that was copied or read twice. Hooks may attach again, and say after each refit what
    became of every tensor."""
    counts: dict[str, int] = {}
    again = {"attached", "waiting"}
    again |= {"coverage"} if any(row["fact"] in again for row in facts.rows) else set()
    for row in facts.rows:
        if row["fact"] not in again:
            text = json.dumps(row, sort_keys=True)
            counts[text] = counts.get(text, 0) + 1
    return [f"fact {json.loads(text)['fact']}: the same row stands {count} times" for text, count in counts.items() if count > 1]


def _conflicts(hashes: tuple[Hashes, ...]) -> list[str]:
    """Names that were sent, or read on one replica, with two different hashes in one version."""
    first: dict[tuple[str, str | None, int, str], str] = {}
    found = []
    for row in hashes:
        for name, value in row.hashes.items():
            if first.setdefault((row.side, row.replica, row.version, name), value) != value:
                found.append(f"{name}: two different hashes {row.side} at version {row.version}")
    return found


KNOWN = frozenset(
    {"refit", "hashes", "coverage", "map", "version", "sample", "mismatch", "probe_error", "attached", "waiting"},
)
_ORDERED: dict[str, type[TypedRow]] = {"version": Version, "sample": Sample}


def _read(kind: str, model: type[R], row: dict[str, Any], problems: list[str]) -> R | None:
    try:
        return model.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "(the row)"
        problems.append(f"fact {kind}: {key}: {first['msg']}")
        return None


def by_replica(rows: Rows) -> dict[str, list[Refit]]:
    """The refits of each replica, in the order in which they were written."""
    found: dict[str, list[Refit]] = {}
    for row in rows.refits:
        found.setdefault(row.replica, []).append(row)
    return found


def sent_versions(rows: Rows) -> dict[int, dict[str, str]]:
    """What the policy sent, by version; what several ranks sent of one version is put together."""
    found: dict[int, dict[str, str]] = {}
    for row in rows.hashes:
        if row.side == "sent":
            found.setdefault(row.version, {}).update(row.hashes)
    return found


SHOWN = 3


def contradictions(rows: Rows, own: bool, transports: Sequence[str] = ()) -> list[str]:
    """One sentence for each. `own`: a run of ours, whose rows say more than hooks can. `transports`: those asked for, if not ours."""
    found = [*_exports(rows), *_counts(rows), *_moves(rows), *_replicas(rows), *_roots(rows), *_rest(rows)]
    return [*found, *_own(rows, transports)] if own else found


def _exports(rows: Rows) -> Iterator[str]:
    sent = sent_versions(rows)
    for (before, old), (version, new) in pairwise(sorted(sent.items())):
        if other := sorted(old.keys() ^ new.keys()):
            yield f"versions {before} and {version} were sent with different names: {', '.join(other[:SHOWN])}"
    for name, mine in by_replica(rows).items():
        lost = sorted(set(sent) - {row.version for row in mine})
        if lost:
            yield f"replica {name}: version {', '.join(map(str, lost[:SHOWN]))} was sent, and there is no refit of it"


def _counts(rows: Rows) -> Iterator[str]:
    sent = sent_versions(rows)
    for row in rows.refits:
        if row.version in sent and row.names != len(sent[row.version]):
            yield f"{_what(row)}: {row.names} names, although {len(sent[row.version])} were sent"
        if max(row.stale_names, row.touched_names, len(row.wrong_names)) > row.names:
            yield f"{_what(row)}: more names are stale, touched or wrong than there are"


def _moves(rows: Rows) -> Iterator[str]:
    """Root, hashes and payload agree on whether a refit brought other weights."""
    sent = sent_versions(rows)
    for mine in by_replica(rows).values():
        for before, now in pairwise(mine):
            moved = now.produced != before.produced
            if before.version in sent and now.version in sent and moved != (sent[before.version] != sent[now.version]):
                yield f"{_what(now)}: by its root the weights {'moved' if moved else 'stayed'}, by their hashes they did not"
            nothing = now.changed == 0 or not now.bytes or (now.modes and set(now.modes) == {"same"})
            if moved and nothing and not now.refused:
                yield f"{_what(now)}: other weights than before, and a payload that carried nothing"


def _replicas(rows: Rows) -> Iterator[str]:
    known = by_replica(rows)
    named = [row.replica for row in (*rows.maps, *rows.coverages, *rows.replicas, *rows.hashes) if row.replica is not None]
    for name in dict.fromkeys(named):
        if name not in known:
            yield f"replica {name}: there are facts of it, and no refit"
    lives: dict[str, set[str]] = {}
    for life, name in rows.lives():
        lives.setdefault(life, set()).add(name)
    for life, names in lives.items():
        if len(names) > 1:
            yield f"replicas {', '.join(sorted(names))} are one process: {life}"


def _roots(rows: Rows) -> Iterator[str]:
    found = {(row.replica, row.version): row.consumed for row in rows.refits if not row.refused}
    for row in rows.versions():
        if (row.replica, row.version) in found and row.root != found[row.replica, row.version]:
            yield f"replica {row.replica}: says that version {row.version} is {row.root}, read was {found[row.replica, row.version]}"


def _rest(rows: Rows) -> Iterator[str]:
    sent = list(sent_versions(rows).values())
    still = {name for row in rows.coverages for name in row.never_changed}
    moved = sorted(name for name in still if len({each.get(name) for each in sent}) > 1)
    if moved:
        yield f"{', '.join(moved[:SHOWN])}: never changed by the coverage, changed by the hashes"
    for compared in (rows.mismatches, rows.sampled):
        steps = [row.step for row in compared]
        if len(steps) > len(set(steps)):
            yield "log-probabilities of one step were compared twice"
        if idle := sorted(set(steps) - {row.step for row in rows.refits}):
            yield f"log-probabilities of step {', '.join(map(str, idle[:SHOWN]))}, which has no refit"
    largest = max((row.elements or 0 for row in rows.refits), default=0)
    for row in rows.maps:
        if row.elements < largest:
            yield f"replica {row.replica}: the map has {row.elements} of {largest} elements"


def _own(rows: Rows, transports: Sequence[str]) -> Iterator[str]:
    """Transports are known, sizes are said, a version has one step, and every sample was compared."""
    for row in rows.refits:
        if row.transport in transports and row.transport not in TRANSPORTS:
            continue  # a loop's own, which counts no elements
        if row.transport not in TRANSPORTS or row.kind not in KINDS:
            yield f"{_what(row)}: no such transport: {row.transport} ({row.kind})"
        if row.changed is None or row.elements is None:
            yield f"{_what(row)}: it is not said how many elements changed"
    steps = {row.version: row.step for row in rows.refits}
    for each in rows.hashes:
        if each.step != steps.get(each.version, each.step):
            yield f"what was {each.side} as version {each.version} is of step {each.step}, its refit of step {steps[each.version]}"
    drawn = Counter(row.version for row in rows.samples())
    for compared in rows.sampled:
        count = sum(drawn[version] for version, step in steps.items() if step == compared.step)
        if not count <= compared.sequences <= count + drawn[None]:  # a sample without a version is named elsewhere
            yield f"step {compared.step}: log-probabilities of {compared.sequences} samples were compared, and there are facts of {count}"


def _what(row: Refit) -> str:
    return f"refit {row.index} of replica {row.replica}"
