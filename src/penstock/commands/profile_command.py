"""``penstock profile``: measure a model layer by layer."""

import argparse

from penstock.commands.command import Command, declare_option, declare_progress, deliver, given
from penstock.commands.quantities import parse_count

_TYPES = {"bf16": "bfloat16", "fp16": "float16", "bfloat16": "bfloat16", "float16": "float16"}


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject",
        metavar="FILE.py:FUNCTION",
        help="a function without arguments that returns (model, sample) or penstock.Subject(model, sample)",
    )
    parser.add_argument("-o", "--output", metavar="PROFILE", help="write the profile to this file (JSON)")
    for name, text in (("--iterations", "timed runs of each layer"), ("--warmup", "runs before, not timed")):
        declare_option(parser, name, text, type=parse_count, metavar="N")
    declare_option(parser, "--device", "where to measure: cpu, cuda, cuda:1 (default: where the model is)")
    parser.add_argument(
        "--autocast", choices=_TYPES, help="compute in this type where PyTorch's autocast does, as the training will"
    )
    parser.add_argument(
        "--wire-dtype", choices=[*_TYPES, "int8"], help="count what links carry in this type, as the training will send"
    )
    parser.add_argument("--name", default="", help="of the profile (default: what the file says)")
    declare_progress(parser)


def _run(arguments: argparse.Namespace) -> None:
    import torch

    from penstock.commands.descriptions import describe_profile
    from penstock.commands.subject_files import load_subject
    from penstock.profiling import profile
    from penstock.training.wire_codecs import RowInt8

    subject = load_subject(arguments.subject)
    types = {name: getattr(torch, full) for name, full in _TYPES.items()}
    measured = profile(
        subject.model,
        subject.sample,
        name=arguments.name or subject.name,
        loss_fn=subject.loss_fn,
        target=subject.target,
        optimizer=subject.optimizer,
        autocast=types.get(arguments.autocast),
        wire_dtype=RowInt8() if arguments.wire_dtype == "int8" else types.get(arguments.wire_dtype),
        **given(arguments, "iterations", "warmup", "device", "progress"),
    )
    deliver(measured, describe_profile(measured), arguments)


PROFILE = Command(
    name="profile",
    summary="measure a model layer by layer",
    description="Measures seconds and bytes of every layer of a model, for one microbatch on one device.",
    example="penstock profile train.py:make_model -o profile.json",
    declare=_declare,
    run=_run,
)
