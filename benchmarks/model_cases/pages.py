"""Records as words: the outcome of a case, a line for the screen, and docs/models.md."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

__all__ = ["WAYS_OUT", "outcome_of", "page", "summary"]

TOLERANCE = {"float64": 1e-11, "float32": 1e-4}
PREDICTION_TOLERANCE = 1e-9
WAYS_OUT = "ways out of refusals"
"""A family: models that train after what the error of a refused one asks for."""

Record = Mapping[str, Any]

CAUSES: list[dict[str, str]] = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())
OUTCOMES = {
    "equal": "equal to the bit",
    "close": "equal within rounding",
    "oracle": "equal to the plain loop; `reference_train` fails or differs",
    "refused": "refused, with a `PenstockError`",
    "internal": "fails with another error than a `PenstockError`",
    "limit": "exceeds the limit of 90 processor seconds or 10 GiB",
    "wrong": "**other numbers than the plain loop**",
}


def outcome_of(record: Record) -> str:
    """One of `OUTCOMES`, or ``unusable``: the case does not run eagerly, or ``crashed``: its process failed.

    ``refused`` is also a case that is refused under one schedule only.
    """
    if "crashed" in record:
        return "crashed"
    if "eager" in record:
        return "unusable"
    trainings = record.get("trainings", [])
    kinds = [entry.get("kind") for entry in trainings]
    tolerance = TOLERANCE[record.get("dtype", "float64")]
    by_oracle = record.get("microbatches", 2) == 1
    plain = _worst([entry for entry in trainings if by_oracle or entry["against"] == "plain loop"])
    if plain > tolerance or _prediction(record) == "wrong":
        return "wrong"
    if "internal" in kinds or _prediction(record) == "internal":
        return "internal"
    if "ended" in record:
        return "limit"
    if not kinds or "refused" in kinds:
        return "refused"
    worst = _worst(trainings)
    if worst > tolerance or "oracle" in kinds:
        return "oracle"
    return "close" if worst else "equal"


def summary(record: Record) -> str:
    """A line about a case."""
    name = f"{record['family']}/{record['case']}"
    seconds = record.get("seconds", 0.0)
    parts = [f"{outcome_of(record):9} {name:45} {record.get('layers', '-'):>3} layers {seconds:5.1f} s"]
    parts.append(f"free: {record.get('free', '-')}")
    for entry in record.get("trainings", []):
        what = f"{entry['schedule']}x{entry['stages']}"
        if entry.get("relative"):
            parts.append(f"{what} vs {entry['against']}: {entry['relative']:.0e} at {entry['where']}")
        elif "error" in entry:
            parts.append(f"{what} {entry['phase']} {entry['kind']}: {entry['error'][:300]}")
    prediction = record.get("prediction", {})
    if prediction.get("error") or prediction.get("relative"):
        parts.append(f"predict: {prediction.get('error', prediction.get('relative'))!s:.200}")
    rest = ("eager", "ended", "crashed", "sizes_refused", "reasons")
    parts += [str(record[key])[:1500] for key in rest if key in record]
    return " | ".join(parts)


def page(records: Sequence[Record], versions: str) -> str:
    """docs/models.md."""
    usable = [record for record in records if outcome_of(record) not in ("unusable", "crashed")]
    ways = [record for record in usable if record["family"] == WAYS_OUT]
    libraries = [record for record in usable if _is_library(record)]
    habits = [record for record in usable if not _is_library(record) and record not in ways]
    counts, share = _counts(libraries, habits), _share(libraries, habits)
    return _PAGE.format(versions=versions, counts=counts, share=share, refusals=_refusals([*libraries, *habits], ways))


_PAGE = """# Models that were tried

`python benchmarks/models.py --save docs/models.md` makes this page; do not edit it by hand. What each case returned is
a line of [models.jsonl](../benchmarks/results/models.jsonl), and its model is in `benchmarks/model_cases`.

Models are small and have random weights. Each is trained for three steps of SGD with momentum by a plain loop of
PyTorch, and by `Pipeline` under `1f1b-flush` on 2 stages, `zb-h1` on 3 and `2bw` on 2 (beside a loop with gradients at
the weights before the last update); those that are captured in half a second under each schedule, too. All losses,
parameters, buffers, plain attributes and results of `predict` are compared, in float64 where the model can. Numbers of
samples and lengths change from step to step where it takes them. Dropout is 0, except in cases of random numbers.

{versions}

{counts}

{share}

## What is refused, and the way out

For what is between blocks, a list of layers is another way out: layers run as they are.

{refusals}
"""


def _counts(libraries: Sequence[Record], habits: Sequence[Record]) -> str:
    lines = ["| result | models of libraries | models by hand |", "|---|---|---|"]
    found = [Counter(map(outcome_of, records)) for records in (libraries, habits)]
    for outcome, words in OUTCOMES.items():
        if any(counter[outcome] for counter in found):
            expected = outcome in ("equal", "close", "refused")
            names = [
                str(each["case"]) for each in (*libraries, *habits) if outcome_of(each) == outcome and not expected
            ]
            lines.append(
                f"| {words + ': ' * bool(names) + ', '.join(names)} | {found[0][outcome]} | {found[1][outcome]} |"
            )
    return "\n".join([*lines, f"| all | {len(libraries)} | {len(habits)} |"])


def _share(libraries: Sequence[Record], habits: Sequence[Record]) -> str:
    """The share of the models with blocks that train unchanged."""
    asked = [
        [record for record in records if record.get("blocks", 0) >= 2 and not record.get("changed")]
        for records in (libraries, habits)
    ]
    right = [sum(map(_trains, records)) for records in asked]
    share = sum(right) / max(sum(map(len, asked)), 1)
    return (
        "**Models with blocks** hold two or more modules of one class in a list or an `nn.Sequential`, and nothing is "
        f"changed between their steps. Of them {share:.1%} train unchanged, with the numbers of the plain loop in all "
        f"trainings: {right[0]} of {len(asked[0])} models of libraries, and {right[1]} of {len(asked[1])} by hand."
    )


def _trains(record: Record) -> bool:
    """Whether it has the right numbers in all trainings, on 2 stages and, with as many layers, on 3."""
    return outcome_of(record) in ("equal", "close") and record.get("layers", 0) >= 3


def _refusals(records: Sequence[Record], ways: Sequence[Record]) -> str:
    refused = {str(record["case"]): record for record in records if outcome_of(record) == "refused"}
    by_cause: dict[int, list[str]] = {}
    for name, record in refused.items():
        error = next((entry["error"] for entry in record["trainings"] if "error" in entry), "")
        cause = next(number for number, each in enumerate(CAUSES) if re.search(each["pattern"], error))
        by_cause.setdefault(cause, []).append(name)
    lines = ["| reason | way out | models |", "|---|---|---|"]
    for number, names in sorted(by_cause.items()):
        lines.append(f"| {CAUSES[number]['reason']} | {CAUSES[number]['way_out']} | {len(names)} |")
    right = [way for way in ways if outcome_of(way) in ("equal", "close")]
    out = refused.keys() & {_refused_by(way) for way in right}
    same = {_refused_by(way) for way in right if _has_same_losses(way, refused.get(_refused_by(way), {}))}
    return "\n".join(lines) + (
        f"\n\nAfter what the error asks for, {len(out)} of the {len(refused)} refused models train, {len(same & out)} "
        f"of them with the losses of the refused model's own plain loop. No way out was tried for: "
        f"{'; '.join(name for name in refused if name not in out) or 'none'}."
    )


def _refused_by(way: Record) -> str:
    """The case that `way` is a way out for."""
    return str(way["case"]).partition(": ")[0]


def _has_same_losses(way: Record, refused: Record) -> bool:
    pairs = list(zip(way.get("losses", ()), refused.get("losses", ()), strict=False))
    return bool(pairs) and all(abs(a - b) <= 1e-9 * abs(b) for a, b in pairs)


def _worst(entries: Sequence[Record]) -> float:
    return max((float(entry["relative"]) for entry in entries if "relative" in entry), default=0.0)


def _is_library(record: Record) -> bool:
    return " " not in record["family"] and record["family"] != "torch.nn"


def _prediction(record: Record) -> str:
    prediction = record.get("prediction", {})
    match prediction.get("kind"):
        case "compared":
            # Kernels may take another path where no gradient is needed.
            far = prediction["relative"] > max(TOLERANCE[record["dtype"]], PREDICTION_TOLERANCE)
            return "wrong" if far else "equal"
        case None:
            return "none"
        case kind:
            return str(kind)
