"""What a probe may hold: a CPU's constants, a share of what a GPU has free."""

from __future__ import annotations

import torch

from pillarattn.evaluation.probe_memory import ProbeMemory


def test_a_cpu_keeps_its_limits():
    assert ProbeMemory.of(torch.device("cpu")) == ProbeMemory()


def test_a_gpu_gives_shares_of_what_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * 2**30, 140 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * 2**30)
    found = ProbeMemory.of(torch.device("cuda"))
    assert found == ProbeMemory.of_free(128 * 2**30)
    # Of logits and of what a draft gathers, several copies live at a time.
    held = found.scores + 4 * found.logits + 6 * found.draft + 10 * found.selection
    assert held < 0.75 * 128 * 2**30
    # 7,168 tokens of a text of 8,192 with 90 KV heads go through at once.
    assert found.scores // (4 * 90 * 8192) > 7168
    assert found.draft // (4 * 8 * 49152) > 796
    assert found.selection // (4 * 90 * 8192) > 600
