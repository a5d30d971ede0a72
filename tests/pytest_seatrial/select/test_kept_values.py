"""Values that one test makes and another uses, in every form that people write: all of them in one project, changed all at once."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.pytest_seatrial.select.projects import Small

pytestmark = pytest.mark.slow

DEEP = """
def deep():
    return 1

"""
# A name: a module that has `deep` above it, and what both tests ask for.
FORMS = {
    "local": (
        """
        class A:
            def __init__(self): self.c = {}
            def get(self, k):
                c = self.c
                if k not in c: c[k] = deep()
                return c[k]
        a = A()
        """,
        "m.a.get(3)",
    ),
    "default": (
        """
        def f(k, c={}):
            if k not in c: c[k] = deep()
            return c[k]
        """,
        "m.f(3)",
    ),
    "parameter": (
        """
        class App: db = None
        app = App()
        def ensure(a):
            if a.db is None: a.db = deep()
            return a.db
        """,
        "m.ensure(m.app)",
    ),
    "event": (
        """
        import threading
        ready = threading.Event()
        v = []
        def init(): v.append(deep())
        def use():
            if not ready.is_set():
                init()
                ready.set()
            return v[0]
        """,
        "m.use()",
    ),
    "variable": (
        """
        import contextvars
        x = contextvars.ContextVar('x')
        def use():
            try: return x.get()
            except LookupError:
                x.set(deep())
                return x.get()
        """,
        "m.use()",
    ),
    "frozen": (
        """
        import dataclasses
        @dataclasses.dataclass(frozen=True)
        class F:
            a: int = 0
            @property
            def v(self):
                if not hasattr(self, '_v'): object.__setattr__(self, '_v', deep())
                return self._v
        f = F()
        """,
        "m.f.v",
    ),
    "suppress": (
        """
        import contextlib
        c = {}
        def f(k):
            with contextlib.suppress(KeyError): return c[k]
            c[k] = deep()
            return c[k]
        """,
        "m.f(3)",
    ),
    "scan": (
        """
        c = []
        def f(k):
            for a, b in c:
                if a == k: return b
            v = deep()
            c.append((k, v))
            return v
        """,
        "m.f(3)",
    ),
    "next": (
        """
        c = []
        def f(k):
            v = next((b for a, b in c if a == k), None)
            if v is None:
                v = deep()
                c.append((k, v))
            return v
        """,
        "m.f(3)",
    ),
    "match": (
        """
        c = {}
        def f(k):
            match k in c:
                case False: c[k] = deep()
            return c[k]
        """,
        "m.f(3)",
    ),
    "instance": (
        """
        class D:
            i = None
            @classmethod
            def get(cls):
                if cls.i is None: cls.i = cls()
                return cls.i
            def __init__(self): self.v = deep()
        """,
        "m.D.get().v",
    ),
    "metaclass": (
        """
        class M(type):
            i = {}
            def __call__(cls, *a):
                if cls not in cls.i: cls.i[cls] = super().__call__(*a)
                return cls.i[cls]
        class D(metaclass=M):
            def __init__(self): self.v = deep()
        """,
        "m.D().v",
    ),
    "registry": (
        """
        known, made = {}, {}
        def add(n):
            def d(c):
                known[n] = c
                return c
            return d
        @add('x')
        class X:
            def __init__(self): self.v = deep()
        def get(n):
            if n not in made: made[n] = known[n]()
            return made[n]
        """,
        "m.get('x').v",
    ),
    "computed": (
        """
        class B:
            def __init__(self): self.c = {}
            def get(self, n):
                if n not in self.c: self.c[n] = getattr(self, '_build_' + n)()
                return self.c[n]
            def _build_x(self): return deep()
        b = B()
        """,
        "m.b.get('x')",
    ),
    "passed": (
        """
        c = {}
        def cached(k, f):
            if k not in c: c[k] = f()
            return c[k]
        """,
        "m.cached('a', m.deep)",
    ),
    "module": (
        """
        def __getattr__(name):
            if name != 'table': raise AttributeError(name)
            globals()[name] = deep()
            return globals()[name]
        """,
        "m.table",
    ),
    "factory": (
        """
        import collections
        t = collections.defaultdict(deep)
        """,
        "m.t['a']",
    ),
    "generator": (
        """
        class It:
            def __init__(self): self.b, self.g = [], self.gen()
            def gen(self): yield deep()
            def __getitem__(self, i):
                while len(self.b) <= i: self.b.append(next(self.g))
                return self.b[i]
        it = It()
        """,
        "m.it[0]",
    ),
    "operator": (
        """
        class V:
            def __init__(self, x): self.x = x
            def __add__(self, o): return V(self.x + o.x + deep())
        vs = [V(0), V(0)]
        t = None
        def total():
            global t
            if t is None: t = vs[0] + vs[1]
            return t.x
        """,
        "m.total()",
    ),
}


def test_whoever_uses_a_kept_value_depends_on_what_made_it(tmp_path: Path) -> None:
    files = {}
    for name, (text, use) in FORMS.items():
        files[f"kept_{name}.py"] = DEEP + textwrap.dedent(text)
        files[f"test_{name}.py"] = "".join(
            f"def test_{name}_{which}():\n    import kept_{name} as m\n    assert {use} == 1\n\n" for which in ("first", "second")
        )
    files["test_far.py"] = "def test_far():\n    pass\n"
    project = Small(tmp_path, files)
    project.settled()
    for name in FORMS:
        project.edit(f"kept_{name}.py", "return 1\n\n", "return 2\n\n")
    after = project.run()
    assert after.ran == {f"test_{name}_{which}" for name in FORMS for which in ("first", "second")}, after.out
    assert after.code == 1


def test_a_dispatcher_that_keeps_nothing_does_not_join_its_users(tmp_path: Path) -> None:
    files = {
        "m.py": "def call(f, *args):\n    return f(*args)\n\ndef one():\n    return 1\n\ndef two():\n    return 2\n",
        "test_a.py": "import m\n\ndef test_one():\n    assert m.call(m.one) == 1\n\ndef test_two():\n    assert m.call(m.two) == 2\n",
    }
    project = Small(tmp_path, files)
    project.settled()
    project.edit("m.py", "return 1", "return int(1)")
    assert project.run().ran == {"test_one"}


def test_a_file_that_was_read_for_a_kept_value(tmp_path: Path) -> None:
    files = {
        "m.py": """
            class App:
                text = None

            app = App()

            def read(name):
                with open(name) as file:
                    return file.read()

            def text(app):
                if app.text is None:
                    app.text = read("a.txt")
                return app.text
            """,
        "a.txt": "1",
        "b.txt": "1",
        "test_a.py": """
            import m

            def test_first(): assert m.text(m.app) == "1"

            def test_second(): assert m.text(m.app) == "1"

            def test_other(): assert m.read("b.txt") == "1"
            """,
    }
    project = Small(tmp_path, files)
    project.settled()
    project.write("a.txt", "2")
    assert project.run().ran == {"test_first", "test_second"}
    project.write("a.txt", "1")
    assert project.run().code == 0
    project.write("b.txt", "2")
    assert project.run().ran == {"test_other"}
