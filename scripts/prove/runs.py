"""One run after the other: what it is known by, how it is made, where it is kept."""

import csv
import datetime
import hashlib
import json
import os
import pathlib
import platform
import shutil
import subprocess
import time

import held_out
import measures
from results import RUN, Refused
from served import Engine, Loop

ROOT = pathlib.Path(__file__).resolve().parents[2]
RATES = 30
# Nobody waits for a trainer in a run without one.
CONTROL_AT_ONCE = 12


def hashed(facts):
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def digest(paths):
    """A hash of files."""
    whole = hashlib.sha256()
    for path in sorted(paths):
        with open(path, "rb") as file:
            while part := file.read(1 << 20):
                whole.update(part)
    return whole.hexdigest()[:12]


def weights(model):
    files = list(model.glob("*.safetensors"))
    if not files:
        raise Refused(f"no weights in `{model}`: fetch them by `scripts/fetch-model.sh smollm2-135m`")
    return digest(files)


def persona_file(options, persona):
    folder = ROOT / ("scripts/prove" if options.tiny else "fixtures/personas")
    path = folder / f"{persona}.toml"
    if not path.exists():
        raise Refused(f"no persona `{persona}`: there is no `{path.relative_to(ROOT)}`")
    return path


def question_files():
    return sorted(path for path in (ROOT / "fixtures/questions").glob("*.jsonl") if path.stem != "held-out")


def identity(options, persona, estimator):
    """The hash of all that decides how a run goes, but for the weights and the seed."""
    facts = {
        "persona": digest([persona_file(options, persona)]), "questions": digest(question_files()),
        "held-out": digest([held_out.QUESTIONS]), "sessions": options.sessions,
    }
    if estimator != "none":
        facts |= {"estimator": estimator, "settings": options.settings_of(estimator)}
    return hashed(facts)


def rate_identity(options, persona):
    facts = {"persona": digest([persona_file(options, persona)]), "questions": digest(question_files()), "rates": RATES}
    return hashed(facts)


def output(*command):
    """What a program says, or nothing if there is none."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def today():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M")


def maker(options):
    """Who makes a run: version, commit, machine."""
    changed = output("git", "status", "--porcelain", "--", "cmd", "src", "scripts", "fixtures/models", "Cargo.lock")
    facts = pathlib.Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "version": output(options.program, "--version"),
        "commit": output("git", "rev-parse", "--short=12", "HEAD") + ("+" if changed else ""),
        "machine": f"{names[0] if names else platform.machine()}, {os.cpu_count()} processors",
    }


def made_with(options):
    """What all runs of a folder have in common."""
    settings = {name: value for name, value in options.settings.items() if value is not None}
    return settings | {
        "sessions": options.sessions, "model": options.model.name, "weights": options.weights,
        "questions": digest(question_files()), "held-out": digest([held_out.QUESTIONS]),
    }


def unlike(before, now):
    """What differs between two sets of settings, in words."""
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    word = lambda settings, name: settings.get(name, "not set")
    return [f"{name} was {word(before, name)}, is {word(now, name)}" for name in names]


def claim(options):
    """Refuses a folder whose results were made with other settings; else it is ours."""
    record, now = options.out / "made-with.json", made_with(options)
    held = [options.out / name for name in ("runs", "rates", "before.json")]
    if options.again:
        for path in (*held, record):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    makers = []
    if record.exists():
        told = json.loads(record.read_text())
        differences = unlike(told["settings"], now)
        if differences:
            raise Refused(
                f"the results in `{options.out}` were made with other settings: {'; '.join(differences)}; "
                "name another folder by `--out`, or make them anew by `--again`"
            )
        makers = told["makers"]
    elif any(path.exists() for path in held):
        raise Refused(
            f"nothing tells with what the results in `{options.out}` were made; "
            "name another folder by `--out`, or make them anew by `--again`"
        )
    # Each row names its own.
    if options.maker not in makers:
        if makers:
            print(f"note: earlier results here are of {json.dumps(makers[-1])}, these of {json.dumps(options.maker)}")
        makers.append(options.maker)
    record.write_text(json.dumps({"settings": now, "makers": makers}, indent=1) + "\n")


def simulate(options, persona, url, *more):
    command = [options.program, "simulate", "--persona", persona_file(options, persona), "--engine", url]
    subprocess.run([str(word) for word in (*command, "--questions", *question_files(), *more)], check=True)


def rates(options, personas):
    """How often each persona's wish is met, bare and hinted; measured where that is not known."""
    known = lambda persona: options.results.rate(rate_identity(options, persona), options.weights, persona)
    missing = [persona for persona in personas if known(persona) is None] if options.program else []
    if missing:
        (options.out / "rates").mkdir(exist_ok=True)
        with Engine(options, options.model, options.out) as engine:
            for persona in missing:
                measure(options, persona, engine)
    return {persona: known(persona) for persona in personas if known(persona) is not None}


def measure(options, persona, engine):
    out = options.out / "rates" / f"{persona}.csv"
    simulate(options, persona, engine.url, "--base-rates", "--sessions", RATES, "--at-once", 8, "-o", out)
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    share = lambda prompt: measures.mean(row["obeyed"] == "true" for row in rows if row["prompt"] == prompt)
    options.results.add_rate({
        "settings_hash": rate_identity(options, persona), "weights": options.weights, "persona": persona,
        "questions": str(RATES), "bare": f"{share('bare'):.3f}", "hinted": f"{share('hinted'):.3f}",
        "model": options.model.name, "date": today(),
    })


def before(options):
    """What the start model says to the held-out questions."""
    kept = options.out / "before.json"
    if not kept.exists():
        with Engine(options, options.model, options.out) as engine:
            kept.write_text(json.dumps(held_out.before(engine.url)))
    return json.loads(kept.read_text())


def run(options, persona, estimator, seed):
    """One run, which gets its name only when it is whole."""
    name = f"{persona}-{estimator}-{seed}"
    folder = options.scratch / f"unfinished-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = before(options)
    began = time.monotonic()
    try:
        told = talk(options, folder, (persona, estimator, seed), start)
    finally:
        # Gigabytes of weights; the record of each step is in `told`.
        shutil.rmtree(folder / "run/policy", ignore_errors=True)
    shutil.rmtree(folder / "run", ignore_errors=True)
    settings = options.settings_of(estimator)
    told |= {"persona": persona, "estimator": estimator, "seed": seed, "minutes": (time.monotonic() - began) / 60}
    told |= {"settings": settings, "settings_hash": identity(options, persona, estimator), "weights": options.weights}
    told |= {"model": options.model.name, "date": today()} | options.maker
    (folder / "run.json").write_text(json.dumps(told, indent=1))
    partial, kept = options.out / f"unfinished-{name}", options.out / "runs" / name
    if folder != partial:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.move(folder, partial)
    kept.parent.mkdir(exist_ok=True)
    shutil.rmtree(kept, ignore_errors=True)
    partial.rename(kept)
    keep(options, kept)


def talk(options, folder, wanted, start):
    """The sessions of a run, then the questions that nobody trained on."""
    persona, estimator, seed = wanted
    settings = options.settings_of(estimator)
    words = ["--sessions", options.sessions, "--seed", seed, "--keep-replies", "-o", folder / "sessions.csv"]
    if estimator == "none":
        with Engine(options, options.model, folder) as engine:
            simulate(options, persona, engine.url, *words, "--at-once", CONTROL_AT_ONCE)
            return {"held_out": held_out.after(engine.url, start)}
    rounds = ["--at-once", settings["round"], "--sessions-per-policy", settings["round"]]
    with Loop(options, folder, estimator, seed, settings) as loop:
        simulate(options, persona, loop.front, *words, *rounds)
    # The loop has ended: the last step is made, and no newer policy comes meanwhile.
    told = {"steps": loop.steps()}
    with Engine(options, loop.policy(), folder) as engine:
        told["held_out"] = held_out.after(engine.url, start)
    subprocess.run([options.program, "report", "run", "-o", "report.html"], cwd=folder, check=True)
    return told


def keep(options, folder):
    """Adds a finished run to the results."""
    told = json.loads((folder / "run.json").read_text())
    with open(folder / "sessions.csv", newline="") as file:
        sessions = list(csv.DictReader(file))
    options.results.add(measures.row(told, sessions), measures.curve(told, sessions))


def harvest(options):
    """Adds what was finished and not added, as where the program was killed between the two."""
    for record in sorted(options.out.glob("runs/*/run.json")):
        told = json.loads(record.read_text())
        if not options.results.found(*(told[name] for name in RUN)):
            keep(options, record.parent)
