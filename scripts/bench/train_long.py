"""What the trainer costs in the long run.

    train_long.py memory OCLAW FORGE MODEL
    train_long.py scale BENCH MODEL

`memory` trains STEPS (500) steps of random lengths by `oclaw train`, and prints its
resident memory at every EVERY-th (50) of them. FORGE is the bench target `advantage`,
whose table it takes and fills with ids of the tiny MODEL; its Python needs numpy and
pyarrow. `scale` makes steps of COPIES ("1 2 4") times the tokens of one batch, by the
bench target `train`, and prints seconds per trained token. TYPE and BUDGET as in train.py.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import facts

STEPS = int(os.environ.get("STEPS", 500))
EVERY = int(os.environ.get("EVERY", 50))
TURNS_PER_STEP = 4
# Ids of each, at most.
PROMPT, ANSWER = 256, 128
COPIES = [int(word) for word in os.environ.get("COPIES", "1 2 4").split()]
REPEATS = int(os.environ.get("TURNS", 2))
TYPE = os.environ.get("TYPE", "f32")
BUDGET = os.environ.get("BUDGET", "1024")
BATCH = "fixtures/bench/train_batch.json"
# Columns that `hint` and `teacher-lp` add: their lengths are those of other answers.
TAUGHT = ("hint", "teacher", "student", "topk")


def forge(forge_program, vocabulary, path):
    """Writes a judged table whose prompts and answers have random lengths."""
    import numpy
    import pyarrow
    import pyarrow.parquet

    rows = STEPS * TURNS_PER_STEP
    subprocess.run([forge_program, "forge", path, str(rows)], check=True)
    table = pyarrow.parquet.read_table(path)
    table = table.drop_columns([name for name in table.column_names if name.startswith(TAUGHT)])
    chance = numpy.random.default_rng(1)
    lengths = chance.integers(2, ANSWER + 1, rows)
    ids = lambda length: chance.integers(0, vocabulary, length).tolist()
    columns = {
        "prompt_ids": [ids(length) for length in chance.integers(2, PROMPT + 1, rows)],
        "response_ids": [ids(length) for length in lengths],
        "rollout_log_probs": [[-7.0] * int(length) for length in lengths],
        "usage_completion_tokens": lengths.tolist(),
        "score": chance.choice([-1.0, 1.0], rows).tolist(),
    }
    for name, values in columns.items():
        field = table.schema.field(name)
        place = table.schema.get_field_index(name)
        table = table.set_column(place, field, pyarrow.array(values, type=field.type))
    pyarrow.parquet.write_table(table, path)


def resident_mib(pid):
    with open(f"/proc/{pid}/status") as lines:
        found = [int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS:")]
    # Nothing if it has ended and nobody has asked for its exit code.
    return found[0] if found else None


def watch(process, metrics):
    """Returns resident memory by step, read when the metrics first tell of the step."""
    found, done, last = {}, 0, None
    with open(metrics, "rb") as lines:
        running = True
        while running:
            running = process.poll() is None
            last = (running and resident_mib(process.pid)) or last
            done += lines.read().count(b"\n")
            step = done // EVERY * EVERY
            # Of the last step it may be told when the trainer has just ended.
            if step and step not in found and last is not None:
                found[step] = last
            time.sleep(0.005)
    return found


def memory(oclaw, forge_program, model):
    vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        judged, noted, metrics = (f"{folder}/{name}" for name in ("judged.parquet", "noted.parquet", "metrics.jsonl"))
        forge(forge_program, vocabulary, judged)
        subprocess.run([oclaw, "advantage", "-q", "--estimator", "grpo", judged, "-o", noted], check=True)
        # Rows of policy 0 are old after a few steps, and a policy of noise is to stay whole.
        command = [
            oclaw, "train", "-q", "--estimator", "grpo", "--batch-turns", str(TURNS_PER_STEP), "--lr", "1e-7",
            "--max-staleness", str(STEPS), "--keep", "1", "--model", model, "--out", f"{folder}/policy",
            "--metrics", metrics, noted,
        ]
        Path(metrics).touch()
        process = subprocess.Popen(command)
        resident = watch(process, metrics)
        if process.returncode != 0:
            sys.exit(f"`oclaw train` ended with exit code {process.returncode}")
        steps = [json.loads(line) for line in Path(metrics).read_text().splitlines()]
    if len(steps) != STEPS:
        sys.exit(f"{len(steps)} steps were made, not {STEPS}")
    tokens = [step["input_tokens"] for step in steps]
    print(json.dumps({
        "figure": f"resident memory of `oclaw train` over {STEPS} steps of random lengths, f32",
        "resident_mib": {str(step): value for step, value in resident.items()},
        "growth_mib": list(resident.values())[-1] - list(resident.values())[0] if resident else None,
        "input_tokens_least": min(tokens), "input_tokens_most": max(tokens),
    }), flush=True)


def scale(bench, model):
    from train import Program

    samples = json.loads(Path(BATCH).read_text())["samples"]
    trained = sum(sum(1 for flag in sample["loss_mask"] if flag) for sample in samples)
    program = Program([bench, BATCH, model, TYPE, BUDGET])
    # The first step gets its memory from the system.
    program.step("1")
    per_token = {}
    for copies in COPIES:
        seconds = min(program.step(copies)["seconds"] for _ in range(REPEATS))
        per_token[copies] = seconds / (trained * copies)
        print(json.dumps({
            "figure": f"a training step of {copies}x the tokens, {TYPE}", "trained_tokens": trained * copies,
            "seconds": round(seconds, 2), "seconds_per_trained_token": round(per_token[copies], 6),
            "to_the_first": round(per_token[copies] / per_token[COPIES[0]], 3),
        }), flush=True)
    peak = program.end()
    print(json.dumps({"figure": f"peak memory of these steps, {TYPE}", "peak_mib": round(peak)}), flush=True)


def main():
    part, *words = sys.argv[1:]
    print(json.dumps({"machine": facts()}), flush=True)
    {"memory": memory, "scale": scale}[part](*words)


if __name__ == "__main__":
    main()
