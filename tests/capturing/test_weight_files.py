"""`load_weights` reads what the model needs, compares all of it before, and says what does not fit."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import penstock
from penstock.capturing.initialization import initialize
from penstock.capturing.weight_files import load_weights
from penstock.errors import CheckpointError, PenstockError


class Net(nn.Module):
    """Tied weights, a buffer in the state dict, and one outside of it that a reset computes."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)
        self.angles = Angles(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.first(x)) + self.angles(x))


class Angles(nn.Module):
    """Adds a table that is in no file."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.copy_(torch.arange(float(len(self.table))).sin())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


def net(dtype: torch.dtype = torch.float32, **options: Any) -> Net:
    """The net without weights."""
    with torch.device("meta"):
        return Net(**options).to(dtype)


def values() -> dict[str, Tensor]:
    """What a file holds for it."""
    torch.manual_seed(3)
    tensors = {name: torch.randn(tensor.shape) for name, tensor in Net().state_dict().items() if tensor.ndim}
    tensors["norm.num_batches_tracked"] = torch.tensor(7)
    del tensors["second.weight"]
    return tensors


def stored(path: Path, tensors: dict[str, Tensor]) -> Path:
    """A file with `tensors`."""
    save_file(tensors, path)
    return path


def complaint(model: nn.Module, path: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        initialize(model, load_weights(path, **options))
    return str(caught.value)


def test_a_file_fills_the_model(tmp_path: Path) -> None:
    tensors = values()
    model = initialize(net(), load_weights(stored(tmp_path / "any.safetensors", tensors)))

    state = model.state_dict()
    assert state.keys() == {*tensors, "second.weight"}
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
    assert model.second.weight is model.first.weight
    assert torch.equal(model.angles.table, torch.arange(4.0).sin())


def test_a_weight_may_have_any_of_its_names(tmp_path: Path) -> None:
    tensors = values()
    tensors["second.weight"] = tensors.pop("first.weight")
    model = initialize(net(), load_weights(stored(tmp_path / "x.safetensors", tensors)))

    assert torch.equal(model.first.weight, tensors["second.weight"])


def test_different_values_for_one_weight_are_refused(tmp_path: Path) -> None:
    tensors = values()
    own = tensors["first.weight"]
    initialize(net(), load_weights(stored(tmp_path / "a", {**tensors, "second.weight": own.clone()})))

    text = complaint(net(), stored(tmp_path / "b", {**tensors, "second.weight": own + 1}))

    assert "first.weight (b) and second.weight (b) have different values" in text


def test_an_index_names_the_files(tmp_path: Path) -> None:
    tensors = values()
    homes = {name: f"part-{number}.safetensors" for number, name in enumerate(tensors)}
    for name, file in homes.items():
        stored(tmp_path / file, {name: tensors[name]})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))

    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        model = initialize(net(), load_weights(path))
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in tensors.items())

    (tmp_path / "part-1.safetensors").unlink()
    (tmp_path / "part-3.safetensors").unlink()
    assert "Absent: part-1.safetensors, part-3.safetensors" in complaint(net(), tmp_path)


def test_a_tensor_in_two_files_is_that_of_the_file_which_the_index_names(tmp_path: Path) -> None:
    tensors = values()
    first, *others = tensors
    stored(tmp_path / "a.safetensors", tensors)
    stored(tmp_path / "b.safetensors", {first: tensors[first] + 1, "more": torch.ones(1)})
    homes = {**dict.fromkeys(tensors, "a.safetensors"), "more": "b.safetensors"}
    for home, difference in (("a.safetensors", 0), ("b.safetensors", 1)):
        index = {"weight_map": {**homes, first: home}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with warnings.catch_warnings(action="ignore"):
            model = initialize(net(), load_weights(tmp_path))
        assert torch.equal(model.state_dict()[first], tensors[first] + difference)
        assert all(torch.equal(model.state_dict()[name], tensors[name]) for name in others)


def fail(name: str) -> str:
    raise KeyError(name)


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (fail, "rename= fails for 'first.weight': KeyError"),
        (lambda name: None, r"rename\('first.weight'\): expected text, found nothing"),
        (lambda name: [name], r"rename\('first.weight'\): expected text, found \['first"),
        ({"first": None}, "rename= fails for '"),
        ({"^": r"\9"}, "rename= fails for '': .*invalid group reference"),
        ({3: "a"}, "rename= fails for ''"),
        ({"*x": ""}, "rename= fails for '': .*nothing to repeat"),
    ],
)
def test_a_wrong_renaming_is_refused(tmp_path: Path, rename: Any, message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        initialize(net(), load_weights(stored(tmp_path / "x", values()), rename=rename))


@pytest.mark.parametrize(
    ("in_file", "in_model"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float64)],
)
def test_floating_types_are_converted(tmp_path: Path, in_file: torch.dtype, in_model: torch.dtype) -> None:
    tensors = {name: t.to(in_file) if t.is_floating_point() else t for name, t in values().items()}
    model = initialize(net(in_model), load_weights(stored(tmp_path / "x", tensors)))

    assert model.first.weight.dtype == in_model
    assert all(
        torch.equal(model.state_dict()[name], t.to(model.state_dict()[name].dtype)) for name, t in tensors.items()
    )


def test_other_types_are_not_converted(tmp_path: Path) -> None:
    tensors = values()
    tensors["first.bias"] = tensors["first.bias"].to(torch.float8_e4m3fn)
    tensors["norm.bias"] = torch.zeros(4, dtype=torch.int8)

    text = complaint(net(), stored(tmp_path / "x", tensors))

    assert "first.bias: F32 in the model, F8_E4M3 in x; norm.bias: F32 in the model, I8 in x" in text
    assert "Build layers of the library that has quantized a file (bitsandbytes), or convert the file" in text


def test_all_that_does_not_fit_is_named_together(tmp_path: Path) -> None:
    tensors = values()
    tensors["extra"] = tensors.pop("first.bias")
    tensors["norm.scale"] = tensors.pop("norm.weight")
    tensors["norm.running_mean"] = torch.zeros(5)
    tensors["first.weight"] = torch.zeros(4, 5)

    text = complaint(net(), stored(tmp_path / "x", tensors))

    assert "lack 2 tensor(s) of the model: first.bias, norm.weight." in text
    assert (
        "2 tensor(s) differ in shape or type: first.weight: (4, 4) in the model, (4, 5) in x; norm.running_mean" in text
    )
    assert "The model lacks 2 tensor(s) of the files: extra, norm.scale." in text
    assert "rename=" in text and "missing=penstock.reset_parameters(model)" in text


def test_what_the_model_has_not_is_warned_of_once(tmp_path: Path) -> None:
    tensors = {**values(), "old": torch.zeros(1), "angles.table": torch.zeros(4)}
    init_fn = load_weights(stored(tmp_path / "x", tensors))

    with pytest.warns(
        UserWarning, match=r"no place for 1 tensor\(s\) of the files, which are not read: old\."
    ) as caught:
        first = initialize(net(), init_fn)
    initialize(net(), init_fn)

    assert len(caught) == 1
    assert torch.equal(first.angles.table, torch.arange(4.0).sin())


@pytest.mark.parametrize(
    "rename",
    [lambda name: "net." + name.replace("first", "fc"), {r"^": "net.", r"\.first\.": ".fc."}],
    ids=["function", "dict"],
)
def test_names_in_the_files_may_differ(tmp_path: Path, rename: Any) -> None:
    tensors = values()
    there = {"net." + name.replace("first", "fc"): tensor for name, tensor in tensors.items()}
    path = stored(tmp_path / "x", there)
    model = initialize(net(), load_weights(path, rename=rename))

    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in tensors.items())
    assert "first.weight (as 'net.first.weight' or 'net.second.weight')" in complaint(net(), path, rename={"^": "net."})


def test_what_files_lack_may_come_from_elsewhere(tmp_path: Path) -> None:
    tensors = values()
    del tensors["first.bias"], tensors["norm.running_var"]
    path = stored(tmp_path / "x", tensors)
    model = net()
    initialize(model, load_weights(path, missing=penstock.reset_parameters(model)))

    assert 0 < float(model.first.bias.detach().abs().max()) <= 0.5
    assert torch.equal(model.norm.running_var, torch.ones(4))
    assert torch.equal(model.first.weight, tensors["first.weight"])
    # Not one name fits: that is another model, and no missing head.
    model = net()
    text = complaint(model, path, missing=penstock.reset_parameters(model), rename={"^": "none."})
    assert "lack 7 tensor(s)" in text


def test_values_in_the_files_replace_those_of_the_model(tmp_path: Path) -> None:
    """As accelerate builds models: parameters on the meta device, buffers not."""
    tensors = values()
    model = net()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        setattr(model.norm, name, torch.zeros_like(getattr(model.norm, name), device="cpu"))
    model.angles.table = torch.full((4,), 5.0)
    initialize(model, load_weights(stored(tmp_path / "x", tensors)))

    assert torch.equal(model.norm.running_mean, tensors["norm.running_mean"])
    assert int(model.norm.num_batches_tracked) == 7
    assert torch.equal(model.angles.table, torch.full((4,), 5.0))


def test_it_serves_a_function_of_the_user_tensor_by_tensor(tmp_path: Path) -> None:
    tensors = values()
    load = load_weights(stored(tmp_path / "x", tensors))
    reset = penstock.reset_parameters(net())

    def init_fn(name: str, tensor: Tensor) -> None:
        (reset if name.startswith("angles") else load)(name, tensor)

    model = initialize(net(), init_fn)

    assert torch.equal(model.first.weight, tensors["first.weight"])
    with pytest.raises(CheckpointError, match="expected 'no such', the weights of no such, found no such tensor"):
        load("no such", torch.zeros(1))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "found an empty directory. Download a model of the hub with huggingface_hub.snapshot_download"),
        ({"pytorch_model.bin": b"x"}, "found pytorch_model.bin. "),
        ({"model.safetensors": b"\x10\0\0\0\0\0\0\0{}"}, "model.safetensors: expected a whole safetensors file, found"),
        ({"model.safetensors.index.json": b"{"}, "index.json: line 1, column 2: not JSON"),
        *(
            ({"model.safetensors.index.json": b'{"weight_map": %s}' % found}, message)
            for found, message in {
                b"[]": "whose weight_map has the name of a file beside it for each tensor, found []",
                b"null": "found nothing",
                b'{"a": 3}': "for each tensor, found 3",
                b'{"a": null}': "for each tensor, found nothing",
                b'{"a": NaN}': "for each tensor, found nan",
                b'{"a": ["b"]}': "for each tensor, found ['b']",
                b'{"a": "../b"}': "for each tensor, found '../b'",
                b'{"a": "%s"}' % (b"x" * 5000): "for each tensor, found 'xxx",
                b'{"a": "b", "a": "c"}': "the key 'a' is written twice",
                b"[" * 100_000: "a depth that cannot be read",
                b"1" * 5000: "a value that cannot be read",
            }.items()
        ),
        ({"model.safetensors.index.json": b"[1]"}, "found nothing"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)

    assert message in complaint(net(), tmp_path)
    assert "nothing. Download" in complaint(net(), tmp_path / "absent")


def test_half_a_file_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = stored(tmp_path / "x", values())
    path.write_bytes(path.read_bytes()[:-1])

    assert "x: expected a whole safetensors file, found SafetensorError" in complaint(net(), path)


def test_without_the_library_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path / "x", values())
    monkeypatch.setitem(sys.modules, "safetensors", None)

    with pytest.raises(PenstockError, match="pip install safetensors"):
        initialize(net(), load_weights(path))


def test_a_pipeline_compares_before_it_captures(tmp_path: Path) -> None:
    """A capture of a large model takes minutes."""

    class Failing(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("captured")

    with torch.device("meta"):
        model = Failing(nn.Linear(2, 2), nn.Linear(2, 2))
    path = stored(tmp_path / "x", {"0.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match="lack 3 tensor"), warnings.catch_warnings():
        options: Any = {"loss_fn": nn.functional.mse_loss, "optimizer": torch.optim.SGD, "stages": 2}
        penstock.Pipeline(model, (torch.zeros(2, 2),), init_fn=load_weights(path), **options)
