"""Whether this NeMo-RL accepts what a script would run, and whether it would matter: known before a GPU is touched.

- NeMo-RL's own loader composes the configuration of every recorded training, in the loop's own interpreter.
- Every override that is rejected is a finding, and so is every value that differs from what a level claims.
- So is every override that is accepted and that no code of the checkout reads (see `source`): a run with it would be
  vacuous.
"""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.files import read_text
from seatrial.loops.child import NoAnswerError, ask
from seatrial.loops.claims import ABSENT, differences
from seatrial.loops.nemo_rl.ahead.record import Training
from seatrial.loops.nemo_rl.runs.source import Source, read_source
from seatrial.loops.overrides import key_of
from seatrial.loops.sizes import Sizes
from seatrial.model.errors import UserError
from seatrial.model.guarded import BadValue, parse_python
from seatrial.model.record import Finding
from seatrial.model.verdict import Boundary

COMPOSE_SECONDS = 300
DRIVE = Path(__file__).parents[1] / "drive" / "compose.py"
BATCHES = ("policy.train_micro_batch_size", "policy.logprob_batch_size")
MEGATRON = "policy.megatron_cfg"
TP, PP, CP = (f"{MEGATRON}.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
APART = "policy.generation.colocated"
CLUSTER = ("cluster.gpus_per_node", "cluster.num_nodes", f"{APART}.enabled", f"{APART}.resources.gpus_per_node")
UNCLEAN = "script and configuration are of different versions: use a clean checkout"
OTHER_VERSION = "this level was written for another version of NeMo-RL: use a revision that has the key, or leave the level out"
GUARDED_TP = 4
"""From this size on NeMo-RL refuses to train and to compute log-probabilities with different batch sizes."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One training to compose: how it was recorded, and what is claimed of it."""

    title: str
    training: Training
    claims: Mapping[str, Any]
    gpus: int | None = None
    """GPUs that it may use; None is any number."""
    ours: tuple[str, ...] = ()
    """Overrides that the level itself adds to those of the script."""


def compose(
    wanted: Sequence[Wanted], checkout: Path, start: Sequence[str], environment: Mapping[str, str], own: Sequence[str]
) -> list[Finding]:
    """Findings over all trainings; `own` are the user's overrides, which are named as such."""
    with tempfile.TemporaryDirectory(prefix="seatrial-compose-") as folder:
        runs = [_request(item, checkout, Path(folder, f"{number}.yaml")) for number, item in enumerate(wanted)]
        unknown = [
            _config(False, f"{w.title}: {w.training.program} names no configuration of its own")
            for w, run in zip(wanted, runs, strict=True)
            if run is None
        ]
        if unknown:
            return unknown
        try:
            answers = ask(start, DRIVE, checkout, environment, COMPOSE_SECONDS, {"checkout": str(checkout), "runs": runs})
        except NoAnswerError as error:
            return [_environment(f"the configuration could not be composed in {error}")]
    source = read_source(checkout)
    made = [finding for item, answer in zip(wanted, answers, strict=True) for finding in _judge(item, answer, own, source)]
    claimed = sum(len(item.claims) for item in wanted)
    return _once(made) or [_config(True, f"{len(wanted)} runs composed, {claimed} values as claimed, every override is read")]


def default_config(program: Path) -> Path | None:
    """The configuration that a program takes when none is named: it joins its own folder, the rest of the path and the name."""
    try:
        tree = parse_python(read_text(program))
    except BadValue as error:
        raise UserError(
            f"{program}: not Python: {error.what}{f' ({error.where})' if error.where else ''}", "correct the program"
        ) from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
            parts = [word.value for word in node.args[1:] if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            if parts and parts[-1].endswith(".yaml") and len(parts) == len(node.args) - 1:
                return program.parent.joinpath(*parts)
    return None


def _request(item: Wanted, checkout: Path, written: Path) -> dict[str, Any] | None:
    """What the driver is asked for; None when the configuration is not known."""
    training = item.training
    config = checkout / training.config if training.config else default_config(checkout / training.program)
    if training.text is not None:
        written.write_text(training.text, encoding="utf-8")
        config = written
    if config is None:
        return None
    return {
        "config": str(config),
        "overrides": list(training.overrides),
        "keys": [*item.claims, f"{MEGATRON}.enabled", TP, PP, CP, *CLUSTER, *BATCHES],
    }


def _judge(item: Wanted, answer: Mapping[str, Any], own: Sequence[str], source: Source) -> Iterator[Finding]:
    if answer["error"]:
        yield _config(False, f"{item.title}: NeMo-RL's own configuration does not compose: {answer['error']}", "use a clean checkout")
        return
    for entry in answer["rejected"]:
        override, near = entry["override"], entry["near"]
        known = f"; nearest known: {', '.join(near)}" if near else ""
        fix = "correct it, or leave it out" if override in own else OTHER_VERSION if override in item.ours else UNCLEAN
        yield _config(False, f"{item.title}: this NeMo-RL rejects {override}{known} ({entry['reason'][:200]})", fix)
    for override, added in answer["added"].items():
        why = source.unread(key_of(override), added)
        if why and key_of(override) not in answer["referred"]:
            fix = "leave it out, or use the key that this checkout reads" if override in own else "use the keys of this checkout"
            yield _config(False, f"{item.title}: {override} is accepted, but {why}: a run with it would be vacuous", fix)
    rejected = {key_of(entry["override"]) for entry in answer["rejected"]}
    for key, value, claimed in differences(item.claims, answer["values"]):
        if key in rejected:  # it is said above why it is not as claimed
            continue
        theirs = next((word for word in own if key_of(word) == key), None)
        fix = f"leave {theirs} out: with it the level would not prove its claim" if theirs else "use NeMo-RL's own script unchanged"
        yield _config(False, f"{item.title} claims {key} = {claimed}, and the run would have {value}", fix)
    asked = _all_gpus(answer["values"])
    if item.gpus is not None and asked is not None and asked > item.gpus:
        yield _config(False, f"{item.title} asks for {asked} GPUs, and {item.gpus} are to be used", f"--set options.gpus={asked}")
    if answer["values"].get(f"{MEGATRON}.enabled") is True:
        yield from _sizes(item.title, answer["values"])


def _sizes(title: str, values: Mapping[str, Any]) -> Iterator[Finding]:
    """NeMo-RL refuses sizes that do not divide its GPUs, and TP >= 4 with different batch sizes."""
    tp, pp, cp = (values[key] if isinstance(values.get(key), int) else 1 for key in (TP, PP, CP))
    train, logprob = (values.get(key, ABSENT) for key in BATCHES)
    wrong = Sizes(tp, pp, cp).problem(world) if (world := _trainers(values)) else None
    if wrong:
        yield _config(False, f"{title}: {wrong}", f"choose {TP}, {PP} and {CP} so that their product divides the GPUs that train")
    if tp >= GUARDED_TP and logprob not in (ABSENT, train):
        message = f"{title}: TP {tp} with train_micro_batch_size {train} and logprob_batch_size {logprob}: NeMo-RL refuses it"
        yield _config(False, message, f"use TP 1 or 2; or set {BATCHES[0]} and {BATCHES[1]} to the same number")


def _all_gpus(values: Mapping[str, Any]) -> int | None:
    gpus, nodes = (values.get(key) for key in CLUSTER[:2])
    return gpus * nodes if isinstance(gpus, int) and isinstance(nodes, int) else None


def _trainers(values: Mapping[str, Any]) -> int | None:
    """GPUs that train; None where generation has nodes of its own."""
    gpus, (nodes, together, generating) = _all_gpus(values), (values.get(key) for key in CLUSTER[1:])
    if gpus is None or together is not False:
        return gpus
    return gpus - generating if nodes == 1 and isinstance(generating, int) and generating < gpus else None


def _once(findings: Sequence[Finding]) -> list[Finding]:
    """A script that trains several times says the same of each."""
    return list(dict.fromkeys(findings))


def _config(ok: bool, message: str, fix: str = "") -> Finding:
    return Finding(name="configuration", ok=ok, boundary=Boundary.CONFIG, message=message, fix=fix)


def _environment(message: str) -> Finding:
    return Finding(name="configuration", ok=False, message=message, fix="make uv's environment of the checkout: uv sync")
