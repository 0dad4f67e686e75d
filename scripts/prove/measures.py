"""What a run came to, as a row of figures, and what rows come to together."""

IN_A_ROW = 3
# An agent that forgot what it knew has not learned. What it may lose at most, on questions
# that nobody trained on: of the start model's own answers this much log-prob per token;
# of the new answers, runs of four tokens that repeat, and their length.
MOST_FALL = 0.7
MOST_REPETITION = 0.10
LEAST_LENGTH = 0.25
# Who asks for less gets less.
BREVITY = {"brief", "short"}
# What is to be reached.
MOST_MINUTES = 10
LEAST_PERSONAS, LEAST_SEEDS = 4, 2


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else None


def written(value, digits=3):
    """A number as it stands in a table; one that is not known is nothing, never 0."""
    return "" if value is None else f"{value:.{digits}f}"


def sessions_to_adapt(obeyed):
    """The first of three sessions in a row whose first replies obey, from 1, as `oclaw simulate` counts."""
    starts = range(len(obeyed) - IN_A_ROW + 1)
    return next((at + 1 for at in starts if all(obeyed[at:at + IN_A_ROW])), None)


def thirds(values):
    """The means of the first, the middle and the last third; the ends are of one size."""
    third = len(values) // 3
    if third == 0:
        return None, None, None
    parts = values[:third], values[third:len(values) - third], values[len(values) - third:]
    return tuple(mean(part) for part in parts)


def row(told, sessions):
    """A finished run and its sessions as one row of text."""
    steps, held = told.get("steps", []), told["held_out"]
    known = lambda name: [step[name] for step in steps if step.get(name) is not None]
    obeyed = [session["obeyed"] == "true" for session in sessions]
    adapted, replies = sessions_to_adapt(obeyed), [session["all_tokens"] for session in sessions]
    found = {name: str(told[name]) for name in ("settings_hash", "weights", "persona", "estimator", "seed")}
    found |= {"sessions": str(len(sessions)), "sessions_to_adapt": "" if adapted is None else str(adapted)}
    found["never"] = "yes" if adapted is None else "no"
    for name, values in (("obeyed", obeyed), ("reward", known("reward"))):
        found |= {f"{name}_{part}": written(value) for part, value in zip(("first", "middle", "last"), thirds(values))}
    found |= {f"held_out_{name}": written(value) for name, value in held.items()}
    found |= {
        "weights_changed": written(mean(known("weights_changed"))), "steps": str(len(steps)),
        "trained_tokens": str(sum(known("tokens"))) if steps else "",
        "reply_tokens": str(sum(map(int, replies))) if all(replies) else "",
        "minutes": written(told["minutes"], 1),
        "settings": " ".join(f"{name}={value}" for name, value in sorted(told["settings"].items())),
    }
    return found | {name: str(told[name]) for name in ("model", "date", "commit", "version", "machine")}


def curve(told, sessions):
    """What is kept of each session."""
    names = ("settings_hash", "weights", "persona", "estimator", "seed")
    return [
        {name: str(told[name]) for name in names}
        | {name: session[name] for name in ("session", "policy", "obeyed", "replies", "tokens")}
        for session in sessions
    ]


def broken(row):
    """The bounds on forgetting that a run did not keep, in words."""
    number = lambda name: float(row[f"held_out_{name}"])
    fall = number("log_prob_before") - number("log_prob_after")
    found = []
    # So written that what is no number breaks the bound, too.
    if not fall <= MOST_FALL:
        found.append(f"log-prob fell by {fall:.2f}")
    if not number("repetition_after") <= MOST_REPETITION:
        found.append(f"repetition {number('repetition_after'):.2f}")
    short = not number("tokens_after") >= LEAST_LENGTH * number("tokens_before")
    if short and row["persona"] not in BREVITY:
        found.append(f"{number('tokens_after'):.1f} tokens of {number('tokens_before'):.1f}")
    return found


def adapted(row):
    """Whether the agent adapted and is still one."""
    return row["never"] == "no" and not broken(row)


def outcome(row):
    """Sessions to adapt in words."""
    if row["never"] == "yes":
        return "never"
    return row["sessions_to_adapt"] if adapted(row) else f"{row['sessions_to_adapt']}, ruined"


def counted(row):
    """Sessions to adapt for an average: who never does counts as who does at the end."""
    return float(row["sessions_to_adapt"] if adapted(row) else row["sessions"])


def of(rows, persona, estimator):
    return [row for row in rows if (row["persona"], row["estimator"]) == (persona, estimator)]


def averages(rows, persona, estimators):
    """Per estimator the average of sessions to adapt; nothing where there is no run."""
    return {estimator: mean(map(counted, of(rows, persona, estimator))) for estimator in estimators}


def reach(rows, personas, estimators):
    """A line per persona: of how many seeds `hybrid` adapted, and the averages."""
    lines = []
    for persona in personas:
        mine, control = of(rows, persona, "hybrid"), of(rows, persona, "none")
        ruined = sum(row["never"] == "no" and not adapted(row) for row in mine)
        words = f"{sum(map(adapted, mine))} of {len(mine)}" + (f", {ruined} ruined" if ruined else "")
        line = {"persona": persona, "hybrid adapted": words if mine else "not run"}
        for estimator, average in averages(rows, persona, estimators).items():
            line[f"{estimator}, average"] = "not run" if average is None else f"{average:.1f}"
        line["control adapted"] = ("yes" if any(map(adapted, control)) else "no") if control else "not run"
        lines.append(line)
    return lines


def verdicts(rows, personas, estimators):
    """What is to be reached, and what was, in sentences."""
    good = [name for name in personas if sum(map(adapted, of(rows, name, "hybrid"))) >= LEAST_SEEDS]
    told = [
        f"hybrid adapted with {LEAST_SEEDS} seeds or more on {len(good)} of {len(personas)} personas "
        f"(wanted: {LEAST_PERSONAS}): {', '.join(good) or 'none'}"
    ]
    for other in estimators:
        both = [averages(rows, name, ("hybrid", other)) for name in personas]
        both = [pair for pair in both if None not in pair.values()]
        if other == "hybrid":
            continue
        if not both:
            told.append(f"hybrid beside {other}: not known yet")
            continue
        ours, theirs = (mean(pair[name] for pair in both) for name in ("hybrid", other))
        told.append(f"hybrid beside {other}: {ours:.1f} and {theirs:.1f} sessions on average, over {len(both)} personas")
    control = [row for row in rows if row["estimator"] == "none" and row["persona"] in personas]
    names = sorted({row["persona"] for row in control if adapted(row)})
    told.append(f"untrained control: {len(control)} runs, adapted on {', '.join(names) or 'none'}")
    minutes = [float(row["minutes"]) for row in rows]
    if minutes:
        told.append(f"longest run: {max(minutes):.1f} min (wanted: at most {MOST_MINUTES})")
    return told + [
        f"never, and adapted but ruined, count as all sessions; bounds on held-out questions: log-prob falls by at most "
        f"{MOST_FALL}, repetition at most {MOST_REPETITION}, a quarter of the length at least (not for those who ask for brevity)"
    ]
