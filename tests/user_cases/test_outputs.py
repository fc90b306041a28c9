"""U07: a streamer gets the prompt once, then each token once and in order, then one end."""

from __future__ import annotations

import threading

import pytest
from transformers import TextIteratorStreamer, TextStreamer

NEW = {"max_new_tokens": 12, "do_sample": False}


class Recording:
    """Keeps the shapes and tokens that it is handed."""

    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        self.puts.append((tuple(value.shape), value.flatten().tolist()))

    def end(self):
        self.ends += 1


def test_u07_a_recording_streamer(plain, patched, draft_model, prompt, accepting, block_guard):
    """Stock assisted decoding puts tensors of another shape than plain decoding does."""
    seen = {}
    for name, model, extra in (
        ("plain", plain, {}),
        ("stock", plain, {"assistant_model": draft_model}),
        ("ours", patched, {"assistant": accepting}),
    ):
        seen[name] = streamer = Recording()
        out = model.generate(prompt(1, 8), **NEW, **extra, streamer=streamer)
        assert [token for _, tokens in streamer.puts for token in tokens] == out[0].tolist()
    assert seen["ours"].puts == seen["plain"].puts
    assert seen["ours"].ends == seen["plain"].ends == 1
    assert seen["stock"].puts != seen["plain"].puts
    block_guard(accepting)


@pytest.mark.parametrize("end", [{"max_new_tokens": 1}, {"max_new_tokens": 5}, {"eos": 3}])
def test_u07_endings_inside_a_block(plain, patched, prompt, accepting, end):
    kwargs = {**NEW, **end}
    if (at := kwargs.pop("eos", None)) is not None:
        kwargs["eos_token_id"] = int(plain.generate(prompt(1, 8), **NEW)[0, 8 + at])
    theirs, mine = Recording(), Recording()
    plain.generate(prompt(1, 8), **kwargs, streamer=theirs)
    patched.generate(prompt(1, 8), **kwargs, streamer=mine, assistant=accepting)
    assert (mine.puts, mine.ends) == (theirs.puts, 1)


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_u07_text_streamers(patched, prompt, accepting, tokenizer, capsys, skip_prompt):
    out = patched.generate(
        prompt(1, 8), **NEW, assistant=accepting,
        streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt),
    )  # fmt: skip
    written = tokenizer.decode(out[0, 8 if skip_prompt else 0 :])
    assert capsys.readouterr().out.split() == written.split()


def test_u07_an_iterator_read_from_another_thread(patched, prompt, accepting, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    outputs = []
    call = lambda: outputs.append(  # noqa: E731
        patched.generate(prompt(1, 8), **NEW, streamer=streamer, assistant=accepting)
    )
    thread = threading.Thread(target=call)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text.split() == tokenizer.decode(outputs[0][0, 8:]).split()


def test_u07_a_character_of_two_tokens(tiny_model, prompt, accepting):
    """A byte-level tokenizer writes a character once its last byte is there, and never twice."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    import pillarattn

    # Tokens are the two bytes of e-acute, by turns.
    names = {"<pad>": 0, "Ã": 1, "©": 2, **{f"x{i}": i for i in range(3, 97)}}
    inner = Tokenizer(models.WordLevel(names, unk_token="<pad>"))
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>")
    model = pillarattn.patch(tiny_model("llama"))

    class Chunks(TextStreamer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.chunks = []

        def on_finalized_text(self, text, stream_end=False):
            self.chunks.append(text)

    streamer = Chunks(tokenizer, skip_prompt=True)
    out = model.generate(
        prompt(1, 8), **NEW, streamer=streamer, assistant=accepting,
        prefix_allowed_tokens_fn=lambda row, ids: [1 + len(ids) % 2],
    )  # fmt: skip
    assert out[0, 8:].tolist() == [1, 2] * 6
    assert "".join(streamer.chunks) == "é" * 6
    assert all(set(chunk) <= {"é"} for chunk in streamer.chunks)


def test_u07_a_batch_and_a_text_streamer(plain, patched, prompt, accepting, tokenizer):
    for model, extra in ((plain, {}), (patched, {"assistant": accepting})):
        with pytest.raises(ValueError, match="batch size 1"):
            model.generate(prompt(2, 8), **NEW, **extra, streamer=TextStreamer(tokenizer))


def test_u07_a_reader_that_goes_away(plain, patched, prompt, accepting):
    class Leaves(Recording):
        def put(self, value):
            super().put(value)
            if len(self.puts) == 4:
                raise BrokenPipeError("the reader went away")

    with pytest.raises(BrokenPipeError):
        patched.generate(prompt(1, 8), **NEW, streamer=Leaves(), assistant=accepting)
    want = plain.generate(prompt(1, 8), **NEW).tolist()
    assert patched.generate(prompt(1, 8), **NEW, assistant=accepting).tolist() == want
    assert patched.generate(prompt(1, 8), **NEW).tolist() == want
