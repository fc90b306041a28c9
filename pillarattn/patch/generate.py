"""The one method that patching binds: `generate` that takes `assistant=`."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from transformers.generation import StoppingCriteriaList, StopStringCriteria

from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.patch.compat import PreTrainedModel
from pillarattn.patch.options import check_call, effective


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
        kwargs = self._named(args, kwargs)
        check_call(kwargs, config=kwargs.get("generation_config"), model=self.model)
        kwargs.pop("custom_generate", None)
        kwargs = self._with_stop_strings(kwargs)
        streamer = kwargs.get("streamer")

        def decoding_method(model: Any, input_ids: Any, **prepared: Any) -> Any:
            # generate keeps the streamer to itself, apart from putting the prompt.
            return assistant(model, input_ids, streamer=streamer, **prepared)

        return self._stock(custom_generate=decoding_method, **kwargs)

    def _stock(self, *args: Any, **kwargs: Any) -> Any:
        if self.original is not None:
            return self.original(*args, **kwargs)
        return type(self.model).generate(self.model, *args, **kwargs)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Give positional arguments their names, so that none is looked for in vain."""
        signature = inspect.signature(type(self.model).generate)
        bound = signature.bind_partial(self.model, *args, **kwargs).arguments
        extra = bound.pop("kwargs", {})
        named = {name: value for name, value in bound.items() if name != "self"}
        return {**named, **extra}

    def _with_stop_strings(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Turn stop strings into a criterion: `generate` loses the tokenizer on the way to us."""
        config, tokenizer = kwargs.get("generation_config"), kwargs.get("tokenizer")
        strings = effective("stop_strings", kwargs, config=config, model=self.model)
        if strings is None or tokenizer is None:
            return kwargs
        criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
        criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
        changes: dict[str, Any] = {"stopping_criteria": criteria}
        if getattr(config, "stop_strings", None) is not None:
            changes["generation_config"] = copy.deepcopy(config)
            changes["generation_config"].stop_strings = None
        if "stop_strings" in kwargs or self.model.generation_config.stop_strings is not None:
            changes["stop_strings"] = None
        return {**kwargs, **changes}
