"""The private Slurm itself: what it offers, what it survives, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.slurm.cluster import PrivateSlurm, conf, processes, tools
from tests.runtime.slurm.conftest import MakeCluster

real = pytest.mark.real
CHECKOUT = Path(__file__).parents[3]


def submit(cluster: PrivateSlurm, script: str, *options: str) -> str:
    """Submit a batch script; returns the job id."""
    done = cluster.run("sbatch", "--parsable", *options, stdin=f"#!/bin/bash\n{script}\n")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def finished(cluster: PrivateSlurm, key: str, job: str, count: int = 1) -> list[dict[str, str]]:
    """Wait until the oracle knows `count` records of a job."""
    return cluster.wait(
        lambda: found if len(found := [row for row in cluster.oracle() if row.get(key) == job]) >= count else [],
        f"{count} finished of {key} {job}",
        60,
    )


def state(cluster: PrivateSlurm, job: str) -> str:
    return cluster.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").stdout.strip()


def bridges(root: Path) -> list[str]:
    links = subprocess.run([tools.tool("ip"), "-json", "link", "show"], capture_output=True, text=True, check=True).stdout
    return [link["ifname"] for link in json.loads(links) if link.get("ifalias") == str(root)]


def await_running(cluster: PrivateSlurm, job: str) -> None:
    cluster.wait(lambda: state(cluster, job) == "RUNNING", f"job {job} to run")


def leftovers(cluster: PrivateSlurm) -> set[int]:
    return processes.slurm_started(cluster.root)


# --- one cluster that serves them all


@real
def test_it_comes_up_with_idle_nodes_and_three_partitions(cluster: PrivateSlurm) -> None:
    assert cluster.node_states() == dict.fromkeys(("n1", "n2", "n3", "n4"), "idle")
    names = cluster.run("sinfo", "--noheader", "--format=%P").stdout.split()
    assert sorted(names) == ["high", "low", "main*"]


@real
def test_srun_reaches_every_node(cluster: PrivateSlurm) -> None:
    done = cluster.run("srun", "--nodes=4", "bash", "-c", "echo $SLURMD_NODENAME")
    assert sorted(done.stdout.split()) == list(cluster.nodes)


@real
def test_the_oracle_knows_state_and_exact_exit_code_also_of_a_name_with_spaces(cluster: PrivateSlurm) -> None:
    job = submit(cluster, "exit 137", "--job-name=two words, A=b", "--output=/dev/null")
    row = finished(cluster, "JobId", job)[0]
    assert (row["JobState"], row["ExitCode"], row["Partition"]) == ("FAILED", "137:0", "main")


@real
def test_an_array_runs_each_task_once(cluster: PrivateSlurm) -> None:
    job = submit(cluster, "exit $SLURM_ARRAY_TASK_ID", "--array=0-5%3", "--output=/dev/null")
    rows = finished(cluster, "ArrayJobId", job, 6)
    assert {row["ArrayTaskId"]: row["ExitCode"] for row in rows} == {str(task): f"{task}:0" for task in range(6)}


@real
def test_an_array_index_above_the_limit_is_refused(cluster: PrivateSlurm) -> None:
    assert "Invalid job array" in cluster.run("sbatch", "--array=1001", "--wrap=true").stderr


@real
def test_a_het_job_has_two_groups(cluster: PrivateSlurm) -> None:
    script = "srun --het-group=0,1 bash -c 'echo $SLURMD_NODENAME' | sort"
    job = submit(cluster, script, "--ntasks=1", "--output=het.txt", ":", "--ntasks=2", "--gres=gpu:1")
    rows = finished(cluster, "HetJobId", job, 2)
    assert {row["JobState"] for row in rows} == {"COMPLETED"}
    assert len((cluster.root / "work" / "het.txt").read_text().split()) == 3


@real
def test_exact_steps_get_different_gpus_and_others_none(cluster: PrivateSlurm) -> None:
    show = "bash -c 'echo $CUDA_VISIBLE_DEVICES > gpus.$0; sleep 1'"
    step = f"srun -n1 -c2 --exact --gres=gpu:4 {show}"
    script = f"{step} a & {step} b & wait; srun --overlap --gres=none {show} c"
    job = submit(cluster, script, "--nodes=1", "--ntasks=2", "--cpus-per-task=2", "--gres=gpu:8", "--output=/dev/null")
    assert finished(cluster, "JobId", job)[0]["JobState"] == "COMPLETED"
    given = [(cluster.root / "work" / f"gpus.{name}").read_text().strip() for name in "abc"]
    assert sorted(given[:2]) == ["0,1,2,3", "4,5,6,7"]
    assert given[2] == ""


@real
def test_more_gpus_or_memory_than_a_node_has_are_refused(cluster: PrivateSlurm) -> None:
    for option in ("--gres=gpu:9", f"--mem={conf.MEMORY_MB + 1}"):
        done = cluster.run("sbatch", "--test-only", option, "--wrap=true")
        assert done.returncode != 0, option


@real
def test_fake_pyxis_reports_what_was_asked_for(cluster: PrivateSlurm, tmp_path: Path) -> None:
    options = ("--container-image=nvcr.io#nvidia/x:1", "--container-mounts=/a:/b:ro,/c:/c", "--container-name=box", "--container-env=A,B")
    flags = ("--no-container-mount-home", "--container-writable", "--container-remap-root", "--no-container-entrypoint")
    done = cluster.run("srun", *options, *flags, f"--container-workdir={tmp_path}", "bash", "-c", "pwd; env | grep ^FAKE_ | sort")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(tmp_path),
        "FAKE_PYXIS_ENV=A,B",
        "FAKE_PYXIS_IMAGE=nvcr.io#nvidia/x:1",
        "FAKE_PYXIS_MOUNTS=/a:/b:ro,/c:/c",
        "FAKE_PYXIS_NAME=box",
        "FAKE_PYXIS_NO_ENTRYPOINT=1",
        "FAKE_PYXIS_NO_MOUNT_HOME=1",
        "FAKE_PYXIS_REMAP_ROOT=1",
        f"FAKE_PYXIS_WORKDIR={tmp_path}",
        "FAKE_PYXIS_WRITABLE=1",
    ]


@real
def test_fake_pyxis_refuses_an_empty_value_and_an_unknown_option(cluster: PrivateSlurm) -> None:
    assert "argument required" in cluster.run("srun", "--container-image=", "true").stderr
    assert "unrecognized option" in cluster.run("srun", "--container-imagination=x", "true").stderr


@real
def test_fake_pyxis_ignores_mounts_without_an_image_loudly(cluster: PrivateSlurm) -> None:
    done = cluster.run("srun", "--container-mounts=/a:/b", "bash", "-c", "env | grep -c ^FAKE_")
    assert done.stdout.strip() == "0"
    assert "ignoring --container-mounts" in done.stderr


@real
def test_fake_pyxis_serves_sbatch_and_each_step_reports_its_own(cluster: PrivateSlurm) -> None:
    script = "echo batch=$FAKE_PYXIS_IMAGE; srun --container-image=other bash -c 'echo step=$FAKE_PYXIS_IMAGE,$FAKE_PYXIS_WORKDIR'"
    job = submit(cluster, script, "--container-image=one", "--output=pyxis.txt")
    finished(cluster, "JobId", job)
    assert (cluster.root / "work" / "pyxis.txt").read_text().splitlines() == ["batch=one", "step=other,"]


@real
def test_the_controller_listens_on_loopback_only(cluster: PrivateSlurm) -> None:
    port = next(
        line.partition("=")[2] for line in (cluster.root / "slurm.conf").read_text().splitlines() if line.startswith("SlurmctldPort")
    )
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"]
    assert [where for where in listening if int(where.partition(":")[2], 16) == int(port)] == [f"0100007F:{int(port):04X}"]


@real
def test_sacct_knows_a_finished_job(accounting_cluster: PrivateSlurm) -> None:
    job = submit(accounting_cluster, "exit 3", "--output=/dev/null")
    sacct = ("sacct", "-X", "-n", "-P", "-D", "-j", job, "--format=JobID,State,ExitCode")
    accounting_cluster.wait(lambda: "FAILED" in accounting_cluster.run(*sacct).stdout, f"sacct to know job {job}", 30)
    assert accounting_cluster.run(*sacct).stdout.strip() == f"{job}|FAILED|3:0"


@real
def test_without_accounting_sacct_fails(cluster: PrivateSlurm) -> None:
    assert cluster.run("sacct").returncode != 0


# --- clusters of a test's own: crashes, side by side, tear-down


@real
def test_a_running_job_survives_a_controller_killed_and_restarted(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(nodes=1)
    go = cluster.root / "work" / "go"
    wait_for_it = f"touch began; while ! [ -e {go} ]; do sleep 0.1; done; exit 4"
    job = submit(cluster, f"srun bash -c '{wait_for_it}'", "--output=/dev/null")
    began, saved = cluster.root / "work" / "began", cluster.root / "state" / "job_state"
    cluster.wait(began.exists, "the step to begin")
    cluster.wait(lambda: saved.stat().st_mtime > began.stat().st_mtime, "the controller to save its state")
    cluster.kill_controller()
    assert "Unable to contact slurm controller" in cluster.run("squeue").stderr
    cluster.start_controller()
    assert state(cluster, job) == "RUNNING"
    go.touch()
    assert finished(cluster, "JobId", job)[0]["ExitCode"] == "4:0"


@real
def test_a_killed_node_takes_its_jobs_along_and_they_run_again_elsewhere(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(nodes=2)
    job = submit(cluster, "echo ${SLURM_RESTART_COUNT:-0} $SLURMD_NODENAME >> ran; sleep 300", "--requeue", "--output=/dev/null")
    ran = cluster.root / "work" / "ran"
    cluster.wait(ran.exists, "the job to run")
    node = ran.read_text().split()[-1]
    assert processes.slurm_started(cluster.root, node)
    cluster.kill_node(node)
    assert not processes.slurm_started(cluster.root, node)
    cluster.wait(lambda: cluster.node_states()[node].startswith("down"), "the controller to notice", 240)
    cluster.wait(lambda: len(ran.read_text().splitlines()) == 2, "the job to run again", 240)
    assert ran.read_text().split() == ["0", node, "1", next(name for name in cluster.nodes if name != node)]
    cluster.start_node(node)
    assert cluster.node_states()[node] == "idle"
    assert state(cluster, job) == "RUNNING"


@real
def test_a_node_is_set_down_and_back_at_once(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(nodes=1)
    cluster.set_node("n1", "DOWN", "a reason with words")
    assert cluster.node_states()["n1"] == "down"
    cluster.set_node("n1", "RESUME")
    cluster.wait(lambda: cluster.node_states()["n1"] == "idle", "n1 to be idle")
    with pytest.raises(RuntimeError, match="n9"):
        cluster.set_node("n9", "DOWN")


@real
def test_a_job_in_low_gives_way_and_is_requeued(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(nodes=1)
    low = submit(cluster, "sleep 300", "--partition=low", "--exclusive", "--output=/dev/null")
    await_running(cluster, low)
    high = submit(cluster, "sleep 300", "--partition=high", "--exclusive", "--output=/dev/null")
    await_running(cluster, high)
    assert state(cluster, low) == "PENDING"


@real
def test_a_finished_job_is_forgotten_after_min_job_age(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(nodes=1, min_job_age=2, settings={"MaxArraySize": "11"})
    job = submit(cluster, "true", "--output=/dev/null")
    finished(cluster, "JobId", job)
    cluster.wait(lambda: "Invalid job id" in cluster.run("squeue", "--jobs", job).stderr, "the job to be forgotten", 60)
    assert "Invalid job array" in cluster.run("sbatch", "--array=11", "--wrap=true").stderr


@real
def test_two_clusters_live_side_by_side_and_down_leaves_nothing(make_cluster: MakeCluster) -> None:
    one, two = make_cluster(nodes=1), make_cluster(nodes=2, gpus=0, pyxis=False)
    for cluster in (one, two):
        submit(cluster, "setsid sleep 300 & srun env -i /bin/sh -c 'echo >step; sleep 300'", "--job-name=mine", "--output=/dev/null")
        cluster.wait((cluster.root / "work" / "step").exists, "the step to run")
    assert "unrecognized option" in two.run("srun", "--container-image=x", "true").stderr
    one.down()
    assert not leftovers(one)
    assert "Unable to contact" in one.run("squeue").stderr
    assert two.run("squeue", "--noheader", "--format=%j").stdout.split() == ["mine"]
    one.up()
    assert one.run("squeue", "--noheader").stdout == "", "up starts from nothing"
    with pytest.raises(RuntimeError, match="already up"):
        one.up()


@real
def test_without_munge_it_comes_up_all_the_same(make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tools.installed
    monkeypatch.setattr(tools, "installed", lambda program: program != "munged" and installed(program))
    cluster = make_cluster(nodes=1)
    assert not cluster.munge
    assert cluster.run("srun", "echo", "fine").stdout == "fine\n"


@real
def test_a_failed_up_says_what_the_daemon_said_and_leaves_nothing_behind(tmp_path_factory: pytest.TempPathFactory) -> None:
    if lacking := tools.missing(False, True, namespaces=False):
        pytest.skip(lacking)
    cluster = PrivateSlurm(tmp_path_factory.mktemp("bad"), settings={"SelectType": "select/nonsense"})
    with pytest.raises(RuntimeError, match=r"slurmctld ended.*(?s:.*)nonsense"):
        cluster.up()
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(cluster.root) not in running
    assert not leftovers(cluster)


@real
def test_nodes_of_their_own_network_have_names_addresses_and_ports(make_cluster: MakeCluster) -> None:
    one, two = make_cluster(nodes=2, network="namespaces"), make_cluster(nodes=2, network="namespaces")
    for cluster in (one, two):
        serve = "python3 -m http.server 8000 --bind $(hostname) --directory /etc >/dev/null 2>&1 & sleep 1; wait"
        job = submit(cluster, f"srun bash -c '{serve}'", "--nodes=2", "--output=/dev/null")
        fetch = "import urllib.request as u; print([u.urlopen(f'http://{n}:8000/hostname', timeout=60).status for n in ('n1','n2')])"
        await_running(cluster, job)
        look = ("srun", "--overlap", f"--jobid={job}", "--nodes=2", "bash", "-c")
        said = cluster.run(*look, "echo $(hostname) $SLURMD_NODENAME $(getent hosts $(hostname) | cut -d' ' -f2-)").stdout
        assert sorted({word for word in said.split() if word.startswith("n")}) == ["n1", "n2"]
        answers = ("srun", "--overlap", f"--jobid={job}", "--nodes=1", "--ntasks=1", "python3", "-c", fetch)
        time.sleep(1)
        assert cluster.run(*answers).stdout.strip() == "[200, 200]"
    assert one.run("srun", "--overlap", "scontrol", "ping").stdout.strip().endswith("UP"), "a node reaches the controller"
    names = bridges(one.root)
    assert len(names) == 1
    one.kill_node("n1")
    one.start_node("n1")
    one.down()
    assert two.run("srun", "--overlap", "--nodes=2", "hostname").returncode == 0
    two.down()
    assert not leftovers(one) | leftovers(two)
    assert not bridges(one.root) + bridges(two.root)
    assert not list(Path("/sys/class/net").glob(f"{names[0]}*")), "no cable either"
    assert str(one.root) not in Path("/proc/mounts").read_text()


@real
@pytest.mark.parametrize("network", ["loopback", "namespaces"])
def test_a_cluster_whose_owner_was_killed_is_ended_and_cleared_by_a_later_down(
    tmp_path_factory: pytest.TempPathFactory, network: str
) -> None:
    lacking = tools.missing(False, True, network == "namespaces")
    if lacking:
        pytest.skip(lacking)
    root = tmp_path_factory.mktemp("dead")
    code = (
        "import sys,time; from pathlib import Path; from tests.runtime.slurm.cluster import PrivateSlurm\n"
        "c = PrivateSlurm(Path(sys.argv[1]), nodes=1, network=sys.argv[2]); c.up()\n"
        "c.run('sbatch', '--output=/dev/null', '--wrap', 'setsid sleep 300 & touch ran; srun sleep 300')\n"
        "c.wait((c.root / 'work/ran').exists, 'job'); print('up', flush=True); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(root), network], stdout=subprocess.PIPE, cwd=CHECKOUT) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        owner.kill()
    later = PrivateSlurm(root)
    assert leftovers(later) or network == "namespaces", "Slurm's own step daemons outlive it, except where a node ends as a whole"
    assert bridges(root) or network == "loopback"
    later.down()
    assert not leftovers(later)
    assert not bridges(root)


@real
def test_by_hand(tmp_path_factory: pytest.TempPathFactory) -> None:
    if lacking := tools.missing(False, True, namespaces=False):
        pytest.skip(lacking)
    root = str(tmp_path_factory.mktemp("hand"))
    hand = (sys.executable, "-m", "tests.runtime.slurm.cluster")
    try:
        up = subprocess.run([*hand, "up", root, "--nodes=1"], cwd=CHECKOUT, capture_output=True, text=True, check=True)
        assert up.stdout == f"export SLURM_CONF={root}/slurm.conf\n"
        assert PrivateSlurm(Path(root)).node_states() == {"n1": "idle"}
    finally:
        subprocess.run([*hand, "down", root], cwd=CHECKOUT, check=True)
    assert not leftovers(PrivateSlurm(Path(root)))


# --- without Slurm


def test_a_root_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too long for sockets"):
        PrivateSlurm(tmp_path / ("x" * 80))


def test_down_of_what_never_was_is_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("no")
    PrivateSlurm(root / "absent").down()
    PrivateSlurm(root).down()
    assert list(root.iterdir()) == []


def test_ports_are_neighbours_below_the_kernels_own_and_differ_from_call_to_call() -> None:
    first, second = tools.free_ports(7), tools.free_ports(7)
    assert first == list(range(first[0], first[0] + 7))
    assert not set(first) & set(second)
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(first + second) < lowest


def test_what_is_missing_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "installed", lambda program: program not in ("slurmctld", "slurmdbd"))
    assert tools.missing(False, False, False) == "apt-get install --no-install-recommends slurm-wlm (or, as root: sh scripts/slurm.sh)"
    assert "slurm-wlm slurmdbd" in str(tools.missing(True, True, False))
    monkeypatch.setattr(tools, "installed", lambda program: True)
    assert tools.missing(True, True, False) is None


def test_a_recycled_pid_and_a_zombie_count_as_dead(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    table = processes.Processes(tmp_path, keep=False)
    pid = table.start("sleeper", ["sleep", "60"], dict(os.environ))
    assert table.pid("sleeper") == pid
    record = tmp_path / "processes.json"
    truth = record.read_text()
    record.write_text(truth.replace(str(processes.start_ticks(pid)), "1"))
    assert not table.alive("sleeper"), "another start time is another process"
    record.write_text(truth)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # ended, not collected
    assert processes.start_ticks(pid) is None
    table.end("sleeper")
    assert table.names() == ()


def test_a_caller_s_setting_replaces_ours(tmp_path: Path) -> None:
    shape = conf.Shape(
        root=tmp_path,
        user="me",
        hostname="here",
        address="127.0.0.1",
        controller_port=1,
        nodes=(conf.Node("n1", "127.0.0.1", 2, "here"),),
        cpus=8,
        devices=(),
        munge=False,
        accounting=None,
        plugin=None,
        min_job_age=300,
        settings={"KillWait": "1", "PropagateResourceLimits": "NONE"},
    )
    lines = conf.slurm_conf(shape).splitlines()
    assert [line for line in lines if line.startswith(("KillWait", "Propagate", "AuthType"))] == [
        "AuthType=auth/none",
        "KillWait=1",
        "PropagateResourceLimits=NONE",
    ]
    assert "Gres" not in next(line for line in lines if line.startswith("NodeName"))
