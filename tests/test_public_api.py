"""The public names: exactly these, each documented, and one version."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

import pytest

import pillarattn

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = {
    "AssistantDrafter",
    "DraftHead",
    "Drafter",
    "Eagle3Head",
    "Engine",
    "EngineConfig",
    "HeadDrafter",
    "HeadShape",
    "LosslessReport",
    "MtpHead",
    "PillarAttention",
    "PillarCache",
    "PillarConfig",
    "RequestOutput",
    "SamplingParams",
    "SelfSpeculativeGenerator",
    "Strategy",
    "UnsupportedModelError",
    "acceptance_probe",
    "check_lossless",
    "patch",
    "register_strategy",
    "unpatch",
}
MODULES = {"theory"}
CLASSES = {name for name in PUBLIC if name[0].isupper()}


def test_all_lists_exactly_the_public_names():
    assert set(pillarattn.__all__) == PUBLIC | MODULES
    assert len(pillarattn.__all__) == len(PUBLIC | MODULES)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_is_there_and_documented(name):
    value = getattr(pillarattn, name)
    assert inspect.isclass(value) == (name in CLASSES)
    # `value.__doc__` of a class is its own; `inspect.getdoc` would take its base's.
    assert value.__doc__
    assert value.__doc__.strip()
    assert not value.__doc__.startswith(f"{name}("), (
        "a dataclass without a docstring gets its signature"
    )


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_is_defined_here_under_that_name(name):
    value = getattr(pillarattn, name)
    assert value.__name__ == name
    assert value.__module__.split(".")[0] == "pillarattn"


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_public_methods_are_documented(name):
    own = vars(getattr(pillarattn, name)).items()
    methods = {
        key: getattr(value, "__func__", value)
        for key, value in own
        if not key.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod, property)))
    }
    assert [key for key, value in methods.items() if not value.__doc__] == []


def test_nothing_else_is_visible():
    visible = {name for name in vars(pillarattn) if not name.startswith("_")}
    # Rooms and leaves become attributes once they are imported. `patch` is both: the function wins.
    modules = {name for name in visible if inspect.ismodule(getattr(pillarattn, name))}
    assert all(getattr(pillarattn, name).__package__.startswith("pillarattn") for name in modules)
    assert visible - modules == PUBLIC


def test_a_star_import_brings_the_public_names_only():
    brought: dict[str, object] = {}
    exec("from pillarattn import *", brought)
    assert set(brought) - {"__builtins__"} == PUBLIC | MODULES


def test_a_wrong_name_is_an_attribute_error():
    with pytest.raises(AttributeError):
        _ = pillarattn.no_such_name


def test_patch_is_the_function_also_after_its_room_was_imported():
    import pillarattn.patch.patching

    assert inspect.isfunction(pillarattn.patch)


def test_the_version_is_that_of_the_project_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pillarattn.__version__ == project["version"]
