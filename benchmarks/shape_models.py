"""Models of named shapes with random weights, and the strongest plain decoding there is for them.

Times of passes are those of the real model of that shape, text and acceptance are not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.round_profile import SHAPES as LLAMA_SHAPES
from pillarattn.evaluation.environment import machine
from pillarattn.patch.compat import AttentionInterface
from pillarattn.theory.known_models import KNOWN_MODELS

_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
# Token ids are even in number: the engine's replay makes a wrong token by the last bit.
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "model_type": "qwen3", **LLAMA_SHAPES["8b"],
        "rope_parameters": _ROPE,
    },
    "1.7b": {**KNOWN_MODELS["Qwen3-1.7B"], "rope_parameters": _ROPE},
    "smollm2": {"model_type": "llama", **LLAMA_SHAPES["smollm2"]},
    "tiny": {
        "model_type": "qwen3", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    },
}  # fmt: skip
COMPILE_MODES = ("default", "max-autotune-no-cudagraphs", "none")
# The name under which attention over the static cache is registered.
IN_PLACE = "benchmark_in_place"
WARM_STEPS = 3
TOP_KERNELS = 8
# Kernels of attention of the engine's plain step.
ATTENTION = ("mixed_kernel", "combine_listed_kernel")


def random_model(shape: str, device: torch.device) -> Any:
    """Return a model of a named shape with random weights, made where it stays.

    In bf16 on a GPU, in fp32 on a CPU.
    """
    fields = dict(SHAPES[shape])
    config = AutoConfig.for_model(
        fields.pop("model_type"), **fields, max_position_embeddings=65536, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def kv_bytes_per_token(model: Any) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    config = model.config
    per_layer = 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    return int(config.num_hidden_layers * per_layer)


def free_bytes(device: torch.device) -> float:
    """Return the memory that the next allocations may take."""
    gc.collect()
    if device.type != "cuda":
        return float(machine()["memory_bytes"] or float("inf"))
    torch.cuda.empty_cache()
    return float(torch.cuda.mem_get_info(device)[0])


def wait(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class CompiledStep:
    """One plain step of a whole batch: `torch.compile` and one CUDA graph over a static cache.

    The model's own layers run; each writes its new keys and values to a slot of a cache that stays
    where it is, and attends by PyTorch's attention without a mask. Every replay reads the whole
    cache, writes the last slot and takes the likeliest token: no host work but the replay is left.

    Args:
        model: not patched.
        batch, length: rows, and tokens of each in the cache.
        mode: of `torch.compile`; "none" leaves it out.
    """

    def __init__(self, model: Any, *, batch: int, length: int, mode: str) -> None:
        config, self.device = model.config, model.device
        shape = batch, config.num_key_value_heads, length, config.head_dim
        options = {"dtype": model.dtype, "device": self.device}
        self._held = [
            (torch.empty(shape, **options).normal_(), torch.empty(shape, **options).normal_())
            for _ in range(config.num_hidden_layers)
        ]
        self._last = torch.tensor([length - 1], device=self.device)
        self._ids = torch.ones(batch, 1, dtype=torch.int64, device=self.device)
        self._places = self._last.expand(batch, 1).contiguous()
        self._model, self._mode = model, mode

    @torch.no_grad()
    def run(self, steps: int, profiled: int) -> dict[str, Any]:
        """Compile, record and time `steps` replays, and look at the kernels of a few more."""
        with self._attention():
            begun = perf_counter()
            step = self._recorded()
            ready = perf_counter() - begun
            times = [_seconds(step, self.device) for _ in range(WARM_STEPS + steps)][WARM_STEPS:]
            together = _seconds(lambda: [step() for _ in range(steps)], self.device)
            ran = kernels(lambda: [step() for _ in range(profiled)], profiled, self.device)
        step_ms = 1000 * median(times)
        return {
            "tokens_per_second": len(self._ids) / median(times), "step_ms": step_ms,
            "mean_step_ms": 1000 * together / steps, "most_step_ms": 1000 * max(times),
            "tokens_per_step": len(self._ids), "steps": steps, "compile_mode": self._mode,
            "compile_seconds": ready, **ran,
            "busy_share": ran["busy_ms"] / step_ms if ran["busy_ms"] else None,
        }  # fmt: skip

    def _next(self, ids: Tensor, places: Tensor) -> Tensor:
        logits = self._model(input_ids=ids, position_ids=places, use_cache=False).logits
        best: Tensor = logits[:, -1:].argmax(dim=-1)
        return best

    def _recorded(self) -> Callable[[], None]:
        """Return what runs one step."""
        compiled: Callable[[Tensor, Tensor], Tensor] = self._next
        if self._mode != "none":
            torch._dynamo.reset()
            compiled = torch.compile(self._next, mode=self._mode, fullgraph=True, dynamic=False)

        def step() -> None:
            self._ids.copy_(compiled(self._ids, self._places))

        if self.device.type != "cuda":
            step()
            return step
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_STEPS):
                step()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """Let the model attend over the static cache; a name without a mask of its own has none."""
        held, last = self._held, self._last

        def attend(
            module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float,
            **_: Any,
        ) -> tuple[Tensor, None]:  # fmt: skip
            keys, values = held[module.layer_idx]
            keys.index_copy_(2, last, key)
            values.index_copy_(2, last, value)
            out = scaled_dot_product_attention(query, keys, values, scale=scaling, enable_gqa=True)
            return out.transpose(1, 2), None

        AttentionInterface.register(IN_PLACE, attend)
        before = self._model.config._attn_implementation
        self._model.config._attn_implementation = IN_PLACE
        try:
            yield
        finally:
            self._model.config._attn_implementation = before

    def free(self) -> None:
        """Let the memory go, which compiled code and the registered attention hold too."""
        self._held.clear()
        torch._dynamo.reset()


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    wait(device)
    begun = perf_counter()
    work()
    wait(device)
    return perf_counter() - begun


def kernels(work: Callable[[], object], steps: int, device: torch.device) -> dict[str, Any]:
    """Return milliseconds of kernels a step, and the first of them: name, milliseconds, calls.

    Without a GPU, or without steps, there are none.
    """
    if not steps:
        return {"busy_ms": None, "attention_ms": None, "launches": 0, "kernels": []}
    is_cuda = device.type == "cuda"
    kind = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        work()
        wait(device)
    times = [
        (one.key[:90], one.self_device_time_total / 1000 / steps, one.count / steps)
        for one in profiler.key_averages()
        if one.self_device_time_total > 0
    ]
    busy = sum(time for _, time, _ in times)
    attention = sum(time for name, time, _ in times if any(n in name for n in ATTENTION))
    return {
        "busy_ms": busy or None, "attention_ms": attention or None,
        "launches": sum(count for _, _, count in times),
        "kernels": sorted(times, key=lambda one: -one[1])[:TOP_KERNELS],
    }  # fmt: skip
