"""What a log says itself, and what it merely quotes.

A phrase in a sample (`model/log_text.py`) or inside quotation marks is a quotation.
"""

from __future__ import annotations

import re

from seatrial.model.log_text import in_sample, is_sample

_RECORD = re.compile(r"""\{.*["'](?:message|msg|event)["']: ?["'][^"']*$""")
_DENIED = re.compile(r"(?:\b(?:no|not any|zero|without|never|avoids?|prevents?)|(?<![\d.])0)\s+(?:\w+\s+)?$", re.IGNORECASE)
_NONE_OF = re.compile(
    r"(?<![\d.])0 (?:nan|inf|failed|row|sample|batch|skipped|dropped|error|worker|prompt|rollout|request|example|record|restart)",
    re.IGNORECASE,
)
"""`no stale weights`, `0 rows skipped`."""
_NOTHING = re.compile(r"\w*\s*[:=]\s*(?:0(?:\.0+)?%?|false|none|\[\])(?=\W*$|[,;|)])", re.IGNORECASE)
"""`skipped batches: 0`."""
_PLANNED = re.compile(r"\b(?:will|would|may|might|shall)\s+$", re.IGNORECASE)
_CONDITION = re.compile(r"\b(?:if|when(?:ever)?|unless|in case)\b", re.IGNORECASE)
"""`will skip the step if …`: what a run would do."""
_WORDS = 14
"""Words that may stand before a phrase: heads of log records and a short subject. After more it is prose."""


def says(text: str, found: re.Match[str]) -> bool:
    """Whether a phrase is the line's own word: not a quotation, not a part of a sample, and not denied."""
    if _NOTHING.match(text, found.end()) or (_PLANNED.search(text[: found.start()]) and _CONDITION.search(text, found.end())):
        return False
    return not denied(text[: found.start()]) and not _NONE_OF.search(found[0]) and not quoted(text, found)


def denied(before: str) -> bool:
    """Whether what stands before a phrase denies it."""
    return _DENIED.search(before) is not None


def quoted(text: str, found: re.Match[str]) -> bool:
    """Whether a phrase is a quotation, a part of a sample, or prose."""
    before = text[: found.start()]
    if is_sample(text) or (text.lstrip().startswith("|") and (before.strip() or text.rstrip().endswith("|"))):
        return True
    if in_sample(before):
        return True
    if _RECORD.match(before):
        return False
    if before.count('"') % 2 or before.count("`") % 2 or before.count("“") > before.count("”") or before.count("«") > before.count("»"):
        return True
    if len(re.findall(r"(?<!\w)'|'(?!\w)", before)) % 2:
        return True
    return len(before.split()) > _WORDS
