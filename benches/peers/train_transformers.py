"""The peers of a training step: the same batch by Hugging Face transformers.

    train_transformers.py FILE MODEL TYPE plain|tuned

Trains a step per line read from standard input (a number of copies of the batch),
and prints its figures. `plain`: micro-batches of four in the order of the file,
padded, logits of every position. `tuned`: sorted by length, micro-batches of the
size that is quickest here, logits of the answers' positions only. bf16 is autocast
over f32 weights, so that small updates are not lost.
"""

import json
import resource
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def advantages(sample, settings):
    old, teacher = (torch.tensor(sample[key]) for key in ("old_log_probs", "teacher_log_probs"))
    return settings["w_opd"] * (teacher - old) + settings["w_rl"] * sample["score"]


def losses(log_probs, sample, settings):
    """The mean loss of one sample's trained tokens."""
    old, advantage = torch.tensor(sample["old_log_probs"]), advantages(sample, settings)
    ratio = (log_probs - old).exp()
    low, high = 1 - settings["eps_low"], 1 + settings["eps_high"]
    token = torch.maximum(-ratio * advantage, -ratio.clamp(low, high) * advantage)
    mask = torch.tensor(sample["loss_mask"], dtype=torch.float32)
    return (token * mask).sum() / mask.sum()


def micro_batch(model, samples, settings, tuned):
    rows = [torch.tensor(sample["prompt_ids"] + sample["response_ids"]) for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    # One sequence, or all of one length: no mask, the quicker way.
    mask = None if tuned and bool(mask.all()) else mask
    starts = [len(sample["prompt_ids"]) for sample in samples]
    parts = []
    if tuned:
        hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        picked = torch.cat([hidden[at, start - 1:len(row) - 1] for at, (start, row) in enumerate(zip(starts, rows))])
        own = torch.cat([row[start:] for start, row in zip(starts, rows)])
        loss = torch.nn.functional.cross_entropy(model.lm_head(picked).float(), own, reduction="none")
        parts = list((-loss).split([len(row) - start for start, row in zip(starts, rows)]))
    else:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
        log_probs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        parts = [log_probs[at, start - 1:len(row) - 1] for at, (start, row) in enumerate(zip(starts, rows))]
    return sum(losses(part, sample, settings) for part, sample in zip(parts, samples))


def gradients(model, samples, settings, size, tuned, dtype):
    if tuned:
        samples = sorted(samples, key=lambda it: len(it["prompt_ids"]) + len(it["response_ids"]))
    total = 0.0
    for start in range(0, len(samples), size):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
            loss = micro_batch(model, samples[start:start + size], settings, tuned) / len(samples)
        loss.backward()
        total += float(loss)
    return total


def main():
    file, folder, dtype, form = sys.argv[1:]
    with open(file) as text:
        settings = json.load(text)
    samples, tuned = settings["samples"], form == "tuned"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=settings["lr"], eps=settings["adam_eps"],
        betas=tuple(settings["betas"]), weight_decay=settings["weight_decay"], fused=tuned,
    )
    size = 4
    if tuned:
        taken = {}
        few = sorted(samples, key=lambda it: len(it["prompt_ids"]) + len(it["response_ids"]))[6:10]
        for size in (1, 1, 2, 4):
            before = time.perf_counter()
            gradients(model, few, settings, size, tuned, dtype)
            taken[size] = time.perf_counter() - before
        size = min(taken, key=taken.get)
    import transformers
    print(json.dumps({
        "threads": torch.get_num_threads(), "micro_batch": size,
        "torch": torch.__version__, "transformers": transformers.__version__,
    }), flush=True)
    for line in sys.stdin:
        batch = samples * int(line)
        before = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = gradients(model, batch, settings, size, tuned, dtype)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_grad"])
        optimizer.step()
        print(json.dumps({
            "seconds": time.perf_counter() - before, "loss": loss, "gradient_norm": float(norm),
            "tokens": sum(len(it["prompt_ids"]) + len(it["response_ids"]) for it in batch),
            "resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }), flush=True)


if __name__ == "__main__":
    main()
