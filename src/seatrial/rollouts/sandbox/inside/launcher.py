"""The first program in a sandbox: takes its files from standard input, gives up root, sets the limits, becomes the real program.

`argv[1]` is a plan as JSON: `uid` (or null), `limits` by name, `argv`. Standard input begins with 12 digits, the length of a JSON
object, then that object: `files` by name, and `token`; all behind it is the program's own. When all is ready the token, which the
program never sees, is said on standard error: without it, nobody takes what went wrong for the program's failure.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path


def take(length: int) -> bytes:
    """Exactly so many bytes of standard input, and not one more: the rest is not ours."""
    data = bytearray()
    while len(data) < length:
        chunk = os.read(0, length - len(data))
        if not chunk:
            raise EOFError("standard input ended within the files")
        data += chunk
    return bytes(data)


def main() -> None:
    plan = json.loads(sys.argv[1])
    given = json.loads(take(int(take(12))))
    if plan["uid"] is not None:
        os.setgroups([])
        os.setresgid(plan["uid"], plan["uid"], plan["uid"])
        os.setresuid(plan["uid"], plan["uid"], plan["uid"])
    for name, text in given["files"].items():
        Path(name).write_text(text, encoding="utf-8", errors="surrogatepass")
    for name, (soft, hard) in plan["limits"].items():
        resource.setrlimit(getattr(resource, name), (soft, hard))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        # Python ignores them, and its heirs would.
        signal.signal(number, signal.SIG_DFL)
    if not os.access(plan["argv"][0], os.X_OK):
        raise FileNotFoundError(plan["argv"][0])
    os.write(2, f"{given['token']}\n".encode())
    os.execv(plan["argv"][0], plan["argv"])


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(str(error))
