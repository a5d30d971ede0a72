"""What a test or a group needs of the machine, and what of it is not there.

- Variables, modules, programs, files and GPUs; a variable that is set but empty is absent. Values are never shown.
- A module is looked up, and nothing is imported: neither it nor the packages around it. One that breaks on import is there, and
  the test that imports it fails.
- GPUs are those that CUDA would show to this process: counted by NVML, then those of CUDA_VISIBLE_DEVICES.
- Wrong arguments are a `ValueError` that names the key; who asked is the caller's to say.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

LISTS = ("env", "modules", "programs", "files")
KEYS = (*LISTS, "gpus")


class Needs(NamedTuple):
    """What must be there."""

    env: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    gpus: int = 0

    def absent(self, folder: Path) -> list[str]:
        """What is not here, in words; relative files are looked for in `folder`."""
        found = [f"variable {name}" for name in self.env if not os.environ.get(name)]
        found += [f"module {name}{why}" for name in self.modules if (why := _no_module(name)) is not None]
        found += [f"program {name}" for name in self.programs if shutil.which(name) is None]
        found += [f"file {name}" for name in self.files if not (folder / Path(name).expanduser()).exists()]
        return found + (self._too_few() if self.gpus else [])

    def _too_few(self) -> list[str]:
        here, why = gpus_here()
        return [] if here >= self.gpus else [f"{self.gpus} GPU{'' if self.gpus == 1 else 's'} ({here} here{why})"]


def parse(values: Mapping[str, object]) -> Needs:
    """Needs from a table of the configuration or the arguments of a marker."""
    lists: dict[str, tuple[str, ...]] = {}
    for key, value in values.items():
        if key not in KEYS:
            raise ValueError(f"unknown key {key!r}; {nearest(key, KEYS)}")
        if key != "gpus":
            lists[key] = _texts(key, value)
    return Needs(**lists, gpus=gpu_number(values["gpus"]) if "gpus" in values else 0)


def gpu_number(value: object) -> int:
    """A number of GPUs; a switch is none, though Python counts it as a number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"gpus: must be a whole number of at least 1 (got {value!r})")
    return value


def nearest(key: str, known: Sequence[str]) -> str:
    """The known key that was probably meant, else all of them."""
    import difflib  # slow, and for mistakes only

    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def _texts(key: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ValueError(f'{key}: must be a list of texts, such as ["one"] (got {value!r})')
    for item in value:
        if not isinstance(item, str) or not item.strip():
            raise ValueError(f"{key}: must be a list of texts (got {item!r} in it)")
    return tuple(value)


def _no_module(name: str) -> str | None:
    """None when the module is there, else why not, where there is more to say than that."""
    if sys.modules.get(name) is not None:
        return None  # also one in no package, such as os.path
    parts = name.split(".")
    places: list[str] | None = None
    try:
        for length in range(1, len(parts) + 1):
            if length > 1 and places is None:
                return f" ({'.'.join(parts[: length - 1])} is no package)"
            found, places = _look(".".join(parts[:length]), places)
            if not found:
                return ""
    except Exception as error:  # noqa: BLE001 - finders are somebody's code: whatever they raise, the module is not usable
        return f" ({type(error).__name__}: {error})"
    return None


def _look(name: str, places: list[str] | None) -> tuple[bool, list[str] | None]:
    """Whether a module is in these places (None: on the import path), and the places of what is in it; None for no package."""
    if name in sys.modules:
        loaded = sys.modules[name]
        inner = getattr(loaded, "__path__", None)
        return loaded is not None, None if inner is None else list(inner)
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, places)
        except KeyError:  # a namespace in a namespace asks for the outer one, which is not imported
            inside = [str(whole) for place in places or () if (whole := Path(place) / name.rpartition(".")[2]).is_dir()]
            return bool(inside), inside
        if spec is not None:
            inner = spec.submodule_search_locations
            return True, None if inner is None else list(inner)
    return False, None


def gpus_here() -> tuple[int, str]:
    """How many GPUs CUDA would show to this process; and why none can be counted, where the driver does not answer."""
    from seatrial.regress.unit import gpus  # ctypes is slow to import

    try:
        present = len(gpus.names_here())
    except gpus.GpuError as error:
        return 0, f": {error}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return present if visible is None else _visible(visible, present), ""


def _visible(text: str, present: int) -> int:
    """How many of the listed devices count: CUDA stops at the first that does not exist; a device listed twice hides all."""
    seen: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        is_index = entry.isdecimal() and int(entry) < present
        is_name = present > 0 and entry.startswith(("GPU-", "MIG-"))
        if not (is_index or is_name):
            break
        if entry in seen:
            return 0
        seen.append(entry)
    return len(seen)
