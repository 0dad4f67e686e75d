"""The peer of `oclaw judge`: the same calls by plain asyncio and httpx.

    judge_httpx.py URL TURNS.jsonl OUT.jsonl VOTES AT_ONCE

Reads turns, asks each `VOTES` times, takes the majority, writes all in order.
No cache, no retries, no budget: what one would write in an afternoon.
"""

import asyncio
import collections
import json
import re
import sys

import httpx

RULE = (
    "Say whether the assistant's answer was good, judged by what came after it. "
    "End with \\boxed{1} if it was, \\boxed{-1} if it has to be done over, \\boxed{0} if that is open."
)
BOX = re.compile(r"\\boxed\{([-+]?[01])\}")


def prompt(turn):
    shown = {
        "request": turn["messages"][-1],
        "answer": turn["response"],
        "next": turn["next_state"],
    }
    return [{"role": "system", "content": RULE}, {"role": "user", "content": json.dumps(shown)}]


async def vote(client, places, messages, seed):
    body = {"model": "judge", "messages": messages, "temperature": 0.6, "max_tokens": 2048, "seed": seed}
    async with places:
        answer = await client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    found = BOX.findall(answer.json()["choices"][0]["message"]["content"])
    return int(found[-1]) if found else None


async def judge(client, places, turn, votes):
    messages = prompt(turn)
    cast = await asyncio.gather(*(vote(client, places, messages, seed) for seed in range(votes)))
    counts = collections.Counter(value for value in cast if value is not None).most_common(2)
    tied = len(counts) == 2 and counts[0][1] == counts[1][1]
    score = None if not counts else 0 if tied else counts[0][0]
    return {**turn, "votes": cast, "score": score}


async def main():
    url, source, out, votes, at_once = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
    with open(source) as lines:
        turns = [json.loads(line) for line in lines]
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
    places = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client:
        judged = await asyncio.gather(*(judge(client, places, turn, votes) for turn in turns))
    with open(out, "w") as lines:
        for turn in judged:
            lines.write(json.dumps(turn) + "\n")


asyncio.run(main())
