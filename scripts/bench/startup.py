"""Start-up time of `--help`: oclaw in both builds, and a Python argparse program as the peer."""

import json
import os
import statistics
import subprocess
import sys
import time

RUNS = 20
PEER = "import argparse; argparse.ArgumentParser(description='peer').parse_args(['--help'])"


def milliseconds(command):
    taken = []
    for _ in range(RUNS + 1):
        before = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        taken.append(1000 * (time.perf_counter() - before))
    # The first run reads the program from the disk.
    return statistics.median(taken[1:])


def peak_mebibytes(command):
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, _, usage = os.wait4(process.pid, 0)
    return usage.ru_maxrss / 1024


def main():
    with_torch, without_torch = sys.argv[1:]
    peer = milliseconds([sys.executable, "-c", PEER])
    for name, program in (("torch", with_torch), ("no torch", without_torch)):
        command = [program, "--help"]
        taken = milliseconds(command)
        print(json.dumps({
            "figure": f"startup of `oclaw --help`, {name} build",
            "milliseconds": round(taken, 2),
            "peak_mib": round(peak_mebibytes(command), 1),
            "peer": "python3 argparse --help",
            "peer_milliseconds": round(peer, 2),
            "ratio": round(peer / taken, 2),
        }), flush=True)


if __name__ == "__main__":
    main()
