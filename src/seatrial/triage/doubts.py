"""What a line between two steps says about a part of the training that went wrong, in whatever words.

Signatures know wordings; this knows how such a line is built: a part (weights, rewards, ranks, …), a trouble (failed, mismatch, gone, …),
and either the level of an error or what the run did instead (continuing, using zeros, skipping, …). All in one line, none of it denied.

- It counts only while steps are being trained: what is printed before the first step is about the start, what follows the last one
  about the end.
- Not counted: attempts that will be repeated, services that only carry metrics, answers that a grader could not read (they earn nothing),
  and tools that a model called.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from seatrial.core.log_text import Stems, is_sample
from seatrial.core.verdict import Boundary
from seatrial.triage.log import denied, quoted


class Doubt(NamedTuple):
    """What a line says."""

    boundary: Boundary
    severe: bool
    """It says so as an error, or of everything in that step: one such line counts."""


_PARTS = (
    (r"\blora|\badapters?|\bpeft\b", Boundary.PEFT),
    (r"\bcheckpoints?\b|\bckpt\b|\bpersist|\boptimizer shard|\boptimi[sz]er states?\b|\bscheduler state|\brng state", Boundary.CHECKPOINT),
    (
        r"\brewards?\b|\breward_?(?:model|func|server|worker|manager)\w*|\bscor(?:es?|ing|er)\b|\bgrader|\bverifier|\badvantages?\b",
        Boundary.REWARD,
    ),
    (r"\b(?:ranks disagree|between ranks|across ranks|barrier)\b|\bnccl|\ball.?reduce|\ball.?gather|\bcollectives?\b", Boundary.DDP),
    (
        r"(?<![a-z])(?:refit|weights?|params?|parameters?|tensors?|lm_head|state.?dict)(?![a-z])|\bpolicy version|token_mult_prob_error",
        Boundary.REFIT,
    ),
    (
        r"\boptimi[sz]er|\bbackward\b|\bgradients?\b|(?<![a-z])grads?(?![a-z])|\bupdates?\b|\bloss\b|\blogits\b|(?<![a-z])log.?probs?\b|\bkl\b"
        r"|\bmodel outputs?\b|\bmini-?batch",
        Boundary.OPTIMIZER,
    ),
    (r"\branks?\b|\bddp\b|\bfsdp\b|\bgloo\b", Boundary.DDP),
    (r"\b\w{0,20}workers?\b|\bactors?\b|\bnodes?\b|\breplicas?\b|\benginecore\b", Boundary.CLUSTER),
    (
        r"\brollouts?\b|\bgenerat(?:ion|or|e|ing)s?\b|\bcompletions?\b|\btrajector|\bresponses?\b|\bsampler\b"
        r"|\binference\b|\bengine\b|\bvllm\b|\bsglang\b",
        Boundary.ROLLOUT,
    ),
    (r"\bcritic\b|\bpolicy\b|\bvalue (?:head|model|function)\b", Boundary.OPTIMIZER),
    (r"\bdata_?loader|\bbatch(?:es)?\b|\bdatasets?\b|\bprompts?\b|\btokeni[sz]er\b", Boundary.DATA),
)
_COMPILED = tuple((re.compile(words, re.IGNORECASE), boundary) for words, boundary in _PARTS)
_DONE = (
    r"(?:updat|load|sen[dt]|receiv|transferr?|sync|appli|apply|merg|reduc|writ|sav|comput|finish|complet|respond|reach|generat|produc|train|equal"
    r"|match|refresh|available|work|answer|shared|stepp|propagat|read|deliver|arriv|persist)\w*"
)
_NEGATED = rf"(?:did|does|do|was|were|is|are|has|have|been)(?: not|n't)(?: been| be| fully)? {_DONE}"
_TROUBLE = re.compile(
    r"\bfail(?:ed|s|ing|ures?)?\b|\berrors?\b|\bexceptions?\b|\braised\b|\bcrash\w*|\bdied\b|\bdead\b|\bhung\b"
    r"|\bstuck\b|\w{0,30}?abort(?:ed|ing|s)?\b"
    r"|\blost\b|\bgone\b|\b(?:is|are|was|were|service|server|went) down\b|\bunavailable\b|\bunreachable\b|\btimed[ -]?out\b"
    r"|\btime-?out (?:waiting|after)\b"
    r"|\bmismatch\w*|\bdiffers?\b|\bdisagree\w*|\bdiverge\w*|\bunequal\b|!=|\bcorrupt\w*|\bcould ?(?:n[o']t|not)\b"
    r"|\bcan ?(?:n[o']t|not|'t)\b"
    rf"|\b{_NEGATED}|\bnever\b|\bunable\b|\brefused\b|\brejected\b"
    rf"|\b(?:produced|returned|got|received|generated|sent|trained) nothing\b|\bempty\b"
    rf"|\b(?:got|is|was|were|are|returned|rewards?) None\b|\bstopped (?:respond|answer|work)ing\b"
    r"|\bnans?\b|\bno-?op\b|\bno (?:matching|gradients?|valid|tokens?|output|usable|lora|adapter)\b|\b0 tokens\b|\bexploded\b|\bran out\b"
    r"|\breturned [45]\d\d\b|\bHTTP [45]\d\d\b|\bswallowed\b|\bsuccess ?[=:] ?false\b|\btoo (?:high|large)\b"
    r"|> ?threshold|\bbroken?\b|\bfatal\b"
    r"|\bexceed(?:s|ed)\b|\blag(?:s|ged|ging)?\b|\bfell (?:behind|off|out)\b|\bzeroed\b|\bno (?:rewards?|advantages?) (?:was|were|could)\b"
    r"|\bexpected\b.{0,30}\b(?:got|found|reports?|received)\b"
    r"|\bunresponsive\b|\b(?:is|are|was|were|looks?) truncated\b|\bafter (?:a |the )?time-?out\b"
    r"|\bexhausted\b|\binvalid\b|\bmissing\b|\babandon\w+|\bdrift\w*|\bunhealthy\b",
    re.IGNORECASE,
)
_STRONG = re.compile(
    rf"\bfail(?:ed|ure)\b|\b{_NEGATED}|\bnever\b|\bmismatch\w*|\bdiffers?\b|\bcorrupt\w*|\blost\b|\bunreachable\b|\bcrash\w*|\bdied\b"
    r"|\bdisagree\w*|\bhung\b|\bsuccess ?[=:] ?false\b|\bcould ?(?:n[o']t|not)\b|\bunable\b|\brejected\b|\bno rewards?\b|\bzeroed\b"
    r"|\btensors? missing\b|\bmissing tensors?\b|\blag\w*\b|\bfell (?:behind|out)\b|\baborted\b"
    r"|\bexpected\b.{0,30}\b(?:got|found|reports?|received)\b",
    re.IGNORECASE,
)
_DEAD = re.compile(r"\bdied\b|\bcrashed\b|\bunreachable\b|\bhung\b", re.IGNORECASE)
"""Of a part that a run cannot do without, one such word says it all."""
_CLEAR = frozenset({Boundary.REFIT, Boundary.PEFT, Boundary.CHECKPOINT, Boundary.DDP, Boundary.OPTIMIZER})
"""Parts of which a strong word is enough: graders and generators say such things of answers, too."""
_NO_TROUBLE = re.compile(r"\b(?:no|0|without|zero) errors?\b|\berrors?\W+(?:0|none)\b", re.IGNORECASE)
_INSTEAD = re.compile(
    r"\bcontinu\w*|\bproceed\w*|\bkeep\w* going\b|\bgo(?:es|ing)? on\b|\bcarr\w+ on\b|\bignor\w+|\banyway\b"
    r"|\bskip(?:s|ped|ping)?\b|\bus(?:ing|ed)\b"
    r"|\btreat\w* as\b|\bassum(?:ed|ing)\b|\bzeroed\b|\bzeros\b"
    r"|\b(?:with|as|to|by|scored|returning|returned) 0(?:\.0+)?\b|\bpadd(?:ed|ing)\b|\bfill\w+\b"
    r"|\binstead\b|\bset to\b|\bf[ae]ll\w* back\b|\broll\w* back\b|\babandon\w+|\bkeeps?\b|\bkept\b|\bleft out\b"
    r"|\brunning with\b|\bre-?(?:start|spawn|creat|launch)\w*|\brecover\w*|\bduplicat\w+|\breus\w+|\brepeat\w*"
    r"|\bdisabled\b|\bwithout\b|\bstarting (?:with|from)\b|\bfresh\b|\bdropp\w+|\bdiscard\w+|\bunchanged\b"
    r"|\blater\b|\bno-?op\b|\bexcluded\b|\breplac\w+"
    r"|\breset\w*|\bstill\b|\bold(?:er)?\b|\bprevious\b|\bstale\b|\bgenerat\w+ with\b|\btrain\w+ (?:on|with)\b"
    r"|\bremaining\b|\bthis (?:batch|step|round)\b",
    re.IGNORECASE,
)
_LEVEL = re.compile(
    r"\W*(?:[\w.:/-]+ ){0,5}?(?:[\d:.,]+\W+)?\W*(?:(ERROR|CRITICAL|FATAL|[EF]\d{4} \d\d:\d\d)|(WARN(?:ING)?))\b"
    r"|\W*(?:((?i:error|critical|fatal))|((?i:warning))):|(AssertionError)\b"
)
_GLOG = re.compile(r"\[?[ef]\d{4} \d\d:\d\d")
_AGAIN = re.compile(
    r"\bretry(?!\w* (?:at|in) (?:the )?next (?:step|sync|round))|\bretries\b|\battempt \d|\btry(?:ing)? again\b"
    r"|\b(?:newly|re-?)initiali[sz]ed\b|\btarget kl\b|\bdeprecat|\b\w+Warning: |\bwill be\b|\bwould\b|\bif\b"
    r"|\bwhen(?:ever)?\b",
    re.IGNORECASE,
)
_ASIDE = re.compile(
    r"\bwandb|\bmlflow|\btensorboard|\bprometheus|\bswanlab|\btelemetry|\bmetrics?\b|\bexporter|\bdashboard"
    r"|\blogg(?:er|ing)\b|\bupload|\bhub\b|\bplot|\bimport"
    r"|\bcompil|\bdynamo|\binductor|\btriton|\bkernels?\b|\bcuda graphs?"
    r"|\bcache(?!d (?:reward|score|weight|response|rollout|batch|completion|advantage))|\bfuture\w*|\bprofil|\bmodel card"
    r"|\breadme|\bwarm-?up\b|\bversion (?:check|mismatch)|\ballowed by (?:the |a )?(?:white|allow)[- ]?list"
    r"|\btools?\b|\bNET/|\bplugins?\b|\bsockets?\b|\bTCP\b|\brotary|\bcode execution|\bweights only|\bweights_only",
    re.IGNORECASE,
)
_UNREAD = re.compile(
    r"\bpars(?:e|ed|ing|able)\b|\bextract|\bformat|\bboxed\b|\bincorrect\b|\bverification\b|\bwrong answer"
    r"|\bplayer\b|\bopponent\b|\bgame\b|\bepisode|\benv(?:ironment)?\b.{0,20}(?:reset|over)",
    re.IGNORECASE,
)
"""A grader that cannot read an answer rewards it with nothing, and is right; so is a game that was lost."""
_TOO_LONG = re.compile(r"\blength\b|\blong(?:er)?\b|\btruncat|\bvariance\b|\bfilter", re.IGNORECASE)
_OLD = re.compile(r"\breus\w+|\bold(?:er)?\b|\bprevious\b|\bstale\b|\bduplicat\w+|\brepeat\w*|\bfrom before\b", re.IGNORECASE)
_QUIET = re.compile(
    r"\W*(?:[\w.:/\[\]-]+ ){0,5}?\W*\b(?:INFO|DEBUG|TRACE)\b|\W*(?i:info|debug|note):|[ID]\d{4} \d\d:"
    r"|(?:[\w.:/\[\]-]+ ){0,5}?seatrial: waiting for\b"
)
"""Said as information; so are our own words while something starts, whatever they quote."""
_ALL = re.compile(r"\b(?:all|every|everything|nothing|entire|whole)\b|\b(\d+) ?(?:of|/) ?\1\b", re.IGNORECASE)
_SHARE_OF = re.compile(r"\b(\d{1,6}) (?:out )?of (\d{1,6})\b")
"""`12 of 16`: half of a step is as good as all."""
_RIGHT = re.compile(r"\s*(?:[=:]\s*)?(?:0(?:\.0+)?\b(?![.\d])|false\b|\[\]|none\b)", re.IGNORECASE)
"""`errors: 0`."""


_TROUBLES = Stems(
    "fail|error|exception|raised|crash|died|dead|hung|stuck|abort|lost|gone| down|unavailable|unreachable|timed|time out|timeout"
    "|time-out|mismatch|differ|disagree|diverge|unequal|!=|corrupt|n't| not|cannot|abandon|drift|unhealthy|stopped |never|unable"
    "|refused|rejected|nothing|empty|none|nan|no-op|noop| no |0 tokens|explode|ran out|returned |http |swallow|success|too high"
    "|too large|threshold|broke|fatal|critical|unresponsive|truncated|exhausted|invalid|missing|exceed|lag|fell |zeroed|expected"
)
_OF_PARTS = Stems.of((words for words, _ in _COMPILED), shortest=2)


def may_doubt(lower: str, words: frozenset[str]) -> bool:
    """Whether a line in small letters, of these words, may hold a doubt: keeps the patterns from most lines."""
    return (_TROUBLES.within(f" {lower}", words) or _GLOG.match(lower) is not None) and _OF_PARTS.within(lower, words)


def doubt(text: str) -> Doubt | None:
    """What a line says went wrong; None for nothing."""
    if _QUIET.match(text) or _ASIDE.search(text) or _AGAIN.search(text):
        return None
    boundary = next((boundary for words, boundary in _COMPILED if words.search(text)), None)
    if boundary is None or (boundary in (Boundary.REWARD, Boundary.ROLLOUT) and _UNREAD.search(text)):
        return None
    if boundary in (Boundary.DATA, Boundary.ROLLOUT) and _TOO_LONG.search(text):
        return None
    troubles = [found for found in _TROUBLE.finditer(text) if not _RIGHT.match(text, found.end()) and not denied(text[: found.start()])]
    level = _LEVEL.match(text)
    if not troubles and not (boundary in _CLEAR and level is not None and (level[1] or level[3]) and not _NO_TROUBLE.search(text)):
        return None  # an error that names such a part says enough
    error = level is not None and (level[1] or level[3] or level[5]) is not None
    warned = level is not None and _STRONG.search(text) is not None
    whole = _ALL.search(text) is not None or any(2 * int(part) >= int(all_of) > 1 for part, all_of in _SHARE_OF.findall(text))
    strong = boundary in _CLEAR and any(_STRONG.match(found[0]) for found in troubles)
    dead = any(_DEAD.match(found[0]) for found in troubles)
    said = (
        error or warned or whole or strong or dead or len({found[0].lower() for found in troubles}) > 1 or _INSTEAD.search(text) is not None
    )
    if not said or (quoted(text, troubles[0]) if troubles else is_sample(text)):
        return None
    return Doubt(boundary, error or whole or dead or _OLD.search(text) is not None)
