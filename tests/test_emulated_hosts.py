"""benchmarks/emulated_hosts.py: ranks in namespaces with a slow link between them, and nothing left behind."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import emulated_hosts  # noqa: E402

JOB = """
import json, sys, time, torch, torch.distributed as dist
from foveate.parallel.comm import partition
from foveate.parallel.hosts import ask_hosts
dist.init_process_group("gloo")
found, group, me = ask_hosts(), partition([[0, 1]], "pair", 3.0), dist.get_rank()
x, rows = torch.zeros(4_000_000, dtype=torch.uint8), [0, 0]
rows[1 - me] = len(x)
seconds = []
for late in (0.0, 0.2):
    dist.barrier()
    time.sleep(late * me)
    began = time.monotonic()
    group.all_to_all(x, rows, rows, "test").wait()
    dist.barrier()
    seconds.append(time.monotonic() - began)
if me == 0:
    open(sys.argv[1], "w").write(json.dumps([found.of, seconds]))
while True:  # until a host is unplugged
    group.all_to_all(x, rows, rows, "last").wait()
    time.sleep(0.1)
"""


def test_two_hosts_share_a_slow_link_and_are_told_apart(tmp_path: Path) -> None:
    """And what they send each other travels both ways at once, also where one of them comes late. Then one is
    unplugged: both say so, and end."""
    reason = emulated_hosts.why_not()
    if reason:
        pytest.skip(reason)
    script, result, log = tmp_path / "job.py", tmp_path / "result.json", tmp_path / "log"
    script.write_text(JOB)
    with emulated_hosts.Hosts(2, mbit=20, limit=60) as hosts, log.open("w") as told:
        names = [hosts.switch, *hosts.names]
        hosts.start(1, [str(script), str(result)], stdout=told, stderr=subprocess.STDOUT)
        end = time.monotonic() + 100
        while not result.exists() and time.monotonic() < end:
            time.sleep(0.2)
        hosts.unplug(1)
        assert hosts.wait() == [1, 1]
    found = log.read_text()
    assert "CommError: rank 0: 'last' among ranks [0, 1] (pair) did not complete. rank 1 did not answer" in found
    assert (
        "CommError: rank 1: 'last' among ranks [0, 1] (pair) did not complete. the job's store does not answer" in found
    )
    of, seconds = json.loads(result.read_text())
    assert of == [0, 1]
    for took, late in zip(seconds, (0.0, 0.2), strict=True):  # 4 MB at 20 Mbit/s are 1.6 s, one way after the other 3.2
        assert 1.5 < took - late < 2.6
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in left for name in names)


@pytest.mark.parametrize("wrong", [{"count": 5}, {"count": 0}, {"count": 2, "mbit": 0}, {"count": 2, "limit": 1e9}])
def test_hosts_are_bounded_in_number_and_time(wrong: dict) -> None:
    with pytest.raises(ValueError, match="1 to 4 hosts"):
        emulated_hosts.Hosts(**wrong)
