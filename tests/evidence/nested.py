"""Secrets whose names stand on other lines: elements of XML, blocks of HCL, items of Kubernetes, tables; and what looks like them.

Each is (name, text, secret); none of the lines in `HARMLESS_NESTED` may change.
"""

from __future__ import annotations

from tests.evidence.shapes import AWS, B64PW, OPENSSH, PEM, PLAIN_PW, WORDS, block

P = PLAIN_PW

NESTED: list[tuple[str, str, str]] = [
    ("xml secret value later", f"<secret>\n  <name>db</name>\n  <value>{P}</value>\n</secret>", P),
    ("xml password value", f"<password>\n  <value>{P}</value>\n</password>", P),
    ("xml password value text own line", f"<password>\n  <value>\n    {P}\n  </value>\n</password>", P),
    ("xml password text own line", f"<password>\n    {P}\n</password>", P),
    ("xml comment between", f"<secret id='x'>\n  <!-- the db -->\n  <meta>x</meta>\n  <value>{P}</value>\n</secret>", P),
    ("xml split attrs", f"<secret\n    id='x'\n    scope='y'>\n  <value>{P}</value>\n</secret>", P),
    ("xml value attr", f'<secret>\n  <entry value="{P}"/>\n</secret>', P),
    ("xml value attr 1", f"<secret name='x' value=\"{P}\"/>", P),
    ("xml password attrs", f"<add key='DbPassword' value='{P}'/>", P),
    ("xml nested deeper", f"<credentials>\n  <scope>GLOBAL</scope>\n  <inner>\n   <value>{P}</value>\n  </inner>\n</credentials>", P),
    ("xml name value elements", f"<property>\n  <value>{P}</value>\n  <name>fs.s3a.secret.key</name>\n</property>", P),
    ("xml entry string", f"<entry>\n  <string>password</string>\n  <string>{P}</string>\n</entry>", P),
    ("plist", f"<key>password</key>\n<string>{P}</string>", P),
    ("plist blank", f"<dict>\n\t<key>DBPassword</key>\n\n\t<string>{P}</string>\n</dict>", P),
    ("xml cdata multi", f"<secret>\n  <value><![CDATA[\n{P}\n]]></value>\n</secret>", P),
    ("xml words", f"<secret>\n  <value>{WORDS}</value>\n</secret>", WORDS),
    ("xml value two in line", f"<password>\n  <type>plain</type><value>{P}</value>\n</password>", P),
    ("xml ns", f"<ns:secret>\n  <ns:value>{P}</ns:value>\n</ns:secret>", P),
    ("xml caps", f"<Secret>\n  <SecretValue>{P}</SecretValue>\n</Secret>", P),
    ("xml secret child text", f"<secret>\n  <text>{P}</text>\n</secret>", P),
    ("hcl", f'secret {{\n  value = "{P}"\n}}', P),
    ("hcl label", f'secret "db" {{\n  name = "x"\n  value = "{P}"\n}}', P),
    ("hcl nested", f'secret "db" {{\n  metadata {{\n    owner = "x"\n  }}\n  value = "{P}"\n}}', P),
    ("hcl resource", f'resource "aws_secretsmanager_secret_version" "x" {{\n  secret_id = aws.x.id\n  secret_string = "{P}"\n}}', P),
    ("hcl resource2", f'resource "random_password" "x" {{\n  result = "{P}"\n}}', P),
    ("hcl resource3", f'resource "aws_ssm_parameter" "db_password" {{\n  name = "x"\n  type = "SecureString"\n  value = "{P}"\n}}', P),
    ("hcl variable", f'variable "db_password" {{\n  type = string\n  default = "{P}"\n}}', P),
    ("hcl brace next line", f'variable "db_password"\n{{\n  default = "{P}"\n}}', P),
    ("hcl heredoc", f'secret "x" {{\n  value = <<EOT\n{P}\nEOT\n}}', P),
    ("hcl set nested", f'set_sensitive {{\n  name  = "db.password"\n  value = "{P}"\n}}', P),
    ("hcl set value first", f'set_sensitive {{\n  value = "{P}"\n  name  = "db.password"\n}}', P),
    ("hcl tfvars obj", f'db_credentials = {{\n  username = "u"\n  anything = "{P}"\n}}', P),
    (
        "hcl k8s secret",
        f'resource "kubernetes_secret" "x" {{\n  metadata {{\n    name = "x"\n  }}\n  data = {{\n    foo = "{P}"\n  }}\n}}',
        P,
    ),
    ("tf plan", f'  # random_password.x will be created\n  + resource "random_password" "x" {{\n      + result = "{P}"\n    }}', P),
    (
        "json tf state",
        f'"type": "random_password",\n"name": "x",\n"instances": [\n {{\n  "attributes": {{\n   "result": "{P}"\n  }}\n }}\n]',
        P,
    ),
    ("k8s env value first", f"env:\n- value: {P}\n  name: DB_PASSWORD", P),
    ("k8s env value first words", f"env:\n- value: {WORDS}\n  name: DB_PASSWORD", WORDS),
    ("k8s env value first alpha", "env:\n- value: letmein\n  name: DB_PASSWORD", "letmein"),
    ("k8s json value first", f'"env": [\n  {{\n    "value": "{P}",\n    "name": "DB_PASSWORD"\n  }}\n]', P),
    ("k8s json value first alpha", '"env": [\n  {\n    "value": "letmeinplease",\n    "name": "DB_PASSWORD"\n  }\n]', "letmeinplease"),
    ("one-line value first", f'{{"value": "{P}", "name": "DB_PASSWORD"}}', P),
    ("one-line yaml value first", f"- {{value: {P}, name: DB_PASSWORD}}", P),
    ("py value first", f"[{{'value': '{P}', 'name': 'DB_PASSWORD'}}]", P),
    ("k8s secret data first", f"apiVersion: v1\ndata:\n  foo: {B64PW}\nkind: Secret", B64PW),
    ("k8s secret data first nokey", f"data:\n  foo: {B64PW}\nkind: Secret", B64PW),
    ("k8s secret stringData first", f"apiVersion: v1\nstringData:\n  foo: {P}\nkind: Secret", P),
    ("k8s list item", f"items:\n- apiVersion: v1\n  data:\n    foo: {B64PW}\n  kind: Secret", B64PW),
    ("k8s secret data short", "apiVersion: v1\ndata:\n  foo: aHVudGVy\nkind: Secret", "aHVudGVy"),
    (
        "k8s secret data json",
        '{\n  "apiVersion": "v1",\n  "data": {\n    "foo": "aHVudGVyMTIz"\n  },\n  "kind": "Secret"\n}',
        "aHVudGVyMTIz",
    ),
    ("k8s secret data one line", '{"apiVersion":"v1","data":{"foo":"aHVudGVyMTIz"},"kind":"Secret"}', "aHVudGVyMTIz"),
    ("k8s secret data block", f"apiVersion: v1\ndata:\n  foo: |\n    {B64PW}\nkind: Secret", B64PW),
    ("csv", f"user,password\nbob,{P}\namy,letmein", P),
    ("csv2", f"user,password\nbob,{P}\namy,letmein", "letmein"),
    ("csv quoted", f'"user","password"\n"bob","{P}"', P),
    ("csv semicolon", f"user;password\nbob;{P}", P),
    ("csv single col", f"password\n{P}\n{P}x", P),
    ("csv spaces names", f"Name,User Name,Secret Key\nbob,bob smith,{P}", P),
    ("csv extra col", f"user,password,notes\nbob,{P}", P),
    ("csv ragged", f'user,password,notes\nbob,{P},"a, b",c', P),
    ("csv comment #", f"# user,password\nbob,{P}", P),
    ("csv bom", f"\ufeffuser,password\nbob,{P}", P),
    ("csv colon", f"user:password\nbob:{P}", P),
    ("csv empty row", f"user,password\n\nbob,{P}", P),
    ("csv aws", f"Access key ID,Secret access key\nAKIAIOSFODNN7EXAMPLE,{AWS}", AWS),
    (
        "csv aws user",
        f"User name,Password,Access key ID,Secret access key,Console login link\nbob,{P},AKIAIOSFODNN7EXAMPLE,{AWS},https://x",
        P,
    ),
    ("csv api key", f"provider,api_key\nx,{P}", P),
    ("csv parens", f"user,password (plain)\nbob,{P}", P),
    ("csv umlaut", f"benutzer,passwort,größe\nbob,{P},3", P),
    ("csv digits", "user,password\nbob,83920117", "83920117"),
    ("csv multi colon", f"url,username,password,totp\nhttps://x,bob,{P},", P),
    ("csv bitwarden", f"folder,favorite,type,name,notes,fields,login_uri,login_username,login_password\n,,login,x,,,https://x,bob,{P}", P),
    ("csv hyphen/slash", f"user/name,password\nbob,{P}", P),
    ("csv index", f",user,password\n0,bob,{P}", P),
    ("df print", f"   user password\n0   bob {P}", P),
    ("tsv", f"user\tpassword\nbob\t{P}", P),
    ("k8s desc first", f"env:\n- description: x\n  value: {P}\n  name: DB_PASSWORD", P),
    ("k8s block first", f"env:\n- value: |\n    {P}\n  name: DB_PASSWORD", P),
    ("k8s value next line", f"env:\n- value:\n    {P}\n  name: DB_PASSWORD", P),
    ("k8s type between", f"env:\n- value: {P}\n  type: x\n  name: DB_PASSWORD", P),
    ("k8s json block", f'{{\n "type": "x",\n "value": "{P}",\n "name": "DB_PASSWORD"\n}}', P),
    ("md", f"| user | password |\n|---|---|\n| bob | {P} |", P),
]

HARMLESS_NESTED = [
    # XML of other kinds
    "<settings>\n  <value>12</value>\n  <name>batch</name>\n</settings>",
    "<property>\n  <name>data.path</name>\n  <value>/data/train.jsonl</value>\n</property>",
    "<list>\n  <item>batch-size</item>\n  <item>step-128-of-256</item>\n</list>",
    '<testcase classname="tests.test_secret_santa" name="test_password_form" time="0.01"/>',
    '<token value="the" id="12"/>',
    '<token value="Ġhello" id="9906"/>',
    "<tokens>\n  <token>12</token>\n  <token>17</token>\n</tokens>",
    '<map>\n  <entry key="lr" value="1e-6"/>\n  <entry key="model" value="Qwen/Qwen3-8B"/>\n</map>',
    '<input type="text" name="user" value="bob-the-builder"/>',
    "<dict>\n\t<key>CFBundleVersion</key>\n\t<string>10.2.3b4</string>\n</dict>",
    '<tokenizer\n    name="x"\n    vocab="151643">\n  <class>Qwen2Tokenizer</class>\n</tokenizer>',
    # HCL and Terraform
    'variable "max_tokens" {\n  type    = number\n  default = "8192"\n}',
    'resource "aws_s3_bucket" "data" {\n  bucket = "train-data-2026"\n  value  = "us-east-1a"\n}',
    'output "tokens_seen" {\n  value = "1048576"\n}',
    '{\n  "type": "aws_instance",\n  "values": {\n    "ami": "ami-0abc1234"\n  }\n}',
    '{\n  "type": "token",\n  "value": "hello"\n}',
    '"type": "text",\n"value": "what is 2+2?"',
    # Kubernetes
    'apiVersion: v1\ndata:\n  config.json: small-one\n  epochs: "12"\nkind: ConfigMap',
    "apiVersion: v1\nkind: ConfigMap\ndata:\n  checksum: 9f86d081884c7d659a2feaa0c55ad015\n  tokenizer: Qwen2Tokenizer",
    'env:\n- name: TOKENIZERS_PARALLELISM\n  value: "false"\n- name: NCCL_DEBUG\n  value: INFO',
    'env:\n- value: "16"\n  name: OMP_NUM_THREADS',
    "- name: run\n  value: grpo-qwen3-8b-run42",
    "learning_rate:\n    desc: null\n    value: 1e-06\nrun_id:\n    desc: null\n    value: 3k9x2m1qab",
    "- value: |\n    first line of a prompt\n    second line of it\n  name: PROMPT",
    # tables
    "step,loss,num_tokens\n1,0.5,2048\n2,0.4,4096",
    "# step,loss,reward\n1,0.5,0.1\n2,0.4,0.2",
    ",step,loss\n0,1,0.5\n1,2,0.4",
    "user,max_tokens,model\nbob,512,qwen3-8b-instruct2507\namy,512,llama3-8b-instruct1",
    "   step  loss  num_tokens\n0     1   0.5        2048\n1     2   0.4        4096",
    "name:value\nlr:1e-6",
    "user:role\nbob:admin2admin9",
    "token\nhello\nworld",
    "tokens\nstep_00000100\nstep_00000200",
    "key\nmodel.layers.0.mlp",
    "train/loss,perf/tokens_per_sec\n0.5,12345.67",
    "token/s,step/s\n123.4,5.6",
    # dumps
    "00000000: 7f45 4c46 0201 0100 0000 0000 0000 0000  .ELF............",
    "00000000: 89504e470d0a1a0a0000000d49484452  .PNG........IHDR\n00000010: 00000280000001e0080600000035d1dc  .............5..",
    "00000000  1f 8b 08 00 00 00 00 00  00 03 4b cb cf 07 00 21  |..........K....!|",
    "0000000 177 E L F 002 001 001 \\0 \\0 \\0 \\0 \\0 \\0 \\0 \\0 \\0",
    "0000000    45   12   33   45    7    9",
    "0000000 del   E   L   F stx soh soh nul",
    "00000000: 2d2d 2d20 612f 782e 7079 0a2b 2b2b 2062  --- a/x.py.+++ b",
    "-----BEGIN CERTIFICATE-----",
]
"""Lines that look like the shapes above, and hold no secret."""


def xxd(data: bytes, width: int = 16, group: int = 2) -> list[str]:
    """Rows of `xxd -c width -g group`."""
    rows = []
    for at in range(0, len(data), width):
        part = data[at : at + width]
        groups = [part[here : here + (group or width)].hex() for here in range(0, len(part), group or width)]
        rows.append(f"{at:08x}: {' '.join(groups)}  {''.join(chr(c) if 32 <= c < 127 else '.' for c in part)}")
    return rows


def hexdump(data: bytes) -> list[str]:
    """Rows of `hexdump -C`."""
    parts = [(at, data[at : at + 16]) for at in range(0, len(data), 16)]
    shown = [(at, part.hex(" "), "".join(chr(c) if 32 <= c < 127 else "." for c in part)) for at, part in parts]
    return [f"{at:08x}  {digits[:23]:<23}  {digits[24:]:<23}  |{text}|" for at, digits, text in shown]


def decimals(data: bytes) -> list[str]:
    """Rows of `od -td1`."""
    return [f"{at:07o}" + "".join(f"{c:5d}" for c in data[at : at + 16]) for at in range(0, len(data), 16)]


def characters(data: bytes) -> list[str]:
    """Rows of `od -a`."""
    named = {10: "nl", 32: "sp"}
    return [f"{at:07o}" + "".join(f"{named.get(c, chr(c)):>4}" for c in data[at : at + 16]) for at in range(0, len(data), 16)]


_KEYS = {"OpenSSH": OPENSSH, "PEM": PEM, "RSA": block("RSA PRIVATE KEY"), "a file with a key": f"name: x\nkey: |\n{PEM}"}
KEY_DUMPS: list[tuple[str, list[str]]] = [
    (f"{tool} of {name}", rows)
    for name, text in _KEYS.items()
    for data in [f"{text}\n".encode()]
    for tool, rows in {
        "xxd": xxd(data),
        "xxd -g0": xxd(data, group=0),
        "xxd -g1": xxd(data, group=1),
        "xxd -c32": xxd(data, width=32),
        "hexdump -C": hexdump(data),
        "od -td1": decimals(data),
        "od -a": characters(data),
    }.items()
]
"""Whole dumps of keys; of each no more than the rows up to BEGIN may survive."""
