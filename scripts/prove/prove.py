"""The proof: see scripts/prove.sh."""

import argparse
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import measures
import page
import runs
from results import Refused, Results

ROOT = pathlib.Path(__file__).resolve().parents[2]
PERSONAS = ["brief", "short", "eager", "self", "unsure", "emoji"]
RATES_ONLY = ["student", "ta", "teacher"]
ESTIMATORS = ["hybrid", "none", "grpo", "opd", "combine"]
TRAINED = {"hybrid", "grpo", "opd", "combine"}
TAUGHT = {"hybrid", "opd", "combine"}
SESSIONS = 36

# The settings of every run, the same for every persona: nothing is tuned for one. Each has
# a flag: what is chosen (None: the trainer's own), how it is read, which estimators have it.
SETTINGS = {
    "lr": (5e-4, float, TRAINED),
    "epochs": (4, int, TRAINED),
    "batch-turns": (4, int, TRAINED),
    "mini-batches": (None, int, TRAINED),
    "max-wait": ("8s", str, TRAINED),
    "lora-rank": (16, int, TRAINED),
    "lora-alpha": (None, float, TRAINED),
    "train-dtype": ("bf16", ["f32", "bf16"], TRAINED),
    "weight-decay": (None, float, TRAINED),
    "clip-norm": (None, float, TRAINED),
    "kl-coef": (0.05, float, TRAINED),
    # What a step may change of an id's probability, up: what is said once in a thousand
    # would take many steps at 0.28.
    "clip-high": (1.0, float, TRAINED),
    "w-rl": (0.1, float, {"hybrid", "combine"}),
    "w-opd": (None, float, {"hybrid", "combine"}),
    "distill-clip": (5.0, float, TAUGHT),
    "subset": ("teacher", ["student", "teacher", "overlap"], {"hybrid"}),
    "distill-weights": ("teacher", ["policy", "teacher"], {"hybrid"}),
    "hint-selection": (None, ["sequence", "token", "shortest"], {"hybrid"}),
    "topk": (16, int, {"hybrid"}),
    "teacher": ("base", ["base", "ema"], TAUGHT),
    "ema": (None, float, TAUGHT),
    "round": (2, int, TRAINED),
}
# What a slow teacher keeps of itself at an update, unless it is told.
EMA = 0.99
# A random model has to be pushed harder, and nobody could teach it.
TINY = {"lr": 3e-3, "epochs": 2, "batch-turns": 16, "max-wait": "2s", "round": 16}
TINY_SESSIONS = 96


def field(name):
    return name.replace("-", "_")


def other_setting(text):
    """Reads `clip-low=0.1`: what is no number is a word."""
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise argparse.ArgumentTypeError("wanted NAME=VALUE")
    if name in SETTINGS:
        raise argparse.ArgumentTypeError(f"`{name}` has a flag of its own, `--{name}`")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def arguments():
    parser = argparse.ArgumentParser(prog="scripts/prove.sh", allow_abbrev=False)
    words = lambda text: text.split(",")
    # None is "not given": what is given and has no effect is refused.
    parser.add_argument("--personas", type=words)
    parser.add_argument("--estimators", type=words)
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in words(text)])
    parser.add_argument("--sessions", type=int)
    parser.add_argument("--max-minutes", type=float)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "target/prove")
    parser.add_argument("--results", type=pathlib.Path)
    parser.add_argument("--scratch", type=pathlib.Path)
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--set", action="append", type=other_setting, metavar="NAME=VALUE")
    parser.add_argument("--again", action="store_true", default=None)
    parser.add_argument("--report", action="store_true", default=None)
    parser.add_argument("--tiny", action="store_true", default=None)
    for name, (chosen, kind, _) in SETTINGS.items():
        flags = [f"--{name}"] + (["--batch"] if name == "batch-turns" else [])
        how = {"choices": kind} if isinstance(kind, list) else {"type": kind, "metavar": "X"}
        default = "the trainer's" if chosen is None else chosen
        parser.add_argument(*flags, dest=field(name), help=f"[default: {default}]", **how)
    return parser


def given(options, names):
    """The flags among these that stand on the command line."""
    return [f"--{name}" for name in names if getattr(options, field(name)) is not None]


def check(options):
    """Refuses what cannot be, and what would have no effect."""
    alone = {
        "tiny": ["personas", "estimators", "seeds", "sessions", "max-minutes", "results", "scratch", "model", "set", "again", "report", *SETTINGS],
        "report": ["max-minutes", "scratch", "model", "again"],
    }
    for name, others in alone.items():
        useless = given(options, others) if getattr(options, name) else []
        if useless:
            raise Refused(f"{', '.join(useless)} would have no effect beside `--{name}`")
    if options.seeds and not options.estimators:
        raise Refused("`--seeds` needs `--estimators`: without them the 42 runs have seeds of their own")
    estimators = options.estimators or ESTIMATORS
    unknown = [name for name in estimators if name not in ESTIMATORS]
    if unknown:
        raise Refused(f"no estimator `{unknown[0]}`: they are {', '.join(ESTIMATORS)}")
    for name, (_, _, having) in SETTINGS.items():
        if given(options, [name]) and not having & set(estimators):
            raise Refused(f"`--{name}` would have no effect: none of {', '.join(estimators)} has it")
    if options.set and not TRAINED & set(estimators):
        raise Refused("`--set` would have no effect: nothing is trained")
    if options.lora_rank == 0 and options.lora_alpha is not None:
        raise Refused("`--lora-alpha` would have no effect without adapters (`--lora-rank 0`)")
    if options.ema is not None and options.teacher != "ema":
        raise Refused("`--ema` would have no effect without `--teacher ema`")


def complete(options):
    """Puts in what was not given."""
    chosen = {name: chosen for name, (chosen, _, _) in SETTINGS.items()}
    typed = {name: getattr(options, field(name)) for name in SETTINGS}
    options.settings = chosen | {name: value for name, value in typed.items() if value is not None}
    if options.settings["teacher"] == "ema" and options.settings["ema"] is None:
        options.settings["ema"] = EMA
    # All weights are trained where there are no adapters.
    options.settings["lora-rank"] = options.settings["lora-rank"] or None
    options.settings |= dict(options.set or [])
    options.personas = options.personas or PERSONAS
    options.sessions = SESSIONS if options.sessions is None else options.sessions
    options.max_minutes = float("inf") if options.max_minutes is None else options.max_minutes
    options.model = options.model or ROOT / "models/SmolLM2-135M-Instruct"
    options.results = options.results or ROOT / "fixtures/personas/runs.csv"
    if options.tiny:
        options.out, options.model = options.out / "tiny", ROOT / "fixtures/models/tiny-qwen3"
        options.settings, options.sessions, options.results = dict(TINY), TINY_SESSIONS, options.out / "runs.csv"
    trained = TRAINED & set(options.estimators or ESTIMATORS)
    if trained and options.sessions <= options.settings["round"]:
        raise Refused(f"{options.sessions} sessions in rounds of {options.settings['round']}: no newer policy would be met")
    having = {name: having for name, (_, _, having) in SETTINGS.items()}
    options.settings_of = lambda estimator: {
        name: value for name, value in options.settings.items()
        if value is not None and estimator in having.get(name, TRAINED)
    }
    options.out, options.model = options.out.resolve(), options.model.resolve()
    options.scratch = (options.scratch or options.out).resolve()


def prepare(options):
    """Makes ready what a start needs that makes runs, or only tells of them."""
    options.program = options.weights = options.maker = None
    if options.report:
        options.results = Results(options.results.resolve())
        return
    options.program = str(pathlib.Path(os.environ["OCLAW_BIN"]).resolve())
    if options.tiny:
        # What was made by an earlier program says nothing of this one.
        shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True, exist_ok=True)
    options.results = Results(options.results.resolve())
    options.weights, options.maker = runs.weights(options.model), runs.maker(options)
    runs.claim(options)
    runs.harvest(options)


def plan(options):
    """The runs, most telling first."""
    if options.estimators:
        return list(itertools.product(options.personas, options.estimators, options.seeds or [1]))
    wanted = [(persona, estimator, 1) for persona in options.personas for estimator in ("hybrid", "none")]
    wanted += [(persona, "hybrid", seed) for seed in (2, 3) for persona in options.personas]
    wanted += [(persona, estimator, 1) for estimator in ("grpo", "opd", "combine") for persona in options.personas]
    return wanted


def found(options, wanted):
    """The rows of a run, if it was made, here or elsewhere."""
    persona, estimator, seed = wanted
    return options.results.found(runs.identity(options, persona, estimator), options.weights, persona, estimator, seed)


def summary(options, planned, rates):
    """All that is told of runs, of the results alone."""
    rows = [row for wanted in planned for row in found(options, wanted)]
    estimators = [name for name in ESTIMATORS if any(name == estimator for _, estimator, _ in planned)]
    told = {"rates": rates, "rows": rows, "others": [row for row in options.results.runs if row not in rows]}
    told["missing"] = [wanted for wanted in planned if not found(options, wanted)]
    told["reach"] = measures.reach(rows, options.personas, estimators)
    told["verdicts"] = measures.verdicts(rows, options.personas, estimators)
    page.write(options.out / "report.html", told, options.results.obeyed)
    return told


def tell(options, planned, rates):
    told = summary(options, planned, rates)
    page.print_table([page.figures(row) for row in told["rows"]])
    if told["others"]:
        print("\nwith other settings:")
        page.print_table(page.with_settings(told["others"]))
    page.print_table(told["reach"])
    print("\n" + "\n".join(told["verdicts"]))
    for persona, estimator, seed in told["missing"]:
        print(f"not run: {persona}, {estimator}, seed {seed}")
    print(f"\npage: {options.out / 'report.html'}; results: {options.results.paths['runs']}")
    return told["missing"]


def make(options, planned, rates, end):
    """Makes the runs that are missing, as long as there is time."""
    for wanted in planned:
        if time.monotonic() >= end:
            return
        if found(options, wanted) and not options.again:
            continue
        print(f"\n== {wanted[0]}, {wanted[1]}, seed {wanted[2]}", flush=True)
        # One that fails is listed as not run, and the others are made all the same.
        try:
            runs.run(options, *wanted)
        except (subprocess.CalledProcessError, ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            print(f"FAILED: {error!r}", flush=True)
        summary(options, planned, rates)


def tiny(options):
    """A random model and a rule that it obeys half of the time: the reward has to rise."""
    options.personas, planned = ["tiny"], [("tiny", "grpo", 1)]
    runs.run(options, *planned[0])
    tell(options, planned, {})
    row, = found(options, planned[0])
    obeyed = options.results.obeyed(row)
    first, _, last = (2 * share - 1 for share in measures.thirds(obeyed))
    print(f"reward of first replies: {first:+.2f} in the first third, {last:+.2f} in the last; {row['minutes']} min")
    return 0 if last > first else 1


def main():
    options = arguments().parse_args()
    check(options)
    complete(options)
    prepare(options)
    if options.tiny:
        return tiny(options)
    end = time.monotonic() + options.max_minutes * 60
    rates = runs.rates(options, options.personas + [name for name in RATES_ONLY if name not in options.personas])
    page.print_table(page.told_rates(rates))
    planned = plan(options)
    if not options.report:
        make(options, planned, rates, end)
    missing = tell(options, planned, rates)
    return 3 if missing and not options.report else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Refused as refusal:
        print(f"prove: {refusal}", file=sys.stderr)
        sys.exit(2)
