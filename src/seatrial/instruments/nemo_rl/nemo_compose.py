"""Compose NeMo-RL's configuration with its own loader, without a GPU. Runs in the loop's interpreter.

    python nemo_compose.py < request.json > answer.json

- A request is `{"checkout": DIR, "runs": [{"config": FILE, "overrides": [...], "keys": [...]}, ...]}`; the answer has per run
  the rejected overrides (each with the reason and the nearest known keys), for each accepted one the first part of its
  key that no file has (or null), the keys that other values refer to, and the values of the keys.
- The loader stops at the first override that it rejects. Here each one is found: the shortest rejected beginning of the
  list ends with it; without it the search goes on.
- Only `nemo_rl.utils.config` is imported; it needs omegaconf and hydra-core.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

NEAR = 3
ABSENT = "(no such key)"
REFERENCE = re.compile(r"\$\{([\w.]+)\}")


class Composer:
    """One configuration file, read once."""

    def __init__(self, loader: Any, config: str) -> None:
        self.loader, self.config = loader, config
        self.loaded: Any = None

    def compose(self, overrides: list[str], resolve: bool = True) -> tuple[Any, str]:
        """The configuration as plain values, or None and the reason in one line."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            if self.loaded is None:
                self.loaded = self.loader.load_config(self.config)
            made = copy.deepcopy(self.loaded)
            if overrides:
                made = self.loader.parse_hydra_overrides(made, overrides)
            return OmegaConf.to_container(made, resolve=resolve), ""
        except (self.loader.OverridesError, OmegaConfBaseException, OSError, AssertionError) as error:
            return None, " ".join(f"{error}".split()) or type(error).__name__

    def first_rejected(self, overrides: list[str]) -> int:
        """Index of the last override of the shortest rejected beginning."""
        low, high = 0, len(overrides)
        while high - low > 1:
            middle = (low + high) // 2
            if self.compose(overrides[:middle])[0] is None:
                high = middle
            else:
                low = middle
        return high - 1


def compose_run(composer: Composer, run: dict[str, Any]) -> dict[str, Any]:
    """One run: what is rejected, what is added to the files, and the values of the keys."""
    base, reason = composer.compose([])
    if base is None:
        return {"rejected": [], "error": reason, "added": {}, "referred": [], "values": {}}
    kept = list(run["overrides"])
    rejected = []
    config, reason = composer.compose(kept)
    while config is None:
        bad = composer.first_rejected(kept)
        rejected.append({"override": kept[bad], "reason": composer.compose(kept[: bad + 1])[1]})
        del kept[bad]
        config, reason = composer.compose(kept)
    known = list(_flat("", base))
    for entry in rejected:
        entry["near"] = difflib.get_close_matches(_key(entry["override"]), known, n=NEAR)
    raw, _ = composer.compose([], resolve=False)
    return {
        "rejected": rejected,
        "error": None,
        "added": {word: _added(base, _key(word)) for word in kept},
        "referred": sorted(set(REFERENCE.findall(json.dumps(raw, default=str)))),
        "values": {key: _value(config, key) for key in run["keys"]},
    }


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _flat(prefix: str, value: Any) -> Any:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), item)
    else:
        yield prefix


def _added(config: Any, key: str) -> Any:
    """The beginning of a key up to the first part that is not there; None when all are."""
    parts = key.split(".")
    for place, part in enumerate(parts):
        if not isinstance(config, dict):
            return None if isinstance(config, list) else ".".join(parts[: place + 1])
        if part not in config:
            return ".".join(parts[: place + 1])
        config = config[part]
    return None


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return ABSENT
        config = config[part]
    return config


def main() -> int:
    """Answer the request on standard input."""
    # The directory of a script comes first on the path; the modules beside this one are no packages of the loop.
    here = Path(__file__).absolute().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).absolute() != here]
    request = json.load(sys.stdin)
    sys.path.insert(0, request["checkout"])
    os.environ["NO_VCS_VERSION"] = "1"  # nemo_rl would ask git for its commit
    with contextlib.redirect_stdout(io.StringIO()):
        loader = importlib.import_module("nemo_rl.utils.config")
        register = getattr(loader, "register_omegaconf_resolvers", _register)
        register()
        composers = {run["config"]: Composer(loader, run["config"]) for run in request["runs"]}
        answer = [compose_run(composers[run["config"]], run) for run in request["runs"]]
    json.dump(answer, sys.stdout, default=str)
    return 0


def _register() -> None:
    """Before v0.6 each program registered the one resolver that the files used."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("mul", lambda a, b: a * b)


if __name__ == "__main__":
    sys.exit(main())
