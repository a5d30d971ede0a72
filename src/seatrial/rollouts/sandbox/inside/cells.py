"""A session: runs cells of Python one after another, keeping their variables, as IPython does.

A request is a line of JSON on standard input: `code`, `minimal` (only the last line of a traceback), `limit` (characters). The
answer, 12 digits of its length and JSON: `stdout`, `stderr`, `failed`. Cells have no standard input; all they and their processes
write is collected in files. The value of a cell's last expression is shown.
"""

from __future__ import annotations

import ast
import code
import json
import linecache
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import IO


class Cells(code.InteractiveInterpreter):
    """The variables, and whether the last cell failed."""

    def __init__(self) -> None:
        super().__init__({"__name__": "__main__", "__builtins__": __builtins__})
        self.number = 0
        self.failed = False
        self.minimal = False

    def run(self, source: str) -> None:
        self.number += 1
        self.failed = False
        name = f"<cell {self.number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        try:
            body = ast.parse(source, name).body
            last = [body.pop()] if body and isinstance(body[-1], ast.Expr) else []
            parts = [compile(ast.Module(body, []), name, "exec"), compile(ast.Interactive([*last]), name, "single")]
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            self._fail(traceback.format_exception_only(error))
            return
        for part in parts:
            if not self.failed:
                try:
                    self.runcode(part)
                except SystemExit as error:
                    self._fail([f"SystemExit: {error.code}\n"])

    def showtraceback(self) -> None:
        """What a cell raised, without the frame that ran it."""
        kind, error, trace = sys.exc_info()
        trace = trace.tb_next if trace is not None else None
        self._fail(traceback.format_exception_only(kind, error) if self.minimal else traceback.format_exception(kind, error, trace))

    def _fail(self, lines: list[str]) -> None:
        self.failed = True
        self.write("".join(lines))


def collected(stream: IO[bytes], limit: int) -> str:
    """What was written since the last time; the file is emptied."""
    stream.seek(0)
    text = stream.read(4 * limit).decode("utf-8", errors="replace")[:limit]
    stream.seek(0)
    stream.truncate()
    return text


def _unnamed() -> int:
    """A file without a name: what cells do to /tmp does not touch it."""
    handle, name = tempfile.mkstemp()
    Path(name).unlink()
    return handle


def main() -> None:
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    outputs = [os.fdopen(_unnamed(), "r+b", 0) for _ in range(2)]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, stream in enumerate(outputs, 1):
        os.dup2(stream.fileno(), number)
    cells = Cells()
    for line in requests:
        request = json.loads(line)
        cells.minimal = request["minimal"]
        cells.run(request["code"])
        for flushed in (sys.stdout, sys.stderr):
            flushed.flush()
        stdout, stderr = (collected(stream, request["limit"]) for stream in outputs)
        answer = json.dumps({"stdout": stdout, "stderr": stderr, "failed": cells.failed}).encode()
        answers.write(b"%012d%s" % (len(answer), answer))
        answers.flush()


if __name__ == "__main__":
    main()
