"""Runs the conformance ladder over the checkout under test and judges its facts; then the base and the Bridge's own tests join the verdict.

- A ladder that failed runs again on the base of the change: what fails there too is Blocked. Without a known base, or where it cannot
  run, a failure without a measured check is Blocked: an import or a call that does not fit may be the machine's, or older than the
  change. What was measured and missed stays a Fail.
- A checkout that was edited during the probe revokes a Pass. Nothing after the ladder makes a verdict better.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import read_json, write_json
from seatrial.core.guarded import parse_json
from seatrial.core.records import OwnVerdict, RepoState
from seatrial.core.records import replace as replace_record
from seatrial.core.verdict import Boundary, Verdict, worst
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import differs
from seatrial.instruments.bridge.faults import FAULTS
from seatrial.instruments.bridge.rungs import FAMILIES, TABLE
from seatrial.probes.bridge_verdict import BridgeRequest, JudgedBridgeProbe, judge_ladder, last_line, touched
from seatrial.probes.own_tests import OwnTests, own_tests
from seatrial.probes.probe_process import FACTS, LOG, Driver, Follower, Tell, require_weights, trouble
from seatrial.runtime.interrupt import check_stop
from seatrial.trial.base_worktrees import same_files, shown, unchanged
from seatrial.trial.pre_tests import fresh, uncompared
from seatrial.trial.staging import stage

__all__ = [
    "FAMILIES",
    "FAULTS",
    "TABLE",
    "BridgeSetup",
    "import_path",
    "pinned",
    "probe_bridge",
    "require_models",
    "require_rungs",
    "shown_model",
]
LADDER = "seatrial.instruments.bridge.ladder"
PLAN = "plan.json"
SUBMODULE = Path("3rdparty", "Megatron-LM")
TEXTS = ("rung", "made", "unimportable", "loop")
"""Facts with errors in them."""
MINUTES_PER_GB = 4.0
"""How much longer, in units of a rung's own minutes, a large checkpoint may take per gigabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSetup:
    """Where and how the ladder runs."""

    asked: BridgeRequest
    python: Path
    out: Path
    """An empty directory."""
    deadline_s: float
    changes: tuple[RepoState, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    """For rungs: steps, the engine and its interpreter."""


def require_models(models: Sequence[str]) -> None:
    """Families that we make ourselves, or directories with a configuration and weights; the names under which they are shown differ."""
    for model in models:
        place = Path(model)
        if model in FAMILIES:
            continue
        if not place.is_dir():
            known = ", ".join(name for name, family in FAMILIES.items() if not family.needs)
            raise UserError(f"--model {model}: no such family or directory", f"name a local HF directory, or one of {known}")
        if not (place / "config.json").is_file():
            raise UserError(f"{place}: config.json is missing", f"copy the model's config.json into {place}")
        _require_architecture(place / "config.json")
        require_weights(place, str(place))
    twice = [name for name in {shown_model(model) for model in models} if sum(shown_model(model) == name for model in models) > 1]
    if twice:
        raise UserError(f"two models are called {twice[0]}", "probe them one after the other")


def _require_architecture(file: Path) -> None:
    """Something that names the architecture by which the Bridge finds its code."""
    found = read_json(file)
    named = found.get("architectures") if isinstance(found, dict) else None
    if not isinstance(named, list) or not named:
        raise UserError(f"{file}: `architectures` is missing", "name the architecture as transformers' save_pretrained does")


def shown_model(model: str) -> str:
    """What a model is called in tables and facts."""
    return model if model in FAMILIES else Path(model).absolute().name


def require_rungs(text: str) -> tuple[str, ...]:
    """Names separated by commas, in the order of the ladder."""
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [name for name in wanted if name not in TABLE]
    if unknown or not wanted:
        said = f"unknown rung {unknown[0]!r}" if unknown else "no rung is named"
        raise UserError(f"--rungs {text!r}: {said}", f"choose from {', '.join(TABLE)}")
    return tuple(name for name in TABLE if name in wanted)


def import_path(changes: Sequence[RepoState]) -> tuple[str, ...]:
    """The checkouts under test; behind a Bridge its own pinned Megatron-LM, where that is checked out and no other is under test."""
    made = [repo.import_root for repo in changes if repo.import_root]
    return (*made, *(str(place) for place in pinned(changes))) if _bundled(changes) else tuple(made)


def _bundled(changes: Sequence[RepoState]) -> bool:
    """Whether Megatron-Core is the Bridge's own, and no other is under test."""
    return not any("megatron.core" in repo.packages for repo in changes)


def pinned(changes: Sequence[RepoState]) -> list[Path]:
    """The Megatron-LM inside a Bridge under test."""
    places = [Path(repo.path) / SUBMODULE for repo in changes if "megatron.bridge" in repo.packages]
    return [place for place in places if (place / "megatron" / "core" / "__init__.py").is_file()]


def plan_of(setup: BridgeSetup) -> dict[str, object]:
    """The plan that the driver reads."""
    asked = setup.asked
    named = {shown_model(model): None if model in FAMILIES else str(Path(model).absolute()) for model in asked.models}
    items = [{"model": model, "rung": rung, "fault": asked.fault} for model in named for rung in asked.rungs]
    watch = {str(Path(repo.path, path)): path for repo in setup.changes for path in repo.changed if path.endswith(".py")}
    options = {**setup.options, "engine": asked.engine}
    patience = max([1.0, *(_gigabytes(Path(model)) * MINUTES_PER_GB for model in asked.models if model not in FAMILIES)])
    return {"patience": patience, "device": asked.device, "models": named, "items": items, "options": options, "watch": watch}


def _gigabytes(place: Path) -> float:
    return sum(file.stat().st_size for file in place.glob("*.safetensors")) / 1e9


def probe_bridge(setup: BridgeSetup, tell: Tell) -> JudgedBridgeProbe:
    """Run the ladder to its end and judge its facts. Raises `Interrupted` when Seatrial is asked to stop."""
    redactor = Redactor(os.environ)
    instruments = stage(setup.out)
    driver = Driver(out=setup.out, instruments=instruments, redactor=redactor, import_path=import_path(setup.changes))
    write_json(setup.out / PLAN, plan_of(setup))
    tell(f"starting the ladder: {len(setup.asked.models)} models, {len(setup.asked.rungs)} rungs: {setup.out / LOG}")
    follower = Follower(setup.out / FACTS, "rung", _said, tell)
    argv = [str(setup.python), "-m", LADDER, str(setup.out / PLAN), str(setup.out)]
    outcome = driver.run(argv, LOG, setup.deadline_s, follower.tick)
    follower.look()
    facts = driver.facts(TEXTS)
    for text in (*setup.out.glob("rungs/*/error-*"), *setup.out.glob("rungs/**/*.log")):
        redactor.file(text)
    check_stop()
    asked = replace_record(setup.asked, models=tuple(shown_model(model) for model in setup.asked.models))
    core = next((str(place) for place in pinned(setup.changes)), None) if _bundled(setup.changes) else None
    how = trouble(outcome, setup.out / LOG, setup.deadline_s)
    judged = judge_ladder(facts, asked, setup.changes, how, core, touched(setup.changes))
    return replace_record(judged, limitations=(*judged.limitations, *_pin(setup.changes)))


def _pin(changes: Sequence[RepoState]) -> list[str]:
    """Which Megatron-Core stood behind the Bridge, when it is not the one that the Bridge pins."""
    if not _bundled(changes) or pinned(changes):
        return []
    bridges = [repo for repo in changes if "megatron.bridge" in repo.packages and (Path(repo.path) / SUBMODULE).parent.is_dir()]
    return [
        f"{repo.name}: its pinned Megatron-LM is not checked out; the installed Megatron-Core took its place "
        f"(git -C {repo.path} submodule update --init {SUBMODULE})"
        for repo in bridges
    ]


def _said(line: bytes) -> str:
    try:
        row = parse_json(line)
        how = "" if row["state"] == "ran" else f": {row['state']}: {last_line(row['error'])[:160]}"
        return f"{row['model']}: {row['rung']}: {row['seconds']:.1f} s{how}"
    except (ValueError, KeyError, TypeError):
        return "a rung whose fact cannot be read"


BEFORE = "before"
"""Below the probe's directory: facts and logs of the base."""
LEAST_S = 30.0
"""With less time left the base is not begun."""


def beside_base(setup: BridgeSetup, judged: JudgedBridgeProbe, left_s: float, tell: Tell) -> JudgedBridgeProbe:
    """The verdict beside the base; a verdict that is no Fail stays."""
    if judged.verdict is not Verdict.FAIL or not setup.changes:
        return judged
    why, note = _excuse(setup, judged, left_s, tell)
    if why:
        own = OwnVerdict(verdict=judged.verdict, reason=judged.reason, boundary=judged.boundary)
        return replace_record(judged, verdict=Verdict.BLOCKED, reason=f"{why}: {judged.reason}", own=own)
    return replace_record(judged, limitations=(*judged.limitations, note))


def _excuse(setup: BridgeSetup, judged: JudgedBridgeProbe, left_s: float, tell: Tell) -> tuple[str, str]:
    """Why the failures are not the change's, or nothing; and a note on what was compared."""
    found = _as_stored(judged)
    bases = [(repo, repo.base) for repo in setup.changes if repo.base]
    states = tuple(replace_record(repo, commit=commit) for repo, commit in bases)
    if len(bases) < len(setup.changes):
        return uncompared(found, "the state before the change is not known: name --base")
    if same_files(setup.changes):
        return f"nothing differs from the base ({shown(states)}), so there is no change to hold this against", ""
    if left_s < LEAST_S:
        return uncompared(found, "no time was left of the deadline: raise --deadline")
    tell(f"the ladder failed: climbing it at the base ({shown(states)}), to compare")
    try:
        with unchanged(bases, setup.out / f"{BEFORE}-src") as trees:
            before = probe_bridge(replace(setup, out=setup.out / BEFORE, changes=trees, deadline_s=left_s), tell)
    except (BlockedError, UserError) as error:
        return uncompared(found, f"the state before the change cannot be run: {error.message}")
    if before.verdict in (Verdict.BLOCKED, Verdict.SKIPPED):
        return uncompared(found, f"the base is {before.verdict}: {before.reason}")
    new = fresh(found, _as_stored(before) if before.verdict is Verdict.FAIL else None)
    if new is None:
        return f"the base ({shown(states)}) fails in the same way", ""
    what = ": ".join(part for part in (new.model, new.rung, new.check) if part)
    return "", f"compared with the base ({shown(states)}): this is new{f': {what}' if what else ''}"


def _as_stored(judged: JudgedBridgeProbe) -> dict[str, Any]:
    """As probe.json holds it."""
    return {"judged": judged.model_dump(mode="json")}


def run_own_tests(setup: BridgeSetup, judged: JudgedBridgeProbe, left_s: float, tell: Tell) -> JudgedBridgeProbe:
    """The Bridge's own unit tests that match the diff, when a change of a Bridge is under test, in the time that is left."""
    repo = next((state for state in setup.changes if "megatron.bridge" in state.packages), None)
    if repo is None:
        return judged
    if repo.base is None or not repo.changed:
        note = f"{repo.name}: its own tests were not run: no change against a base is known (name --base)"
        return replace_record(judged, limitations=(*judged.limitations, note))
    if left_s <= 0:
        late = "not run: no time was left of the deadline (raise --deadline, or leave them out with --no-tests)"
        return joined(judged, OwnTests(verdict=Verdict.BLOCKED, reason=late))
    return joined(judged, own_tests(setup.python, repo, setup.out / "own-tests", left_s, repo.base, tell))


def joined(judged: JudgedBridgeProbe, found: OwnTests) -> JudgedBridgeProbe:
    """What the ladder and the Bridge's own tests prove together: the worse of the two. The tests are a deliverable of their own.

    A checkout that has none of them is no worse for it: that is said among the limitations.
    """
    said: dict[str, object] = {
        "own_tests": found,
        "limitations": (*judged.limitations, *(f"own tests: {note}" for note in found.notes)),
    }
    if found.dead:
        first = "; ".join(found.dead[:3])
        dead = f"{len(found.dead)} paths that upstream's skills name are dead: {first}; all in probe.json"
        said["follow_ups"] = (*judged.follow_ups, dead)
    if found.verdict is Verdict.SKIPPED:
        said["limitations"] = (*judged.limitations, f"own tests: none ran: {found.reason}", *(f"own tests: {note}" for note in found.notes))
    verdict = worst((judged.verdict, found.verdict))
    if verdict is not judged.verdict and found.verdict is not Verdict.SKIPPED:
        boundary = Boundary.PROVIDER if verdict is Verdict.FAIL else Boundary.ENVIRONMENT
        said |= {"verdict": verdict, "reason": f"the Bridge's own tests: {found.reason}", "boundary": boundary}
    return replace_record(judged, **said)


def unless_edited(judged: JudgedBridgeProbe, changes: Sequence[RepoState], evidence: Path) -> JudgedBridgeProbe:
    """A checkout that was edited while the ladder ran is not the one that was recorded in `evidence`: no Pass."""
    if judged.verdict is not Verdict.PASS:
        return judged
    redactor = Redactor(os.environ)
    for repo in changes:
        how = differs(repo, evidence, redactor)
        if how is not None:
            reason = f"{repo.path} was edited while it was probed: {how}"
            return replace_record(judged, verdict=Verdict.BLOCKED, reason=reason, boundary=Boundary.ENVIRONMENT)
    return judged
