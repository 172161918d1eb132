"""The values that the arguments of a pipeline become."""

import inspect
from dataclasses import MISSING, fields, replace

import torch
from torch import nn

from penstock.pipeline import Pipeline
from penstock.runtime.assembly.pipeline_options import OPTIONS, ModelOptions, PipelineOptions, PlanOptions, RunOptions
from penstock.training.recipes import Recipe
from penstock.values import Plan


def test_values_have_the_names_and_the_defaults_of_the_arguments() -> None:
    kinds = (ModelOptions, Recipe, PlanOptions, RunOptions)
    values = {each.name: each.default for kind in kinds for each in fields(kind)}
    arguments = {name: each.default for name, each in inspect.signature(Pipeline).parameters.items()}

    assert sum(len(fields(kind)) for kind in kinds) == len(values)
    assert len(arguments) <= 33
    # Of `penstock.rehearse`, and no argument.
    assert values.pop("rehearses") is False
    assert values == {name: MISSING if value is inspect.Parameter.empty else value for name, value in arguments.items()}


def test_every_option_says_whether_ranks_agree_on_it_and_whether_a_new_plan_keeps_it() -> None:
    assert OPTIONS.keys() == inspect.signature(Pipeline).parameters.keys()
    # Only options of the plan are chosen anew.
    assert {name for name, rule in OPTIONS.items() if not rule.kept} <= {each.name for each in fields(PlanOptions)}
    assert {name for name, rule in OPTIONS.items() if rule.agrees == "own"} == {"offload_to"}


def test_a_new_plan_takes_the_place_of_all_that_chose_the_old_one() -> None:
    wanted = PlanOptions(schedule="pipedream", microbatches=4, stages=2, balance="measured", recompute=True)
    wanted = replace(wanted, vertical_sync=True, tensor_parallel=1, state_on_host=True)
    trained, recipe = ModelOptions([nn.Linear(4, 4)] * 2, (torch.zeros(2, 4),)), Recipe(nn.MSELoss(), torch.optim.SGD)
    plan = Plan.uniform(2, 2)
    found = PipelineOptions(trained, recipe, wanted, RunOptions()).replanned(plan).plan

    assert (found.plan, found.recompute) == (plan, True)
    assert found.state_on_host is True
    assert (found.schedule, found.microbatches, found.stages, found.balance) == (None, None, None, "work")
    assert (found.vertical_sync, found.tensor_parallel) == (False, None)
