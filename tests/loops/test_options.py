"""Options of loops: known names, known values, and errors that say what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.core.loop import Option, read_options
from seatrial.loops import get_loop

KNOWN = (
    Option("device", "where", "choice", "gpu", ("gpu", "cpu")),
    Option("gpus", "how many", "number", "8"),
    Option("steps", "how long", "number", "20", (), 20, 100),
)


def test_a_known_option_passes_and_an_unknown_one_names_the_nearest() -> None:
    assert read_options("Loop", KNOWN, {"gpus": "1"}) == {"gpus": "1"}
    with pytest.raises(UserError, match=r"options\.gpu: Loop has no such option; known: device, gpus, steps") as caught:
        read_options("Loop", KNOWN, {"gpu": "1"})
    assert caught.value.fix == "use gpus"


def test_a_loop_without_options_refuses_any() -> None:
    with pytest.raises(UserError, match=r"options\.device: Loop has no such option; it takes none"):
        read_options("Loop", (), {"device": "cpu"})


def test_a_loop_with_one_keeps_it_as_a_path_and_refuses_others() -> None:
    loop = get_loop("trl")
    assert loop.configured({}).chosen == {}
    assert loop.configured({"vllm_python": "/a/../b/python"}).chosen == {"vllm_python": "/a/../b/python"}
    assert loop.configured({"vllm_python": "bin/python"}).chosen == {"vllm_python": str(Path("bin/python").absolute())}
    assert loop.chosen == {}, "the loop itself is not changed"
    with pytest.raises(UserError, match=r"options\.device: TRL has no such option; known: vllm_python"):
        loop.configured({"device": "cpu"})


def test_a_choice_is_one_of_the_known_values() -> None:
    assert get_loop("verl").option("device") == "gpu"
    assert get_loop("verl").configured({"device": "cpu"}).option("device") == "cpu"
    with pytest.raises(UserError, match=r"options\.device = 'tpu': not one of gpu, cpu"):
        read_options("Loop", KNOWN, {"device": "tpu"})


def test_numbers_have_limits() -> None:
    assert read_options("Loop", KNOWN, {"gpus": "4", "steps": "20"}) == {"gpus": "4", "steps": "20"}
    for text in ("0", "-1", "1.5", "", "x", "١"):
        with pytest.raises(UserError, match=r"options\.gpus = .*: not a whole number of at least 1") as caught:
            read_options("Loop", KNOWN, {"gpus": text})
        assert caught.value.fix == "use 8"
    with pytest.raises(UserError, match="not a whole number from 20 to 100"):
        read_options("Loop", KNOWN, {"steps": "101"})


def test_an_option_describes_itself() -> None:
    assert [option.describe() for option in KNOWN] == [
        "device=gpu|cpu (default: gpu)  where",
        "gpus=1.. (default: 8)  how many",
        "steps=20..100 (default: 20)  how long",
    ]
