"""What should stay as it was: answers to questions that nobody trained on."""

import concurrent.futures
import json
import pathlib
import urllib.request

QUESTIONS = pathlib.Path(__file__).resolve().parents[2] / "fixtures/questions/held-out.jsonl"
LONGEST = 32


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def answer(engine, question):
    body = {
        "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": LONGEST,
        "return_token_ids": True, "return_prompt_token_ids": True,
    }
    choice = post(f"{engine}/v1/chat/completions", body)["choices"][0]
    return {"prompt": choice["prompt_token_ids"], "ids": choice["response_token_ids"]}


def log_prob(engine, prompt, ids):
    """Mean log-prob of an answer's tokens."""
    body = {
        "input_ids": prompt + ids, "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True, "logprob_start_len": len(prompt) - 1,
    }
    entries = post(f"{engine}/generate", body)["meta_info"]["input_token_logprobs"][1:]
    return sum(entry[0] for entry in entries) / len(entries)


def repetition(ids, size=4):
    """The share of runs of four tokens that stood in the answer before."""
    runs = [tuple(ids[at:at + size]) for at in range(len(ids) - size + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def questions():
    return [json.loads(line)["question"] for line in QUESTIONS.read_text().splitlines()]


def at_once(ask, asked):
    """Asks all together: the engine computes them in one batch."""
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(ask, asked))


def before(engine):
    """The start model's greedy answers, and what it thinks of them."""
    answers = at_once(lambda question: answer(engine, question), questions())
    scores = at_once(lambda told: log_prob(engine, told["prompt"], told["ids"]), answers)
    return [told | {"log_prob": score} for told, score in zip(answers, scores)]


def after(engine, before):
    """The same of another policy: of the old answers their log-prob, of its own their length."""
    own = at_once(lambda question: answer(engine, question)["ids"], questions())
    old = at_once(lambda told: log_prob(engine, told["prompt"], told["ids"]), before)
    mean = lambda values: sum(values) / len(values)
    return {
        "log_prob_before": mean([told["log_prob"] for told in before]), "log_prob_after": mean(old),
        "tokens_before": mean([len(told["ids"]) for told in before]), "tokens_after": mean([len(ids) for ids in own]),
        "repetition_before": mean([repetition(told["ids"]) for told in before]),
        "repetition_after": mean([repetition(ids) for ids in own]),
    }
