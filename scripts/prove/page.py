"""Tables in a terminal, and a page with a plot per persona: of the kept results alone."""

import html
import itertools

import measures

MOST_BARE, LEAST_HINTED = 0.3, 0.2
COLOURS = {"hybrid": "#1d6fb8", "none": "#888888", "grpo": "#c4571b", "opd": "#4a8f3c", "combine": "#8a4fae"}
WIDTH, HEIGHT, LEFT, BOTTOM = 560, 200, 40, 30
STYLE = """body { font: 15px/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: left }
svg { width: 100%; max-width: 42rem } text { font-size: 11px; fill: #555 }"""


def figures(row):
    """A run as it is shown."""
    three = lambda name: " ".join(row[f"{name}_{part}"] or "-" for part in ("first", "middle", "last"))
    pair = lambda name: f"{row[f'held_out_{name}_before']} {row[f'held_out_{name}_after']}"
    broken = measures.broken(row)
    return {
        "persona": row["persona"], "estimator": row["estimator"], "seed": row["seed"],
        "sessions to adapt": measures.outcome(row), "within bounds": f"no: {'; '.join(broken)}" if broken else "yes",
        "obeyed, by thirds": three("obeyed"), "reward, by thirds": three("reward"),
        "held-out log-prob": pair("log_prob"), "held-out tokens": pair("tokens"), "repetition": pair("repetition"),
        "weights changed": row["weights_changed"], "steps": row["steps"], "tokens of replies": row["reply_tokens"],
        "minutes": row["minutes"], "date": row["date"],
    }


def told_rates(rates):
    """Base rates as they are shown."""
    room = lambda bare, hinted: "yes" if bare <= MOST_BARE and hinted >= LEAST_HINTED else "no"
    return [
        {"persona": persona, "bare": f"{bare:.2f}", "hinted": f"{hinted:.2f}", "room": room(bare, hinted)}
        for persona, (bare, hinted) in rates.items()
    ]


def print_table(rows):
    if not rows:
        return
    print("\n| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(row.values()) + " |")


def curve(obeyed):
    """The share of first replies that obeyed among four sessions at a time."""
    return [sum(obeyed[at:at + 4]) / len(obeyed[at:at + 4]) for at in range(0, len(obeyed), 4)]


def plot(persona, runs, obeyed):
    curves = [curve(obeyed(row)) for row in runs]
    most = max(map(len, curves))
    across = lambda at: LEFT + (at + 0.5) / max(most, 1) * (WIDTH - LEFT - 10)
    up = lambda share: 12 + (1 - share) * (HEIGHT - BOTTOM - 12)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(persona)}: share of first replies that obey">']
    for share in (0, 0.5, 1):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{up(share)}" y2="{up(share)}" stroke="#ddd"/><text x="8" y="{up(share) + 4}">{share}</text>')
    parts += [f'<text x="{across(at):.0f}" y="{HEIGHT - 12}" text-anchor="middle">{4 * at + 4}</text>' for at in range(most)]
    for row, shares in zip(runs, curves):
        points = " ".join(f"{across(at):.1f},{up(share):.1f}" for at, share in enumerate(shares))
        name = html.escape(f"{row['estimator']}, seed {row['seed']}")
        colour = COLOURS.get(row["estimator"], "#222")
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"><title>{name}</title></polyline>')
    words = ", ".join(
        f'<span style="color:{COLOURS.get(row["estimator"], "#222")}">{html.escape(row["estimator"])} {row["seed"]}: {measures.outcome(row)}</span>'
        for row in runs
    )
    return "".join(parts) + f"</svg><p>Sessions to adapt: {words}</p>"


def table(rows):
    if not rows:
        return "<p>None.</p>"
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(value)}</td>" for value in row.values()) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def paragraphs(lines):
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def with_settings(rows):
    """Runs whose settings are not those of the others."""
    return [figures(row) | {"settings": row["settings"]} for row in rows]


def write(path, told, obeyed):
    """Writes the page of what is told: rates, rows, others, reach, verdicts, missing."""
    body = f"<h2>Reach</h2>{table(told['reach'])}{paragraphs(told['verdicts'])}"
    body += f"<h2>Replies that obey without training</h2>{table(told_rates(told['rates']))}"
    by_persona = lambda row: row["persona"]
    for persona, group in itertools.groupby(sorted(told["rows"], key=by_persona), by_persona):
        body += f"<h2>{html.escape(persona)}</h2>{plot(persona, list(group), obeyed)}"
    body += f"<h2>Runs</h2>{table([figures(row) for row in told['rows']])}"
    body += f"<h2>Runs with other settings</h2>{table(with_settings(told['others']))}"
    not_run = [f"{persona}, {estimator}, seed {seed}" for persona, estimator, seed in told["missing"]]
    body += f"<h2>Not run</h2>{paragraphs(not_run or ['None.'])}"
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"/><title>oclaw: does it learn?</title><style>{STYLE}</style></head>'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{head}<body><h1>Does it learn?</h1>{body}</body></html>\n")
