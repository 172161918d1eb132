"""Records as words: the outcome of a case, a line for the screen, and docs/models.md."""

from typing import Any

__all__ = ["outcome_of", "page", "summary"]

TOLERANCE = {"float64": 1e-11, "float32": 1e-4}


def outcome_of(record: dict[str, Any]) -> str:
    """One of: equal, close, wrong, oracle, refused, internal, unusable, limit, crashed.

    oracle: the pipeline equals the plain loop, and `penstock.reference_train` does not. unusable: does not run eagerly.
    """
    if "crashed" in record:
        return "crashed"
    if "eager" in record:
        return "unusable"
    kinds = [entry.get("kind") for entry in record.get("trainings", [])]
    tolerance = TOLERANCE[record.get("dtype", "float64")]
    trainings = record.get("trainings", [])
    worst = max((entry["relative"] for entry in trainings if "relative" in entry), default=0.0)
    plain = max((e["relative"] for e in trainings if "relative" in e and e["against"] == "plain loop"), default=0.0)
    if plain > tolerance or _prediction(record) == "wrong":
        return "wrong"
    if worst > tolerance and record.get("microbatches", 2) == 1:
        return "wrong"
    if "internal" in kinds or _prediction(record) == "internal":
        return "internal"
    if "ended" in record:
        return "limit"
    if not kinds or kinds[0] == "refused":
        return "refused"
    if worst > tolerance or "oracle" in kinds:
        return "oracle"
    return "close" if worst else "equal"


def summary(record: dict[str, Any]) -> str:
    """A line about a case."""
    outcome = outcome_of(record)
    name = f"{record['family']}/{record['case']}"
    parts = [f"{outcome:9} {name:45} {record.get('layers', '-'):>3} layers {record.get('seconds', 0):5.1f} s"]
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
    parts += [str(record[key])[:1500] for key in ("eager", "ended", "crashed", "sizes_refused", "reasons") if key in record]
    return " | ".join(parts)


def page(records: list[dict[str, Any]]) -> str:
    return ""


def _prediction(record: dict[str, Any]) -> str:
    prediction = record.get("prediction", {})
    match prediction.get("kind"):
        case "compared":
            # Kernels may take another path where no gradient is needed.
            return "wrong" if prediction["relative"] > max(TOLERANCE[record["dtype"]], 1e-9) else "equal"
        case None:
            return "none"
        case kind:
            return str(kind)
