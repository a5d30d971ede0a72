"""Makes the profile of a campaign: from its journal, merged or not, complete or not."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from seatrial import __version__
from seatrial.model.errors import UserError
from seatrial.model.words import counted
from seatrial.rollouts import manifest as manifests
from seatrial.rollouts.manifest import Manifest
from seatrial.rollouts.place import Place
from seatrial.rollouts.profile.columns import Columns, read_columns
from seatrial.rollouts.profile.formulas import default_ks
from seatrial.rollouts.profile.groups import Sources, make_groups
from seatrial.rollouts.profile.histograms import make_histograms
from seatrial.rollouts.profile.model import Journal, Profile, Summary
from seatrial.rollouts.profile.tasks import Rules, make_task
from seatrial.rollouts.units import Units


def profile(
    place: Place, *, pass_at: float = 1.0, ks: Sequence[int] | None = None, progress: Callable[[str], None] = lambda _: None
) -> Profile:
    """The profile of all rollouts there are. A reward of `pass_at` and more is correct; `ks` are 1, 2, 4, … unless said."""
    if not math.isfinite(pass_at):
        raise UserError(f"a reward of {pass_at} and more is correct: no reward is", "say a finite number")
    manifest = manifests.load(place)
    rules = Rules(pass_at, _ks(manifest, ks))
    with Units(place, manifest) as units, _no_collection():
        progress(f"reading the rollouts of {counted(manifest.units, 'unit')}")
        columns, scan = read_columns(place, units)
        found = f"{counted(scan.ok, 'rollout')}, {counted(scan.failed, 'failure')}, {scan.owed} missing"
        progress(f"{found}; counting {counted(manifest.rows, 'task')}")
        tasks = tuple(make_task(units.row(index), units.units_of_row(index), columns, rules) for index in range(units.rows))
        groups = make_groups(tasks, Sources(columns, units.units_of_row, rules.ks))
    summary = Summary(
        campaign=manifest.name,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        seatrial=__version__,
        inputs_sha256=manifest.inputs_sha256,
        pass_at=pass_at,
        ks=rules.ks,
        rules=_in_words(rules, columns),
        journal=Journal(torn=scan.torn, tails=scan.tails, foreign=scan.foreign, duplicates=scan.duplicates, conflicts=scan.conflicts),
        groups=groups,
        histograms=make_histograms(tasks, columns),
    )
    return Profile(summary, tasks)


def _ks(manifest: Manifest, ks: Sequence[int] | None) -> tuple[int, ...]:
    most = max(len(labels) for labels in manifest.repeats.values())
    if ks is None:
        return default_ks(most)
    wrong = [k for k in ks if not 1 <= k <= most]
    if wrong or not ks:
        raise UserError(f"k = {', '.join(map(str, wrong)) or 'nothing'}: tasks have up to {most} rollouts", f"choose k from 1 to {most}")
    return tuple(sorted(set(ks)))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Many small objects are made and none of them forms a cycle: looking for cycles took a sixth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _in_words(rules: Rules, columns: Columns) -> tuple[str, ...]:
    said = [
        "Only rollouts that worked have a reward. Failures and missing rollouts are counted beside them, never as a reward of 0.",
        "The headline of a group is the mean over its tasks, each counting once; figures over rollouts weigh each rollout the same.",
        f"A rollout is correct when its reward is {rules.pass_at:g} or more.",
        "pass@k: the chance that k of a task's n rollouts, drawn without replacement, hold a correct one, 1 - C(n-c,k)/C(n,k); "
        "best@k: the expected largest reward of k drawn. Both are unbiased.",
        "maj@k: the first k rollouts vote with their answers; same answer with another reward is another vote, no answer is no vote, "
        "winners that tie are averaged, nobody voting is 0. Datasets without any answer take no part.",
        "Tasks with fewer than k rollouts are left out of figures at k; each says how many tasks it used.",
        "Intervals are of 95 %: Wilson's for the pass rate of a task; for means over tasks Student's with tasks as clusters, "
        "none where tasks do not differ, cut at 0 and 1 where all rewards lie there.",
        "std is that of the sample (n - 1), and unknown for one rollout. Run i of avg-of-k is made of the i-th rollout of each task.",
    ]
    if columns.metrics_left_out:
        said.append(f"{columns.metrics_left_out} further metric values were left out: more than {len(columns.metrics)} names.")
    return tuple(said)
