"""The convergence study runs, its methods are what they are called, and its document shows what came out."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from convergence.tasks import Batches, Task
from convergence.training import METHODS, Run
from convergence.unstashed import Unstashed
from convergence_study import Study, main, read
from support.paths import ROOT

pytestmark = pytest.mark.slow

Records = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    """The study computes on one."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


ALONE = ("--stages", "1", *(f"--only=digits/adamw/{name}" for name in ("data", "one", "flush/", "pipedream", "2bw/")))
FOUR = ("data parallelism", "flush", "pipedream", "pipedream, no stashing", "2bw", "2bw, weight prediction")
"""Methods of four stages that the suite tries."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A few updates of methods on four stages, of all if a test asks for these, and of some on one."""
    path = tmp_path_factory.mktemp("convergence") / "results.jsonl"
    some = tuple(f"--only=gpt/adamw/{name}/" for name in FOUR)
    if {test_every_method_learns.__name__, test_flush_has_the_bits_of_data_parallelism.__name__} & {
        item.name for item in request.session.items
    }:
        some = ("--only=gpt/adamw", "--only=digits/sgd/data", "--only=digits/sgd/flush/")
    for options in (some, ALONE):
        main(["--quick", f"--results={path}", *options])
    return path


def digests(results: Path, task: str, stages: int) -> dict[str, str]:
    records = read(results).values()
    return {one["method"]: one["digest"] for one in records if (one["task"], one["stages"]) == (task, stages)}


@pytest.mark.sampled(0)
def test_every_method_learns(results: Path) -> None:
    records = [one for one in read(results).values() if one["task"] == "gpt"]

    # Without BatchNorm there is no need of a control for pipedream.
    assert {one["method"] for one in records} == METHODS.keys() - {"one device"}
    assert not [one["key"] for one in records if one["diverged"] or not one["final"] < one["validation"][0][1]]


@pytest.mark.sampled(0)
def test_flush_has_the_bits_of_data_parallelism(results: Path) -> None:
    for task, stages in (("gpt", 4), ("digits", 4), ("digits", 1)):
        found = digests(results, task, stages)
        assert found["flush"] == found["data parallelism"]


def test_four_stages_make_each_method_another_training(results: Path) -> None:
    found = digests(results, "gpt", 4)

    assert found.keys() >= set(FOUR)
    assert len(set(found.values())) == len(found) - 1


def test_one_stage_leaves_nothing_stale_but_2bw(results: Path) -> None:
    found = digests(results, "digits", 1)

    names = ("pipedream", "pipedream, vertical sync", "pipedream, no stashing", "pipedream, weight prediction")
    assert {found[name] for name in names} == {found["one device"]}
    assert found["2bw"] != found["data parallelism"]


def test_a_study_goes_on_where_it_stopped(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = results.read_text().splitlines()
    torn = results.with_name("torn.jsonl")
    torn.write_text("\n".join([*before[:-1], before[-1][:50]]))

    main(["--quick", f"--results={torn}", *ALONE])

    (printed,) = capsys.readouterr().out.splitlines()
    assert printed.startswith(json.loads(before[-1])["key"])
    assert read(torn).keys() == read(results).keys()


def test_seeds_run_at_the_rates_that_were_best() -> None:
    wanted = Study(only=("digits/sgd",))
    records: Records = {}
    while (run := wanted.missing(records)) is not None:
        # Data parallelism is best at 0.1, `2bw` at 0.03, and vertical sync at none.
        loss = abs(run.rate - (0.03 if run.method == "2bw" else 0.1))
        records[run.key] = {"diverged": 3 if "vertical" in run.method else None, "final": loss}
        assert isinstance(run, Run)

    def rates(method: str, seed: int) -> set[float]:
        keys = (key.split("/") for key in records)
        return {float(rate) for _, _, name, rate, number, *_ in keys if (name, int(number)) == (method, seed)}

    assert rates("2bw", 0) == {0.03, 0.1, 0.3}
    assert rates("2bw", 2) == {0.03}
    assert rates("data parallelism", 2) == {0.1}
    assert (rates("flush", 0), rates("flush", 1)) == ({0.1}, set())


def test_without_stashing_backwards_read_the_newest_weights() -> None:
    """Three matrices in two stages, by hand: the first two are one update behind when they forward."""
    torch.manual_seed(0)
    weights = [torch.randn(4, 4, dtype=torch.float64) / 2 for _ in range(3)]
    batches = [(torch.randn(5, 4).double(), torch.randn(5, 4).double()) for _ in range(6)]

    def read_nothing() -> Batches:
        raise AssertionError("the batches are given")

    def halved(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum() / 2

    layers: list[nn.Module] = [nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in weights]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data.copy_(weight)
    task = Task("matrices", "", list, read_nothing, halved, 5, 6, (0, 2, 3), {}, {})
    trainer = Unstashed(
        task,
        layers,
        2,
        lambda params: [torch.optim.SGD(params, lr=0.01)],
        lambda optimizer: LambdaLR(optimizer, lambda update: 1.0),
    )
    for batch in batches:
        trainer.step(*batch)
    trainer.drain()

    a, b, c = weights
    older = (a, b)
    for x, y in batches:
        used_a, used_b = older
        older = (a, b)
        hidden = x @ used_a.T
        middle = hidden @ used_b.T
        error = middle @ c.T - y
        to_b = error @ c
        # Through `b` as it is now, and not as it was in the forward.
        to_a = to_b @ b
        a, b, c = a - 0.01 * to_a.T @ x, b - 0.01 * to_b.T @ hidden, c - 0.01 * error.T @ middle

    for layer, weight in zip(layers, (a, b, c), strict=True):
        assert isinstance(layer.weight, Tensor)
        torch.testing.assert_close(layer.weight.detach(), weight, rtol=1e-12, atol=1e-12)


def test_the_document_shows_the_results(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text((ROOT / "studies/convergence/results/convergence.jsonl").read_text())
    main(["--report", f"--pictures={tmp_path}", f"--results={results}"])
    made = (tmp_path / "results.md").read_text()
    document = (ROOT / "docs/convergence.md").read_text()
    pictures = {picture.name: picture.read_text() for picture in tmp_path.glob("*.svg")}

    assert made == (ROOT / "studies/convergence/results/convergence.md").read_text()
    assert pictures == {path.name: path.read_text() for path in (ROOT / "docs/pictures").glob("convergence*.svg")}
    assert [name for name in pictures if f"(pictures/{name})" not in document] == []
