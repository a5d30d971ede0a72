"""Functions that keep their result, and which parts of a function may be left out when it runs again, as far as its text shows."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeGuard

Function = ast.FunctionDef | ast.AsyncFunctionDef

WORDS = ("cache", "memo", "once", "lazy", "singleton", "defaultdict")
KEEPERS = frozenset({"setdefault", "append", "add", "update", "insert", "extend", "pop", "popleft", "popitem"})
"""What is taken from a pool was put there by somebody."""


def skips(node: Function, inside: Sequence[ast.AST]) -> bool:
    """Whether the work of the function may be had without running it."""
    if any(word in name.lower() for part in node.decorator_list for name in names(part) for word in WORDS):
        return True
    if any(isinstance(inner, (ast.Global, ast.Nonlocal)) for inner in inside):
        return True
    return node.name == "__missing__" or (node.name in ("__getattr__", "__get__") and any(True for _ in set_here(inside)))


def caches(value: ast.AST) -> bool:
    """Whether something is called here whose name says that it keeps results."""
    calls = (part.func for part in ast.walk(value) if isinstance(part, ast.Call))
    return any(word in name.lower() for call in calls for name in names(call) for word in WORDS)


def names(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr


def set_here(inside: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """What is set: an attribute itself, of an item what holds it."""
    for part in inside:
        if isinstance(part, (ast.Attribute, ast.Subscript)) and isinstance(part.ctx, ast.Store):
            yield part.value if isinstance(part, ast.Subscript) else part
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in KEEPERS:
            yield part.func.value
        elif isinstance(part, ast.Call) and last(part.func) in ("setattr", "__setattr__") and len(part.args) == 3:
            target, name = part.args[0], part.args[1]
            yield ast.Attribute(target, name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else "?", ast.Store())


def last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


OWNERS = frozenset({"self", "cls"})
"""Parameters whose attributes outlive the call; their methods are functions of the project, where it is seen what they keep."""
MAKERS = frozenset({"list", "dict", "set", "bytearray", "deque", "Counter", "OrderedDict", "StringIO", "BytesIO"})
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.Tuple, ast.ListComp, ast.DictComp, ast.SetComp, ast.Constant, ast.JoinedStr, ast.BinOp)
TRIES = (ast.Try, ast.TryStar)


def told(inside: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, str]]:
    """What is told something, and by which method, and nobody looks at the answer: it may keep it."""
    for part in inside:
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Call) and isinstance(part.value.func, ast.Attribute):
            base = part.value.func.value
            if not (isinstance(base, ast.Name) and base.id in OWNERS):
                yield base, part.value.func.attr


def asked(inside: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for part in inside:
        if isinstance(part, (ast.If, ast.IfExp, ast.While)):
            yield part.test
        elif isinstance(part, ast.BoolOp):
            yield from part.values
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in {"get", "setdefault"}:
            yield part.func.value
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id in {"getattr", "hasattr"}:
            yield part
        elif isinstance(part, (ast.For, ast.AsyncFor, ast.comprehension)):
            yield part.iter
        elif isinstance(part, ast.Match):
            yield part.subject


def tried_blocks(inside: Iterable[ast.AST]) -> Iterator[list[ast.stmt]]:
    for part in inside:
        if isinstance(part, TRIES) or suppresses(part):
            yield part.body


def suppresses(part: ast.AST) -> TypeGuard[ast.With]:
    return isinstance(part, ast.With) and any("suppress" in name for item in part.items for name in names(item.context_expr))


def assignments(part: ast.AST) -> Iterator[tuple[set[str], ast.expr]]:
    if isinstance(part, ast.Assign):
        yield {name for target in part.targets for name in stored(target)}, part.value
    elif isinstance(part, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and part.value is not None:
        yield set(stored(part.target)), part.value
    elif isinstance(part, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield set(stored(part.target)), part.iter
    elif isinstance(part, ast.withitem) and part.optional_vars is not None:
        yield set(stored(part.optional_vars)), part.context_expr


def stored(target: ast.AST) -> Iterator[str]:
    return (part.id for part in ast.walk(target) if isinstance(part, ast.Name) and isinstance(part.ctx, (ast.Store, ast.Del)))


def loaded(node: ast.expr) -> ast.expr:
    """The same without load or store, so that both compare equal."""
    if isinstance(node, ast.Attribute):
        return ast.Attribute(loaded(node.value), node.attr, ast.Load())
    if isinstance(node, ast.Name):
        return ast.Name(node.id, ast.Load())
    return node


def root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def uses(asked: ast.AST, names: set[str]) -> set[str]:
    """Which attributes of these names are asked here, "" if it is more than an attribute."""
    found = set()
    pending = [asked]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name) and node.id in names:
            found.add("")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in names:
                found.add(node.attr)
        elif isinstance(node, ast.Attribute | ast.Subscript | ast.Call) and root(node) in names:
            found.add("")
        else:
            pending.extend(ast.iter_child_nodes(node))
    return found


def without_arguments(tried: ast.AST) -> ast.AST:
    """The same where names that are only passed on are not mentioned: nobody asks them."""
    plain: ast.AST = _Unnamed().visit(copy.deepcopy(tried))
    return plain


class _Unnamed(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.args = [part for part in node.args if not isinstance(part, ast.Name)]
        node.keywords = [part for part in node.keywords if not isinstance(part.value, ast.Name)]
        return node


def is_text(part: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(part, ast.Constant) and isinstance(part.value, str)


def made(inside: Iterable[ast.AST]) -> set[str]:
    """Locals that hold nothing but what was made here."""
    made: dict[str, bool] = {}
    for part in inside:
        if isinstance(part, (ast.Assign, ast.AnnAssign)):
            fresh = isinstance(part.value, DISPLAYS) or (isinstance(part.value, ast.Call) and last(part.value.func) in MAKERS)
            for target in part.targets if isinstance(part, ast.Assign) else [part.target]:
                if isinstance(target, ast.Name):
                    made[target.id] = fresh and made.get(target.id, True)
    return {name for name, fresh in made.items() if fresh}


ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break, ast.Yield, ast.YieldFrom)
COMPOUND = (ast.If, ast.While, ast.For, ast.AsyncFor, ast.Try, ast.TryStar, ast.With, ast.AsyncWith, ast.Match)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class File(NamedTuple):
    """What must be known of the whole file."""

    setters: Mapping[str, frozenset[str]]  # what its functions set, by their names
    modules: frozenset[str]  # names of modules that are imported anywhere in it


class LeftOut(NamedTuple):
    """What of a function may not run again."""

    nodes: list[ast.AST]
    told: str  # the method by which something is told what it may keep; "" if this function sets it by itself
    asked: frozenset[str]  # which attributes of that are asked; "" for anything else


def file(functions: Iterable[tuple[str, Sequence[ast.AST]]], level: Iterable[ast.AST]) -> File:
    """Of names of functions and all their own nodes (`instrument.nodes_inside`, as everywhere here), and the nodes of the module level."""
    setters: dict[str, frozenset[str]] = {}
    modules = set(_modules(level))
    for name, inside in functions:
        declared = {one for part in inside if isinstance(part, (ast.Global, ast.Nonlocal)) for one in part.names}
        setters[name] = setters.get(name, frozenset()) | declared | {last(base) for base in set_here(inside)} - {""}
        modules.update(_modules(inside))
    return File(setters, frozenset(modules))


def _modules(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for part in nodes:
        if isinstance(part, ast.Import):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in part.names)
        elif isinstance(part, ast.ImportFrom) and part.level and not part.module:
            yield from (alias.asname or alias.name for alias in part.names)  # from . import module


def left_out(node: Function, inside: Sequence[ast.AST], known: File) -> list[LeftOut]:
    """What of the function may not run again, because of what it did before: by what it sets, and by what it tells others."""
    caught = {part.name for part in inside if isinstance(part, ast.ExceptHandler) and part.name}
    new = made(inside) | {arg.arg for arg in (node.args.vararg, node.args.kwarg) if arg} | caught
    sets = [base for base in set_here(inside) if root(base) not in new]
    sure = [part for part in inside if _filled(part, known) or _asks_module(part, inside, known)]
    found = [_slice(inside, _Kept(inside, sets), sure)]
    # What is neither asked nor given to a local that may be asked needs no look.
    looked = [*asked(inside), *(one for body in tried_blocks(inside) for one in body)]
    looked += [value for part in inside for _, value in assignments(part)]
    questions = {part.id for one in looked for part in ast.walk(one) if isinstance(part, ast.Name)} - new
    for base, method in told(inside):
        if root(base) in questions and not (isinstance(base, ast.Name) and base.id in known.modules):
            one = _slice(inside, _Kept(inside, [base], told=True), [])
            found.append(one and one._replace(told=method))
    return [one for one in found if one]


def _slice(inside: Sequence[ast.AST], kept: _Kept, found: list[ast.AST]) -> LeftOut | None:
    """`found` is left out in any case."""
    if not (kept.bases or found):
        return None
    for part in [*found, *_guards(inside, kept)]:
        if _ends(part):
            found = [*found, *_after(inside, part)]
    found.extend(one for part in inside for one in _under(part, kept))
    found.extend(part for part in inside if isinstance(part, ast.stmt) and not isinstance(part, COMPOUND) and kept.sets(part))
    return LeftOut(_with_values(inside, found), "", frozenset(kept.asked))


class _Kept:
    """What a function asks for and sets, and the locals that got something from it."""

    def __init__(self, inside: Sequence[ast.AST], held: Sequence[ast.expr], *, told: bool = False) -> None:
        """`held`: what is set here, or what is `told` something."""
        self._roots = {root(base) for base in held}
        self._seen: Callable[[ast.AST], ast.AST] = without_arguments if told else lambda node: node
        self.bases: set[str] = set()
        self.spread: set[str] = set()  # locals that got something from it
        self.asked: set[str] = set()  # which attributes of it are asked; "" for anything else
        self._words: set[str] = set()
        self._from = self._copies(inside, {ast.dump(loaded(base)) for base in held}) if held else {}
        if held:
            self._ask(map(self._seen, asked(inside)), held)
        for tried in tried_blocks(inside) if held else ():
            # What is only told something there is not asked for.
            beside = {id(node) for one in tried for node in ast.walk(one)} if told else set()
            self._ask(map(without_arguments, tried), [base for base in held if id(base) not in beside])
        self._words = {base for base in self.bases if base.isidentifier()}
        self._spread(inside)

    def _ask(self, asked: Iterable[ast.AST], bases: Sequence[ast.expr]) -> None:
        kept = {ast.dump(loaded(base)) for base in bases}
        words = {base.attr for base in bases if isinstance(base, ast.Attribute)}
        for one in asked:
            meant: set[str] = set()
            for part in ast.walk(one):
                if isinstance(part, (ast.Name, ast.Attribute)):
                    meant |= {ast.dump(loaded(part)), *(self._from.get(part.id, ()) if isinstance(part, ast.Name) else ())} & kept
                elif is_text(part) and part.value in words:
                    meant.add(part.value)  # hasattr(self, "_x")
            if meant:
                self.bases |= meant
                self.asked |= uses(one, self._roots)

    def _copies(self, inside: Sequence[ast.AST], bases: set[str]) -> dict[str, set[str]]:
        """Locals that got something of what is held, over any number of steps, and of what."""
        found: dict[str, set[str]] = {}
        given = [(targets, list(ast.walk(self._seen(value)))) for part in inside for targets, value in assignments(part)]
        grown = True
        while grown:
            grown = False
            for targets, nodes in given:
                names = {ast.dump(loaded(node)) for node in nodes if isinstance(node, (ast.Name, ast.Attribute))} & bases
                names = names.union(*(found[node.id] for node in nodes if isinstance(node, ast.Name) and node.id in found))
                for target in targets:
                    if names - found.get(target, set()):
                        found.setdefault(target, set()).update(names)
                        grown = True
        return found

    def _spread(self, inside: Sequence[ast.AST]) -> None:
        """Locals that hold what was asked for, over any number of steps."""
        given = [pair for part in inside for pair in assignments(part)] if self.bases else []
        grown = True
        while grown:
            grown = False
            for targets, value in given:
                new = targets - self.spread
                if new and self.in_(self._seen(value)):
                    self.spread |= new
                    self.asked |= uses(self._seen(value), self._roots)
                    grown = True

    def in_(self, node: ast.AST) -> bool:
        return any(
            (isinstance(part, ast.Name) and part.id in self.spread)
            or (isinstance(part, (ast.Name, ast.Attribute)) and ast.dump(loaded(part)) in self.bases)
            or (isinstance(part, ast.Attribute) and part.attr in self._words)
            or (is_text(part) and part.value in self._words)
            for part in ast.walk(node)
        )

    def sets(self, statement: ast.stmt) -> bool:
        inside = list(ast.walk(statement))
        every = [*set_here(inside), *(base for base, _ in told(inside))]
        return any(ast.dump(loaded(base)) in self.bases or last(base) in self._words for base in every)


def _asks_module(part: ast.AST, inside: Sequence[ast.AST], known: File) -> bool:
    """Whether a condition asks a module which is told something under it, or after it if it may end the function."""
    if not isinstance(part, (ast.If, ast.While)):
        return False
    names = {one.id for one in ast.walk(part.test) if isinstance(one, ast.Name)} & known.modules
    later = [node for one in _after(inside, part) for node in ast.walk(one)] if names and _ends(part) else []
    return bool(names) and any(isinstance(base, ast.Name) and base.id in names for base, _ in told([*ast.walk(part), *later]))


def _guards(inside: Iterable[ast.AST], kept: _Kept) -> Iterator[ast.AST]:
    """Statements that ask for it: what stands under them may be left out."""
    for part in inside:
        if (
            (isinstance(part, (ast.If, ast.While)) and kept.in_(part.test))
            or (isinstance(part, (ast.For, ast.AsyncFor)) and kept.in_(part.iter))
            or (isinstance(part, ast.Match) and kept.in_(part.subject))
            or ((isinstance(part, TRIES) or suppresses(part)) and any(kept.in_(one) for one in part.body))
        ):
            yield part


def _under(part: ast.AST, kept: _Kept) -> Iterator[ast.AST]:
    """What is left out by a question in this node."""
    if any(True for _ in _guards([part], kept)):
        if isinstance(part, TRIES):
            yield from [*part.handlers, *part.orelse]
        else:
            yield part
    elif (
        (isinstance(part, ast.IfExp) and kept.in_(part.test))
        or (isinstance(part, ast.BoolOp) and any(kept.in_(value) for value in part.values))
        or (isinstance(part, COMPREHENSIONS) and any(kept.in_(one.iter) for one in part.generators))
        or (isinstance(part, ast.Call) and last(part.func) == "setdefault" and kept.in_(part))
    ):
        yield part


def _ends(part: ast.AST) -> bool:
    """Whether what comes after may not be reached."""
    return any(isinstance(one, ENDS) for one in ast.walk(part))


def _after(inside: Iterable[ast.AST], guard: ast.AST) -> Iterator[ast.AST]:
    last = getattr(guard, "end_lineno", 0) or 0
    return (part for part in inside if isinstance(part, ast.stmt) and part.lineno > last)


def _with_values(inside: Sequence[ast.AST], found: list[ast.AST]) -> list[ast.AST]:
    """The nodes, with those that gave a value to a local which is used in them."""
    given = [(part, targets) for part in inside for targets, _ in assignments(part)]
    used: set[str] = set()
    pending = list(found)
    taken = {id(part) for part in found}
    while pending:
        used.update(part.id for one in pending for part in ast.walk(one) if isinstance(part, ast.Name))
        pending = [part for part, targets in given if id(part) not in taken and targets & used]
        taken.update(map(id, pending))
        found.extend(pending)
    return found


def _filled(part: ast.AST, known: File) -> bool:
    """Whether a condition asks for something that a function called under it sets."""
    if not isinstance(part, (ast.If, ast.IfExp, ast.While, ast.BoolOp)):
        return False
    asked = part.values[0] if isinstance(part, ast.BoolOp) else part.test
    words = {last(node) if isinstance(node, (ast.Name, ast.Attribute)) else str(getattr(node, "value", "")) for node in ast.walk(asked)}
    calls = (last(node.func) for node in ast.walk(part) if isinstance(node, ast.Call))
    return any(words & known.setters.get(name, frozenset()) for name in calls if name)
