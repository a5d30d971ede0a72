"""Code: what is taken for the program, how tests are read, and that only right programs pass."""

from __future__ import annotations

import json
from typing import Any

import pytest

from seatrial.rollouts.rollout_record import Verifier
from seatrial.rollouts.sandbox import bubblewrap
from seatrial.rollouts.verifiers.process_verifiers import extract
from seatrial.rollouts.verifiers.text_verifiers import AssertsCase, CallCase, ProgramCase, cases_of, column, same_output, same_value
from tests.rollouts.sandboxes import LIMITS, left_over, needs_sandbox
from tests.rollouts.verifiers import failure, made, row, talk


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a"),
        ("```py\na\n```\nthen\n```Python\nb\nc\n```\ndone", "b\nc"),
        ("```python\na\n```\nOutput:\n```\n1\n```", "a"),
        ("```python\na\n```\n```text\n1\n```", "a"),
        ("```\na\n```", "a"),
        ("````python\n```\nx\n````", "```\nx"),
        ("~~~python\na\n~~~", "a"),
        ("  ```python title=x\n  a\n  ```", "  a"),
        ("```python\na\n```\n```python\nb was cut", "a"),
        ("```cpp\na\n```", None),
        ("print(1)", None),
        ("", None),
    ],
)
def test_the_last_python_block_is_the_program(text: str, code: str | None) -> None:
    assert extract(text) == code


def test_tests_in_every_format() -> None:
    pair = [{"input": "1", "output": "2", "testtype": "stdin"}]
    assert cases_of(pair) == cases_of(json.dumps(pair)) == [ProgramCase("1", "2")]
    assert cases_of({"inputs": ["1", ["a", "b"]], "outputs": ["2", "c"], "fn_name": None}) == [
        ProgramCase("1", "2"),
        ProgramCase("a\nb", "c"),
    ]
    calls = {"inputs": ['[1]\n"x"', [2, 3]], "outputs": ["true", [4]], "fn_name": "f"}
    assert cases_of(calls) == [CallCase("f", [[1], "x"], True), CallCase("f", [2, 3], [4])]
    assert cases_of("assert f(1) == 2") == [AssertsCase("assert f(1) == 2")]
    assert cases_of(["assert f(1)", "assert f(2)"]) == [AssertsCase("assert f(1)"), AssertsCase("assert f(2)")]
    assert cases_of("[f(x) for x in y]") == [AssertsCase("[f(x) for x in y]")]
    assert cases_of("def check(candidate):\n    assert candidate(1)", "f")[0] == AssertsCase(
        "def check(candidate):\n    assert candidate(1)\ncheck(f)\n"
    )


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ([], "no tests"),
        ({"inputs": [], "outputs": []}, "no tests"),
        ({"inputs": ["1"], "outputs": []}, "same length"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": "a b"}, "no name"),
        ({"inputs": ["{"], "outputs": ["1"], "fn_name": "f"}, "Expecting"),
        ([{"input": "1"}], "input and output"),
        ([{"input": 1, "output": "1"}], "texts"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "fn_name"),
        ([1], "input and output"),
        (None, "no tests"),
        (3, "no tests"),
        ("", "nothing in it is executed"),
        ("x = 1\n'doc'\ndef test(): assert False", "nothing in it is executed"),
        ("def check(candidate):\n    assert candidate(1)", "never called"),
        ("assert (", "not Python"),
    ],
)
def test_tests_that_would_check_nothing_are_refused(tests: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        cases_of(tests)


def test_a_column_may_lie_within_another() -> None:
    assert column({"a": {"b": 1}}, "a.b") == 1
    assert column({"a.b": 2, "a": {"b": 1}}, "a.b") == 2
    for missing in ("c", "a.c", "a.b.c"):
        with pytest.raises(ValueError, match=f"no column {missing}"):
            column({"a": {"b": 1}}, missing)


@pytest.mark.parametrize(
    ("got", "wanted", "same"),
    [
        ("1 2\n", " 1 2 ", True),
        ("1.0 2", "1 2.00", True),
        ("a\nb", "a \n b", True),
        ("50000000000000000", "50000000000000001", False),
        ("a b", "a  b", False),
        ("a\n\nb", "a\nb", False),
        ("", "1", False),
        ("nan", "1", False),
        ("1 x", "1 y", False),
    ],
)
def test_outputs_are_compared_as_livecodebench_does(got: str, wanted: str, same: bool) -> None:
    assert same_output(got, wanted) is same


def test_values_are_compared_as_livecodebench_does() -> None:
    assert same_value([1, [2]], [1, [2]])
    assert same_value(0.1 + 0.2, 0.3)
    assert same_value("1.0", 1)
    assert not same_value([0.1 + 0.2], [0.3])
    assert not same_value(float("nan"), float("nan"))
    assert not same_value(None, 0)
    assert not same_value(10**400, 1.0)


CALLS = {"fn_name": "f", "inputs": ["[1, 2]", "[5]"], "outputs": ["[2, 1]", "[5, 5]"]}
SOLVED = {
    "a method": ("class Solution:\n    def f(self, a: List[int]):\n        print('noise')\n        return (max(a), min(a))", CALLS, ""),
    "a function": ("def f(a): return [max(a), min(a)]", CALLS, ""),
    "a wrong method": ("class Solution:\n    def f(self, a): return [2, 1]", CALLS, "test 1: returned [2, 1], expected [5, 5]"),
    "no such function": ("def g(a): return 1", CALLS, "test 0: exit code 1: KeyError: 'f'"),
    "leaving before the result": ("import os\nos._exit(0)", CALLS, "test 0: it ended before the function returned"),
    "an object that equals everything": ("class E:\n    __eq__ = lambda s, o: True\ndef f(a): return E()", CALLS, "test 0: returned '<"),
    "a program": ("n = int(input())\nprint(n * 2)\nexit()", [{"input": "2\n", "output": "4"}], ""),
    "a main program": ("if __name__ == '__main__':\n    print(sqrt(4), deque([1])[0])", [{"input": "", "output": "2 1"}], ""),
    "a program from the future": ("from __future__ import annotations\nprint(1)", [{"input": "", "output": "1"}], ""),
    "a program that is wrong": ("print(1)", [{"input": "x", "output": "2"}], "test 0: wrote '1\\n', expected '2', for 'x'"),
    "a program that raises": ("print(1)\n1 / 0", [{"input": "", "output": "1"}], "test 0: exit code 1: ZeroDivisionError"),
    "a program that does not end": ("while True: pass", [{"input": "", "output": "1"}], "test 0: ended by its limits: timeout"),
    "asserts": ("def f(x): return x + 1", "assert f(1) == 2", ""),
    "an assert that fails": ("def f(x): return x", "assert f(1) == 2", "test 0: exit code 1: AssertionError"),
    "leaving before asserts": ("import sys\nsys.exit(0)", "assert f(1) == 2", "test 0: it ended before all asserts were made"),
    "leaving within an assert": ("import os\ndef f(x): os._exit(0)", "assert f(1) == 2", "test 0: it ended before all asserts were made"),
    "no such name": ("x = 1", "assert f(1) == 2", "test 0: exit code 1: NameError"),
    "a syntax error": ("def f(:", "assert f(1) == 2", "test 0: exit code 1: SyntaxError"),
}  # fmt: skip


@needs_sandbox()
@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVED)
def test_only_right_programs_pass(name: str) -> None:
    code, tests, failed = SOLVED[name]

    async def use(verifier: Verifier) -> None:
        result = await verifier.score(row(tests=tests), f"Here:\n```python\n{code}\n```\n", ())
        assert result.reward == float(not failed)
        assert str(result.fields.get("failed_test", "")).startswith(failed)
        assert bool(result.fields.get("failed_test")) == bool(failed)
        assert result.fields["extracted_code"] == code

    talk(lambda: made(kind="code", limits=LIMITS), use)
    assert left_over() == []


@needs_sandbox()
def test_one_of_each_end() -> None:
    async def use(verifier: Verifier) -> None:
        given = row(tests=[{"input": "1", "output": "1"}, {"input": "2", "output": "4"}])
        right = await verifier.score(given, "```python\nprint(int(input()) ** 2)\n```", ())
        assert (right.reward, right.fields["tests_passed"]) == (1.0, 2)
        wrong = await verifier.score(given, "```python\nprint(input())\n```", ())
        assert (wrong.reward, wrong.fields["tests_passed"], wrong.metrics) == (0.0, 1, {"tests_passed_share": 0.5})
        none = await verifier.score(given, "print(1)", ())
        assert (none.reward, none.fields["failed_test"]) == (0.0, "the answer has no code block")

    talk(lambda: made(kind="code", limits=LIMITS), use)


def test_tests_that_cannot_be_read_and_sandboxes_that_do_not_work_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "find_bubblewrap", lambda: None)

    async def use(verifier: Verifier) -> None:
        error = await failure(verifier, row(other=1), "```python\n1\n```")
        assert (error.kind, error.heals, str(error)) == ("reward", False, "d.jsonl:1: tests: no column tests")
        error = await failure(verifier, row(tests="assert x"), "```python\n1\n```")
        assert (error.kind, error.heals) == ("sandbox", True)
        assert "not installed" in str(error)

    talk(lambda: made(kind="code"), use)
