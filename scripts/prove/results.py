"""Results that are kept with the program, so that runs may be made over days and on
several machines: a row per finished run, a row per session, a row per base rate."""

import csv
import os

RUN = ["settings_hash", "weights", "persona", "estimator", "seed"]
RATE = ["settings_hash", "weights", "persona"]
RUNS = RUN + [
    "sessions", "sessions_to_adapt", "never", "obeyed_first", "obeyed_middle", "obeyed_last", "reward_first",
    "reward_middle", "reward_last", "held_out_log_prob_before", "held_out_log_prob_after", "held_out_tokens_before",
    "held_out_tokens_after", "held_out_repetition_before", "held_out_repetition_after", "weights_changed", "steps",
    "trained_tokens", "reply_tokens", "minutes", "settings", "model", "date", "commit", "version", "machine",
]
SESSIONS = RUN + ["session", "policy", "obeyed", "replies", "tokens"]
RATES = RATE + ["questions", "bare", "hinted", "model", "date"]


class Refused(Exception):
    """What is wanted cannot be done as it is."""


def read(path, columns):
    if not path.exists():
        return []
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in columns if name not in (reader.fieldnames or [])]
        if missing:
            raise Refused(f"`{path}` has no column `{missing[0]}`: name another file by `--results`")
        return list(reader)


def write(path, columns, rows):
    """Writes a table, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with open(new, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(new, path)


def key(row, names):
    return tuple(row[name] for name in names)


def place(row):
    """Rows lie in one order, whoever added them: so that two sets of them merge."""
    return *key(row, ["persona", "estimator"]), int(row["seed"]), key(row, RUN), int(row.get("session", 0))


class Results:
    def __init__(self, path):
        near = lambda name: path.with_name(f"{path.stem}-{name}.csv")
        self.paths = {"runs": path, "sessions": near("sessions"), "rates": near("rates")}
        self.load()

    def load(self):
        self.runs = read(self.paths["runs"], RUNS)
        self.sessions = read(self.paths["sessions"], SESSIONS)
        self.rates = read(self.paths["rates"], RATES)

    def found(self, settings_hash, weights, persona, estimator, seed):
        """The rows of a run; with weights that are not known, of whatever weights."""
        wanted = {"settings_hash": settings_hash, "persona": persona, "estimator": estimator, "seed": str(seed)}
        if weights:
            wanted["weights"] = weights
        return [row for row in self.runs if wanted.items() <= row.items()]

    def add(self, row, sessions):
        """Adds a run, in place of the same one that was made before."""
        # Another process may have added one meanwhile.
        self.load()
        mine = key(row, RUN)
        others = lambda rows: [other for other in rows if key(other, RUN) != mine]
        self.sessions = sorted(others(self.sessions) + sessions, key=place)
        self.runs = sorted(others(self.runs) + [row], key=place)
        # The row last: what it stands for is there then.
        write(self.paths["sessions"], SESSIONS, self.sessions)
        write(self.paths["runs"], RUNS, self.runs)

    def rate(self, settings_hash, weights, persona):
        """The shares that obey bare and hinted, if they were measured."""
        wanted = {"settings_hash": settings_hash, "persona": persona} | ({"weights": weights} if weights else {})
        rows = [row for row in self.rates if wanted.items() <= row.items()]
        return (float(rows[-1]["bare"]), float(rows[-1]["hinted"])) if rows else None

    def add_rate(self, row):
        self.load()
        others = [other for other in self.rates if key(other, RATE) != key(row, RATE)]
        self.rates = sorted(others + [row], key=lambda row: (row["persona"], key(row, RATE)))
        write(self.paths["rates"], RATES, self.rates)

    def obeyed(self, row):
        """Of each session of a run, whether its first reply obeyed."""
        mine = [session for session in self.sessions if key(session, RUN) == key(row, RUN)]
        return [session["obeyed"] == "true" for session in sorted(mine, key=place)]
