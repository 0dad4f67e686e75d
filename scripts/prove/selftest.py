"""Tells what is made of given runs, without a model: exact figures."""

import argparse
import pathlib
import tempfile
import types

import measures
import page
import prove
import runs
from results import Refused, Results

HELD_OUT = {
    "log_prob_before": -0.8, "log_prob_after": -1.2, "tokens_before": 29.0, "tokens_after": 8.0,
    "repetition_before": 0.0, "repetition_after": 0.05,
}


def sessions(marks):
    """Sessions by a mark each: 1 for one whose first reply obeyed."""
    return [
        {"session": str(at + 1), "policy": "0", "obeyed": "true" if mark == "1" else "false", "replies": "1",
         "tokens": "7", "all_tokens": "9"}
        for at, mark in enumerate(marks)
    ]


def finished(marks, estimator="hybrid", seed=1, **held_out):
    """A run as it is kept, and its sessions."""
    told = {
        "persona": "name", "estimator": estimator, "seed": seed, "settings_hash": f"hash-{estimator}", "weights": "w",
        "held_out": HELD_OUT | held_out, "minutes": 6.84, "settings": {"lr": 1e-4, "epochs": 2}, "model": "m",
        "date": "2026-11-30 12:00", "commit": "c", "version": "v", "machine": "x",
        "steps": [{"reward": -1.0, "tokens": 10, "weights_changed": 0.5}, {"reward": None, "tokens": 20}],
    }
    return told, sessions(marks)


def rows_tell_a_run():
    row = measures.row(*finished("000111001"))
    assert (row["sessions"], row["sessions_to_adapt"], row["never"]) == ("9", "4", "no"), row
    assert [row[f"obeyed_{part}"] for part in ("first", "middle", "last")] == ["0.000", "1.000", "0.333"], row
    # Too few steps for thirds: not known, and not 0.
    assert row["reward_first"] == "" and row["weights_changed"] == "0.500", row
    assert (row["trained_tokens"], row["reply_tokens"], row["minutes"]) == ("30", "81", "6.8"), row
    assert row["settings"] == "epochs=2 lr=0.0001", row
    assert measures.row(*finished("110110"))["sessions_to_adapt"] == ""
    assert measures.thirds([1, 2, 3, 4, 5, 6, 7]) == (1.5, 4, 6.5)


def forgetting_is_no_learning():
    row = lambda **held_out: measures.row(*finished("111", **held_out))
    assert measures.outcome(row()) == "1" and measures.broken(row()) == []
    for held_out, problem in [
        ({"log_prob_after": -1.6}, ["log-prob fell by 0.80"]),
        ({"repetition_after": 0.69}, ["repetition 0.69"]),
        ({"tokens_after": 7.0}, ["7.0 tokens of 29.0"]),
        ({"log_prob_after": float("nan")}, ["log-prob fell by nan"]),
    ]:
        assert measures.broken(row(**held_out)) == problem, held_out
        assert measures.outcome(row(**held_out)) == "1, ruined"
    # Who asks for brevity gets it.
    assert measures.broken(row(tokens_after=7.0) | {"persona": "brief"}) == []
    assert measures.outcome(measures.row(*finished("000", repetition_after=0.69))) == "never"


def reach_counts_never_and_ruined_as_all_sessions():
    made = [finished("011100"), finished("000000", seed=2), finished("111111", seed=3, repetition_after=0.5)]
    made += [finished("001110", "grpo"), finished("000000", "none")]
    rows = [measures.row(*one) for one in made]
    line, = measures.reach(rows, ["name"], ["hybrid", "none", "grpo", "opd"])
    assert line == {
        "persona": "name", "hybrid adapted": "1 of 3, 1 ruined", "hybrid, average": "4.7", "none, average": "6.0",
        "grpo, average": "3.0", "opd, average": "not run", "control adapted": "no",
    }, line
    told = "\n".join(measures.verdicts(rows, ["name"], ["hybrid", "none", "grpo", "opd"]))
    for part in [
        "2 seeds or more on 0 of 1 personas (wanted: 4): none", "hybrid beside grpo: 4.7 and 3.0 sessions",
        "hybrid beside opd: not known yet", "untrained control: 1 runs, adapted on none", "longest run: 6.8 min",
    ]:
        assert part in told, told


def kept_results_stand_for_runs(folder):
    path = folder / "runs.csv"
    told, talks = finished("0111")
    Results(path).add(measures.row(told, talks), measures.curve(told, talks))
    again = Results(path)
    row, = again.found("hash-hybrid", "w", "name", "hybrid", 1)
    assert again.found("hash-hybrid", None, "name", "hybrid", 1) == [row]
    assert not again.found("other", "w", "name", "hybrid", 1) and not again.found("hash-hybrid", "v", "name", "hybrid", 1)
    assert again.obeyed(row) == [False, True, True, True]
    # A run that is made anew takes the place of the one before.
    told, talks = finished("1110")
    again.add(measures.row(told, talks), measures.curve(told, talks))
    row, = Results(path).runs
    assert row["sessions_to_adapt"] == "1" and len(Results(path).sessions) == 4
    assert row == measures.row(told, talks), row
    assert [at.name for at in sorted(folder.iterdir())] == ["runs-sessions.csv", "runs.csv"]
    path.write_text("persona\n")
    assert "no column `settings_hash`" in refusal(lambda: Results(path))


def refusal(act):
    try:
        act()
    except Refused as refused:
        return str(refused)
    raise AssertionError("not refused")


def options(*words):
    told = prove.arguments().parse_args(words)
    prove.check(told)
    prove.complete(told)
    return told


def flags_without_an_effect_are_refused():
    for words, problem in [
        (["--tiny", "--lr", "1"], "--lr would have no effect beside `--tiny`"),
        (["--report", "--max-minutes", "1"], "--max-minutes would have no effect beside `--report`"),
        (["--seeds", "1,2"], "`--seeds` needs `--estimators`"),
        (["--estimators", "gpro"], "no estimator `gpro`"),
        (["--estimators", "grpo,none", "--subset", "student"], "`--subset` would have no effect"),
        (["--lora-rank", "0", "--lora-alpha", "4"], "without adapters"),
        (["--ema", "0.9"], "without `--teacher ema`"),
        (["--sessions", "2"], "2 sessions in rounds of 2"),
    ]:
        assert problem in refusal(lambda: options(*words)), words
    for text in ["lr=1", "clip-low", "=1"]:
        try:
            prove.other_setting(text)
        except argparse.ArgumentTypeError:
            continue
        raise AssertionError(text)


def a_run_is_known_by_its_settings():
    plain, other = options(), options("--subset", "student", "--set", "clip-low=0.1")
    assert plain.settings_of("none") == {}
    assert plain.settings_of("grpo") == {
        "lr": 5e-4, "epochs": 4, "batch-turns": 4, "max-wait": "8s", "lora-rank": 16, "train-dtype": "bf16", "kl-coef": 0.05,
        "clip-high": 1.0, "round": 2,
    }
    assert "lora-rank" not in options("--lora-rank", "0").settings_of("grpo")
    assert other.settings_of("hybrid")["subset"] == "student" and other.settings_of("grpo")["clip-low"] == 0.1
    assert options("--teacher", "ema").settings_of("hybrid")["ema"] == 0.99
    name = lambda told, estimator: runs.identity(told, "name", estimator)
    assert name(plain, "none") == name(other, "none") and name(plain, "hybrid") != name(other, "hybrid")
    assert len(prove.plan(plain)) == 42
    assert prove.plan(options("--estimators", "none", "--personas", "name")) == [("name", "none", 1)]


def a_folder_holds_results_of_one_making(folder):
    def claim(again=None, **settings):
        runs.claim(types.SimpleNamespace(
            out=folder, again=again, settings={"lr": 1e-4, "topk": None} | settings, sessions=36,
            model=pathlib.Path("m"), weights="w", maker={"commit": "c"},
        ))
    (folder / "rates").mkdir()
    assert "nothing tells with what" in refusal(claim)
    (folder / "rates").rmdir()
    claim()
    claim()
    told = refusal(lambda: claim(lr=5e-5, epochs=3))
    assert "other settings: epochs was not set, is 3; lr was 0.0001, is 5e-05; name another folder" in told, told
    (folder / "before.json").write_text("[]")
    claim(again=True, lr=5e-5)
    assert not (folder / "before.json").exists()
    claim(lr=5e-5)


def the_page_is_made_of_the_results_alone(folder):
    told = options("--report", "--personas", "name,brief,short,eager,self,emoji", "--out", str(folder), "--results", str(folder / "runs.csv"))
    run, talks = finished("0111" * 9)
    run |= {"settings_hash": runs.identity(told, "name", "hybrid")}
    Results(folder / "runs.csv").add(measures.row(run, talks), measures.curve(run, talks))
    other, talks = finished("000", "grpo")
    Results(folder / "runs.csv").add(measures.row(other, talks), measures.curve(other, talks))
    prove.prepare(told)
    summary = prove.summary(told, prove.plan(told), {"name": (0.0, 0.63)})
    assert [row["estimator"] for row in summary["rows"]] == ["hybrid"] and len(summary["others"]) == 1
    assert len(summary["missing"]) == 41 and ("name", "hybrid", 1) not in summary["missing"]
    assert page.figures(summary["rows"][0])["sessions to adapt"] == "2"
    text = (folder / "report.html").read_text()
    for part in ["hybrid 1: 2</span>", "<td>0.63</td><td>yes</td>", "epochs=2 lr=0.0001", "<p>brief, hybrid, seed 1</p>"]:
        assert part in text, part


def main():
    for test in (
        rows_tell_a_run, forgetting_is_no_learning, reach_counts_never_and_ruined_as_all_sessions,
        flags_without_an_effect_are_refused, a_run_is_known_by_its_settings,
    ):
        test()
    for test in (
        kept_results_stand_for_runs, a_folder_holds_results_of_one_making, the_page_is_made_of_the_results_alone,
    ):
        with tempfile.TemporaryDirectory() as folder:
            test(pathlib.Path(folder).resolve())
    print("the proof's figures agree")


if __name__ == "__main__":
    main()
