"""Composes a loop's configuration without a GPU and says which overrides it rejects. A script of its own, run by the loop's interpreter.

    python compose_config.py < request.json > answer.json

- A request is `{"config_dir": DIR, "runs": […]}` for a directory that Hydra composes, or `{"checkout": DIR, "runs": […]}` for a NeMo-RL,
  whose own loader (`nemo_rl.utils.config`, alone) composes. A run is `{"config": NAME or FILE, "overrides": […], "keys": […]}`.
- The answer has per run the rejected overrides (each with the reason and the nearest known keys) and the values of the keys; from a
  NeMo-RL also, for each accepted override, the first part of its key that no file has (or null), and the keys that other values refer to.
- Loaders stop at the first override that they reject. Here each one is found: the shortest rejected beginning of the list ends with it;
  without it the search goes on.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NEAR = 3
ABSENT = "(no such key)"
REFERENCE = re.compile(r"\$\{([\w.]+)\}")


class Hydra:
    """Compositions of Hydra, which is initialised with the directory."""

    def __init__(self, config: str) -> None:
        self.config = config

    def compose(self, overrides: list[str]) -> tuple[Any, str]:
        """The configuration, or None and the reason in one line."""
        from hydra import compose
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        try:
            return compose(self.config, overrides=overrides), ""
        except (HydraException, OmegaConfBaseException) as error:
            return None, " ".join(f"{error}".split())

    def plain(self, config: Any) -> Any:
        """The configuration as nested tables."""
        from omegaconf import OmegaConf

        return OmegaConf.to_container(config, resolve=False)

    def value(self, config: Any, key: str) -> Any:
        """A plain value, interpolations resolved; one that cannot be resolved is shown as its error."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            value = OmegaConf.select(config, key, default=ABSENT)
        except OmegaConfBaseException as error:
            return f"({error})".splitlines()[0]
        return OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value

    def more(self, _overrides: list[str]) -> dict[str, Any]:
        """Nothing else is known."""
        return {}


class NemoRl:
    """Compositions of NeMo-RL's own loader; a file is read once."""

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

    def plain(self, config: Any) -> Any:
        """As it is."""
        return config

    def value(self, config: Any, key: str) -> Any:
        """The value at a dotted key."""
        for part in key.split("."):
            if not isinstance(config, dict) or part not in config:
                return ABSENT
            config = config[part]
        return config

    def more(self, overrides: list[str]) -> dict[str, Any]:
        """What the overrides add to the files, and what other values refer to."""
        (base, _), (raw, _) = self.compose([]), self.compose([], resolve=False)
        referred = sorted(set(REFERENCE.findall(json.dumps(raw, default=str))))
        return {"added": {word: _added(base, _key(word)) for word in overrides}, "referred": referred}


def compose_run(composer: Hydra | NemoRl, overrides: list[str], keys: list[str]) -> dict[str, Any]:
    """One run: what is rejected, and the values of the keys in what is left."""
    kept, rejected = list(overrides), []
    config, _ = composer.compose(kept)
    if config is None or isinstance(composer, NemoRl):  # Hydra's defaults may leave a choice to an override
        base, reason = composer.compose([])
        if base is None:
            return {"rejected": [], "error": reason, "added": {}, "referred": [], "values": {}}
    while config is None:
        bad = _first_rejected(composer, kept)
        rejected.append({"override": kept[bad], "reason": composer.compose(kept[: bad + 1])[1]})
        del kept[bad]
        config, _ = composer.compose(kept)
    known = list(_flat("", composer.plain(config)))
    near = [{**entry, "near": difflib.get_close_matches(_key(entry["override"]), known, n=NEAR)} for entry in rejected]
    return {"rejected": near, "error": None, "values": {key: composer.value(config, key) for key in keys}, **composer.more(kept)}


def _first_rejected(composer: Hydra | NemoRl, overrides: list[str]) -> int:
    """Index of the last override of the shortest rejected beginning."""
    low, high = 0, len(overrides)
    while high - low > 1:
        middle = (low + high) // 2
        if composer.compose(overrides[:middle])[0] is None:
            high = middle
        else:
            low = middle
    return high - 1


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _flat(prefix: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), item)
    else:
        yield prefix


def _added(config: Any, key: str) -> str | None:
    """The beginning of a key up to the first part that is not there; None when all are."""
    parts = key.split(".")
    for place, part in enumerate(parts):
        if isinstance(config, list):
            return None
        if not isinstance(config, dict) or part not in config:
            return ".".join(parts[: place + 1])
        config = config[part]
    return None


def main() -> None:
    """Answer the request on standard input."""
    # The directory of a script comes first on the path; the modules beside this one are no packages of the loop.
    here = Path(__file__).absolute().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).absolute() != here]
    request = json.load(sys.stdin)
    with contextlib.ExitStack() as context:
        composers: dict[str, Hydra | NemoRl]
        configs = {run["config"] for run in request["runs"]}
        if "config_dir" in request:
            from hydra import initialize_config_dir

            context.enter_context(initialize_config_dir(request["config_dir"], version_base=None))
            composers = {config: Hydra(config) for config in configs}
        else:
            sys.path.insert(0, request["checkout"])
            os.environ["NO_VCS_VERSION"] = "1"  # nemo_rl would ask git for its commit
            context.enter_context(contextlib.redirect_stdout(io.StringIO()))
            loader = importlib.import_module("nemo_rl.utils.config")
            getattr(loader, "register_omegaconf_resolvers", _register)()
            composers = {config: NemoRl(loader, config) for config in configs}
        answer = [compose_run(composers[run["config"]], run["overrides"], run["keys"]) for run in request["runs"]]
    json.dump(answer, sys.stdout, default=str)


def _register() -> None:
    """Before v0.6 each program registered the one resolver that the files used."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("mul", lambda a, b: a * b)


if __name__ == "__main__":
    main()
