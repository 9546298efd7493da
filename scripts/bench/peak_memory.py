"""Runs a command and leaves its peak memory in a file: `peak_memory.py FOLDER COMMAND...`, one for each rank.

Writes FOLDER/rank-R.json with `peak_bytes` (the peak resident set of the command itself) and passes its status on."""

import json
import os
import sys
from pathlib import Path


def main():
    folder, command = Path(sys.argv[1]), sys.argv[2:]
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMIX_RANK") or "0"
    child = os.fork()
    if child == 0:
        os.execvp(command[0], command)
    _, status, usage = os.wait4(child, 0)
    result = {"rank": int(rank), "peak_bytes": usage.ru_maxrss * 1024}
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))
    sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)


main()
