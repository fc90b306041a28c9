"""The one method that patching binds: `generate` that takes `assistant=`."""

from __future__ import annotations

import copy
from typing import Any

from transformers.generation import StoppingCriteriaList, StopStringCriteria

from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.patch.compat import PreTrainedModel
from pillarattn.patch.options import check_call


class PatchedGenerate:
    """`model.generate` of a patched model.

    Without `assistant=` it is the model's own method. A class, not a closure, so that a patched
    model can be pickled and deep-copied.
    """

    def __init__(self, model: PreTrainedModel, original: Any = None) -> None:
        self.model = model
        self.original = original

    def __call__(self, *args: Any, assistant: Any = None, **kwargs: Any) -> Any:
        """Generate; `assistant` is a `SelfSpeculativeGenerator` or None.

        Raises:
            UnsupportedOptionError: an argument competes with `assistant=`.
            TypeError: `assistant` is something else.
        """
        if assistant is None and isinstance(
            kwargs.get("custom_generate"), SelfSpeculativeGenerator
        ):
            assistant = kwargs.pop("custom_generate")
        if assistant is None:
            return self._stock(*args, **kwargs)
        if not isinstance(assistant, SelfSpeculativeGenerator):
            raise TypeError(
                "assistant= takes a pillarattn.SelfSpeculativeGenerator, got "
                f"{type(assistant).__name__}; a draft model goes into assistant_model="
            )
        check_call(kwargs)
        kwargs = self._with_stop_strings(args, kwargs)
        streamer = kwargs.get("streamer")

        def decoding_method(model: Any, input_ids: Any, **prepared: Any) -> Any:
            # generate keeps the streamer to itself, apart from putting the prompt.
            return assistant(model, input_ids, streamer=streamer, **prepared)

        return self._stock(*args, custom_generate=decoding_method, **kwargs)

    def _stock(self, *args: Any, **kwargs: Any) -> Any:
        if self.original is not None:
            return self.original(*args, **kwargs)
        return type(self.model).generate(self.model, *args, **kwargs)

    def _with_stop_strings(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Turn stop strings into a criterion: `generate` loses the tokenizer on the way to us."""
        config = kwargs.get("generation_config")
        if config is None:
            config = next((a for a in args[1:2] if a is not None), None)
        strings = kwargs.get("stop_strings")
        if strings is None:
            strings = getattr(config or self.model.generation_config, "stop_strings", None)
        tokenizer = kwargs.get("tokenizer")
        if strings is None or tokenizer is None:
            return kwargs
        kwargs = dict(kwargs)
        config = copy.deepcopy(config or self.model.generation_config)
        config.stop_strings = None
        kwargs.update(generation_config=config, stop_strings=None)
        criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
        criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
        kwargs["stopping_criteria"] = criteria
        return kwargs
