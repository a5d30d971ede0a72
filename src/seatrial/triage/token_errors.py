"""Errors of token rows, collected in one pass, and the small statistics over them: seeded, deterministic, standard library only.

- Bounded: per sequence a handful of numbers, per token only counts in fixed bins.
- Few values are tested by random permutations, more by the usual approximation.
"""

from __future__ import annotations

import math
import random
import statistics
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, groupby

from seatrial.core.errors import UserError
from seatrial.core.series import TokenRow
from seatrial.core.text import shortened

FEW = 300
PERMUTATIONS = 1999


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    made = [0.0] * len(values)
    before = 0
    for _, group in groupby(sorted(range(len(values)), key=values.__getitem__), key=values.__getitem__):
        tied = list(group)
        for index in tied:
            made[index] = before + (len(tied) + 1) / 2
        before += len(tied)
    return made


def correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Pearson's; None when either is constant."""
    try:
        return statistics.correlation(one, other)
    except statistics.StatisticsError:  # fewer than two, or constant
        return None


def spearman(one: Sequence[float], other: Sequence[float]) -> tuple[float | None, float | None]:
    """Rank correlation and its two-sided p."""
    first, second = ranks(one), ranks(other)
    rho = correlation(first, second)
    if rho is None:
        return None, None
    if len(first) > FEW:
        return rho, math.erfc(abs(rho) * math.sqrt((len(first) - 1) / 2))
    # Ranks keep mean and spread when they are permuted: the sum of products alone decides.
    middle = (len(first) + 1) / 2
    centred = [value - middle for value in first]
    observed = abs(_products(centred, second))
    return rho, _permuted(second, lambda order: abs(_products(centred, order)) >= observed - 1e-9)


def between_groups(groups: Sequence[int], values: Sequence[float]) -> tuple[float | None, float | None]:
    """Share of the variance that lies between the groups, less what chance puts there; and p of the groups being alike.

    Values are finite; their scale counts, so that one group far from all others is seen among few.
    """
    sizes = Counter(groups)
    count, kinds = len(values), len(sizes)
    mean = math.fsum(values) / count
    total = math.fsum((value - mean) ** 2 for value in values)
    if kinds < 2 or kinds == count or not total:
        return None, None
    centred = [value - mean for value in values]
    between = _spread(groups, centred, sizes)
    share = max(0.0, 1 - ((total - between) / (count - kinds)) / (total / (count - 1)))
    if count > FEW:
        return share, _chi_square_p((count - 1) * between / total, kinds - 1)
    return share, _permuted(centred, lambda order: _spread(groups, order, sizes) >= between * (1 - 1e-9))


def exceeds(inside: Sequence[float], outside: Sequence[float]) -> float:
    """How often a value of the one group is larger than one of the other; one half when they are alike."""
    order = ranks([*inside, *outside])
    total = math.fsum(order[: len(inside)]) - len(inside) * (len(inside) + 1) / 2
    return total / (len(inside) * len(outside))


def signs(values: Sequence[float]) -> float | None:
    """p of the two-sided sign-flip test: is the mean of paired differences zero?"""
    total = math.fsum(values)
    square = math.fsum(value * value for value in values)
    if not square:
        return None
    if len(values) > FEW:
        return math.erfc(abs(total) / math.sqrt(2 * square))
    chance = random.Random(0)
    hits = sum(
        abs(math.fsum(value if chance.getrandbits(1) else -value for value in values)) >= abs(total) - 1e-12 for _ in range(PERMUTATIONS)
    )
    return (hits + 1) / (PERMUTATIONS + 1)


def _products(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def _permuted(values: Sequence[float], is_hit: Callable[[list[float]], bool]) -> float:
    """p by random permutations; the observed order counts as one of them."""
    chance, order, hits = random.Random(0), list(values), 0
    for _ in range(PERMUTATIONS):
        chance.shuffle(order)
        hits += is_hit(order)
    return (hits + 1) / (PERMUTATIONS + 1)


def _spread(groups: Sequence[int], centred: Sequence[float], sizes: Mapping[int, int]) -> float:
    """Sum of squares between the groups."""
    sums = dict.fromkeys(sizes, 0.0)
    for group, value in zip(groups, centred, strict=True):
        sums[group] += value
    return math.fsum(total * total / sizes[group] for group, total in sums.items())


def _chi_square_p(value: float, freedom: int) -> float:
    """Upper tail, by Wilson and Hilferty."""
    if value <= 0:
        return 1.0
    spread = 2 / (9 * freedom)
    return 0.5 * math.erfc(((value / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread))


LIMIT = 88.72
"""Beyond this exp() is infinite in 32 bits, in which trainers compute it."""
THRESHOLDS = (0.05, 0.5)
HEAD = 16
PARTS = 10
_NAMED = 20
_PROMPT = 80
_LOWEST, _DECADES, _FINE = -9, 12, 100
"""Bins of the error: decades from 1e-9, each in a hundred."""


class Histogram:
    """Counts of errors in bins of 2.3 %; errors at or below the lowest edge are in the first, infinite ones apart."""

    def __init__(self) -> None:
        self.counts = array("Q", bytes(8 * _DECADES * _FINE))
        self.infinite = 0
        self.largest = 0.0

    def add(self, error: float) -> None:
        """Count one error, which may be infinite."""
        if error == math.inf:
            self.infinite += 1
            return
        self.largest = max(self.largest, error)
        place = int((math.log10(error) - _LOWEST) * _FINE) if error > 10**_LOWEST else 0
        self.counts[min(place, len(self.counts) - 1)] += 1

    def percentile(self, share: float) -> float:
        """The error that this share of the tokens does not exceed."""
        if share >= 1:
            return math.inf if self.infinite else self.largest
        wanted, seen = share * (sum(self.counts) + self.infinite), 0
        for place, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return min(10 ** (_LOWEST + (place + 0.5) / _FINE), self.largest) if place else 0.0
        return math.inf

    def bars(self) -> Iterator[tuple[float, int]]:
        """Upper edge and count of each half of a decade from 1e-5 on; everything smaller is one bar."""
        width = _FINE // 2
        first = (-5 - _LOWEST) * _FINE
        yield 1e-5, sum(self.counts[:first])
        for start in range(first, len(self.counts), width):
            yield 10 ** (_LOWEST + (start + width) / _FINE), sum(self.counts[start : start + width])


@dataclass(slots=True)
class Means:
    """Running means of the error by bin."""

    sums: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def add(self, place: int, value: float, count: int = 1) -> None:
        """Add `count` values with this sum."""
        self.sums[place] = self.sums.get(place, 0.0) + value
        self.counts[place] = self.counts.get(place, 0) + count


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sequence, without its tokens."""

    source: str
    run: str
    step: int
    row: int
    prompt: int
    length: int
    tokens: int
    total: float
    """Sum of exp(error) over its tokens in the loss; infinite when one of them is not finite."""
    position: int
    position_error: float
    masked_out: bool
    truncated: bool | None
    settings: tuple[tuple[str, str], ...]
    non_finite: int
    slope: float | None
    """Rank correlation of error and position, over tenths of the sequence; None when it is short or constant."""
    head: float | None
    """Mean error of the first tokens less that of the rest; None when there is no rest."""

    @property
    def error(self) -> float:
        """The mult error: mean of exp(error)."""
        return self.total / self.tokens


@dataclass(slots=True)
class Collected:
    """Everything that is kept of the rows."""

    sequences: list[TokenSequence] = field(default_factory=list)
    prompts: dict[str, int] = field(default_factory=dict)
    empty: int = 0
    errors: Histogram = field(default_factory=Histogram)
    above: dict[float, int] = field(default_factory=lambda: dict.fromkeys(THRESHOLDS, 0))
    positions: Means = field(default_factory=Means)
    """By position in the response, in bins that double: 0-15, 16-31, 32-63, …"""
    parts: Means = field(default_factory=Means)
    heads: Means = field(default_factory=Means)
    in_loss: int = 0
    outside: int = 0
    places: list[str] = field(default_factory=list)
    recorded: bool = False
    """Whether the trainer's side holds anything but zeros."""

    def tokens(self) -> int:
        """Tokens in the loss, of all sequences."""
        return sum(sequence.tokens for sequence in self.sequences)

    def prompt_texts(self) -> list[str]:
        """The beginning of each prompt, by index."""
        return [shortened(text, _PROMPT) for text in self.prompts]


def doubling(place: int) -> int:
    """Bin of a position or length: 0 for below 16, then one more for each doubling."""
    return max(0, place.bit_length() - 4)


def collect(rows: Iterable[TokenRow]) -> Collected:
    """Read all rows once."""
    made = Collected()
    for row in rows:
        if not len(row.generation) == len(row.training) == len(row.mask):
            sizes = f"{len(row.generation)}, {len(row.training)} and {len(row.mask)}"
            raise UserError(f"{row.source}: {sizes} values for the tokens of one sequence", "the file is torn or of another version")
        _add(made, row)
    return made


def _add(made: Collected, row: TokenRow) -> None:
    places = [place for place in compress(range(len(row.mask)), row.mask) if place]
    _outside(made, row, places)
    if not places:
        made.empty += 1
        return
    errors = array("d", (_error(made, row, place) for place in places))
    made.recorded = made.recorded or any(row.training[place] for place in places)
    total = math.fsum(map(math.exp, errors)) if max(errors) <= LIMIT else math.inf
    worst = max(range(len(errors)), key=errors.__getitem__)
    slope, head = _along(made, errors)
    made.sequences.append(
        TokenSequence(
            source=row.source,
            run=row.run,
            step=row.step,
            row=row.row,
            prompt=made.prompts.setdefault(row.prompt, len(made.prompts)),
            length=row.length,
            tokens=len(places),
            total=total,
            position=places[worst],
            position_error=errors[worst],
            masked_out=row.masked_out,
            truncated=row.truncated,
            settings=row.settings,
            non_finite=sum(error == math.inf for error in errors),
            slope=slope,
            head=head,
        )
    )


def _error(made: Collected, row: TokenRow, place: int) -> float:
    """The error of one token, counted; infinite where either side is not finite."""
    error = abs(row.generation[place] - row.training[place])
    if not math.isfinite(error):
        made.in_loss += 1
        _name(made, row, place, "")
        error = math.inf
    made.errors.add(error)
    for threshold in THRESHOLDS:
        made.above[threshold] += error > threshold
    return error


def _outside(made: Collected, row: TokenRow, places: list[int]) -> None:
    """Non-finite values outside the loss. Those that the generator gives for the prompt are not looked at."""
    if math.isfinite(sum(row.training)) and math.isfinite(sum(row.generation)):
        return  # the usual case, at the speed of a sum
    counted, begin = set(places), places[0] if places else len(row.mask)
    for place in range(1, len(row.mask)):
        values = (row.training[place], row.generation[place] if place >= begin else 0.0)
        if place not in counted and not all(map(math.isfinite, values)):
            made.outside += 1
            _name(made, row, place, ", outside the loss")


def _name(made: Collected, row: TokenRow, place: int, where: str) -> None:
    if len(made.places) < _NAMED:
        made.places.append(f"{row.source}, position {place}: generator {row.generation[place]}, trainer {row.training[place]}{where}")


def _along(made: Collected, errors: array[float]) -> tuple[float | None, float | None]:
    """How the error runs along one sequence: its slope, and how the first tokens compare with the rest."""
    finite = [min(error, LIMIT) for error in errors]
    count = len(finite)
    bins = min(PARTS, count)
    means = []
    for part in range(bins):
        inside = finite[part * count // bins : (part + 1) * count // bins]
        means.append(math.fsum(inside) / len(inside))
        if bins == PARTS:
            made.parts.add(part, math.fsum(inside), len(inside))
    start = 0
    while start < count:
        end = min(count, HEAD if not start else start * 2)
        made.positions.add(doubling(start), math.fsum(finite[start:end]), end - start)
        start = end
    slope = correlation(list(range(bins)), ranks(means)) if bins > 3 else None
    if count <= HEAD:
        return slope, None
    first, rest = math.fsum(finite[:HEAD]), math.fsum(finite[HEAD:])
    made.heads.add(0, first, HEAD)
    made.heads.add(1, rest, count - HEAD)
    return slope, first / HEAD - rest / (count - HEAD)
