"""What one rank of a tensor-parallel run does; `torchrun rank_script.py FOLDER` starts it.

It reads models from FOLDER, decodes every case of `cases.py`, and writes `rank-N.json` there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pillarattn
from tests.parallel.cases import CASES, PROMPT_LENGTH, decode, prompts


class StopsOnFirstRank(StoppingCriteria):
    """Stands for a clock: only the first rank finds that it is time."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        late = dist.get_rank() == 0 and input_ids.shape[1] >= PROMPT_LENGTH + 7
        return torch.full((input_ids.shape[0],), late, device=input_ids.device)


def load(folder: Path, **options: Any) -> Any:
    options = options or {"tp_plan": "auto"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def refused(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def gathered(folder: Path) -> Any:
    """Load a model whose plan leaves attention whole: what the refusal tells users to do."""
    from transformers.distributed import DistributedConfig

    place = "model.layers.*.self_attn"
    plan = dict.fromkeys((f"{place}.{n}_proj" for n in "qkv"), "colwise_gather_output")
    plan[f"{place}.o_proj"] = "rowwise_split_input"
    return load(folder, distributed_config=DistributedConfig(tp_size=2, tp_plan=plan))


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {}
    models = {}
    for family in sorted({case.family for case in CASES}):
        models[family] = model = pillarattn.patch(load(folder / family))
        found[f"{family}/dense_reason"] = model.pillarattn_record.dense_reason
        ids = prompts(model.device)
        with torch.no_grad():
            found[f"{family}/logits"] = model(ids).logits.double().sum(dim=-1).tolist()
    for case in CASES:
        # What a rank's own generator does must not matter; the first one's seed is the case's.
        torch.manual_seed(5 + 100 * rank)
        found[case.name] = decode(case, models[case.family])
    model = models["llama"]
    ids = prompts(model.device)
    assistant = pillarattn.SelfSpeculativeGenerator(k=3, s=0.5)
    out = model.generate(
        ids, max_new_tokens=4, do_sample=False, assistant=assistant, return_dict_in_generate=True
    )
    cache = getattr(out, "cache", None) or out.past_key_values
    found["cache heads"] = [layer.keys.shape[1] for layer in cache.layers]
    found["clock"] = model.generate(
        ids,
        max_new_tokens=30,
        do_sample=False,
        assistant=assistant,
        stopping_criteria=StoppingCriteriaList([StopsOnFirstRank()]),
    ).tolist()
    # Each rank has a clock of its own; what the first one makes of it holds for all.
    gated = pillarattn.SelfSpeculativeGenerator(k="auto", s="auto", min_budget=4)
    options = {"max_new_tokens": 90, "do_sample": False}
    found["gate"] = {
        "plain": model.generate(ids, **options).tolist(),
        "tokens": model.generate(ids, **options, assistant=gated).tolist(),
        "decisions": gated.stats.decisions,
        "accepted": gated.stats.accepted_per_round,
    }
    found["other prompts"] = refused(
        lambda: model.generate(ids + rank, max_new_tokens=4, do_sample=False, assistant=assistant)
    )
    found["three KV heads"] = refused(lambda: pillarattn.patch(load(folder / "three")))
    whole = pillarattn.patch(gathered(folder / "three"))
    found["three KV heads, gathered"] = whole.generate(
        ids, max_new_tokens=12, do_sample=False, assistant=assistant
    ).tolist()
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    # A rank that ends while its group still lets go of a tensor aborts: all leave together.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
