"""The ranked configurations of a transformer as a table, and why the second one is slower than the first."""

from collections.abc import Sequence

from penstock.planning.ptd_p.parallel_configs import ConfigEstimate
from penstock.values.quantities import bytes_text, seconds_text

_SHOWN = 10
_SIZES = ("p", "t", "d", "b", "v", "recompute")
_MEASURES = ("seconds", "samples/s", "TFLOP/s", "tensor", "messages", "bubble", "gradients", "peak", "by")
_HEAD = _SIZES + _MEASURES


def ranking_text(ranked: Sequence[ConfigEstimate]) -> str:
    """The first ten of `ranked` (best first), their shares of the time by cause, and the difference to the second.

    TFLOP/s are per device, by [Narayanan 2021, equation 4.2], including recomputation.
    """
    rows = [_HEAD, *(_row(one) for one in ranked[:_SHOWN])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    if len(ranked) > _SHOWN:
        lines.append(f"and {len(ranked) - _SHOWN} slower ones that fit")
    lines.append(_difference(ranked[0], ranked[1]) if len(ranked) > 1 else "No other configuration fits.")
    return "\n".join(lines)


def _row(one: ConfigEstimate) -> tuple[str, ...]:
    config, seconds = one.config, one.minibatch_seconds
    sizes = (config.pipeline, config.tensor, config.data, config.microbatch_size, config.stages_per_rank)
    shares = (one.tensor_seconds, one.pipeline_seconds, one.bubble_seconds, one.data_seconds)
    return (
        *map(str, sizes),
        "yes" if config.recompute else "no",
        f"{seconds:.4g}",
        f"{one.samples_per_second:.4g}",
        f"{one.device_operations / 1e12:.1f}",
        *(f"{share / seconds:.1%}" for share in shares),
        bytes_text(one.peak_bytes),
        "simulator" if one.simulated else "formula",
    )


def _difference(best: ConfigEstimate, second: ConfigEstimate) -> str:
    """Where the second one loses and where it gains, the largest difference first."""
    causes = {
        "computation": second.compute_seconds - best.compute_seconds,
        "tensor all-reduces": second.tensor_seconds - best.tensor_seconds,
        "messages": second.pipeline_seconds - best.pipeline_seconds,
        "bubble": second.bubble_seconds - best.bubble_seconds,
        "gradients": second.data_seconds - best.data_seconds,
    }
    longer = second.minibatch_seconds / best.minibatch_seconds - 1
    differences = [
        f"{cause} {seconds_text(abs(change))} {'more' if change > 0 else 'less'}"
        for cause, change in sorted(causes.items(), key=lambda item: -abs(item[1]))
        if abs(change) > 1e-3 * best.minibatch_seconds
    ]
    reason = "; ".join(differences) if differences else "no cause differs by a thousandth of the time"
    return f"{second.config} takes {100 * longer:.1f} % longer: {reason}"
