"""probe.json of a conformance probe, and what the facts of a ladder prove: a pure function from facts to verdicts.

- A rung passes when it ran to its end and met every check; a rung that raised, crashed or hung is a Fail.
- A rung whose error is a part that this machine lacks is Skipped, and names the part. The exception itself decides; a module or name of
  Megatron or transformers that cannot be imported is never the machine's fault. A Skipped rung counts when it was asked for by name; a
  rung that does not apply never counts. Nothing that counts is a Skipped probe, never a Pass.
- Facts that are missing, torn, or of another checkout than the one under test prove nothing: Blocked. So does a ladder that called none of
  the functions that a change touches.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from seatrial.checks.bridge import JUDGES
from seatrial.checks.bridge_rungs import RungJudgement
from seatrial.checks.probe_facts import Facts, Row
from seatrial.core.guarded import parse_python, read_file
from seatrial.core.records import SCHEMA_VERSION, CheckResult, OwnVerdict, Record, RepoState
from seatrial.core.verdict import Boundary, Verdict, worst
from seatrial.evidence.changes import changed_lines
from seatrial.evidence.imports import comes_from
from seatrial.instruments.bridge import rungs as ladder
from seatrial.probes.own_tests import OwnTests


class BridgeRequest(Record):
    """What the probe was to show."""

    models: tuple[str, ...]
    """Families, or directories."""
    rungs: tuple[str, ...]
    models_named: bool = True
    """False when every family was taken: one that is known not to run here does not count then."""
    rungs_named: bool = False
    """True when rungs were asked for by name: one that cannot run here counts then."""
    device: str = "cpu"
    engine: str = "transformers"
    fault: str | None = None


def shown_model(model: str) -> str:
    """What a model is called in tables and facts."""
    return model if model in ladder.FAMILIES else Path(model).absolute().name


class RungResult(Record):
    """One rung of one family."""

    rung: str
    title: str
    verdict: Verdict
    reason: str
    counted: bool = True
    """False: it does not apply, or it is known not to run here and nobody asked for it by name."""
    applicable: bool = True
    """Whether the question that the rung asks can be asked of this family."""
    boundary: Boundary | None = None
    figure: str = ""
    """The measured value, in a few letters."""
    checks: tuple[CheckResult, ...] = ()
    limitations: tuple[str, ...] = ()
    seconds: float = 0
    cpu_seconds: float = 0


class FamilyResult(Record):
    """All rungs of one family or checkpoint."""

    model: str
    verdict: Verdict
    reason: str
    counted: bool = True
    boundary: Boundary | None = None
    rungs: tuple[RungResult, ...] = ()


class ShimUse(Record):
    """One stand-in that took part, or was dropped because it is not needed."""

    id: str
    stands_for: str
    reason: str
    state: Literal["used", "dropped"]
    note: str = ""


class JudgedBridgeProbe(Record):
    """What the facts prove."""

    verdict: Verdict
    reason: str
    boundary: Boundary | None = None
    own: OwnVerdict | None = None
    """The verdict of the ladder by itself, where the comparison with the base replaced it."""
    families: tuple[FamilyResult, ...] = ()
    own_tests: OwnTests | None = None
    shims: tuple[ShimUse, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)
    """Of Python, torch, transformers, Megatron-Core and Megatron-Bridge, each with the file it was imported from."""
    limitations: tuple[str, ...] = ()
    follow_ups: tuple[str, ...] = ()


class BridgeProbe(Record):
    """probe.json."""

    schema_version: int = Field(default=SCHEMA_VERSION)
    probe: Literal["bridge"] = "bridge"
    seatrial: str
    created: str
    """UTC, ISO 8601."""
    command: tuple[str, ...]
    """How Seatrial was called, redacted."""
    asked: BridgeRequest
    changes: tuple[RepoState, ...] = ()
    python: str | None = None
    seconds: float = 0
    judged: JudgedBridgeProbe


OPTIONAL_PACKAGES = (
    *("transformer_engine", "mamba_ssm", "causal_conv1d", "flash_attn", "flashinfer", "fla", "apex", "triton", "grouped_gemm", "vllm"),
    *("deep_ep", "nvidia_resiliency_ext", "fast_hadamard_transform", "tilelang", "emerging_optimizers", "torchvision", "torchaudio"),
    *("torch", "transformers", "accelerate", "omegaconf", "modelopt", "peft", "safetensors", "einops", "megatron.energon"),
    "multistorageclient",
)
"""Packages that Megatron takes where they are, and those that an interpreter of one's own may lack."""
_NAMES = "|".join(re.escape(name) for name in OPTIONAL_PACKAGES)
_ENGINES = "[Tt]ransformer[-_ ]?[Ee]ngine|mamba[-_]ssm|causal[-_]conv1d|flash[-_]attn"
_ABSENT = "(?:is|are) (?:not installed|not available|required)"
PARTS = {
    rf"^ModuleNotFoundError: No module named '(?P<part>(?:{_NAMES}))'": "the package {part} is missing",
    rf"^ModuleNotFoundError: No module named '(?P<part>(?!transformers\.|torch\.)(?:{_NAMES})\.[\w.]+)'": "the package {part} is missing",
    r"^\w+: (?P<part>Torch not compiled with CUDA enabled|Found no NVIDIA driver on your system)": "CUDA: {part}",
    r"^AttributeError: .*(?P<part>_cuda_setDevice|_cuda_getDeviceCount|_cuda_getCurrentRawStream)": "CUDA: torch has no {part} here",
    r"^RuntimeError: (?P<part>Transformer Engine is not installed on this machine)": "Transformer Engine: {part}",
    r"^AssertionError: .*(?P<part>Please use TE\w+ instead)": "Transformer Engine: {part}",
    r"^AssertionError: (?P<part>[\w ]*[Cc]ontext parallelism is only supported by TE\w+)": "Transformer Engine: {part}",
    r"^RuntimeError: (?P<part>\w+ is a Triton kernel; Triton is not installed on this machine)": "Triton: {part}",
    rf"^(?:ImportError|RuntimeError|AssertionError): (?P<part>[^\n]*(?:{_ENGINES})[^\n]*{_ABSENT}[^\n]*)": "{part}",
}
_OWN = re.compile(r"cannot import name|No module named 'megatron(?!\.energon)[.']")


def lacking(error: str) -> str | None:
    """The missing part that ended something with this traceback, or None when it is no such error."""
    text = error.strip()
    final = re.split(r"\n(?=\S)", "\n".join(text.splitlines()[-12:]))[-1] if text else ""
    if _OWN.search(final):
        return None
    for pattern, form in PARTS.items():
        found = re.search(pattern, final)
        if found:
            return form.format(part=" ".join(found["part"].split())[:300])
    return None


SUBMODULE = "3rdparty/Megatron-LM/"


@dataclass(frozen=True, slots=True)
class Function:
    """One function with changed lines in it; line 0 stands for what is outside of functions, or cannot be placed in one."""

    path: str
    line: int
    """Its first, decorators included."""
    name: str

    def __str__(self) -> str:
        return f"{self.path}: {self.name}" if self.line else self.path


def touched(changes: Sequence[RepoState]) -> tuple[Function, ...]:
    """The innermost functions around every added line of source files, and each changed file of which no function can be told."""
    return tuple(dict.fromkeys(found for repo in changes if repo.base for found in _of(repo)))


def _of(repo: RepoState) -> Iterator[Function]:
    lines: dict[str, set[int]] = {}
    for line in changed_lines(Path(repo.path), repo.base).lines:
        if is_source(line.path):
            # Where a line is gone, nothing is left to be placed: the file stands for it.
            lines.setdefault(line.path, set()).update(() if line.removed else (line.number,))
    for path, numbers in lines.items():
        found = list(_around(path, _tree(Path(repo.path, path)), numbers))
        yield from found or [Function(path, 0, "")]


def _tree(file: Path) -> ast.Module:
    try:
        return parse_python(read_file(file))
    except (OSError, ValueError):  # it is gone, or the ladder will say so itself
        return ast.Module([], [])


def is_source(path: str) -> bool:
    """Whether a path is one that a rung could run."""
    inner = path.removeprefix(SUBMODULE)
    return path.endswith(".py") and not path.endswith("__init__.py") and inner.startswith(("src/", "megatron/"))


def _around(path: str, tree: ast.Module, numbers: set[int]) -> Iterator[Function]:
    spans = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
            spans.append((first, node.end_lineno or first, node.name))
    for number in sorted(numbers):
        inner = max((span for span in spans if span[0] <= number <= span[1]), default=None)
        if inner is not None:
            yield Function(path, inner[0], inner[2])


OPTIONAL_RUNGS = ("cp",)
"""Rungs that upstream itself runs only with Transformer Engine: they count when they ran, or were asked for by name."""
PACKAGES = ("torch", "transformers", "megatron.core", "megatron.bridge")
HEAD = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning|Refused|Missing)\b")
"""How an exception begins at the end of a traceback."""
KILLED = "killed by signal 9"
_SHOWN = 3


def judge_ladder(
    facts: Facts,
    asked: BridgeRequest,
    changes: Sequence[RepoState] = (),
    trouble: str = "",
    core: str | None = None,
    functions: Sequence[Function] = (),
) -> JudgedBridgeProbe:
    """Judge a whole run. `trouble` says how its process ended, when not well; `core` is where Megatron-Core must come from, if known;
    `functions` are those that the change touches."""
    if blocked := _worthless(facts, asked, changes, trouble, core):
        return JudgedBridgeProbe(verdict=blocked[0], reason=blocked[1], boundary=blocked[2])
    families = tuple(_family(facts, asked, model, trouble) for model in asked.models)
    verdict, reason, boundary = _sum(families)
    idle = _idle(facts, functions)
    if verdict is Verdict.PASS and idle and len(idle) == len(functions):
        verdict, boundary = Verdict.BLOCKED, Boundary.CONFIG
        reason = f"vacuous: no rung called any function that the change touches ({idle[0]}): choose models and rungs that use it"
    return JudgedBridgeProbe(
        verdict=verdict,
        reason=reason,
        boundary=boundary,
        families=families,
        shims=_shims(facts),
        versions=_versions(facts),
        limitations=_limitations(facts, asked, families, idle),
    )


def _worthless(
    facts: Facts, asked: BridgeRequest, changes: Sequence[RepoState], trouble: str, core: str | None
) -> tuple[Verdict, str, Boundary] | None:
    if facts.damage:
        return (Verdict.BLOCKED, f"facts are damaged: {facts.damage[0]}", Boundary.METRICS)
    broken = facts.one("unimportable")
    if broken is not None:
        error = str(broken.get("error", ""))
        part = lacking(error)
        if part is None and changes:
            return (Verdict.FAIL, f"the Bridge under test cannot be imported: {last_line(error)}", Boundary.PROVIDER)
        return (Verdict.BLOCKED, f"Megatron cannot be imported: {part or last_line(error)}", Boundary.ENVIRONMENT)
    imported = facts.one("imported")
    if imported is None:
        return (Verdict.BLOCKED, f"the ladder never began: {trouble or 'no fact says what was imported'}", Boundary.ENVIRONMENT)
    if asked.device != "cpu" and imported.get("cuda") is not True:
        return (Verdict.BLOCKED, "there is no CUDA device that this torch can use: nothing could run on one", Boundary.ENVIRONMENT)
    wanted = [(name, repo.import_root) for repo in changes for name in PACKAGES if name in repo.packages and repo.import_root]
    for package, root in (*wanted, *([("megatron.core", core)] if core else [])):
        file = str(_dict(imported.get(package)).get("file"))
        if not comes_from(file, package, root):
            return (Verdict.BLOCKED, f"wrong import: {package} came from {file}, not from {root}", Boundary.ENVIRONMENT)
    return None


def _family(facts: Facts, asked: BridgeRequest, model: str, trouble: str) -> FamilyResult:
    made = facts.of("made", model=model)
    if made and made[0].get("state") != "ran":
        return _unmade(asked, model, made[0])
    results = tuple(_rung(facts, asked, model, rung, trouble) for rung in asked.rungs)
    counted = [result for result in results if result.counted]
    verdict = worst(result.verdict for result in counted)
    first = next((result for result in counted if result.verdict is verdict), None)
    if verdict is Verdict.PASS:
        return FamilyResult(model=model, verdict=verdict, reason=f"{len(counted)} rungs passed", rungs=results)
    reason = f"{first.rung}: {first.reason}" if first else "no rung applies to it"
    return FamilyResult(model=model, verdict=verdict, reason=reason, boundary=first.boundary if first else None, rungs=results)


def _unmade(asked: BridgeRequest, model: str, row: Row) -> FamilyResult:
    """A family without a checkpoint: a missing part is Skipped, anything else is our own failure."""
    error = str(row.get("error", ""))
    if row.get("state") == "missing":
        return FamilyResult(model=model, verdict=Verdict.SKIPPED, reason=f"cannot run here: {error}", counted=asked.models_named)
    reason = f"its checkpoint was not made: {last_line(error) or row.get('state')}"
    return FamilyResult(model=model, verdict=Verdict.BLOCKED, reason=reason, boundary=Boundary.ENVIRONMENT)


def _rung(facts: Facts, asked: BridgeRequest, model: str, rung: str, trouble: str) -> RungResult:
    match = {"model": model, "rung": rung, "fault": asked.fault}
    ends = facts.of("rung", **match)
    title = ladder.TABLE[rung].title
    if len(ends) != 1:
        reason = f"it has no end: {trouble or 'the ladder stopped before it'}" if not ends else f"it ended {len(ends)} times"
        return RungResult(rung=rung, title=title, verdict=Verdict.BLOCKED, reason=reason, boundary=Boundary.ENVIRONMENT)
    end = ends[0]
    state, error = str(end.get("state")), str(end.get("error", ""))
    found: dict[str, object]
    part = error if state == "missing" else lacking(error)
    if state == "ran":
        rows = [row for row in facts.rows if row["fact"] not in ("rung", "shims", "called")]
        rows = [row for row in rows if all(row.get(key) == value for key, value in match.items())]
        found = _measured(JUDGES[rung](rows, asked.device))
    elif state == "not applicable":
        found = {"verdict": Verdict.SKIPPED, "reason": f"does not apply: {error}", "counted": False, "applicable": False}
    elif part is not None:
        known = rung in OPTIONAL_RUNGS or (asked.device != "cpu" and ladder.TABLE[rung].ranks > 1)
        found = {"verdict": Verdict.SKIPPED, "reason": f"cannot run here: {part}", "counted": asked.rungs_named or not known}
    elif state == KILLED:
        reason = f"{state}: the machine ran out of memory, it seems"
        found = {"verdict": Verdict.BLOCKED, "reason": reason, "boundary": Boundary.ENVIRONMENT}
    else:
        found = {"verdict": Verdict.FAIL, "reason": f"{state}: {last_line(error)}", "boundary": Boundary.PROVIDER}
    times = {key: float(end.get(key) or 0) if isinstance(end.get(key), int | float) else 0.0 for key in ("seconds", "cpu_seconds")}
    return RungResult.model_validate({"rung": rung, "title": title, **times, **found})


def _measured(judged: RungJudgement) -> dict[str, object]:
    missed = next((check for check in judged.checks if not check.passed), None)
    verdict, reason, boundary = Verdict.PASS, f"{len(judged.checks)} checks met", None
    if missed is not None:
        said = f": {missed.message}" if missed.message else ""
        verdict, reason, boundary = Verdict.FAIL, f"{missed.name} ({missed.value}){said}", missed.boundary
    elif not judged.checks:
        verdict, reason, boundary = Verdict.BLOCKED, "vacuous: nothing was checked", Boundary.METRICS
    how = {"verdict": verdict, "reason": reason, "boundary": boundary}
    return {**how, "figure": judged.figure, "checks": judged.checks, "limitations": judged.limitations}


def _sum(families: Sequence[FamilyResult]) -> tuple[Verdict, str, Boundary | None]:
    counted = [family for family in families if family.counted]
    verdict = worst(family.verdict for family in counted)
    if verdict is Verdict.PASS:
        rungs = sum(rung.counted for family in counted for rung in family.rungs)
        left = [family for family in families if not family.counted]
        more = f"; {len(left)} families cannot run here" if left else ""
        return verdict, f"{len(counted)} {'family' if len(counted) == 1 else 'families'}, {rungs} rungs, every check was met{more}", None
    bad = [family for family in counted if family.verdict is verdict]
    if not bad:
        return verdict, "no family could run here", None
    said = "; ".join(f"{family.model}: {family.reason}" for family in bad[:_SHOWN])
    more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return verdict, said + more, bad[0].boundary


def _shims(facts: Facts) -> tuple[ShimUse, ...]:
    """Every shim that took part in any rung, and those that were dropped in all."""
    found: dict[str, ShimUse] = {}
    for row in facts.of("shims"):
        for shim in row.get("shims", ()):
            use = ShimUse.model_validate(shim)
            if use.id not in found or use.state == "used":
                found[use.id] = use
    return tuple(sorted(found.values(), key=lambda use: (use.state == "dropped", use.id)))


def _versions(facts: Facts) -> dict[str, str]:
    row = facts.one("imported") or {}
    made = {"python": str(row.get("python", ""))}
    for package in PACKAGES:
        found = _dict(row.get(package))
        made[package] = f"{found.get('version') or 'unknown version'} from {found.get('file')}"
    return made


def _limitations(facts: Facts, asked: BridgeRequest, families: Sequence[FamilyResult], idle: Sequence[Function]) -> tuple[str, ...]:
    made = [f"shim {use.id}: {use.reason} ({use.stands_for})" for use in _shims(facts) if use.state == "used"]
    made += [f"shim {use.id} was dropped: {use.note}" for use in _shims(facts) if use.state == "dropped"]
    made += [f"{family.model}: {text}" for family in families for rung in family.rungs for text in rung.limitations]
    skipped = [(family, rung) for family in families for rung in family.rungs if rung.verdict is Verdict.SKIPPED and rung.applicable]
    made += [f"{family.model}: {rung.rung} did not run: {rung.reason}" for family, rung in skipped]
    made += [f"{family.model}: {family.reason}" for family in families if not family.counted]
    if idle:
        more = f" and {len(idle) - _SHOWN} more" if len(idle) > _SHOWN else ""
        made.append(f"no rung called these changed functions: {', '.join(map(str, idle[:_SHOWN]))}{more}")
    if asked.device == "cpu":
        made.append("everything ran on a CPU: no CUDA kernel, no Transformer Engine, no NCCL took part")
    if asked.fault is not None:
        made.append(f"the fault {asked.fault} was injected: a Pass would be a defect of the probe")
    return tuple(dict.fromkeys(made))


def _idle(facts: Facts, functions: Sequence[Function]) -> list[Function]:
    """Changed functions that no rung which came to its end called."""
    ended = {(row.get("model"), row.get("rung")) for row in facts.of("rung", state="ran")}
    rows = [row for row in facts.of("called") if (row.get("model"), row.get("rung")) in ended]
    called = {(str(path), line) for row in rows for path, number in row.get("functions", ()) for line in (number, 0)}
    return [function for function in functions if (function.path, function.line) not in called]


def last_line(error: str) -> str:
    """The exception of a traceback, on one line: its last line that is not indented, with what follows it."""
    lines = [line for line in error.strip().splitlines() if line.strip()]
    if lines and lines[-1].startswith(("SyntaxError", "IndentationError", "TabError")):
        where = next((line.strip() for line in reversed(lines) if line.strip().startswith("File ")), "")
        return f"{lines[-1]} ({where})"[:400]
    start = next((place for place in reversed(range(len(lines))) if HEAD.match(lines[place])), max(0, len(lines) - 1))
    return " ".join(" ".join(lines[start:]).split())[:400]


def _dict(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}
