"""What a program does with the OpenAI SDK, against `oclaw serve`.

    client.py BASE_URL CONTROL_URL

The engine behind it answers by the last message (see `openai_sdk.rs`). Prints one
JSON line per conversation that went as it must.
"""

import asyncio
import json
import sys

import openai
from pydantic import BaseModel

BASE = sys.argv[1]
client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="client-canary", max_retries=0)
chats = client.chat.completions


def user(text):
    return {"role": "user", "content": text}


def ask(text, session, **more):
    return {"model": "m1", "messages": [user(text)], "extra_headers": {"X-Session-Id": session}, **more}


def done(name, **found):
    print(json.dumps({"done": name, **found}), flush=True)


def chat():
    answer = chats.create(**ask("chat", "chat", seed=3, temperature=0.5))
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("said chat", "stop"), answer
    # Nothing that the proxy asked for is in the client's copy.
    assert choice.logprobs is None and set(choice.model_extra) <= {"matched_stop"}, choice
    assert answer.usage.completion_tokens == 3, answer
    following = [user("chat"), choice.message, user("again")]
    second = chats.create(**{**ask("", "chat"), "messages": following})
    assert second.choices[0].message.content == "said again"
    done("chat")


def asked_log_probs():
    answer = chats.create(**ask("chat", "log-probs", logprobs=True))
    assert [token.logprob for token in answer.choices[0].logprobs.content] == [-0.5, -0.25, -0.125]
    done("log-probs")


def stream():
    events = list(chats.create(**ask("stream", "stream", stream=True)))
    pieces = [event.choices[0].delta.content or "" for event in events]
    assert "".join(pieces) == "杭州 🦀", pieces
    assert events[-1].choices[0].finish_reason == "stop"
    assert all(event.choices[0].logprobs is None and event.usage is None for event in events)
    counted = list(chats.create(**ask("stream", "stream-usage", stream=True, stream_options={"include_usage": True})))
    assert counted[-1].choices == [] and counted[-1].usage.completion_tokens == 3, counted[-1]
    done("stream")


def stream_helper():
    with client.chat.completions.stream(**ask("stream", "helper")) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
    assert final.choices[0].message.content == "杭州 🦀"
    done("helper")


TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}


def tools():
    calls = {}
    for event in chats.create(**ask("tools", "tools", stream=True, tools=[TOOL])):
        for part in event.choices[0].delta.tool_calls or []:
            call = calls.setdefault(part.index, {"id": part.id, "type": "function", "function": {"name": part.function.name, "arguments": ""}})
            call["function"]["arguments"] += part.function.arguments or ""
    calls = [calls[index] for index in sorted(calls)]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"path": "a"}, {"path": "b"}], calls
    messages = [user("tools"), {"role": "assistant", "content": None, "tool_calls": calls}]
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": f"files of {call['id']}"} for call in calls]
    answer = chats.create(**{**ask("", "tools", tools=[TOOL]), "messages": messages})
    assert answer.choices[0].message.content == "said files of call_b"
    done("tools")


class City(BaseModel):
    name: str
    people: int


def structured():
    parsed = client.chat.completions.parse(**ask("structured", "structured", response_format=City))
    assert parsed.choices[0].message.parsed == City(name="杭州", people=12)
    done("structured")


def refusal():
    answer = chats.create(**ask("refusal", "refusal"))
    assert (answer.choices[0].message.content, answer.choices[0].message.refusal) == (None, "I will not.")
    done("refusal")


def several():
    answer = chats.create(**ask("several", "several", n=2))
    assert [choice.message.content for choice in answer.choices] == ["one", "two"]
    done("several")


ERRORS = {
    400: openai.BadRequestError, 401: openai.AuthenticationError, 403: openai.PermissionDeniedError,
    404: openai.NotFoundError, 409: openai.ConflictError, 422: openai.UnprocessableEntityError,
    429: openai.RateLimitError, 500: openai.InternalServerError, 503: openai.InternalServerError,
    529: openai.InternalServerError,
}


def errors():
    for status, kind in ERRORS.items():
        for streamed in (False, True):
            try:
                chats.create(**ask(f"status {status}", "errors", stream=streamed))
                raise SystemExit(f"{status} came through")
            except openai.APIStatusError as error:
                assert type(error) is kind and error.status_code == status, (status, error)
                assert error.body == {"message": f"scripted {status}", "type": "scripted", "param": None, "code": "c"}, error.body
                assert error.response.headers["retry-after"] == "7", status
                assert error.response.headers["x-ratelimit-remaining-tokens"] == "11", status
                assert error.request_id == f"req-{status}", status
    try:
        list(chats.create(**ask("error in stream", "errors-stream", stream=True)))
        raise SystemExit("an error inside a stream was swallowed")
    except openai.APIError as error:
        assert error.message == "out of memory" and error.code == "oom", error
    done("errors")


def own_errors():
    """Refusals of the proxy's own have the same shape."""
    keyless = openai.OpenAI(base_url=sys.argv[2] + "/v1", api_key="wrong-canary", max_retries=0)
    try:
        keyless.chat.completions.create(**ask("chat", "keyless"))
        raise SystemExit("a wrong key came through")
    except openai.AuthenticationError as error:
        assert error.code == "invalid_api_key" and error.body["message"], error.body
    try:
        client.get("/models%2f..%2fx", cast_to=object)
        raise SystemExit("a climbing path came through")
    except openai.APIStatusError as error:
        assert error.status_code == 404, error
    done("own errors")


def retries():
    patient = client.with_options(max_retries=2).chat.completions
    answer = patient.create(**ask("retry", "retry"))
    assert answer.choices[0].message.content == "at last"
    events = list(patient.create(**ask("retry", "retry-stream", stream=True)))
    assert "".join(event.choices[0].delta.content or "" for event in events) == "at last"
    done("retries")


def hang_up():
    events = chats.create(**ask("endless", "hang-up", stream=True))
    next(iter(events))
    events.close()
    done("hang up")


def others():
    assert [model.id for model in client.models.list()] == ["m1"]
    assert client.embeddings.create(model="m1", input="x", encoding_format="float").data[0].embedding == [0.5, -0.5]
    assert client.completions.create(model="m1", prompt="x").choices[0].text == "plain"
    done("others")


async def at_once():
    many = openai.AsyncOpenAI(base_url=f"{BASE}/v1", api_key="client-canary", max_retries=0)

    async def one(number):
        words = f"number {number}"
        answer = await many.chat.completions.create(**ask(words, f"at-once-{number}"))
        assert answer.choices[0].message.content == f"said {words}"

    await asyncio.gather(*(one(number) for number in range(32)))
    done("at once")


for conversation in [chat, asked_log_probs, stream, stream_helper, tools, structured, refusal, several, errors, own_errors,
                     retries, hang_up, others]:
    conversation()
asyncio.run(at_once())
