"""Turns per second through `oclaw judge`, beside plain asyncio + httpx.

    annotate.py OCLAW BENCH PEER_PYTHON

OCLAW is the release program, BENCH the bench target `annotate` (forge and
judge), PEER_PYTHON a Python with httpx. Rows and places are taken from ROWS,
PEER_ROWS and AT_ONCE.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from machine import facts

ROWS = int(os.environ.get("ROWS", 100_000))
PEER_ROWS = int(os.environ.get("PEER_ROWS", 3_000))
AT_ONCE = int(os.environ.get("AT_ONCE", 256))
VOTES = 3
SAMPLE_EVERY = 1.0


def resident_mebibytes(pid):
    try:
        with open(f"/proc/{pid}/status") as lines:
            for line in lines:
                if line.startswith("VmRSS"):
                    return int(line.split()[1]) / 1024
    except OSError:
        pass
    return None


def timed(command):
    """Runs a command to its end; returns seconds, peak memory, memory over time, processor seconds."""
    from_start = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    over_time = []
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        over_time.append(resident_mebibytes(process.pid))
        time.sleep(SAMPLE_EVERY if len(over_time) > 5 else 0.02)
    seconds = time.perf_counter() - from_start
    if os.waitstatus_to_exitcode(status) != 0:
        sys.exit(f"{' '.join(map(str, command))} failed: {process.stderr.read()[-2000:]}")
    return seconds, usage.ru_maxrss / 1024, over_time, usage.ru_utime + usage.ru_stime


def quarters(over_time):
    """Mean memory in each quarter of the run: flat or not."""
    known = [value for value in over_time if value]
    size = max(1, len(known) // 4)
    parts = [known[start:start + size] for start in range(0, 4 * size, size)]
    return [round(sum(part) / len(part)) for part in parts if part]


def main():
    oclaw, bench, peer = sys.argv[1:]
    kept = pathlib.Path("target/bench")
    table, sample = kept / f"turns-{ROWS}.parquet", kept / f"turns-{PEER_ROWS}.jsonl"
    if not (table.exists() and sample.exists()):
        subprocess.run([bench, "forge", table, str(ROWS), sample, str(PEER_ROWS)], check=True)
    print(json.dumps({"machine": facts()}), flush=True)
    judge = subprocess.Popen([bench, "judge"], stdout=subprocess.PIPE, text=True)
    try:
        url = judge.stdout.readline().strip()
        with tempfile.TemporaryDirectory(dir=kept) as folder:
            command = [oclaw, "judge", table, "-o", f"{folder}/judged.parquet", "--engine", url]
            command += ["--votes", str(VOTES), "--at-once", str(AT_ONCE), "--cache", f"{folder}/answers.sqlite", "-q"]
            taken, peak, over_time, processor = timed(command)
            judging = resident_mebibytes(judge.pid)
            peer_taken, peer_peak, _, peer_processor = timed(
                [peer, "benches/peers/judge_httpx.py", url, sample, f"{folder}/peer.jsonl", str(VOTES), str(AT_ONCE)]
            )
    finally:
        judge.kill()
        judge.wait()
    rate, peer_rate = ROWS / taken, PEER_ROWS / peer_taken
    print(json.dumps({
        "figure": f"`oclaw judge`, {VOTES} votes, {AT_ONCE} calls at once, a judge that answers after 50 ms",
        "turns": ROWS,
        "seconds": round(taken, 1),
        "turns_per_second": round(rate),
        "peak_mib": round(peak),
        "mib_by_quarter": quarters(over_time),
        "processor_ms_per_turn": round(1000 * processor / ROWS, 3),
        "judge_mib": round(judging or 0),
        "peer": "asyncio + httpx",
        "peer_turns": PEER_ROWS,
        "peer_turns_per_second": round(peer_rate),
        "peer_peak_mib": round(peer_peak),
        "peer_processor_ms_per_turn": round(1000 * peer_processor / PEER_ROWS, 3),
        "ratio": round(rate / peer_rate, 2),
    }), flush=True)


if __name__ == "__main__":
    main()
