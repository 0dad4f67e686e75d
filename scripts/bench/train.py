"""Tokens per second of a training step, beside Hugging Face transformers.

    train.py BENCH PEER_PYTHON MODEL

BENCH is the bench target `train`. The programs stay loaded and take turns, so that
whatever else the machine does falls on all; the best of each counts. TURNS, TYPES,
BUDGET (our tokens per pass), COPIES (of the batch, to see the cost grow) and
RANDOM (steps of random lengths, to see memory stay) are taken from the environment.
"""

import json
import os
import subprocess
import sys

from machine import facts

TURNS = int(os.environ.get("TURNS", 2))
TYPES = os.environ.get("TYPES", "f32 bf16").split()
BUDGET = os.environ.get("BUDGET", "1024")
COPIES = os.environ.get("COPIES", "1 2 4").split()
RANDOM = int(os.environ.get("RANDOM_STEPS", 20))
PEERS = os.environ.get("PEERS", "plain tuned").split()
BATCH = "fixtures/bench/train_batch.json"


class Program:
    def __init__(self, command):
        self.process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.about = self.read()
        self.steps = []

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{' '.join(map(str, self.process.args))} ended")
        return json.loads(line)

    def step(self, line="1"):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        step = self.read()
        self.steps.append(step)
        return step

    def best(self):
        # The first step gets its memory from the system.
        return max(step["tokens"] / step["seconds"] for step in self.steps[1:])

    def end(self):
        self.process.stdin.close()
        _, _, usage = os.wait4(self.process.pid, 0)
        return usage.ru_maxrss / 1024


def ours(bench, model, dtype):
    return Program([bench, BATCH, model, dtype, BUDGET])


def compare(bench, peer_python, model, dtype):
    script = "benches/peers/train_transformers.py"
    programs = {"oclaw": ours(bench, model, dtype)}
    for form in PEERS:
        programs[form] = Program([peer_python, script, BATCH, model, dtype, form])
    for _ in range(TURNS + 1):
        for program in programs.values():
            program.step()
    own = programs.pop("oclaw")
    speed, peak = own.best(), own.end()
    figure = {
        "figure": f"training step, {dtype}, {BUDGET} tokens per pass",
        "tokens": own.steps[0]["tokens"],
        "tokens_per_second": round(speed),
        "peak_mib": round(peak),
        "loss_first": own.steps[0]["loss"],
        "optimizer_seconds": own.steps[-1]["optimizer_seconds"],
        "threads": own.about["threads"],
    }
    for form, program in programs.items():
        theirs, memory = program.best(), program.end()
        figure[form] = {
            **program.about,
            "tokens_per_second": round(theirs),
            "peak_mib": round(memory),
            "loss_first": program.steps[0]["loss"],
            "speed_ratio": round(speed / theirs, 2),
            "memory_ratio": round(peak / memory, 2),
        }
    print(json.dumps(figure), flush=True)


def growth(bench, model, dtype):
    program = ours(bench, model, dtype)
    program.step("1")
    steps = {copies: program.step(copies) for copies in COPIES}
    seconds = {f"{copies}x": round(step["seconds"], 1) for copies, step in steps.items()}
    print(json.dumps({"figure": f"seconds of a step by tokens, {dtype}", **seconds, "peak_mib": round(program.end())}), flush=True)


def memory(bench, model, dtype):
    program = ours(bench, model, dtype)
    resident = [program.step(f"random {seed}")["resident_mib"] for seed in range(RANDOM)]
    peak = program.end()
    print(json.dumps({
        "figure": f"resident memory over {RANDOM} steps of random lengths, {dtype}",
        "after_first_fifth_mib": max(resident[:RANDOM // 5]), "last_fifth_mib": max(resident[-(RANDOM // 5):]),
        "peak_mib": round(peak),
    }), flush=True)


def main():
    bench, peer_python, model = sys.argv[1:]
    print(json.dumps({"machine": facts()}), flush=True)
    for dtype in TYPES:
        compare(bench, peer_python, model, dtype)
    if COPIES:
        growth(bench, model, TYPES[0])
    if RANDOM:
        memory(bench, model, TYPES[0])


if __name__ == "__main__":
    main()
