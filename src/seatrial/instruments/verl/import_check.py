"""Import packages once, with what makes them run on a CPU, and say which module is missing.

Called as `import_check SHIM PACKAGE...`, in the loop's interpreter with the checkouts first on its path. It prints a line with MARK
and a JSON object: empty when all could be imported; otherwise `package`, `missing` (a module's name), `said` and `core`, the version
of the installed Megatron-Core. Whatever else is raised is left to the caller, as the traceback that it is.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys

MARK = "seatrial imports: "


def check(shim: str, packages: list[str]) -> dict[str, str]:
    """The first package that needs a module which is not there, or nothing."""
    importlib.import_module(f"seatrial.instruments.verl.{shim}")
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            return {"package": package, "missing": error.name or "", "said": str(error), "core": _core()}
    return {}


def _core() -> str:
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    print("\n" + MARK + json.dumps(check(sys.argv[1], sys.argv[2:])))
