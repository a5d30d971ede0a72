"""Facts that probes left, and the configuration in force, as checks.

- A torn or malformed row counts as damage: a proof from damaged facts fails. A missing fact is a missed proof.
- A claim is a value by dotted key; `"> 0"` and `">= N"` are lower bounds. Types count: `1` is not `True`. A missing key fulfils no claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.core.errors import UserError
from seatrial.core.files import read_text
from seatrial.core.guarded import BadValue, parse_json, parse_json_once
from seatrial.core.journal import read_journal
from seatrial.core.records import CheckResult, replace
from seatrial.core.series import Damage, Metrics
from seatrial.core.verdict import Boundary

FACTS_PATTERN = "*facts*.jsonl"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts of one phase, in the order in which they were written."""

    rows: tuple[Row, ...]
    damage: tuple[Damage, ...] = ()

    def of(self, kind: str, **match: Any) -> list[Row]:
        """The facts of one kind whose fields have the given values."""
        return [row for row in self.rows if row["fact"] == kind and all(row.get(key) == value for key, value in match.items())]

    def one(self, kind: str, **match: Any) -> Row | None:
        """The only such fact, or None when there is none or more than one."""
        found = self.of(kind, **match)
        return found[0] if len(found) == 1 else None


def read_facts(path: Path) -> Facts:
    """Read a facts.jsonl; an absent file has no facts."""
    if not path.is_file():
        return Facts(())
    rows: list[Row] = []
    damage: list[Damage] = []
    for number, text in enumerate(read_text(path).split("\n"), 1):  # a row may be long: all hashes of a large model
        if not text:
            continue
        try:
            row = parse_json_once(text)
            if not isinstance(row, dict) or not isinstance(row.get("fact"), str):
                raise BadValue("a fact is an object with the key 'fact'")
            rows.append(row)
        except BadValue as error:
            damage.append(Damage(str(path), f"line {number}", 1, f"not a fact: {error}"))
    return Facts(tuple(rows), tuple(damage))


def read_all(source: Path) -> Facts:
    """The facts of a run: one file, or every file of facts below a directory, in the order of their names. None is an error."""
    if source.is_dir():
        files = sorted(source.rglob(FACTS_PATTERN))
        if not files:
            raise UserError(f"{source}: no file of facts below it ({FACTS_PATTERN})", "name the file that the hooks were told to write")
    elif source.is_file():
        files = [source]
    else:
        raise UserError(f"{source}: no such file or directory", "name the file of facts, or the directory that holds it")
    read = [read_facts(file) for file in files]
    return Facts(tuple(row for each in read for row in each.rows), tuple(damage for each in read for damage in each.damage))


Hashes = Mapping[str, str]


def proof(
    name: str, passed: bool, value: object, boundary: Boundary, threshold: str = "", message: str = "", *, run: str = ""
) -> CheckResult:
    text = value if isinstance(value, (float, str)) else str(value)
    return CheckResult(name=name, kind="proof", passed=passed, value=text, threshold=threshold, message=message, boundary=boundary, run=run)


def about_run(run: str, checks: Iterable[CheckResult]) -> list[CheckResult]:
    return [replace(check, run=check.run or run) for check in checks]


def differing(left: Hashes, right: Hashes) -> list[str]:
    """Names whose hashes differ, or that one side lacks."""
    return [name for name in {**left, **right} if left.get(name) != right.get(name)]


def equal(name: str, left: Hashes | None, right: Hashes | None, boundary: Boundary = Boundary.CHECKPOINT) -> CheckResult:
    if not left or not right:
        return proof(f"{name}: bit-equal", False, "no facts", boundary)
    wrong = differing(left, right)
    value = f"{len(left) - len(wrong)} of {len(left)} equal"
    return proof(f"{name}: bit-equal", not wrong, value, boundary, "all", ", ".join(wrong[:3]))


def same_trajectory(metrics: Metrics, left: str, right: str, after: int | None, is_clock: Callable[[str], bool]) -> CheckResult:
    """Every metric of both runs is the same number at every step after `after`, except those that measure the machine."""
    names, others = _tags(metrics, left, is_clock), _tags(metrics, right, is_clock)
    unequal: list[str] = []
    steps: set[int] = set()
    for name in sorted(names | others):
        one, two = metrics.series.get(left + name), metrics.series.get(right + name)
        a = {s: v for s, v in zip(one.steps, one.values, strict=True) if after is not None and s > after} if one else {}
        b = dict(zip(two.steps, two.values, strict=True)) if two else {}
        if {s: v.hex() for s, v in a.items()} != {s: v.hex() for s, v in b.items()}:
            unequal.append(name)
        steps |= a.keys()
    ok = bool(names) and bool(steps) and not unequal
    value = f"{len(names | others) - len(unequal)} of {len(names | others)} metrics x {len(steps)} steps equal"
    made = proof("trajectory after the resume: bit-equal", ok, value, Boundary.CHECKPOINT, "all", ", ".join(unequal[:4]))
    return replace(made, steps=tuple(sorted(steps)))


def _tags(metrics: Metrics, prefix: str, is_clock: Callable[[str], bool]) -> set[str]:
    names = {tag.removeprefix(prefix) for tag in metrics.series if tag.startswith(prefix)}
    return {name for name in names if not is_clock(name)}


ABSENT = "(no such key)"


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key of nested mappings."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return ABSENT
        value = value[part]
    return value


def claim_holds(claimed: Any, value: Any) -> bool:
    """Whether a value is what is claimed; a list of one file is that file."""
    if isinstance(value, list) and len(value) == 1 and not isinstance(claimed, list):
        value = value[0]
    if isinstance(claimed, str) and claimed.startswith(">"):
        sign, _, least = claimed.partition(" ")
        return type(value) in (int, float) and (value >= float(least) if sign == ">=" else value > float(least))
    return type(value) is type(claimed) and bool(value == claimed)


def unmet_claims(claims: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Key, value and claim, where a value is not as claimed; `values` are by dotted key."""
    for key, claimed in claims.items():
        value = values.get(key, ABSENT)
        if not claim_holds(claimed, value):
            yield key, value, claimed


def check_claims(phase: str, claims: Mapping[str, Any], printed: Sequence[Mapping[str, Any] | None]) -> CheckResult:
    """The configurations that a run printed are those that the level claims; None stands for one that is torn."""
    name = f"configuration in force ({phase})"
    if not printed or None in printed:
        return proof(name, False, "the run printed no whole configuration", Boundary.CONFIG, run=phase)
    # Of several runs in one log any may have written the metrics: each must be as claimed.
    wrong = [item for config in printed if config for item in unmet_claims(claims, {key: lookup(config, key) for key in claims})]
    fell = "; ".join(f"{key} fell back to {value} (claimed: {claimed})" for key, value, claimed in wrong[:3])
    shown = fell or ", ".join(f"{key}={lookup(printed[-1] or {}, key)}" for key in list(claims)[:3])
    keys = tuple(dict.fromkeys(key for key, _, _ in wrong))
    value = f"{len(claims) - len(keys)} of {len(claims)} values as claimed"
    return replace(proof(name, not wrong, value, Boundary.CONFIG, "all", shown, run=phase), settings=keys)


ENGINE = ("megatron.core", "megatron.bridge")


def trained_with(path: Path) -> CheckResult:
    """Ray workers really imported Megatron-Core and Megatron-Bridge, by the import proofs in `path`."""
    used = {row["package"] for row in _imports(path) if row["process"] == "worker" and row["method"] == "imported" and row["file"]}
    absent = [package for package in ENGINE if package not in used]
    message = f"no Ray worker imported {' and '.join(absent)}" if absent else ""
    value = f"{len(ENGINE) - len(absent)} of {len(ENGINE)} packages"
    return proof("Ray workers used Megatron-Core and Megatron-Bridge", not absent, value, Boundary.PROVIDER, "all", message)


def _imports(path: Path) -> Iterator[dict[str, Any]]:
    """The import proofs; a torn row proves nothing, and the judge names it."""
    for _, row, _ in read_journal(path) if path.is_file() else ():
        try:
            entry = parse_json(row)
        except BadValue:
            continue
        if isinstance(entry, dict) and {"process", "package", "method", "file"} <= set(entry):
            yield entry
