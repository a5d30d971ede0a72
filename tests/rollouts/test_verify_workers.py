"""What is verified in processes of its own: the user's function, and mathematics. They may hang, crash and lie."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import psutil
import pytest

from seatrial.core.errors import UserError
from seatrial.rollouts.rollout_record import Verifier
from seatrial.rollouts.verifiers.process_verifiers import bare, equivalence, load_function
from tests.rollouts.verifiers import failure, made, row, talk

pytestmark = pytest.mark.slow

FUNCTION = """
import os, subprocess, time
def reward(row, text):
    print("noise that goes nowhere")
    if text == "hang":
        subprocess.Popen(["sleep", "60"])
        time.sleep(60)
    if text == "crash": os._exit(7)
    if text == "shot": os.kill(os.getpid(), 9)
    if text == "once" and not os.path.exists(row["mark"]):
        open(row["mark"], "w").close()
        os._exit(7)
    if text == "stop":
        for number in (1, 2, 10, 15): os.kill(os.getpid(), number)
        return subprocess.run(["sh", "-c", "kill -15 $$; echo went on"], capture_output=True).returncode
    if text == "exit": raise SystemExit(3)
    if text == "raise": raise ValueError("no\\nsense")
    if text in VALUES: return VALUES[text]
    return {"reward": float(text == row["answer"]), "answer": text, "length": len(text), "pid": os.getpid()}
VALUES = {"nan": float("nan"), "none": None, "text": "1", "inf in it": {"reward": 1, "x": float("inf")}, "empty": {}}
VALUES |= {"one": 1, "true": True}
not_one = 3
"""


def workers() -> list[int]:
    """Live ones; what other tests left to this process to collect has no command line any more."""
    found = psutil.process_iter(["pid", "ppid", "cmdline"])
    mine = {child.pid for child in psutil.Process().children(recursive=True)}
    return [
        child.pid
        for child in found
        if child.pid in mine and "seatrial.rollouts.verifiers.process_verifiers" in (child.info["cmdline"] or ())
    ]


@pytest.mark.slow
def test_a_function_may_hang_crash_and_lie(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)

    async def use(verifier: Verifier) -> None:
        right = await verifier.score(row(answer="x"), "x", ())
        assert (right.reward, right.answer, right.metrics["length"]) == (1.0, "x", 1.0)
        same = await verifier.score(row(answer="x"), "y", ())
        assert (same.reward, same.fields["pid"]) == (0.0, right.fields["pid"])
        assert [(await verifier.score(row(), text, ())).reward for text in ("one", "true")] == [1.0, 1.0]
        for text, words in {"nan": "nan", "none": "None", "text": "'1'", "inf in it": "x = inf", "empty": "no finite reward"}.items():
            error = await failure(verifier, row(), text)
            assert (error.kind, error.heals) == ("reward", False)
            assert words in str(error)
        assert str(await failure(verifier, row(), "raise")) == "mine.py:reward: ValueError: no sense (mine.py:17)"
        assert "SystemExit: 3" in str(await failure(verifier, row(), "exit"))
        assert str(await failure(verifier, row(), "crash")) == "mine.py:reward: the worker process died (exit code 7)"
        shot = await failure(verifier, row(), "shot")
        assert (shot.heals, str(shot)) == (True, "mine.py:reward: the worker process died (signal 9)")
        assert (await verifier.score(row(answer="once", mark=str(tmp_path / "mark")), "once", ())).reward == 1.0
        right = await verifier.score(row(answer="x"), "x", ())
        # Signals that ask for an end do not reach the function, but what it starts can be ended by them.
        assert (await verifier.score(row(), "stop", ())).reward == -15.0
        assert (await verifier.score(row(answer="x"), "x", ())).fields["pid"] == right.fields["pid"]
        began = time.monotonic()
        assert str(await failure(verifier, row(), "hang")) == "mine.py:reward: no answer within 5 s"
        assert time.monotonic() - began < 45  # it would be 60
        assert (await verifier.score(row(answer="x"), "x", ())).fields["pid"] != right.fields["pid"]
        assert len(workers()) == 1

    talk(lambda: made(base=tmp_path, kind="function", function="mine.py:reward", timeout_s=5), use)
    assert workers() == []


def test_a_function_that_cannot_be_named_is_refused_at_once(tmp_path: Path) -> None:
    for spec, why in {
        "mine.py": "names no function",
        "a:b c": "names no function",
        ":f": "names no function",
        "no.py:f": "does not exist",
    }.items():
        with pytest.raises(UserError, match=why):
            made(base=tmp_path, kind="function", function=spec)


@pytest.mark.slow
def test_a_function_that_cannot_be_loaded_stops_the_campaign(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    (tmp_path / "broken.py").write_text("import os\nos._exit(4)")

    async def use(verifier: Verifier, why: str) -> None:
        with pytest.raises(UserError, match=why):
            await verifier.score(row(), "x", ())

    for spec, why in {
        "mine.py:absent": "AttributeError",
        "no_such_module:f": "ModuleNotFoundError",
        "broken.py:f": r"died while loading \(exit code 4\)",
    }.items():
        talk(lambda spec=spec: made(base=tmp_path, kind="function", function=spec), lambda verifier, why=why: use(verifier, why))  # type: ignore[misc]
    assert workers() == []


def test_a_function_is_found_in_files_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "seatrial_test_function.py").write_text(FUNCTION)
    assert load_function(tmp_path, "seatrial_test_function.py:reward")({"answer": "x"}, "x")["reward"] == 1.0
    assert load_function(tmp_path, "seatrial_test_function:reward")({"answer": "x"}, "x")["reward"] == 1.0
    with pytest.raises(TypeError, match="is not a function"):
        load_function(tmp_path, "seatrial_test_function.py:not_one")


@pytest.mark.slow
def test_mathematics_in_workers_that_may_hang() -> None:
    async def use(verifier: Verifier) -> None:
        results = await asyncio.gather(*(verifier.score(row(answer="1/2"), rf"\boxed{{{n}/{2 * n}}}", ()) for n in range(1, 20)))
        assert {result.reward for result in results} == {1.0}
        assert 1 <= len(workers()) <= 4
        error = await failure(verifier, row(answer="9"), r"\boxed{9^{9^{9^{9}}}}")
        assert (error.kind, str(error)) == ("reward", "math-verify: no answer within 5 s")
        assert (await verifier.score(row(answer="9"), r"\boxed{9}", ())).reward == 1.0
        error = await failure(verifier, row(answer="$ $"), "1")
        assert "d.jsonl:1: the expected answer cannot be read as mathematics" in str(error)

    talk(lambda: made(kind="math", timeout_s=5), use)
    assert workers() == []


@pytest.mark.parametrize(
    ("expected", "text", "right", "answer"),
    [
        ("1/2", r"so \boxed{0.5}", True, "1/2"),
        (r"$\frac{1}{2}$", r"the answer is $\frac12$", True, "1/2"),
        ("204", "The answer is 204.", True, "204"),
        ("204", r"\boxed{205}", False, "205"),
        (r"3\sqrt{2}", r"\boxed{\sqrt{18}}", True, "sqrt(18)"),
        (r"\(x^2+1\)", r"\boxed{1 + x^2}", True, "x**2 + 1"),
        ("7", "", False, None),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_equivalence(expected: str, text: str, right: bool, answer: str | None) -> None:
    assert equivalence()({"expected": [expected], "text": text}) == {"right": right, "answer": answer}


def test_delimiters_around_an_expected_answer_do_not_matter() -> None:
    for text in ("5", "$5$", "$$5$$", r"\(5\)", r"\[ 5 \]", " 5 "):
        assert bare(text) == "5"
    assert bare("$") == "$"


def test_workers_are_not_started_before_they_are_needed() -> None:
    async def use(verifier: Verifier) -> None:
        assert workers() == []

    talk(lambda: made(kind="math"), use)
