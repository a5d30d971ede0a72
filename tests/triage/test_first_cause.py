"""The first exception outranks a later signal, and the driver's traceback a crash while Ray ends; a signal explains its consequences."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.records import Diagnosis
from seatrial.core.verdict import Boundary, Verdict
from seatrial.loops import get_loop
from seatrial.trial.level import read_diagnosis
from tests.loops.nemo_logs import ROOT, grpo_log, raised
from tests.triage.runs import SITE, traceback, trl_log, verl_log

ENGINE = "\x1b[36m(vLLMHttpServer pid=7001)\x1b[0m "
SIGTERM = [
    "*** SIGTERM received at time=1794706888 on cpu 1 ***",
    "PC: @     0x7f55a2b1c7aa  (unknown)  epoll_wait",
    "    @     0x7f55a2a42520  (unknown)  (unknown)",
    "[2026-11-15 01:58:08,881 E 4711 4711] logging.cc:474: *** SIGTERM received at time=1794706888 on cpu 1 ***",
    "[2026-11-15 01:58:08,881 E 4711 4711] logging.cc:474: PC: @     0x7f55a2b1c7aa  (unknown)  epoll_wait",
]
LOADER = "AttributeError: 'Parameter' object has no attribute 'weight_loader'"
LOADING = [
    "Traceback (most recent call last):",
    f'  File "{SITE}/vllm/v1/worker/worker_base.py", line 327, in update_weights_from_ipc',
    "    self.model_runner.model.load_weights(weights)",
    f'  File "{SITE}/vllm/model_executor/models/qwen2.py", line 412, in load_weights',
    "    weight_loader = param.weight_loader",
    LOADER,
]
NATIVE = [
    "[2026-11-17 00:24:43,281 E 5853 5853] logging.cc:118: Unhandled exception: N5boost10wrapexceptEE. what(): Broken pipe",
    "*** StackTrace Information ***",
    "/usr/local/lib/python3.12/dist-packages/ray/_raylet.so(+0x163a472) [0x7f1] ray::TerminateHandler()",
    "/usr/local/lib/python3.12/dist-packages/ray/_raylet.so(+0x1650021) [0x7f2] ray::core::CoreWorkerProcess::Shutdown()",
    "/lib/x86_64-linux-gnu/libc.so.6(+0x45495) [0x7f3]",
    "",
    "*** SIGABRT received at time=1794874683 on cpu 3 ***",
    "PC: @     0x7f55  (unknown)  pthread_kill",
    "    @     0x7f56  ray::core::CoreWorkerProcessImpl::~CoreWorkerProcessImpl() core_worker_process.cc",
    "[2026-11-17 00:24:43,290 E 5853 5853] logging.cc:496: *** SIGABRT received at time=1794874683 on cpu 3 ***",
    "Fatal Python error: Aborted",
    "",
    "Stack (most recent call first):",
    '  File "/usr/local/lib/python3.12/dist-packages/ray/_private/worker.py", line 1943 in shutdown',
    "",
    "Extension modules: msgpack._cmsgpack, google._upb._message, psutil._psutil_linux (total: 3)",
]


def diagnosed(loop: str, lines: str | list[str], tmp_path: Path) -> Diagnosis:
    path = tmp_path / "run.log"
    path.write_text(lines if isinstance(lines, str) else "\n".join(lines) + "\n")
    return read_diagnosis(get_loop(loop), path)


def begun(loop: str) -> list[str]:
    """A run that was being refitted for the first time."""
    if loop == "verl":
        return verl_log().split("\n")[:6]
    if loop == "trl":
        return trl_log(2).split("\n")[:5]
    return grpo_log(until="policy and generator ready").rstrip("\n").split("\n")


@pytest.mark.parametrize("loop", ["trl", "verl", "nemo-rl"])
@pytest.mark.parametrize("form", ["uncaught", "logged", "driver"])
@pytest.mark.parametrize("waiting", [0, 40])
def test_a_refused_weight_before_a_signal_is_a_refit(loop: str, form: str, waiting: int, tmp_path: Path) -> None:
    head = {"uncaught": ENGINE, "logged": f"{ENGINE}ERROR 11-15 01:50:01 [core.py:803] ", "driver": ""}[form]
    waits = [f"{ENGINE}INFO 11-15 01:5{n % 10}:00 [metrics.py:89] waiting for requests" for n in range(waiting)]
    found = diagnosed(loop, [*begun(loop), *(head + line for line in LOADING), *waits, *SIGTERM], tmp_path)
    assert (found.boundary, found.verdict) == (Boundary.REFIT, Verdict.FAIL)
    assert LOADER in found.cause


def test_a_bar_that_is_drawn_after_the_exception_does_not_hide_it(tmp_path: Path) -> None:
    lines = verl_log().split("\n")
    found = diagnosed("verl", [*lines[:5], *(ENGINE + line for line in LOADING), lines[5], *SIGTERM], tmp_path)
    assert (found.boundary, found.verdict) == (Boundary.REFIT, Verdict.FAIL)


def test_the_drivers_traceback_outranks_the_native_stack_of_the_teardown(tmp_path: Path) -> None:
    """Seen with a real NeMo-RL run: prettytable is imported late, after engine and policy are up."""
    text = [
        "Traceback (most recent call last):",
        f'  File "{ROOT}/examples/run_grpo.py", line 239, in main',
        "    grpo_train(",
        f'  File "{ROOT}/nemo_rl/utils/logger.py", line 1214, in print_message_log_samples',
        "    from prettytable import PrettyTable",
        "ModuleNotFoundError: No module named 'prettytable'",
    ]
    for until in ("cluster connected", "data read", "setup complete"):
        log = grpo_log(until=until).rstrip("\n").split("\n")
        for after in (NATIVE, NATIVE[6:], NATIVE[7:], [line for line in NATIVE if line]):
            found = diagnosed("nemo-rl", [*log, *text, *after], tmp_path)
            assert (found.cause, found.boundary, found.verdict) == (text[-1], Boundary.ENVIRONMENT, Verdict.BLOCKED), (until, after)
            assert found.line == len(log) + len(text)


def test_a_native_frame_is_no_part_of_an_exceptions_message(tmp_path: Path) -> None:
    """A harmless line of a shutdown acquits nothing that stands above it."""
    stack = "    @     0x7f56  ray::core::CoreWorkerProcessImpl::Shutdown() core_worker_process.cc"
    found = diagnosed("nemo-rl", [*begun("nemo-rl"), *traceback("ValueError: mine", "examples/run_grpo.py:main"), stack], tmp_path)
    assert found.cause == "ValueError: mine"
    assert not any("core_worker_process" in text for text in found.excerpt)


@pytest.mark.parametrize(
    "after",
    [
        ["KeyboardInterrupt"],
        traceback("KeyboardInterrupt", "train.py:main"),
        traceback("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", "train.py:main"),
        traceback("BrokenPipeError: [Errno 32] Broken pipe", "train.py:main"),
        ["terminate called after throwing an instance of 'std::system_error'", "  what():  Broken pipe", "Aborted (core dumped)"],
        traceback("RuntimeError: DataLoader worker (pid 7) is killed by signal: Terminated.", "train.py:main"),
    ],
)
@pytest.mark.parametrize("loop", ["trl", "verl", "nemo-rl"])
def test_what_a_signal_brings_about_is_explained_by_it(loop: str, after: list[str], tmp_path: Path) -> None:
    lines = begun(loop)
    found = diagnosed(loop, [*lines, SIGTERM[0], *after], tmp_path)
    assert found.line == len(lines) + 1
    assert "SIGTERM" in found.cause


def test_a_setting_that_the_driver_refuses_is_no_fault_of_the_provider(tmp_path: Path) -> None:
    said = (
        "ValueError: model_overrides is only for Megatron Bridge model fields without a first-class NeMo-RL setting; "
        "policy.megatron_cfg.model_overrides.transformer_impl conflicts with policy.megatron_cfg.transformer_impl. "
        "Set the first-class field directly instead."
    )
    calls = [
        "nemo_rl/models/policy/workers/megatron_policy_worker.py:__init__",
        "nemo_rl/models/megatron/setup.py:_validate_model_override_conflicts",
    ]
    lines = raised("MegatronPolicyWorker.__init__", calls, said)
    found = diagnosed("nemo-rl", grpo_log(until="policy being built") + "\n".join(lines) + "\n", tmp_path)
    assert (found.boundary, found.verdict, found.signature) == (Boundary.CONFIG, Verdict.BLOCKED, "model-overrides")


@pytest.mark.parametrize(
    "said",
    [
        "ValueError: `use_vllm` and `--use_transformers_paged` cannot be used together",
        "ValueError: policy.dtensor_cfg.enabled and policy.megatron_cfg.enabled are mutually exclusive",
        "AssertionError: sequence_packing is not compatible with context_parallel_size > 1",
        "ValueError: Only one of `max_steps` or `num_train_epochs` can be set",
    ],
)
@pytest.mark.parametrize("loop", ["trl", "verl", "nemo-rl"])
def test_settings_that_exclude_each_other(loop: str, said: str, tmp_path: Path) -> None:
    found = diagnosed(loop, [*begun(loop)[:-1], *traceback(said, "train.py:main")], tmp_path)
    assert (found.boundary, found.verdict) == (Boundary.CONFIG, Verdict.BLOCKED)


@pytest.mark.parametrize(
    "said", ["RuntimeError: shape of q_proj is not compatible with linear_qkv", "ValueError: tensor a conflicts with b"]
)
def test_a_conflict_of_shapes_is_none_of_settings(said: str, tmp_path: Path) -> None:
    assert diagnosed("verl", [*begun("verl"), *traceback(said, "train.py:main")], tmp_path).boundary is not Boundary.CONFIG
