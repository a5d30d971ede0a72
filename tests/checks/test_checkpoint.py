"""Torn weights are told by their file before an engine stumbles over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.probes.probe_process import require_weights
from tests.probes.tiny_weights import weights


def test_whole_weights_are_fine(tmp_path: Path) -> None:
    require_weights(weights(tmp_path / "a.safetensors"), "--weights X")


@pytest.mark.parametrize(("cut", "said"), [(1, "torn: 7 bytes of weights"), (9, "torn"), (10**6, "not a safetensors file")])
def test_a_torn_file_is_named(tmp_path: Path, cut: int, said: str) -> None:
    weights(tmp_path / "a.safetensors")
    torn = tmp_path / "b.safetensors"
    weights(torn, 0)
    torn.write_bytes(torn.read_bytes()[: max(0, torn.stat().st_size - cut)])
    with pytest.raises(UserError, match=said) as caught:
        require_weights(tmp_path, "--weights X")
    assert str(torn) in caught.value.message


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--weights X: no weights"):
        require_weights(tmp_path, "--weights X")


def test_another_format(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a safetensors file"):
        require_weights(weights(tmp_path / "a.safetensors", header=b"x" * 105), "--weights X")
