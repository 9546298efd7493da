"""All parts of the multi-node test. See scripts/multinode_test.sh."""
import argparse
import os
import sys
import time
import traceback

import cases
import faults
import figures
import signals

PARTS = {"cases": cases.run, "slow": cases.run_slow, "faults": faults.run, "signals": signals.run, "figures": figures.run}


def main():
    parser = argparse.ArgumentParser("scripts/multinode_test.sh")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--share", type=faults.share, default=(1, 1), metavar="I/N")
    parser.add_argument("--program", default=os.environ["MPK_MULTINODE_PROGRAM"])
    arguments = parser.parse_args()
    for name in arguments.parts:
        if name not in PARTS:
            parser.error(f"no part {name}; the parts are {', '.join(PARTS)}")
    if not os.access(arguments.program, os.X_OK):
        print(f"multinode: there is no {arguments.program}; build it: cargo build --release -p mpk-launch --bins", file=sys.stderr)
        return 2
    failed, passed, begin = [], 0, time.monotonic()

    def report(name, test):
        nonlocal passed
        start = time.monotonic()
        try:
            said = test()
        except Exception as error:  # the rest is tested too
            failed.append(name)
            text = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
            print(f"FAILED  {name}: {text}", flush=True)
            return
        passed += 1
        print(f"ok      {name}{': ' + said if said else ''} ({time.monotonic() - start:.1f} s)", flush=True)

    of_share = {part.__name__: lambda *rest, part=part: part.run(*rest, arguments.share) for part in (faults, signals)}
    parts = {**PARTS, **of_share}
    for name in arguments.parts or parts:
        parts[name](arguments.program, report, arguments.long)
    print(f"multinode: {passed} passed, {len(failed)} failed, {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


sys.exit(main())
