"""What a conformance probe leaves for people: the table of families and rungs, summary.md, and a model verification card.

The card has the format of the Bridge's skill `create-model-verification-card`. An item is `verified` only when its Slurm launcher has
run; a probe runs none, so every item is `unverified` and says what was measured instead. The card holds no path, address or name of a
machine: where one slipped in, there is no card. No YAML library is needed: this shape is mappings, lists of words, numbers and quoted text.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.core.errors import UserError
from seatrial.core.files import read_table, write_error
from seatrial.core.records import RepoState
from seatrial.core.text import one_line
from seatrial.core.verdict import Verdict
from seatrial.instruments.bridge.rungs import FAMILIES
from seatrial.probes.bridge_verdict import BridgeProbe, BridgeRequest, FamilyResult, RungResult, shown_model
from seatrial.probes.refit_run import check_line, columns, section
from seatrial.report.markdown import prose

WORDS = {Verdict.PASS: "ok", Verdict.FAIL: "FAIL", Verdict.SKIPPED: "skip", Verdict.BLOCKED: "BLOCKED"}
_LONGEST = 300


def bridge_table(families: Sequence[FamilyResult], rungs: Sequence[str]) -> str:
    """Families down, rungs across: the measured value of what passed, the verdict of the rest, - where a rung does not apply."""
    rows = [("family", *rungs)]
    for family in families:
        found = {rung.rung: rung for rung in family.rungs}
        rows.append((family.model, *(_cell(found.get(rung)) for rung in rungs)))
    return columns(rows)


def _cell(rung: RungResult | None) -> str:
    if rung is None:
        return "skip"
    if rung.verdict is Verdict.PASS:
        return one_line(rung.figure) or "ok"
    return WORDS[rung.verdict] if rung.applicable else "-"


def bridge_summary(probe: BridgeProbe, out: Path | None) -> str:
    """The summary in the fixed order; recorded texts are no markup, and stay on one line each, so that none can imitate a heading."""
    judged, asked = probe.judged, probe.asked
    state = [f"{repo.name} at {repo.commit[:12]}, {len(repo.dirty)} dirty files: {repo.path}" for repo in probe.changes]
    head = [
        f"Result: {judged.verdict} - {prose(judged.reason)}",
        f"Requested coverage: Bridge conformance on {asked.device}; {prose(', '.join(asked.rungs))}",
        f"Model: {prose(', '.join(asked.models))}",
    ]
    evidence = [f"Command: {' '.join(probe.command)}", *([f"Interpreter: {probe.python}"] if probe.python else [])]
    evidence += [f"Change: {text}" for text in state or ["none: the installed packages"]]
    evidence += [f"{package}: {text}" for package, text in judged.versions.items()]
    evidence += [f"Facts and logs: {out}"] if out else []
    sections = (
        ("Deliverables", list(_deliverables(probe))),
        ("Missed checks", list(_missed(judged.families))),
        ("Evidence", evidence),
        ("Limitations", judged.limitations),
        ("Follow-ups", judged.follow_ups),
    )
    return "\n\n".join(["\n".join(head), *(section(title, bullets) for title, bullets in sections)]) + "\n"


def _deliverables(probe: BridgeProbe) -> Iterator[str]:
    for family in probe.judged.families:
        yield f"{family.model}: {family.verdict}{'' if family.counted else ' (not counted)'} - {family.reason[:_LONGEST]}"
        for rung in family.rungs:
            figure = f" [{rung.figure}]" if rung.figure else ""
            at = f" (boundary {rung.boundary})" if rung.boundary else ""
            yield f"{family.model}: {rung.rung}, {rung.title}: {rung.verdict}{figure}{at} - {rung.reason[:_LONGEST]}"
    tests = probe.judged.own_tests
    if tests is not None:
        yield f"Bridge's own tests: {tests.verdict} - {tests.reason[:_LONGEST]}"


def _missed(families: Sequence[FamilyResult]) -> Iterator[str]:
    for family in families:
        for rung in family.rungs:
            yield from (f"{family.model}: {rung.rung}: {check_line(check)}" for check in rung.checks if not check.passed)


DISCLAIMER = (
    "Performance disclaimer: this model has not been performance-tuned; reported timing and throughput metrics are sanity checks, "
    "not optimized performance results."
)
"""Word for word: a card without a tuned recipe must begin with it."""
NO_CONTAINER = "nvcr.io/nvidia/pytorch:replace-me-the-probe-ran-in-no-container"
HARDWARE = "H100"
"""Items of training need a public accelerator as their key, also where nothing has run."""
DIRECT = ("hf_to_megatron_cpu", "hf_to_megatron_gpu", "megatron_to_hf_cpu", "megatron_to_hf_gpu", "manual_forward_pass", "inference")
TRAINING = ("pretrain", "sft", "sft_export_inference", "sft_long_context", "peft", "checkpoint_resume")
METRICS = (
    *("initial_loss", "final_loss", "last_10_steps_step_time_ms_avg", "last_10_steps_model_tflops_per_gpu_avg"),
    "last_10_steps_tokens_per_second_per_gpu_avg",
)
RUNGS: Mapping[str, tuple[str, ...]] = {
    "hf_to_megatron": ("import", "mapping"),
    "megatron_to_hf": ("roundtrip", "reload"),
    "manual_forward_pass": ("parity",),
    "peft": ("lora",),
    "checkpoint_resume": ("checkpoint",),
}
"""The rungs that come near an item, by the item's name without its device."""
_PRIVATE = {
    "an absolute path": r"(?<![A-Za-z0-9_$.])/[A-Za-z0-9._${}-]+",
    "a path of a home or parent directory": r"~[\w.-]*/|\.\./",
    "a variable of an environment": r"\$\{?[A-Za-z_]",
    "an address": r"\b[a-z][a-z0-9+.-]*://|[\w.%+-]+@[\w.-]+\.[A-Za-z]{2,}|(?<!\d)(?:\d{1,3}\.){3}\d{1,3}(?!\d)",
    "the word cluster": r"(?i)\bcluster\b",
}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_KEY = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a card says about the model and what was under test."""

    model: str
    """As it is shown."""
    tiny: bool
    """Made by us, with random weights."""
    architecture: str
    transformers: str
    bridge_commit: str
    device: str


def require_card(asked: BridgeRequest, changes: Sequence[RepoState], place: Path) -> None:
    """Refuse, before anything runs, a card that cannot come of it, or that cannot be written to its place."""
    _require_plain(len(asked.models), asked.fault)
    _clean_commit(_bridge(changes))
    if asked.models[0] not in FAMILIES:
        _architecture(asked.models, shown_model(asked.models[0]))
    if place.is_dir():
        raise UserError(f"--card {place}: is a directory", "name a file")
    there = next(parent for parent in place.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise write_error(place, error) from error


def card_text(probe: BridgeProbe) -> str:
    """The card of a probe of one model, as YAML. A UserError says why there can be none."""
    _require_plain(len(probe.judged.families), probe.asked.fault)
    family = probe.judged.families[0]
    text = "".join(f"{line}\n" for line in _lines(card(family, about(probe, family)), 0))
    for what, pattern in _PRIVATE.items():
        if found := re.search(pattern, text.replace(NO_CONTAINER, "")):
            raise UserError(
                f"the card would hold {what}: {found[0]!r}", "rename the model's directory, or report this as a mistake of Seatrial"
            )
    return text


def _require_plain(models: int, fault: str | None) -> None:
    if models != 1:
        raise UserError(f"a card is of one model, and here are {models}", "name one with --model")
    if fault:
        raise UserError(f"with the fault {fault} what runs is not the commit that a card names", "leave --fault or --card out")


def _bridge(changes: Sequence[RepoState]) -> RepoState | None:
    return next((change for change in changes if "megatron.bridge" in change.packages), None)


def about(probe: BridgeProbe, family: FamilyResult) -> About:
    tiny = family.model in FAMILIES and family.model in probe.asked.models  # a directory may be called like a family
    version = _VERSION.match(probe.judged.versions.get("transformers", ""))
    if version is None:
        raise UserError("the card needs the version of transformers, and the probe does not know it", "see why the probe did not start")
    return About(
        model=family.model,
        tiny=tiny,
        architecture=FAMILIES[family.model].architecture if tiny else _architecture(probe.asked.models, family.model),
        transformers=version[0],
        bridge_commit=_clean_commit(_bridge(probe.changes)),
        device=probe.asked.device,
    )


def _clean_commit(repo: RepoState | None) -> str:
    """A card names one commit, and nothing but that commit may have run."""
    if repo is None:
        raise UserError("a card names the commit of the Bridge, and no checkout is under test", "name it: --change bridge=PATH")
    if repo.dirty:
        raise UserError(f"{repo.path}: has uncommitted changes, and a card names a commit", "commit them, or leave --card out")
    if not _COMMIT.fullmatch(repo.commit):
        raise UserError(f"{repo.path}: {repo.commit} is no commit of 40 letters", "a card needs a repository with SHA-1 names")
    return repo.commit


def _architecture(models: Sequence[str], model: str) -> str:
    place = next((Path(asked) for asked in models if shown_model(asked) == model), None)
    names = read_table(place / "config.json").get("architectures") if place is not None else None
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise UserError(f"{place or model}: config.json names no architecture", 'add "architectures" to its config.json')
    return names[0]


def card(family: FamilyResult, about: About) -> dict[str, Any]:
    kind = "a tiny model of this family with random weights, not a public checkpoint" if about.tiny else "the weights of a local checkpoint"
    summary = (
        f"{DISCLAIMER} Draft made by Seatrial: nothing here is verified by the contract of this card, because no public launcher was run. "
        f"What was measured on {about.device} with {kind} is said in the items."
    )
    return {
        "title": re.sub(r"\W+", "_", f"{about.model}_tiny_random" if about.tiny else about.model).strip("_").lower(),
        "summary": summary,
        "verification_index": {"model_level": {"unverified": list(DIRECT)}, "training": {HARDWARE: {"unverified": list(TRAINING)}}},
        "model": {
            "hf_id": None,
            "hf_revision": None,
            "architecture": about.architecture,
            "min_transformers_version": about.transformers,
        },
        "verification_environment": {"base_container": NO_CONTAINER, "bridge_commit": about.bridge_commit},
        "items": {
            **{name: _item(name, _measured(name, family.rungs, about)) for name in DIRECT},
            **{name: {HARDWARE: _item(name, _measured(name, family.rungs, about))} for name in TRAINING},
        },
    }


def _item(name: str, measured: str | None) -> dict[str, Any]:
    item: dict[str, Any] = {"status": "unverified", "precision": None}
    if name in ("sft_export_inference", "checkpoint_resume"):
        item["depends_on"] = "sft" if name == "sft_export_inference" else "pretrain"
    item["commands" if name == "sft_export_inference" else "command"] = None
    item["last_verified"] = None
    item["expected_result"] = measured
    if name in ("pretrain", "sft", "sft_long_context", "peft"):
        item["enabled_features"] = {}
    if name in TRAINING and name != "sft_export_inference":
        item["metrics"] = dict.fromkeys(METRICS)
    if name == "checkpoint_resume":
        tolerances = {"loss_relative_tolerance": 0.01, "loss_absolute_tolerance": 1e-6}
        item["resume_comparison"] = {"reference_item": "pretrain", "sentinel_steps": None, **tolerances, "sentinels_match": None}
    return item


def _measured(name: str, rungs: Sequence[RungResult], about: About) -> str | None:
    """What was measured near an item, on its device; None when nothing was."""
    plain, _, device = name.rpartition("_")
    if device in ("cpu", "gpu") and (device == "gpu") != (about.device == "cuda"):
        return None
    wanted = RUNGS.get(plain if device in ("cpu", "gpu") else name, ())
    found = [f"{rung.title}: {rung.verdict}" + (f" ({rung.figure})" if rung.figure else "") for rung in rungs if rung.rung in wanted]
    if not found:
        return None
    kind = "a tiny random-weight model of the family" if about.tiny else "the weights of a local checkpoint"
    return f"Not verified. Seatrial measured on {about.device} with {kind}: {'; '.join(found)}. The launcher of this item was not run."


def _lines(value: Mapping[str, Any], depth: int) -> Iterator[str]:
    for key, entry in value.items():
        if not _KEY.fullmatch(key):
            raise ValueError(f"no plain key: {key!r}")
        start = f"{'  ' * depth}{key}:"
        if isinstance(entry, dict) and entry:
            yield start
            yield from _lines(entry, depth + 1)
        elif isinstance(entry, list) and entry:
            yield start
            yield from (f"{'  ' * (depth + 1)}- {_scalar(one)}" for one in entry)
        else:
            yield f"{start} {_scalar(entry)}"


def _scalar(value: object) -> str:
    """Text is always quoted; a float always has a point, without which YAML 1.1 takes `1e-06` for text."""
    if value is None:
        return "null"
    if value == {}:
        return "{}"
    if isinstance(value, float) and math.isfinite(value):
        head, mark, exponent = repr(value).partition("e")
        return f"{head}{'' if '.' in head else '.0'}{mark}{exponent}"
    if isinstance(value, str) and value.isprintable():
        return json.dumps(value, ensure_ascii=False)
    raise ValueError(f"a card cannot hold {value!r}")
