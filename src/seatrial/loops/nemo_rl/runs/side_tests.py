"""Tests that go before the levels: the Bridge's own for what the diff touches, then NeMo-RL's for the surface.

Both repositories move their tests. A file that is not there is reported with what runs instead, never left out silently.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from seatrial.loops import bridge_tests
from seatrial.loops.conformance import conformance
from seatrial.loops.nemo_rl.runs import checkout
from seatrial.model.loop import Context, SideTests
from seatrial.model.record import RepoState

UNITS = (
    "tests/unit/models/megatron/test_megatron_setup.py",
    "tests/unit/models/policy/test_megatron_worker.py",
    "tests/unit/utils/test_weight_transfer.py",
)
CHECKPOINT = ("tests/unit/utils/test_checkpoint.py", "tests/unit/utils/test_native_checkpoint.py")
VLLM = ("tests/unit/models/generation/test_vllm_generation.py", "tests/unit/models/generation/test_vllm_utils.py")
BY_LEVEL = {"lora-checkpoint": CHECKPOINT, "refit": VLLM}
MOVED = {
    "tests/unit/utils/test_weight_transfer.py": (
        "tests/unit/utils/test_weight_transfer_stream.py",
        "tests/unit/utils/test_packed_tensor.py",
    ),
}
"""Where tests went that a guide still names."""
EXTRAS = ("mcore", "vllm")
UV = ("uv", "run", "--group", "test")


def side_tests(context: Context) -> tuple[SideTests, ...]:
    """The Bridge's conformance and tests, when one is under test; then NeMo-RL's. None when they were switched off."""
    if context.options.get("tests") == "off":
        return ()
    bridge = next((repo for repo in context.changes if "megatron.bridge" in repo.packages and not repo.companion), None)
    place = checkout.checkout_of(context)
    made = [_bridge(bridge)] if bridge else []
    return (*conformance(context), *made, *(_units(place, context) if place else []))


def _bridge(repo: RepoState) -> SideTests:
    root = Path(repo.path)
    files, notes = bridge_tests.chosen(repo)
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
    files, notes = bridge_tests.present(place, wanted, MOVED)
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
