"""Tokens per second of local teacher scoring, beside Hugging Face transformers.

    score.py BENCH PEER_PYTHON MODEL

BENCH is the bench target `score`. Both programs stay loaded and take turns, so
that whatever else the machine does falls on both; the best of each counts.
TURNS, TYPES, SETS and TOP_K are taken from the environment, and MOST, the number
of sequences of a set.
"""

import json
import os
import pathlib
import subprocess
import sys

from machine import facts

TURNS = int(os.environ.get("TURNS", 5))
TYPES = os.environ.get("TYPES", "f32 bf16").split()
SETS = os.environ.get("SETS", "distinct hinted").split()
TOP_K = os.environ.get("TOP_K", "0")
MOST = int(os.environ.get("MOST", 1000))


class Program:
    def __init__(self, command):
        self.process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.about = self.read()
        self.seconds, self.means = [], []

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{' '.join(map(str, self.process.args))} ended")
        return json.loads(line)

    def once(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        answer = self.read()
        self.seconds.append(answer["seconds"])
        self.means = answer["means"]

    def end(self):
        self.process.stdin.close()
        _, _, usage = os.wait4(self.process.pid, 0)
        return usage.ru_maxrss / 1024


def main():
    bench, peer_python, model = sys.argv[1:]
    file = pathlib.Path("target/bench/sequences.json")
    subprocess.run([bench, "sequences", file], check=True)
    sequences = {name: some[:MOST] for name, some in json.loads(file.read_text()).items()}
    file.write_text(json.dumps(sequences))
    print(json.dumps({"machine": facts()}), flush=True)
    for name in SETS:
        tokens = sum(len(sequence["ids"]) for sequence in sequences[name])
        for dtype in TYPES:
            words = [file, name, model, dtype, TOP_K]
            peer = Program([peer_python, "benches/peers/score_transformers.py", *words])
            ours = Program([bench, "run", *words])
            # The first pass of each gets its memory from the system.
            for _ in range(TURNS + 1):
                ours.once()
                peer.once()
            best = [min(program.seconds[1:]) for program in (ours, peer)]
            off = max(abs(a - b) for a, b in zip(ours.means, peer.means))
            print(json.dumps({
                "figure": f"local scoring, {name} sequences, {dtype}, top-k {TOP_K}",
                "sequences": len(sequences[name]),
                "tokens": tokens,
                "tokens_per_second": round(tokens / best[0]),
                "threads": ours.about["threads"],
                "peer": "transformers",
                **{f"peer_{key}": value for key, value in peer.about.items()},
                "peer_tokens_per_second": round(tokens / best[1]),
                "ratio": round(best[1] / best[0], 2),
                "largest_difference_of_mean_log_probs": round(off, 5),
                "peak_mib": round(ours.end()),
                "peer_peak_mib": round(peer.end()),
            }), flush=True)


if __name__ == "__main__":
    main()
