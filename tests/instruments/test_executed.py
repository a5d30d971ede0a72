"""Which functions of changed files ran: seen in real interpreters, of every Python that is on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from seatrial.evidence.imports import Executed, read_executed
from seatrial.instruments import executed

SOURCE = Path(__file__).parents[2] / "src"
PYENV = Path.home() / ".pyenv" / "versions"
OTHERS = sorted(str(place) for version in ("3.9", "3.10", "3.12", "3.13") for place in PYENV.glob(f"{version}.*/bin/python"))
PYTHONS = [sys.executable, *OTHERS]
START = "from seatrial.instruments import executed; executed.start({out!r}, 'driver'{more})\n"


class Place:
    """A checkout with one changed file, and a level directory."""

    def __init__(self, root: Path) -> None:
        self.root, self.out = root / "my checkout ü", root / "level"
        (self.root / "pkg").mkdir(parents=True)
        (self.root / "pkg" / "__init__.py").write_text("")
        self.out.mkdir()

    def change(self, text: str, name: str = "pkg/mod.py") -> Path:
        file = self.root / name
        file.write_text(textwrap.dedent(text), encoding="utf-8")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        (self.out / "changed.json").write_text(json.dumps({"files": [{"repo": "lib", "path": name, "sha256": digest}]}))
        return file

    def start(self, more: str = "") -> str:
        return START.format(out=str(self.out), more=more)

    def run(
        self, words: list[str], python: str = sys.executable, path: tuple[Path, ...] = (), **more: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {"PYTHONPATH": os.pathsep.join(map(str, [*path, self.root, SOURCE])), "PYTHONDONTWRITEBYTECODE": "1", **more}
        return subprocess.run([python, *words], env=environment, capture_output=True, text=True, timeout=60, check=False)

    def code(self, text: str, more: str = "", **options: str) -> Executed:
        """Run a driver with the recorder started, and read what it wrote."""
        done = self.run(["-c", self.start(more) + textwrap.dedent(text)], **options)  # type: ignore[arg-type]
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return read_executed(self.out / "executed.jsonl")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def names(found: Executed) -> set[str]:
    return {row[2] for row in found.ran}


KINDS = """
    import contextlib, dataclasses, functools

    SQUARES = [i * i for i in range(3)]

    @dataclasses.dataclass
    class Box:
        size: int = 3
        def method(self): return 1
        def idle_method(self): return 2
        @property
        def prop(self): return 3
        @staticmethod
        def static(): return 4
        @classmethod
        def klass(cls): return 5

    def decorator(function):
        @functools.wraps(function)
        def wrapper(*arguments): return function(*arguments)
        return wrapper

    @decorator
    def decorated(x): return x

    @functools.lru_cache
    def cached(): return 1

    def generator(): yield 1
    def idle_generator(): yield 1
    async def coroutine(): return 1
    async def idle_coroutine(): return 1

    @contextlib.contextmanager
    def manager(): yield

    pair = (lambda: 1, lambda: 2)

    def outer():
        def inner(): return inner2
        def inner2(): return 1
        return inner()

    def idle(): return 1

    def _temporary(): return 1
    _temporary()
    del _temporary
"""
DRIVE = """
    import pkg.mod as mod
    box = mod.Box(); box.method(); box.prop; box.static(); box.klass()
    mod.decorated(1); mod.cached(); mod.cached(); list(mod.generator()); mod.idle_generator()
    waiting = mod.coroutine()
    try: waiting.send(None)
    except StopIteration: pass
    with mod.manager(): pass
    mod.pair[1]()
    mod.outer()
    mod.idle_coroutine().close()
"""
RAN = {
    *("<module>", "Box", "method", "prop", "static", "klass", "decorator", "wrapper", "decorated", "cached", "generator", "coroutine"),
    *("manager", "<lambda>", "outer", "inner", "_temporary"),
}


@pytest.mark.parametrize("python", PYTHONS)
def test_every_kind_of_function_is_seen_when_it_runs_and_only_then(place: Place, python: str) -> None:
    place.change(KINDS)
    found = place.code(DRIVE, python=python)
    assert found.recorded
    # Before 3.11 the counter of a generator also counts that it is closed before it began.
    closed = {"idle_generator", "idle_coroutine"} if "3.9." in python or "3.10." in python else set()
    assert names(found) - closed == RAN
    assert all(row[:2] == ("lib", "pkg/mod.py") for row in found.ran)


@pytest.mark.parametrize("python", [python for python in PYTHONS if "3.9" not in python and "3.10" not in python])
def test_lambdas_on_one_line_are_told_apart(place: Place, python: str) -> None:
    file = place.change("pair = (lambda x: x + 1, lambda x: x + 2)\n")
    found = place.code("import pkg.mod\npkg.mod.pair[1](1)", python=python)
    column = file.read_text().rindex("x + 2")
    assert [row[3:] for row in found.ran if row[2] == "<lambda>"] == [(1, column)]


def test_what_is_watched_stays_what_it_is(place: Place, tmp_path: Path) -> None:
    """The same program with and without the recorder prints the same: signatures, code, pickles, tracebacks."""
    place.change(KINDS + "\n    def broken(x, y=2):\n        z = 1\n        raise ValueError(z)\n")
    program = """
        import inspect, pickle, traceback
        import pkg.mod as mod
        code = mod.broken.__code__
        print(inspect.signature(mod.broken), inspect.getsource(mod.decorated), code.co_code.hex(), code.co_names, code.co_consts)
        print(pickle.dumps(mod.broken), hasattr(mod.broken, "__wrapped__"), mod.broken.__globals__ is vars(mod), mod.broken.__closure__)
        try: mod.broken(1)
        except ValueError: print(traceback.format_exc())
        try: import pkg.wrong
        except SyntaxError: print(traceback.format_exc())
    """
    (place.root / "pkg" / "wrong.py").write_text("def f(:\n")
    program = textwrap.dedent(program)
    (tmp_path / "with.py").write_text(place.start() + program)
    (tmp_path / "without.py").write_text("\n" + program)
    one, two = (place.run([str(tmp_path / name)]) for name in ("with.py", "without.py"))
    assert one.returncode == two.returncode == 0, one.stderr
    assert one.stdout.replace("with.py", "without.py") == two.stdout
    assert "executed.py" not in one.stdout
    assert "broken" in names(read_executed(place.out / "executed.jsonl"))


def test_a_file_of_the_same_name_with_other_contents_is_another_file(place: Place) -> None:
    file = place.change("def f(): return 1\n")
    file.write_text("def f(): return 2\n")
    assert not place.code("import pkg.mod\npkg.mod.f()").ran


def test_a_copy_of_the_checkout_counts(place: Place, tmp_path: Path) -> None:
    place.change("def f(): return 1\n")
    place.root.rename(tmp_path / "elsewhere")
    place.root = tmp_path / "elsewhere"
    assert "f" in names(place.code("import pkg.mod\npkg.mod.f()"))


def test_functions_that_were_loaded_and_bound_before(place: Place) -> None:
    """Where the loop itself loads the recorder late: what ran before counts on Python that counts, and all that runs afterwards."""
    place.change("def early(): return 1\ndef late(): return 1\ndef idle(): return 1\nclass C:\n    def m(self): return 1\n")
    done = place.run(["-c", "from pkg.mod import *\nheld = C().m\nearly()\n" + place.start(", fresh=False") + "late(); held()"])
    assert done.returncode == 0, done.stderr
    assert names(read_executed(place.out / "executed.jsonl")) == {"<module>", "early", "late", "m"}


@pytest.mark.parametrize("python", PYTHONS)
def test_what_the_interpreter_runs_itself_does_not_count(place: Place, python: str) -> None:
    place.change("def shown(): return 1\ndef used(): return 1\n")
    (place.root / "sitecustomize.py").write_text("import pkg.mod\nfor _ in range(3):\n    pkg.mod.shown()\n")
    assert not place.code("pass", python=python).ran
    assert "used" in names(place.code("import time, pkg.mod\ntime.sleep(0.5)\npkg.mod.used()", python=python))
    assert "shown" not in names(read_executed(place.out / "executed.jsonl"))


@pytest.mark.parametrize("python", PYTHONS)
def test_pythons_that_it_starts_are_watched_too(place: Place, python: str) -> None:
    """Also where the checkout has a sitecustomize of its own, which still runs, and does not count."""
    place.change("def shown(): return 1\ndef used(): return 1\n")
    (place.root / "sitecustomize.py").write_text("import pkg.mod\nMARK = 7\npkg.mod.shown()\n")
    child = "import sitecustomize, pkg.mod, time; assert sitecustomize.MARK == 7; time.sleep(0.4); pkg.mod.used()"
    found = place.code(
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], check=True)", ", inherit=True", python=python
    )
    assert names(found) == {"used"}


def test_children_that_fork_and_leave_at_once(place: Place) -> None:
    place.change("def in_child(): return 1\ndef in_pool(): return 2\n")
    drive = """
        import multiprocessing, os, pkg.mod
        pid = os.fork()
        if not pid:
            pkg.mod.in_child()
            os._exit(0)
        os.waitpid(pid, 0)
        process = multiprocessing.get_context("fork").Process(target=pkg.mod.in_pool)
        process.start(); process.join()
        assert process.exitcode == 0
    """
    assert names(place.code(drive)) == {"<module>", "in_child", "in_pool"}


def test_a_process_that_is_killed_has_told(place: Place) -> None:
    place.change("def f(): return 1\n")
    done = place.run(["-c", place.start() + "import os, signal, time, pkg.mod\npkg.mod.f(); time.sleep(1); os.kill(os.getpid(), 9)"])
    assert done.returncode == -9
    assert names(read_executed(place.out / "executed.jsonl")) == {"<module>", "f"}


@pytest.mark.parametrize("python", PYTHONS)
def test_the_program_itself(place: Place, python: str) -> None:
    file = place.change("import time\ndef f(): return 1\ndef idle(): return 1\nf()\ntime.sleep(0.6)\n", "run.py")
    start = SOURCE / "seatrial" / "instruments" / "start"
    done = place.run([str(file)], python, (start,), SEATRIAL_EXECUTED=str(place.out))
    assert (done.returncode, done.stderr) == (0, "")
    assert names(read_executed(place.out / "executed.jsonl")) == {"<module>", "f"}


def test_a_module_that_is_run(place: Place) -> None:
    place.change("def f(): return 1\nif __name__ == '__main__':\n    f()\n")
    start = SOURCE / "seatrial" / "instruments" / "start"
    done = place.run(["-m", "pkg.mod"], path=(start,), SEATRIAL_EXECUTED=str(place.out))
    assert (done.returncode, done.stderr) == (0, "")
    assert names(read_executed(place.out / "executed.jsonl")) == {"<module>", "f"}


def test_a_function_that_comes_by_value(place: Place) -> None:
    """As Ray sends what is nested in a function: a new code object, which nobody loaded here."""
    place.change("def outer():\n    def sent(): return 1\n    return sent\n")
    (place.root / "cloudpickle").mkdir()
    (place.root / "cloudpickle" / "__init__.py").write_text("from . import cloudpickle\n")
    maker = "import types\ndef _make_function(code, base): return types.FunctionType(code, base)\n"
    (place.root / "cloudpickle" / "cloudpickle.py").write_text(maker)
    drive = """
        import marshal, cloudpickle, json.tool, pathlib, pkg
        file = str(pathlib.Path(pkg.__file__).with_name("mod.py"))
        code = compile(open(file).read(), file, "exec")
        sent = marshal.loads(marshal.dumps(code.co_consts[0].co_consts[1]))
        cloudpickle.cloudpickle._make_function(sent, {})()
    """
    assert names(place.code(drive)) == {"sent"}


def test_where_runs_cannot_be_counted_it_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.change("def f(): return 1\n")

    def none() -> None:
        raise ValueError("2 candidates")

    monkeypatch.setattr(executed, "calibrated", none)
    monkeypatch.setattr(executed, "MONITORING", None)
    executed.ExecutedRecorder(str(place.out), "driver", []).start(fresh=True)
    found = read_executed(place.out / "executed.jsonl")
    assert (found.recorded, found.ran) == (False, frozenset())
    assert "the run counter of code objects was not found: 2 candidates" in found.why


def test_without_a_change_nothing_is_written(place: Place) -> None:
    assert place.code("import json").recorded is False
    assert not (place.out / "executed.jsonl").exists()


def test_it_costs_nothing_per_call(place: Place) -> None:
    """The code that runs is the very code that the loader made: there is nothing in it that could cost."""
    place.change("def f(): return 1\n")
    place.code(
        """
        import pkg.mod, marshal, pathlib
        source = pathlib.Path(pkg.mod.__file__)
        plain = compile(source.read_bytes(), str(source), "exec").co_consts[0]
        assert pkg.mod.f.__code__.co_code == plain.co_code and pkg.mod.f.__code__.co_consts == plain.co_consts
        """
    )


@pytest.mark.parametrize("python", PYTHONS)
def test_code_that_is_gone_is_not_taken_for_other_code(place: Place, python: str) -> None:
    """The code of a module is freed once it ran, and the next one may lie at its address."""
    files = []
    for number in range(80):
        file = place.change(f"def f{number}(): return {number}\n", f"pkg/mod{number}.py")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        files.append({"repo": "lib", "path": f"pkg/mod{number}.py", "sha256": digest})
    (place.out / "changed.json").write_text(json.dumps({"files": files}))
    drive = """
        import importlib, time
        modules = [importlib.import_module(f"pkg.mod{number}") for number in range(40)]
        time.sleep(0.5)
        modules += [importlib.import_module(f"pkg.mod{number}") for number in range(40, 80)]
        for number, module in enumerate(modules):
            if number % 2: getattr(module, f"f{number}")()
    """
    assert names(place.code(drive, python=python)) == {"<module>", *(f"f{number}" for number in range(1, 80, 2))}


def test_a_sitecustomize_of_the_checkout_does_not_count_where_the_recorder_starts_late(place: Place) -> None:
    place.change("def shown(): return 1\ndef used(): return 1\n")
    (place.root / "sitecustomize.py").write_text("import pkg.mod\npkg.mod.shown()\n")
    done = place.run(["-c", "import pkg.mod\n" + place.start(", fresh=False") + "pkg.mod.used()"])
    assert done.returncode == 0, done.stderr
    assert names(read_executed(place.out / "executed.jsonl")) == {"used"}
