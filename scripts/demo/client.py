"""The people of the demo: an ordinary OpenAI client with a script.

    client.py chat  BASE_URL PREFIX       hold the scripted sessions
    client.py again BASE_URL              hold one more session
    client.py ready BASE_URL              succeed if the server is ready
    client.py score ENGINE_URL ROWS OUT   log-prob of each captured answer under the weights served now
    client.py moved BEFORE AFTER          compare two score files, check the direction

Standard library only: what it does, any client can do.
"""

import json
import sys
import urllib.request

PRAISE = "Thanks, that is exactly right."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    }
]

# One session a line: what the person says. Each answer is judged by the words that follow it.
SESSIONS = [
    ("geography", True, [
        "What is the capital of France? Answer in one sentence.",
        PRAISE + " And what is the capital of Italy?",
        "No, that is too long. Please answer with the name of the city only. What is the capital of Spain?",
        PRAISE + " And which river runs through it?",
    ]),
    ("sea", False, [
        "Write one sentence about the ocean.",
        "That is wrong, I asked for one short sentence. Try again, and end with a question.",
        "Perfect, thank you. Now write one sentence about a mountain.",
        "Great, that is what I wanted. One about a forest, please.",
    ]),
    ("kitchen", True, [
        "How long does it take to boil an egg?",
        "No, please give the number of minutes first, then one short reason.",
        "Thanks, that helps a lot. And how long for rice?",
    ]),
    ("names", False, [
        "Suggest a name for a small grey cat.",
        "Thanks, I love it. Suggest one for a big brown dog.",
        "No, not a list. Give me exactly one name and nothing else.",
        PRAISE + " Goodbye!",
    ]),
    ("words", True, [
        "What does the word brisk mean?",
        "That is not correct. Use it in an example sentence instead of explaining it.",
        "Good answer, thanks. And the word calm?",
    ]),
]


def post(url, body, headers=None):
    request = urllib.request.Request(
        url,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **(headers or {})},
    )
    return urllib.request.urlopen(request, timeout=300)


def read_stream(response):
    """Joins the deltas of a streamed answer, as an SDK would."""
    message = {"role": "assistant", "content": ""}
    for line in response:
        line = line.decode().rstrip("\r\n")
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            break
        chunk = json.loads(data)
        for choice in chunk.get("choices") or []:
            message["content"] += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or []:
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": ""}})
                calls[call["index"]]["function"]["arguments"] += call["function"].get("arguments") or ""
    return message


def ask(base, session, messages, last=False, stream=False, **extra):
    body = {"model": "default", "messages": messages, "stream": stream, "max_tokens": 40, "temperature": 0.7, **extra}
    headers = {"X-Session-Id": session, "X-Turn-Type": "main"}
    if last:
        headers["X-Session-Done"] = "true"
    with post(base + "/v1/chat/completions", body, headers) as response:
        message = read_stream(response) if stream else json.load(response)["choices"][0]["message"]
    return {key: value for key, value in message.items() if key in ("role", "content", "tool_calls") and value is not None}


def one_line(text, width=64):
    text = " ".join(str(text).split())
    return text if len(text) <= width else text[: width - 1] + "…"


def hold(base, session, stream, lines, seed):
    messages = []
    for number, line in enumerate(lines):
        messages.append({"role": "user", "content": line})
        answer = ask(base, session, messages, last=number + 1 == len(lines), stream=stream, seed=seed + number)
        messages.append(answer)
        print(f"  {session:<10} {'stream' if stream else 'whole ':<6}  {one_line(line):<66} -> {one_line(answer.get('content'))}", flush=True)
    return len(lines)


def hold_with_tool(base, session, seed):
    """A session in which the model is made to call a tool and hears the result."""
    choice = {"type": "function", "function": {"name": "add"}}
    messages = [{"role": "user", "content": "Use the tool to add 17 and 25."}]
    answer = ask(base, session, messages, stream=True, seed=seed, tools=TOOLS, tool_choice=choice)
    messages.append(answer)
    call = answer["tool_calls"][0]
    try:
        arguments = json.loads(call["function"]["arguments"])
        result = json.dumps({"result": arguments["a"] + arguments["b"]})
    except (ValueError, KeyError, TypeError) as error:
        result = f"Error: invalid arguments: {error!r}"
    print(f"  {session:<10} stream  {one_line(messages[0]['content']):<66} -> {call['function']['name']}({one_line(call['function']['arguments'], 40)})")
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    answer = ask(base, session, messages, stream=True, seed=seed + 1, tools=TOOLS)
    messages.append(answer)
    print(f"  {session:<10} stream  {'(tool) ' + one_line(result, 58):<66} -> {one_line(answer.get('content'))}")
    messages.append({"role": "user", "content": PRAISE + " What is 42 minus 2?"})
    answer = ask(base, session, messages, last=True, stream=True, seed=seed + 2, tools=TOOLS)
    print(f"  {session:<10} stream  {one_line(messages[-1]['content']):<66} -> {one_line(answer.get('content'))}", flush=True)
    return 3


def chat(base, prefix):
    turns = sum(hold(base, prefix + name, stream, lines, 100 * number) for number, (name, stream, lines) in enumerate(SESSIONS))
    turns += hold_with_tool(base, prefix + "tool", 1000)
    print(f"{len(SESSIONS) + 1} sessions, {turns} turns")


def score(engine, rows, out):
    """Asks the engine for the log-prob of every captured answer, ids as sampled."""
    scored = []
    with open(rows) as lines:
        for line in lines:
            row = json.loads(line)
            if not row["response_ids"] or row["reward"] is None:
                continue
            ids, start = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"])
            body = {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 0, "temperature": 0},
                "return_logprob": True,
                "logprob_start_len": start - 1,
            }
            with post(engine + "/generate", body) as response:
                entries = json.load(response)["meta_info"]["input_token_logprobs"][1:]
            assert [entry[1] for entry in entries] == row["response_ids"], "the engine scored other ids"
            scored.append({
                "session": row["session_id"],
                "turn": row["turn"],
                "reward": row["reward"],
                "hinted": bool(row.get("hints")),
                "log_prob": sum(entry[0] for entry in entries),
                "tokens": len(entries),
            })
    with open(out, "w") as file:
        json.dump(scored, file)


def moved(before, after):
    with open(before) as first, open(after) as second:
        pairs = list(zip(json.load(first), json.load(second)))
    print(f"  {'session':<16} {'turn':>4} {'reward':>6} {'hint':>5} {'tokens':>6} {'before':>9} {'after':>9} {'change':>8}")
    totals = {}
    shown = {}
    for old, new in pairs:
        change = new["log_prob"] - old["log_prob"]
        kind = "praised" if old["reward"] > 0 else "corrected" if old["reward"] < 0 else "neutral"
        totals.setdefault(kind, []).append(change)
        shown.setdefault(kind, change)
        print(f"  {old['session']:<16} {old['turn']:>4} {old['reward']:>6.0f} {'yes' if old['hinted'] else 'no':>5} {old['tokens']:>6} {old['log_prob']:>9.3f} {new['log_prob']:>9.3f} {change:>+8.3f}")
    failed = False
    for kind, sign, word in (("praised", 1, "up"), ("corrected", -1, "down")):
        changes = totals.get(kind, [])
        right = sum(change * sign > 0 for change in changes)
        mean = sum(changes) / len(changes) if changes else 0.0
        good = bool(changes) and mean * sign > 0 and shown[kind] * sign > 0
        failed |= not good
        print(f"  {kind} answers: {right} of {len(changes)} went {word}, mean change {mean:+.3f} nats -> {'ok' if good else 'WRONG WAY'}")
    return 1 if failed else 0


def main():
    command, *arguments = sys.argv[1:]
    if command == "chat":
        chat(*arguments)
    elif command == "again":
        base, = arguments
        hold(base, "after-sync", True, [SESSIONS[0][2][0], PRAISE + " Bye."], 7)
    elif command == "ready":
        base, = arguments
        try:
            urllib.request.urlopen(base + "/readyz", timeout=5).close()
        except OSError:
            sys.exit(1)
    elif command == "score":
        score(*arguments)
    elif command == "moved":
        sys.exit(moved(*arguments))
    else:
        sys.exit(f"unknown command {command}")


if __name__ == "__main__":
    main()
