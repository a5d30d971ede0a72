"""Lock files: what they may contain, and what changes their hash."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.runtime.venvs import LAYERS, read_lock, same_version

ENVIRONMENT_LOCK = Path(__file__).parents[2] / "src" / "seatrial" / "loops"


def lock(tmp_path: Path, text: str, layer: str = "# disk-mb: 10\nbig==1.0\n") -> Path:
    (tmp_path / "layers").mkdir(exist_ok=True)
    (tmp_path / "layers" / "base.lock").write_text(layer)
    path = tmp_path / "environment.lock"
    path.write_text(text)
    return path


def digest(tmp_path: Path, text: str, layer: str = "big==1.0\n") -> str:
    return read_lock(lock(tmp_path, text, layer), tmp_path / "layers").hash()


def test_reads_header_pins_and_layer(tmp_path: Path) -> None:
    text = "# What this is.\n# python: 3.11\n# layer: base\n# disk-mb: 5\n\nOne_Two==1.0+cpu  # why\n# later: a comment\nb==2!1.0.post1\n"
    found = read_lock(lock(tmp_path, text), tmp_path / "layers")
    assert found.python == "3.11"
    assert found.disk_mb == 5
    assert found.pins == {"one-two": "1.0+cpu", "b": "2!1.0.post1"}
    assert found.layer is not None
    assert found.all_pins() == {"big": "1.0", "one-two": "1.0+cpu", "b": "2!1.0.post1"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("numpy", "environment.lock:3: not an exact pin: `numpy`"),
        ("numpy>=2", "not an exact pin"),
        ("numpy==2.*", "not an exact pin"),
        ("numpy==2.0; python_version > '3'", "not an exact pin"),
        ("uvicorn[standard]==1.0", "not an exact pin"),
        ("--index-url https://example.org", "not an exact pin"),
        ("-r other.txt", "not an exact pin"),
        ("./wheel.whl", "not an exact pin"),
        ("ONE==1.0\none==1.0", "environment.lock:4: one is pinned twice"),
        ("big==1.0", "pinned here and in the layer base: big"),
        ("# layr: base", "unknown header key `layr`"),
        ("# layer: base", "`layer` is given twice"),
        ("# disk-mb: many", "`disk-mb` cannot be `many`"),
        ("# requires-python: 3.12", "`requires-python` cannot be `3.12`"),
    ],
)
def test_bad_lines_name_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_lock(lock(tmp_path, f"# python: 3.11\n# layer: base\n{line}\n"), tmp_path / "layers")
    assert message in caught.value.message
    assert caught.value.fix


@pytest.mark.parametrize(
    ("text", "layer", "message"),
    [
        ("a==1\n", "", "does not name the Python version"),
        ("# python: three\n", "", "`python` cannot be"),
        ("# python: 3.11\n# layer: other\n", "", "there is no layer other"),
        ("# python: 3.11\n# layer: base\n", "# python: 3.12\n", "the layer is for Python 3.12"),
        ("# python: 3.11\n# layer: base\n", "# layer: base\n", "a layer cannot have a layer"),
        ("# python: 3.11\n# layer: ../base\n", "", "`layer` cannot be"),
    ],
)
def test_bad_headers(tmp_path: Path, text: str, layer: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_lock(lock(tmp_path, text, layer), tmp_path / "layers")


def test_missing_lock_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.lock"):
        read_lock(tmp_path / "gone.lock")


def test_hash_follows_what_is_installed_only(tmp_path: Path) -> None:
    base = digest(tmp_path, "# python: 3.11\n# layer: base\na==1\nb==2\n")
    assert digest(tmp_path, "# python: 3.11\n# layer: base\n# disk-mb: 7\n# Prose.\nB==2\na==1\n") == base
    others = {
        digest(tmp_path, "# python: 3.12\n# layer: base\na==1\nb==2\n"),
        digest(tmp_path, "# python: 3.11\n# layer: base\na==1\nb==3\n"),
        digest(tmp_path, "# python: 3.11\n# layer: base\na==1\n"),
        digest(tmp_path, "# python: 3.11\na==1\nb==2\n"),
        digest(tmp_path, "# python: 3.11\n# layer: base\na==1\nb==2\n", "big==1.1\n"),
    }
    assert len(others | {base}) == 6


@pytest.mark.parametrize(
    ("pin", "installed", "same"),
    [
        ("2.13.0", "2.13.0+cpu", True),
        ("2.13.0+cpu", "2.13.0", False),
        ("2026.09.0", "2026.9", True),
        ("1.0", "1.0.0", True),
        ("1.10", "1.1", False),
        ("1.0rc1", "1.0", False),
        ("1.0", "None", False),
    ],
)
def test_same_version(pin: str, installed: str, same: bool) -> None:
    assert same_version(pin, installed) is same


def test_every_shipped_lock_is_valid() -> None:
    locks = sorted(ENVIRONMENT_LOCK.glob("*/environment.lock"))
    assert locks
    for path in locks:
        found = read_lock(path)
        assert found.disk_mb > 0
        assert "torch" not in found.pins
    assert (LAYERS / "torch-cpu.lock").is_file()
