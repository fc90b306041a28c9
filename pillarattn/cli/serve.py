"""`pillarattn serve`: an OpenAI-compatible server over one engine."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any

import typer

from pillarattn import Engine, EngineConfig, PillarConfig, patch
from pillarattn.cli.console import human_console, readable_errors
from pillarattn.cli.option_types import Device, Drafts, Dtype, MinBudget, Share, StrategyName
from pillarattn.engine.eviction import EVICTION_POLICIES
from pillarattn.evaluation.demo_model import load_model, resolve_device, resolve_dtype

Served = Annotated[
    str, typer.Argument(help="smollm2 (built in), a checkpoint folder, or a hub name.")
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")]
ServedName = Annotated[
    str | None, typer.Option("--model-name", help="Name that clients ask for; MODEL without it.")
]
KvTokens = Annotated[int, typer.Option(help="Tokens whose keys and values fit the pool.")]
HostTokens = Annotated[int, typer.Option(help="The same in host memory; 0 computes again.")]
MaxBatch = Annotated[int, typer.Option(help="Requests that run at a time.")]
Eviction = Annotated[
    str, typer.Option(help=f"Who makes room: {', '.join(EVICTION_POLICIES.names())}.")
]
PrefixCache = Annotated[
    bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Share pages of equal beginnings.")
]
Auto = Annotated[bool, typer.Option("--auto", help="Measure, and draft only where that is faster.")]


def serve(
    model: Served = "smollm2",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    model_name: ServedName = None,
    k: Drafts = 8,
    s: Share = 0.05,
    strategy: StrategyName = "pillar",
    min_budget: MinBudget = 128,
    kv_tokens: KvTokens = 65536,
    host_tokens: HostTokens = 0,
    max_batch: MaxBatch = 64,
    eviction: Eviction = "lifo",
    prefix_cache: PrefixCache = True,
    auto: Auto = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> None:
    """Serve a model under OpenAI's routes; the extra `serve` brings the web framework."""
    console = human_console(None)
    with readable_errors():
        run, create_app = _framework()
        config = EngineConfig(
            kv_tokens=kv_tokens, host_tokens=host_tokens, max_batch=max_batch, eviction=eviction,
            prefix_cache=prefix_cache, speculative="auto" if auto else True,
            pillar=PillarConfig(k=k, s=s, strategy=strategy, min_budget=min_budget),
        )  # fmt: skip
        where, _ = resolve_device(device), resolve_dtype(dtype)
        loaded, tokenizer = load_model(model, device=str(where), dtype=dtype)
        patched = patch(loaded, join_weights=where.type == "cuda")
        engine = Engine(patched, config, tokenizer=tokenizer)
        app = create_app(engine, model_name or model)
    console.print(f"{model} on {where}, {dtype}: http://{host}:{port}/v1")
    run(app, host=host, port=port, log_level="info")


def _framework() -> tuple[Any, Any]:
    """Return what runs an application and what makes ours.

    Raises:
        ModuleNotFoundError: the extra is not installed.
    """
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"pillarattn serve needs {' and '.join(missing)}; pip install 'pillarattn[serve]'"
        )
    import uvicorn

    from pillarattn.engine.server import create_app

    return uvicorn.run, create_app
