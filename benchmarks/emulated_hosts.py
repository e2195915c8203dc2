"""Several hosts on one machine: network namespaces joined by links of a given rate, and a torchrun job over them.

    sudo python benchmarks/emulated_hosts.py --hosts 2 --ranks 2 --mbit 200 -- benchmarks/bench_cluster.py --timed ...

Every host is a network namespace with one interface into a switch, which is a namespace too: nothing is added to the
machine's own network. The interface is shaped in both directions by `tc` (token bucket), so ranks of a host share it;
ranks inside a host talk over loopback, unshaped. Links are real, bytes are real. Cores are shared by all ranks: a
benchmark must be dominated by links and by waits in the place of computation (bench_cluster.py --timed), or say that it
is not. Needs Linux, root (or CAP_NET_ADMIN and CAP_SYS_ADMIN) and iproute2. Everything is removed at the end, whatever
happens, and after --limit seconds the job is ended.

As a module: `with Hosts(2, mbit=200) as hosts: hosts.torchrun(ranks=2, command=[...])`.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

MOST_HOSTS, MOST_RANKS, MOST_SECONDS = 4, 8, 1800
NETWORK, DEVICE, PORT = "10.77.0", "fov0", 29511


def why_not() -> str | None:
    """What is missing to emulate hosts here; None where nothing is."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs ip and tc: install iproute2"
    probe = f"fovprobe{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"needs the right to make network namespaces (root): {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return None


class Hosts:
    """Namespaces host 0 ... count - 1, address 10.77.0.1 and on. mbit: rate of each host's interface, both ways.

    limit: seconds a job may take; nice: of its processes.
    """

    def __init__(self, count: int, mbit: float = 200, limit: float = 600, nice: int = 0):
        if not 1 <= count <= MOST_HOSTS or mbit <= 0 or not 0 < limit <= MOST_SECONDS:
            raise ValueError(
                f"1 to {MOST_HOSTS} hosts, a rate above 0 and at most {MOST_SECONDS} s, got {count}, {mbit}, {limit}"
            )
        self.count, self.mbit, self.limit, self.nice = count, mbit, limit, nice
        stem = f"fov{os.getpid()}"
        self.switch, self.names = f"{stem}s", [f"{stem}h{host}" for host in range(count)]
        self.running: list[subprocess.Popen] = []

    def __enter__(self) -> "Hosts":
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        _ip("netns", "add", self.switch)
        self._in(self.switch, "ip", "link", "add", "br0", "type", "bridge")
        self._in(self.switch, "ip", "link", "set", "br0", "up")
        for host, name in enumerate(self.names):
            _ip("netns", "add", name)
            port = f"p{host}"
            # Made inside the switch's namespace: the machine's own network never sees either end.
            self._in(self.switch, "ip", "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", name)
            self._in(self.switch, "ip", "link", "set", port, "master", "br0", "up")
            self._in(name, "ip", "link", "set", "lo", "up")
            self._in(name, "ip", "addr", "add", f"{NETWORK}.{host + 1}/24", "dev", DEVICE)
            self._in(name, "ip", "link", "set", DEVICE, "up")
            for where, device in ((name, DEVICE), (self.switch, port)):
                shape = ("tbf", "rate", f"{self.mbit}mbit", "burst", "128kb", "latency", "400ms")
                self._in(where, "tc", "qdisc", "add", "dev", device, "root", *shape)

    def __exit__(self, *_: object) -> None:
        self.stop()
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _in(self, name: str, *command: str) -> None:
        _ip("netns", "exec", name, *command)

    def unplug(self, host: int) -> None:
        """Link down: packets to and from this host are lost from now on."""
        self._in(self.switch, "ip", "link", "set", f"p{host}", "down")

    def start(self, ranks: int, command: Sequence[str], restarts: int = 0, **pipes: object) -> None:
        """torchrun of a script with its arguments, `ranks` on every host; restarts: how often after a lost rank."""
        if not 1 <= ranks <= MOST_RANKS:
            raise ValueError(f"1 to {MOST_RANKS} ranks a host, got {ranks}")
        for host, name in enumerate(self.names):
            environment = os.environ | {
                "GLOO_SOCKET_IFNAME": DEVICE, "TP_SOCKET_IFNAME": DEVICE, "NCCL_HOSTID": name, "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            where = ["--nnodes", str(self.count), "--node-rank", str(host), "--nproc-per-node", str(ranks)]
            if restarts:  # only this rendezvous takes all hosts along
                where += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{NETWORK}.1:{PORT}", "--rdzv-id", "hosts"]
                where += ["--rdzv-conf", f"is_host={int(host == 0)}", "--local-addr", f"{NETWORK}.{host + 1}"]
                where += ["--max-restarts", str(restarts)]
                # Workers that begin anew on one host only would read the addresses of dead ones in a shared store.
                environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            else:
                where += ["--master-addr", f"{NETWORK}.1", "--master-port", str(PORT)]
            torchrun = [sys.executable, "-m", "torch.distributed.run", *where, *command]
            inside = ["nice", "-n", str(self.nice), "ip", "netns", "exec", name, *torchrun]
            self.running.append(subprocess.Popen(inside, env=environment, start_new_session=True, **pipes))  # type: ignore

    def wait(self) -> list[int | None]:
        """Exit codes by host; None for one that had to be ended after the limit."""
        end = time.monotonic() + self.limit
        codes: list[int | None] = []
        for process in self.running:
            try:
                codes.append(process.wait(max(0.1, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
        self.stop()
        return codes

    def stop(self) -> None:
        """End what still runs."""
        for process in self.running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for name in self.names:  # torchrun's workers have sessions of their own
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in found.stdout.split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self.running.clear()

    def torchrun(self, ranks: int, command: Sequence[str]) -> list[int | None]:
        """`start` and `wait`."""
        self.start(ranks, command)
        return self.wait()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {(done.stderr or done.stdout).strip()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help=f"at most {MOST_HOSTS}")
    parser.add_argument("--ranks", type=int, default=2, help=f"of each host, at most {MOST_RANKS}")
    parser.add_argument("--mbit", type=float, default=200, help="of each host's link, both ways")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which the job is ended")
    parser.add_argument("--nice", type=int, default=0, help="below 0: ahead of what else runs on the machine")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- script.py and its arguments")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command or not Path(command[0]).exists():
        parser.error("give the script to run after --")
    reason = why_not()
    if reason:
        parser.error(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces are removed
    with Hosts(options.hosts, options.mbit, options.limit, options.nice) as hosts:
        codes = hosts.torchrun(options.ranks, command)
    if any(codes):
        print(f"exit codes by host: {codes} (None: ended after {options.limit:.0f} s)", file=sys.stderr)
    return max((1 if code is None else abs(code) for code in codes), default=0)


if __name__ == "__main__":
    sys.exit(main())
