"""People who chat without end, the way a client library does: a request that fails
for a passing reason is sent again for a while. Standard library only."""

import http.client
import json
import threading
import time

WORDS = [
    "What is the capital of France?",
    "No, that is wrong. Try again.",
    "Thanks, that is exactly right. And of Italy?",
    "No, not a list. One name only.",
]
PATIENCE = 180.0
# People read before they write.
PAUSE = 1.5


class Person(threading.Thread):
    """Holds one conversation after the other until told to stop."""

    def __init__(self, address, name):
        super().__init__(daemon=True)
        self.address, self.name_ = address, name
        self.over = threading.Event()
        self.seconds, self.retried, self.failed, self.odd = [], 0, 0, []

    def run(self):
        session = 0
        while not self.over.is_set():
            self.converse(f"{self.name_}-{session}")
            session += 1

    def converse(self, session):
        messages = []
        for words in WORDS:
            messages.append({"role": "user", "content": words})
            answer = self.ask(session, messages)
            if answer is None:
                return
            messages.append(answer)
            self.over.wait(PAUSE)

    def ask(self, session, messages):
        start = time.monotonic()
        while True:
            try:
                answer = self.post(session, messages)
                self.seconds.append(time.monotonic() - start)
                return answer
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                self.retried += 1
                if time.monotonic() - start > PATIENCE:
                    self.failed += 1
                    self.odd.append(f"{session}: {error!r}")
                    return None
                time.sleep(0.2)

    def post(self, session, messages):
        host, port = self.address.split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
        try:
            body = json.dumps({"model": "m", "messages": messages, "max_tokens": 8})
            headers = {"Content-Type": "application/json", "X-Session-Id": session}
            connection.request("POST", "/v1/chat/completions", body, headers)
            response = connection.getresponse()
            text = response.read()
            if response.status != 200:
                raise ValueError(f"{response.status}: {text[:200]!r}")
            return json.loads(text)["choices"][0]["message"]
        finally:
            connection.close()
