"""The peers of `oclaw advantage`: the same columns by pyarrow with numpy, and by polars.

    advantage_columns.py pyarrow|polars|polars-streaming IN.parquet OUT.parquet
    advantage_columns.py compare OURS.parquet THEIRS.parquet

Estimator `combine`, for a table in which every turn has a score and every hint one
candidate's log-probs. Writes with zstd 1, as oclaw does. What one would write in an
afternoon: none of the checks, no provenance, no durable rename.
"""

import sys

NEW = (
    "reward", "reward_source", "sample_kind", "sample_reason", "promoted",
    "loss_mask", "rl_advantages", "advantages", "advantage_error",
)


def by_pyarrow(source, target):
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table = pq.read_table(source).combine_chunks()
    column = lambda name: table.column(name).combine_chunks() if table.num_rows else table.column(name).chunk(0)
    explicit, score = column("reward_explicit"), column("score")
    reward = pc.coalesce(explicit, score).to_numpy(zero_copy_only=False).astype(np.float32)
    teacher = column("teacher_log_probs")
    hinted = teacher.is_valid().to_numpy(zero_copy_only=False)
    rollout = column("rollout_log_probs")
    lengths = np.diff(rollout.offsets.to_numpy())
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    old = rollout.flatten().to_numpy(zero_copy_only=False)
    taught = teacher.flatten().flatten().to_numpy(zero_copy_only=False)

    rewarded = reward != 0
    kinds = np.select(
        [hinted & rewarded, hinted, rewarded], ["opd+rl", "opd", "rl"], "none"
    )
    silent = kinds == "none"
    sessions = column("session_id").to_numpy(zero_copy_only=False)
    turns = column("turn").to_numpy()
    order = np.lexsort((turns, sessions))
    first = np.zeros(len(turns), bool)
    first[order] = np.concatenate([[True], sessions[order][1:] != sessions[order][:-1]])
    promoted = first & ~rewarded

    part = np.repeat(reward, lengths)
    advantages = part.copy()
    tokens = np.repeat(hinted, lengths)
    advantages[tokens] += taught - old[tokens]
    mask = np.repeat((~silent).astype(np.int8), lengths)
    reason = np.where(promoted, "promoted_without_signal", "judged_neutral, no_hint")
    new = {
        "reward": pa.array(reward),
        "reward_source": pa.array(np.full(len(reward), "judged")),
        "sample_kind": pa.array(kinds),
        "sample_reason": pa.array(reason, mask=~silent),
        "promoted": pa.array(promoted),
        "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(mask)),
        "rl_advantages": pa.ListArray.from_arrays(offsets, pa.array(part)),
        "advantages": pa.ListArray.from_arrays(pa.array(offsets), pa.array(advantages), mask=pa.array(silent)),
        "advantage_error": pa.nulls(len(reward), pa.string()),
    }
    for name, values in new.items():
        table = table.append_column(name, values)
    pq.write_table(table, target, compression="zstd", compression_level=1)


def polars_columns(frame):
    import polars as pl

    reward = pl.coalesce("reward_explicit", "score")
    hinted = pl.col("teacher_log_probs").is_not_null()
    rewarded = reward != 0
    tokens = pl.col("response_ids").list.len()
    distilled = pl.col("teacher_log_probs").list.first() - pl.col("rollout_log_probs")
    silent = ~hinted & ~rewarded
    first = pl.col("turn") == pl.col("turn").min().over("session_id")
    promoted = first & ~rewarded
    return frame.with_columns(
        reward=reward,
        reward_source=pl.lit("judged"),
        sample_kind=pl.when(hinted & rewarded).then(pl.lit("opd+rl")).when(hinted).then(pl.lit("opd"))
        .when(rewarded).then(pl.lit("rl")).otherwise(pl.lit("none")),
        sample_reason=pl.when(silent & promoted).then(pl.lit("promoted_without_signal"))
        .when(silent).then(pl.lit("judged_neutral, no_hint")),
        promoted=promoted,
        loss_mask=(~silent).cast(pl.Int8).repeat_by(tokens),
        rl_advantages=reward.repeat_by(tokens),
        advantages=pl.when(hinted).then(distilled + reward).when(rewarded).then(reward.repeat_by(tokens)),
        advantage_error=pl.lit(None, dtype=pl.String),
    )


def by_polars(source, target):
    import polars as pl

    frame = polars_columns(pl.read_parquet(source))
    frame.write_parquet(target, compression="zstd", compression_level=1)


def by_polars_streaming(source, target):
    import polars as pl

    frame = polars_columns(pl.scan_parquet(source))
    frame.sink_parquet(target, compression="zstd", compression_level=1)


def compare(ours, theirs):
    """Every column, old and new, value by value; types may differ in width."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    ours, theirs = pq.ParquetFile(ours), pq.ParquetFile(theirs)
    if ours.metadata.num_rows != theirs.metadata.num_rows:
        sys.exit(f"{ours.metadata.num_rows} rows against {theirs.metadata.num_rows}")
    schema = ours.schema_arrow
    missing = set(NEW) - set(schema.names) | set(schema.names) - set(theirs.schema_arrow.names)
    if missing:
        sys.exit(f"columns not on both sides: {sorted(missing)}")
    for field in schema:
        one = ours.read([field.name]).column(0).combine_chunks()
        other = theirs.read([field.name]).column(0).combine_chunks().cast(field.type)
        # Chunks of one column only: its whole is then one array.
        one = one.chunk(0) if isinstance(one, pa.ChunkedArray) else one
        other = other.chunk(0) if isinstance(other, pa.ChunkedArray) else other
        if not one.equals(other):
            row = next(row for row in range(len(one)) if one[row] != other[row])
            sys.exit(f"`{field.name}` differs in row {row}: {str(one[row])[:300]} against {str(other[row])[:300]}")


if __name__ == "__main__":
    what, *paths = sys.argv[1:]
    {
        "pyarrow": by_pyarrow,
        "polars": by_polars,
        "polars-streaming": by_polars_streaming,
        "compare": compare,
    }[what](*paths)
