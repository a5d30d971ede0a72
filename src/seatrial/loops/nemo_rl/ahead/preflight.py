"""What must be right before a GPU is touched: checkout, environment, GPUs, sizes, words, scripts, models, configuration."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from seatrial.loops.gpus import gpus_here
from seatrial.loops.hub import cache_room
from seatrial.loops.nemo_rl.ahead import compose, machine, models
from seatrial.loops.nemo_rl.ahead.record import Recording, ScriptError, record
from seatrial.loops.nemo_rl.runs import assertions, calls, checkout
from seatrial.loops.nemo_rl.runs.variant import Call, gpus
from seatrial.loops.nemo_rl.runs.variants import available, offered, variants
from seatrial.loops.overrides import WANTED, is_override
from seatrial.model.gather import gather
from seatrial.model.loop import Context
from seatrial.model.record import Finding
from seatrial.model.verdict import Boundary

MACHINE = ("GPUs", "Python", "launcher", "vendored Bridge", "Megatron-LM", "variables", "disk of the model cache")
"""Findings about this machine: the configuration can be composed all the same."""
Calls = Mapping[str, Sequence[Call]]


def findings(context: Context) -> tuple[Finding, ...]:
    """What must be right before a GPU is touched; the configuration is composed only when the rest is."""
    place = checkout.checkout_of(context)
    found = checkout.layout(place)
    of_the_machine = (
        lambda: models.experts(context),
        lambda: gpus_here(gpus(context), "run it on a cluster with --on"),
        cache_room,
    )
    if not found.ok or place is None:
        return gather(lambda: found, machine.launcher, lambda: models.given(context), *of_the_machine)
    runs = {name: variants(name, context) for name in context.levels}
    made = [
        *gather(
            lambda: found,
            machine.launcher,
            lambda: machine.python(context, place),
            lambda: machine.vendored(context, place),
            lambda: machine.submodule_core(context, place),
            lambda: machine.variables(context, place),
            lambda: machine.worker_environments(place),
            lambda: machine.sources(context, place),
            *of_the_machine,
            lambda: _sizes(runs),
            lambda: _transports(runs, context),
            lambda: _words(context, place),
            lambda: _scripts(runs, place),
        )
    ]
    if all(finding.ok or finding.name in MACHINE for finding in made):
        made += gather(lambda: configuration(runs, context, place))
    else:
        first = ", ".join(dict.fromkeys(finding.name for finding in made if not finding.ok and finding.name not in MACHINE))
        made += gather(lambda: models.given(context))
        made.append(_config(True, f"not composed, because this must be right before: {first}"))
    return tuple(dict.fromkeys(made))


def _sizes(runs: Calls) -> list[Finding]:
    """Parallel sizes divide the GPUs that train."""
    wrong = [f"{level} ({call.name}): {why}" for level, each in runs.items() for call in each if (why := call.sizes.problem(call.trainers))]
    fix = "choose --set options.tp=, pp=, cp=, ep=, etp= so that their products divide the GPUs"
    return [_config(False, text, fix, "sizes") for text in wrong]


def _transports(runs: Calls, context: Context) -> list[Finding]:
    """Those asked for are among those that the checkout has."""
    here = available(offered(context))
    lacking = [call.name for call in runs.get("refit", ()) if call.name not in here]
    if not lacking:
        return []
    message = f"refit: this NeMo-RL has no transport {', '.join(lacking)}; it has {', '.join(here)}"
    return [_config(False, message, f"--set options.transports={','.join(here)}", "transports")]


def _words(context: Context, place: Path) -> list[Finding]:
    """Arguments must be overrides, or `--config PATH`; and the scripts pass them on unquoted: white space would split one."""
    words = list(context.arguments)
    while "--config" in words[:-1]:
        at = words.index("--config")
        del words[at : at + 2]
    said = [(f"{word!r} is no Hydra override", f"{WANTED}, or --config PATH") for word in words if not is_override(word)]
    places = [*context.arguments, str(context.run_dir), str(place), checkout.python_path(context)]
    fix = "use paths and overrides without white space"
    said += [(f"the script would split {word!r}", fix) for word in places if len(word.split()) != 1]
    return [_config(False, message, fix, "arguments") for message, fix in said]


def _scripts(runs: Calls, place: Path) -> list[Finding]:
    """The scripts are where the levels look for them."""
    made = []
    for script in dict.fromkeys(call.script for each in runs.values() for call in each):
        if not (place / script).is_file():
            here = [str(path.relative_to(place)) for path in (place / script).parent.glob("*.sh")]
            similar = difflib.get_close_matches(script, here, n=3)
            near = f"; similar scripts there: {', '.join(similar)}" if similar else ""
            made.append(
                _config(False, f"{place}: {script} is missing{near}", "check out a revision that has it, or leave the level out", "scripts")
            )
    return made


def configuration(runs: Calls, context: Context, place: Path) -> list[Finding]:
    """Run the scripts with stand-ins, look for their models, and compose what they would run."""
    environment = {**os.environ, "PYTHONPATH": checkout.python_path(context)}
    wanted: list[compose.Wanted] = []
    made: list[Finding] = []
    for level, call in ((level, call) for level, each in runs.items() for call in each):
        phase = calls.training(call, context, context.run_dir / "levels" / level)
        words = phase.argv[phase.argv.index("--") + 1 :]
        title = f"{level} ({call.name})"
        try:
            found = record(place / call.script, place, words, {**environment, **phase.env})
        except ScriptError as error:
            made.append(_config(False, f"{title}: {error}", "use a clean checkout, and set the variables that the script asks for"))
            continue
        made += _unread(title, call, place, found) if call.assertions else []
        wanted += [compose.Wanted(title, training, call.claims, gpus(context), call.overrides) for training in found.trainings]
    made += models.model_findings([item.training for item in wanted], context)
    if wanted and not context.has_python:
        made.append(_config(True, "not composed: there is no interpreter for it yet (see environment)"))
    elif wanted:
        made += compose.compose(wanted, place, [str(context.python)], environment, context.arguments)
    return made


def _unread(title: str, call: Call, place: Path, found: Recording) -> list[Finding]:
    """What the script really hands to the checker was also read from it: else the level would judge by less than the script."""
    lost = assertions.unread(place / call.script, found.assertions)
    if not lost:
        return []
    message = f"{title}: {call.script} asserts {lost[0]}, which Seatrial does not read from it"
    more = f" ({len(lost)} of {len(found.assertions)} assertions)" if len(found.assertions) > 1 else ""
    return [_config(False, message + more, "use NeMo-RL's own script unchanged, or leave the level out", "assertions")]


def _config(ok: bool, message: str, fix: str = "", name: str = "configuration") -> Finding:
    return Finding(name=name, ok=ok, boundary=Boundary.CONFIG, message=message, fix=fix)
