"""Functions that work once and keep the result: which they are, as far as their text shows it.

Whoever comes later may not run them at all (`keeps`):

- By decorator: its name has cache, memo, once, lazy or singleton in it.
- By `global`.
- By hand: something that outlives the call (a global, `self.x`, `cls.x`, one of their items) is asked for in a condition, or tried, and
  set in the same function: `if key not in CACHE: CACHE[key] = …`, `if self._x is None: self._x = …`.
- `__missing__`, and `__getattr__` or `__get__` that sets something.
- In two steps: what is asked for here is set by a function that is called then (`if self.x is None: self.load()`).

Or runs them, and they do less (`may_keep`): anything but a local that was made here is asked for or looked through, and set or told
something: `c = self.c; if k not in c: c[k] = …`, `if not log.handlers: log.addHandler(…)`.

Too many is safe (tests depend on more), too few is not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard

WORDS = ("cache", "memo", "once", "lazy", "singleton", "defaultdict")
KEEPERS = frozenset({"setdefault", "append", "add", "update", "insert", "extend", "pop", "popleft", "popitem"})
"""What is taken from a pool was put there by somebody."""
OWNERS = frozenset({"self", "cls"})
"""Parameters whose attributes outlive the call; their methods are functions of the project, where it is seen what they keep."""
MAKERS = frozenset({"list", "dict", "set", "bytearray", "deque", "Counter", "OrderedDict", "StringIO", "BytesIO"})
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.Tuple, ast.ListComp, ast.DictComp, ast.SetComp, ast.Constant, ast.JoinedStr, ast.BinOp)


def sets(inside: Sequence[ast.AST]) -> frozenset[str]:
    """Names of attributes and globals that a function sets or fills; `inside`: all of its own nodes, as everywhere here."""
    declared = {name for part in inside if isinstance(part, (ast.Global, ast.Nonlocal)) for name in part.names}
    return frozenset(_last(base) for base in _set(inside)) | declared


def keeps(node: ast.FunctionDef | ast.AsyncFunctionDef, inside: Sequence[ast.AST], setters: Mapping[str, frozenset[str]]) -> bool:
    """Whether the function keeps what it did; `setters` is what the functions of the file set, by name."""
    if any(word in name.lower() for part in node.decorator_list for name in _names(part) for word in WORDS):
        return True
    if any(isinstance(inner, (ast.Global, ast.Nonlocal)) for inner in inside):
        return True
    if node.name == "__missing__" or (node.name in ("__getattr__", "__get__") and any(True for _ in _set(inside))):
        return True
    if any(_filled(part, setters) for part in inside):
        return True
    return _asks_for(_asked(inside), _set(inside), _locals(node, inside))


def may_keep(inside: Sequence[ast.AST]) -> bool:
    """Whether the function may do less when it runs again, because of what it did before."""
    return _asks_for([*_asked(inside), *_looked_through(inside)], [*_set(inside), *_told(inside)], _made(inside))


def _asks_for(questions: Iterable[ast.AST], bases: Iterable[ast.expr], local: set[str]) -> bool:
    """Whether a question is about something that is set, and that no local name holds."""
    some = list(bases)
    kept = {ast.dump(_plain(base)) for base in some if _root(base) not in local}
    attributes = {base.attr for base in some if isinstance(base, ast.Attribute)}
    for asked in questions:
        for part in ast.walk(asked):
            if isinstance(part, (ast.Name, ast.Attribute)) and ast.dump(_plain(part)) in kept:
                return True
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value in attributes:
                return True  # hasattr(self, "_x")
    return False


def _filled(part: ast.AST, setters: Mapping[str, frozenset[str]]) -> bool:
    """Whether a condition asks for something that a function called under it sets."""
    if not isinstance(part, (ast.If, ast.IfExp, ast.While, ast.BoolOp)):
        return False
    asked = part.values[0] if isinstance(part, ast.BoolOp) else part.test
    words = {name for node in ast.walk(asked) for name in _word(node)}
    return any(
        words & setters.get(_last(node.func), frozenset()) for node in ast.walk(part) if isinstance(node, ast.Call) and _last(node.func)
    )


def _word(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.Name, ast.Attribute)):
        yield _last(node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def caches(value: ast.AST) -> bool:
    """Whether something is called here whose name says that it keeps results."""
    calls = (part.func for part in ast.walk(value) if isinstance(part, ast.Call))
    return any(word in name.lower() for call in calls for name in _names(call) for word in WORDS)


def _names(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr


def _locals(node: ast.FunctionDef | ast.AsyncFunctionDef, inside: Iterable[ast.AST]) -> set[str]:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    names = {arg.arg for arg in every if arg} - OWNERS
    return names | {part.id for part in inside if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


def _made(inside: Iterable[ast.AST]) -> set[str]:
    """Locals that hold nothing but what was made here."""
    made: dict[str, bool] = {}
    for part in inside:
        if isinstance(part, (ast.Assign, ast.AnnAssign)):
            fresh = isinstance(part.value, DISPLAYS) or (isinstance(part.value, ast.Call) and _last(part.value.func) in MAKERS)
            for target in part.targets if isinstance(part, ast.Assign) else [part.target]:
                if isinstance(target, ast.Name):
                    made[target.id] = fresh and made.get(target.id, True)
    return {name for name, fresh in made.items() if fresh}


def _told(inside: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """What is told something, and nobody looks at the answer: it may keep it."""
    for part in inside:
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Call) and isinstance(part.value.func, ast.Attribute):
            base = part.value.func.value
            if not (isinstance(base, ast.Name) and base.id in OWNERS):
                yield base


def _set(inside: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """What is set: an attribute itself, of an item what holds it."""
    for part in inside:
        if isinstance(part, (ast.Attribute, ast.Subscript)) and isinstance(part.ctx, ast.Store):
            yield part.value if isinstance(part, ast.Subscript) else part
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in KEEPERS:
            yield part.func.value
        elif isinstance(part, ast.Call) and _last(part.func) in ("setattr", "__setattr__") and len(part.args) == 3:
            target, name = part.args[0], part.args[1]
            yield ast.Attribute(target, name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else "?", ast.Store())


def _asked(inside: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for part in inside:
        if isinstance(part, (ast.If, ast.IfExp, ast.While)):
            yield part.test
        elif isinstance(part, ast.Try):
            yield from part.body
        elif isinstance(part, ast.BoolOp):
            yield from part.values
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in {"get", "setdefault"}:
            yield part.func.value
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id in {"getattr", "hasattr"}:
            yield part


def _looked_through(inside: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for part in inside:
        if isinstance(part, (ast.For, ast.AsyncFor, ast.comprehension)):
            yield part.iter
        elif isinstance(part, ast.Match):
            yield part.subject
        elif _suppresses(part):
            yield from part.body


def _suppresses(part: ast.AST) -> TypeGuard[ast.With]:
    return isinstance(part, ast.With) and any("suppress" in name for item in part.items for name in _names(item.context_expr))


def _plain(node: ast.expr) -> ast.expr:
    """The same without load or store, so that both compare equal."""
    if isinstance(node, ast.Attribute):
        return ast.Attribute(_plain(node.value), node.attr, ast.Load())
    if isinstance(node, ast.Name):
        return ast.Name(node.id, ast.Load())
    return node


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
