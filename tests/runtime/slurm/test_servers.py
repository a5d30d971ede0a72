"""Model servers in a jobs file: what a user writes becomes components, and on a real Slurm a router spreads the requests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from seatrial.cli.input_files import read_jobs
from seatrial.core.errors import UserError
from seatrial.core.jobs import Profile, UnitState
from seatrial.runtime import jobdir
from seatrial.runtime import slurm_submit as slurm
from seatrial.runtime.slurm_status import Poller
from tests.runtime.slurm.cluster import PrivateSlurm
from tests.runtime.slurm.harness import until

CLIENT = '[[jobs.components]]\nname = "client"\nrole = "client"\ncommand = ["ask", "{url:policy}", "{url:judge}"]\n'
VLLM = '[[jobs.servers]]\nname = "policy"\nkind = "vllm"\nmodel = "/m"\ntensor_parallel = 4\n'
JUDGE = '[[jobs.servers]]\nname = "judge"\nkind = "url"\nurl = "https://host/v1"\n'


def written(tmp_path: Path, *parts: str) -> Path:
    file = tmp_path / "jobs.toml"
    file.write_text('[[jobs]]\nname = "job"\n' + "".join(parts))
    return file


def test_servers_become_components_and_urls(tmp_path: Path) -> None:
    (job,) = read_jobs(written(tmp_path, VLLM, JUDGE, CLIENT), 8, tmp_path).jobs
    (policy,) = job.services()
    assert (policy.name, policy.gpus, policy.port) == ("policy", 4, True)
    assert policy.command[:3] == ("vllm", "serve", "/m")
    assert "--trust-remote-code" not in policy.command
    assert dict(job.servers) == {"judge": "https://host/v1"}


def test_urls_alone_may_stand_in_a_table(tmp_path: Path) -> None:
    file = written(tmp_path, 'servers = { policy = "http://a/v1", judge = "http://b/v1" }\n', CLIENT)
    assert dict(read_jobs(file, 8, tmp_path).jobs[0].servers) == {"policy": "http://a/v1", "judge": "http://b/v1"}


@pytest.mark.parametrize(
    ("part", "said", "fix"),
    [
        ('url = "http://x"\n', "kind vllm has no use for url", "correct"),
        ("tensor_paralel = 2\n", "jobs.job.servers.policy.tensor_paralel: unknown key", "did you mean tensor_parallel?"),
        ('arguments = ["--port", "1"]\n', "--port in arguments contradicts", "correct"),
        ("data_parallel = 3\n", "12 GPUs", "data_parallel"),
    ],
)
def test_a_wrong_server_names_file_server_and_fix(tmp_path: Path, part: str, said: str, fix: str) -> None:
    with pytest.raises(UserError) as error:
        read_jobs(written(tmp_path, VLLM, part, JUDGE, CLIENT), 8, tmp_path)
    assert said in error.value.message
    assert fix in error.value.fix


SERVE = """
import os, sys
from http.server import BaseHTTPRequestHandler as Handler, ThreadingHTTPServer
def answer(self):
    self.send_response(200); self.send_header("Content-Length", "1"); self.end_headers()
    self.wfile.write(os.environ["SEATRIAL_COPY"].encode())
Handler.do_GET = answer
ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""
ASK = """
import sys, urllib.request
from concurrent.futures import ThreadPoolExecutor
ask = lambda _: urllib.request.urlopen(sys.argv[1] + "/v1/x", timeout=20).read().decode()
print("copies", "".join(sorted(set(ThreadPoolExecutor(8).map(ask, range(64))))))
"""


@pytest.mark.real
def test_a_router_spreads_requests_over_replicas_on_two_nodes(
    cluster: PrivateSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    (tmp_path / "serve.py").write_text(SERVE)
    (tmp_path / "ask.py").write_text(ASK)
    python = f'["{sys.executable}", "{tmp_path}'
    server = (
        f'[[jobs.servers]]\nname = "server"\nkind = "command"\ncommand = {python}/serve.py", "{{bind}}", "{{port}}"]\n'
        'replicas = 3\nper_node = 2\nroute = true\nready_path = "/"\n'
    )
    client = f'[[jobs.components]]\nname = "client"\nrole = "client"\ncommand = {python}/ask.py", "{{url:server}}"]\n'
    batch = read_jobs(written(tmp_path, server, client), 8, tmp_path)
    directory = tmp_path / "batch"
    slurm.submit(batch, Profile(time="0:10:00"), "test", directory)
    poller = Poller([directory])
    unit = until(lambda: found if (found := poller.poll().units[0]).verdict else None, "end of the job", 90)
    job = jobdir.job_dir(directory, "job")
    assert unit.state is UnitState.DONE, unit
    assert "copies 012" in job.log("client", 0, None).read_text()
    assert (job.path / "router.py").is_file()
