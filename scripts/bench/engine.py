"""Tokens per second of `oclaw engine` over HTTP, beside Hugging Face transformers' `generate`.

    engine.py OCLAW PEER_PYTHON MODEL

Both stay loaded and take turns, so that whatever else the machine does falls on both; the
best of each counts, and the prompt's time is in it. Every prompt is new. The bound of one
stream is the memory bandwidth of the same minutes over the bytes of the weights: those of
the file, where the engine holds in bf16 what it multiplies in f32 (with AMX).
TURNS and TYPES are taken from the environment.
"""

import http.client
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import threading
import time

from machine import facts

TURNS = int(os.environ.get("TURNS", 3))
TYPES = os.environ.get("TYPES", "f32 bf16").split()
PROMPT, NEW, LONG = 128, 128, 512
STREAMS = (1, 8, 16)
# `generate` of 16 rows says nothing that 8 do not, and takes a minute more.
PEER_BATCHES = (1, 8)
BUFFER_MIB = 512
draw = random.Random(1)


def prompts(count, length):
    return [[draw.randrange(1000, 40000) for _ in range(length)] for _ in range(count)]


class Peer:
    def __init__(self, python, model, dtype):
        command = [python, "benches/peers/generate_transformers.py", model, dtype]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.about = self.read()

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{' '.join(self.process.args)} ended")
        return json.loads(line)

    def ask(self, **asked):
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return self.read()

    def seconds(self, count, length, new):
        return self.ask(prompts=prompts(count, length), new=new)["seconds"]

    def end(self):
        self.process.stdin.close()
        self.process.wait()


class Engine:
    def __init__(self, program, model, dtype):
        self.file_bytes = sum(file.stat().st_size for file in pathlib.Path(model).glob("*.safetensors"))
        command = [program, "engine", "--model", model, "--dtype", dtype, "--listen", "127.0.0.1:0"]
        before = time.perf_counter()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        said = []
        for line in self.process.stderr:
            said.append(line)
            if "serving" in line and "http://" in line:
                break
        else:
            sys.exit(f"{' '.join(command)} ended: {''.join(said)}")
        self.started = time.perf_counter() - before
        self.host = said[-1].split("http://")[1].split()[0].split("/")[0]
        # What it says later must not fill the pipe.
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def generate(self, ids, new):
        """Asks for so many tokens of one prompt."""
        body = json.dumps({
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
        })
        connection = http.client.HTTPConnection(self.host, timeout=600)
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        assert answer.status == 200, text
        made = len(json.loads(text)["output_ids"])
        assert made == new, f"{made} tokens, not {new}"

    def seconds(self, count, length, new):
        """Returns how long so many streams together take."""
        failed = []

        def one(ids):
            try:
                self.generate(ids, new)
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=one, args=(ids,)) for ids in prompts(count, length)]
        before = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken = time.perf_counter() - before
        if failed:
            sys.exit(f"a stream failed: {failed[0]}")
        return taken

    def end(self):
        self.process.terminate()
        self.process.wait()


def say(figure, **found):
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}
    print(json.dumps({"figure": f"engine.{figure}", **rounded}), flush=True)


def measure(dtype, engine, peer):
    about = {"type": dtype, "peer": "transformers generate", **{f"peer_{key}": value for key, value in peer.about.items()}}
    # The first pass of each gets its memory from the system.
    engine.seconds(2, PROMPT, 8)
    peer.seconds(2, PROMPT, 8)
    ours, theirs, first, bandwidth = {}, {}, {"ours": [], "theirs": []}, []
    for _ in range(TURNS):
        bandwidth.append(peer.ask(bandwidth=BUFFER_MIB)["bytes_per_second"])
        for count in STREAMS:
            ours.setdefault(count, []).append(count * NEW / engine.seconds(count, PROMPT, NEW))
            if count in PEER_BATCHES:
                theirs.setdefault(count, []).append(count * NEW / peer.seconds(count, PROMPT, NEW))
        first["ours"].append(engine.seconds(1, LONG, 1))
        first["theirs"].append(peer.seconds(1, LONG, 1))
    best = {count: max(rates) for count, rates in ours.items()}
    for count, rate in best.items():
        found = {"streams": count, "prompt": PROMPT, "new": NEW, "tokens_per_second": rate}
        if count in theirs:
            peers = max(theirs[count])
            found |= {"peer_tokens_per_second": peers, "ratio": rate / peers}
        if count == 1:
            narrow = "amx_bf16" in facts()["features"]
            held = min(peer.about["weight_bytes"], engine.file_bytes) if narrow else peer.about["weight_bytes"]
            bound = max(bandwidth) / held
            found |= {"weight_bytes": held, "bound_tokens_per_second": bound, "share_of_bound": rate / bound}
            found |= {"read_gb_per_second": max(bandwidth) / 1e9}
        else:
            found |= {"times_one_stream": rate / best[1]}
        say("generate", **found, **about)
    ours, theirs = (statistics.median(first[who]) for who in ("ours", "theirs"))
    # Below 1 we are the quicker ones.
    say("first_token", prompt=LONG, seconds=ours, peer_seconds=theirs, time_ratio=ours / theirs, **about)
    say("start", seconds=engine.started, type=dtype)


def main():
    program, peer_python, model = sys.argv[1:]
    print(json.dumps({"machine": facts()}), flush=True)
    print("engine: NOT MEASURED: llama.cpp (its Python package comes as source, a long build)", file=sys.stderr)
    for dtype in TYPES:
        peer = Peer(peer_python, model, dtype)
        engine = Engine(program, model, dtype)
        try:
            measure(dtype, engine, peer)
        finally:
            engine.end()
            peer.end()


if __name__ == "__main__":
    main()
