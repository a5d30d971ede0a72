"""What a NeMo-RL checkout is and offers, read from its files; and which of its keys its code reads."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.core.errors import BlockedError
from seatrial.loops.nemo_rl import nemo_checkout
from seatrial.loops.nemo_rl.nemo_checkout import ConfigSource, read_source
from tests.loops.nemo_rl_checkout import REAL, Bench, as_repository, make_bench, repo

SPARSE = "policy.generation.refit_cfg.sparse"
SEED = "policy.generation.delta_compression"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return make_bench(tmp_path)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    read_source.cache_clear()


def test_a_checkout_says_what_it_offers(bench: Bench) -> None:
    found = nemo_checkout.layout(bench.nemo_rl)
    assert found.ok
    assert "NeMo-RL 0.6.0, refit by refit_transport; transports packed, vllm_zmq_sparse" in found.message
    assert "; LoRA with Megatron; Megatron generation; 9 functionals" in found.message
    offers = nemo_checkout.generation(bench.nemo_rl)
    assert offers.refit == "refit_transport"
    assert offers.check_interface == "positional"
    assert "grpo_megatron.sh" in offers.scripts


def test_an_older_generation_is_told_by_its_files(bench: Bench) -> None:
    code = bench.nemo_rl / "nemo_rl" / "models" / "generation" / "config.py"
    edit(code, "refit_transport", "sending")
    assert nemo_checkout.generation(bench.nemo_rl).refit == "delta_compression"
    edit(code, "delta_compression", "other")
    edit(code, "mcore_generation_config", "none_such")
    edit(bench.nemo_rl / "examples" / "configs" / "grpo_math_1B.yaml", "peft:", "left:")
    edit(bench.nemo_rl / nemo_checkout.CHECKER, '"checks"', '"--check"')
    offers = nemo_checkout.generation(bench.nemo_rl)
    assert (offers.refit, offers.peft, offers.megatron_generation, offers.check_interface) == ("none", False, False, "unknown")
    said = nemo_checkout.layout(bench.nemo_rl).message
    assert "one refit transport" in said
    assert "an interface that Seatrial does not know" in said


def test_what_is_no_checkout_is_said(bench: Bench, tmp_path: Path) -> None:
    assert "no NeMo-RL checkout was named" in nemo_checkout.layout(None).message
    other = nemo_checkout.layout(tmp_path)
    assert (other.ok, other.fix) == (False, nemo_checkout.CLONE)
    assert "nemo_rl/package_info.py is missing" in other.message
    (bench.nemo_rl / nemo_checkout.LOADER).unlink()
    assert "nemo_rl/utils/config.py is missing" in nemo_checkout.layout(bench.nemo_rl).message
    assert nemo_checkout.generation(tmp_path).scripts == frozenset()


def test_the_checkout_is_the_one_named_or_the_one_under_test(bench: Bench) -> None:
    context = bench.context()
    assert nemo_checkout.checkout_of(context) == bench.nemo_rl
    own = replace(context, options={}, changes=(repo("nemo-rl", bench.nemo_rl, bench.nemo_rl, ("nemo_rl",)),))
    assert nemo_checkout.checkout_of(own) == bench.nemo_rl
    assert nemo_checkout.import_path(own) == (str(bench.nemo_rl / nemo_checkout.VENDORED / nemo_checkout.CORE),), (
        "itself is in front already"
    )
    assert nemo_checkout.checkout_of(replace(context, options={}, changes=())) is None


def test_the_bridge_under_test_brings_its_own_megatron(bench: Bench) -> None:
    context = bench.context()
    assert nemo_checkout.import_path(context) == (str(bench.bridge / nemo_checkout.CORE), str(bench.nemo_rl))
    assert nemo_checkout.python_path(context).split(":")[0] == str(bench.bridge / "src")
    (bench.bridge / nemo_checkout.CORE / "megatron" / "core").rename(bench.root / "gone")
    assert nemo_checkout.bundled_core(context) == [bench.nemo_rl / nemo_checkout.VENDORED / nemo_checkout.CORE], (
        "an empty submodule provides nothing"
    )
    core = repo("megatron", bench.root, bench.root, ("megatron.core",))
    assert nemo_checkout.bundled_core(replace(context, changes=(*context.changes, core))) == []


def test_the_interpreter_is_that_of_uvs_environment(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"nemo_rl": str(bench.nemo_rl)}
    monkeypatch.delenv("UV_PROJECT_ENVIRONMENT", raising=False)
    monkeypatch.setattr(nemo_checkout, "IMAGE", bench.root / "image")
    with pytest.raises(BlockedError, match="uv has not made the environment") as caught:
        nemo_checkout.interpreter(options)
    assert caught.value.fix == f"cd {bench.nemo_rl} && git submodule update --init --recursive && uv sync"
    for place in (bench.root / "image", bench.nemo_rl / ".venv", bench.root / "named"):
        (place / "bin").mkdir(parents=True)
        (place / "bin" / "python").touch()
        if place.name == "named":
            monkeypatch.setenv("UV_PROJECT_ENVIRONMENT", str(place))
        assert nemo_checkout.interpreter(options) == place / "bin" / "python"
    monkeypatch.setenv("UV_PROJECT_ENVIRONMENT", "elsewhere")
    with pytest.raises(BlockedError, match="elsewhere"):
        nemo_checkout.interpreter(options)


@pytest.mark.parametrize(
    ("key", "added", "said"),
    [
        ("policy.megatron_cfg.converter_type", None, "reads converter_type"),
        (f"{SEED}.enabled", SEED, "reads delta_compression below generation (it belongs below sparse)"),
        (f"{SEED}.dtype", SEED, "reads dtype"),
        (f"{SPARSE}.delta_compression.encoding", SPARSE, ""),
        (f"{SPARSE}.delta_compression.full_sync_interval", SPARSE, "reads full_sync_interval"),
        (
            "policy.generation.encoding",
            "policy.generation.encoding",
            "reads encoding below generation (it belongs below delta_compression)",
        ),
        ("policy.generation.old_switch", None, "reads old_switch"),
        ("policy.generation.vllm_kwargs.anything.at_all", "policy.generation.vllm_kwargs", ""),
        ("policy.megatron_cfg.env_vars.NRL_OLD_VARIABLE", None, ""),
        ("data.0.some_name", "data.0.some_name", ""),
        ("policy.megatron_cfg.peft.enabled", None, ""),
        ("policy.generation.real_quant", "policy.generation.real_quant", ""),
    ],
)
def test_a_key_that_no_code_reads_is_found(bench: Bench, key: str, added: str | None, said: str) -> None:
    why = read_source(bench.nemo_rl).unread(key, added)
    assert (why or "") == (f"nothing in this checkout {said}" if said else "")


def test_a_name_that_code_looks_up_by_its_text_may_stand_anywhere() -> None:
    source = ConfigSource(frozenset({"a", "b", "c"}), frozenset({"c"}), {"c": frozenset({"b"}), "b": frozenset({"c"})})
    assert source.unread("a.c", "a.c") is None
    assert source.unread("a.b", "a.b") is not None
    assert source.unread("a.b", None) is None, "a YAML file has it there"


@pytest.mark.real
@pytest.mark.skipif(not REAL, reason="no real checkout: SEATRIAL_NEMO_RL_CHECKOUT=DIR")
def test_the_real_checkout_offers_what_is_known_of_it() -> None:
    place = Path(str(REAL))
    offers = nemo_checkout.generation(place)
    assert nemo_checkout.layout(place).ok
    assert offers.refit == "refit_transport"
    assert {"packed", "nccl_reshard", "vllm_zmq_sparse"} <= set(offers.transports)
    assert offers.peft
    assert offers.megatron_generation
    assert offers.check_interface == "positional"
    assert read_source(place).unread(f"{SEED}.enabled", SEED)
    assert read_source(place).unread(f"{SPARSE}.delta_compression.encoding", SPARSE) is None


def test_the_fixture_can_be_a_repository_with_a_submodule(bench: Bench) -> None:
    """The scripts' results are ignored there, so that a trial leaves it clean."""
    as_repository(bench.nemo_rl)
    (bench.nemo_rl / nemo_checkout.FUNCTIONAL / "grpo_megatron").mkdir()
    (bench.nemo_rl / nemo_checkout.FUNCTIONAL / "grpo_megatron" / "run.log").touch()
    for place in (bench.nemo_rl, bench.nemo_rl / nemo_checkout.VENDORED):
        words = ["git", "-C", str(place), "status", "--porcelain"]
        assert subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout == ""
    assert (bench.nemo_rl / nemo_checkout.VENDORED / ".git").is_dir()
