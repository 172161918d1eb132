"""Records as words: the outcome of a case, a line for the screen, and docs/models.md."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["WAYS_OUT", "outcome_of", "page", "summary"]

TOLERANCE = {"float64": 1e-11, "float32": 1e-4}
PREDICTION_TOLERANCE = 1e-9
WAYS_OUT = "ways out of refusals"
"""A family: models that train after what the error of a refused one asks for."""

Record = Mapping[str, Any]

# What stands in the way, by a pattern in the error, with the way out. The first that is found counts.
CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        r"the model has no blocks|cannot cut \d+ layers",
        "it is one layer: its blocks are no modules of their own, or are called by other methods than `forward`",
        "make each block a module and call it as `block(x)`, or pass a list of layers",
    ),
    (
        r"its forward changes|draws random numbers of Python",
        "its forward keeps state, or draws random numbers of Python, outside of its blocks",
        "move that into a block, draw with `torch.rand`, or pass a list of layers",
    ),
    (r"has the hook", "a module that is no block has a hook", "register it on a block, or remove it"),
    (
        r"Python control flow depends on the values|it leaves PyTorch for NumPy",
        "the code between its blocks decides by the values in a tensor",
        "move the decision into a block, pass what it decides as an argument, use `torch.where`, or pass a list of "
        "layers",
    ),
    (
        r"fixes the batch size",
        "the code between its blocks fixes the number of samples",
        "compute sizes from `x.shape[0]` and not from `len(x)`, loop over no samples, compute such a loss in "
        "`loss_fn`, or pass a list of layers",
    ),
    (
        r"another tensor was assigned|requires_grad is",
        "a parameter was frozen or replaced after the pipeline was built",
        "write in it, or build the pipeline again",
    ),
    (
        r"the trace of .* differs from the model|would be lost, since this code is traced",
        "the code between its blocks does what a trace cannot keep",
        "move it into a block, or pass a list of layers",
    ),
    (
        r"written in place after its forward",
        "a block writes in its forward what the backward of an earlier microbatch still needs",
        "have the block read a copy: `self.weight.clone()`",
    ),
    (
        r"does not follow from the sizes",
        "a block returns a size that its arguments do not explain",
        "pass a list of layers",
    ),
    (
        r"cannot be copied for every call",
        "the code between its blocks puts tensors in an object that it passes to blocks",
        "make the object in each block, pass the tensors, or pass a list of layers",
    ),
    (
        r"cannot be traced",
        "`torch.export` cannot trace the code between its blocks",
        "change the line that the error names, or pass a list of layers",
    ),
)
REASONS = {
    "layers share a weight": "its gradients are added layer by layer",
    "several layers read a value": "its gradients are added stage by stage",
}
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
    families: dict[str, list[Record]] = {}
    for record in usable:
        families.setdefault(str(record["family"]), []).append(record)
    ways = [record for record in usable if record["family"] == WAYS_OUT]
    libraries = [record for record in usable if _is_library(record)]
    habits = [record for record in usable if not _is_library(record) and record not in ways]
    text = [
        _TOP.format(
            versions=versions,
            counts=_counts(libraries, habits),
            trained=_trained(libraries, habits),
            share=_share([*libraries, *habits]),
        ),
        _refusals([*libraries, *habits], ways),
    ]
    text += [f"## {family}\n\n{_table(found)}" for family, found in families.items()]
    return "\n".join(text)


_TOP = """# Models that were tried

This page is made by `python benchmarks/models.py --save docs/models.md`; do not edit it by hand. Each model is small
and has random weights. A case is a process of its own. It trains the model for three steps of SGD with momentum: by a
plain loop of PyTorch, and by `Pipeline` under `1f1b-flush` on 2 stages and `zb-h1` on 3. Models whose capture takes
less than half a second are also trained under `1f1b-flush` on 3 stages and `zb-h1` on 2. `2bw` on 2 stages is compared
with a plain loop that computes its gradients at the weights before the last update. The quick ones are also trained so
on 3 stages, and are compared with `penstock.reference_train`, too.

All losses, parameters, buffers and plain attributes of the modules are compared, and what `predict` returns after the
training. Batches have other numbers of samples than the sample, and the second step has another length, where the
model takes them; the column *free* says so. Numbers are float64 where the model can compute with them. Dropout is 0,
except in the cases of random numbers: these have one microbatch and draw from PyTorch's own stream (`seed=None`).
Graphs are not cut either; they have one microbatch and are compared with `penstock.reference_train` under `pipedream`.
Models by hand are the classes of these names in `benchmarks/model_cases/habit_blocks.py` and `habit_models.py`; most
are four blocks of a kind between two linear layers, with a connection over all of them.

{versions}

{counts}

{trained}

{share}

*Seconds* are processor seconds of building the first pipeline, which is mostly the capture, on a machine that was busy
with other work.
"""


def _counts(libraries: Sequence[Record], habits: Sequence[Record]) -> str:
    lines = ["| result | models of libraries | models by hand |", "|---|---|---|"]
    found = [Counter(map(outcome_of, records)) for records in (libraries, habits)]
    for outcome, words in OUTCOMES.items():
        if any(counter[outcome] for counter in found):
            lines.append(f"| {words} | {found[0][outcome]} | {found[1][outcome]} |")
    return "\n".join([*lines, f"| all | {len(libraries)} | {len(habits)} |"])


def _trained(libraries: Sequence[Record], habits: Sequence[Record]) -> str:
    parts = []
    for records, kind in ((libraries, "models of libraries"), (habits, "models by hand")):
        right = [each for each in records if outcome_of(each) in ("equal", "close", "oracle")]
        three = sum(each.get("layers", 0) >= 3 for each in right)
        parts.append(
            f"{len(right)} of {len(records)} {kind} train unchanged on 2 stages with the numbers of the plain loop; "
            f"{three} of them have 3 layers or more and do so on 3 stages."
        )
    return "\n".join(parts)


def _share(records: Sequence[Record]) -> str:
    """The share of the models with blocks that train unchanged."""
    asked = [record for record in records if record.get("blocks", 0) >= 2 and not record.get("changed")]
    parts = []
    for kind, found in (
        ("All", asked),
        ("models of libraries", [record for record in asked if _is_library(record)]),
        ("models by hand", [record for record in asked if not _is_library(record)]),
    ):
        right = sum(map(_trains, found))
        parts.append(f"{kind}: {right} of {len(found)}, {right / len(found):.1%}" if found else f"{kind}: none")
    return (
        "**Models with blocks.** These are all cases that run eagerly, of which a list or an `nn.Sequential` holds two "
        "or more modules of one class with parameters, and in which nothing is changed between steps. Those count that "
        "have the numbers of the plain loop in all trainings above, on 2 stages and on 3, under `1f1b-flush`, `zb-h1` "
        f"and `2bw`. {'; '.join(parts)}."
    )


def _trains(record: Record) -> bool:
    """Whether it has the right numbers in all trainings, on 2 stages and, with as many layers, on 3."""
    return outcome_of(record) in ("equal", "close") and record.get("layers", 0) >= 3


def _refusals(records: Sequence[Record], ways: Sequence[Record]) -> str:
    found: dict[int, list[str]] = {}
    refused = {str(record["case"]): record for record in records if outcome_of(record) == "refused"}
    for name, record in refused.items():
        found.setdefault(_cause(_error(record)), []).append(name)
    lines = ["## What is refused, and the way out", "", "| reason | way out | cases |", "|---|---|---|"]
    for number, names in sorted(found.items()):
        _, reason, way = (
            CAUSES[number] if number < len(CAUSES) else ("", "another reason, in the table", "the error says")
        )
        lines.append(f"| {reason} | {way} | {', '.join(names)} |")
    right = [way for way in ways if outcome_of(way) in ("equal", "close")]
    out = {_refused_by(way) for way in right}
    same = {_refused_by(way) for way in right if _computes_the_same(way, refused.get(_refused_by(way), {}))}
    rest = [name for name in refused if name not in out]
    lines += [
        "",
        f"Under *{WAYS_OUT}* are refused models once more, after what the error asks for, each named after the refused "
        f"one. {len(out & refused.keys())} of the {len(refused)} refused models train so, "
        f"{len(same & refused.keys())} of them with the losses of the refused model's own plain loop. No way out was "
        f"tried for: {', '.join(rest) or 'none'}.",
    ]
    return "\n".join([*lines, ""])


def _refused_by(way: Record) -> str:
    """The case that `way` is a way out for."""
    return str(way["case"]).partition(": ")[0]


def _computes_the_same(way: Record, refused: Record) -> bool:
    pairs = list(zip(way.get("losses", ()), refused.get("losses", ()), strict=False))
    return bool(pairs) and all(abs(a - b) <= 1e-9 * abs(b) for a, b in pairs)


def _cause(error: str) -> int:
    return next((number for number, (pattern, *_) in enumerate(CAUSES) if re.search(pattern, error)), len(CAUSES))


def _error(record: Record) -> str:
    return next((str(entry["error"]) for entry in record.get("trainings", []) if "error" in entry), "")


def _table(records: Sequence[Record]) -> str:
    lines = ["| model | layers | seconds | free | result |", "|---|---|---|---|---|"]
    for record in records:
        seconds = f"{record['seconds']:.1f}" if "seconds" in record else "-"
        lines.append(
            f"| {record['case']} | {record.get('layers', '-')} | {seconds} | {record.get('free', '-')} "
            f"| {_result(record)} |"
        )
    return "\n".join([*lines, ""])


def _result(record: Record) -> str:
    prediction = record.get("prediction", {})
    refused = prediction.get("kind") == "refused" and outcome_of(record) != "refused"
    also = f"; `predict` is refused: `{_quoted(prediction['error'])}`" if refused else ""
    return _training(record) + also


def _training(record: Record) -> str:
    outcome = outcome_of(record)
    type_ = ", float32" if record.get("dtype") == "float32" else ""
    match outcome:
        case "equal":
            return f"equal{type_}"
        case "close":
            reasons = [f"{each}: {REASONS[each]}" for each in record.get("reasons", []) if each in REASONS]
            reasons += [each for each in record.get("reasons", []) if each not in REASONS]
            worst = _worst(record["trainings"])
            return f"within {worst:.0e}{type_}; {'; '.join(reasons) or 'reason not known'}"
        case "wrong":
            worst = max(record["trainings"], key=lambda entry: entry.get("relative", 0.0))
            far = f"{worst.get('relative', 0.0):.0e} at `{worst.get('where')}`"
            where = f"{worst['schedule']} on {worst['stages']} stages: {far}"
            return f"**wrong**: {where if _worst(record['trainings']) else 'predict'}"
        case "limit":
            return f"ended by {record['ended']}"
        case _:
            entry = next((entry for entry in record.get("trainings", []) if "error" in entry), {})
            also = (
                f"{entry['schedule']} on {entry['stages']} stages: "
                if record["trainings"][:1] != [entry] and entry
                else ""
            )
            error = entry.get("error") or record.get("prediction", {}).get("error", "")
            return f"{outcome}: {also}`{_quoted(error)}`"


def _quoted(error: str) -> str:
    shorter = re.sub(r"/\S*/(site-packages|benchmarks)/", "", error.partition(": ")[2] or error)
    shorter = shorter.replace("|", "/").replace("`", "'")
    return shorter if len(shorter) <= 230 else f"{shorter[:227]}..."


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
