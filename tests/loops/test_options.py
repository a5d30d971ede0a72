"""Options of loops: known names, known values, and errors that say what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.loops import get_loop
from seatrial.loops.base_loop import choice_option, int_option, require_known_options


def test_a_known_option_passes_and_an_unknown_one_names_the_nearest() -> None:
    require_known_options("Loop", {"device": "", "gpus": ""}, {"gpus": "1"})
    with pytest.raises(UserError, match=r"options\.gpu: Loop has no such option; known: device, gpus") as caught:
        require_known_options("Loop", {"device": "", "gpus": ""}, {"gpu": "1"})
    assert caught.value.fix == "use gpus"


def test_a_loop_without_options_refuses_any() -> None:
    with pytest.raises(UserError, match=r"options\.device: Loop has no such option; it takes none"):
        require_known_options("Loop", {}, {"device": "cpu"})


def test_a_loop_with_one_keeps_it_as_a_path_and_refuses_others() -> None:
    loop = get_loop("trl")
    assert loop.configured({}).chosen == {}
    assert loop.configured({"vllm_python": "/a/../b/python"}).chosen == {"vllm_python": "/a/../b/python"}
    assert loop.configured({"vllm_python": "bin/python"}).chosen == {"vllm_python": str(Path("bin/python").absolute())}
    assert loop.chosen == {}, "the loop itself is not changed"
    with pytest.raises(UserError, match=r"options\.device: TRL has no such option; known: vllm_python"):
        loop.configured({"device": "cpu"})


def test_the_first_choice_is_the_default() -> None:
    assert choice_option({}, "device", ("gpu", "cpu")) == "gpu"
    assert choice_option({"device": "cpu"}, "device", ("gpu", "cpu")) == "cpu"
    with pytest.raises(UserError, match=r"options\.device = 'tpu': not one of gpu, cpu"):
        choice_option({"device": "tpu"}, "device", ("gpu", "cpu"))


def test_numbers_have_limits() -> None:
    assert (int_option({}, "gpus", 8), int_option({"gpus": "4"}, "gpus", 8)) == (8, 4)
    assert int_option({"steps": "20"}, "steps", 20, 20, 100) == 20
    for text in ("0", "-1", "1.5", "", "x", "١"):
        with pytest.raises(UserError, match=r"options\.gpus = .*: not a whole number of at least 1"):
            int_option({"gpus": text}, "gpus", 8)
    with pytest.raises(UserError, match="not a whole number from 20 to 100"):
        int_option({"steps": "101"}, "steps", 20, 20, 100)
