"""An inference server for one conversation, in SGLang's dialect: it answers each
chat by what the person said last, with made-up token ids and log-probs.

    upstream.py LOG.jsonl

Prints its address, writes each request and what it answered to the log, and runs
until it is killed. Standard library only.
"""

import http.server
import json
import sys
import threading

ENVELOPE = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
END_OF_TURN = 9
lock = threading.Lock()


def text(message):
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def spoken(messages):
    """The conversation without the client's internal block, which it never keeps."""
    return [message for message in messages if ENVELOPE not in text(message)]


def decide(messages):
    """Returns the words and the tool calls of the answer."""
    last = spoken(messages)[-1]
    if last["role"] == "tool":
        return "These are the files.", []
    if "LIST" in text(last):
        call = {"name": "ls", "arguments": '{"path":"."}'}
        return "Let me look.", [{"index": 0, "id": "call_a1_2", "type": "function", "function": call}]
    return f"Answer to {len(spoken(messages))} messages.", []


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def whole(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/v1/models":
            self.whole(200, {"object": "list", "data": [{"id": "policy", "object": "model"}]})
        elif self.path in ("/model_info", "/get_model_info"):
            self.whole(200, {"model_path": "/nowhere", "is_generation": True, "weight_version": "0"})
        elif self.path in ("/ready", "/health"):
            self.whole(200, {})
        else:
            self.whole(404, {"error": {"message": "no such route"}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            return self.whole(404, {"error": {"message": "no such route"}})
        words, calls = decide(asked["messages"])
        pieces = words.split(" ")
        pieces = [piece + " " for piece in pieces[:-1]] + [pieces[-1]]
        with lock:
            number = self.server.asked
            self.server.asked += 1
            # The last one is the end of turn, which has no text.
            ids = [1000 * (number + 1) + place for place in range(len(pieces) + len(calls))] + [END_OF_TURN]
            log_probs = [-0.25 * (1 + place % 4) for place in range(len(ids))]
            entry = {"headers": dict(self.headers), "body": asked, "ids": ids, "log_probs": log_probs,
                     "words": words, "calls": calls}
            self.server.log.write(json.dumps(entry) + "\n")
            self.server.log.flush()
        self.stream(asked, pieces, calls, ids, log_probs)

    def stream(self, asked, pieces, calls, ids, log_probs):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        told = iter(log_probs)

        def send(data):
            line = f"data: {data}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.flush()

        def chunk(delta, reason=None, counted=True):
            choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
            if counted and asked.get("logprobs"):
                choice["logprobs"] = {"content": [{"token": "", "bytes": [], "logprob": next(told), "top_logprobs": []}]}
            send(json.dumps({"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "policy",
                             "choices": [choice]}))

        chunk({"role": "assistant", "content": "", "reasoning_content": None}, counted=False)
        for piece in pieces:
            chunk({"content": piece})
        for call in calls:
            chunk({"tool_calls": [call]})
        chunk({}, "tool_calls" if calls else "stop")
        extra = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "policy", "choices": []}
        if asked.get("return_output_ids_in_sglext"):
            send(json.dumps({**extra, "sglext": {"input_ids": [1, 2, 3], "output_ids": [ids]}}))
        if (asked.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": 3, "completion_tokens": len(ids), "total_tokens": 3 + len(ids)}
            send(json.dumps({**extra, "usage": usage}))
        send("[DONE]")
        self.wfile.write(b"0\r\n\r\n")


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.asked, server.log = 0, open(sys.argv[1], "w")
print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
server.serve_forever()
