"""benchmarks/emulated_hosts.py: ranks in namespaces with a slow link between them, and nothing left behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import emulated_hosts  # noqa: E402

JOB = """
import json, sys, time, torch, torch.distributed as dist
from foveate.parallel.hosts import ask_hosts
dist.init_process_group("gloo")
found = ask_hosts()
x = torch.zeros(2, 500_000)
dist.barrier()
began = time.monotonic()
dist.all_to_all_single(torch.empty_like(x), x)
dist.barrier()
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write(json.dumps([found.of, time.monotonic() - began]))
"""


def test_two_hosts_share_a_slow_link_and_are_told_apart(tmp_path: Path) -> None:
    reason = emulated_hosts.why_not()
    if reason:
        pytest.skip(reason)
    script, result = tmp_path / "job.py", tmp_path / "result.json"
    script.write_text(JOB)
    with emulated_hosts.Hosts(2, mbit=20, limit=100) as hosts:
        names = [hosts.switch, *hosts.names]
        assert hosts.torchrun(1, [str(script), str(result)]) == [0, 0]
    of, seconds = json.loads(result.read_text())
    assert of == [0, 1]
    assert seconds > 0.7  # 2 MB each way at 20 Mbit/s are 0.8 s, less what the token bucket lets pass at once
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in left for name in names)


@pytest.mark.parametrize("wrong", [{"count": 5}, {"count": 0}, {"count": 2, "mbit": 0}, {"count": 2, "limit": 1e9}])
def test_hosts_are_bounded_in_number_and_time(wrong: dict) -> None:
    with pytest.raises(ValueError, match="1 to 4 hosts"):
        emulated_hosts.Hosts(**wrong)
