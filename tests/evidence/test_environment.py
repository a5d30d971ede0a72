"""The environment of a loop, asked from its own interpreter."""

from __future__ import annotations

import resource
import sys
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import pytest

from seatrial.core.errors import BlockedError
from seatrial.core.records import EnvironmentRecord
from seatrial.core.verdict import Boundary
from seatrial.runtime.command import NoAnswerError
from seatrial.trial.staging import environment_differences, environment_record, fingerprint, gpu_names
from tests.evidence.conftest import put


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def record(**changes: object) -> EnvironmentRecord:
    plain = EnvironmentRecord(python="/p", python_version="3.11.7", packages={"torch": "2.1"}, fingerprint="f", platform="Linux")
    return plain.model_copy(update=changes)


def test_this_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put(tmp_path, {"json.py": "raise SystemExit(3)", "posing-9.dist-info/METADATA": "Name: posing\nVersion: 9\n"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = environment_record(Path(sys.executable), "abc")
    assert found.python_version == ".".join(map(str, sys.version_info[:3]))
    assert found.packages["pydantic"] == version("pydantic")
    assert found.packages["typing-extensions"] == version("typing_extensions")
    assert "posing" not in found.packages
    assert found.lock == "abc"
    assert found.platform.startswith("Linux")
    assert found.cpu_count >= 1
    assert found.fingerprint == fingerprint(found.python_version, found.packages)
    assert list(found.packages) == sorted(found.packages)


def test_a_hundred_packages_are_cheap_and_the_first_copy_counts(tmp_path: Path) -> None:
    site = tmp_path / "site"
    put(site, {f"Pkg_{n}.x-1.{n}.dist-info/METADATA": f"Name: Pkg_{n}.x\nVersion: 1.{n}\n" + "text\n" * 500 for n in range(100)})
    put(site, {"old.egg-info/PKG-INFO": "Metadata-Version: 1.0\nName: Old_Style\nVersion: 7\n", "torn-1.dist-info/METADATA": ""})
    put(tmp_path / "second", {"pkg_0.x-99.dist-info/METADATA": "Name: pkg-0-x\nVersion: 99\n"})
    python = script(
        tmp_path / "python", f"shift 3; exec {sys.executable} -I -S -c \"import sys; sys.path += ['{site}', '{tmp_path}/second']\n$1\""
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = environment_record(python)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.4
    assert len(found.packages) == 102
    assert found.packages["pkg-0-x"] == "1.0"
    assert found.packages["pkg-99-x"] == "1.99"
    assert found.packages["old-style"] == "7"
    assert found.packages["torn"] == "1"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo 'ModuleNotFoundError: no encodings' >&2; exit 1", "exit code 1.*no encodings"),
        ("exit 0", "not a Python interpreter"),
        ("echo hello", "not a Python interpreter"),
        ('echo \'{"version": "3"}\'', "not a Python interpreter"),
        ('echo \'{"version": "3", "platform": "x", "packages": []}\'', "not a Python interpreter"),
        ('echo \'{"version": "3", "platform": "x", "packages": {"a": null}}\'', "without a name or version"),
    ],
)
def test_an_interpreter_that_cannot_be_asked_blocks(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(BlockedError, match=message) as error:
        environment_record(script(tmp_path / "python", body))
    assert error.value.boundary is Boundary.ENVIRONMENT
    assert str(tmp_path / "python") in error.value.message
    assert "seatrial env build" in error.value.fix


def test_an_absent_or_silent_interpreter_blocks(tmp_path: Path) -> None:
    with pytest.raises(BlockedError, match="cannot be run: No such file"):
        environment_record(tmp_path / "python")
    (tmp_path / "python").touch()
    with pytest.raises(BlockedError, match="cannot be run"):
        environment_record(tmp_path / "python")
    with (
        patch("seatrial.trial.staging.run_command", side_effect=NoAnswerError("late", late=True)),
        pytest.raises(BlockedError, match="does not answer"),
    ):
        environment_record(tmp_path / "python")


def test_the_fingerprint_knows_versions_not_order() -> None:
    assert fingerprint("3.11", {"a": "1", "b": "2"}) == fingerprint("3.11", {"b": "2", "a": "1"})
    others = [fingerprint("3.12", {"a": "1", "b": "2"}), fingerprint("3.11", {"a": "1"}), fingerprint("3.11", {"a": "1", "b": "3"})]
    assert fingerprint("3.11", {"a": "1", "b": "2"}) not in others


def test_differences_are_named() -> None:
    new = record(python_version="3.12.0", packages={"torch": "2.2", "vllm": "0.9"}, platform="Other", gpus=("H200",))
    assert environment_differences(record(packages={"torch": "2.1", "peft": "1"}), new) == (
        "python: 3.11.7 -> 3.12.0",
        "platform: Linux -> Other",
        "peft: 1 -> absent",
        "torch: 2.1 -> 2.2",
        "vllm: absent -> 0.9",
        "GPUs: none -> H200",
    )
    assert environment_differences(record(), record(python="/elsewhere")) == ()


def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_names() == ()
    script(tmp_path / "nvidia-smi", "echo NVIDIA H200; echo NVIDIA H200")
    assert gpu_names() == ("NVIDIA H200", "NVIDIA H200")
    script(tmp_path / "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert gpu_names() == ()
