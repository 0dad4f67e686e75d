"""Tokens per second through `oclaw advantage`, beside pyarrow with numpy and polars.

    advantage.py OCLAW BENCH PEER_PYTHON

OCLAW is the release program, BENCH the bench target `advantage` (forge), PEER_PYTHON
a Python with numpy, polars and pyarrow. Each reads one Parquet file and writes one with
the same new columns; what they wrote is compared. The best of RUNS runs counts, after
one that fills the page cache. ROWS turns, and half as many to show what memory
depends on. Seconds of all processors stand beside those of the clock, which a busy
machine and its disk stretch: oclaw waits until its file would survive a crash, the
peers do not.
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
RUNS = int(os.environ.get("RUNS", 3))
PEER = "benches/peers/advantage_columns.py"
PEERS = ("pyarrow", "polars", "polars-streaming")
COMBINE = ("advantage", "-q", "--estimator", "combine")
COUNT = """import sys, pyarrow.parquet as parquet
file = parquet.ParquetFile(sys.argv[1])
groups = range(file.num_row_groups)
print(sum(len(file.read_row_group(at, ["response_ids"]).column(0).combine_chunks().flatten()) for at in groups))"""


def timed(command):
    """Runs a command to its end; returns seconds, processor seconds and peak memory in MiB."""
    start = time.perf_counter()
    process = subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, text=True)
    talk = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed: {talk[-2000:]}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def best(command):
    timed(command)
    runs = [timed(command) for _ in range(RUNS)]
    seconds, processor, peaks = zip(*runs)
    return min(seconds), min(processor), max(peaks)


def main():
    oclaw, bench, python = sys.argv[1:]
    kept = pathlib.Path("target/bench")
    tables = []
    for rows in (ROWS, ROWS // 2):
        tables.append(kept / f"taught-{rows}.parquet")
        if not tables[-1].exists():
            subprocess.run([bench, "forge", tables[-1], str(rows)], check=True)
    table, half = tables
    tokens = int(subprocess.run([python, "-c", COUNT, table], check=True, capture_output=True, text=True).stdout)
    print(json.dumps({"machine": facts()}), flush=True)
    with tempfile.TemporaryDirectory(dir=kept) as folder:
        ours = f"{folder}/oclaw.parquet"
        seconds, processor, peak = best([oclaw, *COMBINE, table, "-o", ours])
        _, _, half_peak = best([oclaw, *COMBINE, half, "-o", f"{folder}/half.parquet"])
        peers = {}
        for peer in PEERS:
            theirs = f"{folder}/{peer}.parquet"
            peers[peer] = best([python, PEER, peer, table, theirs])
            subprocess.run([python, PEER, "compare", ours, theirs], check=True)
            os.remove(theirs)
    fastest = min(peers, key=lambda peer: peers[peer][0])
    fastest_seconds, fastest_processor, fastest_peak = peers[fastest]
    print(json.dumps({
        "figure": "`oclaw advantage`, `combine`, Parquet to Parquet",
        "turns": ROWS,
        "response_tokens": tokens,
        "file_mib": round(table.stat().st_size / 2**20),
        "seconds": round(seconds, 2),
        "processor_seconds": round(processor, 2),
        "tokens_per_second": round(tokens / seconds),
        "peak_mib": round(peak),
        "peak_mib_of_half_the_turns": round(half_peak),
        "peers": {
            peer: {
                "seconds": round(taken, 2),
                "processor_seconds": round(busy, 2),
                "tokens_per_second": round(tokens / taken),
                "peak_mib": round(mib),
            }
            for peer, (taken, busy, mib) in peers.items()
        },
        "faster_peer": fastest,
        "ratio": round(fastest_seconds / seconds, 2),
        "processor_ratio": round(fastest_processor / processor, 2),
        "memory_ratio": round(peak / fastest_peak, 2),
    }), flush=True)


if __name__ == "__main__":
    main()
