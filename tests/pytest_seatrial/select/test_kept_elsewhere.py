"""Values kept in ways that neither a name nor a new object tells: each form changed alone, and needed by whoever uses it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.pytest_seatrial.select.projects import Small

pytestmark = pytest.mark.slow

DEEP = "def deep():\n    return 1\n\n"
# A name: a module that has `deep` above it, and what three tests do, one after the other; the last one must depend on `deep`.
FORMS = {
    "a new object that passes on what it is told": (
        """
        class Root: ready = None
        root = Root()
        class Front:
            def __init__(self): self.root = root
            def setup(self, value): self.root.ready = value
            @property
            def ready(self): return self.root.ready
        def ask(front):
            if not front.ready: front.setup(deep())
            return front.ready
        """,
        ("m.ask(m.Front())", "m.ask(m.Front())", "m.ask(m.Front())"),
    ),
    "a new object that has an old table": (
        """
        shared = {}
        class Front:
            def __init__(self): self.table = shared
            def get(self, key):
                if key not in self.table: self.table[key] = deep()
                return self.table[key]
        """,
        ("m.Front().get(1)", "m.Front().get(1)", "m.Front().get(1)"),
    ),
    "a new object that has an old list": (
        """
        shared = []
        class Front:
            def __init__(self): self.found = shared
            def put(self): self.found.append(deep())
        def ask(front):
            if not front.found: front.put()
            return front.found[0]
        """,
        ("m.ask(m.Front())", "m.ask(m.Front())", "m.ask(m.Front())"),
    ),
    "a proxy": (
        """
        class Target: value = None
        target = Target()
        class Proxy:
            def __init__(self): pass
            def __getattr__(self, name): return getattr(target, name)
            def __setattr__(self, name, value): setattr(target, name, value)
        def fill(proxy):
            if proxy.value is None: proxy.value = deep()
            return proxy.value
        """,
        ("m.fill(m.Proxy())", "m.fill(m.Proxy())", "m.fill(m.Proxy())"),
    ),
    "what the first test had run before it was kept": (
        """
        box = {}
        def inner(): return deep()
        def get():
            if 1 not in box: box[1] = inner()
            return box[1]
        """,
        ("m.deep() and m.get()", "m.get()", "m.get()"),
    ),
    "a cache behind a cache": (
        """
        import functools
        @functools.lru_cache
        def parse(): return deep()
        @functools.lru_cache
        def load(): return parse()
        """,
        ("m.parse()", "m.load()", "m.load()"),
    ),
    "a keeper behind a keeper": (
        """
        one, two = {}, {}
        def parse():
            if 1 not in one: one[1] = deep()
            return one[1]
        def load():
            if 1 not in two: two[1] = parse()
            return two[1]
        """,
        ("m.parse()", "m.load()", "m.load()"),
    ),
    "a keeper that runs very often": (
        """
        box = {}
        def make(key): return deep() if key == 1500 else 1
        def get(key):
            if key not in box: box[key] = make(key)
            return box[key]
        """,
        ("int(sum(m.get(key) for key in range(1600)) == 1600)", "m.get(1500)", "m.get(1500)"),
    ),
    "a value made in a thread": (
        """
        from concurrent.futures import ThreadPoolExecutor
        box = []
        def helper(): return deep()
        def get():
            if not box:
                with ThreadPoolExecutor(1) as pool: box.append(pool.submit(helper).result())
            return box[0]
        """,
        ("m.get()", "m.get()", "m.get()"),
    ),
    "a value made in another process": (
        """
        import subprocess, sys
        box = []
        def get():
            if not box: box.append(int(subprocess.check_output([sys.executable, "-c", "import m; print(m.deep())"])))
            return box[0]
        """,
        ("m.get()", "m.get()", "m.get()"),
    ),
    "a value that was made before the question": (
        """
        box = {}
        def get(key, make=deep):
            value = make() if key == 1 else 1
            if "x" not in box: box["x"] = value
            return box["x"]
        """,
        ("m.get(1)", "m.get(2)", "m.get(2)"),
    ),
    "an early return": (
        """
        class Table:
            found = None
            def get(self):
                found = self.found
                if found is not None: return found
                made = deep()
                self.found = made
                return made
        table = Table()
        """,
        ("m.table.get()", "m.table.get()", "m.table.get()"),
    ),
    "something that is told what it did not have": (
        """
        import collections
        class Pool:
            def __init__(self): self.queue = collections.deque()
            def offer(self, value): self.queue.append(value)
            @property
            def size(self): return len(self.queue)
        pool = Pool()
        def get():
            size = pool.size
            if size == 0:
                pool.offer(deep())
            return pool.queue[0]
        """,
        ("m.get()", "m.get()", "m.get()"),
    ),
    "a library's object that is told once": (
        """
        import queue
        values = queue.Queue()
        def get():
            there = values.qsize()
            if not there:
                values.put(deep())
            return values.queue[0]
        """,
        ("m.get()", "m.get()", "m.get()"),
    ),
    "a file that a kept value was made of": (
        """
        from pathlib import Path
        box = []
        def get():
            if not box: box.append(int(Path("value.txt").read_text()))
            return box[0]
        """,
        ("m.get()", "m.get()", "m.get()"),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_last_user_depends_on_what_made_it(tmp_path: Path, form: str) -> None:
    text, uses = FORMS[form]
    tests = "".join(f"def test_{number}():\n    assert {use} == 1\n\n" for number, use in enumerate(uses))
    files = {"m.py": DEEP + textwrap.dedent(text), "test_m.py": f"import m\n\n{tests}", "test_far.py": "def test_far():\n    pass\n"}
    project = Small(tmp_path, files)
    project.write("value.txt", "1")
    project.settled()
    if "file" in form:
        project.write("value.txt", "2")
    else:
        project.edit("m.py", "return 1\n\n", "return 2\n\n")
    after = project.run()
    assert "test_2" in after.ran, after.out
    assert "test_far" not in after.ran


def test_what_a_keeper_was_given_lives_no_longer_than_without_recording(tmp_path: Path) -> None:
    files = {
        "m.py": """
            import weakref

            class Box:
                seen = None

            class Given:
                pass

            def ask(box, given):
                alive = weakref.ref(given)
                del given
                if box.seen is None:
                    box.seen = 1
                return alive()
            """,
        "test_m.py": """
            import m

            def test_gone():
                found = m.ask(m.Box(), m.Given())
                assert found is None
            """,
    }
    project = Small(tmp_path, files)
    project.settled()
