"""``penstock profile``: measure a model layer by layer."""

import argparse
from typing import TYPE_CHECKING

from penstock.commands.command import Command, deliver, given
from penstock.commands.quantities import parse_count

if TYPE_CHECKING:
    from penstock.training.wire_codecs import WireDtype

_TYPES = {"bf16": "bfloat16", "fp16": "float16", "bfloat16": "bfloat16", "float16": "float16"}


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject",
        metavar="FILE.py:FUNCTION",
        help="a function without arguments that returns (model, sample) or penstock.Subject(model, sample)",
    )
    parser.add_argument("-o", "--output", metavar="PROFILE", help="write the profile to this file (JSON)")
    for name, text in (("--iterations", "timed runs of each layer"), ("--warmup", "runs before, not timed")):
        parser.add_argument(name, type=parse_count, metavar="N", default=argparse.SUPPRESS, help=text)
    parser.add_argument(
        "--device", default=argparse.SUPPRESS, help="where to measure: cpu, cuda, cuda:1 (default: where the model is)"
    )
    parser.add_argument(
        "--autocast", choices=_TYPES, help="compute in this type where PyTorch's autocast does, as the training will"
    )
    parser.add_argument(
        "--wire-dtype", choices=[*_TYPES, "int8"], help="count what links carry in this type, as the training will send"
    )
    parser.add_argument("--name", default="", help="of the profile (default: what the file says)")
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="a progress line on stderr (default: on a terminal)",
    )


def _run(arguments: argparse.Namespace) -> None:
    import torch

    from penstock.commands.descriptions import describe_profile
    from penstock.commands.subject_files import load_subject
    from penstock.profiling import profile

    subject = load_subject(arguments.subject)
    measured = profile(
        subject.model,
        subject.sample,
        name=arguments.name or subject.name,
        loss_fn=subject.loss_fn,
        target=subject.target,
        autocast=None if arguments.autocast is None else getattr(torch, _TYPES[arguments.autocast]),
        wire_dtype=_wire_dtype(arguments.wire_dtype),
        **given(arguments, "iterations", "warmup", "device", "progress"),
    )
    deliver(measured, describe_profile(measured), arguments)


def _wire_dtype(name: str | None) -> "WireDtype | None":
    """The value of ``Pipeline(wire_dtype=)`` that is called `name` here."""
    import torch

    from penstock.training.wire_codecs import RowInt8

    if name is None:
        return None
    return RowInt8() if name == "int8" else getattr(torch, _TYPES[name])


PROFILE = Command(
    name="profile",
    summary="measure a model layer by layer",
    description="Measures seconds and bytes of every layer of a model, for one microbatch on one device.",
    example="penstock profile train.py:make_model -o profile.json",
    declare=_declare,
    run=_run,
)
