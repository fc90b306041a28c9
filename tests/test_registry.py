"""`Registry`: names to classes, with errors that say which names exist."""

from __future__ import annotations

import pytest

from pillarattn.errors import PillarError, UnknownNameError
from pillarattn.registry import Registry


@pytest.fixture
def registry():
    filled: Registry[object] = Registry("strategy")

    @filled.register("second")
    class Second:
        pass

    @filled.register("first")
    class First:
        pass

    return filled


def test_a_registered_class_comes_back_unchanged():
    registry: Registry[object] = Registry("strategy")

    class Mine:
        pass

    assert registry.register("mine")(Mine) is Mine
    assert registry.get("mine") is Mine


def test_names_are_sorted_and_a_copy(registry):
    assert registry.names() == ["first", "second"]
    assert list(registry) == ["first", "second"]
    registry.names().append("third")
    assert "third" not in registry


@pytest.mark.parametrize(("name", "held"), [("first", True), ("third", False), (3, False)])
def test_membership(registry, name, held):
    assert (name in registry) is held


@pytest.mark.parametrize("name", ["frist", "", None, 3, ["first"]])
def test_an_unknown_name_lists_the_known_ones(registry, name):
    with pytest.raises(UnknownNameError, match="unknown strategy") as error:
        registry.get(name)
    assert repr(name) in str(error.value)
    assert "first, second" in str(error.value)
    assert isinstance(error.value, PillarError)
    assert isinstance(error.value, ValueError)
    assert error.value.__suppress_context__


def test_a_taken_name_is_refused_and_keeps_its_class(registry):
    taken = registry.get("first")

    class Other:
        pass

    with pytest.raises(ValueError, match="'first' is already registered by") as error:
        registry.register("first")(Other)
    assert taken.__qualname__ in str(error.value)
    assert registry.get("first") is taken


def test_the_same_definition_run_again_replaces_the_class():
    registry: Registry[object] = Registry("strategy")

    def cell():
        @registry.register("mine")
        class Mine:
            pass

        return Mine

    first, second = cell(), cell()
    assert first is not second
    assert registry.get("mine") is second


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_name_must_be_a_non_empty_string(registry, name):
    with pytest.raises(ValueError, match="strategy name must be a non-empty string"):
        registry.register(name)


@pytest.mark.parametrize("value", [object(), lambda: None, "text"])
def test_only_classes_are_held(registry, value):
    with pytest.raises(TypeError, match="strategy 'new' must be a class"):
        registry.register("new")(value)
    assert "new" not in registry


def test_registries_share_nothing(registry):
    assert Registry("drafter").names() == []
