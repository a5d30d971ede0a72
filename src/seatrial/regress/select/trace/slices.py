"""What of a function may be left out when it runs again, because of what it did before, as far as its text shows it.

Something that outlives the call is asked for (in a condition, tried, or looked through) and set or told something here, or asked for here
and set by a function that is called then:

- `if key not in CACHE: CACHE[key] = …`, `if self._x is None: self._x = …`, `if not log.handlers: log.addHandler(…)`,
  `if self.x is None: self.load()`.
- What is left out the next time is a slice of the function: what stands under such a question, everything after it if it may end the
  function, what sets the thing, and what made the values that are used there.
- `*args` and `**kwargs` themselves, and an exception that was caught here, have nothing from before.
- What is told something by a method of the project keeps it only if that method sets what is asked here.
- A module that is told something (`os.makedirs(…)`) keeps it only if a condition around that asks the module.

Too many is safe (tests depend on more), too few is not.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from seatrial.regress.select.trace import asking
from seatrial.regress.select.trace.asking import TRIES, is_text, loaded, root
from seatrial.regress.select.trace.memo import Function, last, set_here

ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break, ast.Yield, ast.YieldFrom)
COMPOUND = (ast.If, ast.While, ast.For, ast.AsyncFor, ast.Try, ast.TryStar, ast.With, ast.AsyncWith, ast.Match)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class File(NamedTuple):
    """What must be known of the whole file."""

    setters: Mapping[str, frozenset[str]]
    """What its functions set, by their names."""
    modules: frozenset[str]
    """Names of modules that are imported anywhere in it."""


class LeftOut(NamedTuple):
    """What of a function may not run again."""

    nodes: list[ast.AST]
    told: str
    """The method by which something is told what it may keep; "" if this function sets it by itself."""
    asked: frozenset[str]
    """Which attributes of that are asked; "" for anything else."""


def file(functions: Iterable[tuple[str, Sequence[ast.AST]]], level: Iterable[ast.AST]) -> File:
    """Of names of functions and all their own nodes (`syntax.inside`, as everywhere here), and the nodes of the module level."""
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
    new = asking.made(inside) | {arg.arg for arg in (node.args.vararg, node.args.kwarg) if arg} | asking.caught(inside)
    sets = [base for base in set_here(inside) if root(base) not in new]
    sure = [part for part in inside if _filled(part, known) or _asks_module(part, inside, known)]
    found = [_slice(inside, _Kept(inside, sets), sure)]
    # What is neither asked nor given to a local that may be asked needs no look.
    looked = [*asking.every_question(inside), *(value for part in inside for _, value in asking.given(part))]
    questions = {part.id for one in looked for part in ast.walk(one) if isinstance(part, ast.Name)} - new
    for base, method in asking.told(inside):
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
        self._seen: Callable[[ast.AST], ast.AST] = asking.without_arguments if told else asking.as_it_is
        self.bases: set[str] = set()
        self.spread: set[str] = set()
        """Locals that got something from it."""
        self.asked: set[str] = set()
        """Which attributes of it are asked; "" for anything else."""
        self._words: set[str] = set()
        self._from = self._copies(inside, {ast.dump(loaded(base)) for base in held}) if held else {}
        if held:
            self._ask(map(self._seen, [*asking.asked(inside), *asking.looked_through(inside)]), held)
        for tried in asking.tried(inside) if held else ():
            # What is only told something there is not asked for.
            beside = {id(node) for one in tried for node in ast.walk(one)} if told else set()
            self._ask(map(asking.without_arguments, tried), [base for base in held if id(base) not in beside])
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
                self.asked |= asking.uses(one, self._roots)

    def _copies(self, inside: Sequence[ast.AST], bases: set[str]) -> dict[str, set[str]]:
        """Locals that got something of what is held, over any number of steps, and of what."""
        found: dict[str, set[str]] = {}
        given = [(targets, list(ast.walk(self._seen(value)))) for part in inside for targets, value in asking.given(part)]
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
        given = [pair for part in inside for pair in asking.given(part)] if self.bases else []
        grown = True
        while grown:
            grown = False
            for targets, value in given:
                new = targets - self.spread
                if new and self.in_(self._seen(value)):
                    self.spread |= new
                    self.asked |= asking.uses(self._seen(value), self._roots)
                    grown = True

    def in_(self, node: ast.AST) -> bool:
        """Whether it is mentioned here."""
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and part.id in self.spread:
                return True
            if isinstance(part, (ast.Name, ast.Attribute)) and ast.dump(loaded(part)) in self.bases:
                return True
            if isinstance(part, ast.Attribute) and part.attr in self._words:
                return True
            if is_text(part) and part.value in self._words:
                return True
        return False

    def sets(self, statement: ast.stmt) -> bool:
        """Whether a statement sets it, or tells it something."""
        inside = list(ast.walk(statement))
        every = [*set_here(inside), *(base for base, _ in asking.told(inside))]
        return any(ast.dump(loaded(base)) in self.bases or last(base) in self._words for base in every)


def _asks_module(part: ast.AST, inside: Sequence[ast.AST], known: File) -> bool:
    """Whether a condition asks a module which is told something under it, or after it if it may end the function."""
    if not isinstance(part, (ast.If, ast.While)):
        return False
    names = {one.id for one in ast.walk(part.test) if isinstance(one, ast.Name)} & known.modules
    later = [node for one in _after(inside, part) for node in ast.walk(one)] if names and _ends(part) else []
    return bool(names) and any(isinstance(base, ast.Name) and base.id in names for base, _ in asking.told([*ast.walk(part), *later]))


def _guards(inside: Iterable[ast.AST], kept: _Kept) -> Iterator[ast.AST]:
    """Statements that ask for it: what stands under them may be left out."""
    for part in inside:
        if (
            (isinstance(part, (ast.If, ast.While)) and kept.in_(part.test))
            or (isinstance(part, (ast.For, ast.AsyncFor)) and kept.in_(part.iter))
            or (isinstance(part, ast.Match) and kept.in_(part.subject))
            or ((isinstance(part, TRIES) or asking.suppresses(part)) and any(kept.in_(one) for one in part.body))
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
    given = [(part, targets) for part in inside for targets, _ in asking.given(part)]
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
