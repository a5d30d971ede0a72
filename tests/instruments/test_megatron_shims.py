"""The table of shims without torch: what is needed is seen in upstream's source, what was dropped says why."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from seatrial.instruments.megatron import import_patches, shims


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shims, "_used", set())
    monkeypatch.setattr(shims, "_dropped", {})


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package on the import path; everything is as before afterwards."""
    folder = tmp_path / "upstream"
    folder.mkdir()
    (folder / "__init__.py").write_text("", encoding="utf-8")
    finders = list(sys.meta_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(import_patches, "_stand_ins", {})
    monkeypatch.setattr(import_patches, "_patches", {})
    yield folder
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "upstream"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("source", "needed"),
    [
        ("import triton\n", True),
        ("import os, triton.language as tl\n", True),
        ("from triton.language import math\n", True),
        ("try:\n    import triton\nexcept ImportError:\n    triton = None\n", False),
        ("def f():\n    import triton\n", False),
        ("import tritonclient\nfrom . import triton\n", False),
    ],
)
def test_only_an_unguarded_import_needs_a_stand_in(source: str, needed: bool) -> None:
    assert shims._unguarded(source, "triton") is needed


def state(name: str) -> tuple[str, str]:
    (row,) = [row for row in shims.report() if row["id"] == name]
    return row["state"], row["note"]


def test_a_stand_in_that_upstream_made_unnecessary_is_dropped_with_a_note(upstream: Path) -> None:
    (upstream / "new.py").write_text("try:\n    import absent\nexcept ImportError:\n    absent = None\n", encoding="utf-8")
    (upstream / "old.py").write_text("import absent\n", encoding="utf-8")
    stand_in = ModuleType("absent")
    for module in ("new", "old"):
        import_patches.supply(f"upstream.{module}", "absent", stand_in, lambda source: shims._needed("triton", "absent", source))
    assert importlib.import_module("upstream.new").absent is None
    assert state("triton") == ("dropped", "upstream imports absent behind a guard now")
    assert importlib.import_module("upstream.old").absent is stand_in
    assert state("triton") == ("used", "")


def test_a_shim_that_nothing_reached_says_so() -> None:
    assert {row["state"] for row in shims.report()} == {"not reached"}
    shims.used("cuda-device")
    shims.dropped("typing-override", "this Python has it")
    assert (state("cuda-device"), state("typing-override")) == (("used", ""), ("dropped", "this Python has it"))


def test_every_shim_names_what_it_stands_for_and_why() -> None:
    assert all(shim.stands_for and shim.reason for shim in shims.TABLE.values())
    assert all(name in shims.TABLE for name in shims._WITHOUT_ENGINE)
