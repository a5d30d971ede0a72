"""Wrong facts, written by hand, that once passed or broke the judge. None may pass, and none may end in a traceback."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.probe_facts import Row, read_facts
from seatrial.checks.refit_judge import RefitProbe, RefitRequest, judge_refit_probe
from seatrial.core.verdict import Verdict
from seatrial.probes.refit_run import refit_summary, refit_table
from tests.checks.run_facts import DRIVER, FOREIGN, NAMES, clean, facts, hooked, of

Lie = Callable[[list[Row]], Any]


def tell(fact: str, match: dict[str, Any] | None = None, **fields: Any) -> Lie:
    """Overwrite fields of all rows that match."""

    def lie(rows: list[Row]) -> None:
        for row in of(rows, fact, **(match or {})):
            row.update(fields)

    return lie


def hide(fact: str, **match: Any) -> Lie:
    """Take rows away."""

    def lie(rows: list[Row]) -> None:
        gone = of(rows, fact, **match)
        rows[:] = [row for row in rows if all(row is not other for other in gone)]

    return lie


def again(fact: str, **match: Any) -> Lie:
    """Write a row twice."""
    return lambda rows: rows.append(copy.deepcopy(of(rows, fact, **match)[0]))


def every(*lies: Lie) -> Lie:
    """Several lies at once."""
    return lambda rows: [lie(rows) for lie in lies]


def name_lost(rows: list[Row]) -> None:
    """From version 3 on the policy exports one name less, and everybody is content."""
    for row in of(rows, "hashes"):
        if row["version"] > 2:
            row["hashes"] = {name: value for name, value in row["hashes"].items() if name != NAMES[1]}
    for row in of(rows, "refit"):
        if row["version"] > 2:
            row.update(names=4, stale_names=3, touched_names=3, methods={"read": 3, "forward": 1})


def frozen_hashes(rows: list[Row]) -> None:
    """New roots over weights that never change."""
    first = of(rows, "hashes", side="sent", version=1)[0]["hashes"]
    for row in of(rows, "hashes"):
        row["hashes"] = first


def shared_life(rows: list[Row]) -> None:
    """One process that writes under two names."""
    for row in rows:
        if "incarnation" in row:
            row["incarnation"] = "life"


def swapped_steps(rows: list[Row]) -> None:
    for row in of(rows, "refit"):
        row["step"] = {1: 2, 2: 1}.get(row["step"], row["step"])


LAST = {"replica": "1", "index": 3}
UNREAD = dict.fromkeys(NAMES, "the loader quantises")
OWN: dict[str, Lie] = {
    "a transfer twice": again("hashes", side="live"),
    "a map twice": again("map"),
    "a comparison twice": again("mismatch", step=2),
    "another comparison of the same step": lambda rows: rows.append({**of(rows, "mismatch", step=2)[0], "value": 1.0002}),
    "a comparison of a step that never was": tell("mismatch", {"step": 0}, step=9),
    "steps in another order": swapped_steps,
    "a transfer of another step": tell("hashes", {"side": "live", "version": 3}, step=0),
    "versions that begin later": lambda rows: [row.update(version=row["version"] + 4) for row in rows if row.get("version")],
    "a replica without a refit": lambda rows: rows.append({**of(rows, "version")[-1], "replica": "2", "incarnation": "life-2"}),
    "one process as two replicas": shared_life,
    "no hashes": hide("hashes"),
    "no hashes of what was sent": every(hide("hashes", side="sent"), hide("hashes", side="received")),
    "no hashes of what is live": hide("hashes", side="live", replica="1"),
    "empty hashes": lambda rows: [row.update(hashes=dict.fromkeys(NAMES, "")) for row in of(rows, "hashes")],
    "another root under the version": tell("version", {"version": 4}, root="root9"),
    "no root under the version": tell("version", {"version": 4}, root=None),
    "wrong tensors without their names": tell("refit", LAST, wrong={NAMES[1]: {"runtime": "qkv", "count": 3}}),
    "fewer names than were sent": tell("refit", LAST, names=4, methods={"read": 4}),
    "a name that is sent no more": name_lost,
    "a version that no refit took": lambda rows: rows.append({**of(rows, "hashes", side="sent")[-1], "version": 5, "step": 4}),
    "hashes that never change": frozen_hashes,
    "names that never changed, and did": tell("coverage", never_changed=list(NAMES)),
    "a transport whose payload is the same everywhere": tell("refit", {"transport": "sparse"}, modes={"same": 5}),
    "a change of no element": tell("refit", {"transport": "sparse"}, changed=0),
    "a payload of no bytes": tell("refit", {"transport": "sparse"}, bytes=0),
    "an unknown transport": tell("refit", LAST, transport="pigeon"),
    "a control that sees one tensor of four": tell("refit", LAST, stale_names=1),
    "a refit that touches one tensor of four": tell("refit", LAST, touched_names=1),
    "more stale names than there are": tell("refit", LAST, stale_names=900),
    "only outputs compared": every(tell("refit", methods={"compare": 5}), tell("hashes", {"side": "live"}, hashes={})),
    "an arrival that was not seen": hide("hashes", side="received", replica="1", version=3),
    "a problem of a transfer that is called complete": tell("hashes", {"side": "sent", "version": 2}, problems=["cut"]),
    "an unknown side": tell("hashes", {"side": "received"}, side="recieved"),
    "a log-probability that is not a number": tell("refit", LAST, fresh_max_dlogp="NaN"),
    "a stale log-probability that is not a number": tell("refit", LAST, stale_max_dlogp="NaN"),
    "a large difference beside a small mean": tell("mismatch", {"step": 2}, max_abs=30.0),
    "a larger difference at the refit": tell("refit", LAST, fresh_max_dlogp=30.0),
    "a mean below one": tell("mismatch", {"step": 2}, value=0.2),
    "a percentile that is not a number": tell("mismatch", {"step": 2}, p99="NaN"),
    "percentiles out of order": tell("mismatch", {"step": 2}, p50=1.2),
    "outliers above all": tell("mismatch", {"step": 2}, outlier_share=1.0),
    "a share above one": tell("mismatch", {"step": 2}, outlier_share=2.0, max_sequence=1.06, max_abs=0.06),
    "samples of one step missing": lambda rows: [hide("sample", id=f"1-{n}")(rows) for n in range(4)],
    "a sample of a replica that is not there": tell("sample", {"id": "1-2"}, replica="7"),
    "a coverage without one tensor": tell("coverage", {"replica": "1"}, constant=[], unwritten={NAMES[0]: 64}),
    "memory shared with nobody": tell("coverage", {"replica": "1"}, shared={"head.weight": "nowhere"}),
    "padding that is not unwritten": tell("coverage", {"replica": "1"}, unwritten={"rope.inv_freq": 8}),
    "a negative count": tell("coverage", {"replica": "1"}, unwritten={"rope.inv_freq": -8, NAMES[0]: 64}),
    "a map of fewer elements": tell("map", {"replica": "1"}, elements=3),
    "a map without runs": tell("map", {"replica": "1"}, runs=0),
    "names outside the map that were read through it": every(
        tell("coverage", opaque={NAMES[4]: "packed", NAMES[3]: "packed"}), tell("refit", methods={"read": 4, "forward": 1})
    ),
    "a runtime tensor outside the map": tell("coverage", opaque={"w_scale": "it comes back changed"}),
    "slots that nobody named": tell("map", misplaced={"wqkv": "it holds 3 exported tensors and nobody said in which order"}),
    "an unknown kind of fact": lambda rows: rows.append({"fact": "refits", "index": 0}),
    "a number without end": tell("refit", LAST, bytes=10**400),
    "a version without end": lambda rows: rows.append({**of(rows, "hashes", side="sent")[-1], "version": 10**14}),
    "a reason that is empty": tell("refit", LAST, refused=""),
}
HOOKS: dict[str, Lie] = {
    "hooks without a trace": hide("attached"),
    "a generator that saw nothing arrive": hide("hashes", side="received", replica="1"),
    "a tensor of the worker in no class": lambda rows: of(rows, "hashes", side="received")[0].update(runtime={"mla.w_uk": "bits"}),
    "hashes that are a list": tell("hashes", {"side": "received", "version": 2}, hashes=[["a", "b"]]),
    "misplaced as a list": tell("map", misplaced=["qkv"]),
    "a version without end": lambda rows: rows.append({**of(rows, "hashes", side="sent")[-1], "version": 10**14}),
    "a log-probability that is not a number": tell("refit", LAST, stale_max_dlogp="NaN"),
}


def shown(rows: list[Row], wanted: RefitRequest) -> Verdict:
    """The verdict, after everything was put into words as well."""
    judged = judge_refit_probe(facts(rows), wanted)
    assert refit_table(judged.refits)
    made = RefitProbe(seatrial="0", created="now", command=(), wanted=wanted, judged=judged)
    assert refit_summary(made, None).startswith(f"Result: {judged.verdict}")
    assert made.model_dump_json()
    return judged.verdict


@pytest.mark.parametrize("what", OWN)
def test_no_lie_about_a_run_of_ours_passes(what: str) -> None:
    rows = clean()
    OWN[what](rows)
    assert shown(rows, DRIVER) is not Verdict.PASS
    assert judge_refit_probe(facts(rows), FOREIGN).verdict is not Verdict.PASS, "nor as facts that were found somewhere"


@pytest.mark.parametrize("what", HOOKS)
def test_no_lie_of_hooks_passes(what: str) -> None:
    rows = hooked()
    HOOKS[what](rows)
    assert shown(rows, FOREIGN) is not Verdict.PASS


def test_both_pass_without_a_lie() -> None:
    assert (shown(clean(), DRIVER), shown(clean(), FOREIGN), shown(hooked(), FOREIGN)) == (Verdict.PASS,) * 3


@pytest.mark.parametrize(
    "line",
    [
        b'{"fact": "ref',
        b'{"fact": "refit"}',
        b'{"fact": 3}',
        b"[1]",
        b"NaN",
        b"\xff\xfe\x00",
        b"\x00\x00",
        b"[" * 5000,
        b'{"fact": "probe_error", "where": "\\ud800", "error": "\\ud800"}',
        b'{"fact": "version", "replica": "0", "replica": "0"}',
        b'{"fact": "refit", "replica": "\\ud800"}',
        b'{"fact": "sample", "id": NaN, "version": Infinity, "replica": "0"}',
    ],
)
def test_no_line_that_does_not_belong_there_passes(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in clean()) + line)
    judged = judge_refit_probe(read_facts(path), FOREIGN)
    assert judged.verdict is Verdict.FAIL
    probe = RefitProbe(seatrial="0", created="now", command=(), wanted=FOREIGN, judged=judged)
    assert probe.model_dump_json()
    refit_summary(probe, None).encode()
