"""Links between network namespaces, by the kernel's netlink interface: `ip` is not everywhere."""
import ctypes
import os
import socket
import struct
import threading

CLONE_NEWNET = 0x40000000
REQUEST, ACK, EXCLUSIVE, CREATE = 0x1, 0x4, 0x200, 0x400
ERROR, NEW_LINK, DELETE_LINK, NEW_ADDRESS = 2, 16, 17, 20
# Attributes of a link, of its kind, of a veth pair, and of an address.
NAME, MASTER, LINK_INFO, NAMESPACE_OF = 3, 10, 18, 19
KIND, DATA = 1, 2
PEER = 1
ADDRESS, LOCAL = 1, 2
UP = 1


def inside(pid, what):
    """Calls `what` in the network namespace of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    result, problem = [], []

    def body():
        try:
            with open(f"/proc/{pid}/ns/net") as space:
                if libc.setns(space.fileno(), CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            result.append(what())
        except Exception as error:
            problem.append(error)

    # The thread's namespace ends with it.
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if problem:
        raise problem[0]
    return result[0]


def attribute(kind, value):
    data = value if isinstance(value, bytes) else struct.pack("=I", value) if isinstance(value, int) else value.encode() + b"\0"
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def link(name="", index=0, flags=0, change=0):
    head = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, flags, change)
    return head + (attribute(NAME, name) if name else b"")


def ask(what, kind, body, flags=0):
    """Sends one request to the kernel. Raises OSError if it refuses."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.settimeout(5)
        netlink.bind((0, 0))
        netlink.send(struct.pack("=IHHII", 16 + len(body), kind, REQUEST | ACK | flags, 1, 0) + body)
        answer = netlink.recv(65536)
    code = -struct.unpack_from("=i", answer, 16)[0] if struct.unpack_from("=H", answer, 4)[0] == ERROR else 0
    if code:
        raise OSError(code, f"{what}: {os.strerror(code)}")


def bridge(name):
    ask(f"bridge {name}", NEW_LINK, link(name) + attribute(LINK_INFO, attribute(KIND, "bridge")), CREATE | EXCLUSIVE)


def pair(name, peer, pid):
    """Two ends of a cable: `name` here, and `peer` in the network namespace of a process."""
    other = attribute(PEER, link(peer) + attribute(NAMESPACE_OF, pid))
    info = attribute(KIND, "veth") + attribute(DATA, other)
    ask(f"link {name}", NEW_LINK, link(name) + attribute(LINK_INFO, info), CREATE | EXCLUSIVE)


def set_up(name, up=True):
    ask(f"link {name}", NEW_LINK, link(index=socket.if_nametoindex(name), flags=UP if up else 0, change=UP))


def set_master(name, master):
    ask(f"link {name}", NEW_LINK, link(index=socket.if_nametoindex(name)) + attribute(MASTER, socket.if_nametoindex(master)))


def add_address(name, address, bits):
    number = socket.inet_aton(address)
    body = struct.pack("=BBBBI", socket.AF_INET, bits, 0, 0, socket.if_nametoindex(name))
    ask(f"address {address}", NEW_ADDRESS, body + attribute(LOCAL, number) + attribute(ADDRESS, number), CREATE | EXCLUSIVE)


def delete(name):
    """Returns true if there was such a link."""
    try:
        ask(f"link {name}", DELETE_LINK, link(index=socket.if_nametoindex(name)))
    except OSError:
        return False
    return True
