"""A warning, once, for the use of a model of which this process trains a part; Penstock's own calls say nothing."""

import pytest
import torch
from torch import nn

from penstock.capturing.reminders import Reminder
from penstock.errors import PenstockError
from support.jobs.weight_jobs import use_the_model
from support.processes import Pool

REMINDED = {"call", "call of a copy", "state dict of a pickle"}


def test_a_process_with_a_part_of_the_model_is_reminded(pool: Pool) -> None:
    for found in pool.run(2, use_the_model, "llama"):
        assert {name for name, texts in found.items() if texts} == REMINDED
        for name in REMINDED:
            (text,) = found[name]
            assert "of the" in text and "pipe.predict(inputs)" in text and "pipe.save_weights(directory)" in text


def test_a_process_with_the_whole_model_is_not() -> None:
    assert not any(use_the_model("llama").values())


def test_a_call_of_a_model_of_which_a_part_has_no_weights_says_what_to_call() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].to("meta")
    Reminder("call pipe.predict").put_on(model)
    for _ in range(2):
        with pytest.raises(PenstockError, match=r"call pipe\.predict"):
            model(torch.ones(1, 2))
    with pytest.warns(UserWarning, match=r"call pipe\.predict"):
        model.state_dict()
    model.to_empty(device="cpu")
    model(torch.ones(1, 2))
