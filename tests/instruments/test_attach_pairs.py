"""Whether what generators received is what policies sent: everything that must not pass."""

from __future__ import annotations

from typing import Any

import pytest

from seatrial.instruments.refit.agreement import problems


def row(side: str, version: int, hashes: dict[str, str], who: str = "", **more: Any) -> dict[str, Any]:
    """A row of hashes."""
    made = {"fact": "hashes", "side": side, "version": version, "hashes": hashes, "process": who or side, "incarnation": who or side}
    return {**made, "problems": [], **more}


def attached(side: str, **more: Any) -> dict[str, Any]:
    """What was found of one side."""
    made = {"fact": "attached", "side": side, "module": "m", "owner": "C", "owner_found": True, "found": ["f"], "missing": []}
    return {**made, "optional": False, **more}


BOTH = [attached("generator"), attached("policy")]
A, B = {"q": "1", "k": "2"}, {"q": "3", "k": "4"}
CLEAN = [*BOTH, row("sent", 1, A), row("received", 1, A), row("sent", 2, B), row("received", 2, B)]


def test_a_clean_run_has_none() -> None:
    assert problems(CLEAN) == []


def test_parts_of_several_senders_make_the_whole() -> None:
    parts = [row("sent", 1, {"q": "1"}, "one"), row("sent", 1, {"k": "2"}, "two")]
    assert problems([*BOTH, *parts, row("received", 1, A)]) == []


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "nothing was sent"),
        ([*BOTH, row("sent", 1, A)], "nothing was received"),
        ([*BOTH, row("received", 1, A)], "nothing was sent"),
        ([*CLEAN[:4], row("sent", 2, B), row("received", 2, A)], "2 of 2 names otherwise than sent: q, k"),
        ([*CLEAN[:5]], "generator received: refits [1], although 2 were sent"),
        ([*CLEAN, row("received", 3, B)], "refit 3: received by received got 2 of 2 names"),
        ([*CLEAN, row("received", 2, B)], "refits [1, 2, 2], although 2 were sent"),
        ([*CLEAN, row("received", 1, B, "again")], "received by again got 2 of 2 names otherwise than sent"),
        ([*CLEAN, row("sent", 2, A, "other")], "refit 2: senders disagree on q"),
        ([*BOTH, row("sent", 1, A), row("received", 1, {"q": "1"})], "1 names were sent and reached no generator: k"),
        ([*CLEAN, row("relayed", 2, A)], "relayed by relayed got 2 of 2 names otherwise than sent"),
        ([*BOTH, row("relayed", 1, A), row("received", 1, A)], "nothing was sent"),
        ([*CLEAN, {"fact": "probe_error", "where": "here", "error": "E: x"}], "the probe met an error in here: E: x"),
        ([*CLEAN[2:], attached("policy")], "no process has a generator"),
        ([*CLEAN, attached("policy", found=[], missing=["f", "g"])], "m: C has no f, g in this version"),
        ([*CLEAN, attached("policy", found=[], owner_found=False)], "m: C is not there in this version"),
        ([*CLEAN[:-1], row("received", 2, B, problems=["f returned False"])], "received by received: f returned False"),
        ([*CLEAN, {"fact": "map", "replica": "0", "restored": False}], "map of 0: the weights were not restored"),
        ([*CLEAN, {"fact": "map", "replica": "0", "restored": True, "misplaced": {"qkv": "slots"}}], "map of 0: qkv: slots"),
    ],
)
def test_what_is_not_proven_is_said(rows: list[dict[str, Any]], said: str) -> None:
    assert any(said in text for text in problems(rows)), problems(rows)


def test_a_map_that_was_learned_again_needs_a_coverage_of_its_own() -> None:
    learned, covered = {"fact": "map", "replica": "0", "restored": True}, {"fact": "coverage", "replica": "0"}
    said = "map of 0: learned again, and no refit after that shows the coverage"
    assert problems([*CLEAN, learned, covered, learned]) == [said]
    assert problems([*CLEAN, learned, covered, learned, {**covered, "replica": "1"}]) == [said]
    assert problems([*CLEAN, learned, covered, covered, learned, covered]) == []


def test_what_upstream_may_lack_is_no_problem() -> None:
    assert problems([*CLEAN, attached("generator", found=[], missing=["f"], optional=True)]) == []
