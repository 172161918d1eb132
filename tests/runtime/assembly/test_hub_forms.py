"""What of a PEFT model is written, and under which names: as PEFT itself does, or not at all."""

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from penstock.errors import PenstockError
from penstock.runtime.assembly.weight_exports import hub_form
from support.jobs.weight_jobs import build

# PEFT asks transformers by a name of old.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
MATRICES = ["q_proj", "v_proj"]


def adapted(**options: Any) -> Any:
    """Llama with a LoRA of these options."""
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(build("llama"), peft.LoraConfig(r=2, **{"target_modules": MATRICES, **options}))


@pytest.mark.parametrize(
    "options",
    [{"modules_to_save": ["lm_head"]}, {"use_dora": True}, {"bias": "all"}, {"task_type": "CAUSAL_LM"}],
    ids=lambda options: next(iter(options)),
)
def test_names_are_those_of_peft(tmp_path: Path, options: dict[str, Any]) -> None:
    model = adapted(**options)
    model.save_pretrained(tmp_path)
    names, adapter = hub_form(model, model.state_dict())

    with safe_open(tmp_path / "adapter_model.safetensors", framework="pt") as opened:
        assert sorted(names.values()) == sorted(opened.keys())
    assert adapter


def test_other_adapters_are_refused() -> None:
    peft = pytest.importorskip("peft")
    computed = peft.get_peft_model(build("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    several = adapted()
    several.add_adapter("second", peft.LoraConfig(r=2, target_modules=MATRICES))

    for model, text in (
        (computed, "PEFT does not save prompt_embeddings as the model has it"),
        (several, "the model has the adapters default, second: expected one"),
    ):
        with pytest.raises(PenstockError, match=text):
            hub_form(model, model.state_dict())
