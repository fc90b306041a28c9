"""`pillarattn bench --plan`: tables, JSON, sources of models and acceptance, readable mistakes."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from pillarattn.cli.bench import bench
from pillarattn.theory.acceptance import mean_accepted
from pillarattn.theory.hardware import HARDWARE
from pillarattn.theory.known_models import KNOWN_MODELS
from pillarattn.theory.planner import Workload, expect
from pillarattn.theory.roofline import KERNELS
from pillarattn.theory.shape_reading import shape_from_config

QWEN = ["--model", "qwen3-8b", "--batch", 32, "--length", 16384, "--schedule", "unified"]


def run(*arguments):
    # As in the command itself, where bench is one of several.
    app = typer.Typer(pretty_exceptions_enable=False)
    app.add_typer(bench)
    app.command("other")(lambda: None)
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def plan_of(*arguments):
    result = run("--plan", *arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_flag_and_the_command_are_one():
    by_flag, by_command = run("--plan", *QWEN), run("plan", *QWEN)
    assert by_flag.exit_code == 0, by_flag.output
    assert by_flag.output == by_command.output
    assert run(*QWEN, "--plan").output == by_flag.output


def test_the_tables_say_what_to_expect():
    result = run("--plan", *QWEN)
    for words in (
        "Qwen3-8B: 8.19 B parameters, 16.4 GB; 147,456 B of cache per token",
        "measured on one H200",
        "plain step",
        "verify pass",
        "92.5 GB",
        "tokens per round",
        "speed-up",
        "2.36x",
        "pays from this batch on",
        "sequences that fit",
        "5.11x / 0.80x / 0.42x",
        "Speculation pays",
    ):
        assert words in result.output
    assert "\x1b" not in result.output


def test_json_alone_is_on_stdout_and_is_what_the_library_computes():
    result = run("--plan", *QWEN, "--json", "-")
    record = json.loads(result.stdout)
    assert "Where it pays" in result.stderr
    work = Workload(
        shape_from_config(KNOWN_MODELS["Qwen3-8B"]),
        HARDWARE["H200-measured"],
        32,
        16384,
        KERNELS,
        "unified",
    )
    found = expect(work, k=8, s=0.05, accepted=0.77 * 8)
    assert record["expected"]["kernels"]["speedup"] == pytest.approx(found.speedup)
    assert record["mean_accepted"] == pytest.approx(6.16)
    assert record["fits"] is True
    assert record["sequences_fit"] <= record["sequences_fit_plain"] == 50


def test_it_needs_no_arguments_and_warns_of_a_bad_idea():
    result = run("--plan", "--model", "qwen3-8b", "--acceptance", 0.2)
    assert result.exit_code == 0
    assert "Do not speculate here" in result.output
    assert run("--plan").exit_code == 0
    assert "SmolLM2-135M" in run("--plan").output


def test_what_does_not_fit_is_said():
    result = run("--plan", *QWEN, "--gpu", "rtx 4090")
    assert "32 sequences do not fit into memory" in result.output
    assert "a vendor's peak is not reached" in result.output
    assert plan_of(*QWEN, "--gpu", "rtx 4090")["fits"] is False


def test_own_hardware():
    own = ["--gpu", "my cpu", "--bandwidth", 0.05, "--tflops", 0.5, "--memory", 16]
    record = plan_of("--model", "smollm2", *own)
    assert record["hardware"]["name"] == "my cpu"
    assert record["hardware"]["bandwidth"] == 0.05e12
    assert record["hardware"]["memory"] == 16e9


def test_a_folder_is_counted_exactly(tiny_checkpoint, tiny_model):
    record = plan_of("--model", tiny_checkpoint, "--length", 100)
    model = tiny_model("llama")
    assert record["model"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert record["model"]["weight_bytes"] == 4 * record["model"]["parameters"]
    assert record["model"]["layers"] == 2


def test_a_model_type_is_enough():
    assert plan_of("--model", "mistral")["model"]["full_layers"] == 0
    assert "no layer of this model can be sparse" in run("--plan", "--model", "mistral").output


def test_a_config_file_is_enough(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(KNOWN_MODELS["Qwen3-8B"]))
    record = plan_of("--model", path)
    # Counted in the family's own structure, norms included.
    assert record["model"]["parameters"] == 8_190_735_360
    # A family that transformers does not know is read by rule.
    path.write_text(json.dumps({**KNOWN_MODELS["Qwen3-8B"], "model_type": "my-own"}))
    assert plan_of("--model", path)["model"]["parameters"] == 8_190_427_136


def test_widths_and_latents_are_options():
    half = plan_of(*QWEN, "--weight-bytes", 1, "--kv-bytes", 1)["passes"]["plain step"]
    full = plan_of(*QWEN)["passes"]["plain step"]
    assert half["bytes"] == full["bytes"] / 2
    latent, expanded = (
        plan_of("--model", "deepseek-v3", "--mla", mla)["passes"]["draft step"]
        for mla in ("latent", "expanded")
    )
    assert expanded["bytes"] > latent["bytes"]


def test_acceptance_of_a_run_is_used(tmp_path):
    path = tmp_path / "run.json"
    stats = {"accepted_by_position": [90, 60, 10], "drafted_by_position": [100, 100, 100]}
    path.write_text(json.dumps({"command": "generate", "stats": stats}))
    record = plan_of(*QWEN, "--k", 3, "--acceptance-file", path)
    assert record["mean_accepted"] == pytest.approx(1.6)
    # Nobody measured a fourth draft.
    assert max(one["k"] for one in record["tried"]) == 3


def test_acceptance_of_a_probe_is_used(tmp_path):
    path = tmp_path / "probe.jsonl"
    records = [
        {"strategy": name, "k": 8, "s": s, "mean_accepted": accepted}
        for name, s, accepted in (
            ("pillar", 0.02, 3.0),
            ("pillar", 0.1, 6.5),
            ("uniform", 0.1, 1.0),
        )
    ]
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    measured = ["--acceptance-file", path, "--strategy", "pillar"]
    record = plan_of(*QWEN, "--s", 0.02, *measured)
    assert record["mean_accepted"] == pytest.approx(3.0)
    assert record["best"]["s"] == 0.1


def test_a_plain_rate_assumes_one_chance_per_draft():
    record = plan_of(*QWEN, "--k", 2, "--acceptance", 0.72)
    # 0.8 + 0.8^2 = 2 * 0.72
    third = next(one for one in record["tried"] if one["k"] == 3)
    assert third["mean_accepted"] == pytest.approx(mean_accepted(0.8, 3))


def test_the_plan_is_written_to_a_file(tmp_path):
    path = tmp_path / "plan.json"
    assert run("--plan", "--json", path).exit_code == 0
    assert json.loads(path.read_text())["command"] == "bench plan"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h300"], "unknown hardware 'h300'"),
        (["--gpu", "cpu", "--bandwidth", 1], "missing: --tflops, --memory"),
        (["--gpu", "x", "--bandwidth", 0, "--tflops", 1, "--memory", 1], "bandwidth of hardware"),
        (["--model", "no/such/folder/here"], "no/such/folder/here"),
        (["--k", 0], "--k must be within 1 and 256, got 0"),
        (["--max-k", 1000], "--max-k must be within 1 and 256"),
        (["--s", 0], "0 < s <= 1"),
        (["--s", "nan"], "0 < s <= 1"),
        (["--batch", 0], "batch must be an integer >= 1"),
        (["--length", -5], "length must be an integer >= 1"),
        (["--prompt", 0], "prompt must be at least 1"),
        (["--acceptance", 1.5], "--acceptance must be within 0 and 1"),
        (["--acceptance", "nan"], "--acceptance must be within 0 and 1"),
        (["--acceptance-file", "no-such.json"], "is not a file"),
        (["--schedule", "random"], "schedule must be one of"),
        (["--efficiency", "best"], "unknown efficiency 'best'"),
        (["--scores", "all"], "scores must be one of"),
        (["--mla", "both"], "mla must be one of"),
        (["--weight-bytes", 0], "--weight-bytes must be within"),
        (["--kv-bytes", 9], "--kv-bytes must be within"),
        (["--json", "no/such/folder/x.json"], "does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message):
    result = run("--plan", *arguments)
    assert result.exit_code == 2, result.output
    line = result.stderr.strip()
    assert line.startswith("Error: ")
    assert message in line
    assert "\n" not in line
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "{", "is not JSON"),
        ("config.json", "[1]", "must hold one JSON object"),
        ("config.json", "{}", "must give a positive integer"),
        ("config.json", '{"model_type": "qwen3", "hidden_size": "wide"}', "hidden_size"),
    ],
)
def test_a_bad_config_file_is_named(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    result = run("--plan", "--model", path)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"k": 3}', '[{"k": 8, "s": 0.05}]'])
@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_a_bad_acceptance_file_is_named(tmp_path, text, suffix):
    path = tmp_path / f"measured.{suffix}"
    path.write_text(text)
    result = run("--plan", "--acceptance-file", path)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["--help"], ["plan", "--help"]])
def test_help_is_complete(arguments):
    output = run(*arguments).output
    for option in ["--plan"] if "plan" not in arguments else ["--gpu", "--acceptance", "--json"]:
        assert option in output


def test_options_need_the_flag():
    assert run("--k", 8).exit_code == 2
