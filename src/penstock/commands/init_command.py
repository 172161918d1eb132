"""``penstock init``: write a training script for the model of a file."""

import argparse
import keyword
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.commands.command import Command, answer
from penstock.errors import PenstockError
from penstock.values.documents import write_text

if TYPE_CHECKING:
    from penstock.profiling import Subject

_SCRIPT = '''\
"""Trains the model of {file} through a pipeline. `penstock init` wrote this script for you to change.

    python {script}                             # all stages in one process
    torchrun --nproc-per-node 2 {script}        # a process for each stage

Both have the same numbers.
"""

from pathlib import Path

import penstock
import torch

from {module} import {imported}

STEPS = 20
CHECKPOINTS = Path(__file__).with_suffix(".checkpoints")  # the next run goes on from the newest one


def main() -> None:
    torch.manual_seed(0)  # every process builds the same model and reads the same batches
    with penstock.local_device():  # tensors are made on the GPU of this process, if it has one
{building}
    if pipe.rank == 0 and pipe.steps >= STEPS:
        print(f"{{CHECKPOINTS}} has all {{STEPS}} steps: delete it to begin anew, or raise STEPS")
    for number in range(pipe.steps, STEPS):
        result = pipe.step({batch})  # forward, backward, update
        loss = float(result.loss)  # the same on every process
        if pipe.rank == 0:
            print(f"step {{number + 1}}: loss {{loss:.4f}}", flush=True)
    pipe.save(CHECKPOINTS, keep=2)
    pipe.close()


if __name__ == "__main__":
    main()
'''
_SETUP = """\
        setup = make()
    batches = list(setup.pop("batches"))  # your loader takes its place
    setup.setdefault("resume", CHECKPOINTS)
    pipe = penstock.Pipeline(**setup)"""
_NAME = re.compile(r"\w[\w.+-]*")
_SUBJECT = """\
        {making}
    pipe = penstock.Pipeline(
        model,
        sample={sample},  # example inputs of one microbatch
        loss_fn={loss}
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        microbatches=4,
        resume=CHECKPOINTS,
    )
    # Your batches take their place: pipe.step(inputs, target) cuts them into microbatches.
    batches = [penstock.Microbatches({parts})]"""


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject",
        metavar="FILE.py:FUNCTION",
        help="a function without arguments that returns what `profile` takes: (model, sample) or penstock.Subject; or "
        "what `rehearse` takes: a dict with model, batches, and the arguments of penstock.Pipeline",
    )
    parser.add_argument(
        "-o", "--output", metavar="NAME", default="train.py", help="of the script, beside FILE.py (default: train.py)"
    )
    parser.add_argument("--force", action="store_true", help="replace a file of that name")


def _run(arguments: argparse.Namespace) -> None:
    from penstock.commands.subject_files import load_function, read_subject
    from penstock.rehearsing.trainings import read_setup
    from penstock.training.losses import Microbatches

    where, make = load_function(arguments.subject)
    file, _, function = where.rpartition(":")
    model_file, script = Path(file), Path(file).parent / arguments.output
    _check_names(model_file, function, script, force=arguments.force)
    made, batch = make(), "batches[number % len(batches)]"
    if not isinstance(made, Mapping):
        building = _building(where, read_subject(where, made), is_pair=isinstance(made, tuple))
    else:
        inputs, target = read_setup(make, None, 1).batches[0]
        building, batch = _SETUP, batch if target is None or isinstance(inputs, Microbatches) else f"*{batch}"
    imported = "make" if function == "make" else f"{function} as make"
    names = {"file": model_file.name, "module": model_file.stem, "imported": imported, "script": script.name}
    write_text(script, _SCRIPT.format(building=building, batch=batch, **names), PenstockError)
    text = f"wrote {script}: start it with python, or with torchrun --nproc-per-node N"
    answer(arguments, text, {"script": str(script)})


def _check_names(model_file: Path, function: str, script: Path, *, force: bool) -> None:
    """Raises `PenstockError` unless `script` can import `model_file` and takes the place of no other file."""
    if not all(name.isidentifier() and not keyword.iskeyword(name) for name in (model_file.stem, function)):
        raise PenstockError(f"{model_file}:{function}: expected names that Python can import: rename the file")
    if not _NAME.fullmatch(script.name) or script.stem in {"torch", "penstock", *sys.stdlib_module_names}:
        raise PenstockError(
            f"--output {script}: expected a name of letters, digits and ._+- that no module has which the script "
            "imports, such as train.py: give another"
        )
    if script.parent.resolve() != model_file.resolve().parent:
        raise PenstockError(f"--output {script}: expected a name beside {model_file}, found a folder: leave it out")
    if script.is_symlink() or (script.exists() and (not force or script.samefile(model_file))):
        found = "a link" if script.is_symlink() else "one"
        raise PenstockError(
            f"{script}: expected no file of that name, found {found}: give another --output, or --force to replace a "
            "script"
        )


def _building(where: str, subject: "Subject", *, is_pair: bool) -> str:
    """How the script builds a pipeline for a model and its sample. `is_pair`: the function returns no `Subject`."""
    lines = ["model, sample = make()"]
    if not is_pair:
        lines = ["subject = make()", "model, sample, target = subject.model, subject.sample, subject.target"]
    loss, parts = "subject.loss_fn,", "[sample] * 4, [target] * 4"
    if subject.loss_fn is None and (shape := _output_shape(where, subject)):
        lines.append(f"target = torch.randn({shape})  # a stand-in for your target")
        loss = "torch.nn.functional.mse_loss,  # a stand-in for your (output, target) -> mean over samples"
    elif subject.loss_fn is None:
        loss, parts = "penstock.model_loss,  # the model computes it", "[sample] * 4"
    sample = "sample" if isinstance(subject.sample, tuple | dict) else "(sample,)"
    return _SUBJECT.format(making="\n        ".join(lines), sample=sample, loss=loss, parts=parts)


def _output_shape(where: str, subject: "Subject") -> tuple[int, ...]:
    """The shape of the output, to compare with a target; empty if the model computes its loss itself."""
    import torch

    from penstock.capturing.model_kinds import check_model
    from penstock.capturing.samples import read_sample
    from penstock.training.losses import compute_loss, model_loss

    model: Any = subject.model
    check_model(model, "penstock init")
    call, _ = read_sample(subject.sample)
    first, *others = model if isinstance(model, Sequence) else [model]
    with torch.no_grad():
        output = first(*call.args, **call.kwargs)
        for layer in others:
            output = layer(output)
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        return tuple(output.shape)
    try:
        compute_loss(model_loss, output, None)
    except PenstockError:
        raise PenstockError(
            f"{where}: expected an output to compare with a target, or a loss, found {type(output).__name__}: return "
            "penstock.Subject(model, sample, loss_fn=..., target=...), or a dict as `penstock rehearse` takes it"
        ) from None
    return ()


INIT = Command(
    name="init",
    summary="write a training script for a model",
    description="Writes a script that trains the model of a file through a pipeline, with python in one process and "
    "with torchrun in several. A dict as `rehearse` takes it brings batches, loss and optimizer; of (model, sample) "
    "the script trains on the sample, with stand-ins that say so. It replaces no file without --force.",
    example="penstock init model.py:make",
    declare=_declare,
    run=_run,
)
