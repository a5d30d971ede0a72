"""Errors that a run got over, held against a limit.

A run that goes on after an error has not shown that it did its work: a reward function that raises at every step, an update
that was skipped, a rank that died while the others went on. Triage counts such errors by class. One may be noise; more than
the limit make the run inconclusive, with the boundary that they hit.

- Tracebacks count by where they were raised. In the path of rewards, updates, weights and checkpoints the first one counts;
  elsewhere more than one, and more than a share of the steps.
- The death of a rank, a crash and a forced kill count at once.
- Lines without a traceback are signatures of `survived.toml`, each with its own limit.
- Not counted: optional imports, code that a model wrote, services that only carry metrics, and what a line merely quotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from seatrial.core.log_text import Finder, Stems, words_of
from seatrial.core.records import Diagnosis, replace
from seatrial.core.specs import Signature
from seatrial.core.verdict import Boundary, Verdict
from seatrial.triage import log
from seatrial.triage.causes import Chain, How, MilestoneProgress, survived
from seatrial.triage.doubts import Doubt, doubt, may_doubt
from seatrial.triage.log import Line, says
from seatrial.triage.signatures import Hit, compile_pattern, load_signatures, times

LINES = Path(__file__).with_name("survived.toml")
"""What runs print when they skip, replace or lose something and go on."""
SHARE = 0.02
"""Part of the steps that an error outside of the critical path may hit."""
BARE_SHARE = 0.1
CRITICAL = frozenset({Boundary.REWARD, Boundary.OPTIMIZER, Boundary.REFIT, Boundary.CHECKPOINT, Boundary.DDP, Boundary.PEFT})
"""One error there changes what is learned, sent or kept."""
MACHINE = frozenset({Boundary.ENVIRONMENT, Boundary.CLUSTER, Boundary.DDP})
"""Workers and servers end with the run: such a line counts only if the run went on after it."""

STEMS = Stems(
    "skip|stale|overflow|outdated|out of date|not updat|not sync|not been|never|back to|back on|restart|re-start|spawn|relaunch"
    "|re-launch|recreat|died|dead|crash|kill|oom|memory|nccl|fail|timeout|timed out|time out|nan| inf | inf,| inf;| inf.|inf/|/inf"
    "|infs| inf)|finite|padd|dummy|placeholder|segfault|segmentation|dumped|double free|default|watchdog|previous|old weights"
    "|last weights|last known|last policy|corrupt|drop|discard|error|exception|unreachable|unavailable|mismatch|differ|disagree"
    "|diverge|not reduced|not all|not averaged|malloc|free()|smashing|bus error|xid|instruction|floating point|symbol lookup"
    "|exited|left|disconnect|world size|reus|repeat|set to|last batch|previous batch|same batch|old batch|mini-batch|minibatch"
    "|no batch|nothing was|raised|broke|inline_container|unexpected pos|errno|no space|quota|input/output|http 5|gone|missing"
    "|no lora|aborted at|virtual method|sigkill|sigsegv|sigabrt|sigbus|sigill|sigfpe|returned|reject|refused|denied"
    "|trainable param|frozen param|no param|0 param|are zero|were zero|underflow|vanish|none for|unchanged|identical|the same"
    "|not changed|no effect|off the bus|uncorrectable|dieder|deaderror|actorerror|fell behind|excluded|responded| are 0| were 0"
    "|is zero|is none|are none|all zero|all none|flow to 0|ignored|incomplete|to resume|to restore|infinit|throw|not applied"
    "|not loaded|not merged|not attached|not transferred|not found|base model|base weights|base policy|original|untrained|initial "
    "|disk full|disk is full|disk was full|still |is 0|= 0|became 0|reached 0|to 0|unhealthy|lost|replac|filling|filled|unable"
    "|could not|cannot|incompat|invalid|abort"
)
"""Every line of `survived.toml` holds one of these words: one search keeps the others from most lines."""
METRICS_ROW = re.compile(r"\s*\{['\"](?!level|severity|time|ts|msg|message|event|logger|asctime)|.{0,200}?\bstep:\d+ - \S+:")

_MOST = 1000
"""Lines that are kept of a signature that only counts between steps."""
_SHORT, _MOST_DULL = 120, 10_000
_LONGEST = 4000
"""Characters of a line that are searched: what says that something was skipped says it early."""
_PLACES: tuple[tuple[re.Pattern[str], Boundary], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), boundary)
    for pattern, boundary in (
        (r"reward|compute_score|\bscor(?:e|er|ing)|verif(?:y|ier)|grader|\bgrade\b", Boundary.REWARD),
        (
            r"refit|(?:update|sync|load|broadcast|receive|send|transfer)_?\w*weights?|weight_(?:sync|transfer|loader|update)|update_(?:named_)?param"
            r"|\b(?:weights?|parameters?)\b.{0,60}\b(?:differ|mismatch|diverge|unequal|not equal|(?:do|does) not match|stale)"
            r"|\b(?:differ|mismatch)\w*\b.{0,60}\b(?:weights?|parameters?)\b",
            Boundary.REFIT,
        ),
        (r"checkpoint|save_(?:model|pretrained|state)|_save\b|ckpt", Boundary.CHECKPOINT),
        (
            r"optimi[sz]er|\boptim\b|clip_grad|lr_scheduler|\bbackward\b|training_step|update_(?:actor|critic|policy)|grad_scaler",
            Boundary.OPTIMIZER,
        ),
        (r"\blora|peft|adapter", Boundary.PEFT),
        (r"all_?reduce|all_?gather|reduce_scatter|\bbarrier\b|distributed_c10d|nccl|\bfsdp|\bddp|parallel/distributed", Boundary.DDP),
        (r"rollout|generat|vllm|sglang|sampling|agent_loop|\btool|environment|env_step", Boundary.ROLLOUT),
        (r"dataset|data_?loader|collat|tokeni[sz]", Boundary.DATA),
    )
)
"""Words in the file name and function of a frame, and in a message; the first that is met from the inside out decides."""
_ASIDE = re.compile(
    r"/(?:wandb|mlflow|swanlab|tensorboard\w*|tensorboardX|opentelemetry|prometheus_client|sentry_sdk|comet_ml|neptune|clearml|trackio|aim)/"
    r"|/ray/(?:dashboard|util/metrics|_private/(?:metrics_agent|usage|log_monitor|telemetry))|/vllm/usage/|/torch/_(?:dynamo|inductor)/"
    r"|/huggingface_hub/(?:utils/_telemetry|hf_api)"
)
"""Services that carry metrics, telemetry or uploads, and compilers with a fallback: the training does not rest on them."""
_IMPORTS = re.compile(r"importlib|_bootstrap|import_utils|, in (?:safe_import\w*|try_import\w*|<module>)$")
_MODEL_CODE = re.compile(r'File "(?:<\w+>|/tmp/\S*(?:sandbox|code|exec|tmp)\S*\.py)"')
"""Code that a model wrote and a tool ran: it may raise what it likes."""
_RANK = re.compile(r"\[(?:rank|default|trainer|worker)?\d+\]:$|\d{1,5}:$")
_FRAME = re.compile(r'File "[^"]*?((?:[^"/]*/)?[^"/]*)", line \d+, in (.*)')
_SCHEDULER = re.compile(r"CANCELLED|TIME LIMIT|PREEMPT")
_BUGS = frozenset({"AssertionError", "AttributeError", "KeyError", "NameError", "NotImplementedError", "TypeError", "UnboundLocalError"})
"""No service answers with these: the code itself is wrong, every time."""
_TENSORS = re.compile(
    r"\bsize of tensor\b|\btensors?\b.{0,60}\b(?:same|match|mismatch|shape|size|device|dtype|expected|contiguous|differ|equal)"
    r"|\bshapes?\b.{0,80}\b(?:not aligned|cannot be multiplied|mismatch|incompatible|invalid|broadcast)"
    r"|\b(?:CUDA|cuDNN|cuBLAS|NCCL|HIP)\b ?\w* ?error\b|\b(?:CUBLAS|CUDNN|CUDA)_(?:STATUS|ERROR)_|\bexpected\b.{0,40}\btensors?\b"
    r"|\bfound dtype\b|\bsize mismatch for\b|\bfor key\b.{0,40}\bstate_dict\b",
    re.IGNORECASE,
)
"""What torch says of tensors: a model's answers, graders and tools have none."""
_OPTIONAL = frozenset({"ImportError", "ModuleNotFoundError", "PackageNotFoundError"})


@dataclass(frozen=True, slots=True)
class _Class:
    """Errors of one kind."""

    boundary: Boundary
    hits: tuple[Hit, ...]
    name: str
    limit: int
    excerpt: tuple[str, ...] = ()


@cache
def _finder(signature: Signature) -> Finder:
    return Finder(compile_pattern(f"signature {signature.id}", signature.pattern))


class Survivors:
    """Feed the lines of a log in order, then ask for what went beyond its limit."""

    def __init__(self) -> None:
        known = load_signatures(LINES)
        self._known = tuple(signature for signature in known if not signature.bare)
        self._bare = tuple(signature for signature in known if signature.bare)
        self._patterns = [(s, _finder(s)) for s in self._known]
        self._hits: dict[str, list[Hit]] = {}
        self._counts: dict[str, int] = {}
        self._doubts: list[tuple[Doubt, Hit, int]] = []
        self._dull: set[str] = set()
        """Short lines that say nothing: a loop prints the same ones at every step."""

    def feed(self, line: Line) -> None:
        """Take the next line of the log."""
        text = line.body[:_LONGEST]
        if text in self._dull:
            return
        lower = text.lower()
        words = words_of(lower)
        stems, parts = STEMS.within(lower, words), may_doubt(lower, words)
        if not (stems or parts) or METRICS_ROW.match(text):
            self._note_dull(text)
            return
        tolerated = False
        for signature, pattern in self._patterns if stems else ():
            found = pattern.search(text, lower)
            if found is not None and says(text, found):
                self._counts[signature.id] = self._counts.get(signature.id, 0) + times(line.text)
                hits = self._hits.setdefault(signature.id, [])
                if len(hits) < _MOST:
                    hits.append(Hit(line.number, line.text))
                if signature.tolerated:
                    tolerated = True
                    break
                return  # one line is one error
        said = doubt(text) if parts and len(self._doubts) < _MOST else None
        if said is not None:
            self._doubts.append((said, Hit(line.number, line.text), times(line.text)))
        elif not tolerated and len(self._doubts) < _MOST:
            self._note_dull(text)

    def _note_dull(self, text: str) -> None:
        """Remember a short line as one that says nothing."""
        if len(text) < _SHORT:
            if len(self._dull) >= _MOST_DULL:
                self._dull.clear()
            self._dull.add(text)

    def forget(self, samples: Sequence[tuple[str, int, int]]) -> None:
        """Leave out what stood in samples: process, first and last line of each."""
        for process, first, last in samples:

            def kept(hit: Hit, process: str = process, first: int = first, last: int = last) -> bool:
                return not (first <= hit.line <= last and hit.text.startswith(process))

            self._doubts = [one for one in self._doubts if kept(one[1])]
            for name, hits in self._hits.items():
                left = [hit for hit in hits if kept(hit)]
                self._counts[name] -= len(hits) - len(left)
                self._hits[name] = left

    def lines(self) -> Iterator[Hit]:
        """The first line of each kind, for a note."""
        yield from (hits[0] for hits in self._hits.values() if hits)

    def beyond(
        self, chains: Sequence[Chain], progress: MilestoneProgress, harmless: Sequence[Signature], framed: Sequence[Signature]
    ) -> Iterator[Diagnosis]:
        """What the run got over more often than it may; nothing where the log shows no milestone."""
        last = progress.last()
        if last is None:
            return
        steps = progress.rounds()
        for found in _classes(chains, progress, framed, self._bare, steps):
            if len(found.hits) > found.limit:
                yield _raised(found, steps)
        acquit = [(s.ending, compile_pattern(f"signature {s.id}", s.pattern)) for s in harmless]
        for signature in self._known:
            hits, count = self._hits.get(signature.id, []), self._counts.get(signature.id, 0)
            if signature.training:
                hits = [hit for hit in hits if progress.training(hit.line) and progress.after(hit.line, main=False)]
            if not hits or count <= max(signature.tolerated, int(signature.share * steps)):
                continue
            first = hits[0]
            noise = (pattern for ending, pattern in acquit if not (ending and progress.after(first.line, main=True)))
            if any(pattern.search(first.text) for pattern in noise) or (signature.boundary in MACHINE and first.line > last.line):
                continue
            yield _diagnosis(signature, first, count, steps)
        yield from self._doubtful(progress, [pattern for _, pattern in acquit], steps)

    def _doubtful(self, progress: MilestoneProgress, acquit: Sequence[re.Pattern[str]], steps: int) -> Iterator[Diagnosis]:
        """Lines between two steps that say in words of their own that a part went wrong."""
        found: dict[Boundary, list[tuple[Doubt, Hit, int]]] = {}
        for said, hit, count in self._doubts:
            if progress.training(hit.line) and progress.after(hit.line, main=False) and not any(p.search(hit.text) for p in acquit):
                found.setdefault(said.boundary, []).append((said, hit, count))
        for boundary, lines in found.items():
            strict = boundary in CRITICAL or boundary is Boundary.CLUSTER or any(said.severe for said, _, _ in lines)
            number = sum(count for _, _, count in lines)
            if number > (0 if strict else max(1, int(SHARE * steps))):
                first = lines[0][1]
                yield _raised(_Class(boundary, tuple(hit for _, hit, _ in lines), "", 0, (first.text.strip(),)), steps)


def _diagnosis(signature: Signature, hit: Hit, count: int, steps: int) -> Diagnosis:
    found = _raised(_Class(signature.boundary or Boundary.ENVIRONMENT, (hit,), "", 0, (hit.text.strip(),)), steps)
    advice = f"{_often(count, steps)} {signature.advice}"
    return replace(found, boundary=signature.boundary, verdict=signature.verdict, signature=signature.id, advice=advice, times=count)


def _raised(found: _Class, steps: int) -> Diagnosis:
    first = found.hits[0]
    return Diagnosis(
        boundary=found.boundary,
        verdict=Verdict.BLOCKED,
        cause=first.text.strip()[:400],
        line=first.line,
        excerpt=tuple(text[:400] for text in (found.excerpt or (first.text,))),
        signature=f"survived-{found.boundary}",
        advice=f"{_often(len(found.hits), steps)} The run went on after this error, so its metrics do not show what the failed part would "
        "have done. Mend the cause, or prove that the error cannot change a result.",
        exception=found.name or None,
        survived=True,
        times=len(found.hits),
    )


def _often(count: int, steps: int) -> str:
    return f"{count} time{'s' if count > 1 else ''} in {steps} step{'s' if steps != 1 else ''}."


def _classes(
    chains: Sequence[Chain], progress: MilestoneProgress, framed: Sequence[Signature], bare: Sequence[Signature], steps: int
) -> Iterator[_Class]:
    """The survived errors, by what they raised and where."""
    found: dict[tuple[str, Boundary, int], list[Chain]] = {}
    for chain in chains:
        if not survived(chain, progress) or not progress.after(chain.end, main=False):
            continue
        place = _untold(chain, progress, bare) or _place(chain, progress, framed, steps)
        if place is not None:
            boundary, limit = place
            found.setdefault((log.short(chain.first.name), boundary, limit), []).append(chain)
    for (name, boundary, limit), group in found.items():
        first = group[0].first
        excerpt = (*first.tail, *(text for _, text in first.lines[:6]))
        native = group[0].how is How.KILLED or group[0].crash
        hits = tuple(Hit(c.first.line, c.first.lines[0][1].strip()) for c in group)
        yield _Class(boundary, hits, "" if native else name, limit, excerpt)


def _untold(chain: Chain, progress: MilestoneProgress, bare: Sequence[Signature]) -> tuple[Boundary, int] | None:
    """Where an exception without a traceback hit, if its own words name a part whose errors are never noise."""
    first = chain.first
    if chain.how is not How.BARE or chain.crash or not progress.building(chain.start):
        return None
    if not _exception(first.name) or log.short(first.name) in _OPTIONAL:
        return None
    said = f"{log.short(first.name)}: {first.message}"
    return next(((s.boundary, 0) for s in bare if s.boundary is not None and _finder(s).search(said)), None)


def _place(chain: Chain, progress: MilestoneProgress, framed: Sequence[Signature], steps: int) -> tuple[Boundary, int] | None:
    """Where an error hit, and how many of its kind are noise; None where it does not count."""
    first = chain.first
    if chain.how in (How.NOTED, How.REPORT, How.TEST):
        return None
    if chain.how is How.KILLED:
        ended = _SCHEDULER.search(first.lines[0][1])
        return (Boundary.ENVIRONMENT, 0) if chain.forced else (Boundary.CLUSTER, 0) if ended else None
    if chain.crash:
        return Boundary.ENVIRONMENT, 0
    frames = [frame for raised in chain.raised for frame in raised.frames]
    said = f"{first.name}: {first.message}"
    if not chain.primary and not frames:
        return None
    if any(_ASIDE.search(frame) for frame in frames) or (frames and _MODEL_CODE.match(frames[-1])):
        return None
    rank = _RANK.match(chain.process) is not None
    if log.short(first.name) in _OPTIONAL or (first.frames and _IMPORTS.search(first.frames[-1])):
        dead = rank and chain.how is How.UNCAUGHT and progress.training(chain.start)
        return (Boundary.DDP, 0) if dead else None
    boundary = _boundary(first.frames or frames, said, framed)
    if rank and chain.how is How.UNCAUGHT:
        return boundary or Boundary.DDP, 0
    if not progress.building(chain.start):
        return None
    if chain.how is How.BARE:
        if _TENSORS.search(said) and _exception(first.name) and progress.training(chain.start):
            return boundary or Boundary.OPTIMIZER, 0
        if log.short(first.name) == "AssertionError" and not first.message and progress.training(chain.start):
            return Boundary.ENVIRONMENT, 0
        if boundary not in CRITICAL or not _exception(first.name):
            return None
        strict = boundary is Boundary.REFIT or log.short(first.name) in _BUGS
        return boundary, 0 if strict else max(1, int(BARE_SHARE * steps))
    if boundary in CRITICAL:
        return boundary, 0
    if not progress.training(chain.start):
        return None
    return boundary or Boundary.ENVIRONMENT, max(1, int(SHARE * steps))


def _exception(name: str) -> bool:
    """Whether a bare line names an exception; `error: …` is a tool's word."""
    return log.short(name)[:1].isupper() and name not in ("ERROR",)


def _boundary(frames: Sequence[str], said: str, framed: Sequence[Signature]) -> Boundary | None:
    """By the loop's own knowledge of its calls, else by the words of the frames from the inside out, else by the message."""
    known = next((s.boundary for s in framed if any(re.search(s.pattern, frame) for frame in frames)), None)
    if known in CRITICAL:
        return known
    worded = framed_boundary(frames, said)
    return worded if known is None or worded in CRITICAL else known


def framed_boundary(frames: Sequence[str], said: str = "") -> Boundary | None:
    """Where the calls of an exception belong, from the inside out, else its message; None where the words do not tell."""
    return next((boundary for text in (*map(_named, reversed(frames)), said) for words, boundary in _PLACES if words.search(text)), None)


def _named(frame: str) -> str:
    """File, its directory and function of a frame; directories above may be called anything."""
    found = _FRAME.match(frame)
    return f"{found[1]} {found[2]}" if found else ""
