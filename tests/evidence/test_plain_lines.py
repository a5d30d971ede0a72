"""The filter in front of the rules misses nothing: with it and without it a log comes out the same."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from seatrial.evidence.redact import Needs, PlainLines, Redactor
from tests.evidence.attacks import ATTACKS, LATER
from tests.evidence.harmless import RL_LINES
from tests.evidence.nested import HARMLESS_NESTED, KEY_DUMPS, NESTED
from tests.evidence.shapes import DUMPS, HARMLESS, SHAPES
from tests.evidence.test_redact import LEFT_ALONE, SECRETS
from tests.evidence.test_redact import SHAPES as TOKENS

ENVIRON = {"HF_TOKEN": "letters", "DB_PASSWORD": "with a blank, and more", "X_API_KEY": "12ab34-9876543", "PIN_PASSWORD": "83920117"}
TEXTS = [
    *(text for _, text, _ in SHAPES),
    *(text for _, text, _ in (*ATTACKS, *LATER)),
    *("\n".join(rows) for _, rows, _ in DUMPS),
    *(text for text, _ in SECRETS),
    *(f"got {token} here" for token in TOKENS),
    *(text for _, text, _ in NESTED),
    *("\n".join(rows) for _, rows in KEY_DUMPS),
    *HARMLESS_NESTED,
    *HARMLESS,
    *RL_LINES,
    *LEFT_ALONE,
    *(f"so {value} is" for value in ENVIRON.values()),
    # what a fuzzer found in the filter's first versions
    "https://d.cloudfront.net/x?Expires=1&Signature=0A0B0C0D0E0F",
    "masterauth hunter2hunter9",
    "poetry config pypi-token.pypi hunter2hunter9",
    "db.x:6543:p,rod:amy:Tr0ub4dor",
    "api KEY1: Ab3De5Gh7Jk9Mn1Pq3St5Vw7Yz2Bc4Df6Hj8",
    "3\x1b[35m082 04bd 0201 0030 0d06 09 2a 8648 86f7  0......0...*.H..",
    "Pass:   {",
]
PREFIXES = ("", "(W pid=1) ", "\x1b[36m(W pid=7)\x1b[0m ", "+", "loss\xa00.5 ")


def streamed(redactor: Redactor, rows: Iterable[str]) -> list[str]:
    lines = redactor.lines()
    return [lines.line(row) for row in rows]


def without_filter(monkeypatch: pytest.MonkeyPatch, rows: list[str]) -> list[str]:
    with monkeypatch.context() as patched:
        patched.setattr(PlainLines, "needs", lambda _, __: Needs.ALL)
        return streamed(Redactor(ENVIRON), rows)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_shapes_come_out_the_same(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [prefix + row for text in TEXTS for row in [*text.split("\n"), *["loss 0.5"] * 8]]
    assert streamed(Redactor(ENVIRON), rows) == without_filter(monkeypatch, rows)


def test_mutants_of_shapes_come_out_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(7)
    pieces = [row for text in TEXTS for row in text.split("\n") if len(row) < 500]
    rows = []
    for _ in range(6000):
        row = chance.choice(pieces)
        for _ in range(chance.randrange(4)):
            at = chance.randrange(len(row) + 1)
            match chance.randrange(6):
                case 0:
                    row = row[:at] + row[at + chance.randrange(1, 4) :]
                case 1:
                    row = row[:at] + chance.choice(" \t,;:=\"'-\\<>|()[]{}@$\x1b\xa0\x1c019aZ") + row[at:]
                case 2:
                    row = row[:at] + chance.choice(pieces)[: chance.randrange(1, 40)]
                case 3:
                    row = row.swapcase() if chance.random() < 0.2 else row[:at] + row[at:].lower()
                case 4:
                    other = chance.choice(pieces)
                    row = row[:at] + other[chance.randrange(len(other) + 1) :]
                case _:
                    row = row[:at] + f"\x1b[3{chance.randrange(8)}m" + row[at:]
        rows += [row, "step 3 loss 0.5"]
    assert streamed(Redactor(ENVIRON), rows) == without_filter(monkeypatch, rows)


def test_real_logs_come_out_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = sorted((Path(__file__).parents[1] / "data").rglob("*.log"))
    rows = [row for log in logs for row in log.read_text(errors="surrogateescape").split("\n")[:400]]
    assert len(rows) > 1000
    assert streamed(Redactor(ENVIRON), rows) == without_filter(monkeypatch, rows)


def test_ordinary_lines_are_plain() -> None:
    plain = PlainLines([])
    for line in (
        "{'loss': 0.5, 'grad_norm': 1.2, 'num_tokens': 2048.0, 'epoch': 0.1}",
        "(WorkerDict pid=123) INFO 11-18 12:00:00 [gpu_model_runner.py:58] Model loading took 15.2 GiB",
        "step:1 - global_seqlen/min:49876 - actor/entropy:0.35 - perf/total_num_tokens:98304",
    ):
        assert plain.needs(line) is Needs.NOTHING, line
