"""A killed run goes on where it was: what is finished is read, the rest is decoded."""

from __future__ import annotations

import pytest

from pillarattn.engine.request import SamplingParams

NEW = 12


def killed(run, prompts, params, path, after):
    """Generate until `after` outputs have ended, then be interrupted."""
    step, ended = run.step, []

    def interrupted():
        if len(ended) >= after:
            raise KeyboardInterrupt
        outputs = step()
        ended.extend(o for o in outputs if o.finished)
        return outputs

    run.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        run.generate(prompts, params, checkpoint=path)
    assert not run.has_unfinished
    assert run.scheduler.pool.used == 0
    return [o.request_id for o in ended]


def counted(run):
    """Return the list that `run.add_request` files its ids in."""
    added, add = [], run.add_request

    def counting(*args, **kwargs):
        added.append(kwargs["request_id"])
        return add(*args, **kwargs)

    run.add_request = counting
    return added


def test_finished_work_is_not_done_again(engine, prompts, tmp_path):
    path, params = tmp_path / "out" / "run.jsonl", SamplingParams(max_tokens=NEW)
    wanted = engine().generate(prompts, params)
    ended = killed(engine(max_batch=2), prompts, params, path, after=3)
    # The kill tears the line that is being written.
    path.write_bytes(path.read_bytes() + b'{"key": "abc", "out')
    run = engine()
    added = counted(run)
    outputs = run.generate(prompts, params, checkpoint=path)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted]
    assert [o.request_id for o in outputs] == [str(i) for i in range(6)]
    assert sorted(added + ended) == [str(i) for i in range(6)]
    run = engine()
    added = counted(run)
    again = run.generate(prompts, params, checkpoint=path)
    assert again == outputs
    assert added == []


def test_samples_of_one_prompt_are_kept_one_by_one(engine, prompts, tmp_path):
    path = tmp_path / "run.jsonl"
    params = SamplingParams(max_tokens=NEW, temperature=1.0, seed=3, n=4)
    wanted = engine().generate(prompts[:2], params)
    killed(engine(max_batch=2), prompts[:2], params, path, after=3)
    outputs = engine().generate(prompts[:2], params, checkpoint=path)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted]


@pytest.mark.parametrize(
    "change", ["prompt", "max_tokens", "temperature", "seed", "stop_token_ids", "model"]
)
def test_what_decides_an_output_decides_its_key(engine, prompts, tmp_path, change):
    path, params = tmp_path / "run.jsonl", {"max_tokens": NEW, "temperature": 1.0, "seed": 1}
    engine().generate(prompts[:1], SamplingParams(**params), checkpoint=path)
    new = {"max_tokens": 5, "temperature": 0.5, "seed": 2, "stop_token_ids": (3,)}
    if change in new:
        params[change] = new[change]
    run = engine("qwen2" if change == "model" else "llama")
    added = counted(run)
    prompt = prompts[1] if change == "prompt" else prompts[0]
    run.generate([prompt], SamplingParams(**params), checkpoint=path)
    assert added == ["0"]


def test_failures_are_tried_again(engine, prompts, tmp_path):
    path = tmp_path / "run.jsonl"
    long = SamplingParams(max_tokens=100)
    (output,) = engine(kv_tokens=64).generate(prompts[:1], long, checkpoint=path)
    assert output.finish_reason == "error"
    (output,) = engine(kv_tokens=256).generate(prompts[:1], long, checkpoint=path)
    assert output.finish_reason == "length"


def test_processors_cannot_be_told_apart(engine, prompts, tmp_path):
    params = SamplingParams(logits_processors=[lambda ids, logits: logits])
    with pytest.raises(ValueError, match="cannot tell logits processors apart"):
        engine().generate(prompts, params, checkpoint=tmp_path / "run.jsonl")


def test_calls_are_checked(engine, prompts):
    run = engine()
    with pytest.raises(ValueError, match="2 prompts and 1 params"):
        run.generate(prompts[:2], [SamplingParams()])
    run.add_request(prompts[0])
    with pytest.raises(ValueError, match="1 requests are unfinished"):
        run.generate(prompts)
