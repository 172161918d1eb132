"""The measurements of a model: a chain of layers with times and sizes.

Planners and the simulator read it; the profiler and `Profile.from_pipedream` write it. One profile is valid for one
microbatch size. It has the times of one kind of device, and `joined` adds those of others. Times are seconds, sizes are
bytes.
"""

import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path

from penstock.arguments import TEXT, Entries, FieldRules, check_fields, instance, integer, is_count, number, text_of
from penstock.errors import ProfileError, counted, suggestion
from penstock.values.crossings import Crossing
from penstock.values.device_kinds import DeviceKind
from penstock.values.documents import YamlNode, read_json, read_known, write_text
from penstock.values.graphs import linearize, read_graph
from penstock.values.quantities import MOST

_MEASURE = "measure it again, or write 0 if there is none"
_SECONDS, _BYTES = (number(0, most=MOST, unit=unit).but(_MEASURE) for unit in ("seconds", "bytes"))
_COLUMNS = ("forward_seconds", "backward_seconds", "weight_seconds")


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
        rules: FieldRules = {"device": TEXT.but("give the device's name"), **dict.fromkeys(_COLUMNS, Entries(_SECONDS))}
        check_fields(self, rules, ProfileError)
        for name in _COLUMNS:
            if len(getattr(self, name)) != len(self.forward_seconds):
                raise ProfileError(
                    f"{name}: expected {len(self.forward_seconds)} numbers, one per layer, found "
                    f"{len(getattr(self, name))}: measure again"
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
        return DeviceTimes(self.device, *(getattr(self, name)[:layers] for name in _COLUMNS))

    def scaled(self, factor: float) -> "DeviceTimes":
        """These seconds times `factor`."""
        if factor == 1:
            return self
        scaled = (tuple(factor * seconds for seconds in getattr(self, name)) for name in _COLUMNS)
        return DeviceTimes(self.device, *scaled)


_FORMAT = "penstock-profile/1"


_LAYER_RULES = {
    "name": TEXT.but("give the layer's name in the model"),
    **dict.fromkeys(("forward_seconds", "backward_seconds"), _SECONDS),
    **dict.fromkeys(("cut_bytes", "saved_bytes", "parameter_bytes", "workspace_bytes", "frozen_bytes"), _BYTES),
    "weight_seconds": _SECONDS.optional,
    "update_seconds": _SECONDS,
    "wire_bytes": _BYTES.optional,
}


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """Holds the measurements of one layer for one microbatch on one device."""

    name: str
    forward_seconds: float
    backward_seconds: float
    cut_bytes: float
    """All tensors that cross the cut after this layer, with skip connections; for the last layer, its output."""
    saved_bytes: float
    """The bytes that autograd keeps of one microbatch between this layer's forward and its backward."""
    parameter_bytes: float
    """The parameters that are trained: each has versions, a gradient and the optimizer's state."""
    workspace_bytes: float = 0.0
    """The most bytes that its forward or its backward holds temporarily besides all these: temporaries, and gradients
    that are not accumulated yet. 0 if the file does not give it."""
    weight_seconds: float | None = None
    """The share of `backward_seconds` that computes gradients of parameters only: the weight backward, which the layer
    before does not wait for. None if it was not measured."""
    wire_bytes: float | None = None
    """What a link carries of `cut_bytes` under ``wire_dtype=``. None if stages send tensors as they are."""
    update_seconds: float = 0.0
    """What the optimizer takes for the layer's parameters. 0 if the file does not give it."""
    frozen_bytes: float = 0.0
    """What the layer holds once and does not train: frozen parameters as they are packed, their scales, and buffers."""

    def __post_init__(self) -> None:
        check_fields(self, _LAYER_RULES, ProfileError, f" in layer {text_of(self.name)}")
        if self.weight_seconds is not None and self.weight_seconds > self.backward_seconds:
            raise ProfileError(
                f"weight_seconds: expected at most backward_seconds = {self.backward_seconds}, of which it is a part, "
                f"found {self.weight_seconds} in layer {self.name!r}: measure both again, or leave it out"
            )
        if self.wire_bytes is not None and self.wire_bytes > self.cut_bytes:
            raise ProfileError(
                f"wire_bytes: expected at most cut_bytes = {self.cut_bytes}, which a link carries of them, found "
                f"{self.wire_bytes} in layer {self.name!r}: measure both again, or leave it out"
            )

    @property
    def seconds(self) -> float:
        """Forward and backward together: ``T_l`` of [PipeDream 2019, section 3.1]."""
        return self.forward_seconds + self.backward_seconds

    @property
    def weight_part_seconds(self) -> float:
        """`weight_seconds`. If it was not measured, half of the backward, since one of its two matrix products is for
        the parameters; 0 for a layer without parameters.
        """
        if self.weight_seconds is not None:
            return self.weight_seconds
        return self.backward_seconds / 2 if self.parameter_bytes else 0.0


_RULES: FieldRules = {
    "layers": Entries(instance(LayerProfile, "a LayerProfile", "build one")),
    "crossings": Entries(instance(Crossing, "a Crossing", "build one")),
    "others": Entries(
        instance(DeviceTimes, "the DeviceTimes of another device", "add the other profile with Profile.joined")
    ),
    "microbatch_size": integer(1, unit="samples").but("give the number of samples that the times were measured with"),
    "name": TEXT,
    "device": TEXT,
    "library_bytes": number(0, most=MOST).but("measure it again, or leave it out"),
    "fragmentation": number(1, most=MOST).but("measure it again, or leave it out"),
    "tensor_parallel": integer(1).but("give the number of devices that share every layer, or leave it out"),
    "split_share": number(0, most=MOST).but("measure it again, or leave it out").optional,
}


@dataclass(frozen=True, slots=True)
class Profile:
    """A model as a chain of measured layers, for microbatches of `microbatch_size` samples."""

    layers: tuple[LayerProfile, ...]
    microbatch_size: int
    name: str = ""
    """The name of the model."""
    device: str = ""
    """The device that was measured."""
    crossings: tuple[Crossing, ...] = ()
    """The values that later layers than the next read; `cut_bytes` include them. Empty if the file gives none."""
    library_bytes: float = 0.0
    """The bytes that libraries keep forever on every rank once layers have run, such as workspaces of cuBLAS. No
    layer's numbers include them. 0 on a CPU."""
    fragmentation: float = 1.0
    """The bytes that the allocator had reserved per byte in use, at the peak of the measurement. It means little for a
    model of a few MB. 1 on a CPU, where it is not measured."""
    others: tuple[DeviceTimes, ...] = ()
    """The times of the same layers on other kinds of devices (`joined`). Sizes are those of `layers` on all kinds."""
    tensor_parallel: int = 1
    """How many devices share every layer. Seconds then include what they send each other, and bytes are those of one of
    them."""
    split_share: float | None = None
    """How much longer the two halves of a split backward take than the whole one, as a share of it. None if it was not
    measured."""

    def __post_init__(self) -> None:
        check_fields(self, _RULES, ProfileError)
        if not self.layers:
            raise ProfileError("layers: expected one layer or more, found none: a model has at least one layer")
        for index, crossing in enumerate(self.crossings):
            _check_crossing(f"crossings[{index}]", crossing, len(self.layers))
        devices = [self.device]
        for index, times in enumerate(self.others):
            if len(times) != len(self.layers):
                raise ProfileError(
                    f"others[{index}]: expected the times of {len(self.layers)} layers on {times.device!r}, found "
                    f"{len(times)}: measure the same model there"
                )
            if times.device in devices:
                raise ProfileError(
                    f"others[{index}].device: expected another device than {', '.join(map(repr, devices))}, found "
                    f"{times.device!r}: give one profile for each kind of device, each with its device's name"
                )
            devices.append(times.device)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def seconds(self) -> float:
        """Forward and backward of one microbatch on one device."""
        return sum(layer.seconds for layer in self.layers)

    @property
    def parameter_bytes(self) -> float:
        """The bytes of all weights that are trained."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def frozen_bytes(self) -> float:
        """The bytes of all that is held and not trained."""
        return sum(layer.frozen_bytes for layer in self.layers)

    def joined(self, other: "Profile") -> "Profile":
        """This profile with the times of `other`, the same model's on another kind of device.

        Raises `ProfileError` unless both have the same layers and microbatch size.
        """
        if [layer.name for layer in other.layers] != [layer.name for layer in self.layers]:
            raise ProfileError(
                f"profile of {other.device!r}: expected the layers of the profile of {self.device!r}, found others: "
                "give profiles of one model"
            )
        if other.tensor_parallel != self.tensor_parallel:
            raise ProfileError(
                f"profile of {other.device!r}: expected layers on {counted(self.tensor_parallel, 'device')} "
                f"(tensor_parallel), as on {self.device!r}, found {other.tensor_parallel}: measure both alike"
            )
        if other.microbatch_size != self.microbatch_size:
            raise ProfileError(
                f"profile of {other.device!r}: expected microbatches of {counted(self.microbatch_size, 'sample')}, as "
                f"on {self.device!r}, found {other.microbatch_size}: measure both at the same size"
            )
        return replace(self, others=(*self.others, other.times_on(DeviceKind(other.device)), *other.others))

    def times_on(self, kind: DeviceKind) -> DeviceTimes:
        """The times of the layers on a device of `kind`: those measured on it, or the first, over its speed.

        Raises `ProfileError` if times of several kinds were measured, but not of this one, and it has no speed.
        """
        for times in self.others:
            if times.device == kind.name:
                return times.scaled(1 / kind.speed)
        if self.others and kind.name != self.device and kind.speed == 1:
            known = [self.device, *(times.device for times in self.others)]
            raise ProfileError(
                f"kind {kind.name!r}: expected one of those that were profiled, {', '.join(map(repr, known))}, or a "
                f"speed, found neither: {suggestion(kind.name, known)}Name the kind as its profile does, or give the "
                f"kind's speed relative to {self.device!r}"
            )
        columns = ("forward_seconds", "backward_seconds", "weight_part_seconds")
        values = [tuple(getattr(layer, name) for layer in self.layers) for name in columns]
        return DeviceTimes(self.device, *values).scaled(1 / kind.speed)

    def on(self, kind: DeviceKind) -> "Profile":
        """This profile as it is on devices of `kind` only."""
        if kind.speed == 1 and not self.others:
            return self
        times = self.times_on(kind)
        rows = zip(times.forward_seconds, times.backward_seconds, times.weight_seconds, strict=True)
        layers = tuple(
            replace(
                layer,
                forward_seconds=forward,
                backward_seconds=backward,
                weight_seconds=None if layer.weight_seconds is None and times.device == self.device else weight,
            )
            for layer, (forward, backward, weight) in zip(self.layers, rows, strict=True)
        )
        return replace(self, layers=layers, device=times.device, others=())

    @property
    def on_wire(self) -> "Profile":
        """This profile with what a link carries in place of what crosses cuts."""
        if all(layer.wire_bytes is None for layer in self.layers):
            return self
        layers = (
            layer if layer.wire_bytes is None else replace(layer, cut_bytes=layer.wire_bytes) for layer in self.layers
        )
        crossings = (
            each if each.wire_bytes is None else replace(each, size_bytes=each.wire_bytes) for each in self.crossings
        )
        return replace(self, layers=tuple(layers), crossings=tuple(crossings))

    def with_wire_share(self, share: float) -> "Profile":
        """This profile where a link carries `share` of the bytes that cross a cut.

        It is 0.5 for ``wire_dtype=torch.bfloat16`` and tensors of float32, if nothing else crosses. A profile that was
        measured with ``wire_dtype=`` is exact.
        """
        share = number(0, most=1).but("give the share of the bytes that is sent").check("share", share, ProfileError)
        layers = tuple(replace(layer, wire_bytes=share * layer.cut_bytes) for layer in self.layers)
        crossings = tuple(replace(each, wire_bytes=share * each.size_bytes) for each in self.crossings)
        return replace(self, layers=layers, crossings=crossings)

    def prefix(self, layers: int) -> "Profile":
        """The first `layers` layers as a profile of their own."""
        kept = (replace(found, read=tuple(read for read in found.read if read < layers)) for found in self.crossings)
        crossings = tuple(found for found in kept if found.read)
        others = tuple(times.prefix(layers) for times in self.others)
        return replace(self, layers=self.layers[:layers], crossings=crossings, others=others)

    def scaled(self, microbatch_size: int) -> "Profile":
        """This profile for microbatches of another size: times and activations are scaled, weights are not.

        It is an extrapolation [Narayanan 2021, section 3.3]. Small microbatches run less efficiently than it predicts,
        so a profile that was measured at that size is better.
        """
        share = microbatch_size / self.microbatch_size
        layers = tuple(
            replace(
                layer,
                forward_seconds=layer.forward_seconds * share,
                backward_seconds=layer.backward_seconds * share,
                cut_bytes=layer.cut_bytes * share,
                saved_bytes=layer.saved_bytes * share,
                workspace_bytes=layer.workspace_bytes * share,
                weight_seconds=_scaled(layer.weight_seconds, share),
                wire_bytes=_scaled(layer.wire_bytes, share),
            )
            for layer in self.layers
        )
        crossings = tuple(
            replace(found, size_bytes=found.size_bytes * share, wire_bytes=_scaled(found.wire_bytes, share))
            for found in self.crossings
        )
        others = tuple(times.scaled(share) for times in self.others)
        return replace(self, layers=layers, microbatch_size=microbatch_size, crossings=crossings, others=others)

    def save(self, path: str | Path) -> None:
        """Writes JSON, one line per layer. `ProfileError` if the file cannot be written."""
        rows = [_row(layer) for layer in self.layers]
        head = {"format": _FORMAT, "name": self.name, "device": self.device, "microbatch_size": self.microbatch_size}
        noted = {"library_bytes": self.library_bytes, "fragmentation": self.fragmentation}
        head |= noted if (self.library_bytes, self.fragmentation) != (0, 1) else {}
        head |= {"tensor_parallel": self.tensor_parallel} if self.tensor_parallel > 1 else {}
        head |= {} if self.split_share is None else {"split_share": self.split_share}
        lines = [f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items()]
        text = "{\n" + "".join(lines) + _list("layers", rows)
        if self.crossings:
            text += ",\n" + _list("crossings", [_row(found) for found in self.crossings])
        if self.others:
            text += ",\n" + _list("others", [json.dumps(asdict(times)) for times in self.others])
        write_text(path, text + "\n}\n", ProfileError)

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Reads what `save` wrote, perhaps edited. `ProfileError` names the file, the field and the fix."""
        place = read_json(path, ProfileError)
        place.check_format(_FORMAT)
        noted = ("library_bytes", "fragmentation", "split_share")
        places = place.mapping(
            ("format", "microbatch_size", "layers"),
            ("name", "device", "crossings", "others", "tensor_parallel", *noted),
        )
        layers = tuple(_read_layer(layer) for layer in places["layers"].items())
        size = places["microbatch_size"].integer()
        readers = {**dict.fromkeys(("name", "device"), YamlNode.text), **dict.fromkeys(noted, YamlNode.number)}
        known = read_known(places, {**readers, "tensor_parallel": YamlNode.integer})
        for name, read in (("crossings", _read_crossing), ("others", _read_times)):
            known |= {name: tuple(map(read, places[name].items()))} if name in places else {}
        return place.build(lambda: cls(layers, size, **known))

    @classmethod
    def from_pipedream(cls, path: str | Path, microbatch_size: int | None = None) -> "Profile":
        """Reads a ``graph.txt`` of PipeDream's profiler and makes a chain of its graph.

        The measured minibatch becomes the microbatch. Its size is `microbatch_size`, or else follows from the bytes of
        the input images (3 x 224 x 224 numbers of 4 bytes, or 299 or 331 in place of 224). Without either (GNMT) the
        minibatch counts as one sample, and rates are minibatches per second. The file does not contain `saved_bytes`;
        the bytes of all outputs of the operator replace it. `ProfileError` names the line that cannot be read.
        """
        file = read_graph(path)
        try:
            order = linearize(file.graph)
        except ValueError as cycle:
            raise ProfileError(
                f"{path}: expected a graph without cycles, found that {cycle}: correct the edges"
            ) from None
        layers = []
        for index, cut_bytes in order:
            node = file.graph.operators[index]
            times = (node.forward_seconds, node.backward_seconds)
            layers.append(LayerProfile(node.name, *times, cut_bytes, node.output_bytes, node.parameter_bytes))
        size = microbatch_size if microbatch_size is not None else file.minibatch_size or 1
        return cls(tuple(layers), size, name=file.name)


def _scaled(size: float | None, share: float) -> float | None:
    return None if size is None else size * share


def _row(value: LayerProfile | Crossing) -> str:
    noted = ((name, field) for name, field in asdict(value).items() if field or name != "frozen_bytes")
    return json.dumps({name: field for name, field in noted if field is not None})


def _check_crossing(where: str, crossing: Crossing, layers: int) -> None:
    stops = (crossing.made, *crossing.read)
    if (
        not all(is_count(stop, least=0) for stop in stops)
        or list(stops) != sorted(set(stops))
        or len(stops) < 2
        or stops[-1] >= layers
    ):
        raise ProfileError(
            f"{where}: expected a value that one layer makes and one or more later ones of 0 to {layers - 1} read, "
            f"ascending, found made {text_of(crossing.made)} and read {text_of(crossing.read)}: measure it again"
        )
    _BYTES.check(f"{where}: size_bytes", crossing.size_bytes, ProfileError)
    _BYTES.optional.check(f"{where}: wire_bytes", crossing.wire_bytes, ProfileError)


def _list(name: str, rows: Sequence[str]) -> str:
    return f'  "{name}": [\n' + ",\n".join(f"    {row}" for row in rows) + "\n  ]"


def _read_crossing(place: YamlNode) -> Crossing:
    places = place.mapping(("name", "made", "read", "size_bytes"), ("wire_bytes",))
    numbers = dict.fromkeys(("size_bytes", "wire_bytes"), YamlNode.number)
    readers = {"name": YamlNode.text, "made": YamlNode.integer, "read": YamlNode.integers, **numbers}
    return Crossing(**read_known(places, readers))


def _read_times(place: YamlNode) -> DeviceTimes:
    places = place.mapping(("device", *_COLUMNS))
    columns = [places[name].numbers() for name in _COLUMNS]
    return place.build(lambda: DeviceTimes(places["device"].text(), *columns))


def _read_layer(place: YamlNode) -> LayerProfile:
    needed = [field.name for field in fields(LayerProfile) if field.default is MISSING]
    places = place.mapping(needed, [field.name for field in fields(LayerProfile) if field.default is not MISSING])
    name = places.pop("name").text()
    values = {number: found.number() for number, found in places.items()}
    return place.build(lambda: LayerProfile(name, **values))
