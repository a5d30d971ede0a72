"""The demo's model: a two-layer Qwen2 with 84,000 parameters, trained here in half a minute; nothing is downloaded.

- It learns one- and two-digit sums and the largest of four numbers, and stops before it is perfect: pass rates differ between rows.
- The same recipe with the same libraries gives the same weights. They are kept in a directory named after all of them.
- An answer depends on its own request alone. Padding and neighbours in a batch move a logit by rounding errors; in double precision
  these are too small to change which token a seed draws.
- Runs in an environment with torch and transformers; no other module of Seatrial but `questions` is there.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.rollouts.demo import questions

CONTEXT = 64
"""Tokens of a prompt and its answer."""
_PHRASES = ("What is ", "Which is largest? ", "Answer: ", "A) ", " B) ", " C) ", " D) ")
_PIECES = ("<pad>", "<eos>", "<unk>", *"0123456789+?ABCD", *_PHRASES)
_SPLIT = r"[A-Z][a-z ]+[?:]? ?| ?[A-D]\) |."
_SEED = 20261115
_STEPS = 800
_BATCH = 96
_RATE = 4e-3
_WARM_UP = 50
_IGNORED = -100
"""What the loss leaves out: the prompt."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, as tokens."""

    tokens: tuple[int, ...]
    most: int
    """Tokens of its answer, at most."""
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said."""

    text: str
    tokens: int
    """The end token included."""
    finish: str
    """`stop`, or `length`."""


class Policy:
    """A trained model that answers in batches."""

    def __init__(self, directory: Path) -> None:
        from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

        self._words = PreTrainedTokenizerFast.from_pretrained(directory)  # not Auto: that takes the one of large Qwen2 models
        self._model = Qwen2ForCausalLM.from_pretrained(directory).double().eval()

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a prompt."""
        return tuple(self._words.encode(text))

    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        """One answer each, in order."""
        import torch

        width = max(len(ask.tokens) for ask in asks)
        end = self._words.eos_token_id
        ids = torch.tensor([[0] * (width - len(ask.tokens)) + list(ask.tokens) for ask in asks])
        mask = torch.tensor([[0] * (width - len(ask.tokens)) + [1] * len(ask.tokens) for ask in asks])
        places = (mask.cumsum(1) - 1).clamp(min=0)
        draws = [random.Random(ask.seed) for ask in asks]
        said: list[list[int]] = [[] for _ in asks]
        cache = None
        with torch.inference_mode():
            while True:
                out = self._model(input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                for ask, draw, tokens, logits in zip(asks, draws, said, out.logits[:, -1].tolist(), strict=True):
                    if len(tokens) < ask.most and tokens[-1:] != [end]:
                        tokens.append(choose(logits, ask.temperature, ask.top_p, draw))
                if all(len(tokens) == ask.most or tokens[-1:] == [end] for ask, tokens in zip(asks, said, strict=True)):
                    break
                ids = torch.tensor([tokens[-1:] for tokens in said])
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
                places = places[:, -1:] + 1
        return [self._answer(tokens, tokens[-1] == end) for tokens in said]

    def _answer(self, tokens: list[int], ended: bool) -> Answer:
        return Answer(self._words.decode(tokens, skip_special_tokens=True), len(tokens), "stop" if ended else "length")


def choose(logits: Sequence[float], temperature: float, top_p: float, draw: random.Random) -> int:
    """A token: the likeliest at temperature 0, else drawn from the likeliest ones that have `top_p` together."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if temperature == 0:
        return order[0]
    weights = [math.exp((logits[token] - logits[order[0]]) / temperature) for token in order]
    share, kept, total = top_p * sum(weights), 0, 0.0
    while kept < len(weights) and (kept == 0 or total < share):
        total += weights[kept]
        kept += 1
    left = draw.random() * total
    for token, weight in zip(order[:kept], weights, strict=False):
        left -= weight
        if left < 0:
            return token
    return order[kept - 1]


def ensure(cache: Path, progress: Callable[[str], None]) -> Path:
    """The directory of the trained model below `cache`, made now unless it is there; safe when two processes do it at once."""
    place = cache / f"policy-{_recipe()}"
    if (place / "config.json").is_file():
        return place
    cache.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=cache))
    try:
        model, words = _train(progress)
        model.save_pretrained(temporary)
        words.save_pretrained(temporary)
        os.rename(temporary, place)  # noqa: PTH104 - fails when another process was first, which is fine
    except OSError:
        if not (place / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return place


def _recipe() -> str:
    """Everything that the weights depend on, in short."""
    import torch
    import transformers

    known = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for path in (__file__, questions.__file__):
        known.update(Path(path).read_bytes())
    return known.hexdigest()[:12]


def _tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(_PIECES)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _train(progress: Callable[[str], None]) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(_SEED)
    words, draw = _tokenizer(), random.Random(_SEED)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    ends = {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id, "bos_token_id": None}
    turns = {"rope_type": "default", "rope_theta": 100.0}  # few positions: slower rotations would hardly tell neighbours apart
    shape = Qwen2Config(vocab_size=len(_PIECES), max_position_embeddings=CONTEXT, rope_parameters=turns, **sizes, **ends)
    model = Qwen2ForCausalLM(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / _WARM_UP) * max(0.02, 1 - step / _STEPS)
        tokens, labels = _batch(words, "largest" if step % 4 == 3 else "sums", draw)
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 200 == 0:
            progress(f"training: step {step + 1} of {_STEPS}, loss {loss.item():.3f}")
    return model, words


def _batch(words: Any, dataset: str, draw: random.Random) -> tuple[Any, Any]:
    """Tokens and labels of questions with their answers; only answers count."""
    import torch

    pairs: list[tuple[list[int], list[int]]] = []
    for _ in range(_BATCH):
        if dataset == "sums":
            question, before = questions.sum_of(draw, 1 if draw.random() < 0.3 else 2), ""
        else:
            question, before = questions.largest_of(draw, draw.random() < 0.5), "Answer: "
        pairs.append((words.encode(question.prompt), [*words.encode(before + question.answer), words.eos_token_id]))
    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    tokens = torch.full((_BATCH, width), words.pad_token_id)
    labels = torch.full((_BATCH, width), _IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor([*prompt, *answer])
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return tokens, labels
