"""Errors that say what this machine lacks, not what a change broke. The part is named exactly.

- The exception itself decides, never a line before it; a package that is not known to be optional is not called missing.
- A module or a name of Megatron or transformers that cannot be imported is never the machine's fault.
"""

from __future__ import annotations

import re

OPTIONAL = (
    *("transformer_engine", "mamba_ssm", "causal_conv1d", "flash_attn", "flashinfer", "fla", "apex", "triton", "grouped_gemm", "vllm"),
    *("deep_ep", "nvidia_resiliency_ext", "fast_hadamard_transform", "tilelang", "emerging_optimizers", "torchvision", "torchaudio"),
    *(
        "torch",
        "transformers",
        "accelerate",
        "omegaconf",
        "modelopt",
        "peft",
        "safetensors",
        "einops",
        "megatron.energon",
        "multistorageclient",
    ),
)
"""Packages that Megatron takes where they are, and those that an interpreter of one's own may lack."""
_NAMES = "|".join(re.escape(name) for name in OPTIONAL)
_ENGINES = "[Tt]ransformer[-_ ]?[Ee]ngine|mamba[-_]ssm|causal[-_]conv1d|flash[-_]attn"
_ABSENT = "(?:is|are) (?:not installed|not available|required)"
PARTS = {
    rf"^ModuleNotFoundError: No module named '(?P<part>(?:{_NAMES}))'": "the package {part} is missing",
    rf"^ModuleNotFoundError: No module named '(?P<part>(?!transformers\.|torch\.)(?:{_NAMES})\.[\w.]+)'": "the package {part} is missing",
    r"^\w+: (?P<part>Torch not compiled with CUDA enabled|Found no NVIDIA driver on your system)": "CUDA: {part}",
    r"^AttributeError: .*(?P<part>_cuda_setDevice|_cuda_getDeviceCount|_cuda_getCurrentRawStream)": "CUDA: torch has no {part} here",
    r"^RuntimeError: (?P<part>Transformer Engine is not installed on this machine)": "Transformer Engine: {part}",
    r"^AssertionError: .*(?P<part>Please use TE\w+ instead)": "Transformer Engine: {part}",
    r"^AssertionError: (?P<part>[\w ]*[Cc]ontext parallelism is only supported by TE\w+)": "Transformer Engine: {part}",
    r"^RuntimeError: (?P<part>\w+ is a Triton kernel; Triton is not installed on this machine)": "Triton: {part}",
    rf"^(?:ImportError|RuntimeError|AssertionError): (?P<part>[^\n]*(?:{_ENGINES})[^\n]*{_ABSENT}[^\n]*)": "{part}",
}
_OWN = re.compile(r"cannot import name|No module named 'megatron(?!\.energon)[.']")


def lacking(error: str) -> str | None:
    """The missing part that ended something with this traceback, or None when it is no such error."""
    text = error.strip()
    final = re.split(r"\n(?=\S)", "\n".join(text.splitlines()[-12:]))[-1] if text else ""
    if _OWN.search(final):
        return None
    for pattern, form in PARTS.items():
        found = re.search(pattern, final)
        if found:
            return form.format(part=" ".join(found["part"].split())[:300])
    return None
