"""Real Ray: what actors and tasks execute is told by their workers, and functions pickled by value work without us."""

from __future__ import annotations

import pytest

from tests.pytest_seatrial.select.trace.traced import Told, trace
from tests.runtime.rays import NEW_PIDS, environment, need_namespaces

pytestmark = [pytest.mark.real, pytest.mark.slow]

FILES = {
    "lib.py": "def helper(): return 7\ndef init(): return helper()\n",
    "actors.py": """
    import ray, lib
    @ray.remote
    class Counter:
        def __init__(self): self.n = lib.init()
        def more(self):
            self.n += 1
            return self.n
        async def later(self): return self.n
    @ray.remote
    def task(x): return lib.helper() + x
    """,
    "test_mod.py": """
    import ray, lib
    def here(): return lib.helper()
    @ray.remote
    class Local:
        def go(self): return here()
    """,
}
SCRIPT = """
import subprocess
import ray
from ray import cloudpickle
import actors, test_mod
cloudpickle.register_pickle_by_value(test_mod)
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
recorder.switch(1)
assert ray.get(actors.task.remote(1), timeout=60) == 8
recorder.switch(2)
counter = actors.Counter.remote()
recorder.switch(3)
assert ray.get(counter.more.remote(), timeout=60) == 8
recorder.switch(4)
assert ray.get(counter.more.remote(), timeout=60) == 9
ray.kill(counter)
recorder.switch(5)
local = test_mod.Local.remote()
assert ray.get(local.go.remote(), timeout=60) == 7
recorder.switch(6)
assert ray.get(actors.task.remote(1), timeout=60) == 8
ray.shutdown()
data = cloudpickle.dumps(test_mod.here)
env = {name: value for name, value in os.environ.items() if name not in ("SEATRIAL_SELECT", "PYTHONPATH")}
code = "import sys; from ray import cloudpickle; sys.path.insert(0, '.'); print(cloudpickle.loads(sys.stdin.buffer.read())())"
print(subprocess.run([sys.executable, "-c", code], input=data, env=env, check=True, capture_output=True, timeout=60).stdout)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    need_namespaces()
    return trace(tmp_path_factory.mktemp("ray"), FILES, SCRIPT, python=str(environment().python), within=NEW_PIDS)


def test_tasks_and_actors_tell_what_they_execute(told: Told) -> None:
    assert told.hits(1, own=False) == told.hits(6, own=False) == {"actors.py:task", "lib.py:helper"}
    made = told.hits(2, own=False) | told.hits(3, own=False)
    assert made == {"actors.py:Counter.__init__", "actors.py:Counter.more", "lib.py:init", "lib.py:helper"}
    assert told.hits(4, own=False) == {"actors.py:Counter.more"}


def test_an_actor_pickled_by_value_tells_too(told: Told) -> None:
    assert told.hits(5, own=False) == {"test_mod.py:Local.go", "test_mod.py:here", "lib.py:helper"}


def test_task_workers_are_told_from_actors(told: Told) -> None:
    kinds = {process.kind: told.hits_of(events) for process, events in told.children if told.hits_of(events)}
    assert "actors.py:task" in kinds["ray-task"]
    assert "actors.py:task" not in kinds["ray"]


def test_a_function_pickled_by_value_works_in_a_process_without_us(told: Told) -> None:
    assert "b'7\\n'" in told.output
