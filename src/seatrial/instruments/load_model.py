"""Load a model's configuration and tokenizer as its loop would, and say what is wrong. Runs in the loop's own interpreter.

It reads `{"path": …, "tokenizer": bool}` on standard input and prints one JSON object: each problem has a code and the error in one line.
Offline, without code of the model itself (`trust_remote_code` is off), and without its weights.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

SENTENCE = "What is 12 + 7? The answer is 19.\n"


def look(asked: dict[str, Any]) -> dict[str, Any]:
    import transformers

    found: dict[str, Any] = {"transformers": transformers.__version__, "problems": []}
    config = _config(asked["path"], found)
    if asked["tokenizer"]:
        rows = getattr(config.get_text_config() if hasattr(config, "get_text_config") else config, "vocab_size", None)
        _tokenizer(asked["path"], rows if isinstance(rows, int) else None, found)
    return found


def _config(path: str, found: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the answer
        kind = _model_type(Path(path, "config.json"))
        unknown = kind is not None and kind not in CONFIG_MAPPING
        code = "model-remote-code" if "trust_remote_code" in str(error) else "model-type-unknown" if unknown else "model-config"
        found["problems"].append({"code": code, "said": _line(error), "model_type": kind})
        return None
    found["config"] = type(config).__name__
    return config


def _model_type(file: Path) -> str | None:
    """What config.json says, as far as it can be read at all."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    kind = stored.get("model_type") if isinstance(stored, dict) else None
    return kind if isinstance(kind, str) else None


def _tokenizer(path: str, rows: Any, found: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    try:
        made = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        used = [number for number in (made.bos_token_id, made.eos_token_id, made.pad_token_id) if isinstance(number, int)]
        plain = list(made(SENTENCE, add_special_tokens=False)["input_ids"])
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the answer
        code, said = "model-remote-code" if "trust_remote_code" in str(error) else "tokenizer", _line(error)
        if all(problem["said"] != said for problem in found["problems"]):  # a tokenizer reads the configuration, too
            found["problems"].append({"code": code, "said": said})
        return
    used += plain
    if not plain:
        found["problems"].append({"code": "tokenizer-empty", "said": ""})
    template = bool(getattr(made, "chat_template", None))
    if template:
        try:
            ids = made.apply_chat_template([{"role": "user", "content": SENTENCE}], add_generation_prompt=True, tokenize=True)
            used += list(ids["input_ids"] if hasattr(ids, "keys") else ids)
        except Exception as error:  # noqa: BLE001 - whatever a library raises is the answer
            found["problems"].append({"code": "chat-template", "said": _line(error)})
    size, words = max(len(made), _highest(made) + 1), int(getattr(made, "vocab_size", 0) or 0)
    found["tokenizer"] = {"kind": type(made).__name__, "size": size, "template": template, "rows": rows}
    if isinstance(rows, int) and size > rows:
        # Added tokens that nothing uses may lie behind the embedding: text models cut out of larger ones have such.
        needed = max([words - 1, *used])
        found["problems"].append({"code": "vocabulary", "said": "", "size": size, "rows": rows, "used": needed >= rows})


def _highest(tokenizer: Any) -> int:
    """The highest id of a token, -1 where the tokenizer does not list them: ids may have holes."""
    try:
        return max(tokenizer.get_vocab().values(), default=-1)
    except Exception:  # noqa: BLE001 - not every tokenizer has a list, and none must
        return -1


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else "(no message)"
    return f"{type(error).__name__}: {said}"[:400]


def main() -> None:
    """Answer one question; what libraries print goes to standard error."""
    here = Path(__file__).absolute().parent  # holds folders that are called like loops
    sys.path[:] = [entry for entry in sys.path if Path(entry).absolute() != here]
    out = os.dup(1)
    os.dup2(2, 1)
    answer = json.dumps(look(json.load(sys.stdin)))
    with os.fdopen(out, "w", encoding="utf-8") as stream:
        stream.write(answer)


if __name__ == "__main__":
    main()
