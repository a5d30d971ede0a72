"""Code: the answer's program is run in the sandbox against the tests of the row; the reward is 1 only if all of them pass.

- The code is the last fenced block that is marked python or py, else the last that is not marked. A block that is not closed (a
  truncated answer) is none.
- Each test runs alone, with the limits of `[sandbox]`; the first that fails ends the row, and is named in its fields.
- What a program must write or return never enters the sandbox; it is compared here. Asserts share the interpreter with the code, so
  code that goes out of its way to look into it can pass them (leaving early cannot): prefer inputs and outputs where that matters.
- A program must end with exit code 0. A sandbox that does not work is a failure of class `sandbox`, tests that cannot be read one of
  class `reward`; neither is ever a reward of 0.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from seatrial.model.guarded import parse_json
from seatrial.rollouts.campaign import SandboxLimits, Verify
from seatrial.rollouts.record import FailureKind
from seatrial.rollouts.sandbox import Ran, Sandbox, SandboxError, bubblewrap
from seatrial.rollouts.verify.cases import Asserts, Call, Case, Program, cases_of, column, same_output, same_value
from seatrial.rollouts.verify.truth import undisturbed
from seatrial.rollouts.work import RolloutError, Row, Score

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n`]*$")
_PYTHON = ("python", "python3", "py", "py3")
_SHOWN = 300


class Programs:
    """A `Verifier`."""

    def __init__(self, verify: Verify, limits: SandboxLimits) -> None:
        self._column = verify.tests
        self._sandbox = Sandbox(limits)

    async def score(self, row: Row, text: str, output: Sequence[Mapping[str, Any]]) -> Score:  # noqa: ARG002
        try:
            entry_point = row.data.get("entry_point")
            cases = cases_of(column(row.data, self._column), entry_point if isinstance(entry_point, str) else None)
        except ValueError as error:
            raise RolloutError(FailureKind.REWARD, f"{row.source or row.id}: {self._column}: {error}") from error
        code = extract(text)
        passed, failed = 0, "the answer has no code block"
        if code is not None:
            with undisturbed(FailureKind.SANDBOX):
                passed, failed = await self._try(code, cases)
        fields: dict[str, Any] = {"extracted_code": code, "tests": len(cases), "tests_passed": passed}
        if failed:
            fields["failed_test"] = failed
        return Score(float(passed == len(cases)), None, fields, {"tests_passed_share": passed / len(cases)})

    async def close(self) -> None:
        """Every run ends what it started."""

    async def _try(self, code: str, cases: Sequence[Case]) -> tuple[int, str]:
        """How many tests passed before the first that failed, and how that one did."""
        for number, case in enumerate(cases):
            try:
                why = await self._one(code, case)
            except SandboxError as error:
                raise RolloutError(FailureKind.SANDBOX, str(error), heals=True) from error
            if why:
                return number, f"test {number}: {why}"
        return len(cases), ""

    async def _one(self, code: str, case: Case) -> str:
        """Run one test: nothing, or how it failed."""
        token = secrets.token_hex(16)
        stdin = ""
        request: dict[str, Any] = {"kind": "asserts", "token": token}
        files = {"solution.py": code}
        if isinstance(case, Program):
            stdin, request = case.stdin, {"kind": "program"}
        elif isinstance(case, Call):
            request = {"kind": "call", "name": case.name, "arguments": case.arguments}
        else:
            files["tests.py"] = case.code
        ran = await self._sandbox.run(_examiner(), stdin=stdin, files={**files, "request.json": json.dumps(request)})
        if ran.ending != "done":
            return f"ended by its limits: {ran.ending}"
        if ran.exit_code != 0:
            return f"exit code {ran.exit_code}: {_last(ran.stderr)}"
        return _compare(ran, case, token)


def extract(text: str) -> str | None:
    """The code of an answer."""
    marked: str | None = None
    unmarked: str | None = None
    fence, language, lines = "", "", list[str]()
    for line in text.splitlines():
        match = _FENCE.match(line)
        if not fence:
            if match:
                fence, language, lines = match[1], match[2].lower(), []
        elif match and match[1].startswith(fence) and not match[2]:
            if language in _PYTHON:
                marked = "\n".join(lines)
            elif not language:
                unmarked = "\n".join(lines)
            fence = ""
        else:
            lines.append(line)
    return marked if marked is not None else unmarked


def _compare(ran: Ran, case: Case, token: str) -> str:
    if isinstance(case, Asserts):
        return "" if ran.stdout == token else "it ended before all asserts were made"
    if isinstance(case, Program):
        if same_output(ran.stdout, case.output):
            return ""
        return f"wrote {ran.stdout[:_SHOWN]!r}, expected {case.output[:_SHOWN]!r}, for {case.stdin[:_SHOWN]!r}"
    try:
        value = parse_json(ran.stdout)
    except ValueError:
        return "it ended before the function returned"
    return "" if same_value(value, case.output) else f"returned {value!r:.300}, expected {case.output!r:.300}, for {case.arguments!r:.300}"


def _last(text: str) -> str:
    """The last line of a traceback."""
    return (text.strip().splitlines() or ["no message"])[-1][:_SHOWN]


@functools.cache
def _examiner() -> str:
    return bubblewrap.inside("examine")
