"""Sees every import of a project's module and runs it instrumented; `__pycache__` is neither read nor written."""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import marshal
import os
import re
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from pytest_seatrial.select.trace import instrument as kept
from pytest_seatrial.select.trace.instrument import BROKEN, MODULE, block_number, instrument, numbers
from pytest_seatrial.select.trace.trace_events import EXISTS, HIT_NAME, INSTRUMENT_VERSION
from pytest_seatrial.select.trace.trace_recorder import TraceRecorder

if TYPE_CHECKING:
    import pytest

Rewrite = Callable[[ast.Module, bytes, str], None]

OTHERS = re.compile(rb"\btorch\s*\.\s*(compile|jit|_dynamo|export)\b|\bfrom\s+torch\s+import\b.*\b(compile|jit)\b|\btriton\b|\bnumba\b")


def compiled(source: bytes, path: str, relative: str, cache: str, rewrite: Rewrite | None, salt: str) -> CodeType | None:
    """The code, from the cache or made and put there; None if this file is not to be instrumented."""
    if OTHERS.search(source):
        return None
    tag = f"{INSTRUMENT_VERSION}\0{path}\0{relative}\0{sys.version}\0{sys.flags.optimize}\0{salt}\0"
    place = kept.cached_place(cache, tag.encode("utf-8", "surrogateescape") + source)
    found = _load(place)
    if found is None:
        found = _make(source, path, relative, rewrite)
        if found is not None:
            kept.store_cached(cache, place, marshal.dumps(found))
    return found


def _make(source: bytes, path: str, relative: str, rewrite: Rewrite | None) -> CodeType | None:
    try:
        tree = ast.parse(source, path)
        known = numbers(tree, relative)  # of the text, before asserts are something else
        if rewrite is not None:
            rewrite(tree, source, path)
        instrument(tree, known, block_number(relative, MODULE))
        made: Any = compile(tree, path, "exec", dont_inherit=True)
    except BROKEN:
        return None  # Python itself says it better, or can do it without us
    return made if isinstance(made, CodeType) else None


def _load(place: str) -> CodeType | None:
    data = kept.load_cached(place)
    try:
        found = None if data is None else marshal.loads(data)
    except (ValueError, EOFError, TypeError):
        return None
    return found if isinstance(found, CodeType) else None


FILE = "<frozen importlib._bootstrap_external>"
OWN = "pytest_seatrial/select/"  # our own modules may be imported by our own loader: they are never instrumented

LIBRARY = os.__file__.removesuffix("os.py")

Source = importlib.machinery.SourceFileLoader
After = Callable[[ModuleType], None]


class Imports:
    """The changes to Python's import, and the way back."""

    def __init__(self, recorder: TraceRecorder, cache: str, after: After) -> None:
        """`after` is called with every module that was loaded from a source file, the project's or not."""
        self.recorder = recorder
        self.cache = cache
        self.after = after
        self.code_before: Any = Source.get_code
        self.exec_before: Any = Source.exec_module
        self.missing = Missing(recorder)

    def install(self) -> None:
        """Change; `recorder.stop` undoes it."""
        bootstrap: Any = sys.modules["_frozen_importlib"]
        import_before = bootstrap._gcd_import
        put: dict[str, Any] = {"get_code": self._get_code(), "exec_module": self._exec_module()}
        had = {name: Source.__dict__.get(name) for name in put}
        for name, function in put.items():
            setattr(Source, name, function)
        bootstrap._gcd_import = importing = _importing(self.recorder, import_before)
        sys.meta_path.append(self.missing)

        def undo() -> None:
            # Somebody else may have changed them after us; theirs calls ours, which does nothing any more.
            for name, function in put.items():
                if Source.__dict__.get(name) is function:
                    if had[name] is None:
                        delattr(Source, name)
                    else:
                        setattr(Source, name, had[name])
            if bootstrap._gcd_import is importing:
                bootstrap._gcd_import = import_before
            if self.missing in sys.meta_path:
                sys.meta_path.remove(self.missing)

        self.recorder.undo.append(undo)

    def _exec_module(self) -> Any:
        recorder, before, after = self.recorder, self.exec_before, self.after

        def exec_module(self: Any, module: ModuleType) -> None:
            if not _prepare(recorder, self, module):
                before(self, module)
            else:
                try:
                    before(self, module)
                finally:
                    recorder.end()
            try:
                after(module)
            except Exception as error:  # noqa: BLE001  # the user's import must go on
                recorder.trouble(f"after the import of {module.__name__}: {type(error).__name__}")

        return _hidden(exec_module)

    def _get_code(self) -> Any:
        recorder, before, cache = self.recorder, self.code_before, self.cache

        def get_code(self: Any, fullname: str) -> CodeType | None:
            relative = None
            try:
                relative = recorder.claims(self.path)
            except Exception as error:  # noqa: BLE001  # Python can load it without us
                recorder.trouble(f"import of {self.path}: {type(error).__name__}")
            if relative is None:
                found: CodeType | None = before(self, fullname)
                return found
            loading = recorder._local.__dict__.pop("loading", (None, None))
            hushed = recorder.hush(True)
            try:
                if loading[0] is self and not _foreign(type(self), get_code):
                    found = _code(self, relative, recorder, cache, loading[1])
                    if found is not None:
                        return found
                recorder.whole(relative)
                return before(self, fullname)  # type: ignore[no-any-return]
            finally:
                recorder.hush(hushed)

        return _hidden(get_code)


def _prepare(recorder: TraceRecorder, loader: Any, module: ModuleType) -> bool:
    """Say that a module begins; False if it is not the project's, or if that failed."""
    relative = None
    try:
        relative = recorder.claims(loader.path)
        if relative is None:
            if recorder.running:
                recorder.outside(loader.path)
            return False
        if recorder.outer is not None and (named := recorder.outer.tree.source(loader.path)) is not None:
            recorder.outer.whole(named)
        module.__dict__[HIT_NAME] = recorder.hit
        recorder._local.loading = (loader, module)
        recorder.begin(relative)
    except Exception as error:  # noqa: BLE001  # the user's import must go on
        recorder.trouble(f"import of {module.__name__}: {type(error).__name__}")
        return False
    return True


def _code(loader: Any, relative: str, recorder: TraceRecorder, cache: str, module: ModuleType) -> CodeType | None:
    if OWN in relative or recorder.tree.left_alone(relative):
        return None
    try:
        source: bytes = loader.get_data(loader.path)
    except OSError:
        return None
    if b"__import__" in source:
        module.__dict__["__import__"] = Import(recorder)
    rewrite: Rewrite | None = getattr(loader, "seatrial_rewrite", None)
    try:
        return compiled(source, loader.path, relative, cache, rewrite, getattr(loader, "seatrial_salt", ""))
    except Exception:  # noqa: BLE001  # Python can load it without us
        return None


def _foreign(kind: type, get_code: object) -> bool:
    """Whether a loader has its own way to code."""
    if kind.get_code is not get_code:  # type: ignore[attr-defined]
        return True
    return any(getattr(kind, name) is not getattr(Source, name) for name in ("source_to_code", "get_data", "path_stats"))


def _hidden(function: Any) -> Any:
    assert isinstance(function, FunctionType)
    function.__code__ = function.__code__.replace(co_filename=FILE)
    return function


def _importing(recorder: TraceRecorder, before: Any) -> Any:
    def _gcd_import(name: str, package: str | None = None, level: int = 0) -> Any:
        module = before(name, package, level)
        if recorder.running:
            _tell_import(recorder, module)
        return module

    return _hidden(_gcd_import)


def _tell_import(recorder: TraceRecorder, module: object) -> None:
    try:
        # Not vars(): asking a lazy module for anything would load it.
        file = object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:
        return
    relative = recorder.tree.source(file) if isinstance(file, str) else None
    if relative is not None:
        recorder.loaded(relative, sys._getframe(2))


class Import:
    """`__import__` of a module that calls it by name."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self.recorder = recorder

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        module = builtins.__import__(name, *args, **kwargs)
        if self.recorder.running:
            for found in (module, sys.modules.get(name)):
                _tell_import(self.recorder, found)
        return module

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (builtins, "__import__")


class Missing:
    """The last finder: what nobody found may be there tomorrow."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self.recorder = recorder

    def find_spec(self, name: str, path: Any = None, target: object = None) -> None:  # noqa: ARG002
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
            frame = frame.f_back
        asker = frame.f_code.co_filename if frame is not None else ""
        by_library = asker.startswith(LIBRARY) and not asker.startswith((f"{LIBRARY}importlib", f"{LIBRARY}site-packages"))
        if not self.recorder.running or by_library:  # Python's own library tries modules of other systems
            return
        tail = name.rpartition(".")[2]
        for base in list(sys.path if path is None else path):
            if isinstance(base, str):
                for candidate in (f"{base or '.'}/{tail}.py", f"{base or '.'}/{tail}"):
                    relative = self.recorder.tree.relative(candidate)
                    if relative is not None:
                        self.recorder.tell(EXISTS, relative)


class Rewriting:
    """The first finder of the pytest process: modules whose asserts pytest rewrites are rewritten as ever, and instrumented.

    It asks pytest's own hook. What that claims below the root is loaded by us with pytest's `rewrite_asserts` applied; where that function
    is not what we know, pytest loads the module itself and the file counts as whole.
    """

    def __init__(self, recorder: TraceRecorder, config: pytest.Config) -> None:
        self.recorder = recorder
        self.config = config
        self.rewrite, self.salt = _rewrite(config)

    def install(self) -> None:
        """Go first; `recorder.stop` undoes it."""
        sys.meta_path.insert(0, self)
        self.recorder.undo.append(lambda: sys.meta_path.remove(self) if self in sys.meta_path else None)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        """pytest's answer, with our loader where the file is the project's."""
        import importlib.util  # children need none of this
        from pathlib import Path

        hook: Any = next((finder for finder in sys.meta_path if type(finder).__name__ == "AssertionRewritingHook"), None)
        if hook is None or not self.recorder.running:
            return None
        spec: importlib.machinery.ModuleSpec | None = hook.find_spec(name, path, target)
        if spec is None or spec.origin is None or spec.loader is not hook:
            return spec
        relative = self.recorder.tree.source(spec.origin)
        if relative is None:
            self.recorder.outside(spec.origin)
            return spec
        if self.rewrite is None:
            loader: Any = _Whole(self.recorder, relative, hook)
        else:
            loader = _Rewritten(name, spec.origin)
            loader.seatrial_rewrite, loader.seatrial_salt = self.rewrite, self.salt
            names = getattr(hook, "_rewritten_names", None)  # pytest warns of modules that come too late to be rewritten
            if isinstance(names, dict):
                names[name] = Path(spec.origin)
        where = spec.submodule_search_locations
        return importlib.util.spec_from_file_location(name, spec.origin, loader=loader, submodule_search_locations=where)


class _Rewritten(Source):
    seatrial_rewrite: Any = None
    seatrial_salt = ""


class _Whole:
    """pytest's loader, with the import seen."""

    def __init__(self, recorder: TraceRecorder, relative: str, hook: Any) -> None:
        self._recorder, self._relative, self._hook = recorder, relative, hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._hook.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._recorder.begin(self._relative)
        try:
            self._recorder.whole(self._relative)
            self._hook.exec_module(module)
        finally:
            self._recorder.end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hook, name)


def _rewrite(config: pytest.Config) -> tuple[Any, str]:
    """pytest's function on a tree, and what it depends on."""
    try:
        import pytest
        from _pytest.assertion.rewrite import rewrite_asserts

        passes = bool(config.getini("enable_assertion_pass_hook"))
    except (ImportError, ValueError, KeyError):
        return None, ""

    def rewrite(tree: ast.Module, source: bytes, path: str) -> None:
        rewrite_asserts(tree, source, path, config)

    return rewrite, f"pytest {pytest.__version__} {passes}"
