"""The forms in which exceptions are printed, and what the form says about who handled them."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.triage.causes import Chain, ChainReader, How
from seatrial.triage.log import read_log

FRAMES = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    call()\n    ^^^^^^\n'


def chains(tmp_path: Path, text: str) -> list[Chain]:
    path = tmp_path / "run.log"
    path.write_text(text)
    reader = ChainReader()
    for line in read_log(path):
        reader.feed(line)
    return reader.finish()


def only(tmp_path: Path, text: str) -> Chain:
    (chain,) = chains(tmp_path, text)
    return chain


def test_direct_cause_comes_first(tmp_path: Path) -> None:
    chain = only(
        tmp_path,
        f"{FRAMES}ImportError: no flash\nsecond line\n\nThe above exception was the direct cause of the following exception:\n\n"
        f"{FRAMES}RuntimeError: please install foo\n",
    )
    assert [(r.name, r.line) for r in chain.raised] == [("ImportError", 5), ("RuntimeError", 14)]
    assert (chain.first.message, chain.how, chain.first.tail) == ("no flash", How.UNCAUGHT, ('  File "a.py", line 1, in f', "    call()"))


def test_handling_links_too_and_unlinked_tracebacks_do_not(tmp_path: Path) -> None:
    text = f"{FRAMES}KeyError: 'a'\n\nDuring handling of the above exception, another exception occurred:\n\n{FRAMES}OSError: b\n"
    assert [r.name for r in only(tmp_path, text).raised] == ["KeyError", "OSError"]
    assert len(chains(tmp_path, f"{FRAMES}KeyError: 'a'\n{FRAMES}OSError: b\n")) == 2


def test_a_message_may_begin_on_a_line_of_its_own(tmp_path: Path) -> None:
    chain = only(tmp_path, f"{FRAMES}AssertionError: \n--------\nchoose another size\nmore of it\n")
    assert (chain.first.message, chain.first.lines[-1], chain.end) == ("choose another size", (7, "choose another size"), 7)
    assert only(tmp_path, f"{FRAMES}AssertionError\nordinary output\n").first.message == ""


def test_a_transfer_that_failed_elsewhere_is_no_cause_of_its_own(tmp_path: Path) -> None:
    said = "RuntimeError: Weight transfer failed during NCCL collective sync."
    assert not only(tmp_path, f"{FRAMES}{said}\n").primary
    assert only(tmp_path, f"{FRAMES}RuntimeError: transfer failed\n").primary


def test_ray_wraps_remote_tracebacks(tmp_path: Path) -> None:
    chain = only(
        tmp_path,
        f"{FRAMES}ray.exceptions.RayTaskError(ValueError): \x1b[36mray::Runner.run()\x1b[39m (pid=1, ip=192.0.2.10)\n"
        '           ^^^^^\n  File "b.py", line 2, in g\n    x\n'
        "ray.exceptions.RayTaskError(ValueError): ray::Worker.init() (pid=2, ip=192.0.2.10)\n"
        '  File "c.py", line 3, in h\n    y\nKeyError: first\n\n'
        "The above exception was the direct cause of the following exception:\n\nray::Worker.init() (pid=2)\n"
        '  File "d.py", line 4, in i\n    z\nValueError: last\n',
    )
    assert [r.carrier for r in chain.raised] == [True, True, False, False]
    assert chain.first.name == "KeyError"


@pytest.mark.parametrize("name", ["multiprocessing.pool.RemoteTraceback", "concurrent.futures.process._RemoteTraceback"])
def test_multiprocessing_quotes_the_remote_traceback(name: str, tmp_path: Path) -> None:
    chain = only(
        tmp_path,
        f'{name}: \n"""\n{FRAMES}ValueError: bad shard\n"""\n\n'
        f"The above exception was the direct cause of the following exception:\n\n{FRAMES}ValueError: bad shard\n",
    )
    assert (chain.how, chain.first.line) == (How.UNCAUGHT, 7)


def test_nested_originals(tmp_path: Path) -> None:
    loader = f"{FRAMES}RuntimeError: Caught KeyError in DataLoader worker process 0.\nOriginal {FRAMES}KeyError: 'text'\n"
    assert only(tmp_path, loader).first.name == "KeyError"
    spawn = (
        f"{FRAMES}torch.multiprocessing.spawn.ProcessRaisedException: \n\n"
        f"-- Process 0 terminated with the following error:\n{FRAMES}TypeError: x\n"
    )
    assert only(tmp_path, spawn).first.name == "TypeError"


def test_exception_group(tmp_path: Path) -> None:
    chain = only(
        tmp_path,
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "g.py", line 48, in <module>\n  |     main()\n'
        "  | ExceptionGroup: two workers failed (2 sub-exceptions)\n"
        "  +-+---------------- 1 ----------------\n    | ValueError: left\n"
        "    +---------------- 2 ----------------\n    | Traceback (most recent call last):\n"
        '    |   File "g.py", line 3, in f\n    | TypeError: right\n    +------------------------------------\n',
    )
    assert [r.name for r in chain.raised] == ["ExceptionGroup", "ValueError", "TypeError"]
    assert (chain.first.line, chain.how) == (6, How.UNCAUGHT)


def test_processes_are_kept_apart(tmp_path: Path) -> None:
    a = [f"[rank0]: {part}" for part in f"{FRAMES}ValueError: zero".split("\n")]
    b = [f"(Worker pid=9) {part}" for part in f"{FRAMES}TypeError: one".split("\n")]
    mixed = "\n".join(x for pair in zip(a, b, strict=True) for x in pair)
    assert [(c.process, c.first.name) for c in chains(tmp_path, mixed)] == [("[rank0]:", "ValueError"), ("(Worker pid=9)", "TypeError")]


@pytest.mark.parametrize(
    ("lead", "how"),
    [
        ("", How.UNCAUGHT),
        ("INFO:root:starting\n", How.UNCAUGHT),
        ("ERROR:root:step failed\n", How.LOGGED),
        ("[2026-11-15 01:02:03,004][root][ERROR] - step failed\n", How.LOGGED),
        ("2026-11-15 01:02:03,004 - ERROR - x - step failed\n", How.LOGGED),
        ("Error executing job with overrides: []\n", How.UNCAUGHT),
        ("Exception ignored in: <function A.__del__ at 0x7f>\n", How.NOTED),
        ("--- Logging error ---\n", How.NOTED),
        ("Task exception was never retrieved\nfuture: <Task finished name='T'>\n", How.NOTED),
        ("Exception in thread Thread-1 (run):\n", How.LOGGED),
        ("INFO:x:Import of Y failed with: ", How.NOTED),
        ("Import of Y failed with: ", How.LOGGED),
        ("train:  98%|█████| 78/80 [00:07<00:00, 10.97it/s]", How.UNCAUGHT),
    ],
)
def test_who_handled_it(lead: str, how: How, tmp_path: Path) -> None:
    assert only(tmp_path, f"{lead}{FRAMES}ValueError: x\n").how is how


def test_engine_log_records(tmp_path: Path) -> None:
    text = "".join(f"(EngineCore_0 pid=5) ERROR 11-15 01:02:03 [core.py:1] {part}\n" for part in f"{FRAMES}ValueError: x".split("\n"))
    chain = only(tmp_path, text)
    assert (chain.how, chain.first.line, chain.process) == (How.LOGGED, 5, "(EngineCore_0 pid=5)")
    assert only(tmp_path, text.replace("ERROR", "WARNING")).how is How.WARNED


@pytest.mark.parametrize(
    ("line", "how", "name"),
    [
        ("ValueError: no traceback", How.BARE, "ValueError"),
        ("train.py: error: unrecognized arguments: --x", How.BARE, "error"),
        ("*** SIGTERM received at time=1 on cpu 0 ***", How.KILLED, "killed"),
        ("run.sh: line 3: 12345 Killed    python x.py", How.KILLED, "killed"),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-15T01:02:03 DUE TO TIME LIMIT ***", How.KILLED, "killed"),
        ("Fatal Python error: Segmentation fault", How.UNCAUGHT, "crash"),
        ("terminate called after throwing an instance of 'c10::Error'", How.UNCAUGHT, "crash"),
        ("E       KeyError: 'a'", How.TEST, "KeyError"),
        ("E       assert 1 == 2", How.TEST, "AssertionError"),
        ("FAILED tests/test_a.py::test_b - TypeError: c", How.REPORT, "TypeError"),
        ("FAIL export: 3 tensors differ", How.REPORT, "FAIL"),
        ("stage.one FAIL OSError cannot", How.REPORT, "OSError"),
    ],
)
def test_single_lines(line: str, how: How, name: str, tmp_path: Path) -> None:
    chain = only(tmp_path, f"before\n{line}\n")
    assert (chain.how, chain.first.name, chain.first.line) == (how, name, 2)


@pytest.mark.parametrize(
    "line",
    [
        '/x/__init__.py:32: UserWarning: engine is not available: ModuleNotFoundError("No module named y")',
        "W1115 02:01:11.294000 18741 torch/_library/triton.py:53] Triton not available",
        "INFO: retry after ValueError: x",
        "(Worker pid=3) *** SIGTERM received at time=1 on cpu 0 ***",
        "Request FAILED with status 500",
        "│ FAIL │ max(data) < 1 │",
        "trainer FAILED",
        "    ValueError: indented text of a message",
        "Failures:",
    ],
)
def test_mentions_are_no_events(line: str, tmp_path: Path) -> None:
    assert chains(tmp_path, f"{line}\n") == []


@pytest.mark.parametrize(
    "names",
    ["KeyboardInterrupt", "torch.distributed.elastic.multiprocessing.api.SignalException: Process 1 got signal: 15", "SystemExit: 143"],
)
def test_interrupts_are_kills(names: str, tmp_path: Path) -> None:
    assert only(tmp_path, f"{FRAMES}{names}\n").how is How.KILLED


def test_exit_after_an_exception_is_no_kill(tmp_path: Path) -> None:
    text = f"{FRAMES}ValueError: x\n\nDuring handling of the above exception, another exception occurred:\n\n{FRAMES}SystemExit: 1\n"
    chain = only(tmp_path, text)
    assert (chain.how, chain.first.name) == (How.UNCAUGHT, "ValueError")


def test_torn_traceback_is_dropped_and_foreign_lines_are_not_the_exception(tmp_path: Path) -> None:
    assert chains(tmp_path, FRAMES) == []
    text = FRAMES + "Warning: from another writer\nstep 3 done\n" + '  File "b.py", line 2, in g\n    x\nValueError: real\n'
    assert only(tmp_path, text).first.message == "real"
