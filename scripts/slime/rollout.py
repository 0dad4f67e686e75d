"""Feeds slime from oclaw's tables: a rollout function that generates nothing.

    --rollout-function-path rollout.generate_rollout

Reads finished Parquet shards that `oclaw advantage` has written, oldest first,
and returns each turn once as a `Sample`, with the ids and log-probs that the
serving engine gave. Needs pyarrow. See the README beside this file.
"""

import glob
import json
import logging
import math
import os
import time

import pyarrow.parquet as parquet

try:
    from slime.utils.types import Sample
except ImportError as error:  # The self-test brings a stand-in.
    raise ImportError("slime is not installed, or not on PYTHONPATH") from error

try:
    from slime.rollout.base_types import RolloutFnTrainOutput
except ImportError:
    RolloutFnTrainOutput = None

logger = logging.getLogger(__name__)

COLUMNS = [
    "session_id", "turn", "turn_id", "request_id", "choice", "created_at", "model",
    "weight_version", "messages", "tools", "response", "status", "prompt_ids",
    "response_ids", "rollout_log_probs", "untrainable_reason", "reward_explicit",
    "score", "teacher_log_probs", "reward", "loss_mask",
]
STATUS = {"complete": "completed", "truncated": "truncated", "aborted": "aborted", "failed": "failed"}


def shards(place):
    """Lists finished shards. Names that start with a dot are unfinished."""
    if os.path.isdir(place):
        found = glob.glob(os.path.join(glob.escape(place), "*.parquet"))
    else:
        found = glob.glob(place)
    return [path for path in found if not os.path.basename(path).startswith(".")]


def rows(place):
    """Returns all rows, oldest first."""
    found = []
    for path in shards(place):
        known = set(parquet.read_schema(path).names)
        table = parquet.read_table(path, columns=[name for name in COLUMNS if name in known])
        found.extend({**dict.fromkeys(COLUMNS), **row} for row in table.to_pylist())
    found.sort(key=lambda row: (row["created_at"], row["turn_id"]))
    return found


def teacher_of(row):
    """The first usable candidate, the one that `oclaw advantage` takes."""
    for candidate in row["teacher_log_probs"] or []:
        if candidate is None or len(candidate) != len(row["response_ids"]):
            continue
        if all(math.isfinite(value) for value in candidate):
            return candidate
    return None


def why_not(row, with_teacher):
    """Says why a row is no sample, or None. Nothing is padded to make it one."""
    if row["prompt_ids"] is None or row["response_ids"] is None:
        return "no_token_ids"
    if row["untrainable_reason"] is not None:
        return "untrainable"
    length = len(row["response_ids"])
    if length == 0:
        return "empty_answer"
    if worth(row) is None:
        return "no_reward"
    if not math.isfinite(worth(row)):
        return "reward_not_finite"
    if row["rollout_log_probs"] is None:
        return "no_log_probs"
    if any(value is None for value in row["rollout_log_probs"]):
        return "log_prob_gap"
    if len(row["rollout_log_probs"]) != length:
        return "log_probs_misaligned"
    if not all(math.isfinite(value) for value in row["rollout_log_probs"]):
        return "log_prob_not_finite"
    if row["loss_mask"] is not None and len(row["loss_mask"]) != length:
        return "loss_mask_misaligned"
    # An answer of tool calls alone has no text.
    content = json.loads(row["response"]).get("content")
    if content is not None and not isinstance(content, str):
        return "no_text_answer"
    if with_teacher and teacher_of(row) is None:
        return "no_teacher"
    return None


def worth(row):
    """The resolved reward, else a stated one, else the judge's majority."""
    for name in ("reward", "reward_explicit", "score"):
        if row[name] is not None:
            return row[name]
    return None


def sample_of(row, index, group, with_teacher):
    """Makes slime's Sample of a row."""
    sample = Sample()
    sample.index = index
    sample.group_index = group
    sample.prompt = json.loads(row["messages"])
    sample.tokens = row["prompt_ids"] + row["response_ids"]
    sample.response = json.loads(row["response"]).get("content") or ""
    sample.response_length = len(row["response_ids"])
    sample.reward = {"score": worth(row)}
    sample.loss_mask = row["loss_mask"] or [1] * len(row["response_ids"])
    sample.rollout_log_probs = row["rollout_log_probs"]
    sample.weight_versions = [row["weight_version"]] if row["weight_version"] else []
    sample.status = Sample.Status(STATUS[row["status"]])
    sample.remove_sample = False
    sample.metadata = {
        "turn_id": row["turn_id"],
        "session_id": row["session_id"],
        "turn": row["turn"],
        "request_id": row["request_id"],
        "choice": row["choice"],
        "model": row["model"],
    }
    if with_teacher:
        # An extra attribute, which survives slime's to_dict and from_dict.
        sample.teacher_log_probs = teacher_of(row)
    return sample


class Feed:
    """Hands out each turn once, in whole requests."""

    def __init__(self, place, with_teacher=False):
        self.place = place
        self.with_teacher = with_teacher
        self.taken = set()
        self.index = 0
        self.group = 0

    def groups(self, wanted, wait=0.0, poll=5.0):
        """Returns groups of samples that hold at least `wanted` samples."""
        end = time.monotonic() + wait
        while True:
            found, left = self._look(wanted)
            count = sum(len(group) for group in found)
            if count >= wanted:
                break
            if time.monotonic() >= end:
                raise RuntimeError(
                    f"{self.place}: {count} of {wanted} samples are there; left out: {left or 'none'}"
                )
            time.sleep(min(poll, max(0.0, end - time.monotonic())))
        samples = []
        for group in found:
            made = []
            for row in group:
                made.append(sample_of(row, self.index, self.group, self.with_teacher))
                self.taken.add(row["turn_id"])
                self.index += 1
            samples.append(made)
            self.group += 1
        return samples, left

    def _look(self, wanted):
        by_request, left = {}, {}
        for row in rows(self.place):
            if row["turn_id"] in self.taken:
                continue
            reason = why_not(row, self.with_teacher)
            if reason is None:
                by_request.setdefault(row["request_id"], []).append(row)
            else:
                left[reason] = left.get(reason, 0) + 1
        found, count = [], 0
        for group in by_request.values():
            if count >= wanted:
                break
            found.append(group)
            count += len(group)
        return found, left


_feeds = {}


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    """slime's rollout function. Settings come from `args` or the environment:
    `oclaw_table` (OCLAW_TABLE), a folder of shards, a file or a pattern;
    `oclaw_with_teacher` (OCLAW_WITH_TEACHER=1); `oclaw_wait` (OCLAW_WAIT), seconds.
    """
    if evaluation:
        raise NotImplementedError("oclaw's tables hold no evaluation prompts; use --eval-function-path")

    def setting(name, default):
        return getattr(args, name, None) or os.environ.get(name.upper()) or default

    place = setting("oclaw_table", None)
    if not place:
        raise ValueError("name the table by args.oclaw_table or OCLAW_TABLE")
    with_teacher = str(setting("oclaw_with_teacher", "0")).lower() in {"1", "true", "yes", "on"}
    feed = _feeds.setdefault((place, with_teacher), Feed(place, with_teacher))
    samples, left = feed.groups(args.global_batch_size, float(setting("oclaw_wait", 0)))
    count = sum(len(group) for group in samples)
    logger.info("rollout %s: %s samples in %s groups; left out: %s", rollout_id, count, len(samples), left)
    if RolloutFnTrainOutput is None:
        return samples
    metrics = {"rollout/oclaw_samples": count}
    metrics.update({f"rollout/oclaw_left_out_{reason}": n for reason, n in left.items()})
    return RolloutFnTrainOutput(samples=samples, metrics=metrics)
