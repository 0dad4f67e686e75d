"""What the runs came to: tables, and a page with a plot per persona."""

import csv
import html
import itertools

IN_A_ROW = 3
COLOURS = {"hybrid": "#1d6fb8", "none": "#888888", "grpo": "#c4571b", "opd": "#4a8f3c", "combine": "#8a4fae"}
WIDTH, HEIGHT, LEFT, BOTTOM = 560, 200, 40, 30
STYLE = """body { font: 15px/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse } td, th { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: left }
svg { width: 100%; max-width: 42rem } text { font-size: 11px; fill: #555 }"""


def obeyed(told):
    return [row["obeyed"] == "true" for row in told["sessions"]]


def adapted(told):
    """The first of three sessions in a row whose first replies obey, as `oclaw simulate` counts."""
    kept = obeyed(told)
    rows = (at for at in range(len(kept) - IN_A_ROW + 1) if all(kept[at:at + IN_A_ROW]))
    return next(rows, None)


def told_adapted(told):
    at = adapted(told)
    return "never" if at is None else str(at + 1)


def thirds(told):
    kept = obeyed(told)
    third = max(len(kept) // 3, 1)
    return sum(kept[:third]) / third, sum(kept[-third:]) / third


def figures(told):
    """A run as a row."""
    first, last = thirds(told)
    held, steps = told["held_out"], told.get("steps", [])
    counts = [row["all_tokens"] for row in told["sessions"]]
    changed = [step["weights_changed"] for step in steps if step.get("weights_changed") is not None]
    return {
        "persona": told["persona"], "estimator": told["estimator"], "seed": told["seed"], "sessions": len(told["sessions"]),
        "sessions_to_adapt": told_adapted(told), "first_third": f"{first:.2f}", "last_third": f"{last:.2f}",
        "steps": len(steps), "reward_per_step": " ".join(f"{step['reward']:+.2f}" for step in steps if step.get("reward") is not None),
        "weights_changed": f"{changed[-1]:.3f}" if changed else "",
        "reply_tokens": sum(map(int, counts)) if all(counts) else "", "minutes": f"{told['minutes']:.1f}",
        "held_out_log_prob": f"{held['log_prob_before']:.3f} {held['log_prob_after']:.3f}",
        "held_out_tokens": f"{held['tokens_before']:.1f} {held['tokens_after']:.1f}",
        "held_out_repetition": f"{held['repetition_before']:.3f} {held['repetition_after']:.3f}",
    }


def print_rates(rates):
    print(f"\n{'persona':10} {'bare':>6} {'hinted':>7}  room")
    for persona, (bare, hinted) in rates.items():
        print(f"{persona:10} {bare:6.2f} {hinted:7.2f}  {'yes' if bare <= 0.3 and hinted >= 0.2 else 'no'}")


def print_runs(runs):
    if not runs:
        return
    rows = [figures(told) for told in runs]
    names = ["persona", "estimator", "seed", "sessions_to_adapt", "first_third", "last_third", "steps", "minutes",
             "held_out_log_prob", "held_out_tokens", "held_out_repetition"]
    print("\n| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        print("| " + " | ".join(str(row[name]) for name in names) + " |")


def curve(told):
    """The share of first replies that obeyed among four sessions at a time."""
    kept = obeyed(told)
    return [sum(kept[at:at + 4]) / len(kept[at:at + 4]) for at in range(0, len(kept), 4)]


def plot(persona, runs):
    most = max(len(curve(told)) for told in runs)
    across = lambda at: LEFT + (at + 0.5) / most * (WIDTH - LEFT - 10)
    up = lambda share: 12 + (1 - share) * (HEIGHT - BOTTOM - 12)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(persona)}: share of first replies that obey">']
    for share in (0, 0.5, 1):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{up(share)}" y2="{up(share)}" stroke="#ddd"/><text x="8" y="{up(share) + 4}">{share}</text>')
    parts += [f'<text x="{across(at):.0f}" y="{HEIGHT - 12}" text-anchor="middle">{4 * at + 4}</text>' for at in range(most)]
    for told in runs:
        points = " ".join(f"{across(at):.1f},{up(share):.1f}" for at, share in enumerate(curve(told)))
        name = html.escape(f"{told['estimator']}, seed {told['seed']}")
        colour = COLOURS.get(told["estimator"], "#222")
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"><title>{name}</title></polyline>')
    words = ", ".join(
        f'<span style="color:{COLOURS.get(told["estimator"], "#222")}">{html.escape(told["estimator"])} {told["seed"]}: {told_adapted(told)}</span>'
        for told in runs
    )
    return "".join(parts) + f"</svg><p>Sessions to adapt: {words}</p>"


def table(rows):
    head = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(value))}</td>" for value in row.values()) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def write(folder, rates, runs):
    told_rates = [{"persona": name, "bare": f"{bare:.2f}", "hinted": f"{hinted:.2f}"} for name, (bare, hinted) in rates.items()]
    write_csv(folder / "rates.csv", told_rates)
    body = f"<h2>Replies that obey without training</h2>{table(told_rates)}"
    if runs:
        rows = [figures(told) for told in runs]
        write_csv(folder / "runs.csv", rows)
        named = lambda told: {name: told[name] for name in ("persona", "estimator", "seed")}
        write_csv(folder / "sessions.csv", [named(told) | row for told in runs for row in told["sessions"]])
        by_persona = lambda told: told["persona"]
        for persona, group in itertools.groupby(sorted(runs, key=by_persona), by_persona):
            body += f"<h2>{html.escape(persona)}</h2>{plot(persona, list(group))}"
        body += f"<h2>Runs</h2>{table(rows)}"
    page = f'<!doctype html><html lang="en"><head><meta charset="utf-8"/><title>oclaw: does it learn?</title><style>{STYLE}</style></head>'
    (folder / "report.html").write_text(f"{page}<body><h1>Does it learn?</h1>{body}</body></html>\n")
