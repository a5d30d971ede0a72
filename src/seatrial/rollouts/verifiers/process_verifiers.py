"""Verifiers that run in processes: `math` and `function` in worker processes, `code` in the sandbox.

- A worker (`python -m seatrial.rollouts.verifiers.process_verifiers math`, or `function BASE SPEC`) loads once and answers one request at a
  time. One that is late is killed and replaced; one that dies is replaced once for the same request. Workers ignore Ctrl-C and SIGTERM
  and die with this process.
- Requests come on its standard input, answers go to what was its standard output, each behind 12 digits of its number and 12 of its
  length. Answer 0 says whether it could load: null, or why not. What a function prints goes nowhere. A function may fork, and its child
  may return: only the process that was asked answers.
- math: equivalence by math-verify; an unreadable expected answer or a timeout is a failure of class `reward`.
- function: the user's function, called with (row, text), gives a number or a dict with `reward`; anything else is a failure.
- code: the last fenced Python block runs against the row's tests, each alone; the reward is 1 only if all pass. Expected outputs never
  enter the sandbox; asserts share the interpreter with the code, so prefer inputs and outputs. A broken sandbox is a failure of class
  `sandbox`, unreadable tests one of class `reward`.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import logging
import math
import os
import re
import secrets
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from seatrial.core.errors import UserError
from seatrial.core.guarded import parse_json
from seatrial.rollouts.campaign import SandboxLimits, Verify
from seatrial.rollouts.rollout_record import FailureKind, InputRow, RolloutError, Score, Verifier
from seatrial.rollouts.sandbox import Ran, Sandbox, SandboxError, bubblewrap
from seatrial.rollouts.sandbox.sandbox import END_S, Child, start_child
from seatrial.rollouts.verifiers import text_verifiers as texts
from seatrial.rollouts.verifiers.text_verifiers import AssertsCase, CallCase, Case, ProgramCase, Truth, undisturbed
from seatrial.runtime.process_tree import die_with_parent

_LOAD_S = 120.0
_MOST = 4
STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask for an end in order."""


class WorkerError(Exception):
    """No answer: too late, or the worker died. The message says which, `heals` whether another try may give one."""

    def __init__(self, message: str, *, heals: bool = False) -> None:
        super().__init__(message)
        self.heals = heals


class _DiedError(WorkerError):
    """The worker died."""


class WorkerPool:
    """A pool of workers of one kind."""

    def __init__(self, arguments: Sequence[str], timeout_s: float, count: int | None = None) -> None:
        self._arguments = arguments
        self._timeout_s = timeout_s
        self._turn = asyncio.Semaphore(count or min(os.cpu_count() or 1, _MOST))
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._closed = asyncio.Event()

    async def ask(self, request: Mapping[str, Any]) -> Any:
        """The answer to a request. Raises WorkerError, and UserError when a worker cannot load what it needs."""
        async with self._turn:
            try:
                return await self._ask(request)
            except _DiedError:
                return await self._ask(request)

    async def _ask(self, request: Mapping[str, Any]) -> Any:
        if self._closed.is_set():  # a retry, or a request that waited for its turn, would start a worker that nobody ends
            raise WorkerError("the verifier was closed", heals=True)
        worker = self._idle.pop() if self._idle else await self._start()
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await worker.ask(request)
        except TimeoutError:
            await self._end(worker)
            raise WorkerError(f"no answer within {self._timeout_s:g} s") from None
        except _StaleError as error:
            await self._end(worker)
            raise _DiedError(str(error)) from None
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            code = await self._end(worker)
            raise _DiedError(f"the worker process died ({_how(code)})", heals=code < 0) from None
        except BaseException:
            await self._end(worker)
            raise
        self._idle.append(worker)
        return answer

    async def close(self) -> None:
        """End every worker, also those that load or answer."""
        self._closed.set()
        self._idle.clear()
        workers = [*self._all]
        for worker in workers:  # before the first wait: that may be cancelled
            worker.kill()
        await asyncio.gather(*(self._end(worker) for worker in workers))

    async def _start(self) -> _Worker:
        words = (sys.executable, "-m", "seatrial.rollouts.verifiers.process_verifiers", *self._arguments)
        worker = _Worker(await start_child(words, start_new_session=True, before_exec=_before_exec()))
        self._all.add(worker)
        if self._closed.is_set():  # while it started
            await self._end(worker)
            raise WorkerError("the verifier was closed", heals=True)
        what = f"a worker of the verifier ({' '.join(self._arguments)})"
        try:
            async with asyncio.timeout(_LOAD_S):
                said = await worker.read(0)
        except TimeoutError:
            await self._end(worker)
            raise UserError(f"{what} did not load within {_LOAD_S:g} s", "see what its import waits for") from None
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            if self._closed.is_set():
                await self._end(worker)
                raise WorkerError("the verifier was closed", heals=True) from None
            raise UserError(f"{what} died while loading ({_how(await self._end(worker))})", "import it in a Python of your own") from None
        except BaseException:
            await self._end(worker)
            raise
        if said is not None:
            await self._end(worker)
            raise UserError(str(said), "see that it can be imported where the collector runs")
        return worker

    async def _end(self, worker: _Worker) -> int:
        self._all.discard(worker)
        return await worker.end()


class _StaleError(Exception):
    """What came is the answer to another request."""


class _Worker:
    def __init__(self, process: Child) -> None:
        self._process = process
        self._number = 0
        self._ended = False

    async def ask(self, request: Mapping[str, Any]) -> Any:
        body = json.dumps(request).encode()
        self._number += 1
        self._process.stdin.write(b"%012d%012d" % (self._number, len(body)) + body)
        await self._process.stdin.drain()
        return await self.read(self._number)

    async def read(self, number: int) -> Any:
        head = await self._process.stdout.readexactly(24)
        answer = parse_json(await self._process.stdout.readexactly(int(head[12:])))
        if int(head[:12]) != number:
            raise _StaleError(f"the worker process answered request {int(head[:12])} where {number} was asked")
        return answer

    def kill(self) -> None:
        """Kill it and what it started. Not twice: its number may be another process's by then."""
        if not self._ended:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> int:
        """Kill it and what it started; its exit code, negative for a signal."""
        self.kill()
        self._process.close()
        try:
            async with asyncio.timeout(END_S):
                code = await self._process.wait()
        except TimeoutError:  # the kernel holds it; it dies when that lets it go
            return -signal.SIGKILL
        self._ended = True
        with suppress(ChildProcessError):
            # What it had started may be ours now (see `adopt_orphans`); there is nobody else to collect it.
            while os.waitpid(-self._process.pid, os.WNOHANG)[0]:
                pass
        return code


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _before_exec() -> Callable[[], None]:
    """What a worker does before exec: it dies with us, and ignores signals until `worker` has taken them over."""
    die = die_with_parent()

    def prepare() -> None:
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        die()

    return prepare


_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


class _WorkerVerifier(Verifier):
    """Scores in worker processes."""

    _workers: WorkerPool

    async def close(self) -> None:
        await self._workers.close()


class Mathematics(_WorkerVerifier):
    """Compares mathematics."""

    def __init__(self, verify: Verify, truth: Truth) -> None:
        self._truth = truth
        self._workers = WorkerPool(["math"], verify.timeout_s)

    async def score(self, row: InputRow, text: str, output: Sequence[Mapping[str, Any]]) -> Score:  # noqa: ARG002
        expected = self._truth.expected(row)
        try:
            said = await self._workers.ask({"expected": expected, "text": text})
        except WorkerError as error:
            raise RolloutError(FailureKind.REWARD, f"math-verify: {error}", heals=error.heals) from error
        if "error" in said:
            raise RolloutError(FailureKind.REWARD, f"{row.source or row.id}: {said['error']}")
        fields = {"expected_answer": expected[0], "extracted_answer": said["answer"]}
        return Score(float(said["right"]), said["answer"], fields)


def equivalence() -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """For a worker: answers {"expected", "text"} by {"right", "answer"}, or {"error"}. No time limit of its own."""
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]
    except ImportError as error:
        raise UserError("the verifier math needs math-verify, which is not installed", 'pip install "seatrial[rollouts]"') from error

    def answer(request: Mapping[str, Any]) -> dict[str, Any]:
        golds = []
        for expected in request["expected"]:
            gold = parse(rf"\boxed{{{bare(expected)}}}", [LatexExtractionConfig()], parsing_timeout=None)
            if not gold:
                return {"error": f"the expected answer cannot be read as mathematics: {expected!r:.200}"}
            golds.append(gold)
        found = parse(request["text"], [ExprExtractionConfig(), LatexExtractionConfig()], parsing_timeout=None)
        right = any(verify(gold, found, timeout_seconds=None) for gold in golds)
        # The first entry is what the extracted text means, so that equal answers vote together.
        return {"right": right, "answer": str(found[0]) if found else None}

    return answer


def bare(text: str) -> str:
    """Without the delimiters of LaTeX around it."""
    text = text.strip()
    for left, right in _DELIMITERS:
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            return text[len(left) : -len(right)].strip()
    return text


class Function(_WorkerVerifier):
    """Calls the user's function."""

    def __init__(self, verify: Verify, base: Path) -> None:
        assert verify.function is not None
        module, colon, name = verify.function.rpartition(":")
        if not colon or not module or not name.isidentifier():
            raise UserError(f"verifiers: function = {verify.function!r} names no function", "write module:name, or path/file.py:name")
        if module.endswith(".py") and not (base / module).is_file():
            raise UserError(f"verifiers: function: {base / module} does not exist", f"a relative path starts at {base}")
        self._name = verify.function
        self._workers = WorkerPool(["function", str(base.absolute()), verify.function], verify.timeout_s)

    async def score(self, row: InputRow, text: str, output: Sequence[Mapping[str, Any]]) -> Score:  # noqa: ARG002
        try:
            with undisturbed(FailureKind.REWARD):
                said = await self._workers.ask({"row": dict(row.data), "text": text})
        except WorkerError as error:
            raise RolloutError(FailureKind.REWARD, f"{self._name}: {error}", heals=error.heals) from error
        if "error" in said:
            raise RolloutError(FailureKind.REWARD, f"{self._name}: {said['error']}")
        return self._score(said["value"])

    def _score(self, value: Any) -> Score:
        fields: Mapping[str, Any] = value if isinstance(value, dict) else {"reward": value}
        reward = fields.get("reward")
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise RolloutError(FailureKind.REWARD, f"{self._name} gave {value!r:.200}, and no finite reward")
        for key, number in fields.items():
            if isinstance(number, float) and not math.isfinite(number):
                raise RolloutError(FailureKind.REWARD, f"{self._name} gave {key} = {number}, which is not finite")
        answer = fields.get("answer")
        numbers = {key: float(number) for key, number in fields.items() if isinstance(number, int | float) and key != "reward"}
        kept = {key: inner for key, inner in fields.items() if key != "reward"}
        return Score(float(reward), None if answer is None else str(answer), kept, numbers)


_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n`]*$")
_PYTHON = ("python", "python3", "py", "py3")
_SHOWN = 300


class Programs(Verifier):
    """Runs code against tests; every run ends what it started."""

    def __init__(self, verify: Verify, limits: SandboxLimits) -> None:
        self._column = verify.tests
        self._sandbox = Sandbox(limits)

    async def score(self, row: InputRow, text: str, output: Sequence[Mapping[str, Any]]) -> Score:  # noqa: ARG002
        try:
            entry_point = row.data.get("entry_point")
            cases = texts.cases_of(texts.column(row.data, self._column), entry_point if isinstance(entry_point, str) else None)
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
        if isinstance(case, ProgramCase):
            stdin, request = case.stdin, {"kind": "program"}
        elif isinstance(case, CallCase):
            request = {"kind": "call", "name": case.name, "arguments": case.arguments}
        else:
            files["tests.py"] = case.code
        ran = await self._sandbox.run(
            bubblewrap.inside_source("examine"), stdin=stdin, files={**files, "request.json": json.dumps(request)}
        )
        if ran.ending != "done":
            return f"ended by its limits: {ran.ending}"
        if ran.exit_code != 0:
            lines = ran.stderr.strip().splitlines() or ["no message"]
            return f"exit code {ran.exit_code}: {lines[-1][:_SHOWN]}"
        return _compare(ran, case, token)


def extract(text: str) -> str | None:
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
    if isinstance(case, AssertsCase):
        return "" if ran.stdout == token else "it ended before all asserts were made"
    if isinstance(case, ProgramCase):
        if texts.same_output(ran.stdout, case.output):
            return ""
        return f"wrote {ran.stdout[:_SHOWN]!r}, expected {case.output[:_SHOWN]!r}, for {case.stdin[:_SHOWN]!r}"
    try:
        value = parse_json(ran.stdout)
    except ValueError:
        return "it ended before the function returned"
    return (
        ""
        if texts.same_value(value, case.output)
        else f"returned {value!r:.300}, expected {case.output!r:.300}, for {case.arguments!r:.300}"
    )


def load_function(base: Path, spec: str) -> Callable[[Any, str], Any]:
    """The user's function: `module:name`, or `path/file.py:name` with a path that starts at `base`."""
    module_name, _, name = spec.rpartition(":")
    sys.path.insert(0, str(base))
    if module_name.endswith(".py"):
        path = base / module_name
        found = importlib.util.spec_from_file_location(path.stem, path)
        if found is None or found.loader is None:
            raise ImportError(f"{path}: no Python file")
        module = importlib.util.module_from_spec(found)
        sys.modules[path.stem] = module
        found.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{spec} is not a function")
    return function  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """As JSON has it; numbers of other libraries become ours."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return value.item() if hasattr(value, "item") else repr(value)


def _send(stream: IO[bytes], number: int, answer: Any) -> None:
    body = json.dumps(answer).encode()
    stream.write(b"%012d%012d" % (number, len(body)) + body)
    stream.flush()


def main() -> None:
    """Answer until standard input ends."""
    for stop in STOPS:
        # A handler that does nothing, because what is ignored would stay ignored in whatever a function starts.
        signal.signal(stop, lambda *_: None)
    own = os.getpid()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    try:
        if sys.argv[1] == "math":
            logging.disable(logging.CRITICAL)
            answerer = equivalence()
        else:
            function = load_function(Path(sys.argv[2]), sys.argv[3])

            def answerer(request: Mapping[str, Any]) -> dict[str, Any]:
                return {"value": _plain(function(request["row"], request["text"]))}

    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - whatever a user's module raises, even SystemExit, is why it was not loaded
        _send(answers, 0, f"verifier {' '.join(sys.argv[1:])}: {_raised(error)}")
        return
    _send(answers, 0, None)
    while head := requests.read(24):
        request = json.loads(requests.read(int(head[12:])))
        try:
            answer = answerer(request)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - a function may raise anything; it is the answer's failure, not the worker's
            answer = {"error": _raised(error)}
        if os.getpid() != own:
            os._exit(0)
        _send(answers, int(head[:12]), answer)


def _raised(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")[:1000] + where


if __name__ == "__main__":
    main()
