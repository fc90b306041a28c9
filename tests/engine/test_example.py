"""The example of the engine runs as it stands, on a tiny model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pillarattn.evaluation.notebook_model import notebook_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "engine.py"


def test_the_example(tmp_path, capsys):
    model, tokenizer = notebook_model(tiny=True)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    spec = importlib.util.spec_from_file_location("engine_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(str(tmp_path))
    printed = capsys.readouterr().out
    assert printed.count("of drafts accepted") == 3
    assert printed.count("sample 0") == 8
    assert "stream:" in printed
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 60
