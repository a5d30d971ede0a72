"""Redaction: what must go, what must stay, and how fast."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from seatrial.core.secret_names import Says, says_secret
from seatrial.evidence.redact import Redactor

PLAIN = Redactor({})

# Test secrets are put together here so that no scanner takes this file for a leak.
HF = "hf_" + "QwErTyUiOpAsDfGhJkLzXcVbNmQwErTyUi"
JWT = "eyJ" + "hbGciOiJIUzI1NiJ9." + "eyJ" + "zdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
HEX40 = "0123456789abcdef0123456789abcdef01234567"

SHAPES = [
    HF,
    "api_org_" + "QwErTyUiOpAsDfGhJkLzXcVbNmQwErTyUi",
    "sk-" + "abcdefghijklmnopqrst1234",
    "sk-" + "ant-api03-abcdefghij_klmnop-1234567",
    "sk-" + "proj-abc123def456ghi789jkl",
    "ghp_" + "abcdefghijklmnopqrstuvwxyz0123456789",
    "gho_" + "abcdefghijklmnopqrstuvwxyz0123456789",
    "ghs_" + "abcdefghijklmnopqrstuvwxyz0123456789",
    "github_pat_" + "11ABCDEFG0abcdefghijkl_mnopqrst",
    "glpat-" + "abcDEF123456_-xyzXYZ",
    "AKIA" + "IOSFODNN7EXAMPLE",
    "xoxb-" + "123456789012-abcdefghij",
    "nvapi-" + "abcdefghijklmnopqrstuvwx_yz-0123",
    "AIza" + "SyA1234567890abcdefghijklmnopqrstuv",
    "npm_" + "abcdefghijklmnopqrstuvwxyz0123456789",
    "pypi-" + "AgEIcHlwaS5vcmcCJDEyMzQ1Njc4LTEyMzQtMTIzNC0xMjM0LTEyMzQ1Njc4",
    JWT,
]

# (text, the part that must not survive)
SECRETS = [
    ("git clone https://user:hunter2pass@github.com/x/y", "hunter2pass"),
    (f"https://oauth2:{HEX40}@gitlab.com/x", HEX40),
    (f"https://{HEX40}@github.com/x/y.git", HEX40),
    ("postgresql://admin:s3cr3t!@db:5432/seatrial", "s3cr3t!"),
    ("redis://:p@ss:word@cache:6379", "ss:word"),
    ("Authorization: Bearer abc.def-ghi", "abc.def-ghi"),
    ("curl -H 'Authorization: Basic dXNlcjpwYXNz' https://x", "dXNlcjpwYXNz"),
    ('{"authorization": "Bearer shorty"}', "shorty"),
    ("Proxy-Authorization: Digest username=u, response=deadbeef", "deadbeef"),
    ("x-api-key: 0a1b2c3d", "0a1b2c3d"),
    ("sent header Bearer 0123456789abcdefXYZ", "0123456789abcdefXYZ"),
    ("api_key=abcd1234", "abcd1234"),
    ("API key: abcd1234", "abcd1234"),
    ("apiKey: 'abcd1234'", "abcd1234"),
    ('"openai_api_key": "letters-only"', "letters-only"),
    ('{\\"password\\": \\"hunter22\\"}', "hunter22"),
    ("password=hunter2", "hunter2"),
    ("PGPASSWORD=hunter2 psql", "hunter2"),
    ("db.password: 12345678", "12345678"),
    ('password="with \\" quote and space"', "quote and space"),
    ("passwd='two words'", "two words"),
    ('password: "never closed', "never"),
    ("client_secret=zzzzzz", "zzzzzz"),
    ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "wJalrXUtnFEMI"),
    ("AccountKey=abc123==;EndpointSuffix=core", "abc123"),
    ("?X-Amz-Signature=0a0b0c0d&x=1", "0a0b0c0d"),
    ("--api-key sesame42 --model m", "sesame42"),
    ("--hf-token=sesame42", "sesame42"),
    ("--token sesame42", "sesame42"),
    ("['--api-key', 'sesame42', '--model']", "sesame42"),
    ('argv: ["--password", "sesame42"]', "sesame42"),
    (f"WANDB_API_KEY={HEX40}", HEX40),
    (f"wandb login {HEX40}", HEX40),
    (f"wandb login --relogin {HEX40}", HEX40),
    (f"machine api.wandb.ai login user password {HEX40}", HEX40),
    (f"token: {HEX40}", HEX40),
    (f"some_key = {HEX40}", HEX40),
    ("HF_TOKEN_WRITE=abcdef", "abcdef"),
    ("export MY_API_KEY_2=abcdef", "abcdef"),
    ("os.environ['HF_TOKEN'] = 'abcdef'", "abcdef"),
    ("environ={'HF_TOKEN': 'abcdef', 'HOME': '/root'}", "abcdef"),
    ("(Worker pid=7) ü password=hunter2 é", "hunter2"),
    ("İİİ password=hunter2", "hunter2"),
    ("-----BEGIN RSA PRIVATE KEY-----\\nMIIEow\\n-----END RSA PRIVATE KEY-----", "MIIEow"),
    ("-----BEGIN PRIVATE KEY-----\\nMII\\n-----END PRIVATE KEY----- password=hunter2", "hunter2"),
]

LEFT_ALONE = [
    "Loading tokenizer from /models/qwen, tokenizer_class=Qwen2TokenizerFast",
    "TOKENIZERS_PARALLELISM=false",
    "max_tokens=1024 max_new_tokens: 2048 num_memory_tokens=16 total_tokens=123456789012",
    "'pad_token': '<pad>', pad_token=<pad> eos_token_id=151643",
    'eos_token="<|endoftext|>", bos_token: <|im_start|>, unk_token="[UNK]"',
    "token_mult_prob_error: 1.0123 token_mult_prob_error=1.02",
    "throughput: 1234.5 tokens/sec, tokens per second = 12",
    "tokens_per_sec_per_gpu=1234, time per output token: 0.012",
    "author: Jane Doe <jane@example.org>, authentic=very, authored-by: someone-else",
    "keyboard=us-international-102keys monkey: banana-split-12345678",
    "num_key_value_heads=8 key_value_heads: 16 head_dim=128",
    "password_hash_algo=argon2id password_file: /etc/app/pw secret_name=db-main",
    "KeyError: 'model.layers.0.self_attn.q_proj.weight'",
    'Missing key(s) in state_dict: "model.layers.0.weight"',
    "unexpected key: model.layers.0.mlp.down_proj.weight",
    "reward_key=math_verify_v2_score input_key: prompt_text_long_name",
    "hf_hub_download hf_transfer hf_model_path=/models/llama",
    "task-based-scheduling-of-workers-0001 disk-usage-monitoring-of-node-12",
    "sk-learn-style-estimators-are-used-here",
    "https://github.com/NVIDIA/Megatron-LM@main",
    "git+https://github.com/x/y.git@v1.2.3#egg=y",
    "ssh://git@github.com/x/y.git git@github.com:x/y.git",
    "http://10.0.0.1:8000/v1 and mail to someone@example.org",
    "commit 0123456789abcdef0123456789abcdef01234567 sha256 " + "ab" * 32,
    "api_key=None token: None password: null HF_TOKEN=$HF_TOKEN api_key=${OPENAI_API_KEY}",
    "api_key=api_key token=token password=self.password",
    "token = os.environ['SOMETHING'] secret = get_secret()",
    "use_auth_token=True token=False",
    "api_key={api_key} password=%(password)s secret=$(cat file) passwords=[]",
    "api_key='***' token=<your token>",
    "Invalid token: 42. Next token: 1234",
    "image_token=151655 video_token_id: 151656 decoder_start_token=0",
    "sort_key=lambda_function_name_16 primary_key: id cache_key=abc",
    "SSH_AUTH_SOCK=/tmp/ssh-XXXX/agent.1",
    "authentication: disabled, authorised_users=12",
    "expected '-----BEGIN PRIVATE KEY-----' in the file",
    "[redacted:HF_TOKEN] and api_key=[redacted:api_key]",
    "bearer of bad news",
    "wandb: run id 0123456789abcdef0123456789abcdef01234567",
    "",
    "\x1b[32mloss\x1b[0m \udce9",
]


@pytest.mark.parametrize("secret", SHAPES)
@pytest.mark.parametrize("frame", ["{}", "got {} here", "'{}',", "x={}&y=1", "url/{}?a"])
def test_tokens_of_known_shapes_go(secret: str, frame: str) -> None:
    redacted = PLAIN.text(frame.format(secret))
    assert secret[-12:] not in redacted
    assert "[redacted:" in redacted


@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_secrets_go(text: str, secret: str) -> None:
    redacted = PLAIN.text(text)
    assert secret not in redacted
    assert "[redacted:" in redacted


@pytest.mark.parametrize("text", LEFT_ALONE)
def test_what_is_no_secret_stays(text: str) -> None:
    assert PLAIN.text(text) == text


@pytest.mark.parametrize("text", [text for text, _ in SECRETS] + SHAPES)
def test_redacting_twice_changes_nothing(text: str) -> None:
    once = PLAIN.text(text)
    assert PLAIN.text(once) == once


def test_only_the_value_goes() -> None:
    assert PLAIN.text("a=1, api_key=abcd1234, b=2") == "a=1, api_key=[redacted:api_key], b=2"
    assert PLAIN.text("https://u:p4ss@host/x") == "https://[redacted:url-credentials]@host/x"
    assert PLAIN.text("Authorization: Bearer abc\nnext") == "Authorization: Bearer [redacted:Authorization]\nnext"


def test_json_stays_json() -> None:
    row = json.dumps({"api_key": 'ab"cd\\ef', "step": 3, "note": f"with {HF}"})
    assert json.loads(PLAIN.text(row)) == {"api_key": "[redacted:api_key]", "step": 3, "note": "with [redacted:hf-token]"}


def test_values_of_the_environment_go_wherever_they_stand(tmp_path: Path) -> None:
    existing = tmp_path / "agent.sock"
    existing.touch()
    redactor = Redactor(
        {
            "MY_PASSWORD": 'p"a s/s',
            "HF_TOKEN": "letters",
            "NPM_TOKEN": "letters-and-more",
            "SSH_AUTH_SOCK": "/tmp/agent.1",
            "GOOGLE_APPLICATION_CREDENTIALS": str(existing),
            "TOKENIZERS_PARALLELISM": "disabled",
            "MAX_TOKENS": "10000000",
            "HF_TOKEN_LIMIT": "8192000",
            "REWARD_KEY": "accuracy_reward",
            "OPENAI_API_KEY": "true",
            "X_SECRET": "1",
            "DB_PASSWORD": "$ecret123",
            "GCP_CREDENTIALS": '{"type": "service_account", "id": "x"}',
            "DEPLOY_KEY": "line-one-of-it\nline-two-of-it",
        }
    )
    assert redactor.text("xlettersx") == "x[redacted:HF_TOKEN]x"
    assert redactor.text("letters-and-more") == "[redacted:NPM_TOKEN]"
    assert redactor.text('p"a s/s') == "[redacted:MY_PASSWORD]"
    assert redactor.text(json.dumps('p"a s/s')) == '"[redacted:MY_PASSWORD]"'
    assert redactor.text("p%22a%20s%2Fs") == "[redacted:MY_PASSWORD]"
    assert redactor.text("uses $ecret123") == "uses [redacted:DB_PASSWORD]"
    assert redactor.text('{"type": "service_account", "id": "x"}') == "[redacted:GCP_CREDENTIALS]"
    assert redactor.text("> line-two-of-it") == "> [redacted:DEPLOY_KEY]"
    untouched = f"/tmp/agent.1 {existing} disabled 10000000 8192000 accuracy_reward true 1"
    assert redactor.text(untouched) == untouched


def test_values_keep_their_shape() -> None:
    value = {
        "api_key": "abcd1234",
        "password": 123456,
        "max_tokens": 512,
        "tokens": [1, 2],
        "nested": [{"hf_token": "abcdef"}, ("plain", HF)],
        "passwords": ["one-of-them"],
        "none": {"token": None, "secret": True, "password": "[redacted:X]"},
    }
    assert PLAIN.value(value) == {
        "api_key": "[redacted:api_key]",
        "password": "[redacted:password]",
        "max_tokens": 512,
        "tokens": [1, 2],
        "nested": [{"hf_token": "[redacted:hf_token]"}, ("plain", "[redacted:hf-token]")],
        "passwords": ["[redacted:passwords]"],
        "none": {"token": None, "secret": True, "password": "[redacted:X]"},
    }


def test_a_column_and_the_data_of_a_secret_go_from_values() -> None:
    table = {"columns": ["user", "password", "num_tokens"], "data": [["bob", "hunter2", 12], ["amy", None, 13], "odd"]}
    assert PLAIN.value(table)["data"] == [["bob", "[redacted:password]", 12], ["amy", None, 13], "odd"]
    secret = {"apiVersion": "v1", "data": {"a": "aHVudGVyMg=="}, "kind": "Secret"}
    assert PLAIN.value(secret) == secret | {"data": {"a": "[redacted:secret-data]"}}
    assert PLAIN.value(secret | {"kind": "ConfigMap"}) == secret | {"kind": "ConfigMap"}


def test_the_value_behind_a_flag_goes_from_an_argument_list() -> None:
    arguments = ("run", "--api-key", "sesame42", "--max-tokens", "512", "--token", "short1", "--password", "--verbose", 3)
    redacted = (
        "run",
        "--api-key",
        "[redacted:api-key]",
        "--max-tokens",
        "512",
        "--token",
        "[redacted:access-token]",
        "--password",
        "--verbose",
        3,
    )
    assert PLAIN.value(arguments) == redacted


KEY = ["-----BEGIN PRIVATE KEY-----", "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC" * 2, "Zm9vYmFy", "-----END PRIVATE KEY-----"]


@pytest.mark.parametrize("prefix", ["", "(Worker pid=1) ", "    "])
def test_a_private_key_goes_line_by_line(prefix: str) -> None:
    lines = PLAIN.lines()
    redacted = [lines.line(f"{prefix}{row}\n") for row in ["before", *KEY, "after"]]
    assert redacted[0] == f"{prefix}before\n"
    assert redacted[-1] == f"{prefix}after\n"
    assert all("[redacted:private-key]" in row and row.endswith("\n") for row in redacted[1:-1])
    assert "MIIE" not in "".join(redacted)
    assert "Zm9v" not in "".join(redacted)


def test_a_torn_private_key_does_not_swallow_the_log() -> None:
    text = "\n".join([*KEY[:2], "Traceback (most recent call last):", "RuntimeError: password=hunter2"])
    redacted = PLAIN.text(text)
    assert "MIIE" not in redacted
    assert "Traceback (most recent call last):\nRuntimeError: password=[redacted:password]" in redacted


def test_an_encrypted_private_key_goes_with_its_header() -> None:
    rows = [KEY[0], "Proc-Type: 4,ENCRYPTED", "DEK-Info: AES-128-CBC,AB12", "", *KEY[1:], "after"]
    redacted = PLAIN.text("\n".join(rows)).split("\n")
    assert len(redacted) == len(rows)
    assert redacted[-1] == "after"
    assert not any("MIIE" in row or "AB12" in row for row in redacted)


def test_program_text_keeps_its_expressions() -> None:
    lines = PLAIN.lines(program=True)
    for source in (
        "token = load(key)",
        'password: str = "changeme"',
        'parser.add_argument("--api-key", help="the key of it")',
        "api_key = other_name",
    ):
        assert lines.line(source) == source
    assert HEX40 not in lines.line(f'api_key = "{HEX40}"')
    assert HF not in lines.line(f"f({HF!r})")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("HF_TOKEN", Says.STRONG),
        ("accessToken", Says.STRONG),
        ("APIKey", Says.STRONG),
        ("DB_PWD", Says.STRONG),
        ("api_tokens", Says.STRONG),
        ("PWD", Says.NOTHING),
        ("OLDPWD", Says.NOTHING),
        ("token", Says.WEAK),
        ("key", Says.NOTHING),
        ("keys", Says.NOTHING),
        ("XAUTHORITY", Says.NOTHING),
        ("prompt_tokens", Says.NOTHING),
        ("", Says.NOTHING),
        ("123", Says.NOTHING),
    ],
)
def test_what_names_say(name: str, expected: Says) -> None:
    assert says_secret(name) is expected


@pytest.mark.parametrize("unit", ["key", "a.", "token=", "eyJ", "://a@", 'password="', "sk-a"])
def test_no_line_takes_quadratic_time(unit: str) -> None:
    begin = time.process_time()
    PLAIN.text(unit * (200_000 // len(unit)))
    assert time.process_time() - begin < 20, "quadratic time would be minutes"


def test_a_log_that_another_program_wrote_is_rewritten_without_secrets(tmp_path: Path) -> None:
    log, secret = tmp_path / "server.log", "s3cr3t-Value-91827364"
    log.write_bytes(f"ready\nargs: {secret}\n".encode() + b"\xff torn\n")
    Redactor({"SOME_API_KEY": secret}).file(log)
    assert log.read_bytes() == b"ready\nargs: [redacted:SOME_API_KEY]\n\xff torn\n"
    before = log.stat().st_mtime_ns
    Redactor({"SOME_API_KEY": secret}).file(log)
    assert log.stat().st_mtime_ns == before
    Redactor({}).file(tmp_path / "none.log")
