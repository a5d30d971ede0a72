"""Running the conformance ladder over the checkout under test, and judging the facts it leaves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from seatrial.evidence.redact import Redactor
from seatrial.files import read_json, write_json
from seatrial.launch.interrupt import check_stop
from seatrial.model.errors import UserError
from seatrial.model.guarded import parse_json
from seatrial.model.record import RepoState
from seatrial.probes.bridge.families import FAMILIES
from seatrial.probes.bridge.faults import FAULTS
from seatrial.probes.bridge.rungs import TABLE
from seatrial.proving.bridge.judge import judge, last_line
from seatrial.proving.bridge.record import Asked, Judged
from seatrial.proving.bridge.touched import touched
from seatrial.proving.checkpoint import require_weights
from seatrial.proving.driver import FACTS, LOG, Driver, Follower, Tell, trouble
from seatrial.trial.inject import stage_packages

__all__ = ["FAMILIES", "FAULTS", "TABLE", "Setup", "import_path", "pinned", "prove", "require_models", "require_rungs", "shown"]
LADDER = "seatrial.probes.bridge.ladder"
PLAN = "plan.json"
SUBMODULE = Path("3rdparty", "Megatron-LM")
TEXTS = ("rung", "made", "unimportable", "loop")
"""Facts with errors in them."""
MINUTES_PER_GB = 4.0
"""How much longer, in units of a rung's own minutes, a large checkpoint may take per gigabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Where and how the ladder runs."""

    asked: Asked
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
    twice = [name for name in {shown(model) for model in models} if sum(shown(model) == name for model in models) > 1]
    if twice:
        raise UserError(f"two models are called {twice[0]}", "probe them one after the other")


def _require_architecture(file: Path) -> None:
    """Something that names the architecture by which the Bridge finds its code."""
    found = read_json(file)
    named = found.get("architectures") if isinstance(found, dict) else None
    if not isinstance(named, list) or not named:
        raise UserError(f"{file}: `architectures` is missing", "name the architecture as transformers' save_pretrained does")


def shown(model: str) -> str:
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


def plan_of(setup: Setup) -> dict[str, object]:
    """The plan that the driver reads."""
    asked = setup.asked
    named = {shown(model): None if model in FAMILIES else str(Path(model).absolute()) for model in asked.models}
    items = [{"model": model, "rung": rung, "fault": asked.fault} for model in named for rung in asked.rungs]
    watch = {str(Path(repo.path, path)): path for repo in setup.changes for path in repo.changed if path.endswith(".py")}
    options = {**setup.options, "engine": asked.engine}
    patience = max([1.0, *(_gigabytes(Path(model)) * MINUTES_PER_GB for model in asked.models if model not in FAMILIES)])
    return {"patience": patience, "device": asked.device, "models": named, "items": items, "options": options, "watch": watch}


def _gigabytes(place: Path) -> float:
    return sum(file.stat().st_size for file in place.glob("*.safetensors")) / 1e9


def prove(setup: Setup, tell: Tell) -> Judged:
    """Run the ladder to its end and judge its facts. Raises `Interrupted` when Seatrial is asked to stop."""
    redactor = Redactor(os.environ)
    instruments = stage_packages((), setup.out)
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
    asked = setup.asked.model_copy(update={"models": tuple(shown(model) for model in setup.asked.models)})
    core = next((str(place) for place in pinned(setup.changes)), None) if _bundled(setup.changes) else None
    how = trouble(outcome, setup.out / LOG, setup.deadline_s)
    judged = judge(facts, asked, setup.changes, how, core, touched(setup.changes))
    return judged.model_copy(update={"limitations": (*judged.limitations, *_pin(setup.changes))})


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
