"""Checks rollout.py against a table, with a stand-in for slime's own types.

    python3 selftest.py TABLE EXPORTED.jsonl

EXPORTED.jsonl is what `oclaw export --to slime TABLE` wrote: both ways must give
the same samples.
"""

import dataclasses
import enum
import json
import sys
import types


class Status(enum.Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclasses.dataclass
class Sample:
    """The fields that this project uses, named as in slime/utils/types.py."""

    group_index: int | None = None
    index: int | None = None
    prompt: object = ""
    tokens: list = dataclasses.field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: object = None
    loss_mask: list | None = None
    weight_versions: list = dataclasses.field(default_factory=list)
    rollout_log_probs: list | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict = dataclasses.field(default_factory=dict)


Sample.Status = Status


@dataclasses.dataclass
class RolloutFnTrainOutput:
    samples: list
    metrics: dict | None = None


def stand_in(name, **members):
    module = types.ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module


def close(a, b):
    return len(a) == len(b) and all(abs(x - y) < 1e-6 for x, y in zip(a, b))


def main(table, exported):
    for name in ("slime", "slime.utils", "slime.rollout"):
        stand_in(name)
    stand_in("slime.utils.types", Sample=Sample)
    stand_in("slime.rollout.base_types", RolloutFnTrainOutput=RolloutFnTrainOutput)
    import rollout

    with open(exported, encoding="utf-8") as lines:
        expected = {line["metadata"]["turn_id"]: line for line in map(json.loads, lines)}
    with_teacher = all("teacher_log_probs" in line for line in expected.values())
    args = types.SimpleNamespace(
        oclaw_table=table, oclaw_with_teacher=with_teacher, global_batch_size=len(expected)
    )
    output = rollout.generate_rollout(args, 0, None)
    found = [sample for group in output.samples for sample in group]
    assert len(found) == len(expected) == output.metrics["rollout/oclaw_samples"]
    for sample in found:
        line = expected.pop(sample.metadata["turn_id"])
        for name in ("prompt", "tokens", "response", "response_length", "loss_mask", "weight_versions"):
            assert getattr(sample, name) == line[name], name
        assert sample.status.value == line["status"]
        assert abs(sample.reward["score"] - line["reward"]["score"]) < 1e-6
        assert close(sample.rollout_log_probs, line["rollout_log_probs"])
        if with_teacher:
            assert close(sample.teacher_log_probs, line["teacher_log_probs"])
        assert len(sample.tokens) > sample.response_length == len(sample.loss_mask)
    assert not expected
    for group in output.samples:
        assert len({sample.group_index for sample in group}) == 1
        assert len({sample.metadata["request_id"] for sample in group}) == 1
    # Each turn is handed out once; a second batch is not there.
    try:
        rollout.generate_rollout(args, 1, None)
    except RuntimeError as error:
        assert "0 of" in str(error), error
    else:
        raise AssertionError("turns were handed out twice")
    print(f"{len(found)} samples agree")


if __name__ == "__main__":
    main(*sys.argv[1:])
