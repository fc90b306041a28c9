"""Settings under which the library works as a published system does."""

from __future__ import annotations

from typing import Any

from pillarattn.errors import UnknownNameError

PRESETS: dict[str, dict[str, Any]] = {
    # The method of this library (arXiv 2512.01278).
    "pillar": {"strategy": "pillar"},
    # Sparse self-speculation with a window, or with keys chosen at the prompt (arXiv 2408.11049).
    "magicdec": {"strategy": "streaming", "sink": 16},
    "magicdec-snapkv": {"strategy": "snapkv"},
    # A cheap drafter below self-speculation over retrieved chunks (arXiv 2404.11912). Its small
    # model is `drafter=[AssistantDrafter(model), "sparse"]`.
    "triforce": {"strategy": "triforce", "drafter": ("ngram", "sparse"), "k": 6},
    # No model drafts at all.
    "prompt-lookup": {"drafter": "ngram"},
}


def preset(name: str) -> dict[str, Any]:
    """Return the options of a preset, as `SelfSpeculativeGenerator` takes them.

    Raises:
        UnknownNameError: there is no such preset.
    """
    try:
        return dict(PRESETS[name])
    except (KeyError, TypeError):
        known = ", ".join(sorted(PRESETS))
        raise UnknownNameError(f"unknown preset {name!r}; choose one of {known}") from None
