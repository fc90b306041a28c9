"""One model over several processes: each holds a part of its heads, and all emit the same tokens.

Run: torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py MODEL

MODEL is a folder or a hub name whose KV heads divide by the processes. One GPU a process, or CPUs.
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import pillarattn
from pillarattn.evaluation import worked_maths


def main(name: str, prompt_tokens: int = 800, new_tokens: int = 64) -> None:
    """Decode one prompt plainly and with drafts, on all ranks; the first one prints."""
    is_first = int(os.environ["RANK"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(name)
    # transformers starts the ranks' group and loads this rank's part of each layer.
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", tp_plan="auto").eval()
    inputs = tokenizer(worked_maths(prompt_tokens, tokenizer), return_tensors="pt")
    inputs = inputs.to(model.device)

    pillarattn.patch(model)
    pillar = pillarattn.SelfSpeculativeGenerator(k=8, s=0.05, min_budget=64)
    options = {"max_new_tokens": new_tokens, "do_sample": False}
    plain = model.generate(**inputs, **options)
    fast = model.generate(**inputs, **options, assistant=pillar)

    if is_first:
        print(tokenizer.decode(fast[0, inputs["input_ids"].shape[1] :]))
        print(pillar.stats)
        print(f"same tokens as plain decoding on {dist.get_world_size()} ranks:",
              plain.tolist() == fast.tolist())  # fmt: skip
    # A rank that ends while its group still lets go of a tensor aborts: all leave together.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
    sys.stdout.flush()
    # Threads of the group may outlive it, and then abort an interpreter that ends in order.
    os._exit(0)
