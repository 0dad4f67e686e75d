"""Lets OpenClaw hold a conversation through `oclaw serve`, and checks what was recorded.

    e2e.py OCLAW NODE OPENCLAW_ENTRY

Standard library only. Exit code 0 if every row is as it must be.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
SESSION = "e2e-1"
SAID = ["Plan my day in two lines", "No, shorter please. LIST the files", "Thanks, great"]
PATIENCE = 180


def configuration(url, workspace):
    model = {
        "id": "policy", "name": "Policy", "reasoning": False, "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": 65536, "maxTokens": 2048,
        "compat": {"supportsPromptCacheKey": True, "sendSessionAffinityHeaders": True},
    }
    provider = {"baseUrl": f"{url}/v1", "apiKey": "key-canary", "api": "openai-completions",
                "timeoutSeconds": 60, "models": [model]}
    return {
        "agents": {"defaults": {"model": {"primary": "oclaw/policy"}, "workspace": str(workspace)}},
        "models": {"mode": "merge", "providers": {"oclaw": provider}},
        "plugins": {
            "load": {"paths": [str(HERE / "plugin")]},
            "entries": {"oclaw-sessions": {"enabled": True, "hooks": {"allowConversationAccess": True}}},
        },
    }


def first_line(process, starting):
    for line in process:
        if line.startswith(starting):
            return line.split()[-1] if starting == "http" else line[len(starting):].split("/v1")[0]
        sys.stderr.write(line)
    raise SystemExit(f"ended before it was ready: {starting}")


def converse(node, entry, folder, url):
    """Says each line in a run of its own, as a person would; returns what was answered."""
    workspace = folder / "workspace"
    workspace.mkdir()
    (workspace / "notes.txt").write_text("buy milk\n")
    config = folder / "openclaw.json"
    config.write_text(json.dumps(configuration(url, workspace)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPENCLAW_", "OCLAW_"))}
    environment |= {"HOME": str(folder), "OPENCLAW_CONFIG_PATH": str(config), "OPENCLAW_STATE_DIR": str(folder / "state"),
                    "PATH": f"{pathlib.Path(node).parent}:{environment['PATH']}", "NO_COLOR": "1"}
    answers = []
    for said in SAID:
        started = time.monotonic()
        command = [node, entry, "agent", "--local", "--session-id", SESSION, "--message", said, "--json"]
        ran = subprocess.run(command, env=environment, cwd=workspace, capture_output=True, text=True, timeout=PATIENCE)
        print(f"  {said!r}: {time.monotonic() - started:.0f} s", flush=True)
        if ran.returncode != 0:
            raise SystemExit(f"openclaw ended with {ran.returncode}:\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
        answers.append(ran.stdout)
    return answers


def plain(message):
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def letters(text):
    return "".join(letter for letter in text if letter.isalnum())


def check(rows, asked, answers, summary):
    """Compares the rows with what the upstream saw and said."""
    assert len(asked) == 4, f"the upstream was asked {len(asked)} times, not 4"
    assert len(rows) == 4, f"{len(rows)} rows, not 4: {summary}"
    for row, told in zip(rows, asked):
        assert row["session_id"] == SESSION, row["session_id"]
        assert (row["session_source"], row["session_confidence"]) == ("header", 1.0), row["session_source"]
        assert row["response_ids"] == told["ids"], (row["response_ids"], told["ids"])
        # The end of turn is the one token that may come without a log-prob.
        assert row["rollout_log_probs"] == told["log_probs"], (row["rollout_log_probs"], told["log_probs"])
        assert (row["token_source"], row["untrainable_reason"]) == ("engine", None), row["untrainable_reason"]
        assert (row["status"], row["weight_version"]) == ("complete", "0"), row
        assert json.loads(row["response"])["content"] == told["words"]
        marks = {name.lower() for name in told["headers"]}
        crossed = marks & {"x-session-id", "x-turn-type", "authorization"}
        assert not crossed, f"these headers reached the engine: {crossed}"
        assert "key-canary" not in json.dumps(told), "the client's key reached the engine"
    assert [row["turn"] for row in rows] == [1, 2, 3, 4], [row["turn"] for row in rows]
    assert [row["parent_turn_id"] for row in rows] == [None] + [row["turn_id"] for row in rows[:-1]]
    assert {row["branch"] for row in rows} == {rows[0]["branch"]}
    kinds = [row["next_state_kind"] for row in rows]
    assert kinds == ["user", "tool", "user", "none"], kinds
    next_states = [json.loads(row["next_state"]) if row["next_state"] else [] for row in rows]
    assert [len(state) for state in next_states] == [1, 1, 1, 0], next_states
    assert SAID[1] in plain(next_states[0][0]) and SAID[2] in plain(next_states[2][0]), next_states
    result = next_states[1][0]
    call = json.loads(rows[1]["response"])["tool_calls"][0]
    assert result["role"] == "tool" and "notes.txt" in plain(result), result
    # OpenClaw rewrites the id of a call when it sends it back.
    assert letters(result["tool_call_id"]) == letters(call["id"]), (result, call)
    assert "OPENCLAW_INTERNAL_CONTEXT" not in json.dumps(next_states), next_states
    for answer, words in zip(answers, [asked[0]["words"], asked[2]["words"], asked[3]["words"]]):
        assert words in answer, f"OpenClaw did not get {words!r}: {answer[:2000]}"
    assert "not captured" not in summary, summary


def main():
    oclaw, node, entry = sys.argv[1:]
    running = []

    def start(command, pipe, **more):
        process = subprocess.Popen(command, text=True, **{pipe: subprocess.PIPE}, **more)
        running.append(process)
        return process

    with tempfile.TemporaryDirectory(prefix="oclaw-e2e-") as name:
        folder = pathlib.Path(name)
        log, spool = folder / "upstream.jsonl", folder / "turns"
        try:
            upstream = start([sys.executable, str(HERE / "upstream.py"), str(log)], "stdout")
            engine = first_line(upstream.stdout, "http")
            serve = start([oclaw, "serve", "--engine", engine, "--listen", "127.0.0.1:0", "--spool", str(spool),
                           "--flush-open"], "stderr")
            url = first_line(serve.stderr, "ready: ")
            answers = converse(node, entry, folder, url)
            serve.send_signal(signal.SIGTERM)
            summary = serve.stderr.read()
            assert serve.wait(60) == 0, summary
            asked = [json.loads(line) for line in log.read_text().splitlines()]
            shown = subprocess.run([oclaw, "view", "--json", str(spool)], capture_output=True, text=True, check=True)
            rows = sorted((json.loads(line) for line in shown.stdout.splitlines()), key=lambda row: row["turn"])
            check(rows, asked, answers, summary)
            lint = subprocess.run([oclaw, "lint", str(spool)], capture_output=True, text=True)
            assert lint.returncode == 0, lint.stdout
        finally:
            for process in running:
                process.kill()
    print("OpenClaw: 3 messages, 4 turns of one session recorded with their ids, log-probs and next states")


if __name__ == "__main__":
    main()
