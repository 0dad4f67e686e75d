"""The proof: see scripts/prove.sh."""

import argparse
import csv
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import held_out
import page
from served import Engine, Loop

ROOT = pathlib.Path(__file__).resolve().parents[2]
PERSONAS = ["brief", "emoji", "name", "because", "steps", "eager"]
RATES_ONLY = ["student", "ta", "teacher"]
# The same for every persona: nothing is tuned for one.
SETTINGS = {"lr": "1e-4", "epochs": 2, "batch-turns": 8, "max-wait": "8s", "distill-clip": 1.0, "subset": "teacher"}
ROUND = 4
RATES = 30
# A random model has to be pushed harder, and nobody could teach it.
TINY = {"lr": "3e-3", "epochs": 2, "batch-turns": 16, "max-wait": "2s"}
TINY_ROUND, TINY_SESSIONS = 16, 96


def setting(text):
    """Reads `lr=1e-4`: a number stays as it is written, another word is a word."""
    name, _, value = text.partition("=")
    try:
        return name, value if name == "lr" else json.loads(value)
    except ValueError:
        return name, value


def plan(options):
    """The runs, most telling first."""
    if options.estimators:
        return list(itertools.product(options.personas, options.estimators, options.seeds))
    runs = [(persona, estimator, 1) for persona in options.personas for estimator in ("hybrid", "none")]
    runs += [(persona, "hybrid", seed) for seed in (2, 3) for persona in options.personas]
    runs += [(persona, estimator, 1) for estimator in ("grpo", "opd", "combine") for persona in options.personas]
    return runs


def simulate(options, persona, url, *more):
    questions = sorted(str(path) for path in (ROOT / "fixtures/questions").glob("*.jsonl") if path.stem != "held-out")
    folder = ROOT / ("scripts/prove" if options.tiny else "fixtures/personas")
    command = [options.program, "simulate", "--persona", str(folder / f"{persona}.toml"), "--engine", url]
    subprocess.run([*command, "--questions", *questions, *map(str, more)], check=True)


def rate(options, personas):
    """Measures how often each persona's wish is met, bare and hinted, where that is not known."""
    missing = [persona for persona in personas if not (options.out / "rates" / f"{persona}.csv").exists()]
    before = options.out / "before.json"
    if missing or not before.exists():
        (options.out / "rates").mkdir(exist_ok=True)
        with Engine(options) as engine:
            if not before.exists():
                before.write_text(json.dumps(held_out.before(engine.url)))
            for persona in missing:
                out = options.out / "rates" / f"{persona}.csv"
                simulate(options, persona, engine.url, "--base-rates", "--sessions", RATES, "--at-once", 8, "-o", out)
    rates = {}
    for persona in personas:
        with open(options.out / "rates" / f"{persona}.csv") as file:
            rows = list(csv.DictReader(file))
        share = lambda prompt: [row["obeyed"] == "true" for row in rows if row["prompt"] == prompt]
        rates[persona] = tuple(sum(obeyed) / len(obeyed) for obeyed in (share("bare"), share("hinted")))
    return rates


def run(options, persona, estimator, seed):
    """One run, which gets its name only when it is whole."""
    name = f"{persona}-{estimator}-{seed}"
    kept, folder = options.out / "runs" / name, options.out / f"unfinished-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()
    sessions = folder / "sessions.csv"
    talk = ["--sessions", options.sessions, "--seed", seed, "--at-once", options.round, "--keep-replies", "-o", sessions]
    before = json.loads((options.out / "before.json").read_text())
    if estimator == "none":
        with Engine(options) as engine:
            simulate(options, persona, engine.url, *talk)
            told = {"held_out": held_out.after(engine.url, before)}
    else:
        with Loop(options, folder, estimator, seed, options.settings) as loop:
            simulate(options, persona, loop.front, "--sessions-per-policy", options.round, *talk)
            told = {"held_out": held_out.after(loop.engine, before)}
        told["steps"] = loop.steps()
        subprocess.run([options.program, "report", "run", "-o", "report.html"], cwd=folder, check=True)
        # Gigabytes of weights; the record of each step is in `told`.
        shutil.rmtree(folder / "run")
    told |= {"persona": persona, "estimator": estimator, "seed": seed, "minutes": (time.monotonic() - began) / 60}
    told["settings"] = options.settings if estimator != "none" else {}
    (folder / "run.json").write_text(json.dumps(told, indent=1))
    kept.parent.mkdir(exist_ok=True)
    folder.rename(kept)


def kept_runs(options, runs):
    found = []
    for persona, estimator, seed in runs:
        folder = options.out / "runs" / f"{persona}-{estimator}-{seed}"
        if (folder / "run.json").exists():
            told = json.loads((folder / "run.json").read_text())
            with open(folder / "sessions.csv") as file:
                told["sessions"] = list(csv.DictReader(file))
            found.append(told)
    return found


def tiny(options):
    """A random model and a rule that it obeys half of the time: the reward has to rise."""
    options.model, options.settings, options.round = ROOT / "fixtures/models/tiny-qwen3", TINY, TINY_ROUND
    options.sessions = TINY_SESSIONS
    wanted = ("tiny", "grpo", 1)
    shutil.rmtree(options.out / "runs", ignore_errors=True)
    rate(options, [])
    run(options, *wanted)
    told, = kept_runs(options, [wanted])
    rewards = [1.0 if row["obeyed"] == "true" else -1.0 for row in told["sessions"]]
    third = len(rewards) // 3
    first, last = (sum(part) / len(part) for part in (rewards[:third], rewards[-third:]))
    print(f"reward of first replies: {first:+.2f} in the first third, {last:+.2f} in the last; {told['minutes']:.1f} min")
    return 0 if last > first else 1


def main():
    parser = argparse.ArgumentParser()
    words = lambda text: text.split(",")
    parser.add_argument("--personas", type=words, default=PERSONAS)
    parser.add_argument("--estimators", type=words)
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in words(text)], default=[1])
    parser.add_argument("--sessions", type=int, default=36)
    parser.add_argument("--max-minutes", type=float, default=float("inf"))
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "target/prove")
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "models/SmolLM2-135M-Instruct")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.program = str(pathlib.Path(os.environ["OCLAW_BIN"]).resolve())
    options.out, options.model = options.out.resolve(), options.model.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    options.settings, options.round = SETTINGS | dict(map(setting, options.set)), ROUND
    if options.tiny:
        return tiny(options)
    end = time.monotonic() + options.max_minutes * 60
    rates = rate(options, options.personas + [persona for persona in RATES_ONLY if persona not in options.personas])
    page.print_rates(rates)
    runs = plan(options)
    done = lambda: {(told["persona"], told["estimator"], told["seed"]) for told in kept_runs(options, runs)}
    for wanted in runs:
        if wanted not in done() and time.monotonic() < end:
            print(f"\n== {wanted[0]}, {wanted[1]}, seed {wanted[2]}", flush=True)
            try:
                run(options, *wanted)
            except (subprocess.CalledProcessError, OSError, RuntimeError) as error:
                print(f"FAILED: {error}", flush=True)
        page.write(options.out, rates, kept_runs(options, runs))
    page.print_runs(kept_runs(options, runs))
    missing = [wanted for wanted in runs if wanted not in done()]
    for persona, estimator, seed in missing:
        print(f"not run: {persona}, {estimator}, seed {seed}")
    print(f"\npage and tables in {options.out}")
    return 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
