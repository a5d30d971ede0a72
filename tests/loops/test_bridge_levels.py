"""Which levels a changed path of Megatron-Bridge asks for, in both loops: the table of the notes on it, row by row."""

from __future__ import annotations

import pytest

from seatrial.core.loop import Loop
from seatrial.evidence.changes import ChangedLine
from seatrial.loops import get_loop
from seatrial.trial.plan import Diff, read_diff, required

NEMO, VERL = get_loop("nemo-rl"), get_loop("verl")
BRIDGE = "src/megatron/bridge/"
NONE: tuple[set[int], set[int]] = (set(), set())
PROVIDER = CONFIG = ({0}, {0})
MAPPING = ({0, 1, 2}, {0, 1})
PEFT = OPTIMIZER = ({0, 1, 6}, {0, 1, 5})
CHECKPOINT = ({0, 1}, {0, 1})
FSDP = ({0, 1, 4}, {0, 1, 3})
PARALLEL = ({0, 4}, {0, 2})
VLM = MTP = ({0, 5}, {0, 4})
QUANTIZATION = ({0, 2, 5}, {0, 4})
INFERENCE = ({0, 3}, {0})
PIN = ({0, 1, 2, 4}, {0, 1, 2})


def both(*rows: tuple[set[int], set[int]]) -> tuple[set[int], set[int]]:
    """A path that several rows name."""
    return set().union(*(row[0] for row in rows)), set().union(*(row[1] for row in rows))


def expand(start: str, names: str, end: str = "") -> list[str]:
    return [f"{BRIDGE}{start}{name}{end}" for name in names.split()]


TABLE: list[tuple[list[str], tuple[set[int], set[int]]]] = [
    (expand("models/", "gpt mla t5 model distillation", "_provider.py"), PROVIDER),
    (expand("models/", "transformer_config config logit_dtype gpt_full_te_layer_autocast_spec", ".py"), PROVIDER),
    (expand("models/", "common/base gpt/x hybrid/y mamba/mamba_builder decorators/torchrun", ".py"), PROVIDER),
    (expand("models/", "qwen/qwen3_provider llama/llama_provider exaone/exaone45/my_provider_x", ".py"), PROVIDER),
    (expand("models/", "gemma/modeling stepfun/layers qwen/attention_x mistral/layer_specs", ".py"), PROVIDER),
    (expand("models/conversion/", "param_mapping model_bridge auto_bridge utils", ".py"), MAPPING),
    (expand("models/", "hf_pretrained/causal_lm qwen/qwen3_bridge llama/llama_bridge", ".py"), MAPPING),
    (expand("utils/", "vocab_utils", ".py"), MAPPING),
    (expand("peft/", "lora utils adapter_wrapper", ".py"), PEFT),
    (expand("models/conversion/", "peft_bridge", ".py"), both(MAPPING, PEFT)),
    (expand("training/", "checkpointing model_load_save state utils/checkpoint_utils", ".py"), CHECKPOINT),
    (expand("utils/", "safe_pickle instantiate_utils", ".py"), CHECKPOINT),
    (expand("training/", "fsdp_compat utils/my_fsdp_x", ".py"), FSDP),
    (expand("training/", "optim losses mixed_precision train gpt_step setup utils/train_utils", ".py"), OPTIMIZER),
    (expand("training/", "config initialize forward_step_func_types utils/config_utils utils/omegaconf_utils", ".py"), CONFIG),
    (expand("", "__init__ utils/common_utils utils/import_utils utils/fusions utils/cuda_graph utils/activation_map", ".py"), CONFIG),
    (expand("training/tokenizers/", "tokenizer", ".py"), CONFIG),
    (expand("training/", "comm_overlap flex_dispatcher_backend eval_context_parallel_rebinding", ".py"), PARALLEL),
    (expand("training/", "megatron_mimo_parallel_utils", ".py"), PARALLEL),
    (expand("training/utils/", "pg_utils packed_seq_utils padding_utils batch_utils moe_token_drop", ".py"), PARALLEL),
    (expand("data/packing/", "in_batch sequence", ".py"), PARALLEL),
    (expand("models/", "hy_v3/__init__ olmoe/x deepseek/common glm_moe_dsa/glm5_provider gpt_oss/x mimo_v2_flash/x", ".py"), PARALLEL),
    (expand("models/", "minimax_m2/x minimax_m3/x kimi/x bailing/x qwen/qwen3_moe_provider", ".py"), PARALLEL),
    (expand("models/", "minimax_m3/minimax_m3_bridge", ".py"), both(PARALLEL, MAPPING)),
    (expand("models/", "qwen_vl gemma_vl glm_vl ernie_vl nemotron_vl", "/modelling_x/rope.py"), VLM),
    (expand("models/", "qwen_omni nemotron_omni qwen_audio qwen3_asr megatron_mimo", "/x.py"), VLM),
    (expand("models/", "kimi_vl/kimi_k25_vl_bridge", ".py"), both(VLM, PARALLEL, MAPPING)),
    (expand("training/", "vlm_step llava_step audio_lm_step nemotron_omni_step megatron_mimo_step", ".py"), VLM),
    (expand("training/", "setup_megatron_mimo pretrain_megatron_mimo utils/visual_inputs", ".py"), VLM),
    (expand("inference/vlm/", "base", ".py"), both(VLM, INFERENCE)),
    (expand("models/conversion/", "modelopt_utils quant_bridge quant_mapping quantization_utils", ".py"), both(QUANTIZATION, MAPPING)),
    (expand("training/", "post_training/distillation tensor_inspect utils/fp8_x utils/nvfp4_x utils/modelopt_x", ".py"), QUANTIZATION),
    (expand("training/utils/", "mtp_x eagle_x speculative_x", ".py"), MTP),
    (expand("inference/", "text_generation base", ".py"), INFERENCE),
    (["3rdparty/Megatron-LM", ".main.commit", ".dev.commit", "pyproject.toml", "uv.lock"], PIN),
    (expand("", "recipes/qwen/h100/qwen3_moe perf_recipes/glm_moe_dsa/gb200/glm5 diffusion/models/flux/flux_provider", ".py"), NONE),
    (expand("data/", "collators/sft energon/x megatron_mimo/x", ".py"), NONE),
    (["docs/x.py", "tests/x.py", "examples/x.py", "scripts/x.py", "tutorials/x.py", "tools/x.py", "skills/x/SKILL.md"], NONE),
    ([".github/x.yml", ".claude/skills", ".agents/skills", "docker/x.py"], NONE),
    (["README.md", "CLAUDE.md", "ruff.toml", "tests/unit_tests/peft/test_lora.py", "docker/Dockerfile.ci"], NONE),
]
PATHS = [(path, levels) for paths, levels in TABLE for path in paths]
UNNAMED = expand(
    "training/", "utils/flop_utils fault_tolerance pretrain mlm_compat/model mlm_compat/arguments eval inprocess_restart", ".py"
)
UNNAMED += expand("", "models/__init__ models/stepfun/configuration_step37 package_info", ".py")


def of_bridge(*paths: str, lines: tuple[ChangedLine, ...] = ()) -> Diff:
    return Diff("bridge", "b", paths, lines, packages=("megatron.bridge",))


def asked(loop: Loop, *paths: str, lines: tuple[ChangedLine, ...] = ()) -> set[int]:
    return {cause.level for cause in read_diff(loop, of_bridge(*paths, lines=lines)).causes}


def test_a_changed_path_asks_for_its_levels() -> None:
    wrong = {path: got for path, levels in PATHS if (got := (asked(NEMO, path), asked(VERL, path))) != levels}
    assert wrong == {}
    aside = {path for path, _ in PATHS if read_diff(VERL, of_bridge(path)).not_needed}
    assert aside == {path for path, levels in PATHS if levels == NONE}


def test_what_the_table_does_not_name_fans_out_to_the_defaults() -> None:
    for loop in (NEMO, VERL):
        for path in UNNAMED:
            found = required(loop, [of_bridge(path)])
            assert (found.unmatched, [level.number for level in found.levels]) == ((f"bridge: {path}",), [0])


def test_only_papers_ask_for_nothing_and_one_more_path_for_something() -> None:
    for loop in (NEMO, VERL):
        assert required(loop, [of_bridge("docs/a.md", f"{BRIDGE}recipes/x.py")]).levels == ()
        assert required(loop, [of_bridge("docs/a.md", f"{BRIDGE}training/eval.py")]).levels


@pytest.mark.parametrize(
    ("path", "text", "nemo", "verl"),
    [
        ("models/qwen/qwen3_provider.py", "    mtp_num_layers: int | None = None", {0, 5}, {0, 4}),
        ("models/qwen/qwen3_provider.py", "    self.fp8 = True", {0, 2, 5}, {0, 4}),
        ("models/qwen/qwen3_provider.py", "    quantization_config = None", {0, 2, 5}, {0, 4}),
        ("models/qwen/qwen3_provider.py", "    lora_rank = 4", {0, 1}, {0}),
        ("recipes/qwen3.py", "    mtp_num_layers = 1; fp8 = True; lora = 1", set(), set()),
    ],
)
def test_the_content_is_a_second_signal(path: str, text: str, nemo: set[int], verl: set[int]) -> None:
    lines = (ChangedLine(f"{BRIDGE}{path}", 9, text),)
    assert (asked(NEMO, f"{BRIDGE}{path}", lines=lines), asked(VERL, f"{BRIDGE}{path}", lines=lines)) == (nemo, verl)


@pytest.mark.parametrize(
    ("file", "text", "within", "counts"),
    [
        ("pyproject.toml", 'select = ["E"]', "line-length = 120", False),
        ("pyproject.toml", '    "pytest-shard>=0.1.2",', "test = [", False),
        ("pyproject.toml", '    "mlflow>=3.15.0",', "dependencies = [", True),
        ("pyproject.toml", '    "transformer-engine",', "override = [", True),
        ("uv.lock", '    { name = "pytest-shard" },', "dependencies = [", False),
        ("uv.lock", 'sdist = { url = "https://x/transformers-5.8.0.tar.gz" }', "", True),
        ("uv.lock", 'source = { git = "https://github.com/NVIDIA/TransformerEngine.git?rev=1" }', "", True),
    ],
)
def test_a_pin_counts_by_what_is_pinned(file: str, text: str, within: str, counts: bool) -> None:
    lines = (ChangedLine(file, 1, text, within=within),)
    assert (asked(NEMO, file, lines=lines), asked(VERL, file, lines=lines)) == (PIN if counts else NONE)


def test_what_a_loop_imports_is_said() -> None:
    path = f"{BRIDGE}training/utils/train_utils.py"
    lines = (ChangedLine(path, 9, "    x = 1", within="def make_value_model(hidden):"),)
    assert any(cause.rule == "is in make_value_model, which verl imports" for cause in read_diff(VERL, of_bridge(path, lines=lines)).causes)
    assert not any("imports" in cause.rule for cause in read_diff(NEMO, of_bridge(path, lines=lines)).causes)
    flops = f"{BRIDGE}training/utils/flop_utils.py"
    causes = read_diff(NEMO, of_bridge(flops, lines=(ChangedLine(flops, 3, "x"),))).causes
    assert [cause.rule for cause in causes] == ["is in megatron.bridge.training.utils.flop_utils, which NeMo-RL imports"]


def test_each_device_of_verl_has_the_same_table_and_fsdp2_has_none() -> None:
    assert VERL.configured({"device": "cpu"}).concerns() == VERL.concerns()
    fsdp2 = VERL.configured({"device": "cpu", "strategy": "fsdp2"})
    assert (fsdp2.concerns(), fsdp2.surfaces()) == ((), ())


@pytest.mark.parametrize(
    ("path", "nemo", "verl"),
    [
        ("megatron/core/tensor_parallel/layers.py", {0, 4}, {0, 2}),
        ("megatron/core/optimizer/optimizer.py", {0, 1, 6}, {0, 1, 5}),
        ("3rdparty/Megatron-LM/megatron/core/optimizer/optimizer.py", {0, 1, 2, 4, 6}, {0, 1, 2, 5}),
        ("megatron/core/distributed/fsdp/x.py", {0, 1, 4}, {0, 1, 2, 3}),
        ("verl/workers/engine/megatron/transformer_impl.py", set(), {0, 1, 2}),
        ("verl/utils/checkpoint/megatron_checkpoint_manager.py", set(), {0, 1}),
        ("verl/trainer/ppo/core_algos.py", set(), {0, 5}),
        ("nemo_rl/weight_sync/x.py", {0, 2}, set()),
    ],
)
def test_other_repositories(path: str, nemo: set[int], verl: set[int]) -> None:
    assert (asked(NEMO, path), asked(VERL, path)) == (nemo, verl)


def test_examples_of_nemo_rl_are_no_papers() -> None:
    diff = Diff("rl", "b", ("examples/configs/grpo.yaml", "README.md"), packages=("nemo_rl",))
    found = read_diff(NEMO, diff)
    assert ({cause.level for cause in found.causes}, found.not_needed) == ({0}, ["rl: README.md"])
