"""Faults between a policy and what it exports: wrong weights that arrive exactly as they were sent.

Every transport and every version is right then; only a comparison with the policy's own bits can see it. `token_mult_prob_error`
mostly stays below 1.05 with them (benchmarks/h200.md), so the usual limit lets them pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Export = dict[str, Any]
NO_SUCH_FAULT = "this model cannot have the fault"


def _named(export: Mapping[str, Any], pattern: str) -> str:
    """The first name that matches; a model without one cannot have this fault."""
    found = next((name for name in export if re.search(pattern, name)), None)
    if found is None:
        raise ValueError(f"no exported name matches {pattern!r}: {NO_SUCH_FAULT}")
    return found


def _gate_up_swapped(export: Export, _: Export) -> Export:
    gate = _named(export, r"gate_proj\.weight$")
    up = gate.replace("gate_proj", "up_proj")
    return {**export, gate: export[up].clone(), up: export[gate].clone()}


def _final_norm_reset(export: Export, _: Export) -> Export:
    name = _named(export, r"^model\.norm\.weight$")
    return {**export, name: export[name] * 0 + 1}


def _layer_partly_frozen(export: Export, first: Export) -> Export:
    frozen = [name for name in export if ".layers.0." in name and "o_proj" in name]
    _named(dict.fromkeys(frozen), "weight")
    return {**export, **{name: first[name] for name in frozen}}


def _q_rows_reversed(export: Export, _: Export) -> Export:
    name = _named(export, r"q_proj\.weight$")
    return {**export, name: export[name].flip(0).contiguous()}


def _k_bias_zeroed(export: Export, _: Export) -> Export:
    name = _named(export, r"k_proj\.bias$")
    return {**export, name: export[name] * 0}


FAULTS: dict[str, tuple[str, Callable[[Export, Export], Export]]] = {
    "gate-up-swapped": ("gate and up of one layer change places on export", _gate_up_swapped),
    "final-norm-reset": ("the final norm is exported as ones", _final_norm_reset),
    "layer-partly-frozen": ("layer 0 keeps exporting some of its first weights", _layer_partly_frozen),
    "q-rows-reversed": ("the rows of one query projection are exported in reverse", _q_rows_reversed),
    "k-bias-zeroed": ("one key bias is exported as zeros", _k_bias_zeroed),
}


def broken(fault: str | None, export: Export, first: Export) -> Export:
    """The export with a fault of this module in it; `first` is what was exported at the start. Other faults change nothing."""
    return FAULTS[fault][1](export, first) if fault in FAULTS else export
