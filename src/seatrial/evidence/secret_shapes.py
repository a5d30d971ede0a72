"""Secrets that are known by their own shape, or by the command, header or element that they stand in.

A rule runs only where one of its literals occurs, so that harmless text costs little. A rule keeps its first group, if it has one.
"""

# ruff: noqa: E501 - a pattern is read in one piece

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from seatrial.core.secret_names import Says, has_stem, looks_random, says_secret

_FREE = r"(?<![A-Za-z0-9])"
_BEFORE = r"(?<![A-Za-z0-9_-])"
_GAP = r"(?:\\*[\"'])?[\s,=]+(?:\\*[\"'])?"
"""Between the words of a command, also where they are a list of quoted strings."""
_MEASURED = r"(?![-+]?[\d.]+(?:[eE][-+]?\d+)?(?:[^\w.]|\.?$|\.\s))"
"""A number is no secret."""
_GAP_BEFORE = r"(?:\\*[\"'])?[\s,=]+"
_ARGUMENT = r"(?!\[redacted|[-$<{])[^\s\"'\\,|;&]+"
_QUOTED = r"(?!\[redacted)(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s\"'\\,|;&\[]\S*)"

Rule = tuple[tuple[str, ...], str, str]
_TOKENS: tuple[Rule, ...] = (
    (("hf_", "api_org_"), "hf-token", _FREE + r"(?:hf|api_org)_[A-Za-z0-9]{30,}"),
    (("sk-",), "sk-key", _FREE + r"sk-(?=[A-Za-z0-9_-]*\d)[A-Za-z0-9_-]{20,}"),
    (("_live_", "_test_", "whsec_"), "stripe-key", _FREE + r"(?:[srp]k_(?:live|test)|whsec)_[A-Za-z0-9+/=]{16,}"),
    (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), "github-token", _FREE + r"gh[pousr]_[A-Za-z0-9]{30,}"),
    (("github_pat_",), "github-token", _FREE + r"github_pat_[A-Za-z0-9_]{22,}"),
    (("glpat-", "gldt-", "glrt-", "glptt-", "gloas-", "glcbt-", "glsoat-", "glft-", "glimt-", "glagent-"), "gitlab-token",
     _FREE + r"gl(?:pat|dt|rt|ptt|oas|cbt|soat|ft|imt|agent)-[A-Za-z0-9_.-]{18,}"),
    (("AKIA", "ASIA"), "aws-secret-key", r"(?<![A-Za-z0-9])(A[KS]IA[0-9A-Z]{16}[^\n]{0,200}?[^A-Za-z0-9/+\n])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])"),
    (("AKIA", "ASIA", "ABIA", "ACCA"), "aws-key-id", _FREE + r"A(?:KIA|SIA|BIA|CCA)[0-9A-Z]{16}(?![A-Za-z0-9])"),
    (("xox", "xapp-"), "slack-token", _FREE + r"(?:xox[a-z](?:\.xox[a-z])?|xapp)-[A-Za-z0-9-]{10,}"),
    (("hooks.slack.com",), "slack-webhook", r"(hooks\.slack\.com/(?:services|workflows|triggers)/)[A-Za-z0-9/_-]{20,}"),
    (("webhook",), "webhook", r"(?i)(/(?:api/)?webhooks?/(?:\d+/)?)(?=[A-Za-z_-]*\d)[A-Za-z0-9_@/-]{24,}"),
    (("nvapi-",), "nvidia-key", _FREE + r"nvapi-[A-Za-z0-9_-]{20,}"),
    (("AIza",), "google-key", _FREE + r"AIza[0-9A-Za-z_-]{30,}"),
    (("ya29.", "GOCSPX-", "1//0"), "google-token", _FREE + r"(?:ya29\.|GOCSPX-|1//0)[0-9A-Za-z_-]{20,}"),
    (("npm_",), "npm-token", _FREE + r"npm_[A-Za-z0-9]{36}(?![A-Za-z0-9_])"),
    (("pypi-",), "pypi-token", _FREE + r"pypi-[A-Za-z0-9_-]{50,}"),
    (("gsk_",), "groq-key", _FREE + r"gsk_[A-Za-z0-9]{40,}"),
    (("wandb_v1_",), "wandb-key", _FREE + r"wandb_v1_[A-Za-z0-9_-]{20,}"),
    (("wandb",), "wandb-key", r"(wandb:?" + _GAP + r"login" + _GAP + r"(?:--[\w-]+(?:=\S+)?" + _GAP + r")*)(?:local-)?[0-9a-f]{40}(?![0-9a-f])"),
    (("eyJ",), "jwt", _FREE + r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){0,3}"),
    (("SG.",), "sendgrid-key", _FREE + r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"),
    (("SK",), "twilio-key", _FREE + r"SK[0-9a-f]{32}(?![A-Za-z0-9])"),
    (("key-",), "mailgun-key", _FREE + r"key-[0-9a-f]{32}(?![A-Za-z0-9])"),
    (("-us",), "mailchimp-key", _FREE + r"[0-9a-f]{32}-us\d{1,2}(?![A-Za-z0-9])"),
    ((":AA",), "telegram-token", r"(?<![A-Za-z0-9])((?:bot)?)\d{8,10}:AA[A-Za-z0-9_-]{32,}"),
    ((".",), "discord-token", _BEFORE + r"[MNO][A-Za-z0-9_-]{23,27}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,}"),
    (("dapi",), "databricks-token", _FREE + r"dapi[0-9a-f]{32}(?:-\d)?"),
    (("hvs.", "hvb.", "hvr."), "vault-token", _FREE + r"hv[sbr]\.[A-Za-z0-9_-]{20,}"),
    ((".atlasv1.",), "terraform-token", _FREE + r"[A-Za-z0-9]{10,}\.atlasv1\.[A-Za-z0-9_=-]{30,}"),
    (("dp.",), "doppler-token", _FREE + r"dp\.[a-z]{2,6}\.(?:[a-z0-9_-]+\.)?[A-Za-z0-9]{30,}"),
    (("age-secret-key-", "AGE-SECRET-KEY-"), "private-key", r"(?i)\bage-secret-key-(?:pq-)?1[a-z0-9]{20,}"),
    (("ATATT", "ATBB", "ATCTT"), "atlassian-token", _FREE + r"AT(?:ATT|BB|CTT)[A-Za-z0-9+/=_-]{20,}"),
    (("sq0",), "square-token", _FREE + r"sq0[a-z]{3}-[A-Za-z0-9_-]{20,}"),
    (("pat",), "airtable-token", _FREE + r"pat[A-Za-z0-9]{14}\.[0-9a-f]{64}"),
    (("EAA",), "facebook-token", _FREE + r"EAA[A-Za-z0-9]{60,}"),
    (("tskey-", "NRAK-", "NRII-", "PMAK-", "HRKU-", "pplx-", "xai-", "sess-", "pul-", "CCIPAT_", "FlyV1", "fm2_", "fo1_", "v1.0-", "fw_", "sbp_"), "token",
     _FREE + r"(?:fw_|sbp_|tskey-(?:[a-z]+-)?|NRAK-|NRII-|PMAK-|HRKU-|pplx-|xai-|sess-|pul-|CCIPAT_|FlyV1 |fm2_|fo1_|v1\.0-)[A-Za-z0-9_+/=-]{20,}"),
    (("do", "shp", "dckr_", "r8_", "tfp_", "gl", "sntry", "figd_", "lin_api_", "ntn_", "rnd_", "pcsk_", "pscale_"), "token",
     _FREE + r"(?:do[opr]_v1_|shp(?:at|ca|pa|ss)_|dckr_(?:pat|oat)_|r8_|tfp_|gl(?:sa|c)_|sntry[su]_|figd_|lin_api_|ntn_|rnd_|pcsk_|pscale_(?:tkn|pw|oauth)_)[A-Za-z0-9_+/=-]{20,}"),
    (("LS0tLS1CRUdJTi", "0tLS0tQkVHSU4", "tLS0tLUJFR0lO"), "private-key",
     r"[A-Za-z0-9+/]{0,4}(?:LS0tLS1CRUdJTi|0tLS0tQkVHSU4|tLS0tLUJFR0lO)[A-Za-z0-9+/=_-]*"),
    (("eyJhdXRocyI6", "ewogICJhdXRocyI6", "ewoJImF1dGhzIjo", "ewogICAgImF1dGhzIjo"), "docker-auth",
     r"(?:eyJhdXRocyI6|ewogICJhdXRocyI6|ewoJImF1dGhzIjo|ewogICAgImF1dGhzIjo)[A-Za-z0-9+/=]*"),
    (("==",), "storage-key", r"(?<![A-Za-z0-9+/:-])[A-Za-z0-9+/]{86}==(?![A-Za-z0-9+/=])"),
    (("b3BlbnNzaC1rZXktdjE",), "private-key", r"b3BlbnNzaC1rZXktdjE[A-Za-z0-9+/=]*"),
    (("RWRTY0Iy",), "private-key", r"RWRTY0Iy[A-Za-z0-9+/=]{20,}"),
    (("MII", "MC4C", "MHcC"), "private-key", r"(?<![A-Za-z0-9+/])M(?:II[A-Za-z]|C4CA|HcCA)(?=[A-Za-z0-9+/]*\d)[A-Za-z0-9+/]{60,}={0,2}"),
    (("$",), "password-hash", r"(?<![A-Za-z0-9$])\$(?:1|2[abxy]?|5|6|7|y|gy|md5|sha1|apr1|argon2(?:id|i|d)|scrypt|pbkdf2[\w-]*|bcrypt[\w-]*)\$[^\s:\"',;]{8,}"),
    (("$",), "password-hash", _FREE + r"(?:pbkdf2|bcrypt|argon2|scrypt|sha1|md5)[a-z0-9_]*\$[^\s\"':,;]{16,}"),
    (("{S", "{C"), "password-hash", r"\{(?:S?SHA(?:256|512)?|S?MD5|CRYPT)\}[A-Za-z0-9+/=$.]{8,}"),
    (("_", "-"), "token", r"(?<![A-Za-z0-9/.=_])[a-z]{2,10}(?:_[a-z0-9]{1,8}){0,2}[_-]"
     r"(?=[a-zA-Z]*\d)(?=[a-z0-9]*[A-Z])(?=[A-Z0-9]*[a-z])(?=(?:[A-Za-z]*\d){3})(?=(?:[a-z0-9]*[A-Z]){3})[A-Za-z0-9]{30,}(?![A-Za-z0-9/.])"),
)  # fmt: skip

_COMMANDS: tuple[Rule, ...] = (
    # Only where an option stands.
    (("curl", "wget", "http"), "credentials",
     r"(\b(?:curl|wget|httpie|https?)\b[^\n|;]{0,300}?[\s\"',](?:-U|-a|--auth)" + _GAP + r")(?!\[redacted)[^\s\"',|;]+:[^\s\"'|;]+"),
    (("curl",), "credentials", r"(\bcurl\b[^\n|;]{0,300}?\s-[a-zA-Z]*u\s*\"[^\s\":]+\":)(?!\[redacted)\"[^\"\n]+\""),
    (("curl",), "credentials", r"(\bcurl\b[^\n|;]{0,300}?[\s\"',]-[a-zA-Z]*u)(?!\[redacted)[^\s\"',|;:-]+:[^\s\"'|;]+"),
    (("--user", "-u", "--proxy-user", "curl"), "credentials", r"((?:--(?:proxy-)?user|[\s\"']-[a-zA-Z]{0,6}u)(?:\\*[\"'])?[=\s,]+)(?:\\*[\"'])?(?![\[$]|\d+:\d+(?![^\s\"']))[^\s\"',:/\\]+:(?!//)[^\s\"'\\]+"),
    (("-b", "--cookie"), "cookie", r"(\bcurl\b[^\n|;]{0,500}?\s(?:-b|--cookie)[\s=]+)(?!\[redacted)(?:\"[^\"\n]*\"|'[^'\n]*'|\S*=\S+)"),
    (("mysql", "mariadb", "7z", "sshpass", "mycli", "rar"), "password",
     r"(\b(?:mysql\w*|mariadb[\w-]*|mycli|7za?|u?n?rar|sshpass)\b[^\n|;]{0,300}?[\s\"',]-p)(?!\[redacted|ort|ath|rotocol|\s)(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',|;]+)"),
    (("sshpass", "docker", "podman", "buildah", "skopeo", "login", "mongo", "twine", "cqlsh", "zip", "az ", "nerdctl", "helm", "mysql", "ansible"), "password",
     r"(\b(?:sshpass|(?:docker|podman|buildah|skopeo|nerdctl|az|oc|cf|helm|crane|oras)\b[^\n|;]{0,200}?\blogin|mongo\w*|twine|cqlsh|zip|unzip)\b[^\n|;]{0,300}?[\s\"',]-(?:p|P)" + _GAP_BEFORE + r")"
     + _QUOTED),
    (("redis-cli", "ldap", "smbclient", "rpcclient", "openssl", "ssh-keygen", "keytool", "htpasswd", "sqlcmd", "bcp", "ipmitool", "mosquitto", "snmp"), "password",
     r"(\b(?:redis-cli\b[^\n|;]{0,300}?[\s\"',](?:-a|--pass)|ldap\w+\b[^\n|;]{0,300}?[\s\"',]-w|(?:sqlcmd|bcp|ipmitool|mosquitto_\w+)\b[^\n|;]{0,300}?[\s\"',]-P"
     r"|snmp\w+\b[^\n|;]{0,300}?[\s\"',]-[AX]|openssl\b[^\n|;]{0,300}?[\s\"',]-k|ssh-keygen\b[^\n|;]{0,300}?[\s\"',]-[NP]|htpasswd\b[^\n|;]{0,100}?\s-\w*b\w*\s+\S+\s+\S+)" + _GAP_BEFORE + r")" + _QUOTED),
    (("smbclient", "rpcclient", "mount", "net use", "username="), "password", r"(-U" + _GAP + r"[^\s%\"']+%)(?!\[redacted)[^\s\"']+"),
    (("curl",), "password", r"(\bcurl\b[^\n|;]{0,300}?\s(?:-E|--cert|--proxy-cert)[\s=]+[^\s:]+:)(?!\[redacted)[^\s\"']+"),
    (("curl", "http"), "token", r"((?:\bcurl\b|\bhttp\b)[^\n|;]{0,300}?\s(?:-u|--user)[\s=]+[\"']?)(?=[A-Za-z_-]*\d)[A-Za-z0-9_.-]{16,}(?=:(?:[\s\"']|$))"),
    (("-u", "-U"), "password", r"((?:^|\s)-[uU][ =]?(?!\d)[^\s:]+ -[pP] )(?!\[redacted|\d+(?:\s|$|:))(?=\S*\d)[^\s\"'/:]{6,}"),
    (("--value", "--secret-string", "put", "set"), "secret",
     r"(\b(?:secrets?|ssm|keyvault|parameter|secretsmanager)\b[^\n|;]{0,300}?\s--(?:value|secret-string|secret|body|plaintext)[\s=]+)(?!\[redacted|[\"']?(?:\$|file:))" + _QUOTED),
    (("security",), "password", r"(\bsecurity add-(?:generic|internet)-password\b[^\n|;]{0,300}?\s-[wX] )(?!\[redacted)" + _QUOTED),
    (("passwd ", "mkpasswd"), "password", r"(\b(?:openssl passwd|mkpasswd)(?:\s+-[\w-]+(?:\s+(?:sha-?\d+|md5|des|bcrypt|yescrypt))?)*\s+)(?!\[redacted|-|(?:sha-?\d+|md5|des|bcrypt|yescrypt)\b)" + _QUOTED),
    (("pass:",), "password", r"(-pass(?:in|out)?" + _GAP + r"pass:)(?!\[redacted|\$)[^\s\"']+"),
)  # fmt: skip

_CONTEXT: tuple[Rule, ...] = (
    (("mysqladmin",), "password", r"(\bmysqladmin\b[^\n|;]{0,300}?\spassword\s+)" + _QUOTED),
    (("<cookie",), "cookie", r"(<Cookie [^\s=<>]{1,100}=)(?!\[redacted)\S+(?= for )"),
    (("password for", "passphrase for"), "password",
     r"(?i)(\b(?:password|passphrase) for [\"']?[\w.@:/-]{1,80}[\"']?:[ \t]+)(?!\[redacted)[^\s\"':\\]{6,}(?=\s*(?:$|[\"'\\]))"),
    (("--token-id",), "token", r"(--token-id[=\s]+)(?!\[redacted)(?=\S*[A-Za-z])(?=\S*\d)\S{12,}"),
    (("mnemonic",), "secret", r"(?i)(\bmnemonic(?: phrase)?(?: is)?\s*[:=]\s*[\"']?)(?!\[redacted)[a-z]+(?: [a-z]+){5,}"),
    (("password",), "password", r"(?i)(<input\b[^<>\n]{0,300}?type=[\"']?password[\"']?[^<>\n]{0,300}?\bvalue=[\"'])(?!\[redacted)[^\"'\n]+"),
    (("password",), "password", r"(?i)(<input\b[^<>\n]{0,300}?\bvalue=[\"'])(?!\[redacted)[^\"'\n]+(?=[\"'][^<>\n]{0,300}?type=[\"']?password)"),
    (("secret", "password", "passwd", "passphrase", "apikey", "credential"), "secret",
     r"(?i)(<(?:[\w-]+:)?[\w.-]{0,40}(?:secret|password|passwd|passphrase|api-?key|credentials?)\b[^<>\n]{0,300}?\s(?:value|text|data|string|content)=)(?![\"'](?:\[redacted|\$|\{))(?:\"[^\"\n]{4,}\"|'[^'\n]{4,}')"),
    (("<token", "token "), "token",
     r"(?i)(<(?:[\w-]+:)?[\w.-]{0,40}token\s[^<>\n]{0,300}?\bvalue=[\"'])(?!\[redacted)(?=[A-Za-z_-]*\d)(?=[^\s\"']*[A-Za-z])[\w.+/=-]{16,}(?=[\"'])"),
    (("PASS=",), "password", r"((?<![\w-])PASS=[\"']?)(?!\[redacted|\$)(?=[^\s\"']*\d)(?=[^\s\"']*[A-Za-z])[^\s\"',;]{6,}"),
    (("password", "passphrase", "passcode", "token", "secret", "key"), "prose",
     r"(?i)(\b(?:password|passphrase|passcode|token|secret|api[ _-]key)(?: is| for [^\n]{1,80}?|: !!\w+)(?::| =|:? (?=\S*\d\S*[a-z]|\S*[a-z]\S*\d))\s*[\"']?)(?!\[redacted|\$)" + _MEASURED + r"(?=[^\s\"']*\d)(?=[^\s\"']*[A-Za-z])[^\s\"',;]{8,}"),
    (("<<<",), "password", r"(\b(?:sudo|kinit|ch?p?passwd|su|gpg|cryptsetup|docker|gh|secret-tool|wrangler|vault)\b[^\n|;]{0,200}?<<<\s*)(?!\[redacted|[\"']?\$)(?:\"[^\"\n]*\"|'[^'\n]*'|\S+)"),
    (("<<<",), "secret", r"((?i:token|secret|password|passwd|key)\b\s*<<<\s*)(?!\[redacted|[\"']?\$)(?:\"[^\"\n]*\"|'[^'\n]*'|\S+)"),
    (("mot de passe", "contraseña", "senha", "пароль", "密码", "密碼", "口令", "パスワード", "비밀번호"), "password",
     r"(?i)((?:mot de passe|contraseña|senha|пароль|密码|密碼|口令|パスワード|비밀번호)\s*[:：=]\s*)(?!\[redacted)[^\s\"',;。，]{4,}"),
    (("user",), "credentials", r"(\buser\s*=\s*\"[^\s\":]+:)(?!\[redacted|\d{1,5}\")[^\s\"]{6,}(?=\")"),
    (("sqlplus", "rman ", "expdp", "impdp"), "password", r"(\b(?:sqlplus|rman|expdp|impdp)\b[^\n|;]{0,100}?\s[\w.$]+/)(?!\[redacted)[^\s@/\"']+(?=@)"),
    (("password", "passwort", "token", "secret", "key"), "prose",
     r"(?i)(\*\*[\w -]{0,40}(?:password|passwort|passphrase|token|secret|api[ _-]?key):?\*\*:?\s*[\"'`]?)(?!\[redacted|\$)(?=[^\s\"'`]*\d)(?=[^\s\"'`]*[A-Za-z])[^\s\"'`,;]{8,}"),
    (("password", "passwd", "api_key", "apikey", "secret", "token"), "cell",
     r"(?i)([|│┃]\s*[\w.-]*(?:password|passwd|api_?key|secret(?:_key)?|(?:hf|access|auth|api)_token)\s*[|│┃]\s*)(?!\[redacted)(?=[^\s|│┃]*\d)(?=[^\s|│┃]*[A-Za-z])[^\s|│┃]{8,}"),
    (("<secret", "<password", "<token", "<apikey", "<credential"), "secret",
     r"(?i)(<(?:secret|password|token|apikey|credentials?)\b[^<>\n]{0,200}>\s*(?:<name>[^<\n]{0,100}</name>\s*)?<(?:value|string|data|text)>)(?!\[redacted)[^<\n]+"),
    (("\ttrue\t", "\tfalse\t"), "cookie", r"(\t(?:TRUE|FALSE)\t/[^\t\n]*\t(?:TRUE|FALSE)\t\d+\t[^\t\n]+\t)(?!\[redacted)\S+"),
    (("community",), "password", r"(\bsnmp\w*(?:-server)? community )(?!\[redacted)[^\s\"']{6,}"),
    (("bearer",), "bearer-token", r"(?i)(\bbearer(?:\\*\s|%20|\+|:)\s*)(?=[A-Za-z._~+/=-]*[\dA-Z])[A-Za-z0-9._~+/=-]{8,}"),
    (("password", "passwd"), "netrc-password",
     r"(\b(?:machine\s+\S+|default|login\s+\S+)(?:\s+(?:login|account|machine)\s+\S+)*\s+(?:password|passwd)\s+)(?![\"']?\[redacted)(?:\"[^\"\n]*\"|'[^'\n]*'|\S+)"),
    (("sig=",), "signature", r"(?i)((?:[?&;\"'\s]|&amp;)sig=)(?!\[redacted)[^&\s\"'<>]{6,}"),
    (("signature", "policy=", "credential=", "token=", "hmac="), "signature",
     r"(?i)([?&;](?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|Signature|Policy|hmac)=)(?!\[redacted)[^&\s\"'<>]{6,}"),
    (("key=", "token=", "code=", "auth=", "secret=", "session=", "jwt=", "?t=", "&t="), "query-secret",
     r"(?i)([?&](?:key|token|code|auth|secret|session|jwt|apikey|t)=)(?!\[redacted)(?=[^&\s]*\d)(?=[^&\s]*[a-z])[^&\s\"'<>]{10,}"),
    (("login",), "token",
     r"(\b(?:wandb|vault|modal|netlify|railway|huggingface-cli|hf)" + _GAP + r"(?:auth" + _GAP + r")?login" + _GAP + r")(?=[A-Za-z._-]*\d)" + _ARGUMENT),
    (("echo ", "printf "), "password",
     r"(\b(?:echo|printf)\s+(?:-\w+\s+)?)(?!\[redacted|[\"']?\$)(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s|]+)"
     r"(?=\s*\|[^\n]*?(?:chpasswd|sudo\s+(?:-\w+\s+)*-S|--password-stdin|passwd\b|--with-token|\blogin\b|kinit|su\b|gpg\b|ssh-add|cryptsetup|\bpass insert|secret|keyring|vault (?:kv|write)|ansible-vault|\bage\b))"),
    (("login",), "token", r"(\blogin\(\s*(?:\w+\s*=\s*[^,\n]{1,80},\s*){0,4}(?:key|token)\s*=\s*)(?![\"']\[redacted)(?:\"[^\"\n]+\"|'[^'\n]+')"),
    (("insert",), "row", r"(?i)(\binsert\s+into\b[^\n]{0,200}?(?:passw|secret|token|api_?key)[^\n]{0,200}?\bvalues\s*\()(?!\[redacted)[^)\n]+"),
    (("AUTH",), "password", r"((?:^|[\s\"'])AUTH[\"']?\s+[\"']?)(?!\[redacted)(?=[^\s\"']*\d)[^\s\"']{8,}"),
    (("basic ",), "credentials", r"(\b[Bb]asic )(?=[A-Za-z+/]*[0-9=])[A-Za-z0-9+/]{12,}={0,2}"),
    (("http-basic.", "pypi-token."), "password", r"(\bhttp-basic\.\S+\s+\S+\s+|\bpypi-token\.\S+\s+)(?!\[redacted)\S+"),
    (("/t/",), "token", r"(//[\w.:-]+/t/)(?!\[redacted)(?=[A-Za-z-]*\d)[A-Za-z0-9-]{12,}"),
    (("enter", "paste", "provide"), "prompt",
     r"(?i)(\b(?:enter|paste|provide)\b[^\n:]{0,60}\b(?:token|key|password|passphrase|secret|pin)\b[^\n:]{0,80}:\s+)(?!\[redacted)(?=\S*\d)(?=\S*[A-Za-z])[^\s/\"',;\\]{8,}(?=\s*(?:$|[\"'\\]))"),
    (("unseal key", "seed phrase", "recovery phrase", "mnemonic phrase", "recovery key", "recovery code"), "secret",
     r"(?i)(\b(?:unseal key \d+|(?:seed|recovery|mnemonic) phrase|recovery (?:key|code))(?: is)?\s*[:=]\s*)(?!\[redacted)(?:\S*\d\S*|[a-z]+(?: [a-z]+){5,})"),
    (("pin:", "pin=", "pin code"), "pin", r"(\bPIN(?: code)?\s*[:=]\s*)\d{4,8}\b"),
    (("credentials", "login"), "credentials",
     r"(?i)(\b(?:credentials|logins?|user/pass(?:word)?)\s*:\s*[\w.@-]{2,64}\s*[/:]\s*)(?!\[redacted|//)(?=[^\s/]*\d)(?=[^\s/]*[A-Za-z])[^\s/\"',;]{8,}(?=$|[\s\"',;)\\])"),
    (("::add-mask::",), "masked", r"(::add-mask::)(?!\[redacted)\S+"),
    (("::set-output", "::save-state"), "output", r"(?i)(::(?:set-output|save-state) name=[\w-]*(?:token|secret|passw|key|pat)[\w-]*::)(?!\[redacted)\S+"),
    (("mc alias", "mc config host"), "password", r"(\bmc (?:alias set|config host add) \S+ \S+ \S+ )(?!\[redacted|-|\$)\S+"),
    (("setuser",), "password", r"(\bSETUSER \S+[^\n]*? [>#])(?!\[redacted)\S+"),
    (("keyring", "set_password"), "password", r"(\bset_password\(\s*(?:[bru]?[\"'][^\"'\n]*[\"']\s*,\s*){2}[bru]?)(?![\"']\[redacted)(?:\"[^\"\n]*\"|'[^'\n]*')"),
    (("vault",), "secret", r"(\bvault (?:kv put|kv patch|write) \S+(?: [\w.-]+=\[redacted:\w+\])* [\w.-]+=)(?!\[redacted|@|\$)" + _QUOTED),
    (("client(",), "api-key", r"(\b\w*Client\(\s*)(?=[\"'][A-Za-z_-]*\d)(?=[\"'][a-z0-9_-]*[A-Z])(?![\"']\[redacted)(?:\"[A-Za-z0-9_-]{20,}\"|'[A-Za-z0-9_-]{20,}')"),
    (("\"username\"", "'username'"), "api-key", r"([\"']username[\"']\s*:\s*[\"'][^\"'\n]*[\"']\s*,\s*[\"']key[\"']\s*:\s*[\"'])(?=[A-Za-z]*\d)[A-Za-z0-9]{16,}(?=[\"'])"),
    (("jdbc:oracle",), "password", r"(jdbc:oracle:\w+:[\w.$-]+/)(?!\[redacted)[^\s@\"']+(?=@)"),
    (("password={", "pwd={"), "password", r"(?i)((?:password|pwd)=\{)(?!\[redacted)[^{}\n]+(?=\}(?:;|$|[\"']))"),
    (("sip:", "sips:"), "password", r"(\bsips?:[\w.+-]+:)(?!\[redacted|\d{1,5}(?![\w@]))[^\s@:]+(?=@)"),
    (("/p:",), "password", r"(\s/p:)(?!\[redacted)\S+"),
    (("login",), "token", r"(\b(?:cargo|fly|flyctl|heroku|doctl|npm|yarn|oc|wandb|hf)\s+(?:auth\s+)?login\s+)(?!\[redacted|-)(?=[A-Za-z_-]*\d)\S{12,}"),
    (("from-literal",), "secret", r"(--from-literal(?:=|\s+)[\w.-]+=)(?!\[redacted)(?:\"[^\"\n]*\"|'[^'\n]*'|\S+)"),
    (("AUTH ",), "credentials", r"(\bAUTH (?:PLAIN|LOGIN|XOAUTH2|CRAM-MD5) )[A-Za-z0-9+/=]{8,}"),
    ((":::", "realm"), "password-hash", r"(?i)(\b[\w.-]+:(?:\d+|[\w ]+):(?:[0-9a-f]{32}:)?)[0-9a-f]{32}(?::::)?(?![0-9a-f])"),
    (("add_user", "change_password", "useradd", "psexec", "net use", "rclone obscure", "lftp", "gh secret", "adduser"), "password",
     r"(\b(?:rabbitmqctl\s+(?:add_user|change_password)\s+\S+\s+|(?:useradd|usermod|psexec)\b[^\n|;]{0,300}?\s-p\s+|net use \S+ \S+ |rclone obscure "
     r"|lftp\b[^\n|;]{0,200}?-u\s+[^\s,]+,|gh secret set\b[^\n|;]{0,200}?(?:--body|-b)[\s=]+))(?!\[redacted|/user)(?:\"[^\"\n]*\"|'[^'\n]*'|\S+)"),
    (("password",), "password", r"(?i)(password[^\n]{0,20}\bsend\s+(?:--\s+)?)(?![\"']?\[redacted|[\"']?\$)(?:\"[^\"\n]*\"|'[^'\n]*')"),
    (("webhook",), "webhook", r"((?:webhookb2|IncomingWebhook)/)(?!\[redacted)[\w@/-]{20,}"),
    (("login",), "password", r"(\.login\(\s*[bruf]?[\"'][^\"'\n]*[\"']\s*,\s*[bruf]?)(?![\"']\[redacted)(?:\"[^\"\n]*\"|'[^'\n]*')"),
    (("auth",), "password", r"(?i)((?:basicauth|digestauth|basic_auth|\bauth\s*=\s*|\bauth[\"']\s*:\s*)\s*[(\[]\s*[bruf]?[\"'][^\"'\n]*[\"']\s*,\s*[bruf]?)(?![\"']\[redacted)(?:\"[^\"\n]*\"|'[^'\n]*')"),
    (("securestring",), "password", r"(?i)(ConvertTo-SecureString\s+(?:-String\s+)?)(?!\[redacted|\$)(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s-]\S*)"),
    (("pscredential",), "password", r"(?i)(PSCredential\s*\(\s*[\"'][^\"'\n]*[\"']\s*,\s*)(?!\[redacted|[\"']\[redacted|\$|\()(?:\"[^\"\n]*\"|'[^'\n]*')"),
    (("identified",), "password", r"(?i)(\bidentified\s+(?:with\s+\S+\s+)?(?:by|as)\s+(?:password\s+)?)(?!\[redacted|[\"']\[redacted)(?:\"[^\"\n]*\"|'[^'\n]*'|\S+)"),
    (("password",), "password", r"(?i)(\b(?:with|set|encrypted|user\s+\S+)\s+(?:encrypted\s+)?password\s*(?:=|\bto\b|\bfor\b[^=\n]{0,80}=|\s)\s*)(?![\"']\[redacted)(?:\"[^\"\n]+\"|'[^'\n]+')"),
    (("requirepass", "masterauth"), "password", r"(\b(?:requirepass|masterauth)\s+)(?!\[redacted)\S+"),
    ((":5432:", ":3306:", ":*:", ":6432:", ":5433:", ":5434:", ":6543:", ":26257:", ":5439:"), "password",
     r"((?:^|\s)[^\s:]+:(?:543[2-9]|6432|6543|3306|26257|\*):[^\s:]+:[^\s:]+:)(?!\[redacted)\S+"),
    (("@",), "url-credentials", r"((?<![\w.:/@\[-])[A-Za-z][\w.+-]{0,63}:)(?!\[redacted|//)[^\s:@/\"'(),=]{3,128}(?=@(?!sha\d)(?:tcp\(|unix\()?[A-Za-z\d][\w.-]{0,200}(?::\d{2,5}\b|/|\)))"),
    (("\"d\"", "\"p\"", "\"q\"", "\"k\"", "\"dp\"", "\"qi\""), "private-key", r"(\"(?:d|p|q|dp|dq|qi|k)\"\s*:\s*\")[A-Za-z0-9_-]{20,}(?=\")"),
    (("PRIVATE-TOKEN", "Token ", "ApiKey", "apikey "), "token", r"(\b(?:Token|ApiKey|apikey)\s+(?:token=)?)(?=[A-Za-z]*\d)(?=[\dA-Z_-]*[a-z])[A-Za-z0-9_.=+/-]{20,}"),
)  # fmt: skip

Compiled = tuple[tuple[str, ...], str, re.Pattern[str]]


def _compiled(rules: tuple[Rule, ...], small: bool = False) -> tuple[Compiled, ...]:
    """With `small`, literals are looked for in the text in small letters."""
    made = ((literals, kind, re.compile(pattern)) for literals, kind, pattern in rules)
    return tuple(
        (
            tuple(dict.fromkeys(map(str.lower, literals))) if small else literals,
            (r"\1" if pattern.groups else "") + f"[redacted:{kind}]",
            pattern,
        )
        for literals, kind, pattern in made
    )


_TOKEN_RULES, _COMMAND_RULES, _CONTEXT_RULES = _compiled(_TOKENS), _compiled(_COMMANDS), _compiled(_CONTEXT, small=True)
# What is left of the rules for a line without a word that says secret.
_WITHOUT_STEMS = ((tuple(one for one in literals if not has_stem(one)), shown, pattern) for literals, shown, pattern in _CONTEXT_RULES)
_STEMLESS_RULES = tuple(rule for rule in _WITHOUT_STEMS if rule[0])
STEMLESS_LITERALS = tuple(dict.fromkeys(literal for literals, *_ in _STEMLESS_RULES for literal in literals))
_GENERAL = (".", "_", "-")
"""Literals that say nothing; the patterns of their rules ask for any digits."""
ZEROS = str.maketrans("123456789", "000000000")
_GENERAL_PATTERNS = tuple(pattern for literals, _, pattern in _TOKEN_RULES if set(literals) <= set(_GENERAL))
_ZERO_LITERALS = tuple(
    dict.fromkeys(one.translate(ZEROS) for literals, *_ in _TOKEN_RULES if not set(literals) <= set(_GENERAL) for one in literals)
)
STEM_LITERALS = tuple(dict.fromkeys(literal for literals, *_ in _CONTEXT_RULES for literal in literals if has_stem(literal)))
_RUN = re.compile(r"(?a:\b[\w-]{16,})")
_NO_TOKEN = re.compile(r"[a-z_-]+|\d+(?:e-?\d+)?|[A-Za-z_-]{16,19}")
_PREFIXES = ("$", "{S", "{C", "ervices/", "ebhook")
"""Every token has a long run that is no word and no number, or a prefix of its own."""
_WORD_PREFIX = re.compile(r"(?:hf|gh[pousr]|npm|gsk)_|(?:nvapi|pypi|pplx|xai|tskey)-")
_OPTION = re.compile(r"[\s\"',]-[A-Za-z-]")
_URL = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,20}:(?:\\?/|_){2})([^\s/\"'<>?#]{1,512})@")
_ODD_URL = re.compile(r"(://(?!\[redacted)[^\s/:@\"'<>?#]{0,64}:)(?!\d{1,5}[/?#]|\[redacted)[^\s\"'<>@:]{1,200}(?=@[A-Za-z0-9])")
"""A password with a slash, a question mark or a hash in it; a port is none."""

# A name and its value as two fields of one element: Kubernetes, XML, JSON, Terraform.
_N = r"[A-Za-z0-9_.:/$-]{2,128}"
_FIELD = (
    r"(?<![\w.-])(?:\\*[\"'])?(?:name|key|Name|Key|NAME|KEY|variable|variableName|ParameterKey|var|field|header|id|n)(?:\\*[\"'])?\s*[:=]\s*(?:\\*[\"'])?(?P<name>"
    + _N
    + r")(?:\\*[\"'])?"
)
_WORTH = (
    r"(?<![\w.-])(?:\\*[\"'])?(?:value|Value|VALUE|val|ParameterValue|default|Default|content|string|secret|data|v)(?:\\*[\"'])?\s*[:=]\s*"
)
_ANY = r"(?:\"(?P<a>(?:\\.|[^\"\\\n])*)\"|'(?P<b>[^'\n]*)'|\\+\"(?P<c>[^\"\n]*?)\\+\"|(?P<d>[^\s\"'<>,}{\[\]\\]+))"
_PAIRS = (
    re.compile(_FIELD + r"[^{}\n]{0,200}?[\s,;]\s*" + _WORTH + _ANY),
    re.compile(_WORTH + _ANY + r"[^{}\n]{0,200}?[\s,;]\s*" + _FIELD),
)
_ELEMENT = re.compile(
    r"<(?P<name>[A-Za-z][\w:.-]{0,80})(?P<attributes>(?:\s[^<>\n]{0,500})?)>(?:\s*<!\[CDATA\[)?(?P<value>[^<>\n]+?)(?:\]\]>\s*)?</"
)
_PLIST = re.compile(r"<(?:key|name)>(?P<name>[^<>\n]{1,128})</(?:key|name)>\s*<(?:string|data|value)>(?P<value>[^<>\n]+)</")
_ATTRIBUTE = re.compile(r"(?:name|key|id)\s*=\s*[\"']([^\"']{1,128})[\"']")
_COMMAND_PAIR = re.compile(
    r"(?:\b(?:setenv|ENV|ARG|setx|putenv|define|(?:configure|config|secret|secrets|env|variable|kv)\s+(?:set|add|put|--\w+)|config)\s+(?:--?[\w-]+\s+){0,3})"
    r"[\"']?(?P<name>[^\s\"'=]{2,200})[\"']?\s+(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s\"'=-]\S*)"
)  # fmt: skip
_OTHERWISE = re.compile(
    r"(?P<name>[A-Za-z_][\w.]{1,80})(?:[\"']?[)\]])?(?:\s*=\s*[\w.()\[\]]{1,80})?\s+or\s+(?:\"(?P<a>[^\"\n]+)\"|'(?P<b>[^'\n]+)')"
)
_TERRAFORM = re.compile(r"variable\s+\"(?P<name>[\w.-]{2,128})\"\s*\{[^}\n]{0,200}?\bdefault\s*=\s*\"(?P<a>[^\"\n]+)\"")
_VALUE_GROUPS = ("a", "b", "c", "d")


def tokens(text: str) -> str:
    """`text` without tokens of known shapes and credentials in URLs: what is a secret wherever it stands."""
    if len(text) >= 20 and may_hold_token(text):
        text = _applied(_TOKEN_RULES, text, text)
    if "@" in text and ("://" in text or ":\\/\\/" in text or ":__" in text):
        text = _URL.sub(_without_credentials, text)
        text = _ODD_URL.sub(r"\1[redacted:url-credentials]", text)
    return text


def may_hold_token(text: str) -> bool:
    """Whether a text has a run or a prefix that a token needs."""
    for run in _RUN.findall(text):
        if len(run) > 64 or _may_be_token(run):
            return True
    for prefix in _PREFIXES:  # noqa: SIM110 - a generator takes three times as long
        if prefix in text:
            return True
    return False


def may_be_in_word(word: str) -> bool:
    """Whether a rule for tokens may match within a word whose digits are zeros."""
    for literal in _ZERO_LITERALS:
        if literal in word:
            return True
    return any(pattern.search(word) for pattern in _GENERAL_PATTERNS)


@lru_cache(maxsize=4096)
def _may_be_token(run: str) -> bool:
    return not _NO_TOKEN.fullmatch(run) or _WORD_PREFIX.search(run) is not None


def contexts(text: str, lowered: str, stem: bool) -> str:
    """`text` without what stands where commands, headers and SQL have their secrets.

    `lowered` is it in small letters; `stem` says whether it holds a word that says secret.
    """
    if (" -" in text or '"-' in text or "'-" in text) and _OPTION.search(text):
        text = _applied(_COMMAND_RULES, text, text)
    if stem:
        return _applied(_CONTEXT_RULES, text, lowered)
    for literal in STEMLESS_LITERALS:
        if literal in lowered:
            return _applied(_STEMLESS_RULES, text, lowered)
    return text


def _applied(rules: tuple[Compiled, ...], text: str, shown: str) -> str:
    """`text` after the rules of which a literal is in what is `shown`."""
    for literals, replacement, pattern in rules:
        for literal in literals:
            if literal in shown:
                text = pattern.sub(replacement, text)
                break
    return text


def pairs(text: str, is_secret: Callable[[str, str], bool]) -> str:
    """`text` without values that stand in a field beside the field with their name; `is_secret(value, name)` decides."""

    def replaced(match: re.Match[str]) -> str:
        name = match["name"]
        group = next((group for group in (*_VALUE_GROUPS, "value") if group in match.groupdict() and match[group] is not None), "")
        if not group or not is_secret(match[group].strip().strip("\"'"), _last(name)):
            return match[0]
        return without(match, group, _last(name))

    def without(match: re.Match[str], group: str, name: str) -> str:
        text, start = match.string, match.start()
        return f"{text[start : match.start(group)]}[redacted:{name}]{text[match.end(group) : match.end()]}"

    def element(match: re.Match[str]) -> str:
        named = _ATTRIBUTE.search(match["attributes"])
        names = (match["name"].rpartition(":")[2], named[1] if named else "")
        name = next((one for one in names if one and is_secret(match["value"].strip(), one)), None)
        return match[0] if name is None else without(match, "value", name)

    text = _OTHERWISE.sub(replaced, text) if " or " in text else text
    text = _TERRAFORM.sub(replaced, text) if "variable" in text else text
    if "</" in text:
        text = _ELEMENT.sub(element, text)
        text = _PLIST.sub(replaced, text)
    lowered = text.lower()
    if any(word in lowered for word in ("value", "val", "default", "content", "string", "secret", "data", '"v"')):
        for pattern in _PAIRS:
            text = pattern.sub(replaced, text)
    if any(word in text for word in ("setenv", "ENV", "ARG", "setx", "putenv", "define", "config", "secret", "env", "variable", "kv")):
        text = _COMMAND_PAIR.sub(replaced, text)
    return text


def _last(name: str) -> str:
    return re.split(r"[:/$]", name)[-1] or name


def _without_credentials(match: re.Match[str]) -> str:
    scheme, user = match.groups()
    if "[redacted" in user or not (":" in user or "%3A" in user or _is_token(user, scheme)):
        return match.group(0)
    return f"{scheme}[redacted:url-credentials]@"


def _is_token(user: str, scheme: str) -> bool:
    """Whether the user of a URL is a token: a long one, of a protocol that has no users like `git`."""
    if looks_random(user) or says_secret(user) is Says.STRONG:
        return True
    return scheme.startswith("http") and len(user) >= 12 and any(c.isdigit() for c in user)
