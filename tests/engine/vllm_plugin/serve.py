"""Serves fixed prompts with vLLM on a CPU, in a process of its own: `serve.py MODEL JSON`.

JSON holds k (0: plain), s, prompts, new tokens, temperature and whether the entry point registers.
Prints one JSON line with tokens and what was drafted and accepted by position.
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
               "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}  # fmt: skip


def main(folder: str, asked: dict) -> None:
    from vllm import LLM, SamplingParams

    from pillarattn.engine.vllm_plugin import PROPOSER, register

    register()
    options = {}
    if asked["k"]:
        options = {
            "speculative_config": {
                "method": "custom_class",
                "model": PROPOSER,
                "num_speculative_tokens": asked["k"],
            },
            "additional_config": {"pillarattn": asked["options"]},
        }
    engine = LLM(
        model=folder, dtype="float32", max_model_len=asked.get("max_model_len", 512),
        enforce_eager=True, skip_tokenizer_init=True, max_num_seqs=4, async_scheduling=False,
        max_num_batched_tokens=asked.get("batched_tokens", 2048), disable_log_stats=False,
        **options,
    )  # fmt: skip
    sampling = SamplingParams(
        max_tokens=asked["new_tokens"], temperature=asked.get("temperature", 0.0), seed=1,
        detokenize=False, ignore_eos=True,
    )  # fmt: skip
    out = engine.generate([{"prompt_token_ids": p} for p in asked["prompts"]], sampling)
    found = {metric.name: metric for metric in engine.get_metrics()}
    by_position = found.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    drafted = found.get("vllm:spec_decode_num_draft_tokens")
    print(json.dumps({
        "tokens": [list(one.outputs[0].token_ids) for one in out],
        "drafted": drafted.value if drafted else 0,
        "accepted_by_position": by_position.values if by_position else [],
    }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
