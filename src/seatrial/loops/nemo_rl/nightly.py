"""NeMo-RL's test suites and functional scripts: what they ask for, leave and assert, and whether one ran to its end."""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from seatrial.core.errors import UserError
from seatrial.core.files import read_json, read_text
from seatrial.core.guarded import parse_count, parse_step
from seatrial.loops.console_lines import read_lines
from seatrial.loops.nemo_rl.script_reader import CHECKER, called, read_calls
from seatrial.loops.nightly_scripts import Asserted, Functional, Nightly

BLOCK = re.compile(r"^# =+ BEGIN CONFIG =+$(.*?)^# =+ END CONFIG =+$", re.DOTALL | re.MULTILINE)
ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?(\w+)=(.*)$", re.MULTILINE)
VALUE = re.compile(
    r"""(?P<quote>["']?) (?: (?P<number>\d+) | \$\{\w+:-(?P<default>\d+)\} | \$\(\((?P<sum>[^$`]+)\)\) ) (?P=quote) \s* (?:\#.*)?""",
    re.VERBOSE | re.ASCII,
)
NUMBERS = ("NUM_NODES", "GPUS_PER_NODE", "MAX_STEPS", "STEPS_PER_RUN", "NUM_RUNS", "NUM_MINUTES")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod}
GPUS_PER_NODE = 8
"""What the launcher takes where a script says nothing."""
TITLE = "Metric Checks"
MISSED = re.compile(r"^\s*[│|]\s*FAIL\s*[│|]")
STEP_METRIC = "train/loss"
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
    def incomplete(self, tree: Path, log: Path) -> str | None:
        here = tree / self.script
        found = describe_nightly(self.script, read_text(here)) if here.is_file() else None
        return _without_table(log) or _too_few(tree / self.metrics, found.steps if found else self.steps)


def describe_nightly(script: str, text: str) -> Suite | None:
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
    for _, _, text in read_lines(log):
        seen = seen or text.strip() == TITLE
        if seen and MISSED.match(text):
            return f"a check of the script was missed, and it exited with 0 all the same: {text.strip()[:200]}"
    return None if seen else "the script exited with 0 and never looked at its metrics: no table of checks in its log"


def _too_few(metrics: Path, steps: int) -> str | None:
    try:
        data = read_json(metrics)
    except UserError as error:
        return f"the script exited with 0 and its metrics cannot be read: {error.message}"
    table = data.get(STEP_METRIC) if isinstance(data, dict) else None
    reached = [step for key in table if (step := parse_step(key)) is not None] if isinstance(table, dict) else []
    if max(reached, default=0) < steps:
        return f"the script exited with 0 at step {max(reached, default=0)} of {steps}"
    return None


DUMPER = "json_dump_tb_logs.py"
OUTPUT = "--output_path"
SKIPS = (re.compile(r"^(?:\[INFO\] )?Target step [0-9]+ reached, skipping run$"),)
"""Of the test suites: the metrics of an earlier run have the last step already."""
PASSED_ON = ("$@", "$*")
STEPS_OVERRIDE = re.compile(r"\+{0,2}\w+\.max_num_steps=([0-9]+)")
GPUS = re.compile(r"\+{0,2}cluster\.gpus_per_node=([0-9]+)")
NODES = re.compile(r"\+{0,2}cluster\.num_nodes=([0-9]+)")
LOGS = re.compile(r"\+{0,2}logger\.log_dir=(.+)")
ENDS_EARLY = "checkpointing.checkpoint_must_save_by="
SHELL_ASSIGNMENT = re.compile(r"\w+=.*")
RECIPE_OF = re.compile(r"-tq_(?:simple|mooncake)$")
"""What a wrapper's name has beyond that of the recipe that it calls."""
NAME = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
HERE = re.compile(r"(?:\$\(\s*pwd\s*\)|`pwd`|\$PWD|\$\{PWD\})/")
"""The root of the checkout, as far as anybody goes by relative places: a script that went elsewhere leaves no metrics there."""
SHELLS = ("bash", "sh")
COMPARED = 'data["train/token_mult_prob_error"]'
FLOOR = f"min({COMPARED}) >= 0.999"
"""Whoever bounds it needs this too: it is 1 at least, and 0 where every token is masked: that passes every upper bound of the scripts."""


def describe_functional(script: Path, arguments: tuple[str, ...]) -> Functional | None:
    """What a script of a checkout asks for; None for one of another project."""
    root = next((parent for parent in script.parents if (parent / "tests" / CHECKER).is_file()), None)
    if root is None or script.suffix != ".sh":
        return None
    reading = _Reading(root, script, arguments)
    reading.read(script)
    suite = reading.suite
    output = script.with_suffix("")
    planned = suite.nodes * suite.gpus_per_node if suite else reading.gpus or None
    return Functional(
        loop="nemo-rl",
        root=root,
        output=output,
        logs=output / "logs",
        asserted=reading.asserted(),
        unread=tuple(reading.unread),
        gpus=planned,
        minutes=suite.minutes if suite else None,
        step_tags=(STEP_METRIC,),
        skips=SKIPS,
        table=TITLE if any(checks for checks in reading.checks.values()) else "",
    )


@dataclass(slots=True)
class _Reading:
    root: Path
    script: Path
    """The one that is called: results carry its name."""
    arguments: tuple[str, ...]
    checks: dict[str, list[str]] = field(default_factory=dict)
    """By the metrics file, as written; in the order in which the files are made."""
    steps: dict[str, int | None] = field(default_factory=dict)
    """Of the files that are made from the trainer's logs."""
    trained: dict[str, int] = field(default_factory=dict)
    """Steps of the trainer's calls, by where they log to; 0 where a call is to end early."""
    early: bool = False
    """Whether a call is to end early."""
    unread: list[str] = field(default_factory=list)
    """What mentions the checker and could not be read."""
    gpus: int = 0
    suite: Suite | None = None
    files: list[Path] = field(default_factory=list)

    def read(self, file: Path) -> None:
        """Read a script, and the one that it calls."""
        if file in self.files or not file.is_file():
            return
        self.files.append(file)
        text = read_text(file)
        self.early = self.early or ENDS_EARLY in text
        self.suite = self.suite or describe_nightly(str(file.relative_to(self.root)), text)
        self.unread += read_calls(text, self.seen)

    def seen(self, words: tuple[str, ...]) -> None:
        names = [PurePosixPath(word).name for word in words]
        if (script := _script(words)) is not None and (place := self.place(script)) is not None:
            self.read(place)
        elif (call := called(words)) is not None:
            if call.expressions:
                found = self.checks.setdefault(_relative(call.metrics), [])
                found += [expr for expr in call.expressions if expr not in found]
        elif DUMPER in names and OUTPUT in words[:-1]:
            metrics = _relative(words[words.index(OUTPUT) + 1])
            self.checks.setdefault(metrics, [])
            self.steps[metrics] = self._steps_of(words[names.index(DUMPER) + 1])
        else:
            self._trains(words)

    def _trains(self, words: tuple[str, ...]) -> None:
        whole = [part for word in words for part in (self.arguments if word in PASSED_ON else (word,))]
        last = {
            pattern: match[1] for pattern in (STEPS_OVERRIDE, GPUS, NODES, LOGS) for word in whole if (match := pattern.fullmatch(word))
        }
        self.gpus = max(self.gpus, parse_count(last.get(GPUS, "0")) * parse_count(last.get(NODES, "1")))
        if STEPS_OVERRIDE in last:
            early = any(word.startswith(ENDS_EARLY) for word in whole)
            self.trained[last.get(LOGS, "")] = 0 if early else parse_count(last[STEPS_OVERRIDE])

    def _steps_of(self, logs: str) -> int | None:
        """The last call that logs to this place says how far its metrics go; where none does, the longest of all calls.

        In a script that ends some call early, nobody can then say which one it is.
        """
        return self.trained.get(logs, 0 if self.early else max(self.trained.values(), default=0)) or None

    def asserted(self) -> tuple[Asserted, ...]:
        """The metrics files; a CONFIG block says how far all of them must get, unless the user's arguments do."""
        made = []
        for written, checks in self.checks.items():
            steps = self.steps.get(written)
            if written in self.steps and steps is None and self.suite is not None:
                steps = self.suite.steps
            made.append(Asserted(metrics=self.place(written), written=written, checks=tuple(checks), steps=steps))
        return tuple(made)

    def place(self, word: str) -> Path | None:
        """A path of a script; None where it holds a variable whose value is not known."""
        output = self.script.with_suffix("")
        known = {
            "SCRIPT_DIR": self.script.parent,
            "PROJECT_ROOT": self.root,
            "EXP_NAME": output.name,
            "EXP_DIR": output,
            "LOG_DIR": output / "logs",
            "CKPT_DIR": output / "ckpts",
            "JSON_METRICS": output / "metrics.json",
            "RUN_LOG": output / "run.log",
            "TQ_EXP_NAME": output.name,
            "BASE_RECIPE": RECIPE_OF.sub("", output.name),
        }
        text = NAME.sub(lambda found: str(known.get(found[1] or found[2], found[0])), word)
        return None if "$" in text or "`" in text else self.root / text


def _relative(written: str) -> str:
    """The place of a metrics file without the directory that the script is run in: one file has one name."""
    return HERE.sub("", written, count=1) if HERE.match(written) else written


def _script(words: tuple[str, ...]) -> str | None:
    """The script that a command hands over to: `NAME=value bash script.sh …`, `exec script.sh …`."""
    bare = list(words)
    while bare and SHELL_ASSIGNMENT.fullmatch(bare[0]):
        bare.pop(0)
    while bare and (bare[0] == "exec" or bare[0] in SHELLS):
        bare.pop(0)
    return bare[0] if bare and bare[0].endswith(".sh") and len(bare) < len(words) else None
