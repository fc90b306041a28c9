"""Recurrent and convolution layers: how much state one sequence keeps, and how many weights."""

from __future__ import annotations

from pillarattn.theory.config_fields import ConfigFields


def state_layer(config: ConfigFields) -> tuple[int, int] | None:
    """Return values of state per sequence and parameters of one recurrent layer.

    The state is the recurrent matrix plus the window of its short convolution. Parameters count
    matrices only. None where no rule knows the family: its state is then left out, and the shape
    says so.
    """
    for rule in (_delta_rule, _kimi_delta, _mamba2, _mamba1, _lightning):
        found = rule(config)
        if found is not None:
            return found
    return None


def conv_layer(config: ConfigFields) -> tuple[int, int]:
    """Return state and parameters of a gated short convolution (LFM2)."""
    hidden, taps = config.need("hidden"), config.get_int("conv_L_cache", 3)
    return hidden * taps, hidden * (4 * hidden + taps)


def _delta_rule(config: ConfigFields) -> tuple[int, int] | None:
    """Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo hybrid): one key-by-value matrix a value head."""
    heads = config.get_int("linear_num_value_heads", 0)
    if not heads:
        return None
    key_dim, value_dim = config.need("linear_key_head_dim"), config.need("linear_value_head_dim")
    keys, values = config.need("linear_num_key_heads") * key_dim, heads * value_dim
    mixed, taps = 2 * keys + values, config.get_int("linear_conv_kernel_dim", 4)
    state = heads * key_dim * value_dim + mixed * taps
    projections = config.need("hidden") * (mixed + values + 2 * heads + values)
    return state, projections + mixed * taps


def _kimi_delta(config: ConfigFields) -> tuple[int, int] | None:
    """Kimi delta attention: as many key as value heads, and low-rank gates."""
    heads, dim = config.get_int("linear_num_heads", 0), config.get_int("linear_head_dim", 0)
    if not heads or not dim:
        return None
    hidden, taps, width = config.need("hidden"), config.get_int("linear_conv_kernel_dim", 4), 0
    width = heads * dim
    gates = 2 * (hidden * dim + dim * width) + hidden * heads
    return heads * dim * dim + 3 * width * taps, 4 * hidden * width + gates + 3 * width * taps


def _mamba2(config: ConfigFields) -> tuple[int, int] | None:
    """Mamba-2 (Bamba, Nemotron-H, Zamba2, Granite hybrid, Falcon-H1): one matrix a head."""
    heads = _first(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    dim = _first(config, "mamba_d_head", "mamba_head_dim", "mamba_headdim")
    if config.model_type == "mamba2":
        heads, dim = config.need("heads"), config.need("head_dim")
    if not heads or not dim:
        return None
    states = _first(config, "mamba_d_state", "ssm_state_size", "state_size")
    groups = _first(config, "mamba_n_groups", "mamba_ngroups", "n_groups") or 1
    taps = _first(config, "mamba_d_conv", "conv_kernel") or 4
    inner, mixed = heads * dim, heads * dim + 2 * groups * states
    projections = config.need("hidden") * (inner + mixed + heads + inner)
    return inner * states + mixed * taps, projections + mixed * taps


def _mamba1(config: ConfigFields) -> tuple[int, int] | None:
    """Mamba (Jamba, FalconMamba): one row of states a channel."""
    states = _first(config, "mamba_d_state", "state_size")
    if not states:
        return None
    hidden, taps = config.need("hidden"), _first(config, "mamba_d_conv", "conv_kernel") or 4
    inner = hidden * (_first(config, "mamba_expand", "expand") or 2)
    rank = _first(config, "mamba_dt_rank", "time_step_rank") or -(-hidden // 16)
    matrices = hidden * 3 * inner + inner * (rank + 2 * states) + rank * inner + inner * states
    return inner * (states + taps), matrices + inner * taps


def _lightning(config: ConfigFields) -> tuple[int, int] | None:
    """Lightning attention (MiniMax): one head_dim by head_dim matrix a query head."""
    if not config.model_type.startswith("minimax"):
        return None
    heads, hidden = config.need("heads"), config.need("hidden")
    dim = config.get_int("head_dim", hidden // heads)
    return heads * dim * dim, 5 * hidden * heads * dim


def _first(config: ConfigFields, *names: str) -> int:
    """Return the first field that is a number, 0 where none is."""
    return next((found for name in names if (found := config.get_int(name, 0))), 0)
