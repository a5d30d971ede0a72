"""A verl checkout for tests (a copy of tests/data/verl/checkout), with what a trial on GPUs needs beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import seatrial
from seatrial.core.loop import Context, Phase, read_tables
from seatrial.core.records import RepoState
from seatrial.core.specs import Level
from seatrial.loops.verl import gpu_side, verl_checkout
from seatrial.loops.verl import gpu_side as wrapper
from seatrial.loops.verl.gpu_runs import phases
from seatrial.loops.verl.verl_checkout import python_path
from tests.loops.tiny_model import make_model

SOURCE = Path(__file__).parents[1] / "data" / "verl" / "checkout"
PYTHON = Path(sys.executable).parent / "python3"
LADDER = read_tables(Path(wrapper.__file__).parent / "levels.toml", "level", Level, beside=("concern", "surface"))


@dataclass(frozen=True)
class Bench:
    """Everything that a trial would have prepared."""

    root: Path

    @property
    def verl(self) -> Path:
        return self.root / "verl_checkout"

    @property
    def bridge(self) -> Path:
        return self.root / "bridge"

    def context(self, *arguments: str, levels: tuple[str, ...] = ("smoke",), python: Path = PYTHON, **options: str) -> Context:
        """A trial of a Bridge checkout that drives the verl checkout."""
        given = {"verl": str(self.verl), "train_files": str(self.root / "train.parquet"), "val_files": str(self.root / "test.parquet")}
        return Context(
            run_dir=self.root / "run",
            python=python,
            model=str(self.root / "model"),
            levels=levels,
            changes=(
                repo("bridge", self.bridge, self.bridge / "src", ("megatron.bridge",)),
                repo("verl", self.verl, self.verl, ("verl",), companion=True),
            ),
            arguments=arguments,
            options={**given, **options},
        )

    def level_directory(self, level: str) -> Path:
        return self.root / "run" / "levels" / level


def repo(name: str, path: Path, root: Path, packages: tuple[str, ...], companion: bool = False) -> RepoState:
    """A clean checkout."""
    return RepoState(
        name=name, path=str(path), commit="0" * 40, branch="main", packages=packages, import_root=str(root), companion=companion
    )


def make_bench(root: Path) -> Bench:
    """Checkouts, model, data and instruments below `root`."""
    bench = Bench(root)
    for file in SOURCE.rglob("*"):
        if file.is_file():
            place = bench.verl / str(file.relative_to(SOURCE)).removesuffix(".txt")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read_bytes())
    for place in (bench.bridge / "src" / "megatron" / "bridge", bench.bridge / "3rdparty" / "Megatron-LM" / "megatron" / "core"):
        place.mkdir(parents=True)
        (place / "__init__.py").write_text("")
    for name in ("train.parquet", "test.parquet"):
        (root / name).write_bytes(b"PAR1 rows PAR1")
    make_model(root / "model")
    (root / "run").mkdir()
    return bench


def on_gpus(root: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench on a machine with eight GPUs, on which any configuration composes."""
    smi = root / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text('#!/bin/sh\nfor n in 0 1 2 3 4 5 6 7; do echo "GPU $n: stand-in"; done\n')
    smi.chmod(0o755)
    for name, value in {"PATH": f"{smi.parent}:/usr/bin:/bin", "HF_HOME": str(root / "hf"), "HOME": str(root / "home")}.items():
        monkeypatch.setenv(name, value)
    for name in ("VERL_USE_EXTERNAL_MODULES", "RAY_ADDRESS", "HF_HUB_CACHE", "UV_PROJECT_ENVIRONMENT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(verl_checkout, "OWN", root / "seatrial")  # the loop's Python is that of the tests
    monkeypatch.setattr(verl_checkout, "SHADOW", root / "workspace" / "Megatron-LM")
    monkeypatch.setattr(gpu_side, "compose", lambda *_: [])
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    return make_bench(root)


def _stage(target: Path) -> None:
    """What `trial.staging` copies into a run directory."""
    if target.exists():
        return
    source = Path(seatrial.__file__).parent
    shutil.copytree(source / "instruments", target / "seatrial" / "instruments", ignore=shutil.ignore_patterns("__pycache__"))
    (target / "seatrial" / "__init__.py").touch()


def level(name: str) -> Level:
    """One level of the ladder."""
    return next(item for item in LADDER if item.name == name)


def run_phase(phase: Phase, context: Context, directory: Path, **variables: str) -> int:
    """Run a phase as the trial engine does; its log is at the place where that would put it."""
    _stage(context.run_dir / "instruments")
    (directory / phase.name).mkdir(parents=True, exist_ok=True)
    ours = {"PYTHONPATH": python_path(context), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("COV_", "PYTEST"))}
    with (directory / phase.name / "run.log").open("wb") as log:
        environment: dict[str, Any] = {**kept, **phase.env, **ours, **variables}
        done = subprocess.run(phase.argv, env=environment, cwd=phase.cwd, stdout=log, stderr=subprocess.STDOUT, timeout=200, check=False)
    return done.returncode


def run_level(bench: Bench, name: str, context: Context) -> Path:
    """All phases of a level; each must end with 0."""
    directory = bench.level_directory(name)
    for phase in phases(level(name), context, directory):
        code = run_phase(phase, context, directory)
        assert code == 0, (directory / phase.name / "run.log").read_text()
    return directory
