"""Judges of the rungs that follow weights and names: build, import, roundtrip, reload, mapping, order.

Each names the tensor, parameter, mapping or setting that is wrong. A fact that is missing, doubled or incomplete is a missed check, and so
is one that says nothing: no tensors, no parameters, no settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seatrial.loops.facts import Row
from seatrial.loops.proof import proof
from seatrial.model.record import CheckResult
from seatrial.model.verdict import Boundary
from seatrial.proving.bridge.judgement import Judgement
from seatrial.proving.bridge.judges import read

SHOWN = 3
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


def judge_build(rows: Sequence[Row], _device: str) -> Judgement:
    """The provider carries every value that the HF configuration says."""
    row = read.only(rows, "build")
    settings, parameters = row.get("settings"), row.get("parameters")
    held = [item for item in settings if isinstance(item, dict)] if isinstance(settings, list) else []
    wrong = [item for item in held if not _same_value(item)]
    there = {item.get("field") for item in held}
    lacking = [field for field in CERTAIN if field not in there]
    text = [f"{item.get('key')} is {item.get('config')}, the provider has {item.get('field')} {item.get('provider')}" for item in wrong]
    text += [f"{field}: not compared" for field in lacking]
    value = f"{len(held) - len(wrong)}/{len(held)}"
    made = len(parameters) if isinstance(parameters, dict) else 0
    checks = (
        _check("the provider builds a model", made > 0, f"{made} parameters", "> 0"),
        _check("the provider has the configuration's values", not text, value, "all", text),
    )
    return Judgement(checks, value)


def _same_value(item: Mapping[str, Any]) -> bool:
    """Equal as values; a truth value is not a number."""
    left, right = item.get("config"), item.get("provider")
    return left is not None and isinstance(left, bool) == isinstance(right, bool) and left == right


def judge_import(rows: Sequence[Row], _device: str) -> Judgement:
    """Every parameter was written, and every tensor on disk was read."""
    row = read.only(rows, "import")
    parameters, stored = read.count(row, "parameters"), read.count(row, "stored")
    unreached, padding = read.length(row.get("unreached")), read.count(row, "padding_rows")
    figure = f"{parameters - (unreached or 0)}/{parameters}"
    checks = (
        _check("the checkpoint has no NaN, which marks unwritten parameters", *_none(row, "nan_on_disk")),
        _check("the import writes every parameter", *_none(row, "unreached", parameters > 0)),
        _check("the import reads every tensor on disk", *_none(row, "unread", stored > 0)),
    )
    notes = (f"{padding} rows of padding in the vocabulary keep what they were made with",) if padding > 0 else ()
    return Judgement(checks, figure, notes)


def judge_roundtrip(rows: Sequence[Row], _device: str) -> Judgement:
    """The export is the checkpoint, bit for bit, in both precisions."""
    checks: list[CheckResult] = []
    notes: list[str] = []
    figure = ""
    for dtype in DTYPES:
        row = read.only([found for found in rows if found.get("dtype") == dtype], "roundtrip")
        checks += _compared(row, f"export in {dtype}")
        figure = figure or _figure(row)
        notes += _wider(row, dtype)
    return Judgement(tuple(checks), figure, tuple(notes))


def judge_reload(rows: Sequence[Row], _device: str) -> Judgement:
    """The saved directory is the checkpoint again, for transformers too."""
    saved, row = read.only(rows, "saved"), read.only(rows, "reload")
    loading, tokenizer = row.get("loading"), row.get("tokenizer")
    loading = loading if isinstance(loading, dict) else {}
    told = [f"{kind}: {name}" for kind, found in loading.items() if read.length(found) != 0 for name in _shown(found) or ["not counted"]]
    told += [f"{kind}: not reported" for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if kind not in loading]
    tokenizer = tokenizer if isinstance(tokenizer, dict) else {}
    files, lost = tokenizer.get("files"), tokenizer.get("lost")
    kept = isinstance(files, list) and lost == [] and (not files or tokenizer.get("same") is True)
    same = row.get("logits_equal") is True and row.get("logits_finite") is True
    checks = (
        *_compared(saved, "save_hf_pretrained"),
        _check("transformers loads every weight and makes none up", not told, f"{len(told)} complaints", "0", told),
        _check("the saved configuration is the original's", *_none(row, "config")),
        _check("the saved tokenizer is the original's", kept, str(tokenizer.get("same")), "same tokens", lost or []),
        _check("logits of the saved checkpoint are the original's", same, f"difference {row.get('max_difference')}", "bit-equal, finite"),
    )
    notes = ["the checkpoint has no tokenizer: saving one was not tried"] if files == [] else []
    return Judgement(checks, _figure(saved), (*notes, *_wider(saved, "float32")))


def judge_mapping(rows: Sequence[Row], _device: str) -> Judgement:
    """Every Megatron name and every HF name is mapped exactly once."""
    row = read.only(rows, "mapping")
    ours, stored = read.count(row, "megatron"), read.count(row, "stored")
    bad = sum(read.length(row.get(key)) or 0 for key in ("hf_unmapped", "hf_ambiguous"))
    checks = (
        _check("every Megatron parameter has a mapping", *_none(row, "unmapped", ours > 0)),
        _check("no two mappings of a Megatron parameter disagree", *_none(row, "ambiguous", ours > 0)),
        _check("every HF tensor has a mapping", *_none(row, "hf_unmapped", stored > 0)),
        _check("no HF tensor is made by two Megatron parameters", *_none(row, "hf_ambiguous", stored > 0)),
        _check("every mapping leads to a tensor on disk", *_none(row, "hf_absent", stored > 0)),
        _check("fused and local norms are mapped alike", *_none(row, "norms_unlike", stored > 0 and isinstance(row.get("norms"), int))),
    )
    notes = ["no fused norm is mapped: whether layers of Transformer Engine get theirs is not shown"] if row.get("norms") == 0 else []
    for key, text in (("repeated", "mapped twice, both times the same way"), ("renamed", "mapped to names that need not be the disk's")):
        if read.length(row.get(key)):
            notes.append(f"{read.length(row.get(key))} parameters are {text}: {', '.join(_shown(row.get(key)))}")
    return Judgement(checks, f"{stored - bad}/{stored}", tuple(notes))


def judge_order(rows: Sequence[Row], _device: str) -> Judgement:
    """The export can feed a refit: known names, each once, in one order, with whole groups."""
    row = read.only(rows, "order")
    names, experts = read.count(row, "names"), row.get("experts")
    again = row.get("second") == names > 0
    fused = bool(experts) and read.count(row, "expert_layers") == 0
    asked = (
        ("the export has every name of the checkpoint", "missing", names > 0),
        ("the export has no other names", "unknown", names > 0),
        ("no name comes twice", "twice", names > 0),
        ("a second export comes in the same order", "moved", again),
        ("the order is that of the conversion tasks", "out_of_order", names > 0),
        ("parts that vLLM stacks arrive before the next layer", "split", names > 0),
        ("the export follows the weights when they change", "stale", names > 0),
        ("every expert of every layer is whole", "expert_lacking", "expert_layers" in row),
    )
    checks = tuple(_check(name, *_none(row, key, ok), boundary=Boundary.REFIT) for name, key, ok in asked)
    notes = []
    if read.length(row.get("aliases")):
        notes.append(
            f"{read.length(row.get('aliases'))} exported tensors share memory with live parameters: clone before an asynchronous refit"
        )
    if fused:
        notes.append("experts are one tensor per layer: their completeness is left to the round trip")
    return Judgement(checks, f"{names}/{read.count(row, 'stored')}", tuple(notes))


def _compared(row: Row, what: str) -> list[CheckResult]:
    """The checks of one comparison with the files on disk. Together they must account for every tensor."""
    stored, equal = read.count(row, "stored"), read.count(row, "equal")
    absent = stored - equal - sum(read.length(row.get(key)) or 0 for key in ("missing", "reshaped", "retyped", "unequal", "tied_absent"))
    checks = [_check(f"{what}: {text}", *_none(row, key, stored > 0)) for key, text in COMPARED.items()]
    counted = stored > 0 and equal > 0 and absent == 0
    return [*checks, _check(f"{what}: every tensor was compared", counted, f"{equal}/{stored}", "all")]


def _figure(row: Row) -> str:
    return f"{read.count(row, 'equal')}/{read.count(row, 'stored')}"


def _wider(row: Row, dtype: str) -> list[str]:
    found = row.get("wider")
    return (
        [f"{read.length(found)} tensors are exported in the disk's dtype, not {dtype}: {', '.join(_shown(found))}"]
        if read.length(found)
        else []
    )


def _shown(found: object) -> list[str]:
    """The first of a list, for people."""
    return [f"{item.get('name')} ({item.get('looks')})" if isinstance(item, dict) else str(item) for item in read.first(found)[:SHOWN]]


def _none(row: Row, key: str, ok: bool = True) -> tuple[bool, str, str, list[str]]:
    """That a list of a fact is there and empty: passed, value, threshold, names."""
    count = read.length(row.get(key))
    if count is None:
        return False, "no facts", "0", []
    return ok and count == 0, str(count) if ok else f"{count}, of nothing", "0", _shown(row.get(key))


def _check(
    name: str, passed: bool, value: str, threshold: str, named: Sequence[str] = (), boundary: Boundary = Boundary.PROVIDER
) -> CheckResult:
    return proof(name, passed, value, boundary, threshold, "; ".join(named[:SHOWN]))
