"""Which names say that their value is a secret.

- A name is cut into words (`HF_TOKEN`, `apiKey`, `--client-secret`); only whole words count, so `tokenizer`, `author`,
  `keyboard` and `monkey` say nothing.
- STRONG names (`password`, `api_key`, `hf_token`) make any value a secret; WEAK names (`token`, `some_key`, `auth`)
  only one that looks like a credential (`looks_random`).
- Machine learning speaks of tokens and keys all the time: `max_tokens`, `eos_token`, `num_key_value_heads` and
  `token_mult_prob_error` say nothing.
"""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache


class Says(IntEnum):
    """How clearly a name says that its value is a secret."""

    NOTHING = 0
    WEAK = 1
    STRONG = 2


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_STEMS = (
    "password",
    "passwd",
    "passphrase",
    "secret",
    "credential",
    "apikey",
    "accesskey",
    "secretkey",
    "privatekey",
    "authtoken",
    "accesstoken",
)

# What follows the secret word and still names the secret itself: HF_TOKEN_WRITE, API_KEY_2.
_STILL_VALUE = _words("value string raw b base read write rw ro prod dev staging test ci primary secondary default old new")
_TOKEN_OF = _words(
    "api auth access bearer refresh secret security session personal private deploy bot registry csrf xsrf jwt oauth hf hub huggingface "
    "github gh gitlab gl npm pypi slack wandb ngc nvidia aws azure google gcp openai anthropic service admin"
)
_NO_TOKEN_OF = _words(
    "pad bos eos unk cls sep mask image video audio special stop end start begin next last first prev per max min num n total prompt "
    "new output input generated completion response decoder think bad fim suffix prefix middle vision placeholder boi eoi "
    "batch by each tool"
)
_KEY_OF = _words(
    "api access secret private signing signature encryption ssh deploy account master auth authorization storage shared "
    "subscription client service openai anthropic wandb hf ngc nvidia aws azure google gcp stripe session licence license registry gpg rsa"
)
_NO_KEY_OF = _words("public sort primary foreign cache partition dict state metric reward input output prompt answer label data")
_AUTH_OF = _words("basic http proxy npm registry docker redis")


@lru_cache(maxsize=4096)
def says_secret(name: str) -> Says:
    """What `name` says about its value."""
    words = [word.lower() for word in _WORD.findall(name)]
    while len(words) > 1 and (words[-1].isdigit() or words[-1] in _STILL_VALUE):
        words.pop()
    if not words:
        return Says.NOTHING
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last.removesuffix("s").endswith(_STEMS) or (last == "pwd" and before) or words[-2:] == ["amz", "signature"]:
        return Says.STRONG
    if last in ("token", "tokens"):
        return _graded(before, last, _TOKEN_OF, _NO_TOKEN_OF)
    if last in ("key", "keys"):
        return _graded(before, last, _KEY_OF, _NO_KEY_OF) if before else Says.NOTHING
    if last == "auth":
        return Says.STRONG if before in _AUTH_OF else Says.WEAK
    return Says.STRONG if last == "authorization" else Says.NOTHING


def says_password(name: str) -> bool:
    """Whether even a number under this name is a secret."""
    return name.lower().rstrip("s").endswith(("password", "passwd", "passphrase", "_pwd"))


def _graded(before: str, last: str, strong: frozenset[str], nothing: frozenset[str]) -> Says:
    if before in strong:
        return Says.STRONG
    # In the plural they are counts and lists unless the word before says otherwise.
    return Says.NOTHING if before in nothing or last.endswith("s") else Says.WEAK


def looks_random(value: str) -> bool:
    """Whether a value looks like a credential: a long run of letters and digits, mixed."""
    return any(sum(c.isdigit() for c in run) >= 2 and sum(c.isalpha() for c in run) >= 2 for run in re.findall(r"[A-Za-z0-9]{16,}", value))
