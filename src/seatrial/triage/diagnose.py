"""From a log alone: how far the run got, the first cause, its boundary, the verdict it supports and what to do.

- A known failure decides where its pattern matches the first cause, or anywhere if it is marked silent; of two, Fail
  beats Blocked, then the earlier line.
- An unknown failure sits where the last milestone before it says. Before any milestone it is Blocked at environment.
- A kill from outside is named as such; boundary and verdict are those of the last milestone.
- Milestones are given in the order in which a loop reaches them; the last one says that the work is done.
- A log that shows no failure has no verdict: triage never says Pass.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.core.log_text import Samples, exit_value
from seatrial.core.records import Diagnosis, replace
from seatrial.core.specs import Milestone, Signature
from seatrial.core.text import shortened
from seatrial.core.verdict import Boundary, Verdict
from seatrial.triage import log as shapes
from seatrial.triage.causes import (
    CRASH,
    Cause,
    Chain,
    ChainReader,
    How,
    MilestoneProgress,
    Reached,
    find_cause,
    in_order,
    survived,
)
from seatrial.triage.doubts import doubt
from seatrial.triage.log import Line, Log, read_log
from seatrial.triage.signatures import GENERAL, Hit, Scan, first_match, load_signatures
from seatrial.triage.survived import Survivors, framed_boundary

_TAIL = 8  # last lines searched for a known failure when nothing was raised; further up it may be a mere mention
_WINDOW = 200  # lines before a report of another process's death that may hold its cause
_DETAIL = 6  # lines after it that may belong to its message
_CLIP = 400
_NOISE = 20
_STAGES: tuple[tuple[str, Boundary], ...] = (
    (r"checkpoint|resume", Boundary.CHECKPOINT),
    (r"refit|reload|weight.?sync|update_weights", Boundary.REFIT),
    (r"optim|adam|train step", Boundary.OPTIMIZER),
    (r"lora|peft|adapter", Boundary.PEFT),
    (r"\bddp|fsdp|data.?parallel|distributed", Boundary.DDP),
    (r"reward", Boundary.REWARD),
    (r"rollout|generat|sampling", Boundary.ROLLOUT),
    (r"dataset|tokenizer|\bdata\b", Boundary.DATA),
    (r"metric|loss", Boundary.METRICS),
)
"""Words in the name of a failed stage, for logs of runners that no milestones are known of; else the provider."""

_NO_NUMBER = re.compile(r"\b(?:nan|inf)\b", re.IGNORECASE)
CALLED = frozenset({Boundary.REWARD, Boundary.REFIT, Boundary.CHECKPOINT, Boundary.PEFT, Boundary.DDP, Boundary.ROLLOUT})
"""Boundaries that the calls of an unknown exception tell better than the last milestone."""
_TOOLS = ("error", "fatal", "ERROR")
"""What a tool prints before its message; not the name of an exception."""
_TOTALS = re.compile(r"\b\d+ failed\b.*\b\d+ (passed|skipped|errors?)\b.* in [\d.]+ ?s")

_KILL_ADVICE = (
    "The run was ended from outside (a signal or Ctrl-C), not by an exception. Nothing in the log says why: look for a deadline, "
    "a stall watch or a scheduler; if it had stopped writing long before, it hung after the last milestone."
)
_UNKNOWN_ADVICE = "No known failure matches. Read the excerpt; if the cause is understood, add a signature (docs/triage.md)."


def diagnose(path: Path, milestones: Sequence[Milestone], signatures: Sequence[Signature], *, ended: bool = False) -> Diagnosis:
    """Triage one log. `signatures` are the loop's own; the general ones are always added after them.

    `ended`: the process ended with 0, and the log need not say so: the last line counts as its last milestone.
    """
    general = load_signatures(GENERAL)
    plain, framed = tuple(s for s in signatures if not s.frame), tuple(s for s in signatures if s.frame)
    known = (*plain, *general)
    log = read_log(path)
    scan, reader, tail = Scan(milestones, (*known, *framed)), ChainReader(), deque[Line](maxlen=_TAIL)
    survivors, samples = Survivors(), Samples()
    for line in log:
        if milestones and samples.holds(line.process, line.body, line.number):
            continue  # what a model wrote is no word of the run
        scan.feed(line)
        reader.feed(line)
        if line.body.strip():
            tail.append(line)
        if milestones:
            survivors.feed(line)
    scan.finish()
    survivors.forget(samples.later)
    if ended and milestones and tail:
        scan.reached.append(Reached(tail[-1].number + 1, "", milestones[-1].id))
    harmless = [s for s in known if s.harmless and scan.counts(s)]
    chains = reader.finish()
    counting = [s for s in known if not s.harmless and scan.counts(s)]
    loops = [s for s in signatures if not s.harmless and not s.silent and scan.counts(s)]
    progress = MilestoneProgress(in_order(scan.reached, milestones), milestones)
    triage = _Triage(log, milestones, scan, progress, counting, harmless, loops)
    for chain in chains:
        # Servers are stopped by a signal when the work is done; a forced kill (no memory while saving) is no such thing.
        stopped = chain.how is How.KILLED and triage.finished() and not chain.forced and not progress.after(chain.end, main=False)
        noise = (s for s in harmless if not (s.ending and progress.after(chain.end, main=True)))
        told = any(chain.process == whose and begun <= chain.start <= end for whose, begun, end in samples.later)
        if told or stopped or triage.afterthought(chain) or any(first_match(s, _lines(chain)) for s in noise):
            chain.how = How.NOTED
    found = [*triage.silent(), *(triage.failure(chains, tail) or triage.ending(tail, chains))]
    found = found or list(survivors.beyond(chains, progress, harmless, [s for s in framed if scan.counts(s)]))
    decisive = min(found, key=lambda d: (d.verdict is not Verdict.FAIL, d.line or 0), default=Diagnosis())
    last = triage.progress.last()
    mentioned = [hit for hit in survivors.lines() if hit.line != decisive.line]
    mentions = _noise(scan, harmless, [chain for chain in chains if survived(chain, triage.progress)], mentioned)
    return replace(decisive, file=str(path), milestone=last.id if last else None, noise=mentions)


@dataclass(frozen=True, slots=True)
class _Triage:
    """What was read of a log, and the questions put to it."""

    log: Log
    milestones: Sequence[Milestone]
    scan: Scan
    progress: MilestoneProgress
    known: Sequence[Signature]
    """Signatures that count for this log, without the harmless ones."""
    harmless: Sequence[Signature]
    loops: Sequence[Signature]
    """The loop's own, by which an unknown failure may be known from the calls that raised it."""

    def finished(self) -> bool:
        """Whether the last milestone of the loop is the last one reached."""
        last = self.progress.last()
        return last is not None and last.id == self.milestones[-1].id

    def afterthought(self, chain: Chain) -> bool:
        """Whether a tool's error line stands behind the end of the work, and says neither that the run failed nor what of it."""
        if chain.how is not How.BARE or chain.first.name not in _TOOLS or not self.finished() or self.progress.after(chain.end, main=False):
            return False
        said = chain.first.lines[0][1]
        return exit_value(said) is None and doubt(said) is None and not any(first_match(s, _lines(chain)) for s in self.known)

    def silent(self) -> Iterator[Diagnosis]:
        """Known failures that count wherever they occur."""
        for signature in self.known:
            if signature.silent and signature.pattern in self.scan.hits:
                count = self.scan.times.get(signature.pattern, 1)
                if count <= max(signature.tolerated, int(signature.share * self.progress.rounds())):
                    continue
                found = _known(signature, self.scan.hits[signature.pattern], ())
                often = f"{count} such lines. {found.advice}" if count > 1 else found.advice
                yield replace(found, times=count, advice=often)

    def failure(self, chains: Sequence[Chain], tail: Sequence[Line]) -> list[Diagnosis]:
        """The failure that ended the run, if there is one. Of a test runner's many unknown ones its last line tells most."""
        cause = find_cause(chains, self.progress)
        if cause is None:
            return []
        if cause.chain.how is not How.TEST:
            return [self._explain(cause)]
        # One does not cause the next, so each needs its own explanation.
        explained = [self._explain(Cause(chain, chain.first)) for chain in chains if chain.how is How.TEST]
        worst = next((d for d in explained if d.verdict is Verdict.FAIL), explained[0])
        totals = next((line for line in tail if _TOTALS.search(line.body)), None)
        if totals is not None and worst.signature is None and len(explained) > 1:
            worst = replace(worst, line=totals.number, cause=shortened(totals.body.strip(), _CLIP))
        return [worst]

    def ending(self, tail: Sequence[Line], chains: Sequence[Chain]) -> list[Diagnosis]:
        """A known failure in the last lines of a run that raised nothing and did not finish."""
        if self.finished():
            return []
        last = self.progress.last()
        first = max(last.line if last else 0, *(chain.end for chain in chains), 0) + 1  # what was survived is no cause
        found = self._match(self._telling(line for line in tail if line.number >= first))
        return [_known(*found, ())] if found else []

    def _match(self, hits: Sequence[Hit]) -> tuple[Signature, Hit] | None:
        """The first signature that matches one of the lines."""
        return next(((s, hit) for s in self.known if (hit := first_match(s, hits))), None)

    def _explain(self, cause: Cause) -> Diagnosis:
        chain, raised = cause
        own = [Hit(raised.line, f"{raised.name}: {raised.message}"), *(Hit(*line) for line in raised.lines)]
        excerpt = (*raised.tail, *(text for _, text in raised.lines[:6]))
        found = self._match([*self._around(chain), *own] if raised.carrier or raised.name == CRASH else own)
        name = shapes.short(raised.name) if raised.name != CRASH and chain.how is not How.KILLED else None
        if found is not None:
            return replace(_known(*found, excerpt), exception=name)
        line, text = _decisive(cause)
        # The loop may know the failure by a call that raised it: a reward function may raise anything.
        by_call = (s for s in self.loops if any(re.search(s.pattern, frame) for frame in raised.frames))
        if name is not None and (called := next(by_call, None)) is not None:
            return replace(_known(called, Hit(line, text), excerpt), exception=name)
        boundary, verdict = self._place(cause)
        advice = _KILL_ADVICE if chain.how is How.KILLED else _UNKNOWN_ADVICE
        return Diagnosis(
            boundary=boundary,
            verdict=verdict,
            cause=shortened(text.strip(), _CLIP),
            exception=name,
            line=line,
            excerpt=tuple(shortened(text, _CLIP) for text in excerpt),
            advice=advice,
        )

    def _around(self, chain: Chain) -> list[Hit]:
        """What stands around a report that something died, and may say why. A process that crashed said it itself."""
        reached = self.progress.before(chain.start)
        first = max(reached.line if reached else 0, chain.start - _WINDOW)
        lines = self.log.between(first, chain.end + _DETAIL)
        return self._telling(line for line in lines if not chain.crash or line.process.startswith(chain.process))

    def _telling(self, lines: Iterable[Line]) -> list[Hit]:
        """Lines that may say what happened: harmless ones do not."""
        hits = [Hit(line.number, line.body) for line in lines]
        return [hit for hit in hits if not any(first_match(s, [hit]) for s in self.harmless)]

    def _place(self, cause: Cause) -> tuple[Boundary, Verdict]:
        """Where an unknown failure sits."""
        chain, raised = cause
        reached = self.progress.before(raised.line, inclusive=True)
        if self.finished() and chain.how is How.BARE and raised.name in _TOOLS and reached == self.progress.last():
            return Boundary.ENVIRONMENT, Verdict.FAIL  # a launcher's word after the work was done
        if reached is not None:
            milestone = next(m for m in self.milestones if m.id == reached.id)
            called = framed_boundary(raised.frames) if milestone.verdict is Verdict.FAIL else None
            if called is Boundary.ROLLOUT and _NO_NUMBER.search(raised.message):
                called = None  # a sampler that meets NaN has it from the weights
            return (called if called in CALLED else milestone.boundary), milestone.verdict
        match chain.how:
            case How.REPORT:
                return stage_boundary(raised.lines[0][1].partition(raised.name)[0] or raised.message), Verdict.FAIL
            case How.TEST:
                return Boundary.PROVIDER, Verdict.FAIL
            case How.KILLED:
                return Boundary.CLUSTER, Verdict.BLOCKED
            case _:
                return Boundary.ENVIRONMENT, Verdict.BLOCKED


STEPS = (
    Milestone(
        id="step",
        pattern=r"(?i)(?:^|[\s\[({|>'\"])(?:global_?|train(?:ing)? ?)?(?:step|iter(?:ation)?|epoch|update)s?['\"]?\s*[ =:#\[]\s*\d+"
        r"|\b(?:loss|reward|grad_norm)\b['\"]?\s*[=:]\s*['\"]?-?\d|\d+%\|[^|]*\| *\d+/\d+ \[",
        boundary=Boundary.OPTIMIZER,
    ),
    Milestone(id="ended", pattern=r"(?!)x", boundary=Boundary.CHECKPOINT),
)
"""Of a script that no loop knows: lines that only work prints, and the end, which its exit code shows."""


def stage_boundary(name: str) -> Boundary:
    """Where a failed stage of this name sits."""
    return next((boundary for words, boundary in _STAGES if re.search(words, name, re.IGNORECASE)), Boundary.PROVIDER)


def _known(signature: Signature, hit: Hit, excerpt: Sequence[str]) -> Diagnosis:
    return Diagnosis(
        boundary=signature.boundary,
        verdict=signature.verdict,
        cause=shortened(hit.text.strip(), _CLIP),
        line=hit.line,
        excerpt=tuple(shortened(text, _CLIP) for text in excerpt or (hit.text,)),
        signature=signature.id,
        advice=signature.advice,
    )


def _decisive(cause: Cause) -> tuple[int, str]:
    """The line that says most. A validation error's first line only counts the errors; the next name them."""
    chain, raised = cause
    if re.match(r"\d+ validation errors? for", raised.message):
        detail = next(((number, text.strip()) for number, text in raised.lines if "[type=" in text), None)
        if detail:
            return detail[0], f"{raised.name}: {detail[1]}"
    if chain.how in (How.REPORT, How.KILLED) or raised.name == CRASH:
        return raised.line, raised.lines[0][1]
    return raised.line, f"{raised.name}: {raised.message}" if raised.message else raised.name


def _lines(chain: Chain) -> list[Hit]:
    """The lines of a chain that a harmless signature may match: the one that opens the traceback, and its exceptions' own. The
    line before may be noise of its own, and what follows an exception may be that of a shutdown: neither acquits anything."""
    opening = chain.lead.rpartition("\n")[2] if shapes.HEADER in chain.lead else ""
    return [Hit(chain.start, opening), *(Hit(*raised.lines[0]) for raised in chain.raised)]


def _noise(scan: Scan, harmless: Sequence[Signature], survivors: Sequence[Chain], mentioned: Sequence[Hit]) -> tuple[str, ...]:
    """Harmless lines and survived exceptions, each once, in the order of the log."""
    hits = [hit for s in harmless if (hit := scan.hits.get(s.pattern))]
    hits += [Hit(chain.first.line, f"survived {chain.first.name}: {chain.first.message}") for chain in survivors]
    seen: dict[str, int] = {}
    for hit in (*hits, *mentioned):
        seen.setdefault(shortened(hit.text.strip(), _CLIP), hit.line)
    return tuple(f"line {line}: {text}" for text, line in sorted(seen.items(), key=lambda item: item[1])[:_NOISE])
