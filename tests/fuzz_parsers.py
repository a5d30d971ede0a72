"""Parsers of outside data that no command reads alone: what Slurm answers, rows of verifiers, source of a change, headers of weights and
refits, the state of test selection, locks. Each takes a generator and an empty directory; what it may raise is what its caller awaits."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import sqlite3
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from tests.fuzz_mutate import NUMBERS, TEXTS, changed, hostile, json_changed, mutate, toml_changed, written

STATE = ".seatrial-select.sqlite"
Parser = Callable[[random.Random, Path], None]


def text_changed(rng: random.Random, text: str, junk: tuple[str, ...] = (*NUMBERS, *TEXTS)) -> str:
    """Text with a few pieces replaced, dropped or doubled."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, end = sorted(rng.randrange(len(text) + 1) for _ in "ab")
        end = min(end, at + rng.choice((0, 0, 1, 4, 40)))
        text = text[:at] + rng.choice((*junk, text[at:end] * 3, "")) + text[end:]
    return text


def slurm(rng: random.Random, place: Path) -> None:
    """What Slurm's commands print."""
    from seatrial.runtime import slurm as commands
    from seatrial.runtime.command import Answer

    queue = "12_3|RUNNING|2025-01-01T00:00:00|None|(null)|n\n12_[4-9%2]|PENDING|N/A|Priority|c|n\n13+1|COMPLETED|N/A|x||n\n"
    account = "12_3|COMPLETED|2025-01-01T00:00:00|2025-01-01T00:01:00|n\n12|CANCELLED by 0|2025-01-01T00:00:00|Unknown|n\n"
    config = "Configuration data as of 2025-01-01\nMaxArraySize            = 1001\nClusterName = c\n"
    asked: tuple[tuple[str, Callable[[], object]], ...] = (
        *((queue, lambda: commands.squeue("", ["12"])), (account, lambda: commands.sacct("", ["12"]))),
        *((config, lambda: commands.largest_array("")), (config, lambda: commands.setting("", "ClusterName"))),
        *(("12;c\n", lambda: commands.sbatch(Path("x"), [], "")), ("12\n", lambda: commands.scancel("", ["12"]))),
    )
    said, call = rng.choice(asked)
    out = text_changed(rng, said).encode("utf-8", "replace")
    done = Answer(rng.choice((0, 0, 0, 1)), out, out if rng.random() < 0.2 else b"")
    with mock.patch.object(commands, "_call", return_value=done):
        call()


def verified(rng: random.Random, place: Path) -> None:
    """Rows and answers as verifiers read them."""
    from seatrial.rollouts.backends.direct_backend import retry_after
    from seatrial.rollouts.sandbox.sandbox_service import _asked
    from seatrial.rollouts.verifiers import judge_verifier, process_verifiers, text_verifiers
    from seatrial.rollouts.verifiers.process_verifiers import bare
    from seatrial.rollouts.verifiers.text_verifiers import boxed, last_line, last_match, options_of, texts_of, why_no_choice

    code = "def check(f):\n    assert f(1) == 2\n"
    tests: tuple[Any, ...] = (
        {"inputs": ["1 2", "3"], "outputs": ["3", ["4", "5"]]},
        {"inputs": ["[1]\n2", [1]], "outputs": ["1", 2], "fn_name": "f"},
        [{"input": "1", "output": "2", "testtype": "stdin"}],
        ["assert 1 == 1", code],
        '{"inputs": ["1"], "outputs": ["2"]}',
        code,
    )
    given = changed(rng, json.loads(json.dumps(rng.choice(tests))), rng.choice((1, 2)))
    given = text_changed(rng, given, (*TEXTS, "-" * 3000, "(" * 250, "[" * 3000, "a" + ".b" * 3000)) if isinstance(given, str) else given
    with suppress(ValueError):
        for case in text_verifiers.cases_of(given, rng.choice(("f", "a b", None))):
            json.dumps(getattr(case, "arguments", None))
    row = changed(rng, {"options": {"A": "x", "B": "y"}, "choices": [{"A": "x"}, "y"], "verifier_metadata": {"unit_tests": given}})
    if isinstance(row, dict):
        options_of(row)
        why_no_choice(row, hostile(rng))
        with suppress(ValueError):
            text_verifiers.column(row, "verifier_metadata.unit_tests")
    texts_of(hostile(rng))
    said = text_changed(rng, '</think> {"reward": 1} [[A=B]] \\boxed{1{2}}\n```python\nx\n```\n1 2.50\n')
    (
        judge_verifier.verdict(said),
        process_verifiers.extract(said),
        bare(said),
        boxed(said),
        last_line(said),
        text_verifiers.same_output(said, text_changed(rng, said)),
    )
    text_verifiers.same_value(hostile(rng), hostile(rng)), last_match(judge_verifier._VERDICT, said), retry_after(said)
    body = {"generated_code": "1", "timeout": 3, "language": "python", "std_input": "", "max_output_characters": 9}
    with suppress(ValueError):
        _asked(written(changed(rng, body)).decode("utf-8", "replace"), rng.choice(("s", None, "\x00")))


SOURCE = '''"""Doc."""
import os, sys
from . import a
from b.c import d as e
@decorator
class A(B):
    x: int = 1
    def f(self, *a, k=lambda q: q): return [i for i in a if k]
    async def g(self):
        await self.f(); return f"{self.x!r:>{2}}"
if __name__ == "__main__":
    print(os.path.join(here, "configs", "grpo.yaml"))
'''
DEEP = ("-" * 3000 + "1", "(" * 199 + ")" * 199, "a" + ".b" * 3000, "[" * 90 + "]" * 90, "if 1:\n" + " x\n" * 50, "1+" * 3000 + "1")


def source(rng: random.Random, place: Path) -> None:
    """Source of a change, of the tests that select, and of a verifier."""
    from pytest_seatrial.select.source_digests import facts
    from pytest_seatrial.select.trace.import_loader import _make
    from seatrial.core.errors import UserError
    from seatrial.evidence.changes import _compared
    from seatrial.loops.nemo_rl.nemo_checkout import _sections
    from seatrial.loops.nemo_rl.nemo_preflight import default_config
    from seatrial.probes.bridge_verdict import _around, _tree
    from seatrial.rollouts.campaign_rounds import _check_function

    text = text_changed(rng, SOURCE, (*TEXTS, *DEEP))
    data = text.encode("utf-8", "surrogatepass")
    path = place / "program.py"
    path.write_bytes(data)
    _compared(SOURCE.encode(), data), _compared(data, SOURCE.encode()), _compared(None, data)
    list(_around("program.py", _tree(path), {3, 8}))
    _make(data, str(path), "program.py", None)
    facts(data)
    _sections([text])
    with suppress(UserError):
        default_config(path)
    with suppress(UserError):
        _check_function(f"{path}:f", boxed=True)


def weights(rng: random.Random, place: Path) -> None:
    """The files of a model, without loading them."""
    from seatrial.loops.host_findings import _settings, _weights
    from seatrial.probes.probe_process import require_weights

    header: Any = {"model.embed_tokens.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}, "__metadata__": {"a": "b"}}
    body = written(header) if rng.random() < 0.3 else json_changed(rng, json.dumps(header).encode())
    length = len(body) if rng.random() < 0.7 else rng.choice((0, 1, 7, 1 << 20, 1 << 40, 1 << 63, (1 << 64) - 1))
    (place / "model.safetensors").write_bytes(struct.pack("<Q", length) + body + bytes(16))
    index = {"weight_map": {"model.embed_tokens.weight": "model.safetensors"}, "metadata": {}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 2}')
    (place / "tokenizer_config.json").write_text("{}")
    for path in rng.sample(sorted(place.iterdir()), rng.choice((1, 2))):
        mutate(rng, path)
    list(_settings(place)), list(_weights(place))
    require_weights(place, "x")


def refit(rng: random.Random, place: Path) -> None:
    """A payload of a refit."""
    from seatrial.instruments.refit import payload, payload_header
    from seatrial.instruments.refit.payload_header import RefitRefused
    from tests.instruments.test_refit_payload import written as payload_of

    whole = payload_of()
    _, body, *_ = payload.PREAMBLE.unpack(whole[: payload.PREAMBLE.size])
    text = json_changed(rng, whole[payload.PREAMBLE.size + body :])
    with suppress(RefitRefused):
        payload_header.parse(text)
    made = bytearray(whole)
    made[rng.randrange(len(made))] = rng.randrange(256)
    (place / "payload").write_bytes(bytes(made)[: rng.choice((len(made), len(made), rng.randrange(len(made))))])
    with suppress(RefitRefused):
        payload.read(place / "payload")


def selection(rng: random.Random, place: Path) -> None:
    """The state of test selection, with cells and bytes of others."""
    from pytest_seatrial.select import selection_state

    path, given = place / "state.db", {"python": "3"}
    outcomes = [selection_state.RecordedOutcome(name, (frozenset({("a.py", name, "1"), ("é.py", "", "2")}),)) for name in ("one", "two")]
    selection_state.save_state(path, given, "c", [*outcomes, selection_state.RecordedOutcome("three", None)], lambda path, block: "1")
    if rng.random() < 0.4:
        mutate(rng, path)
    else:
        value = rng.choice(("'x'", "x'ff'", "1e999", "-1", "9223372036854775807", "cast(x'eda080' as text)", "''", "null", "x''"))
        table = rng.choice(
            ("meta.value", "versions.path", "versions.digest", "sets.members", "records.sets", "records.test", "failed.test")
        )
        with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as base, base:
            name, _, column = table.partition(".")
            base.execute(f"update or ignore {name} set {column} = {value}")
    _ = selection_state.load_state(path, given).known
    if not path.is_fifo():
        with suppress(OSError, sqlite3.OperationalError):  # `recording` tells it
            selection_state.save_state(path, given, "d", outcomes, lambda path, block: "1")


PROJECT = {
    "pytest.ini": "[pytest]\npythonpath = .\n",
    "a.py": "def f():\n    return 1\n",
    "test_a.py": "import a\n\n\ndef test_a():\n    assert a.f() == 1\n\n\ndef test_b():\n    pass\n",
}


@functools.cache
def _recorded() -> bytes:
    """The state file of a session that recorded the project."""
    with tempfile.TemporaryDirectory(prefix="seatrial-fuzz-select-") as folder:
        _session(Path(folder), "--seatrial-record")
        return (Path(folder) / STATE).read_bytes()


def _session(place: Path, option: str) -> str:
    """A session of pytest over the project, in a process of its own."""
    for name, text in PROJECT.items():
        (place / name).write_text(text)
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", option)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "SEATRIAL_"))}
    cache = {"XDG_CACHE_HOME": str(place / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, cwd=place, env={**kept, **cache}, capture_output=True, text=True, check=False, timeout=60)
    said = done.stdout + done.stderr
    assert done.returncode in (0, 5), said  # 5: no test was selected
    assert "INTERNALERROR" not in said, said
    assert "Traceback" not in said, said
    return said


def selecting(rng: random.Random, place: Path) -> None:
    """A session that selects by a damaged state file: it says so and runs every test, or what it says still holds. Few: a process each."""
    if rng.random() < 0.9:
        return
    path = place / STATE
    path.write_bytes(_recorded())
    if rng.random() < 0.4:
        mutate(rng, path)
    else:
        data = bytearray(path.read_bytes())
        for _ in range(rng.choice((1, 3, 30))):
            at = rng.randrange(len(data))
            data[at : at + rng.choice((1, 4, 64))] = bytes([rng.randrange(256)]) * rng.choice((1, 4, 64))
        path.write_bytes(bytes(data))
    _session(place, "--seatrial-select")


def locks(rng: random.Random, place: Path) -> None:
    """Locks of environments, of ours and of a commit; groups of tests."""
    import pytest

    from pytest_seatrial.suite_groups import read_groups
    from seatrial.bisect.bisect_records import EnvironmentPlan
    from seatrial.bisect.lockfile import BuildFailed, read_wanted
    from seatrial.runtime.venvs import read_lock

    with suppress(BuildFailed, pytest.UsageError):
        match rng.randrange(4):
            case 0:
                made = text_changed(rng, "# python: 3.11\n# disk-mb: 20\n# requires-python\na==1.0\nb==2.0+cpu  # c\n")
                (place / "a.lock").write_bytes(made.encode("utf-8", "surrogatepass"))
                read_lock(place / "a.lock")
            case 1:
                made = text_changed(rng, "-r other.txt\na==1 --hash=sha256:00\n-e .\n-c b.txt\n--find-links x\n./c\n\\\nd\n")
                (place / "requirements.txt").write_bytes(made.encode("utf-8", "surrogatepass"))
                (place / "other.txt").write_text("-r requirements.txt\n" if rng.random() < 0.3 else "x==1\n")
                read_wanted(place, EnvironmentPlan(kind="pip", lock="requirements.txt"))
            case 2:
                table = b'version = 1\n[[package]]\nname = "a"\nversion = "1"\n[package.source]\neditable = "."\n'
                (place / "uv.lock").write_bytes(toml_changed(rng, table))
                (place / "pyproject.toml").write_text('[project]\nname = "a"\n')
                read_wanted(place, EnvironmentPlan(kind="uv", lock="uv.lock"))
            case _:
                table = b'[tool.seatrial.groups.gpu]\noption = "--gpu"\nmarker = "gpu"\nhours = 1.5\nmode = "only"\npaths = ["tests"]\n'
                (place / "pyproject.toml").write_bytes(toml_changed(rng, table))
                read_groups(place)


def nightly(rng: random.Random, place: Path) -> None:
    """Scripts of NeMo-RL's suites, and diffs of git."""
    from seatrial.evidence.changes import _marked_lines
    from seatrial.loops.nemo_rl.nightly import describe_nightly

    script = "# ===== BEGIN CONFIG =====\nNUM_NODES=1\nSTEPS_PER_RUN=10\nMAX_STEPS=10\n"
    script += "NUM_RUNS=$(( (MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN ))\nNUM_MINUTES=30\n# ===== END CONFIG =====\nuv run x.py\n"
    describe_nightly("tests/test_suites/llm/a.sh", text_changed(rng, script, (*NUMBERS, *TEXTS, "-" * 3000, "(" * 300, "9*" * 2000 + "9")))
    diff = 'diff --git a/x b/x\n--- a/x\n+++ "b/\\303\\251 \\t"\n@@ -1,2 +3 @@ def f():\n-a\n+b\n'
    list(_marked_lines(text_changed(rng, diff).encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")))


def chunks(rng: random.Random, place: Path) -> None:
    """A body in chunks, as the router passes it on."""
    from seatrial.runtime.staged import router

    data = text_changed(rng, "3\r\nabc\r\n1;x=y\r\nd\r\n0\r\nX: y\r\n\r\n").encode("utf-8", "replace")

    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        with suppress(router.BadBody, router.Broken, asyncio.IncompleteReadError, ConnectionError):
            while (size := await router._chunk_size(reader, None)) and size < 1 << 20:
                await reader.readexactly(size)
                await router._line(reader, None)

    asyncio.run(read())


def leftovers(rng: random.Random, place: Path) -> None:
    """What a killed Seatrial left to tell which processes are its own. No process gets a signal."""
    from seatrial.core.errors import UserError
    from seatrial.runtime import process_tree

    path = place / "1.pids"
    path.write_bytes(b'{"run_id": "no-such-run", "pid": 4194305, "started": 1.5, "owner": 4194306, "owner_started": 1.0}')
    mutate(rng, path)
    said = ""
    with mock.patch.object(process_tree, "send") as sent:
        try:
            process_tree.end_leftovers(path, grace_s=0)
        except UserError as error:
            said = str(error)
    assert not said or path.name in said
    assert not sent.called


PARSERS: tuple[Parser, ...] = (slurm, verified, source, weights, refit, selection, selecting, locks, nightly, chunks, leftovers)
