"""Judges of the rungs that compute: parity with transformers, and two ranks against one.

Tolerances come from the run itself: how far transformers is, on the same device and in the same precision, from transformers in higher
precision. Megatron may be a few times as far. A number that is missing, NaN or infinite is a missed check. A failure names the first
module that differs although its inputs agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from seatrial.loops.facts import Facts, Row
from seatrial.loops.proof import proof
from seatrial.model.record import CheckResult
from seatrial.model.verdict import Boundary
from seatrial.probes.bridge.rungs import parallel
from seatrial.proving.bridge.judgement import Judgement
from seatrial.proving.bridge.judges import read
from seatrial.proving.bridge.judges.gradients import judge_gradients

BAR = 1e-5
"""Largest difference of float32 logits on a CPU, where transformers itself computes that well."""
FACTOR = 4.0
"""Times transformers' own largest error. Seven tiny families x 50 inputs on a CPU: 0.61 to 1.69, where no router changes its mind."""
MEDIAN = 2.0
"""Times transformers' own median error; the same runs, routed families included: 0.78 to 1.15."""
TAIL = 8.0
"""Times the median error, for the largest error of a model with routers in bfloat16. Transformers' routers change their minds too, which
spoils its largest error (Megatron's was 0.03 to 24 times that). Positions that no change reached, two such families: up to 2.67 times on
the 120 inputs that this was chosen by; up to 2.47, and no failure, on 120 others."""
ROUNDING = 1e-7
"""Of the largest logit, in addition: half a step of float32, for a reference that happens to have no error at all."""
COSINE = 0.99
"""Upstream's own skill for parity tests asks for this much."""
SIGNAL = 10.0
"""The largest logit, in median errors: below that there would be nothing to compare."""
NOISY = {"float32": 1e-4, "bfloat16": 0.2}
"""Of the largest logit: what transformers' own error may be at most. Above it, it would excuse Megatron's. Measured on a CPU, tiny
families and Qwen2.5-0.5B: up to 1.5e-6 and 0.019, without routers."""
WRONG = ("missing", "extra", "unequal", "retyped")
PADDING = "padding kept"


def judge_parity(rows: Sequence[Row], device: str) -> Judgement:
    """Both precisions; the figure is the largest difference in float32."""
    facts = Facts(tuple(rows))
    located = facts.one("located") or {}
    checks: list[CheckResult] = []
    limitations: list[str] = []
    for dtype in ("float32", "bfloat16"):
        row = facts.one("parity", dtype=dtype)
        checks += _precision(row, dtype, device, where(located)) if row else [_missed(f"logits ({dtype})")]
        limitations += _rerouted(row or {}, dtype)
    compared = located.get("compared")
    checks.append(_check("modules were compared one by one", _positive(compared), str(compared), "> 0"))
    if all(check.passed for check in checks) and located.get("first"):
        limitations.append(f"the logits agree, a module inside does not, or was paired with the wrong one: {where(located)}")
    first = read.figures(facts.one("parity", dtype="float32") or {}, "megatron")
    return Judgement(tuple(checks), _text(first.get("max")), tuple(limitations))


def _precision(row: Row, dtype: str, device: str, place: str) -> list[CheckResult]:
    ours, error, noise = read.figures(row, "megatron"), read.figures(row, "megatron_error"), read.figures(row, "hf_error")
    flipped = row.get("rerouted")
    kept = read.figures(row, "untouched") if flipped else error
    name = f"logits ({dtype})"
    routed = dtype == "bfloat16" and row.get("routers") != 0
    limit = _limit(noise, routed)
    checks = [
        _check(f"{name}: as many as transformers gives", _same_shape(row), str(row.get("shape")), str(row.get("wanted_shape"))),
        _check(f"{name}: more than noise", _above(noise.get("scale"), SIGNAL, noise.get("median")), _text(noise.get("scale"))),
        _at_most(f"{name}: typical error", error.get("median"), _times(MEDIAN, noise.get("median"), noise), place),
    ]
    if not routed:  # else the limit goes by the median, which SIGNAL bounds
        checks.append(_precise(f"{name}: ", noise, dtype))
    if flipped:
        left = kept.get("positions")
        checks.append(_check(f"{name}: positions that no router flip reached", _positive(left), _text(left), "> 0", place))
    if dtype == "float32" and device == "cpu" and _within(noise.get("max"), BAR):
        checks.append(_at_most(f"{name}: largest difference from transformers", ours.get("max"), BAR, place))
    if not flipped or flipped != error.get("positions"):
        checks.append(_at_most(f"{name}: largest error", kept.get("max"), limit, place))
        checks.append(_at_most(f"{name}: next token, margin where it differs", kept.get("margin"), _twice(limit), place))
        cosine = read.number(kept.get("cosine"))
        checks.append(_check(f"{name}: cosine", cosine is not None and cosine >= COSINE, _text(cosine), f">= {COSINE}", place))
    return checks


def judge_parallel(rows: Sequence[Row], device: str) -> Judgement:
    """Rungs tp, pp, ep, cp and sp; the figure is the largest difference from the single rank."""
    row = Facts(tuple(rows)).one("parallel")
    if row is None:
        return Judgement((_missed("two ranks against one"),))
    found = row.get("ranks")
    ranks: list[Row] = [rank for rank in found if isinstance(rank, dict)] if isinstance(found, list) else []
    noise = read.figures(row, "hf_error")
    limit = _limit(noise, routed=False)
    if limit is not None and device == "cpu" and _within(noise.get("max"), BAR):
        limit = min(limit, BAR)
    checks = [_divided(row, ranks), _precise("", noise, "float32")]
    trained = parallel.trains(read.figures(row, "asked"), 1 if _positive(row.get("experts")) else 0)
    place = next((text for text in (where(read.figures(rank, "located")) for rank in ranks) if text), "")
    for rank in ranks:
        name = f"rank {rank.get('rank')}"
        checks += _exported(name, read.figures(rank, "export"))
        checks += judge_gradients(read.figures(rank, "gradients"), f"{name}: ") if trained else []
        for other, text in (("single", "the single rank"), ("transformers", "transformers")):
            figures = read.figures(rank, other)
            checks.append(_at_most(f"{name}: logits, largest difference from {text}", figures.get("max"), limit, place))
            checks.append(_at_most(f"{name}: next token, margin where {text} differs", figures.get("margin"), _twice(limit), place))
    worst = [read.number(read.figures(rank, "single").get("max")) for rank in ranks]
    notes = () if trained else ("gradients were not compared: Megatron trains no such model",)
    return Judgement(tuple(checks), _text(max(worst, key=lambda value: math.inf if value is None else value, default=None)), notes)


def _divided(row: Row, ranks: list[Row]) -> CheckResult:
    """The model really was spread over two ranks: by Megatron's own word, by the parameters on each, and by what was put together."""
    asked, sizes, whole = row.get("asked"), row.get("sizes"), row.get("whole")
    reasons = []
    if not asked or asked != sizes or asked == {"tp": 1, "pp": 1, "ep": 1, "cp": 1, "sp": False}:
        reasons.append(f"asked for {asked}, Megatron has {sizes}")
    if [rank.get("rank") for rank in ranks] != [0, 1]:
        reasons.append(f"ranks {[rank.get('rank') for rank in ranks]} reported")
    counts = [rank.get("parameters") for rank in ranks]
    if not _context(asked) and not all(_fewer(count, whole) for count in counts):
        reasons.append(f"parameters per rank {counts}, of the whole model {whole}")
    for size, value, axis in (("tp", 2, "features"), ("sp", True, "positions")):
        wanted = isinstance(asked, dict) and asked.get(size) == value
        if wanted and not all(_positive(read.figures(read.figures(rank, "located"), "split").get(axis)) for rank in ranks):
            reasons.append(f"no module had its {axis} divided")
    return _check("the model is divided", not reasons, str(counts), f"< {whole} each", "; ".join(reasons))


def _context(asked: object) -> bool:
    """Context parallel divides the sequence alone: every rank has the whole model."""
    return isinstance(asked, dict) and asked.get("cp") == 2


def _fewer(count: object, whole: object) -> bool:
    return isinstance(count, int) and isinstance(whole, int) and 0 < count < whole


def _exported(name: str, export: Row) -> list[CheckResult]:
    """The export is the checkpoint, bit for bit; rows of padding after the vocabulary are a check of their own."""
    reshaped = read.first(export.get("reshaped"))
    padded = [item for item in reshaped if isinstance(item, dict) and PADDING in str(item.get("looks"))]
    counts = {key: read.length(export.get(key)) for key in (*WRONG, "reshaped")}
    other = counts["reshaped"] != len(padded)
    ok = _positive(export.get("stored")) and _positive(export.get("equal")) and not other and all(counts[key] == 0 for key in WRONG)
    named = [
        str(item.get("name") if isinstance(item, dict) else item) for key in (*WRONG, "reshaped") for item in read.first(export.get(key))
    ]
    value = f"{export.get('equal')}/{export.get('stored')} equal"
    cut = "; ".join(f"{item.get('name')}: {item.get('looks')}" for item in padded)
    return [
        _check(f"{name}: export is the checkpoint", ok, value, "all", "" if ok else ", ".join(named[:3])),
        _check(
            f"{name}: export has no padding of the vocabulary", counts["reshaped"] is not None and not padded, str(len(padded)), "0", cut
        ),
    ]


def where(located: Row) -> str:
    """The first module that differs, in words; empty when none was found."""
    first = located.get("first")
    if not isinstance(first, dict):
        return ""
    what = f" ({first['what']})" if first.get("what") else ""
    numbers = f"differs by {_text(first.get('difference'))} of {_text(first.get('scale'))}"
    parts = [
        f"first at {first.get('megatron')}{what}, in transformers {first.get('hf')}: {numbers}",
        located.get("kind"),
        located.get("suspicion"),
    ]
    return "; ".join(str(part) for part in parts if part)


def _rerouted(row: Row, dtype: str) -> list[str]:
    """What a router's choice between nearly equal experts took out of the comparison."""
    count = row.get("rerouted")
    if not count:
        return []
    left = read.figures(row, "untouched").get("positions", 0)
    return [f"{dtype}: {count} positions follow another choice of experts than in float32; largest errors are judged on the other {left}"]


def _limit(noise: Row, routed: bool) -> float | None:
    """How large the largest error may be."""
    limits = [_times(FACTOR, noise.get("max"), noise)]
    if routed:
        limits.append(_times(TAIL, noise.get("median"), noise))
    known = [limit for limit in limits if limit is not None]
    return min(known) if len(known) == len(limits) else None


def _precise(of: str, noise: Row, dtype: str) -> CheckResult:
    scale = read.number(noise.get("scale"))
    limit = None if scale is None else NOISY[dtype] * scale
    return _at_most(f"{of}transformers' own error", noise.get("max"), limit, "the reference is too noisy to judge by")


def _twice(limit: float | None) -> float | None:
    """The margin of a next token: two logits may each be off by the limit."""
    return None if limit is None else 2 * limit


def _times(factor: float, value: object, noise: Row) -> float | None:
    number, scale = read.number(value), read.number(noise.get("scale"))
    return None if number is None or scale is None else factor * number + ROUNDING * scale


def _within(value: object, limit: float | None) -> bool:
    number = read.number(value)
    return number is not None and limit is not None and 0 <= number <= limit


def _above(value: object, factor: float, noise: object) -> bool:
    number, other = read.number(value), read.number(noise)
    return number is not None and other is not None and number > factor * other and number > 0


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _same_shape(row: Row) -> bool:
    shape = row.get("shape")
    return isinstance(shape, list) and bool(shape) and shape == row.get("wanted_shape") and all(_positive(size) for size in shape)


def _text(value: object) -> str:
    number = read.number(value)
    return "none" if value is None else f"{number:.1e}" if number is not None else str(value)


def _at_most(name: str, value: object, limit: float | None, place: str) -> CheckResult:
    passed = _within(value, limit)
    return _check(name, passed, _text(value), f"<= {_text(limit)}", place)


def _check(name: str, passed: bool, value: str, threshold: str = "", message: str = "") -> CheckResult:
    return proof(name, passed, value, Boundary.PROVIDER, threshold, "" if passed else message)


def _missed(name: str) -> CheckResult:
    return _check(name, False, "no facts", "", "the rung wrote no such fact, or more than one")
