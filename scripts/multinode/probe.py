"""Finds out whether the kernel lets us make nodes. If not, says why and exits with 77."""
import errno
import subprocess
import sys

import net

REFUSED = (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOSPC, errno.EINVAL, errno.EUSERS, errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT)
holder = subprocess.Popen(["unshare", "--net", "--uts", "sh", "-c", "hostname probe && echo ok && exec sleep 60"],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
said = holder.stdout.readline()
if said != "ok\n":
    print(said.strip() or "unshare failed without a message")
    sys.exit(77)
try:
    net.set_up("lo")
    net.pair("probe", "eth0", holder.pid)
    net.inside(holder.pid, lambda: net.set_up("eth0"))
except OSError as error:
    print(error)
    sys.exit(77 if error.errno in REFUSED else 1)
finally:
    holder.kill()
    holder.wait()
