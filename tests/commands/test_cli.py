"""The command: files in, files out, one line for an error, and the same numbers as the functions give."""

import argparse
import io
import json
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.cli import main
from penstock.commands import COMMANDS
from penstock.commands.quantities import parse_bandwidth, parse_bytes, parse_count
from penstock.values import Cluster, LayerProfile, Plan, Profile
from penstock.values.quantities import bandwidth_text, bytes_text, seconds_text

SUBJECT = """
from dataclasses import dataclass
import torch
from torch import nn
import penstock
from neighbour import WIDTH

@dataclass
class Config:
    width: int = WIDTH

def make():
    model = nn.Sequential(nn.Linear(6, Config().width), nn.ReLU(), nn.Linear(Config().width, 2))
    return model, (torch.ones(4, 6),)

def subject():
    model, sample = make()
    return penstock.Subject(model, sample, name="mlp", optimizer=lambda p: [] if len(p[0]) == 2 else torch.optim.SGD(p))

def one_number():
    return 5

def three():
    return 1, 2, 3

def no_model():
    return "linear", (torch.ones(4, 6),)

def broken():
    return [1, 2][3]

def wrong_sample():
    return make()[0], (torch.ones(4, 5),)
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:  # type: ignore[misc]
    """A directory with a model file, a profile, a plan and a cluster."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(SUBJECT)
    Path("neighbour.py").write_text("WIDTH = 8\n")
    layers = tuple(LayerProfile(f"layer{i}", 1e-3, 2e-3, 1e4, 3e4, 1e6) for i in range(4))
    Profile(layers, microbatch_size=8, name="four", device="cpu").save("profile.json")
    Plan.uniform(layers=4, stages=2, microbatches=4).save("plan.yaml")
    Cluster.uniform(2, 12e9, memory_bytes=16e9).save("cluster.yaml")
    yield tmp_path
    for name in ("penstock_subject_model", "neighbour"):
        sys.modules.pop(name, None)


def refused(capsys, *argv: str) -> str:
    """The error of a command that is refused: the one line on stderr, without the name in front."""
    assert main(argv) == 1

    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith("penstock: error: ")
    assert written.err.count("\n") == 1
    return written.err.removeprefix("penstock: error: ").rstrip("\n")


def printed(capsys, *argv: str) -> str:
    assert main(argv) == 0

    written = capsys.readouterr()
    assert written.err == ""
    return written.out


# Quantities


@pytest.mark.parametrize(
    ("text", "bandwidth"),
    [
        ("12e9", 12e9),
        ("10000", 1e4),
        ("12GB/s", 12e9),
        ("12 GB/s", 12e9),
        ("12GBps", 12e9),
        ("2GiB/s", 2 * 2**30),
        ("10Gbps", 1.25e9),
        ("10Gbit/s", 1.25e9),
        ("1.5Tb/s", 1.5e12 / 8),
        ("100kB/s", 1e5),
        ("8bps", 1.0),
    ],
)
def test_bandwidths(text, bandwidth):
    assert parse_bandwidth(text) == bandwidth


@pytest.mark.parametrize(("text", "size"), [("16GiB", 16 * 2**30), ("16GB", 16e9), ("16e9", 16e9), ("5B", 5.0)])
def test_memory_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("parse", "text"),
    [(parse_bandwidth, text) for text in ("", "fast", "10", "10G", "10 gigabit", "0", "-3", "10GB", "1e9 B/s/s")]
    + [(parse_bytes, text) for text in ("", "16G", "16Gb", "0", "16GB/s", "-1")]
    + [(parse_count, text) for text in ("0", "-1", "1.5", "two", "")],
)
def test_what_is_no_quantity_is_refused_with_examples(parse, text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected"):
        parse(text)


def test_quantities_have_three_digits_and_a_unit():
    seconds, sizes = (0, 2e-9, 1.234e-5, 0.15, 12.0, 345.6), (0, 12, 1536, 4.5e6, 16e9, 2e12)
    assert ", ".join(map(seconds_text, seconds)) == "0, 2 ns, 12.3 us, 150 ms, 12 s, 346 s"
    assert ", ".join(map(bytes_text, sizes)) == "0, 12 B, 1.54 kB, 4.5 MB, 16 GB, 2 TB"
    assert bandwidth_text(1.25e9) == "1.25 GB/s"


# The command line


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    first, system, *tested = capsys.readouterr().out.splitlines()
    assert (stop.value.code, first) == (0, f"penstock {penstock.__version__}")
    assert system.startswith(f"Python {platform.python_version()}, PyTorch {torch.__version__}")
    assert "CPUs" in tested[0]


@pytest.mark.parametrize("command", [command.name for command in COMMANDS if command.name != "probe"])
def test_every_command_has_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"example:\n  penstock {command} " in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["train"],
        ["plan"],
        ["plan", "p.json", "--devices", "0"],
        ["plan", "p.json", "--devices", "2", "--bandwidth", "10G"],
        ["verify", "plan.yaml", "--minibatches", "x"],
    ],
)
def test_a_wrong_command_line_ends_with_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert "usage: penstock" in capsys.readouterr().err


def run_module(*arguments: str, folder: Path) -> tuple[int, str, str]:
    """Exit code, output and errors of ``python -m penstock ARGUMENTS``."""
    command = [sys.executable, "-m", "penstock", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    return done.returncode, done.stdout, done.stderr


def test_an_error_is_red_on_a_terminal(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    assert main(["show", "nowhere.yaml"]) == 1
    assert capsys.readouterr().err.startswith("\x1b[1;31mpenstock: error:\x1b[0m nowhere.yaml")


def test_completion_needs_a_package(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)

    assert refused(capsys, "completion", "zsh").endswith("found none: pip install 'shtab>=1.9'")


@pytest.mark.processes
def test_bash_completes_commands_options_and_files(here: Path, capsys: Any) -> None:
    pytest.importorskip("shtab", reason="the extra `test` brings it")
    Path("penstock.bash").write_text(printed(capsys, "completion", "bash"))
    script = """
        . ./penstock.bash
        complete_words() {
            COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
            _shtab_penstock penstock "${COMP_WORDS[COMP_CWORD]}" ""
            echo "${COMPREPLY[@]}"
        }
        complete_words penstock pro
        complete_words penstock plan --band
        complete_words penstock show prof
        complete_words penstock completion z
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=240, cwd=here)

    assert (done.stdout.splitlines(), done.stderr) == (["profile probe", "--bandwidth", "profile.json", "zsh"], "")
    for shell in ("zsh", "fish"):
        assert "frontier" in json.loads(printed(capsys, "completion", shell, "--json"))["script"]


@pytest.mark.parametrize("name", ["k\N{LATIN SMALL LETTER O WITH DIAERESIS}pfe", "\N{CJK UNIFIED IDEOGRAPH-5C64}"])
def test_names_are_printed_where_the_terminal_lacks_their_characters(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    Profile((LayerProfile(name, 1.0, 1.0, cut_bytes=1.0, saved_bytes=1.0, parameter_bytes=1.0),), 4).save(path)
    for encoding, shown in (("ascii", name.encode("ascii", "backslashreplace").decode()), ("utf-8", name)):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
        assert main(["show", str(path)]) == 0
        assert shown in written.getvalue().decode(encoding)


def test_a_profile_without_times_is_explained_without_numbers_that_are_none() -> None:
    nothing = Profile(
        tuple(LayerProfile(f"l{i}", 0.0, 0.0, cut_bytes=1e5, saved_bytes=1e6, parameter_bytes=4e6) for i in range(4)), 4
    )
    for bandwidth in (1e9, float("inf")):
        assert "nan" not in penstock.plan(nothing, Cluster.uniform(2, bandwidth)).explain()


@pytest.mark.processes
def test_the_package_runs_as_a_module(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "cluster.yaml"]) == 0
    assert run_module("show", "cluster.yaml", folder=here) == (0, capsys.readouterr().out, "")

    code, text, _ = run_module("plan", "--help", folder=here)
    assert (code, text.partition(" [-h]")[0]) == (0, "usage: python -m penstock plan")
    assert "example:\n  python -m penstock plan " in text
    assert run_module("show", "missing.yaml", folder=here)[0] == 1
    assert run_module("plot", folder=here)[0] == 2


@pytest.mark.processes
@pytest.mark.parametrize("argv", ["['--help']", "['plan', '--help']", "['show', 'cluster.yaml']"])
def test_what_needs_no_torch_does_not_wait_for_it(argv, here):
    program = f"""
import sys
from penstock.cli import main
try:
    main({argv})
finally:
    assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.processes
@pytest.mark.parametrize("words", ["show profile.json", "--version"])
def test_a_reader_that_leaves_early_is_no_error(here, words):
    command = f"{sys.executable} -c 'from penstock.cli import main; main()' {words} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=240)

    assert done.stderr == ""


# profile


def test_profile_writes_the_file_and_prints_the_table(here, capsys):
    out = printed(capsys, "profile", "model.py:subject", "-o", "out.json", "--iterations", "1", "--warmup", "1")
    found = Profile.load("out.json")

    assert [layer.parameter_bytes for layer in found.layers] == [(6 * 8 + 8) * 4, 0, (8 * 2 + 2) * 4]
    assert [layer.cut_bytes for layer in found.layers] == [4 * 8 * 4, 4 * 8 * 4, 4 * 2 * 4]
    # The subject's optimizer steps no parameter of the last layer.
    assert [layer.update_seconds > 0 for layer in found.layers] == [True, False, False]
    assert (found.name, found.microbatch_size, found.device) == ("mlp", 4, "cpu")
    assert out.startswith("profile of mlp, cpu: 3 layers, microbatches of 4 samples\n")
    assert out.endswith("wrote out.json\n")
    assert [line.split()[:2] for line in out.splitlines()[2:5]] == [
        [str(index), layer.name] for index, layer in enumerate(found.layers)
    ]


def test_profile_under_autocast(here, capsys):
    options = ["model.py:make", "--json", "--iterations", "1", "--warmup", "1"]
    whole, half = (json.loads(printed(capsys, "profile", *options, *more)) for more in ([], ["--autocast", "bf16"]))

    assert 2 * half["layers"][0]["cut_bytes"] == whole["layers"][0]["cut_bytes"]


def test_profile_of_what_links_carry(here, capsys):
    options = ["model.py:make", "--iterations", "1", "--warmup", "1", "--wire-dtype"]
    half = json.loads(printed(capsys, "profile", *options, "bf16", "--json"))
    rows = printed(capsys, "profile", *options, "int8")

    assert [layer["wire_bytes"] for layer in half["layers"]] == [layer["cut_bytes"] / 2 for layer in half["layers"]]
    assert ["128 B  40 B" in line for line in rows.splitlines()[2:5]] == [True, True, False]


def test_profile_for_machines(here, capsys):
    out = json.loads(printed(capsys, "profile", "model.py:make", "--json", "--iterations", "1", "--name", "given"))

    assert (out["name"], out["microbatch_size"], len(out["layers"])) == ("given", 4, 3)
    assert set(out["layers"][0]) == set(LayerProfile.__slots__)


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("nowhere.py:make", "nowhere.py: no such file: expected FILE.py:FUNCTION, found 'nowhere.py:make'"),
        ("model.py", "model.py: expected FILE.py:FUNCTION, found no function; choose one of this file: make, subject"),
        ("model.py:mak", "model.py: there is no function 'mak'. Did you mean 'make'? The functions of this file"),
        ("model.py:one_number", "model.py:one_number returned an object of type int: expected (model, sample) or"),
        ("model.py:three", "model.py:three returned a tuple of 3: expected (model, sample)"),
        ("model.py:no_model", "model.py:no_model returned an object of type str as the model: expected (model"),
        ("model.py:broken", "model.py, line 30: IndexError when model.py broken() was called: list index out of range"),
    ],
)
def test_a_subject_that_is_not_as_expected(here, capsys, spec, error):
    assert refused(capsys, "profile", spec).startswith(error)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("x = 1\ny = x / 0\n", "bad.py, line 2: ZeroDivisionError when bad.py was imported: division by zero"),
        ("def f(:\n", "bad.py, line 1: SyntaxError when bad.py was imported: "),
        ("raise SystemExit(3)\n", "bad.py, line 1: SystemExit when bad.py was imported: 3; what a script does belongs"),
    ],
)
def test_a_file_that_cannot_be_imported(here, capsys, source, error):
    Path("bad.py").write_text(source)

    assert refused(capsys, "profile", "bad.py:make").startswith(error)


def test_a_traceback_is_shown_on_request(here, capsys):
    assert main(["profile", "model.py:broken", "--traceback"]) == 1

    written = capsys.readouterr().err
    assert "return [1, 2][3]" in written
    assert written.splitlines()[-1].startswith("penstock: error: model.py, line 30: ")


# plan


def test_plan_writes_what_the_function_makes(here, capsys):
    out = printed(capsys, "plan", "profile.json", "cluster.yaml", "--straight", "--microbatches", "8", "-o", "out.yaml")
    made = penstock.plan(Profile.load("profile.json"), Cluster.load("cluster.yaml"), straight=True, microbatches=8)

    assert Plan.load("out.yaml") == made
    assert out == (
        f"{made.explain()}\nTrain with penstock.Pipeline(..., plan=penstock.Plan.load('out.yaml')).\nwrote out.yaml\n"
    )


def test_plan_on_devices_without_a_cluster_file(here, capsys):
    options = ["--planner", "uniform", "--schedule", "2bw", "--stages", "4", "--microbatches", "4", "--json"]
    out = json.loads(printed(capsys, "plan", "profile.json", "--devices", "4", "--bandwidth", "10Gbps", *options))

    assert [stage["ranks"] for stage in out["stages"]] == [[0], [1], [2], [3]]
    assert (out["schedule"], out["microbatches"]) == ("2bw", 4)


def test_plan_respects_the_memory(here, capsys):
    error = refused(capsys, "plan", "profile.json", "--devices", "2", "--bandwidth", "1GB/s", "--memory", "1kB")

    assert "expected a plan with at most 1 kB on each of 2 devices" in error
    assert "Each of these would be enough: 8.08 MB on each device" in error


def test_plan_needs_one_cluster(here, capsys):
    assert refused(capsys, "plan", "profile.json").startswith(
        "cluster: none was given: expected a cluster file, or --dev"
    )
    assert refused(capsys, "plan", "profile.json", "cluster.yaml", "--devices", "2", "--memory", "1GB").startswith(
        "cluster: cluster.yaml and --devices, --memory were given: expected one of them"
    )


# simulate


def test_simulate_says_what_the_function_says_and_writes_the_files(here, capsys):
    argv = ["simulate", "plan.yaml", "profile.json", "cluster.yaml", "--minibatches", "2"]
    out = printed(capsys, *argv, "--trace", "trace.json", "--svg", "timeline.svg", "--html", "timeline.html")
    plan, profile, cluster = Plan.load("plan.yaml"), Profile.load("profile.json"), Cluster.load("cluster.yaml")
    timeline = penstock.simulate(plan, profile, cluster, minibatches=2)

    assert out.startswith(penstock.render(timeline))
    assert f"{timeline.bubble:.1%} of wall time" in out
    assert out.endswith("wrote trace.json\nwrote timeline.svg\nwrote timeline.html\n")
    assert "<h1>four, 1f1b-flush, predicted</h1>" in Path("timeline.html").read_text()
    assert json.loads(Path("trace.json").read_text())
    assert Path("timeline.svg").read_text().startswith("<svg")
    machine = json.loads(printed(capsys, *argv, "--json"))
    assert (machine["seconds"], machine["bubble"], machine["ranks"]) == (timeline.seconds, timeline.bubble, 2)


def test_links_that_carry_a_share(here, capsys):
    """Half of the bytes at half of the bandwidth take as long."""
    half = ["profile.json", "--bandwidth", "1MB/s", "--wire-share", "0.5"]
    whole = ["profile.json", "--bandwidth", "2MB/s"]

    assert len({printed(capsys, "simulate", "plan.yaml", *options) for options in (half, whole)}) == 1
    explained = printed(capsys, "plan", *half, "--devices", "2", "--straight", "--stages", "2")
    assert "Links carry 50% of what crosses cuts, as with wire_dtype=" in explained


def test_a_file_that_cannot_be_written_is_one_line(here, capsys):
    error = refused(capsys, "simulate", "plan.yaml", "profile.json", "--svg", "nowhere/timeline.svg")

    assert error == "nowhere/timeline.svg: cannot be written: No such file or directory. Give another path"


# verify


def test_verify_proves_the_plan(here, capsys):
    proved = penstock.verify(penstock.schedule(Plan.load("plan.yaml")), minibatches=3)

    assert printed(capsys, "verify", "plan.yaml", "--minibatches", "3") == f"{proved}\n"
    assert json.loads(printed(capsys, "verify", "plan.yaml", "--json"))["in_flight"] == [2, 1]


def test_verify_refuses_a_plan_that_breaks_its_schedule(here, capsys):
    Plan.uniform(layers=4, stages=4, schedule="2bw", microbatches=2).save("plan.yaml")

    assert "2bw" in refused(capsys, "verify", "plan.yaml")


# show


def test_show_prints_a_plan_with_its_picture(here, capsys):
    plan = Plan.load("plan.yaml")

    assert printed(capsys, "show", "plan.yaml") == f"{plan}\n\n{penstock.render(penstock.schedule(plan))}\n"
    assert json.loads(printed(capsys, "show", "plan.yaml", "--json"))["stages"][1] == {
        "start": 2,
        "stop": 4,
        "ranks": [1],
    }


def test_show_prints_a_profile(here, capsys):
    table = """\
profile of four, cpu: 4 layers, microbatches of 8 samples
   layer   forward  backward    cut   saved  parameters  workspace
0  layer0     1 ms      2 ms  10 kB   30 kB        1 MB          0
1  layer1     1 ms      2 ms  10 kB   30 kB        1 MB          0
2  layer2     1 ms      2 ms  10 kB   30 kB        1 MB          0
3  layer3     1 ms      2 ms  10 kB   30 kB        1 MB          0
   sum        4 ms      8 ms         120 kB        4 MB
"""

    assert printed(capsys, "show", "profile.json") == table

    replace(Profile.load("profile.json"), library_bytes=64e6, fragmentation=1.25).save("profile.json")
    noted = (
        "libraries keep 64 MB beside it on every rank; the allocator had reserved 1.25 times what was in use at the "
        "peak\n"
    )
    assert printed(capsys, "show", "profile.json") == table + noted


def test_show_prints_clusters(here, capsys):
    assert printed(capsys, "show", "cluster.yaml") == "cluster: 2 devices, 16 GB each\n  2 devices at 12 GB/s\n"

    Cluster.hierarchical([(4, 12e9), (2, 1.25e9)]).save("cluster.yaml")
    assert printed(capsys, "show", "cluster.yaml") == (
        "cluster: 8 devices, no memory limit\n  4 devices at 12 GB/s\n  2 of these at 1.25 GB/s\n"
    )

    Cluster.from_matrix([[0, 1e9], [2e9, 0]]).save("cluster.yaml")
    assert printed(capsys, "show", "cluster.yaml").splitlines()[1:] == [
        "          to 0    to 1",
        "from 0       -  1 GB/s",
        "from 1  2 GB/s       -",
    ]


def test_a_cluster_is_shown_with_what_messages_and_actions_take(here, capsys):
    Cluster.uniform(2, 12e9).with_costs(
        action_seconds=3e-5, message_seconds=2e-4, message_seconds_per_byte=4e-9, message_blocking=0.5
    ).save("cluster.yaml")
    with Path("cluster.yaml").open("a") as file:
        file.write("step_seconds: 2e-3\n")

    assert printed(capsys, "show", "cluster.yaml").splitlines()[2:] == [
        "  a message takes up to 200 us, 4 ns a byte and 50% of its time on the link of each of its two ranks",
        "  an action takes 30 us beyond its layers",
        "  a step takes 2 ms beyond its actions",
    ]


def test_show_says_which_files_it_knows(here, capsys):
    Path("other.yaml").write_text("a: 1\n")

    assert refused(capsys, "show", "other.yaml").startswith("other.yaml: expected a plan, a profile, a cluster or")
    assert refused(capsys, "show", "plan.yml").startswith("plan.yml: no such file. Did you mean 'plan.yaml'?")


def test_a_profile_under_another_name_is_found_by_its_content(here, capsys):
    Path("profile.json").rename("measured")

    assert printed(capsys, "show", "measured").startswith("profile of four, cpu: 4 layers")


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("plan.yaml", "microbatches: 4", "microbatches: 1e30", "microbatches: expected a whole number from 1 to 65536"),
        ("plan.yaml", "microbatches: 4", "microbatches: 3000000", "from 1 to 65536, found 3000000"),
        ("plan.yaml", "microbatches: 4", f"microbatches: {'1' * 5000}", "cannot be read: Exceeds"),
        ("plan.yaml", "microbatches: 4", f"microbatches: {'[' * 5000}", "a depth that cannot be read"),
        ("plan.yaml", "ranks: [1]", "ranks: [1e30]", "to hold a stage each, found none on"),
        ("cluster.yaml", "bytes_per_second: ", f"bytes_per_second: {'[' * 5000}", "a depth that cannot be read"),
        ("profile.json", '"microbatch_size": ', f'"microbatch_size": {"[" * 100_000}', "a depth that cannot be read"),
        ("profile.json", '"microbatch_size": ', f'"microbatch_size": {"1" * 5000}', "cannot be read: Exceeds"),
    ],
)
def test_a_file_of_absurd_values_is_refused(here, capsys, name: str, old: str, new: str, message: str) -> None:
    text = Path(name).read_text()
    assert old in text
    Path(name).write_text(text.replace(old, new, 1))
    error = refused(capsys, "show", name)

    assert name in error and message in error
