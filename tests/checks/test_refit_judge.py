"""The judge of refit probes: clean facts pass, and each check can fail: one fact is falsified at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from seatrial.checks import refit_judge, refit_weights
from seatrial.checks.probe_facts import Facts, Row
from seatrial.checks.refit_judge import MISMATCH, STAMPED, VERSIONS, WHOLE, RefitRequest, judge_refit_probe
from seatrial.checks.refit_weights import BASE, COMMITTED, REFUSED
from seatrial.core.series import Damage
from seatrial.core.verdict import Boundary, Verdict
from tests.checks.run_facts import DRIVER, FOREIGN, NAMES, STEPS, clean, facts, hooked, missed, of

Falsify = Callable[[list[Row]], Any]
ARRIVED = "what arrived is what was sent"
CLASSIFIED, PLACED = "every runtime tensor is classified", "every element is where its name says"


def test_a_clean_run_passes() -> None:
    judged = judge_refit_probe(facts(clean()), DRIVER)
    assert (judged.verdict, missed(judged), judged.wrong) == (Verdict.PASS, set(), ())
    assert "5 tensors are bit-equal after each of 8 refits" in judged.reason
    assert len(judged.refits) == 8
    assert len(judged.mismatch) == STEPS + 1
    assert any("model.norm.weight" in text for text in judged.limitations), "what never changed is said"
    assert all(check.value for check in judged.checks), "each proof has what it measured"


def change(fact: str, match: dict[str, Any], **fields: Any) -> Falsify:
    """Overwrite fields of the rows that match."""

    def falsify(rows: list[Row]) -> None:
        for row in of(rows, fact, **match):
            row.update(fields)

    return falsify


def drop(fact: str, **match: Any) -> Falsify:
    """Take rows away."""

    def falsify(rows: list[Row]) -> None:
        gone = of(rows, fact, **match)
        rows[:] = [row for row in rows if all(row is not other for other in gone)]

    return falsify


def without(fact: str, key: str) -> Falsify:
    """Take a key away from one row."""
    return lambda rows: of(rows, fact)[0].pop(key)


def doubled(fact: str, **match: Any) -> Falsify:
    return lambda rows: rows.append(dict(of(rows, fact, **match)[0]))


def still(version: int) -> Falsify:
    """A version that brings the weights of the one before it."""

    def falsify(rows: list[Row]) -> None:
        for row in of(rows, "hashes", version=version):
            row["hashes"] = of(rows, "hashes", version=version - 1)[0]["hashes"]
        root = f"root{version - 1}"
        for row in of(rows, "refit", version=version):
            row.update(produced=root, consumed=root, stale_names=0, touched_names=0, changed=0)
        for row in of(rows, "version", version=version):
            row["root"] = root

    return falsify


LAST = {"replica": "1", "index": 3}
FALSE: dict[str, tuple[Falsify, str]] = {
    "a probe error": (lambda rows: rows.append({"fact": "probe_error", "where": "hash", "error": "boom"}), WHOLE),
    "a row without a key": (without("refit", "methods"), WHOLE),
    "a row with a wrong type": (change("version", {"replica": "0"}, version="3"), WHOLE),
    "a negative count": (change("refit", LAST, names=-1), WHOLE),
    "a transfer not wholly seen": (change("hashes", {"side": "received", "version": 2}, complete=False, problems=["cut"]), WHOLE),
    "two hashes of one name": (lambda rows: rows.append({**of(rows, "hashes", side="sent")[0], "hashes": {NAMES[0]: "other"}}), WHOLE),
    "hooks that found nothing": (lambda rows: rows.append({"fact": "attached", "module": "m", "owner": "W", "owner_found": False}), WHOLE),
    "a refit too few": (drop("refit", **LAST), refit_weights.REFITS),
    "a refit twice": (doubled("refit", **LAST), refit_weights.REFITS),
    "refits out of order": (change("refit", LAST, index=7), refit_weights.REFITS),
    "a refusal": (change("refit", LAST, refused="truncated: 3 bytes short"), REFUSED),
    "another base": (change("refit", {"replica": "1", "index": 0}, stale_names=1), BASE),
    "a first refit that writes": (change("refit", {"replica": "1", "index": 0}, touched_names=1), BASE),
    "another root": (change("refit", LAST, consumed="root9"), refit_weights.EQUAL),
    "no root": (change("refit", LAST, consumed=None, produced=None), refit_weights.EQUAL),
    "no names": (change("refit", LAST, names=0, methods={}), refit_weights.EQUAL),
    "another arrival": (change("hashes", {"side": "received", "version": 2, "replica": "0"}, hashes={}), ARRIVED),
    "nothing known to be sent": (drop("hashes", side="sent", version=2), ARRIVED),
    "a name without a method": (change("refit", LAST, methods={"read": 4}), refit_weights.METHODS),
    "an unknown method": (change("refit", LAST, methods={"guess": 5}), refit_weights.METHODS),
    "stale weights not seen": (change("refit", LAST, stale_names=0), refit_weights.CONTROL),
    "a refit that touches nothing": (change("refit", LAST, touched_names=0), refit_weights.CONTROL),
    "stale log-probabilities not compared": (change("refit", LAST, stale_max_dlogp=None), refit_weights.CONTROL),
    "a policy that did not move once": (still(3), refit_weights.CONTROL),
    "a wrong base for the next delta": (change("refit", LAST, committed=False), COMMITTED),
    "a commit that nobody told of": (change("refit", LAST, committed=None), COMMITTED),
    "a refused payload as base": (change("refit", LAST, refused="truncated", committed=True), COMMITTED),
    "no map": (drop("map", replica="1"), refit_weights.MAPPED),
    "an empty map": (change("map", {"replica": "1"}, elements=0), refit_weights.MAPPED),
    "weights not restored": (change("map", {"replica": "1"}, restored=False), refit_weights.MAPPED),
    "swapped slots": (change("map", {"replica": "1"}, misplaced={"qkv": "its slots are out of order"}), PLACED),
    "no coverage": (drop("coverage", replica="1"), CLASSIFIED),
    "two classes": (change("coverage", {"replica": "1"}, derived={NAMES[0]: "x"}), CLASSIFIED),
    "nothing written": (change("coverage", {"replica": "1"}, written=[], opaque={}), CLASSIFIED),
    "an unconsumed name": (change("coverage", {"replica": "1"}, unconsumed={"mtp.weight": 12}), refit_weights.CONSUMED),
    "an unwritten tensor": (change("coverage", {"replica": "1"}, unwritten={NAMES[1]: 3}), refit_weights.UNWRITTEN),
    "an idle parameter": (change("coverage", {"replica": "1"}, idle=["rope.inv_freq"]), refit_weights.UNWRITTEN),
    "padding of another size": (change("coverage", {"replica": "1"}, unwritten={NAMES[0]: 65}), refit_weights.UNWRITTEN),
    "padding that changed": (
        change("coverage", {"replica": "1"}, padding={NAMES[0]: {"elements": 64, "constant": False}}),
        refit_weights.UNWRITTEN,
    ),
    "a tensor that moved": (
        change("coverage", {"replica": "1"}, derived={}, moved={"rope.cos": "its bits changed with load 2"}, unwritten={NAMES[0]: 64}),
        refit_weights.MOVED,
    ),
    "a tensor that is derived without a reason": (change("coverage", {"replica": "1"}, recomputed=[]), refit_weights.MOVED),
    "a buffer that is not exported": (change("coverage", {"replica": "1"}, unexported=["rope.inv_freq"]), refit_weights.UNEXPORTED),
    "a policy that nobody watched": (change("coverage", {"replica": "1"}, unexported=None), refit_weights.UNEXPORTED),
    "a tensor that no method proves": (change("refit", LAST, unproven=["rope.cos"]), refit_weights.METHODS),
    "no versions": (drop("version"), VERSIONS),
    "a version not reported": (drop("version", replica="1", version=3), VERSIONS),
    "a version that falls": (change("version", {"replica": "1", "version": 4}, version=1), VERSIONS),
    "a version left out": (change("refit", LAST, version=6), VERSIONS),
    "a restarted replica": (change("version", {"replica": "1", "version": 3}, incarnation="again"), VERSIONS),
    "a replica restarted in a refit": (change("refit", LAST, incarnation="again"), VERSIONS),
    "no samples": (drop("sample"), STAMPED),
    "a sample without version": (change("sample", {"id": "1-2"}, version=None), STAMPED),
    "a sample of a version nobody held": (change("sample", {"id": "1-2"}, version=9), STAMPED),
    "a sample of another life": (change("sample", {"id": "1-2"}, incarnation="again"), VERSIONS),
    "a sample of no known life": (change("sample", {"id": "1-2"}, incarnation=None), STAMPED),
    "no log-probabilities": (drop("mismatch", step=2), MISMATCH),
    "no log-probabilities after a refit": (drop("mismatch", step=3), MISMATCH),
    "no log-probabilities of samples": (drop("mismatch", step=0, of="sampled"), MISMATCH),
    "samples apart": (change("mismatch", {"step": 2, "of": "sampled"}, value=1.05), MISMATCH),
    "samples compared twice": (change("mismatch", {"step": 2, "of": "sampled"}, step=1), WHOLE),
    "log-probabilities apart": (change("mismatch", {"step": 2}, value=1.05), MISMATCH),
    "a value that is not a number": (change("mismatch", {"step": 2}, value="NaN"), MISMATCH),
    "tokens that are not finite": (change("mismatch", {"step": 2}, nonfinite=1), MISMATCH),
    "no tokens": (change("mismatch", {"step": 2}, tokens=0), MISMATCH),
}


@pytest.mark.parametrize("what", FALSE)
def test_each_check_can_fail(what: str) -> None:
    falsify, expected = FALSE[what]
    rows = clean()
    falsify(rows)
    judged = judge_refit_probe(facts(rows), DRIVER)
    assert judged.verdict is Verdict.FAIL
    assert expected in missed(judged)
    assert judged.boundary is not None


def test_every_check_is_falsified_somewhere() -> None:
    names = {check.name for check in judge_refit_probe(facts(clean()), DRIVER).checks}
    elsewhere = {"the run came to its end", refit_judge.USED, refit_weights.OPAQUE}
    assert names == {expected for _, expected in FALSE.values()} | elsewhere


def test_damage_and_a_bad_end_are_missed_proofs() -> None:
    damaged = Facts(tuple(clean()), (Damage("facts.jsonl", "line 3", 1, "torn"),))
    assert missed(judge_refit_probe(damaged, DRIVER)) == {WHOLE}
    judged = judge_refit_probe(facts(clean()), DRIVER, "exit code 1: boom")
    assert (judged.verdict, missed(judged)) == (Verdict.FAIL, {"the run came to its end"})


def test_hooks_need_not_watch_the_policy_but_what_they_say_counts() -> None:
    rows = hooked()
    judged = judge_refit_probe(facts(rows), FOREIGN)
    assert refit_weights.UNEXPORTED not in {check.name for check in judged.checks}
    assert any("the export stream was taken for the policy" in text for text in judged.limitations)
    of(rows, "coverage")[0]["unexported"] = ["table"]
    assert refit_weights.UNEXPORTED in missed(judge_refit_probe(facts(rows), FOREIGN))


def test_hooks_may_cover_every_refit_and_each_row_counts() -> None:
    rows = hooked()
    rows += [dict(row) for row in of(rows, "coverage")]
    assert judge_refit_probe(facts(rows), FOREIGN).verdict is Verdict.PASS
    of(rows, "coverage")[0]["padding"] = {NAMES[0]: {"elements": 64, "constant": False}}
    assert refit_weights.UNWRITTEN in missed(judge_refit_probe(facts(rows), FOREIGN))


def test_an_opaque_tensor_needs_the_hashes_of_what_was_sent() -> None:
    rows = clean()
    for row in of(rows, "coverage"):
        row["opaque"] = {NAMES[1]: "quantised"}
    assert refit_weights.OPAQUE not in missed(judge_refit_probe(facts(rows), DRIVER))
    drop("hashes", side="sent")(rows)
    assert refit_weights.OPAQUE in missed(judge_refit_probe(facts(rows), DRIVER))


def test_what_is_not_finite_and_what_was_compared_with_nothing_is_said() -> None:
    rows = clean()
    for count, row in enumerate(of(rows, "refit", replica="0")):
        row["nonfinite"] = {NAMES[1]: count} if count else {}
    limitations = judge_refit_probe(facts(rows), DRIVER).limitations
    assert f"1 names were sent with values that are not finite: {NAMES[1]} (3)" in limitations
    assert "1 buffers were compared with nothing: rope.inv_freq" in limitations


def test_a_loader_that_raises_while_the_map_is_learned_is_a_fail() -> None:
    rows: list[Row] = [{"fact": "probe_error", "where": "map", "error": "the loader raised KeyError: 'w'"}]
    judged = judge_refit_probe(facts(rows), DRIVER, "exit code 1: the loader raised")
    assert (judged.verdict, judged.boundary) == (Verdict.FAIL, Boundary.REFIT)
    assert judged.reason == "the coordinate map could not be learned: the loader raised KeyError: 'w'"


def test_a_run_without_a_refit_is_blocked() -> None:
    judged = judge_refit_probe(facts([]), DRIVER, "exit code 1: no module named torch")
    assert (judged.verdict, judged.boundary) == (Verdict.BLOCKED, Boundary.ENVIRONMENT)
    assert "no module named torch" in judged.reason
    assert judge_refit_probe(facts([]), FOREIGN).verdict is Verdict.BLOCKED


def test_weights_that_never_change_are_blocked_as_vacuous() -> None:
    rows = clean()
    change("refit", {}, produced="root1", consumed="root1", stale_names=0, touched_names=0, changed=0)(rows)
    change("version", {}, root="root1")(rows)
    for row in of(rows, "hashes"):
        row["hashes"] = of(rows, "hashes", side="sent", version=1)[0]["hashes"]
    judged = judge_refit_probe(facts(rows), DRIVER)
    assert (judged.verdict, judged.vacuous) == (Verdict.BLOCKED, True)
    assert "never changed" in judged.reason


def test_a_vacuous_run_with_a_wrong_tensor_fails() -> None:
    rows = clean()
    change("refit", {}, produced="root1", consumed="root1", stale_names=0, touched_names=0)(rows)
    change("refit", LAST, wrong_names=[NAMES[1]])(rows)
    assert judge_refit_probe(facts(rows), DRIVER).verdict is Verdict.FAIL


def test_a_vacuous_run_that_misses_anything_else_fails() -> None:
    rows = clean()
    change("refit", {}, transport="full")(rows)
    judged = judge_refit_probe(facts(rows), DRIVER)
    assert judged.verdict is Verdict.BLOCKED
    assert "never used: packed, sparse" in judged.reason
    change("map", {"replica": "0"}, restored=False)(rows)
    assert judge_refit_probe(facts(rows), DRIVER).verdict is Verdict.FAIL


def test_a_transport_counts_only_when_it_brought_something() -> None:
    """The first refit changes nothing: that it went by a transport shows nothing about it."""
    rows = clean()
    for row in of(rows, "refit"):
        row["transport"] = "sparse" if row["index"] == 0 else "full"
    asked = DRIVER.model_copy(update={"transports": ("sparse",)})
    assert judge_refit_probe(facts(rows), asked).verdict is Verdict.BLOCKED


def test_a_loop_may_send_by_a_transport_of_its_own() -> None:
    rows = clean()
    change("refit", {}, transport="trl", kind="sync", changed=None, elements=None)(rows)
    own = refit_judge.Expected(STEPS + 1, ("trl",), driven=True)
    assert [check.name for check in refit_judge.judge_refits(facts(rows), own).checks if not check.passed] == []
    assert {WHOLE, refit_judge.USED} <= missed(judge_refit_probe(facts(rows), DRIVER)), "only where it was asked for"


def test_a_map_that_refused_every_name_is_blocked() -> None:
    rows = clean()
    opaque = dict.fromkeys(NAMES, "the loader quantises")
    change("coverage", {}, tensors=2, written=[], shared={}, padding={}, unwritten={}, opaque=opaque)(rows)
    change("refit", {}, methods={})(rows)
    judged = judge_refit_probe(facts(rows), DRIVER)
    assert judged.verdict is Verdict.BLOCKED
    assert "the loader quantises" in judged.reason


def test_a_name_outside_the_map_must_be_proven_otherwise() -> None:
    rows = clean()
    change("coverage", {}, opaque={NAMES[4]: "packed away"})(rows)
    judged = judge_refit_probe(facts(rows), DRIVER)
    assert judged.verdict is Verdict.PASS
    assert any("packed away" in text for text in judged.limitations)
    change("refit", LAST, methods={"read": 4})(rows)
    assert refit_weights.OPAQUE in missed(judge_refit_probe(facts(rows), DRIVER))


def test_outputs_compared_instead_of_bits_are_said() -> None:
    rows = clean()
    change("refit", {}, methods={"read": 4, "compare": 1})(rows)
    for row in of(rows, "hashes", side="live"):
        row["hashes"] = {name: value for name, value in row["hashes"].items() if name != NAMES[3]}
    judged = judge_refit_probe(facts(rows), DRIVER)
    assert judged.verdict is Verdict.PASS
    assert any("by the output of their module" in text for text in judged.limitations)
    change("refit", LAST, methods={"read": 5})(rows)
    assert [(wrong.name, wrong.looks) for wrong in judge_refit_probe(facts(rows), DRIVER).wrong] == [(NAMES[3], "not there")]


def test_a_cast_is_never_called_bit_equal() -> None:
    rows = hooked()
    change("hashes", {"side": "live"}, casts=dict.fromkeys(NAMES[:2], "torch.float32 to torch.bfloat16"))(rows)
    judged = judge_refit_probe(facts(rows), FOREIGN)
    assert judged.verdict is Verdict.PASS
    assert judged.reason.startswith("3 tensors are bit-equal, 2 tensors are equal after the same cast (torch.float32 to torch.bfloat16)")
    assert (
        next(check.value for check in judged.checks if check.name == refit_weights.EQUAL)
        == "5 tensors, 2 after the same cast, 0 of 8 refits wrong"
    )
    assert any("what it drops is not seen" in text for text in judged.limitations)


def test_what_is_not_compared_is_said() -> None:
    rows = hooked()
    for row in of(rows, "hashes", side="received"):
        row["runtime"] = {**row["runtime"], "drafter.fc.weight": "bits"}
    said = judge_refit_probe(facts(rows), FOREIGN).limitations
    assert any("derived from others, and their bits are not compared: rope.cos: recomputed" in text for text in said)
    assert any("1 tensors of a draft model are not proven" in text for text in said)


def test_facts_of_another_framework_may_lack_what_hooks_cannot_see() -> None:
    rows = hooked()
    judged = judge_refit_probe(facts(rows), FOREIGN)
    assert (judged.verdict, missed(judged)) == (Verdict.PASS, set())
    assert len([text for text in judged.limitations if "version" in text or "log-prob" in text or "base" in text]) == 3
    assert any("hold those seen (0, 1)" in text for text in judged.limitations)
    assert missed(judge_refit_probe(facts(rows), DRIVER)) > {BASE, STAMPED, MISMATCH}
    unknown = [row for row in rows if row["fact"] != "attached"]
    excused = {BASE, COMMITTED, STAMPED, MISMATCH, WHOLE, refit_weights.CONTROL, refit_weights.UNEXPORTED}
    assert missed(judge_refit_probe(facts(unknown), FOREIGN)) == excused, "without a trace of hooks nothing is excused"
    change("refit", LAST, wrong_names=[NAMES[1]])(rows)
    assert judge_refit_probe(facts(rows), FOREIGN).verdict is Verdict.FAIL


def test_what_was_seen_by_hooks_still_counts_against_a_run() -> None:
    rows = clean()
    change("mismatch", {"step": 2}, value=1.2)(rows)
    assert missed(judge_refit_probe(facts(rows), FOREIGN)) == {MISMATCH}


def test_a_probe_never_passes_on_log_probabilities_alone() -> None:
    rows = [row for row in clean() if row["fact"] in ("mismatch", "sample", "version")]
    assert judge_refit_probe(facts(rows), RefitRequest(source="facts")).verdict is Verdict.BLOCKED


def test_hooks_in_many_processes_must_agree() -> None:
    judged = judge_refit_probe(facts(hooked()), FOREIGN)
    assert (judged.verdict, missed(judged)) == (Verdict.PASS, set())


@pytest.mark.parametrize(
    "falsify",
    [
        drop("hashes", side="received", replica="1", version=4),
        drop("hashes", side="sent"),
        drop("attached", side="policy"),
        without("attached", "optional"),
        doubled("hashes", side="received", replica="1", version=4),
    ],
)
def test_hooks_that_do_not_agree_fail(falsify: Falsify) -> None:
    rows = hooked()
    falsify(rows)
    judged = judge_refit_probe(facts(rows), FOREIGN)
    assert judged.verdict is Verdict.FAIL
    assert WHOLE in missed(judged)
