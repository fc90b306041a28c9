"""The Triton kernel accepts and draws what the reference does, token for token."""

from __future__ import annotations

import pytest
import torch

from pillarattn.kernels import rejection_sample

NAN = float("nan")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DTYPES["fp64"] = torch.float64


@pytest.fixture
def agree(triton_device, monkeypatch):
    """Return a call that compares both implementations and returns what they found."""
    from pillarattn.kernels.rejection_sample import triton_kernel

    # Small vocabularies have several stretches too.
    monkeypatch.setattr(triton_kernel, "STRETCH", 64)

    def call(tokens, target, **given):
        batch, k = tokens.shape
        given.setdefault("uniforms", torch.rand(batch, k, dtype=torch.float64))
        if "noise" not in given:
            given["noise"] = torch.empty(batch, target.shape[2]).double().exponential_()
        wanted = rejection_sample(tokens, target, implementation="reference", **given)
        moved = {n: None if t is None else t.to(triton_device) for n, t in given.items()}
        moved["draft_tokens"], moved["target_probs"] = (
            t.to(triton_device) for t in (tokens, target)
        )
        got = rejection_sample(implementation="triton", **moved)
        assert [t.tolist() for t in got] == [t.tolist() for t in wanted]
        assert all(t.dtype == torch.int64 for t in got)
        return wanted

    return call


def laws(batch, rows, size, dtype, *, sharpness=2.0, kept=1.0):
    """Return random laws; with `kept` below 1 most tokens have no mass, as after top-p."""
    logits = torch.randn(batch, rows, size) * sharpness
    gone = torch.rand(batch, rows, size) > kept
    gone[..., 0] = False
    return logits.masked_fill(gone, -torch.inf).softmax(dim=-1).to(dtype)


def drafted(draft):
    batch, k = draft.shape[:2]
    return torch.multinomial(draft.float().flatten(0, 1), 1).view(batch, k)


LAWS = [(dtype, kept) for dtype in DTYPES for kept in (1.0, 0.05)]
# Every size meets every k, and both of them every kind of laws.
CELLS = [
    (size, k, *LAWS[n])
    for i, size in enumerate((1, 64, 150))
    for j, k in enumerate((0, 1, 6))
    for n in range((i + j) % 3, len(LAWS), 3)
]


@pytest.mark.parametrize(("size", "k", "dtype", "kept"), CELLS)
def test_equal_to_the_reference(agree, dtype, size, k, kept) -> None:
    target = laws(3, k + 1, size, DTYPES[dtype], kept=kept)
    draft = (0.5 * target[:, :k] + 0.5 * laws(3, k, size, DTYPES[dtype])).to(DTYPES[dtype])
    tokens = drafted(draft) if k else torch.zeros(3, 0, dtype=torch.int64)
    agree(tokens, target, draft_probs=draft)
    agree(tokens, target)
    lengths = torch.tensor([k, k // 2, 0])
    ragged, _ = agree(tokens, target, draft_probs=draft, draft_lengths=lengths)
    agree(tokens, target, draft_lengths=lengths)
    assert bool((ragged <= lengths).all())


@pytest.mark.parametrize("point_mass", [False, True])
def test_laws_without_tokens(agree, point_mass) -> None:
    """In each place of a round: rows of zeros, of NaN, and of a NaN among numbers."""
    batch, k, size = 12, 3, 150
    target, draft = laws(batch, k + 1, size, torch.float32), laws(batch, k, size, torch.float32)
    tokens = drafted(draft)
    for row in range(batch):
        place, kind = row % 4, row // 4
        target[row, place, 7 if kind == 2 else slice(None)] = 0.0 if kind == 0 else NAN
    uniforms = torch.zeros(batch, k, dtype=torch.float64)
    probs = None if point_mass else draft
    _, following = agree(tokens, target, draft_probs=probs, uniforms=uniforms)
    assert following[:8].tolist() == [-1] * 8 and int(following[8:].min()) >= 0
    # A draft's law with NaN leaves no residual there.
    draft[:, :, ::2] = NAN
    agree(tokens, target, draft_probs=draft)
    agree(tokens, target, draft_probs=torch.full_like(draft, NAN))
    agree(tokens, target, draft_probs=torch.zeros_like(draft))


def test_what_is_left_of_equal_laws(agree) -> None:
    """No residual anywhere: the plain law; one in a single stretch: that one wins the row."""
    target = laws(16, 2, 300, torch.float32)
    draft, tokens = target[:, :1].clone(), torch.zeros(16, 1, dtype=torch.int64)
    draft[:, 0, 0] *= 1 + 1e-3
    always = torch.full((16, 1), 1 - 2**-53, dtype=torch.float64)
    accepted, following = agree(tokens, target, draft_probs=draft, uniforms=always)
    assert accepted.tolist() == [0] * 16 and len(set(following.tolist())) > 5
    draft[8:, 0, 200] *= 1 - 1e-3
    _, following = agree(tokens, target, draft_probs=draft, uniforms=always)
    assert following[8:].tolist() == [200] * 8 and len(set(following[:8].tolist())) > 3


def test_ties_and_noise_without_end(agree) -> None:
    target = torch.full((3, 1, 200), 1 / 200)
    target[1, 0, :130] = 0.0
    noise = torch.ones(3, 200, dtype=torch.float64)
    nothing = torch.zeros(3, 0, dtype=torch.int64)
    assert agree(nothing, target, noise=noise)[1].tolist() == [0, 130, 0]
    noise[:, [5, 140]] = 0.0
    assert agree(nothing, target, noise=noise)[1].tolist() == [5, 140, 5]
    noise[:] = torch.inf
    assert agree(nothing, target, noise=noise)[1].tolist() == [0, 130, 0]


def test_views_of_larger_tensors(agree) -> None:
    k, size = 4, 130
    target = laws(k + 1, 5, 2 * size, torch.float32).transpose(0, 1)[:, :, ::2]
    draft = laws(1, 1, size, torch.float32).expand(5, k, size)
    tokens = drafted(draft).T.contiguous().T
    uniforms = torch.rand(k, 5, dtype=torch.float64).T
    noise = torch.empty(5, 2 * size).exponential_()[:, ::2]
    lengths = torch.tensor([4, 9, 0, 9, 2, 9, 1, 9, 3, 9])[::2]
    agree(tokens, target, draft_probs=draft, draft_lengths=lengths, uniforms=uniforms, noise=noise)
    agree(tokens[:0], target[:0], draft_probs=draft[:0])


def test_whole_stretches(agree, monkeypatch) -> None:
    from pillarattn.kernels.rejection_sample import triton_kernel

    monkeypatch.setattr(triton_kernel, "STRETCH", 1024)
    target, draft = laws(3, 3, 2500, torch.float32), laws(3, 2, 2500, torch.float32)
    agree(drafted(draft), target, draft_probs=draft)
