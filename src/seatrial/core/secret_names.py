"""Which names say that their value is a secret.

- A name is cut into words (`HF_TOKEN`, `apiKey`, `--client-secret`); only whole words count, so `tokenizer`, `author`,
  `keyboard` and `monkey` say nothing.
- STRONG names (`password`, `api_key`, `hf_token`) make any value a secret; WEAK names (`token`, `some_key`, `auth`)
  only one that looks like a credential (`looks_random`).
- Machine learning speaks of tokens and keys all the time: `max_tokens`, `eos_token`, `num_key_value_heads` and
  `token_mult_prob_error` say nothing.
"""

from __future__ import annotations

import base64
import re
from enum import IntEnum
from functools import lru_cache

from seatrial.core.text import word_set


class Says(IntEnum):
    """How clearly a name says that its value is a secret."""

    NOTHING = 0
    WEAK = 1
    STRONG = 2


STEM_LITERALS = (
    *("token", "secret", "pass", "cred", "key", "auth", "pwd", "signature", "cookie", "session", "mnemonic", "kennwort", "psk", "otp"),
    *("_pw", "pw:", "pw=", "sid=", "pat=", "_pat", "bindpw", "rootpw", "dockerconf", "dockercfg"),
)
"""A name that says secret has one of these, in small letters."""


def has_stem(lowered: str) -> bool:
    """Whether a line in small letters holds a word that a name that says secret has."""
    for literal in STEM_LITERALS:  # noqa: SIM110 - a generator takes three times as long
        if literal in lowered:
            return True
    return False


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_PASSWORD = ("password", "passwd", "passphrase", "passcode", "passwort", "kennwort", "contrasena")
_STEMS = (
    *_PASSWORD,
    *("secret", "credential", "apikey", "accesskey", "secretkey", "privatekey", "authtoken", "accesstoken", "cookie", "mnemonic"),
)

# What follows the secret word and still names the secret itself: HF_TOKEN_WRITE, API_KEY_2, client-key-data.
_STILL_VALUE = word_set(
    "value string raw b base read write rw ro prod dev staging test ci primary secondary default old new data plain plaintext"
)
_TOKEN_OF = word_set(
    "api auth access bearer refresh secret security session personal private deploy bot registry csrf xsrf jwt oauth hf hub huggingface "
    "github gh gitlab gl npm pypi slack wandb ngc nvidia aws azure google gcp openai anthropic service admin id identity vault user "
    "discord telegram sas root join app"
)
_NO_TOKEN_OF = word_set(
    "pad bos eos unk cls sep mask image video audio special stop end start begin next last first prev per max min num n total prompt "
    "new output input generated completion response decoder think bad fim suffix prefix middle vision placeholder boi eoi "
    "batch by each tool pre sub de"
)
_KEY_OF = word_set(
    "api access secret private signing signature encryption ssh deploy account master auth authorization storage shared "
    "subscription client service openai anthropic wandb hf ngc nvidia aws azure google gcp stripe session licence license registry gpg rsa "
    "pgp tls ssl host hmac cookie consumer application app datadog sendgrid"
)
_NO_KEY_OF = word_set("public sort primary foreign cache partition dict state metric reward input output prompt answer label data")
_AUTH_OF = word_set("basic http proxy npm registry docker redis")
_NO_PASS_OF = word_set(
    "forward backward first second third single one two multi by per each eval train test tests all full last next no rate did must will "
    "checks to not"
)
_NO_PASS = word_set("askpass bypass compass encompass overpass surpass trespass underpass")
_SHORT = word_set("pw psk otp totp creds cred")
_SESSIONS = word_set("sessionid jsessionid phpsessid sid")
# What follows the secret word and says something about the secret: password_file, secret_name.
_ABOUT = word_set(
    "hash hashes algo algorithm file files path paths dir name names length len min max policy id ids count counts field fields reset "
    "url uri manager managers required type types ref refs version rotation prompt expiry expires expired age error errors changed check "
    "checks valid "
    "validator validators label help message msg hint santa sauce store provider providers env variable var format regex pattern "
    "set is has enabled disabled strength mode rule rules tests suite page form screen input output size limit limits"
)


@lru_cache(maxsize=4096)
def says_secret(name: str) -> Says:
    """What `name` says about its value."""
    words = [word.lower() for word in _WORD.findall(name[-256:])]
    while len(words) > 1 and (words[-1].isdigit() or words[-1] in _STILL_VALUE):
        words.pop()
    if not words:
        return Says.NOTHING
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last.removesuffix("s").endswith(_STEMS) or last in _SHORT or words[-2:] in (["amz", "signature"], ["goog", "signature"]):
        return Says.STRONG
    if last == "pwd":  # PWD is the working directory
        return Says.STRONG if before or name.strip(".-_") != "PWD" else Says.NOTHING
    if last.endswith("pass") and last not in _NO_PASS:
        return _pass(name, last, before)
    if last.endswith(("token", "tokens")):
        prefix = last.removesuffix("s").removesuffix("token")
        return _graded(prefix or before, last, _TOKEN_OF, _NO_TOKEN_OF)
    if last in ("key", "keys"):
        return _graded(before, last, _KEY_OF, _NO_KEY_OF) if before else Says.NOTHING
    if last.endswith("key") and last.removesuffix("key") in _KEY_OF:
        return Says.STRONG
    if last == "pat":  # a personal access token
        return Says.STRONG if before and name.isupper() else Says.WEAK
    if last == "oauth" and before in _TOKEN_OF:
        return Says.STRONG
    if last in ("bindpw", "rootpw", "dockerconfigjson", "dockercfg") or words[-2:] == ["auth", "ident"]:
        return Says.STRONG
    if last == "auth":
        return Says.STRONG if before in _AUTH_OF else Says.WEAK
    if last == "keystore" or last in _SESSIONS or words[-2:] == ["session", "id"]:
        return Says.WEAK
    if words[-2:] == ["key", "id"] and len(words) > 2 and words[-3] in _KEY_OF:
        return Says.STRONG
    return Says.STRONG if last == "authorization" else _inner(words)


def _pass(name: str, last: str, before: str) -> Says:
    """`pass`, `db_pass`, `smtppass`. A capital alone is a verdict."""
    if before in _NO_PASS_OF or name.rpartition(".")[2] in ("PASS", "Pass"):
        return Says.NOTHING
    if last == "pass" and not before and name.strip(".-_") != "pass":
        return Says.NOTHING if name.isupper() else Says.WEAK
    return Says.STRONG


def _inner(words: list[str]) -> Says:
    """A secret word that is followed by others: PASSWORD_FOR_DB, TOKEN_GITHUB; `password_file` says something about one."""
    if words[-1] in _ABOUT or words[-1].endswith(("ed", "ing")):
        return Says.NOTHING
    if any(word.endswith(_PASSWORD) for word in words):
        return Says.NOTHING if any(word in _ABOUT for word in words) else Says.STRONG
    if words[0] == "token" and words[-1] in _TOKEN_OF:
        return Says.STRONG
    return Says.WEAK if any(word.endswith(("secret", "apikey")) for word in words) else Says.NOTHING


def says_password(name: str) -> bool:
    """Whether even a number under this name is a secret."""
    plain = name.lower().rstrip("s0123456789_.-")
    return plain.endswith((*_PASSWORD, "pwd", "_pas", "-pas", "otp", "_pw", "passwd")) or plain == "pw"


def _graded(before: str, last: str, strong: frozenset[str], nothing: frozenset[str]) -> Says:
    if before in strong:
        return Says.STRONG
    # In the plural they are counts and lists unless the word before says otherwise.
    return Says.NOTHING if before in nothing or last.endswith("s") else Says.WEAK


_RUN = re.compile(r"[A-Za-z0-9]{8,}")
_UUID = re.compile(r"(?i)\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_MIXED = re.compile(r"(?<=\d)(?=[A-Za-z])|(?<=[A-Za-z])(?=\d)")
_CASES = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[a-z])")
_ENCODED_PAIR = re.compile(r"[A-Za-z0-9+/]{8,2048}={0,2}")


def looks_random(value: str) -> bool:
    """Whether a value looks like a credential: letters and digits, mixed; a UUID; `user:password` in base64."""
    return any(map(_random_run, _RUN.findall(value))) or bool(_UUID.search(value)) or is_encoded_pair(value)


def _random_run(run: str) -> bool:
    digits = sum(c.isdigit() for c in run)
    if len(run) >= 16 and digits >= 2 and len(run) - digits >= 2:
        return True
    if digits >= 2 and len(_MIXED.findall(run)) >= 4:
        return True
    return len(run) >= 16 and len(_CASES.findall(run)) >= 0.4 * len(run)


def is_encoded_pair(value: str) -> bool:
    """Whether a value is `user:password` in base64, as Docker and Basic authorization keep it."""
    value = value.strip()
    if not _ENCODED_PAIR.fullmatch(value):
        return False
    try:
        text = base64.b64decode(value + "=" * (-len(value) % 4)).decode("ascii")
    except ValueError:
        return False
    return text.isprintable() and 0 < text.find(":") < len(text) - 1
