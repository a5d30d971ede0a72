"""NeMo-RL's test suites (`tests/test_suites/**.sh`): what their CONFIG block says, and whether one ran to its end.

- The block is read, never evaluated: numbers, `${NAME:-number}`, and arithmetic on numbers that stand before it.
- These scripts exit with 0 also when training ended early: they look at their metrics only if the last step was reached. So an exit
  code of 0 counts only with a table of checks in the log, none of them missed, and the last step in the metrics.
- How many steps that are is read from the tree that was run: it differs between commits, and an edit may change it.
"""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from seatrial.files import read_json, read_text
from seatrial.loops.lines import lines
from seatrial.loops.nightly import Nightly
from seatrial.model.errors import UserError
from seatrial.model.guarded import parse_count, parse_step

BLOCK = re.compile(r"^# =+ BEGIN CONFIG =+$(.*?)^# =+ END CONFIG =+$", re.DOTALL | re.MULTILINE)
ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?(\w+)=(.*)$", re.MULTILINE)
VALUE = re.compile(
    r"""(?P<quote>["']?) (?: (?P<number>\d+) | \$\{\w+:-(?P<default>\d+)\} | \$\(\((?P<sum>[^$`]+)\)\) ) (?P=quote) \s* (?:\#.*)?""", re.X
)
NUMBERS = ("NUM_NODES", "GPUS_PER_NODE", "MAX_STEPS", "STEPS_PER_RUN", "NUM_RUNS", "NUM_MINUTES")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod}
GPUS_PER_NODE = 8
"""What the launcher takes where a script says nothing."""
TITLE = "Metric Checks"
MISSED = re.compile(r"^\s*[│|]\s*FAIL\s*[│|]")
STEPS = "train/loss"
"""The scripts themselves count steps by it."""
VARIABLES = {
    # Environments of workers are kept by the name of their class, whatever the commit: force a new one, where no other run has its own.
    "NRL_FORCE_REBUILD_VENVS": "true",
    "NEMO_RL_VENV_DIR": "{tree}/venvs",
    # A converted checkpoint is found again by the name of its model: one of another commit must not be.
    "NRL_MEGATRON_CHECKPOINT_DIR": "{checkpoints}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite(Nightly):
    """One script of the test suites."""

    def incomplete(self, tree: Path, log: Path) -> str | None:
        """Why an exit code of 0 does not count."""
        here = tree / self.script
        found = describe(self.script, read_text(here)) if here.is_file() else None
        return _without_table(log) or _too_few(tree / self.metrics, found.steps if found else self.steps)


def describe(script: str, text: str) -> Suite | None:
    """What the CONFIG block of a script says; None for a script without one."""
    block = BLOCK.search(text)
    place = PurePosixPath(script)
    if block is None or place.suffix != ".sh":
        return None
    values = _values(script, block[1])

    def wanted(name: str) -> int:
        if values.get(name, 0) < 1:
            raise UserError(f"{script}: {name} is not in its CONFIG block, or no positive number", f"write {name}=NUMBER there")
        return values[name]

    steps = wanted("MAX_STEPS")
    runs = wanted("NUM_RUNS") if "NUM_RUNS" in values else -(-steps // (values.get("STEPS_PER_RUN") or steps))
    return Suite(
        script=script,
        nodes=wanted("NUM_NODES"),
        gpus_per_node=wanted("GPUS_PER_NODE") if "GPUS_PER_NODE" in values else GPUS_PER_NODE,
        minutes=wanted("NUM_MINUTES") * runs,
        steps=steps,
        metrics=str(place.with_suffix("") / "metrics.json"),
        variables=VARIABLES,
    )


def _values(script: str, block: str) -> dict[str, int]:
    """Names that stand for a number, the last assignment of each. Others (models, comments for the cluster) are of no use here."""
    values: dict[str, int] = {}
    for name, text in ASSIGNMENT.findall(block):
        match = VALUE.fullmatch(text.strip())
        if match is None and name in NUMBERS:
            raise UserError(f"{script}: {name}={text.strip()} cannot be read as a number", f"write {name}=NUMBER there")
        if match is None:
            continue
        number = match["number"] or match["default"]
        values[name] = parse_count(number) if number else _sum(script, name, match["sum"], values)
    return values


def _sum(script: str, name: str, text: str, values: dict[str, int]) -> int:
    """The value of shell arithmetic on known numbers."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=known) if known in values:
                return values[known]
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
                result: int = OPERATORS[type(sign)](value(left), value(right))
                return result
        raise ValueError(ast.unparse(node))

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise UserError(f"{script}: {name}=$(({text})) cannot be read: {error}", f"write {name}=NUMBER there") from error


def _without_table(log: Path) -> str | None:
    """Whether the script looked at its metrics, and liked them."""
    seen = False
    for _, _, text in lines(log):
        seen = seen or text.strip() == TITLE
        if seen and MISSED.match(text):
            return f"a check of the script was missed, and it exited with 0 all the same: {text.strip()[:200]}"
    return None if seen else "the script exited with 0 and never looked at its metrics: no table of checks in its log"


def _too_few(metrics: Path, steps: int) -> str | None:
    """Whether the last step was reached."""
    try:
        data = read_json(metrics)
    except UserError as error:
        return f"the script exited with 0 and its metrics cannot be read: {error.message}"
    table = data.get(STEPS) if isinstance(data, dict) else None
    reached = [step for key in table if (step := parse_step(key)) is not None] if isinstance(table, dict) else []
    if max(reached, default=0) < steps:
        return f"the script exited with 0 at step {max(reached, default=0)} of {steps}"
    return None
