"""What holds for one case: every training of it, and what each is equal to."""

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import penstock
from model_cases.cases import Case
from model_cases.comparison import compare, compare_outputs
from model_cases.training import Batches, Outcome, build, train_by_oracle, train_plainly, train_staged
from penstock.errors import PenstockError

__all__ = ["QUICK_SECONDS", "count_blocks", "try_case"]

QUICK_SECONDS = 0.5
"""Processor seconds of a capture under which a case is also trained on the other two pairs of schedule and stages, and
by the oracle; a plain loop for 2bw there is always.
"""

Record = dict[str, Any]


def try_case(case: Case, keep: Callable[[Record], None]) -> Record:
    """The record of `case`; `keep` stores it whenever something is known, for a run that ends at a limit."""
    record: Record = {"case": case.name, "family": case.family, "trainings": [], "microbatches": case.microbatches}
    record["changed"] = case.between is not None
    started = time.process_time()
    keep(record)
    for dtype in (torch.float64, torch.float32) if case.float64 else (torch.float32,):
        for sizes, freedom in _sizes_of(case):
            batches = Batches(sizes, dtype)
            try:
                plain = train_plainly(case, batches)
            except Exception as error:
                record["eager"] = _described(error)
                continue
            record.pop("eager", None)
            record.update(dtype=str(dtype).removeprefix("torch."), free=freedom)
            if not _is_training(case, batches, plain, record):
                return record
            if _train(case, batches, plain, record, keep):
                record["total_seconds"] = time.process_time() - started
                keep(record)
                return record
        if "dtype" in record:
            break
    record["total_seconds"] = time.process_time() - started
    keep(record)
    return record


def _sizes_of(case: Case) -> Iterator[tuple[list[tuple[int, int]], str]]:
    """The sizes of sample and batches: free, with one length, and with the sample's number of samples."""
    n, first, other = case.samples, case.lengths[0], case.lengths[-1]
    counts = (3 * n - 1, 3 * n, 2 * n) if case.microbatches > 1 else (n + 1, n + 2, n)
    if case.free_batch and other != first:
        yield [(n, first), (counts[0], first), (counts[1], other), (counts[2], first)], "batch and length"
    if case.free_batch:
        yield [(n, first), *((count, first) for count in counts)], "batch"
    yield [(n, first), *[(n * case.microbatches, first)] * 3], "none"


def _is_training(case: Case, batches: Batches, plain: Outcome, record: Record) -> bool:
    """Whether the case tells anything: its losses are finite, and it trains something."""
    model = build(case, batches.dtype)
    before = dict(model.named_parameters())
    record["blocks"] = count_blocks(model)
    trained = sum(name in before and not torch.equal(before[name], plain.state[name]) for name in before)
    record.update(trained=trained, parameters=len(before), losses=plain.losses)
    finite = all(abs(loss) < float("inf") for loss in plain.losses)
    if not finite or not trained:
        record["eager"] = "the loss is not finite" if not finite else "no parameter is trained"
    return finite and bool(trained)


def count_blocks(model: nn.Module) -> int:
    """The most modules of one class with parameters that a list or an `nn.Sequential` in `model` holds."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)]
    found = [
        Counter(type(child) for child in each.children() if any(True for _ in child.parameters())) for each in lists
    ]
    return max((count for each in found for count in each.values()), default=0)


def _train(case: Case, batches: Batches, plain: Outcome, record: Record, keep: Callable[[Record], None]) -> bool:
    """Adds the trainings; False if these sizes were refused in a step, and others are to be tried."""
    pairs = [("1f1b-flush", 2), ("zb-h1", 3)]
    for schedule, stages in pairs:
        first = schedule == "1f1b-flush" and stages == 2
        if not first and record.get("layers", 0) < stages:
            continue
        entry: Record = {"schedule": schedule, "stages": stages, "against": "plain loop"}
        found = _staged(case, batches, entry, record, predicts=first)
        if found is not None:
            _judge(entry, plain, found)
            if first:
                _judge_prediction(record, plain, found)
        elif first and entry["phase"] == "step" and record["free"] != "none" and entry["kind"] == "refused":
            record.setdefault("sizes_refused", []).append(f"{record['free']}: {entry['error']}")
            return False
        record["trainings"].append(entry)
        keep(record)
        if found is None and first:
            return True
        if not first and stages == 3 and record["seconds"] < QUICK_SECONDS and len(pairs) == 2:
            pairs += [("1f1b-flush", 3), ("zb-h1", 2)]
    _train_delayed(case, batches, record)
    _explain(case, batches, record)
    return True


def _train_delayed(case: Case, batches: Batches, record: Record) -> None:
    """Under 2bw, or with one microbatch under pipedream, beside the oracle, and 2bw also beside a plain loop."""
    if record["layers"] < 2 or case.draws or case.between is not None:
        return
    # Under 2bw there is a plain loop, too.
    with_oracle = case.microbatches == 1 or record["seconds"] < QUICK_SECONDS
    schedule = "2bw" if case.microbatches > 1 else "pipedream"
    entry: Record = {"schedule": schedule, "stages": 2, "against": "plain loop" if schedule == "2bw" else "oracle"}
    found = _staged(case, batches, entry, record)
    record["trainings"].append(entry)
    if found is None:
        return
    if schedule == "2bw":
        _judge(entry, train_plainly(case, batches, delayed=True), found)
        if record["layers"] >= 3 and record["seconds"] < QUICK_SECONDS and record["free"] != "none":
            _train_delayed_on_three(case, batches, record)
        entry = {"schedule": schedule, "stages": 2, "against": "oracle"}
    if with_oracle:
        if schedule == "2bw":
            record["trainings"].append(entry)
        try:
            _judge(entry, train_by_oracle(case, batches, schedule=schedule, stages=2), found.saved())
        except Exception as error:
            entry.update(kind="oracle", phase="oracle", error=_described(error))


def _train_delayed_on_three(case: Case, batches: Batches, record: Record) -> None:
    """The same on 3 stages, which need 3 microbatches. They are no smaller than the others: for a single sample
    BatchNorm may have no variance, and its backward on a CPU is wrong in PyTorch 2.13 for some memory layouts.
    """
    case = replace(case, microbatches=3)
    sample, *steps = batches.sizes
    batches = replace(batches, sizes=[sample, *((3 * samples // 2 + samples % 2, length) for samples, length in steps)])
    entry: Record = {"schedule": "2bw", "stages": 3, "against": "plain loop"}
    found = _staged(case, batches, entry, record)
    record["trainings"].append(entry)
    if found is not None:
        _judge(entry, train_plainly(case, batches, delayed=True), found)


def _staged(case: Case, batches: Batches, entry: Record, record: Record, predicts: bool = False) -> Outcome | None:
    entry["phase"] = "capture"

    def note(name: str, value: Any) -> None:
        if name == "layers":
            entry["phase"] = "step"
        if name == "predicts":
            entry["phase"] = "predict"
        record.setdefault(name, value)

    try:
        return train_staged(
            case, batches, schedule=entry["schedule"], stages=entry["stages"], note=note, predicts=predicts
        )
    except Exception as error:
        if entry["phase"] == "predict":
            record["prediction"] = {"error": _described(error), "kind": _kind(error)}
            return _staged(case, batches, entry, record)
        entry.update(kind=_kind(error), error=_described(error))
        if entry["kind"] == "internal":
            traceback.print_exc()
    return None


def _kind(error: Exception) -> str:
    # What the model itself raises in a step comes wrapped, with its cause.
    return "refused" if isinstance(error, PenstockError) else "internal"


def _judge(entry: Record, expected: Outcome, found: Outcome) -> None:
    difference = compare(expected, found)
    entry.update(kind="compared", relative=difference.relative, where=difference.where)


def _judge_prediction(record: Record, plain: Outcome, found: Outcome) -> None:
    if "prediction" in record:
        return
    if isinstance(plain.prediction, Exception):
        record["prediction"] = {"kind": "eager", "error": _described(plain.prediction)}
        return
    difference = compare_outputs(plain.prediction, found.prediction)
    record["prediction"] = {"kind": "compared", "relative": difference.relative, "where": difference.where}


def _explain(case: Case, batches: Batches, record: Record) -> None:
    """Why numbers differ in their last bits, as far as a program can tell."""
    differing = [entry for entry in record["trainings"] if entry.get("relative")]
    if not differing:
        return
    again = compare(train_plainly(case, batches), train_plainly(case, batches))
    reasons = [] if not again.relative else [f"two plain loops differ by {again.relative:.0e}"]
    chain = penstock.capture(build(case, batches.dtype), batches.draw(case)[0])
    held = Counter(key for layer in chain.layers for key in {id(each) for each in layer.module.parameters()})
    if any(count > 1 for count in held.values()):
        reasons.append("layers share a weight")
    readers = Counter(name for layer in chain.layers for name in layer.inputs if name not in chain.inputs.names)
    if any(count > 1 for count in readers.values()):
        reasons.append("several layers read a value")
    record["reasons"] = reasons


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:900]}"
