"""Tests that go before the levels: the Bridge's own for what the diff touches, then NeMo-RL's for the surface.

Both repositories move their tests. A file that is not there is reported with what runs instead, never left out silently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from seatrial.loops.nemo_rl.runs import checkout
from seatrial.model.loop import Context, SideTests
from seatrial.model.record import RepoState

BRIDGE = (
    "tests/unit_tests/models/test_model_provider_mixin.py",
    "tests/unit_tests/models/test_param_mapping.py",
    "tests/unit_tests/training/test_integration.py",
)
"""What the Bridge's own guide names for any change of a provider."""
UNITS = (
    "tests/unit/models/megatron/test_megatron_setup.py",
    "tests/unit/models/policy/test_megatron_worker.py",
    "tests/unit/utils/test_weight_transfer.py",
)
CHECKPOINT = ("tests/unit/utils/test_checkpoint.py", "tests/unit/utils/test_native_checkpoint.py")
VLLM = ("tests/unit/models/generation/test_vllm_generation.py", "tests/unit/models/generation/test_vllm_utils.py")
BY_LEVEL = {"lora-checkpoint": CHECKPOINT, "refit": VLLM}
MOVED = {
    "tests/unit_tests/training/test_integration.py": (
        "tests/unit_tests/peft/test_utils.py",
        "tests/unit_tests/training/utils/test_config_utils.py",
        "tests/unit_tests/training/utils/test_train_utils.py",
    ),
    "tests/unit/utils/test_weight_transfer.py": (
        "tests/unit/utils/test_weight_transfer_stream.py",
        "tests/unit/utils/test_packed_tensor.py",
    ),
}
"""Where tests went that a guide still names."""
EXTRAS = ("mcore", "vllm")
UV = ("uv", "run", "--group", "test")
SOURCE = "src/megatron/bridge/"
OTHERS = tuple(f"{SOURCE}{name}/" for name in ("recipes", "perf_recipes", "diffusion"))
"""What no RL loop uses."""
UNIT_TESTS = "tests/unit_tests/"
SHOWN = 5


def side_tests(context: Context) -> tuple[SideTests, ...]:
    """The Bridge's, when one is under test; then NeMo-RL's. None when they were switched off."""
    if context.options.get("tests") == "off":
        return ()
    bridge = next((repo for repo in context.changes if "megatron.bridge" in repo.packages and not repo.companion), None)
    place = checkout.checkout_of(context)
    made = [_bridge(bridge)] if bridge else []
    return (*made, *(_units(place, context) if place else []))


def _bridge(repo: RepoState) -> SideTests:
    root = Path(repo.path)
    focused, without = _focused(repo)
    files, notes = _present(root, [*BRIDGE, *focused])
    if not repo.changed:
        notes = (*notes, "what the change touches is not known (name --base): only the general tests were chosen")
    if without:
        more = f" and {len(without) - SHOWN} more" if len(without) > SHOWN else ""
        notes = (*notes, f"no unit test was found for {', '.join(without[:SHOWN])}{more}")
    return SideTests(
        key="bridge",
        name="Bridge-side checks",
        argv=("uv", "run", "python", "-m", "pytest", "-q"),
        cwd=root,
        files=files,
        notes=notes,
        skip=None if files else f"{root}: none of the focused tests exists",
    )


def _units(place: Path, context: Context) -> list[SideTests]:
    """One run without extras, and one for each extra that tests are marked with: NeMo-RL leaves those out otherwise."""
    wanted = [*UNITS, *(file for level in context.levels for file in BY_LEVEL.get(level, ()))]
    files, notes = _present(place, wanted)
    marks = {file: _marks(place / file) for file in files}
    common = SideTests(
        key="nemo-rl",
        name="NeMo-RL unit checks",
        argv=(*UV, "pytest", "-q"),
        cwd=place,
        env={"PYTHONPATH": os.pathsep.join((*_tested(context), checkout.python_path(context)))},
        files=tuple(file for file in files if None not in marks[file]),
        notes=notes,
        skip=None if files else f"{place}: none of the unit tests of the surface exists",
    )
    made = [common] if common.files or common.skip else []
    for extra in EXTRAS:
        marked = tuple(file for file in files if extra in marks[file])
        if marked:
            argv = (*UV, "--extra", extra, "pytest", "-q", f"--{extra}-only")
            name = f"NeMo-RL unit checks ({extra})"
            made.append(replace(common, key=f"nemo-rl-{extra}", name=name, argv=argv, files=marked, notes=() if made else notes))
    return made


def _tested(context: Context) -> list[str]:
    """The checkouts under test go first, also one that is copied into the vendored tree: that copy is made later."""
    return [repo.import_root for repo in context.changes if repo.import_root and not repo.companion]


def _marks(file: Path) -> set[str | None]:
    """Extras that tests of a file are marked with; None among them when all of its tests are."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    found: set[str | None] = {extra for extra in EXTRAS if f"mark.{extra}" in text}
    return found | {None} if re.search(rf"^pytestmark = .*mark\.({'|'.join(EXTRAS)})", text, re.MULTILINE) else found


def _present(root: Path, wanted: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The files that exist, and what is missing or has moved."""
    files: list[str] = []
    notes: list[str] = []
    for name in dict.fromkeys(wanted):
        if (root / name).exists():
            files.append(name)
            continue
        instead = [other for other in MOVED.get(name, ()) if (root / other).exists()]
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
