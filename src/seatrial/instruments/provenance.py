"""Where a process really imports its packages from. Runs inside a loop's interpreter.

- Standard library only, Python 3.9 or newer, no other module of Seatrial: also a script (`python provenance.py --found torch`).
- A row has the fields of an import proof. `imported` really imports; `found` runs no code of the package or of its parents.
- A package under test is right only at its own place in the checkout: not in an environment that happens to lie inside it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

Row = dict[str, Any]
CUSTOMIZE = ("sitecustomize", "usercustomize")
"""Modules that the interpreter imports as it starts: a checkout that has one is loaded by every process, and used by none."""


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """For the start of a process, which is mostly imports: the garbage collector rests, and never walks what they made.

    A loop's packages make a million objects that stay: looking through them again and again takes a sixth of a short run's time.
    What is made afterwards is collected as ever.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if enabled:
            gc.enable()


def imported(packages: Iterable[str], process: str, expected: Mapping[str, str] | None = None) -> list[Row]:
    """Import each package and say from which file; one that cannot be imported has none."""
    rows = []
    for package in packages:
        root = (expected or {}).get(package)
        try:
            module = importlib.import_module(package)
        except Exception:  # noqa: BLE001 - a package may raise anything while it is imported; the log shows what
            traceback.print_exc()
            rows.append(_row(process, package, None, None, root, "imported"))
            continue
        rows.append(_row(process, package, _file_of(module), _version(module, package, root), root, "imported"))
    return rows


def found(packages: Iterable[str], process: str) -> list[Row]:
    return [_row(process, package, _locate(package), None, None, "found") for package in packages]


def report(path: str, process: str, packages: Iterable[str], expected: Mapping[str, str]) -> list[Row]:
    """Import the packages and append their rows to the file at `path`, in one write; returns the rows.

    `expected` names the checkout of each package under test.
    """
    return _append(path, imported(packages, process, expected))


def locate(path: str, process: str, packages: Iterable[str], expected: Mapping[str, str]) -> list[Row]:
    """Like `report`, for packages that this process does not import itself: where they would come from."""
    return _append(path, [_row(process, name, _locate(name), None, expected.get(name), "found") for name in packages])


def in_startup(frame: FrameType | None) -> bool:
    """Whether the interpreter's own start (`sitecustomize`, `usercustomize`, a `.pth` file) stands below this frame."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "site":
            return True
        frame = frame.f_back
    return False


_STARTUP: set[str] = set()  # files that the interpreter loaded itself before the loop began


def customized() -> bool:
    """Whether the interpreter ran a module of its start that is neither Python's, nor the environment's, nor ours: a checkout's."""
    own = tuple(str(Path(place).resolve()) + os.sep for place in (sys.prefix, sys.base_prefix, Path(__file__).parents[1]))
    files = [getattr(sys.modules.get(name), "__file__", None) for name in CUSTOMIZE]
    return any(isinstance(file, str) and not str(Path(file).resolve()).startswith((*own, "/usr/", "/etc/")) for file in files)


def begin() -> None:
    """Nothing of the loop is loaded yet: what is here was loaded by the interpreter, and is not counted as loaded by the loop."""
    _STARTUP.update(_files(sys.modules))


def started_with(name: str, file: str | None = None) -> bool:
    """Whether the interpreter loads this module itself as it starts, not the loop."""
    return name in CUSTOMIZE or (file is not None and str(Path(file).resolve()) in _STARTUP)


def _files(modules: Mapping[str, Any]) -> list[str]:
    """The files of modules, except those that the interpreter loads itself."""
    named = [(name, getattr(module, "__file__", None)) for name, module in list(modules.items())]
    return [str(Path(file).resolve()) for name, file in named if isinstance(file, str) and file and not started_with(name, file)]


def loaded(path: str, process: str, roots: Iterable[str]) -> None:
    """Append which files below each root this process has loaded so far; call it at the end."""
    files = [Path(file) for file in _files(sys.modules)]
    rows = []
    for root in roots:
        base = Path(root).resolve()
        below = sorted({str(file.relative_to(base)) for file in files if base in file.parents})
        rows.append({"process": process, "root": root, "files": below})
    _append(path, rows)


def _append(path: str, rows: list[Row]) -> list[Row]:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode("utf-8")
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        written = os.write(handle, data)
    finally:
        os.close(handle)
    if written != len(data):
        raise OSError(f"{path}: wrote {written} of {len(data)} bytes")
    return rows


def verify(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is wrong with the rows, one sentence each: packages under test that come from elsewhere or not at all."""
    problems = []
    for row in rows:
        where, root = row["file"], row["expected"]
        if root is None:
            continue
        if where is None:
            problems.append(f"{row['process']}: could not import {row['package']}, expected from {root}")
        elif not comes_from(where, row["package"], root):
            problems.append(f"{row['process']}: imported {row['package']} from {where}, expected from {root}")
    return problems


def comes_from(file: str, package: str, root: str) -> bool:
    """Whether `file` is `package` at its place in the checkout at `root` (or its src), links resolved."""
    real = str(Path(file).resolve())
    for base in (Path(root), Path(root, "src")):
        place = str(base.joinpath(*package.split(".")).resolve())
        if real == place or real.startswith((place + os.sep, place + ".")):
            return True
    return False


def _row(process: str, package: str, file: str | None, version: str | None, expected: str | None, method: str) -> Row:
    ok = file is not None and (expected is None or comes_from(file, package, expected))
    return {"process": process, "package": package, "file": file, "version": version, "expected": expected, "ok": ok, "method": method}


def _file_of(module: ModuleType) -> str | None:
    """The file of a module; for a namespace package the first directory, where its parts are looked up first."""
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    return str(Path(file).absolute()) if file else None


def _version(module: ModuleType, package: str, expected: str | None) -> str | None:
    """The version that the module states; installed metadata only for what is not under test, since it describes another copy."""
    stated = getattr(module, "__version__", None)
    if isinstance(stated, str):
        return stated
    if expected is not None:
        return None
    import importlib.metadata  # 50 ms, needed only here

    try:
        return importlib.metadata.version(package.replace(".", "-"))
    except importlib.metadata.PackageNotFoundError:
        return None


def _locate(package: str) -> str | None:
    """The file that an import of `package` would load; parents are searched, not imported."""
    directories: list[str] | None = None
    stand_ins: list[str] = []
    name = ""
    try:
        for part in package.split("."):
            name = f"{name}.{part}" if name else part
            spec = _spec(name, directories)
            if spec is None:
                return None
            if name == package and spec.has_location:
                return str(Path(spec.origin).absolute())
            directories = list(spec.submodule_search_locations or ())
            if not directories:
                return None
            if name not in sys.modules:
                # The finders ask an imported parent where it is; an empty module answers without running its code.
                sys.modules[name] = ModuleType(name)
                sys.modules[name].__path__ = directories
                stand_ins.append(name)
    finally:
        for name in stand_ins:
            del sys.modules[name]
    return str(Path(directories[0]).absolute()) if directories else None


def _spec(name: str, path: list[str] | None) -> Any:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, path) if find else None
        if spec is not None:
            return spec
    return None


def main() -> int:
    """`--found PACKAGE…`: print the rows as JSON."""
    parser = argparse.ArgumentParser(description="Show from which files packages would be imported here.")
    parser.add_argument("--found", nargs="+", required=True, metavar="PACKAGE", help="packages to locate without importing them")
    arguments = parser.parse_args()
    here = Path(__file__).absolute().parent
    # The directory of a script comes first on the path; the probes in it are no packages of the loop.
    sys.path[:] = [entry for entry in sys.path if Path(entry).absolute() != here]
    print(json.dumps(found(arguments.found, "driver")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
