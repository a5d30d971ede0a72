"""The judge of the closed loop: a clean run passes, and every way in which it can be wrong, empty or without a control does not."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.checks.bridge import CHANCE, chance, judge_loop
from seatrial.checks.bridge_rungs import RungJudgement
from seatrial.checks.probe_facts import Row
from seatrial.checks.refit_judge import TRANSPORTS
from seatrial.instruments.bridge.rungs import Missing, Rank
from seatrial.instruments.bridge.rungs_loop import chosen, experts_of, reward

STEPS, PARAMETERS = 20, 3
NAMES = ("model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight", "model.norm.weight")
FIGURES = {"p90": 1.0000002, "p99": 1.0000002, "max_sequence": 1.0000003, "outlier_share": 0.0, "max_abs": 2.5e-7}


def _refit(index: int) -> list[Row]:
    version, moved = index + 1, len(NAMES) if index else 0
    hashes = {name: f"{name}@{version}" for name in NAMES} if index else {name: f"{name}@1" for name in NAMES}
    held = {"replica": "0", "incarnation": "life", "version": version}
    row: Row = {"fact": "refit", "index": index, "step": index, **held, "names": len(NAMES), "bytes": 1280, "elements": 640}
    row |= {"transport": TRANSPORTS[index % 3], "kind": "difference" if index % 3 == 2 else "overwrite", "changed": 640 if moved else 0}
    row |= {"produced": f"root{version}", "consumed": f"root{version}", "wrong_names": [], "refused": None, "committed": True}
    row |= {"methods": {"read": len(NAMES)}}
    row |= {"stale_names": moved, "touched_names": moved, "stale_max_dlogp": 0.5, "fresh_max_dlogp": 2e-7}
    mismatch = {"step": index, "value": 1 + 2.3e-7, "p50": 1 + 1.5e-7, "tokens": 192, "sequences": 16, "nonfinite": 0, **FIGURES}
    return [
        {"fact": "hashes", "side": "sent", "version": version, "step": index, "hashes": hashes},
        {"fact": "hashes", "side": "live", "step": index, **held, "hashes": hashes, "zeros": [], "nans": {}},
        {"fact": "version", **held, "root": f"root{version}"},
        row,
        {"fact": "mismatch", **mismatch},
    ]


def _rows() -> list[Row]:
    """The rows of the refits, as the loop writes them."""
    rows: list[Row] = [{"fact": "map", "replica": "0", "elements": 640, "runs": 3, "duplicates": {}, "restored": True, "misplaced": {}}]
    for index in range(STEPS + 1):
        if index:
            drawn = {"fact": "sample", "version": index, "replica": "0", "incarnation": "life"}
            rows += [{**drawn, "id": f"{index}-{n}"} for n in range(2)]
            rows.append({**rows[-3], "of": "sampled", "sequences": 2})  # of the refit before
        rows += _refit(index)
    lists = {"written": list(NAMES), "recomputed": [], "constant": [], "idle": [], "never_changed": [], "unexported": []}
    maps: Row = {"shared": {}, "derived": {}, "moved": {}, "unconsumed": {}, "unwritten": {}, "opaque": {}, "padding": {}}
    return [*rows, {"fact": "coverage", "replica": "0", "tensors": len(NAMES), **lists, **maps}]


def _flat(seed: int) -> list[list[float]]:
    """Rewards that go nowhere."""
    return [[0.1 + 0.01 * ((step * 7 + seed) % 5), 0.13] for step in range(STEPS)]


def _clean() -> list[Row]:
    """The facts of a good run."""
    setup = {"engine": "transformers", "steps": STEPS, "rate": 0.005, "dtype": "float32", "experts": 0}
    rising = [[0.1 + 0.04 * step, 0.12 + 0.04 * step] for step in range(STEPS)]
    refits: list[Row] = [{"step": STEPS + 1 + n, "changed": 0 if n else 640, "wrong_names": [], "refused": None} for n in range(STEPS + 1)]
    stale = [{"value": 1.8 + step, "p50": 1.7 + step} for step in range(STEPS)]
    return [
        {"fact": "setup", **setup},
        {"fact": "control", "run": "no-refit", "rewards": _flat(1), "still": [0] * STEPS, "mismatch": stale, "touched": []},
        {"fact": "loop", "run": "learn", "rewards": rising, "unmoved": [{"count": 0, "names": []} for _ in range(STEPS)], "rows": _rows()},
        {"fact": "reimport", "parameters": PARAMETERS, "unequal": [], "unequal_count": 0},
        {"fact": "control", "run": "no-learning", "rewards": _flat(2), "still": [PARAMETERS] * STEPS, "refits": refits},
    ]


CLEAN = _clean()


def judged(change: Callable[[dict[str, Any]], None] | None = None, device: str = "cpu") -> RungJudgement:
    """The clean run with one thing changed; its facts are given by name."""
    rows = copy.deepcopy(CLEAN)
    if change is not None:
        change({str(row.get("run", row["fact"])): row for row in rows})
    return judge_loop(rows, device)


def missed(found: RungJudgement) -> dict[str, str]:
    """Messages of what was missed, by name."""
    return {check.name: check.message for check in found.checks if not check.passed}


def of(facts: dict[str, Any], kind: str, **match: Any) -> Row:
    """One row of the refits."""
    found: Row = next(row for row in facts["learn"]["rows"] if row["fact"] == kind and all(row[key] == match[key] for key in match))
    return found


def test_a_clean_run_passes() -> None:
    found = judged()
    assert missed(found) == {}
    assert found.figure == "0.11→0.87"
    assert not [text for text in found.limitations if "step" in text]


def _set(fact: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda facts: facts[fact].update(fields)


def _mismatch(step: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda facts: of(facts, "mismatch", step=step).update(fields)


def _stale_export(facts: dict[str, Any]) -> None:
    """Both sides agree on a tensor that the policy no longer has."""
    for row in facts["learn"]["rows"]:
        if row["fact"] == "hashes":
            row["hashes"][NAMES[1]] = f"{NAMES[1]}@1"
        if row["fact"] == "refit" and row["index"]:
            row.update(stale_names=2, touched_names=2)


def _idle_step(facts: dict[str, Any]) -> None:
    facts["learn"]["unmoved"][4] = {"count": PARAMETERS, "names": ["embedding.word_embeddings.weight"]}


def _wrong_weights(facts: dict[str, Any]) -> None:
    of(facts, "refit", index=3).update(wrong_names=[NAMES[0]], consumed="other")


def _no_base(facts: dict[str, Any]) -> None:
    facts["no-learning"]["refits"][0]["changed"] = 0


def _moving(facts: dict[str, Any]) -> None:
    facts["no-learning"]["refits"][5]["changed"] = 1


RISING = [[0.1 + 0.04 * step, 0.12 + 0.04 * step] for step in range(STEPS)]
WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str, str]] = {
    "no step": (_idle_step, "every step changes the weights of the policy", "word_embeddings"),
    "another export": (
        _set("reimport", unequal=["decoder.layers.0.mlp.linear_fc1.weight"], unequal_count=1),
        "the last export, imported again, is the policy",
        "linear_fc1",
    ),
    "nothing imported": (_set("reimport", parameters=0), "the last export, imported again, is the policy", ""),
    "stale export": (_stale_export, "the export follows the policy", "gate_proj.weight at step 1"),
    "wrong weights": (_wrong_weights, "every refit is proven", NAMES[0]),
    "far apart": (_mismatch(7, value=1.00001, max_sequence=1.0001, max_abs=1e-4), "token_mult_prob_error within", "step 7"),
    "not a number": (_mismatch(7, value="NaN", nonfinite=1), "token_mult_prob_error within", "step 7"),
    "high floor": (_mismatch(0, value=1.001, max_sequence=1.01, max_abs=1e-2), "token_mult_prob_error before any step", "equal weights"),
    "blind limit": (_set("no-refit", mismatch=[{"value": 1.000001, "p50": 1.0}] * STEPS), "the limit sees a missing refit", "step 1"),
    "blind by NaN": (_set("no-refit", mismatch=[{"value": "NaN", "p50": "NaN"}] * STEPS), "the limit sees a missing refit", "step 1"),
    "refitted control": (_set("no-refit", touched=["a.weight"]), "control without refits", "a.weight"),
    "idle control": (_set("no-refit", still=[PARAMETERS] * STEPS), "control without refits", "did not move at step 1"),
    "base not put back": (_no_base, "control with learning rate 0", "base"),
    "control that moved": (_moving, "control with learning rate 0", "refit 5 changed 1"),
    "control that learned": (_set("no-learning", still=[0] * STEPS), "control with learning rate 0", "moved at step 1"),
    "flat reward": (_set("learn", rewards=_flat(0)), "reward rises", ""),
    "falling reward": (_set("learn", rewards=RISING[::-1]), "reward rises", ""),
    "control as good": (_set("no-refit", rewards=RISING), "reward ends above that without refits", ""),
    "rise without learning": (_set("no-learning", rewards=RISING), "reward stays without learning", ""),
    "fall without learning": (_set("no-learning", rewards=RISING[::-1]), "reward stays without learning", ""),
    "unknown dtype": (_set("setup", dtype="float16"), "token_mult_prob_error before any step", ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_missed_and_named(name: str) -> None:
    change, check, said = WRONG[name]
    found = missed(judged(change))
    assert any(known.startswith(check) and said in message for known, message in found.items()), found


NOT_WHOLE: dict[str, Callable[[dict[str, Any]], None]] = {
    "short": _set("learn", rewards=RISING[:-1]),
    "reward that is no number": _set("learn", rewards=[["NaN", 0.5]] * STEPS),
    "empty step": _set("no-refit", rewards=[[]] * STEPS),
    "no steps": _set("setup", steps=0),
    "a row that is no fact": _set("learn", rows=[{"step": 1}]),
    "wrong form": _set("reimport", parameters="three"),
}


@pytest.mark.parametrize("name", NOT_WHOLE)
def test_facts_that_are_not_whole_prove_nothing(name: str) -> None:
    assert list(missed(judged(NOT_WHOLE[name]))) == ["the facts of the closed loop are whole"]


@pytest.mark.parametrize("lost", range(len(CLEAN)))
def test_a_fact_that_is_missing_or_there_twice_is_missed(lost: int) -> None:
    assert missed(judge_loop(CLEAN[:lost] + CLEAN[lost + 1 :], "cpu"))
    assert missed(judge_loop([*CLEAN, CLEAN[lost]], "cpu"))


def test_rows_of_the_refits_that_are_missing_are_missed() -> None:
    def first(facts: dict[str, Any]) -> None:
        facts["learn"]["rows"].remove(of(facts, "mismatch", step=0))

    def one(facts: dict[str, Any]) -> None:
        facts["learn"]["rows"].remove(of(facts, "refit", index=9))

    assert "token_mult_prob_error before any step is rounding" in missed(judged(first))
    assert "every refit is proven" in missed(judged(one))
    assert missed(judged(_set("learn", rows=[])))


def test_an_infinite_control_is_seen_and_a_floor_is_of_its_device() -> None:
    far = [{"value": "Infinity", "p50": "Infinity"}] * STEPS
    assert missed(judged(_set("no-refit", mismatch=far))) == {}
    noisy = {"value": 1 + 5e-5, "p50": 1 + 5e-5, "p90": 1 + 6e-5, "p99": 1 + 6e-5, "max_sequence": 1 + 6e-5, "max_abs": 1e-4}

    def cuda(facts: dict[str, Any]) -> None:
        for row in facts["learn"]["rows"]:
            if row["fact"] == "mismatch":
                row.update(noisy)

    assert missed(judged(cuda, "cuda")) == {}
    assert missed(judged(cuda, "cpu"))


def test_experts_are_judged_by_their_median_and_what_is_not_shown_is_said() -> None:
    def outlier(facts: dict[str, Any]) -> None:
        facts["setup"].update(experts=4)
        facts["learn"]["unmoved"][2] = {"count": 1, "names": ["experts.3"]}
        of(facts, "mismatch", step=9).update(value=1.003, max_sequence=1.04, max_abs=0.4, p99=1.04)

    found = judged(outlier)
    assert missed(found) == {}
    told = " ".join(found.limitations)
    assert all(text in told for text in ("median", "1 steps left some parameter"))

    def idle(facts: dict[str, Any]) -> None:
        facts["learn"]["unmoved"] = [{"count": 1, "names": ["experts.3"]}] * STEPS

    assert missed(judged(idle)) == {"the export follows the policy": "no step moved every parameter"}

    def dense(facts: dict[str, Any]) -> None:
        outlier(facts)
        facts["setup"]["experts"] = 0

    assert missed(judged(dense))


def test_the_rank_test_is_exact() -> None:
    assert chance([3, 4], [1, 2]) == pytest.approx(1 / 6)
    assert chance([1, 2], [3, 4]) == 1
    assert chance([1, 1], [1, 1]) == 1
    assert chance([2, 2], [1, 2]) == pytest.approx(1 / 2)  # three of the four values are equal: half of all choices leave out the 1
    assert chance(range(10, 20), range(10)) == pytest.approx(1 / math.comb(20, 10))
    assert chance(range(7, 14), range(7)) > CHANCE  # too few steps to show anything


def _rank(device: str, **options: Any) -> Rank:
    return Rank("m", "loop", Path(), Path(), Path(), device, options=options)


def test_vllm_generates_where_it_refits_all_weights() -> None:
    dense, tied = SimpleNamespace(tie_word_embeddings=False), SimpleNamespace(tie_word_embeddings=True)
    experts = SimpleNamespace(tie_word_embeddings=False, num_local_experts=4)
    assert experts_of(dense) == 0
    assert experts_of(experts) == 4
    assert chosen(_rank("cpu"), dense) == "transformers"
    assert chosen(_rank("cuda"), tied) == "vllm"
    assert chosen(_rank("cpu", engine="vllm"), dense) == "vllm"
    for config in (tied, experts):
        with pytest.raises(Missing, match="vLLM that refits"):
            chosen(_rank("cpu", engine="vllm"), config)
    with pytest.raises(ValueError, match="option engine: 'sglang'"):
        chosen(_rank("cpu", engine="sglang"), dense)


def test_the_reward_is_the_share_of_every_eighth_token() -> None:
    assert reward([0, 8, 16, 7]) == 0.75
