"""Judges of the rungs that follow weights and names (build, import, roundtrip, reload, mapping, order) and of those that compute
(parity, and two ranks against one).

- Tolerances come from the run itself: how far transformers is, on the same device and in the same precision, from transformers in higher
  precision. Megatron may be a few times as far. Every gradient must be transformers' own.
- A fact that is missing, doubled, incomplete or empty, and a number that is missing, NaN, infinite or a truth value, are missed checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seatrial.checks.probe_facts import Facts, Row, proof
from seatrial.core.records import CheckResult
from seatrial.core.verdict import Boundary
from seatrial.instruments.bridge import rungs_numbers
from seatrial.instruments.bridge.rungs_numbers import NOISE, SHARE, allowed


@dataclass(frozen=True, slots=True)
class RungJudgement:
    """What the facts of one rung prove."""

    checks: tuple[CheckResult, ...]
    figure: str = ""
    """A few letters for the table of families: `2.1e-07`, `26/26`."""
    limitations: tuple[str, ...] = ()


RungJudge = Callable[[Sequence[Row], str], RungJudgement]
"""From the facts of one rung of one model, and the device it ran on (`cpu`, `cuda`). A missing fact is a missed check."""


def only_fact(rows: Sequence[Row], fact: str, dtype: str | None = None) -> Row:
    """The only such fact; an empty one when there is none or more than one."""
    found = [row for row in rows if row.get("fact") == fact and dtype in (None, row.get("dtype"))]
    return found[0] if len(found) == 1 else {}


def number_of(value: object) -> float | None:
    """A finite number, or None."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def count_of(row: Mapping[str, Any], key: str) -> int:
    """How many a fact says; 0 when it does not."""
    value = row.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def figures_of(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The fields of a part of a fact; none when there is no such part."""
    found = row.get(key)
    return found if isinstance(found, dict) else {}


def length_of(found: object) -> int | None:
    """How many a list of a fact has (`instruments.bridge.training.listed`); None when it is no such list."""
    many, first = (found.get("count"), found.get("first")) if isinstance(found, dict) else (None, None)
    whole = isinstance(many, int) and not isinstance(many, bool) and isinstance(first, list) and many >= len(first)
    return many if whole else None


def first_of(found: object) -> list[Any]:
    names = found.get("first") if isinstance(found, dict) else None
    return names if isinstance(names, list) else []


NOISY_GRADIENTS = 1e-2
"""Of the largest gradient: noise above this is a defect itself and excuses nothing."""
SHOWN = 3


def judge_gradients(row: Mapping[str, Any], who: str = "") -> list[CheckResult]:
    worst, tensors, largest = row.get("worst"), row.get("tensors"), number_of(row.get("largest")) or 0.0
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
    apart, size, noise = (number_of(item.get(key)) for key in ("apart", "size", "noise"))
    if apart is None or size is None or noise is None:
        return False
    return min(apart, size, noise) >= 0 and noise <= NOISY_GRADIENTS * largest and apart <= allowed(size, noise, largest)


DTYPES = ("float32", "bfloat16")
CERTAIN = ("hidden_size", "num_layers", "vocab_size")
"""Settings that every configuration has: without them nothing was compared."""
COMPARED = {
    "missing": "no tensor is missing",
    "extra": "no tensor is too many",
    "reshaped": "shapes are the checkpoint's",
    "retyped": "dtypes are the model's",
    "unequal": "every bit is the checkpoint's",
}


def check(
    name: str, passed: bool, value: object, threshold: str = "", message: str = "", boundary: Boundary = Boundary.PROVIDER
) -> CheckResult:
    return proof(name, passed, "no facts" if value is None else value, boundary, threshold, message)


def none_of(name: str, row: Row, key: str, ok: bool = True, boundary: Boundary = Boundary.PROVIDER) -> CheckResult:
    """A list of a fact is there and empty; `ok`: whether there was anything that could have been in it."""
    count = length_of(row.get(key))
    value = None if count is None else str(count) if ok else f"{count}, of nothing"
    return check(name, ok and count == 0, value, "0", "; ".join(shown(row.get(key))), boundary)


def judge_build(rows: Sequence[Row], _device: str) -> RungJudgement:
    """The provider carries every value that the HF configuration says."""
    row = only_fact(rows, "build")
    settings, parameters = row.get("settings"), row.get("parameters")
    held = [item for item in settings if isinstance(item, dict)] if isinstance(settings, list) else []
    wrong = [item for item in held if not _same_value(item)]
    text = [f"{item.get('key')} is {item.get('config')}, the provider has {item.get('field')} {item.get('provider')}" for item in wrong]
    text += [f"{field}: not compared" for field in CERTAIN if field not in {item.get("field") for item in held}]
    value = f"{len(held) - len(wrong)}/{len(held)}"
    made = len(parameters) if isinstance(parameters, dict) else 0
    checks = (
        check("the provider builds a model", made > 0, f"{made} parameters", "> 0"),
        check("the provider has the configuration's values", not text, value, "all", "; ".join(text[:SHOWN])),
    )
    return RungJudgement(checks, value)


def _same_value(item: Mapping[str, Any]) -> bool:
    """Equal as values; a truth value is not a number."""
    left, right = item.get("config"), item.get("provider")
    return left is not None and isinstance(left, bool) == isinstance(right, bool) and left == right


def judge_import(rows: Sequence[Row], _device: str) -> RungJudgement:
    """Every parameter was written, and every tensor on disk was read."""
    row = only_fact(rows, "import")
    parameters, padding = count_of(row, "parameters"), count_of(row, "padding_rows")
    checks = (
        none_of("the checkpoint has no NaN, which marks unwritten parameters", row, "nan_on_disk"),
        none_of("the import writes every parameter", row, "unreached", parameters > 0),
        none_of("the import reads every tensor on disk", row, "unread", count_of(row, "stored") > 0),
    )
    notes = (f"{padding} rows of padding in the vocabulary keep what they were made with",) if padding > 0 else ()
    return RungJudgement(checks, f"{parameters - (length_of(row.get('unreached')) or 0)}/{parameters}", notes)


def judge_roundtrip(rows: Sequence[Row], _device: str) -> RungJudgement:
    """The export is the checkpoint, bit for bit, in both precisions."""
    found = {dtype: only_fact(rows, "roundtrip", dtype) for dtype in DTYPES}
    checks = [each for dtype, row in found.items() for each in _compared(row, f"export in {dtype}")]
    notes = [note for dtype, row in found.items() for note in _wider(row, dtype)]
    return RungJudgement(tuple(checks), _figure(found["float32"]), tuple(notes))


def judge_reload(rows: Sequence[Row], _device: str) -> RungJudgement:
    """The saved directory is the checkpoint again, for transformers too."""
    saved, row = only_fact(rows, "saved"), only_fact(rows, "reload")
    loading, tokenizer = figures_of(row, "loading"), figures_of(row, "tokenizer")
    told = [f"{kind}: {name}" for kind, found in loading.items() if length_of(found) != 0 for name in shown(found) or ["not counted"]]
    told += [f"{kind}: not reported" for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if kind not in loading]
    files, lost = tokenizer.get("files"), tokenizer.get("lost")
    kept = isinstance(files, list) and lost == [] and (not files or tokenizer.get("same") is True)
    same = row.get("logits_equal") is True and row.get("logits_finite") is True
    apart, gone = f"difference {row.get('max_difference')}", "; ".join((lost or [])[:SHOWN])
    checks = (
        *_compared(saved, "save_hf_pretrained"),
        check("transformers loads every weight and makes none up", not told, f"{len(told)} complaints", "0", "; ".join(told[:SHOWN])),
        none_of("the saved configuration is the original's", row, "config"),
        check("the saved tokenizer is the original's", kept, str(tokenizer.get("same")), "same tokens", gone),
        check("logits of the saved checkpoint are the original's", same, apart, "bit-equal, finite"),
    )
    notes = ["the checkpoint has no tokenizer: saving one was not tried"] if files == [] else []
    return RungJudgement(checks, _figure(saved), (*notes, *_wider(saved, "float32")))


def judge_mapping(rows: Sequence[Row], _device: str) -> RungJudgement:
    """Every Megatron name and every HF name is mapped exactly once."""
    row = only_fact(rows, "mapping")
    ours, stored = count_of(row, "megatron") > 0, count_of(row, "stored")
    theirs = stored > 0
    checks = (
        none_of("every Megatron parameter has a mapping", row, "unmapped", ours),
        none_of("no two mappings of a Megatron parameter disagree", row, "ambiguous", ours),
        none_of("every HF tensor has a mapping", row, "hf_unmapped", theirs),
        none_of("no HF tensor is made by two Megatron parameters", row, "hf_ambiguous", theirs),
        none_of("every mapping leads to a tensor on disk", row, "hf_absent", theirs),
        none_of("fused and local norms are mapped alike", row, "norms_unlike", theirs and isinstance(row.get("norms"), int)),
    )
    notes = ["no fused norm is mapped: whether layers of Transformer Engine get theirs is not shown"] if row.get("norms") == 0 else []
    for key, text in (("repeated", "mapped twice, both times the same way"), ("renamed", "mapped to names that need not be the disk's")):
        if count := length_of(row.get(key)):
            notes.append(f"{count} parameters are {text}: {', '.join(shown(row.get(key)))}")
    bad = sum(length_of(row.get(key)) or 0 for key in ("hf_unmapped", "hf_ambiguous"))
    return RungJudgement(checks, f"{stored - bad}/{stored}", tuple(notes))


def judge_order(rows: Sequence[Row], _device: str) -> RungJudgement:
    """The export can feed a refit: known names, each once, in one order, with whole groups."""
    row = only_fact(rows, "order")
    names = count_of(row, "names")
    asked = (
        ("the export has every name of the checkpoint", "missing", names > 0),
        ("the export has no other names", "unknown", names > 0),
        ("no name comes twice", "twice", names > 0),
        ("a second export comes in the same order", "moved", row.get("second") == names > 0),
        ("the order is that of the conversion tasks", "out_of_order", names > 0),
        ("parts that vLLM stacks arrive before the next layer", "split", names > 0),
        ("the export follows the weights when they change", "stale", names > 0),
        ("every expert of every layer is whole", "expert_lacking", "expert_layers" in row),
    )
    notes = []
    if aliases := length_of(row.get("aliases")):
        notes.append(f"{aliases} exported tensors share memory with live parameters: clone before an asynchronous refit")
    if row.get("experts") and count_of(row, "expert_layers") == 0:
        notes.append("experts are one tensor per layer: their completeness is left to the round trip")
    checks = tuple(none_of(name, row, key, ok, Boundary.REFIT) for name, key, ok in asked)
    return RungJudgement(checks, f"{names}/{count_of(row, 'stored')}", tuple(notes))


def _compared(row: Row, what: str) -> list[CheckResult]:
    """The checks of one comparison with the files on disk. Together they must account for every tensor."""
    stored, equal = count_of(row, "stored"), count_of(row, "equal")
    absent = stored - equal - sum(length_of(row.get(key)) or 0 for key in ("missing", "reshaped", "retyped", "unequal", "tied_absent"))
    counted = stored > 0 and equal > 0 and absent == 0
    made = [none_of(f"{what}: {text}", row, key, stored > 0) for key, text in COMPARED.items()]
    return [*made, check(f"{what}: every tensor was compared", counted, _figure(row), "all")]


def _figure(row: Row) -> str:
    return f"{count_of(row, 'equal')}/{count_of(row, 'stored')}"


def _wider(row: Row, dtype: str) -> list[str]:
    count, names = length_of(row.get("wider")), ", ".join(shown(row.get("wider")))
    return [f"{count} tensors are exported in the disk's dtype, not {dtype}: {names}"] if count else []


def shown(found: object) -> list[str]:
    """The first of a list, for people."""
    return [f"{item.get('name')} ({item.get('looks')})" if isinstance(item, dict) else str(item) for item in first_of(found)[:SHOWN]]


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


def judge_parity(rows: Sequence[Row], device: str) -> RungJudgement:
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
    first = figures_of(facts.one("parity", dtype="float32") or {}, "megatron")
    return RungJudgement(tuple(checks), _text(first.get("max")), tuple(limitations))


def _precision(row: Row, dtype: str, device: str, place: str) -> list[CheckResult]:
    ours, error, noise = figures_of(row, "megatron"), figures_of(row, "megatron_error"), figures_of(row, "hf_error")
    flipped = row.get("rerouted")
    kept = figures_of(row, "untouched") if flipped else error
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
        cosine = number_of(kept.get("cosine"))
        checks.append(_check(f"{name}: cosine", cosine is not None and cosine >= COSINE, _text(cosine), f">= {COSINE}", place))
    return checks


def judge_parallel(rows: Sequence[Row], device: str) -> RungJudgement:
    """Rungs tp, pp, ep, cp and sp; the figure is the largest difference from the single rank."""
    row = Facts(tuple(rows)).one("parallel")
    if row is None:
        return RungJudgement((_missed("two ranks against one"),))
    found = row.get("ranks")
    ranks: list[Row] = [rank for rank in found if isinstance(rank, dict)] if isinstance(found, list) else []
    noise = figures_of(row, "hf_error")
    limit = _limit(noise, routed=False)
    if limit is not None and device == "cpu" and _within(noise.get("max"), BAR):
        limit = min(limit, BAR)
    checks = [_divided(row, ranks), _precise("", noise, "float32")]
    trained = rungs_numbers.trains(figures_of(row, "asked"), 1 if _positive(row.get("experts")) else 0)
    place = next((text for text in (where(figures_of(rank, "located")) for rank in ranks) if text), "")
    for rank in ranks:
        name = f"rank {rank.get('rank')}"
        checks += _exported(name, figures_of(rank, "export"))
        checks += judge_gradients(figures_of(rank, "gradients"), f"{name}: ") if trained else []
        for other, text in (("single", "the single rank"), ("transformers", "transformers")):
            figures = figures_of(rank, other)
            checks.append(_at_most(f"{name}: logits, largest difference from {text}", figures.get("max"), limit, place))
            checks.append(_at_most(f"{name}: next token, margin where {text} differs", figures.get("margin"), _twice(limit), place))
    worst = [number_of(figures_of(rank, "single").get("max")) for rank in ranks]
    notes = () if trained else ("gradients were not compared: Megatron trains no such model",)
    return RungJudgement(tuple(checks), _text(max(worst, key=lambda value: math.inf if value is None else value, default=None)), notes)


def _divided(row: Row, ranks: list[Row]) -> CheckResult:
    """The model really was spread over two ranks: by Megatron's own word, by the parameters on each, and by what was put together."""
    asked, sizes, whole = row.get("asked"), row.get("sizes"), row.get("whole")
    reasons = []
    if not asked or asked != sizes or asked == {"tp": 1, "pp": 1, "ep": 1, "cp": 1, "sp": False}:
        reasons.append(f"asked for {asked}, Megatron has {sizes}")
    if [rank.get("rank") for rank in ranks] != [0, 1]:
        reasons.append(f"ranks {[rank.get('rank') for rank in ranks]} reported")
    counts = [rank.get("parameters") for rank in ranks]
    context = isinstance(asked, dict) and asked.get("cp") == 2  # it divides the sequence alone: every rank has the whole model
    if not context and not all(isinstance(count, int) and isinstance(whole, int) and 0 < count < whole for count in counts):
        reasons.append(f"parameters per rank {counts}, of the whole model {whole}")
    for size, value, axis in (("tp", 2, "features"), ("sp", True, "positions")):
        wanted = isinstance(asked, dict) and asked.get(size) == value
        if wanted and not all(_positive(figures_of(figures_of(rank, "located"), "split").get(axis)) for rank in ranks):
            reasons.append(f"no module had its {axis} divided")
    return _check("the model is divided", not reasons, str(counts), f"< {whole} each", "; ".join(reasons))


def _exported(name: str, export: Row) -> list[CheckResult]:
    """The export is the checkpoint, bit for bit; rows of padding after the vocabulary are a check of their own."""
    reshaped = first_of(export.get("reshaped"))
    padded = [item for item in reshaped if isinstance(item, dict) and item.get("padded") is True]
    counts = {key: length_of(export.get(key)) for key in (*WRONG, "reshaped")}
    other = counts["reshaped"] != len(padded)
    ok = _positive(export.get("stored")) and _positive(export.get("equal")) and not other and all(counts[key] == 0 for key in WRONG)
    named = [
        str(item.get("name") if isinstance(item, dict) else item) for key in (*WRONG, "reshaped") for item in first_of(export.get(key))
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
    left = figures_of(row, "untouched").get("positions", 0)
    return [f"{dtype}: {count} positions follow another choice of experts than in float32; largest errors are judged on the other {left}"]


def _limit(noise: Row, routed: bool) -> float | None:
    limits = [_times(FACTOR, noise.get("max"), noise)]
    if routed:
        limits.append(_times(TAIL, noise.get("median"), noise))
    known = [limit for limit in limits if limit is not None]
    return min(known) if len(known) == len(limits) else None


def _precise(of: str, noise: Row, dtype: str) -> CheckResult:
    scale = number_of(noise.get("scale"))
    limit = None if scale is None else NOISY[dtype] * scale
    return _at_most(f"{of}transformers' own error", noise.get("max"), limit, "the reference is too noisy to judge by")


def _twice(limit: float | None) -> float | None:
    """The margin of a next token: two logits may each be off by the limit."""
    return None if limit is None else 2 * limit


def _times(factor: float, value: object, noise: Row) -> float | None:
    number, scale = number_of(value), number_of(noise.get("scale"))
    return None if number is None or scale is None else factor * number + ROUNDING * scale


def _within(value: object, limit: float | None) -> bool:
    number = number_of(value)
    return number is not None and limit is not None and 0 <= number <= limit


def _above(value: object, factor: float, noise: object) -> bool:
    number, other = number_of(value), number_of(noise)
    return number is not None and other is not None and number > factor * other and number > 0


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _same_shape(row: Row) -> bool:
    shape = row.get("shape")
    return isinstance(shape, list) and bool(shape) and shape == row.get("wanted_shape") and all(_positive(size) for size in shape)


def _text(value: object) -> str:
    number = number_of(value)
    return "none" if value is None else f"{number:.1e}" if number is not None else str(value)


def _at_most(name: str, value: object, limit: float | None, place: str) -> CheckResult:
    passed = _within(value, limit)
    return _check(name, passed, _text(value), f"<= {_text(limit)}", place)


def _check(name: str, passed: bool, value: str, threshold: str = "", message: str = "") -> CheckResult:
    return check(name, passed, value, threshold, "" if passed else message)


def _missed(name: str) -> CheckResult:
    return _check(name, False, "no facts", "", "the rung wrote no such fact, or more than one")
