"""Recorded runs of level 3 with TRL's own generation, against other settings (see `trl_knob_cases`)."""

from __future__ import annotations

from seatrial.instruments.trl import trl_settings
from tests.real.trl_knob_cases import OTHER, recorded, unseen


def case_settings_of_trls_own_generation_diverge_as_others() -> None:
    """Of level 3's runs with TRL's own sync: what vLLM was asked for, and the correction for its log-probabilities."""
    served = {name for name in OTHER if "vllm" in name}
    sampling = {name for name, knob in trl_settings.KNOBS.items() if knob.stage == "sampling"}
    tried: set[str] = set()
    for arguments, words in recorded():
        place, done = arguments.record_dir, set(OTHER) - served - sampling
        wrong = unseen(place.name, arguments, place, words, done)
        assert wrong == [], wrong
        tried |= done
    assert tried == set(OTHER), sorted(set(OTHER) - tried)
