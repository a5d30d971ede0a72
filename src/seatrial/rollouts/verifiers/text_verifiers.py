"""What a row says about the right answer, and the verifiers that compare text: `exact` and `choice`.

- exact: the last match of `pattern`, else the last \boxed{}, else the last line, equals an expected text but for white space and case.
- choice: the answer is a letter. Looked for in this order, the last one of each counts: `pattern` (then nowhere else); \boxed{};
  "Answer: C" or "the answer is (C)"; a last line that is a letter or an option. Letters are capitals; two at once are no answer. Options
  are the row's `options` or `choices`. Gym's mcqa takes the first box instead of the last, and boxes alone.
- Tests of code: [{"input", "output"}]; {"inputs", "outputs"} with or without "fn_name" (LiveCodeBench, Gym's code_gen); or Python that
  asserts, with `check(candidate)` as in HumanEval. What cannot be read, is empty or checks nothing is a ValueError.
"""

from __future__ import annotations

import ast
import math
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from seatrial.core.guarded import BadValue, parse_json, parse_python
from seatrial.rollouts.campaign import Dataset, Verify, expected, prompt_messages
from seatrial.rollouts.rollout_record import FailureKind, InputRow, RolloutError, Score, Verifier
from seatrial.runtime.interrupt import stop_requested

Asker = Callable[[str], Awaitable[str]]
"""Asks a model a prompt, gives its text. Raises RolloutError. One with a `close` is closed with its verifier."""


class Truth:
    """Reads rows as their datasets say."""

    def __init__(self, datasets: Mapping[str, Dataset]) -> None:
        self._datasets = datasets

    def expected(self, row: InputRow) -> tuple[str, ...]:
        """The answers that are right, one or several; a failure of class `reward` when the row has none."""
        value = expected(row.data, self._datasets[row.dataset])
        known = texts_of(value)
        if known is None:
            raise RolloutError(FailureKind.REWARD, f"{row.source or row.id}: no expected answer that is a text or a number: {value!r:.200}")
        return known

    def question(self, row: InputRow) -> str:
        """What the user said, as text."""
        messages = prompt_messages(row.data, self._datasets[row.dataset])
        return "\n\n".join(_content(message.get("content")) for message in messages if message.get("role") == "user").strip()


@contextmanager
def undisturbed(kind: FailureKind) -> Iterator[None]:
    """Around a score that comes of programs: none, when we are asked to stop meanwhile. Whoever asks, asks every process of the job,
    and a test that was ended by that must not look like a wrong answer."""
    before = stop_requested()
    yield
    if stop_requested() and not before:
        raise RolloutError(kind, "asked to stop while it was scored", heals=True)


def texts_of(value: Any) -> tuple[str, ...] | None:
    """Expected answers, one or a list of them, as texts; None when one of them is none, or there is none."""
    values = value if isinstance(value, list | tuple) else [value]
    texts = [str(item) for item in values if isinstance(item, str | int | float) and not isinstance(item, bool)]
    known = tuple(text for text in texts if text.strip())
    return known if known and len(known) == len(values) else None


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…} that is closed, however braces are nested in it."""
    mark = r"\boxed{"
    found = text.rfind(mark)
    while found >= 0:
        depth = 0
        for place in range(found + len(mark) - 1, len(text)):
            depth += (text[place] == "{") - (text[place] == "}")
            if depth == 0:
                return text[found + len(mark) : place].strip()
        found = text.rfind(mark, 0, found)
    return None


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts: Sequence[Any] = content if isinstance(content, list | tuple) else ()
    return "\n".join(part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str))


class ProgramCase(NamedTuple):
    """Reads `stdin`, must write `output`."""

    stdin: str
    output: str


class CallCase(NamedTuple):
    """Must return `output`."""

    name: str
    arguments: list[Any]
    output: Any


class AssertsCase(NamedTuple):
    """Must run to its end."""

    code: str


Case = ProgramCase | CallCase | AssertsCase


def column(data: Mapping[str, Any], name: str) -> Any:
    """A column of a row; dots lead into objects (`verifier_metadata.unit_tests`)."""
    value: Any = data
    for part in [name] if name in data else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(f"no column {name}")
        value = value[part]
    return value


def cases_of(tests: Any, entry_point: str | None = None) -> list[Case]:
    """Every test of a row, at least one."""
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        try:
            tests = parse_json(tests)
        except ValueError:
            pass  # Python may begin with these signs too; it is parsed below.
    if isinstance(tests, str):
        return [AssertsCase(_checked(tests, entry_point))]
    if isinstance(tests, Mapping):
        return _lists(tests)
    if not isinstance(tests, list | tuple) or not tests:
        raise ValueError("no tests")
    if all(isinstance(entry, str) for entry in tests):
        return [AssertsCase(_checked(entry, entry_point)) for entry in tests]
    cases: list[Case] = []
    for entry in tests:
        if not isinstance(entry, Mapping) or "input" not in entry or "output" not in entry:
            raise ValueError("a test must have input and output")
        if entry.get("testtype", "stdin") != "stdin":
            raise ValueError("tests of functions are written as fn_name, inputs and outputs")
        cases.append(ProgramCase(_text(entry["input"]), _text(entry["output"])))
    return cases


def same_output(got: str, wanted: str) -> bool:
    """Line by line as LiveCodeBench: white space around lines does not matter, and numbers are equal by value."""
    ours, theirs = ([line.strip() for line in text.strip().split("\n")] for text in (got, wanted))
    if len(ours) != len(theirs):
        return False
    try:
        different = ((mine.split(), other.split()) for mine, other in zip(ours, theirs, strict=True) if mine != other)
        return all([*map(Decimal, mine)] == [*map(Decimal, other)] for mine, other in different)
    except InvalidOperation:
        return False


def same_value(got: Any, wanted: Any) -> bool:
    """Equal, or two numbers that are close, as LiveCodeBench."""
    if got == wanted:
        return True
    try:
        return math.isclose(float(got), float(wanted), rel_tol=1e-5, abs_tol=1e-8)
    except (TypeError, ValueError, OverflowError):
        return False


def _lists(tests: Mapping[str, Any]) -> list[Case]:
    inputs, outputs, name = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("inputs and outputs must be two lists of the same length")
    if not inputs:
        raise ValueError("no tests")
    pairs = zip(inputs, outputs, strict=True)
    if name is None:
        return [ProgramCase(_text(given), _text(wanted)) for given, wanted in pairs]
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"fn_name = {name!r} is no name")
    calls: list[Case] = []
    for given, wanted in pairs:
        if isinstance(given, str):
            given = [parse_json(line) for line in given.split("\n") if line.strip()]
        if not isinstance(given, list):
            raise ValueError(f"arguments are JSON, one per line, or a list, not {given!r:.80}")
        calls.append(CallCase(name, given, parse_json(wanted) if isinstance(wanted, str) else wanted))
    return calls


def _text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"input and output of a program are texts, not {value!r:.80}")
    return value


def _checked(code: str, entry_point: str | None) -> str:
    """Asserts that parse, and of which something is executed."""
    try:
        body = parse_python(code).body
    except BadValue as error:
        raise ValueError(f"not Python: {error.what}{f' ({error.where})' if error.where else ''}") from error
    if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in body) and not any(map(_runs, body)):
        if entry_point is None or not entry_point.isidentifier():
            raise ValueError("check() is defined and never called, and the row has no entry_point")
        return f"{code}\ncheck({entry_point})\n"
    if not any(map(_runs, body)):
        raise ValueError("nothing in it is executed: a solution could not fail")
    return code


def _runs(node: ast.stmt) -> bool:
    """Whether a statement at the top can check something: not a definition, an import, a constant or a docstring."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Pass)
    return not isinstance(node, kinds)


class Exact(Verifier):
    """Compares text; see above."""

    def __init__(self, verify: Verify, truth: Truth) -> None:
        self._pattern = re.compile(verify.pattern) if verify.pattern is not None else None
        self._ignore_case = verify.ignore_case
        self._truth = truth

    async def score(self, row: InputRow, text: str, output: Sequence[Mapping[str, Any]]) -> Score:  # noqa: ARG002
        expected = self._truth.expected(row)
        answer = self._extract(text)
        right = answer is not None and self._plain(answer) in {self._plain(known) for known in expected}
        return Score(float(right), answer, {"expected_answer": expected[0], "extracted_answer": answer})

    def _extract(self, text: str) -> str | None:
        if self._pattern is not None:
            return last_match(self._pattern, text)
        found = boxed(text)
        return (last_line(text) if found is None else found) or None

    def _plain(self, text: str) -> str:
        bare = " ".join(text.split())
        return bare.casefold() if self._ignore_case else bare


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """The last match: its first group, if the pattern has one and it took part; stripped."""
    found = deque(pattern.finditer(text), maxlen=1)
    if not found:
        return None
    last = found[0]
    return ((last[1] if pattern.groups and last[1] is not None else last[0]) or "").strip() or None


_STATED = re.compile(r"(?i:\banswer)[*_]{0,3}(?:\s+(?i:is|would\s+be|should\s+be))?[*_]{0,3}\s*[:：]?[*_]{0,3}[ \t]*(?P<said>[^\n]+)")
_LEADING = re.compile(r"[\s*_(\[{$]*(?:(?i:option|choice)\s+)?[\s*_(\[{$]*(?P<letter>[A-Z])(?![A-Za-z0-9])(?P<rest>.*)", re.S)
_ALTERNATIVE = re.compile(r"[\s*_)\]}$]*(?:,|/|\bor\b|\band\b|&)\s*[*_(\[{$]*[A-Z](?![A-Za-z0-9'])", re.S)
_SIGN_NEXT = re.compile(r"\s*(?:[^\w\s]|$)")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathsf)\s*\{([^{}]*)\}")
_WORDS = ("A", "I")
_NONE = "expects {0!r:.200}, which is no letter and no option"


class Choice(Verifier):
    """Compares text; see above."""

    def __init__(self, verify: Verify, truth: Truth) -> None:
        self._pattern = re.compile(verify.pattern) if verify.pattern is not None else None
        self._truth = truth

    async def score(self, row: InputRow, text: str, output: Sequence[Mapping[str, Any]]) -> Score:  # noqa: ARG002
        options = options_of(row.data)
        expected = self._truth.expected(row)
        letters = {_expected_letter(known, options) for known in expected}
        if None in letters:
            raise RolloutError(FailureKind.REWARD, f"{row.source or row.id}: {_NONE.format(expected)}")
        answer = self._extract(text, options)
        return Score(float(answer in letters), answer, {"expected_answer": expected[0], "extracted_answer": answer})

    def _extract(self, text: str, options: Mapping[str, str]) -> str | None:
        if self._pattern is not None:
            return _read(last_match(self._pattern, text) or "", options, alone=True)
        box = boxed(text)
        if box is not None:
            return _read(box, options, alone=True)
        for stated in reversed([*_STATED.finditer(text)]):
            if (letter := _read(stated["said"], options, alone=False)) is not None:
                return letter
        return _read(last_line(text), options, alone=True)


def options_of(data: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the options by letter; empty when the row has none that can be read."""
    given = data.get("options") or data.get("choices")
    if isinstance(given, Mapping):
        pairs = [*given.items()]
    elif isinstance(given, list | tuple) and all(isinstance(entry, Mapping) for entry in given):
        pairs = [pair for entry in given for pair in entry.items()]
    elif isinstance(given, list | tuple):
        pairs = [(chr(ord("A") + place), entry) for place, entry in enumerate(given[:26])]
    else:
        pairs = []
    return {key.upper(): str(text) for key, text in pairs if isinstance(key, str) and re.fullmatch("[A-Za-z]", key) and text is not None}


def why_no_choice(data: Mapping[str, Any], expected: Any) -> str | None:
    """None, or why a row that expects this cannot be scored, whatever the answer."""
    options, known = options_of(data), texts_of(expected)
    if known is not None and all(_expected_letter(text, options) for text in known):
        return None
    return _NONE.format(expected)


def _expected_letter(text: str, options: Mapping[str, str]) -> str | None:
    letter = text.strip(" \t\n().:").upper()
    if re.fullmatch("[A-Z]", letter) and (not options or letter in options):
        return letter
    return _option(text, options)


def _read(said: str, options: Mapping[str, str], *, alone: bool) -> str | None:
    """The letter that something said means; `alone`: nothing but the letter, or the text of its option, may stand there."""
    bare = _WRAPPED.sub(r"\1", said).strip()
    if (letter := _option(bare, options)) is not None:
        return letter
    match = _LEADING.match(bare)
    if match is None or (options and match["letter"] not in options) or _ALTERNATIVE.match(match["rest"]):
        return None
    letter, rest = match["letter"], match["rest"]
    text = rest.strip(" \t\n.*_)]}$:：,-")
    if not text or (letter in options and _same(text, options[letter])):
        return letter
    if alone or (letter in _WORDS and not _SIGN_NEXT.match(rest)):
        return None
    return letter


def _option(text: str, options: Mapping[str, str]) -> str | None:
    found = [letter for letter, option in options.items() if _same(text, option)]
    return found[0] if len(found) == 1 else None


def _same(text: str, option: str) -> bool:
    return bool(option.strip()) and _plain(text) == _plain(option)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .*_$")
