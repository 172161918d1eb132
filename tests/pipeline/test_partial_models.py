"""A model of which this process does not have all newest numbers refuses to be used as one, until it is gathered.

Jobs run in two processes, beside the same training in one process, which has the whole model at all times.
"""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support import models
from support.jobs.weight_jobs import TOKENS, build, class_of, lora, make_pipeline
from support.processes import Pool

NAMED = ("pipe.evaluate", "pipe.predict", "pipe.save_weights", "pipe.full_state_dict", "pipe.gather_model()")
ZEROS = torch.zeros_like(TOKENS)
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Block(nn.Module):
    """Has a weight, a buffer that its forward writes, and one outside of the state dict that it writes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return torch.tanh(self.norm(self.linear(x)))


class Net(nn.Module):
    """Its last block is frozen, and so are a teacher that its forward does not use and a table that all blocks read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[3].linear.requires_grad_(False)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("table", torch.ones(4))
        self.factor = 1.0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * self.table) * self.factor
        return x


def net_pipeline(model: nn.Module, **options: Any) -> penstock.Pipeline:
    given: dict[str, Any] = {"microbatches": 2, "stages": 2, "optimizer": models.adamw, **options}
    return penstock.Pipeline(model, (X[:4],), F.mse_loss, **given)


def error_of(use: Callable[[], object]) -> str:
    try:
        use()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def same(model: nn.Module, state: dict[str, Tensor]) -> bool:
    return same_tensors(model.state_dict(), state)


def same_tensors(own: dict[str, Tensor], state: dict[str, Tensor]) -> bool:
    return own.keys() == state.keys() and all(torch.equal(own[name], tensor) for name, tensor in state.items())


USES: dict[str, Callable[[nn.Module], object]] = {
    "forward": lambda model: model(X),
    "blocks": lambda model: [block(X) for block in model.blocks],
    "state_dict": lambda model: model.state_dict(),
    "state_dict of a part": lambda model: model.blocks.state_dict(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "norms": lambda model: [parameter.norm() for parameter in model.parameters()],
    "data": lambda model: [parameter.data for parameter in model.parameters()],
    "numpy": lambda model: [parameter.detach().numpy() for parameter in model.parameters()],
    "buffers": lambda model: [buffer.sum() for buffer in model.buffers()],
    "average": lambda model: torch.optim.swa_utils.AveragedModel(model),
    "foreach": lambda model: torch._foreach_norm(list(model.parameters())),
    "written to another": lambda model: [torch.zeros_like(X[0]).add_(block.linear.bias) for block in model.blocks],
    "another pipeline": net_pipeline,
}
"""What a whole model can do."""
ALLOWED: dict[str, Callable[[nn.Module], object]] = {
    "sizes": lambda model: [(each.shape, each.numel(), each.dtype, each.device) for each in model.parameters()],
    "text": lambda model: [repr(model), [repr(parameter) for parameter in model.parameters()]],
    "modes": lambda model: [model.eval(), model.train(), model.zero_grad()],
    "clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "device": lambda model: [model.cpu(), model.to("cpu"), model.double()],
    "kinds": lambda model: [nn.Linear(4, 4).load_state_dict({}, strict=False), isinstance_of_all(model)],
    "teacher": lambda model: model.teacher(X),
    "table": lambda model: model.table.sum(),
    "frozen": lambda model: model.blocks[3].linear(X),
}
"""What reads no number that another process may have changed."""


def isinstance_of_all(model: nn.Module) -> None:
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    assert {type(parameter).__name__ for parameter in model.parameters()} == {"Parameter"}


def use_everything() -> dict[str, Any]:
    model = Net()
    pipe = net_pipeline(model, check="off")
    # In evaluation mode, since a forward that is refused in the middle has written the statistics of the blocks before.
    before = error_of(lambda: model.eval()(X))
    model.train()
    for _ in range(2):
        pipe.step(X, X)
    model.eval()
    # In one process another pipeline would take the model from this one.
    uses = {name: use for name, use in USES.items() if use is not net_pipeline or dist.is_initialized()}
    found: dict[str, Any] = {
        "before": before,
        "uses": {name: error_of(partial(use, model)) for name, use in uses.items()},
    }
    found["allowed"] = {name: error_of(partial(use, model)) for name, use in ALLOWED.items()}
    model.train()
    own = dict(pipe.named_parameters())
    found["own"] = error_of(lambda: [parameter.norm() for parameter in own.values()])
    found["loss"] = float(pipe.evaluate(X, X).loss)
    pipe.measure(iterations=1, warmup=1)
    model.eval()
    pipe.gather_model()
    found["gathered"] = same(model, pipe.full_state_dict(rank=None))
    found["calls"] = [float(block.calls) for block in model.blocks]  # type: ignore[arg-type]
    found["ordinary"] = {type(tensor) for tensor in (*model.parameters(), *model.buffers())} == {nn.Parameter, Tensor}
    found["whole"] = [error_of(partial(use, model)) for use in USES.values() if use is not net_pipeline]
    made = copy.deepcopy(model)
    found["output"] = made(X).detach()
    model.train()
    # The pipeline captures the model again, whose numbers are old by then.
    model.factor = 0.5
    pipe.step(X, X)
    found["again"], found["copy"] = error_of(lambda: model.eval()(X)), error_of(lambda: made(X))
    found["text"] = repr(pipe)
    found["state"] = pipe.full_state_dict(rank=None)
    pipe.close()
    found["closed"] = error_of(lambda: model(X))
    return found


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The same training in one process."""
    return use_everything()


@pytest.fixture(scope="module")
def used(pool: Pool) -> list[dict[str, Any]]:
    return pool.run(2, use_everything)


def test_one_process_has_all(plain: dict[str, Any]) -> None:
    assert not any(plain["uses"].values()) and not any(plain["allowed"].values())
    assert plain["ordinary"] and not plain["again"] and not plain["closed"]
    assert plain["text"] == "<Pipeline, rank 0 of 1: 1f1b-flush, 2 stages, 2 microbatches, 3 steps>"


@pytest.mark.parametrize("name", USES)
def test_old_numbers_are_not_read(used: list[dict[str, Any]], name: str) -> None:
    for rank, found in enumerate(used):
        assert not found["before"]
        text = found["uses"][name]
        assert text.startswith("PenstockError: blocks."), text
        assert int(text.split(".")[1]) // 2 != rank
        assert all(each in text for each in NAMED)


@pytest.mark.parametrize("name", ALLOWED)
def test_reads_without_numbers_work(used: list[dict[str, Any]], name: str) -> None:
    assert [found["allowed"][name] for found in used] == ["", ""]
    assert [found["own"] for found in used] == ["", ""]


def test_a_gathered_model_is_an_ordinary_one_until_the_next_step(
    plain: dict[str, Any], used: list[dict[str, Any]]
) -> None:
    for found in used:
        assert found["loss"] == plain["loss"]
        assert found["gathered"] and found["ordinary"] and not any(found["whole"]) and not found["copy"]
        assert found["calls"] == plain["calls"]
        assert torch.equal(found["output"], plain["output"])
        assert "its newest numbers are in another process" in found["again"]
        assert "before pipe.close()" in found["closed"]
        assert same_tensors(found["state"], plain["state"])


def train_on(schedule: str, options: dict[str, Any]) -> list[tuple[str, bool]]:
    """What a forward says before and after each of the ways in which weights change."""
    model = Net()
    pipe = net_pipeline(model, schedule=schedule, **options)
    found = []

    def note() -> None:
        refused = error_of(lambda: model.eval()(X))
        model.train()
        pipe.gather_model()
        found.append((refused, same(model, pipe.full_state_dict(rank=None))))

    pipe.step(X, X)
    note()
    state = pipe.state_dict()
    pipe.step(X, X)
    pipe.step(X, X)
    note()
    pipe.load_state_dict(state)
    note()
    if options:
        with pipe.averaged():
            note()
        note()
    pipe.close()
    return found


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("1f1b-flush", {"update_hooks": penstock.WeightAverage(0.9)}), ("pipedream", {}), ("2bw", {})],
)
def test_steps_loads_and_averages_make_it_partial_again(pool: Pool, schedule: str, options: dict[str, Any]) -> None:
    for found in pool.run(2, train_on, schedule, options):
        assert all("its newest numbers are in another process" in text and equal for text, equal in found), found


def load_at_first(directory: Path) -> tuple[str, str, bool]:
    """A load changes what is frozen, too. A first step after it is compared with the model as any other."""
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    first = net_pipeline(model)
    first.save(directory)
    first.close()
    model = Net()
    pipe = net_pipeline(model, resume=directory)
    frozen, teacher = error_of(lambda: model.blocks[3].linear(X)), error_of(lambda: model.teacher(X))
    pipe.step(X, X)
    pipe.gather_model()
    state = pipe.full_state_dict(rank=None)
    whole = same(model, state)
    return frozen if pipe.rank == 0 else teacher, error_of(lambda: model(X)), whole


def test_a_load_changes_frozen_weights_too(tmp_path: Path, pool: Pool) -> None:
    (frozen, first, whole), (teacher, second, complete) = pool.run(2, load_at_first, tmp_path)
    assert frozen.startswith("PenstockError: blocks.3.linear.weight: its newest numbers are in another process")
    assert teacher.startswith("PenstockError: teacher.weight: its newest numbers are in another process")
    assert (first, second, whole, complete) == ("", "", True, True)


def hold_all() -> list[str]:
    """One stage of two replicas; two stages that share all of their weights."""
    texts = []
    for model, options in (
        (Net(), {"plan": penstock.Plan((penstock.Stage(0, 4, (0, 1)),), microbatches=2), "stages": None}),
        (models.InARow(*[layer := nn.Linear(4, 4).double()] * 2, nn.Tanh(), layer), {}),
    ):
        pipe = net_pipeline(model, **{**options, "microbatches": None if "plan" in options else 2})
        pipe.step(X, X)
        pipe.drain()
        texts.append(error_of(partial(model, X)) or str(same(model, pipe.full_state_dict(rank=None))))
        pipe.close()
    return texts


def test_a_process_that_holds_all_refuses_nothing(pool: Pool) -> None:
    assert pool.run(2, hold_all) == [["True", "True"]] * 2


def gather_meta() -> tuple[str, bool, Tensor]:
    """A list of layers that had no weights: the refusal, whether it is whole then, and its output after a close."""
    with torch.device("meta"):
        layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)]
        layers[3].requires_grad_(False)
    model, x = nn.Sequential(*layers), X.float()
    options: dict[str, Any] = {
        "optimizer": models.adamw,
        "init_fn": penstock.reset_parameters(layers),
        "stages": 2,
        "microbatches": 2,
    }
    pipe = penstock.Pipeline(layers, (x[:4],), F.mse_loss, **options)
    pipe.step(x, x)
    text = error_of(lambda: model(x))
    pipe.gather_model()
    pipe.step(x, x)
    pipe.gather_model()
    whole = same(model, {name: tensor for name, tensor in pipe.full_state_dict(rank=None).items()})
    pipe.close()
    return text, whole, model.eval()(x).detach()


def test_a_model_that_had_no_weights_gets_them(pool: Pool) -> None:
    _, _, expected = gather_meta()
    for rank, (text, whole, output) in enumerate(pool.run(2, gather_meta)):
        assert text.startswith(f"PenstockError: {'02'[1 - rank]}.weight: its newest numbers are in another process")
        assert whole and torch.equal(output, expected)


def train_llama(directory: Path, adapters: bool) -> dict[str, Any]:
    """A script of transformers, whose last lines are those of a script without a pipeline."""
    model = lora() if adapters else build("llama")
    pipe = make_pipeline(model)
    for _ in range(2):
        pipe.step({"input_ids": TOKENS}, ZEROS)
    prompt = TOKENS[:1]
    uses: dict[str, Callable[[], object]] = {
        "forward": lambda: model(input_ids=TOKENS),
        "part": lambda: (model.base_model if adapters else model.model)(input_ids=TOKENS),
        "generate": lambda: model.generate(input_ids=prompt, max_new_tokens=2, do_sample=False),
        "save_pretrained": lambda: model.save_pretrained(directory / f"refused-{pipe.rank}"),
        "merge": lambda: (
            copy.deepcopy(model).merge_and_unload()
            if adapters
            else model.lm_head.weight + model.model.embed_tokens.weight
        ),
    }
    found: dict[str, Any] = {"refused": {name: error_of(use) for name, use in uses.items()}}
    found["sizes"] = sum(parameter.numel() for parameter in model.parameters())
    found["predicted"] = pipe.predict({"input_ids": TOKENS}).logits
    pipe.gather_model()
    pipe.close()
    model.eval()
    found["logits"] = model(input_ids=TOKENS).logits.detach()
    found["generated"] = model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
    if pipe.rank == 0:
        model.save_pretrained(directory / "saved")
    return found


@pytest.mark.parametrize("adapters", [False, True], ids=["llama", "peft"])
def test_the_last_lines_of_a_script_of_transformers_stay(tmp_path: Path, pool: Pool, adapters: bool) -> None:
    expected = train_llama(tmp_path / "plain", adapters)
    assert not any(expected["refused"].values())
    for found in pool.run(2, train_llama, tmp_path, adapters):
        for text in found["refused"].values():
            assert "PenstockError" in text and all(each in text for each in NAMED), text
        assert found["sizes"] == expected["sizes"]
        for name in ("predicted", "logits", "generated"):
            assert torch.equal(found[name], expected[name])
    if adapters:
        import peft

        loaded = peft.PeftModel.from_pretrained(lora().unload(), tmp_path / "saved")
    else:
        loaded = class_of("llama").from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded.eval()(input_ids=TOKENS).logits, expected["logits"])


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
@pytest.mark.parametrize(
    "options", [{}, {"version_dtype": torch.bfloat16, "autocast": torch.bfloat16}], ids=["same", "lower"]
)
def test_between_steps_one_process_reads_the_newest_version(schedule: str, options: dict[str, Any]) -> None:
    model = Net().float()
    pipe = penstock.Pipeline(
        model, (X[:4].float(),), F.mse_loss, models.adamw, schedule=schedule, stages=2, microbatches=2, **options
    )
    for _ in range(3):
        pipe.step(X.float(), X.float())
        # No drain comes between: the parameters are those that the last update of each stage has made.
        newest = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
        other = Net().float()
        other.load_state_dict({**model.state_dict(), **newest})
        assert torch.equal(model.eval()(X.float()), other.eval()(X.float()))
        model.train()
    pipe.drain()
    assert same(model, pipe.full_state_dict())
