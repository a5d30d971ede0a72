"""Tiny wheels and locks, so that environments can be built without a network."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest


def make_wheel(directory: Path, name: str, version: str, requires: str = "", python: str = "") -> None:
    """Write a wheel with one module that knows its version."""
    directory.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (f"Requires-Dist: {requires}\n" if requires else "")
    metadata += f"Requires-Python: {python}\n" if python else ""
    members = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{member},,\n" for member in members) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for member, text in {**members, f"{info}/RECORD": record}.items():
            wheel.writestr(member, text)


def only_local(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip see nothing but the wheels in `directory`."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_COMPILE", "1")
