"""The peer of local teacher scoring: the same sequences by Hugging Face transformers.

    score_transformers.py FILE SET MODEL TYPE TOP_K

Scores the set once per line read from standard input, and prints the seconds
and the mean log-prob of each sequence. Written with care, not as the first idea:
batches are sorted by length, the size of a batch is the best of several, and the
head runs on the response's rows only.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM

HEAD_ROWS = 512


def batches(order, size):
    return [order[start:start + size] for start in range(0, len(order), size)]


def score(model, sequences, size, top_k):
    order = sorted(range(len(sequences)), key=lambda place: len(sequences[place]["ids"]))
    means = [0.0] * len(sequences)
    for batch in batches(order, size):
        ids = [torch.tensor(sequences[place]["ids"]) for place in batch]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        lengths = torch.tensor([len(row) for row in ids])
        mask = (torch.arange(padded.shape[1])[None] < lengths[:, None]).long()
        # One sequence, or all of one length: no mask, the quicker way.
        mask = None if bool(mask.all()) else mask
        hidden = model.model(input_ids=padded, attention_mask=mask, use_cache=False).last_hidden_state
        for row, place in enumerate(batch):
            start = sequences[place]["start"]
            rows, own = hidden[row, start - 1:len(ids[row]) - 1], ids[row][start:]
            found = []
            for first in range(0, len(own), HEAD_ROWS):
                logits = model.lm_head(rows[first:first + HEAD_ROWS]).float()
                log_probs = logits.log_softmax(-1)
                found.append(log_probs.gather(1, own[first:first + HEAD_ROWS, None]))
                if top_k:
                    log_probs.topk(top_k)
            means[place] = float(torch.cat(found).mean())
    return means


def main():
    file, name, folder, dtype, top_k = sys.argv[1:]
    with open(file) as text:
        sequences = json.load(text)[name]
    dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        taken = {}
        for size in (1, 4, 16):
            before = time.perf_counter()
            score(model, sequences, size, int(top_k))
            taken[size] = time.perf_counter() - before
        size = min(taken, key=taken.get)
        import transformers
        print(json.dumps({
            "threads": torch.get_num_threads(), "batch": size,
            "torch": torch.__version__, "transformers": transformers.__version__,
        }), flush=True)
        for _ in sys.stdin:
            before = time.perf_counter()
            means = score(model, sequences, size, int(top_k))
            print(json.dumps({"seconds": time.perf_counter() - before, "means": means}), flush=True)


if __name__ == "__main__":
    main()
