"""Decoder layers of the Llama and Qwen shape in few launches.

Hugging Face's layer launches dozens of kernels, most of which move a row of numbers and do little
else: in a replayed pass of a small model they take most of the time. Here a norm, a rotation with
the cache write, and a gate are one kernel each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import unwrap
from threading import Lock
from typing import Any

from torch import Tensor, nn

from pillarattn.kernels.layer_ops import add_rms_norm, rotary_write, silu_mul
from pillarattn.patch.attention_function import attention_options
from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.current_pass import find_cache
from pillarattn.patch.fused_pools import ContiguousPools, FusedPools, OpenPools
from pillarattn.patch.joined_weights import JoinedWeights
from pillarattn.patch.model_parts import hooked, modules_of

# Layers whose forward is exactly the one below, by file and class.
KNOWN = {
    "transformers.models.llama.modeling_llama": "LlamaDecoderLayer",
    "transformers.models.mistral.modeling_mistral": "MistralDecoderLayer",
    "transformers.models.qwen2.modeling_qwen2": "Qwen2DecoderLayer",
    "transformers.models.qwen3.modeling_qwen3": "Qwen3DecoderLayer",
}
# Where their code must come from: some libraries put their own into the class.
SOURCES = ("torch", "transformers")
PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
GATE_LINEARS = ("gate_proj", "up_proj", "down_proj")
# Guards the switches of all models: a lock cannot be pickled.
_LOCK = Lock()


@dataclass
class FusedSwitch:
    """Puts fused code in front of a model's own while some pass wants it; threads share it.

    Which pass a call belongs to, its cache tells.

    Attributes:
        users: what runs fused, by the identity of its cache.
        replaced: modules with fused code in front.
    """

    users: dict[int, FusedLayers] = field(default_factory=dict)
    replaced: list[Any] = field(default_factory=list)

    @contextmanager
    def on(self, fused: FusedLayers) -> Iterator[None]:
        """Let the passes over the cache of `fused` run it inside."""
        with _LOCK:
            # Not all users need fuse the same: what one of them listens to, another leaves alone.
            for module in fused.modules:
                if not is_switch(vars(module).get("forward")):
                    module.forward = partial(self.dispatch, module, module.forward)
                    self.replaced.append(module)
            self.users[id(fused.cache)] = fused
        try:
            yield
        finally:
            with _LOCK:
                del self.users[id(fused.cache)]
                if not self.users:
                    for module in self.replaced:
                        vars(module).pop("forward", None)
                    self.replaced.clear()

    def dispatch(self, module: Any, original: Any, *arguments: Any, **kwargs: Any) -> Any:
        """Run a module's call, fused where it belongs to a pass that wants it."""
        fused = self.users.get(id(find_cache()))
        if fused is None or id(module) not in fused.own:
            return original(*arguments, **kwargs)
        return fused.run(module, original, *arguments, **kwargs)


class FusedLayers:
    """Runs the layers of one model over one cache with fused kernels, where it is switched on.

    Args:
        model: patched.
        pools: of the cache: passes that write to it are the ones meant; all others run the model's
            own code. A `PillarCache` stands for its `ContiguousPools`.
        switch: the model's.
        joined: weights side by side that an earlier run made of this model: filled anew, at the
            addresses that its recordings know. None: new ones are made where they are small.
        joins: whether there may be any, and whether the last product of a layer may add to the
            residual stream. Both round otherwise than separate products do.
        kernels: of the small ops: "auto", "reference" or "triton".

    Attributes:
        layers: those that are fused; none if one of them cannot be.
        last_norm: the norm after them, likewise, or None.
        own: the identities of both.
        ran: layers that ran fused since `active` was last entered.
    """

    def __init__(
        self,
        model: nn.Module,
        pools: FusedPools | PillarCache,
        switch: FusedSwitch,
        *,
        joined: JoinedWeights | None = None,
        joins: bool = True,
        kernels: str = "auto",
    ) -> None:
        self.pools = ContiguousPools(pools) if isinstance(pools, PillarCache) else pools
        self.cache: Any = self.pools.cache
        self.kernels = kernels
        self.ran = 0
        self._switch = switch
        self.layers = fusible_layers(model)
        self.last_norm = _last_norm(model) if self.layers else None
        self.own = set(map(id, self.modules))
        self._inside = [part for module in self.modules for part in module.modules()]
        self.joined = joined or JoinedWeights()
        self._groups = linear_groups(self.layers) if joins else []
        self._adds = joins
        self.refill()

    @property
    def modules(self) -> list[Any]:
        """What is replaced."""
        return [*self.layers, *([] if self.last_norm is None else [self.last_norm])]

    def goes_on(self, switch: FusedSwitch) -> bool:
        """Whether another run of the same code over the same cache may use this; it is refilled.

        Args:
            switch: the model's.
        """
        if switch is not self._switch or hooked(self._inside):
            return False
        self.refill()
        return True

    def refill(self) -> None:
        """Copy joined weights anew: the model's have been written to."""
        self.joined.fill(self._groups)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use the fused layers inside."""
        self.ran = 0
        self.pools.begin()
        with self._switch.on(self):
            yield
        self.pools.begin()

    def run(self, module: Any, original: Any, hidden: Tensor, *others: Any, **kwargs: Any) -> Any:
        """Compute what a module of the model is called for."""
        if module is not self.last_norm:
            return self._layer(module, original, hidden, *others, **kwargs)
        rows = hidden.reshape(-1, hidden.shape[-1])
        return self._norm(module, rows, None)[0].view_as(hidden)

    def _layer(
        self, layer: Any, original: Any, hidden_states: Tensor, *arguments: Any, **kwargs: Any
    ) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        turn = kwargs.get("position_embeddings")
        attention, opened = layer.self_attn, None
        if (
            cache is self.cache
            and not arguments
            # Its dropout is no part of the fused one.
            and not layer.training
            and turn is not None
            and turn[0].shape[-1] == attention.head_dim
        ):
            heads = attention.v_proj.out_features // attention.head_dim
            opened = self.pools.open(
                attention.layer_idx, hidden_states, heads=heads, dim=attention.head_dim
            )
        if opened is None:
            return original(hidden_states, *arguments, **kwargs)
        self.ran += 1
        batch, width, size = hidden_states.shape
        rows = hidden_states.reshape(-1, size)
        normed, _ = self._norm(layer.input_layernorm, rows, None)
        attended = self._attend(attention, normed, (batch, width), opened, kwargs)
        normed, total = self._norm(layer.post_attention_layernorm, attended, rows)
        mlp = layer.mlp
        both = self.joined.outputs([mlp.gate_proj, mlp.up_proj], normed)
        gated = silu_mul(both, implementation=self.kernels)
        return self._down(mlp.down_proj, gated, total).view(batch, width, size)

    def _attend(
        self,
        module: Any,
        normed: Tensor,
        shape: tuple[int, int],
        opened: OpenPools,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Return the output of a layer's attention, `[B * Q, H]`; its keys go to the cache."""
        (batch, width), index = shape, module.layer_idx
        turn = kwargs["position_embeddings"]
        cos, sin = (t.expand(batch, width, -1).reshape(batch * width, -1) for t in turn)
        norms = {}
        if hasattr(module, "q_norm"):
            norms = {
                "query_weight": module.q_norm.weight, "key_weight": module.k_norm.weight,
                "eps": module.q_norm.variance_epsilon,
            }  # fmt: skip
        linears = [module.q_proj, module.k_proj, module.v_proj]
        query = rotary_write(
            self.joined.outputs(linears, normed), cos, sin, slots=opened.slots,
            key_pool=opened.keys, value_pool=opened.values, implementation=self.kernels, **norms,
        )  # fmt: skip
        views = self.pools.advance(index, width)
        asked = {**kwargs, "scaling": module.scaling}
        asked.setdefault("sliding_window", getattr(module, "sliding_window", None))
        options = attention_options("sdpa", module, kwargs.get("attention_mask"), asked)
        heads = query.view(batch, width, -1, module.head_dim).transpose(1, 2)
        cache = self.cache
        out = cache.attention(heads, cache.layers[index], cache.step, index, options, views)
        attended: Tensor = module.o_proj(out.transpose(1, 2).reshape(batch * width, -1))
        return attended

    def _down(self, linear: nn.Linear, gated: Tensor, total: Tensor) -> Tensor:
        """Add the outputs of the last product to the residual stream, which is written to."""
        bias: Tensor | None = linear.bias
        if self._adds and bias is None and total.dtype == gated.dtype:
            return total.addmm_(gated, linear.weight.T)
        return total + linear(gated)

    def _norm(self, module: Any, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return add_rms_norm(
            hidden, residual, module.weight, eps=module.variance_epsilon,
            implementation=self.kernels,
        )  # fmt: skip


def fusible_layers(model: nn.Module) -> list[Any]:
    """Return a model's layers of a known shape; none if one of them cannot be fused."""
    found = [module for module in modules_of(model) if _is_known(module)]
    return found if all(map(_can_fuse, found)) else []


def linear_groups(layers: list[Any]) -> list[list[nn.Linear]]:
    """Return the linear layers that read the same rows, two groups a layer."""
    return [group for layer in layers for group in _groups(layer)]


def _last_norm(model: nn.Module) -> Any:
    """Return the norm that follows the layers, if it is as its class made it."""
    for module in model.modules():
        norm = getattr(module, "norm", None)
        if hasattr(module, "layers") and isinstance(norm, nn.Module):
            known = type(norm).__module__ in KNOWN and type(norm).__name__.endswith("RMSNorm")
            heard = norm._forward_hooks or norm._forward_pre_hooks or _is_replaced(norm)
            return norm if known and not heard else None
    return None


def _groups(layer: Any) -> list[list[nn.Linear]]:
    attention, mlp = layer.self_attn, layer.mlp
    return [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [mlp.gate_proj, mlp.up_proj],
    ]


def _is_known(module: nn.Module) -> bool:
    return KNOWN.get(type(module).__module__) == type(module).__name__


def _can_fuse(layer: Any) -> bool:
    """Whether a layer is as its class made it: plain parts, and nobody listens to them."""
    if set(dict(layer.named_children())) != set(PARTS) or hasattr(layer, "_hf_hook"):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linears = [getattr(attention, name) for name in LINEARS]
    linears += [getattr(mlp, name) for name in GATE_LINEARS]
    # A weight of another kind, quantised or sharded, has products of its own.
    is_plain = all(
        type(linear) is nn.Linear and type(linear.weight) is nn.Parameter for linear in linears
    )
    watched = any(
        module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook")
        for module in layer.modules()
    )
    act = mlp.act_fn
    is_silu = isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation"
    replaced = any(_is_replaced(module) for module in layer.modules())
    return is_plain and is_silu and not watched and not replaced


def _is_replaced(module: nn.Module) -> bool:
    """Whether somebody else than a `FusedSwitch` has given a module, or its class, a forward."""
    own = vars(module).get("forward")
    source = unwrap(type(module).forward).__module__
    return (own is not None and not is_switch(own)) or source.split(".")[0] not in SOURCES


def is_switch(forward: Any) -> bool:
    """Whether a forward is one that a `FusedSwitch` has given for a while."""
    return isinstance(getattr(getattr(forward, "func", None), "__self__", None), FusedSwitch)
