"""A stand-in for Gym's command line: the same interface, no Ray, no imports beyond the standard library, ready at once.

Called as `ng_run` or `ng_collect_rollouts` it is Gym before 0.4: its servers have no page at /, and write no logs of their own.

`FAKE_GYM` names what goes wrong: `dies` (a server ends at its start, after saying the key), `deaf` (a server never answers),
`broken` (the collector fails whatever it is given), `asleep` (it never gets to its rows).
Rows ask for it by a word in their prompt: see `answer` and `collect`.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

SERVERS = {"mcqa": "resources_servers", "mcqa_simple_agent": "responses_api_agents", "other_agent": "responses_api_agents"}
WRONG = os.environ.get("FAKE_GYM", "")
CALLED = Path(sys.argv[0]).name
OLDER = CALLED.startswith("ng_")


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as a server of Gym, or as its head."""

    protocol_version = "HTTP/1.1"
    instances: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        if self.path == "/server_instances":
            self.send(200, self.instances)
        elif OLDER:
            self.send(404, {"detail": "Not Found"})
        else:
            self.send(200, {"status": "ok"})

    def do_POST(self) -> None:
        status, body = answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send(status, body)

    def send(self, status: int, body: Any) -> None:
        """One JSON answer."""
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""


def prompt(row: dict[str, Any]) -> str:
    """What a row asks."""
    return str(row["responses_create_params"]["input"][0]["content"])


def answer(row: dict[str, Any]) -> tuple[int, Any]:
    """Of /run."""
    said = prompt(row)
    if "boom" in said:
        return 500, "Hit an exception in Agent___a calling an inner server: b'out of luck'"
    if "hang" in said:
        time.sleep(60)
    base = {"responses_create_params": row["responses_create_params"], "response": {"output": []}, "reward": 1.0, "agent_ref": "mine"}
    if "class" in said:
        return 200, base | {"_ng_failure_class": "tool", "_ng_failure_terminal": "terminal" in said}
    return 200, "nothing" if "text" in said else base | {"reward": "high" if "high" in said else 1.0}


def serve(port: int) -> None:
    """A server, until it is killed."""
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def be_server(name: str, port: int, log: Path | None) -> None:
    """A server, in a process of its own."""
    if log is not None:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
    if WRONG and name == "mcqa":
        os.write(1, f"Traceback: no module named luck ({os.environ['SEATRIAL_POLICY_API_KEY']})\n".encode())
        if WRONG == "dies":
            os._exit(1)
        if WRONG == "deaf":
            signal.pause()
    serve(port)


def start(words: dict[str, str]) -> None:
    """`gym env start`, `ng_run`."""
    low, logs = int(words["port_range_low"]), Path(words["nemo_gym_log_dir"].strip("'"))
    for number, (name, kind) in enumerate(SERVERS.items()):
        pid = os.fork()
        if pid == 0:
            be_server(name, low + number, None if OLDER else logs / f"{name}.log")
        Handler.instances.append({"process_name": name, "server_type": kind, "url": f"http://127.0.0.1:{low + number}", "pid": pid})
    sys.stdout.write(f"the key is {os.environ['SEATRIAL_POLICY_API_KEY']}\n")
    sys.stdout.flush()
    serve(int(words["head_server.port"]))


def collect(words: dict[str, str]) -> int:
    """`gym eval run --no-serve --resume`, `ng_collect_rollouts +resume_from_cache=true`."""
    output = Path(words["output_jsonl_fpath"].strip("'"))
    assert output.read_bytes() == b""
    if WRONG == "broken":
        sys.stdout.write("no such option\n")
        return 1
    if WRONG == "asleep":
        time.sleep(60)
    failures = output.with_name(output.stem + "_failures.jsonl").open("a")
    for line in output.with_name(output.stem + "_materialized_inputs.jsonl").read_text().splitlines():
        row = json.loads(line)
        said = prompt(row)
        if "boom" in said:
            sys.stdout.write("ClientResponseError: 500\n")
            return 1
        if "hang" in said:
            time.sleep(60)
        if "lost" in said:
            continue
        made = answer(row)[1]
        made |= {key: row[key] for key in ("_ng_task_index", "_ng_rollout_index", "agent_ref")}
        with failures if "class" in said else output.open("a") as stream:
            stream.write(json.dumps(made) + "\n")
    return 0


def main() -> None:
    """As `gym`, `ng_run` and `ng_collect_rollouts` do."""
    words = dict(word.lstrip("+").split("=", 1) for word in sys.argv[1:] if "=" in word)
    command = " ".join((CALLED, *(word for word in sys.argv[1:] if "=" not in word)))
    if command in ("gym env start", "ng_run"):
        start(words)
    if command == "gym eval run --no-serve --resume" or (command == "ng_collect_rollouts" and words["resume_from_cache"] == "true"):
        sys.exit(collect(words))
    sys.exit(f"no such command: {command}")


if __name__ == "__main__":
    main()
