"""What Gym's programs are told: their words, and their environment.

- The API key stands in the environment only. Gym writes its whole configuration onto the command lines of its servers, which
  everybody on the node can read; so what it is told is a reference to a variable, which each server resolves for itself.
- Arguments of the campaign come before ours, unless they are refused (see `install`).
- Ray and every server listen on loopback. What Gym keeps for later runs (caches of uv and Hugging Face) stays where the user has it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.rollouts.campaign import Gym
from seatrial.rollouts.gym.install import Installation, config_paths, key_of
from seatrial.rollouts.gym.ports import Block

KEY = "SEATRIAL_POLICY_API_KEY"
LOOPBACK = "127.0.0.1"
_NOT_PASSED_ON = ("RAY_ADDRESS", "NEMO_GYM_CONFIG_DICT", "NEMO_GYM_CONFIG_PATH", "VIRTUAL_ENV", "PYTHONHOME")
"""They would tie an instance to another one, or to Seatrial's own interpreter."""
_NO_KEY = "EMPTY"
"""Servers that need no key are sent one all the same; this one is usual."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The policy as Gym's model server asks it."""

    urls: tuple[str, ...]
    model: str
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Private:
    """The directory of one instance, for its owner only, gone at its end."""

    root: Path

    @property
    def work(self) -> Path:
        """Where Gym runs: it writes to its working directory."""
        return self.root / "w"

    @property
    def logs(self) -> Path:
        """A log per server, as Gym writes it where servers share an environment; they may hold secrets."""
        return self.root / "l"

    @property
    def ray(self) -> Path:
        """Ray's files; sockets bear no long paths."""
        return self.root / "r"

    @property
    def venvs(self) -> Path:
        """Environments of the servers."""
        return self.root / "v"


def start_words(gym: Gym, installation: Installation, ports: Block, policy: Asked, private: Private) -> tuple[str, ...]:
    """The command that starts the servers of one instance."""
    url = quoted(policy.urls[0]) if len(policy.urls) == 1 else f"[{','.join(map(quoted, policy.urls))}]"
    ours = [
        *_head(ports.head),
        f"+port_range_low={ports.low}",
        f"+port_range_high={ports.high}",
        f"+default_host={LOOPBACK}",
        f"+policy_base_url={url}",
        f"+policy_api_key=${{oc.env:{KEY}}}",
        f"+policy_model_name={quoted(policy.model)}",
        f"+uv_venv_dir={quoted(str(private.venvs))}",
    ]
    if gym.shared_environments:
        ours += ["+skip_venv_if_present=true", f"+nemo_gym_log_dir={quoted(str(private.logs))}"]
    else:
        # No log directory: with one, Gym 0.4.0 runs the installation under pipefail, where a server without requirements of its own
        # fails without a word (`grep -v` finds nothing).
        ours += [f"+uv_cache_dir={quoted(_uv_cache())}"]
    paths = f"+config_paths=[{','.join(config_paths(gym))}]"
    return (*installation.command(installation.generation.start), paths, *_ours(ours, gym.run_arguments), *gym.run_arguments)


def collect_words(gym: Gym, installation: Installation, head: int, output: Path, concurrency: int) -> tuple[str, ...]:
    """The command of Gym's collector against servers that run, for inputs that are materialized already: their file is not even opened."""
    ours = [
        *_head(head),
        "+disable_aggregation=true",
        "+upload_rollouts_to_wandb=false",
        f"+num_samples_in_parallel={concurrency}",
        f"+input_jsonl_fpath={quoted(str(output))}",
        f"+output_jsonl_fpath={quoted(str(output))}",
    ]
    return (*installation.command(installation.generation.collect), *_ours(ours, gym.collect_arguments), *gym.collect_arguments)


def environment(
    given: Mapping[str, str], installation: Installation, policy: Asked, private: Private, sandbox: tuple[str, int] | None
) -> dict[str, str]:
    """The environment of Gym's programs."""
    found = {key: value for key, value in given.items() if key not in _NOT_PASSED_ON}
    caches = found.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    # uv looks for the interpreter that Gym runs on along PATH; it must not download another one.
    path = [str(installation.python.parent), str(installation.base / "bin"), found.get("PATH", os.defpath)]
    # Gym asks its own servers through a library that heeds proxies.
    no_proxy = ",".join(filter(None, (found.get("no_proxy") or found.get("NO_PROXY"), LOOPBACK, "localhost")))
    found |= {
        "PATH": os.pathsep.join(path),
        "HF_HOME": caches,
        "HF_DATASETS_CACHE": found.get("HF_DATASETS_CACHE") or str(Path(caches) / "datasets"),
        "UV_PYTHON_DOWNLOADS": "never",
        "RAY_TMPDIR": str(private.ray),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray listens on loopback where it forms no clusters; by this name that can be said on Linux, too.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "PYTHONUNBUFFERED": "1",
        "no_proxy": no_proxy,
        "NO_PROXY": no_proxy,
        KEY: policy.key or _NO_KEY,
    }
    if sandbox:
        found |= {"NEMO_SKILLS_SANDBOX_HOST": sandbox[0], "NEMO_SKILLS_SANDBOX_PORT": str(sandbox[1])}
    return found


def quoted(value: str) -> str:
    """A value as Hydra's grammar takes any text."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _head(port: int) -> list[str]:
    return [f"+head_server.host={LOOPBACK}", f"+head_server.port={port}"]


def _ours(ours: Sequence[str], given: Sequence[str]) -> list[str]:
    """Without those that the campaign says itself: Hydra takes no key twice."""
    said = {key_of(argument) for argument in given} | {"num_samples_in_parallel" for argument in given if key_of(argument) == "concurrency"}
    return [argument for argument in ours if key_of(argument) not in said]


def _uv_cache() -> str:
    return os.environ.get("UV_CACHE_DIR") or str(Path.home() / ".cache" / "uv")
