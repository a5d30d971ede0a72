"""Patch third-party modules at import time, without touching a file of theirs.

- `supply(module, name, stand_in)`: inside that one module, `import name` yields `stand_in`. Every other module still finds the package
  absent and takes its own "not installed" branch: a fake `triton` in `sys.modules` would switch on fast paths that cannot run here.
- `after(module, patch)`: call `patch(module)` right after the module body has run;
- `hide(module)`: it is not there.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

Patch = Callable[[ModuleType], None]

Condition = Callable[[str], bool]

_stand_ins: dict[str, dict[str, tuple[ModuleType, Condition | None]]] = {}
_patches: dict[str, list[Patch]] = {}
_hidden: set[str] = set()


def supply(module: str, name: str, stand_in: ModuleType, when: Condition | None = None) -> None:
    """Make `import name` inside `module` (and nowhere else) yield `stand_in`, if `when` holds for the source of the module."""
    _stand_ins.setdefault(module, {})[name] = (stand_in, when)
    _install()


def after(module: str, patch: Patch) -> None:
    """Call `patch` with the module once it has been executed (at once if it is already there)."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        _apply(patch, loaded)
        return
    _patches.setdefault(module, []).append(patch)
    _install()


def hide(module: str) -> None:
    _hidden.add(module)
    _install()


def _apply(patch: Patch, module: ModuleType) -> None:
    """Not an ImportError: whoever imports may take that for a package that is not installed, and go on without it."""
    try:
        patch(module)
    except AttributeError as error:
        raise RuntimeError(f"seatrial: no CPU shim fits this {module.__name__} ({error}): run this version on GPUs") from error


class _PatchingLoader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        stand_ins = {
            root: stand_in for root, (stand_in, when) in _stand_ins.get(name, {}).items() if when is None or when(self._source(name))
        }
        if stand_ins:
            # The import statement asks the builtins of the module it stands in for __import__: give this module its own.
            module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _importer(stand_ins)}
        self._inner.exec_module(module)
        for patch in _patches.get(name, []):
            _apply(patch, module)

    def _source(self, name: str) -> str:
        found = getattr(self._inner, "get_source", lambda _name: None)(name)
        return found or ""

    def __getattr__(self, name: str) -> Any:
        # get_source, get_data, is_package: tracebacks, inspect and pickle ask for them.
        return getattr(self._inner, name)


def _importer(stand_ins: Mapping[str, ModuleType]) -> Callable[..., ModuleType]:
    def import_(
        name: str,
        globals_: Mapping[str, object] | None = None,
        locals_: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        root = name.partition(".")[0]
        if level == 0 and root in stand_ins:
            module = stand_ins[root]
            if fromlist:
                for part in name.split(".")[1:]:
                    module = getattr(module, part)
            return module
        return builtins.__import__(name, globals_, locals_, fromlist or (), level)

    return import_


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in _hidden:
            raise ModuleNotFoundError(f"No module named {fullname!r}: it is hidden", name=fullname)
        if fullname not in _stand_ins and fullname not in _patches:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


_finder = _Finder()


def _install() -> None:
    """Right in front of what searches directories: the import witness, which comes first, then sees these modules, too."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(sys.meta_path.index(importlib.machinery.PathFinder), _finder)
