"""Bodies of requests, in OpenAI's words, and the `SamplingParams` that they stand for."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pillarattn.engine.prompts import sample_seed
from pillarattn.engine.request import MOST_LOGPROBS, SamplingParams

# Fields whose names and meanings are those of `SamplingParams`.
SAME = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "stop_token_ids", "ignore_eos", "k", "s", "acceptance", "draft_length",
    "draft_share",
)  # fmt: skip


# Each is looked for after every token of everybody's steps.
StopString = Annotated[str, Field(max_length=1024)]


class StreamOptions(BaseModel):
    """What a stream has besides text."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class Body(BaseModel):
    """Fields that both kinds of requests have; unknown ones are refused unless they are null.

    The fields from `top_k` on are not OpenAI's.
    """

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    n: int = Field(1, ge=1, le=1024)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    seed: int | None = Field(None, ge=0)
    stop: StopString | Annotated[list[StopString], Field(max_length=64)] = []
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    user: str | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[int] = Field([], max_length=1024)
    ignore_eos: bool = False
    priority: int = 0
    k: int | None = None
    s: float | None = None
    acceptance: str | None = None
    draft_length: str | None = None
    draft_share: str | None = None

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, values: Any) -> Any:
        """Take null for what is left out, as clients mean it."""
        if isinstance(values, dict):
            return {name: value for name, value in values.items() if value is not None}
        return values

    @property
    def named_logprobs(self) -> int | None:
        """How many of the likeliest tokens to name beside each; None: no log probabilities."""
        raise NotImplementedError

    def sampling(self, sample: int, max_tokens: int) -> SamplingParams:
        """Return how a sample of a prompt is decoded.

        Raises:
            ValueError: a value is out of range.
        """
        return SamplingParams(
            max_tokens=max_tokens,
            stop=self.stop if isinstance(self.stop, str) else tuple(self.stop),
            seed=sample_seed(self.seed, sample),
            logprobs=self.named_logprobs,
            **{name: getattr(self, name) for name in SAME},
        )


class CompletionBody(Body):
    """The body of /v1/completions: one prompt or several, as text or as token ids."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = 16
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    @property
    def named_logprobs(self) -> int | None:
        """See `Body`."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class ChatBody(Body):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)

    @model_validator(mode="after")
    def with_logprobs(self) -> ChatBody:
        """Refuse likeliest tokens beside log probabilities that are not wanted."""
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} needs logprobs=true")
        return self

    @property
    def named_logprobs(self) -> int | None:
        """See `Body`."""
        return self.top_logprobs if self.logprobs else None

    def texts(self) -> list[dict[str, Any]]:
        """Return the messages with parts of text joined by line breaks, as templates expect them.

        Raises:
            ValueError: a part is an image, or something else that is no text.
        """
        return [{**m, "content": _joined(m["content"])} if "content" in m else m
                for m in self.messages]  # fmt: skip


def _joined(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"parts of content must have the type 'text', got {kind!r}")
    return "\n".join(str(part.get("text", "")) for part in content)
