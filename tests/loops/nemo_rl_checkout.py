"""A NeMo-RL checkout for tests (a copy of tests/data/nemo_rl/checkout), with what a trial on GPUs needs beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from seatrial.core.loop import Context
from seatrial.core.records import RepoState
from seatrial.loops.nemo_rl import nemo_checkout
from seatrial.loops.nemo_rl.nemo_checkout import read_source
from tests.loops.tiny_model import make_model

SOURCE = Path(__file__).parents[1] / "data" / "nemo_rl" / "checkout"
PYTHON = Path(sys.executable)
OMEGACONF = """
class OmegaConf:
    @staticmethod
    def to_container(config, resolve):
        return config
"""
"""The loader of the fixture makes plain dictionaries; of omegaconf it leaves nothing to do."""
REAL = os.environ.get("SEATRIAL_NEMO_RL_CHECKOUT")
"""A real checkout."""


@dataclass(frozen=True)
class Bench:
    """Everything that a trial would have prepared."""

    root: Path

    @property
    def nemo_rl(self) -> Path:
        return self.root / "nemo_rl_checkout"

    @property
    def bridge(self) -> Path:
        return self.root / "bridge"

    @property
    def site(self) -> Path:
        """Goes on PYTHONPATH in place of omegaconf."""
        return self.root / "site"

    def context(self, *arguments: str, levels: tuple[str, ...] = ("smoke",), model: str = "Qwen/Qwen2.5-0.5B", **options: str) -> Context:
        """A trial of a Bridge checkout that drives the NeMo-RL checkout."""
        return Context(
            run_dir=self.root / "run",
            python=PYTHON,
            model=model,
            levels=levels,
            changes=(
                repo("bridge", self.bridge, self.bridge / "src", ("megatron.bridge",)),
                repo("nemo-rl", self.nemo_rl, self.nemo_rl, ("nemo_rl",), companion=True),
            ),
            arguments=arguments,
            options={"nemo_rl": str(self.nemo_rl), **options},
        )

    def level_directory(self, level: str) -> Path:
        return self.root / "run" / "levels" / level


def repo(name: str, path: Path, root: Path, packages: tuple[str, ...], companion: bool = False) -> RepoState:
    """A clean checkout."""
    return RepoState(
        name=name, path=str(path), commit="0" * 40, branch="main", packages=packages, import_root=str(root), companion=companion
    )


def make_bridge(place: Path) -> None:
    """A Bridge checkout with its Megatron-LM."""
    for package in (place / nemo_checkout.BRIDGE, place / nemo_checkout.CORE / "megatron" / "core"):
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
    (place / nemo_checkout.BRIDGE / "provider.py").write_text("NAME = 'provider'\n")


def make_bench(root: Path) -> Bench:
    """Checkouts, a model and the stand-in for omegaconf below `root`."""
    bench = Bench(root)
    for file in SOURCE.rglob("*"):
        if file.is_file():
            place = bench.nemo_rl / str(file.relative_to(SOURCE)).removesuffix(".txt")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read_bytes())
    make_bridge(bench.nemo_rl / nemo_checkout.VENDORED)
    make_bridge(bench.bridge)
    for name, text in {"__init__.py": OMEGACONF, "errors.py": "class OmegaConfBaseException(Exception): ...\n"}.items():
        (bench.site / "omegaconf" / name).parent.mkdir(parents=True, exist_ok=True)
        (bench.site / "omegaconf" / name).write_text(text)
    make_model(root / "model")
    (root / "run").mkdir()
    read_source.cache_clear()
    return bench


def as_repository(place: Path) -> None:
    """Commit everything there; the vendored Bridge becomes a repository of its own, as a submodule is."""
    for each in (place / nemo_checkout.VENDORED, place):
        if each.is_dir():
            who = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
            for words in (("init", "-q", "-b", "main"), ("add", "-A"), ("commit", "-q", "-m", "all")):
                subprocess.run(["git", "-c", "advice.addEmbeddedRepo=false", *who, *words], cwd=each, check=True, timeout=60)


def on_gpus(root: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench on a machine with two GPUs and uv, where the stand-in for omegaconf is installed."""
    smi = 'for n in 0 1; do echo "GPU $n: stand-in"; done'
    for name, text in {"nvidia-smi": smi, "uv": "exit 0"}.items():
        program = root / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    path = os.pathsep.join((str(root / "bin"), os.environ.get("PATH") or os.defpath))
    values = {"PATH": path, "HF_HOME": str(root / "hf"), "HOME": str(root / "home")}
    for name, value in {**values, "TORCH_CUDA_ARCH_LIST": "9.0"}.items():
        monkeypatch.setenv(name, value)
    unset = ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "UV_PROJECT_ENVIRONMENT", "NEMO_RL_VENV_DIR")
    for name in (*unset, "NRL_FORCE_REBUILD_VENVS", "NRL_IGNORE_TP_ACCURACY_CHECK", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    bench = make_bench(root)
    ours = nemo_checkout.python_path
    monkeypatch.setattr(nemo_checkout, "python_path", lambda context: f"{ours(context)}:{bench.site}")
    return bench
