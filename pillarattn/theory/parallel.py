"""More than one device: tensor parallelism, pipelines, and what they do to a speed-up.

A tensor-parallel rank holds 1/r of each layer's heads, of its MLP and of the cache, and runs the
same passes. Selections are local to KV heads, so speculation adds no traffic between ranks but for
two sums of activations a layer in each pass, which plain decoding has too: k + 1 passes of a round
pay their latency k + 1 times.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from pillarattn.theory.links import Link
from pillarattn.theory.model_shape import LayerShape, ModelShape
from pillarattn.theory.planner import Expectation, Workload, expect

# Bytes of an activation between layers, and of a logit where it is gathered.
ACTIVATION_BYTES = 2
# Sums of activations over the ranks: after attention and after the MLP.
SUMS_A_LAYER = 2
_HEADS = ("query_heads", "kv_heads", "stored", "read", "key_values", "attend_flops",
          "expanded", "expand_flops", "scan_flops")  # fmt: skip


def shard(shape: ModelShape, ranks: int) -> ModelShape:
    """Return what one of `ranks` tensor-parallel ranks holds of a model.

    Norms and routers, which every rank has whole, are too small to count.

    Raises:
        ValueError: KV heads do not divide by the ranks, or a layer keeps latents or a state, which
            transformers' plans do not split by heads.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks must be an integer >= 1, got {ranks!r}")
    if ranks == 1:
        return shape
    weights = shape.weights
    parts = {f.name: getattr(weights, f.name) for f in fields(weights)}
    for name in ("dense", "head", "idle", "expert"):
        parts[name] = -(-parts[name] // ranks)
    return replace(
        shape,
        name=f"{shape.name} / {ranks}",
        layers=tuple(_shard_layer(layer, ranks) for layer in shape.layers),
        weights=replace(weights, **parts),
    )


def _shard_layer(layer: LayerShape, ranks: int) -> LayerShape:
    if layer.kind == "none" and not layer.state:
        return layer
    if layer.state or layer.scanned or layer.expanded:
        raise ValueError(
            "tensor parallelism is counted for layers of whole KV heads only; this model keeps "
            "latents, indexer keys or recurrent states"
        )
    if layer.kv_heads % ranks or layer.query_heads % ranks:
        raise ValueError(
            f"{layer.kv_heads} KV heads and {layer.query_heads} query heads do not divide by "
            f"{ranks} ranks"
        )
    return replace(layer, **{name: getattr(layer, name) // ranks for name in _HEADS})


def pass_communication(shape: ModelShape, rows: float, *, ranks: int, link: Link) -> float:
    """Return the seconds that ranks spend on each other in one pass over `rows` tokens.

    Two sums a layer, one for the embedding that is split by vocabulary, and gathered logits of all
    rows. `shape` is the whole model.
    """
    if ranks == 1:
        return 0.0
    row_bytes = rows * shape.hidden * ACTIVATION_BYTES
    sums = SUMS_A_LAYER * len(shape.layers) + 1
    logits = rows * shape.vocab * ACTIVATION_BYTES
    return sums * link.all_reduce(row_bytes, ranks) + link.all_gather(logits, ranks)


@dataclass(frozen=True)
class ParallelExpectation:
    """What one (k, s) should give on several ranks.

    Attributes:
        ranks: devices that hold the model together.
        local: the expectation of one rank's share, as if the ranks never met.
        plain_seconds, round_seconds: of a plain step and a round, communication included.
        plain_communication, round_communication: seconds of it.
        speedup: plain over speculative time per token, on the same ranks.
    """

    ranks: int
    local: Expectation
    plain_seconds: float
    round_seconds: float
    plain_communication: float
    round_communication: float
    speedup: float


def expect_on_ranks(
    workload: Workload, *, ranks: int, link: Link, k: int, s: float, accepted: float
) -> ParallelExpectation:
    """Return what tensor parallelism over `ranks` devices gives; communication hides nothing.

    Args:
        workload: of the whole model; `hardware` is one device.
        ranks: devices, each of which holds all sequences' share of KV heads.
        link: between any two of them.
        k, s: the setting; k = 0 is plain decoding.
        accepted: drafts accepted per round.

    Raises:
        ValueError: the model's heads do not divide by the ranks.
    """
    whole = workload.shape
    local = expect(replace(workload, shape=shard(whole, ranks)), k=k, s=s, accepted=accepted)

    def talk(rows: float) -> float:
        return pass_communication(whole, rows, ranks=ranks, link=link)

    batch = workload.batch
    plain_talk = talk(batch)
    if workload.schedule == "lockstep":
        round_talk = k * talk(batch) + talk(batch * (k + 1))
    else:
        steps = k + (2 if workload.schedule == "delayed" else 1)
        round_talk = steps * talk(batch * (2 * k + 1) / steps)
    plain = local.plain_seconds + plain_talk
    spent = local.round_seconds + round_talk
    speedup = plain * (accepted + 1) / spent
    return ParallelExpectation(ranks, local, plain, spent, plain_talk, round_talk, speedup)


def pipeline_seconds(
    stage_seconds: float, *, stages: int, microbatches: int, hop_seconds: float = 0.0
) -> float:
    """Return the seconds in which a pipeline decodes one pass of every microbatch.

    A sequence's next pass needs the token of the last one, so that a microbatch comes back to the
    first stage only after it has gone through all: with fewer microbatches than stages, stages
    wait. Draft passes are passes like any other, so speculation does not change the wait itself.

    Args:
        stage_seconds: of one microbatch in the slowest stage.
        stages: devices that a token passes.
        microbatches: parts of the batch that are on their way at once.
        hop_seconds: of handing activations to the next stage.
    """
    for name, value in (("stages", stages), ("microbatches", microbatches)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    return max(stages, microbatches) * (stage_seconds + (hop_seconds if stages > 1 else 0.0))


def pipeline_bubble(stages: int, microbatches: int) -> float:
    """Return the share of the time that a stage waits: 1 - m/p with m < p microbatches, else 0."""
    return max(0.0, 1.0 - microbatches / stages)
