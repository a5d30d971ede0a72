"""Secret shapes, each with the parts that must not survive, and harmless lines, which must.

Secrets are put together here so that no scanner takes this file for a leak.
"""

# ruff: noqa: E501 - a pattern is read in one piece, in its own letters

from __future__ import annotations

import base64
import json

PW = "Tr0ub4dor" + "&3xyzzy"
PLAIN_PW = "hunter2" + "hunter9"
WORDS = "correct horse " + "battery staple"
B62 = "aB3dE5gH7jK9mN1pQ3sT5vW7yZ2bC4dF6" + "hJ8"
HEX32 = "9f86d081884c7d65" + "9a2feaa0c55ad015"
HEX40 = HEX32 + "a3bf4f1b"
AWS = "wJalrXUtnFEMI/K7MDENG" + "/bPxRfiCYzzzzzzzKEY"
B64PW = base64.b64encode(f"admin:{PLAIN_PW}".encode()).decode()
UUID = "3f2b8c1e-9d47-4a6b-" + "8e15-7c0d9a2b4f63"
_DASH = "-" * 5
ROWS = (
    "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtzc2gtZW",
    "QyNTUxOQAAACBW1oXvJ3l2zUvzq8GQ0c3Jr1H7yqv4v0zXo2m3nVbK1gAAAJgR9k5DEfZO",
    "QwAAAAtzc2gtZWQyNTUxOQAAACBW1oXvJ3l2zUvzq8GQ0c3Jr1H7yqv4v0zXo2m3nVbK1g",
    "AAAEDq5m0kq9QJ8m1mQ1C2s7nG4b0w7Zp1lE8yT3uR5vX9cFbWhe8neXbNS/OrwZDRzcmv",
    "UfvKq/i/TNejabedVsrWAAAAEHVzZXJAbGFwdG9wAQIDBAU=",
)
PEM_ROWS = (
    "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj",
    "MzEfYyjiWA4R4/M2bS1GB4t7NXp98C3SC6dVMvDuictGeurT8jNbvJZHtCSuYEvu",
    "Zm9vYmFyYmF6cXV4Cg==",
)


def block(label: str, rows: tuple[str, ...] = PEM_ROWS, dashes: str = _DASH) -> str:
    """A key block."""
    return "\n".join((f"{dashes}BEGIN {label}{dashes}", *rows, f"{dashes}END {label}{dashes}"))


OPENSSH = block("OPENSSH PRIVATE KEY", ROWS)
PEM = block("PRIVATE KEY")
PUTTY = "\n".join(
    (
        "PuTTY-User-Key-File-3: ssh-ed25519",
        "Encryption: none",
        "Comment: laptop",
        "Public-Lines: 1",
        ROWS[0],
        "Private-Lines: 1",
        ROWS[3],
        "Private-MAC: " + HEX40,
    )
)
ESCAPED = PEM.replace("\n", "\\n") + "\\n"
WRAPPED = base64.b64encode(PEM.encode()).decode()
_C = B62[:24]
_B64 = base64.b64encode(PLAIN_PW.encode()).decode()
_ROW_PARTS = PEM_ROWS
_SSH_PARTS = ROWS

SHAPES: list[tuple[str, str, tuple[str, ...]]] = [
    # key blocks
    ("openssh", OPENSSH, _SSH_PARTS),
    ("pem rsa", block("RSA PRIVATE KEY"), _ROW_PARTS),
    ("pem ec", block("EC PRIVATE KEY"), _ROW_PARTS),
    ("pem pkcs8", PEM, _ROW_PARTS),
    ("pem encrypted", block("ENCRYPTED PRIVATE KEY"), _ROW_PARTS),
    ("pem with header", block("RSA PRIVATE KEY", ("Proc-Type: 4,ENCRYPTED", "DEK-Info: AES-128-CBC," + HEX32, "", *PEM_ROWS)), (*_ROW_PARTS, HEX32)),
    ("pgp", block("PGP PRIVATE KEY BLOCK", ("Version: GnuPG v2", "", *PEM_ROWS, "=aB3d")), _ROW_PARTS),
    ("ssh2", block("SSH2 ENCRYPTED PRIVATE KEY", ('Comment: "2048-bit RSA"', *ROWS), "---- ").replace("-----BEGIN", "---- BEGIN"), _SSH_PARTS),
    ("putty", PUTTY, (ROWS[0], ROWS[3], HEX40)),
    ("age", "AGE-SECRET-KEY-1" + "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L" + "QPZRY9X8GF2TVDW0S3JN54KHCE", ("QPZRY9X8GF2TVDW0S3JN",)),
    ("openvpn static", block("OpenVPN Static key V1", (HEX32, HEX32[::-1])), (HEX32, HEX32[::-1])),
    ("ansi", OPENSSH.replace("\n", "\x1b[0m\n\x1b[32m"), _SSH_PARTS),
    ("quoted list", "\n".join(f"    '{row}\\n'," for row in OPENSSH.split("\n")), _SSH_PARTS),
    ("python concatenation", "KEY = (" + "\n".join(f'"{row}\\n"' for row in OPENSSH.split("\n")) + ")", _SSH_PARTS),
    ("yaml block", "key: |\n" + "\n".join(f"    {row}" for row in OPENSSH.split("\n")), _SSH_PARTS),
    ("one line", f'"private_key": "{ESCAPED}"', _ROW_PARTS),
    ("one line, twice escaped", f'"{{\\"k\\": \\"{ESCAPED}\\"}}"'.replace("\\n", "\\\\n"), _ROW_PARTS),
    ("torn", "\n".join(OPENSSH.split("\n")[:-2]), _SSH_PARTS[:-1]),
    ("torn in one line", f"key={ESCAPED[: len(ESCAPED) // 2]}", (PEM_ROWS[0],)),
    ("end without begin", "\n".join(OPENSSH.split("\n")[2:]), _SSH_PARTS[1:]),
    ("crlf", OPENSSH.replace("\n", "\r\n"), _SSH_PARTS),
    ("base64 of a block", f"data: {WRAPPED}", (WRAPPED[20:60], WRAPPED[-40:])),
    ("interleaved", OPENSSH.replace("\n", "\n(Worker pid=12) step 3 loss 0.5 reward 1.0\n"), _SSH_PARTS),
    ("spaced rows", block("PRIVATE KEY", tuple(" ".join(row[at : at + 8] for at in range(0, len(row), 8)) for row in PEM_ROWS)), tuple(row[:8] for row in PEM_ROWS)),
    ("rows without markers", "\n".join(ROWS[:-1]), _SSH_PARTS[:-1]),
    ("ansible vault", f"$ANSIBLE_VAULT;1.1;AES256\n{HEX40 * 2}\n{HEX32}", (HEX40, HEX32)),
    # files
    ("netrc", f"machine api.x.ai login bob password {PLAIN_PW}", (PLAIN_PW,)),
    ("netrc in lines", f"machine api.x.ai\nlogin bob\npassword {PLAIN_PW}", (PLAIN_PW,)),
    ("netrc, indented", f"machine api.x.ai\n  login bob\n  password {PW}", (PW,)),
    ("pgpass", f"db.local:5432:prod:bob:{PW}", (PW,)),
    ("pypirc", f"[pypi]\nusername = bob\npassword = {PW}", (PW,)),
    ("npmrc", f"//registry.npmjs.org/:_authToken={UUID}", (UUID,)),
    ("npmrc auth", f"_auth={B64PW}", (B64PW,)),
    ("htpasswd", "bob:$apr1$" + "x8Jk2LmN$abcdefghijklmnopqrstu1", ("abcdefghijklmnopqrstu1",)),
    ("shadow", "root:$6$" + "saltsalt$abcdefghijklmnopqrstuvwxyz0123456789:19000:0", ("abcdefghijklmnopqrstuvwxyz",)),
    ("aws ini", f"[default]\naws_access_key_id = AKIA{'IOSFODNN7EXAMPLE'}\naws_secret_access_key = {AWS}", ("IOSFODNN7EXAMPLE", AWS)),
    ("docker config", f'{{"auths": {{"ghcr.io": {{"auth": "{B64PW}"}}}}}}', (B64PW,)),
    ("kubeconfig", f"    client-key-data: {WRAPPED}\n    token: {B62}", (WRAPPED[30:80], B62)),
    ("service account", f'{{"type": "service_account", "private_key_id": "{HEX40}", "private_key": "{ESCAPED}"}}', (HEX40, PEM_ROWS[1])),
    ("maven", f"<server><id>x</id><username>u</username><password>{PW.replace('&', '')}</password></server>", (PW.replace("&", ""),)),
    ("xml attribute", f'<user name="bob" password="{PLAIN_PW}"/>', (PLAIN_PW,)),
    ("xml add", f'<add key="ApiSecret" value="{PLAIN_PW}"/>', (PLAIN_PW,)),
    ("xml named string", f'<string name="api_key">{PLAIN_PW}</string>', (PLAIN_PW,)),
    ("xml in lines", f"<password>\n  {PLAIN_PW}\n</password>", (PLAIN_PW,)),
    ("plist", f"<key>Password</key>\n<string>{PLAIN_PW}</string>", (PLAIN_PW,)),
    ("kubernetes pair", f"- name: DB_PASSWORD\n  value: {PLAIN_PW}", (PLAIN_PW,)),
    ("kubernetes pair, quoted", f'- name: "DB_PASSWORD"\n  value: "{WORDS}"', (WORDS,)),
    ("kubernetes pair, reversed", f"- value: {PLAIN_PW}\n  name: DB_PASSWORD", (PLAIN_PW,)),
    ("kubernetes json", f'{{"name": "DB_PASSWORD", "value": "{PLAIN_PW}"}}', (PLAIN_PW,)),
    ("kubernetes json, reversed", f'{{"value": "{PLAIN_PW}", "name": "DB_PASSWORD"}}', (PLAIN_PW,)),
    ("kubernetes secret", f"kind: Secret\nmetadata:\n  name: x\ndata:\n  whatever: {base64.b64encode(PLAIN_PW.encode()).decode()}", (base64.b64encode(PLAIN_PW.encode()).decode(),)),
    ("terraform state", f'"db_password": {{"value": "{PLAIN_PW}", "type": "string"}}', (PLAIN_PW,)),
    ("yaml nested", f"password:\n  value: {PLAIN_PW}", (PLAIN_PW,)),
    ("yaml next line", f"password:\n    {PLAIN_PW}", (PLAIN_PW,)),
    ("yaml block scalar", f"db_password: |\n  {PLAIN_PW}\nnext: 1", (PLAIN_PW,)),
    ("yaml folded words", f"passphrase: >-\n  {WORDS}", (WORDS,)),
    ("yaml list", f"passwords:\n  - {PLAIN_PW}\n  - {PW}", (PLAIN_PW, PW)),
    ("yaml words", f"passphrase: {WORDS}", ("battery staple",)),
    ("toml", f'[db]\npassword = "{WORDS}"', (WORDS,)),
    ("ini aligned", f"password            = {PW}", (PW,)),
    ("dotenv", f"DB_PASSWORD={PW}", (PW,)),
    ("dotenv quoted", f"export DB_PASSWORD = '{WORDS}'", (WORDS,)),
    ("continued", f"export HF_TOKEN=\\\n{PLAIN_PW}", (PLAIN_PW,)),
    # commands
    ("curl -u", f"curl -u bob:{PLAIN_PW} https://x", (PLAIN_PW,)),
    ("curl --user", f"curl -s --user bob:{PLAIN_PW} https://x", (PLAIN_PW,)),
    ("curl --user=", f"curl --user=bob:{PLAIN_PW} https://x", (PLAIN_PW,)),
    ("curl argv", f"['curl', '-u', 'bob:{PLAIN_PW}', 'https://x']", (PLAIN_PW,)),
    ("curl cookie", f"curl -b 'sid={PLAIN_PW}' https://x", (PLAIN_PW,)),
    ("mysql -p", f"mysql -h db -u root -p{PLAIN_PW} prod", (PLAIN_PW,)),
    ("mysqldump -p", f"+ mysqldump -uroot -p'{PLAIN_PW}' prod", (PLAIN_PW,)),
    ("pgpassword", f"PGPASSWORD={PLAIN_PW} psql -h db", (PLAIN_PW,)),
    ("sshpass", f"sshpass -p {PLAIN_PW} ssh host", (PLAIN_PW,)),
    ("sshpass quoted", f"sshpass -p '{WORDS}' ssh host", (WORDS,)),
    ("docker login", f"docker login -u bob -p {PLAIN_PW} ghcr.io", (PLAIN_PW,)),
    ("redis-cli", f"redis-cli -h cache -a {PLAIN_PW} ping", (PLAIN_PW,)),
    ("openssl", f"openssl rsa -in k -passin pass:{PLAIN_PW}", (PLAIN_PW,)),
    ("ldap", f"ldapsearch -D cn=x -w {PLAIN_PW} -b dc=x", (PLAIN_PW,)),
    ("smb", f"smbclient //h/s -U bob%{PLAIN_PW}", (PLAIN_PW,)),
    ("chpasswd", f"echo 'bob:{PLAIN_PW}' | chpasswd", (PLAIN_PW,)),
    ("password-stdin", f"echo {PLAIN_PW} | docker login --password-stdin", (PLAIN_PW,)),
    ("hf login", f"huggingface-cli login --token {PLAIN_PW}", (PLAIN_PW,)),
    ("wandb login", f"wandb login {HEX40}", (HEX40,)),
    ("aws configure", f"aws configure set aws_secret_access_key {AWS}", (AWS,)),
    ("setenv", f"setenv DB_PASSWORD {PLAIN_PW}", (PLAIN_PW,)),
    ("dockerfile", f"ENV DB_PASSWORD {PLAIN_PW}", (PLAIN_PW,)),
    ("windows set", f"set DB_PASSWORD={PLAIN_PW}", (PLAIN_PW,)),
    ("powershell", f'$env:DB_PASSWORD="{PLAIN_PW}"', (PLAIN_PW,)),
    ("secure string", f'ConvertTo-SecureString "{PLAIN_PW}" -AsPlainText', (PLAIN_PW,)),
    ("r", f'Sys.setenv(API_KEY = "{PLAIN_PW}")', (PLAIN_PW,)),
    ("r pair", f'Sys.setenv("API_KEY", "{PLAIN_PW}")', (PLAIN_PW,)),
    ("julia", f'ENV["API_KEY"] = "{PLAIN_PW}"', (PLAIN_PW,)),
    ("flag", f"--api-key {PLAIN_PW} --model m", (PLAIN_PW,)),
    ("flag=", f"--api-key={PLAIN_PW} --model m", (PLAIN_PW,)),
    ("java flag", f"keytool -list -storepass {PLAIN_PW}", (PLAIN_PW,)),
    ("set -x", f"+ export TOKEN={B62}", (B62,)),
    ("sql", f"CREATE USER bob IDENTIFIED BY '{PLAIN_PW}'", (PLAIN_PW,)),
    ("sql role", f"ALTER ROLE bob WITH PASSWORD '{PLAIN_PW}'", (PLAIN_PW,)),
    # connection strings and URLs
    ("ado.net", f"Server=db;User Id=sa;Pwd={PLAIN_PW};Database=x", (PLAIN_PW,)),
    ("odbc", f"Driver=x;UID=sa;PWD={PLAIN_PW};", (PLAIN_PW,)),
    ("pwd", f"user=sa pwd={PLAIN_PW}", (PLAIN_PW,)),
    ("pass:", f"user: sa, pass: {PLAIN_PW}", (PLAIN_PW,)),
    ("passwd:", f"passwd: {PW}", (PW,)),
    ("postgres", f"postgres://bob:{PLAIN_PW}@db/x", (PLAIN_PW,)),
    ("redis", f"redis://:{PLAIN_PW}@cache:6379/0", (PLAIN_PW,)),
    ("amqp", f"amqp://guest:{PLAIN_PW}@mq:5672/", (PLAIN_PW,)),
    ("mongodb", f"mongodb+srv://bob:{PLAIN_PW}@c0.mongodb.net/?retryWrites=true", (PLAIN_PW,)),
    ("jdbc", f"jdbc:postgresql://db/x?user=bob&password={PLAIN_PW}&ssl=true", (PLAIN_PW,)),
    ("go dsn", f"bob:{PLAIN_PW}@tcp(db:3306)/x", (PLAIN_PW,)),
    ("no scheme", f"bob:{PLAIN_PW}@db.internal:5432/x", (PLAIN_PW,)),
    ("libpq", f"host=db user=bob password={PLAIN_PW} dbname=x", (PLAIN_PW,)),
    ("git token", f"git clone https://{B62}@github.com/x/y", (B62,)),
    ("azure sas", f"https://a.blob.core.windows.net/c?sv=2022&se=2026&sig={B62}%3D", (B62,)),
    ("account key", f"AccountName=a;AccountKey={B62}==;EndpointSuffix=core", (B62,)),
    ("shared access key", f"Endpoint=sb://x/;SharedAccessKeyName=k;SharedAccessKey={B62}=", (B62,)),
    ("presigned s3", f"https://b.s3.amazonaws.com/o?X-Amz-Credential=x&X-Amz-Signature={HEX40}", (HEX40,)),
    ("presigned gcs", f"https://storage.googleapis.com/o?X-Goog-Signature={HEX40}", (HEX40,)),
    ("query token", f"GET /v1/x?token={B62}&n=1", (B62,)),
    ("form", f"grant_type=password&username=bob&password={PLAIN_PW}&x=1", (PLAIN_PW,)),
    # headers
    ("basic", f"Authorization: Basic {B64PW}", (B64PW,)),
    ("bearer in curl", f"curl -H 'Authorization: Bearer {B62}' https://x", (B62,)),
    ("digest", f'Authorization: Digest username="u", response="{HEX32}"', (HEX32,)),
    ("x-api-key", f"X-Api-Key: {PLAIN_PW}", (PLAIN_PW,)),
    ("header dict", f"headers={{'Authorization': 'Bearer {B62}', 'X-Api-Key': '{PLAIN_PW}'}}", (B62, PLAIN_PW)),
    ("header pairs", f'[["Authorization", "Bearer {B62}"], ["X-Api-Key", "{PLAIN_PW}"]]', (B62, PLAIN_PW)),
    ("cookie", f"Cookie: theme=dark; sid={PLAIN_PW}; x=y", (PLAIN_PW,)),
    ("set-cookie", f"Set-Cookie: sid={PLAIN_PW}; Path=/; HttpOnly", (PLAIN_PW,)),
    ("cookie dict", f"{{'Cookie': 'sid={PLAIN_PW}; a=b'}}", (PLAIN_PW,)),
    ("cookies argument", f"requests.get(u, cookies={{'sid': '{PLAIN_PW}'}})", (PLAIN_PW,)),
    ("requests auth", f"requests.get(u, auth=('bob', '{PLAIN_PW}'))", (PLAIN_PW,)),
    ("gitlab header", f"PRIVATE-TOKEN: {PLAIN_PW}", (PLAIN_PW,)),
    # tokens by themselves
    *((kind, f"got {text} here", (text[-16:],)) for kind, text in (
        ("jwt", "eyJ" + "hbGciOiJIUzI1NiJ9.eyJ" + "zdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"),
        ("github", "ghp_" + B62), ("github fine", "github_pat_" + B62), ("gitlab", "glpat-" + B62[:20]), ("gitlab deploy", "gldt-" + B62[:20]),
        ("hf", "hf_" + B62), ("openai", "sk-" + "proj-" + B62), ("anthropic", "sk-" + "ant-api03-" + B62), ("nvidia", "nvapi-" + B62),
        ("slack", "xoxb-" + "123456789012-" + B62), ("stripe", "sk_" + "live_" + B62), ("google", "AIza" + B62[:35]), ("google oauth", "GOCSPX-" + B62[:28]),
        ("discord", "MTA" + B62[:21] + ".GaBcDe." + B62[:30]), ("telegram", "123456789:" + "AA" + B62[:33]), ("sendgrid", "SG." + B62[:22] + "." + B62), ("twilio", "SK" + HEX32),
        ("npm", "npm_" + B62), ("pypi", "pypi-" + "AgEIcHlwaS5vcmc" + B62 + B62), ("slack hook", "https://hooks.slack.com/services/T00000000/B00000000/" + B62[:24]),
        ("vault", "hvs." + B62), ("databricks", "dapi" + HEX32), ("unknown vendor", "acme_" + B62),
    )),
    # programs
    ("python", f'password = "{PLAIN_PW}"', (PLAIN_PW,)),
    ("python words", f"PASSPHRASE: str = '{WORDS}'", (WORDS,)),
    ("python environ", f'os.environ["DB_PASSWORD"] = "{PLAIN_PW}"', (PLAIN_PW,)),
    ("python default", f'os.environ.get("DB_PASSWORD", "{PLAIN_PW}")', (PLAIN_PW,)),
    ("python call", f'connect(host="db", password="{PLAIN_PW}")', (PLAIN_PW,)),
    ("python login", f'smtp.login("bob", "{PLAIN_PW}")', (PLAIN_PW,)),
    ("python string", f'run("mysql --password={PLAIN_PW} x")', (PLAIN_PW,)),
    ("environ dump", f"environ({{'PATH': '/bin', 'DB_PASSWORD': '{PLAIN_PW}'}})", (PLAIN_PW,)),
    ("json nested", f'{{"db": {{"creds": {{"password": "{WORDS}"}}}}}}', (WORDS,)),
    ("json escaped", f'{{\\"password\\": \\"{WORDS}\\"}}', (WORDS,)),
    ("jwk", f'{{"kty": "RSA", "d": "{B62}"}}', (B62,)),
    # tried in November 2026, and leaked then
    ("aws text output",f"ACCESSKEY\tAKIA{'QWERTYUIOPASDFGH'}\t2026-11-18T00:00:00+00:00\t{AWS}\tActive\tbob",(AWS,)),
    ("aws csv download",f"Access key ID,Secret access key\nAKIA{'QWERTYUIOPASDFGH'},{AWS}",(AWS,)),
    ("aws csv new user",f"User name,Password,Console login link\nbob,{PW},https://x.signin.aws.amazon.com/console",(PW,)),
    ("spark s3a conf",f"spark.hadoop.fs.s3a.secret.key    {AWS}",(AWS,)),
    ("aws env in ecs log",f"environment variable AWS_SECRET_ACCESS_KEY set to {AWS}",(AWS,)),
    ("minio",f"mc alias set local http://minio:9000 admin {PW}",(PW,)),
    ("azure sp table",f"AppId                                 DisplayName    Password                                  Tenant\n------------------------------------  -------------  ----------------------------------------  ------------\n00000000-1111-2222-3333-444444444444  x              q8Q~{_C}  t",(_C,)),
    ("azure keys list",json.dumps([{"keyName":"key1","permissions":"FULL","value":(_C*4)[:86]+"=="}],indent=2),(_C,)),
    ("hf hub login prompt",f"Enter your token (input will not be visible): {_C}{_C[:8]}",(_C,)),
    ("wandb prompt",f"wandb: Paste an API key from your profile and hit enter: {HEX40}",(HEX40,)),
    ("wandb login kw",f"wandb.login(host='https://x', key='{HEX40}', relogin=True)",(HEX40,)),
    ("cohere",f"co = cohere.Client('{_C}{_C[:16]}')",(_C,)),
    ("fireworks","fw_"+_C,(_C,)),
    ("kaggle",json.dumps({"username":"bob","key":HEX32}),(HEX32,)),
    ("lambda labs",f"curl -u secret_box_{_C}: https://cloud.lambdalabs.com/api",(_C,)),
    ("pinecone","pcsk_"+_C+"_"+_C,(_C,)),
    ("supabase","sbp_"+HEX32+"a1b2c3d4",(HEX32,)),
    ("gha add-mask",f"::add-mask::{PLAIN_PW}",(PLAIN_PW,)),
    ("gha set-output",f"::set-output name=token::{_C}",(_C,)),
    ("yarnrc",f"npmRegistries:\n  \"https://r.x\":\n    npmAuthToken: \"{_C}\"\n    npmAuthIdent: \"bob:{PLAIN_PW}\"",(_C,PLAIN_PW)),
    ("docker imagepull secret",f".dockerconfigjson: {base64.b64encode(json.dumps({'auths':{'x':{'auth':B64PW}}}).encode()).decode()}",(base64.b64encode(json.dumps({'auths':{'x':{'auth':B64PW}}}).encode()).decode()[8:],)),
    ("dnssec key",f"secret \"{_C}{_C}==\";",(_C,)),
    ("pgpass many",f"# host:port:db:user:pw\nlocalhost:5432:*:bob:{PLAIN_PW}\ndb.x:6543:prod:amy:{PW}",(PLAIN_PW,PW)),
    ("netrc quoted",f'machine h login bob password "{WORDS}"',(WORDS,)),
    ("composer auth",json.dumps({"github-oauth":{"github.com":_C},"http-basic":{"r.x":{"username":"b","password":PLAIN_PW}}},indent=1),(_C,PLAIN_PW)),
    ("composer oauth line",f"\"github-oauth\": {{\"github.com\": \"{_C}\"}}",(_C,)),
    ("tf plan sensitive change",f"      ~ secret_string = \"{PLAIN_PW}\" -> \"{PW}\"",(PLAIN_PW,PW)),
    ("redis acl",f"ACL SETUSER bob on >{PLAIN_PW} ~* +@all",(PLAIN_PW,)),
    ("ldap conf",f"bindpw {PLAIN_PW}",(PLAIN_PW,)),
    ("openvpn auth",f"<auth-user-pass>\nbob\n{PLAIN_PW}\n</auth-user-pass>",(PLAIN_PW,)),
    ("xrdp",f"rdesktop -u bob -p {PLAIN_PW} host",(PLAIN_PW,)),
    ("curl cert",f"curl --cert client.pem:{PLAIN_PW} https://h",(PLAIN_PW,)),
    ("curl -E",f"curl -E client.p12:{PLAIN_PW} https://h",(PLAIN_PW,)),
    ("ncftp",f"ncftpput -u bob -p {PLAIN_PW} h /r f",(PLAIN_PW,)),
    ("vault write",f"vault write secret/x value={PLAIN_PW}",(PLAIN_PW,)),
    ("vault unseal",f"Unseal Key 1: {_C}{_C[:20]}=\nInitial Root Token: s.{_C}",(_C,)),
    ("pass insert",f"echo '{PLAIN_PW}' | pass insert -e x",(PLAIN_PW,)),
    ("security keychain",f"security add-generic-password -a bob -s x -w {PLAIN_PW}",(PLAIN_PW,)),
    ("secret-tool",f"printf '{PLAIN_PW}' | secret-tool store --label=x k v",(PLAIN_PW,)),
    ("keyring set",f"keyring.set_password('x', 'bob', '{PLAIN_PW}')",(PLAIN_PW,)),
    ("cryptsetup",f"echo -n '{PLAIN_PW}' | cryptsetup luksOpen /dev/sda x -",(PLAIN_PW,)),
    ("mkpasswd",f"mkpasswd -m sha-512 {PLAIN_PW}",(PLAIN_PW,)),
    ("chpasswd here",f"chpasswd <<< 'bob:{PLAIN_PW}'",(PLAIN_PW,)),
    ("telegram url",f"https://api.telegram.org/bot123456789:AA{_C}{_C[:9]}/sendMessage",(_C,)),
    ("jdbc oracle",f"jdbc:oracle:thin:bob/{PLAIN_PW}@//h:1521/x",(PLAIN_PW,)),
    ("jdbc sqlserver",f"jdbc:sqlserver://h;databaseName=x;user=sa;password={{{PW}}};",(PW,)),
    ("sip",f"sip:bob:{PLAIN_PW}@h",(PLAIN_PW,)),
    ("checkout url dir",f"Cloning into 'https:__bob:{PLAIN_PW}@github.com'",(PLAIN_PW,)),
    ("sentence de",f"Das Passwort lautet {PLAIN_PW}",(PLAIN_PW,)),
    ("sentence quoted",f"using password \"{WORDS}\" for bob",(WORDS,)),
    ("sentence cred pair",f"credentials: bob / {PLAIN_PW}",(PLAIN_PW,)),
    ("slash pair",f"Default login: admin/{PLAIN_PW}",(PLAIN_PW,)),
    ("pin","PIN: 839201",("839201",)),
    ("seed phrase","seed phrase: legal winner thank year wave sausage worth useful",("wave sausage",)),
    ("wp config",f"define( 'AUTH_KEY',         '{_C}' );\ndefine( 'DB_PASSWORD', '{PLAIN_PW}' );",(_C,PLAIN_PW)),
    ("ssm put",f"aws ssm put-parameter --name /x/db_password --value {PLAIN_PW} --type SecureString",(PLAIN_PW,)),
    ("secretsmanager put",f"aws secretsmanager create-secret --name x --secret-string '{{\"p\":\"{PLAIN_PW}\"}}'",(PLAIN_PW,)),
    ("gcloud secrets",f"printf '{PLAIN_PW}' | gcloud secrets create x --data-file=-",(PLAIN_PW,)),
    ("az keyvault",f"az keyvault secret set --vault-name v --name x --value '{PLAIN_PW}'",(PLAIN_PW,)),
    ("wrangler",f"echo {PLAIN_PW} | wrangler secret put KEY",(PLAIN_PW,)),
    ("pulumi",f"config:\n  app:dbPassword:\n    secure: {_C}{_C}",(_C,)),
    ("circleci ctx",f"circleci context store-secret github org ctx API_TOKEN <<< {_C}",(_C,)),
    ("csv aligned pipe",f"name | passwd | role\nbob | {PLAIN_PW} | admin",(PLAIN_PW,)),
    ("psql expanded",f"-[ RECORD 1 ]--\nuser     | bob\npassword | {PLAIN_PW}",(PLAIN_PW,)),
    ("python repr list",f"[Secret(name='a', value='{PLAIN_PW}')]",(PLAIN_PW,)),
    ("attrs secret",f"ApiKey(value='{_C}')",(_C,)),
    ("har cookie",json.dumps({"cookies":[{"name":"sessionid","value":_C}]}),(_C,)),
    ("french",f"mot de passe : {PLAIN_PW}",(PLAIN_PW,)),
    ("spanish",f"contraseña: {PLAIN_PW}",(PLAIN_PW,)),
    ("chinese",f"密码：{PLAIN_PW}",(PLAIN_PW,)),
    ("chinese ascii colon",f"密码: {PLAIN_PW}",(PLAIN_PW,)),
    ("arrow",f"password → {PLAIN_PW}",(PLAIN_PW,)),
    # blocks: the name stands on another line than the value
    ("xml secret, value below", f"<secret>\n  <value>{PLAIN_PW}</value>\n</secret>", (PLAIN_PW,)),
    ("xml secret, name and value below", f"<secret>\n  <name>db</name>\n  <value>{PLAIN_PW}</value>\n</secret>", (PLAIN_PW,)),
    ("xml secret with attributes", f'<secret name="db" type="x">\n  <description>of it</description>\n  <value>{PLAIN_PW}</value>\n</secret>', (PLAIN_PW,)),
    ("xml secret, value in lines", f"<secret>\n  <value>\n    {PLAIN_PW}\n  </value>\n</secret>", (PLAIN_PW,)),
    ("xml credentials", f"<credentials>\n  <username>bob</username>\n  <secretText>\n  {PLAIN_PW}\n</secretText></credentials>", (PLAIN_PW,)),
    ("xml cdata below", f"<password>\n<value><![CDATA[{PLAIN_PW}]]></value>\n</password>", (PLAIN_PW,)),
    ("xml named property", f'<property name="db.password">\n  <value>{PLAIN_PW}</value>\n</property>', (PLAIN_PW,)),
    ("xml entry", f'<entry key="db.password">\n  {PLAIN_PW}\n</entry>', (PLAIN_PW,)),
    ("xml value before name", f"<property>\n  <value>{PLAIN_PW}</value>\n  <name>db.password</name>\n</property>", (PLAIN_PW,)),
    ("hcl secret on one line", f'secret {{ value = "{PLAIN_PW}" }}', (PLAIN_PW,)),
    ("hcl secret", f'secret {{\n  value = "{PLAIN_PW}"\n}}', (PLAIN_PW,)),
    ("hcl label", f'resource "aws_ssm_parameter" "db_password" {{\n  name  = "/prod/db"\n  value = "{PLAIN_PW}"\n}}', (PLAIN_PW,)),
    ("hcl output", f'output "db_password" {{\n  sensitive = true\n  value     = "{PLAIN_PW}"\n}}', (PLAIN_PW,)),
    ("hcl heredoc", f"secret {{\n  value = <<EOT\n{PLAIN_PW}\nEOT\n}}", (PLAIN_PW,)),
    ("hcl default on one line", f'password "main" {{ default = "{PLAIN_PW}" }}', (PLAIN_PW,)),
    ("kubernetes pair, reversed, apart", f"env:\n- value: {PLAIN_PW}\n  kind: plain\n  name: API_KEY", (PLAIN_PW,)),
    ("kubernetes pair, reversed, words", f'  - value: "{WORDS}"\n    name: DB_PASSWORD', (WORDS,)),
    ("kubernetes pair, reversed, bare dash", f"  -\n    value: {PLAIN_PW}\n    name: DB_PASSWORD", (PLAIN_PW,)),
    ("json pair in lines, reversed", f'[\n  {{\n    "value": "{PLAIN_PW}",\n    "type": "x",\n    "name": "API_KEY"\n  }}\n]', (PLAIN_PW,)),
    ("toml pair, reversed", f'[[env]]\nvalue = "{PLAIN_PW}"\nname = "API_KEY"', (PLAIN_PW,)),
    ("kubernetes secret, data first", f"apiVersion: v1\ndata:\n  whatever: {_B64}\n  other: {B64PW}\nkind: Secret", (_B64, B64PW)),
    ("kubernetes secret, stringData first", f"apiVersion: v1\nstringData:\n  whatever: {PLAIN_PW}\nkind: Secret", (PLAIN_PW,)),
    ("kubernetes secret in a list", f"items:\n- apiVersion: v1\n  data:\n    whatever: {_B64}\n  kind: Secret", (_B64,)),
    ("kubernetes secret, json", json.dumps({"apiVersion": "v1", "data": {"whatever": _B64}, "kind": "Secret"}, indent=2), (_B64,)),
    ("kubernetes secret, json on one line", json.dumps({"apiVersion": "v1", "data": {"whatever": _B64}, "kind": "Secret"}), (_B64,)),
    ("kubernetes secret, json, kind first", json.dumps({"kind": "Secret", "data": {"whatever": _B64}}), (_B64,)),
    ("kubernetes secret, block", f"kind: Secret\nstringData:\n  x.ini: |\n    user bob\n    word {PLAIN_PW}\ntype: Opaque", (PLAIN_PW,)),
    ("kubernetes secret, dict", repr({"apiVersion": "v1", "data": {"whatever": _B64}, "kind": "Secret"}), (_B64,)),
    ("csv header", f"user,email,api_key\nbob,b@x.org,{PLAIN_PW}\namy,a@x.org,{PW}", (PLAIN_PW, PW)),
    ("csv header, quoted", f'"user","password"\n"bob","{WORDS}"', (WORDS,)),
    ("csv header, semicolons", f"user;password;x\nbob;{PLAIN_PW};1", (PLAIN_PW,)),
    ("csv header, first column", f"password,user\n{PLAIN_PW},bob\n{PW},amy", (PLAIN_PW, PW)),
    ("tsv header", f"user\tpassword\tx\nbob\t{PLAIN_PW}\t1", (PLAIN_PW,)),
    ("psql table", f" user | password \n------+----------\n bob  | {PLAIN_PW}\n(1 row)", (PLAIN_PW,)),
    ("mysql table", f"+------+------+\n| user | password |\n+------+------+\n| bob  | {PLAIN_PW} |\n+------+------+", (PLAIN_PW,)),
    ("markdown table", f"| user | api_key |\n|------|---------|\n| bob | {PLAIN_PW} |", (PLAIN_PW,)),
    ("rich table with a header", f"┃ user ┃ password ┃\n┡━━━╇━━━┩\n│ bob │ {PLAIN_PW} │", (PLAIN_PW,)),
    ("aligned columns", f"NAME      PASSWORD          AGE\nbob       {PLAIN_PW}    5d\namy       {PW}  3d", (PLAIN_PW, PW)),
    ("data frame", f"  user        password\n0  bob  {PLAIN_PW}\n1  amy  {PW}", (PLAIN_PW, PW)),
    ("table in json", json.dumps({"columns": ["user", "password"], "data": [["bob", PLAIN_PW], ["amy", PW]]}), (PLAIN_PW, PW)),
    ("rows in json", json.dumps([["user", "password"], ["bob", PLAIN_PW]]), (PLAIN_PW,)),
    ("yaml secrets, named", f"secrets:\n  - name: foo\n    value: {PLAIN_PW}", (PLAIN_PW,)),
    ("yaml secret, deeper", f"secret:\n  foo:\n    value: {PLAIN_PW}", (PLAIN_PW,)),
    ("yaml password, described", f"password:\n  description: of it\n  type: string\n  default: {PLAIN_PW}", (PLAIN_PW,)),
    ("yaml credentials", f"credentials:\n  db: {PLAIN_PW}\n  mail: {PW}", (PLAIN_PW, PW)),
    ("json secret in lines", f'"secret": {{\n  "type": "x",\n  "value": "{PLAIN_PW}"\n}}', (PLAIN_PW,)),
    ("json secrets in lines", f'"secrets": [\n  {{\n    "name": "a",\n    "value": "{PLAIN_PW}"\n  }}\n]', (PLAIN_PW,)),
    ("toml secret", f'[secret]\nname = "x"\nvalue = "{PLAIN_PW}"', (PLAIN_PW,)),
    ("toml dotted secret", f'[db.password]\nvalue = "{PLAIN_PW}"', (PLAIN_PW,)),
    ("toml secrets", f'[[secrets]]\nname = "a"\nvalue = "{PLAIN_PW}"', (PLAIN_PW,)),
    ("toml table of secrets", f'[secrets]\nfoo = "{PLAIN_PW}"\nbar = "{PW}"', (PLAIN_PW, PW)),
    ("ini credentials", f"[credentials]\nfoo = {PLAIN_PW}", (PLAIN_PW,)),
]  # fmt: skip


def _dump(data: bytes, style: str) -> list[str]:
    """The rows of a dump as xxd, hexdump and od print them, and as programs hold bytes."""
    rows = []
    for at in range(0, len(data), 16):
        part = data[at : at + 16]
        shown = "".join(chr(one) if 32 <= one < 127 else "." for one in part)
        pairs = [f"{one:02x}" for one in part]
        words = [int.from_bytes(part[low : low + 2], "little") for low in range(0, len(part), 2)]
        match style:
            case "xxd" | "xxd -u":
                groups = " ".join("".join(pairs[low : low + 2]) for low in range(0, 16, 2))
                rows.append(f"{at:08x}: {groups.upper() if style == 'xxd -u' else groups}  {shown}")
            case "hexdump -C":
                rows.append(f"{at:08x}  {' '.join(pairs[:8])}  {' '.join(pairs[8:])}  |{shown}|")
            case "hexdump":
                rows.append(f"{at:07x} " + " ".join(f"{word:04x}" for word in words))
            case "od":
                rows.append(f"{at:07o} " + " ".join(f"{word:06o}" for word in words))
            case "od -b":
                rows.append(f"{at:07o} " + " ".join(f"{one:03o}" for one in part))
            case "od -c":
                rows.append(f"{at:07o} " + "".join("  \\n" if one == 10 else f"{chr(one):>4}" for one in part))
            case "od -t x1z":
                rows.append(f"{at:06x} {' '.join(pairs)}  >{shown}<")
            case "hexyl":
                rows.append(f"│{at:08x}│ {' '.join(pairs[:8])} ┊ {' '.join(pairs[8:])} │........┊........│")
            case "xxd -b":
                rows.append(f"{at:08x}: {' '.join(f'{one:08b}' for one in part)}  {shown}")
            case "gdb":
                rows.append(f"0x{0x7FFE0000 + at:x}:\t" + "\t".join(f"0x{pair}" for pair in pairs))
            case "ranges":
                rows.append(f"{at:04x}-{at + 15:04x}  {' '.join(pairs)}")
            case "colons":
                rows.append("    " + "".join(f"{pair}:" for pair in pairs))
            case "escapes":
                rows.append("b'" + "".join(f"\\x{pair}" for pair in pairs) + "'")
            case "xxd -p":
                rows.append("".join(pairs))
            case "array of C":
                rows.append("  " + ", ".join(f"0x{pair}" for pair in pairs) + ",")
            case _:
                rows.append(" ".join(f"{one:3d}" for one in part))
    return rows


_DUMPED = (OPENSSH + "\n").encode()
_STYLES = (
    "xxd",
    "xxd -u",
    "hexdump -C",
    "hexdump",
    "od",
    "od -b",
    "od -c",
    "od -t x1z",
    "xxd -p",
    "hexyl",
    "array of C",
    "od -t u1",
    "xxd -b",
    "gdb",
    "ranges",
    "colons",
    "escapes",
)
DUMPS: list[tuple[str, list[str], list[str]]] = [
    *((style, rows, rows[3:-3]) for style in _STYLES for rows in [_dump(_DUMPED, style)]),
    *(
        (f"{style} of DER", rows, rows[1:])
        for style in ("xxd", "hexdump -C")
        for rows in [_dump(base64.b64decode("".join(PEM_ROWS[:2])), style)]
    ),
    (
        "openssl",
        [
            f"{label}\n    {row}"
            for label in ("privateExponent:", "prime1:")
            for row in (":".join(HEX32[at : at + 2] for at in range(0, 30, 2)) + ":",)
        ],
        [":".join(HEX32[at : at + 2] for at in range(0, 30, 2))],
    ),
    ("hex on one line", [f"key {_DUMPED.hex()} end"], [_DUMPED.hex()[100:300]]),
    ("bytes of Python", [str(list(_DUMPED))], [str(list(_DUMPED))[300:500]]),
    ("bytes of Go", [f"[{' '.join(map(str, _DUMPED))}]"], [" ".join(map(str, _DUMPED))[300:500]]),
]
"""How a private key looks as a dump of bytes, and the rows that must not survive; the first rows say what it is."""

HARMLESS = [
    "max_tokens=512",
    "num_tokens: 123",
    "tokenizer=Qwen/Qwen2.5-0.5B-Instruct",
    "pad_token_id: 151643, eos_token_id=151645",
    "token_mult_prob_error: 1.02",
    "pass@1: 0.4, pass@8: 0.75",
    "passed: 12, failed: 3",
    "PASS: tests/test_x.py::test_one",
    "Pass: every requested level passed",
    "Result: Pass",
    "12 passed, 1 skipped in 3.21s",
    "author=Jane Doe",
    "keys: [a, b]",
    "dict_keys(['loss', 'reward'])",
    "tests/test_gifts.py::test_secret_santa PASSED",
    "commit 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "sha256 = 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "nvcr.io/nvidia/nemo:24.05@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "wandb: Syncing run copper-sunset-42",
    "wandb: View run at https://wandb.ai/team/project/runs/3k9x2m1q",
    "checkpoints/step_100/model-00001-of-00004.safetensors",
    "outputs/aGVsbG8gd29ybGQ.txt",
    "step=3 loss=0.512 grad_norm=1.25 reward=0.5 lr=1e-06",
    "{'loss': 0.5, 'grad_norm': 1.2, 'reward': 0.25, 'num_tokens': 2048.0, 'epoch': 0.1}",
    '{"step": 3, "loss": 0.5, "completions/mean_length": 12.5}',
    "Traceback (most recent call last):",
    '  File "/opt/x/auth.py", line 12, in login',
    "KeyError: 'token'",
    "sorted(rows, key=lambda row: row.step)",
    "max(values, key=len)",
    "password=None",
    "token: str",
    "def f(password: str) -> None:",
    "def login(user: str, password: str | None = None, token: Optional[str] = None):",
    "import getpass; getpass.getuser()",
    "password = getpass.getpass()",
    "api_key = os.environ['OPENAI_API_KEY']",
    'token = os.environ.get("HF_TOKEN")',
    "api_key=settings.api_key, password=self.password",
    "HF_TOKEN=${HF_TOKEN} DB_PASSWORD=$DB_PASSWORD",
    "--api-key API_KEY  the key of the server",
    "usage: x [--password PASSWORD] [--token TOKEN]",
    "PWD=/home/bob/work OLDPWD=/tmp",
    "pwd: /home/bob/work",
    "first_pass: 0.12s, forward_pass=3ms, backward pass: 4ms",
    "pass_rate: 0.4",
    "password_file: /run/secrets/db",
    "key: model.layers.0.self_attn.k_proj.weight",
    "special_tokens_map.json tokenizer_config.json added_tokens.json",
    "next token: 1234, stop_token='</s>'",
    "tokens/sec/gpu: 1234.5",
    "prompt_tokens=12 completion_tokens=34 total_tokens=46",
    "RayTaskError(RuntimeError): ray::Worker.step() (pid=12, ip=10.0.0.1)",
    "(Worker pid=123) INFO 11-18 12:00:00 [core.py:58] Initializing engine",
    "2026-11-18T12:00:00.123Z [rank0]: step 3/20 loss 0.51",
    "-u is not a flag of this program",
    "docker run -p 8000:8000 -u 1000:1000 image",
    "mysql is not installed",
    "curl -s https://example.org/file.tar.gz -o file.tar.gz",
    "git@github.com:org/repo.git",
    "ssh -p 2222 user@host",
    "contact: someone@example.org",
    "-----BEGIN CERTIFICATE-----",
    "-----BEGIN PUBLIC KEY-----",
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFbWhe8neXbNS bob@laptop",
    "name: trainer\nvalue: 12",
    "- name: BATCH_SIZE\n  value: 128",
    '{"name": "LEARNING_RATE", "value": "1e-6"}',
    "<name>trainer</name><value>12</value>",
    "kind: ConfigMap\ndata:\n  batch: small",
    "cookies: 3",
    "Enter password:\nTraceback (most recent call last):",
    "Session started at 12:00, session_2026-11-18_12-00-00_123456_789",
    "num_attention_heads=16 num_key_value_heads=8",
    "assert token_ids == [1, 2, 3]",
    "secret_santa: 3",
    "passing: 3, bypass=true",
    "Authentication succeeded",
    "authors = ['Jane Doe', 'John Roe']",
    "public_key=/etc/keys/x.pub",
    "sort_key: step, primary_key=id",
]
