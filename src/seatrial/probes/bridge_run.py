"""`seatrial probe bridge`: plans the conformance ladder, runs it over the checkout under test, judges its facts and stores the verdict.

- A ladder that failed runs again on the base of the change: what fails there too is Blocked. Without a known base, or where it cannot
  run, a failure without a measured check is Blocked: an import or a call that does not fit may be the machine's, or older than the
  change. What was measured and missed stays a Fail.
- A checkout that was edited during the probe revokes a Pass. Nothing after the ladder makes a verdict better.
"""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import seatrial
from seatrial import loops
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import read_json, write_json, write_text
from seatrial.core.guarded import parse_json
from seatrial.core.records import OwnVerdict, RepoState
from seatrial.core.records import replace as replace_record
from seatrial.core.verdict import Boundary, Verdict, worst
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import differs, write_repos
from seatrial.instruments.bridge.faults import FAULTS as FAULTS
from seatrial.instruments.bridge.rungs import FAMILIES as FAMILIES
from seatrial.instruments.bridge.rungs import TABLE as TABLE
from seatrial.probes.bridge_report import bridge_summary, card_text, require_card
from seatrial.probes.bridge_verdict import BridgeProbe, BridgeRequest, JudgedBridgeProbe, judge_ladder, last_line, shown_model, touched
from seatrial.probes.own_tests import OwnTests, own_tests
from seatrial.probes.probe_process import FACTS, LOG, Driver, Follower, ProbeInterrupted, Tell, require_weights, trouble, vllm_python
from seatrial.runtime.environments import Environments
from seatrial.runtime.interrupt import Interrupted, Interruptible, check_stop
from seatrial.trial import run_dir
from seatrial.trial.base_worktrees import same_files, shown, unchanged
from seatrial.trial.pre_tests import fresh, uncompared
from seatrial.trial.staging import stage
from seatrial.trial.trial_request import checkouts

LADDER = "seatrial.instruments.bridge.ladder"
PLAN = "plan.json"
DEFAULT = "qwen2"
EVIDENCE = "evidence"
STEPS = 20
MINUTES = 60.0
PROVIDED = ("megatron.bridge", "megatron.core", "transformers")
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
    found = read_json(file)
    named = found.get("architectures") if isinstance(found, dict) else None
    if not isinstance(named, list) or not named:
        raise UserError(f"{file}: `architectures` is missing", "name the architecture as transformers' save_pretrained does")


def require_rungs(text: str) -> tuple[str, ...]:
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
    places = [Path(repo.path) / SUBMODULE for repo in changes if "megatron.bridge" in repo.packages]
    return [place for place in places if (place / "megatron" / "core" / "__init__.py").is_file()]


def plan_of(setup: BridgeSetup) -> dict[str, object]:
    asked = setup.asked
    named = {shown_model(model): None if model in FAMILIES else str(Path(model).absolute()) for model in asked.models}
    items = [{"model": model, "rung": rung, "fault": asked.fault} for model in named for rung in asked.rungs]
    watch = {str(Path(repo.path, path)): path for repo in setup.changes for path in repo.changed if path.endswith(".py")}
    options = {**setup.options, "engine": asked.engine}
    own = [Path(model) for model in asked.models if model not in FAMILIES]
    sizes = [sum(file.stat().st_size for file in place.glob("*.safetensors")) / 1e9 for place in own]
    patience = max([1.0, *(size * MINUTES_PER_GB for size in sizes)])
    return {"patience": patience, "device": asked.device, "models": named, "items": items, "options": options, "watch": watch}


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
    """What the ladder and the Bridge's own tests prove together: the worse of the two. The tests are a deliverable of their own. A checkout
    that has none of them is no worse for it: that is said among the limitations."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeOptions:
    """The options of `seatrial probe bridge`; None: not given."""

    change: Sequence[str] = ()
    model: Sequence[str] = ()
    everything: bool = False
    rungs: str | None = None
    fault: str | None = None
    engine: Literal["transformers", "vllm"] = "transformers"
    engine_python: Path | None = None
    steps: int = STEPS
    python: Path | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    tests: bool = True
    base: str | None = None
    run_base: bool = True
    card: Path | None = None
    out: Path | None = None
    minutes: float = MINUTES
    command: Sequence[str] = ()
    """How Seatrial was called, for the record."""


def run_bridge_probe(options: BridgeOptions, tell: Tell, tell_build: Tell) -> tuple[BridgeProbe, Path]:
    """The probe, and the directory that holds its evidence."""
    asked = bridge_request(options)
    changes = _changes(options.change, options.base)
    if options.card is not None:
        require_card(asked, changes, options.card)
    began = time.monotonic()
    with Interruptible():
        python = _interpreter(options.python, tell_build)
        ends = time.monotonic() + 60 * options.minutes
        settings = {"steps": options.steps, **_engine(asked, options.engine_python)}
        place = run_dir.named_directory(options.out) if options.out else run_dir.new_directory(Path("trials"), "probe-bridge")
        recorded = write_repos(changes, place / EVIDENCE, Redactor(os.environ)) if changes else ()
        setup = BridgeSetup(asked=asked, python=python, out=place, deadline_s=60 * options.minutes, changes=recorded, options=settings)
        try:
            judged = probe_bridge(setup, tell)
            if options.run_base and asked.fault is None:
                judged = beside_base(setup, judged, ends - time.monotonic(), tell)
            if options.tests and asked.fault is None:
                judged = run_own_tests(setup, judged, ends - time.monotonic(), tell)
            judged = unless_edited(judged, setup.changes, place / EVIDENCE)
        except Interrupted:
            raise ProbeInterrupted(place) from None
    redactor = Redactor(os.environ)
    made = BridgeProbe(
        seatrial=seatrial.__version__,
        created=run_dir.now(),
        command=tuple(redactor.value(list(options.command))),
        asked=asked,
        changes=setup.changes,
        python=str(python),
        seconds=round(time.monotonic() - began, 2),
        judged=judged,
    )
    # The verdict last: where it lies, the evidence does, too. Only the card comes after it, which can still prove impossible.
    write_text(place / "summary.md", redactor.text(bridge_summary(made, place)))
    write_json(place / "probe.json", made)
    if options.card is not None:
        try:
            write_text(options.card, card_text(made))
        except UserError as error:
            raise NoCard(error, made, place) from error
    return made, place


class NoCard(UserError):
    """The probe came to a verdict, which is stored; its card is impossible."""

    def __init__(self, error: UserError, record: BridgeProbe, directory: Path) -> None:
        super().__init__(error.message, error.fix)
        self.record, self.directory = record, directory


def bridge_request(options: BridgeOptions) -> BridgeRequest:
    """Models and rungs, where all of them are known."""
    fault = options.fault
    if options.everything and options.model:
        raise UserError("--all and --model are both given", "leave one out")
    default = (FAULTS[fault].model if fault in FAULTS else DEFAULT,)
    models = tuple(FAMILIES) if options.everything else tuple(options.model) or default
    require_models(models)
    if fault is not None and fault not in FAULTS:
        close = difflib.get_close_matches(fault, FAULTS, n=1)
        raise UserError(f"unknown fault {fault!r}", f"use {close[0]}" if close else "seatrial probe bridge --fault list")
    text = options.rungs or (",".join(FAULTS[fault].rungs) if fault else None)
    rungs = require_rungs(text) if text else tuple(TABLE)
    if options.device == "cuda" and options.python is None:
        raise UserError("--device cuda needs an interpreter with CUDA and Megatron", "name it with --python")
    return BridgeRequest(
        models=models,
        rungs=rungs,
        models_named=not options.everything,
        rungs_named=options.rungs is not None,
        device=options.device,
        engine=options.engine,
        fault=fault,
    )


def _changes(words: Sequence[str], base: str | None) -> tuple[RepoState, ...]:
    """The checkouts under test, with what each differs in from its base."""
    states, _ = checkouts(words, base)
    for state in states:
        if not set(PROVIDED) & set(state.packages):
            raise UserError(
                f"{state.path}: provides {', '.join(state.packages) or 'no package'}, and the ladder runs none of that",
                "name a checkout of Megatron-Bridge, Megatron-LM or transformers",
            )
    return states


def _interpreter(own: Path | None, tell: Tell) -> Path:
    """The interpreter with Megatron; ours is built when it is absent."""
    if own is not None:
        if not own.is_file():
            raise BlockedError(Boundary.ENVIRONMENT, f"{own}: no such interpreter", "name a Python that has Megatron with --python")
        return own.absolute()
    cache, name = Environments(), loops.MEGATRON_CPU
    lock = loops.engine_environments()[name]
    found = cache.find(name, lock)
    if found is None:
        tell(f"building the environment {name}, once: this takes minutes")
        found = cache.build(name, lock, tell, line_filter=Redactor(os.environ).lines().line)
    return found.python


def _engine(asked: BridgeRequest, own: Path | None) -> dict[str, object]:
    """What the closed loop is told about its engine."""
    if asked.engine != "vllm" or "loop" not in asked.rungs:
        return {}
    python = own or vllm_python("--engine-python")
    return {"engine_python": str(python.absolute())}
