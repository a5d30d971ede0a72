"""Where one process of a loop imports its packages from, as it imports them. A driver of the loop starts it.

It reads SEATRIAL_IMPORTS (the level directory, where imports.jsonl and loaded.jsonl are appended to), SEATRIAL_UNDER_TEST
(`package=root` entries, joined like a search path) and SEATRIAL_WATCH (further packages worth recording, separated by commas).

- Packages that are imported already are reported as `imported`, the others as `found`, and as `imported` once something imports them.
- Files of the checkouts are recorded as they are loaded: Ray ends its workers without running what they registered for their end.
- A package under test that comes from elsewhere ends the process. One that cannot be found at all does, too, unless the
  processes of the loop have environments of their own: then the judge wants it from another.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from seatrial.instruments import executed, facts, provenance

WRONG_IMPORT = 90  # exit code of a process that found a package under test in another place than its checkout


class Witness:
    """The import proofs of this process. As the first finder of imports it sees each one, and leaves it to the others."""

    def __init__(self, directory: str, process: str, expected: Mapping[str, str], watch: Sequence[str], may_lack: bool = False) -> None:
        self.imports, self.files = str(Path(directory, "imports.jsonl")), str(Path(directory, "loaded.jsonl"))
        self.process, self.expected, self.may_lack = process, dict(expected), may_lack
        self.watched = list(dict.fromkeys([*expected, *watch]))
        self.roots = {root: Path(root).resolve() for root in sorted(set(expected.values()))}

    def start(self, main: str | None = None) -> None:
        """Report what is known now, and watch from here on. The file `main` runs without being imported."""
        here = [name for name in self.watched if name in sys.modules]
        rows = provenance.report(self.imports, self.process, here, self.expected)
        rows += provenance.locate(self.imports, self.process, [name for name in self.watched if name not in here], self.expected)
        self._end_if_wrong(rows)
        provenance.loaded(self.files, self.process, self.roots)
        self._loaded(main)
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that the other finders give, with a loader that tells what it does."""
        if name not in self.watched and not any(name.startswith(package + ".") for package in self.expected):
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                self._tell(name, spec)
                return spec
        return None

    def _tell(self, name: str, spec: ModuleSpec) -> None:
        """Let the loader record that the module is loaded; and of a watched package, that its import came to its end.

        Only for the latter a frame of ours is on the stack while the module runs: tracebacks shall show the change.
        """
        loader: Any = spec.loader
        if not hasattr(loader, "exec_module") or not hasattr(loader, "__dict__"):
            return  # built into the interpreter: no file of a checkout
        create, execute = loader.create_module, loader.exec_module

        def create_module(spec: ModuleSpec) -> ModuleType | None:
            self._loaded(spec.origin if spec.has_location else None)
            made: ModuleType | None = create(spec)
            return made

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._end_if_wrong(provenance.report(self.imports, self.process, [name], self.expected))

        loader.create_module = create_module
        if name in self.watched:
            loader.exec_module = exec_module

    def _loaded(self, file: str | None) -> None:
        if provenance.in_startup(sys._getframe()):
            return  # by the interpreter itself
        place = Path(file).resolve() if file else None
        for root, base in self.roots.items():
            if place is not None and base in place.parents:
                facts.append(self.files, {"process": self.process, "root": root, "files": [str(place.relative_to(base))]})

    def _end_if_wrong(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if wrong_imports(self.process, [row for row in rows if row["file"] or not self.may_lack]):
            sys.stderr.flush()
            os._exit(WRONG_IMPORT)  # an exception would be wrapped by Ray, retried, or swallowed


def wrong_imports(process: str, rows: Iterable[Mapping[str, Any]]) -> bool:
    """Say which packages under test come from elsewhere; whether any does."""
    problems = provenance.verify(rows)
    for problem in problems:
        print(f"seatrial: wrong import in {process}: {problem}", flush=True)
    return bool(problems)


class ImportProofs:
    """For a process that knows what it imports: it proves that before it does anything else, and the rest at its end.

    A package under test that the loop does not import itself is located, never imported just to be reported.
    """

    def __init__(self, directory: Path, process: str, under_test: Sequence[str]) -> None:
        self.path, self.loaded, self.process = str(directory / "imports.jsonl"), str(directory / "loaded.jsonl"), process
        self.expected = dict(item.split("=", 1) for item in under_test)
        if executed.RECORDER is None:  # else it began as the interpreter did
            provenance.begin()
        executed.start(str(directory), process, inherit=True)

    def prove(self, packages: Sequence[str]) -> None:
        """Import the loop's own packages and locate the others; end the process when one under test is elsewhere."""
        with provenance.uncollected():
            # A package under test that breaks on import must show its traceback: that is the change, not its surroundings.
            for name in self._told(name for name in self.expected if name in packages):
                if importlib.util.find_spec(name) is not None:
                    importlib.import_module(name)
            rows = provenance.report(self.path, self.process, self._told(packages), self.expected)
        rows += provenance.locate(self.path, self.process, self._others(packages), self.expected)
        if wrong_imports(self.process, rows):
            sys.exit(WRONG_IMPORT)
        print(f"seatrial: imports proven in {self.process}", flush=True)

    def close(self, packages: Sequence[str]) -> None:
        since = [name for name in self._others(packages) if name in sys.modules]
        provenance.report(self.path, self.process, since, self.expected)
        provenance.loaded(self.loaded, self.process, sorted(set(self.expected.values())))
        executed.flush()

    def _told(self, packages: Iterable[str]) -> Iterator[str]:
        """Each package, after a line that says so: on a crowded machine imports take long, and silence is what a stall is known by."""
        for name in packages:
            print(f"seatrial: importing {name} in {self.process}", flush=True)
            yield name

    def _others(self, packages: Sequence[str]) -> list[str]:
        return [name for name in self.expected if name not in packages]


def under_test(text: str) -> dict[str, str]:
    """`package=root` entries, joined like a search path."""
    return dict(entry.split("=", 1) for entry in text.split(os.pathsep) if entry)


def watch_this_process(
    environment: Mapping[str, str], process: str, main: str | None = None, may_lack: bool = False, fresh: bool = False
) -> Witness:
    """Start the witness of this process, which is of the kind `process`; `fresh`: before anything of the loop was loaded."""
    directory = environment.get("SEATRIAL_IMPORTS")
    if not directory:
        raise ImportError("SEATRIAL_IMPORTS is not set here, although the import witness is asked for: set both, or neither")
    if fresh or provenance.customized():
        provenance.begin()
    executed.start(directory, process, fresh)
    watch = [name for name in environment.get("SEATRIAL_WATCH", "").split(",") if name]
    witness = Witness(directory, process, under_test(environment.get("SEATRIAL_UNDER_TEST", "")), watch, may_lack)
    witness.start(main)
    return witness
