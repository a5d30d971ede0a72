"""Preflight helpers of several loops: a child process with a deadline, GPUs, names of changes, and a model that the user gave.

- Of a model its files, its kind, the Hugging Face cache, and whether the loop's interpreter loads it. Every problem is a finding with
  its file and the fix; none hides another.
- No network, no code of the model, no pickle: weights are listed, never loaded.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from seatrial.core.errors import FindingCode, UserError
from seatrial.core.files import is_lfs_pointer, read_json, room_at
from seatrial.core.guarded import BadValue, exists, parse_json, parse_json_once
from seatrial.core.loop import Context, finding
from seatrial.core.records import Finding, Record, replace
from seatrial.core.verdict import Boundary
from seatrial.runtime.command import NoAnswerError, run_command


def ask(start: Sequence[str], driver: Path, cwd: Path, environment: Mapping[str, str], seconds: float, request: Any) -> Any:
    """The JSON answer of a driver, run in the loop's own interpreter, to a JSON request; NoAnswerError when there is none."""
    quiet = {**environment, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = run_command([*start, str(driver)], seconds, cwd=cwd, env=quiet, stdin=json.dumps(request).encode(), own_session=True)
    if done.code:
        raise NoAnswerError(f"{start[0]}: {done.last_words}")
    try:
        return parse_json(done.out)
    except BadValue as error:
        raise NoAnswerError(f"{start[0]}: what it said is no answer: {done.out[:200]!r}") from error


NVIDIA_SMI_SECONDS = 30


def gpus_here(wanted: int, without: str) -> Finding:
    """Whether there are as many as wanted; `without` says what to do where there is none."""
    smi = shutil.which("nvidia-smi")
    listed = ""
    if smi:
        try:
            listed = run_command([smi, "-L"], NVIDIA_SMI_SECONDS).out
        except NoAnswerError as error:
            listed = f"({error})"
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    if count == 0:
        why = "no GPU was found here" + ("" if smi else ": there is no nvidia-smi")
        return finding("GPUs", False, why, without, Boundary.CLUSTER)
    return finding("GPUs", count >= wanted, f"{count} GPUs here, {wanted} wanted", f"--set options.gpus={count}", Boundary.CLUSTER)


def wrong_names(context: Context, packages: Mapping[str, str]) -> Iterator[Finding]:
    """A change that is called by a known name must provide that package."""
    for repo in context.changes:
        wanted = packages.get(repo.name)
        if wanted and wanted not in repo.packages:
            own = next((name for name, package in packages.items() if package in repo.packages), None)
            message = f"{repo.path} is called {repo.name} and does not provide {wanted}, but {', '.join(repo.packages) or 'no package'}"
            fix = f"--change {own}={repo.path}" if own else f"name the checkout that provides {wanted}"
            yield Finding(name="change", ok=False, boundary=Boundary.CONFIG, message=message, fix=fix)


LOADER = Path(__file__).parents[1] / "instruments" / "load_model.py"
SECONDS = 120
HEADER_MOST = 100_000_000
"""The longest header of a safetensors file, as its own library has it."""
BITS = dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
BITS |= dict.fromkeys(("I16", "U16", "F16", "BF16"), 16) | dict.fromkeys(("I32", "U32", "F32"), 32)
BITS |= dict.fromkeys(("C64", "F64", "I64", "U64"), 64)
"""Of one element, by its type in a safetensors file; of one that is not here nothing is known."""
DIMENSIONS = 64
JSON_MOST = 1_000_000_000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model", "tekken.json", "vocab.txt", "spiece.model")
SETTINGS = (
    *("generation_config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.json", "preprocessor_config.json", "processor_config.json"),
)
EMBEDDING = "model.embed_tokens.weight"
LIBRARIES = ("transformers", "tokenizers", "safetensors", "huggingface_hub")
"""What loads a model, and may be under test itself."""


@dataclass(frozen=True, slots=True)
class ModelUse:
    build: str
    """The command that makes the interpreter that loads it."""
    weights: bool = True
    tokenizer: bool = True
    template: bool = False
    """Whether prompts go through a chat template."""
    own: bool = False
    """The interpreter is that of the training process: a library that it lacks blocks."""


class Problem(Record):
    """Something that the loader met."""

    code: FindingCode
    said: str
    model_type: str | None = None
    size: int = 0
    rows: int = 0
    used: bool = False


class Tokenizer(Record):
    kind: str
    size: int
    template: bool
    rows: int | None


class LoaderAnswer(Record):
    transformers: str
    config: str = ""
    tokenizer: Tokenizer | None = None
    problems: tuple[Problem, ...]


def model_findings(directory: Path, context: Context, use: ModelUse) -> tuple[Finding, ...]:
    """Everything that is wrong with the model at `directory`; one finding that is ok when nothing is."""
    if directory.is_dir() and not os.access(directory, os.R_OK | os.X_OK):
        return (_unreadable(directory),)
    if not directory.is_dir():
        fix = "--model DIRECTORY with config.json, weights and tokenizer, or leave --model out"
        return (_bad(FindingCode.MODEL_MISSING, directory, "no such model directory", fix),)
    made = [*_settings(directory), *(_weights(directory) if use.weights else ())]
    words = use.tokenizer and (any((directory / name).is_file() for name in TOKENIZER_FILES) or any(directory.glob("*.tiktoken")))
    if use.tokenizer and not words:
        fix = f"copy tokenizer.json and tokenizer_config.json into {directory}"
        made.append(_bad(FindingCode.TOKENIZER_MISSING, directory, "no tokenizer files", fix))
    broken = {Path(found.path).name for found in made}
    if "config.json" in broken or any(found.code is FindingCode.MODEL_CONFIG for found in made):
        return tuple(made)  # nothing would load without it
    words = words and broken.isdisjoint(SETTINGS)
    return (*made, *_loaded(directory, context, use, words, whole=not made))


def _settings(directory: Path) -> Iterator[Finding]:
    if not (directory / "config.json").is_file():
        fix = f"copy the model's config.json into {directory}"
        yield _bad(FindingCode.MODEL_CONFIG, directory, "config.json is missing", fix)
    for name in ("config.json", *SETTINGS):
        path = directory / name
        if not path.is_file():
            continue
        if not os.access(path, os.R_OK):
            yield _unreadable(path)
        elif is_lfs_pointer(path):
            yield _pointer(path)
        elif not isinstance(_json(path), dict):
            yield _bad(FindingCode.MODEL_FILE_TORN, path, "no whole JSON object: the file is torn", f"copy {name} of the model again")


def _json(path: Path) -> Any:
    try:
        if not path.is_file() or path.stat().st_size > JSON_MOST:
            return None
        return read_json(path)
    except (UserError, OSError, ValueError, RecursionError):
        return None


def _weights(directory: Path) -> Iterator[Finding]:
    """Shards that are missing, torn, or pointers."""
    shards = [*sorted(directory.glob("*.safetensors")), *sorted(directory.glob("pytorch_model*.bin"))]
    indexes = [path for path in sorted(directory.glob("*.index.json")) if path.is_file()]
    if not shards and not indexes:
        fix = f"copy the model's weights into {directory}"
        yield _bad(FindingCode.MODEL_WEIGHTS_MISSING, directory, "no weights (*.safetensors)", fix)
    headers, broken = dict[str, Mapping[str, Any]](), False
    for path in shards:
        if path.exists() and not os.access(path, os.R_OK):
            yield _unreadable(path)
        elif is_lfs_pointer(path):
            yield _pointer(path)
        elif not path.is_file() or not path.stat().st_size:
            yield _torn(path, "empty, or a link to nothing")
        elif path.suffix == ".safetensors":
            header, wrong = read_header(path)
            headers[path.name] = header
            if wrong:
                broken = True
                yield _torn(path, wrong)
    if headers and len(headers) == len(shards) and not any(headers.values()) and not broken:
        yield _torn(shards[0], "holds no tensor")
    for path in indexes:
        yield from _index(path, headers)
    settings = _json(directory / "config.json")
    plain = settings if isinstance(settings, dict) and "quantization_config" not in settings else {}
    rows, columns = plain.get("vocab_size"), plain.get("hidden_size")
    shape: list[int] = next((header[EMBEDDING]["shape"] for header in headers.values() if EMBEDDING in header), [])
    for key, wanted, held in zip(("vocab_size", "hidden_size"), (rows, columns), shape, strict=False):
        if isinstance(wanted, int) and held != wanted:
            message = f"{EMBEDDING} has {held} {'rows' if key == 'vocab_size' else 'columns'}, and config.json says {key} {wanted}"
            fix = "copy config.json and weights of one and the same model"
            yield _bad(FindingCode.VOCABULARY, directory / "config.json", message, fix)


def _index(path: Path, headers: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    stored = _json(path)
    places = stored.get("weight_map") if isinstance(stored, dict) else None
    if is_lfs_pointer(path):
        yield _pointer(path)
    elif not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        yield _bad(FindingCode.MODEL_FILE_TORN, path, "no whole index of weights", f"copy {path.name} of the model again")
    else:
        wanted = sorted(set(places.values()))
        lost = [name for name in wanted if not exists(path.parent / name)]
        if lost:
            message = f"names {len(wanted)} shards, and {len(lost)} are not there: {', '.join(lost[:3])}{', …' if len(lost) > 3 else ''}"
            yield _bad(FindingCode.MODEL_SHARDS_MISSING, path, message, f"copy them into {path.parent}")
        absent = [tensor for tensor, name in places.items() if headers.get(name) and tensor not in headers[name]]
        if absent:
            message = f"{places[absent[0]]} lacks {len(absent)} tensors that the index names ({absent[0]})"
            yield _bad(FindingCode.MODEL_SHARDS_MISSING, path, message, "copy index and shards of one and the same model")


def read_header(path: Path) -> tuple[Mapping[str, Any], str]:
    """The header of a safetensors file, and what is wrong with the file ("" when nothing is)."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_MOST):
            return {}, "the header is torn"
        text = stream.read(length)
    header = _parsed(text)
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"} if isinstance(header, dict) else None
    if tensors is None or not all(_is_entry(entry) for entry in tensors.values()):
        return {}, "the header is torn"
    end = 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        begin, after = entry["data_offsets"]
        bits = BITS.get(entry.get("dtype"))
        if begin != end or after < begin or (bits and (after - begin) * 8 != math.prod(entry["shape"]) * bits):
            return tensors, f"the header does not fit together at {name[:200]!r}"
        end = after
    return tensors, "" if 8 + length + end == size else f"has {size} bytes, and its header says {8 + length + end}"


def _parsed(text: bytes) -> Any:
    try:
        return parse_json_once(text)
    except BadValue:
        return None


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    counts = all(isinstance(part, list) and all(type(number) is int and number >= 0 for number in part) for part in (shape, offsets))
    return counts and len(offsets or ()) == 2 and len(shape or ()) <= DIMENSIONS


def _loaded(directory: Path, context: Context, use: ModelUse, words: bool, whole: bool) -> Iterator[Finding]:
    if not context.has_python:
        message = f"{directory}: configuration and tokenizer were not loaded: there is no interpreter for it yet"
        yield _finding(FindingCode.MODEL_NOT_LOADED, directory, message, use.build, warns=True)
        return
    tested = [name for repo in context.changes if not repo.companion for name in repo.packages if name in LIBRARIES]
    try:
        request = {"path": str(directory), "tokenizer": words}
        answer = LoaderAnswer.model_validate(ask([str(context.python)], LOADER, Path("/"), _environment(context), SECONDS, request))
    except (NoAnswerError, ValidationError) as error:
        message = f"{directory}: configuration and tokenizer could not be loaded: {error}"
        blocks = use.own and not tested and not (isinstance(error, NoAnswerError) and error.late)
        yield _finding(FindingCode.MODEL_NOT_LOADED, directory, message, use.build, warns=True, ok=not blocks)
        return
    problems = list(_problems(directory, context, use, answer))
    for found in problems:
        if tested and not found.ok:
            told = f"{found.message}; {', '.join(tested)} is under test: the level will judge it"
            yield replace(found, ok=True, warns=True, message=told)
        else:
            yield found
    if whole and not problems:
        said = f", {answer.tokenizer.kind} with {answer.tokenizer.size} tokens" if answer.tokenizer else ""
        yield _finding(FindingCode.MODEL, directory, f"{directory}: {answer.config}{said}, loaded offline by {context.python}")


def _environment(context: Context) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_DATASETS_OFFLINE": "1"}
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "USE_TF": "0", "USE_FLAX": "0"}
    path = {"PYTHONPATH": os.pathsep.join(context.import_path())} if context.import_path() else {}
    return {**kept, **offline, **quiet, **path}


def _problems(directory: Path, context: Context, use: ModelUse, answer: LoaderAnswer) -> Iterator[Finding]:
    config, version = directory / "config.json", f"transformers {answer.transformers} of {context.python}"
    for problem in answer.problems:
        code, said = problem.code, problem.said
        if code is FindingCode.MODEL_TYPE_UNKNOWN:
            message = f"{version} does not know model_type {problem.model_type!r}"
            fix = "use a model that it knows, or --change PATH of a transformers checkout that does"
            yield _bad(code, config, message, fix)
        elif code is FindingCode.MODEL_REMOTE_CODE:
            trusted = any("trust_remote_code" in word for word in context.arguments)
            message = "it needs code of its own (trust_remote_code), which the preflight does not run"
            fix = "read its code, then allow it with the loop's own argument after --, or use another model"
            yield _finding(code, config, f"{config}: {message}", fix, warns=True, ok=trusted)
        elif code is FindingCode.MODEL_CONFIG:
            yield _bad(code, config, f"does not load with {version}: {said}", "copy the model's config.json again")
        elif code is FindingCode.TOKENIZER:
            fix = f"copy tokenizer.json and tokenizer_config.json of the model into {directory} again"
            yield _bad(code, directory, f"the tokenizer does not load with {version}: {said}", fix)
        elif code is FindingCode.TOKENIZER_EMPTY:
            fix = f"copy tokenizer.json and tokenizer_config.json of the model into {directory} again"
            message = f"{directory}: the tokenizer loads and makes no token of plain text: its vocabulary may be lost"
            yield _finding(code, directory, message, fix, warns=True)
        elif code is FindingCode.CHAT_TEMPLATE:
            fix = "repair chat_template.jinja, or chat_template in tokenizer_config.json"
            yield _finding(code, directory, f"{directory}: the chat template fails: {said}", fix, warns=True, ok=not use.template)
        elif code is FindingCode.VOCABULARY:
            message = f"{directory}: the tokenizer has {problem.size} tokens, and the embedding {problem.rows} rows"
            fix = "copy tokenizer and weights of one and the same model"
            more = "" if problem.used else "; those behind it are added tokens that no text needs"
            yield _finding(code, directory, message + more, fix, warns=True, ok=not problem.used)
    if use.template and answer.tokenizer and not answer.tokenizer.template:
        message = f"{directory}: the tokenizer has no chat template, and the loop writes its prompts with one"
        fix = f"use an instruct model, or write {shlex.quote(str(directory / 'chat_template.jinja'))}"
        yield _finding(FindingCode.CHAT_TEMPLATE, directory, message, fix, ok=False)


def _pointer(path: Path) -> Finding:
    fix = f"git -C {shlex.quote(str(path.parent))} lfs pull"
    return _bad(FindingCode.MODEL_LFS_POINTER, path, "a pointer of Git LFS, not the file itself", fix)


def _unreadable(path: Path) -> Finding:
    mode = "u+rx" if path.is_dir() else "u+r"
    return _bad(FindingCode.MODEL_MISSING, path, "you may not read it", f"chmod {mode} {shlex.quote(str(path))}, as its owner")


def _torn(path: Path, wrong: str) -> Finding:
    return _bad(FindingCode.MODEL_WEIGHTS_TORN, path, wrong, f"copy {path.name} of the model again")


def _bad(code: FindingCode, path: Path, wrong: str, fix: str) -> Finding:
    return _finding(code, path, f"{path}: {wrong}", fix, ok=False)


def _finding(code: FindingCode, path: Path, message: str, fix: str = "", *, ok: bool = True, warns: bool = False) -> Finding:
    return Finding(name="model", ok=ok, boundary=Boundary.DATA, message=message, fix=fix, code=code, warns=ok and warns, path=str(path))


SPARE_CACHE_MB = 1000


def hub_cache() -> Path:
    """The Hugging Face cache, as the hub's own client finds it."""
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()


def hub_snapshot(model: str) -> Path:
    """The directory of the cached `main` revision of a model; it need not exist."""
    stored = hub_cache() / f"models--{model.replace('/', '--')}"
    main = stored / "refs" / "main"
    return stored / "snapshots" / (main.read_text(encoding="utf-8").strip() if main.is_file() else "(none)")


def cache_room() -> Finding:
    cache = hub_cache()
    found = room_at(cache)
    enough, message = found.free_mb >= SPARE_CACHE_MB, f"{found.free_mb:.0f} MB free at {found.place}"
    return replace(finding("disk of the model cache", enough, message, "set HF_HOME to a larger disk"), path=str(found.place))


KINDS = {
    "moe": ("num_experts", "n_routed_experts", "num_local_experts"),
    "vlm": ("vision_config",),
    "mtp": ("num_nextn_predict_layers", "mtp_num_layers", "mtp_num_hidden_layers"),
}
"""Keys of a config.json that tell an architecture."""


def config_is_kind(settings: Mapping[str, Any], kind: str) -> bool:
    """Whether a config.json says so, for the whole model or for the text part of it."""
    inner = settings.get("text_config")
    return any(source.get(key) for source in (settings, inner) if isinstance(source, Mapping) for key in KINDS[kind])
