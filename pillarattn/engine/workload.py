"""What a simulation runs, and on what: many requests of uneven length, and a machine in figures."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A device, its host and a model; the defaults are Qwen3-8B on one H200.

    Attributes:
        kv_tokens: tokens that the pool holds.
        kv_bytes: bytes of one token, over all layers.
        weight_bytes: bytes of weights read in each step.
        bandwidth: bytes a second of device memory.
        flops: FLOPs a second of matrix products.
        link: bytes a second to the host, and as many back at the same time.
    """

    kv_tokens: int = 829_000
    kv_bytes: int = 147_456
    weight_bytes: float = 15.14e9
    bandwidth: float = 4.657e12
    flops: float = 788e12
    link: float = 55e9

    def step_seconds(self, rows: int, kv_read: float) -> float:
        """Return the time of a step of `rows` rows that reads `kv_read` tokens' keys and values."""
        # Two FLOPs for each weight and row; a weight has two bytes.
        products = max(self.weight_bytes / self.bandwidth, self.weight_bytes * rows / self.flops)
        return products + kv_read * self.kv_bytes / self.bandwidth


@dataclass(frozen=True)
class Workload:
    """Requests that all wait at the start, with outputs of log-normal length.

    Attributes:
        requests: how many.
        prompt: tokens of each prompt.
        mean, deviation: of the output lengths before the cut, in tokens.
        max_tokens: where outputs are cut; what `reserve` must reckon with.
        max_batch: requests on the device at a time.
        k: tokens drafted per round.
        s: share of the context that a draft reads.
        accept: chance of a draft to be accepted if those before it were.
        hot_share: share of a request that its drafts read between two verify passes, in blocks as
            they are moved: what may leave without stopping it is the rest.
        chunk: tokens that move at a time.
        lead: drafts before the verify pass at which what has left is called back.
        seed: of lengths and acceptance.
    """

    requests: int = 600
    prompt: int = 140
    mean: float = 3000.0
    deviation: float = 1800.0
    max_tokens: int = 8192
    max_batch: int = 128
    k: int = 8
    s: float = 0.05
    accept: float = 0.9416
    hot_share: float = 0.5
    chunk: int = 1024
    lead: int = 2
    seed: int = 0

    def lengths(self) -> list[int]:
        """Return the output length of each request."""
        draw = random.Random(self.seed)
        sigma = math.sqrt(math.log(1 + (self.deviation / self.mean) ** 2))
        mu = math.log(self.mean) - sigma**2 / 2
        drawn = (round(draw.lognormvariate(mu, sigma)) for _ in range(self.requests))
        return [min(max(n, 1), self.max_tokens) for n in drawn]
