"""Nodes made of network namespaces on one machine, each with its own host name and address, and mpirun over them.

The caller already runs in its own namespaces (scripts/multinode_test.sh), so nothing outlives it.
"""
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import net
from relay import Relay

REPOSITORY = Path(__file__).resolve().parents[2]
SUBNET = "10.99.0"
SHARED_MEMORY = Path("/dev/shm")
# mpirun and its daemons notice a lost connection after ten seconds, not after a quarter of an hour. The ranks notice it
# earlier.
PATIENCE = ["--mca", "oob_tcp_keepalive_time", "7", "--mca", "oob_tcp_keepalive_intvl", "1", "--mca", "oob_tcp_keepalive_probes", "2"]


class Cluster:
    """`count` nodes, node1 to nodeN. `delay`: (seconds, jitter, loss) of every packet between them. `own_cores`: each
    node has its own share of this machine's cores, as real machines have, if there are enough cores."""

    def __init__(self, count, delay=None, own_cores=False):
        cores = sorted(os.sched_getaffinity(0))
        self.cores = [cores[len(cores) * i // count:len(cores) * (i + 1) // count] if own_cores and len(cores) >= count else cores
                      for i in range(count)]
        self.folder = Path(tempfile.mkdtemp(prefix="mpk-nodes-"))
        # Jobs keep their temporary files here, so that a test sees what they leave behind.
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        # Other jobs of this machine use its shared memory too. This one belongs to the test's own mount namespace.
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", SHARED_MEMORY], check=True)
        self.holders = []
        self.names = [f"node{i + 1}" for i in range(count)]
        net.set_up("lo")  # for jobs on one node
        if delay is None:
            try:
                net.bridge("nodes")
                net.set_up("nodes")
            except OSError:
                delay = (0.0, 0.0, 0.0)  # a kernel without bridges: packets go through user space
        for index, name in enumerate(self.names):
            holder = subprocess.Popen(["unshare", "-n", "--uts", "sh", "-c", f"hostname {name} && echo ok && exec sleep 100000"],
                                      stdout=subprocess.PIPE, text=True)
            assert holder.stdout.readline() == "ok\n", "a node's namespaces cannot be created"
            self.holders.append(holder)
            port = f"port{index + 1}"
            net.pair(port, "eth0", holder.pid)
            if delay is None:
                net.set_master(port, "nodes")
            net.set_up(port)
            net.inside(holder.pid, lambda address=f"{SUBNET}.{index + 1}": self._join(address))
            # A connection whose other end is gone fails after seconds, not after a quarter of an hour: mpirun's daemons then end.
            self.set_retries(index + 1, 5)
        self.relay = Relay([f"port{i + 1}" for i in range(count)], [h.pid for h in self.holders], *delay) if delay else None
        pids = " ".join(f"{name}) pid={holder.pid} cores={self.core_list(node)};;"
                        for node, (name, holder) in enumerate(zip(self.names, self.holders), 1))
        self.agent = self.folder / "agent"
        self.agent.write_text(f'#!/bin/sh\nhost=$1\nshift\ncase $host in {pids} *) exit 1;; esac\nexec nsenter -t "$pid" -n -u taskset -c "$cores" sh -c "$*"\n')
        self.agent.chmod(0o755)

    @staticmethod
    def _join(address):
        """A node's own links."""
        net.set_up("lo")
        net.add_address("eth0", address, 24)
        net.set_up("eth0")

    def close(self):
        for holder in self.holders:
            holder.kill()
            holder.wait()
        if self.relay:
            self.relay.close()
        for name in ("nodes", *(f"port{index + 1}" for index in range(len(self.names)))):
            net.delete(name)
        subprocess.run(["umount", "--lazy", SHARED_MEMORY], check=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def cut(self, node):
        """Cuts the node off: no packet goes to or from it any more."""
        net.set_up(f"port{node}", False)

    def set_retries(self, node, count):
        """How often an unconfirmed packet is sent again before its connection fails."""
        subprocess.run([*self.enter(node), "sh", "-c", f"echo {count} >/proc/sys/net/ipv4/tcp_retries2 2>/dev/null || true"])

    def core_list(self, node):
        return ",".join(map(str, self.cores[node - 1]))

    def enter(self, node):
        return ["nsenter", "-t", str(self.holders[node - 1].pid), "-n", "-u", "taskset", "-c", self.core_list(node)]

    def processes(self, node):
        """The processes of a node, except the one that holds its namespaces."""
        space = os.readlink(f"/proc/{self.holders[node - 1].pid}/ns/net")
        found = []
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/net") == space and int(entry) != self.holders[node - 1].pid:
                    found.append((int(entry), Path(f"/proc/{entry}/comm").read_text().strip()))
            except OSError:
                pass
        return found

    def left_behind(self):
        """The files that jobs have left in shared memory, in their temporary folder and in folders of compilations."""
        folders = (SHARED_MEMORY.iterdir(), self.temporary.rglob("*"), self.folder.rglob("*.build"))
        return [str(path) for paths in folders for path in paths]

    def start(self, hosts, command, options=(), recorded=True):
        """mpirun on node 1; `hosts`: ranks of each node. Without `recorded`, the job's own start is not delayed by that of the recorders."""
        slots = ",".join(f"{name}:{ranks}" for name, ranks in zip(self.names, hosts) if ranks)
        return Job(self, [*self.enter(1), "mpirun", "--mca", "plm_rsh_agent", str(self.agent), "-H", slots, "-n", str(sum(hosts)),
                          "--mca", "btl", "tcp,self,vader", "--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0",
                          *PATIENCE, *options], list(map(str, command)), recorded)

    def run(self, hosts, command, timeout=60, options=(), recorded=True):
        return self.start(hosts, command, options, recorded).wait(timeout)


class Job:
    """A running job. If `recorded`, status_of.py starts each rank and records how it ended."""

    def __init__(self, cluster, launcher, command, recorded):
        self.cluster = cluster
        self.notes = Path(tempfile.mkdtemp(prefix="job-", dir=cluster.folder))
        recorder = [sys.executable, str(Path(__file__).with_name("status_of.py")), str(self.notes)] if recorded else []
        command = [*launcher, *recorder, *command]
        self.out, self.err = open(self.notes / "stdout", "w+"), open(self.notes / "stderr", "w+")
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.out, stderr=self.err, text=True, start_new_session=True,
                                        env={**os.environ, "TMPDIR": str(cluster.temporary)})

    def stderr(self):
        return (self.notes / "stderr").read_text(errors="replace")

    def stdout(self):
        return (self.notes / "stdout").read_text(errors="replace")

    def await_text(self, text, seconds=30):
        """Waits until stderr contains `text`."""
        end = time.monotonic() + seconds
        while text not in self.stderr():
            if time.monotonic() > end or self.process.poll() is not None:
                raise AssertionError(f"no `{text}` in:\n{self.stderr()}")
            time.sleep(0.02)

    def ranks(self):
        """The process of each rank, by rank."""
        return {int(path.name[4:]): int(path.read_text()) for path in self.notes.glob("pid.*") if path.read_text()}

    def statuses(self):
        """How ranks ended, by rank: (status, seconds since the epoch). Running ranks are missing."""
        found = {}
        for path in self.notes.glob("status.*"):
            words = path.read_text().split()
            if len(words) == 2:
                found[int(path.name[7:])] = (int(words[0]), float(words[1]))
        return found

    def wait(self, timeout):
        # Popen.wait with a time limit looks only every 50 ms, which is too coarse for figures.
        end = os.pidfd_open(self.process.pid)
        try:
            ended, _, _ = select.select([end], [], [], timeout)
        finally:
            os.close(end)
        if not ended:
            self.kill()
            raise AssertionError(f"the job did not end within {timeout} s:\n{self.stderr()[-4000:]}")
        self.process.wait()
        return self

    def kill(self):
        """Kills all processes of the job."""
        for node in range(1, len(self.cluster.names) + 1):
            for pid, _ in self.cluster.processes(node):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        self.process.wait()
