"""Which of the Bridge's own unit tests match a diff: those that its guides name for any change, and those of what it touches.

Upstream moves its tests. A file that is not there is reported with what runs instead, never left out silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from seatrial.model.record import RepoState

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
    ),
}
"""Where tests went that a guide still names."""
SOURCE = "src/megatron/bridge/"
OTHERS = tuple(f"{SOURCE}{name}/" for name in ("recipes", "perf_recipes", "diffusion"))
"""What no RL loop uses."""
UNIT_TESTS = "tests/unit_tests/"
SHOWN = 5


def chosen(repo: RepoState) -> tuple[tuple[str, ...], tuple[str, ...]]:
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
