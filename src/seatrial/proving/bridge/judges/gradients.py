"""The judge of compared gradients: every tensor has transformers' own. The rungs policy, tp, pp, ep and sp have such facts.

What is missing, is no number, or shows no gradient at all is a missed check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seatrial.loops.proof import proof
from seatrial.model.record import CheckResult
from seatrial.model.verdict import Boundary
from seatrial.probes.bridge.gradients import NOISE, SHARE, allowed
from seatrial.proving.bridge.judges import read

NOISY = 1e-2
"""Of the largest gradient: noise above this is a defect itself and excuses nothing."""
SHOWN = 3


def judge_gradients(row: Mapping[str, Any], who: str = "") -> list[CheckResult]:
    """The checks of one comparison; `who` says whose, with a colon."""
    worst, tensors, largest = row.get("worst"), row.get("tensors"), read.number(row.get("largest")) or 0.0
    first = worst.get("first") if isinstance(worst, dict) else None
    found = [item for item in first if isinstance(item, dict)] if isinstance(first, list) else []
    whole = isinstance(worst, dict) and isinstance(first, list) and len(found) == len(first) > 0 and worst.get("count") == tensors
    wrong = [item for item in found if not _same(item, largest)]
    text = [f"{item.get('name')} (apart by {item.get('apart')}, largest gradient {item.get('size')})" for item in wrong[:SHOWN]]
    value = f"{found[0].get('apart')} of {found[0].get('size')}" if whole else "no facts"
    limit = f"<= {NOISE:g} x noise + {SHARE:g} x largest"
    return [
        proof(f"{who}there are gradients", largest > 0, row.get("largest", "no facts"), Boundary.PROVIDER, "> 0"),
        proof(f"{who}every gradient is transformers'", whole and not wrong, value, Boundary.PROVIDER, limit, "; ".join(text)),
    ]


def _same(item: Mapping[str, Any], largest: float) -> bool:
    apart, size, noise = (read.number(item.get(key)) for key in ("apart", "size", "noise"))
    if apart is None or size is None or noise is None:
        return False
    return min(apart, size, noise) >= 0 and noise <= NOISY * largest and apart <= allowed(size, noise, largest)
