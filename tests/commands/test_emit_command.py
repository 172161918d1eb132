"""`penstock emit`: jobs that clusters read, start as many processes as the plan has, and let a training save."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli import main
from penstock.fleet.cluster_jobs import CLUSTERS
from penstock.values import Plan

WORDS = ["train.py", "--text", "two words", "$HOME"]
OPTIONS = ["--per-host", "2", "--image", "me/train:1", "--device", "H100", "--seconds", "3600"]
STUB = '#!/bin/sh\nexec {python} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"\n'


@pytest.fixture(autouse=True)
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Plan.uniform(4, 4).save("plan.yaml")


def emit(capsys: Any, cluster: str, *options: str) -> str:
    assert main(["emit", "plan.yaml", "--cluster", cluster, *options, "--", *WORDS]) == 0, capsys.readouterr().err
    return str(capsys.readouterr().out)


def started(text: str, folder: Path, environment: dict[str, str]) -> list[str]:
    """The arguments of torchrun in the script `text`, in which `srun` and `scontrol` stand in for Slurm's."""
    commands = {
        "torchrun": STUB.format(python=shlex.quote(sys.executable)),
        "srun": '#!/bin/sh\nexec "$@"\n',
        "scontrol": '#!/bin/sh\necho "$@" > asked\necho host7\necho host8\n',
    }
    for name, command in commands.items():
        (folder / name).write_text(command)
        (folder / name).chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    ended = subprocess.run(["bash", "-c", text], env=path | environment, capture_output=True, check=True, cwd=folder)
    return [str(word) for word in json.loads(ended.stdout)]


def test_a_slurm_script_starts_torchrun_on_every_host(tmp_path: Path, capsys: Any) -> None:
    text = emit(capsys, "slurm", *OPTIONS[:2], *OPTIONS[4:])

    words = started(text, tmp_path, {"SLURM_JOB_NODELIST": "host[7-8]", "SLURM_JOB_ID": "12"})
    assert (tmp_path / "asked").read_text() == "show hostnames host[7-8]\n"
    assert words[-4:] == WORDS
    assert " ".join(words[:-4]) == (
        "--signals-to-handle SIGTERM,SIGINT,SIGUSR1 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host7:29500 "
        "--rdzv-id 12 --nproc-per-node 2"
    )
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if "#SBATCH" in line
    )
    expected = {"job-name": "train", "nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "H100:2", "time": "62"}
    assert options == expected | {"signal": "USR1@120", "requeue": ""}


def test_a_skypilot_task_starts_torchrun_on_every_node(tmp_path: Path, capsys: Any) -> None:
    task = yaml.safe_load(emit(capsys, "skypilot", *OPTIONS))

    words = started(task["run"], tmp_path, {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_TASK_ID": "t 1"})
    assert words[-4:] == WORDS
    assert words[words.index("--rdzv-endpoint") + 1 :][:3] == ["10.0.0.7:29500", "--rdzv-id", "t 1"]
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:2")


def test_kubernetes_starts_a_pod_for_each_host(capsys: Any) -> None:
    made = {name: yaml.safe_load(emit(capsys, name, *OPTIONS)) for name in ("jobset", "trainjob")}

    job = made["jobset"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    command = pod["containers"][0]["command"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    assert command[command.index("--rdzv-endpoint") + 1] == "train-workers-0-0.train:29500"
    assert command[-4:] == WORDS
    assert pod["terminationGracePeriodSeconds"] == 120
    trainer = made["trainjob"]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["command"]) == (2, 2, ["torchrun", *WORDS])


def test_jobs_keep_the_published_schemas(capsys: Any) -> None:
    """Nothing that the models do not know is left over; without these packages, here is nothing to compare with."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for name, model in (("jobset", models.JobsetV1alpha2JobSet), ("trainjob", models.TrainerV1alpha1TrainJob)):
        for options in (OPTIONS, ["--image", "me/train:1"]):
            made = yaml.safe_load(emit(capsys, name, *options))
            assert model.from_dict(made).to_dict() == made


def test_tasks_keep_the_published_schema(capsys: Any) -> None:
    schemas = pytest.importorskip("sky.utils.schemas", exc_type=ImportError)
    jsonschema = pytest.importorskip("jsonschema")
    for options in (OPTIONS, ["--device", "H100"]):
        jsonschema.validate(yaml.safe_load(emit(capsys, "skypilot", *options)), schemas.get_task_schema())


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_one_host_needs_no_meeting(cluster: str, capsys: Any) -> None:
    text = emit(capsys, cluster, *OPTIONS[2:])

    assert ("--standalone" in text) is (cluster != "trainjob")
    assert "rdzv" not in text


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (
            "--cluster slrm",
            "cluster: expected one of slurm, jobset, trainjob, skypilot, found 'slrm': Did you mean 'slurm'",
        ),
        ("--cluster jobset", "image: expected the container"),
        ("--cluster skypilot", "device: expected the name of an accelerator"),
        ("--per-host 3", "plan.yaml: expected a multiple of 3 processes"),
    ],
)
def test_refusals(words: str, refused: str, capsys: Any) -> None:
    assert main(["emit", "plan.yaml", *words.split(), "--", *WORDS]) == 1
    assert refused in capsys.readouterr().err
