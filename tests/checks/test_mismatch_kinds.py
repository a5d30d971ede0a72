"""What a wrong tensor looks like, by hashes; and that the judge compares hashes itself instead of believing a run's own word."""

from __future__ import annotations

import pytest

from seatrial.checks.refit_judge import judge_refit_probe
from seatrial.checks.refit_weights import SeenWeights, differing_tensors, looks_like
from seatrial.core.verdict import Verdict
from tests.checks.run_facts import DRIVER, NAMES, clean, facts, hashes, of

EMBED, Q0, Q1, Q2, NORM = NAMES
SENT = {version: hashes(version) for version in (1, 2, 3)}


def held(**instead: str) -> SeenWeights:
    """Version 3 with some hashes replaced; keys are the variables above."""
    return SeenWeights({**hashes(3), **{globals()[key]: value for key, value in instead.items()}})


@pytest.mark.parametrize(
    ("name", "seen", "expected"),
    [
        (Q0, held(Q0=f"{Q0}@2"), "stale (equals version 2)"),
        (Q0, held(Q0=f"{Q0}@1"), "stale (equals version 1)"),
        (Q0, held(Q0=f"{Q2}@3", Q2=f"{Q0}@3"), f"swapped with {Q2}"),
        (Q0, held(Q0=f"{Q1}@3", Q1=f"{Q0}@3"), f"swapped with {Q1}"),
        (Q1, held(Q1=f"{Q0}@3"), f"shifted layer (holds {Q0})"),
        (Q1, held(Q1=f"{Q2}@3"), f"shifted layer (holds {Q2})"),
        (Q2, held(Q2=f"{Q0}@3"), f"other name (holds {Q0})"),
        (Q0, held(Q0=f"{EMBED}@3"), f"other name (holds {EMBED})"),
        (Q0, held(Q0="something else"), ""),
        (Q0, held(Q0=f"{Q1}@2"), ""),
        (Q0, SeenWeights({**hashes(3), Q0: "x"}, zeros=frozenset({Q0})), "zero"),
        (Q0, SeenWeights({**hashes(3), Q0: "x"}, nans={Q0: 7}), "NaN (7 elements)"),
        (Q0, SeenWeights({name: value for name, value in hashes(3).items() if name != Q0}), "not there"),
    ],
)
def test_kinds(name: str, seen: SeenWeights, expected: str) -> None:
    assert looks_like(name, 3, SENT, seen) == expected


def test_nothing_is_claimed_when_two_explanations_fit() -> None:
    same = {version: {**hashes(version), Q1: f"{Q0}@{version}"} for version in SENT}
    assert looks_like(Q2, 3, same, held(Q2=f"{Q0}@3")) == "", "two names have these bits"
    both = {**SENT, 2: {**hashes(2), Q2: f"{Q0}@3"}}
    assert looks_like(Q2, 3, both, held(Q2=f"{Q0}@3")) == "", "an older version and another name have these bits"


def test_names_on_one_side_only_differ() -> None:
    assert differing_tensors({"a": "1", "b": "2"}, {"a": "1", "c": "2"}) == ["b", "c"]


def test_the_judge_compares_hashes_itself() -> None:
    rows = clean()
    of(rows, "hashes", side="live", replica="1", version=3)[0]["hashes"] = {**hashes(3), Q1: f"{Q1}@2"}
    judged = judge_refit_probe(facts(rows), DRIVER)
    assert judged.verdict is Verdict.FAIL
    (wrong,) = judged.wrong
    assert (wrong.name, wrong.layer, wrong.replica, wrong.step, wrong.version) == (Q1, "model.layers.1", "1", 2, 3)
    assert wrong.looks == "stale (equals version 2)"
    assert f"{Q1} (layer model.layers.1) on replica 1 at step 2, version 3: stale (equals version 2)" in judged.reason


def test_a_mismatch_without_hashes_keeps_its_name() -> None:
    rows = [row for row in clean() if row["fact"] != "hashes"]
    of(rows, "refit", replica="0", index=2)[0]["wrong_names"] = [Q0]
    judged = judge_refit_probe(facts(rows), DRIVER)
    assert [(wrong.name, wrong.looks) for wrong in judged.wrong] == [(Q0, "")]
    assert any("not its kind" in text for text in judged.limitations)


@pytest.mark.parametrize(("mark", "words"), [("torn-12ab", "copies of a tied weight differ"), ("output-off-0.8", "output")])
def test_what_a_driver_marks_is_told_with_the_runtime_tensor(mark: str, words: str) -> None:
    rows = clean()
    of(rows, "hashes", side="live", replica="1", version=3)[0]["hashes"] = {**hashes(3), EMBED: mark}
    of(rows, "refit", replica="1", index=2)[0].update(wrong_names=[EMBED], wrong={EMBED: {"runtime": "lm_head.weight", "count": 3}})
    judged = judge_refit_probe(facts(rows), DRIVER)
    assert judged.verdict is Verdict.FAIL
    assert words in judged.wrong[0].looks
    assert "held as lm_head.weight, on replica 1" in judged.reason
