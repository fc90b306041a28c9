"""`pillarattn bench plan`: bytes, times and speed-up to expect, without running anything."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from pillarattn.cli.console import check_json_target, human_console, readable_errors, write_json
from pillarattn.cli.option_types import JsonTarget, MinBudget, Share
from pillarattn.cli.plan_tables import show_outlook
from pillarattn.evaluation.demo_model import load_config
from pillarattn.theory.acceptance import alpha_of, constant_acceptance
from pillarattn.theory.acceptance_records import MeasuredAcceptance, read_acceptance
from pillarattn.theory.hardware import HARDWARE, Hardware, custom_hardware, hardware_named
from pillarattn.theory.known_models import KNOWN_MODELS, known_model
from pillarattn.theory.layer_shapes import MLA_CHOICES
from pillarattn.theory.model_shape import ModelShape
from pillarattn.theory.outlook import outlook
from pillarattn.theory.planner import SCHEDULES, Workload
from pillarattn.theory.roofline import EFFICIENCIES, efficiency_named
from pillarattn.theory.shape_reading import shape_from_config, shape_from_model
from pillarattn.theory.traffic import SCORE_MODES

SCHEMA = 1
MOST_DRAFTS = 256
# The paper's 6.16 of 8 drafts.
PAPER_RATE = 0.77


PlannedModel = Annotated[
    str,
    typer.Option(
        help="A model that is known here, a config.json, a checkpoint folder, a hub name or a "
        f"model type. Known: {', '.join(KNOWN_MODELS)}."
    ),
]
Gpu = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(HARDWARE)}; or any name with --bandwidth, --tflops and --memory."
    ),
]
Batch = Annotated[int, typer.Option(help="Sequences that decode together.")]
Length = Annotated[
    int, typer.Option(help="Tokens that each sequence holds, prompt and output so far.")
]
PromptLength = Annotated[
    int | None, typer.Option(help="Tokens of the prompt pass (default: --length).")
]
PlannedDrafts = Annotated[int, typer.Option(help=f"Tokens drafted per round, 1 to {MOST_DRAFTS}.")]
Rate = Annotated[
    float,
    typer.Option(
        help="Acceptance rate at --k, accepted / drafted; other k assume the same chance per "
        "draft. The default is the paper's 6.16 of 8."
    ),
]
AcceptanceFile = Annotated[
    Path | None,
    typer.Option(
        help="Measured acceptance instead: JSON or JSONL records with k, s, mean_accepted, or "
        "what `pillarattn generate --json` wrote."
    ),
]
OneStrategy = Annotated[
    str | None, typer.Option(help="Use only the file's records of this strategy.")
]
LargestK = Annotated[int, typer.Option(help="Largest k to try.")]
Schedule = Annotated[str, typer.Option(help=f"{', '.join(SCHEDULES)}: `generate` is lockstep.")]
EfficiencyName = Annotated[
    str, typer.Option(help=f"{', '.join(EFFICIENCIES)}: how close code comes to the ceilings.")
]
ScoreMode = Annotated[
    str, typer.Option(help=f"{', '.join(SCORE_MODES)}: how verification scores keys.")
]
LatentReads = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(MLA_CHOICES)}: what latent attention reads; transformers expands."
    ),
]
WeightBytes = Annotated[
    float | None, typer.Option(help="Bytes of one parameter (default: the config's, else 2).")
]
CacheBytes = Annotated[
    float | None, typer.Option(help="Bytes of one cached value (default: as the weights).")
]
Sampling = Annotated[
    bool, typer.Option("--sampling", help="Count the draft distributions that sampling keeps.")
]
Bandwidth = Annotated[float | None, typer.Option(help="Your own bandwidth, in TB/s.")]
MatrixRate = Annotated[float | None, typer.Option(help="Your own matrix rate, in TFLOP/s.")]
Memory = Annotated[float | None, typer.Option(help="Your own memory, in GB.")]


def plan(
    model: PlannedModel = "smollm2",
    gpu: Gpu = "H200-measured",
    batch: Batch = 1,
    length: Length = 8192,
    prompt: PromptLength = None,
    k: PlannedDrafts = 8,
    s: Share = 0.05,
    min_budget: MinBudget = 128,
    acceptance: Rate = PAPER_RATE,
    acceptance_file: AcceptanceFile = None,
    strategy: OneStrategy = None,
    max_k: LargestK = 16,
    schedule: Schedule = "lockstep",
    efficiency: EfficiencyName = "kernels",
    scores: ScoreMode = "pooled",
    mla: LatentReads = "latent",
    weight_bytes: WeightBytes = None,
    kv_bytes: CacheBytes = None,
    sampling: Sampling = False,
    bandwidth: Bandwidth = None,
    tflops: MatrixRate = None,
    memory: Memory = None,
    json_to: JsonTarget = None,
) -> None:
    """Print what to expect of sparse self-speculation: bytes, times, speed-up, the best k."""
    console = human_console(json_to)
    with readable_errors():
        check_json_target(json_to)
        for option, value in (("--k", k), ("--max-k", max_k)):
            if not 1 <= value <= MOST_DRAFTS:
                raise ValueError(f"{option} must be within 1 and {MOST_DRAFTS}, got {value}")
        measured = _acceptance(acceptance, k, acceptance_file, strategy)
        workload = Workload(
            shape=_shape(model, mla, weight_bytes, kv_bytes),
            hardware=_hardware(gpu, bandwidth, tflops, memory),
            efficiency=efficiency_named(efficiency),
            batch=batch,
            length=length,
            schedule=schedule,
            min_budget=min_budget,
            scores=scores,
        )
        found = outlook(
            workload,
            measured.mean,
            k=k,
            s=s,
            ks=tuple(range(1, min(max_k, measured.max_k or max_k) + 1)),
            ss=measured.ss,
            prompt=prompt,
            sampling=sampling,
        )
    show_outlook(console, found)
    write_json({"schema": SCHEMA, "command": "bench plan", **found.to_dict()}, json_to)


def _shape(name: str, mla: str, weight_bytes: float | None, kv_bytes: float | None) -> ModelShape:
    for option, value in (("--weight-bytes", weight_bytes), ("--kv-bytes", kv_bytes)):
        if value is not None and not 0 < value <= 8:
            raise ValueError(f"{option} must be within 0 < bytes <= 8, got {value}")
    path, known = Path(name), known_model(name)
    if path.is_file():
        shape = _shape_of_json(path, mla)
    elif known is not None and not path.is_dir():
        shape = shape_from_config(known[1], name=known[0], mla=mla)
    else:
        shape = _shape_of_config(load_config(name), name, mla)
    return shape.with_bytes(weight_bytes=weight_bytes, kv_bytes=kv_bytes)


def _shape_of_json(path: Path, mla: str) -> ModelShape:
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--model: {str(path)!r} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--model: {str(path)!r} must hold one JSON object, a model's config")
    if values.get("model_type") not in CONFIG_MAPPING:
        return shape_from_config(values, name=path.name, mla=mla)
    # The family's own class fills in what the file leaves at its default.
    own = {key: value for key, value in values.items() if key != "model_type"}
    try:
        config = AutoConfig.for_model(values["model_type"], **own)
    except Exception as error:
        # Each version of transformers refuses bad fields by an error class of its own.
        raise ValueError(f"--model: {str(path)!r} is no valid config: {error}") from None
    return _shape_of_config(config, path.name, mla)


def _shape_of_config(config: Any, name: str, mla: str) -> ModelShape:
    """Count the parameters of the model where it can be built, else by rule."""
    from transformers import AutoModelForCausalLM

    shape = shape_from_config(config, name=name, mla=mla)
    try:
        # On the meta device a model of any size has its structure but no weights.
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            structure = AutoModelForCausalLM.from_config(config)
    except Exception:
        # Whatever a family's constructor misses, the rules still give a plan.
        return shape
    counted = shape_from_model(structure, name=name, mla=mla)
    # The structure is built in full precision, whatever the checkpoint holds.
    return counted.with_bytes(weight_bytes=shape.weight_bytes, kv_bytes=shape.kv_bytes)


def _hardware(
    name: str, bandwidth: float | None, tflops: float | None, memory: float | None
) -> Hardware:
    given = {"--bandwidth": bandwidth, "--tflops": tflops, "--memory": memory}
    missing = [option for option, value in given.items() if value is None]
    if len(missing) == len(given):
        return hardware_named(name)
    if bandwidth is None or tflops is None or memory is None:
        raise ValueError(
            f"your own hardware needs --bandwidth, --tflops and --memory; missing: "
            f"{', '.join(missing)}"
        )
    return custom_hardware(
        name, bandwidth=bandwidth * 1e12, flops=tflops * 1e12, memory=memory * 1e9
    )


def _acceptance(rate: float, k: int, file: Path | None, strategy: str | None) -> MeasuredAcceptance:
    if file is None:
        if not 0 <= rate <= 1:
            raise ValueError(
                f"--acceptance must be within 0 and 1 (accepted / drafted), got {rate}"
            )
        return MeasuredAcceptance(constant_acceptance(alpha_of(rate * k, k)))
    if not file.is_file():
        raise ValueError(f"--acceptance-file: {str(file)!r} is not a file")
    return read_acceptance(_measurements(file), strategy=strategy)


def _measurements(file: Path) -> Any:
    text = file.read_text(encoding="utf-8")
    try:
        if file.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"--acceptance-file: {str(file)!r} is not JSON: {error}") from None
