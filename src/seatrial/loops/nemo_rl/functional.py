"""NeMo-RL's functional scripts (`tests/functional`, `tests/test_suites`): what they leave, what they assert, how far they must get.

- A script is read, never run: the calls of its trainer, of the tool that writes metrics.json, and of the checker.
- The steps of a metrics file are those of the trainer's calls that log to where it is made from (`grpo.max_num_steps=2`), with the
  arguments of the user where the script passes them on; else those of the CONFIG block. A file that is not made from the trainer's
  logs (a score), and a call that is to end early (`checkpoint_must_save_by`), have none.
- A script that only calls another one (`bash $SCRIPT_DIR/base.sh`) is read with it, under its own name.
- A check that stands in a branch counts whichever branch is taken: leaving one out would be a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from seatrial.files import read_text
from seatrial.loops.nemo_rl import nightly
from seatrial.loops.nemo_rl.runs.assertions import CHECKER, called, read_calls
from seatrial.loops.nightly import Asserted, Functional
from seatrial.model.guarded import parse_count

DUMPER = "json_dump_tb_logs.py"
OUTPUT = "--output_path"
SKIPS = (re.compile(r"^(?:\[INFO\] )?Target step \d+ reached, skipping run$"),)
"""Of the test suites: the metrics of an earlier run have the last step already."""
PASSED_ON = ("$@", "$*")
STEPS = re.compile(r"\+{0,2}\w+\.max_num_steps=(\d+)")
GPUS = re.compile(r"\+{0,2}cluster\.gpus_per_node=(\d+)")
NODES = re.compile(r"\+{0,2}cluster\.num_nodes=(\d+)")
LOGS = re.compile(r"\+{0,2}logger\.log_dir=(.+)")
ENDS_EARLY = "checkpointing.checkpoint_must_save_by="
ASSIGNMENT = re.compile(r"\w+=.*")
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
        step_tags=(nightly.STEPS,),
        skips=SKIPS,
        table=nightly.TITLE if any(checks for checks in reading.checks.values()) else "",
    )


@dataclass(slots=True)
class _Reading:
    """What was seen of a script so far."""

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
    suite: nightly.Suite | None = None
    files: list[Path] = field(default_factory=list)

    def read(self, file: Path) -> None:
        """Read a script, and the one that it calls."""
        if file in self.files or not file.is_file():
            return
        self.files.append(file)
        text = read_text(file)
        self.early = self.early or ENDS_EARLY in text
        self.suite = self.suite or nightly.describe(str(file.relative_to(self.root)), text)
        self.unread += read_calls(text, self.seen)

    def seen(self, words: tuple[str, ...]) -> None:
        """One command of a script."""
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
        last = {pattern: match[1] for pattern in (STEPS, GPUS, NODES, LOGS) for word in whole if (match := pattern.fullmatch(word))}
        self.gpus = max(self.gpus, parse_count(last.get(GPUS, "0")) * parse_count(last.get(NODES, "1")))
        if STEPS in last:
            early = any(word.startswith(ENDS_EARLY) for word in whole)
            self.trained[last.get(LOGS, "")] = 0 if early else parse_count(last[STEPS])

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
    while bare and ASSIGNMENT.fullmatch(bare[0]):
        bare.pop(0)
    while bare and (bare[0] == "exec" or bare[0] in SHELLS):
        bare.pop(0)
    return bare[0] if bare and bare[0].endswith(".sh") and len(bare) < len(words) else None
