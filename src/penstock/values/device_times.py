"""The seconds of a model's layers on one kind of device."""

from dataclasses import dataclass, replace

from penstock.arguments import TEXT, check_fields, entries, number
from penstock.errors import ProfileError

_SECONDS = number(0, unit="seconds").but("measure it again, or write 0 if there is none")


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Holds the seconds of every layer for one microbatch, as measured on a device."""

    device: str
    """The name of the device; the `name` of its `DeviceKind`."""
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    weight_seconds: tuple[float, ...]
    """The share of each backward that computes gradients of parameters only."""

    def __post_init__(self) -> None:
        check_fields(self, {"device": TEXT.but("give the device's name")}, ProfileError)
        for name in ("forward_seconds", "backward_seconds", "weight_seconds"):
            values = enumerate(entries(name, getattr(self, name), ProfileError))
            checked = tuple(_SECONDS.check(f"{name}[{layer}]", value, ProfileError) for layer, value in values)
            object.__setattr__(self, name, checked)
            if len(checked) != len(self.forward_seconds):
                raise ProfileError(
                    f"{name}: expected {len(self.forward_seconds)} numbers, one per layer, found {len(checked)}: "
                    "measure again"
                )
        for layer, (part, whole) in enumerate(zip(self.weight_seconds, self.backward_seconds, strict=True)):
            if part > whole:
                raise ProfileError(
                    f"weight_seconds[{layer}]: expected at most backward_seconds = {whole}, of which it is a part, "
                    f"found {part}: measure both again"
                )

    def __len__(self) -> int:
        return len(self.forward_seconds)

    def prefix(self, layers: int) -> "DeviceTimes":
        """The times of the first `layers` layers."""
        parts = (self.forward_seconds, self.backward_seconds, self.weight_seconds)
        return DeviceTimes(self.device, *(part[:layers] for part in parts))

    def scaled(self, factor: float) -> "DeviceTimes":
        """These seconds times `factor`."""
        if factor == 1:
            return self
        parts = (self.forward_seconds, self.backward_seconds, self.weight_seconds)
        forward, backward, weight = (tuple(factor * seconds for seconds in part) for part in parts)
        return replace(self, forward_seconds=forward, backward_seconds=backward, weight_seconds=weight)
