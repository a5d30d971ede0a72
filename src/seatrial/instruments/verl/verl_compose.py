"""Compose verl's configuration with Hydra, without a GPU and without importing verl. Runs in the loop's interpreter.

    python verl_compose.py < request.json > answer.json

- A request is `{"config_dir": DIR, "runs": [{"config_name": NAME, "overrides": [...], "keys": [...]}, ...]}`; the answer has
  per run the rejected overrides (each with the reason and the nearest known keys) and the values of the keys.
- Hydra stops at the first override that it rejects. Here each one is found: the shortest rejected beginning of the list
  ends with it; without it the search goes on.
"""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path
from typing import Any

NEAR = 3


def compose_run(config_name: str, overrides: list[str], keys: list[str]) -> dict[str, Any]:
    """One configuration: what is rejected, and the values of the keys in what is left."""
    from omegaconf import OmegaConf

    kept = list(overrides)
    rejected: list[dict[str, Any]] = []
    config, reason = _compose(config_name, kept)
    while config is None:
        bad = _first_rejected(config_name, kept)
        if bad is None:
            return {"rejected": [], "error": reason, "values": {}}
        rejected.append({"override": kept[bad], "reason": _compose(config_name, kept[: bad + 1])[1]})
        del kept[bad]
        config, reason = _compose(config_name, kept)
    known = list(_flat("", OmegaConf.to_container(config, resolve=False)))
    for entry in rejected:
        key = entry["override"].lstrip("+~").partition("=")[0]
        entry["near"] = difflib.get_close_matches(key, known, n=NEAR)
    return {"rejected": rejected, "error": None, "values": {key: _value(config, key) for key in keys}}


def _compose(config_name: str, overrides: list[str]) -> tuple[Any, str]:
    """The configuration, or None and the reason in one line."""
    from hydra import compose
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        return compose(config_name, overrides=overrides), ""
    except (HydraException, OmegaConfBaseException) as error:
        return None, " ".join(f"{error}".split())


def _first_rejected(config_name: str, overrides: list[str]) -> int | None:
    """Index of the last override of the shortest rejected beginning; None when the configuration alone is broken."""
    if _compose(config_name, [])[0] is None:
        return None
    low, high = 0, len(overrides)
    while high - low > 1:
        middle = (low + high) // 2
        if _compose(config_name, overrides[:middle])[0] is None:
            high = middle
        else:
            low = middle
    return high - 1


def _flat(prefix: str, value: Any) -> Any:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), item)
    else:
        yield prefix


def _value(config: Any, key: str) -> Any:
    """A plain value, interpolations resolved; one that cannot be resolved is shown as its error."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        value = OmegaConf.select(config, key, default="(no such key)")
    except OmegaConfBaseException as error:
        return f"({error})".splitlines()[0]
    return OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value


def main() -> int:
    """Answer the request on standard input."""
    # The directory of a script comes first on the path; the modules beside this one are no packages of the loop.
    here = Path(__file__).absolute().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).absolute() != here]
    from hydra import initialize_config_dir

    request = json.load(sys.stdin)
    with initialize_config_dir(request["config_dir"], version_base=None):
        answer = [compose_run(run["config_name"], run["overrides"], run["keys"]) for run in request["runs"]]
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
