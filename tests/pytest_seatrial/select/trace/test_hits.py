"""Which blocks are told when which code runs in the recording process."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from pytest_seatrial.select.evidence import Evidence
from pytest_seatrial.select.trace.instrument import KEEPS
from pytest_seatrial.select.trace.trace_events import HIT
from pytest_seatrial.select.trace.trace_recorder import ProjectTree, TraceRecorder
from tests.pytest_seatrial.select.trace.traced import trace

SECONDS, LATEST = 1.0, 60.0
"""How long threads race: at least, and at most where busy cores let them do little."""
ENOUGH = 3000
"""Hits that all threads make together before the race may end."""

MODULE = {
    "mod.py": '''
    from __future__ import annotations
    import asyncio, contextlib, functools, queue, threading

    def plain(x): return x
    def only(): """Nothing but a docstring."""
    def outer():
        def inner(): return 1
        return inner
    def generator():
        yield 1
        yield 2
    async def coroutine():
        await asyncio.sleep(0)
        return 1
    async def agen():
        yield 1
    @contextlib.contextmanager
    def managed():
        yield 1
    @functools.lru_cache
    def cached(): return plain(1)
    class A:
        made = plain(2)
        def method(self): return 1
        @property
        def prop(self): return 1
        @prop.setter
        def prop(self, value): self.x = value
        @staticmethod
        def static(): return 1
        @classmethod
        def klass(cls): return 1
    LAMBDA = lambda: 1
    def with_lambda(): return lambda: 2
    def worker(jobs, done):
        while True:
            job = jobs.get()
            if job is None: break
            done.put(job)
    '''
}


def test_every_kind_of_function_is_hit(tmp_path: Path) -> None:
    told = trace(
        tmp_path,
        MODULE,
        """
        import asyncio, mod
        recorder.switch(1)
        mod.plain(1); mod.only(); mod.cached()
        recorder.switch(2)
        inner = mod.outer()
        recorder.switch(3)
        inner()
        recorder.switch(4)
        a = mod.A(); a.method(); a.prop; mod.A.static(); mod.A.klass()
        recorder.switch(5)
        a.prop = 3
        recorder.switch(6)
        asyncio.run(mod.coroutine()); mod.LAMBDA()
        recorder.switch(7)
        late = mod.with_lambda()
        recorder.switch(8)
        late()
        """,
    )
    assert told.hits(1) == {"mod.py:plain", "mod.py:only", "mod.py:cached"}
    assert told.hits(2) == {"mod.py:outer"}
    assert told.hits(3) == {"mod.py:outer.<locals>.inner"}
    assert told.hits(4) == {"mod.py:A.method", "mod.py:A.prop", "mod.py:A.static", "mod.py:A.klass"}
    assert told.hits(5) == {"mod.py:A.prop#2"}
    assert told.hits(6) == {"mod.py:coroutine", "mod.py:"}
    assert told.hits(7) == told.hits(8) == {"mod.py:with_lambda"}
    assert told.at_import("mod.py") == {"mod.py:plain"}


def test_what_sleeps_is_hit_again_when_it_goes_on(tmp_path: Path) -> None:
    told = trace(
        tmp_path,
        MODULE,
        """
        import queue, threading, mod
        recorder.switch(1)
        running, context = mod.generator(), mod.managed()
        next(running); context.__enter__()
        recorder.switch(2)
        next(running)
        recorder.switch(3)
        context.__exit__(None, None, None)
        recorder.switch(4)
        jobs, done = queue.Queue(), queue.Queue()
        thread = threading.Thread(target=mod.worker, args=(jobs, done)); thread.start()
        jobs.put(1); done.get()
        recorder.switch(5)
        jobs.put(1); done.get()
        recorder.switch(6)
        jobs.put(None); thread.join()
        """,
    )
    assert told.hits(2) == {"mod.py:generator"}
    assert told.hits(3) == {"mod.py:managed"}
    assert told.hits(4) == {"mod.py:worker"}
    # The thread waits in `get` when the epoch is switched: a loop tells when it comes round.
    assert "mod.py:worker" in told.hits(5) | told.hits(6)


def test_one_block_is_told_once_per_epoch_and_again_in_the_next(tmp_path: Path) -> None:
    told = trace(tmp_path, MODULE, "import mod\nfor epoch in (1, 2, 1):\n    recorder.switch(epoch)\n    for _ in range(9): mod.plain(1)")
    assert [event.epoch for event in told.own if event.kind == "hit" and not event.b] == [1, 2, 1]


def test_import_time_hits_belong_to_the_module_and_not_to_the_epoch(tmp_path: Path) -> None:
    files = {
        "a.py": "import helper\nX = helper.make()\nimport b\nY = helper.make()",
        "b.py": "import helper\nhelper.make()",
        "helper.py": "def make(): return 1",
    }
    told = trace(tmp_path, files, "recorder.switch(1)\nimport a")
    assert told.at_import("a.py") == told.at_import("b.py") == {"helper.py:make"}
    assert told.hits(1) == set()
    assert told.of("load") >= {("a.py", "helper.py"), ("a.py", "b.py"), ("", "a.py")}


def test_a_thread_that_runs_while_another_imports_is_told_for_itself(tmp_path: Path) -> None:
    files = {
        "slow.py": "import helper\nhelper.make()\nhelper.entered.set()\nhelper.leave.wait(60)\n",
        "helper.py": "import threading\nentered, leave = threading.Event(), threading.Event()\ndef make(): return 1\n",
    }
    told = trace(
        tmp_path,
        files,
        """
        import threading, helper
        recorder.switch(1)
        thread = threading.Thread(target=lambda: __import__("slow")); thread.start()
        helper.entered.wait(60); helper.make(); helper.leave.set(); thread.join()
        """,
    )
    assert told.hits(1) == {"helper.py:make"}
    assert told.at_import("slow.py") == {"helper.py:make"}


def test_stop_puts_everything_back(tmp_path: Path) -> None:
    script = """
    import importlib, linecache, pathlib, mod
    from importlib.machinery import SourceFileLoader
    recorder.switch(1)
    recorder.stop()
    mod.plain(1); open("mod.py").close()
    importlib.reload(mod)
    assert mod.plain(1) == 1
    assert "SEATRIAL_SELECT" not in os.environ and "start" not in os.environ["PYTHONPATH"]
    assert "exec_module" not in vars(SourceFileLoader) and "get_code" not in vars(SourceFileLoader)
    places = (os.path.exists, pathlib.Path.exists, linecache.getlines)
    assert not any("seatrial" in place.__code__.co_filename for place in places), places
    assert not any("seatrial" in type(finder).__module__ for finder in sys.meta_path)
    """
    assert trace(tmp_path, MODULE, script).hits(1) == set()


def test_no_hit_of_another_thread_is_lost_when_tests_change(tmp_path: Path) -> None:
    """What a thread did while one test ran belongs to that test, wherever the switch to the next one finds the thread."""
    recorder = TraceRecorder(str(tmp_path), ProjectTree(str(tmp_path)), memoryview(bytearray(8)).cast("Q"), None)
    done = threading.Event()
    expected: list[set[tuple[int, int]]] = [set() for _ in range(3)]

    def work(mine: set[tuple[int, int]], kinds: int) -> None:
        number = 0
        while not done.is_set():
            number = number % 40 + 1
            before = recorder.cell[0]
            recorder.hit[number | (KEEPS if number % kinds == 0 else 0)]
            if recorder.cell[0] == before:
                mine.add((number, before))

    threads = [threading.Thread(target=work, args=(mine, kinds)) for mine, kinds in zip(expected, (7, 11, 50), strict=True)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        epoch, until, latest = 0, time.monotonic() + SECONDS, time.monotonic() + LATEST
        while (now := time.monotonic()) < until or (now < latest and sum(map(len, expected)) <= ENOUGH):
            epoch += 1
            recorder.switch(epoch)
            if epoch % 100 == 0:
                recorder.begin("a.py")
                recorder.end()
    finally:
        done.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    evidence = Evidence()
    evidence.fold(recorder.drain())
    told = {(number, epoch) for epoch, numbers in evidence.hits.items() for number in numbers}
    told |= {(int(a), epoch) for epoch, deeds in evidence.deeds.items() for kind, a, _ in deeds if kind == HIT}
    every = set().union(*expected)
    assert len(every) > ENOUGH // len(expected)
    assert not every - told
