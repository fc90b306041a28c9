"""Streamers get the prompt once, then every token once and in order, then one end."""

from __future__ import annotations

import threading

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer, TextStreamer


class Recording:
    """Keeps everything it is handed."""

    def __init__(self, fail_at=None):
        self.puts, self.ends, self.fail_at = [], 0, fail_at

    def put(self, value):
        if self.fail_at is not None and len(self.puts) == self.fail_at:
            raise RuntimeError("the reader went away")
        assert self.ends == 0
        self.puts.append(value.clone())

    def end(self):
        self.ends += 1


@pytest.fixture(scope="module")
def tokenizer():
    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", unk_token="w0")


def run(model, ids, **kwargs):
    """Generate with a recording streamer; return the output and the streamer."""
    streamer = Recording()
    out = model.generate(ids, do_sample=False, streamer=streamer, **kwargs)
    return out, streamer


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("s", [0.7, 1.0])
@pytest.mark.parametrize("end", [None, "eos", 1, 6, 9])
def test_a_streamer_is_called_as_by_plain_generate(pair, prompt, drafting, batch, s, end):
    plain, patched = pair()
    ids = prompt(batch, 8)
    kwargs = {"max_new_tokens": end if isinstance(end, int) else 18}
    if end == "eos":
        free = plain.generate(ids, max_new_tokens=18, do_sample=False)
        kwargs["eos_token_id"] = [int(row[8 + 4 + 3 * i]) for i, row in enumerate(free)]
    out, theirs = run(plain, ids, **kwargs)
    got, mine = run(patched, ids, **kwargs, assistant=drafting(k=7, s=s))
    assert got.tolist() == out.tolist()
    assert [p.tolist() for p in mine.puts] == [p.tolist() for p in theirs.puts]
    assert len(mine.puts) == 1 + out.shape[1] - 8
    assert mine.ends == theirs.ends == 1


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_text_streamer_prints_the_output(pair, prompt, drafting, tokenizer, capsys, skip_prompt):
    out = pair()[1].generate(
        prompt(1, 8), max_new_tokens=12, do_sample=False, assistant=drafting(k=7, s=1.0),
        streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt),
    )  # fmt: skip
    text = capsys.readouterr().out.split()
    assert text == tokenizer.decode(out[0, 8 if skip_prompt else 0 :]).split()


def test_text_iterator_streamer_in_another_thread(pair, prompt, drafting, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    outputs = []

    def work():
        outputs.append(
            pair()[1].generate(
                prompt(1, 8), max_new_tokens=12, do_sample=False, assistant=drafting(),
                streamer=streamer,
            )
        )  # fmt: skip

    thread = threading.Thread(target=work)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text.split() == tokenizer.decode(outputs[0][0, 8:]).split()


def test_text_streamers_refuse_batches_as_ever(pair, prompt, drafting, tokenizer):
    with pytest.raises(ValueError, match="batch size 1"):
        pair()[1].generate(
            prompt(2, 8), max_new_tokens=4, do_sample=False, assistant=drafting(),
            streamer=TextStreamer(tokenizer),
        )  # fmt: skip


@pytest.mark.parametrize("fail_at", [0, 1, 4])
def test_an_exception_in_put_leaves_the_model_usable(pair, prompt, same, drafting, fail_at):
    plain, patched = pair()
    attention = plain.config._attn_implementation
    with pytest.raises(RuntimeError, match="went away"):
        patched.generate(
            prompt(1, 8), max_new_tokens=12, do_sample=False, assistant=drafting(k=7, s=1.0),
            streamer=Recording(fail_at),
        )  # fmt: skip
    assert patched.config._attn_implementation == attention
    same(plain, patched, drafting(), input_ids=prompt(1, 8), max_new_tokens=12)
    wanted = plain.generate(prompt(1, 8), max_new_tokens=12, do_sample=False)
    assert patched.generate(prompt(1, 8), max_new_tokens=12, do_sample=False).equal(wanted)


def test_streaming_is_not_held_back_to_the_end(pair, prompt, drafting):
    """Tokens of a round are handed out before the next round runs."""
    patched = pair()[1]
    calls = []

    class Watching(Recording):
        def put(self, value):
            super().put(value)
            calls.append(forwards[0])

    forwards = [0]
    handle = patched.register_forward_pre_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
    try:
        patched.generate(
            prompt(1, 8), max_new_tokens=16, do_sample=False, streamer=Watching(),
            assistant=drafting(k=4, s=1.0),
        )  # fmt: skip
    finally:
        handle.remove()
    assert calls[:3] == [0, 1, 6], "the prompt, its first token, and the first round's tokens"
    assert calls[3:7] == [6] * 4
