"""Recorded passes: when they are made, kept and replayed, and what happens where they cannot be."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import StoppingCriteriaList

import pillarattn
from pillarattn import SelfSpeculativeGenerator
from pillarattn.datatypes import LiveLengths, Phase, RowLengths, Selection
from pillarattn.decoding.cost_gate import Choice, CostGate
from pillarattn.evaluation.batch_timing import timed_batch
from pillarattn.modules.step import StepState
from pillarattn.patch import build_target, captured_passes, graph_recorder
from pillarattn.patch.captured_passes import CapturedPasses
from pillarattn.patch.fused_layers import FusedLayers
from pillarattn.patch.kept_passes import code_of, kind_of
from pillarattn.patch.obstacle import obstacle
from pillarattn.patch.static_selection import STEP, StaticSelection
from pillarattn.patch.target import HFTarget

NEW = {"max_new_tokens": 24, "do_sample": False}


def test_without_a_gpu_nothing_is_recorded(pair, drafting, prompt, monkeypatch):
    _, patched = pair()
    monkeypatch.setattr(CapturedPasses, "run", lambda *_, **__: pytest.fail("asked"))
    patched.generate(prompt(2, 12), **NEW, assistant=drafting())
    assert "cpu" in obstacle(patched, pillarattn.PillarCache())


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.9, "top_k": 20}])
@pytest.mark.parametrize("drafter", ["sparse", ("ngram", "sparse")])
def test_replays_give_the_tokens_of_eager_passes(
    rehearsed, pair, drafting, prompt, drafter, sampling
):
    _, patched = pair()
    ids = prompt(3, 20)
    options = {"drafter": drafter, "seed": 3}
    eager = patched.generate(
        ids, **{**NEW, **sampling}, assistant=drafting(**options, cuda_graphs=False)
    )
    assert not rehearsed
    replayed = patched.generate(ids, **{**NEW, **sampling}, assistant=drafting(**options))
    assert torch.equal(eager, replayed)
    assert rehearsed[0].replayed > 20
    assert rehearsed[0].reason is None


def test_a_gate_learns_from_replayed_rounds_alone(rehearsed, pair, prompt):
    _, patched = pair()
    ids = prompt(1, 20)
    pillar = pillarattn.SelfSpeculativeGenerator(k="auto", s=0.7, min_budget=4)
    plain = patched.generate(ids, max_new_tokens=120, do_sample=False)
    assert torch.equal(
        patched.generate(ids, max_new_tokens=120, do_sample=False, assistant=pillar), plain
    )
    assert rehearsed[0].replayed > 10


def test_recordings_end_with_the_generation_and_where_buffers_move(
    rehearsed, pair, drafting, prompt
):
    _, patched = pair()
    pillar = drafting()
    patched.generate(
        prompt(2, 60),
        max_new_tokens=90,
        do_sample=False,
        assistant=pillar,
        return_dict_in_generate=True,
    )
    (passes,) = rehearsed
    assert passes.replayed > 5
    assert not passes._kept, "the caller has the cache"
    assert pillar.kept.take(None) is None


def test_the_next_call_goes_on_with_the_recordings_of_the_last(
    rehearsed, pair, drafting, prompt, monkeypatch
):
    plain, patched = pair()
    pillar = drafting()
    for length in (20, 60, 35):
        ids = prompt(2, length, seed=length)
        out = patched.generate(ids, **NEW, assistant=pillar)
        assert torch.equal(out, plain.generate(ids, **NEW))
    assert len(rehearsed) == 1
    (passes,) = rehearsed
    assert passes.replayed > 60
    assert passes._forward is passes.fused is None, "a generator keeps no model alive"
    monkeypatch.setattr(CapturedPasses, "_record", lambda *_: pytest.fail("recorded again"))
    patched.generate(ids, **NEW, assistant=pillar)
    for copied in (copy.deepcopy(pillar), pickle.loads(pickle.dumps(pillar))):
        assert copied.kept.take(None) is None


def test_weights_written_in_place_are_those_of_the_next_call(
    rehearsed, tiny_model, drafting, prompt
):
    """Not even a version counts what is written to `.data`."""
    plain = tiny_model("llama")
    patched, pillar, ids = pillarattn.patch(copy.deepcopy(plain)), drafting(), prompt(2, 20)
    before = patched.generate(ids, **NEW, assistant=pillar)
    for model in (plain, patched):
        model.model.layers[0].mlp.gate_proj.weight.data.neg_()
    out = patched.generate(ids, **NEW, assistant=pillar)
    assert len(rehearsed) == 1
    assert not torch.equal(out, before)
    assert torch.equal(out, plain.generate(ids, **NEW))


@pytest.mark.parametrize("change", [None, "hook", "patched anew"])
def test_fused_layers_go_on_while_nobody_listens_to_their_parts(
    rehearsed, tiny_model, drafting, prompt, change
):
    plain = tiny_model("llama")
    patched, pillar, ids = pillarattn.patch(copy.deepcopy(plain)), drafting(), prompt(2, 20)
    patched.generate(ids, **NEW, assistant=pillar)
    first, mlp = pillar.kept._held[1].fused, patched.model.layers[1].mlp

    def watch(*_):
        pass

    # Such a hook does nothing unless a run asks for more, and ends no recording.
    watch.__module__ = "transformers.utils.output_capturing"
    if change == "hook":
        mlp.register_forward_hook(watch)
    elif change == "patched anew":
        pillarattn.patch(pillarattn.unpatch(patched))
    out = patched.generate(ids, **NEW, assistant=pillar)
    assert torch.equal(out, plain.generate(ids, **NEW))
    second = pillar.kept._held[1].fused
    assert (second is first) == (change is None)
    assert bool(second.layers) == (change != "hook")


@pytest.mark.parametrize(
    "change",
    [
        "batch", "longer", "weights", "hook", "other hook", "forward", "class", "switch", "vector",
        "config", "strides", "free", "failed",
    ],
)  # fmt: skip
def test_recordings_are_not_used_where_something_has_changed(
    rehearsed, tiny_model, drafting, prompt, monkeypatch, change
):
    plain = tiny_model("llama")
    patched = pillarattn.patch(copy.deepcopy(plain))
    pillar, ids = drafting(), prompt(2, 20)
    if change == "other hook":
        patched.model.layers[0].register_forward_hook(lambda *_: None).remove()
    mlp = patched.model.layers[1].mlp
    mlp.scale, mlp.vector = {"default": 1.0}, torch.zeros(64)
    patched.generate(ids, **NEW, assistant=pillar)
    new = dict(NEW)
    if change == "batch":
        ids = prompt(3, 20)
    elif change == "longer":
        new["max_new_tokens"] = 520
        ids = ids[:, :4]
        new["eos_token_id"] = list(range(97))
    elif change == "weights":
        for model in (plain, patched):
            weight = model.model.layers[0].mlp.up_proj.weight
            weight.data = weight.data.flip(0).clone()
    elif change == "hook":
        patched.model.layers[0].register_forward_hook(lambda m, i, out: out * 1.5)
        plain.model.layers[0].register_forward_hook(lambda m, i, out: out * 1.5)
    elif change == "forward":
        own = patched.model.layers[0].mlp.forward
        patched.model.layers[0].mlp.forward = lambda rows: own(rows)
    elif change == "class":
        own = type(patched.model.layers[0].mlp).forward
        monkeypatch.setattr(
            type(patched.model.layers[0].mlp), "forward", lambda self, rows: own(self, rows)
        )
    elif change == "switch":
        mlp.scale["default"] = 2.0
    elif change == "vector":
        mlp.vector = torch.ones(64)
    elif change == "config":
        patched.set_attn_implementation("eager")
    elif change == "strides":
        for model in (plain, patched):
            weight = model.model.layers[0].self_attn.o_proj.weight
            weight.data = weight.data.t()
    elif change == "free":
        pillar.free()
    else:
        with pytest.raises(KeyError):
            patched.generate(
                ids,
                **NEW,
                assistant=pillar,
                stopping_criteria=StoppingCriteriaList([lambda ids, _: {}["no"]]),
            )
    out = patched.generate(ids, **new, assistant=pillar)
    assert torch.equal(out, plain.generate(ids, **new))
    assert len(rehearsed) == 2


def test_a_pass_that_cannot_be_recorded_runs_eagerly_after_one_warning(
    rehearsed, pair, drafting, prompt, monkeypatch
):
    plain, patched = pair()
    ids = prompt(2, 20)

    def refuse(self, recording):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(CapturedPasses, "_play", refuse)
    with pytest.warns(RuntimeWarning, match="without CUDA graphs.*not permitted") as caught:
        out = patched.generate(ids, **NEW, assistant=drafting())
    assert len(caught) == 1
    assert torch.equal(out, plain.generate(ids, **NEW))
    assert rehearsed[0].replayed == 0


def test_a_model_that_lets_the_host_look_at_lengths_is_found_out(
    rehearsed, pair, drafting, prompt, monkeypatch
):
    """A replay that repeats what it saw when it was recorded, as a baked-in length would."""
    plain, patched = pair()
    ids = prompt(2, 20)
    monkeypatch.setattr(patched.pillarattn_record, "proven_passes", set())

    def frozen(self, recording):
        self._play(recording)
        logits = recording.logits.clone()

        def replay():
            recording.logits = logits

        return replay

    monkeypatch.setattr(build_target.CapturedPasses, "_record", frozen)
    with pytest.warns(RuntimeWarning, match="differs from the same one run eagerly"):
        out = patched.generate(ids, **NEW, assistant=drafting())
    assert torch.equal(out, plain.generate(ids, **NEW))
    assert not patched.pillarattn_record.proven_passes


def test_kinds_are_compared_once_a_model(rehearsed, pair, drafting, prompt, monkeypatch):
    _, patched = pair("qwen3")
    monkeypatch.setattr(patched.pillarattn_record, "proven_passes", set())
    gaps = []
    measure = captured_passes.logits_gap
    monkeypatch.setattr(
        captured_passes, "logits_gap", lambda *both: gaps.append(measure(*both)) or gaps[-1]
    )
    for _ in range(2):
        patched.generate(prompt(2, 20), **NEW, assistant=drafting())
    assert patched.pillarattn_record.proven_passes == {(Phase.DRAFT, 1), (Phase.VERIFY, 5)}
    assert len(gaps) == 2
    assert max(gap for gap, _ in gaps) <= graph_recorder.EXACT_TOLERANCE


def test_the_least_used_recording_makes_room(rehearsed, pair, drafting, prompt, monkeypatch):
    plain, patched = pair()
    monkeypatch.setattr(captured_passes, "MOST", 1)
    ids = prompt(1, 20)
    out = patched.generate(ids, **NEW, assistant=drafting())
    assert torch.equal(out, plain.generate(ids, **NEW))
    # Draft and verify passes push each other out; drafts of one round follow each other.
    assert rehearsed[0].replayed > 0


def test_spans_cover_the_length_and_waste_little():
    for length in (1, 511, 512, 513, 4096, 4097, 8191, 30000):
        span = graph_recorder.rounded(length, captured_passes.LEAST_SPAN)
        assert length <= span <= max(length + 512, length * 1.13)


def test_live_lengths_grow_on_the_device_and_are_never_taken_for_uniform():
    live = LiveLengths([64, 64], "cpu", tensor=torch.tensor([3, 9]))
    grown = live.plus(2)
    assert (grown.tensor.tolist(), grown.max) == ([5, 11], 66)
    assert isinstance(grown, LiveLengths)
    assert not live.is_uniform
    live.tensor.copy_(torch.tensor([4, 4]))
    live.forget_later()
    assert live.plus(2).tensor.tolist() == [6, 6]
    assert RowLengths([3, 9], "cpu").plus(2).tensor.tolist() == [5, 11]


def selection(width, count, start, heads=2):
    indices = torch.arange(width, dtype=torch.int32).expand(1, heads, -1)
    return Selection(indices, torch.full((1, heads), count, dtype=torch.int32), start)


def test_selections_are_copied_once_a_round_into_memory_that_fits_the_next_ones():
    start = torch.tensor([50])
    first = {3: selection(9, 9, start), 5: selection(9, 7, start)}
    held = StaticSelection(first)
    held.load(first)
    indices = held.selections[5].indices
    assert indices.shape[2] == STEP
    assert indices[0, 0, :9].tolist() == list(range(9))
    assert held.selections[3].counts.tolist() == [[9, 9]]
    later = torch.tensor([61])
    second = {3: selection(12, 11, later), 5: selection(12, 12, later)}
    held.load(second)
    assert held.selections[5].indices.data_ptr() == indices.data_ptr()
    assert indices[0, 1, :12].tolist() == list(range(12))
    assert held.selections[3].tail_start.tolist() == [61]
    indices.zero_()
    held.load(dict(second))
    assert not indices.any(), "what was loaded already is not copied again"


def test_layers_of_different_heads_and_widths():
    start = torch.tensor([50])
    one = {0: selection(9, 9, start), 1: selection(4, 4, start, heads=1)}
    held = StaticSelection(one)
    held.load(one)
    assert held.selections[1].indices[0, 0, :4].tolist() == [0, 1, 2, 3]
    assert held.selections[0].counts.tolist() == [[9, 9]]
    assert StaticSelection.kind_of(one) == (STEP, ((0, 2), (1, 1)))
    apart = {0: selection(9, 9, start), 1: selection(4, 4, start.clone())}
    assert StaticSelection.kind_of(apart) is None


def test_a_step_that_chooses_at_draft_steps_is_not_recorded(rehearsed, pair, drafting, prompt):
    _, patched = pair()
    patched.generate(prompt(1, 20), **NEW, assistant=drafting(strategy="quest"))
    assert rehearsed[0].reason is None
    assert {held.step.phase for held in rehearsed[0]._kept.values()} == {Phase.VERIFY}


@pytest.mark.parametrize("value", [1, "auto", None])
def test_the_switch_is_a_bool(value):
    with pytest.raises(ValueError, match="cuda_graphs must be True or False"):
        pillarattn.PillarConfig(cuda_graphs=value)


def test_no_warning_where_all_is_well(rehearsed, pair, drafting, prompt):
    _, patched = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        patched.generate(prompt(2, 20), **NEW, assistant=drafting())


def test_the_last_rounds_run_as_wide_as_those_before(
    rehearsed, pair, drafting, prompt, monkeypatch
):
    """Rounds that may draft less and less would each be a pass of a new shape."""
    plain, patched = pair()
    monkeypatch.setattr(captured_passes, "RARE", 99)
    ids = prompt(2, 20)
    widths, forward = [], HFTarget._forward

    def watched(self, inputs, step, width):
        if step.phase is Phase.VERIFY:
            widths.append(width)
        return forward(self, inputs, step, width)

    monkeypatch.setattr(HFTarget, "_forward", watched)
    for _ in range(2):
        pillar = drafting()
        out = patched.generate(ids, **NEW, assistant=pillar)
        assert torch.equal(out, plain.generate(ids, **NEW))
    assert set(widths) == {1, 5}
    eager = drafting(cuda_graphs=False)
    patched.generate(ids, **NEW, assistant=eager)
    assert pillar.stats.accepted_per_round == eager.stats.accepted_per_round
    assert pillar.stats.drafted == eager.stats.drafted
    assert set(widths) & {2, 3, 4}, "there are such rounds"


def test_a_wider_pass_leaves_the_scores_of_the_rows_that_were_asked_for(
    rehearsed, pair, drafting, prompt, monkeypatch
):
    _, patched = pair()
    forward, seen = HFTarget.forward, []

    def watched(self, tokens, step):
        logits = forward(self, tokens, step)
        if step.scores is not None:
            (rows,) = {scored.row_scores.shape[2] for scored in step.scores._layers.values()}
            seen.append((tokens.shape[1], rows, logits.shape[1]))
        return logits

    monkeypatch.setattr(HFTarget, "forward", watched)
    pillar = drafting()
    for _ in range(2):
        patched.generate(prompt(2, 20), **NEW, assistant=pillar)
    assert {width for width, *_ in seen} > {5}
    assert all(width == rows == kept for width, rows, kept in seen)


def test_a_width_that_is_wanted_often_is_recorded():
    passes = CapturedPasses(None, pillarattn.PillarCache(limit=64), {(Phase.VERIFY, 5)})
    keys = torch.zeros(1, 2, 9, 16)
    passes.cache.update(keys, keys, 0)
    step = StepState(Phase.VERIFY)
    live = LiveLengths([9], "cpu")
    held = captured_passes.Recording(5, {}, live, step, None, first=(9,))
    passes._kept["wide"] = held
    asked = [passes.width_for(3, step) for _ in range(captured_passes.RARE + 2)]
    assert asked == [5] * captured_passes.RARE + [3, 3]
    assert passes.width_for(1, step) == 1
    assert passes.width_for(6, step) == 6
    assert passes.width_for(3, StepState(Phase.DRAFT)) == 3
    passes.cache.roll_back(RowLengths([9], "cpu"))
    passes.cache.update(torch.zeros(1, 2, 53, 16), torch.zeros(1, 2, 53, 16), 0)
    assert passes.width_for(2, step) == 2, "no room"


def test_hooks_come_and_go_under_numbers_of_their_own(tiny_model):
    """A new hook may lie where one lay that has gone."""
    model = tiny_model("llama")
    seen = set()
    for _ in range(3):
        handle = model.model.layers[0].register_forward_hook(lambda *_: None)
        seen.add(code_of(model))
        handle.remove()
    assert len(seen) == 3


def test_a_model_that_a_user_listens_to_is_not_recorded(tiny_model):
    """A replay calls nobody, and what a hook adds may be a number that changes."""
    model, cache = tiny_model("llama"), pillarattn.PillarCache()
    model(torch.ones(1, 2, dtype=torch.long), output_hidden_states=True)
    assert "cpu" in obstacle(model, cache), "transformers listens when it is asked to"
    handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: None)
    assert "hook of model.layers.1.mlp would not be called" in obstacle(model, cache)
    handle.remove()
    model.register_forward_hook(print)
    assert "hook of the model" in obstacle(model, cache)


def test_adapters_that_are_switched_off_are_not_replayed(rehearsed, tiny_model, drafting, prompt):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("llama"), lora).eval()
    pillarattn.patch(model)
    pillar, ids = drafting(), prompt(2, 20)
    model.generate(input_ids=ids, **NEW, assistant=pillar)
    with model.disable_adapter():
        out = model.generate(input_ids=ids, **NEW, assistant=pillar)
        wanted = model.generate(input_ids=ids, **NEW)
    assert torch.equal(out, wanted)
    assert len(rehearsed) == 2
    model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] *= 3
    model.generate(input_ids=ids, **NEW, assistant=pillar)
    assert len(rehearsed) == 3


def test_recordings_end_with_an_autocast_block(rehearsed, tiny_model, drafting, prompt):
    """Its copies of weights are freed with it, and a recording would go on reading them."""
    patched = pillarattn.patch(tiny_model("llama").bfloat16())
    pillar, ids = drafting(), prompt(1, 20)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            patched.generate(ids, **NEW, assistant=pillar)
    assert len(rehearsed) == 2
    assert pillar.kept.take(None) is None
    patched.generate(ids, **NEW, assistant=pillar)
    torch.set_float32_matmul_precision("medium")
    try:
        patched.generate(ids, **NEW, assistant=pillar)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert len(rehearsed) == 4


def test_weights_that_are_more_than_one_tensor_are_not_recorded_for_later(
    rehearsed, tiny_model, prompt
):
    """Quantised and sharded weights hide their memory in tensors of other types."""
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    model, asked = tiny_model("llama"), {"kernels": "auto", "strict": False}
    assert kind_of(model, prompt(1, 9), **asked, code=code_of(model)) is not None
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = torch.nn.Parameter(two_tensor(layer.weight.data, layer.weight.data.clone()))
    assert kind_of(model, prompt(1, 9), **asked, code=code_of(model)) is None


def test_what_was_proven_of_other_code_is_proven_again(rehearsed, tiny_model, drafting, prompt):
    patched = pillarattn.patch(tiny_model("llama"))
    ids = prompt(2, 20)
    patched.generate(ids, **NEW, assistant=drafting())
    record = patched.pillarattn_record
    proven = record.proven_passes
    assert proven
    patched.generate(ids, **NEW, assistant=drafting())
    assert record.proven_passes is proven
    patched.to(torch.float64)
    assert record.proven_with(code_of(patched)) == set()
    patched.generate(ids, **NEW, assistant=drafting())
    assert record.proven_passes == proven
    assert record.proven_passes is not proven
    pickle.dumps(patched)


def test_a_generator_lets_go_of_a_model_that_has_gone(rehearsed, tiny_model, drafting, prompt):
    patched = pillarattn.patch(tiny_model("llama"))
    pillar, ids = drafting(), prompt(2, 20)
    patched.generate(ids, **NEW, assistant=pillar)
    assert pillar.kept._held is not None
    gone = weakref.ref(patched)
    rehearsed.clear()
    del patched
    gc.collect()
    assert gone() is None
    assert pillar.kept._held is None, "its memory would wait for a model that never comes"


def test_a_wider_pass_that_fails_runs_eagerly_as_wide_as_it_was(
    rehearsed, pair, drafting, prompt, monkeypatch
):
    plain, patched = pair()
    monkeypatch.setattr(captured_passes, "RARE", 99)
    ids = prompt(2, 20)
    fill, widened = CapturedPasses._fill, []

    def full(self, recording, inputs, step, base):
        if widened:
            raise torch.OutOfMemoryError("CUDA out of memory")
        fill(self, recording, inputs, step, base)

    width_for = CapturedPasses.width_for

    def asked(self, width, step):
        found = width_for(self, width, step)
        if found > width:
            widened.append(found)
        return found

    monkeypatch.setattr(CapturedPasses, "_fill", full)
    monkeypatch.setattr(CapturedPasses, "width_for", asked)
    with pytest.warns(RuntimeWarning, match="out of memory"):
        out = patched.generate(ids, **NEW, assistant=drafting())
    assert widened
    assert torch.equal(out, plain.generate(ids, **NEW))


def test_buffers_that_move_to_where_others_were_are_noticed():
    passes = CapturedPasses(None, pillarattn.PillarCache(limit=64), set())
    for layer in range(2):
        passes.cache.update(torch.zeros(1, 2, 9, 16), torch.zeros(1, 2, 9, 16), layer)
    first, second = passes.cache.layers
    memory = torch.zeros(3, *first.key_buffer.shape)
    first.key_buffer, second.key_buffer = memory[0], memory[2]
    step, ids = StepState(Phase.VERIFY), {"input_ids": torch.zeros(1, 2, dtype=torch.long)}
    assert passes._key(ids, step, 2) is not None
    passes._kept["one"] = None
    assert passes._key(ids, step, 2) is not None
    assert passes._kept
    # The highest address stays in use, by the other layer.
    first.key_buffer, second.key_buffer = memory[2], memory[1]
    passes._key(ids, step, 2)
    assert not passes._kept


def test_passes_are_recorded_on_the_device_of_the_model(monkeypatch):
    """A stream of the current device, which may be another one, would record nothing."""
    devices = []
    monkeypatch.setattr(
        graph_recorder.GraphRecorder, "record", lambda self, play, device: devices.append(device)
    )
    live = LiveLengths([9], "cpu")
    live.device = torch.device("cuda:1")
    passes = CapturedPasses(None, pillarattn.PillarCache(), set())
    passes._record(captured_passes.Recording(5, {}, live, StepState(Phase.VERIFY), None))
    assert devices == [torch.device("cuda:1")]


def test_a_kept_cache_looks_new_to_a_model(rehearsed, pair, drafting, prompt):
    """Some models let a first pass look ahead, and tell it by the cache."""
    _, patched = pair()
    pillar, ids = drafting(), prompt(2, 20)
    patched.generate(ids, **NEW, assistant=pillar)
    cache = pillar.kept._held[1].restart()
    assert not cache.is_initialized
    assert cache.get_seq_length() == 0
    assert all(layer.keys is None for layer in cache.layers)


def test_a_timers_hook_does_not_end_recordings(rehearsed, pair, drafting, prompt):
    """`bench generate` notes the end of the prompt by a hook, each time a new one."""
    _, patched = pair()
    pillar, ids = drafting(), prompt(2, 20)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for _ in range(3):
        timed_batch(patched, inputs, end_tokens=frozenset(), **NEW, assistant=pillar)
    assert len(rehearsed) == 1


def test_what_a_model_runs_is_told_while_other_threads_switch_fused_layers_on(tiny_model):
    patched = pillarattn.patch(tiny_model("llama"))
    switch, alone = patched.pillarattn_record.fused, code_of(patched)
    ended = []

    def flicker():
        fused = FusedLayers(patched, pillarattn.PillarCache(), switch)
        while not ended:
            with switch.on(fused):
                pass

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(flicker)
        try:
            found = {code_of(patched) for _ in range(200)}
        finally:
            ended.append(True)
        other.result()
    assert found == {alone}


def test_rounds_of_a_gate_share_four_shapes(rehearsed, pair, prompt, monkeypatch):
    """Each k would be a verify pass of its own, and each s a selection of its own."""
    plain, patched = pair()
    ids, new = prompt(2, 30), {"max_new_tokens": 120, "do_sample": False}
    choices = [(0, 0.1), (2, 0.1), (3, 0.5), (7, 0.1), (0, 0.1), (16, 0.5), (4, 0.5)] * 4

    class Restless(CostGate):
        def choose(self, length, room):
            k, s = choices.pop(0) if choices else (5, 0.5)
            return Choice(k, s, 1, "test")

    monkeypatch.setattr(SelfSpeculativeGenerator, "new_gate", lambda *_: Restless(ss=(0.1, 0.5)))
    pillar = SelfSpeculativeGenerator(k="auto", s="auto", min_budget=4)
    out = patched.generate(ids, **new, assistant=pillar)
    assert torch.equal(out, plain.generate(ids, **new))
    (passes,) = rehearsed
    assert passes.reason is None
    held = pillar.kept.take(pillar.kept._held[0]).captured._kept.values()
    kinds = {(one.step.phase, one.width) for one in held}
    wide = {(Phase.VERIFY, 9), (Phase.VERIFY, 17)}
    assert {(Phase.VERIFY, 9), (Phase.DRAFT, 1)} <= kinds
    assert kinds <= {*wide, (Phase.DRAFT, 1), (Phase.VERIFY, 1)}
    assert len(held) == len(kinds)
    assert len(pillar.stats.decisions) > 5
