"""Watches the memory of a program's processes.

    memory.py PROGRAM OUT    until SIGTERM, then OUT holds the largest sum seen, in MiB

The sum is over the resident pages of every process that runs PROGRAM and was
started below the caller. Pages that several of them share count in each: the
figure is rather too large. Standard library only; Linux.
"""

import os
import signal
import sys
import time

EVERY_SECONDS = 0.2


def parents():
    """Parent of each process that can be read."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                # The program's name stands in brackets and may hold anything.
                found[int(name)] = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            pass
    return found


def is_below(process, ancestor, parent):
    while process > 1:
        if process == ancestor:
            return True
        process = parent.get(process, 0)
    return False


def resident_bytes(process, program):
    try:
        if os.path.realpath(f"/proc/{process}/exe") != program:
            return 0
        with open(f"/proc/{process}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def main():
    program, out = os.path.realpath(sys.argv[1]), sys.argv[2]
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    most, caller = 0, os.getppid()
    while not ended:
        parent = parents()
        below = (process for process in parent if is_below(process, caller, parent))
        most = max(most, sum(resident_bytes(process, program) for process in below))
        time.sleep(EVERY_SECONDS)
    with open(out, "w", encoding="ascii") as file:
        print(most // 2**20, file=file)


main()
