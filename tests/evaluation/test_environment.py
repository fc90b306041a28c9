"""The record of where a measurement ran."""

from __future__ import annotations

import json

import torch

from pillarattn.evaluation.environment import environment, package_version


def test_it_names_versions_device_and_threads():
    facts = environment("cpu")
    assert facts["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert facts["device"] == "cpu"
    assert facts["threads"] == torch.get_num_threads()
    json.dumps(facts)


def test_a_missing_package_has_no_version():
    assert package_version("no-such-package-here") is None
