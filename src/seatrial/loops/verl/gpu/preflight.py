"""What must be right before a GPU is touched: checkout, launcher, model, data, GPUs, sizes, and then the configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from seatrial.loops.gpus import gpus_here
from seatrial.loops.overrides import WANTED, is_override
from seatrial.loops.verl.gpu import architecture, checkout, compose, models
from seatrial.loops.verl.gpu.calls import training
from seatrial.loops.verl.gpu.variant import Variant, gpus
from seatrial.loops.verl.gpu.variants import variants
from seatrial.model.gather import gather
from seatrial.model.loop import Context
from seatrial.model.record import Finding
from seatrial.model.verdict import Boundary

MACHINE = ("GPUs", "CPUs")
"""Findings about this machine: the configuration can be composed all the same."""
QUEUE_CPUS = 9
"""verl's transfer queue: eight storage actors and a controller take one each; with fewer it waits for ever."""
CPUS_PER_GPU = 3
"""What verl reserves beside each GPU for the workers that share it; with fewer their placement group waits for ever."""
STORAGE_UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"


def findings(context: Context) -> tuple[Finding, ...]:
    """What must be right before a GPU is touched; the configuration is composed only when the rest is."""
    place = checkout.checkout_of(context)
    found = checkout.layout(place)
    of_the_machine = (
        lambda: models.model_findings(context),
        lambda: architecture.findings(context),
        lambda: gpus_here(gpus(context), "--device cpu, or run it on a cluster with --on"),
        lambda: _cpus(context),
        lambda: _words(context),
    )
    if not found.ok or place is None:
        return gather(lambda: found, *of_the_machine)
    calls = {name: variants(name, context, context.run_dir / "levels" / name) for name in context.levels}
    made = [
        *gather(
            lambda: found,
            lambda: checkout.launching(context),
            lambda: checkout.shadowing(context),
            *of_the_machine,
            lambda: _sizes(calls, gpus(context)),
        )
    ]
    if all(finding.ok or finding.name in MACHINE for finding in made):
        made += gather(lambda: _configuration(calls, context, place))
    else:
        first = ", ".join(dict.fromkeys(finding.name for finding in made if not finding.ok and finding.name not in MACHINE))
        message = f"not composed, because this must be right before: {first}"
        made.append(Finding(name="configuration", ok=True, boundary=Boundary.CONFIG, message=message))
    return tuple(made)


def _cpus(context: Context) -> tuple[Finding, ...]:
    """The CPUs that a Ray started here would have."""
    if os.environ.get("RAY_ADDRESS") or any(STORAGE_UNITS in word or "ray_init.num_cpus" in word for word in context.arguments):
        return ()
    count, least = os.cpu_count() or 1, QUEUE_CPUS + CPUS_PER_GPU * gpus(context)
    message = f"{count} CPUs here, {least} needed by Ray's actors"
    return (_machine("CPUs", count >= least, message, f"use a larger host, or -- {STORAGE_UNITS}=1"),)


def _machine(name: str, ok: bool, message: str, fix: str) -> Finding:
    return Finding(name=name, ok=ok, boundary=Boundary.CLUSTER, message=message, fix="" if ok else fix)


def _sizes(calls: Mapping[str, Sequence[Variant]], count: int) -> list[Finding]:
    made = []
    for level, call in ((level, call) for level, each in calls.items() for call in each):
        wrong = call.sizes.problem(count)
        if wrong:
            fix = "choose --set options.tp=, pp=, cp=, ep=, etp= so that their products divide the GPUs"
            made.append(Finding(name="sizes", ok=False, boundary=Boundary.CONFIG, message=f"{level}: {wrong}", fix=fix))
    return made


def _words(context: Context) -> list[Finding]:
    """Arguments must be overrides; and the wrapper passes them on unquoted: one with white space would become two."""
    strange = [word for word in context.arguments if not is_override(word)]
    places = [*context.arguments, str(context.run_dir), checkout.python_path(context), *models.data_files(context)]
    split = [word for word in places if len(word.split()) != 1]
    fix = "use paths and overrides without white space"
    said = [(f"{word!r} is no Hydra override", WANTED) for word in strange]
    said += [(f"the wrapper would split {word!r}", fix) for word in split]
    return [Finding(name="arguments", ok=False, boundary=Boundary.CONFIG, message=message, fix=fix) for message, fix in said]


def _configuration(calls: Mapping[str, Sequence[Variant]], context: Context, place: Path) -> list[Finding]:
    """Run the scripts with stand-ins, compare how they start Python with what the import check does, and compose."""
    environment = {**os.environ, "PYTHONPATH": checkout.python_path(context)}
    wanted, made = [], []
    for level, call in ((level, call) for level, each in calls.items() for call in each):
        phase = training(call, context, context.run_dir / "levels" / level)
        title = f"{level} ({call.name})"
        try:
            recording = compose.record(place / call.script, place, phase.argv[2:], {**environment, **phase.env})
        except compose.ScriptError as error:
            made.append(
                Finding(name="configuration", ok=False, boundary=Boundary.CONFIG, message=f"{title}: {error}", fix="use a clean checkout")
            )
            continue
        expected = ("uv", *checkout.uv_words(call.extras), "python3") if checkout.launcher(context) == "uv" else ("python3",)
        if recording.launch() != expected:
            message = (
                f"{title}: {call.script} starts `{' '.join(recording.launch())}`, and imports would be checked with `{' '.join(expected)}`"
            )
            fix = "this wrapper is of a generation that Seatrial does not know: --set options.launcher=python"
            made.append(Finding(name="launcher", ok=False, boundary=Boundary.CONFIG, message=message, fix=fix))
        wanted.append(compose.Wanted(title, recording, call.claims))
    if wanted and checkout.launcher(context) == "python" and not context.has_python:
        made.append(
            Finding(
                name="configuration",
                ok=True,
                boundary=Boundary.CONFIG,
                message="not composed: there is no interpreter for it yet (see environment)",
            )
        )
    elif wanted:
        extras = next(call.extras for each in calls.values() for call in each)
        made += compose.compose(wanted, place, checkout.start_words(context, extras), environment, context.arguments)
    return made
