"""What runs while people talk: an engine alone, or the whole loop."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import threading
import time
import urllib.request

CONFIG = """
seed = {seed}
[engines.policy]
model = {model}
url = "http://{engine}"
[engine]
dtype = "f32"
[serve]
listen = "{front}"
shard-age = "500ms"
[judge]
rules = ""
poll = "200ms"
[hint]
from-feedback = true
poll = "200ms"
[teacher-lp]
topk = {topk}
poll = "200ms"
# Nothing is asked twice in a run, and each policy's files would be read for a hash.
no-cache = true
{teacher}
[advantage]
estimator = "{estimator}"
poll = "200ms"
{advantage}
[train]
estimator = "{estimator}"
dtype = "f32"
keep = 2
poll = "200ms"
{train}
[sync-weights]
poll = "200ms"
[loop]
run = "run"
"""
# Settings that are not the trainer's, and those that `advantage` has, too.
NOT_TRAINED = {"topk", "teacher", "round"}
OF_ADVANTAGE = {"distill-clip", "w-opd", "w-rl"}
READY = 300
DRAIN = 180


def lines(settings, wanted):
    return "\n".join(f"{name} = {json.dumps(value)}" for name, value in settings.items() if wanted(name))


def address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def environment():
    return {name: value for name, value in os.environ.items() if not name.startswith("OCLAW_")}


class Child:
    """A process that answers at an address."""

    def begin(self, command, folder, ready):
        with open(folder / "talk.log", "ab") as talk:
            self.process = subprocess.Popen(
                command, cwd=folder, stdout=talk, stderr=talk, stdin=subprocess.DEVNULL, env=environment()
            )
        end = time.monotonic() + READY
        while True:
            try:
                urllib.request.urlopen(ready, timeout=5).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > end:
                    self.end()
                    raise RuntimeError(f"{command[1]} did not start: {(folder / 'talk.log').read_text()[-2000:]}") from None
                time.sleep(0.2)

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(DRAIN)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()


class Engine(Child):
    def __init__(self, options, model, folder):
        where = address()
        self.url = f"http://{where}"
        command = [options.program, "engine", "--model", str(model), "--listen", where, "--dtype", "f32"]
        self.begin(command, folder, f"{self.url}/health")


class Loop(Child):
    def __init__(self, options, folder, estimator, seed, settings):
        front, engine = address(), address()
        self.folder, self.front = folder, f"http://{front}"
        self.over, self.watch = threading.Event(), None
        teacher = ""
        if settings.get("teacher") == "ema":
            name = folder / "teacher"
            name.symlink_to(options.model)
            teacher = f"model = {json.dumps(str(name))}"
            self.watch = threading.Thread(target=self.change_teacher, args=(name,), daemon=True)
        text = CONFIG.format(
            model=json.dumps(str(options.model)), engine=engine, front=front, estimator=estimator, seed=seed,
            topk=settings.get("topk", 0), teacher=teacher,
            advantage=lines(settings, lambda name: name in OF_ADVANTAGE),
            train=lines(settings, lambda name: name not in NOT_TRAINED),
        )
        (folder / "oclaw.toml").write_text(text)
        self.begin([options.program, "loop", "oclaw.toml"], folder, f"{self.front}/readyz")
        if self.watch:
            self.watch.start()

    def change_teacher(self, name):
        """Lets the teacher's name lead to the moving average as soon as there is one: before
        the first step there is only the start model."""
        average = self.folder / "run/policy/latest/ema"
        while not self.over.wait(0.2):
            if (average / "config.json").exists():
                new = name.with_name("teacher.new")
                new.symlink_to(average)
                new.replace(name)
                return

    def end(self):
        self.over.set()
        super().end()

    def steps(self):
        """The trainer's record of each step."""
        metrics = pathlib.Path(self.folder, "run/metrics.jsonl")
        return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []

    def policy(self):
        """The folder of the newest policy."""
        newest = pathlib.Path(self.folder, "run/policy/latest").resolve()
        if not newest.is_dir():
            raise RuntimeError("no policy was made")
        return newest
