"""Finished outputs in a file, so that a killed run goes on where it was."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pillarattn.engine.logprobs import TokenLogprob
from pillarattn.engine.request import RequestOutput, SamplingParams


class Checkpoint:
    """A file of JSON lines, one a finished output, under a key of all that decides it.

    Args:
        path: made if missing; None keeps nothing.
        model: its class, name and config are part of every key.
    """

    def __init__(self, path: str | Path | None, model: Any) -> None:
        self.path = None if path is None else Path(path)
        config = model.config.to_json_string() if self.path is not None else ""
        self._model = f"{type(model).__name__} {model.name_or_path} {config}"
        self._outputs: dict[str, dict[str, Any]] = {}
        if self.path is not None and self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                    self._outputs[record["key"]] = record["output"]
                except (ValueError, KeyError, TypeError):
                    # The line that was being written when the run was killed.
                    continue

    def key(self, index: int, sample: int, prompt: list[int], params: SamplingParams) -> str:
        """Return the key of a sample of the prompt at `index` of a call."""
        if self.path is None:
            return ""
        plain = {f.name: getattr(params, f.name) for f in fields(params)}
        plain.pop("logits_processors")
        text = json.dumps([self._model, index, sample, prompt, plain], sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()

    def find(self, key: str, request_id: str) -> RequestOutput | None:
        """Return the output kept under `key`, or None."""
        kept = self._outputs.get(key)
        if kept is None:
            return None
        known: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in kept.items()
        }
        if known.get("logprobs") is not None:
            known["logprobs"] = tuple(
                TokenLogprob(token, own, tuple((i, p) for i, p in top))
                for token, own, top in known["logprobs"]
            )
        known["request_id"] = request_id
        return RequestOutput(**known)

    def add(self, key: str, output: RequestOutput) -> None:
        """Keep an output, unless it failed or was aborted: those are tried again."""
        if self.path is None or output.finish_reason in ("error", "abort"):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"key": key, "output": asdict(output)})
        # A line torn by a kill must not swallow the next one.
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if torn and self.path.stat().st_size else "") + line + "\n")
