"""A slow and lossy switch between nodes, in user space: the kernel's netem is not everywhere.

Each packet arrives after `delay` seconds, more or less up to `jitter`, in order; a share `loss` of them never does.
"""
import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import threading
import time

from net import inside

ETH_P_ALL = 3
PACKET_OUTGOING = 4
SIOCETHTOOL = 0x8946
# Work that a kernel leaves to the network card: a sender's checksums (tx) and segmentation (tso, gso), a receiver's joining (gro).
OFFLOADS = {"tx": 0x17, "tso": 0x1F, "gso": 0x24, "gro": 0x2C}


def no_offloads(port):
    """Switches these offloads off, so that packets are as on a wire: whole, with their checksums."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in OFFLOADS.values():
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP16x", port.encode(), ctypes.addressof(value))
            try:
                fcntl.ioctl(control, SIOCETHTOOL, request)
            except OSError:
                pass  # not all of them are there


class Relay:
    def __init__(self, ports, pids, delay, jitter, loss, seed=1):
        self.delay, self.jitter, self.loss = delay, jitter, loss
        self.random = random.Random(seed)
        self.lost = self.passed = 0
        self.sockets = []
        for port, pid in zip(ports, pids):
            no_offloads(port)
            inside(pid, lambda: no_offloads("eth0"))
            opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
            opened.bind((port, ETH_P_ALL))
            opened.setblocking(False)
            self.sockets.append(opened)
        self.wake, wake = os.pipe()
        self._stop = wake
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def close(self):
        os.write(self._stop, b"x")
        self.thread.join()
        for opened in self.sockets:
            opened.close()

    def _run(self):
        behind = {}  # address of a card: its port
        waiting, number = [], 0
        latest = {}
        poll = select.poll()
        by_descriptor = {opened.fileno(): index for index, opened in enumerate(self.sockets)}
        for descriptor in [*by_descriptor, self.wake]:
            poll.register(descriptor, select.POLLIN)
        while True:
            timeout = None if not waiting else max(0, (waiting[0][0] - time.monotonic()) * 1000)
            for descriptor, _ in poll.poll(timeout):
                if descriptor == self.wake:
                    return
                source = by_descriptor[descriptor]
                for _ in range(64):
                    try:
                        packet, about = self.sockets[source].recvfrom(65600)
                    except OSError:
                        break  # nothing more, or the link is down
                    if about[2] == PACKET_OUTGOING:
                        continue
                    behind[packet[6:12]] = source
                    if self.random.random() < self.loss:
                        self.lost += 1
                        continue
                    self.passed += 1
                    target = behind.get(packet[:6])
                    for port in [target] if target is not None else [p for p in range(len(self.sockets)) if p != source]:
                        due = time.monotonic() + self.delay + self.random.uniform(-self.jitter, self.jitter)
                        due = latest[source, port] = max(due, latest.get((source, port), 0))
                        number += 1
                        heapq.heappush(waiting, (due, number, port, packet))
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, port, packet = heapq.heappop(waiting)
                try:
                    self.sockets[port].send(packet)
                except OSError:
                    pass  # the link is down
