"""The example that finetunes a language model learns real text on three processes, resumes, and exports."""

import contextlib
import io
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers

from support.paths import ROOT
from support.processes import Pool

pytestmark = pytest.mark.slow

SMALL = ["--text", str(ROOT / "docs"), "--text-bytes", "40000", "--length", "32", "--batch-size", "6"]


def run_example(arguments: list[str]) -> str:
    """What ``python examples/finetune_causal_lm.py ARGUMENTS`` prints."""
    sys.path.insert(0, str(ROOT / "examples"))
    given, sys.argv = sys.argv, ["finetune_causal_lm.py", *arguments]
    printed = io.StringIO()
    try:
        import finetune_causal_lm

        with contextlib.redirect_stdout(printed):
            finetune_causal_lm.main()
    finally:
        sys.argv = given
        sys.path.remove(str(ROOT / "examples"))
    return printed.getvalue()


SMALL += ["--microbatches", "3", "--learning-rate", "3e-3", "--warmup", "2", "--evaluate-every", "6"]


def losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): validation loss ([\d.]+)", printed)}


@pytest.mark.sampled(0)
def test_a_whole_model(pool: Pool, tmp_path: Path) -> None:
    checkpoints, exported = tmp_path / "checkpoints", tmp_path / "exported"
    arguments = [*SMALL, "--steps", "12", "--checkpoints", str(checkpoints), "--export", str(exported)]
    printed = pool.run(3, run_example, arguments)
    found = losses(printed[0])

    assert printed[1:] == ["", ""]
    assert list(found) == [0, 6, 12]
    assert found[12] < found[6] < found[0]

    shutil.rmtree(checkpoints / "step-000012")
    # In a single process with other stages, from the checkpoint of three.
    resumed = run_example([*arguments, "--resume", "--stages", "2"])

    assert "resumed after step 6" in resumed
    assert losses(resumed) == {6: found[6], 12: found[12]}

    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    rows = torch.tensor(list((ROOT / "README.md").read_bytes()[:320])).view(10, 32)
    with torch.no_grad():
        assert model(input_ids=rows, labels=rows).loss < found[0]


# PEFT asks transformers by a name of old.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters(pool: Pool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = tmp_path / "base"
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(base)
    options = ["--model", str(base), "--lora", "4", "--learning-rate", "3e-2", "--steps", "12"]
    printed = pool.run(3, run_example, [*SMALL, *options, "--export", str(tmp_path / "adapter")])
    found = losses(printed[0])

    assert found[12] < found[0]

    start = transformers.AutoModelForCausalLM.from_pretrained(base)
    rows = torch.tensor(list((ROOT / "README.md").read_bytes()[:320])).view(10, 32)
    with torch.no_grad():
        before = start(input_ids=rows, labels=rows).loss
        adapted = peft.PeftModel.from_pretrained(start, tmp_path / "adapter")
        after = adapted(input_ids=rows, labels=rows).loss

    assert after < before
