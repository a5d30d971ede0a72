"""Words for the bit comparison of a level with its base."""

from __future__ import annotations

from seatrial.model.record import BitComparison, BitDifference


def difference_words(found: BitDifference) -> str:
    """Where two runs first differ: `first differs at step 3, stage reward, in rewards: aa, on the base bb`."""
    place = [f"step {found.step}"] if found.step is not None else []
    place += [f"stage {found.stage}"] if found.stage else []
    place += [f"phase {found.phase}"] if found.phase not in ("run", ".") else []
    where = f" at {', '.join(place)}" if place else ""
    return f"first differs{where}, in {found.name}: {_short(found.found)}, on the base {_short(found.expected)}"


def bit_words(found: BitComparison) -> str:
    """One comparison in one line."""
    alone = "; the metrics alone were compared" if found.sources == ("metrics",) else ""
    if found.outcome == "identical":
        return f"identical to the base ({found.compared} values{alone})"
    if found.difference is None:
        return f"not compared bit by bit: {found.reason}"
    return f"{difference_words(found.difference)}{alone}"


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"
