"""What the facts of both ends of the weight sync prove: the generator holds what the actor holds, and began as the model's files."""

from __future__ import annotations

import itertools
from typing import Any

from seatrial.loops.facts import Facts
from seatrial.loops.proof import proof
from seatrial.model.record import CheckResult
from seatrial.model.verdict import Boundary

Row = dict[str, Any]


def state(facts: Facts, role: str, when: str, step: int) -> Row:
    """The only state of that moment; empty when there is none or more than one."""
    return facts.one("state", role=role, when=when, step=step) or {}


def span(steps: list[int]) -> str:
    """The steps as a reader wants them: `0 to 20` when none is missing, doubled or out of order."""
    whole = bool(steps) and steps[-1] - steps[0] == len(steps) - 1 and steps == list(range(steps[0], steps[-1] + 1))
    return f"{steps[0]} to {steps[-1]}" if whole else f"{steps}"


def is_adapter(name: str) -> bool:
    """Whether a tensor belongs to an adapter: PEFT and Megatron-Bridge name theirs differently."""
    return "lora_" in name or ".adapter." in name


def synced(facts: Facts, phase: str, begin: int, last: int, lora: bool) -> list[CheckResult]:
    """After every step the generation server holds, bit for bit, what the actor holds; with adapters the base came first."""
    rows = [row for row in facts.of("sync") if row["adapter"] == lora]
    base = [row for row in facts.of("sync") if row["adapter"] != lora]
    bad = [row["step"] for row in (*rows, *base) if row["unknown"] or row["absent"] or row["wrong"] or not row["sent"]]
    wrong = [name for row in (*rows, *base) for name in (*row["unknown"], *row["absent"], *row["wrong"])]
    steps = [row["step"] for row in rows]
    names, where, wanted = len(rows[0]["sent"]) if rows else 0, f" ({phase})", list(range(begin, last + 1))
    made = [
        proof(f"weights go to the generator at every step{where}", steps == wanted, span(steps), Boundary.REFIT, span(wanted)),
        proof(
            f"the generator holds what was sent: bit-equal{where}",
            bool(rows) and not bad,
            f"{names} tensors, {len(bad)} of {len(rows) + len(base)} syncs wrong",
            Boundary.REFIT,
            "all",
            few(wrong),
        ),
        _follows(facts, rows, base, begin, where),
    ]
    if lora:
        early = [row["step"] for row in base] == [begin]
        made.append(proof(f"the base was sent before the adapters{where}", early, f"{len(base)} syncs", Boundary.REFIT, "1"))
    if not begin:
        made.append(_began(facts, (base if lora else rows)[:1], where))
    return made


def _follows(facts: Facts, rows: list[Row], base: list[Row], begin: int, where: str) -> CheckResult:
    """What was sent is what the actor holds, by an opinion of our own on what that is; or, of a model that we have none on, it moves."""
    given = (facts.one("model") or {"made": True})["made"] is False
    first = state(facts, "actor", "restored" if begin else "start", begin)
    if given and first and first.get("exported") is None:
        still = [b["step"] for a, b in itertools.pairwise(rows) if a["sent"] == b["sent"]]
        return proof(f"what is sent moves with the actor{where}", len(rows) > 1 and not still, f"{len(still)} syncs", Boundary.REFIT, "0")
    names = [name for row in (*rows, *base) for name in _foreign(facts, row, begin)]
    value = f"{len(names)} tensors differ"
    return proof(
        f"what was sent is what the actor holds: bit-equal{where}", bool(rows) and not names, value, Boundary.REFIT, "0", few(names)
    )


def _foreign(facts: Facts, row: Row, begin: int) -> list[str]:
    """Names in a sync that are not as the actor holds them at that step, and what the actor holds and was not sent."""
    when = "step" if row["step"] > begin else "restored" if begin else "start"
    held = state(facts, "actor", when, row["step"]).get("exported") or {}
    return _unlike(row["sent"], {name: value for name, value in held.items() if is_adapter(name) == row["adapter"]}) or (
        [] if held else ["all"]
    )


def _began(facts: Facts, first: list[Row], where: str) -> CheckResult:
    """The first weights sent are those of the model's files: what was loaded into the engine came out again."""
    files = facts.one("files")
    names = _unlike(first[0]["sent"], files["tensors"]) if first and files else ["all"]
    count = len(files["tensors"]) if files else 0
    name = f"the first weights sent are those of the model's files: bit-equal{where}"
    return proof(name, bool(count) and not names, f"{len(names)} of {count} tensors differ", Boundary.PROVIDER, "0", few(names))


def _unlike(sent: Row, held: Row) -> list[str]:
    """Where two sets of tensors differ; of tied tensors, which are equal, one name is enough."""
    wrong = [name for name, value in sent.items() if (held[name] != value if name in held else value not in held.values())]
    return wrong + [name for name, value in held.items() if name not in sent and value not in sent.values()]


def few(names: list[str]) -> str:
    """Enough of them to know where to look."""
    return ", ".join(names[:3])
