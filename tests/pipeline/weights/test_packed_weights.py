"""Weights of packed layers from files, packed there or when they are read, on the process that needs them; and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import penstock
from penstock.errors import CheckpointError, PenstockError
from support.packed_layers import Adapted, PackedWeight, packed
from support.processes import Pool

LAYERS, WIDTH = 4, 4
X, Y = torch.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH), torch.full((8, WIDTH), 0.1)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted(WIDTH) for _ in range(LAYERS)))


def write(directory: Path, whole: bool) -> Path:
    """A file of the model, packed if `whole`, or as it was before."""
    model = packed(net()) if whole else net()
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, directory / "x.safetensors")
    return directory / "x.safetensors"


def start(model: nn.Module, **options: Any) -> penstock.Pipeline:
    arguments = {"microbatches": 2, "check": "off", **options}
    return penstock.Pipeline(model, (X[:2],), F.mse_loss, lambda ps: torch.optim.AdamW(ps, lr=1e-2), **arguments)


def from_file(file: Path, **options: Any) -> penstock.Pipeline:
    with torch.device("meta"):
        model = net()
    return start(model, init_fn=penstock.load_weights(file), **options)


def losses(pipe: penstock.Pipeline) -> list[float]:
    return [float(pipe.step(X, Y).loss) for _ in range(3)]


def expected() -> list[float]:
    with start(packed(net()), stages=2) as pipe:
        return losses(pipe)


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_without_weights_reads_or_packs_its_own(whole: bool, tmp_path: Path) -> None:
    with from_file(write(tmp_path, whole), stages=2) as pipe:
        assert losses(pipe) == expected()
        assert pipe.full_state_dict().keys() == packed(net()).state_dict().keys()
    with torch.device("meta"):
        model = net()
    made = penstock.initialize(model, penstock.load_weights(tmp_path / "x.safetensors"))
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, packed(net()).state_dict()[name]), name


def test_one_weight_at_a_time_is_there_before_it_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, events = write(tmp_path, False), list[str]()
    pack = PackedWeight.to

    def noted(self: Any, device: Any = None, *rest: Any, **others: Any) -> Any:
        events.append(f"packs {self.dtype}")
        return pack(self, device, *rest, **others)

    monkeypatch.setattr(PackedWeight, "to", noted)
    with torch.device("meta"):
        model = net()
    read: Any = penstock.load_weights(file)
    read_one = type(read).__call__

    def counted(self: Any, name: str, tensor: Tensor) -> None:
        events.append(f"reads {name}")
        read_one(self, name, tensor)

    monkeypatch.setattr(type(read), "__call__", counted)
    penstock.initialize(model, read)
    reads = [index for index, event in enumerate(events) if "base_layer" in event]
    assert len(reads) == LAYERS
    assert [events[index + 1] for index in reads] == ["packs torch.float32"] * LAYERS


def test_a_damaged_or_missing_scale_in_a_file_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, True)
    tensors = load_file(file)
    tensors["2.base_layer.weight.scales"][1] = torch.nan
    save_file(tensors, tmp_path / "damaged.safetensors")
    with pytest.raises(CheckpointError, match=r"damaged.*finite numbers in 2\.base_layer\.weight\.scales"):
        from_file(tmp_path / "damaged.safetensors", stages=2)
    del tensors["2.base_layer.weight.scales"]
    save_file(tensors, tmp_path / "without.safetensors")
    with pytest.raises(CheckpointError, match=r"PackedWeight refuses 2\.base_layer.* KeyError: 'scales'"):
        from_file(tmp_path / "without.safetensors", stages=2)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    """A model that is no PEFT model goes whole, with the scales."""
    with start(packed(net()), stages=2) as pipe:
        losses(pipe)
        pipe.save_weights(tmp_path / "out")
        whole = pipe.full_state_dict()
        went_on = pipe.predict(X[:2])
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    with from_file(tmp_path / "out", stages=2) as other:
        assert torch.equal(other.predict(X[:2]), went_on)


def in_processes(directory: Path, packed_file: Path) -> tuple[list[float], list[str], int, str]:
    """The losses, the whole state dict's names, how many layers have weights here, and the error of another model."""
    with torch.device("meta"):
        model = net()
    with start(model, init_fn=penstock.load_weights(packed_file), save_frozen=False) as pipe:
        found = losses(pipe)
        pipe.save_weights(directory / "out")
        pipe.save(directory / "run")
        names = sorted(pipe.full_state_dict(rank=None))
        here = sum(not each.base_layer.weight.is_meta for each in model)  # type: ignore[union-attr]
    with torch.device("meta"):
        again = net()
    with start(again, init_fn=penstock.load_weights(packed_file), resume=directory / "run") as pipe:
        went_on = float(pipe.step(X, Y).loss)
    return found, names, here, repr(went_on)


def test_two_processes(pool: Pool, tmp_path: Path) -> None:
    with start(packed(net()), stages=2) as pipe:
        first = [float(pipe.step(X, Y).loss) for _ in range(4)]
    for whole in (True, False):
        (tmp_path / str(whole)).mkdir()
        file = write(tmp_path / str(whole), whole)
        for found, names, here, went_on in pool.run(2, in_processes, tmp_path / str(whole), file):
            assert found == first[:3]
            assert names == sorted(packed(net()).state_dict())
            assert here == LAYERS // 2
            assert went_on == repr(first[3])
        assert load_file(tmp_path / str(whole) / "out" / "model.safetensors").keys() == set(names)


class Halves(Tensor):
    """Numbers as bfloat16, as a library may wrap them."""

    @staticmethod
    def __new__(cls, values: Tensor) -> "Halves":
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> "Halves":
        return cls(inner["numbers"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers)
        plain = torch.utils._pytree.tree_map_only(Halves, lambda each: each.numbers.float(), (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def halved(name: str, tensor: Tensor) -> Tensor:
    return Halves(tensor.detach().bfloat16()) if name in ("1.weight", "3.weight") else tensor


def test_a_function_converts_what_was_read(tmp_path: Path) -> None:
    save_file(linears().state_dict(), tmp_path / "x.safetensors")
    plain: Any = linears()
    for index in (1, 3):
        plain[index].weight = nn.Parameter(halved(f"{index}.weight", plain[index].weight), requires_grad=False)
    with start(plain, stages=2) as pipe:
        first = losses(pipe)
    with torch.device("meta"):
        model: Any = linears()
    with start(model, stages=2, init_fn=penstock.load_weights(tmp_path / "x.safetensors", convert=halved)) as pipe:
        assert losses(pipe) == first
    assert isinstance(model[1].weight, Halves)


def test_a_function_that_returns_something_else_is_refused(tmp_path: Path) -> None:
    save_file(linears().state_dict(), tmp_path / "x.safetensors")
    with torch.device("meta"):
        model = linears()
    convert: Any = lambda name, tensor: None  # noqa: E731
    with pytest.raises(PenstockError, match=r"convert=.*expected a tensor of the shape \(4, 4\) for 0\.weight"):
        penstock.initialize(model, penstock.load_weights(tmp_path / "x.safetensors", convert=convert))
