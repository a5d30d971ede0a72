"""The examples of docs/rollouts.md: campaign files that load, say what the pull request's calls say, and are quoted as they are."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from seatrial.rollouts.campaign import Campaign, Collector, Dataset, Failures, Gym, Policy, Requests, SandboxLimits, Verify, Work
from seatrial.runtime.servers import components

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "rollouts"
DOCS = ROOT / "docs" / "rollouts.md"
MODEL = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
EXAMPLES = ("aime24", "lcb")


def load(name: str, **changed: Any) -> Campaign:
    return Campaign.model_validate({**tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8")), **changed})


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_asks_what_the_pull_request_asked(name: str) -> None:
    campaign = load(name)
    assert campaign.work.labels() == (0, 1, 2, 3)
    assert campaign.sampling == {"temperature": 1.0, "top_p": 1.0, "max_output_tokens": 65536}
    assert campaign.requests.concurrency == 64
    assert campaign.skills_layout
    assert campaign.identity()["policy"]["model"] == MODEL
    server = campaign.policy.server
    assert server is not None
    (service,) = components(server, gpus_per_node=8)
    assert (service.nodes, service.gpus) == (1, 8)
    command = " ".join(service.command)
    assert command.startswith(f"vllm serve {MODEL} --host {{bind}} --port {{port}} --tensor-parallel-size 8 --trust-remote-code")
    assert command.endswith("--dtype auto --mamba_ssm_cache_dtype float32 --reasoning-parser deepseek_r1")


@pytest.mark.parametrize(
    ("name", "config", "agent"),
    [
        ("aime24", "resources_servers/math_with_judge/configs/dapo17k.yaml", "math_with_judge_simple_agent"),
        ("lcb", "resources_servers/code_gen/configs/code_gen.yaml", "code_gen_simple_agent"),
    ],
)
def test_an_example_uses_the_same_environment(name: str, config: str, agent: str) -> None:
    gym = load(name).gym
    assert gym is not None
    assert gym.config_paths == (config, "responses_api_models/vllm_model/configs/vllm_model.yaml")
    assert gym.agent == agent


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_pre_hosted_variant_is_the_same_campaign(name: str) -> None:
    """So that a campaign may be resumed with servers elsewhere."""
    elsewhere = load(name, policy={"model": MODEL, "url": "http://host:8000/v1", "key_env": "POLICY_KEY"})
    assert elsewhere.identity() == load(name).identity()


@pytest.mark.parametrize("name", EXAMPLES)
def test_servers_here_and_elsewhere_exclude_each_other(name: str) -> None:
    policy = tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))["policy"]
    with pytest.raises(ValueError, match="url and server"):
        load(name, policy={**policy, "url": "http://host:8000/v1"})


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_documentation_quotes_the_example(name: str) -> None:
    text = DOCS.read_text(encoding="utf-8")
    if "@@EXAMPLES@@" in text:
        pytest.skip("docs/rollouts.md has no examples yet")
    assert (DATA / f"{name}.toml").read_text(encoding="utf-8") in re.findall(r"```toml\n(.*?)```", text, re.S)


def test_the_verifiers_of_the_documentation_are_of_every_kind() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)
    (tables,) = [found["verifiers"] for block in blocks if "verifiers" in (found := tomllib.loads(block))]
    kinds = {Verify.model_validate(table).kind for table in tables.values()}
    assert kinds == set(get_args(Verify.model_fields["kind"].annotation))


def test_the_documentation_lists_the_keys() -> None:
    """Of every table, as the errors say that it does."""
    text = DOCS.read_text(encoding="utf-8")
    tables = (Campaign, Dataset, Work, Policy, Requests, Failures, Gym, SandboxLimits, Collector, Verify)
    keys = {key for table in tables for key in table.model_fields}
    assert sorted(key for key in keys if not re.search(rf"\b{key}\b", text)) == []
