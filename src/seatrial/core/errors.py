"""Errors that a user can fix, errors that block a trial, and the codes of preflight findings.

- Both errors carry the fix. The command line prints them without a traceback; any other exception is an internal error (exit 3).
- Codes of findings are what scripts may rely on, whatever the messages say. Codes are only ever added.
"""

from __future__ import annotations

import re
from enum import StrEnum

from seatrial.core.verdict import Boundary


class UserError(Exception):
    """Bad input: names the file, the key and the fix. Exit code 2."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.fix}" if self.fix else self.message


class BlockedError(Exception):
    """Something before or beside the change stops the run; becomes the verdict Blocked at `boundary`."""

    def __init__(self, boundary: Boundary, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.boundary = boundary
        self.message = message
        self.fix = fix


class Severity(StrEnum):
    """What a finding means for the trial."""

    OK = "ok"
    WARNS = "warns"
    BLOCKS = "blocks"


class FindingCode(StrEnum):
    """What a finding is about."""

    OTHER = "other"
    CHECK_FAILED = "check-failed"
    """A check could not be made, because of an error."""
    REQUEST = "request"
    LEVEL = "level"
    # this machine
    GIT = "git"
    LOCALE = "locale"
    PORTS = "ports"
    VARIABLES = "variables"
    DISK = "disk"
    INODES = "inodes"
    NOT_WRITABLE = "not-writable"
    SHARED_MEMORY = "shared-memory"
    MEMORY = "memory"
    OPEN_FILES = "open-files"
    GPUS = "gpus"
    CPUS = "cpus"
    RAY = "ray"
    RAY_NODES_COMPLETE = "ray-nodes-complete"
    RAY_NODE_ANSWERS = "ray-node-answers"
    RAY_NODES_ALIKE = "ray-nodes-alike"
    RAY_IMPORT = "ray-import"
    # environments
    ENVIRONMENT = "environment"
    ENVIRONMENT_EXISTS = "environment-exists"
    ENVIRONMENT_COMPLETE = "environment-complete"
    ENVIRONMENT_BUILDING = "environment-building"
    INTERPRETER_RUNS = "interpreter-runs"
    PACKAGES_AS_LOCKED = "packages-as-locked"
    PYTHON = "python"
    LAUNCHER = "launcher"
    WORKER_ENVIRONMENTS = "worker-environments"
    VLLM = "vllm"
    IMPORTS = "imports"
    # checkouts
    CHANGE = "change"
    LOADS_ITSELF = "loads-itself"
    SUBMODULES = "submodules"
    CHECKOUT = "checkout"
    VENDORED_BRIDGE = "vendored-bridge"
    MEGATRON_LM = "megatron-lm"
    SCRIPTS = "scripts"
    ASSERTIONS = "assertions"
    # configuration
    ARGUMENTS = "arguments"
    OPTIONS = "options"
    SIZES = "sizes"
    TRANSPORTS = "transports"
    CONFIGURATION = "configuration"
    # model and data
    DATA = "data"
    REWARD_MODEL = "reward-model"
    DUMMY_MODEL = "dummy-model"
    DISK_OF_THE_MODEL_CACHE = "disk-of-the-model-cache"
    MODEL = "model"
    MODEL_MISSING = "model-missing"
    MODEL_NOT_LOADED = "model-not-loaded"
    """Neither configuration nor tokenizer could be tried."""
    MODEL_CONFIG = "model-config"
    MODEL_TYPE_UNKNOWN = "model-type-unknown"
    MODEL_REMOTE_CODE = "model-remote-code"
    MODEL_FILE_TORN = "model-file-torn"
    MODEL_LFS_POINTER = "model-lfs-pointer"
    MODEL_WEIGHTS_MISSING = "model-weights-missing"
    MODEL_SHARDS_MISSING = "model-shards-missing"
    MODEL_WEIGHTS_TORN = "model-weights-torn"
    TOKENIZER_MISSING = "tokenizer-missing"
    TOKENIZER = "tokenizer"
    TOKENIZER_EMPTY = "tokenizer-empty"
    """It loads, and makes no tokens of plain text."""
    VOCABULARY = "vocabulary"
    CHAT_TEMPLATE = "chat-template"


def code_of(name: str) -> FindingCode:
    """The code that a finding has by its name alone."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if slug.startswith("ray-import-"):
        return FindingCode.RAY_IMPORT
    if re.fullmatch(r"level-\d+", slug):
        return FindingCode.LEVEL
    return FindingCode(slug) if slug in set(FindingCode) else FindingCode.OTHER
