"""Modules whose asserts pytest rewrites: rewritten as ever, and instrumented.

- The first finder asks pytest's own hook. What it claims below the root is loaded by us with pytest's `rewrite_asserts` applied; where
  that function is not what we know, pytest loads the module itself and the file counts as whole.
- Only in the pytest process.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pytest_seatrial.select.trace.trace_recorder import TraceRecorder

if TYPE_CHECKING:
    import ast

    import pytest


class Rewriting:
    """The first finder of the pytest process."""

    def __init__(self, recorder: TraceRecorder, config: pytest.Config) -> None:
        self.recorder = recorder
        self.config = config
        self.rewrite, self.salt = _rewrite(config)

    def install(self) -> None:
        """Go first; `recorder.stop` undoes it."""
        sys.meta_path.insert(0, self)
        self.recorder.undo.append(lambda: sys.meta_path.remove(self) if self in sys.meta_path else None)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """pytest's answer, with our loader where the file is the project's."""
        hook: Any = next((finder for finder in sys.meta_path if type(finder).__name__ == "AssertionRewritingHook"), None)
        if hook is None or not self.recorder.running:
            return None
        spec: ModuleSpec | None = hook.find_spec(name, path, target)
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


class _Rewritten(SourceFileLoader):
    """`import_loader.Imports` sees the two attributes."""

    seatrial_rewrite: Any = None
    seatrial_salt = ""


class _Whole:
    """pytest's loader, with the import seen."""

    def __init__(self, recorder: TraceRecorder, relative: str, hook: Any) -> None:
        self._recorder, self._relative, self._hook = recorder, relative, hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The default."""
        made: ModuleType | None = self._hook.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """As pytest does it."""
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
