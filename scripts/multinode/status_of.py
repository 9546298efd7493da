"""Runs one rank: status_of.py FOLDER COMMAND... Records its process and how it ended in FOLDER.

There are two processes: one that the launcher knows, and one beyond its reach that starts the rank and sees its end.
Whatever the launcher does to the first process also happens to the rank.
"""
import os
import signal
import subprocess
import sys
import threading
import time

folder, command = sys.argv[1], sys.argv[2:]
rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")


def note(name, text):
    with open(f"{folder}/.{name}.{rank}", "w") as file:
        file.write(text)
    os.rename(f"{folder}/.{name}.{rank}", f"{folder}/{name}.{rank}")


def watch(parent):
    """Starts the rank and records its end; the rank dies with `parent`."""
    os.setsid()
    child = subprocess.Popen(command)
    note("pid", str(child.pid))

    def end_with_parent():
        while os.getppid() == parent:
            time.sleep(0.01)
        child.kill()

    threading.Thread(target=end_with_parent, daemon=True).start()
    status = child.wait()
    note("status", f"{status} {time.time()}")
    os._exit(status if status >= 0 else 128 - status)


parent = os.getpid()
watcher = os.fork()
if watcher == 0:
    watch(parent)


def forward(number, _):
    try:
        with open(f"{folder}/pid.{rank}") as file:
            os.kill(int(file.read()), number)
    except OSError:
        pass


for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, forward)
while True:
    try:
        _, status = os.waitpid(watcher, 0)
        break
    except InterruptedError:
        pass
sys.exit(os.waitstatus_to_exitcode(status))
