"""Tests of Megatron-Bridge before the levels: its own unit tests for a diff, and the conformance gate (conformance.toml)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath

from seatrial.core.loop import Context, SideTests, read_tables
from seatrial.core.records import RepoState
from seatrial.core.specs import Conformance
from seatrial.loops import MEGATRON_CPU

GENERAL = (
    "tests/unit_tests/models/test_model_provider_mixin.py",
    "tests/unit_tests/models/test_param_mapping.py",
    "tests/unit_tests/training/test_integration.py",
)
"""What the Bridge's own guide names for any change of a provider."""
MOVED: Mapping[str, tuple[str, ...]] = {
    "tests/unit_tests/training/test_integration.py": (
        "tests/unit_tests/peft/test_utils.py",
        "tests/unit_tests/training/utils/test_config_utils.py",
        "tests/unit_tests/training/utils/test_train_utils.py",
    )
}
"""Where tests went that a guide still names."""
SOURCE = "src/megatron/bridge/"
OTHERS = tuple(f"{SOURCE}{name}/" for name in ("recipes", "perf_recipes", "diffusion"))
"""What no RL loop uses."""
UNIT_TESTS = "tests/unit_tests/"
SHOWN = 5


def tests_for_diff(repo: RepoState) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The test files of a change of the Bridge that exist, and what there is to say about the choice."""
    focused, without = _focused(repo)
    files, notes = present(Path(repo.path), [*GENERAL, *focused], MOVED)
    if not repo.changed:
        notes = (*notes, "what the change touches is not known (name --base): only the general tests were chosen")
    if without:
        more = f" and {len(without) - SHOWN} more" if len(without) > SHOWN else ""
        notes = (*notes, f"no unit test was found for {', '.join(without[:SHOWN])}{more}")
    return files, notes


def present(root: Path, wanted: Iterable[str], moved: Mapping[str, tuple[str, ...]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The files that exist, and what is missing or has moved."""
    files: list[str] = []
    notes: list[str] = []
    for name in dict.fromkeys(wanted):
        if (root / name).exists():
            files.append(name)
            continue
        instead = [other for other in moved.get(name, ()) if (root / other).exists()]
        files += instead
        notes.append(f"{name} is missing" + (f", {', '.join(instead)} run instead" if instead else ""))
    return tuple(dict.fromkeys(files)), tuple(notes)


def _focused(repo: RepoState) -> tuple[list[str], list[str]]:
    """Tests that the diff itself changed and those of what it touches; and the changed files for which there is none."""
    root = Path(repo.path)
    tests = sorted(str(found.relative_to(root)) for found in (root / UNIT_TESTS).rglob("test_*.py"))
    made, without = [], []
    for path in repo.changed:
        if path.startswith(UNIT_TESTS) and Path(path).name.startswith("test_") and path.endswith(".py"):
            made.append(path)
        elif path.startswith(SOURCE) and path.endswith(".py") and not path.startswith(OTHERS):
            found = _tests_of(PurePosixPath(path.removeprefix(SOURCE)), tests)
            made += found
            without += [path] if not found and Path(path).name != "__init__.py" else []
    return made, without


def _tests_of(file: PurePosixPath, tests: Sequence[str]) -> list[str]:
    """Those beside it; else of its model family, and those elsewhere that have its name, if that is no common one."""
    stem, folder = file.stem.lstrip("_"), f"{UNIT_TESTS}{file.parent}"
    beginnings = (
        f"{folder}/test_{stem}",
        f"{folder}/test_{file.parent.name}_{stem}",
        f"{folder.rpartition('/')[0]}/test_{file.parent.name}_{stem}",
    )
    own = [test for test in tests if test.startswith(beginnings) and test.count("/") <= folder.count("/") + 1]
    if own or stem == "init__":
        return own
    named = (f"test_{stem}.py", f"test_{stem}_") if "_" in stem else ()
    return [*_family(file, tests), *(test for test in tests if PurePosixPath(test).name.startswith(named))]


def _family(file: PurePosixPath, tests: Sequence[str]) -> list[str]:
    """All tests of the innermost folder of a model that has any."""
    folders = file.parts[1:-1] if file.parts[0] == "models" else ()
    for name in reversed(folders):
        if found := [test for test in tests if test.startswith(f"{UNIT_TESTS}models/{name}/")]:
            return found
    return []


NAMES = {"megatron.bridge": "bridge", "megatron.core": "megatron"}
"""What the probe calls the checkouts that it can run."""
MINUTES, MINUTES_OF_A_FAMILY = 10, 10


@cache
def conformance_rows() -> tuple[Conformance, ...]:
    """Those of conformance.toml; the first holds for any source."""
    return read_tables(Path(__file__).parent / "conformance.toml", "conformance", Conformance)


def conformance(context: Context) -> tuple[SideTests, ...]:
    """The probes of the checkouts under test, one for the families that climb the same rungs; none where nothing asks for it."""
    tested = [(name, repo) for repo in context.changes if (name := _name(repo)) and not repo.companion]
    if not tested or context.options.get("tests") == "off":
        return ()
    unknown = any(not repo.changed for _, repo in tested)
    meant = _meant(path for _, repo in tested for path in repo.changed) or ([conformance_rows()[0]] if unknown else [])
    bases = [(repo, repo.base) for _, repo in tested if repo.base]
    arguments = [word for name, repo in tested for word in ("--change", f"{name}={repo.path}")]
    if len(tested) == len(bases) == 1:  # the probe takes one revision, and two repositories have none in common
        arguments += ["--base", bases[0][1]]
    note = "what the change touches is not known (name --base): only the general rungs were chosen"
    common = SideTests(
        key="conformance",
        name="Bridge conformance",
        argv=(sys.executable, "-m", "seatrial.cli.main", "probe", "bridge", *arguments),
        cwd=context.run_dir,
        notes=(note,) if unknown else (),
        blocked=None
        if MEGATRON_CPU in context.environments
        else f"the environment {MEGATRON_CPU} is not built: seatrial env build {MEGATRON_CPU}",
        kind="probe",
        gate=True,
        bases=tuple(bases) if len(bases) == len(tested) else (),
    )
    return tuple(_probe(common, number, families, rungs) for number, (rungs, families) in enumerate(_groups(meant).items()))


def _probe(common: SideTests, number: int, families: Sequence[str], rungs: Sequence[str]) -> SideTests:
    """The probe of some families; all but the first are called by theirs."""
    models = [word for family in families for word in ("--model", family)]
    return replace(
        common,
        key=f"{common.key}-{families[0]}" if number else common.key,
        name=f"{common.name} of {', '.join(families)}" if number else common.name,
        argv=(*common.argv, *models, "--rungs", ",".join(rungs), "--no-base", "--no-tests"),
        minutes=MINUTES + MINUTES_OF_A_FAMILY * len(families),
    )


def _groups(meant: Sequence[Conformance]) -> dict[tuple[str, ...], list[str]]:
    """The families that climb the same rungs, by these."""
    rungs = _each(row.rungs for row in meant)
    made: dict[tuple[str, ...], list[str]] = {}
    for family in _each(row.families for row in meant):
        left_out = {rung for row in conformance_rows() if family in row.families for rung in row.without}
        made.setdefault(tuple(rung for rung in rungs if rung not in left_out), []).append(family)
    return made


def _name(repo: RepoState) -> str | None:
    return next((name for package, name in NAMES.items() if package in repo.packages), None)


def _meant(paths: Iterable[str]) -> list[Conformance]:
    """The rows that a changed path asks for, in their order."""
    touched = list(paths)
    return [row for row in conformance_rows() if any(row.glob_of(path) for path in touched)]


def _each(lists: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Each name once, in the order in which it is first asked for."""
    return tuple(dict.fromkeys(name for names in lists for name in names))
