"""The peer of the embedded engine: `generate` of Hugging Face transformers.

    generate_transformers.py MODEL TYPE

Reads one JSON object per line: `prompts`, lists of ids of one length, and `new`, how many
tokens each is to get; prints the seconds that took. `{"bandwidth": MIB}` reads so much
memory with all threads and prints the bytes per second.
"""

import json
import sys
import time

import torch
import transformers

READ = 5


def bandwidth(mib):
    numbers = torch.ones(mib * 2**20 // 4)
    taken = []
    for _ in range(READ + 1):
        before = time.perf_counter()
        numbers.sum()
        taken.append(time.perf_counter() - before)
    return numbers.numel() * 4 / min(taken[1:])


def main():
    folder, dtype = sys.argv[1:]
    dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    print(json.dumps({
        "threads": torch.get_num_threads(), "weight_bytes": weights,
        "torch": torch.__version__, "transformers": transformers.__version__,
    }), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "bandwidth" in asked:
            print(json.dumps({"bytes_per_second": bandwidth(asked["bandwidth"])}), flush=True)
            continue
        ids, new = torch.tensor(asked["prompts"]), asked["new"]
        before = time.perf_counter()
        with torch.inference_mode():
            # An end that the model would like is no end: all make as many tokens.
            made = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                min_new_tokens=new, max_new_tokens=new, pad_token_id=0,
            )
        seconds = time.perf_counter() - before
        assert made.shape[1] == ids.shape[1] + new, made.shape
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
